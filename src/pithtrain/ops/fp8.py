"""Products of 8-bit operands: e4m3 values, a power of two as the scale of each block. Forward and input gradients; a
weight gradient stays in compute dtype, since on Hopper fp8 gains nothing there (two transposed quantisations).

    y = X8 W8^T     dx = dY8 W8     X8 = round(X / s) to e4m3,  s = 2^ceil(log2(amax / 448)),  amax of the block

| recipe | a scale of X and dY is of | of W | products on CUDA |
|---|---|---|---|
| blockwise (Hopper) | 128 along the contraction | 128 x 128 | `F.scaled_mm`; experts: `fp8_kernels`, fp32 every 128 |
| rowwise (Hopper, Blackwell) | a row | an output; for dx an input | the same two, sums scaled at their end |
| mxfp8 (Blackwell) | 32 along the contraction | both ways the same | torch's two, scales as e8m0 |

Powers of two lose no bit, so X8 s is X rounded to four bits and nothing else, and no finite value exceeds 448. A block
of zeros has scale 1; one with an Inf or NaN has scale NaN and shows as a whole. The exponent stays in [-126, 120]:
blocks below 1e-38 lose bits, and there is no other floor, for gradients of a mean loss are small.

Both forms of a weight, W8 for y and its transpose for dx, are made once per version (`linear.Weight.operand`): 2 bytes
a parameter. On a CPU, and in fp32 anywhere, products dequantise and multiply in fp32: only sums are rounded otherwise
than on a device. Kernels in `fp8_kernels` give the bits of the quantisers here; a compiled region takes these, which
its compiler fuses into the norm before them.

Legend: R rows, K contraction, N outputs, E experts; a scale has one column per block of K, contiguous along rows.
"""

from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.errors import Problem, SpecError

Recipe = Literal["blockwise", "rowwise", "mxfp8"]
E4M3 = torch.float8_e4m3fn
GROUP = {"blockwise": 128, "rowwise": 0, "mxfp8": 32}  # values of a row that share a scale; 0: all


class Fp8(NamedTuple):
    """e4m3 values [..., R, K], and fp32 scales [..., R, blocks of K] or, of 128 x 128, [..., R / 128, K / 128] with
    the last dimension padded to a multiple of 4 for cuBLAS. `wide`: what they were, and what products are. With
    `row_R` the operand is data[row_R] with scale[row_R]; the experts' product reads those rows where they are, and
    nothing else takes such an operand."""

    data: Tensor
    scale: Tensor
    wide: torch.dtype
    row_R: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """R of the operand."""
        return len(self.data if self.row_R is None else self.row_R)


class Fp8Weight(NamedTuple):
    """What a product takes in place of W [..., N, K]: `forward` is W, `dgrad` its transpose [..., K, N]."""

    recipe: Recipe
    forward: Fp8
    dgrad: Fp8


