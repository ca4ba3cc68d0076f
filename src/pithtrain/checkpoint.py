"""Full state on disk: canonical names, whole shapes, any mesh in and out. `catalog` says which folders count.

    checkpoints/step-00000100/
        checkpoint.json     written last: position, model, mesh, each tensor's shape, norm and sum, each file's size
        .metadata *.distcp  torch.distributed.checkpoint

All ranks put their shards of master, exp_avg and exp_avg_sq (no exp_avg_sq of what Muon moves, a master alone where
there is no gradient), as DTensors of the whole shape, into `step-00000100.partial`; rank 0 then adds checkpoint.json
and one rename makes the checkpoint visible. Loading cuts the same whole tensors another way, so any mesh loads any
other. Weights are the masters, rounded.

A save in its order, where `async_save` moves the last part behind the next steps:

    sums       each rank sums up its shards on its device; rank 0 adds them up
    copy       to host memory, page-locked and taken while training began (not for a synchronous save on a CPU)
    write      files, fsync, marker, rename; then what retention no longer keeps is deleted

The sums (`fingerprint`) are what makes a load exact or an error: a checkpoint that does not give its sums back is
passed over for the one before. docs/checkpoint-format.md has the format, and what a resume takes and refuses.

Cost: 12 bytes per parameter written (8 with bf16 moments), each exactly once over all ranks, and as much host memory
for the whole run. One H200 and the 52 GB of the six-layer Qwen3 bench: sums and copy 1.1 s, write at the disk's own
speed.
"""

import math
import os
import re
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pithtrain import catalog
from pithtrain.catalog import Marker
from pithtrain.errors import CheckpointError, PithtrainError, RunFailed
from pithtrain.models.contract import Parameter
from pithtrain.world import World
from pithtrain.zero import Sharded, Zero

KINDS = ("master", "exp_avg", "exp_avg_sq")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.float64)}
THREADS = 4  # files of a rank, written and read at once: one thread does 1.5 GB/s, and disks do more
SHOWN_S = 30.0  # how long a network file system may take to show one host what another wrote
SUMMED = 1 << 24  # elements summed at once: torch widens them to 64 bits in a copy

