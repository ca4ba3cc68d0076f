"""Copies into the peers' memory: places, the turns of the two sets, the whole engine over it, where it is possible."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C import _distributed_c10d
from torch.distributed import _symmetric_memory

from harness import Pool, gather_ran, make_spec, shared_peers, steps_job
from pithtrain import build, doctor
from pithtrain.errors import CapacityError, RunFailed
from pithtrain.ops import symmetric
from pithtrain.ops.dispatch import places
from pithtrain.ops.symmetric import Blocks, Peers, Seat, regions, set_bytes, why_not
from pithtrain.plan import exchange_rows, plan
from pithtrain.spec import RunSpec
from pithtrain.world import Place


@pytest.mark.parametrize("ranks", [1, 2, 4, 40])
def test_places_of_every_rank_fill_every_buffer_once(ranks: int) -> None:
    """Each receiver's rows lie one behind the other in the order of their senders, on the way out and home."""
    counts = torch.randint(2**30, 2**30 + 5, (ranks, ranks, 2), generator=torch.Generator().manual_seed(ranks))
    told = [places(counts.to(torch.int32).numpy(), rank) for rank in range(ranks)]  # sums that 32 bits do not hold
    rows = counts[:, :, 0].tolist()
    for rank, (out, home, slots, _) in enumerate(told):
        assert out.sent == home.received == rows[rank]
        assert out.received == home.sent == [rows[other][rank] for other in range(ranks)]
        assert slots == counts[:, rank, 1].sum()
    for to in range(ranks):
        for way in (0, 1):  # out, home
            blocks = [each[way] for each in told]
            ends = itertools.accumulate((each.sent[to] for each in blocks), initial=0)
            assert [each.begin[to] for each in blocks] == list(ends)[:-1]
        assert told[0].most[to] == max(sum(told[to][0].sent), sum(told[to][0].received))
    assert all(each.most == told[0].most for each in told), "all ranks judge alike whether rows fit"


def test_regions_do_not_overlap_and_fit_their_set() -> None:
    for capacity, row_bytes in itertools.product((1, 7, 1000), ([4096, 128], [4096, 32], [3], [0, 8], [5760, 64, 4])):
        begins = regions(capacity, row_bytes)
        for begin, after, each in zip(begins[:-1], begins[1:], row_bytes, strict=True):
            assert begin % 256 == 0 and begin + capacity * each <= after
        assert begins[-1] <= set_bytes(capacity, row_bytes, ranks=2)
    assert set_bytes(1, [2, 2], ranks=72) >= 72 * 72 * 8  # the counts of all ranks


class Flags:
    """Signals of two ranks in one process: whoever would have to wait is told so."""

    def __init__(self, rank: int, flags: dict[tuple[int, int], int]):
        self._rank, self._flags = rank, flags

    def put_signal(self, dst_rank: int, channel: int) -> None:
        assert not self._flags.get((dst_rank, channel)), "a put never waits"
        self._flags[dst_rank, channel] = 1

    def wait_signal(self, src_rank: int, channel: int) -> None:
        assert self._flags.pop((self._rank, channel), 0), "waits for what was not sent"


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_as_far_ahead_as_it_can_be_overwrites_nothing(ahead: int) -> None:
    """It launches exchange n+1 once it has finished n; the other one has not even looked at n then. Forty exchanges of
    growing and empty ones, each read at the last moment that the protocol allows."""
    sets = [torch.full((2, set_bytes(8, [8], 2)), 0xFF, dtype=torch.uint8) for _ in range(2)]
    flags: dict[tuple[int, int], int] = {}
    peers = [Peers(Flags(rank, flags), rank, sets, capacity=8, channel=6) for rank in range(2)]
    first, second = ahead, 1 - ahead

    def put(rank: int, n: int) -> tuple[torch.Tensor, int]:
        """Rank r sends n % 4 rows of the number 2 n + r to each."""
        count = n % 4
        rows = torch.full((2 * count, 1), 2.0 * n + rank, dtype=torch.float64)
        begin = [rank * count] * 2
        [arriving], channel = peers[rank].put([rows], Blocks([count] * 2, [count] * 2, begin))
        return arriving, channel

    def read(rank: int, n: int, flight: tuple[torch.Tensor, int]) -> None:
        peers[rank].wait(flight[1])
        assert flight[0].flatten().tolist() == [2.0 * n] * (n % 4) + [2.0 * n + 1] * (n % 4)

    flying = put(first, 0)
    for n in range(40):
        late = put(second, n)
        read(first, n, flying)
        flying = put(first, n + 1)
        read(second, n, late)


