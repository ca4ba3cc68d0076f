"""The pointwise pieces: gated activations and their by-hand backward, RMSNorm."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from pithtrain.ops.norm import rms_norm
from pithtrain.ops.swiglu import SILU, Glu, swiglu, weighted_swiglu, weighted_swiglu_backward
from reference import assert_near, gradients, leaves, poisoned_memory, random

DTYPES = [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
IDS = ["fp64", "fp32", "bf16"]
GPT_OSS = Glu(alpha=1.702, limit=7.0, offset=1.0)

# ---- gated activations -----------------------------------------------------------------------------------------------


def plain(gate: Tensor, up: Tensor, glu: Glu) -> Tensor:
    limit = math.inf if glu.limit is None else glu.limit
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + glu.offset) * gate / (1 + torch.exp(-glu.alpha * gate))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=IDS)
def test_swiglu(dtype: torch.dtype, tolerance: float) -> None:
    gate, up = random(0, 9, 7, dtype=dtype), random(1, 9, 7, dtype=dtype)
    out = swiglu(gate, up)
    assert out.dtype == dtype
    assert_near(out, gate.double() / (1 + torch.exp(-gate.double())) * up.double(), tolerance)


def test_swiglu_gradients() -> None:
    assert torch.autograd.gradcheck(swiglu, leaves(random(0, 3, 4), random(1, 3, 4)))


@pytest.mark.parametrize("glu", [SILU, GPT_OSS, Glu(0.7, 2.0, -0.5)], ids=["silu", "gpt-oss", "another"])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=IDS)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_weighted_swiglu_and_its_backward(rows: int, dtype: torch.dtype, tolerance: float, glu: Glu) -> None:
    """At numbers of which many are cut, both ways."""
    gate_up, da = random(0, rows, 14, dtype=dtype, scale=4), random(2, rows, 7, dtype=dtype)
    weight = random(1, rows, dtype=torch.promote_types(dtype, torch.float32))
    with poisoned_memory():
        out = weighted_swiglu(gate_up, weight, glu)
        dgate_up, dweight, _ = weighted_swiglu_backward(da, gate_up, weight, glu)
    wide, w = leaves(gate_up, weight)
    expected = w[:, None] * plain(wide[:, :7], wide[:, 7:], glu)
    grads = gradients((expected * da.double()).sum(), (wide, w))
    assert out.dtype == dgate_up.dtype == dtype and dweight.dtype == weight.dtype
    for a, b in zip((out, dgate_up, dweight), (expected.detach(), *grads), strict=True):
        assert_near(a, b, tolerance)
    if rows == 9:
        limit = math.inf if glu.limit is None else glu.limit
        cut = torch.cat((gate_up[:, :7] > limit, gate_up[:, 7:].abs() > limit), dim=1)
        assert cut.any() == (glu.limit is not None) and not dgate_up[cut].any() and dgate_up[~cut].all()


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, glu: Glu) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.glu = glu
        return weighted_swiglu(gate_up, weight, glu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_up, weight = ctx.saved_tensors
        return *weighted_swiglu_backward(grads[0], gate_up, weight, ctx.glu)[:2], None


@pytest.mark.parametrize("glu", [SILU, GPT_OSS], ids=["silu", "gpt-oss"])
def test_the_backward_is_the_derivative(glu: Glu) -> None:
    """By finite differences; none of these numbers lies within a step of the limit."""
    gate_up, weight = leaves(random(0, 3, 8, scale=6), random(1, 3))
    assert torch.autograd.gradcheck(lambda x, w: _Weighted.apply(x, w, glu), (gate_up, weight))


def test_clamped_activation_equals_transformers_at_the_limit_too() -> None:
    """gate and up alternate in theirs. torch.clamp's derivative is 1 at the limit itself."""
    edges = torch.tensor([-8.0, -7.0, -6.5, 0.0, 6.5, 7.0, 8.0], dtype=torch.float64)
    gate_up = torch.cat((torch.cartesian_prod(edges, edges).t().flatten(), random(0, 38, scale=5))).view(2, -1).t()
    theirs = GptOssExperts(GptOssConfig(hidden_size=2, intermediate_size=1, num_local_experts=1))
    assert (theirs.alpha, theirs.limit) == (GPT_OSS.alpha, GPT_OSS.limit)
    leaf, ones = gate_up.clone().requires_grad_(), gate_up.new_ones(len(gate_up))
    expected = theirs._apply_gate(leaf)
    (grad,) = torch.autograd.grad(expected.sum(), leaf)
    assert_near(weighted_swiglu(gate_up, ones, GPT_OSS), expected.detach(), 1e-14)
    found, _, _ = weighted_swiglu_backward(ones[:, None], gate_up, ones, GPT_OSS)
    assert torch.equal(found == 0, grad == 0)
    assert_near(found, grad, 1e-14)


def test_extreme_gates_stay_finite() -> None:
    """silu saturates to 0 and to its argument; so do the derivatives."""
    gate_up = torch.tensor([[-1e4, 2.0], [1e4, 2.0], [0.0, 2.0], [-88.0, 2.0]])
    ones = torch.ones(4)
    assert weighted_swiglu(gate_up, ones).flatten().tolist()[:3] == [0.0, 2e4, 0.0]
    dgate_up, dweight, _ = weighted_swiglu_backward(torch.ones(4, 1), gate_up, ones)
    assert dgate_up[:3].tolist() == [[0.0, 0.0], [2.0, 1e4], [1.0, 0.0]]
    assert dweight.isfinite().all() and dgate_up.isfinite().all()


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=IDS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(scale: float, dtype: torch.dtype, tolerance: float) -> None:
    x = random(0, 3, 5, 16, dtype=dtype, scale=scale)
    gain = random(1, 16, dtype=torch.promote_types(dtype, torch.float32))
    out = rms_norm(x, gain, 1e-6)
    assert out.dtype == dtype
    for row, found in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        wide = row.double()
        size = math.sqrt(sum(v * v for v in wide.tolist()) / 16 + 1e-6)
        assert_near(found, wide / size * gain.double(), tolerance)


def test_rms_norm_equals_transformers_in_fp32() -> None:
    theirs = Qwen3MoeRMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(theirs.weight, generator=torch.Generator().manual_seed(0))
    x = random(0, 4, 16, dtype=torch.float32)
    assert torch.allclose(rms_norm(x, theirs.weight, 1e-5), theirs(x), rtol=1e-6, atol=1e-7)


def test_rms_norm_gradients_and_zero_rows() -> None:
    x, gain = leaves(random(0, 3, 8), random(1, 8))
    assert torch.autograd.gradcheck(lambda x, g: rms_norm(x, g, 1e-3), (x, gain))
    zero = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(zero, torch.ones(8), 1e-6)
    (dx,) = torch.autograd.grad(out.sum(), zero)
    assert not out.any() and torch.allclose(dx, torch.full_like(dx, 1e3))
