"""RMSNorm."""

from typing import Any

import torch
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """Saves the input and one number per row; autograd through the formula would keep two fp32 copies of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        wide = x.to(gain.dtype)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gain, rstd)
        return (wide * rstd * gain).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, rstd = ctx.saved_tensors
        dy = grads[0].to(gain.dtype)
        unit = x.to(gain.dtype) * rstd
        dunit = dy * gain
        dx = rstd * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy * unit).flatten(0, -2).sum(0), None


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dim; in the gain's fp32, rounded once to x's dtype.

    u = x r, r = rsqrt(mean(x^2) + eps):  dx = r (du - u mean(du u)), du = dy g;  dg = sum over rows of dy u

    The Hugging Face models round before the gain; in fp32 compute the two are the same, in bf16 ours is more exact.
    """
    return _RmsNorm.apply(x, gain, eps)  # pyright: ignore[reportReturnType]