class Handle:
    """Torch's symmetric memory of one rank alone: what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def empty_strided_p2p(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype)

    def put_signal(self, dst_rank: int, channel: int) -> None:
        self.asked.append((dst_rank, channel))

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


def test_both_directions_have_sets_and_signals_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exchange of either: its bytes land where no other's do before its turn comes again; no multicast."""
    handle: Any = Handle()
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", handle)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda tensor, group: handle)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    lanes = symmetric.open_peers(handle, torch.device("cpu"), 6, (8,))
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    places_of: list[int] = []
    for _ in range(3):
        for peers in lanes:
            rows = torch.ones(6, 1, dtype=torch.int64)
            [arriving], channel = peers.put([rows], Blocks([2] * 3, [2] * 3, [2] * 3))
            places_of.append(arriving.data_ptr())
            assert handle.asked[-2:] == [(2, channel), (0, channel)]
    assert len(set(places_of)) == len({channel for _, channel in handle.asked}) == 4 and places_of[4:] == places_of[:2]

    def fails(tensor: object, group: object) -> None:
        raise RuntimeError("invalid device")

    monkeypatch.setattr(_symmetric_memory, "rendezvous", fails)
    with pytest.raises(RunFailed, match=r"invalid device; set moe\.transport=nccl") as caught:
        symmetric.open_peers(handle, torch.device("cpu"), 6, (8,))
    assert not caught.value.retry


# ---- the engine ------------------------------------------------------------------------------------------------------


def shared_job(place: Place, fields: dict[str, Any], num_steps: int, folder: Path) -> dict[str, Any]:
    """`steps_job` whose expert traffic goes through shared memory."""

    def open_shared(group: torch.distributed.ProcessGroup, device: object, capacity: int, row_bytes: Any) -> Any:
        ranks = "-".join(map(str, torch.distributed.get_process_group_ranks(group)))
        (folder / ranks).mkdir(exist_ok=True)
        peers = shared_peers(folder / ranks, group.rank(), group.size(), capacity, [2 * x for x in row_bytes])
        torch.distributed.barrier(group)
        return peers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose_transport", lambda spec, world: build.Transport("symmetric", "shared memory"))
        patch.setattr(build, "open_peers", open_shared)
        return steps_job(place, fields, num_steps)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "eight"), [("none", False), ("selective", False), ("full", False), ("none", True)])
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2)], ids=["ep2", "pp2ep2"])
def test_the_engine_over_shared_memory_is_bitwise_that_over_gloo(
    pool: Pool, tmp_path: Path, mesh: tuple[int, int, int], mode: str, eight: bool
) -> None:
    """Pairs of both directions in flight; rows that a backward gathers again are kept, others read in place."""
    sections = {"activation_checkpoint": {"mode": mode}, "fp8": {"enabled": eight, "recipe": "rowwise"}}
    spec = make_spec(*mesh, model={"num_experts_per_tok": 3}, **sections)
    fields = spec.model_dump(mode="json")
    want = gather_ran(pool.run(spec.world_size, steps_job, fields, 2))
    found = gather_ran(pool.run(spec.world_size, shared_job, fields, 2, tmp_path))
    assert found.losses == want.losses and found.norms == want.norms
    for name, master in want.masters.items():
        np.testing.assert_array_equal(found.masters[name], master, name)


# ---- where it is possible --------------------------------------------------------------------------------------------

HOST = [Seat("n0", f"gpu{i}", ("gpu0", "gpu1", "gpu2"), tuple(18 * (i != j) for j in range(3))) for i in range(3)]


def test_why_ranks_cannot_write_into_each_other_s_memory() -> None:
    assert why_not(HOST, nvlink=True) == ""
    elsewhere = replace(HOST[1], host="n1")
    assert why_not([HOST[0], elsewhere], nvlink=False) == "the ranks of an expert-parallel group are on n0 and n1"
    alone = [replace(each, devices=(each.device,), links=(0,)) for each in HOST]
    assert "a rank sees 1 GPUs and not those of its peers" in why_not(alone, nvlink=False)
    bridge = [replace(HOST[0], links=(0, 0, None)), replace(HOST[1], links=(0, 0, 0)), HOST[2]]
    assert why_not(bridge[:2], nvlink=True) == "no NVLink joins GPUs 0 and 1 of n0" and why_not(bridge[:2], False) == ""
    assert why_not(bridge, nvlink=False) == "GPUs 0 and 2 of n0 have no access to each other's memory"
    assert why_not([Seat("n0", "cpu")] * 2, nvlink=False) == "cpu has no copy engines"


