"""Attention kernels: pairs of a forward and a backward of one signature, and the sink identity. `ring` calls them.

| case | kernels |
|---|---|
| CUDA, bf16: blocks of a fixed shape, full or causal | cuDNN's ops, which take grouped heads and MLA's 192 / 128 |
| documents, no window | those of `LONG` tokens and more in cuDNN's, one by one; runs of shorter ones in the flash ops |
| a window, ragged blocks; or anything, where torch is asked to be deterministic | the flash ops |
| a CPU; fp32 and float64 anywhere | the plain pair: it writes the scores of a block, again in backward |

No kernel here knows sinks or other blocks, and none needs to. A pair is

    forward(q, k, v, scale, sight) -> (out, lse)          lse [B, Hq, Sq]: the log of the softmax denominator
    backward(dout, q, k, v, out, lse, scale, sight) -> (dq, dk, dv)

and all that its backward takes from the softmax, with scores z, is

    p = exp(z - lse);   delta = rowsum(dO * O);   dz = p * (dO V^T - delta)

So a backward may be given the (O, lse) of more than its own keys, and the gradients are those within the larger
softmax. Keys in several blocks: every block's backward takes the combined (O, lse). A sink is a logit b per head in the
denominator alone, so from (O0, lse0) without it

    lse = logaddexp(lse0, b);   O = O0 exp(lse0 - lse);   db = -sum over batch and queries of exp(b - lse) delta

and the same backward, called with (O, lse). K and V are never repeated: every kernel reads grouped heads.

Documents (`Packed`): the positions of all sequences as one row, cut where documents end. Work is proportional to the
sum of squared lengths. Their number changes with every batch, so no compiled region sees them.

Legend: B sequences, Sq and Sk positions of queries and keys, Hq query and Hkv key/value heads, Dk and Dv widths.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True)
class Packed:
    """Where documents begin and end in the B * S positions of a block, which queries and keys share. Where some are
    long, `pieces` are (first, last position, what lies there): None is one long document."""

    bounds: tuple[int, ...]  # 0, ..., B * S
    on_device: Tensor  # the same, int32
    longest: int
    pieces: "tuple[tuple[int, int, Packed | None], ...]" = ()


class Sight(NamedTuple):
    """Which keys of its block a query sees. Query i of Sq stands at key i + Sk - Sq."""

    causal: bool = True  # none behind it
    window: int | None = None  # the last so many up to its own place
    packed: Packed | None = None  # those of its document alone


class Kernels(NamedTuple):
    """A forward and a backward without sinks; tensors [B, S, heads, width], lse [B, Hq, Sq]."""

    forward: Callable[[Tensor, Tensor, Tensor, float, Sight], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Sight], tuple[Tensor, Tensor, Tensor]]


def kernels_for(q: Tensor, sight: Sight, ragged: bool = False) -> Kernels:
    """`ragged`: the shapes of this call are one batch's; cuDNN would make a plan for each, 20 to 40 ms."""
    if not has_kernel(q):
        return PLAIN
    if sight.window is not None or torch.are_deterministic_algorithms_enabled():
        return FLASH
    if sight.packed is not None:
        return PIECES if sight.packed.pieces else FLASH
    return FLASH if ragged else CUDNN


def merge_for(q: Tensor) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], None]:
    if not has_kernel(q):
        return merge
    from pithtrain.ops import kernels

    return kernels.merge


