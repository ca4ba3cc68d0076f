"""RMSNorm and rotary positions: the two pointwise pieces that every model shares."""

import torch
from torch import Tensor

from pithtrain.ops.linear import accumulate_dtype


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dim; reduced in fp32, rounded once to x's dtype.

    The order (scale in fp32, then gain) follows the Hugging Face models, which round before the gain; in fp32 compute
    the two are the same, in bf16 ours is the more exact.
    """
    dtype = accumulate_dtype(x.dtype)
    wide = x.to(dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.to(dtype)).to(x.dtype)


def rope_tables(head_dim: int, theta: float, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[2, length, head_dim / 2]: cos and sin of position * theta^(-2i / head_dim), in `dtype` (fp32 or float64)."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
    angles = torch.arange(length, device=device, dtype=dtype)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()))


def rotate_halves(x: Tensor, tables: Tensor) -> Tensor:
    """Rotary embedding in the 'halves' layout: pairs are (i, i + D/2). x [B, S, heads, D] -> same, in x's dtype."""
    cos, sin = tables[:, None, :, None, :]
    left, right = x.to(tables.dtype).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
