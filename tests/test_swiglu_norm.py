"""The pointwise pieces: SwiGLU and its by-hand backward, RMSNorm, rotary positions."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    apply_rotary_pos_emb,
)

from pithtrain.ops.norm import rms_norm, rope_tables, rotate_halves
from pithtrain.ops.swiglu import swiglu, weighted_swiglu, weighted_swiglu_backward
from reference import assert_near, gradients, leaves, poisoned_memory, random

DTYPES = [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
IDS = ["fp64", "fp32", "bf16"]

# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=IDS)
def test_swiglu(dtype: torch.dtype, tolerance: float) -> None:
    gate, up = random(0, 9, 7, dtype=dtype), random(1, 9, 7, dtype=dtype)
    out = swiglu(gate, up)
    assert out.dtype == dtype
    assert_near(out, gate.double() / (1 + torch.exp(-gate.double())) * up.double(), tolerance)


def test_swiglu_gradients() -> None:
    assert torch.autograd.gradcheck(swiglu, leaves(random(0, 3, 4), random(1, 3, 4)))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=IDS)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_weighted_swiglu_and_its_backward(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up, da = random(0, rows, 14, dtype=dtype), random(2, rows, 7, dtype=dtype)
    weight = random(1, rows, dtype=torch.promote_types(dtype, torch.float32))
    with poisoned_memory():
        out = weighted_swiglu(gate_up, weight)
        dgate_up, dweight = weighted_swiglu_backward(da, gate_up, weight)
    wide, w = leaves(gate_up, weight)
    expected = w[:, None] * F.silu(wide[:, :7]) * wide[:, 7:]
    grads = gradients((expected * da.double()).sum(), (wide, w))
    assert out.dtype == dgate_up.dtype == dtype and dweight.dtype == weight.dtype
    for a, b in zip((out, dgate_up, dweight), (expected.detach(), *grads), strict=True):
        assert_near(a, b, tolerance)


def test_extreme_gates_stay_finite() -> None:
    """silu saturates to 0 and to its argument; so do the derivatives."""
    gate_up = torch.tensor([[-1e4, 2.0], [1e4, 2.0], [0.0, 2.0], [-88.0, 2.0]])
    ones = torch.ones(4)
    assert weighted_swiglu(gate_up, ones).flatten().tolist()[:3] == [0.0, 2e4, 0.0]
    dgate_up, dweight = weighted_swiglu_backward(torch.ones(4, 1), gate_up, ones)
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


# ---- rotary positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotation_equals_transformers(theta: float) -> None:
    config = Qwen3MoeConfig(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": theta})
    q, k = random(0, 2, 50, 4, 8, dtype=torch.float32), random(1, 2, 50, 2, 8, dtype=torch.float32)
    cos, sin = Qwen3MoeRotaryEmbedding(config)(q, torch.arange(50)[None])
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    tables = rope_tables(8, theta, 50, torch.device("cpu"), torch.float32)
    for x, theirs in zip((q, k), expected, strict=True):
        assert torch.allclose(rotate_halves(x, tables), theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_rotation_of_one_pair_by_hand() -> None:
    """Pairs are (i, i + D/2); pair i at position p turns by p * theta^(-2i/D)."""
    tables = rope_tables(4, 100.0, 3, torch.device("cpu"), torch.float64)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(1, 3, 1, 4)
    out = rotate_halves(x, tables)[0, :, 0]
    for p in range(3):
        for i, turn in enumerate((p * 1.0, p * 0.1)):
            a, b = x[0, p, 0, i].item(), x[0, p, 0, i + 2].item()
            assert out[p, i].item() == pytest.approx(a * math.cos(turn) - b * math.sin(turn))
            assert out[p, i + 2].item() == pytest.approx(a * math.sin(turn) + b * math.cos(turn))


def test_scores_depend_on_the_distance_only() -> None:
    tables = rope_tables(8, 1e4, 30, torch.device("cpu"), torch.float64)
    q, k = (rotate_halves(random(s, 8).expand(1, 30, 1, 8), tables)[0, :, 0] for s in (0, 1))
    scores = q @ k.t()
    for distance in (-7, 0, 1, 12):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12)


def test_rotation_is_rounded_once_in_bf16() -> None:
    tables = rope_tables(8, 1e4, 9, torch.device("cpu"), torch.float32)
    x = random(0, 1, 9, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(rotate_halves(x, tables), rotate_halves(x.float(), tables).bfloat16())
