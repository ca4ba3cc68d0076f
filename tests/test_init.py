"""Initial values: a function of (seed, name, global index) alone, normal, and never the same stream twice."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from pithtrain.ops import init
from pithtrain.ops.init import normal_
from reference import poisoned_memory

NAME = "model.layers.3.mlp.experts.down_proj"


def stream(offset: int, count: int, *, seed: int = 1, name: str = NAME, dtype: torch.dtype = torch.float64) -> Tensor:
    with poisoned_memory():
        out = torch.empty(count, dtype=dtype)
        normal_(out, seed, name, offset, 1.0)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [0, (1 << 32) - 50, 1 << 32, (1 << 40) + 12345])
def test_any_slicing_gives_the_same_numbers(base: int, dtype: torch.dtype) -> None:
    whole = stream(base, 200, dtype=dtype)
    for first, end in [(0, 200), (0, 1), (199, 200), (3, 64), (64, 64), (37, 181)]:
        assert torch.equal(stream(base + first, end - first, dtype=dtype), whole[first:end])


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stream(1000, 100)
    for block in (1, 7, 64, 100):
        monkeypatch.setattr(init, "BLOCK", block)
        assert torch.equal(stream(1000, 100), whole)


def test_the_shape_does_not_matter_and_rows_are_slices() -> None:
    """Rank 1 of 2 holds experts 2 and 3 of 4: the whole tensor's second half."""
    whole = torch.empty(4, 6, 5)
    normal_(whole, 1, NAME, 0, 0.02)
    half = torch.empty(2, 6, 5)
    normal_(half, 1, NAME, 2 * 6 * 5, 0.02)
    assert torch.equal(half, whole[2:])


def test_a_slice_of_a_larger_tensor_is_filled_in_place_and_nothing_beside_it() -> None:
    out = torch.zeros(6, 3)
    normal_(out[2:4], 1, NAME, 0, 1.0)
    assert not out[:2].any() and not out[4:].any() and out[2:4].all()


def test_std_scales() -> None:
    out = torch.empty(100, dtype=torch.float64)
    normal_(out, 1, NAME, 0, 0.02)
    assert torch.allclose(out, 0.02 * stream(0, 100), rtol=1e-15, atol=0)
    normal_(out, 1, NAME, 0, 0.0)
    assert not out.any()


def test_case_080_no_two_experts_layers_names_or_seeds_are_equal() -> None:
    """Streams that a mistake would make equal: correlation within chance, and no element shared."""
    size = 4096
    streams = [stream(expert * size, size) for expert in range(8)]
    streams += [stream(0, size, name=NAME.replace("3", str(layer))) for layer in (0, 1, 2, 4, 33)]
    streams += [stream(0, size, name="model.layers.3.mlp.experts.gate_up_proj"), stream(0, size, seed=2)]
    streams += [stream(0, size, seed=11, name="x"), stream(0, size, seed=1, name="1x")]  # no glue ambiguity
    streams += [stream(1 << high, size) for high in (32, 33, 34, 40, 62)]  # beyond 32 bits nothing repeats
    for a, b in itertools.combinations(streams, 2):
        assert not (a == b).any()
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1].item()) < 6 / math.sqrt(size)


@pytest.mark.parametrize("base", [0, 1 << 33])
def test_the_numbers_are_normal(base: int) -> None:
    count = 1 << 18
    x = stream(base, count)
    error = 1 / math.sqrt(count)
    assert x.isfinite().all()
    assert abs(x.mean().item()) < 5 * error
    assert abs(x.var().item() - 1) < 5 * math.sqrt(2) * error
    assert abs((x**3).mean().item()) < 5 * math.sqrt(15) * error
    assert abs((x**4).mean().item() - 3) < 5 * math.sqrt(96) * error
    for edge in (-3.0, -2.0, -1.0, 0.0, 0.5, 1.5, 2.5, 4.0):  # the distribution function
        probability = 0.5 * (1 + math.erf(edge / math.sqrt(2)))
        sigma = math.sqrt(probability * (1 - probability)) * error
        assert abs((x < edge).double().mean().item() - probability) < 5 * sigma + 1e-9
    for lag in (1, 2, 3, 64, 768, 2048, 4096):  # neighbours in rows and columns
        assert abs((x[lag:] * x[:-lag]).mean().item()) < 5 * error


def test_no_element_is_extreme_in_every_stream() -> None:
    """The first and last elements, and those around 2^32, over many names: normal too. Hash halves that cancel put
    6.76 standard deviations into element 0 of every parameter."""
    for offset in (0, 4095, (1 << 32) - 1, 1 << 32):
        x = torch.cat([stream(offset, 1, name=str(n)) for n in range(400)])
        assert abs(x.mean().item()) < 5 / math.sqrt(400)
        assert abs(x.var().item() - 1) < 5 * math.sqrt(2 / 400)


def test_uniforms_never_reach_zero_or_one() -> None:
    """log(0) would be infinite."""
    extremes = (torch.tensor([0, init._MASK], dtype=torch.float64) + 0.5) / 2**32
    assert extremes[0] > 0 and extremes[1] < 1
    u = init._uniform(torch.arange(100_000), 123, 456)
    assert u.min() > 0 and u.max() < 1


def test_the_mixer_is_a_bijection_with_avalanche() -> None:
    x = torch.arange(1 << 12) * 1048573
    mixed = init.mix(x)
    assert mixed.min() >= 0 and mixed.max() <= init._MASK
    assert mixed.unique().numel() == x.numel()
    for bit in range(32):
        flipped = mixed ^ init.mix(x ^ (1 << bit))
        changed = sum(((flipped >> b) & 1).double().mean().item() for b in range(32))
        assert 15 < changed < 17
