"""Gated activations, with the routing weight folded in for routed experts.

    g = min(gate, limit);  u = clamp(up, -limit, limit) + offset;  s = sigmoid(alpha g)
    act = g s u;    a = w * act                                                   (one rounding, after the weight)
    dgate = w da u (s + alpha g s (1 - s));   dup = w da g s;   dw = <da, act>

beyond the limit dgate and dup are 0; at it they are not, as in the derivative of torch.clamp. SwiGLU has alpha = 1 and
neither limit nor offset, and pays for neither.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops import fp8
from pithtrain.ops.fp8 import Fp8, Recipe
from pithtrain.ops.linear import accumulate_dtype, has_kernel


@dataclass(frozen=True)
class Glu:
    """act = (up + offset) * gate * sigmoid(alpha * gate), of gate cut from above and up cut both ways at `limit`.
    The defaults are SwiGLU; GPT-OSS has (1.702, 7.0, 1.0)."""

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0


SILU = Glu()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, pointwise, computed in fp32 and rounded once."""
    dtype = accumulate_dtype(gate.dtype)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def _factors(gate: Tensor, up: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    """(g, u) of the formula."""
    if glu.limit is not None:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    return gate, up + glu.offset if glu.offset else up


def weighted_swiglu(gate_up: Tensor, weight: Tensor, glu: Glu = SILU, dtype: torch.dtype | None = None) -> Tensor:
    """gate_up [R, 2I] (gate first), weight [R] fp32 -> w * act, [R, I] in `dtype`, or in gate_up's."""
    gate, up = gate_up.to(weight.dtype).chunk(2, dim=-1)
    gate, up = _factors(gate, up, glu)
    silu = F.silu(gate) if glu.alpha == 1 else gate * (glu.alpha * gate).sigmoid()
    return (weight[:, None] * (silu * up)).to(dtype or gate_up.dtype)


def weighted_swiglu_backward(
    da: Tensor, gate_up: Tensor, weight: Tensor, glu: Glu = SILU
) -> tuple[Tensor, Tensor, Tensor]:
    """da [R, I] -> (d gate_up [R, 2I] in da's dtype, d weight [R] fp32, and a once more, in da's dtype)."""
    raw_gate, raw_up = gate_up.to(weight.dtype).chunk(2, dim=-1)
    gate, up = _factors(raw_gate, raw_up, glu)
    dgate_up = da.new_empty(gate_up.shape)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    dtype, da = da.dtype, da.to(weight.dtype)
    s = (gate if glu.alpha == 1 else glu.alpha * gate).sigmoid()
    silu = gate * s
    dweight = (da * silu * up).sum(-1)
    dact = weight[:, None] * da
    dgate.copy_(dact * up * (s + silu * torch.rsub(s, glu.alpha, alpha=glu.alpha)))  # alpha - alpha s, in one pass
    dup.copy_(dact * silu)
    if glu.limit is not None:
        dgate.masked_fill_(raw_gate > glu.limit, 0)
        dup.masked_fill_(raw_up.abs() > glu.limit, 0)
    return dgate_up, dweight, (weight[:, None] * (silu * up)).to(dtype)


def biased(y_RN: Tensor, bias_EN: Tensor | None, expert_R: Tensor) -> Tensor:
    """y + b of each row's expert, in the bias's fp32; without a bias y as it is."""
    return y_RN if bias_EN is None else bias_EN[expert_R].add_(y_RN)


def expert_activation(
    gate_up: Tensor, weight: Tensor, glu: Glu, bias_EN: Tensor | None, expert_R: Tensor, recipe: Recipe | None = None
) -> Tensor | Fp8:
    """w * act(gate_up + b of its expert), [R, I] in gate_up's dtype, or that in 8 bits: one pass on CUDA."""
    if has_kernel(gate_up):
        from pithtrain.ops import fp8_kernels, kernels

        options = (glu.alpha, glu.limit, glu.offset, bias_EN, expert_R)
        if recipe is not None and fp8_kernels.glu_fits(gate_up, fp8.GROUP[recipe]):
            return fp8_kernels.glu(gate_up, weight, *options, fp8.GROUP[recipe])
        act = kernels.glu(gate_up, weight, *options)
    else:
        act = weighted_swiglu(biased(gate_up, bias_EN, expert_R), weight, glu, gate_up.dtype)
    return act if recipe is None else fp8.quantize(act, recipe)


def expert_activation_backward(
    da: Tensor,
    gate_up: Tensor,
    weight: Tensor,
    glu: Glu,
    bias_EN: Tensor | None,
    expert_R: Tensor,
    recipe: Recipe | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | Fp8]:
    """da [R, I] -> (d gate_up [R, 2I] in da's dtype, d weight [R] fp32, a [R, I] in da's dtype, and what the next input
    gradient takes: d gate_up, or that in 8 bits too): one pass on CUDA. The weight gradient of the down projection
    wants a, which a forward need not keep for it."""
    if has_kernel(gate_up):
        from pithtrain.ops import fp8_kernels, kernels

        options = (glu.alpha, glu.limit, glu.offset, bias_EN, expert_R)
        if recipe is not None and fp8_kernels.glu_fits(gate_up, fp8.GROUP[recipe]):
            return fp8_kernels.glu_backward(da, gate_up, weight, *options, fp8.GROUP[recipe])
        dgate_up, dweight, act = kernels.glu_backward(da, gate_up, weight, *options)
    else:
        dgate_up, dweight, act = weighted_swiglu_backward(da, biased(gate_up, bias_EN, expert_R), weight, glu)
    return dgate_up, dweight, act, dgate_up if recipe is None else fp8.quantize(dgate_up, recipe)
