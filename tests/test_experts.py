"""Routed experts, forward and by-hand backward, against loops and autograd in float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pithtrain.ops.experts import Experts, ExpertSegment, Received
from pithtrain.ops.grouped import add_grouped_weight_grad, grouped_linear, grouped_linear_dx
from pithtrain.ops.linear import WeightGrad
from reference import assert_near, distinct_ids, gradients, leaves, make_weight, moe, poisoned_memory, random

H, I, E = 6, 5, 4  # noqa: E741
DTYPES = [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]

ROUTINGS = {
    "random, with padding": [[1, 0], [2, -1], [0, 3], [3, -1], [2, 1]],
    "two experts without rows": [[3, -1], [1, 3], [1, -1]],
    "all rows on one expert": [[2, -1]] * 5,
    "top-1": [[1], [0], [3], [1], [2], [1]],
    "one row": [[2, 0]],
    "every expert": [[3, 1, 0, 2], [0, 1, 2, 3]],
    "a row without slots": [[-1, -1], [0, 1], [-1, -1]],
    "no rows": [],
}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def make_experts(dtype: torch.dtype) -> Experts:
    return Experts(
        make_weight("gate_up", random(1, E, 2 * I, H, dtype=dtype)),
        make_weight("down", random(2, E, H, I, dtype=dtype)),
    )


def make_received(local: Tensor, dtype: torch.dtype, seed: int = 3) -> Received:
    """Padding carries a NaN weight: it must not be read."""
    weights = random(seed, *local.shape, dtype=torch.promote_types(dtype, torch.float32)).abs()
    rows = random(seed + 1, local.shape[0], H, dtype=dtype)
    return Received(rows, local, weights.where(local >= 0, float("nan")), int((local >= 0).sum()))


def run(experts: Experts, received: Received, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    segment = ExpertSegment(experts)
    out = segment.forward(received)
    ready: list[WeightGrad] = []
    drows, dweights = segment.backward(dout, ready)
    assert len(ready) == 2
    for weight in (experts.gate_up, experts.down):
        assert not weight.main_grad.any(), "a weight gradient did not wait"
    for closure in reversed(ready):
        closure()
    return out, drows, dweights


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_equal_to_loops_and_autograd(routing: list[list[int]], dtype: torch.dtype, tolerance: float) -> None:
    local = torch.tensor(routing, dtype=torch.int64).reshape(len(routing), -1 if routing else 2)
    experts, received = make_experts(dtype), make_received(local, dtype)
    dout = random(7, len(routing), H, dtype=dtype)
    out, drows, dweights = run(experts, received, dout)

    rows, weights, gate_up, down = leaves(
        received.rows_UH, received.weights_Uq.nan_to_num(), experts.gate_up.data, experts.down.data
    )
    expected = moe(rows, weights, local, gate_up, down)
    grads = gradients((expected * dout.double()).sum(), (rows, weights, gate_up, down))
    assert out.dtype == drows.dtype == dtype and dweights.dtype == received.weights_Uq.dtype
    found = (out, drows, dweights, experts.gate_up.main_grad, experts.down.main_grad)
    for a, b in zip(found, (expected.detach(), *grads), strict=True):
        assert_near(a, b, tolerance)
    for e in set(range(E)) - {x for row in routing for x in row}:
        assert not experts.gate_up.main_grad[e].any() and not experts.down.main_grad[e].any()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_micro_batches_in_flight_add_up(order: tuple[int, ...]) -> None:
    """Three calls through the same experts, backwards and closures in another order than the forwards."""
    experts = make_experts(torch.float64)
    batches = [(distinct_ids(b, 3 + b, E, 2), 10 * b) for b in range(3)]
    segments, douts = [], []
    for local, seed in batches:
        segments.append(ExpertSegment(experts))
        segments[-1].forward(make_received(local, torch.float64, seed))
        douts.append(random(seed + 7, local.shape[0], H))
    ready: list[WeightGrad] = []
    for b in order:
        segments[b].backward(douts[b], ready)
    for closure in reversed(ready):
        closure()
    gate_up, down = leaves(experts.gate_up.data, experts.down.data)
    total = torch.zeros((), dtype=torch.float64)
    for (local, seed), dout in zip(batches, douts, strict=True):
        received = make_received(local, torch.float64, seed)
        total = total + (moe(received.rows_UH, received.weights_Uq, local, gate_up, down) * dout).sum()
    for weight, grad in zip((experts.gate_up, experts.down), gradients(total, (gate_up, down)), strict=True):
        assert_near(weight.main_grad, grad, 1e-13)


def test_nan_neighbours_are_not_read() -> None:
    """A NaN row, a NaN gradient of a row, and NaN experts spoil only what depends on them."""
    local = torch.tensor([[1, 0], [0, -1], [2, 1]])
    clean, dirty = make_experts(torch.float64), make_experts(torch.float64)
    received, dout = make_received(local, torch.float64), random(7, 3, H)
    expected = run(clean, received, dout)
    for weight in (dirty.gate_up, dirty.down):
        weight.data[2:] = float("nan")  # expert 2 serves the last row only, expert 3 none
    out, drows, dweights = run(dirty, received, dout)
    for a, b in zip((out, drows, dweights), expected, strict=True):
        assert torch.equal(a[:2].nan_to_num(7), b[:2].nan_to_num(7))
    assert out[2].isnan().all() and drows[2].isnan().all()
    assert dweights[2, 0].isnan() and dweights[2, 1] == expected[2][2, 1]
    for weight, same in ((dirty.gate_up, clean.gate_up), (dirty.down, clean.down)):
        assert torch.equal(weight.main_grad[:2], same.main_grad[:2])
        assert not weight.main_grad[3].any()

    spoilt = make_experts(torch.float64)
    rows, dout = received.rows_UH.clone(), dout.clone()
    rows[2], dout[2] = float("nan"), float("nan")
    out, drows, dweights = run(spoilt, Received(rows, local, received.weights_Uq, received.num_slots), dout)
    for a, b in zip((out, drows, dweights), expected, strict=True):
        assert torch.equal(a[:2], b[:2])
    assert out[2].isnan().all() and drows[2].isnan().all() and dweights[2].isnan().all()
    for weight, same in ((spoilt.gate_up, clean.gate_up), (spoilt.down, clean.down)):
        assert torch.equal(weight.main_grad[0], same.main_grad[0])  # expert 1 and 2 did serve that row


def test_padding_has_gradient_zero() -> None:
    experts = make_experts(torch.float32)
    _, _, dweights = run(
        experts,
        make_received(torch.tensor([[2, -1, -1], [0, 1, -1]]), torch.float32),
        random(7, 2, H, dtype=torch.float32),
    )
    assert (dweights != 0).tolist() == [[True, False, False], [True, True, False]]


def test_the_weight_enters_before_the_one_rounding() -> None:
    """bf16: a = w * silu(g) u is rounded once. A weight of 1 + 3/1024 is lost when it is itself rounded to bf16."""
    gate_up = torch.tensor([[[64.0], [1.5 / 64]]], dtype=torch.bfloat16)  # silu(64) = 64 exactly
    down = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[1 + 3 / 1024]])
    segment = ExpertSegment(Experts(make_weight("gate_up", gate_up), make_weight("down", down)))
    out = segment.forward(Received(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[0]]), weight, 1))
    assert out.item() == torch.tensor(1.5 * weight.item()).bfloat16().item() > 1.5
    (_, dweight) = segment.backward(torch.ones(1, 1, dtype=torch.bfloat16), [])
    assert dweight.dtype == torch.float32 and dweight.item() == 1.5


@pytest.mark.parametrize("ends", [[0, 0, 0], [3, 3, 3], [0, 3, 3], [1, 1, 3], [0, 0, 3]])
def test_grouped_matmuls(ends: list[int]) -> None:
    rows = ends[-1]
    w_ENK, x_RK, dy_RN = random(0, 3, 4, 5), random(1, rows, 5), random(2, rows, 4)
    main = random(3, 3, 4, 5)
    expected_main = main.clone()
    ends_E = torch.tensor(ends, dtype=torch.int32)
    y, dx = grouped_linear(x_RK, w_ENK, ends_E), grouped_linear_dx(dy_RN, w_ENK, ends_E)
    add_grouped_weight_grad(main, dy_RN, x_RK, ends_E)
    assert y.shape == (rows, 4) and dx.shape == (rows, 5)
    for r in range(rows):
        e = sum(end <= r for end in ends)
        assert_near(y[r], w_ENK[e] @ x_RK[r], 1e-14)
        assert_near(dx[r], w_ENK[e].t() @ dy_RN[r], 1e-14)
        expected_main[e] += torch.outer(dy_RN[r], x_RK[r])
    assert_near(main, expected_main, 1e-14)
