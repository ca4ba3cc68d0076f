"""Index arithmetic of the expert exchange: no atomics, no host synchronisation.

Two index sets, built from expert ids alone:

*Rows, on the source* (`plan_rows`). Slot (t, j) is token t's j-th expert. With `dedup`, a token goes once to each rank
that owns any of its experts; with plain dispatch once per slot. Rows are ordered by destination, then token, then slot.
Worked example, 2 ranks x 2 experts, ids = [[0, 1], [3, 0], [2, 3]]:

    dedup:  rank 0 gets tokens 0, 1; rank 1 gets tokens 1, 2            4 rows
    plain:  rank 0 gets tokens 0, 0, 1; rank 1 gets tokens 1, 2, 2      6 rows

*Slots, on the destination* (`order_slots`). The slots of the received rows, sorted by local expert, ties by (row,
slot): a stable counting sort, so that a grouped GEMM reads each expert's rows as one block.

On CUDA each is three kernels (`permute_kernels`): a lone forward waits for the host to launch them (on an H200 12 to 22
and 5 to 7 times as fast as the twins). Integers are equal however they are made, so they serve every compute dtype.

Sums over slots and over ranks run in a fixed order in fp32 (`ordered_sum`): for each destination rank its slots in
top-k order, then over ranks. Plain and dedup sum in the same order, and are bitwise equal in fp32.

Legend: T tokens, K experts per token, G ranks, U rows, R slots, q slots a row can carry, C copies per (token, rank).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pithtrain.ops.linear import accumulate_dtype, has_kernel


@dataclass(frozen=True)
class Rows:
    """The rows that a rank sends, before their number is known on the host.

    row_TK, col_TK: where slot (t, j) travels: its row, and its column in that row's record. token_U: the token of a
    row. row_TGC: the rows of token t at rank g, -1 where there is none. records_Ur: int32, what goes with a row: the
    local expert ids of its slots in top-k order, -1 padded, and the bits of their routing weights (`unpack`).
    counts_G2: int32 (rows, slots) per destination. Rows beyond the real count are unspecified.
    """

    row_TK: Tensor
    col_TK: Tensor
    token_U: Tensor
    row_TGC: Tensor
    records_Ur: Tensor
    counts_G2: Tensor


def record_slots(k: int, experts_per_rank: int, dedup: bool) -> int:
    """q, for how many slots a row has room."""
    return min(k, experts_per_rank) if dedup else 1


def plan_rows(ids_TK: Tensor, w_TK: Tensor, num_ranks: int, experts_per_rank: int, dedup: bool) -> Rows:
    """Plan what is sent. ids_TK int64, distinct within a token; expert x lives on rank x // experts_per_rank. w_TK: the
    routing weights, fp32 (float64 on a CPU)."""
    if ids_TK.is_cuda:
        from pithtrain.ops import permute_kernels

        return permute_kernels.plan_rows(ids_TK, w_TK, num_ranks, experts_per_rank, dedup)
    return plain_plan_rows(ids_TK, w_TK, num_ranks, experts_per_rank, dedup)


def plain_plan_rows(ids_TK: Tensor, w_TK: Tensor, num_ranks: int, experts_per_rank: int, dedup: bool) -> Rows:
    """The twin."""
    tokens, k = ids_TK.shape
    device = ids_TK.device
    per_row = record_slots(k, experts_per_rank, dedup)
    copies = 1 if dedup else min(k, experts_per_rank)
    max_rows = tokens * (min(k, num_ranks) if dedup else k)

    rank_TK = ids_TK // experts_per_rank
    same = rank_TK[:, :, None] == rank_TK[:, None, :]
    nth_TK = torch.tril(same, -1).sum(-1)  # how many earlier slots of this token go to the same rank
    slots_TG = (rank_TK[:, :, None] == torch.arange(num_ranks, device=device)).sum(1)
    rows_TG = slots_TG.clamp(max=1) if dedup else slots_TG
    flat = rows_TG.t().reshape(-1)  # destination-major
    first_TG = (flat.cumsum(0) - flat).view(num_ranks, tokens).t()

    row_TK = first_TG.gather(1, rank_TK) + (0 if dedup else nth_TK)
    col_TK = nth_TK if dedup else torch.zeros_like(nth_TK)
    token_U = torch.zeros(max_rows, dtype=torch.int64, device=device)
    token_U[row_TK] = torch.arange(tokens, device=device)[:, None].expand(tokens, k)
    local_Uq = torch.full((max_rows, per_row), -1, dtype=torch.int32, device=device)
    local_Uq[row_TK, col_TK] = (ids_TK % experts_per_rank).to(torch.int32)
    weights_Uq = w_TK.new_zeros(max_rows, per_row)
    weights_Uq[row_TK, col_TK] = w_TK
    records_Ur = torch.cat((local_Uq, weights_Uq.view(torch.int32)), dim=1)
    copy = torch.arange(copies, device=device)
    row_TGC = torch.where(copy < rows_TG[:, :, None], first_TG[:, :, None] + copy, -1)
    counts_G2 = torch.stack((rows_TG.sum(0), slots_TG.sum(0)), dim=1).to(torch.int32)
    return Rows(row_TK, col_TK, token_U, row_TGC, records_Ur, counts_G2)


def unpack(records_Ur: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """-> local expert ids int32 [U, q], -1 for padding, and weights [U, q] of `dtype`: views (float64: copies)."""
    per_row = records_Ur.shape[1] // (1 + dtype.itemsize // 4)
    local_Uq, bits = records_Ur[:, :per_row], records_Ur[:, per_row:]
    # a copy, not `contiguous`: one row's slice counts as contiguous and cannot be viewed as 8-byte floats
    return local_Uq, (bits if dtype.itemsize == 4 else bits.clone(memory_format=torch.contiguous_format)).view(dtype)


@dataclass(frozen=True)
class Slots:
    """The slots of a rank's rows in expert order.

    row_R, expert_R, weight_R: the row, the local expert and the routing weight of each slot. record_R: its flat place
    in the [U, q] records. slot_U1q: the inverse, -1 where a record is padding, as `ordered_sum` takes it. ends_E: int32
    end offset of each local expert's block, as `grouped_mm` takes them.
    """

    row_R: Tensor
    expert_R: Tensor
    weight_R: Tensor
    record_R: Tensor
    slot_U1q: Tensor
    ends_E: Tensor


def order_slots(local_Uq: Tensor, weights_Uq: Tensor, num_experts: int, num_slots: int) -> Slots:
    """Sort slots by local expert. local_Uq int32 or int64, -1 for padding, its rows strided or not, and
    weights_Uq likewise; num_slots: how many are not padding, known on the host."""
    if local_Uq.is_cuda:
        from pithtrain.ops import permute_kernels

        return permute_kernels.order_slots(local_Uq, weights_Uq, num_experts, num_slots)
    return plain_order_slots(local_Uq, weights_Uq, num_experts, num_slots)


def plain_order_slots(local_Uq: Tensor, weights_Uq: Tensor, num_experts: int, num_slots: int) -> Slots:
    """The twin."""
    assert num_experts < 2**15, f"{num_experts} experts on a rank: keys have 16 bits"
    rows, per_row = local_Uq.shape
    flat = local_Uq.reshape(-1)
    key = torch.where(flat < 0, num_experts, flat).to(torch.int16)  # a radix sort: a quarter of the passes of int64
    expert, order = key.sort(stable=True)
    record_R = order[:num_slots]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    slot_U1q = torch.where(flat < 0, -1, place).view(rows, 1, per_row)
    experts_E = torch.arange(num_experts, dtype=key.dtype, device=key.device)
    ends_E = torch.searchsorted(expert, experts_E, right=True, out_int32=True)
    weight_R = weights_Uq.reshape(-1)[record_R]
    return Slots(record_R // per_row, expert[:num_slots].to(torch.int64), weight_R, record_R, slot_U1q, ends_E)


class SlotBias(NamedTuple):
    """What a slot's value gets on top: its expert's bias, times its routing weight. All fp32 but the experts' ids."""

    bias_EH: Tensor
    expert_R: Tensor
    weight_R: Tensor


