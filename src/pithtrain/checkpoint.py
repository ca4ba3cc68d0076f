"""Full state on disk: canonical names, whole shapes, any mesh in and out. `catalog` says which folders count.

    checkpoints/step-00000100/
        checkpoint.json     written last: position, model, mesh, each tensor's shape, norm and sum, each file's size
        .metadata *.distcp  torch.distributed.checkpoint

All ranks put their shards of master, exp_avg and exp_avg_sq, as DTensors of the whole shape, into
`step-00000100.partial`; rank 0 then adds checkpoint.json and one rename makes the checkpoint visible. Experts are one
[E * out, in] tensor per layer and projection, cut by (ep, dp x cp); everything else is cut by dp x cp x ep. Loading
cuts the same whole tensors another way, so any mesh loads any other. Weights are the masters, rounded.

A save in its order, where `async_save` moves the second half behind the next steps:

    sums       each rank sums up its shards on its device; rank 0 adds them up               \\  the stall
    copy       asynchronous: shards to page-locked host memory, allocated while training began /
    write      files, fsync, marker, rename; then what retention no longer keeps is deleted   the write

The sums are what makes a load exact or an error: a 64-bit sum over the bit patterns of a tensor, each row times an odd
number of its own. It does not depend on how the tensor is cut, any single changed bit changes it, and rows that went
to the wrong place change it too. A checkpoint that does not give its sums back is passed over for the one before.

Cost: 12 bytes per parameter written, each exactly once over all ranks, and as much host memory for the whole run. One
H200 and the 52 GB of the six-layer Qwen3 bench: sums and copy 1.1 s, write at the disk's own speed.
"""

import math
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pithtrain import catalog
from pithtrain.errors import CapacityError, CheckpointError, RunFailed
from pithtrain.models.contract import Parameter
from pithtrain.world import World
from pithtrain.zero import Sharded, Zero

KINDS = ("master", "exp_avg", "exp_avg_sq")
THREADS = 4  # files of a rank, written and read at once: one thread does 1.5 GB/s, and disks do more
SUMMED = 1 << 24  # elements summed at once: torch widens them to 64 bits in a copy

torch.serialization.set_crc32_options(False)  # halves the time of a write; our sums see more than a CRC of each piece


class DamagedError(CheckpointError):
    """A checkpoint that looks complete, and cannot be read or gives other numbers back than were saved."""


class SaveError(RunFailed):
    """A checkpoint that the disk did not take; older ones are intact and the state is still in memory."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done, sequences consumed, tokens trained on."""

    step: int
    samples: int
    tokens: int = 0


@dataclass
class Saved:
    """A save: how long training stood still for it, and how long it took until it was on the disk, in seconds."""

    position: Position
    path: Path
    stall_s: float = 0.0
    write_s: float = 0.0
    num_bytes: int = 0
    notes: list[str] = field(default_factory=list)


# ---- saving ----------------------------------------------------------------------------------------------------------


