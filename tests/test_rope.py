"""Rotary positions: both layouts of the pairs, and YaRN against transformers and by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, apply_rotary_pos_emb

from pithtrain.ops.rope import Yarn, rope_tables, rotate_halves, rotate_pairs, yarn_mscale
from reference import assert_near, random

CPU = torch.device("cpu")
Rotate = Callable[[Tensor, Tensor], Tensor]


# ---- the two layouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_halves_equal_transformers(theta: float) -> None:
    config = Qwen3MoeConfig(
        hidden_size=32, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    q, k = random(0, 2, 50, 4, 8, dtype=torch.float32), random(1, 2, 50, 2, 8, dtype=torch.float32)
    cos, sin = Qwen3MoeRotaryEmbedding(config)(q, torch.arange(50)[None])
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    tables = rope_tables(8, theta, 50, CPU, torch.float32)
    for x, theirs in zip((q, k), expected, strict=True):
        assert torch.allclose(rotate_halves(x, tables), theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_pairs_equal_transformers() -> None:
    q, k = random(0, 2, 50, 4, 8, dtype=torch.float32), random(1, 2, 50, 1, 8, dtype=torch.float32)
    tables = rope_tables(8, 1e4, 50, CPU, torch.float32)
    turns = torch.complex(tables[0], tables[1])[None]
    expected = apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), turns)
    for x, theirs in zip((q, k), expected, strict=True):
        assert torch.allclose(rotate_pairs(x, tables), theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rotate", "pairs"), [(rotate_halves, [(0, 2), (1, 3)]), (rotate_pairs, [(0, 1), (2, 3)])], ids=["halves", "pairs"]
)
def test_rotation_of_one_pair_by_hand(rotate: Rotate, pairs: list[tuple[int, int]]) -> None:
    """Pair i at position p turns by p * theta^(-2i/D)."""
    tables = rope_tables(4, 100.0, 3, CPU, torch.float64)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(1, 3, 1, 4)
    out = rotate(x, tables)[0, :, 0]
    for p in range(3):
        for (left, right), turn in zip(pairs, (p * 1.0, p * 0.1), strict=True):
            a, b = x[0, p, 0, left].item(), x[0, p, 0, right].item()
            assert out[p, left].item() == pytest.approx(a * math.cos(turn) - b * math.sin(turn))
            assert out[p, right].item() == pytest.approx(a * math.sin(turn) + b * math.cos(turn))


@pytest.mark.parametrize("rotate", [rotate_halves, rotate_pairs])
def test_scores_depend_on_the_distance_only(rotate: Rotate) -> None:
    tables = rope_tables(8, 1e4, 30, CPU, torch.float64)
    q, k = (rotate(random(s, 8).expand(1, 30, 1, 8), tables)[0, :, 0] for s in (0, 1))
    scores = q @ k.t()
    for distance in (-7, 0, 1, 12):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12)


@pytest.mark.parametrize("rotate", [rotate_halves, rotate_pairs])
def test_rotation_is_rounded_once_in_bf16(rotate: Rotate) -> None:
    tables = rope_tables(8, 1e4, 9, CPU, torch.float32)
    x = random(0, 1, 9, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, tables), rotate(x.float(), tables).bfloat16())


# ---- YaRN ------------------------------------------------------------------------------------------------------------


def yarn(head_dim: int, theta: float, length: int, dtype: torch.dtype, amplitude: float, **more: Any) -> Tensor:
    parameters: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True} | more
    return rope_tables(head_dim, theta, length, CPU, dtype, Yarn(amplitude=amplitude, **parameters))


def theirs(head_dim: int, theta: float, limit: int, **parameters: Any) -> tuple[Tensor, float]:
    """transformers' inverse frequencies and attention factor."""
    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": theta, **parameters}
    config = GptOssConfig(head_dim=head_dim, max_position_embeddings=limit, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS["yarn"](config, CPU)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (16.0, 2.0), (2.0, 2.0)])
