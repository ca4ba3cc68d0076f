"""Tokens per second of specs on this machine, in one table: a few steps of the engine on random tokens.

    .venv/bin/python benchmarks/throughput.py configs/*-1gpu.yaml --set compile.enabled=true --profile
    .venv/bin/python benchmarks/throughput.py configs/tiny.yaml --force-load-balance --json out.json

Every --set is for every spec. A step is a whole one: forwards, backwards, norm, AdamW, new weights;
but tokens are drawn on the device, and nothing is read from disk, saved or logged. Warm-up steps come first; a figure
is the median over the steps that follow, timed by events of the device. A spec of one rank runs in this process, one
of several in as many processes on this host.

Natural routing is what a run does; with --force-load-balance tokens go round robin, so that figures of two machines or
versions differ by nothing that a router decided. Quote the word with the number. One rank of eight that share the
experts of Qwen3, as far as its GEMMs go (16 local experts, eight times the rows each): --set model.num_experts=16. In 8
bits: --set fp8.enabled=true --set fp8.recipe=rowwise; MFU and floor stay against bf16, so that runs compare.

    TFLOP/s     model FLOPs per device, causal attention counted exactly, recomputation not
    MFU         the same against the dense bf16 peak
    peak GiB    most memory allocated and reserved on any rank, from building the engine on
    floor       the least time that the ceilings of an H200 allow (`floor_ms`), as a percentage of the step's
    idle        --profile: share of two steps in which nothing ran on the device, under the profiler
    kernels     --profile: launched per step, copies and fills beside them
    syncs       --profile: cudaStreamSynchronize calls per step
    host ms     --profile: until `train_step` returns, from a drained device; a full launch queue is waited for in it
    hidden      --profile, ep > 1: share of expert communication during which kernels of the model ran, within
                overlapped pairs; the least of all ranks. Communication: NCCL's send-receive kernels, which wait for
                the peer too and, with pp > 1, carry activations as well; or copies into peers' memory. What NCCL's
                kernels take from those of the model is not in it: compare --no-overlap
    exposed     --profile, ep > 1: ms per step, within pairs, of expert communication and of waiting for its signals
                without a kernel beside it; the most of all ranks. Both of the profiled step with the least: a
                profiler slows the host, and a late host shows as a transfer beside nothing
    transport   of expert traffic: moe.transport, resolved

A dash: the figure needs a GPU, --profile, or an H200. Exit code 1 if a spec could not be measured, 2 if one is wrong.
"""

import argparse
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.spawn import spawn

from pithtrain import pipeline
from pithtrain.build import build, device_type
from pithtrain.errors import PithtrainError
from pithtrain.models.contract import flops_per_token, head_flops
from pithtrain.ops import muon
from pithtrain.pipeline import MicroBatch
from pithtrain.spec import RunSpec, from_dict, load
from pithtrain.tape import RunClosures, overlap, run_backward, run_forward
from pithtrain.train import BF16_PEAK_FLOPS, StepResult, train_step
from pithtrain.worker import prepare_environment
from pithtrain.world import Place, World, connect

WARM_UP = 3  # the first compiles, the second fills the allocator's pool
PROFILED = 4  # the host is ahead of the device from the second on