class Saver:
    """Writes this run's checkpoints, one at a time. Every method is called by every rank."""

    def __init__(
        self,
        checkpoints: Path,
        zero: Zero,
        world: World,
        about: dict[str, Any],
        *,
        asynchronous: bool = False,
        keep_last: int | None = None,
        keep_interval: int | None = None,
    ):
        """`about` (JSON values) is kept in checkpoint.json: the model and the tokenizer are compared at a load."""
        self._checkpoints, self._zero, self._world, self._about = checkpoints, zero, world, about
        self._asynchronous, self._keep = asynchronous, (keep_last, keep_interval)
        # a synchronous save of a GPU too: threads that read the device as they write are half as fast
        self._staged = asynchronous or world.device.type == "cuda"
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._error: Exception | None = None
        if self._staged:  # page-locking takes 4 s per 10 GB: not in the way of the first steps
            self._start(self._allocate)

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and its end not heard of; equal on all ranks."""
        return self._saved is not None

    @property
    def writing(self) -> bool:
        """Whether this rank is still busy with it."""
        return self._saved is not None and self._thread is not None and self._thread.is_alive()

    def save(self, position: Position) -> None:
        """Begin a checkpoint; `wait` ends it. A synchronous one is on the disk, or has failed, when this returns.

        Call `wait` for the one before first. The shards may be changed as soon as this returns.
        """
        assert self._saved is None, "one save at a time"
        begin = time.perf_counter()
        final = catalog.folder(self._checkpoints, position.step)
        sums = add_up(summarise(self._zero), self._world)
        kind = {"kind": "full", **asdict(position), "updates": self._zero.updates, "mesh": asdict(self._world.mesh)}
        content = {**kind, **self._about, "torch": torch.__version__, "saved_at": int(time.time()), "tensors": sums}
        shards = {key: shard for key, _, shard in _shards(self._zero)}
        if self._staged:
            self._join()
            shards = {key: self._host[key].copy_(shard, non_blocking=True) for key, shard in shards.items()}
            if self._world.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        self._saved = Saved(position, final, stall_s=time.perf_counter() - begin)
        self._start(lambda: self._write(final, shards, content))
        if not self._asynchronous:
            self._join_silently()
            self._saved.stall_s = time.perf_counter() - begin

    def wait(self) -> Saved | None:
        """Wait for the save in flight: on the disk and visible on all ranks, or SaveError on all ranks. None: none."""
        saved = self._saved
        if saved is None:
            return None
        self._join_silently()
        self._saved, error, self._error = None, self._error, None
        if error is not None:
            raise error
        return saved

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            if self._world.device.type == "cuda":  # the current device belongs to a thread
                torch.cuda.set_device(self._world.device)
            try:
                work()
            except BaseException as error:  # told by `wait`; torch's own is no Exception
                self._error = error if isinstance(error, Exception) else RuntimeError(str(error))

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _join_silently(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _join(self) -> None:
        self._join_silently()
        if self._error is not None:
            raise self._error

    def _allocate(self) -> None:
        """Host memory for all shards: page-locked where there is a GPU, so that the copy runs at the bus's speed."""
        for key, _, shard in _shards(self._zero):
            host = torch.empty(shard.shape, dtype=shard.dtype)
            if shard.is_cuda and host.nbytes:  # torch's own pinned memory is rounded up to a power of two
                runtime: Any = torch.cuda.cudart()
                error = int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
                if error:
                    raise CapacityError(
                        f"{host.nbytes / 2**30:.1f} GiB of host memory cannot be page-locked for checkpoints (CUDA "
                        f"error {error}), which need what `pithtrain plan` says; raise slurm.mem or ulimit -l"
                    )
            self._host[key] = host

    def _write(self, final: Path, shards: dict[str, Tensor], content: dict[str, Any]) -> None:
        """The second half, in a thread of its own; its messages go through `save_group`, which nothing else uses."""
        saved, world = self._saved, self._world
        assert saved is not None
        begin = time.perf_counter()
        partial = final.with_name(final.name + ".partial")

        def prepare() -> None:
            catalog.tidy(self._checkpoints)
            catalog.begin(final)

        def publish() -> None:
            catalog.finish(final, partial, content)
            saved.num_bytes = catalog.size(final)

        self._on_rank_zero(final, prepare)
        writer = FileSystemWriter(partial, thread_count=THREADS)
        state = _state(self._zero, world, shards)
        try:
            dcp_saver.save(state, storage_writer=writer, process_group=world.save_group)
        except CheckpointException as error:
            raise self._failed(final, _causes(error), any(map(_is_disk, error.failures.values()))) from error
        self._on_rank_zero(final, publish)
        saved.write_s = time.perf_counter() - begin
        if world.rank == 0:
            try:
                catalog.retire(self._checkpoints, *self._keep)
            except OSError as error:
                saved.notes.append(f"an old checkpoint could not be deleted: {error}")

    def _on_rank_zero(self, final: Path, work: Callable[[], None]) -> None:
        problem: str | None = None
        if self._world.rank == 0:
            try:
                work()
            except OSError as error:
                problem = f"rank 0: {error}"
        problem = self._world.from_rank_zero(problem, self._world.save_group)
        if problem is not None:
            raise self._failed(final, problem)

    def _failed(self, final: Path, reason: str, disk: bool = True) -> RunFailed:
        if self._world.rank == 0:
            catalog.tidy(self._checkpoints)  # on a full disk its room is needed to say why
        return (SaveError if disk else RunFailed)(f"{final} cannot be written ({reason}); older checkpoints are intact")


