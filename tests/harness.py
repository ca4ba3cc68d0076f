"""Runs the engine on any mesh of CPU processes and returns whole tensors, for tests that compare meshes.

`Pool` starts its processes once and gives each job a fresh process group, so that a test pays for its arithmetic and
not for importing torch eight times. Jobs are module-level functions `job(place, *args)`.
"""

import contextlib
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from pydantic import BaseModel
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pithtrain.batches import read_batches
from pithtrain.build import Engine, build, device_type
from pithtrain.models.contract import ModelConfig, load_config
from pithtrain.ops import symmetric
from pithtrain.ops.cross_entropy import IGNORE
from pithtrain.ops.linear import accumulate_dtype
from pithtrain.ops.symmetric import Peers
from pithtrain.pipeline import MicroBatch
from pithtrain.spec import RunSpec, from_dict, read_model
from pithtrain.tape import Stats, new_stats
from pithtrain.train import loss_scale, train_step
from pithtrain.world import Place, World, connect

MODEL = {
    "architecture": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def tiny(architecture: str) -> ModelConfig:
    """The tiny config of a folder of models/, or of one outside the package."""
    return read_model({"architecture": architecture, **sizes(architecture)["tiny"]}).config


def variants(architecture: str) -> dict[str, dict[str, Any]]:
    """{what is different: fields}: changes of the tiny config that together give every field another value."""
    return sizes(architecture)["variants"]


def sizes(architecture: str) -> dict[str, Any]:
    """The tiny.yaml of a model's folder."""
    return yaml.safe_load(Path(inspect.getfile(load_config(architecture))).with_name("tiny.yaml").read_text())


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """A config as plain data."""
    return cast(BaseModel, config).model_dump(mode="json")


def make_spec(
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    cp: int = 1,
    *,
    architecture: str | None = None,
    model: dict[str, Any] | None = None,
    **sections: Any,
) -> RunSpec:
    """A tiny run on this mesh: of MODEL, or of a family's tiny one with weights that are large enough to matter.
    `sections` update the sections of the same name."""
    base = MODEL
    if architecture is not None:
        base = {**fields_of(tiny(architecture)), "architecture": architecture, "initializer_range": 0.1}
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": {**base, **(model or {})},
        "parallelism": {
            "pipeline_parallel_size": pp,
            "expert_parallel_size": ep,
            "context_parallel_size": cp,
        },
        "training": {
            "max_steps": 5,
            "micro_batch_size": 1,
            "global_batch_size": 16,
            "sequence_length": 16,
            "device": "cpu",
            "compute_dtype": "float32",
        },
        "optimizer": {"lr": 1e-3},
        "moe": {"load_balance_type": "aux_loss", "aux_loss_coef": 0.01},
        "data": {"sources": [{"path": "unused"}], "document_mask": False},
        "slurm": {"gpus_per_node": pp * dp * ep * cp},
    }
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section} if isinstance(section, dict) else section
    return from_dict(fields)


