"""Grouped GEMMs: one matrix per expert, rows of an expert in one block.

`ends_E` holds int32 end offsets. Any group size is legal, zero included; exactly R rows are allocated, so nothing
behind the last group is ever read. bf16 on CUDA uses `F.grouped_mm`, and for the weight gradient a kernel of ours that
adds fp32 products to the fp32 sum in one pass; the twins loop over experts.

Legend: R rows in expert order, E local experts, N output width, K input width.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops import fp8
from pithtrain.ops.fp8 import Fp8, Fp8Weight
from pithtrain.ops.linear import add_sum, add_weight_grad, has_kernel


def grouped_linear(x_RK: Tensor | Fp8, weight: Tensor | Fp8Weight, ends_E: Tensor) -> Tensor:
    """x W_e^T for the rows of each expert e -> [R, N]. W [E, N, K] and x both in 8 bits, or neither."""
    if isinstance(weight, Fp8Weight):
        assert isinstance(x_RK, Fp8), "an 8-bit weight takes an 8-bit operand"
        return fp8.grouped_product(x_RK, weight.forward, ends_E, weight.recipe)
    assert isinstance(x_RK, Tensor), "a weight in compute dtype takes an operand of its kind"
    return _grouped(x_RK, weight.transpose(1, 2), ends_E)


def grouped_linear_dx(dy_RN: Tensor | Fp8, weight: Tensor | Fp8Weight, ends_E: Tensor) -> Tensor:
    """dy W_e for the rows of each expert e -> [R, K]."""
    if isinstance(weight, Fp8Weight):
        assert isinstance(dy_RN, Fp8), "an 8-bit weight takes an 8-bit operand"
        return fp8.grouped_product(dy_RN, weight.dgrad, ends_E, weight.recipe)
    assert isinstance(dy_RN, Tensor), "a weight in compute dtype takes an operand of its kind"
    return _grouped(dy_RN, weight, ends_E)


def _grouped(x: Tensor, matrices: Tensor, ends_E: Tensor) -> Tensor:
    if x.shape[0] and has_kernel(x):
        return F.grouped_mm(x, matrices, offs=ends_E)
    out = x.new_empty(x.shape[0], matrices.shape[2])
    if not x.shape[0]:
        return out
    for e, (start, end) in enumerate(_blocks(ends_E)):
        torch.mm(x[start:end], matrices[e], out=out[start:end])
    return out


def add_grouped_weight_grad(main_ENK: Tensor, beta: int, dy_RN: Tensor, x_RK: Tensor, ends_E: Tensor) -> None:
    """main_grad[e] = beta main_grad[e] + dy_e^T x_e; an expert without rows brings zeros."""
    if has_kernel(x_RK):
        from pithtrain.ops import kernels

        kernels.add_grouped_weight_grad(main_ENK, beta, dy_RN, x_RK, ends_E)
    else:
        plain_grouped_weight_grad(main_ENK, beta, dy_RN, x_RK, ends_E)


def plain_grouped_weight_grad(main_ENK: Tensor, beta: int, dy_RN: Tensor, x_RK: Tensor, ends_E: Tensor) -> None:
    """The twin of the weight gradient."""
    for e, (start, end) in enumerate(_blocks(ends_E)):
        add_weight_grad(main_ENK[e], beta, dy_RN[start:end], x_RK[start:end])


def add_grouped_sum(
    main_EN: Tensor, beta: int, values: Tensor, weight_R: Tensor | None, ends_E: Tensor, row_R: Tensor | None = None
) -> None:
    """main_grad[e] = beta main_grad[e] + the sum of expert e's rows, each times its weight if there is one, in
    main_grad's dtype: no atomics, and on the device no host read. An expert without rows brings zeros. The rows are
    values [R, N], or with an index values[row]."""
    if has_kernel(values):
        from pithtrain.ops import kernels

        kernels.add_grouped_sum(main_EN, beta, values, weight_R, ends_E, row_R)
    else:
        plain_grouped_sum(main_EN, beta, values, weight_R, ends_E, row_R)


def plain_grouped_sum(
    main_EN: Tensor, beta: int, values: Tensor, weight_R: Tensor | None, ends_E: Tensor, row_R: Tensor | None = None
) -> None:
    """The twin of the sum."""
    rows, offsets = (values if row_R is None else values[row_R]).to(main_EN.dtype), F.pad(ends_E, (1, 0))
    if weight_R is not None:
        rows = weight_R[:, None] * rows
    add_sum(main_EN, beta, torch.segment_reduce(rows, "sum", offsets=offsets, unsafe=True, initial=0))


def _blocks(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = [0, *ends_E.tolist()]  # host read: the twin is for the CPU and for proofs
    return list(itertools.pairwise(ends))
