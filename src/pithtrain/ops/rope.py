"""Rotary positions: tables of cos and sin, plain or YaRN, and the two layouts of a head's pairs.

Pair i of D / 2 turns by position * theta^(-2i / D). YaRN (arXiv 2309.00071, sections 3.2 to 3.4) stretches a model
trained on L positions by a factor f: pairs that turn often within L (more than `beta_fast` times) keep their speed,
those that turn less than `beta_slow` times slow down by f, those between are mixed along a straight ramp over the pair
index. L is the *original* length: neither the run's sequence nor the extended limit enters the frequencies. Scores are
sharpened by mscale(f, m)^2, which some models put on cos and sin, others on the softmax scale.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """How YaRN stretches a table. `truncate`: its ramp begins and ends at whole pairs (DeepSeek; GPT-OSS does not)."""

    factor: float
    original: int  # L, positions
    beta_fast: float  # turns
    beta_slow: float
    truncate: bool
    amplitude: float  # of cos and sin


def rope_tables(
    head_dim: int, theta: float, length: int, device: torch.device, dtype: torch.dtype, yarn: Yarn | None = None
) -> Tensor:
    """[2, length, head_dim / 2]: cos and sin of position * theta^(-2i / head_dim), in `dtype` (fp32 or float64)."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
    if yarn is not None:
        ramp = _ramp(yarn, head_dim, theta, inverse)
        inverse = inverse / yarn.factor * ramp + inverse * (1 - ramp)
    angles = torch.arange(length, device=device, dtype=dtype)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin())) * (yarn.amplitude if yarn else 1)


def _ramp(yarn: Yarn, head_dim: int, theta: float, like: Tensor) -> Tensor:
    """[head_dim / 2]: 0 for a pair that keeps its speed, 1 for one that slows down by the factor."""

    def pair_turning(times: float) -> float:  # the index, not whole, of the pair that turns so often in `original`
        return head_dim * math.log(yarn.original / (2 * math.pi * times)) / (2 * math.log(theta))

    first, last = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)  # head_dim, not pairs: released models were made with it
    width = last - first or 1e-3  # a step where both ends meet
    return ((torch.arange(head_dim // 2).to(like) - first) / width).clamp(0, 1)


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """0.1 m ln(factor) + 1, that is sqrt(1 / t) of YaRN's temperature t; 1 where nothing is stretched.

    GPT-OSS multiplies cos and sin by it. DeepSeek multiplies its softmax scale by the square of that with
    `mscale_all_dim`, and cos and sin by what `mscale` has more.
    """
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def rotate_halves(x: Tensor, tables: Tensor) -> Tensor:
    """Rotary embedding in the 'halves' layout: pairs are (i, i + D/2). x [B, S, heads, D] -> same, in x's dtype.

    `tables`: the rows of the positions, [2, S, D / 2] or, one set a sequence, [2, B, S, D / 2]."""
    cos, sin = tables.unsqueeze(-2)
    left, right = x.to(tables.dtype).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def rotate_pairs(x: Tensor, tables: Tensor) -> Tensor:
    """Rotary embedding in the interleaved layout: pairs are (2i, 2i + 1). As `rotate_halves`."""
    cos, sin = tables.unsqueeze(-2)
    even, odd = x.to(tables.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