def shapes(table: Iterable[Parameter]) -> dict[str, tuple[int, ...]]:
    """{key: stored shape} of a full checkpoint of a model."""
    return {f"{kind}/{info.name}": info.stored_shape for info in table for kind in KINDS}


def _shards(zero: Zero) -> Iterable[tuple[str, Sharded, Tensor]]:
    for name, one in zero.sharded.items():
        for kind in KINDS:
            yield f"{kind}/{name}", one, getattr(one, kind)


def fingerprint(rows: Tensor, first_row: int = 0) -> Tensor:
    """Sum over rows of (2 r + 1) x (sum of the row's bit patterns) modulo 2^64, an int64 scalar on the device.

    `rows` are rows `first_row` on of a whole tensor; the sums of disjoint parts add up to that of the whole. An odd
    factor is invertible modulo 2^64, so no change of a single element goes unseen.
    """
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    bits = rows.detach().view(len(rows), math.prod(rows.shape[1:])).view(word)
    step = max(SUMMED // bits.shape[1], 1)
    for begin in range(0, len(rows), step):
        part = bits[begin : begin + step].sum(1, dtype=torch.int64)
        place = torch.arange(begin, begin + len(part), device=rows.device) + first_row
        total += (part * (2 * place + 1)).sum()
    return total


def norm_of(rows: Tensor) -> Tensor:
    """2-norm in float64, a device scalar; in pieces, since torch makes a float64 copy of what it is given."""
    pieces = rows.detach().reshape(-1).split(SUMMED)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in pieces]))


def summarise(zero: Zero) -> dict[str, tuple[list[int], str, int, float]]:
    """{key: whole shape, dtype, this rank's part of the fingerprint, and of the sum of squares}; two device reads."""
    shards = list(_shards(zero))
    if not shards:
        return {}
    sums = torch.stack([fingerprint(shard, one.first_row) for _, one, shard in shards]).tolist()
    norms = torch.stack([norm_of(shard) for _, _, shard in shards]).tolist()
    return {
        key: (list(one.info.stored_shape), str(shard.dtype).removeprefix("torch."), total, norm**2)
        for (key, one, shard), total, norm in zip(shards, sums, norms, strict=True)
    }


