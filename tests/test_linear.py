"""Linears with taps against plain autograd in float64: same dx, same dW, whenever and in whatever order dW runs."""

import itertools
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops.linear import Linears, Region, Segment, Weight, WeightGrad, accumulate_dtype, add_weight_grad
from reference import assert_near, leaves, make_weight, poisoned_memory, random

SHAPES = {"up": (7, 5), "up.bias": (7,), "side": (7, 5), "down": (4, 7), "down.bias": (4,)}
GAIN = (5,)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """A tap is never read, so it may as well be NaN."""
    with poisoned_memory():
        yield


def body(
    lin: Callable[[str, Tensor], Tensor], vectors: Mapping[str, Tensor], x: Tensor, z: Tensor
) -> tuple[tuple[Tensor, Tensor], str]:
    """Two inputs, two outputs, a shared operand, a gain, biases on some."""
    n = x * vectors["gain"]
    mid = F.silu(lin("up", n)) * lin("side", n)
    return (lin("down", mid) + z, z * z), "extra"


def make_region(dtype: torch.dtype = torch.float64) -> Region:
    matrices = {
        name: make_weight(name, random(i, *shape, dtype=dtype)) for i, (name, shape) in enumerate(SHAPES.items())
    }
    return Region(body, matrices, {"gain": make_weight("gain", random(9, *GAIN, dtype=dtype))})