Shards = Iterable[tuple[str, Sharded, Tensor]]  # key, parameter, this rank's rows of one of its tensors

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
        """`about`: what checkpoint.json says of the run (JSON values), beside the position and the tensors. The others
        as in the spec."""
        self._checkpoints, self._zero, self._world, self._about = checkpoints, zero, world, about
        self.asynchronous, self._keep = asynchronous, (keep_last, keep_interval)
        # a synchronous save of a GPU too: threads that read the device as they write are half as fast
        self._staged = asynchronous or world.device.type == "cuda"
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """Begin to take host memory, while the first steps are made: page-locking takes 4 s per 10 GB."""
        if self._staged and not self._host:
            self._behind(self._allocate)

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and its end not heard of; equal on all ranks."""
        return self._saved is not None

    @property
    def writing(self) -> bool:
        """Whether this rank is still busy with it. Raises what no other rank will hear of: our own mistakes."""
        if self._error is not None and not isinstance(self._error, RunFailed):
            raise self._error
        return self._saved is not None and self._thread is not None and self._thread.is_alive()

    def save(
        self,
        position: Position,
        expert_counts: list[list[int]] | None = None,
        recent_losses: list[float] | None = None,
    ) -> None:
        """Begin a checkpoint; `wait` ends it, and must have ended the one before. A synchronous one is on the disk, or
        has failed, when this returns. The shards may be changed as soon as it does. The last two: for the marker."""
        assert self._saved is None, "one save at a time"
        begin = time.perf_counter()
        final = catalog.folder(self._checkpoints, position.step)
        mesh, sums = asdict(self._world.mesh), add_up(summarise(_shards(self._zero)), self._world)
        about = {**self._about, "expert_counts": expert_counts, "recent_losses": recent_losses}
        content = _marker("full", position, self._zero.updates, mesh, about, sums)
        shards = {key: shard for key, _, shard in _shards(self._zero)}
        if self._staged:
            self.prepare()
            self._join()
            shards = {key: self._host[key].copy_(shard, non_blocking=True) for key, shard in shards.items()}
            if self._world.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        saved = self._saved = Saved(position, final, stall_s=time.perf_counter() - begin)
        if self.asynchronous:
            self._behind(lambda: self._write(saved, shards, content))
        else:
            self._run(lambda: self._write(saved, shards, content))
            saved.stall_s = time.perf_counter() - begin

    def wait(self) -> Saved | None:
        """Wait for the save in flight: on the disk and visible on all ranks, or SaveError on all ranks. None: none."""
        try:
            self._join()
            return self._saved
        finally:
            self._saved = None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # told by `wait`, on the main thread
            self._error = error

    def _behind(self, work: Callable[[], None]) -> None:
        def run() -> None:
            if self._world.device.type == "cuda":  # the current device belongs to a thread
                torch.cuda.set_device(self._world.device)
            self._run(work)

        # the name is known to `watch`, which shows this thread's stack where the main thread waits for it
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _allocate(self) -> None:
        """Host memory for all shards: page-locked where there is a GPU, so that the copy runs at the bus's speed."""
        for key, _, shard in _shards(self._zero):
            host = self._host[key] = torch.empty(shard.shape, dtype=shard.dtype)
            if shard.is_cuda and host.nbytes:  # torch's own pinned memory is rounded up to a power of two
                runtime: Any = torch.cuda.cudart()
                if error := int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)):
                    size = f"{host.nbytes / 2**30:.1f} GiB of host memory for checkpoints"
                    print(f"warning: {size} cannot be page-locked (CUDA error {error}): copies are slower", flush=True)
                else:  # freed while it is registered, the next one to get these pages would fail
                    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False

    def _write(self, saved: Saved, shards: dict[str, Tensor], content: dict[str, Any]) -> None:
        """The last part; its messages go through `save_group`, which nothing else uses while it runs."""
        final, world, begin = saved.path, self._world, time.perf_counter()

        def prepare() -> None:
            catalog.tidy(self._checkpoints)
            catalog.begin(final)

        def publish() -> None:
            saved.num_bytes = catalog.finish(final, _require_files(catalog.partial(final)), content)

        def retire() -> None:
            try:
                catalog.retire(final, *self._keep)
            except (OSError, PithtrainError) as error:
                saved.notes.append(f"an old checkpoint could not be deleted: {error}")

        self._on_rank_zero(final, prepare)
        try:
            state, writer = _state(self._zero, world, shards), _Writer(catalog.partial(final))
            dcp_saver.save(state, storage_writer=writer, process_group=world.save_group)
        except CheckpointException as error:
            raise self._failed(final, _causes(error), any(map(_is_disk, error.failures.values()))) from error
        self._on_rank_zero(final, publish)
        saved.write_s = time.perf_counter() - begin
        self._on_rank_zero(final, retire)  # no rank goes on alone while a slow disk deletes

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
        free = shutil.disk_usage(next(path for path in final.parents if path.exists())).free / 2**30
        message = f"{final} cannot be written ({reason}; {free:.2f} GiB free); older checkpoints are intact"
        return (SaveError if disk else RunFailed)(message)


def _marker(
    kind: str,
    position: Position,
    updates: int,
    mesh: dict[str, int] | None,
    about: dict[str, Any],
    tensors: Mapping[str, Any],
) -> dict[str, Any]:
    facts = {"updates": updates, "mesh": mesh, "torch": torch.__version__, "saved_at": int(time.time())}
    return {"kind": kind, **asdict(position), **about, **facts, "tensors": tensors}


def _require_files(partial: Path) -> list[str]:
    """The names of all files of a checkpoint, once this host sees them: a network file system may show them late.
    Raises OSError for one that it does not see, such as one on another host's own disk."""
    stored = FileSystemReader(partial).read_metadata().storage_data
    ends: dict[str, int] = {".metadata": 1}
    for each in stored.values():
        ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    deadline = time.monotonic() + SHOWN_S
    for name, end in ends.items():
        while not (partial / name).exists() or (partial / name).stat().st_size < end:
            if time.monotonic() > deadline:
                raise OSError(
                    f"{partial / name}, which another rank wrote, is not seen by rank 0: not a shared folder?"
                )
            time.sleep(0.1)
    return list(ends)


def shapes(table: Iterable[Parameter], muon: bool) -> dict[str, tuple[int, ...]]:
    """{key: stored shape} of a full checkpoint of a model."""
    return {f"{kind}/{info.name}": info.stored_shape for info in table for kind in KINDS[: 1 + info.moments(muon)]}


