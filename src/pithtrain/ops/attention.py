"""Attention: one function, the device decides the kernel.

CUDA: `F.scaled_dot_product_attention`, which takes cuDNN on Hopper and reads grouped K/V natively (never repeated).
CPU: the plain masked softmax below, in `accumulate_dtype`; it is the oracle of every other path.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops.linear import accumulate_dtype


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention. q [B, S, Hq, Dk], k [B, S, Hkv, Dk], v [B, S, Hkv, Dv] -> [B, S, Hq, Dv].

    Query head h reads key/value head `h // (Hq / Hkv)`.
    """
    if q.is_cuda:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)
    return plain_attention(q, k, v, scale)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The twin: scores, causal mask, softmax, all in fp32 (float64 for float64). Shapes as `attention`."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    dtype = accumulate_dtype(q.dtype)
    qs = q.to(dtype).view(batch, length, groups, heads // groups, width)
    scores = torch.einsum("bqghd,bkgd->bghqk", qs, k.to(dtype)) * scale
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("bghqk,bkgd->bqghd", probs, v.to(dtype))
    return out.reshape(batch, length, heads, v.shape[-1]).to(q.dtype)