def inputs(batch: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, z and the gradients of the two outputs of one micro-batch [2, 3, ...]."""
    return tuple(random(100 * batch + i, 2, 3, width, dtype=dtype) for i, width in enumerate((5, 4, 4, 4)))


def by_autograd(region: Region, batches: list[int]) -> tuple[list[tuple[Tensor, ...]], dict[str, Tensor]]:
    """Input gradients per micro-batch and parameter gradients over all, from one plain float64 graph."""
    every = {**region.matrices, **region.vectors}
    parameters = dict(zip(every, leaves(*(w.data for w in every.values())), strict=True))
    dxs: list[tuple[Tensor, ...]] = []
    total = torch.zeros((), dtype=torch.float64)
    asked: list[Tensor] = []
    for batch in batches:
        x, z, dy0, dy1 = leaves(*inputs(batch))
        lin = lambda name, v: F.linear(v, parameters[name], parameters.get(f"{name}.bias"))  # noqa: E731
        (y0, y1), _ = body(lin, parameters, x, z)
        total = total + (y0 * dy0.detach()).sum() + (y1 * dy1.detach()).sum()
        asked += [x, z]
    found = torch.autograd.grad(total, [*asked, *parameters.values()])
    dxs = [(found[2 * i], found[2 * i + 1]) for i in range(len(batches))]
    return dxs, dict(zip(parameters, found[len(asked) :], strict=True))


def main_grads(region: Region) -> dict[str, Tensor]:
    return {name: w.main_grad for name, w in {**region.matrices, **region.vectors}.items()}


def test_one_call_gives_the_gradients_of_autograd() -> None:
    region = make_region()
    x, z, *dys = inputs(0)
    segment = Segment(region, x, z)
    assert segment.extra == "extra"
    assert not any(y.requires_grad for y in segment.outputs)
    ready: list[WeightGrad] = []
    found = segment.backward(tuple(dys), ready)
    (expected,), weights = by_autograd(region, [0])
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 1e-14)
    assert len(ready) == len(SHAPES)  # one per weight and bias
    for name in SHAPES:
        assert not main_grads(region)[name].any(), f"the gradient of {name} did not wait"
    for closure in ready:
        closure()
    for name, grad in main_grads(region).items():
        assert_near(grad, weights[name], 1e-14)
    assert x.grad is None and all(w.data.grad is None for w in region.matrices.values())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_micro_batches_in_flight_and_closures_in_any_order(order: tuple[int, ...]) -> None:
    """Three forwards through one weight, backwards in any order, every closure afterwards, last one first."""
    region = make_region()
    flying = [Segment(region, *inputs(batch)[:2]) for batch in range(3)]
    ready: list[WeightGrad] = []
    dxs: dict[int, list[Tensor]] = {}
    for batch in order:
        dxs[batch] = flying[batch].backward(inputs(batch)[2:], ready)
    for closure in reversed(ready):
        closure()
    expected, weights = by_autograd(region, [0, 1, 2])
    for batch in range(3):
        for a, b in zip(dxs[batch], expected[batch], strict=True):
            assert_near(a, b, 1e-14)
    for name, grad in main_grads(region).items():
        assert_near(grad, weights[name], 1e-14)


def test_what_goes_on_elsewhere_brings_its_gradient_along() -> None:
    """In the graph, beside the input's own; the output that stands for it is neither told nor read."""
    region, (x, z, dy0, dy1) = make_region(), inputs(0)
    alone, both = (Segment(region, x, z, through=through) for through in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(alone.take(), both.take(), strict=True))
    along = random(77, *x.shape)
    (dx, dz), (dx_both, dz_both) = alone.backward([dy0, dy1], []), both.backward([dy0, dy1, along], [])
    assert_near(dx_both, dx + along, 1e-15)
    assert torch.equal(dz, dz_both)


def test_gradients_are_viewed_in_the_shape_of_the_outputs() -> None:
    """The loss hands back [T, H] for an output of [B, S, H]."""
    region = make_region()
    x, z, dy0, dy1 = inputs(0)
    found = Segment(region, x, z).backward((dy0.flatten(0, 1), dy1.flatten(0, 1)), [])
    for a, b in zip(found, by_autograd(region, [0])[0][0], strict=True):
        assert_near(a, b, 1e-14)


def test_without_gradients_a_linear_is_a_linear() -> None:
    region = make_region()
    lin = Linears({name: w.data for name, w in region.matrices.items()}, None)
    x = inputs(0)[0]
    assert torch.equal(lin("up", x), F.linear(x, region.matrices["up"].data, region.matrices["up.bias"].data))
    assert torch.equal(lin("side", x), F.linear(x, region.matrices["side"].data))
    assert not lin.operands


def test_every_contribution_is_counted_once() -> None:
    counted: dict[str, int] = {}

    def weight(name: str, shape: tuple[int, ...]) -> Weight:
        data = random(1, *shape)
        return Weight(name, data, torch.zeros_like(data), lambda: counted.__setitem__(name, counted.get(name, 0) + 1))

    region = Region(body, {n: weight(n, s) for n, s in SHAPES.items()}, {"gain": weight("gain", GAIN)})
    ready: list[WeightGrad] = []
    for batch in range(2):
        x, z, *dys = inputs(batch)
        Segment(region, x, z).backward(tuple(dys), ready)
    assert counted == {"gain": 2}  # a gain is no matmul weight: its gradient is a by-product and does not wait
    for closure in ready:
        closure()
    assert counted == dict.fromkeys([*SHAPES, "gain"], 2)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_a_router_weight_stays_fp32(compute: torch.dtype) -> None:
    """fp32 weight, bf16 input: fp32 product, fp32 gradient of the weight, bf16 gradient of the input."""
    weight = make_weight("gate", random(0, 6, 5, dtype=torch.float32))
    region = Region(lambda lin, vectors, x: ((lin("gate", x),), None), {"gate": weight}, {})
    x, dy = random(1, 3, 5, dtype=compute), random(2, 3, 6, dtype=torch.float32)
    segment = Segment(region, x)
    assert segment.outputs[0].dtype == torch.float32
    assert_near(segment.outputs[0], x.double() @ weight.data.double().t(), 1e-6)
    ready: list[WeightGrad] = []
    (dx,) = segment.backward((dy,), ready)
    ready[0]()
    assert dx.dtype == compute
    assert_near(dx, dy.double() @ weight.data.double(), 4e-3 if compute == torch.bfloat16 else 1e-6)
    assert weight.main_grad.dtype == torch.float32
    assert_near(weight.main_grad, dy.double().t() @ x.double(), 1e-6)


def test_case_061_near_equal_scores_stay_apart() -> None:
    """Two probabilities that bf16 would tie: the router's product of a bf16 token keeps them in order."""
    weight = make_weight("gate", torch.tensor([[0.0], [4e-4]]))
    lin = Linears({"gate": weight.data}, None)
    low, high = lin("gate", torch.ones(1, 1, dtype=torch.bfloat16)).softmax(-1)[0].tolist()
    assert low < high
    assert torch.tensor(low).bfloat16() == torch.tensor(high).bfloat16()


def test_512_micro_batches_add_up_in_fp32() -> None:
    """bf16 operands, fp32 sums: 512 equal contributions are 512 times one, to fp32 rounding. In bf16 it would stall."""
    region = make_region(torch.bfloat16)
    x, z, *dys = inputs(0, torch.bfloat16)
    ready: list[WeightGrad] = []
    Segment(region, x, z).backward(tuple(dys), ready)
    sums: list[dict[str, Tensor]] = []
    for count in (1, 511):
        for closure in ready * count:
            closure()
        sums.append({name: region.matrices[name].main_grad.clone() for name in SHAPES})
    for name, once in sums[0].items():
        assert once.dtype == torch.float32
        assert_near(sums[1][name], 512 * once, 512 * 2**-24)  # every addition may round the same way


def test_accumulate_dtypes() -> None:
    assert [accumulate_dtype(d) for d in (torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]


def test_add_weight_grad_adds_over_all_leading_dims() -> None:
    main = random(0, 3, 2)
    dy, x = random(1, 4, 5, 3), random(2, 4, 5, 2)
    expected = main + torch.einsum("abo,abi->oi", dy, x)
    add_weight_grad(main, 1, dy, x)
    assert_near(main, expected, 1e-14)
    before = main.clone()
    add_weight_grad(main, 1, dy[:0], x[:0])
    assert torch.equal(main, before)
    add_weight_grad(main.fill_(float("nan")), 0, dy, x)
    assert_near(main, torch.einsum("abo,abi->oi", dy, x), 1e-14)
    add_weight_grad(main.fill_(float("nan")), 0, dy[:0], x[:0])
    assert not main.any()
