"""The expert exchange over 1 to 4 processes against a dense float64 computation on all tokens together.

A `Case` says which experts every rank's tokens visit; all operands follow from it and a seed, so that a rank makes its
own and the test makes all of them. `play` runs one layer's exchange, forward and backward, as the tape does, and
reports what it computed and every collective it called.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harness import Pool, shared_peers
from pithtrain.ops import grouped
from pithtrain.ops.dispatch import Exchange, Lane, LocalExchange, open_exchange
from pithtrain.ops.experts import Experts, ExpertSegment
from pithtrain.ops.linear import WeightGrad
from pithtrain.spec import DistributedSection, Mesh
from pithtrain.world import Place, connect
from reference import assert_near, distinct_ids, gradients, leaves, make_weight, moe, poisoned_memory, random

H, I = 6, 5  # noqa: E741
CPU = torch.device("cpu")
Ids = tuple[tuple[int, ...], ...]  # experts of each token of a rank


@dataclass(frozen=True)
class Case:
    ids: tuple[Ids, ...]  # per rank
    num_experts: int
    k: int
    dedup: bool = True
    dtype: str = "float64"
    seed: int = 0
    multiply: bool = False  # expert x multiplies by x exactly (component 0 of a token must be 1)
    other_seed: int | None = None  # of the operands of all ranks but 0
    row_by_row: bool = False  # grouped matmuls that treat each row alone

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Operands:
    """One rank's: ids and weights [T, K], the rest [T, H]. `shared` and `dn_shared` stand for a shared expert's."""

    ids: Tensor
    w: Tensor
    n: Tensor
    mid: Tensor
    shared: Tensor
    dh: Tensor
    dn_shared: Tensor


def operands(case: Case, rank: int) -> Operands:
    ids = torch.tensor(case.ids[rank], dtype=torch.int64).reshape(-1, case.k)
    seed = (case.seed if case.other_seed is None or rank == 0 else case.other_seed) * 1000 + 10 * rank
    wide = torch.promote_types(case.torch_dtype, torch.float32)
    w = random(seed, *ids.shape, dtype=wide).abs() + 0.1
    n, mid, shared, dh, dn = (random(seed + i, len(ids), H, dtype=case.torch_dtype) for i in range(1, 6))
    if case.multiply:  # small integers and quarters: every product and sum is exact
        w = torch.ceil(w * 2) / 4
        n, mid, shared, dh, dn = (torch.round(x * 2) for x in (n, mid, shared, dh, dn))
        n[:, 0] = 1
    return Operands(ids, w, n, mid, shared, dh, dn)


def expert_weights(case: Case) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] of all experts."""
    if not case.multiply:
        shape = (case.num_experts, 2 * I, H), (case.num_experts, H, I)
        gate_up, down = (random(7 + i, *s, dtype=case.torch_dtype, scale=0.5) for i, s in enumerate(shape))
        return gate_up, down
    gate_up = torch.zeros(case.num_experts, 2 * H, H, dtype=case.torch_dtype)
    gate_up[:, :H, 0] = 64  # silu(64) is exactly 64 in fp32 and float64
    gate_up[:, H:] = torch.eye(H)
    index = torch.arange(case.num_experts, dtype=case.torch_dtype)
    return gate_up, index[:, None, None] * torch.eye(H, dtype=case.torch_dtype) / 64


def one_row_at_a_time(x: Tensor, matrices: Tensor, ends_E: Tensor) -> Tensor:
    """A grouped matmul whose rounding of a row depends on nothing else. BLAS picks a kernel by the number of rows."""
    experts = torch.searchsorted(ends_E, torch.arange(len(x)), right=True).tolist()
    return torch.cat([x.new_empty(0, matrices.shape[2]), *(x[r : r + 1] @ matrices[e] for r, e in enumerate(experts))])