def merge(acc: Tensor, lse: Tensor, out: Tensor | None, part_lse: Tensor) -> None:
    """Takes the attention over further keys, (out, part_lse), into (acc [B, S, Hq, Dv], lse [B, Hq, S]), in place:

        new = logaddexp(lse, part_lse);   acc = acc exp(lse - new) + out exp(part_lse - new);   lse = new

    Without `out` those keys have no values: a sink is one. A bf16 acc is rounded once a call."""
    total = torch.logaddexp(lse, part_lse)
    old, new = ((x - total).exp_().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    acc.copy_(acc * old if out is None else acc * old + out * new)
    lse.copy_(total)


def sinks_grad(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[Hq] from the final (out, lse)."""
    if has_kernel(dout):
        from pithtrain.ops import kernels

        return kernels.sinks_grad(dout, out, lse, sinks)
    delta_BHS = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return -((sinks.to(lse.dtype)[:, None] - lse).exp_() * delta_BHS).sum((0, 2)).to(sinks.dtype)


# ---- plain: the rows of a key head are all queries of its group, [B, Hkv, Hq / Hkv * Sq, width] ---------------------


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: Sight) -> tuple[Tensor, Tensor]:
    if sight.packed is not None:
        single = sight._replace(packed=None)
        outs, lses = zip(
            *(_plain_forward(a, b, c, scale, single) for a, b, c in _documents(sight.packed, q, k, v)), strict=True
        )
        out_TH, lse_1HT = torch.cat(outs, 1), torch.cat(lses, 2)
        return out_TH.view(*q.shape[:3], -1), _per_sequence(lse_1HT[0], q.shape[0])
    batch, length, heads, _ = q.shape
    scores = _scores(q, k, scale, sight)
    top = _finite(scores.amax(-1, keepdim=True))
    powers = scores.sub_(top).exp_()
    total = powers.sum(-1, keepdim=True)  # at least 1, the top's own; 0 where a row sees nothing
    out = (powers @ _rows(v, v.shape[2])).div_(total.clamp(min=1))
    return _heads(out, length).to(q.dtype), (top + total.log()).view(batch, heads, length)


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    if sight.packed is not None:
        single = sight._replace(packed=None)
        lse_BSH1 = lse.transpose(1, 2).unsqueeze(-1)
        parts = [
            _plain_backward(a, b, c, d, e, lse_1LH1.squeeze(-1).transpose(1, 2), scale, single)
            for a, b, c, d, e, lse_1LH1 in _documents(sight.packed, dout, q, k, v, out, lse_BSH1)
        ]
        dq, dk, dv = (
            torch.cat(grads, 1).view_as(x) for grads, x in zip(zip(*parts, strict=True), (q, k, v), strict=True)
        )
        return dq, dk, dv
    length, (keys, groups) = q.shape[1], k.shape[1:3]
    probs = _scores(q, k, scale, sight)
    probs.sub_(_finite(lse).reshape(*probs.shape[:3], 1)).exp_()
    do = _rows(dout, groups)
    delta = (do * _rows(out, groups)).sum(-1, keepdim=True)
    dscores = (do @ _rows(v, groups).mT).sub_(delta).mul_(probs)
    dq = (dscores @ _rows(k, groups)).mul_(scale)
    dk = (dscores.mT @ _rows(q, groups)).mul_(scale)
    dv = probs.mT @ do
    return _heads(dq, length).to(q.dtype), _heads(dk, keys).to(k.dtype), _heads(dv, keys).to(v.dtype)


def _documents(packed: Packed, *tensors: Tensor) -> list[list[Tensor]]:
    """Each document's rows [1, length, ...] of tensors [B, S, ...]."""
    flat = [x.flatten(0, 1) for x in tensors]
    return [[x[None, first:last] for x in flat] for first, last in itertools.pairwise(packed.bounds)]


def _per_sequence(lse_HT: Tensor, batch: int) -> Tensor:
    """-> [B, Hq, S]"""
    return lse_HT.unflatten(1, (batch, -1)).transpose(0, 1)


def _scores(q: Tensor, k: Tensor, scale: float, sight: Sight) -> Tensor:
    """[B, Hkv, Hq / Hkv * Sq, Sk], -inf where a query does not see the key."""
    length, (keys, groups) = q.shape[1], k.shape[1:3]
    scores = (_rows(q, groups) @ _rows(k, groups).mT).mul_(scale)
    back = torch.arange(length, device=q.device)[:, None] + (keys - length) - torch.arange(keys, device=q.device)
    hidden = back < 0 if sight.causal else torch.zeros_like(back, dtype=torch.bool)
    if sight.window is not None:
        hidden |= back >= sight.window
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


# ---- cuDNN: full or causal, blocks of a fixed shape ------------------------------------------------------------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: Sight) -> tuple[Tensor, Tensor]:
    assert sight.window is None and sight.packed is None, "cuDNN's op has neither windows nor documents"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # no bias, with statistics, no dropout, causal or not, no debug mask
    out, stats_BHS1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, sight.causal, False, scale=scale
    )
    return out.transpose(1, 2), stats_BHS1.squeeze(-1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    # contiguous: torch keeps a plan per layout of q, k, v and takes those of out and dout to be as in the first call
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous()))
    no_dropout = lse.new_empty((), dtype=torch.int64)  # a seed and an offset, unread
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(dout, q, k, v, out, lse.contiguous().unsqueeze(-1), no_dropout, no_dropout),
        *(None, None, None, q.shape[2], k.shape[2], 0.0, sight.causal),  # no bias, dense
        scale=scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


