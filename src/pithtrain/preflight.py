"""A look at every rank before the first step: the same software everywhere, and nobody much slower than the others.

A node that is sick trains, at a fraction of the others' speed, and all wait for it at every step; one with another
version of a library computes other numbers. Neither ends a run, so nobody finds out. So each rank tells what it has
(a line in its own log), times one matrix product (its device) and one all-reduce (the way to the others), and rank 0
compares:

    preflight: ranks 16, hosts ['gpu003', 'gpu004'], ..., matmul_ms {'median': 0.21, 'slowest': 0.53, 'factor': 2.5}
    warning: message rank 13 on gpu004 computes 2.5 times slower than the median; without it: pithtrain resume ...

`look` is a collective and measures, `judge` is pure and decides. On a CPU the ranks share cores with each other and
with whatever else runs, so times are told and not judged. Cost: 0.1 s on two H200s, most of it the first use of the
matrix library, which training pays otherwise; 0.04 s on four CPU ranks.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import nccl

from pithtrain.errors import RunFailed
from pithtrain.watch import node_name, usable_cores
from pithtrain.world import World

SLOW = 1.5  # times the median: well beyond what healthy devices of one kind differ by
REPEATS = 5
USED_GIB = 8.0  # of a GPU before anything is built: our own contexts and NCCL's buffers take less (2.9 on two H200s)


@dataclass(frozen=True)
class Facts:
    """What a rank tells. Times are the best of several, in seconds; `versions` must agree."""

    rank: int
    host: str
    device: str
    visible: str | None
    cpus: int
    versions: dict[str, str]
    free_gib: float
    used_gib: float
    matmul_s: float
    all_reduce_s: float


def look(world: World) -> list[Facts]:
    """Measure; every rank calls it. The facts of all ranks on rank 0, [] elsewhere."""
    cuda = world.device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if cuda else (256, torch.float32)
    a = torch.full((size, size), 1e-3, dtype=dtype, device=world.device)  # no random number is drawn here
    out = torch.empty_like(a)
    matmul_s = _best(world, lambda: torch.mm(a, a, out=out))
    world.barrier()  # else the first one to come times the others' arrival
    all_reduce_s = _best(world, lambda: world.sum(out))
    if cuda:
        free, total = torch.cuda.mem_get_info(world.device)
        used = total - free - torch.cuda.memory_reserved(world.device)
        torch.cuda.reset_peak_memory_stats(world.device)
    else:
        free, used = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    nccl_version = ".".join(map(str, nccl.version())) if cuda else "-"
    mine = Facts(
        rank=world.rank,
        host=node_name(),
        device=torch.cuda.get_device_name(world.device) if cuda else "cpu",
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cpus=usable_cores(),
        versions={"torch": torch.__version__, "cuda": str(torch.version.cuda), "nccl": nccl_version},
        free_gib=free / 2**30,
        used_gib=used / 2**30,
        matmul_s=matmul_s,
        all_reduce_s=all_reduce_s,
    )
    print(
        f"rank {mine.rank} on {mine.host}: {mine.device}, CUDA_VISIBLE_DEVICES {mine.visible}, {mine.cpus} cores, "
        f"{mine.free_gib:.1f} GiB free, matrix product {1e3 * matmul_s:.3f} ms, all-reduce {1e3 * all_reduce_s:.3f} ms",
        flush=True,
    )
    return world.to_rank_zero(mine)


def _best(world: World, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        best = min(best, time.perf_counter() - begin)
    return best


def judge(facts: Sequence[Facts], run: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events to tell, as kind and fields: `preflight`, then a `warning` for each rank that stands out. Raises
    RunFailed where the ranks run different software, naming the hosts that differ from most."""
    hosts = list(dict.fromkeys(one.host for one in facts))
    slowest, median = max(facts, key=lambda one: one.matmul_s), statistics.median(one.matmul_s for one in facts)
    times = {"median": round(median * 1e3, 4), "slowest": round(slowest.matmul_s * 1e3, 4)}
    told = {
        "ranks": len(facts),
        "hosts": hosts,
        "devices": sorted({one.device for one in facts}),
        "versions": facts[0].versions,
        "cpus_per_rank": min(one.cpus for one in facts),
        "free_gib": round(min(one.free_gib for one in facts), 1),
        "matmul_ms": times | {"factor": round(slowest.matmul_s / median, 2)},
        "slowest": {"rank": slowest.rank, "host": slowest.host},
        "all_reduce_ms": round(max(one.all_reduce_s for one in facts) * 1e3, 4),
    }
    yield "preflight", told
    for kind in facts[0].versions:
        found = [one.versions[kind] for one in facts]
        usual = statistics.mode(found)
        odd = sorted({f"{one.host} has {one.versions[kind]}" for one in facts if one.versions[kind] != usual})
        if odd:
            error = RunFailed(
                f"the ranks run different versions of {kind}: most have {usual}, {', '.join(odd)}\n"
                f"  go on without it:  pithtrain resume {run} --exclude {odd[0].split()[0]}"
            )
            error.retry = False  # the same nodes would be found again
            raise error
    for one in facts:
        if one.device == "cpu":
            continue
        name = f"rank {one.rank} on {one.host}"
        without = f"; without it:  pithtrain resume {run} --exclude {one.host}" if len(hosts) > 1 else ""
        if one.matmul_s > SLOW * median:
            factor = one.matmul_s / median
            yield "warning", {"message": f"{name} computes {factor:.1f} times slower than the median{without}"}
        if one.used_gib > USED_GIB:
            said = f"{one.used_gib:.1f} GiB of {name}'s GPU are in use by something else: look at nvidia-smi there"
            yield "warning", {"message": said + without}
