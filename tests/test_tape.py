"""The tape: gradients of a chunk against one plain graph, the order of turns of a pair, pairs and weight gradients put
aside bitwise equal to lone runs.

The model is a tiny Qwen3-MoE with a shared expert beside the routed ones, so that every kind of segment is there.
"""

import gc
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness import Pool, make_spec
from pithtrain import tape
from pithtrain.models.contract import Layer
from pithtrain.models.qwen3_moe.model import build_layer, rope
from pithtrain.ops.cross_entropy import IGNORE
from pithtrain.ops.dispatch import Lane
from pithtrain.ops.experts import ExpertSegment, Recompute
from pithtrain.ops.linear import Linears, Region, Segment, Weight, accumulate_dtype
from pithtrain.ops.norm import rms_norm
from pithtrain.ops.parts import Part
from pithtrain.ops.router import Balance
from pithtrain.ops.swiglu import swiglu
from pithtrain.spec import DistributedSection, Mesh
from pithtrain.tape import Attend, Closures, Head, Labels, MoeEntry, Stage, Stats, Tape, Traffic
from pithtrain.world import Place, connect
from reference import assert_near, leaves, make_weight, moe, plain_attention, poisoned_memory, random

B, S, H, V, EXPERTS, K = 2, 5, 16, 11, 4, 2
LAYERS = 14
DENSE = (1, 8)
CPU = torch.device("cpu")
PART = Part(B, S, CPU)
CONFIG = make_spec(
    model={
        "vocab_size": V,
        "hidden_size": H,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 12,
        "moe_intermediate_size": 6,
        "num_experts": EXPERTS,
        "num_experts_per_tok": K,
        "mlp_only_layers": list(DENSE),
        "attention_bias": True,
    }
).model.config


@dataclass(frozen=True)
class Model:
    """All layers over weights found by name, the embedding, and the head."""

    weights: dict[str, Weight]
    layers: tuple[Layer, ...]
    head: Head
    traffic: Traffic

    @property
    def embedding(self) -> Weight:
        return self.weights["model.embed_tokens.weight"]

    def chunk(self, layers: tuple[Layer, ...], *, first: bool = False, last: bool = False) -> Stage:
        tables = rope(CONFIG, S, CPU, accumulate_dtype(self.head.weight.data.dtype))
        return Stage(layers, self.embedding if first else None, self.head if last else None, tables=tables)

    def take_grads(self) -> dict[str, Tensor]:
        """A copy of every main gradient, which is then zero."""
        grads = {name: w.main_grad.clone() for name, w in self.weights.items()}
        for weight in self.weights.values():
            weight.main_grad.zero_()
        return grads


def shared_expert(lin: Linears, vectors: Mapping[str, Tensor], n: Tensor) -> tuple[tuple[Tensor], None]:
    return (lin("shared.down", swiglu(lin("shared.gate", n), lin("shared.up", n))),), None


def final_norm(lin: Linears, vectors: Mapping[str, Tensor], h: Tensor) -> tuple[tuple[Tensor], None]:
    return (rms_norm(h, vectors["norm"], 1e-6),), None


def make_model(dtype: torch.dtype, traffic: Traffic | None = None, ep: int = 0, shared: bool = True) -> Model:
    """`ep`: which share of the experts this rank has."""
    lane = Lane(None, CPU)
    traffic = traffic or Traffic(EXPERTS, lane, lane, dedup=True)
    e = EXPERTS // traffic.forward.size
    weights: dict[str, Weight] = {}
    for i, info in enumerate(CONFIG.parameters()):
        data = random(i, *info.shape, dtype=dtype, scale=0.3) + (1 if info.init == "ones" else 0)
        weights[info.name] = make_weight(info.name, data[ep * e : (ep + 1) * e] if info.kind == "expert" else data)
    layers: list[Layer] = []
    for index in range(LAYERS):
        counts = torch.zeros(EXPERTS, dtype=torch.int64)
        balance = Balance("aux_loss", 0.01, 0.0, 3 * B * S, S, counts, None)
        layer = build_layer(CONFIG, index, weights, balance)
        region = None
        if layer.experts is not None and shared:
            shapes = {"shared.gate": (6, H), "shared.up": (6, H), "shared.down": (H, 6)}
            own = {
                name: make_weight(f"model.layers.{index}.mlp.{name}", random(900 + i, *shape, dtype=dtype, scale=0.3))
                for i, (name, shape) in enumerate(shapes.items())
            }
            weights.update({w.name: w for w in own.values()})
            region = Region(shared_expert, own, {})
        layers.append(replace(layer, shared=region))
    head = Head(Region(final_norm, {}, {"norm": weights["model.norm.weight"]}), weights["lm_head.weight"])
    return Model(weights, tuple(layers), head, traffic)