def _shards(zero: Zero, kinds: Sequence[str] = KINDS) -> Shards:
    for name, one in zero.sharded.items():
        for kind in KINDS[: 1 + one.moments]:
            if kind in kinds:
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


def summarise(shards: Shards) -> dict[str, tuple[list[int], str, int, float]]:
    """{key: whole shape, dtype, this rank's part of the fingerprint, and of the sum of squares}; two device reads."""
    shards = list(shards)
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


def load(path: Path, zero: Zero, world: World, content: Marker) -> Position:
    """Read masters and optimizer state into this rank's shards, whatever mesh wrote them; publish the weights.
    `content`: the marker. Raises, on all ranks: DamagedError where the files do not give back what was saved,
    CheckpointError where they belong to another user or hold another dtype, RunFailed where the disk does not
    answer."""
    _require_own(path)
    ours = {str(one.master.dtype).removeprefix("torch.") for one in zero.sharded.values()}
    theirs = {one["dtype"] for key, one in content["tensors"].items() if key.startswith("master/")}
    if ours and theirs != ours:
        raise CheckpointError(
            f"{path} holds {' and '.join(sorted(theirs))}, this run's training.compute_dtype keeps {ours.pop()}; "
            "resume with the one it was saved with, or begin with its weights (init_from)"
        )
    _load(path, zero, world, content, KINDS)
    zero.loaded(content["updates"])
    return Position(content["step"], content["samples"], content["tokens"])


def moments_dtype(content: Marker) -> str | None:
    """Of the moments that a checkpoint holds."""
    return next((one["dtype"] for key, one in content["tensors"].items() if key.startswith("exp_avg/")), None)


def load_weights(path: Path, zero: Zero, world: World, content: Marker) -> None:
    """The masters of a checkpoint of any kind alone; moments and counters are left as they are. Raises as `load`."""
    _require_own(path)
    _load(path, zero, world, content, ("master",))
    zero.publish()


def _load(path: Path, zero: Zero, world: World, content: Marker, kinds: Sequence[str]) -> None:
    """What is of another dtype is read as it was saved, and copied once its sum was compared: as much memory more."""
    saved, targets = content["tensors"], list(_shards(zero, kinds))
    shards = [(key, one, shard.to(DTYPES[saved[key]["dtype"]])) for key, one, shard in targets]
    state = _state(zero, world, {key: shard for key, _, shard in shards})
    try:
        dcp_loader.load(state, storage_reader=_Reader(path), process_group=world.control_group)
    except CheckpointException as error:
        disk = any(isinstance(failure[0], OSError) for failure in error.failures.values())
        message = f"{path} cannot be read ({_causes(error)})"
        raise (RunFailed if disk else DamagedError)(message) from error
    found = add_up(summarise(shards), world)
    wrong = world.from_rank_zero([key for key, one in found.items() if one["sum"] != saved[key]["sum"]])
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DamagedError(f"{path} gives other numbers back than were saved: {', '.join(wrong[:5])}{more}")
    for (_, _, target), (_, _, shard) in zip(targets, shards, strict=True):
        if target is not shard:
            target.copy_(shard)


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


