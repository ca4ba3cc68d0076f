"""Saving and loading a spec's state, in GB/s, against what the same disk does with plain files in the same run.

    .venv/bin/python benchmarks/checkpoint.py --config configs/tiny.yaml --set model.vocab_size=65536 --folder runs

One process (the mesh is set to one rank) builds the spec's state, and then, in this order:

    disk     --sample-gib of random bytes written and flushed, and read back, by one thread and by four at once
    save     a synchronous save: training stands still until it is on the disk
    load     into the same state, compared with what was saved
    async    a save in the background: how long it held training up, and how long it wrote; with --steps, how long a
             step takes alone and while it is written
    disk     again: other users of a disk come and go, so the ratios take the mean of the two

Nothing is read from memory instead of the disk: files are flushed and dropped from the page cache before each read, and
`cached` says which share of them was still there (null: the file system does not tell). One checkpoint lies on the disk
at a time (12 bytes per parameter), and no sample beside it. Prints one JSON object; GB are 10^9 bytes.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pithtrain import catalog, checkpoint
from pithtrain.build import Engine, build, device_type
from pithtrain.checkpoint import Position, Saved, Saver
from pithtrain.pipeline import MicroBatch
from pithtrain.spec import RunSpec, load
from pithtrain.train import train_step
from pithtrain.world import Place, connect

ONE_RANK = (
    "slurm.nodes=1",
    "slurm.gpus_per_node=1",
    *(f"parallelism.{p}_parallel_size=1" for p in ("pipeline", "expert", "context")),
    "data.document_mask=false",  # random tokens have none
)
BLOCK = os.urandom(16 * 2**20)  # bytes that no file system compresses
THREADS = (1, 4)
PROBE_EVERY = 4 * 2**20  # bytes between the pages of a file that are asked for: a probe may bring its neighbours in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.yaml"))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=C")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the spec's output_dir otherwise")
    parser.add_argument("--sample-gib", type=float, default=8.0, help="size of the plain files")
    parser.add_argument("--repeats", type=int, default=1, help="saves and loads of each kind; medians are printed")
    parser.add_argument("--no-async", action="store_true", help="leave out the save in the background")
    parser.add_argument("--steps", type=int, default=0, help="training steps timed before the save in the background")
    arguments = parser.parse_args()
    spec = load(arguments.config, [*ONE_RANK, *arguments.overrides])
    if spec.world_size != 1:
        sys.exit(f"this measures one process, and the spec has {spec.world_size} ranks")
    place = arguments.folder or spec.output_dir
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix="bench-") as name:
        folder = Path(name)
        with connect(Place(0, 1, 0, "", 1), spec.mesh, device_type(spec), spec.distributed) as world:
            engine = build(spec, world)
            print(json.dumps(measure(spec, engine, folder, arguments), indent=1))


def measure(spec: RunSpec, engine: Engine, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    size = sum(
        each.nbytes for one in engine.zero.sharded.values() for each in (one.master, one.exp_avg, one.exp_avg_sq)
    )
    sample, free = round(arguments.sample_gib * 2**30), shutil.disk_usage(folder).free
    if max(1.02 * size, sample) > free:
        sys.exit(
            f"{folder} has {free / 1e9:.1f} GB free; a checkpoint takes {size / 1e9:.1f}, a sample {sample / 1e9:.1f}"
        )
    about = {
        "run": spec.name,
        "spec_hash": spec.stable_hash(),
        "model": spec.model.model_dump(mode="json"),
        "tokens": 0,
    }
    repeats = range(1, arguments.repeats + 1)
    told: dict[str, Any] = {
        "config": str(arguments.config),
        "device": str(engine.world.device),
        "torch": torch.__version__,
    }
    told |= {"folder": str(folder.parent), "sample_bytes": sample, "repeats": arguments.repeats}
    disk = [plain_files(folder, sample)]

    saver = Saver(folder, engine.zero, engine.world, about)
    told["allocate_s"] = prepared(saver)
    saves: list[float] = []
    loads: list[float] = []
    cached: list[float | None] = []
    for number in repeats:
        path, seconds, saved = save(saver, folder, number)
        saves.append(seconds)
        cached.append(forget(path.iterdir()))
        loads.append(clock(lambda path=path: load_into(path, engine)))
        told["bytes"] = saved.num_bytes
    told |= rates("save", told["bytes"], saves) | rates("load", told["bytes"], loads) | {"load_cached": cached[-1]}

    if not arguments.no_async:
        del saver  # and its host memory
        saver = Saver(folder, engine.zero, engine.world, about, asynchronous=True)
        prepared(saver)
        step, alone, meanwhile = stepper(spec, engine), list[float](), list[float]()
        if arguments.steps:
            step()  # the first step of a process is no step like the others
            alone = [clock(step) for _ in range(arguments.steps)]
        stalls: list[float] = []
        writes: list[float] = []
        for number in repeats:
            timed = (lambda: meanwhile.append(clock(step))) if arguments.steps else None
            _, _, saved = save(saver, folder, number, timed)
            stalls.append(saved.stall_s)
            writes.append(saved.write_s)
        told |= {"async_stall_s": round(statistics.median(stalls), 6)}
        told |= {"async_stall_of_save": round(statistics.median(stalls) / statistics.median(saves), 4)}
        told |= rates("async_write", told["bytes"], writes)
        if arguments.steps:
            told |= {
                "step_s": median(alone),
                "step_while_writing_s": median(meanwhile),
                "steps_while_writing": len(meanwhile),
            }
    clear(folder)

    disk.append(plain_files(folder, sample))
    for way in ("write", "read"):
        speeds = {str(threads): [round(one[way, threads], 3) for one in disk] for threads in THREADS}
        told[f"disk_{way}_gb_s"] = speeds  # by threads: before and after
        best = max(statistics.mean(one[way, threads] for one in disk) for threads in THREADS)
        mine = "save" if way == "write" else "load"
        told[f"{mine}_of_disk"] = round(told[f"{mine}_gb_s"] / best, 3)
    told["disk_read_cached"] = disk[-1]["cached", 1]
    return told


def prepared(saver: Saver) -> float:
    """Seconds until it has its host memory, which a run takes while the first steps are made."""
    begin = time.perf_counter()
    saver.prepare()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    return round(time.perf_counter() - begin, 3)


def clock(work: Callable[[], Any]) -> float:
    """Seconds, the device drained before and after."""
    drain()
    begin = time.perf_counter()
    work()
    drain()
    return time.perf_counter() - begin


def drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def rates(name: str, size: int, seconds: list[float]) -> dict[str, float]:
    middle = statistics.median(seconds)
    return {f"{name}_s": round(middle, 6), f"{name}_gb_s": round(size / middle / 1e9, 3)}


def clear(folder: Path) -> None:
    for path in folder.glob("step-*"):
        shutil.rmtree(path)


def save(
    saver: Saver, folder: Path, step: int, meanwhile: Callable[[], None] | None = None
) -> tuple[Path, float, Saved]:
    """One checkpoint where there was none, and the seconds until it is on the disk."""
    clear(folder)
    saved: list[Saved | None] = []

    def work() -> None:
        saver.save(Position(step, step))
        while meanwhile is not None and saver.writing:
            meanwhile()
        saved.append(saver.wait())

    seconds = clock(work)
    assert saved[0] is not None
    return saved[0].path, seconds, saved[0]


def load_into(path: Path, engine: Engine) -> None:
    checkpoint.load(path, engine.zero, engine.world, catalog.read(path))


def stepper(spec: RunSpec, engine: Engine) -> Callable[[], object]:
    """A training step on random tokens."""
    training, vocabulary = spec.training, spec.model.config.vocab_size

    def step() -> object:
        shape, device = (training.micro_batch_size, training.sequence_length), engine.world.device
        tokens = [torch.randint(vocabulary, shape, device=device) for _ in range(spec.num_micro_batches)]
        return train_step(engine, spec, [MicroBatch(each, each) for each in tokens], spec.optimizer.lr)

    return step


# ---- the disk --------------------------------------------------------------------------------------------------------


def plain_files(folder: Path, size: int) -> dict[tuple[str, int], Any]:
    """GB/s of large sequential writes (flushed) and reads, by the number of files that are written or read at once."""
    found: dict[tuple[str, int], Any] = {}
    for threads in THREADS:
        files = [folder / f"plain-{number}" for number in range(threads)]
        blocks = max(1, size // threads // len(BLOCK))
        with ThreadPoolExecutor(threads) as pool:

            def each(work: Callable[[Path, int], None], files: list[Path] = files, blocks: int = blocks) -> float:
                seconds = clock(lambda: list(pool.map(work, files, [blocks] * len(files))))
                return len(files) * blocks * len(BLOCK) / seconds / 1e9

            found["write", threads] = each(write_blocks)
            found["cached", threads] = forget(files)
            found["read", threads] = each(read_blocks)
        for file in files:
            file.unlink()
    return found


def write_blocks(file: Path, blocks: int) -> None:
    with file.open("wb", buffering=0) as out:
        for _ in range(blocks):
            out.write(BLOCK)
        os.fsync(out.fileno())


def read_blocks(file: Path, blocks: int) -> None:
    block = bytearray(len(BLOCK))
    with file.open("rb", buffering=0) as source:
        for _ in range(blocks):
            source.readinto(block)


def forget(files: Iterable[Path]) -> float | None:
    """Drop flushed files from the page cache; the share of probed pages that are there nevertheless."""
    hits: list[bool] = []
    for file in files:
        with file.open("rb", buffering=0) as source:
            handle, size = source.fileno(), file.stat().st_size
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                hits += [is_cached(handle, offset) for offset in range(0, size, PROBE_EVERY)]
            except OSError:
                return None
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # should a probe have brought something in
    return round(sum(hits) / len(hits), 3) if hits else None


def is_cached(handle: int, offset: int) -> bool:
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


if __name__ == "__main__":
    main()