def input_of(chunk: Stage, seed: int, dtype: torch.dtype) -> Tensor:
    if chunk.embedding is not None:
        return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))
    return random(seed, B, S, H, dtype=dtype)


def labels_of(seed: int, dtype: torch.dtype) -> Labels:
    labels = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed + 1))
    labels[0, 0] = IGNORE
    return Labels(labels, torch.tensor(1 / 30, dtype=accumulate_dtype(dtype)))


def new_stats(dtype: torch.dtype) -> Stats:
    return tape.new_stats(LAYERS, EXPERTS, CPU, accumulate_dtype(dtype))


Forward = Generator[None, None, tuple[Tensor | None, Tape]]
Backward = Generator[Closures, None, Tensor | None]


def ahead(model: Model, chunk: Stage, seed: int, dtype: torch.dtype, stats: Stats | None = None) -> Forward:
    labels = labels_of(seed, dtype) if chunk.head is not None else None
    return tape.forward(chunk, input_of(chunk, seed, dtype), PART, model.traffic, labels, stats or new_stats(dtype))


def back(chunk: Stage, left: Tape, seed: int, dtype: torch.dtype) -> Backward:
    return tape.backward(chunk, left, random(seed + 2, B, S, H, dtype=dtype) if chunk.head is None else None)


# ---- against one graph -----------------------------------------------------------------------------------------------