def add_up(mine: dict[str, tuple[list[int], str, int, float]], world: World) -> dict[str, dict[str, Any]]:
    """What the marker says of each tensor, on rank 0; {} elsewhere. A collective of all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for part in world.to_rank_zero(mine):
        for key, (shape, dtype, total, square) in part.items():
            one = found.setdefault(key, {"shape": shape, "dtype": dtype, "norm": 0.0, "sum": 0})
            one["norm"] += square
            one["sum"] += total
    for one in found.values():
        one["norm"], one["sum"] = math.sqrt(one["norm"]), as_hex(one["sum"])
    return {key: found[key] for key in sorted(found, key=_natural)}  # the order does not depend on the mesh either


def _natural(key: str) -> tuple[int, list[str | int]]:
    kind, _, name = key.partition("/")
    return KINDS.index(kind), [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def as_hex(total: int) -> str:
    """A fingerprint as the marker spells it: 16 digits, modulo 2^64."""
    return f"{total % 2**64:016x}"


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(path: Path, zero: Zero, world: World, content: dict[str, Any]) -> Position:
    """Read masters and optimizer state into this rank's shards, whatever mesh wrote them; publish the weights.

    `content`: what `catalog.read` answered. Raises DamagedError, on all ranks, where the files do not give back what
    was saved, and CheckpointError when they belong to another user or the disk does not answer.
    """
    _load(path, zero, world, content, KINDS)
    zero.loaded(content["updates"])
    return Position(content["step"], content["samples"], content["tokens"])


def load_weights(path: Path, zero: Zero, world: World, content: dict[str, Any]) -> None:
    """The masters of a checkpoint of any kind alone; moments and counters are left as they are. Raises as `load`."""
    _load(path, zero, world, content, ("master",))
    zero.publish()


def _load(path: Path, zero: Zero, world: World, content: dict[str, Any], kinds: Sequence[str]) -> None:
    _require_own(path)
    shards = {key: shard for key, _, shard in _shards(zero) if key.split("/")[0] in kinds}
    try:
        dcp_loader.load(_state(zero, world, shards), storage_reader=_Reader(path), process_group=world.control_group)
    except CheckpointException as error:
        disk = any(isinstance(failure[0], OSError) for failure in error.failures.values())
        message = f"{path} cannot be read ({_causes(error)})"
        raise (CheckpointError if disk else DamagedError)(message) from error
    found = add_up({key: summary for key, summary in summarise(zero).items() if key in shards}, world)
    wrong = [key for key, one in found.items() if one["sum"] != content["tensors"].get(key, {}).get("sum")]
    wrong = world.from_rank_zero(wrong)
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DamagedError(f"{path} gives other numbers back than were saved: {', '.join(wrong[:5])}{more}")


def _require_own(path: Path) -> None:
    """torch unpickles `.metadata`, and a pickle can run anything."""
    owner = (path / ".metadata").stat().st_uid
    if owner != os.getuid():
        raise CheckpointError(f"{path} belongs to uid {owner}; if you trust it, make it yours:  cp -r {path} ELSEWHERE")


def _causes(error: CheckpointException) -> str:
    """torch's exception is no `Exception` and holds the ranks' own."""
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())


def _is_disk(failure: tuple[BaseException, Any]) -> bool:
    """Whether a failed write is the disk's fault; torch's own writer turns some of those into a RuntimeError."""
    return isinstance(failure[0], OSError) or "inline_container" in str(failure[0])


class _Reader(FileSystemReader):
    """torch's, with the files of a checkpoint read by several threads."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        with ThreadPoolExecutor(THREADS) as pool:
            parts = [LoadPlan(items, plan.storage_data, plan.planner_data) for items in files.values()]
            for done in [pool.submit(super(_Reader, self).read_data, part, planner) for part in parts]:
                done.result()
        finished: torch.futures.Future[None] = torch.futures.Future()
        finished.set_result(None)
        return finished


# ---- one process, tensor by tensor -----------------------------------------------------------------------------------


class Reader:
    """A complete checkpoint, read one whole tensor at a time by one process on the CPU, without a process group."""

    def __init__(self, path: Path):
        """Raises CheckpointError for one that is incomplete, unreadable or another user's."""
        self.path, self.content = path, catalog.read(path)
        _require_own(path)
        self._reader = FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            raise DamagedError(f"{path}/.metadata cannot be read ({error!r})") from error
        self._reader.set_up_storage_reader(self._metadata, True)

    def tensor(self, key: str) -> Tensor:
        """The tensor `key`, "master/NAME" for instance, in its stored shape (experts [E * out, in]).

        Memory: the tensor, and the largest piece of it that a rank wrote. Raises DamagedError where it cannot be read
        or its sum is not the one that was saved.
        """
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata) or key not in self.content["tensors"]:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner()
        part = Metadata({key: stored}, storage_data=self._metadata.storage_data)
        planner.set_up_planner({key: whole}, part, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner)
        except Exception as error:
            raise DamagedError(f"{self.path}: {key} cannot be read ({error!r})") from error
        if as_hex(int(fingerprint(whole))) != self.content["tensors"][key]["sum"]:
            raise DamagedError(f"{self.path}: {key} is not what was saved: its sum differs")
        return whole


