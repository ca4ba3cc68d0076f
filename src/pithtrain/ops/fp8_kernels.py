"""The Triton kernels of 8-bit operands (`ops/fp8`): quantisers, which read an activation once and a weight
once (blocks) or twice (rows and columns), and the experts' product.

The quantisers give the bits of their twins: a power of two times a value is exact, so all that is rounded is the one
conversion to e4m3. A gated activation is rounded to bf16 first, as where the two passes are apart.

`benchmarks/kernels.py` times each beside its twin and its ceiling; like `kernels`, imported where a tensor is on CUDA.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pithtrain.ops.fp8 import E4M3, Fp8
from pithtrain.ops.kernels import _block, _gate_and_up, _gate_and_up_backward, _options

constexpr = tl.constexpr
MOST = 4096  # values of each half that a program of the gated activations holds where a row has one scale


class Columns(NamedTuple):
    """Of a gated activation: a program's columns at a time, and its warps."""

    block: int = 512
    warps: int = 4


GLU_COLUMNS = Columns()  # `benchmarks/kernels.py --tune` measures others


@triton.jit
def _bits(x):
    """Of |x|, in fp32. As integers an Inf is above all numbers and a NaN above it, where a maximum of floats would lose
    it."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _amax(x, axis: constexpr):
    """Bits of the largest |x|."""
    return tl.max(_bits(x), axis)


@triton.jit
def _scales(bits):
    """`fp8.scales`."""
    k = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    k = tl.where(bits == 0, 0, tl.maximum(k, -126))
    scale = ((127 + k) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - k) << 23).to(tl.float32, bitcast=True)
    nan = bits >= 0x7F800000
    return tl.where(nan, float("nan"), scale), tl.where(nan, float("nan"), inverse)


@triton.jit
def _store(
    x,
    r,
    rows,
    first: constexpr,
    out,
    scale,
    W: constexpr,
    WHOLE: constexpr,
    GROUP: constexpr,
    R: constexpr,
    BLOCK: constexpr,
):
    """Quantise x [R, BLOCK], zero beyond its width, and store it from column `first` of rows r [R] of out [rows, W]."""
    groups: constexpr = BLOCK // GROUP
    x = tl.reshape(x, [R, groups, GROUP])
    s, inverse = _scales(_amax(x, 2))
    q = tl.reshape(x * inverse[:, :, None], [R, BLOCK]).to(out.dtype.element_ty)
    cols = tl.arange(0, BLOCK)
    keep = (r < rows)[:, None]
    tl.store(out + r[:, None] * WHOLE + first + cols[None, :], q, mask=keep & (cols < W)[None, :])
    at = tl.arange(0, groups)
    tl.store(
        scale + (first // GROUP + at)[None, :].to(tl.int64) * rows + r[:, None],
        s,
        mask=keep & (at * GROUP < W)[None, :],
    )


# ---- activations and gradients ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _quantize_rows(x, out, scale, rows, W: constexpr, GROUP: constexpr, R: constexpr, BLOCK: constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    cols = tl.arange(0, BLOCK)
    keep = (r < rows)[:, None] & (cols < W)[None, :]
    values = tl.load(x + r[:, None] * W + cols[None, :], mask=keep, other=0.0)
    _store(values.to(tl.float32), r, rows, 0, out, scale, W, W, GROUP, R, BLOCK)


def _blocks(width: int, group: int) -> int:
    return triton.cdiv(width, group) if group else 1


def _empty(like: Tensor, rows: int, width: int, blocks: int) -> Fp8:
    scale = torch.empty(blocks, rows, dtype=torch.float32, device=like.device).t()
    return Fp8(torch.empty(rows, width, dtype=E4M3, device=like.device), scale, like.dtype)


def quantize_rows(x_RW: Tensor, group: int) -> Fp8:
    """`fp8.quantize_rows`. A program per 4,096 values."""
    x_RW, (rows, width) = x_RW.contiguous(), x_RW.shape
    out = _empty(x_RW, rows, width, _blocks(width, group))
    block = max(triton.next_power_of_2(width), group)
    at_once = max(1, 4096 // block)
    if rows:
        _quantize_rows[(triton.cdiv(rows, at_once),)](
            *(x_RW, out.data, out.scale, rows, width, group or block, at_once, block),
            num_warps=min(32, max(4, block // 512)),
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _glu_fp8(
    gate_up,
    weight,
    bias,
    expert,
    out,
    scale,
    rows,
    width: constexpr,
    ALPHA: constexpr,
    LIMIT: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
    GROUP: constexpr,
    BLOCK: constexpr,
):
    """BLOCK columns at a time; with one scale for the row (GROUP 0) they are held, in 16 bits, until it is known.
    Beyond the width they are 0 (or NaN, as then is all of the row: its weight is not finite)."""
    r = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + r)
    held = ()
    most = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < width
        g, u, _, _ = _gate_and_up(gate_up, bias, expert, r, cols, keep, width, LIMIT, BIAS)
        a = (w * (g * tl.sigmoid(ALPHA * g) * (u + OFFSET))).to(gate_up.dtype.element_ty)
        if GROUP == 0:
            most = tl.maximum(most, _bits(a))
            held += (a,)
        else:
            x = tl.reshape(a.to(tl.float32), [1, BLOCK])
            _store(x, r + tl.arange(0, 1), rows, start, out, scale, width - start, width, GROUP, 1, BLOCK)
    if GROUP == 0:
        s, inverse = _scales(tl.max(most, 0))
        tl.store(scale + r, s)
        for i in tl.static_range(len(held)):
            cols = i * BLOCK + tl.arange(0, BLOCK)
            q = (held[i].to(tl.float32) * inverse).to(out.dtype.element_ty)
            tl.store(out + r * width + cols, q, mask=cols < width)


@triton.jit(do_not_specialize=["rows"])
def _glu_backward_fp8(
    da,
    gate_up,
    weight,
    bias,
    expert,
    dgate_up,
    dweight,
    act,
    out,
    scale,
    rows,
    width: constexpr,
    ALPHA: constexpr,
    LIMIT: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
    GROUP: constexpr,
    BLOCK: constexpr,
):
    """As `_glu_fp8`; GROUP 0: one scale for both halves of a row."""
    r = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + r)
    held = ()
    most = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < width
        dg, du, total = _gate_and_up_backward(
            da, gate_up, bias, expert, dgate_up, act, r, w, total, cols, keep, width, ALPHA, LIMIT, OFFSET, BIAS
        )
        if GROUP == 0:
            most = tl.maximum(most, tl.maximum(_bits(dg), _bits(du)))
            held += (dg, du)
        else:
            row = r + tl.arange(0, 1)
            gate = tl.reshape(dg.to(tl.float32), [1, BLOCK])
            up = tl.reshape(du.to(tl.float32), [1, BLOCK])
            _store(gate, row, rows, start, out, scale, width - start, 2 * width, GROUP, 1, BLOCK)
            _store(up, row, rows, width + start, out, scale, width - start, 2 * width, GROUP, 1, BLOCK)
    tl.store(dweight + r, tl.sum(total, 0))
    if GROUP == 0:
        s, inverse = _scales(tl.max(most, 0))
        tl.store(scale + r, s)
        for i in tl.static_range(len(held)):
            cols = i // 2 * BLOCK + tl.arange(0, BLOCK)
            q = (held[i].to(tl.float32) * inverse).to(out.dtype.element_ty)
            tl.store(out + r * 2 * width + i % 2 * width + cols, q, mask=cols < width)


def glu_fits(gate_up: Tensor, group: int) -> bool:
    """Whether no block spans gate and up; with one scale a row, whether a program holds it."""
    width = gate_up.shape[1] // 2
    return not width % group if group else width <= MOST


def glu(
    gate_up: Tensor,
    weight: Tensor,
    alpha: float,
    limit: float | None,
    offset: float,
    bias_EN: Tensor | None,
    expert_R: Tensor,
    group: int,
    columns: Columns = GLU_COLUMNS,
) -> Fp8:
    """`kernels.glu`, quantised: bf16 is read and 8 bits are written. A program per row."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = _empty(gate_up, rows, width, _blocks(width, group))
    if rows:
        _glu_fp8[(rows,)](
            *(gate_up, weight, bias_EN, expert_R, out.data, out.scale, rows),
            *(*_options(width, alpha, limit, offset, bias_EN), group, _block(width, columns.block)),
            num_warps=columns.warps,
        )
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
    group: int,
    columns: Columns = GLU_COLUMNS,
) -> tuple[Tensor, Tensor, Tensor, Fp8]:
    """`kernels.glu_backward`, and d gate_up quantised too. A program per row."""
    rows, width = da.shape
    dgate_up, dweight, act = da.new_empty(gate_up.shape), torch.empty_like(weight), torch.empty_like(da)
    out = _empty(gate_up, rows, 2 * width, _blocks(2 * width, group))
    if rows:
        _glu_backward_fp8[(rows,)](
            *(da, gate_up, weight, bias_EN, expert_R, dgate_up, dweight, act, out.data, out.scale, rows),
            *(*_options(width, alpha, limit, offset, bias_EN), group, _block(width, columns.block)),
            num_warps=columns.warps,
        )
    return dgate_up, dweight, act, out