def by_autograd(model: Model, chunk: Stage, seed: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(loss, gradients by name, dh of the input or an empty tensor) of a chunk, from plain float64 autograd."""
    parameters = dict(zip(model.weights, leaves(*(w.data for w in model.weights.values())), strict=True))

    def call(region: Region, *inputs: Tensor) -> tuple[Tensor, ...]:
        matrices = {name: parameters[w.name] for name, w in region.matrices.items()}
        vectors = {name: parameters[w.name] for name, w in region.vectors.items()}
        lin = lambda name, x: F.linear(x, matrices[name], matrices.get(f"{name}.bias"))  # noqa: E731
        outputs, extra = region.fn(lin, vectors, *inputs)
        return (*outputs, extra)

    x = input_of(chunk, seed, torch.float64)
    start = torch.empty(0)
    if chunk.embedding is not None:
        h = parameters[chunk.embedding.name][x]
    else:
        h = start = x.requires_grad_()
    turns = rope(CONFIG, S, CPU, torch.float64)
    for layer in chunk.layers:
        q, k, v, _ = call(layer.before, h, turns)
        out = plain_attention(q, k, v, layer.core.scale).flatten(2)
        if layer.experts is None:
            h, _ = call(layer.after, h, out)
            continue
        mid, n, w, routing = call(layer.after, h, out)
        gate_up, down = (parameters[x.name] for x in (layer.experts.gate_up, layer.experts.down))
        h = mid + moe(n, w, routing.ids_TK, gate_up, down).view_as(mid)
        if layer.shared is not None:
            h = h + call(layer.shared, n)[0].view_as(mid)
    if chunk.head is None:
        loss = (h * random(seed + 2, B, S, H)).sum()
    else:
        labels = labels_of(seed, torch.float64)
        n, _ = call(chunk.head.norm, h)
        logits = n.flatten(0, 1) @ parameters[chunk.head.weight.name].t()
        target = labels.labels.flatten()
        loss = labels.scale * F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE)
    wanted = {**parameters, **({"": start} if start.numel() else {})}
    found = torch.autograd.grad(loss, tuple(wanted.values()), allow_unused=True)
    grads = {n: torch.zeros_like(wanted[n]) if g is None else g for n, g in zip(wanted, found, strict=True)}
    return loss.detach(), grads, grads.pop("", start)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("count", "first", "last"),
    [(0, True, False), (0, False, True), (3, True, True), (2, False, False), (3, True, False), (1, False, True)],
)
def test_a_chunk_equals_one_plain_graph(count: int, first: bool, last: bool, shared: bool) -> None:
    """Loss, dh and every gradient in float64; layers are MoE, dense, MoE. Nothing uninitialised is read."""
    model = make_model(torch.float64, shared=shared)
    chunk = model.chunk(model.layers[:count], first=first, last=last)
    stats = new_stats(torch.float64)
    with poisoned_memory(), torch.no_grad():
        h, left = tape.run_forward(ahead(model, chunk, 50, torch.float64, stats))
        assert (h is None) == last
        dh = tape.run_backward(back(chunk, left, 50, torch.float64), tape.run_now)
    loss, grads, expected_dh = by_autograd(model, chunk, 50)
    if last:
        assert_near(stats.loss, loss, 1e-13)
    else:
        assert h is not None and stats.loss == 0
        assert_near((h * random(52, B, S, H)).sum(), loss, 1e-12)
    assert (dh is None) == first
    if dh is not None:
        assert_near(dh, expected_dh, 1e-12)
    for name, grad in model.take_grads().items():
        assert_near(grad, grads[name], 1e-12)
    for layer in range(LAYERS):
        routed = layer < count and layer not in DENSE
        assert stats.counts_LE[layer].sum() == (B * S * K if routed else 0)
        assert (stats.balance_L[layer] > 0) == routed


def test_the_embedding_adds_up_repeated_tokens() -> None:
    model = make_model(torch.float32)
    chunk = model.chunk((), first=True)
    x = torch.tensor([[3, 3, 0, 3, 1]])
    with torch.no_grad():
        h, left = tape.run_forward(tape.forward(chunk, x, PART, model.traffic, None, new_stats(torch.float32)))
        assert h is not None and torch.equal(h, model.embedding.data[x])
        dh = random(0, 1, 5, H, dtype=torch.float32)
        tape.run_backward(tape.backward(chunk, left, dh), tape.run_now)
    expected = torch.zeros(V, H)
    for token, row in zip(x[0].tolist(), dh[0], strict=True):
        expected[token] += row
    assert torch.equal(model.embedding.main_grad, expected)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def lone_and_paired(
    model: Model, forward: Stage, backward: Stage, dtype: torch.dtype
) -> list[tuple[Tensor | None, Tensor | None, dict[str, Tensor], Stats]]:
    """(h, dh, gradients, statistics) of forward chunk beside backward chunk: one after the other, and as a pair. The
    backward of the chunk that went forward is played too, so that its tape is compared."""
    results = []
    for pair in (False, True):
        stats = new_stats(dtype)
        _, left = tape.run_forward(ahead(model, backward, 10, dtype, stats))
        if pair:
            (h, right), dh = tape.overlap(
                ahead(model, forward, 20, dtype, stats), back(backward, left, 10, dtype), tape.run_now
            )
        else:
            h, right = tape.run_forward(ahead(model, forward, 20, dtype, stats))
            dh = tape.run_backward(back(backward, left, 10, dtype), tape.run_now)
        assert not left.entries
        last = tape.run_backward(back(forward, right, 20, dtype), tape.run_now)
        grads = model.take_grads()
        if last is not None:
            grads["input of the forward"] = last
        results.append((h, dh, grads, stats))
    return results


def assert_same(a: Tensor | None, b: Tensor | None, what: str = "") -> None:
    assert (a is None) == (b is None)
    assert a is None or b is None or torch.equal(a, b), what


def check_pair(model: Model, forward: Stage, backward: Stage, dtype: torch.dtype) -> None:
    lone, paired = lone_and_paired(model, forward, backward, dtype)
    assert_same(lone[0], paired[0], "h")
    assert_same(lone[1], paired[1], "dh")
    assert any(grad.any() for grad in lone[2].values())
    for name, grad in lone[2].items():
        assert_same(grad, paired[2][name], name)
    for field in ("loss", "balance_L", "counts_LE"):
        assert_same(getattr(lone[3], field), getattr(paired[3], field), field)


def pairs_of(model: Model, forward_layers: int, backward_layers: int) -> list[tuple[Stage, Stage]]:
    """The two pairs of P = 1, F0 with B1 and F1 with B0, and a middle chunk with itself and with another."""
    early = model.layers[:7]
    late = model.layers[7:]
    return [
        (model.chunk(early[:forward_layers], first=True), model.chunk(late[:backward_layers], last=True)),
        (model.chunk(late[:forward_layers], last=True), model.chunk(early[:backward_layers], first=True)),
        (model.chunk(early[:forward_layers]), model.chunk(late[:backward_layers])),
        (model.chunk(early[:forward_layers]), model.chunk(early[:backward_layers])),
    ]


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("backward_layers", [0, 1, 3, 7])
@pytest.mark.parametrize("forward_layers", [0, 1, 3, 7])
def test_a_pair_is_bitwise_two_lone_runs(model: Model, forward_layers: int, backward_layers: int) -> None:
    for forward, backward in pairs_of(model, forward_layers, backward_layers):
        if forward.layers or forward.embedding or forward.head or backward.layers:
            check_pair(model, forward, backward, torch.float32)


@torch.no_grad()
def pair_job(place: Place, sizes: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """Pairs over two expert-parallel ranks; returns the gradients of one lone chunk."""
    with connect(place, Mesh(pp=1, dp=1, cp=1, ep=place.world_size), "cpu", DistributedSection()) as world:
        lanes = Lane(world.ep_fwd_group, CPU), Lane(world.ep_bwd_group, CPU)
        model = make_model(torch.float32, Traffic(EXPERTS, *lanes, dedup=True), place.rank)
        for forward_layers, backward_layers in sizes:
            for forward, backward in pairs_of(model, forward_layers, backward_layers):
                check_pair(model, forward, backward, torch.float32)
        chunk = model.chunk(model.layers[:3], first=True, last=True)
        _, left = tape.run_forward(ahead(model, chunk, 50, torch.float32))
        tape.run_backward(back(chunk, left, 50, torch.float32), tape.run_now)
        return {name: grad.numpy() for name, grad in model.take_grads().items()}


def test_pairs_over_two_ranks(pool: Pool) -> None:
    """The same with expert traffic of both directions in flight. Both ranks have the same tokens here, so dense
    gradients are those of one rank, and experts have twice as much."""
    ranks = pool.run(2, pair_job, [(1, 3), (3, 1), (3, 3)])
    model = make_model(torch.float32)
    chunk = model.chunk(model.layers[:3], first=True, last=True)
    with torch.no_grad():
        _, left = tape.run_forward(ahead(model, chunk, 50, torch.float32))
        tape.run_backward(back(chunk, left, 50, torch.float32), tape.run_now)
    for name, grad in model.take_grads().items():
        if "experts" in name:
            assert_near(torch.from_numpy(np.concatenate([grads[name] for grads in ranks])), 2 * grad, 1e-5)
        else:
            for grads in ranks:
                assert_near(torch.from_numpy(grads[name]), grad, 1e-5)


T = TypeVar("T")


@torch.no_grad()
def test_operands_of_attention_go_before_the_backward_of_what_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, values, the output and its gradient would else lie beside what that backward makes."""
    held: list[weakref.ref[Any]] = []
    looked = 0

    class Told(tape.Attention):
        def backward(self, dout: Tensor, ready: Closures) -> list[Tensor]:
            held.extend((weakref.ref(self), weakref.ref(dout)))
            return super().backward(dout, ready)

    class Looking(Segment):
        def backward(self, grads: Sequence[Tensor], ready: Closures) -> list[Tensor]:
            nonlocal looked
            if self._through:
                assert not any(one() is not None for one in held)
                looked += 1
            return super().backward(grads, ready)

    monkeypatch.setattr(tape, "Attention", Told)
    monkeypatch.setattr(tape, "Segment", Looking)
    model = make_model(torch.float32)
    chunk = model.chunk(model.layers[:2])
    _, left = tape.run_forward(ahead(model, chunk, 50, torch.float32))
    tape.run_backward(back(chunk, left, 50, torch.float32), tape.run_now)
    assert looked == 2 and len(held) == 4


@torch.no_grad()
def test_the_turns_of_a_pair_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three MoE layers beside three: what each turn queues and launches, and in what order. One wait per layer."""
    model = make_model(torch.float32)
    layers = [layer for layer in model.layers if layer.experts is not None]
    forward, backward = model.chunk(tuple(layers[:3])), model.chunk(tuple(layers[3:6]))
    turns: list[list[str]] = []
    names: dict[int, str] = {}  # of regions, experts and weights, by identity
    for j, layer in enumerate(layers[:6]):
        assert layer.shared is not None and layer.experts is not None
        for letter, part in (("A", layer.before), ("A", layer.after), ("X", layer.shared)):
            names[id(part)] = f"{letter}{j % 3}"
            names.update({id(w): f"W({letter}{j % 3})" for w in part.matrices.values()})
        names[id(layer.experts)] = f"E{j % 3}"
        names.update({id(w): f"W(E{j % 3})" for w in (layer.experts.gate_up, layer.experts.down)})

    def note(event: str) -> None:
        if turns and turns[-1][-1:] != [event]:  # a layer's closures are one event
            turns[-1].append(event)

    for weight in model.weights.values():
        if id(weight) in names:
            weight.contributed = partial(note, names[id(weight)])

    class RecordedSegment(Segment):
        def __init__(self, region: Region, *inputs: Tensor, **options: Any):
            self.label = names[id(region)]
            note(self.label)
            super().__init__(region, *inputs, **options)

        def backward(self, grads: Sequence[Tensor], ready: Closures) -> list[Tensor]:
            note(f"{self.label}'")
            return super().backward(grads, ready)

    class RecordedExperts(ExpertSegment):
        def __init__(self, experts: Any, recompute: Recompute = "none"):
            self.label = names[id(experts)]
            super().__init__(experts, recompute)

        def forward(self, received: Any) -> Tensor:
            note(self.label)
            return super().forward(received)

        def backward(self, dout_UH: Tensor, ready: Closures) -> tuple[Tensor, Tensor]:
            note(f"{self.label}'")
            return super().backward(dout_UH, ready)

    class RecordedExchange:
        def __init__(self, edge: Any, layer: int):
            self._edge, self._layer = edge, layer

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                note(f"{name} {self._layer}")
                return getattr(self._edge, name)(*args)

            return call

    plain, opened = tape.open_exchange, 0

    def open_recorded(*args: Any) -> Any:
        nonlocal opened
        opened += 1
        return RecordedExchange(plain(*args), (opened - 1) % 3)

    def turn(generator: Generator[T, None, Any], who: str) -> Generator[T, None, Any]:
        while True:
            turns.append([who])
            try:
                item = next(generator)
            except StopIteration as end:
                return end.value
            yield item

    monkeypatch.setattr(tape, "Segment", RecordedSegment)
    monkeypatch.setattr(tape, "ExpertSegment", RecordedExperts)
    monkeypatch.setattr(tape, "open_exchange", open_recorded)
    _, left = tape.run_forward(ahead(model, backward, 10, torch.float32))
    assert not turns
    tape.overlap(
        turn(ahead(model, forward, 20, torch.float32), "F"),
        turn(back(backward, left, 10, torch.float32), "B"),
        tape.run_now,
    )
    expected: list[list[str]] = []
    for j, ell in ((0, 2), (1, 1), (2, 0)):
        above = [f"returned_t {ell + 1}", f"A{ell + 1}'"] if j else []
        expected += [
            ["B", *above, f"launch_combine_t {ell}", *([f"W(A{ell + 1})"] if j else [])],
            ["F", *([f"combined {j - 1}"] if j else []), f"A{j}", f"launch_counts {j}", f"X{j}"],
            ["B", f"received_t {ell}", f"E{ell}'", f"launch_dispatch_t {ell}"],
            ["F", f"wait_counts {j}", f"launch_dispatch {j}"],
            ["B", f"X{ell}'", f"W(E{ell})", f"W(X{ell})"],
            ["F", f"received {j}", f"E{j}", f"launch_combine {j}"],
        ]
    expected += [["B", "returned_t 0", "A0'", "W(A0)"], ["F", "combined 2"], ["B"]]
    assert turns == expected
    assert sum(event.startswith("wait_counts") for turn_ in turns for event in turn_) == 3


# ---- weight gradients put aside --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_weight_gradients_put_aside_are_bitwise_those_run_now(model: Model, count: int, last: bool) -> None:
    """Two micro-batches put aside (their dh already out), run oldest first, after another forward."""
    chunk = model.chunk(model.layers[7 : 7 + count], first=not last, last=last)
    results = []
    for aside in (False, True):
        tapes = [tape.run_forward(ahead(model, chunk, seed, torch.float32))[1] for seed in (10, 20)]
        bundles: list[Closures] = [[], []]
        dhs = [
            tape.run_backward(back(chunk, left, seed, torch.float32), bundle.extend if aside else tape.run_now)
            for seed, left, bundle in zip((10, 20), tapes, bundles, strict=True)
        ]
        if aside:
            for name, weight in model.weights.items():
                if not name.endswith("norm.weight") and weight is not model.head.weight:
                    assert not weight.main_grad.any(), f"the gradient of {name} did not wait"
            tape.run_forward(ahead(model, model.chunk(chunk.layers), 30, torch.float32))
        for bundle in bundles:
            tape.run_now(bundle)
        results.append((dhs, model.take_grads()))
    for now, late in zip(results[0][0], results[1][0], strict=True):
        assert_same(now, late)
    for name, grad in results[0][1].items():
        assert_same(grad, results[1][1][name], name)
    assert any(grad.any() for grad in results[0][1].values())


@torch.no_grad()
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_a_micro_batch_held_is_freed_by_reference_counts(model: Model, recompute: Recompute) -> None:
    """When the backward has ended and its closures have run, no tensor of the micro-batch is left; no cycle waits for
    the collector."""
    chunk = replace(model.chunk(model.layers[:3], first=True, last=True), recompute=recompute)
    gc.collect()
    gc.disable()
    try:
        _, left = tape.run_forward(ahead(model, chunk, 10, torch.float32))
        held = [weakref.ref(entry) for entry in left.entries]
        for entry in left.entries:
            if isinstance(entry, Attend):
                assert not entry.outputs
            if isinstance(entry, Attend) and entry._parts is not None:
                held += [weakref.ref(x) for x in (entry._parts[1], entry._parts[1]._q, entry._parts[1]._out)]
            segments = () if isinstance(entry, MoeEntry) else (entry,)
            for part in (entry._parts or ())[::2] if isinstance(entry, Attend) else segments:
                assert not part.outputs and part._graph is not None
                held += [weakref.ref(x) for x in (*part._leaves, *part._graph.operands.values())]
            if isinstance(entry, MoeEntry):
                held += [weakref.ref(x) for x in (entry.experts, entry.exchange, entry.experts._x)]
        assert len(held) > (12 if recompute == "full" else 40)
        del entry, segments, part
        bundle: Closures = []
        tape.run_backward(back(chunk, left, 10, torch.float32), bundle.extend)
        waiting = sum(ref() is not None for ref in held)
        tape.run_now(bundle)
        bundle.clear()
        assert [ref() for ref in held if ref() is not None] == []
        assert waiting, "closures hold their operands until they have run"
    finally:
        gc.enable()
    model.take_grads()
