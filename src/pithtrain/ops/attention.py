"""Causal attention with grouped heads, a sliding window and sinks: one function, the device decides the kernels.

| case | kernels |
|---|---|
| CUDA, bf16: full causal | `F.scaled_dot_product_attention`, which takes cuDNN on Hopper, MLA's heads (192 / 128) too |
| the same with sinks | cuDNN's forward and backward ops |
| a window; or anything, where torch is asked to be deterministic | the flash ops |
| a CPU; fp32 and float64 anywhere | the plain pair: it writes the S x S scores, again in backward |

No kernel here knows sinks, and none needs to. A pair of kernels without them is

    forward(q, k, v, scale, window) -> (out, lse)          lse [B, Hq, S]: the log of the softmax denominator
    backward(dout, q, k, v, out, lse, scale, window) -> (dq, dk, dv)

and all that its backward takes from the softmax, with scores z, is

    p = exp(z - lse);   delta = rowsum(dO * O);   dz = p * (dO V^T - delta)

A sink is a logit b per head in the denominator alone, so from (O0, lse0) of the forward

    lse = logaddexp(lse0, b);   O = O0 exp(lse0 - lse);   db = -sum over batch and queries of exp(b - lse) delta

and the same backward, called with (O, lse), is that of attention with sinks. Keys in several blocks work alike: the
gradients of a block follow from the lse over all. K and V are never repeated: every kernel reads grouped heads.

Legend: B sequences, S positions, Hq query and Hkv key/value heads, Dk and Dv widths.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.errors import RunFailed
from pithtrain.ops.linear import accumulate_dtype, has_kernel

LEAST_CUDNN = 91501  # from which torch prefers it on Hopper and Blackwell; flash there is 1.7 times slower


def require_cudnn(device: torch.device) -> None:
    """Raises RunFailed where attention on this GPU would silently be slow: torch brings a cuDNN of its own, and an
    older one on the library path hides it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return
    if torch.are_deterministic_algorithms_enabled():
        return  # flash then, and no other
    version = torch.backends.cudnn.version()
    if version is None or version < LEAST_CUDNN or not torch.backends.cuda.cudnn_sdp_enabled():
        raise RunFailed(
            f"attention wants cuDNN {LEAST_CUDNN} or newer, enabled; torch found {version}: take the directory of "
            f"another one off LD_LIBRARY_PATH = {os.environ.get('LD_LIBRARY_PATH', '')!r}"
        )


class Kernels(NamedTuple):
    """A forward and a backward without sinks; all of one signature, tensors [B, S, heads, width], lse [B, Hq, S]."""

    forward: Callable[[Tensor, Tensor, Tensor, float, int | None], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], tuple[Tensor, Tensor, Tensor]
    ]


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention. q [B, S, Hq, Dk], k [B, S, Hkv, Dk], v [B, S, Hkv, Dv] -> [B, S, Hq, Dv].

    Query head h reads key/value head `h // (Hq / Hkv)`. `window`: keys that a query sees, its own included. `sinks`
    [Hq] fp32: a logit per head in the denominator alone.
    """
    assert window is None or window > 0, f"a window of {window} keys: a query sees at least its own"
    if window is not None and window >= q.shape[1]:
        window = None
    kernels = _kernels(q, window)
    if kernels is CUDNN and sinks is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    return with_sinks(kernels, q, k, v, scale, window, sinks)


def with_sinks(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention by a given pair, as `attention`. A row that sees nothing is zero and has no gradient."""
    return _Attention.apply(kernels, q, k, v, scale, window, sinks)  # pyright: ignore[reportReturnType]


def _kernels(q: Tensor, window: int | None) -> Kernels:
    if not has_kernel(q):
        return PLAIN
    return CUDNN if window is None and not torch.are_deterministic_algorithms_enabled() else FLASH


