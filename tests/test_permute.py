"""Index arithmetic of the exchange against loops over tokens and slots."""

import math

import pytest
import torch
from torch import Tensor

from pithtrain.ops import permute
from pithtrain.ops.permute import Rows, Slots, ordered_sum, unpack
from reference import distinct_ids, poisoned_memory, random


def plan_rows(ids_TK: Tensor, num_ranks: int, experts_per_rank: int, dedup: bool) -> Rows:
    return permute.plan_rows(ids_TK, torch.ones(ids_TK.shape, device=ids_TK.device), num_ranks, experts_per_rank, dedup)


def local_of(rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
    return unpack(rows.records_Ur, dtype)[0]


def order_slots(local_Uq: Tensor, num_experts: int, num_slots: int) -> Slots:
    return permute.order_slots(local_Uq, torch.ones(local_Uq.shape, device=local_Uq.device), num_experts, num_slots)


Record = tuple[int, list[tuple[int, int]]]  # (token, [(local expert, slot of the token)])


def rows_by_loops(ids_TK: Tensor, num_ranks: int, experts_per_rank: int, dedup: bool) -> list[list[Record]]:
    """What goes to each rank, in order."""
    sent: list[list[Record]] = [[] for _ in range(num_ranks)]
    for g in range(num_ranks):
        for t, ids in enumerate(ids_TK.tolist()):
            here = [(x % experts_per_rank, j) for j, x in enumerate(ids) if x // experts_per_rank == g]
            if dedup and here:
                sent[g].append((t, here))
            elif not dedup:
                sent[g].extend((t, [slot]) for slot in here)
    return sent


def check_rows(rows: Rows, ids_TK: Tensor, num_ranks: int, experts_per_rank: int, dedup: bool) -> None:
    expected = rows_by_loops(ids_TK, num_ranks, experts_per_rank, dedup)
    counts = [[len(per_rank), sum(len(slots) for _, slots in per_rank)] for per_rank in expected]
    assert rows.counts_G2.tolist() == counts
    flat = [record for per_rank in expected for record in per_rank]
    assert rows.token_U[: len(flat)].tolist() == [token for token, _ in flat]
    local_Uq, weights_Uq = unpack(rows.records_Ur, torch.float32)
    width = local_Uq.shape[1]
    assert width == (min(ids_TK.shape[1], experts_per_rank) if dedup else 1)
    padded = [[local for local, _ in slots] + [-1] * (width - len(slots)) for _, slots in flat]
    assert local_Uq[: len(flat)].tolist() == padded
    assert torch.equal(weights_Uq[: len(flat)], (local_Uq[: len(flat)] >= 0).float())
    where = {(t, j): (u, c) for u, (t, slots) in enumerate(flat) for c, (_, j) in enumerate(slots)}
    for t in range(ids_TK.shape[0]):
        for j in range(ids_TK.shape[1]):
            assert (rows.row_TK[t, j].item(), rows.col_TK[t, j].item()) == where[t, j]
    base = 0
    for g, per_rank in enumerate(expected):
        mine: dict[int, list[int]] = {}
        for u, (t, _) in enumerate(per_rank):
            mine.setdefault(t, []).append(base + u)
        base += len(per_rank)
        for t in range(ids_TK.shape[0]):
            assert [u for u in rows.row_TGC[t, g].tolist() if u >= 0] == mine.get(t, [])


def test_the_worked_example() -> None:
    ids = torch.tensor([[0, 1], [3, 0], [2, 3]])
    dedup, plain = plan_rows(ids, 2, 2, True), plan_rows(ids, 2, 2, False)
    assert dedup.token_U[:4].tolist() == [0, 1, 1, 2] and dedup.counts_G2.tolist() == [[2, 3], [2, 3]]
    assert plain.token_U.tolist() == [0, 0, 1, 1, 2, 2] and plain.counts_G2.tolist() == [[3, 3], [3, 3]]
    assert local_of(dedup)[:4].tolist() == [[0, 1], [0, -1], [1, -1], [0, 1]]


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize(
    ("num_ranks", "experts_per_rank", "k"),
    [
        (1, 8, 1),
        (1, 16, 16),
        (2, 1, 1),
        (2, 1, 2),
        (2, 8, 4),
        (2, 8, 16),  # every token visits every expert
        (4, 1, 4),
        (4, 2, 8),
        (4, 16, 16),
        (40, 1, 1),
        (40, 1, 16),
        (40, 3, 16),
    ],
)
def test_plan_equals_loops(num_ranks: int, experts_per_rank: int, k: int, dedup: bool) -> None:
    for tokens in (1, 2, 17):
        ids = distinct_ids(tokens, tokens, num_ranks * experts_per_rank, k)
        with poisoned_memory():
            check_rows(plan_rows(ids, num_ranks, experts_per_rank, dedup), ids, num_ranks, experts_per_rank, dedup)


@pytest.mark.parametrize("dedup", [True, False])
def test_all_tokens_to_one_rank_and_none_to_another(dedup: bool) -> None:
    for target in range(4):
        ids = distinct_ids(target, 9, 6, 3) + 6 * target
        rows = plan_rows(ids, 4, 6, dedup)
        check_rows(rows, ids, 4, 6, dedup)
        assert [count > 0 for count in rows.counts_G2[:, 0].tolist()] == [g == target for g in range(4)]
    ids = distinct_ids(5, 9, 18, 4)
    ids = torch.where(ids < 6, ids, ids + 6)  # ranks 0, 2, 3: none to rank 1
    rows = plan_rows(ids, 4, 6, dedup)
    check_rows(rows, ids, 4, 6, dedup)
    assert rows.counts_G2[1].tolist() == [0, 0]


@pytest.mark.parametrize("dedup", [True, False])
def test_no_tokens(dedup: bool) -> None:
    rows = plan_rows(torch.zeros(0, 4, dtype=torch.int64), 4, 2, dedup)
    assert rows.counts_G2.tolist() == [[0, 0]] * 4
    assert rows.token_U.shape == (0,) and local_of(rows).shape == (0, 2 if dedup else 1)


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize(("num_ranks", "experts_per_rank", "k"), [(2, 4, 3), (4, 2, 4), (40, 2, 16)])
def test_the_multiset_of_token_expert_weight_is_kept(
    num_ranks: int, experts_per_rank: int, k: int, dedup: bool
) -> None:
    """From the source's ids through the records to each destination's slots in expert order."""
    ids, weights = distinct_ids(3, 11, num_ranks * experts_per_rank, k), random(4, 11, k)
    rows = permute.plan_rows(ids, weights, num_ranks, experts_per_rank, dedup)
    local_Uq, w_Uq = unpack(rows.records_Ur, weights.dtype)
    arrived = []
    first = 0
    for g, (count, num_slots) in enumerate(rows.counts_G2.tolist()):
        part = slice(first, first + count)
        first += count
        slots = permute.order_slots(local_Uq[part], w_Uq[part], experts_per_rank, num_slots)
        experts = torch.repeat_interleave(
            torch.arange(experts_per_rank), slots.ends_E.long().diff(prepend=torch.zeros(1, dtype=torch.int64))
        )
        tokens, w_R = rows.token_U[part][slots.row_R], slots.weight_R
        assert local_Uq[part].flatten()[slots.record_R].tolist() == experts.tolist()
        arrived += zip(tokens.tolist(), (experts + g * experts_per_rank).tolist(), w_R.tolist(), strict=True)
    sent = [(t, ids[t, j].item(), weights[t, j].item()) for t in range(11) for j in range(k)]
    assert sorted(arrived) == sorted(sent)


@pytest.mark.parametrize(
    ("num_experts", "k", "num_ranks", "mean"),
    # the means of the table in ENGINE.md section 5, and two extremes
    [(128, 8, 4, 3.63), (128, 8, 8, 5.34), (64, 6, 16, 5.32), (32, 4, 8, 3.45), (40, 16, 40, 16.0), (16, 3, 1, 1.0)],
)
def test_rows_are_distinct_token_rank_pairs(num_experts: int, k: int, num_ranks: int, mean: float) -> None:
    tokens, e = 3000, num_experts // num_ranks
    ids = distinct_ids(num_ranks, tokens, num_experts, k)
    visited = torch.tensor([len({x // e for x in row}) for row in ids.tolist()], dtype=torch.float64)
    dedup, plain = plan_rows(ids, num_ranks, e, True).counts_G2, plan_rows(ids, num_ranks, e, False).counts_G2
    assert dedup[:, 0].sum() == visited.sum()
    assert plain[:, 0].sum() == tokens * k
    assert torch.equal(dedup[:, 1], plain[:, 0]) and torch.equal(plain[:, 0], plain[:, 1])
    formula = num_ranks * (1 - math.comb(num_experts - e, k) / math.comb(num_experts, k))
    assert formula == pytest.approx(mean, abs=0.01)
    sigma = visited.std().item() / math.sqrt(tokens)
    assert abs(visited.mean().item() - formula) <= 4 * sigma


@pytest.mark.parametrize(
    "local",
    [
        [[1, 0], [0, -1], [1, 2]],
        [[2, -1], [2, -1], [2, -1]],  # all on one expert
        [[-1, -1], [0, 3], [-1, -1]],  # rows without a slot
        [[3]],
        [],
    ],
)
def test_slots_are_in_expert_order_and_stable(local: list[list[int]]) -> None:
    local_Uq = torch.tensor(local, dtype=torch.int64).reshape(len(local), -1 if local else 2)
    width = local_Uq.shape[1]
    expected = sorted((x, u, c) for u, row in enumerate(local) for c, x in enumerate(row) if x >= 0)
    with poisoned_memory():
        slots = order_slots(local_Uq, 4, len(expected))
    assert slots.row_R.tolist() == [u for _, u, _ in expected]
    assert slots.record_R.tolist() == [u * width + c for _, u, c in expected]
    assert slots.ends_E.dtype == torch.int32  # what grouped_mm takes
    assert slots.ends_E.tolist() == [sum(x <= e for x, _, _ in expected) for e in range(4)]
    place = {(u, c): r for r, (_, u, c) in enumerate(expected)}
    assert slots.slot_U1q.tolist() == [[[place.get((u, c), -1) for c in range(width)]] for u in range(len(local))]


def test_the_ordered_sum_goes_left_to_right() -> None:
    values = torch.tensor([[1e8], [1.0], [-1e8], [float("nan")]])
    index = torch.tensor([[[0, 1, 2]], [[0, 2, 1]], [[1, -1, -1]], [[-1, -1, -1]]])
    assert ordered_sum(values, index).flatten().tolist() == [0.0, 1.0, 1.0, 0.0]
    assert ordered_sum(values.double(), index).flatten().tolist() == [1.0, 1.0, 1.0, 0.0]


def test_the_ordered_sum_adds_within_a_group_first_and_what_comes_on_top_last() -> None:
    values = torch.tensor([[1e8], [1.0], [-1e8]])
    index = torch.tensor([[[0, 1], [2, -1]], [[0, 2], [1, -1]], [[1, -1], [0, 2]]])
    assert ordered_sum(values, index).flatten().tolist() == [0.0, 1.0, 1.0]
    plus = [torch.tensor([[-1e8], [1e8], [1.0]]), torch.tensor([[1.0], [-1e8], [3.0]])]
    assert ordered_sum(values, index, plus=plus).flatten().tolist() == [-1e8, 0.0, 5.0]


def test_an_absent_row_is_selected_away_not_multiplied() -> None:
    """-1 reads row 0 and drops it: a NaN or Inf there must not come through."""
    values = torch.tensor([[float("nan"), float("inf")], [1.0, 2.0]])
    assert ordered_sum(values, torch.tensor([[[-1, 1]], [[1, -1]]])).tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert ordered_sum(values[:0], torch.tensor([[[-1, -1]]])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("experts", [127, 128, 300])
def test_slots_of_more_experts_than_a_byte_counts(experts: int) -> None:
    local_Uq = torch.arange(experts).flip(0)[:, None].repeat(1, 2)
    local_Uq[:, 1] = -1
    slots = order_slots(local_Uq, experts, experts)
    assert slots.expert_R.tolist() == [*range(experts)] and slots.ends_E.tolist() == [*range(1, experts + 1)]
    with pytest.raises(AssertionError, match="16 bits"):
        order_slots(local_Uq, 2**15, experts)


@pytest.mark.parametrize("dedup", [True, False])
def test_no_index_work_reads_the_device(dedup: bool) -> None:
    """A meta tensor has no values: any host read of one raises."""
    ids = torch.empty(5, 4, dtype=torch.int64, device="meta")
    rows = plan_rows(ids, 4, 2, dedup)
    slots = order_slots(local_of(rows), 2, 7)
    total = ordered_sum(torch.empty(7, 3, device="meta"), slots.slot_U1q)
    assert total.is_meta and total.shape == (len(local_of(rows)), 3)