class Told:
    """A world whose rank 0 heard these seats."""

    def __init__(self, seats: list[Seat], kind: str):
        self.seats, self.device = seats, torch.device(kind)

    def to_rank_zero(self, seat: Seat) -> list[Seat]:
        return self.seats

    def from_rank_zero(self, value: list[Seat]) -> list[Seat]:
        return value


def test_the_transport_of_a_run_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(wanted: str, seats: list[Seat], kind: str = "cuda", **mesh: Any) -> str:
        spec: RunSpec = make_spec(**(mesh or {"dp": len(seats) // 2, "ep": 2}), training={"device": "auto"})
        spec = spec.model_copy(update={"moe": spec.moe.model_copy(update={"transport": wanted})})
        monkeypatch.setattr(build, "seat", lambda device: None)
        world: Any = Told(seats, kind)
        return ": ".join(build.choose_transport(spec, world))

    two, apart = HOST[:2], [HOST[0], HOST[1], HOST[2], replace(HOST[1], host="n1")]  # the second group is on two hosts
    assert chosen("auto", two) == "symmetric: NVLink joins all ranks of each group"
    assert chosen("symmetric", two) == "symmetric: peer access between all ranks of each group"
    assert chosen("nccl", two) == "nccl: moe.transport says so"
    assert chosen("auto", apart) == "nccl: the ranks of an expert-parallel group are on n0 and n1"
    assert chosen("auto", [Seat("n0", "cpu")] * 2, "cpu") == "gloo: cpu has no copy engines"
    assert chosen("auto", two, dp=2, ep=1) == "none: no expert is on another rank"
    for seats in (apart, [Seat("n0", "cpu")] * 2):
        with pytest.raises(CapacityError, match=r"moe\.transport = 'symmetric': .*; use auto or nccl"):
            chosen("symmetric", seats)


def test_memory_that_cannot_be_mapped_after_all_is_nccl_where_nobody_insisted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RunFailed("no descriptor came")

    monkeypatch.setattr(build, "open_peers", refuse)
    monkeypatch.setattr(build, "choose_transport", lambda spec, world: build.Transport("symmetric", "NVLink"))
    world: Any = Told([], "cpu")
    world.ep_fwd_group = world.ep_bwd_group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    world.device, world.to_rank_zero = torch.device("cpu"), lambda value: ["", value]
    transport, lanes = build.open_lanes(make_spec(ep=2, moe={"transport": "auto"}), world)
    assert transport == ("gloo", "no descriptor came") and not any(lane.peers for lane in lanes)
    with pytest.raises(RunFailed, match="no descriptor came"):
        build.open_lanes(make_spec(ep=2, moe={"transport": "symmetric"}, training={"device": "auto"}), world)


def test_the_doctor_says_how_expert_traffic_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "seat", lambda device: HOST[device.index])
    assert doctor.transport(3).found == "moe.transport=auto is symmetric: NVLink joins all 3 GPUs"
    bridge = [replace(seat, links=(0, 0, 0)) for seat in HOST]
    monkeypatch.setattr(symmetric, "seat", lambda device: bridge[device.index])
    check = doctor.transport(2)
    assert (check.verdict, check.found) == ("OK", "moe.transport=auto is nccl: no NVLink joins GPUs 0 and 1 of n0")


def test_the_plan_counts_the_buffers(tmp_path: Path) -> None:
    """Qwen3's width: 2 ranks x 4 x 4096 tokens x (2048 bf16 + 8 slots of 8 bytes), four times."""
    model = {"hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8}
    training = {"micro_batch_size": 4, "sequence_length": 4096, "device": "auto", "compute_dtype": "auto"}
    copies = {"moe": {"transport": "auto"}}
    spec = make_spec(ep=2, model=model, training=training, **copies)
    assert exchange_rows(spec) == (32768, (4096, 64))
    assert plan(spec).exchange_bytes == 4 * 32768 * 4160 and "GiB more per rank" in plan(spec).text()
    plain = make_spec(ep=2, model=model, training=training, moe={"dispatch": "plain"})
    assert exchange_rows(plain) == (8 * 32768, (4096, 8))
    for off in ({"moe": {"transport": "nccl"}}, {"training": training | {"device": "cpu"}}, {"ep": 1, "dp": 2}):
        spec = make_spec(**{"ep": 2, "model": model, "training": training, **copies, **off})
        assert plan(spec).exchange_bytes == 0 and "copy engines" not in plan(spec).text()
