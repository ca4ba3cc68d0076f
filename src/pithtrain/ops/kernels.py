"""The Triton kernels of the step, bf16 on CUDA: what moves bytes in one pass where plain torch takes several.

Each has its plain twin in the file that calls it, which says what is computed and is what a CPU, fp32 and float64 run;
tests hold the two together in Triton's interpreter and on a GPU. This file is imported where a tensor is on CUDA, so
that a run on a CPU needs no Triton. Everything is summed in fp32 in a fixed order: no atomics.

`benchmarks/kernels.py` times each beside its twin and its ceiling.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pithtrain.ops.cross_entropy import IGNORE
from pithtrain.ops.permute import SlotBias

constexpr = tl.constexpr


def _block(size: int, most: int) -> int:
    return min(triton.next_power_of_2(size), most)


# ---- sums over slots (permute.ordered_sum) ---------------------------------------------------------------------------


@triton.jit
def _ordered_sum(
    values,
    index,
    out,
    bias,
    expert,
    weight,
    plus0,
    plus1,
    H: constexpr,
    G: constexpr,
    C: constexpr,
    BIAS: constexpr,
    PLUS: constexpr,
    BLOCK: constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for g in range(G):
        part = tl.zeros([BLOCK], tl.float32)
        for c in tl.static_range(C):
            row = tl.load(index + (n * G + g) * C + c)
            keep = (cols < H) & (row >= 0)
            part += tl.load(values + row * H + cols, mask=keep, other=0.0).to(tl.float32)
            if BIAS:
                e = tl.load(expert + row, mask=row >= 0, other=0)
                w = tl.load(weight + row, mask=row >= 0, other=0.0)
                part += w * tl.load(bias + e * H + cols, mask=keep, other=0.0)
        total += part
    if PLUS > 0:
        total += tl.load(plus0 + n * H + cols, mask=cols < H).to(tl.float32)
    if PLUS > 1:
        total += tl.load(plus1 + n * H + cols, mask=cols < H).to(tl.float32)
    tl.store(out + n * H + cols, total.to(out.dtype.element_ty), mask=cols < H)


def ordered_sum(
    values_RH: Tensor, index_NGC: Tensor, bias: SlotBias | None = None, plus: Sequence[Tensor] = ()
) -> Tensor:
    """out[n] = sum over g of (sum over c of values[index[n, g, c]] (+ `bias`)), then each of `plus`, in this order and
    rounded once; -1 adds nothing. A program per row of the output."""
    (rows, groups, copies), width = index_NGC.shape, values_RH.shape[1]
    out = values_RH.new_empty(rows, width)
    block = _block(width, 1024)
    terms = [*(term.contiguous() for term in plus), None, None][:2]
    if rows:
        _ordered_sum[(rows, triton.cdiv(width, block))](
            *(values_RH.contiguous(), index_NGC.contiguous(), out, *(bias or (None, None, None)), *terms),
            *(width, groups, copies, bias is not None, len(plus), block),
        )
    return out


# ---- gated activations (swiglu) --------------------------------------------------------------------------------------


@triton.jit
def _gate_and_up(
    gate_up,
    bias,
    expert,
    r,
    cols,
    keep,
    width: constexpr,
    LIMIT: constexpr,
    BIAS: constexpr,
):
    """Raw gate and up of one row, fp32, biased; and whether each lies within the limit (a NaN does: it must show)."""
    g = tl.load(gate_up + r * 2 * width + cols, mask=keep, other=0.0).to(tl.float32)
    u = tl.load(gate_up + r * 2 * width + width + cols, mask=keep, other=0.0).to(tl.float32)
    if BIAS:
        e = tl.load(expert + r)
        g += tl.load(bias + e * 2 * width + cols, mask=keep, other=0.0)
        u += tl.load(bias + e * 2 * width + width + cols, mask=keep, other=0.0)
    g_beyond = g > LIMIT
    u_beyond = tl.abs(u) > LIMIT
    g = tl.where(g_beyond, LIMIT, g)
    u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    return g, u, g_beyond, u_beyond


@triton.jit
def _gate_and_up_backward(
    da,
    gate_up,
    bias,
    expert,
    dgate_up,
    act,
    r,
    w,
    total,
    cols,
    keep,
    width: constexpr,
    ALPHA: constexpr,
    LIMIT: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
):
    """Stores some columns of d gate_up and of w * act; gives d gate and d up as they were stored, and `total`, fp32,
    with what each column adds to the weight's gradient."""
    g, u, g_beyond, u_beyond = _gate_and_up(gate_up, bias, expert, r, cols, keep, width, LIMIT, BIAS)
    u += OFFSET
    d = tl.load(da + r * width + cols, mask=keep, other=0.0).to(tl.float32)
    s = tl.sigmoid(ALPHA * g)
    silu = g * s
    total += d * silu * u
    tl.store(act + r * width + cols, (w * (silu * u)).to(act.dtype.element_ty), mask=keep)
    d *= w
    dg = tl.where(g_beyond, 0.0, d * u * (s + ALPHA * silu * (1 - s))).to(dgate_up.dtype.element_ty)
    du = tl.where(u_beyond, 0.0, d * silu).to(dgate_up.dtype.element_ty)
    tl.store(dgate_up + r * 2 * width + cols, dg, mask=keep)
    tl.store(dgate_up + r * 2 * width + width + cols, du, mask=keep)
    return dg, du, total


