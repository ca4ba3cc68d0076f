"""One model stage's forward and backward, as generators that pause at every communication edge.

A layer is segments of compute joined by edges (`ops/dispatch`). A generator yields right after it has launched a
transfer, so whoever drives it decides what runs meanwhile: a plain forward or backward exhausts one generator, an
overlapped pair alternates two, backward first (`overlap`). Per MoE layer, forward j beside backward l:

    turn  who  queued on compute                   launched          hidden by this turn's compute
    1     B    A'(l+1), then W(A(l+1))             COMBINE'(l)       COMBINE(j-1), COMBINE'(l)
    2     F    sum of j-1, A(j), X(j)              META(j)           COMBINE'(l)
    3     B    E'(l)                               DISPATCH'(l)      META(j) and the host's wait
    4     F    nothing: the host reads counts      DISPATCH(j)
    5     B    X'(l), W(E(l)), W(X(l))                               DISPATCH(j), DISPATCH'(l)
    6     F    E(j)                                COMBINE(j)        DISPATCH'(l)

A: attention (with its ring: `ops/ring`) and router; X: shared experts; E: routed experts; ': backward for inputs;
W: weight gradients.
A backward yields the weight-gradient closures that have become ready; the driver runs them or puts them aside.

What is kept from a forward to its backward, by `Stage.recompute`, and what Qwen3-30B-A3B keeps at ep = 8 (ep = 1) in
KiB per token and layer in bf16, indices, routing and what a compiler chooses otherwise apart:

    none        A: operands of matmuls and what autograd saves, 43; E: slots and gate_up, 56                 99 (99)
    selective   A as before; E: received rows, of which slots are gathered again, and gate_up, 45            88 (67)
    full        A and X: their input alone, 4; E: received rows, 21. A, X and gate_up run again              25 (8)

In 8 bits `none` keeps of E what `selective` keeps (`ops/experts`). Edges never run again, nor does the last norm,
which keeps its input anyway. A rerun is queued before what its backward waits for, so it hides COMBINE' (E) and
DISPATCH' (A).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pithtrain.models.contract import Layer
from pithtrain.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_loss
from pithtrain.ops.dispatch import Edge, Lane, open_exchange
from pithtrain.ops.experts import ExpertSegment, Recompute
from pithtrain.ops.linear import Region, Segment, Weight, WeightGrad
from pithtrain.ops.parts import Part
from pithtrain.ops.ring import Attention, Ring
from pithtrain.ops.router import CutSets, Routing

Closures = list[WeightGrad]
RunClosures = Callable[[Closures], None]
F = TypeVar("F")
B = TypeVar("B")
Turn = TypeVar("Turn")


@dataclass(frozen=True)
class Head:
    """The last stage's end: the final norm, and the linear whose product meets the labels; `z_coef` of its z-loss."""

    norm: Region
    weight: Weight
    z_coef: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One stage's part of the model on this rank; `embedding` on stage 0 and `head` on stage 2P-1. `recompute`: what
    its backward computes again. `arrived`: waits for the weights of a layer, or of a name (`Zero.arrived`). `tables`
    [2, positions, D / 2]: rotary, where there are layers."""

    layers: tuple[Layer, ...]
    embedding: Weight | None
    head: Head | None
    recompute: Recompute = "none"
    arrived: Callable[[int | str], None] = lambda unit: None
    tables: Tensor | None = None


@dataclass(frozen=True)
class Traffic:
    """How tokens reach experts: the number of experts, one lane per direction, and whether to deduplicate; and keys
    their queries: the ring, where sequences are cut."""

    num_experts: int
    forward: Lane
    backward: Lane
    dedup: bool
    ring: Ring | None = None


@dataclass
class Stats:
    """Sums over the micro-batches of a step, on the device. loss, head_z: scaled, so a sum over ranks is the mean over
    the global batch. balance_L, z_L and counts_LE by global layer index."""

    loss: Tensor
    balance_L: Tensor
    z_L: Tensor
    counts_LE: Tensor
    head_z: Tensor

    def routed(self, layer: int, routing: Routing) -> None:
        self.balance_L[layer] += routing.balance
        self.z_L[layer] += routing.z
        self.counts_LE[layer] += routing.counts_E


@dataclass(frozen=True)
class Labels:
    """What the loss needs: labels [B, S] and `scale`, one over the valid tokens of the global batch. Without `learn` it
    is for reading alone, and leaves no gradient."""

    labels: Tensor
    scale: Tensor
    learn: bool = True


class Attend:
    """The A of one layer: `before`, attention and `after`, with the interface of a Segment. Without `keep` it leaves h
    and runs again as a whole, its ring too."""

    def __init__(self, layer: Layer, h: Tensor, turns: Tensor, part: Part, ring: Ring | None, keep: bool):
        self._given = layer, h, turns, part, ring
        self._parts: tuple[Segment, Attention, Segment] | None = None
        after = self._run(keep)
        self.outputs, self.extra = after.take(), after.extra

    def _run(self, keep: bool, *ids_TK: Tensor) -> Segment:
        layer, h, turns, part, ring = self._given
        before = Segment(layer.before, h, given=(turns,), keep=keep, through=True)  # to `after`
        attention = Attention(layer.core, part, ring, *before.take())
        after = Segment(layer.after, h, attention.out, given=ids_TK, keep=keep)
        if keep:
            self._parts = before, attention, after
        return after

    def take(self) -> tuple[Tensor, ...]:
        """The outputs, which from now on the caller alone keeps."""
        outputs, self.outputs = self.outputs, ()
        return outputs

    def rerun(self) -> None:
        """As a Segment's."""
        if self._parts is None:
            self._run(True, *(() if self.extra is None else (self.extra.ids_TK,))).take()

    def backward(self, grads: Sequence[Tensor], ready: list[WeightGrad]) -> list[Tensor]:
        """[dh]. Releases everything."""
        self.rerun()
        assert self._parts is not None
        before, attention, after = self._parts
        del self._parts, self._given
        dh, dout = after.backward(grads, ready)
        del after
        grads = [*attention.backward(dout, ready), dh]
        del attention, dout, dh
        return before.backward(grads, ready)