# ---- flash: windows, documents, ragged blocks, or deterministic ------------------------------------------------------


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: Sight) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_one_row(sight, *_one_width(q, k, v)),
        *(*_lengths(q, k, sight), 0.0, sight.causal, False),  # no dropout, causal or not, no debug mask
        scale=scale,
        **_window(sight),
    )
    out = out.view(*q.shape[:3], -1)[..., : v.shape[-1]]
    return out, lse if sight.packed is None else _per_sequence(lse, q.shape[0])


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = lse.new_empty((), dtype=torch.uint64)
    lse = lse if sight.packed is None else lse.transpose(0, 1).flatten(1)  # [Hq, B * S], as it came
    grads = torch.ops.aten._flash_attention_backward(
        *_one_row(sight, *_one_width(dout, q, k, v, out)),
        *(lse.contiguous(), *_lengths(q, k, sight), 0.0, sight.causal, no_dropout, no_dropout),
        scale=scale,
        **_window(sight),
    )
    dq, dk, dv = (g.view(*x.shape[:3], -1)[..., : x.shape[-1]] for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """Zero-padded to the widest, a multiple of 8: exact, for zeros add nothing to scores and give outputs of zero."""
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _one_row(sight: Sight, *tensors: Tensor) -> list[Tensor]:
    """[B * S, heads, width] where documents lie behind each other; the kernel wants whole rows."""
    return list(tensors) if sight.packed is None else [x.flatten(0, 1).contiguous() for x in tensors]


def _lengths(q: Tensor, k: Tensor, sight: Sight) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where the documents of queries and of keys begin, and the longest."""
    if sight.packed is None:
        return None, None, q.shape[1], k.shape[1]
    return sight.packed.on_device, sight.packed.on_device, sight.packed.longest, sight.packed.longest


def _window(sight: Sight) -> dict[str, int]:
    """Keys before and behind a query's own place, as the flash ops count; -1 is all."""
    return {
        "window_size_left": -1 if sight.window is None else sight.window - 1,
        "window_size_right": 0 if sight.causal else -1,
    }


# ---- documents, some of them long ------------------------------------------------------------------------------------

LONG = 4096  # tokens from which a document takes cuDNN's kernels: 1.4 to 1.8 times as fast, if the host keeps up


def is_long(length: int) -> bool:
    return length >= LONG


def _alone(length: int) -> int:
    """A long document is lengthened to at most 17/16 of it, and to few lengths, for cuDNN makes a plan for each."""
    unit = max(LONG // 16, 1 << length.bit_length() - 5)
    return -(-length // unit) * unit


def _piece(first: int, last: int, packed: Packed | None, *tensors: Tensor) -> list[Tensor]:
    """Rows [1, length, ...] of tensors [B * S, ...]; zeros behind those of a long document, which its own queries do
    not see, and whose queries have no gradient."""
    more = 0 if packed is not None else _alone(last - first) - (last - first)
    return [
        F.pad(x[first:last], (0,) * (2 * x.dim() - 1) + (more,))[None] if more else x[None, first:last] for x in tensors
    ]


def _pieces_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: Sight) -> tuple[Tensor, Tensor]:
    assert sight.packed is not None
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out_THD = q.new_empty(*flat[0].shape[:2], v.shape[-1])
    lse_HT = q.new_empty(q.shape[2], len(flat[0]), dtype=accumulate_dtype(q.dtype))
    for first, last, packed in sight.packed.pieces:
        forward = _cudnn_forward if packed is None else _flash_forward
        a, b, c = _piece(first, last, packed, *flat)
        out, lse = forward(a, b, c, scale, Sight(packed=packed))
        out_THD[first:last] = out[0, : last - first]
        lse_HT[:, first:last] = lse[0, :, : last - first]
    return out_THD.view(*q.shape[:3], -1), _per_sequence(lse_HT, q.shape[0])


def _pieces_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    assert sight.packed is not None
    flat = [x.flatten(0, 1) for x in (dout, q, k, v, out, lse.transpose(1, 2))]
    grads = [torch.empty_like(x) for x in flat[1:4]]
    for first, last, packed in sight.packed.pieces:
        backward = _cudnn_backward if packed is None else _flash_backward
        d, a, b, c, o, lse_1LH = _piece(first, last, packed, *flat)
        found = backward(d, a, b, c, o, lse_1LH.transpose(1, 2), scale, Sight(packed=packed))
        for grad, part in zip(grads, found, strict=True):
            grad[first:last] = part[0, : last - first]
    dq, dk, dv = (grad.view_as(x) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


PLAIN = Kernels(_plain_forward, _plain_backward)
CUDNN = Kernels(_cudnn_forward, _cudnn_backward)
FLASH = Kernels(_flash_forward, _flash_backward)
PIECES = Kernels(_pieces_forward, _pieces_backward)