# measured on one H200, torch 2.11, bf16: TFLOP/s of matmuls, TB/s of a copy; by architecture TFLOP/s of grouped GEMMs
# (gate_up and down, mean over the three products) and of attention, forward and backward (2.5 times its FLOPs)
DENSE, COPY = 790e12, 4.2e12
GROUPED = {"qwen3_moe": 574e12, "deepseek_v2": 606e12, "gpt_oss": 610e12}
ATTENTION = {"qwen3_moe": (551e12, 457e12), "deepseek_v2": (532e12, 408e12), "gpt_oss": (427e12, 375e12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+", metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=C")
    parser.add_argument("--steps", type=int, default=10, help="timed, after the warm-up (default 10)")
    parser.add_argument("--force-load-balance", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-overlap", action="store_true", help="pairs play their backward, then their forward")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least one is timed")
    overrides = arguments.overrides + ["moe.force_load_balance=true"] * arguments.force_load_balance
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    try:
        streams = "data.document_mask=false"  # random tokens have no documents
        specs = [load(config, [*overrides, streams]) for config in arguments.configs]
    except PithtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    rows: list[dict[str, Any]] = []
    told = {"machine": machine(), "set": overrides, "rows": rows}
    for config, spec in zip(arguments.configs, specs, strict=True):
        row: dict[str, Any] = {
            "config": config.stem,
            **about(spec),
            "pairs": "in turn" if arguments.no_overlap else "overlap",
        }
        try:
            row |= measure_here(spec, arguments.steps, arguments.profile, not arguments.no_overlap)
        except Exception as error:  # the others may fit
            traceback.print_exc()
            row |= {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        gc.collect()  # of the spec that is done, or whose frames the error held
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows.append(row)
        told_now = row.get("error") or f"{row['tokens_per_second']:,.0f} tokens/s"
        print(f"{config.stem}: {told_now}", file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join([machine_text(told["machine"]), *overrides, "", table(rows)]))
    sys.exit(any("error" in row for row in rows))


# ---- one spec --------------------------------------------------------------------------------------------------------


def about(spec: RunSpec) -> dict[str, Any]:
    """What a figure must be quoted with."""
    training = spec.training
    return {
        "micro_batch": training.micro_batch_size,
        "accumulation": spec.num_micro_batches,
        "sequence": training.sequence_length,
        "routing": "forced" if spec.moe.force_load_balance else "natural",
        "compiled": spec.compile.enabled,
        "recompute": spec.activation_checkpoint.mode,
        "moments": spec.optimizer.moments_dtype,
        "fp8": spec.fp8.recipe if spec.fp8.enabled else "no",
        "ranks": spec.world_size,
    }


def measure_here(spec: RunSpec, steps: int, profiled: bool, overlapped: bool) -> dict[str, Any]:
    """The figures of a spec; the device is empty again afterwards."""
    if spec.world_size == 1:
        try:
            return measure(spec, Place(0, 1, 0, "", 1), steps, profiled, overlapped)
        finally:
            if spec.compile.enabled:
                torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as name:
        seat = {"RANK": "0", "WORLD_SIZE": str(spec.world_size), **os.environ}
        os.environ.update(prepare_environment(seat))
        spawn(one_rank, (spec.model_dump(mode="json"), name, steps, profiled, overlapped), spec.world_size)
        return json.loads((Path(name) / "row.json").read_text())


def one_rank(rank: int, fields: dict[str, Any], folder: str, steps: int, profiled: bool, overlapped: bool) -> None:
    spec = from_dict(fields)
    row = measure(spec, Place(rank, spec.world_size, rank, f"file://{folder}/store", 1), steps, profiled, overlapped)
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row))


def measure(spec: RunSpec, place: Place, steps: int, profiled: bool, overlapped: bool) -> dict[str, Any]:
    """Build, warm up, time, look. Every rank of the spec calls it; rank 0's answer counts."""
    training, config = spec.training, spec.model.config
    gpu = device_type(spec) == "cuda"
    if gpu:
        torch.cuda.init()  # which a process of several has not done yet
        torch.cuda.reset_peak_memory_stats(place.local_rank)
        if (held := torch.cuda.memory_allocated(place.local_rank)) > 2**30:
            raise RuntimeError(f"{held / 2**30:.1f} GiB of the spec before are still held: measure this one alone")
    played = playing(overlap if overlapped else in_turn)
    with played, connect(place, spec.mesh, device_type(spec), spec.distributed) as world:
        begin = time.perf_counter()
        engine = build(spec, world)
        generator = torch.Generator(world.device).manual_seed(training.seed + world.data_rank)
        shape = (training.micro_batch_size, training.sequence_length // world.mesh.cp + 1)

        def batch() -> MicroBatch:
            drawn = torch.randint(config.vocab_size, shape, device=world.device, generator=generator)
            return MicroBatch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())

        def step() -> StepResult:
            batches = [batch() for _ in range(spec.num_micro_batches)] if world.pp == 0 else []
            return train_step(engine, spec, batches, spec.optimizer.lr)

        for _ in range(WARM_UP):
            step()
        drain(world)
        warm_up_s = time.perf_counter() - begin
        seconds = timed(step, steps, world)
        asked = ask_clocks() if gpu and world.rank == 0 else None
        result = [step() for _ in range(4)][-1]  # while nvidia-smi looks
        clocks = answer(asked)
        loss, norm = result.stats.loss.item(), result.norm.item()
        if not math.isfinite(norm) or result.not_finite.item():
            raise RuntimeError(f"the gradient's norm is {norm}: a step that trains nothing is no measurement")
        memory = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if gpu else (0, 0)
        peaks = world.to_rank_zero(memory) or [memory]
        seen = profile(step, world) if profiled and gpu else {}
        world.barrier()
    step_s = statistics.median(seconds)
    tokens = training.global_batch_size * training.sequence_length / step_s
    flops = tokens * flops_per_token(config, training.sequence_length) / spec.world_size
    name = torch.cuda.get_device_name() if gpu else ""
    peak = next((figure for part, figure in BF16_PEAK_FLOPS.items() if part in name), None)
    known = "H200" in name and spec.world_size == 1 and spec.model.architecture in GROUPED
    floor = floor_ms(spec) if known else None
    row: dict[str, Any] = {
        "step_ms": 1e3 * step_s,
        "step_ms_range": [1e3 * min(seconds), 1e3 * max(seconds)],
        "tokens_per_second": tokens,
        "tflops_per_device": flops / 1e12,
        "mfu_percent": 100 * flops / peak if peak else None,
        "allocated_gib": max(one[0] for one in peaks) / 2**30 if gpu else None,
        "reserved_gib": max(one[1] for one in peaks) / 2**30 if gpu else None,
        "floor_percent": 0.1 * sum(floor.values()) / step_s if floor else None,
        "floor_ms": floor,
        "clocks": clocks,
        "warm_up_s": warm_up_s,
        "loss": loss,
        "transport": engine.transport.name,
    }
    return row | seen