def write_weights(
    out: Path, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str], Tensor], about: dict[str, Any]
) -> Path:
    """A checkpoint of kind "weights" (masters alone) at `out`, by one process: `make(name)` is asked for one fp32
    tensor of the stored shape at a time. Raises CheckpointError if `out` exists or cannot be written, and what `make`
    raises of that kind."""
    if out.exists():
        raise CheckpointError(f"{out} exists already: name another folder, or remove it")
    names = {f"master/{name}": name for name in shapes}
    tensors: dict[str, dict[str, Any]] = {}

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            key = write_item.index.fqn
            made = make(names[key])
            assert made.shape == shapes[names[key]] and made.dtype == torch.float32, names[key]
            summary = {"shape": list(made.shape), "dtype": "float32", "norm": norm_of(made).item()}
            tensors[key] = summary | {"sum": as_hex(int(fingerprint(made)))}
            return made

    state = {key: torch.empty(shapes[name], device="meta") for key, name in names.items()}
    partial = out.with_name(out.name + ".partial")
    try:
        catalog.begin(out)
        # a file per tensor: torch keeps what it wrote until the file ends
        writer = FileSystemWriter(partial, single_file_per_rank=False)
        with warnings.catch_warnings():  # that there is no process group
            warnings.simplefilter("ignore", UserWarning)
            dcp_saver.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        position = {"kind": "weights", "step": 0, "samples": 0, "tokens": 0, "updates": 0, "mesh": None}
        content = {**position, "torch": torch.__version__, "saved_at": int(time.time()), **about, "tensors": tensors}
        catalog.finish(out, partial, content)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        failures = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else []
        for failure in failures:
            if isinstance(failure, CheckpointError):
                raise failure from None
        raise CheckpointError(f"{out} cannot be written ({failures or error})") from error
    return out


# ---- DTensors --------------------------------------------------------------------------------------------------------


def _state(zero: Zero, world: World, shards: Mapping[str, Tensor]) -> dict[str, Any]:
    """DTensors over this rank's own shards, or copies of them: saving reads them, loading writes them in place."""
    device = next((shard.device.type for shard in shards.values()), "cpu")  # one and the same for all
    meshes = {kind: _mesh(world, kind, device) for kind in ("dense", "expert")}
    return {key: as_dtensor(one, shards[key], meshes[one.info.kind]) for key, one, _ in _shards(zero) if key in shards}


def as_dtensor(one: Sharded, shard: Tensor, mesh: DeviceMesh) -> DTensor:
    """`shard` as this rank's piece of a tensor of the parameter's whole shape."""
    shape = torch.Size(one.info.stored_shape)
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(0)] * mesh.ndim
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def _mesh(world: World, kind: str, device: str) -> DeviceMesh:
    """The ranks that share a kind of parameter on this stage: dense one axis, experts (ep, dp x cp).

    Only coordinates are read from it, no collective runs on it, so it gets no process groups of its own.
    """
    m = world.mesh
    data = [(dp, cp) for dp in range(m.dp) for cp in range(m.cp)]
    if kind == "expert":
        ranks: list[Any] = [[m.rank(world.pp, dp, cp, ep) for dp, cp in data] for ep in range(m.ep)]
    else:
        ranks = [m.rank(world.pp, dp, cp, ep) for dp, cp in data for ep in range(m.ep)]
    return DeviceMesh(device, torch.tensor(ranks), _init_backend=False)
