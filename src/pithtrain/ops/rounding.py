"""Moments in bf16: fp32 arithmetic, and a rounding on the way back that keeps small changes alive.

bf16 has 8 bits: a second moment at 1.0 that should fall by 0.1 % a step would move by less than half of its spacing,
and to the nearest it stays where it is for good. Stochastic rounding takes one of the two neighbours, the nearer one
with the higher probability, so the mean is exact and the moment arrives:

    bits of fp32      sign | exponent | 7 bits | 16 bits that bf16 lacks
    + 16 random bits  a carry out of the 16 is a step away from zero, with probability (the 16 bits) / 2^16;  then cut

The random bits are a hash of (seed, parameter, update, global element index): no state, the same on every mesh and
after a resume. One hash of 32 bits serves both moments of an element. A value that bf16 holds is left alone, NaN and
infinity too. Beyond the largest bf16 the neighbour is infinity, as it is for the nearest. The price is noise: a second
moment that should rest strays by 1.6 % around its mean at beta2 = 0.999, by 0.3 % at 0.95 (tests/test_rounding.py).

This is the plain twin; on CUDA `kernels.adamw` and `kernels.look_ahead` round while they update, the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pithtrain.ops.init import BLOCK, hash32, keys_of, mix


def rounding_keys(seed: int, name: str) -> tuple[int, int]:
    """Two 32-bit keys of a parameter's random bits, others than those of its initial values."""
    keys = keys_of(seed, name)
    return keys[4], keys[5]


def store_moments(
    moments: Sequence[Tensor], values: Sequence[Tensor], keys: tuple[int, int], update: Tensor, first: int
) -> None:
    """Write fp32 `values` into the bf16 `moments`, one or two of each, contiguous. `update`: a device scalar; `first`:
    the global index of the first element. Some 40 pointwise passes, in blocks of 4 M elements."""
    step_key = mix(update.to(torch.int64) ^ keys[1])
    for start in range(0, moments[0].numel(), BLOCK):
        block = slice(start, start + BLOCK)
        places = torch.arange(start, min(start + BLOCK, moments[0].numel()), device=moments[0].device) + first
        bits = hash32(places, keys[0], step_key)
        for out, value, shift in zip(moments, values, (0, 16)[: len(moments)], strict=True):
            out.view(-1)[block] = round_to_bf16(value.view(-1)[block], bits >> shift & 0xFFFF)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 values to bf16 by `bits`, 16 random ones each as an integer."""
    cut = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(values.isfinite(), cut.view(torch.float32), values).to(torch.bfloat16)