def drain(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], steps: int, world: World) -> list[float]:
    """Seconds of each step, one after the other: from a device's events, or a CPU's clock."""
    if world.device.type != "cuda":
        marks = [time.perf_counter()]
        marks += [(step(), time.perf_counter())[1] for _ in range(steps)]
        return [after - before for before, after in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


# ---- the floor -------------------------------------------------------------------------------------------------------


def floor_ms(spec: RunSpec) -> dict[str, float]:
    """The least milliseconds of a step on one H200, by what takes them: FLOPs and bytes over the ceilings above, with
    nothing overlapped. Left out: reading and writing logits, the sums into fp32 gradients and their norm, the router,
    index arithmetic.

    dense, grouped, head   6 FLOPs per weight and token, forward and backward
    attention              a forward, and 2.5 times its FLOPs backward, which computes the scores once more
    optimizer              30 bytes a parameter, 22 with bf16 moments (22 and 18 of what Muon moves): master and moments
                           read and written, gradient read, weight written; and what Muon multiplies
    pointwise, in bf16     per slot of a routed expert of width I: 6 H (gathers and sums, forward and back) + 11 I
                           (activation 3, its gradient 5, the activation once more 3); per token: 5 times the input of
                           each norm and the output of each matrix (read and written; back two read, one written)
    """
    config, s = spec.model.config, spec.training.sequence_length
    tokens = spec.training.global_batch_size * s
    table, layers = config.parameters(), range(config.num_hidden_layers)
    hidden, slots = config.hidden_size, config.num_experts_per_tok
    experts = [p for p in table if p.kind == "expert" and len(p.shape) == 3]
    matrices = [p for p in table if p.kind == "dense" and len(p.shape) == 2 and p.layer is not None and not p.fp32]
    widths = [p.shape[2] for p in experts if p.name.endswith("down_proj")]
    grouped = 6 * slots * sum(p.size // p.shape[0] for p in experts)
    dense = 6 * sum(config.linear_weights(layer) for layer in layers) - grouped
    forward = sum(config.attention_flops(layer, s) for layer in layers) / 3
    moved = 2 * slots * sum(6 * hidden + 11 * width for width in widths)
    moved += 10 * (sum(p.shape[0] for p in matrices) + 2 * hidden * len(layers))
    by_muon, bytes_of = spec.optimizer.type == "muon", 4 if spec.optimizer.moments_dtype == "float32" else 2
    updated = sum(p.size * (14 + 2 * bytes_of * p.moments(by_muon)) for p in table)
    turned = sum(
        p.size // (p.matrix_rows * p.shape[-1]) * muon.flops(p.matrix_rows, p.shape[-1])
        for p in table
        if p.moments(by_muon) == 1
    )
    fast, slow = ATTENTION[spec.model.architecture]
    seconds = {
        "dense": tokens * dense / DENSE,
        "grouped": tokens * grouped / GROUPED[spec.model.architecture],
        "head": tokens * head_flops(config) / DENSE,
        "attention": tokens * forward * (1 / fast + 2.5 / slow),
        "optimizer": updated / COPY + turned / DENSE,
        "pointwise": tokens * moved / COPY,
    }
    return {name: 1e3 * value for name, value in seconds.items()}


# ---- the profiler ----------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Of a trace; `device`: it ran there. Start and length in ns."""

    name: str
    device: bool
    start: int
    length: int
    stream: int = 0


def profile(step: Callable[[], object], world: World) -> dict[str, Any]:
    """Host time of a step from a drained device; then PROFILED steps under the profiler, without its Python side."""
    host: list[float] = []
    for _ in range(3):
        drain(world)
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
    drain(world)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    with playing(marked(pipeline.overlap) if world.mesh.ep > 1 else pipeline.overlap), profiler:
        for _ in range(PROFILED):
            step()
        drain(world)
    found = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    cuda = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    events = [
        Event(e.name(), e.device_type() == cuda, e.start_ns(), e.duration_ns(), e.device_resource_id())
        for e in found
        if not e.is_user_annotation()
    ]
    told = {"host_ms": 1e3 * statistics.median(host), **digest(events, PROFILED)}
    if world.mesh.ep > 1:
        ranks = [each for each in world.to_rank_zero(hidden(events, PROFILED)) if each]
        if ranks:  # the worst rank of each step, then the best step
            worst = [(max(ms for _, ms in step), min(share for share, _ in step)) for step in zip(*ranks, strict=True)]
            told["exposed_ms"], told["hidden_percent"] = min(worst)
    return told


@contextmanager
def playing(play: Callable[..., Any]) -> Iterator[None]:
    """Pairs are played by `play`."""
    plain, pipeline.overlap = pipeline.overlap, play
    try:
        yield
    finally:
        pipeline.overlap = plain


def marked(play: Callable[..., Any]) -> Callable[..., Any]:
    """A pair between two kernels of a name that nothing else has, so that a trace shows where it begins and ends."""

    def between(*pair: Any) -> Any:
        torch.cuda._sleep(1)
        result = play(*pair)
        torch.cuda._sleep(1)
        return result

    return between


def in_turn(ahead: Any, back: Any, closures: RunClosures) -> Any:
    """A pair without overlap, in the place of `overlap`."""
    done = run_backward(back, closures)
    return run_forward(ahead), done


MARK, NCCL, PUT, WAIT = "spin_kernel", "ncclDevKernel_SendRecv", "put_signal_kernel", "wait_signal_kernel"
Spans = list[tuple[int, int]]  # from, to; in order, apart from each other


def hidden(events: Sequence[Event], steps: int) -> list[tuple[float, float]]:
    """Of each step: (percent of expert communication beside which kernels of the model ran, exposed ms), in pairs
    alone; [] where there was none. Copies are communication on a stream that also sends signals."""
    ran = [event for event in events if event.device]
    marks = sorted((event.start, event.start + event.length) for event in ran if MARK in event.name)
    pairs = [(begin[1], end[0]) for begin, end in zip(marks[::2], marks[1::2], strict=False)]
    lanes = {event.stream for event in ran if PUT in event.name}
    copies = [event for event in ran if event.name.startswith("Memcpy") and event.stream in lanes]
    moving = [*copies, *(event for event in ran if NCCL in event.name)]
    waits = [event for event in ran if WAIT in event.name]
    no_model = ("Memcpy", "Memset", "nccl")
    model = spans(
        [
            event
            for event in ran
            if not event.name.startswith(no_model) and not any(mark in event.name for mark in (MARK, PUT, WAIT))
        ]
    )
    found: list[tuple[float, float]] = []
    for step in range(steps):
        within = pairs[step * len(pairs) // steps : (step + 1) * len(pairs) // steps]
        moved, busy = both(within, spans(moving)), both(within, spans([*moving, *waits]))
        if moved:
            share = 100 * length(both(moved, model)) / length(moved)
            found.append((share, (length(busy) - length(both(busy, model))) / 1e6))
    return found


def spans(events: Sequence[Event]) -> Spans:
    return merged([(event.start, event.start + event.length) for event in events])


def merged(parts: Spans) -> Spans:
    found: Spans = []
    for begin, end in sorted(parts):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def both(one: Spans, other: Spans) -> Spans:
    """What lies in a span of each."""
    found: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(parts: Spans) -> int:
    return sum(end - begin for begin, end in parts)


def digest(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Idle share and counts per step; which attention kernels ran; the heaviest kernels. What runs at the same time
    counts once; host calls that the profiler did not record at all are None, not 0."""
    ran = sorted((start, start + length, name) for name, device, start, length, _ in events if device)
    if not ran:
        return {}
    busy, end = 0, ran[0][0]
    for start, stop, _ in ran:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    calls = Counter(event.name for event in events if not event.device)
    recorded = any(name.startswith(("cudaLaunch", "cuLaunch")) for name in calls)
    kernels, total = Counter[str](), Counter[str]()
    for start, stop, name in ran:
        kernels[name] += 1
        total[name] += stop - start
    copies = sum(count for name, count in kernels.items() if name.startswith(("Memcpy", "Memset")))
    attention = {
        mark: sum(n for name, n in kernels.items() if mark in name) for mark in ("cudnn", "flash_fwd", "flash_bwd")
    }
    return {
        "idle_percent": 100 * (1 - busy / (end - ran[0][0])),
        "kernels_per_step": round((len(ran) - copies) / steps),
        "copies_per_step": round(copies / steps),
        "syncs_per_step": calls["cudaStreamSynchronize"] / steps if recorded else None,
        "attention_kernels_per_step": {mark: round(count / steps) for mark, count in attention.items() if count},
        "heaviest": [
            {"kernel": name[:120], "ms_per_step": ns / 1e6 / steps, "per_step": kernels[name] / steps}
            for name, ns in total.most_common(40)
        ],
    }


# ---- what is said beside the figures ---------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Device and versions; None for what is not there."""

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else f"CPU {platform.machine()}",
        "devices": torch.cuda.device_count() if gpu else os.cpu_count(),
        "torch": torch.__version__,
        "triton": of("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "clocks": answer(ask_clocks()) if gpu else None,
    }


def machine_text(told: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {told[name] or '-'}" for name in ("torch", "triton", "cuda", "cudnn"))
    return f"{told['device']} x {told['devices']}; {versions}; clocks before: {told['clocks'] or '-'}"


def ask_clocks() -> "subprocess.Popen[str] | None":
    """Start asking for clocks of the SMs (and their most) and of the memory, power and its limit; `answer` waits."""
    query = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit"
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def answer(asked: "subprocess.Popen[str] | None") -> str | None:
    return asked.communicate()[0].strip() or None if asked else None


COLUMNS: dict[str, tuple[str, str]] = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "TFLOP/s": ("tflops_per_device", ".3g"),
    "MFU %": ("mfu_percent", ".1f"),
    "peak GiB": ("allocated_gib", ".1f"),
    "reserved": ("reserved_gib", ".1f"),
    "floor %": ("floor_percent", ".1f"),
    "idle %": ("idle_percent", ".1f"),
    "kernels": ("kernels_per_step", "d"),
    "syncs": ("syncs_per_step", "g"),
    "host ms": ("host_ms", ".1f"),
    "hidden %": ("hidden_percent", ".1f"),
    "exposed": ("exposed_ms", ".1f"),
    "transport": ("transport", "s"),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        ["config", "ranks", "micro-batch", "routing", "compiled", "recompute", "moments", "fp8", "pairs", *COLUMNS]
    ]
    for row in rows:
        line = [row["config"], str(row["ranks"]), f"{row['micro_batch']} x {row['accumulation']}", row["routing"]]
        line += ["yes" if row["compiled"] else "no", row["recompute"], row["moments"], row["fp8"], row["pairs"]]
        figures = [(row.get(key), form) for key, form in COLUMNS.values()]
        lines.append(line + ["-" if figure is None else format(figure, form) for figure, form in figures])
    text = align(lines)
    for row in rows:
        if "error" in row:
            text += f"\n{row['config']}: {row['error']}"
        elif row.get("floor_ms"):
            parts = ", ".join(f"{name} {ms:.0f}" for name, ms in row["floor_ms"].items())
            text += (
                f"\n{row['config']}: {row['step_ms']:.1f} ms; floor {sum(row['floor_ms'].values()):.0f} ms ({parts})"
            )
            text += f"; first steps {row['warm_up_s']:.0f} s; clocks {row['clocks'] or '-'}"
            text += f"; attention kernels {row['attention_kernels_per_step']}" if "idle_percent" in row else ""
    return text


def align(lines: Sequence[Sequence[str]]) -> str:
    """Columns two blanks apart, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in text)


if __name__ == "__main__":
    main()