def ordered_sum(
    values_RH: Tensor, index_NGC: Tensor, bias: SlotBias | None = None, plus: Sequence[Tensor] = ()
) -> Tensor:
    """out[n] = sum over g of (sum over c of values[index[n, g, c]] (+ `bias`)), then each of `plus` [N, H], two at
    most: in this order, in fp32 (float64 of float64), rounded once to the values' dtype; -1 adds nothing. -> [N, H].
    One pass on CUDA."""
    assert len(plus) <= 2, "the kernel has room for two terms more"
    if has_kernel(values_RH):
        from pithtrain.ops import kernels

        return kernels.ordered_sum(values_RH, index_NGC, bias, plus)
    return plain_ordered_sum(values_RH, index_NGC, bias, plus)


def plain_ordered_sum(
    values_RH: Tensor, index_NGC: Tensor, bias: SlotBias | None = None, plus: Sequence[Tensor] = ()
) -> Tensor:
    """The twin."""
    dtype = values_RH.dtype
    out = values_RH.new_zeros(index_NGC.shape[0], values_RH.shape[1], dtype=accumulate_dtype(dtype))
    if bias is not None:
        values_RH = bias.bias_EH[bias.expert_R].mul_(bias.weight_R[:, None]).add_(values_RH)
    for index_NC in index_NGC.unbind(1) if values_RH.shape[0] else ():
        part = torch.zeros_like(out)
        for index in index_NC.unbind(1):
            term = values_RH[index.clamp(min=0)].to(part.dtype)
            part += torch.where((index >= 0)[:, None], term, 0)  # select, never multiply: NaN x 0 is NaN
        out += part
    for term in plus:
        out += term
    return out.to(dtype)


def gather_rows(values_UH: Tensor, row_R: Tensor) -> Tensor:
    """values[row] -> [R, H]. On CUDA by the kernel of the sum, which copies faster than torch's gather."""
    return ordered_sum(values_UH, row_R[:, None, None]) if has_kernel(values_UH) else values_UH[row_R]