@triton.jit
def _glu(
    gate_up,
    weight,
    bias,
    expert,
    out,
    width: constexpr,
    ALPHA: constexpr,
    LIMIT: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
    BLOCK: constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + r)
    for start in tl.static_range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < width
        g, u, _, _ = _gate_and_up(gate_up, bias, expert, r, cols, keep, width, LIMIT, BIAS)
        a = w * (g * tl.sigmoid(ALPHA * g) * (u + OFFSET))
        tl.store(out + r * width + cols, a.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _glu_backward(
    da,
    gate_up,
    weight,
    bias,
    expert,
    dgate_up,
    dweight,
    act,
    width: constexpr,
    ALPHA: constexpr,
    LIMIT: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
    BLOCK: constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + r)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < width
        _, _, total = _gate_and_up_backward(
            da, gate_up, bias, expert, dgate_up, act, r, w, total, cols, keep, width, ALPHA, LIMIT, OFFSET, BIAS
        )
    tl.store(dweight + r, tl.sum(total, 0))


def _options(width: int, alpha: float, limit: float | None, offset: float, bias: Tensor | None) -> tuple[Any, ...]:
    return width, alpha, float("inf") if limit is None else limit, offset, bias is not None


def glu(
    gate_up: Tensor,
    weight: Tensor,
    alpha: float,
    limit: float | None,
    offset: float,
    bias_EN: Tensor | None,
    expert_R: Tensor,
) -> Tensor:
    """w * act(gate_up + b of its expert), [R, I] in gate_up's dtype. A program per row."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        options = _options(width, alpha, limit, offset, bias_EN)
        _glu[(rows,)](gate_up, weight, bias_EN, expert_R, out, *options, _block(width, 1024))
    return out


def glu_backward(
    da: Tensor,
    gate_up: Tensor,
    weight: Tensor,
    alpha: float,
    limit: float | None,
    offset: float,
    bias_EN: Tensor | None,
    expert_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (d gate_up [R, 2I] in da's dtype, d weight [R] fp32, and w * act [R, I] once more). A program per row."""
    rows, width = da.shape
    dgate_up, dweight, act = da.new_empty(gate_up.shape), torch.empty_like(weight), torch.empty_like(da)
    if rows:
        _glu_backward[(rows,)](
            *(da, gate_up, weight, bias_EN, expert_R, dgate_up, dweight, act),
            *(*_options(width, alpha, limit, offset, bias_EN), _block(width, 1024)),
        )
    return dgate_up, dweight, act


# ---- cross entropy (cross_entropy) -----------------------------------------------------------------------------------


@triton.jit
def _cross_entropy(
    logits, labels, scale, grad, losses, squares, IGNORE: constexpr, Z: constexpr, V: constexpr, BLOCK: constexpr
):
    """Pass 1: a running maximum and sum per lane; pass 2: the gradient, the target's -1 inside the vector expression (a
    second store to one element would race)."""
    t = tl.program_id(0).to(tl.int64)
    y = tl.load(labels + t)
    factor = tl.load(scale)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = tl.load(logits + t * V + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_last")
        new = tl.maximum(top, s)
        base = tl.where(new == float("-inf"), 0.0, new)  # a lane beyond V has seen nothing
        total = total * tl.exp(top - base) + tl.exp(s - base)
        top = new
    peak = tl.max(top, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    valid = y != IGNORE
    # a label beyond the vocabulary shows as a loss of NaN, and reads nothing
    target = tl.load(logits + t * V + y, mask=valid & (y >= 0) & (y < V), other=float("nan"))
    tl.store(losses + t, tl.where(valid, (lse - target) * factor, 0.0))
    if Z != 0:
        tl.store(squares + t, tl.where(valid, lse * lse * factor, 0.0))
    factor = tl.where(valid, factor, 0.0)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = tl.load(logits + t * V + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_first")
        p = tl.exp(s - lse)
        if Z != 0:
            p *= 1 + 2 * Z * lse
        g = factor * (p - (cols == y).to(tl.float32))
        g = tl.where(valid, g, 0.0)
        tl.store(grad + t * V + cols, g.to(grad.dtype.element_ty), mask=cols < V, eviction_policy="evict_first")


def cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, scale: Tensor, dtype: torch.dtype, z_coef: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (summed scaled loss, summed scaled lse^2, gradient [T, V] of loss + z_coef lse^2 in `dtype`). fp32 logits are
    read twice; a label IGNORE is a token without loss. A program per token; without `z_coef` no lse^2."""
    tokens, vocab = logits_TV.shape
    grad = torch.empty(tokens, vocab, dtype=dtype, device=logits_TV.device)
    losses, squares = logits_TV.new_empty(tokens), logits_TV.new_empty(tokens if z_coef else 0)
    _cross_entropy[(tokens,)](
        *(logits_TV, labels_T, scale, grad, losses, squares, IGNORE, z_coef, vocab, _block(vocab, 8192)), num_warps=32
    )
    return losses.sum(), squares.sum(), grad


# ---- weight gradients of experts (grouped) ---------------------------------------------------------------------------


@triton.jit
def _grouped_weight_grad(
    dy,
    x,
    main,
    ends,
    N: constexpr,
    K: constexpr,
    BN: constexpr,
    BK: constexpr,
    BR: constexpr,
    GROUP: constexpr,
    BETA: constexpr,
):
    """A program per (expert, tile); GROUP tiles of N share their x in the L2 cache."""
    tiles_n: constexpr = (N + BN - 1) // BN
    tiles_k: constexpr = (K + BK - 1) // BK
    e = tl.program_id(0) // (tiles_n * tiles_k)
    tile = tl.program_id(0) % (tiles_n * tiles_k)
    first = tile // (GROUP * tiles_k) * GROUP
    size = tl.minimum(tiles_n - first, GROUP)
    tile_n = first + tile % (GROUP * tiles_k) % size
    tile_k = tile % (GROUP * tiles_k) // size
    begin = tl.load(ends + e - 1, mask=e > 0, other=0)
    end = tl.load(ends + e)
    if begin < end or BETA == 0:
        ns = tile_n * BN + tl.arange(0, BN)
        ks = tile_k * BK + tl.arange(0, BK)
        total = tl.zeros([BN, BK], tl.float32)
        for r in range(begin, end, BR):
            rows = (r + tl.arange(0, BR)).to(tl.int64)
            keep = rows < end
            a = tl.load(dy + rows[:, None] * N + ns[None, :], mask=keep[:, None] & (ns < N)[None, :], other=0.0)
            b = tl.load(x + rows[:, None] * K + ks[None, :], mask=keep[:, None] & (ks < K)[None, :], other=0.0)
            total = tl.dot(tl.trans(a), b, total)
        at = main + e.to(tl.int64) * N * K + ns[:, None] * K + ks[None, :]
        keep = (ns < N)[:, None] & (ks < K)[None, :]
        if BETA:
            total += tl.load(at, mask=keep, eviction_policy="evict_first")
        tl.store(at, total, mask=keep, eviction_policy="evict_first")


class Tiles(NamedTuple):
    """A program's part of a weight gradient: [n, k] of main, `rows` at a time; `group` tiles of N run side by side."""

    n: int = 128
    k: int = 128
    rows: int = 32
    warps: int = 4
    stages: int = 5
    group: int = 4


WEIGHT_GRAD_TILES = Tiles()  # `benchmarks/kernels.py --tune` measures others


def add_grouped_weight_grad(
    main_ENK: Tensor, beta: int, dy_RN: Tensor, x_RK: Tensor, ends_E: Tensor, tiles: Tiles = WEIGHT_GRAD_TILES
) -> None:
    """main[e] = beta main[e] + dy_e^T x_e: fp32 over all rows of an expert, one addition to main."""
    experts, n, k = main_ENK.shape
    bn, bk = _block(n, tiles.n), _block(k, tiles.k)
    grid = (experts * triton.cdiv(n, bn) * triton.cdiv(k, bk),)
    _grouped_weight_grad[grid](
        *(dy_RN.contiguous(), x_RK.contiguous(), main_ENK, ends_E, n, k, bn, bk, tiles.rows, tiles.group, beta),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit
def _grouped_sum(values, row, weight, main, ends, N: constexpr, BN: constexpr, BR: constexpr, BETA: constexpr):
    e = tl.program_id(0).to(tl.int64)
    ns = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.load(ends + e - 1, mask=e > 0, other=0)
    end = tl.load(ends + e)
    total = tl.zeros([BR, BN], tl.float32)
    for r in range(begin, end, BR):
        at = (r + tl.arange(0, BR)).to(tl.int64)
        keep = (at < end)[:, None] & (ns < N)[None, :]
        of = at if row is None else tl.load(row + at, mask=at < end, other=0)
        term = tl.load(values + of[:, None] * N + ns[None, :], mask=keep, other=0.0).to(tl.float32)
        if weight is not None:
            term *= tl.load(weight + at, mask=at < end, other=0.0)[:, None]
        total += term
    here = main + e * N + ns
    summed = tl.sum(total, 0)
    if BETA:
        summed += tl.load(here, mask=ns < N)
    tl.store(here, summed, mask=ns < N)


def add_grouped_sum(
    main_EN: Tensor, beta: int, values: Tensor, weight_R: Tensor | None, ends_E: Tensor, row_R: Tensor | None = None
) -> None:
    """main[e] = beta main[e] + the (weighted) sum of expert e's rows. A program per expert and 64 columns."""
    experts, n = main_EN.shape
    block = _block(n, 64)
    _grouped_sum[(experts, triton.cdiv(n, block))](
        values.contiguous(), row_R, weight_R, main_EN, ends_E, n, block, 32, beta
    )


# ---- AdamW and Muon (zero) -------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    """`init.mix` on uint32, which wraps by itself."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_to_bf16(x, bits):
    """`rounding.round_to_bf16`, to an fp32 that bf16 holds."""
    raw = x.to(tl.int32, bitcast=True)
    finite = (raw & 0x7F800000) != 0x7F800000
    return tl.where(finite, (raw + bits.to(tl.int32)) & -0x10000, raw).to(tl.float32, bitcast=True)


@triton.jit
def _bits(index, done, low_key, high_key, BLOCK: constexpr):
    """32 random ones for each element, as `rounding.store_moments` draws them."""
    update = tl.zeros([BLOCK], tl.uint32) + done.to(tl.uint32)
    high = (index >> 32).to(tl.uint32) + _mix(update ^ high_key.to(tl.uint32))
    return _mix(_mix(index.to(tl.uint32) ^ low_key.to(tl.uint32)) ^ _mix(high))


@triton.jit(do_not_specialize=["low_key", "high_key", "first"])
def _adamw(
    master,
    exp_avg,
    exp_avg_sq,
    grad,
    weight,
    step,
    clip,
    skipped,
    size,
    lr,
    beta1,
    beta2,
    eps,
    decay,
    low_key,
    high_key,
    first,
    ROUND: constexpr,
    BLOCK: constexpr,
):
    if tl.load(skipped) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        keep = at < size
        done = tl.load(step)
        g = tl.load(grad + at, mask=keep, other=0.0) / tl.load(clip)
        p = tl.load(master + at, mask=keep, other=0.0)
        m = tl.load(exp_avg + at, mask=keep, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + at, mask=keep, other=0.0).to(tl.float32)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        correction1 = 1 - tl.exp2(done * tl.log2(beta1))
        correction2 = 1 - tl.exp2(done * tl.log2(beta2))
        p -= lr * decay * p
        p -= lr / correction1 * m / (tl.sqrt(v / correction2) + eps)
        tl.store(master + at, p, mask=keep)
        if ROUND:
            bits = _bits(first + at, done, low_key, high_key, BLOCK)
            m = _round_to_bf16(m, bits & 0xFFFF)
            v = _round_to_bf16(v, bits >> 16)
        tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=keep)
        tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=keep)
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask=keep)


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor,
    step: Tensor,
    clip: Tensor,
    skipped: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    keys: tuple[int, int] = (0, 0),
    first: int = 0,
) -> None:
    """One update in place; `weight` receives the rounded master. `step` counts this update, `clip` divides the gradient
    and `skipped` = 1 leaves everything: device scalars in fp32, so nothing is read by the host. Moments in bf16 are
    rounded as `rounding.store_moments` does, by `keys` and the global index `first` of the first element."""
    size = master.numel()
    if size:
        _adamw[(triton.cdiv(size, 1024),)](
            *(master, exp_avg, exp_avg_sq, grad, weight, step, clip, skipped),
            *(size, lr, *betas, eps, decay),
            *(*_as_int32(keys), first, exp_avg.dtype == torch.bfloat16, 1024),
        )


def _as_int32(keys: tuple[int, int]) -> list[int]:
    """Always this type: one kernel for all parameters."""
    return [key - 2**32 if key >= 2**31 else key for key in keys]


@triton.jit(do_not_specialize=["low_key", "high_key", "first"])
def _look_ahead(
    exp_avg, grad, ahead, step, clip, skipped, size, momentum, low_key, high_key, first,
    ROUND: constexpr, BLOCK: constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < size
    m = tl.load(exp_avg + at, mask=keep, other=0.0).to(tl.float32)
    if tl.load(skipped) == 0:
        g = tl.load(grad + at, mask=keep, other=0.0) / tl.load(clip)
        m += (1 - momentum) * (g - m)
        u = g + momentum * (m - g)
        if ROUND:
            m = _round_to_bf16(m, _bits(first + at, tl.load(step), low_key, high_key, BLOCK) & 0xFFFF)
        tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=keep)
        tl.store(ahead + at, u.to(ahead.dtype.element_ty), mask=keep)
    else:
        tl.store(ahead + at, m.to(ahead.dtype.element_ty), mask=keep)


def look_ahead(
    exp_avg: Tensor,
    grad: Tensor,
    ahead: Tensor,
    step: Tensor,
    clip: Tensor,
    skipped: Tensor,
    momentum: float,
    keys: tuple[int, int] = (0, 0),
    first: int = 0,
) -> None:
    """One step of Muon's momentum in place, and Nesterov's look ahead, rounded, into `ahead`; the arguments as in
    `adamw`. Where `skipped` the momentum stays, and what is ahead is nothing to go by."""
    if size := grad.numel():
        _look_ahead[(triton.cdiv(size, 1024),)](
            *(exp_avg, grad, ahead, step, clip, skipped, size, momentum),
            *(*_as_int32(keys), first, exp_avg.dtype == torch.bfloat16, 1024),
        )


@triton.jit
def _move(master, direction, weight, skipped, size, lr, length, decay, BLOCK: constexpr):
    if tl.load(skipped) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        keep = at < size
        p = tl.load(master + at, mask=keep, other=0.0)
        p -= lr * decay * p
        p -= lr * length * tl.load(direction + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(master + at, p, mask=keep)
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask=keep)


def move(
    master: Tensor, direction: Tensor, weight: Tensor, skipped: Tensor, lr: float, length: float, decay: float
) -> None:
    """`master` decayed by lr x `decay` and moved by lr x `length` against `direction`; `weight` receives it, rounded.
    All contiguous."""
    if size := master.numel():
        assert direction.is_contiguous() and direction.shape == master.shape
        _move[(triton.cdiv(size, 1024),)](master, direction, weight, skipped, size, lr, length, decay, 1024)


# ---- blocks of attention (ring) --------------------------------------------------------------------------------------


@triton.jit
def _merge(
    acc, lse, out, part, S, acc_b, acc_s, lse_b, lse_h, out_b, out_s, out_h, part_b, part_h, part_s,
    H: constexpr, D: constexpr, BLOCK_H: constexpr, BLOCK_D: constexpr
):  # fmt: skip
    b = (tl.program_id(0) // S).to(tl.int64)
    s = (tl.program_id(0) % S).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    keep = (h < H)[:, None] & (d < D)[None, :]
    own = tl.load(lse + b * lse_b + h * lse_h + s, mask=h < H, other=0.0)
    new = tl.load(part + b * part_b + h * part_h + s * part_s, mask=h < H, other=0.0)
    top = tl.maximum(own, new)
    total = top + tl.log(tl.exp(own - top) + tl.exp(new - top))
    at = b * acc_b + s * acc_s + h[:, None] * D + d[None, :]
    x = tl.load(acc + at, mask=keep, other=0.0).to(tl.float32) * tl.exp(own - total)[:, None]
    if out is not None:
        y = tl.load(out + b * out_b + s * out_s + h[:, None] * out_h + d[None, :], mask=keep, other=0.0)
        x += y.to(tl.float32) * tl.exp(new - total)[:, None]
    tl.store(acc + at, x.to(acc.dtype.element_ty), mask=keep)
    tl.store(lse + b * lse_b + h * lse_h + s, total, mask=h < H)


def merge(acc: Tensor, lse: Tensor, out: Tensor | None, part_lse: Tensor) -> None:
    """In place, as attention.merge; acc and lse may be parts of larger ones. A program per token reads acc and out and
    writes acc once."""
    batch, length, heads, width = acc.shape
    assert acc.stride()[2:] == (width, 1) and lse.stride(2) == 1 and (out is None or out.stride(3) == 1)
    block_h, block_d = _head_block(heads, width)
    _merge[batch * length, triton.cdiv(heads, block_h)](
        *(acc, lse, out, part_lse, length, *acc.stride()[:2], *lse.stride()[:2]),
        *((0, 0, 0) if out is None else out.stride()[:3]),
        *(*part_lse.stride(), heads, width, block_h, block_d),
    )


def _head_block(heads: int, width: int) -> tuple[int, int]:
    """Of a program over one token's heads: 4,096 numbers or, where that is more, one head."""
    block_d = triton.next_power_of_2(width)
    return min(triton.next_power_of_2(heads), max(1, 4096 // block_d)), block_d


SINK_TOKENS = 16  # of a program: a few rows of partial sums, and enough programs


@triton.jit
def _sinks_grad(
    dout, out, lse, sinks, part, T, S, lse_b, lse_h,
    H: constexpr, D: constexpr, BLOCK_H: constexpr, BLOCK_D: constexpr, TOKENS: constexpr
):  # fmt: skip
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    sink = tl.load(sinks + h, mask=h < H, other=0.0)
    total = tl.zeros([BLOCK_H], tl.float32)
    for i in range(TOKENS):
        t = (tl.program_id(0) * TOKENS + i).to(tl.int64)
        own = (h < H) & (t < T)
        keep = own[:, None] & (d < D)[None, :]
        at = (t * H + h[:, None]) * D + d[None, :]
        x = tl.load(dout + at, mask=keep, other=0.0).to(tl.float32)
        y = tl.load(out + at, mask=keep, other=0.0).to(tl.float32)
        own_lse = tl.load(lse + t // S * lse_b + h * lse_h + t % S, mask=own, other=float("inf"))
        total += tl.exp(sink - own_lse) * tl.sum(x * y, axis=1)
    tl.store(part + tl.program_id(0) * H + h, total, mask=h < H)


def sinks_grad(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """As attention.sinks_grad: dout and out are read once; sums of `SINK_TOKENS` tokens are then summed by torch."""
    batch, length, heads, width = out.shape
    dout, out, tokens = dout.contiguous(), out.contiguous(), batch * length
    assert lse.stride(2) == 1
    programs, (block_h, block_d) = triton.cdiv(tokens, SINK_TOKENS), _head_block(heads, width)
    part = lse.new_empty(programs, heads)
    _sinks_grad[programs, triton.cdiv(heads, block_h)](
        *(dout, out, lse, sinks, part, tokens, length, *lse.stride()[:2]),
        *(heads, width, block_h, block_d, SINK_TOKENS),
    )
    return -part.sum(0)