def synthetic(spec: RunSpec, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens, labels [S] of a global sample index: the same on any mesh; every third sample ignores some labels."""
    rng = np.random.default_rng([spec.training.seed, sample])
    ids = torch.from_numpy(rng.integers(0, spec.model.config.vocab_size, spec.training.sequence_length + 1))
    labels = ids[1:].clone()
    if sample % 3 == 0:
        labels[: 1 + sample % 5] = IGNORE
    if spec.data.document_mask:
        labels[[start - 1 for start in documents_of(spec, sample)[1:]]] = IGNORE
    return ids[:-1], labels


def documents_of(spec: RunSpec, sample: int) -> list[int]:
    """Where the documents of a sample begin, with `data.document_mask`: one alone, one of a token before and behind one
    that is longer than any chunk, documents of one token for a half, and random ones."""
    s = spec.training.sequence_length
    rng = np.random.default_rng([7, sample])
    drawn = [0, *(1 + rng.choice(s - 1, rng.integers(1, 5), replace=False)).tolist()]
    return sorted(([0], [0, 1, s - 1], [*range(s // 2)], drawn, drawn)[sample % 5])


def batches_of(spec: RunSpec, engine: Engine, step: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step (from 0), numbered as `batches.read_batches` does."""
    if engine.world.pp and not spec.data.document_mask:
        return []
    return read_batches(cast(Any, Synthetic(spec)), spec, engine.world, step * spec.training.global_batch_size)


@dataclass
class Synthetic:
    """A `Dataset` of `synthetic` samples."""

    spec: RunSpec

    @property
    def document_mask(self) -> bool:
        return self.spec.data.document_mask

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = [synthetic(self.spec, first + i) for i in range(count)]
        tokens, labels = (torch.stack([pair[i] for pair in pairs]).numpy() for i in (0, 1))
        return tokens, labels

    def documents(self, first: int, count: int) -> list[list[int]]:
        return [documents_of(self.spec, first + i) for i in range(count)]


ALONE = Place(0, 1, 0, "", 1)


def single(spec: RunSpec, device: str = "cpu") -> AbstractContextManager[World]:
    """The world of a run of one rank, in this process."""
    return connect(ALONE, spec.mesh, device, spec.distributed)


Shards = dict[str, tuple[int, tuple[int, ...], np.ndarray]]  # name -> (first row, whole shape, rows)


def shards(engine: Engine, pick: Callable[[Any], torch.Tensor]) -> Shards:
    """This rank's rows of one tensor per parameter; a selection bias has neither gradient nor moments. bf16 as fp32:
    numpy has none."""

    def array(x: torch.Tensor) -> np.ndarray:
        return (x.float() if x.dtype == torch.bfloat16 else x.detach().cpu().clone()).numpy()

    return {
        name: (one.first_row, one.info.stored_shape, array(pick(one)))
        for name, one in engine.zero.sharded.items()
        if pick(one).shape[0] == one.master.shape[0]
    }


def assemble(parts: Sequence[Shards]) -> dict[str, np.ndarray]:
    """Whole tensors from all ranks' rows; every row must be there exactly once."""
    whole: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for part in parts:
        for name, (first, shape, rows) in part.items():
            if name not in whole:
                whole[name], seen[name] = np.zeros(shape, rows.dtype), np.zeros(shape[0], np.int64)
            whole[name][first : first + len(rows)] = rows
            seen[name][first : first + len(rows)] += 1
    for name, count in seen.items():
        assert (count == 1).all(), f"{name}: rows held {sorted(set(count))} times"
    return whole


@dataclass
class Ran:
    """What `steps` returns for a mesh: everything whole."""

    losses: list[float]
    norms: list[float]
    balance: list[np.ndarray]  # per step [layers]
    counts: list[np.ndarray]  # per step [layers, experts]
    first_grads: dict[str, np.ndarray]  # summed, before clipping, of step 0
    masters: dict[str, np.ndarray]  # after the last step


def steps_job(place: Place, spec_yaml: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Train `num_steps` on synthetic batches; this rank's part of `Ran`."""
    spec = from_dict(spec_yaml)
    with connect(place, spec.mesh, device_type(spec), spec.distributed) as world:
        engine = build(spec, world)
        out: dict[str, Any] = {"losses": [], "norms": [], "balance": [], "counts": []}
        for step in range(num_steps):
            batches = batches_of(spec, engine, step)
            if step == 0:
                out["first_grads"] = first_gradients(spec, engine, batches)
            result = train_step(engine, spec, batches, spec.optimizer.lr)
            out["losses"].append(world.sum(result.stats.loss.double()).item())
            out["norms"].append(result.norm.item())
            out["balance"].append(world.sum(result.stats.balance_L.double()).cpu().numpy())
            out["counts"].append(world.sum(result.stats.counts_LE.clone()).cpu().numpy())
        out["masters"] = shards(engine, lambda p: p.master)
    return out


def play(engine: Engine, spec: RunSpec, batches: list[MicroBatch]) -> Stats:
    """One step's forwards and backwards, no update; the gradients stay in the engine, summed."""
    config = spec.model.config
    dtype = accumulate_dtype(engine.dtype)
    stats = new_stats(config.num_hidden_layers, config.num_experts, engine.world.device, dtype)
    for weight in engine.zero.weights.values():
        weight.main_grad.fill_(float("nan"))  # what is left of the step before: the first contribution overwrites it
    engine.zero.begin_step(spec.num_micro_batches)
    engine.pipeline.step(batches, loss_scale(batches, engine), stats)
    engine.zero.grad_norm()
    return stats


def first_gradients(spec: RunSpec, engine: Engine, batches: list[MicroBatch]) -> Shards:
    """The summed gradients of one step without its update."""
    play(engine, spec, batches)
    return shards(engine, lambda p: p.grad)


def gather_ran(parts: Sequence[dict[str, Any]]) -> Ran:
    for key in ("losses", "norms"):
        assert all(part[key] == parts[0][key] for part in parts), f"ranks disagree on {key}"
    return Ran(
        parts[0]["losses"],
        parts[0]["norms"],
        parts[0]["balance"],
        parts[0]["counts"],
        assemble([part["first_grads"] for part in parts]),
        assemble([part["masters"] for part in parts]),
    )


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / ||b||; 0 where both are zero."""
    difference, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    return difference / size if size else difference


class Alive(TorchDispatchMode):
    """The storages that operations made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0  # of `bytes`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in given:
                size = storage.nbytes() if x.is_floating_point() else 0
                self._made[storage._cdata] = (StorageWeakRef(storage), size)
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        """Of floating-point tensors with more than one number."""
        return sum(size for ref, size in self._made.values() if size > 8 and not ref.expired())


# ---- the processes ---------------------------------------------------------------------------------------------------


def _worker(rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        function, size, method, args = order
        try:
            pipe.send(("ok", function(Place(rank, size, rank, method, 1), *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
            return  # its peers may hang: the pool starts anew


class Pool:
    """Up to `size` processes that run jobs together."""

    def __init__(self) -> None:
        # forks of a process that has imported torch once; a fork cannot use a GPU that was looked at before
        how = "spawn" if torch.cuda.is_available() else "forkserver"
        self._context = multiprocessing.get_context(how)
        self._context.set_forkserver_preload(["harness"])
        self._workers: list[tuple[Any, Any]] = []

    def run(self, size: int, job: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """job(place, *args) on `size` ranks; results in rank order. Any rank's exception is raised here."""
        while len(self._workers) < size:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_worker, args=(len(self._workers), theirs), daemon=True)
            process.start()
            self._workers.append((process, mine))
        with tempfile.TemporaryDirectory() as folder:
            method = f"file://{Path(folder) / 'rendezvous'}"
            for _, pipe in self._workers[:size]:
                pipe.send((job, size, method, args))
            results = []
            for rank, (_, pipe) in enumerate(self._workers[:size]):
                try:
                    state, value = pipe.recv() if pipe.poll(timeout_s) else ("error", f"no answer in {timeout_s} s")
                except EOFError:
                    state, value = "error", "the process died"
                if state == "error":
                    others: list[str] = []
                    for _, other in self._workers[:size]:
                        with contextlib.suppress(EOFError):  # it died, and the pool starts anew all the same
                            others += [other.recv()[1]] if other is not pipe and other.poll(1) else []
                    self.close()
                    raise AssertionError(f"rank {rank}: {value}\nother ranks: {others}")
                results.append(value)
        return results

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []


def run_mesh(pool: Pool, spec: RunSpec, num_steps: int = 1) -> Ran:
    fields = spec.model_dump(mode="json")
    return gather_ran(pool.run(spec.world_size, steps_job, fields, num_steps))


# ---- peers in shared memory ------------------------------------------------------------------------------------------


class SharedSignals:
    """The flags of `ops/symmetric` as files that the processes of a group map: [to, from, channel] of one byte."""

    def __init__(self, folder: Path, rank: int, size: int):
        self._rank = rank
        self._flags = shared_bytes(folder / "flags", size * size * 4).view(size, size, 4)

    def put_signal(self, dst_rank: int, channel: int) -> None:
        flag = self._flags[dst_rank, self._rank, channel]
        assert flag.item() == 0, "a put never waits: the flag of two exchanges ago has been taken back"
        flag.fill_(1)

    def wait_signal(self, src_rank: int, channel: int) -> None:
        flag = self._flags[self._rank, src_rank, channel]
        deadline = time.monotonic() + 60
        while flag.item() == 0:
            assert time.monotonic() < deadline, f"no signal from {src_rank} on channel {channel}"
            os.sched_yield()
        flag.fill_(0)


def shared_bytes(path: Path, size: int) -> torch.Tensor:
    """A file of zeros as memory, made by whoever comes first."""
    with path.open("ab"):
        os.truncate(path, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def shared_peers(folder: Path, rank: int, size: int, capacity: int, row_bytes: Sequence[int]) -> tuple[Peers, Peers]:
    """As `symmetric.open_peers`, of processes in place of GPUs: copies happen at once, in program order."""
    shape = (4, symmetric.set_bytes(capacity, row_bytes, size))
    sets = [shared_bytes(folder / f"rank-{each}", shape[0] * shape[1]).view(shape) for each in range(size)]
    sets[rank].fill_(0xFF)  # NaN where nothing was written
    signals = SharedSignals(folder, rank, size)
    forward, backward = (Peers(signals, rank, [each[i : i + 2] for each in sets], capacity, i) for i in (0, 2))
    return forward, backward
