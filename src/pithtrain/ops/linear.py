"""Weights, and matmuls whose weight gradient can wait.

A pipeline stage wants `dx` at once (the previous stage is waiting for it) and `dW` whenever the device is idle. torch's
autograd gives both together. So a matmul weight never requires grad here; instead each linear has a *tap*: an extra
input shaped like its output y, through which autograd hands out `dy`, while `x` leaves as a recorded operand:

    y = F.linear(x, W.detach());  y = Tap.apply(y, tap)        # autograd.grad(..., [tap]) -> dy
    closure: W.main_grad += dy^T x                              # fp32, run now or later: the pipeline decides

No hook, no mutation inside autograd, and the same code whether eager or compiled. A tap is `empty(1).expand(y.shape)`:
no memory, never read. Everything is functional, so several micro-batches can be in flight through the same weights.

Legend: T tokens of a micro-batch, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WeightGrad = Callable[[], None]  # a closure that adds one contribution to one main gradient


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16 and fp32, float64 for float64: what sums, norms, softmax and main gradients use."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Weight:
    """One parameter as the kernels see it on this rank.

    `data` is whole (this ep rank's experts, for expert weights), in compute dtype; `main_grad` has its shape, in
    `accumulate_dtype`. `add` is how every contribution arrives, so that the owner of `main_grad` can count them.
    """

    name: str
    data: Tensor
    main_grad: Tensor
    contributed: Callable[[], None] = field(default=lambda: None)

    def add(self, contribution: Callable[[Tensor], Any]) -> None:
        """Apply `contribution` to main_grad and tell the owner."""
        with torch.no_grad():
            contribution(self.main_grad)
        self.contributed()


def split(weights: Mapping[str, Weight], prefix: str) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """What a `Region` of the layer `prefix` takes: matrices with their biases, and vectors (gains, sinks). Names lose
    `prefix` and `.weight`."""
    own = {n.removeprefix(prefix).removesuffix(".weight"): w for n, w in weights.items() if n.startswith(prefix)}
    vectors = {name: own.pop(name) for name, w in [*own.items()] if w.data.ndim == 1 and not name.endswith("bias")}
    return own, vectors


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tap: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def add_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad [out, in] += dy^T x in main_grad's dtype; dy [..., out], x [..., in].

    On CUDA a bf16 pair accumulates into fp32 inside the GEMM, which costs no extra pass (PERFORMANCE.md section 7).
    """
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if dy.is_cuda and dy.dtype == x.dtype != main_grad.dtype:
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(dy.to(main_grad.dtype).t(), x.to(main_grad.dtype))


class Linears:
    """The matmuls of one call of one region: `lin("q_proj", x)` is x W^T (+ b) and remembers what dW needs."""

    def __init__(self, weights: Mapping[str, Weight], with_grad: bool):
        self._weights = weights
        self._with_grad = with_grad
        self.taps: dict[str, Tensor] = {}
        self.operands: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the weight's dtype (a router weight is fp32, so is its product)."""
        weight = self._weights[name].data.detach()
        bias = self._weights.get(f"{name}.bias")
        y = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.data.detach().to(weight.dtype))
        if not self._with_grad:
            return y
        self.taps[name] = y.detach().new_empty(1).expand(y.shape).requires_grad_()
        self.operands[name] = x.detach()
        return _Tap.apply(y, self.taps[name])  # pyright: ignore[reportReturnType]

    def weight_grads(self, dys: Mapping[str, Tensor]) -> list[WeightGrad]:
        """One closure per weight and bias; they hold operands, never modules."""
        return [
            closure
            for name, dy in dys.items()
            for closure in _closures(self._weights[name], self._weights.get(f"{name}.bias"), dy, self.operands[name])
        ]


def _closures(weight: Weight, bias: Weight | None, dy: Tensor, x: Tensor) -> list[WeightGrad]:
    closures: list[WeightGrad] = [lambda: weight.add(lambda main: add_weight_grad(main, dy, x))]
    if bias is not None:
        closures.append(lambda: bias.add(lambda main: main.add_(dy.reshape(-1, dy.shape[-1]).sum(0, dtype=main.dtype))))
    return closures


@dataclass(frozen=True)
class Region:
    """A differentiable piece of a layer between two communication edges, as a function of its parameters.

    `fn(lin, vectors, *inputs) -> (outputs, extra)`: `lin` applies the matmul weights named in `matrices`, `vectors`
    holds the small parameters (norm gains) by name; `outputs` is a tuple of differentiable tensors, `extra` is
    anything that carries no gradient.
    """

    fn: Callable[..., tuple[tuple[Tensor, ...], Any]]
    matrices: Mapping[str, Weight]
    vectors: Mapping[str, Weight]


class Segment:
    """One call of a region, cut off from its neighbours by detached leaves; its backward gives input gradients at
    once and appends weight-gradient closures to `ready`."""

    def __init__(self, region: Region, *inputs: Tensor):
        self._region = region
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        self._vectors = {name: w.data.detach().requires_grad_() for name, w in region.vectors.items()}
        self._lin = Linears(region.matrices, with_grad=True)
        with torch.enable_grad():
            self._outputs, self.extra = region.fn(self._lin, self._vectors, *self._leaves)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(y.detach() for y in self._outputs)

    def backward(self, grads: Sequence[Tensor], ready: list[WeightGrad]) -> list[Tensor]:
        """Gradients of the inputs, in order, from those of the outputs (viewed in their shapes). Releases the graph."""
        grads = [g.view_as(y) for g, y in zip(grads, self._outputs, strict=True)]
        vectors, taps = self._vectors, self._lin.taps
        wanted = (*self._leaves, *vectors.values(), *taps.values())
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(self._outputs, wanted, grads)
        n, v = len(self._leaves), len(vectors)
        for name, grad in zip(vectors, found[n : n + v], strict=True):
            self._region.vectors[name].add(lambda main, grad=grad: main.add_(grad))
        ready.extend(self._lin.weight_grads(dict(zip(taps, found[n + v :], strict=True))))
        del self._outputs, self._leaves, self._vectors, self._lin
        return list(found[:n])
