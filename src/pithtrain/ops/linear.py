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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pithtrain.ops import fp8
from pithtrain.ops.fp8 import Fp8, Fp8Weight, Recipe

WeightGrad = Callable[[], None]  # a closure that adds one contribution to one main gradient


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16 and fp32, float64 for float64: what sums, norms, softmax and main gradients use."""
    return torch.promote_types(dtype, torch.float32)


def has_kernel(x: Tensor) -> bool:
    """Whether ops take their CUDA kernels for it: bf16 on a GPU. fp32 and float64 run the plain twins anywhere."""
    return x.is_cuda and x.dtype == torch.bfloat16


@dataclass
class Weight:
    """One parameter as the kernels see it on this rank.

    `data` is whole (this ep rank's experts, for expert weights), in compute dtype; `main_grad` has its shape, in
    `accumulate_dtype`. `add` is how every contribution arrives, so that the owner of `main_grad` can count them.
    `beta`, as in a GEMM's `beta C + A B`: 0 until the step's first contribution, which overwrites what is there, so
    that nothing clears 4 bytes a parameter and the first contribution reads none; then 1.

    With a `recipe` products take it in 8 bits. Those forms are made when a version of `data` is first used, and serve
    all micro-batches, forward and backward, and an evaluation. Whoever writes `data` raises `version`: torch's own
    count misses collectives and our kernels, and catches what else writes in place.
    """

    name: str
    data: Tensor
    main_grad: Tensor
    contributed: Callable[[], None] = field(default=lambda: None)
    beta: int = 1
    recipe: Recipe | None = None
    version: int = 0
    _forms: tuple[tuple[int, int], Fp8Weight] | None = None

    def operand(self) -> Tensor | Fp8Weight:
        """What a product takes: `data`, or its 8-bit forms. `data` must have arrived."""
        if self.recipe is None:
            return self.data
        version = self.version, self.data._version
        if self._forms is None or self._forms[0] != version:
            self._forms = None  # its memory serves the new ones
            self._forms = version, fp8.quantize_weight(self.data, self.recipe)
        return self._forms[1]

    def add(self, contribution: Callable[[Tensor, int], Any]) -> None:
        """main_grad = beta main_grad + what `contribution(main_grad, beta)` brings; tells the owner."""
        with torch.no_grad():
            contribution(self.main_grad, self.beta)
        self.beta = 1
        self.contributed()


def split(weights: Mapping[str, Weight], prefix: str) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """What a `Region` of the layer `prefix` takes: matrices with their biases, and vectors (gains, sinks). Names lose
    `prefix` and `.weight`."""
    own = {n.removeprefix(prefix).removesuffix(".weight"): w for n, w in weights.items() if n.startswith(prefix)}
    vectors = {name: own.pop(name) for name, w in [*own.items()] if w.data.ndim == 1 and not name.endswith("bias")}
    return own, vectors


def take(weights: dict[str, Weight], *names: str) -> dict[str, Weight]:
    """Those of `names` that are there, which from now on are not."""
    return {name: weights.pop(name) for name in names if name in weights}


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tap: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


class _Through(torch.autograd.Function):
    """One more output, which nobody reads and nothing writes, whose gradient is its input's: in one graph with the
    input's other gradient, so that a compiler adds the two where the other is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _WideLinear(torch.autograd.Function):
    """x W^T of a bf16 x and an fp32 W [out, in], in fp32, on tensor cores: W is the sum of three bf16 matrices but for
    its last bit or two, and their products with x are exact and summed in fp32. Four times as fast as the fp32 GEMM. dx
    is rounded to bf16 in any case and takes one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        high = w.to(x.dtype)
        rest = w - high
        middle = rest.to(x.dtype)
        parts = torch.cat((high, middle, (rest - middle).to(x.dtype)))
        ctx.save_for_backward(high)
        y = torch.mm(x.flatten(0, -2), parts.t(), out_dtype=w.dtype)
        return y.unflatten(-1, (3, -1)).sum(-2).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (high,) = ctx.saved_tensors
        return grads[0].to(high.dtype) @ high, None


def add_weight_grad(main_grad: Tensor, beta: int, dy: Tensor, x: Tensor) -> None:
    """main_grad [out, in] = beta main_grad + dy^T x in main_grad's dtype; dy [..., out], x [..., in].

    On CUDA a bf16 pair accumulates into fp32 inside the GEMM, which costs no extra pass (PERFORMANCE.md section 7).
    """
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if dy.is_cuda and dy.dtype == x.dtype != main_grad.dtype:
        torch.addmm(main_grad, dy.t(), x, beta=beta, out_dtype=main_grad.dtype, out=main_grad)
    elif has_kernel(x):  # dy is fp32: two bf16 parts of it hold 16 bits of its mantissa
        high = dy.to(x.dtype)
        for part, factor in ((high, beta), ((dy - high).to(x.dtype), 1)):
            add_weight_grad(main_grad, factor, part, x)
    else:
        main_grad.addmm_(dy.to(main_grad.dtype).t(), x.to(main_grad.dtype), beta=beta)


def add_sum(main_grad: Tensor, beta: int, value: Tensor) -> None:
    """main_grad = beta main_grad + value, in main_grad's dtype."""
    main_grad.add_(value) if beta else main_grad.copy_(value)


class Linears:
    """The matmuls of one call of one region: `lin("q_proj", x)` is x W^T (+ b) and remembers what dW needs."""

    def __init__(self, weights: Mapping[str, Any], taps: dict[str, Tensor] | None):
        """`weights`: `Weight.operand()` of matrices, and of biases under `NAME.bias`. `taps`: those that exist already,
        new ones are added; None where no gradient is wanted."""
        self._weights, self._taps = weights, taps
        self._last: tuple[Tensor, Fp8] | None = None
        self.operands: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the weight's dtype (a router weight is fp32, so is its product)."""
        weight, bias = self._weights[name], self._weights.get(f"{name}.bias")
        if isinstance(weight, Fp8Weight):
            y = fp8.linear(x, self._quantized(x, weight.recipe), weight)
            y = y if bias is None else y + bias.to(y.dtype)
        elif has_kernel(x) and weight.dtype == torch.float32:
            y = _WideLinear.apply(x, weight)
            assert isinstance(y, Tensor)
            y = y if bias is None else y + bias
        else:
            y = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
        if self._taps is None:
            return y
        if name not in self._taps:
            self._taps[name] = _tap(y.shape, y.dtype, y.device)
        self.operands[name] = x.detach()
        return _Tap.apply(y, self._taps[name])  # pyright: ignore[reportReturnType]

    def _quantized(self, x: Tensor, recipe: Recipe) -> Fp8:
        """Once for linears that follow each other with the same x: q, k and v; gate and up."""
        if self._last is None or self._last[0] is not x:
            self._last = x, fp8.quantize(x.detach().reshape(-1, x.shape[-1]), recipe)
        return self._last[1]


def _tap(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device).expand(shape).requires_grad_()


def _closures(weight: Weight, bias: Weight | None, dy: Tensor, x: Tensor) -> list[WeightGrad]:
    """One per weight and bias; they hold operands, never modules."""
    closures: list[WeightGrad] = [lambda: weight.add(lambda main, beta: add_weight_grad(main, beta, dy, x))]
    if bias is not None:
        dy_TN = dy.reshape(-1, dy.shape[-1])
        closures.append(lambda: bias.add(lambda main, beta: add_sum(main, beta, dy_TN.sum(0, dtype=main.dtype))))
    return closures


Called = tuple[tuple[Tensor, ...], Any, dict[str, Tensor]]  # outputs, extra, operand of each matmul


def call(
    fn: Callable[..., tuple[tuple[Tensor, ...], Any]],
    weights: Mapping[str, Tensor | Fp8Weight],
    vectors: Mapping[str, Tensor],
    taps: dict[str, Tensor] | None,
    inputs: tuple[Tensor, ...],
    through: bool = False,
) -> Called:
    """One call of a region's function, as a function of every tensor but those that are the same in all calls. This is
    what `torch.compile` sees: one graph per kind of layer, whatever the number of layers and micro-batches."""
    lin = Linears(weights, taps)
    outputs, extra = fn(lin, vectors, *inputs)
    if through:
        outputs = (*outputs, _Through.apply(inputs[0]))
    return outputs, extra, lin.operands


@dataclass(frozen=True)
class Region:
    """A differentiable piece of a layer between two communication edges, as a function of its parameters.

    `fn(lin, vectors, *inputs) -> (outputs, extra)`: `lin` applies the matmul weights named in `matrices`, `vectors`
    holds the small parameters (norm gains) by name; `outputs` is a tuple of differentiable tensors, `extra` is
    anything that carries no gradient: a `Routing` or nothing. A rerun with a Routing gets its ids as one more input.
    `call` is the function above, or its compiled form, which wants `taps`: shape and dtype of each matmul's product.
    """

    fn: Callable[..., tuple[tuple[Tensor, ...], Any]]
    matrices: Mapping[str, Weight]
    vectors: Mapping[str, Weight]
    call: Callable[..., Called] = call
    taps: Mapping[str, tuple[torch.Size, torch.dtype]] = field(
        default_factory=dict[str, tuple[torch.Size, torch.dtype]]
    )


def compiled(
    region: Region, compiled_call: Callable[..., Called], *like: tuple[tuple[int, ...], torch.dtype]
) -> Region:
    """The region with `compiled_call` in place of `call`. `like`: shape and type of each input. Nothing is computed:
    the shapes of its products are found with tensors that have no memory."""
    taps: dict[str, Tensor] = {}
    weights = {name: w.data for name, w in region.matrices.items()}
    vectors = {name: w.data for name, w in region.vectors.items()}
    device = next(iter((*weights.values(), *vectors.values()))).device
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in like)
        fake = [{name: mode.from_tensor(x) for name, x in group.items()} for group in (weights, vectors)]
        call(region.fn, fake[0], fake[1], taps, inputs)
    return replace(region, call=compiled_call, taps={name: (x.shape, x.dtype) for name, x in taps.items()})