class _Writer(FileSystemWriter):
    """torch's, with the shards of a rank in several files that are written at once. Its own `thread_count` does that
    too, and loses the error of every thread but the calling one: what a full disk cut off would count as written."""

    def __init__(self, path: Path):
        super().__init__(path, per_thread_copy_ahead=0)  # nothing is on a device here

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        parts: list[list[WriteItem]] = [[] for _ in range(THREADS)]
        sizes = [0] * THREADS
        for item in sorted(plan.items, key=_item_size, reverse=True):
            part = sizes.index(min(sizes))
            parts[part].append(item)
            sizes[part] += _item_size(item)
        prefix, write = plan.storage_data, super().write_data
        plans = [
            replace(plan, items=items, storage_data=replace(prefix, prefix=f"{prefix.prefix}{part}"))
            for part, items in enumerate(parts)
            if items
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            running = [pool.submit(write, part, planner) for part in plans]
        return _finished([result for part in running for result in part.result().wait()])


def _item_size(item: WriteItem) -> int:
    return math.prod(item.tensor_data.chunk.sizes) if item.tensor_data else 0


def _finished(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class _Reader(FileSystemReader):
    """torch's, with the files of a checkpoint read by several threads."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        read = super().read_data
        with ThreadPoolExecutor(THREADS) as pool:
            parts = [LoadPlan(items, plan.storage_data, plan.planner_data) for items in files.values()]
            running = [pool.submit(read, part, planner) for part in parts]
        for part in running:
            part.result()
        return _finished(None)


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
        """The tensor `key`, "master/NAME" for instance, in its stored shape (experts [E * out, in]). Memory: the
        tensor, and the largest piece of it that a rank wrote. Raises DamagedError where it cannot be read or its sum is
        not the one that was saved."""
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata) or key not in self.content["tensors"]:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner()
        part = Metadata({key: stored}, storage_data=self._metadata.storage_data)
        planner.set_up_planner({key: whole}, part, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner)
        except OSError as error:
            gone = "; its run has deleted it meanwhile" if not self.path.exists() else ""
            raise CheckpointError(f"{self.path}: {key} cannot be read ({error}){gone}") from error
        except Exception as error:
            raise DamagedError(f"{self.path}: {key} cannot be read ({error!r})") from error
        saved = self.content["tensors"][key]
        if list(whole.shape) != saved["shape"] or as_hex(int(fingerprint(whole))) != saved["sum"]:
            raise DamagedError(f"{self.path}: {key} is not what was saved: its shape or its sum differs")
        return whole


def verify(path: Path, progress: Callable[[int, int, str], None]) -> Iterator[str]:
    """Read every tensor of a complete checkpoint; what cannot be read or is not what was saved, in words."""
    try:
        reader = Reader(path)
    except CheckpointError as error:
        yield str(error)
        return
    for number, key in enumerate(reader.content["tensors"], 1):
        try:
            reader.tensor(key)
        except CheckpointError as error:
            yield str(error)
        progress(number, len(reader.content["tensors"]), key)


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
    partial = catalog.partial(out)
    try:
        catalog.begin(out)
        # a file per tensor: torch keeps what it wrote until the file ends
        writer = FileSystemWriter(partial, single_file_per_rank=False)
        with warnings.catch_warnings():  # that there is no process group
            warnings.simplefilter("ignore", UserWarning)
            dcp_saver.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        catalog.finish(out, _require_files(partial), _marker("weights", Position(0, 0), 0, None, about, tensors))
    except (OSError, CheckpointException) as error:
        if not isinstance(error, FileExistsError):
            shutil.rmtree(partial, ignore_errors=True)
        cause = error.failures[0][0] if isinstance(error, CheckpointException) else error
        if not _is_disk((cause, None)):
            raise cause from None  # what `make` raised
        raise CheckpointError(f"{out} cannot be written ({cause})") from error
    return out


# ---- DTensors --------------------------------------------------------------------------------------------------------


def _state(zero: Zero, world: World, shards: Mapping[str, Tensor]) -> dict[str, Any]:
    """DTensors over this rank's own shards, or copies of them: saving reads them, loading writes them in place."""
    device = next((shard.device.type for shard in shards.values()), "cpu")  # one and the same for all
    meshes = {kind: _mesh(world, kind, device) for kind in ("dense", "expert")}
    state: dict[str, Any] = {}
    for key, one, _ in _shards(zero):
        if key in shards:
            whole, mesh = torch.empty(one.info.stored_shape, device="meta"), meshes[one.info.kind]
            form = {"shape": whole.shape, "stride": whole.stride()}
            state[key] = DTensor.from_local(shards[key], mesh, [Shard(0)] * mesh.ndim, run_check=False, **form)
    return state


def _mesh(world: World, kind: str, device: str) -> DeviceMesh:
    """The ranks that share a kind of parameter on this stage: dense one axis, experts (ep, dp x cp). Only coordinates
    are read from it, no collective runs on it, so it gets no process groups of its own."""
    m = world.mesh
    data = [(dp, cp) for dp in range(m.dp) for cp in range(m.cp)]
    if kind == "expert":
        ranks: list[Any] = [[m.rank(world.pp, dp, cp, ep) for dp, cp in data] for ep in range(m.ep)]
    else:
        ranks = [m.rank(world.pp, dp, cp, ep) for dp, cp in data for ep in range(m.ep)]
    return DeviceMesh(device, torch.tensor(ranks), _init_backend=False)
