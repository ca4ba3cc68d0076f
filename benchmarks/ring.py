"""What a ring hides: attention of one layer over sequences cut over the GPUs of this host, with its exchanges, without,
and these alone.

    .venv/bin/python benchmarks/ring.py [--ranks 2] [--tokens 16384] [--only TEXT] [--json FILE]
    .venv/bin/python benchmarks/ring.py --ranks 2 --tokens 32          # without GPUs: that it runs, over gloo

One sequence of ranks x tokens in bf16, forward and backward apart, of three models and of GPT-OSS's window. `hidden` is
the share of the exchanges' own time by which they do not lengthen the layer: 1 - (with - without) / alone; below 0 they
cost more beside compute than after it. On GPUs every row is there twice: with the run's communicator, and with one
whose stream has a high priority. Median over rounds of five calls, the slowest rank's each time; the host queues.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from pithtrain.models.deepseek_v2.model import Latent
from pithtrain.ops.linear import Weight
from pithtrain.ops.parts import Part
from pithtrain.ops.ring import Attention, Core, Ring
from pithtrain.spec import DistributedSection, Mesh
from pithtrain.worker import prepare_environment
from pithtrain.world import Place, World, connect

ROUNDS, WARM_UP, CALLS = 9, 2, 5


class Layer(NamedTuple):
    """`heads`: of q and of k, widths of k and of v. `latent`: of MLA, and its rotated key."""

    name: str
    heads: tuple[int, int, int, int]
    window: int | None = None
    latent: tuple[int, int] | None = None


LAYERS = (
    Layer("qwen3", (32, 4, 128, 128)),
    Layer("deepseek", (16, 16, 192, 128), latent=(512, 64)),
    Layer("gpt-oss", (64, 8, 64, 64)),
    Layer("gpt-oss window", (64, 8, 64, 64), window=128),
)


class Told(Ring):
    """A ring that says what it is asked for."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        self.asked: list[Sequence[tuple[Tensor, Tensor, int, int]]] = []

    def _start(self, *messages: tuple[Tensor, Tensor, int, int]) -> list[dist.Work]:
        self.asked.append(messages)
        return super()._start(*messages)


class Still(Ring):
    """A ring that moves nothing: its blocks are what lay in memory."""

    def _start(self, *messages: tuple[Tensor, Tensor, int, int]) -> list[dist.Work]:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=max(gpus, 2), help="default: all GPUs of this host")
    parser.add_argument("--tokens", type=int, default=16384, help="of a rank")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with TEXT in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or (gpus and arguments.ranks > gpus):
        parser.error(f"--ranks {arguments.ranks}: 2 to {gpus} of this host's GPUs can share a sequence")
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(prepare_environment({"RANK": "0", "WORLD_SIZE": str(arguments.ranks), **os.environ}))
        told = (arguments.ranks, name, arguments.tokens, arguments.only)
        mp.spawn(one_rank, told, arguments.ranks)  # pyright: ignore
        rows = json.loads((Path(name) / "told.json").read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'layer':<40} {'with ms':>9} {'without':>9} {'alone':>9} {'MB':>8} {'GB/s':>7} {'hidden':>7}")
    for row in rows:
        print(
            f"{row['name']:<40} {row['with_ms']:>9.3f} {row['without_ms']:>9.3f} {row['alone_ms']:>9.3f} "
            f"{row['bytes'] / 1e6:>8.1f} {row['bytes'] / row['alone_ms'] / 1e6:>7.1f} {row['hidden']:>7.2f}"
        )


def one_rank(rank: int, ranks: int, folder: str, tokens: int, only: str) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(rank, ranks, rank, f"file://{folder}/store", 1)
    with connect(place, Mesh(pp=1, dp=1, cp=ranks, ep=1), kind, DistributedSection()) as world:
        assert world.cp_group is not None
        groups = {"": world.cp_group}
        if kind == "cuda":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            urgent = dist.new_group(list(range(ranks)), backend="nccl", pg_options=options)
            assert isinstance(urgent, dist.ProcessGroup)
            dist.all_reduce(torch.zeros(1, device=world.device), group=urgent)
            groups[", high priority"] = urgent
        rows: list[dict[str, Any]] = []
        for layer in LAYERS:
            for label, group in groups.items():
                if only in layer.name:
                    rows += measure(world, group, layer, label, tokens)
        if rank == 0:
            (Path(folder) / "told.json").write_text(json.dumps(rows))
        world.barrier()


def measure(world: World, group: dist.ProcessGroup, layer: Layer, label: str, tokens: int) -> list[dict[str, Any]]:
    """Forward and backward."""
    device, (hq, hk, dk, dv) = world.device, layer.heads
    generator = torch.Generator(device).manual_seed(world.rank)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    core = Core(dk**-0.5, hq * dv, layer.window)
    sources = [rand(1, tokens, hk, dk), rand(1, tokens, hk, dv)]
    if layer.latent is not None:
        latent, turned = layer.latent
        w = rand(hk * (dk - turned + dv), latent)
        weight = Weight("kv_b", w, torch.zeros_like(w, dtype=torch.float32))
        core = Core(dk**-0.5, hq * dv, expand=Latent(weight, hk, dk - turned))
        sources = [rand(1, tokens, latent), rand(1, tokens, 1, turned)]
    q, dout = rand(1, tokens, hq, dk), rand(1, tokens, hq * dv)
    part = Part(1, tokens * group.size(), device, group.size(), group.rank())
    told, still = Told(group), Still(group)
    rings = {"with": told, "without": still}
    rows: list[dict[str, Any]] = []
    made = {name: Attention(core, part, ring, q, *sources) for name, ring in rings.items()}
    ways: dict[str, Callable[[str], object]] = {
        "forward": lambda name: Attention(core, part, rings[name], q, *sources),
        "backward": lambda name: made[name].backward(dout, []),
    }
    for way, act in ways.items():
        told.asked.clear()
        act("with")
        asked = [[(torch.empty_like(s), torch.empty_like(r), *at) for s, r, *at in each] for each in told.asked]
        told.asked = []
        found = {name: milliseconds(world, partial(once, act, name, told)) for name in rings}
        alone = milliseconds(world, partial(play, still, asked))
        rows.append(
            {
                "name": f"{layer.name} {way}{label}",
                "with_ms": found["with"],
                "without_ms": found["without"],
                "alone_ms": alone,
                "bytes": sum(sent.nbytes for each in asked for sent, *_ in each),
                "hidden": 1 - (found["with"] - found["without"]) / alone,
            }
        )
    return rows


def once(act: Callable[[str], object], name: str, told: Told) -> None:
    act(name)
    told.asked.clear()  # and what it holds


def play(ring: Ring, asked: list[Any]) -> None:
    """The exchanges of a layer, one after the other."""
    for messages in asked:
        for work in Ring._start(ring, *messages):
            work.wait()


def milliseconds(world: World, act: Callable[[], object]) -> float:
    took: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        world.barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            act()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(world.max(round(1e9 * (time.perf_counter() - begin)))()[0] / 1e6 / CALLS)
    return statistics.median(took[WARM_UP:])


if __name__ == "__main__":
    main()
