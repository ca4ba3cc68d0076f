"""Initial values as a function of (seed, parameter name, global index) alone: the same numbers on every mesh.

A counter-based generator in plain tensor operations: two 32-bit hashes of the index, keyed by seed and name, make two
uniforms; Box-Muller makes a normal. No generator state, so a rank computes just the rows it holds. Cost: some 30
pointwise passes over int64, in blocks of 4 M elements; 4 billion parameters take a few seconds on a GPU.
"""

import hashlib
import math
import struct

import torch
from torch import Tensor

BLOCK = 1 << 22  # elements at a time: bounds the temporaries to some 200 MB
_MASK = 0xFFFFFFFF


def normal_(out: Tensor, seed: int, name: str, offset: int, std: float) -> None:
    """Fill `out` (contiguous) with the elements [offset, offset + numel) of the normal(0, std) stream of `name`."""
    keys = keys_of(seed, name)
    flat = out.view(-1)
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        index = torch.arange(block.numel(), device=out.device) + (offset + start)
        radius = torch.sqrt(-2 * torch.log(_uniform(index, *keys[:2])))
        angle = 2 * math.pi * _uniform(index, *keys[2:4])
        block.copy_(std * radius * torch.cos(angle))


def keys_of(seed: int, name: str) -> tuple[int, ...]:
    """Eight 32-bit keys of a parameter: 0 to 3 are for its initial values."""
    return struct.unpack("<8I", hashlib.sha256(f"{seed}:{name}".encode()).digest())


def _uniform(index: Tensor, low_key: int, high_key: int) -> Tensor:
    """float64 in (0, 1)."""
    return (hash32(index, low_key, high_key).to(torch.float64) + 0.5) / 2**32


def hash32(index: Tensor, low_key: int, high_key: int | Tensor) -> Tensor:
    """32 bits of a non-negative int64 index, in int64. One key for both halves would cancel at index 0."""
    low, high = mix((index & _MASK) ^ low_key), mix(((index >> 32) + high_key) & _MASK)
    return mix(low ^ high)


def mix(x: Tensor) -> Tensor:
    """A 32-bit bijection with full avalanche (C. Wellons' lowbias32 constants), on int64 tensors holding 32 bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