def play(case: Case, rank: int, forward: Lane, backward: Lane) -> dict[str, Any]:
    """One layer. Tensors come back as float64 arrays, an exact copy of whatever dtype they had."""
    mine, e = operands(case, rank), case.num_experts // case.size
    gate_up, down = (make_weight("", x[rank * e : (rank + 1) * e].contiguous()) for x in expert_weights(case))
    experts = ExpertSegment(Experts(gate_up, down))
    ready: list[WeightGrad] = []
    calls: list[tuple[Any, Tensor, Tensor]] = []  # every all-to-all: group, what was sent, the buffer that receives
    plain = dist.all_to_all_single

    def recorded(output: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((kwargs["group"], sent.clone(), output))
        return plain(output, sent, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setattr(dist, "all_to_all_single", recorded)
        if case.row_by_row:
            patch.setattr(grouped, "_grouped", one_row_at_a_time)
        exchange = open_exchange(mine.ids, mine.w, case.num_experts, forward, backward, case.dedup)
        exchange.launch_counts()
        exchange.wait_counts()
        exchange.launch_dispatch(mine.n)
        received = exchange.received()
        exchange.launch_combine(experts.forward(received))
        out = exchange.combined(mine.mid, mine.shared)
        exchange.launch_combine_t(mine.dh)
        exchange.launch_dispatch_t(*experts.backward(exchange.received_t(), ready))
        dn, dw = exchange.returned_t(mine.dn_shared)
        for closure in ready:
            closure()
    assert out.dtype == dn.dtype == case.torch_dtype and dw.dtype == mine.w.dtype
    arrays = {"out": out, "dn": dn, "dw": dw, "gate_up": gate_up.main_grad, "down": down.main_grad}
    found: dict[str, Any] = {name: x.double().numpy() for name, x in arrays.items()}
    lanes = {id(forward.group): "forward", id(backward.group): "backward"}
    found["calls"] = [(lanes[id(g)], tuple(x.shape), str(x.dtype), tuple(y.shape)) for g, x, y in calls]
    found["bytes"] = sum(x.nbytes for _, x, _ in calls)
    found["meta"] = calls[0][1][: case.size].tolist() if calls else None
    found["rows_sent"] = getattr(exchange, "rows_sent", None)
    found["num_slots"] = received.num_slots
    return found


def job(place: Place, cases: list[Case], folder: Path | None, capacity: int) -> list[dict[str, Any]]:
    size = place.world_size
    peers = None, None
    with connect(place, Mesh(pp=1, dp=1, cp=1, ep=size), "cpu", DistributedSection()) as world:
        if folder is not None:
            peers = shared_peers(folder, place.rank, size, capacity, (H * 8, 16 * 12))
            world.barrier()
        lanes = Lane(world.ep_fwd_group, CPU, peers[0]), Lane(world.ep_bwd_group, CPU, peers[1])
        return [play(case, place.rank, *lanes) for case in cases]


def run(pool: Pool, *cases: Case, peers: Path | None = None, capacity: int | None = None) -> list[list[dict[str, Any]]]:
    """Per case, what each rank found. All cases have one size. `peers`: a folder for memory that the ranks share, by
    which they exchange instead of collectives; `capacity`: rows that fit, else the worst case."""
    if cases[0].size == 1:
        return [[play(case, 0, Lane(None, CPU), Lane(None, CPU))] for case in cases]
    capacity = capacity or max(sum(len(ids) for ids in case.ids) * case.k for case in cases)
    per_rank = pool.run(cases[0].size, job, list(cases), peers, capacity)
    return [list(ranks) for ranks in zip(*per_rank, strict=True)]


def random_ids(seed: int, tokens: list[int], num_experts: int, k: int) -> tuple[Ids, ...]:
    return tuple(
        tuple(tuple(row) for row in distinct_ids(seed + r, count, num_experts, k).tolist())
        for r, count in enumerate(tokens)
    )


def distinct_ranks(case: Case, rank: int) -> int:
    """How many (token, destination) pairs a rank has."""
    e = case.num_experts // case.size
    return sum(len({x // e for x in row}) for row in case.ids[rank])


def check(case: Case, found: list[dict[str, Any]], tolerance: float) -> None:
    """out, dn, dw of every rank and the experts' gradients against one dense float64 graph."""
    everyone = [operands(case, r) for r in range(case.size)]
    gate_up, down = leaves(*expert_weights(case))
    lists = [leaves(x.n, x.w) for x in everyone]
    outs = [moe(n, w, x.ids, gate_up, down) for (n, w), x in zip(lists, everyone, strict=True)]
    loss = sum(((out * x.dh.double()).sum() for out, x in zip(outs, everyone, strict=True)), torch.zeros(()).double())
    grads = gradients(loss, (gate_up, down, *(x for pair in lists for x in pair)))
    e = case.num_experts // case.size
    for r, (mine, ours) in enumerate(zip(everyone, found, strict=True)):
        expected = {
            "out": (outs[r] + mine.mid.double() + mine.shared.double()).detach(),
            "dn": grads[2 + 2 * r] + mine.dn_shared.double(),
            "dw": grads[3 + 2 * r],
            "gate_up": grads[0][r * e : (r + 1) * e],
            "down": grads[1][r * e : (r + 1) * e],
        }
        for name, value in expected.items():
            try:
                assert_near(torch.from_numpy(ours[name]), value, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name} of rank {r}: {error}") from None


RESULTS = ("out", "dn", "dw", "gate_up", "down")


def assert_same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    """Bit for bit on every rank."""
    for r, (one, other) in enumerate(zip(a, b, strict=True)):
        for name in RESULTS:
            assert np.array_equal(one[name], other[name]), f"{name} of rank {r}"


def check_calls(case: Case, found: list[dict[str, Any]]) -> None:
    """Every rank calls the seven collectives of a layer in one order, on their lanes, with the predicted rows."""
    wide = "torch.float64" if case.dtype == "float64" else "torch.float32"
    narrow, size, e = f"torch.{case.dtype}", case.size, case.num_experts // case.size
    per_row = min(case.k, e) if case.dedup else 1
    record = per_row * (3 if case.dtype == "float64" else 2)  # id and weight bits
    for r, ours in enumerate(found):
        sent = distinct_ranks(case, r) if case.dedup else len(case.ids[r]) * case.k
        slots_per_token = [sum(x // e == r for x in row) for ids in case.ids for row in ids]
        received = sum(min(slots, 1) if case.dedup else slots for slots in slots_per_token)
        assert ours["rows_sent"] == sent
        assert ours["num_slots"] == sum(slots_per_token)
        assert ours["calls"] == [
            ("forward", (size * size, 2), "torch.int32", (size * size, 2)),  # META
            ("forward", (sent, H), narrow, (received, H)),  # DISPATCH
            ("forward", (sent, record), "torch.int32", (received, record)),
            ("forward", (received, H), narrow, (sent, H)),  # COMBINE
            ("backward", (sent, H), narrow, (received, H)),  # COMBINE'
            ("backward", (received, H), narrow, (sent, H)),  # DISPATCH'
            ("backward", (received, per_row), wide, (sent, per_row)),
        ]


# ---- against the dense computation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "num_experts"),
    [([9], 4), ([9, 5], 8), ([1, 1], 2), ([7, 3, 0, 4], 8), ([4, 6, 5, 1], 4)],
    ids=["1 rank", "2 ranks", "2 ranks, e=1", "4 ranks, one idle", "4 ranks, e=1"],
)
def test_equal_to_the_dense_computation(pool: Pool, tokens: list[int], num_experts: int) -> None:
    cases = [
        Case(random_ids(10 * k, tokens, num_experts, k), num_experts, k, dedup, dtype, seed=k)
        for k in (1, 2, 4)
        if k <= num_experts
        for dtype in ("float64", "float32", "bfloat16")
        for dedup in (True, False)
    ]
    for case, found in zip(cases, run(pool, *cases), strict=True):
        check(case, found, {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2e-2}[case.dtype])
        if case.size > 1:
            check_calls(case, found)


@pytest.mark.parametrize("size", [2, 4])
def test_dedup_is_plain_bit_for_bit_and_sends_fewer_rows(pool: Pool, size: int) -> None:
    """fp32, top-2 and top-4, 40 tokens a rank: outputs, gradients of tokens, weights and experts."""
    dedup = [Case(random_ids(k, [40] * size, 8, k), 8, k, True, "float32", seed=k) for k in (2, 4)]
    plain = [replace(case, dedup=False) for case in dedup]
    found = run(pool, *dedup, *plain)
    for case, ours, theirs in zip(dedup, found[:2], found[2:], strict=True):
        assert_same(ours, theirs)
        assert all(one["out"].any() and one["dn"].any() and one["gate_up"].any() for one in ours)
        for r in range(size):
            assert ours[r]["rows_sent"] == distinct_ranks(case, r) < theirs[r]["rows_sent"] == 40 * case.k
            assert ours[r]["num_slots"] == theirs[r]["num_slots"]
        check_calls(case, ours)
        check_calls(replace(case, dedup=False), theirs)


@pytest.mark.parametrize("size", [2, 4])
def test_copies_into_the_peers_memory_are_bitwise_the_collectives(pool: Pool, tmp_path: Path, size: int) -> None:
    """Every case one after the other through the same buffers: dedup and plain, one expert a rank, all dtypes, ranks
    without tokens, tokens for one rank alone, nothing at all. Not a collective is called."""
    cases = [
        Case(random_ids(7 * k + e, [9, 5, 0, 4][:size], e * size, k), e * size, k, dedup, dtype, seed=k)
        for e, k in ((1, 1), (1, 2), (4, 3), (4, 4))
        for dtype in ("float64", "float32", "bfloat16")
        for dedup in (True, False)
    ]
    to_the_last = tuple(((2 * size - 1, 2 * size - 2),) * tokens for tokens in (3, 0, 2, 1)[:size])
    cases += [Case(to_the_last, 2 * size, 2), Case(((),) * size, 2 * size, 2)]
    for want, found in zip(run(pool, *cases), run(pool, *cases, peers=tmp_path), strict=True):
        assert_same(found, want)
        assert [ours["calls"] for ours in found] == [[]] * size
        assert [ours["rows_sent"] for ours in found] == [ours["rows_sent"] for ours in want]


@pytest.mark.slow
def test_more_rows_than_fit_are_an_error_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """Rank 1 of three would receive 5 rows, and neither it nor those who send nothing there wait for the others."""
    ids: tuple[Ids, ...] = (((2, 3), (2, 1), (3, 2)), ((0, 1), (2, 3)), ((3, 2), (4, 5)))
    case = Case(ids, 6, 2)
    assert run(pool, case, peers=tmp_path, capacity=5)
    with pytest.raises(AssertionError) as caught:
        run(pool, case, peers=tmp_path, capacity=4)
    said = "rank 1 of its expert-parallel group would receive 5 rows in one exchange and its buffers hold 4"
    assert str(caught.value).count(said) == 3


@pytest.mark.slow
def test_reruns_are_bitwise_equal(pool: Pool) -> None:
    case = Case(random_ids(3, [30, 20], 8, 4), 8, 4, True, "float32")
    first, *others = run(pool, case, case, case)
    for other in others:
        assert_same(first, other)


def test_the_local_exchange_sends_nothing(pool: Pool) -> None:
    """Expert-parallel size 1 takes neither collectives nor copies, and dedup means nothing."""
    case = Case(random_ids(0, [5], 4, 2), 4, 2, True, "float32")
    (found,), (other,) = run(pool, case, replace(case, dedup=False))
    assert found["calls"] == [] and found["num_slots"] == 10
    assert_same([found], [other])
    mine = operands(case, 0)
    exchange = open_exchange(mine.ids, mine.w, 4, Lane(None, CPU), Lane(None, CPU), dedup=True)
    assert isinstance(exchange, LocalExchange)
    exchange.launch_dispatch(mine.n)
    assert exchange.received().rows_UH is mine.n


def test_without_a_shared_expert(pool: Pool) -> None:
    mine = operands(Case(random_ids(0, [5], 4, 2), 4, 2), 0)
    exchange = LocalExchange(mine.ids, mine.w)
    exchange.launch_combine(mine.n)
    assert torch.equal(exchange.combined(mine.mid, None), mine.n + mine.mid)
    exchange.launch_dispatch_t(mine.dh, mine.w)
    dn, dw = exchange.returned_t(None)
    assert torch.equal(dn, mine.dh) and torch.equal(dw, mine.w)


# ---- host synchronisations -------------------------------------------------------------------------------------------


class HostReads(TorchFunctionMode):
    """Counts calls that would make the host wait for the device."""

    NAMES = frozenset(("tolist", "item", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "equal"))
    NAMES |= {
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "is_nonzero",
        "allclose",
        "repeat_interleave",
        "bincount",
    }

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        parts = index if isinstance(index, tuple) else (index,)
        if name in self.NAMES or any(isinstance(p, Tensor) and p.dtype == torch.bool for p in parts):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def host_read_job(place: Place, case: Case) -> dict[str, list[str]]:
    """Host reads of each call of an exchange, and of the slot order of its destination."""
    seen: dict[str, list[str]] = {}

    def counted(name: str, call: Any) -> Any:
        with HostReads() as reads:
            result = call()
        seen[name] = reads.seen
        return result

    mine = operands(case, place.rank)
    e = case.num_experts // case.size
    with connect(place, Mesh(pp=1, dp=1, cp=1, ep=case.size), "cpu", DistributedSection()) as world:
        lanes = Lane(world.ep_fwd_group, CPU), Lane(world.ep_bwd_group, CPU)
        x = counted("make", lambda: Exchange(mine.ids, mine.w, e, *lanes, case.dedup))
        counted("launch_counts", x.launch_counts)
        counted("wait_counts", x.wait_counts)
        counted("launch_dispatch", lambda: x.launch_dispatch(mine.n))
        received = counted("received", x.received)
        counted("launch_combine", lambda: x.launch_combine(received.rows_UH))
        counted("combined", lambda: x.combined(mine.mid, mine.shared))
        counted("launch_combine_t", lambda: x.launch_combine_t(mine.dh))
        rows = counted("received_t", x.received_t)
        counted("launch_dispatch_t", lambda: x.launch_dispatch_t(rows, received.weights_Uq))
        counted("returned_t", lambda: x.returned_t(mine.dn_shared))
    return seen


@pytest.mark.parametrize("dedup", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_call_of_a_layer_reads_the_device(pool: Pool, dedup: bool) -> None:
    """All host reads are of the counts, in wait_counts, after its one event."""
    for seen in pool.run(2, host_read_job, Case(random_ids(0, [6, 5], 8, 4), 8, 4, dedup)):
        assert seen.pop("wait_counts") == ["numpy"]  # of one small tensor in host memory
        assert not any(seen.values()), seen


# ---- the casebook ----------------------------------------------------------------------------------------------------


def test_case_065_the_same_expert_in_two_slots(pool: Pool) -> None:
    """ids [3, 3]: the token gets expert 3 times the sum of both weights, and both weights get their gradient. (Our
    router never repeats an id: test_router.)"""
    for size in (1, 2):
        for dedup in (True, False):
            ids = (((3, 3),), *[((0, 1),)] * (size - 1))
            case = Case(ids, 4, 2, dedup, "float32", multiply=True)
            ((found, *_),) = run(pool, case)
            mine = operands(case, 0)
            once = (3 * mine.w.sum() * mine.n + mine.mid + mine.shared).double().numpy()
            assert np.allclose(found["out"], once, rtol=1e-6)
            slope = (3 * mine.n * mine.dh).sum().item()
            assert found["dw"].tolist() == [[slope, slope]]


def test_case_068_a_rank_that_receives_nothing_and_one_that_sends_nothing(pool: Pool) -> None:
    """Nobody wants rank 1's experts; and rank 0 has no tokens. All collectives run both ways."""
    cases = []
    for dedup in (True, False):
        only_rank_0 = (((0, 1), (1, 0), (0, 1)), ((1, 0), (0, 1)))
        cases.append(Case(only_rank_0, 4, 2, dedup))
        cases.append(Case(((), ((3, 0), (2, 3))), 4, 2, dedup))
        cases.append(Case(((), ((3, 2), (2, 3))), 4, 2, dedup))  # rank 0 neither sends nor receives
    for case, found in zip(cases, run(pool, *cases), strict=True):
        check(case, found, 1e-13)
        check_calls(case, found)
    idle = run(pool, cases[0])[0][1]
    assert idle["num_slots"] == 0 and not idle["gate_up"].any() and not idle["down"].any()


@pytest.mark.slow
def test_case_072_zero_tokens(pool: Pool) -> None:
    """All-zero splits both ways, one-sided zero, three ranks with one idle: results, and zeros of the right shape."""
    for dedup in (True, False):
        nothing = Case(((), ()), 4, 2, dedup)
        one_sided = Case((((2, 3), (3, 2)), ()), 4, 2, dedup)  # rank 0 sends only, rank 1 receives only
        for case, found in zip((nothing, one_sided), run(pool, nothing, one_sided), strict=True):
            check(case, found, 1e-13)
            check_calls(case, found)
        for ours in run(pool, nothing)[0]:
            assert ours["out"].shape == ours["dn"].shape == (0, H) and ours["dw"].shape == (0, 2)
            assert ours["gate_up"].shape == (2, 2 * I, H) and not ours["gate_up"].any() and not ours["down"].any()
        three = Case((((0, 5), (1, 4)), (), ((4, 5),)), 6, 2, dedup)  # rank 1 sends nothing and receives nothing
        (found,) = run(pool, three)
        check(three, found, 1e-13)
        check_calls(three, found)
        idle = found[1]
        assert idle["rows_sent"] == idle["num_slots"] == 0
        assert idle["gate_up"].shape == (2, 2 * I, H) and not idle["gate_up"].any() and not idle["down"].any()


def test_case_076_weights_meet_their_experts(pool: Pool) -> None:
    """Expert x multiplies by x: out = sum over slots of w * x * n, by hand and exactly."""
    for dtype in ("float32", "float64"):
        for dedup in (True, False):
            case = Case(random_ids(5, [12, 9], 8, 3), 8, 3, dedup, dtype, multiply=True)
            (found,) = run(pool, case)
            for r in range(2):
                mine = operands(case, r)
                factor = (mine.w * mine.ids).double().sum(1, keepdim=True)
                routed = factor * mine.n.double()
                expected = (routed.to(case.torch_dtype) + mine.mid + mine.shared).double()
                assert np.array_equal(found[r]["out"], expected.numpy())
                slope = (mine.n.double() * mine.dh.double()).sum(1, keepdim=True) * mine.ids
                assert np.array_equal(found[r]["dw"], slope.numpy())
                dn = (factor * mine.dh.double()).to(case.torch_dtype) + mine.dn_shared
                assert np.array_equal(found[r]["dn"][:, 1:], dn.double().numpy()[:, 1:])  # 0 also drives the gates


def test_case_077_zero_to_four_experts_on_the_peer(pool: Pool) -> None:
    """k = 4, tokens with 0, 1, 2, 4 experts on the peer: dedup on and off agree, in fewer bytes; counts are pairs."""
    tokens = ((0, 1, 2, 3), (0, 6, 2, 3), (7, 1, 4, 0), (5, 4, 7, 6))
    mirrored = tuple(tuple((x + 4) % 8 for x in row) for row in tokens)
    dedup = Case((tokens, mirrored), 8, 4, True, "float32")
    plain = replace(dedup, dedup=False)
    ours, theirs = run(pool, dedup, plain)
    check(dedup, ours, 2e-6)
    assert_same(ours, theirs)
    for r in range(2):
        assert ours[r]["bytes"] < theirs[r]["bytes"]
        assert [ours[r]["rows_sent"], theirs[r]["rows_sent"]] == [6, 16]
        pairs_to = (9, 7) if r == 0 else (7, 9)
        assert ours[r]["meta"] == [[3, pairs] for pairs in pairs_to]
        assert theirs[r]["meta"] == [[pairs, pairs] for pairs in pairs_to]
        assert ours[r]["num_slots"] == theirs[r]["num_slots"] == 16


@pytest.mark.parametrize("dedup", [True, False])
def test_case_078_what_another_rank_processes_does_not_matter(pool: Pool, dedup: bool) -> None:
    """Rank 0 is fixed; rank 1 first X, then Y (other tokens, and another number of them). The exchange is bitwise
    indifferent; a matmul's rounding depends on its number of rows, so with BLAS rank 0 is equal to 1e-6 only."""
    fixed = random_ids(1, [20], 8, 2)[0]
    others = [random_ids(50 + i, [count], 8, 2)[0] for i, count in enumerate((20, 31, 0, 20))]
    blas = [Case((fixed, ids), 8, 2, dedup, "float32", other_seed=5 + i) for i, ids in enumerate(others)]
    found = [ranks[0] for ranks in run(pool, *(replace(case, row_by_row=True) for case in blas), *blas)]
    for name in ("out", "dn", "dw"):
        for same in found[1 : len(blas)]:
            assert np.array_equal(same[name], found[0][name]), name
        for near in found[len(blas) :]:
            assert np.allclose(near[name], found[0][name], rtol=1e-6, atol=1e-6), name