class _Attention(torch.autograd.Function):
    """Saves its inputs, the output and one number per query and head."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        out, lse = kernels.forward(q, k, v, scale, window)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out.mul_((lse - total).exp_().transpose(1, 2).unsqueeze(-1))  # in fp32; `out` was rounded once before
            lse = total
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.kernels, ctx.scale, ctx.window = kernels, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dq, dk, dv = ctx.kernels.backward(grads[0], q, k, v, out, lse, ctx.scale, ctx.window)
        if sinks is None:
            return None, dq, dk, dv, None, None, None
        delta_BHS = (grads[0].to(lse.dtype) * out).sum(-1).transpose(1, 2)
        dsinks = -((sinks.to(lse.dtype)[:, None] - lse).exp_() * delta_BHS).sum((0, 2))
        return None, dq, dk, dv, None, None, dsinks.to(sinks.dtype)


# ---- plain: the rows of a key head are all queries of its group, [B, Hkv, Hq / Hkv * S, width] -----------------------


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    scores = _scores(q, k, scale, window)
    top = _finite(scores.amax(-1, keepdim=True))
    powers = scores.sub_(top).exp_()
    total = powers.sum(-1, keepdim=True)  # at least 1, the top's own; 0 where a row sees nothing
    out = (powers @ _rows(v, v.shape[2])).div_(total.clamp(min=1))
    return _heads(out, length).to(q.dtype), (top + total.log()).view(batch, heads, length)


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    length, groups = k.shape[1:3]
    probs = _scores(q, k, scale, window)
    probs.sub_(_finite(lse).reshape(*probs.shape[:3], 1)).exp_()
    do = _rows(dout, groups)
    delta = (do * _rows(out, groups)).sum(-1, keepdim=True)
    dscores = (do @ _rows(v, groups).mT).sub_(delta).mul_(probs)
    dq = (dscores @ _rows(k, groups)).mul_(scale)
    dk = (dscores.mT @ _rows(q, groups)).mul_(scale)
    dv = probs.mT @ do
    return _heads(dq, length).to(q.dtype), _heads(dk, length).to(k.dtype), _heads(dv, length).to(v.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, window: int | None) -> Tensor:
    """[B, Hkv, Hq / Hkv * S, S], -inf where a query does not see the key."""
    length, groups = k.shape[1:3]
    positions = torch.arange(length, device=q.device)
    back = positions[:, None] - positions
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    scores = (_rows(q, groups) @ _rows(k, groups).mT).mul_(scale)
    scores.unflatten(2, (-1, length)).masked_fill_(hidden, float("-inf"))
    return scores


def _rows(x: Tensor, groups: int) -> Tensor:
    """[B, S, heads, width] -> [B, groups, heads / groups * S, width], in the accumulate dtype."""
    return x.to(accumulate_dtype(x.dtype)).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _heads(rows: Tensor, length: int) -> Tensor:
    """The way back from `_rows`."""
    return rows.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _finite(x: Tensor) -> Tensor:
    """0 for the -inf of a row that sees nothing: its scores are -inf, and -inf - -inf is no number."""
    return x.masked_fill(x == float("-inf"), 0)


# ---- cuDNN: full causal ----------------------------------------------------------------------------------------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    assert window is None, "cuDNN's op has no window"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # no bias, with statistics, no dropout, causal, no debug mask
    out, stats_BHS1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return out.transpose(1, 2), stats_BHS1.squeeze(-1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    # contiguous: torch keeps a plan per layout of q, k, v and takes those of out and dout to be as in the first call
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous()))
    length, no_dropout = q.shape[2], lse.new_empty((), dtype=torch.int64)  # a seed and an offset, unread
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(dout, q, k, v, out, lse.contiguous().unsqueeze(-1), no_dropout, no_dropout),
        *(None, None, None, length, length, 0.0, True),  # no bias, dense, causal
        scale=scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


# ---- flash: a window, or deterministic -------------------------------------------------------------------------------


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    length = q.shape[1]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_one_width(q, k, v),
        *(None, None, length, length, 0.0, True, False),  # dense, no dropout, causal, no debug mask
        scale=scale,
        window_size_left=_left(window),
        window_size_right=0,
    )
    return out[..., : v.shape[-1]], lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    length, no_dropout = q.shape[1], lse.new_empty((), dtype=torch.uint64)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *_one_width(dout, q, k, v, out),
        *(lse.contiguous(), None, None, length, length, 0.0, True, no_dropout, no_dropout),
        scale=scale,
        window_size_left=_left(window),
        window_size_right=0,
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """Zero-padded to the widest, a multiple of 8: exact, for zeros add nothing to scores and give outputs of zero."""
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _left(window: int | None) -> int:
    """Keys before a query's own, as the flash ops count; -1 is all."""
    return -1 if window is None else window - 1


PLAIN = Kernels(_plain_forward, _plain_backward)
CUDNN = Kernels(_cudnn_forward, _cudnn_backward)
FLASH = Kernels(_flash_forward, _flash_backward)