def require_device(recipe: Recipe, device: torch.device) -> None:
    """Raises SpecError where a GPU lacks what the recipe needs; a CPU emulates each."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if problem := judge_device(recipe, major, f"{torch.cuda.get_device_name(device)} (SM {major}.{minor})"):
        raise SpecError([problem])


def judge_device(recipe: Recipe, major: int, name: str) -> Problem | None:
    """The rule over compute capabilities."""
    if major < 9:
        return Problem("fp8.enabled", True, f"needs SM 9.0, and this is {name}", "set it to false")
    if recipe == "mxfp8" and major == 9:
        rule = f"scales of 32 values are multiplied by tensor cores from SM 10.0 on, and this is {name}"
        return Problem("fp8.recipe", recipe, rule, "use blockwise or rowwise")
    if recipe == "blockwise" and major != 9:
        rule = f"torch multiplies 1 x 128 by 128 x 128 on SM 9.0 alone, and this is {name}"
        return Problem("fp8.recipe", recipe, rule, "use mxfp8 or rowwise")
    return None


# ---- quantisers ------------------------------------------------------------------------------------------------------


def scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """2^ceil(log2(amax / 448)) and its inverse, fp32, from the bits of amax >= 0: 448 is 1.75 x 2^8, so the exponent
    is that of amax less 8, and one more where the mantissa is beyond 1.75."""
    bits = amax.view(torch.int32) & 0x7FFFFFFF  # a compiler's maximum may give a NaN with a sign
    k = ((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(min=-126)
    k = torch.where(bits == 0, 0, k)
    nan = bits >= 0x7F800000
    scale, inverse = (((127 + sign * k) << 23).view(torch.float32).masked_fill(nan, torch.nan) for sign in (1, -1))
    return scale, inverse


def quantize_rows(x: Tensor, group: int) -> Fp8:
    """x [..., R, K] with a scale per `group` values of a row (0: per row); a last group may be shorter."""
    width = x.shape[-1]
    group = group or width
    padded = F.pad(x.float(), (0, -width % group)).unflatten(-1, (-1, group))
    scale, inverse = scales(padded.abs().amax(-1))
    data = (padded * inverse[..., None]).to(E4M3).flatten(-2)
    return Fp8(data[..., :width].contiguous(), scale.mT.contiguous().mT, x.dtype)


def quantize_blocks(w: Tensor) -> Fp8:
    """w [..., N, K] with a scale per 128 x 128; blocks at the ends may be smaller."""
    (n, k), tail = w.shape[-2:], w.shape[:-2]
    padded = F.pad(w.float(), (0, -k % 128, 0, -n % 128))
    tiles = padded.reshape(*tail, -(-n // 128), 128, -(-k // 128), 128)
    scale, inverse = scales(tiles.abs().amax((-3, -1)))
    data = (tiles * inverse[..., :, None, :, None]).to(E4M3).view(padded.shape)
    return Fp8(data[..., :n, :k].contiguous(), _padded(scale), w.dtype)


def _padded(scale: Tensor) -> Tensor:
    return F.pad(scale, (0, -scale.shape[-1] % 4), value=1.0)


def dequantize(q: Fp8, group: int, rows: int = 1) -> Tensor:
    """fp32 [..., R, K] again; a scale is of `rows` x `group` values (group 0: a row's), whatever the sizes."""
    (r, k), scale = q.data.shape[-2:], q.scale
    if group:
        scale = scale.repeat_interleave(group, -1)[..., :k]
    values = q.data.float() * scale.repeat_interleave(rows, -2)[..., :r, :]
    return values if q.row_R is None else values[q.row_R]


def _on_gpu(x: Tensor, wide: torch.dtype) -> bool:
    """As `linear.has_kernel`, of what was or will be quantised."""
    return x.is_cuda and wide == torch.bfloat16


def quantize(x_RK: Tensor, recipe: Recipe) -> Fp8:
    """X or dY along its rows: one kernel on CUDA, inside a compiled region what the compiler makes of the twin."""
    if _on_gpu(x_RK, x_RK.dtype) and not torch.compiler.is_compiling():
        from pithtrain.ops import fp8_kernels

        return fp8_kernels.quantize_rows(x_RK, GROUP[recipe])
    return quantize_rows(x_RK, GROUP[recipe])


def quantize_weight(w: Tensor, recipe: Recipe) -> Fp8Weight:
    """Both forms of W [..., N, K]: on CUDA in one read for blocks of 128 x 128, in two for rows and columns."""
    if _on_gpu(w, w.dtype) and recipe != "mxfp8":
        from pithtrain.ops import fp8_kernels

        return Fp8Weight(recipe, *fp8_kernels.quantize_weight(w, GROUP[recipe]))
    return plain_quantize_weight(w, recipe)


def plain_quantize_weight(w: Tensor, recipe: Recipe) -> Fp8Weight:
    """The twin."""
    if recipe == "blockwise":
        forward, blocks = quantize_blocks(w), -(-w.shape[-1] // 128)
        dgrad = Fp8(forward.data.mT.contiguous(), _padded(forward.scale[..., :blocks].mT.contiguous()), w.dtype)
    else:
        forward, dgrad = quantize_rows(w, GROUP[recipe]), quantize_rows(w.mT, GROUP[recipe])
    return Fp8Weight(recipe, forward, dgrad)


# ---- products --------------------------------------------------------------------------------------------------------


def product(x: Fp8, w: Fp8, recipe: Recipe) -> Tensor:
    """x [R, K] times w [N, K]^T -> [R, N]."""
    assert x.row_R is None, "only experts have rows to find"
    if torch.compiler.is_compiling():
        return _opaque(x.data, x.scale, w.data, w.scale, recipe, x.wide)
    return _product(x, w, recipe)


@torch.library.custom_op("pithtrain::product_in_8_bits", mutates_args=())
def _opaque(x_data: Tensor, x_scale: Tensor, w_data: Tensor, w_scale: Tensor, recipe: str, wide: torch.dtype) -> Tensor:
    """What a compiler sees: torch 2.13's takes `scaled_mm` to an older one that guesses what a scale is of, and refuses
    swizzled ones."""
    return _product(Fp8(x_data, x_scale, wide), Fp8(w_data, w_scale, wide), cast(Recipe, recipe))


@_opaque.register_fake
def _(x_data: Tensor, x_scale: Tensor, w_data: Tensor, w_scale: Tensor, recipe: str, wide: torch.dtype) -> Tensor:
    return x_data.new_empty(x_data.shape[0], w_data.shape[0], dtype=wide)


def _product(x: Fp8, w: Fp8, recipe: Recipe) -> Tensor:
    if not _on_gpu(x.data, x.wide):
        return (dequantize(x, GROUP[recipe]) @ _whole(w, recipe).t()).to(x.wide)
    kind, swizzle = F.ScalingType, None
    if recipe == "blockwise":
        a, b, kinds = x.scale, w.scale.t(), (kind.BlockWise1x128, kind.BlockWise128x128)
    elif recipe == "rowwise":
        a, b, kinds = x.scale.reshape(-1).unsqueeze(1), w.scale.reshape(-1).unsqueeze(0), (kind.RowWise, kind.RowWise)
    else:
        a, b, kinds = swizzled(x.scale), swizzled(w.scale), (kind.BlockWise1x32, kind.BlockWise1x32)
        swizzle = F.SwizzleType.SWIZZLE_32_4_4
    fast = recipe == "rowwise"  # sums of some 14 bits on Hopper; 1 - cos of a product shows that they are enough
    w_KN = w.data.t()
    return F.scaled_mm(x.data, w_KN, a, kinds[0], b, kinds[1], swizzle, swizzle, None, x.wide, use_fast_accum=fast)


def grouped_product(x: Fp8, w: Fp8, ends_E: Tensor, recipe: Recipe) -> Tensor:
    """x [R, K], or its rows, times w_e [N, K]^T for the rows of each expert e -> [R, N]; no rows at all, or none for
    some, is legal. Not for compiled regions."""
    rows, n = x.num_rows, w.data.shape[1]
    if not rows:
        return x.data.new_empty(0, n, dtype=x.wide)
    if not _on_gpu(x.data, x.wide):
        out, begin = x.data.new_empty(rows, n, dtype=x.wide), 0
        wide, w_ENK = dequantize(x, GROUP[recipe]), _whole(w, recipe)
        for e, end in enumerate(ends_E.tolist()):  # host read: the twin is for the CPU and for proofs
            out[begin:end] = wide[begin:end] @ w_ENK[e].t()
            begin = end
        return out
    if recipe != "mxfp8":
        from pithtrain.ops import fp8_kernels

        return fp8_kernels.grouped_product(x, w, ends_E, GROUP[recipe])
    data, scale = x.data, x.scale
    if x.row_R is not None:
        data, scale = data.view(torch.uint8).index_select(0, x.row_R).view(E4M3), scale.index_select(0, x.row_R)
    a, b = swizzled_groups(scale, ends_E), torch.stack([swizzled(each) for each in w.scale])
    multiply = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    return multiply(data, w.data.transpose(1, 2), a, b, offs=ends_E, out_dtype=x.wide)


def _whole(w: Fp8, recipe: Recipe) -> Tensor:
    return dequantize(w, GROUP[recipe], 128 if recipe == "blockwise" else 1)


def swizzled(scale_RB: Tensor) -> Tensor:
    """Powers of two [R, B] as e8m0 in cuBLAS's tiles of 128 x 4, each [32, 4, 4]: (row % 32, row / 32, column)."""
    rows, blocks = scale_RB.shape
    exponent = (scale_RB.contiguous().view(torch.int32) >> 23).to(torch.uint8)  # 255, e8m0's NaN, of a NaN
    padded = F.pad(exponent, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-blocks // 4), 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(-1).view(torch.float8_e8m0fnu)


def swizzled_groups(scale_RB: Tensor, ends_E: Tensor) -> Tensor:
    """The same with each expert's rows beginning a tile: rows are scattered to where the padded groups lie, which
    takes no host read; at most 128 rows an expert are added. -> [rows, B to a multiple of 4]."""
    (rows, blocks), experts = scale_RB.shape, len(ends_E)
    begins_E = F.pad(ends_E, (1, -1))
    tiles_E = ((ends_E - begins_E + 127) // 128).cumsum(0)
    at_R = torch.arange(rows, device=ends_E.device)
    expert_R = torch.searchsorted(ends_E, at_R, right=True, out_int32=True)
    padded = scale_RB.new_ones(-(-rows // 128) * 128 + 128 * experts, blocks)
    padded[at_R - begins_E[expert_R] + 128 * F.pad(tiles_E, (1, -1))[expert_R]] = scale_RB
    return swizzled(padded).view(len(padded), -1)


class _Linear(torch.autograd.Function):
    """x W^T from both in 8 bits; dx = dY8 W8. Keeps the weight's transpose, which others keep too, and no operand."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_data: Tensor,
        x_scale: Tensor,
        w_data: Tensor,
        w_scale: Tensor,
        t_data: Tensor,
        t_scale: Tensor,
        recipe: Recipe,
    ) -> Tensor:
        ctx.save_for_backward(t_data, t_scale)
        ctx.recipe = recipe
        y = product(Fp8(x_data, x_scale, x.dtype), Fp8(w_data, w_scale, x.dtype), recipe)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        t_data, t_scale = ctx.saved_tensors
        dy8, t8 = quantize(dy.reshape(-1, dy.shape[-1]), ctx.recipe), Fp8(t_data, t_scale, dy.dtype)
        dx = product(dy8, t8, ctx.recipe)
        return dx.view(*dy.shape[:-1], dx.shape[-1]), *[None] * 7


def linear(x: Tensor, x8: Fp8, w: Fp8Weight) -> Tensor:
    """x W^T in x's dtype, [..., N]. `x8`: x quantised as rows, once for all weights that take it."""
    tensors = x8.data, x8.scale, w.forward.data, w.forward.scale, w.dgrad.data, w.dgrad.scale
    return _Linear.apply(x, *tensors, w.recipe)  # pyright: ignore[reportReturnType]