@dataclass(frozen=True)
class MoeEntry:
    """What the backward of one MoE layer needs beside its A. `dsums`: gradients of what A gave beside mid, n and w."""

    experts: ExpertSegment
    shared: Segment | None
    exchange: Edge
    dsums: list[Tensor]


@dataclass
class Tape:
    """What a stage's forward leaves for its backward, in order: an Attend, a MoeEntry after its layer's, the last norm.
    `ids`: the tokens of an embedding. `start`: dh at the end of the last stage, where the loss has gradient 1."""

    entries: list[Attend | MoeEntry | Segment]
    ids: Tensor | None
    start: Tensor | None


def forward(
    stage: Stage, x: Tensor, part: Part, traffic: Traffic, labels: Labels | None, stats: Stats
) -> Generator[None, None, tuple[Tensor | None, Tape]]:
    """x: token ids [B, S] on stage 0, else hidden states [B, S, H]; `part`: which positions they are. Returns (hidden
    states to send or None, tape)."""
    tape = Tape([], x if stage.embedding is not None else None, None)
    if stage.embedding is None:
        h = x
    else:
        stage.arrived(stage.embedding.name)
        h = stage.embedding.data[x]
    keep = stage.recompute != "full"
    turns = torch.empty(0) if stage.tables is None else stage.tables[:, part.positions_BS]
    for layer in stage.layers:
        stage.arrived(layer.index)
        a = Attend(layer, h, turns, part, traffic.ring, keep)
        tape.entries.append(a)
        if layer.experts is None:
            (h,) = a.take()
            continue
        mid, n, w, *sums = a.take()
        routing: Routing = a.extra
        sets = None
        if sums:
            assert traffic.ring is not None, "whole sequences have whole sets"
            sets = CutSets(sums[0], routing.counts_NE, traffic.ring.sum)
        stats.routed(layer.index, routing)
        lanes = traffic.forward, traffic.backward
        exchange = open_exchange(routing.ids_TK, w, traffic.num_experts, *lanes, traffic.dedup)
        exchange.launch_counts()
        shared = None if layer.shared is None else Segment(layer.shared, n, keep=keep)
        yield  # META in flight
        exchange.wait_counts()
        exchange.launch_dispatch(n)
        yield  # DISPATCH in flight
        experts = ExpertSegment(layer.experts, stage.recompute)
        exchange.launch_combine(experts.forward(exchange.received(not experts.keeps_slots)))
        yield  # COMBINE in flight
        dsums: list[Tensor] = []
        if sets is not None:
            balance, *dsums = sets.finish()
            stats.balance_L[layer.index] += balance
        tape.entries.append(MoeEntry(experts, shared, exchange, dsums))
        h = exchange.combined(mid.flatten(0, 1), None if shared is None else shared.take()[0]).view_as(mid)
    if stage.head is None:
        return h, tape
    assert labels is not None, "the last stage computes the loss"
    for weight in (stage.head.weight, *stage.head.norm.vectors.values()):
        stage.arrived(weight.name)
    norm = Segment(stage.head.norm, h)
    tape.entries.append(norm)
    n = norm.take()[0].flatten(0, 1)
    head, labels_T = stage.head, labels.labels.flatten()
    if not labels.learn:
        stats.loss += linear_cross_entropy_loss(n, head.weight.data, labels_T, labels.scale)
        return None, tape
    loss, head_z, tape.start = linear_cross_entropy(n, head.weight, labels_T, labels.scale, head.z_coef)
    stats.loss += loss
    if head.z_coef:
        stats.head_z += head_z
    return None, tape


