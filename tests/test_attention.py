"""The plain attention, oracle of every other path, against loops over heads and positions."""

import math

import pytest
import torch

from pithtrain.ops.attention import attention, plain_attention
from reference import assert_near, leaves, random


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)]
)
@pytest.mark.parametrize(("heads", "groups", "width_v"), [(4, 4, 6), (4, 2, 6), (6, 1, 6), (4, 2, 3)])
def test_equal_to_loops(heads: int, groups: int, width_v: int, dtype: torch.dtype, tolerance: float) -> None:
    """Grouped queries, and values of another width than keys."""
    q, k, v = (
        random(i, 2, 5, n, d, dtype=dtype) for i, (n, d) in enumerate([(heads, 6), (groups, 6), (groups, width_v)])
    )
    out = attention(q, k, v, scale=0.3)
    assert out.dtype == dtype
    expected = torch.zeros(2, 5, heads, width_v, dtype=torch.float64)
    for b in range(2):
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(5):
                powers = [math.exp(0.3 * (q[b, i, h].double() @ k[b, j, g].double()).item()) for j in range(i + 1)]
                for j, power in enumerate(powers):
                    expected[b, i, h] += power / sum(powers) * v[b, j, g].double()
    assert_near(out, expected, tolerance)


def test_gradients() -> None:
    q, k, v = leaves(random(0, 1, 4, 2, 4), random(1, 1, 4, 1, 4), random(2, 1, 4, 1, 3))
    assert torch.autograd.gradcheck(lambda q, k, v: plain_attention(q, k, v, 0.5), (q, k, v))


def test_a_later_token_changes_nothing_before_it() -> None:
    q, k, v = (random(i, 1, 8, 2, 4, dtype=torch.float32) for i in range(3))
    before = plain_attention(q, k, v, 0.5)
    for x in (q, k, v):
        x[:, 5] *= 100
    assert torch.equal(plain_attention(q, k, v, 0.5)[:, :5], before[:, :5])