@dataclass(frozen=True)
class _Graph:
    """What a backward takes of one call. The outputs are not in it: their places in autograd's graph are enough."""

    edges: tuple[GradientEdge, ...]
    shapes: tuple[torch.Size, ...]
    vectors: dict[str, Tensor]
    taps: dict[str, Tensor]
    operands: dict[str, Tensor]


class Segment:
    """One call of a region, cut off from its neighbours by detached leaves; its backward gives input gradients at
    once and appends weight-gradient closures to `ready`.

    Without `keep` the call leaves its inputs and no graph, and is made again for the backward. Expert ids are given to
    the rerun and not chosen again: other kernels may round otherwise, turn a near tie, and with it the shapes of all
    that came after. What else the rerun leaves behind (counts, losses) has been told once and is let go.

    `given`: inputs behind the others that have no gradient. `through`: the first input also goes on elsewhere, and
    `backward` takes its gradient from there behind those of the outputs.
    """

    def __init__(
        self, region: Region, *inputs: Tensor, given: tuple[Tensor, ...] = (), keep: bool = True, through: bool = False
    ):
        self._region, self._given, self._through = region, given, through
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        self._graph: _Graph | None = None
        if keep:
            outputs, self.extra = self._record()
        else:
            weights = {name: w.operand() for name, w in region.matrices.items()}
            vectors = {name: w.data for name, w in region.vectors.items()}
            with torch.no_grad():
                outputs, self.extra, _ = region.call(region.fn, weights, vectors, None, (*self._leaves, *given))
        self.outputs = tuple(y.detach() for y in outputs)

    def take(self) -> tuple[Tensor, ...]:
        """The outputs, which from now on the caller alone keeps."""
        outputs, self.outputs = self.outputs, ()
        return outputs

    def rerun(self) -> None:
        """Make the graph again, if it was not kept. The backward does; earlier, it may hide a transfer."""
        if self._graph is None:
            self._record(*(() if self.extra is None else (self.extra.ids_TK,)))

    def _record(self, *ids_TK: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        region = self._region
        weights = {name: w.operand() for name, w in region.matrices.items()}
        vectors = {name: w.data.detach().requires_grad_() for name, w in region.vectors.items()}
        taps = {name: _tap(*like, self._leaves[0].device) for name, like in region.taps.items()}
        with torch.enable_grad():
            inputs = (*self._leaves, *self._given, *ids_TK)
            outputs, extra, operands = region.call(region.fn, weights, vectors, taps, inputs, self._through)
        edges, shapes = tuple(get_gradient_edge(y) for y in outputs), tuple(y.shape for y in outputs)
        self._graph = _Graph(edges, shapes, vectors, taps, operands)
        return outputs[:-1] if self._through else outputs, extra

    def backward(self, grads: Sequence[Tensor], ready: list[WeightGrad]) -> list[Tensor]:
        """Gradients of the inputs, in order, from those of the outputs (viewed in their shapes). Releases the graph."""
        self.rerun()
        graph, region = self._graph, self._region
        assert graph is not None
        grads = [g.view(shape) for g, shape in zip(grads, graph.shapes, strict=True)]
        wanted = (*self._leaves, *graph.vectors.values(), *graph.taps.values())
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(graph.edges, wanted, grads)
        n, v = len(self._leaves), len(graph.vectors)
        for name, grad in zip(graph.vectors, found[n : n + v], strict=True):
            region.vectors[name].add(lambda main, beta, grad=grad: add_sum(main, beta, grad))
        for name, dy in zip(graph.taps, found[n + v :], strict=True):
            bias = region.matrices.get(f"{name}.bias")
            ready.extend(_closures(region.matrices[name], bias, dy, graph.operands[name]))
        del self._graph, self._leaves
        return list(found[:n])