# ---- weights ---------------------------------------------------------------------------------------------------------


@triton.jit
def _quantize_blocks(
    w, out, scale, turned, turned_scale, N: constexpr, K: constexpr, N4: constexpr, K4: constexpr, B: constexpr
):
    """A program per 128 x 128 of one of E matrices; N4 and K4 are the widths of rows of scales."""
    tiles_n: constexpr = N // B
    tiles_k: constexpr = K // B
    e = (tl.program_id(0) // (tiles_n * tiles_k)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_n * tiles_k)
    i = tile // tiles_k
    j = tile % tiles_k
    ns = i * B + tl.arange(0, B)
    ks = j * B + tl.arange(0, B)
    x = tl.load(w + e * N * K + ns[:, None] * K + ks[None, :]).to(tl.float32)
    s, inverse = _scales(tl.max(_amax(x, 1), 0))
    q = (x * inverse).to(out.dtype.element_ty)
    tl.store(out + e * N * K + ns[:, None] * K + ks[None, :], q)
    tl.store(turned + e * N * K + ks[:, None] * N + ns[None, :], tl.trans(q))
    tl.store(scale + (e * tiles_n + i) * K4 + j, s)
    tl.store(turned_scale + (e * tiles_k + j) * N4 + i, s)


@triton.jit
def _quantize_rows_of_weight(
    w, out, scale, most, N: constexpr, K: constexpr, ROWS: constexpr, R: constexpr, BLOCK: constexpr
):
    """A scale per row, and the bits of each column's largest value: a program per ROWS of a matrix, R at a time."""
    blocks: constexpr = (N + ROWS - 1) // ROWS
    e = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * ROWS
    cols = tl.arange(0, BLOCK)
    bits = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, ROWS, R, num_stages=3):  # loads ahead of the reductions
        n = first + start + tl.arange(0, R)
        keep = (n < N)[:, None] & (cols < K)[None, :]
        x = tl.load(w + (e * N + n)[:, None] * K + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, _amax(x, 0))
        _store(x, e * N + n, e * N + N, 0, out, scale, K, K, BLOCK, R, BLOCK)
    tl.store(most + tl.program_id(0).to(tl.int64) * K + cols, bits, mask=cols < K)