@pytest.mark.parametrize("original", [32, 4096])
@pytest.mark.parametrize("factor", [2.0, 32.0, 40.0])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 150_000.0), (64, 1e4), (8, 1e4), (8, 10.0)])
def test_case_138_yarn_equals_transformers(
    head_dim: int, theta: float, factor: float, original: int, betas: tuple[float, float], truncate: bool
) -> None:
    """`truncate: false` included; transformers has its frequencies in fp32."""
    given = {"factor": factor, "beta_fast": betas[0], "beta_slow": betas[1], "truncate": truncate}
    inverse, amplitude = theirs(
        head_dim, theta, int(original * factor), original_max_position_embeddings=original, **given
    )
    assert yarn_mscale(factor) == pytest.approx(amplitude, rel=1e-15)
    angles = torch.arange(64)[:, None] * inverse.double()
    want = amplitude * torch.stack((angles.cos(), angles.sin()))
    found = yarn(head_dim, theta, 64, torch.float64, amplitude, original=original, **given)
    assert (found - want).abs().max() < 1e-5  # 64 radians in fp32
    assert_near(yarn(head_dim, theta, 64, torch.float32, amplitude, original=original, **given), want, 2e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 40.0])
@pytest.mark.parametrize(
    "given",
    [{}, {"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale": 1.0, "mscale_all_dim": 0.5}],
)
def test_case_138_the_amplitude_equals_transformers(factor: float, given: dict[str, float]) -> None:
    """GPT-OSS has no mscale; of DeepSeek's two the rest of the second is in the softmax scale."""
    _, amplitude = theirs(64, 1e4, 4096, factor=factor, original_max_position_embeddings=4096, **given)
    ours = yarn_mscale(factor)
    if given:
        ours = yarn_mscale(factor, given["mscale"]) / yarn_mscale(factor, given["mscale_all_dim"])
    assert ours == pytest.approx(amplitude, rel=1e-15)


def test_yarn_figures_of_the_released_models() -> None:
    assert yarn_mscale(32.0) == pytest.approx(1.3466, abs=5e-5)  # GPT-OSS
    assert yarn_mscale(40.0, 0.707) ** 2 == pytest.approx(1.5896, abs=5e-5)  # DeepSeek-V2-Lite
    assert yarn_mscale(40.0) ** 2 == pytest.approx(1.874, abs=5e-4)


def test_yarn_by_hand() -> None:
    """theta = 10, D = 20: pair i turns L / (2 pi 10^(i/10)) times in L positions. With L = 2 pi 100 the ramp goes from
    pair 4 (10^1.6 = 39.8 turns) to pair 10: pair 7 is half way."""
    original = 628  # 2 pi 100 = 628.3
    fast, slow = 10**1.6, 10.0
    tables = yarn(
        20, 10.0, 2, torch.float64, 1.0, factor=4.0, original=original, beta_fast=fast, beta_slow=slow, truncate=False
    )
    angle = torch.atan2(tables[1, 1], tables[0, 1])
    plain = 10.0 ** -(torch.arange(10, dtype=torch.float64) / 10)
    assert torch.allclose(angle[:4], plain[:4], rtol=1e-12)
    assert angle[7] / plain[7] == pytest.approx((1 + 1 / 4) / 2, abs=5e-4)  # 628 is not quite 628.3
    assert angle[9] / plain[9] == pytest.approx(1 / 6 + 5 / 6 / 4, abs=5e-4)


def test_yarn_of_factor_1_is_plain() -> None:
    plain = rope_tables(16, 1e4, 50, CPU, torch.float64)
    assert_near(yarn(16, 1e4, 50, torch.float64, yarn_mscale(1.0), factor=1.0, original=32), plain, 1e-14)


def test_case_139_the_original_length_alone_makes_the_frequencies() -> None:
    """Original 32, factor 2: the table of 64 positions is the start of that of 128, and equals transformers' whatever
    the extended limit."""
    short, long = (yarn(16, 1e4, n, torch.float64, 1.0, factor=2.0, original=32) for n in (64, 128))
    assert torch.equal(short, long[:, :64])
    for limit in (32, 64, 4096):
        inverse, _ = theirs(16, 1e4, limit, factor=2.0, original_max_position_embeddings=32)
        angles = torch.arange(64)[:, None] * inverse.double()
        assert_near(short, torch.stack((angles.cos(), angles.sin())), 1e-6)
    assert not torch.allclose(short, yarn(16, 1e4, 64, torch.float64, 1.0, factor=2.0, original=64))