def backward(stage: Stage, tape: Tape, dh: Tensor | None) -> Generator[Closures, None, Tensor | None]:
    """dh [B, S, H] of the stage's output, None on the last stage. Returns dh of its input, None on stage 0.

    Every yield hands over the weight-gradient closures that are ready; entries are released as they are used.
    """
    ready: Closures = []
    start = dh if tape.start is None else tape.start
    assert start is not None, "a backward begins with the gradient of the stage's output"
    grads = [start]
    tape.start = dh = start = None  # released with the first segment
    while tape.entries:
        entry = tape.entries.pop()
        if not isinstance(entry, MoeEntry):
            grads = entry.backward(grads, ready)
            continue
        [grad] = grads
        exchange = entry.exchange
        dh_TH = grad.flatten(0, 1)
        exchange.launch_combine_t(dh_TH)
        yield _take(ready)  # COMBINE' in flight; W of the A above
        entry.experts.rerun()
        keep = not entry.experts.keeps_slots
        exchange.launch_dispatch_t(*entry.experts.backward(exchange.received_t(keep), ready))
        yield []  # DISPATCH' in flight; W(E) waits for the next turn, which would else expose it
        dn = None if entry.shared is None else entry.shared.backward([dh_TH], ready)[0]
        yield _take(ready)
        attend = tape.entries[-1]
        assert isinstance(attend, Attend), "the A of this layer lies below"
        attend.rerun()
        grads = [grad, *exchange.returned_t(dn), *entry.dsums]
    [grad] = grads
    if tape.ids is not None:
        assert stage.embedding is not None
        ready.append(_embedding_grad(stage.embedding, tape.ids, grad))
    yield _take(ready)
    return grad if tape.ids is None else None


def _embedding_grad(embedding: Weight, ids: Tensor, dh: Tensor) -> WeightGrad:
    """main_grad[id] += dh of every token with that id, in a fixed order: no atomics."""

    def add(main_grad: Tensor, beta: int) -> None:
        if not beta:
            main_grad.zero_()
        rows, values = ids.flatten(), dh.flatten(0, 1).to(main_grad.dtype)
        if main_grad.is_cuda:
            main_grad.index_put_((rows,), values, accumulate=True)  # sorts by id first
        else:
            main_grad.index_add_(0, rows, values)

    return lambda: embedding.add(add)


def _take(ready: Closures) -> Closures:
    taken = list(ready)
    ready.clear()
    return taken


def run_forward(ahead: Generator[None, None, F]) -> F:
    """A lone forward: nothing runs between its edges."""
    return _exhaust(ahead, lambda _: None)


def run_backward(back: Generator[Closures, None, B], closures: RunClosures) -> B:
    """A lone backward; `closures` runs the weight gradients or puts them aside."""
    return _exhaust(back, closures)


def _exhaust(turns: Generator[Turn, None, B], each: Callable[[Turn], None]) -> B:
    while True:
        try:
            each(next(turns))
        except StopIteration as end:
            return end.value


def overlap(ahead: Generator[None, None, F], back: Generator[Closures, None, B], closures: RunClosures) -> tuple[F, B]:
    """A pair: one turn each, backward first; when one has ended, the rest of the other."""
    while True:
        try:
            closures(next(back))
        except StopIteration as end:
            return run_forward(ahead), end.value
        try:
            next(ahead)
        except StopIteration as end:
            return end.value, run_backward(back, closures)


def run_now(ready: Closures) -> None:
    """Run weight gradients where they are offered, each releasing its operands as it ends."""
    ready.reverse()
    while ready:
        ready.pop()()


def new_stats(num_layers: int, num_experts: int, device: torch.device, dtype: torch.dtype) -> Stats:
    """Zeros. `dtype` is the accumulate dtype of the run."""
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
    return Stats(zeros(()), zeros(num_layers), zeros(num_layers), counts_LE, zeros(()))