@triton.jit
def _quantize_columns(w, most, out, scale, N: constexpr, K: constexpr, BN: constexpr, BK: constexpr):
    """W^T with a scale per column of W, from the bits of its largest value: a program per BN x BK of a matrix."""
    tiles_n: constexpr = (N + BN - 1) // BN
    tiles_k: constexpr = (K + BK - 1) // BK
    e = (tl.program_id(0) // (tiles_n * tiles_k)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_n * tiles_k)
    ns = tile // tiles_k * BN + tl.arange(0, BN)
    ks = tile % tiles_k * BK + tl.arange(0, BK)
    s, inverse = _scales(tl.load(most + e * K + ks, mask=ks < K, other=0))
    tl.store(scale + e * K + ks, s, mask=(ks < K) & (tile < tiles_k))
    keep = (ns < N)[:, None] & (ks < K)[None, :]
    x = tl.load(w + e * N * K + ns[:, None] * K + ks[None, :], mask=keep, other=0.0).to(tl.float32)
    q = tl.trans((x * inverse[None, :]).to(out.dtype.element_ty))
    tl.store(out + e * N * K + ks[:, None] * N + ns[None, :], q, mask=(ks < K)[:, None] & (ns < N)[None, :])


class WeightTiles(NamedTuple):
    """Of a weight with a scale per row of each form: rows of a program that reads whole ones, fewer for a small weight,
    and how many of them at a time; then [n, k] and the warps of one that turns a tile."""

    rows: int = 64
    at_once: int = 4
    n: int = 128
    k: int = 128
    warps: int = 8


WEIGHT_TILES = WeightTiles()  # `benchmarks/kernels.py --tune` measures others


def quantize_weight(w: Tensor, group: int, tiles: WeightTiles = WEIGHT_TILES) -> tuple[Fp8, Fp8]:
    """Both forms of W [..., N, K] in bf16: `group` 128 is blocks of 128 x 128, 0 a scale per row of each form."""
    assert w.dtype == torch.bfloat16 and w.is_contiguous(), "tiles of fp32 are turned wrongly by Triton 3.6 on sm_90"
    (n, k), tail = w.shape[-2:], w.shape[:-2]
    matrices = w.numel() // (n * k)
    data, turned = (torch.empty(*tail, *size, dtype=E4M3, device=w.device) for size in ((n, k), (k, n)))
    if group:
        assert n % 128 == k % 128 == 0 and group == 128, "blocks are whole"
        (nb, kb), (n4, k4) = (n // 128, k // 128), (-(-n // 512) * 4, -(-k // 512) * 4)
        scale, turned_scale = (torch.ones(*tail, *size, device=w.device) for size in ((nb, k4), (kb, n4)))
        _quantize_blocks[(matrices * nb * kb,)](w, data, scale, turned, turned_scale, n, k, n4, k4, 128, num_warps=8)
    else:
        rows = tiles.rows
        while rows > 16 and matrices * n < 256 * rows:
            rows //= 2
        block = triton.next_power_of_2(k)
        scale, turned_scale = (torch.empty(*tail, size, 1, device=w.device) for size in (n, k))
        most = torch.empty(matrices, triton.cdiv(n, rows), k, dtype=torch.int32, device=w.device)
        _quantize_rows_of_weight[(most.shape[0] * most.shape[1],)](
            *(w, data, scale, most, n, k, rows, min(tiles.at_once, max(1, 16384 // block)), block),
            num_warps=min(32, max(1, block // 512)),  # a row in few warps: 8 times faster than in 4 at 768
        )
        bn, bk = _block(n, tiles.n), _block(k, tiles.k)
        _quantize_columns[(matrices * triton.cdiv(n, bn) * triton.cdiv(k, bk),)](
            *(w, most.amax(1), turned, turned_scale, n, k, bn, bk), num_warps=tiles.warps
        )
    return Fp8(data, scale, w.dtype), Fp8(turned, turned_scale, w.dtype)


# ---- the product of routed experts -----------------------------------------------------------------------------------


@triton.jit
def _tile(
    x,
    x_scale,
    w,
    w_scale,
    row,
    out,
    e,
    first,
    last,
    i,
    sources,
    N: constexpr,
    K: constexpr,
    K4: constexpr,
    GROUP: constexpr,
    BR: constexpr,
    BN: constexpr,
    BK: constexpr,
    GATHER: constexpr,
):
    """Rows of an expert from `first` on, before `last`, and outputs of block i. With a scale per row, existing rows and
    outputs are read in place of those that there are not, which takes no mask; nothing of them is stored."""
    r = (first + tl.arange(0, BR)).to(tl.int64)
    keep = r < last
    source = tl.where(keep, r, first)
    if GATHER:
        source = tl.load(row + source).to(tl.int64)
    ns = i * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    at = x + source[:, None] * K + ks[None, :]
    outputs = ns
    if N % BN:
        outputs = tl.minimum(ns, N - 1)
    matrix = w + e.to(tl.int64) * N * K + outputs[:, None] * K + ks[None, :]
    total = tl.zeros([BR, BN], tl.float32)
    for j in range(0, K, BK):
        if GROUP == 0:
            if K % BK == 0:
                a = tl.load(at + j)
                b = tl.load(matrix + j)
            else:
                a = tl.load(at + j, mask=(ks < K - j)[None, :], other=0.0)
                b = tl.load(matrix + j, mask=(ks < K - j)[None, :], other=0.0)
            total = tl.dot(a, tl.trans(b), total)
        else:
            a = tl.load(at + j, mask=keep[:, None], other=0.0)
            b = tl.load(matrix + j)
            s = tl.load(x_scale + j // BK * sources + source, mask=keep, other=0.0)
            s *= tl.load(w_scale + (e * (N // BN) + i) * K4 + j // BK)
            total += tl.dot(a, tl.trans(b)) * s[:, None]
    if GROUP == 0:
        total *= tl.load(x_scale + source)[:, None] * tl.load(w_scale + e * N + outputs)[None, :]
    whole = keep[:, None] & (ns < N)[None, :]
    tl.store(out + r[:, None] * N + ns[None, :], total.to(out.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["sources"])
def _grouped_product(
    x,
    x_scale,
    w,
    w_scale,
    row,
    out,
    ends,
    sources,
    E: constexpr,
    N: constexpr,
    K: constexpr,
    K4: constexpr,
    GROUP: constexpr,
    BR: constexpr,
    BN: constexpr,
    BK: constexpr,
    HALVE: constexpr,
    GATHER: constexpr,
    EXPERTS: constexpr,
):
    """A program per BR rows of one expert and BN outputs. How many tiles an expert has is known on the device alone, so
    each program counts; those beyond the last tile leave. HALVE: an expert's last tile may have half the rows."""
    tiles_n: constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0) // tiles_n
    i = tl.program_id(0) % tiles_n
    experts = tl.arange(0, EXPERTS)
    begin = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    end = tl.load(ends + experts, mask=experts < E, other=0)
    tiles = tl.where(experts < E, (end - begin + BR - 1) // BR, 0)
    until = tl.cumsum(tiles, 0)
    e = tl.sum(((until <= tile) & (experts < E)).to(tl.int32), 0)
    if e < E:
        mine = experts == e
        first = tl.sum(tl.where(mine, begin + (tile - until + tiles) * BR, 0), 0)
        last = tl.sum(tl.where(mine, end, 0), 0)
        if HALVE and last - first <= BR // 2:
            _tile(
                x, x_scale, w, w_scale, row, out, e, first, last, i, sources, N, K, K4, GROUP, BR // 2, BN, BK, GATHER
            )
        else:
            _tile(x, x_scale, w, w_scale, row, out, e, first, last, i, sources, N, K, K4, GROUP, BR, BN, BK, GATHER)


class Tiles(NamedTuple):
    """Of the product: rows and outputs of a program, its warps, and loads in flight."""

    rows: int
    outputs: int
    warps: int
    stages: int


# `benchmarks/kernels.py --tune` measures others. With blocks three programs an SM hide the scaling of sums; with a
# scale per row nothing is scaled before the end, and a large tile reads less.
PRODUCT_TILES = {128: Tiles(64, 128, 4, 3), 0: Tiles(128, 256, 8, 4)}
# mean rows of an expert up to which a last tile of half the rows pays: 5 % at 512, -2 % from 1,024 on, where the second
# branch alone costs. A rank that crosses it compiles the other kernel then, a second once.
FEW = 640


def grouped_product(x: Fp8, w: Fp8, ends_E: Tensor, group: int, tiles: Tiles | None = None) -> Tensor:
    """x [R, K], or the rows that it names, times w_e [N, K]^T. With blocks (group 128) the tensor cores sum 128
    products, and that sum is scaled and added in fp32; with a scale per row (0) they sum all of K, on Hopper in some 14
    bits. No host read: the grid has room for every expert's last, partial tile."""
    rows, (experts, n, k) = x.num_rows, w.data.shape
    assert group in (0, 128) and not (group and (n % 128 or k % 128)), "blocks are whole"
    tiles = tiles or PRODUCT_TILES[group]
    outputs = _block(n, tiles.outputs)
    assert group in (0, outputs), "a block of W has one scale"
    out = torch.empty(rows, n, dtype=x.wide, device=x.data.device)
    if rows:
        _grouped_product[((rows // tiles.rows + min(experts, rows)) * triton.cdiv(n, outputs),)](
            *(x.data, x.scale, w.data, w.scale, x.row_R, out, ends_E, len(x.data)),
            *(experts, n, k, w.scale.shape[-1], group, tiles.rows, outputs, 128),
            *(not group and rows <= FEW * experts, x.row_R is not None, triton.next_power_of_2(experts)),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out
