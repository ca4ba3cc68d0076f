"""Latency and bandwidth between the GPUs of this host (two gloo processes without one), as lines for slurm/NAME.yaml.

    .venv/bin/python benchmarks/links.py            >> slurm/my-cluster.yaml
    .venv/bin/python benchmarks/links.py --ranks 4 --json out.json

Each way of communication is timed over sizes, all ranks at once, and a line is laid through the medians: a message of b
bytes takes latency + b / bandwidth, b what one rank sends to others while it receives as much. Least squares of the
relative error, so that small and large messages count alike. `pithtrain plan` uses the two numbers.

    all_to_all    equal parts for all, over NCCL
    p2p           one grouped batch: send to the next rank, receive from the one before
    copy_engine   expert traffic by moe.transport symmetric: copies into the peers' memory, signals, waits; if it can be

On GPUs the time is the device's, of one message in a row that was queued before it began, as a step does; a CPU's is
its clock's.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pithtrain.ops.dispatch import Lane
from pithtrain.ops.symmetric import Blocks, open_peers, seat, why_not
from pithtrain.spec import DistributedSection, Mesh
from pithtrain.worker import prepare_environment
from pithtrain.world import Place, World, connect

REPEATS, WARM_UP = 20, 3
QUEUED, AHEAD = 10, 20_000_000  # messages in a row; clock cycles, 10 ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=max(gpus, 2), help="default: all GPUs of this host")
    parser.add_argument("--largest-mib", type=int, default=64 if gpus else 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all times too")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or (gpus and arguments.ranks > gpus):
        parser.error(f"--ranks {arguments.ranks}: 2 to {gpus} of this host's GPUs can talk to each other")
    sizes = [size for size in (2**n for n in range(14, 30, 2)) if size <= arguments.largest_mib * 2**20]
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(prepare_environment({"RANK": "0", "WORLD_SIZE": str(arguments.ranks), **os.environ}))
        mp.spawn(one_rank, (arguments.ranks, name, sizes), arguments.ranks)  # pyright: ignore
        told = json.loads((Path(name) / "told.json").read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    print(text(told, arguments.ranks))


def text(told: dict[str, Any], ranks: int) -> str:
    lines = [f"# {ranks} x {told['device']}, torch {torch.__version__}, by benchmarks/links.py", "links:"]
    for name, times in told["seconds"].items():
        latency_s, rate = fit([(int(size), seconds) for size, seconds in times.items()])
        lines.append(f"  {name}: {{latency_us: {1e6 * latency_s:.1f}, gb_s: {rate / 1e9:.4g}}}")
    return "\n".join([*lines, *(f"  # {name}: not measured, {why}" for name, why in told["left_out"].items())])


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(latency in s, bytes a second) of (bytes, seconds) that make sum(((latency + bytes / rate) / seconds - 1)^2)
    least; no latency below 0. Times that do not grow with the size, as a busy host's, tell no rate: then it is the best
    that was seen, which is less than the link's."""
    a, b = zip(*((1 / s, size / s) for size, s in points), strict=True)  # latency * a + b / rate = 1
    aa, ab, bb = (sum(x * y for x, y in zip(u, v, strict=True)) for u, v in ((a, a), (a, b), (b, b)))
    latency = (sum(a) * bb - sum(b) * ab) / (aa * bb - ab * ab)
    if latency < 0:
        return 0.0, bb / sum(b)
    if sum(b) <= latency * ab:
        return min(seconds for _, seconds in points), max(size / seconds for size, seconds in points)
    return latency, bb / (sum(b) - latency * ab)


def one_rank(rank: int, ranks: int, folder: str, sizes: Sequence[int]) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(rank, ranks, rank, f"file://{folder}/store", 1)
    with connect(place, Mesh(pp=1, dp=1, cp=1, ep=ranks), kind, DistributedSection()) as world:
        told: dict[str, Any] = {"device": torch.cuda.get_device_name() if kind == "cuda" else "CPU process"}
        group, told["left_out"] = world.ep_fwd_group, {}
        assert group is not None
        lanes = {"all_to_all": Lane(group, world.device)}
        reason = why_not(world.from_rank_zero(world.to_rank_zero(seat(world.device))), nvlink=False)
        if reason:
            told["left_out"]["copy_engine"] = reason
        else:
            peers = open_peers(group, world.device, 2 * max(sizes), (1,))
            lanes["copy_engine"] = Lane(group, world.device, peers[0])
        seconds: dict[str, dict[int, float]] = {}
        for name, lane in lanes.items():
            seconds[name] = {size: median(world, exchange(lane, rank, ranks, size)) for size in sizes}
        seconds["p2p"] = {size: median(world, ring(world, size)) for size in sizes}
        if rank == 0:
            (Path(folder) / "told.json").write_text(json.dumps(told | {"seconds": seconds}))
        world.barrier()


def exchange(lane: Lane, rank: int, ranks: int, size: int) -> Callable[[], object]:
    """Sends `size` bytes to the others together, and as much to itself as to each of them."""
    part = size // (ranks - 1)
    blocks = Blocks([part] * ranks, [part] * ranks, [rank * part] * ranks)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows = torch.randint(256, (ranks * part, 1), dtype=torch.uint8, device=device)

    def act() -> None:
        with lane.after(lane.mark()):
            transfer = lane.exchange([rows], blocks)
        transfer.finish()

    return act


def ring(world: World, size: int) -> Callable[[], object]:
    rank, ranks, group = world.rank, world.mesh.size, world.ep_bwd_group
    there = torch.randint(256, (size,), dtype=torch.uint8, device=world.device)
    here = torch.empty_like(there)

    def act() -> None:
        send = dist.P2POp(dist.isend, there, (rank + 1) % ranks, group)
        receive = dist.P2POp(dist.irecv, here, (rank - 1) % ranks, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return act


def median(world: World, act: Callable[[], object]) -> float:
    """Seconds of one, after warm-up, the slowest rank's in each round."""
    took: list[float] = []
    once = on_device if world.device.type == "cuda" else on_host
    for _ in range(WARM_UP + REPEATS):
        took.append(world.max(round(1e9 * once(world, act)))()[0] / 1e9)
    return statistics.median(took[WARM_UP:])


def on_host(world: World, act: Callable[[], object]) -> float:
    """Seconds by the clock."""
    world.barrier()
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def on_device(world: World, act: Callable[[], object]) -> float:
    """Seconds of one of QUEUED messages in a row. The device sleeps until the host has queued them all; the first,
    which is not timed, ends when every rank is there."""
    torch.cuda.synchronize()
    world.barrier()
    torch.cuda._sleep(AHEAD)
    act()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(QUEUED):
        act()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / QUEUED


if __name__ == "__main__":
    main()
