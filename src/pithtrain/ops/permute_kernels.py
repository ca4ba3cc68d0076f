"""The Triton kernels of `permute`'s index arithmetic: two counting sorts of three launches each.

Both sort by a small key, a rank or an expert, and keep the order of what is equal:

    count   each program its block of entries, by key             counts [keys, blocks]
    scan    along the blocks of a key                             what the blocks before hold
    place   keys before + blocks before + entries before in the block

Integers alone, no atomics: exactly what the twins in `permute` give, in any compute dtype.

Legend: T tokens, K experts per token, G ranks, U rows, q slots of a row, R slots, N entries, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pithtrain.ops.permute import Rows, Slots, record_slots

constexpr = tl.constexpr

TOKENS, ENTRIES = 128, 128  # of a program
SCANNED = 512  # counts at a time


@triton.jit(do_not_specialize=["blocks"])  # a number that changes with the routing compiles nothing again
def _scan(counts, totals, blocks, BLOCK: constexpr):
    key = tl.program_id(0)
    before = tl.zeros((), tl.int32)
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        count = tl.load(counts + key * blocks + at, mask=at < blocks, other=0)
        tl.store(counts + key * blocks + at, before + tl.cumsum(count, 0) - count, mask=at < blocks)
        before += tl.sum(count, 0)
    tl.store(totals + key, before)


# ---- the rows that a rank sends --------------------------------------------------------------------------------------


@triton.jit
def _ranks(ids, t, T, K: constexpr, KP: constexpr, EACH: constexpr):
    """Expert ids of a block of tokens, and the ranks that own them; -1 beyond."""
    k = tl.arange(0, KP)
    there = (t[:, None] < T) & (k[None, :] < K)
    id = tl.load(ids + t.to(tl.int64)[:, None] * K + k[None, :], mask=there, other=-1)
    return id, tl.where(there, id // EACH, -1), there


@triton.jit
def _count_rows(
    ids, counts, T, G, blocks, K: constexpr, KP: constexpr, EACH: constexpr, DEDUP: constexpr, B: constexpr
):
    block = tl.program_id(0)
    t = block * B + tl.arange(0, B)
    _, rank, _ = _ranks(ids, t, T, K, KP, EACH)
    for g in range(G):
        slots = tl.sum((rank == g).to(tl.int32), 1)
        rows = tl.minimum(slots, 1) if DEDUP else slots
        tl.store(counts + g * blocks + block, tl.sum(rows, 0))
        tl.store(counts + (G + g) * blocks + block, tl.sum(slots, 0))


@triton.jit
def _place_rows(
    ids,
    weights,
    counts,
    totals,
    row_TK,
    col_TK,
    token,
    row_TGC,
    records,
    counts_G2,
    T,
    G,
    blocks,
    K: constexpr,
    KP: constexpr,
    EACH: constexpr,
    DEDUP: constexpr,
    C: constexpr,
    Q: constexpr,
    QP: constexpr,
    B: constexpr,
):
    block = tl.program_id(0)
    t = block * B + tl.arange(0, B)
    t64 = t.to(tl.int64)
    here = t < T
    id, rank, there = _ranks(ids, t, T, K, KP, EACH)
    k, q = tl.arange(0, KP), tl.arange(0, QP)
    row, col = tl.zeros([B, KP], tl.int64), tl.zeros([B, KP], tl.int64)
    before = tl.zeros((), tl.int64)  # rows for the ranks before g
    for g in range(G):
        mine = (rank == g).to(tl.int32)
        slots = tl.sum(mine, 1)
        nth = tl.cumsum(mine, 1) - mine
        rows = tl.minimum(slots, 1) if DEDUP else slots
        first = before + tl.load(counts + g * blocks + block) + tl.cumsum(rows, 0) - rows
        for c in tl.static_range(C):
            sent = here & (c < rows)
            tl.store(row_TGC + (t64 * G + g) * C + c, tl.where(sent, first + c, -1), mask=here)
            tl.store(token + first + c, t64, mask=sent)
        if DEDUP:  # what no slot of a row fills: id -1, and a weight that nobody reads but that is defined
            empty = (here & (rows > 0))[:, None] & (q[None, :] >= slots[:, None]) & (q[None, :] < Q)
            at = records + first[:, None] * (2 * Q) + q[None, :]
            tl.store(at, tl.full([B, QP], -1, tl.int32), mask=empty)
            tl.store(at + Q, tl.zeros([B, QP], tl.int32), mask=empty)
        row = tl.where(rank == g, first[:, None] + (0 if DEDUP else nth), row)
        col = tl.where(rank == g, nth if DEDUP else 0, col)
        total = tl.load(totals + g)
        before += total
        if block == 0:
            tl.store(counts_G2 + 2 * g, total)
            tl.store(counts_G2 + 2 * g + 1, tl.load(totals + G + g))
    place = t64[:, None] * K + k[None, :]
    tl.store(row_TK + place, row, mask=there)
    tl.store(col_TK + place, col, mask=there)
    w = tl.load(weights + place, mask=there, other=0.0).to(tl.int32, bitcast=True)
    fits = there & (col < Q)  # ids are distinct; if they were not, this would write over the next row
    tl.store(records + row * (2 * Q) + col, (id % EACH).to(tl.int32), mask=fits)
    tl.store(records + row * (2 * Q) + Q + col, w, mask=fits)


def plan_rows(ids_TK: Tensor, w_TK: Tensor, num_ranks: int, experts_per_rank: int, dedup: bool) -> Rows:
    """`permute.plain_plan_rows` of fp32 weights."""
    ids_TK, w_TK = ids_TK.contiguous(), w_TK.contiguous()
    tokens, k = ids_TK.shape
    per_row, copies = record_slots(k, experts_per_rank, dedup), 1 if dedup else min(k, experts_per_rank)
    max_rows = tokens * (min(k, num_ranks) if dedup else k)
    blocks = max(triton.cdiv(tokens, TOKENS), 1)
    row_TK, col_TK = torch.empty_like(ids_TK), torch.empty_like(ids_TK)
    token_U, row_TGC = ids_TK.new_empty(max_rows), ids_TK.new_empty(tokens, num_ranks, copies)
    records_Ur = ids_TK.new_empty(max_rows, 2 * per_row, dtype=torch.int32)
    counts_G2 = ids_TK.new_empty(num_ranks, 2, dtype=torch.int32)
    counts = ids_TK.new_empty(2 * num_ranks, blocks, dtype=torch.int32)
    totals = ids_TK.new_empty(2 * num_ranks, dtype=torch.int32)
    sizes = k, triton.next_power_of_2(k), experts_per_rank, dedup
    _count_rows[(blocks,)](ids_TK, counts, tokens, num_ranks, blocks, *sizes, TOKENS)
    _scan[(2 * num_ranks,)](counts, totals, blocks, SCANNED)
    _place_rows[(blocks,)](
        *(ids_TK, w_TK, counts, totals, row_TK, col_TK, token_U, row_TGC, records_Ur, counts_G2),
        *(tokens, num_ranks, blocks, *sizes, copies, per_row, triton.next_power_of_2(per_row), TOKENS),
    )
    return Rows(row_TK, col_TK, token_U, row_TGC, records_Ur, counts_G2)


# ---- the slots of a rank's rows --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N", "blocks"])
def _count_slots(local, counts, stride, N, blocks, Q: constexpr, E: constexpr, EP: constexpr, B: constexpr):
    block = tl.program_id(0)
    n = block * B + tl.arange(0, B)
    key = tl.load(local + (n // Q).to(tl.int64) * stride + n % Q, mask=n < N, other=-1).to(tl.int32)
    e = tl.arange(0, EP)
    tl.store(counts + e * blocks + block, tl.sum((key[:, None] == e[None, :]).to(tl.int32), 0), mask=e < E)


# an empty tensor begins at 0, which divides by 16, where the weights of records may not
@triton.jit(do_not_specialize=["N", "blocks"], do_not_specialize_on_alignment=["weights"])
def _place_slots(
    local,
    weights,
    counts,
    totals,
    row_R,
    expert_R,
    weight_R,
    record_R,
    slot,
    ends,
    stride,
    N,
    blocks,
    Q: constexpr,
    E: constexpr,
    EP: constexpr,
    B: constexpr,
):
    block = tl.program_id(0)
    n = block * B + tl.arange(0, B)
    row, col = (n // Q).to(tl.int64), n % Q
    key = tl.load(local + row * stride + col, mask=n < N, other=-1).to(tl.int32)
    e = tl.arange(0, EP)
    total = tl.load(totals + e, mask=e < E, other=0)
    if block == 0:
        tl.store(ends + e, tl.cumsum(total, 0), mask=e < E)
    before = tl.sum(tl.where(e[None, :] < key[:, None], total[None, :], 0), 1)
    before += tl.load(counts + key * blocks + block, mask=key >= 0, other=0)
    earlier = (key[None, :] == key[:, None]) & (n[None, :] < n[:, None])
    place = (before + tl.sum(earlier.to(tl.int32), 1)).to(tl.int64)
    real = key >= 0
    tl.store(slot + n, tl.where(real, place, -1), mask=n < N)
    tl.store(row_R + place, row, mask=real)
    tl.store(expert_R + place, key.to(tl.int64), mask=real)
    tl.store(record_R + place, n.to(tl.int64), mask=real)
    tl.store(weight_R + place, tl.load(weights + row * stride + col, mask=real), mask=real)


def order_slots(local_Uq: Tensor, weights_Uq: Tensor, num_experts: int, num_slots: int) -> Slots:
    """`permute.plain_order_slots`. Ids and weights that lie alike, two parts of the same records, are read in place."""
    rows, per_row = local_Uq.shape
    entries = rows * per_row
    blocks = max(triton.cdiv(entries, ENTRIES), 1)
    # one by one: parts of one block would begin where no 16 bytes do, and compile the kernel again
    row_R, expert_R, record_R = (local_Uq.new_empty(num_slots, dtype=torch.int64) for _ in range(3))
    weight_R = weights_Uq.new_empty(num_slots)
    slot_U1q = local_Uq.new_empty(rows, 1, per_row, dtype=torch.int64)
    counts = local_Uq.new_empty(num_experts, blocks, dtype=torch.int32)
    totals, ends_E = (local_Uq.new_empty(num_experts, dtype=torch.int32) for _ in range(2))
    sizes = per_row, num_experts, triton.next_power_of_2(num_experts), ENTRIES
    if local_Uq.stride() != weights_Uq.stride() or local_Uq.stride(1) != 1:
        local_Uq, weights_Uq = local_Uq.contiguous(), weights_Uq.contiguous()
    assert entries < 2**31 - ENTRIES, f"{entries} slots of one exchange do not fit a 32-bit index"
    _count_slots[(blocks,)](local_Uq, counts, local_Uq.stride(0), entries, blocks, *sizes)
    _scan[(num_experts,)](counts, totals, blocks, SCANNED)
    _place_slots[(blocks,)](
        *(local_Uq, weights_Uq, counts, totals, row_R, expert_R, weight_R, record_R, slot_U1q, ends_E),
        *(local_Uq.stride(0), entries, blocks, *sizes),
    )
    return Slots(row_R, expert_R, weight_R, record_R, slot_U1q, ends_E)
