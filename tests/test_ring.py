"""Parts of sequences and the ring: every pair of query and key once, and the attention of whole sequences.

The ranks of a ring are threads of this process here, whose hops are queues; `test_mesh` has them as processes.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness import Alive, make_spec, single
from oracle import logits_of
from pithtrain.build import build
from pithtrain.models.deepseek_v2.model import Latent
from pithtrain.ops import ring as ops_ring
from pithtrain.ops.attention import PLAIN
from pithtrain.ops.linear import Weight, accumulate_dtype, add_weight_grad
from pithtrain.ops.parts import Part, chunks
from pithtrain.ops.ring import Attention, Core
from reference import Documents, assert_near, attention, leaves, plain_attention, random

CPU = torch.device("cpu")
LENGTH = 24
ONE, ONES, LONG, MIXED = (0,), tuple(range(LENGTH)), (0, 1, 23), (0, 3, 4, 11, 12, 19)


# ---- parts -----------------------------------------------------------------------------------------------------------


def cut(x: Tensor, cp: int, rank: int) -> Tensor:
    """A rank's positions of x [B, length, ...]."""
    return torch.cat([x[:, chunk] for chunk in chunks(x.shape[1], cp, rank)], 1)


def test_the_chunks_of_the_worked_example() -> None:
    places = torch.arange(8)[None]
    assert cut(places, 2, 0).tolist() == [[0, 1, 6, 7]] and cut(places, 2, 1).tolist() == [[2, 3, 4, 5]]
    assert cut(places, 1, 0).tolist() == places.tolist()
    documents = [[0, 3, 6], [0]]
    assert Part(2, 8, CPU, 2, 0, documents).positions_BS.tolist() == [[0, 1, 0, 1], [0, 1, 6, 7]]
    assert Part(2, 8, CPU, 2, 1, documents).positions_BS.tolist() == [[2, 0, 1, 2], [2, 3, 4, 5]]
    packed = Part(2, 8, CPU, 2, 0, documents).packed
    assert packed is not None and packed.bounds == (0, 2, 4, 6, 8) and packed.longest == 2
    packed = Part(2, 8, CPU, 2, 1, documents).packed
    assert packed is not None and packed.bounds == (0, 1, 2, 4, 6, 8)
    assert Part(2, 8, CPU, documents=[[0], [0]]).packed is None, "whole rows are streams"


def keys_of(part: Part, window: int | None, t: int) -> np.ndarray:
    """Where the keys of step t lie in whole sequences: a rank's chunks, or the end of one."""
    n, halo = part.length // (2 * part.cp), part.halo(window)
    if halo is None or t == 0:
        return cut(torch.arange(part.length)[None], part.cp, (part.rank - t) % part.cp)[0].numpy()
    begin = (part.rank, 2 * part.cp - 1 - part.rank)[t - 1] * n  # of the chunk that it comes before
    return np.arange(begin - halo, begin)


def pairs(part: Part, window: int | None) -> np.ndarray:
    """How often each (sequence, query, key) of whole sequences is seen, over all calls of a part."""
    seen = np.zeros((part.rows, part.length, part.length), int)
    mine = cut(torch.arange(part.length)[None], part.cp, part.rank)[0].numpy()
    for t, calls in enumerate(part.steps(window)):
        theirs = keys_of(part, window, t)
        for i, (rows, queries, keys, sight) in enumerate(calls):
            assert (rows, queries, keys) == (slice(None),) * 3 or (t, i) != (0, 0), "the first covers every query"
            at_q, at_k = mine[queries], theirs[keys]
            back = np.arange(len(at_q))[:, None] + len(at_k) - len(at_q) - np.arange(len(at_k))
            visible = (back >= 0) | (not sight.causal)
            if sight.window is not None:
                visible &= back < sight.window
                assert len(at_q) <= len(at_k), "flash takes 'all keys behind' for Sk of them"
            for row in range(part.rows)[rows]:
                own = visible
                if sight.packed is not None:
                    bounds = np.array(sight.packed.bounds)
                    number = np.searchsorted(bounds, row * len(mine) + np.arange(len(mine)), side="right")
                    own = visible & (number[:, None] == number)
                else:
                    assert visible.any(0).all() and visible.any(1).all(), "what nobody sees is cut away"
                np.add.at(seen[row], np.ix_(at_q, at_k), own.astype(int))
    return seen


def wanted(length: int, window: int | None, documents: Documents) -> np.ndarray:
    places = np.arange(length)
    back = places[:, None] - places
    number = [np.searchsorted(np.array(row), places, side="right") for row in documents]
    return np.stack([(back >= 0) & (back < (window or length)) & (n[:, None] == n) for n in number]).astype(int)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 13, 23, 24, 30])
def test_every_pair_is_seen_once_by_the_rank_that_has_the_query(cp: int, window: int | None) -> None:
    """Documents that are longer than a chunk, end at its edge, of one token, one alone; and streams."""
    rng = np.random.default_rng(0)
    drawn = [tuple(sorted({0, *rng.integers(1, LENGTH, rng.integers(1, 9)).tolist()})) for _ in range(12)]
    for documents in ((ONE, MIXED), (ONES, LONG), ((0, 12), (0, 6, 18)), *itertools.pairwise(drawn), None):
        parts = [Part(2, LENGTH, CPU, cp, rank, documents) for rank in range(cp)]
        seen = sum(pairs(part, window) for part in parts)
        np.testing.assert_array_equal(seen, wanted(LENGTH, window, documents or ((0,), (0,))))


@pytest.mark.parametrize("cp", [2, 4])
def test_work_of_a_stream_is_half_a_square_a_step(cp: int) -> None:
    """On every rank alike. Documents that no chunk's edge cuts leave nothing to do after the first step."""
    n = LENGTH // (2 * cp)
    for rank in range(cp):
        for t, [call] in enumerate(Part(1, LENGTH, CPU, cp, rank).steps(None)):
            area = len(range(2 * n)[call.queries]) * len(range(2 * n)[call.keys])
            assert area == (4 if t == 0 else 2) * n * n
            assert call.sight.causal == (t == 0)
        assert not any(Part(1, LENGTH, CPU, cp, rank, [ONES]).steps(None)[1:]), "steps without work"


@pytest.mark.parametrize("cp", [2, 4])
def test_a_long_document_takes_the_calls_of_a_stream(cp: int) -> None:
    """One a step, of all sequences that are cut alike, though it begins within the first chunk and ends in the last."""
    for rank in range(cp):
        for _, *steps in (Part(3, LENGTH, CPU, cp, rank, [LONG] * 3).steps(window) for window in (None, LENGTH - 2)):
            assert [len(calls) for calls in steps] == [1] * (cp - 1)
            assert all(call.rows == slice(0, 3) for [call] in steps)
        _, *steps = Part(3, LENGTH, CPU, cp, rank, [LONG, LONG, ONE]).steps(None)
        assert max(map(len, steps)) <= 2


# ---- the ring against one softmax ------------------------------------------------------------------------------------


class ThreadRing:
    """A Ring whose ranks are threads."""

    def __init__(self, queues: "Queues", rank: int):
        self._queues, self._rank, self.size = queues, rank, 1 + max(to for _, to in queues)
        self.log: list[tuple[str, int]] = []  # what was started, and its bytes

    def hop(self, sent: Tensor, received: Tensor) -> list[Any]:
        self.log.append(("hop", sent.nbytes))
        return [self._message(sent, received, (self._rank + 1) % self.size, (self._rank - 1) % self.size)]

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Any]:
        self.log.append(("swap", sent[0].nbytes))
        peers = zip(sent, received, (self._rank - 1, self._rank + 1), strict=True)
        return [self._message(out, into, peer, peer) for out, into, peer in peers if 0 <= peer < self.size]

    def _message(self, sent: Tensor, received: Tensor, to: int, of: int) -> "Message":
        message = Message(sent, sent.clone(), received, self._queues[of, self._rank])
        self._queues[self._rank, to].put(message)
        received.fill_(float("nan"))  # whoever reads before it has arrived
        return message


@dataclass
class Message:
    """Taken from the sender's own tensor when the receiver waits, as by a transfer that is late; until the sender has
    waited for that it must not write there."""

    sent: Tensor
    as_it_was: Tensor
    received: Tensor
    incoming: "Queue[Message]"
    taken: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        theirs = self.incoming.get(timeout=60)
        self.received.copy_(theirs.sent)
        theirs.taken.set()
        assert self.taken.wait(60)
        assert self.sent.equal(self.as_it_was), "what is sent was written to before it was waited for"


Queues = dict[tuple[int, int], "Queue[Message]"]  # from, to


def queues_of(cp: int) -> Queues:
    return {(of, to): Queue() for of in range(cp) for to in range(cp)}


@dataclass
class Case:
    """q, and the sources of k and v; `core(rank)` makes each rank its own weights."""

    q: Tensor
    sources: tuple[Tensor, ...]
    dout: Tensor
    core: Callable[[], Core]


Log = list[tuple[str, int]]


def ran(
    case: Case, cp: int, documents: Documents | None, logs: list[Log] | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Output, gradients of q and of the sources, each put together; and of weights, summed over the ranks. `logs` gets
    what each rank has exchanged."""
    rows, length = case.q.shape[:2]
    queues = queues_of(cp)

    def one(rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        part, core = Part(rows, length, case.q.device, cp, rank, documents), case.core()
        given = [cut(x, cp, rank) for x in (case.q, *case.sources)]
        ring: Any = ThreadRing(queues, rank) if cp > 1 else None
        made = Attention(core, part, ring, *given)
        ready: list[Any] = []
        grads = made.backward(cut(case.dout, cp, rank).flatten(2), ready)
        for closure in ready:
            closure()
        if logs is not None:
            logs.append(ring.log)
        weights = [w for w in (core.sinks, core.expand and core.expand.weight) if w is not None]
        return [made.out.unflatten(2, (case.q.shape[2], -1)), *grads], {w.name: w.main_grad for w in weights}

    with ThreadPoolExecutor(cp) as pool:
        found = list(pool.map(one, range(cp)))
    whole = []
    for i in range(len(found[0][0])):
        x = torch.empty(rows, length, *found[0][0][i].shape[2:], dtype=found[0][0][i].dtype, device=case.q.device)
        for rank, (parts, _) in enumerate(found):
            at = torch.cat([torch.arange(length)[chunk] for chunk in chunks(length, cp, rank)])
            x[:, at] = parts[i]
        whole.append(x)
    return whole, {name: torch.stack([grads[name] for _, grads in found]).sum(0) for name in found[0][1]}


def grouped(dtype: torch.dtype, window: int | None, sinks: bool) -> Case:
    shapes = ((4, 6), (2, 6), (2, 3), (4, 3))
    q, k, v, dout = (random(i, 2, LENGTH, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    b = random(9, 4, dtype=accumulate_dtype(dtype), scale=2.0)

    def core() -> Core:
        return Core(0.3, 12, window, Weight("sinks", b, torch.zeros_like(b)) if sinks else None)

    return Case(q, (k, v), dout, core)


def by_softmax(case: Case, documents: Documents | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """`ran`'s answer from one softmax over whole sequences and autograd, in float64."""
    core = case.core()
    named = [w for w in (core.sinks, core.expand and core.expand.weight) if w is not None]
    wide = leaves(case.q, *case.sources, *(w.data for w in named))
    q, first, second, *weights = wide
    if core.expand is None:
        k, v = first, second
    else:
        kv = (first @ weights[0].t()).unflatten(-1, (3, -1))
        k, v = torch.cat((kv[..., :4], second.expand(-1, -1, 3, -1)), -1), kv[..., 4:]
    sinks = weights[0] if core.sinks is not None else None
    out = plain_attention(q, k, v, core.scale, core.window, sinks, documents)
    grads = torch.autograd.grad((out * case.dout.double()).sum(), wide)
    return [out.detach(), *grads[:3]], {w.name: g for w, g in zip(named, grads[3:], strict=True)}


def assert_equal(case: Case, cp: int, documents: Documents | None, tolerance: float) -> None:
    found, weights = ran(case, cp, documents)
    wants, want_weights = by_softmax(case, documents)
    for x, want in zip((*found, *weights.values()), (*wants, *want_weights.values()), strict=True):
        assert_near(x, want, tolerance)
    assert weights.keys() == want_weights.keys()
    assert all(x.dtype == case.q.dtype for x in found)


DOCUMENTS = {"stream": None, "mixed": (MIXED, ONE), "ones and long": (ONES, LONG)}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_case_143_the_ring_is_one_softmax(
    cp: int, window: int | None, sinks: bool, documents: Documents | None
) -> None:
    """Output and gradients of q, k, v and the sinks, which enter once, in float64."""
    assert_equal(grouped(torch.float64, window, sinks), cp, documents, 1e-13)


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("window", [None, 3, 5])
@pytest.mark.parametrize("cp", [1, 4])
def test_the_ring_in_fp32(cp: int, window: int | None, documents: Documents | None) -> None:
    assert_equal(grouped(torch.float32, window, True), cp, documents, 3e-6)


def latent(dtype: torch.dtype) -> Case:
    """3 heads of 4 + 2 wide keys and 5 wide values, from a latent of 7 and one rotated key of 2."""
    shapes = ((3, 6), (7,), (1, 2), (3, 5))
    q, c, kr, dout = (random(i, 2, LENGTH, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    w = random(9, 27, 7, dtype=dtype, scale=0.5)

    def core() -> Core:
        return Core(0.3, 15, expand=Latent(Weight("kv_b", w, torch.zeros_like(w, dtype=accumulate_dtype(dtype))), 3, 4))

    return Case(q, (c, kr), dout, core)


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_latent_travels_and_its_weight_learns_from_every_block(
    cp: int, dtype: torch.dtype, tolerance: float, documents: Documents | None
) -> None:
    assert_equal(latent(dtype), cp, documents, tolerance)


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("kind", ["full", "edges", "latent"])
def test_bf16_blocks_are_rounded_once_each_and_summed_in_fp32(kind: str, documents: Documents | None) -> None:
    """In six parts the output is as near to float64's as in one but for a fifth, gradients but for half; sums in bf16
    would make either twice as far. Edges are of a window of three keys, whose sums are of two terms."""

    def errors(cp: int) -> list[float]:
        window = 3 if kind == "edges" else None
        case = latent(torch.bfloat16) if kind == "latent" else grouped(torch.bfloat16, window, True)
        pairs = zip(ran(case, cp, documents)[0], by_softmax(case, documents)[0], strict=True)
        return [((x.double() - want).norm() / want.norm()).item() for x, want in pairs]

    one, six = errors(1), errors(6)
    assert max(one) < 4e-3
    ratios = [x / y for x, y in zip(six, one, strict=True)]
    assert ratios[0] < 1.25 and max(ratios[1:]) < 1.6, ratios


@pytest.mark.parametrize("kind", ["full", "edges", "latent"])
def test_a_sum_of_two_terms_needs_no_fp32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams on two ranks, and edges on any: bitwise what sums in fp32 give, rounded at the end. But for the latent's
    rotated key, whose blocks are not rounded before."""
    cp, window = (4, 3) if kind == "edges" else (2, None)
    case = latent(torch.bfloat16) if kind == "latent" else grouped(torch.bfloat16, window, False)
    logs: list[Log] = []
    found, _ = ran(case, cp, None, logs)
    sizes = [size for _, size in logs[0]]
    assert len(set(sizes)) == 1, "gradients are as many bytes as keys and values"
    wide = property(lambda self: torch.float32, lambda self, value: None)
    monkeypatch.setattr(ops_ring.Edges if kind == "edges" else ops_ring.Round, "dtype", wide, raising=False)
    want, _ = ran(case, cp, None)
    for x, y in list(zip(found, want, strict=True))[: 3 if kind == "latent" else 4]:
        assert torch.equal(x, y.to(x.dtype))


def test_the_latent_s_weight_counts_one_contribution_a_micro_batch() -> None:
    """However many blocks: its bucket waits for so many (`zero.Bucket`)."""
    counts: list[int] = []
    case = latent(torch.float64)
    make = case.core

    def counting() -> Core:
        core = make()
        assert core.expand is not None
        core.expand.weight.contributed = lambda: counts.append(1)
        return core

    case.core = counting
    ran(case, 4, None)
    assert len(counts) == 4, "one of each rank"


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 8])
def test_every_rank_exchanges_the_same_in_the_same_order(cp: int, window: int | None) -> None:
    """Whatever the documents: nothing else keeps ranks from waiting for each other for ever. A window that reaches the
    chunk before its own and no further takes one exchange of edges each way, of window - 1 keys of two sequences, and
    one for the gradients; a window of one key takes none."""
    n, width = LENGTH // (2 * cp), 2 * (6 + 3)
    keys = 8 * 2 * LENGTH // cp * width
    around = [("hop", keys)] * (cp - 1) + [("hop", keys)] * (2 * cp - 1)
    edge = 0 if window is None else 8 * 2 * (window - 1) * width
    want = around if window is None or window - 1 > n else [("swap", edge)] * 3 if edge else []
    for documents in (None, (ONES, LONG), (MIXED, ONE)):
        logs: list[Log] = []
        ran(grouped(torch.float64, window, True), cp, documents, logs)
        assert logs == [want] * cp, documents


class Alone:
    """A ring in which this rank is every other one too."""

    def __init__(self, size: int):
        self.size = size

    def hop(self, sent: Tensor, received: Tensor) -> list[Any]:
        received.copy_(sent)
        return []

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Any]:
        for out, into in zip(sent, received, strict=True):
            into.copy_(out)
        return []


@pytest.mark.parametrize("kind", ["full", "window", "latent"])
def test_memory_does_not_grow_with_the_number_of_ranks(kind: str) -> None:
    """Bytes alive at the fullest moment of a forward and a backward, for the same tokens a rank; the plain pair's
    scores, which no kernel writes, are those of its largest call, the own keys'."""
    peaks: list[int] = []
    for cp in (2, 4, 8):
        case = (
            latent(torch.float32) if kind == "latent" else grouped(torch.float32, 5 if kind == "window" else None, True)
        )
        core, part, ring = case.core(), Part(2, LENGTH * cp, CPU, cp, cp - 1), cast(Any, Alone(cp))
        with Alive() as alive:
            made = Attention(core, part, ring, case.q, *case.sources)
            made.backward(case.dout.flatten(2), [])
        peaks.append(alive.peak)
    assert peaks[1] <= peaks[0] * 1.25 and peaks[2] == peaks[1], peaks


@pytest.mark.parametrize("cp", [1, 2])
def test_what_a_kernel_has_padded_is_not_kept(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the flash ops with values narrower than keys: the output is the front of wider rows. It is kept once."""

    def padded(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: Any) -> tuple[Tensor, Tensor]:
        out, lse = PLAIN.forward(q, k, v, scale, sight)
        return F.pad(out, (0, 4))[..., : out.shape[-1]], lse

    monkeypatch.setattr(ops_ring, "kernels_for", lambda *_: PLAIN._replace(forward=padded))
    case, part = latent(torch.bfloat16), Part(2, LENGTH * cp, CPU, cp, 0)
    made = Attention(case.core(), part, cast(Any, Alone(cp)) if cp > 1 else None, case.q, *case.sources)
    assert made.out.untyped_storage().nbytes() == made.out.nbytes
    assert made.out.untyped_storage().data_ptr() == made._out.untyped_storage().data_ptr()


# ---- documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["full", "window", "latent"])
def test_case_034_147_a_token_of_one_document_leaves_the_others_bitwise(kind: str, cp: int) -> None:
    """Outputs and gradients at all positions of other documents, wherever chunks are cut."""
    case = latent(torch.float32) if kind == "latent" else grouped(torch.float32, 5 if kind == "window" else None, True)
    documents, own = (MIXED, LONG), slice(4, 11)  # of the first sequence
    before, _ = ran(case, cp, documents)
    for x in (case.q, *case.sources):
        x[0, 6] += 1
    after, _ = ran(case, cp, documents)
    for x, y in zip(before, after, strict=True):
        assert (x[0, own] != y[0, own]).any()
        x[0, own] = y[0, own] = 0
        assert torch.equal(x, y)


def test_case_144_an_empty_document_and_steps_in_which_nothing_is_seen() -> None:
    """A document of length 0 is none: its start is its neighbour's. With documents of one token no step but the first
    has work, and the keys' gradients come home as zeros from all others."""
    assert Part(1, 8, CPU, documents=[[0, 3, 3, 5]]).positions_BS.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    twice = ((*MIXED, 4, 12), (0, 0))
    for x, want in zip(*(ran(grouped(torch.float64, 5, False), 2, d)[0] for d in (twice, (MIXED, ONE))), strict=True):
        assert torch.equal(x, want)
    case = grouped(torch.float64, None, False)
    (out, dq, dk, dv), _ = ran(case, 4, (ONES, ONES))
    assert torch.equal(out, case.sources[1].repeat_interleave(2, 2))
    assert dq.abs().max() < 1e-14 and dk.abs().max() < 1e-14 and torch.isfinite(dv).all()


@pytest.mark.parametrize("cp", [2, 4])
def test_case_136_142_windows_and_heads_across_chunks(cp: int) -> None:
    """Value j of key head g reaches queries j .. j + 3 and heads 2g, 2g + 1 alone, wherever chunks are cut."""
    case = grouped(torch.float32, 4, False)
    before = ran(case, cp, None)[0][0]
    for j in range(LENGTH):
        case.sources[1][0, j, 1] += 1
        moved = (ran(case, cp, None)[0][0] != before).any(-1)
        case.sources[1][0, j, 1] -= 1
        want = torch.zeros_like(moved)
        want[0, j : j + 4, 2:] = True
        assert torch.equal(moved[0], want[0]), j
        before = ran(case, cp, None)[0][0]


@pytest.mark.parametrize("window", [None, 4])
def test_documents_are_so_many_calls(window: int | None) -> None:
    """Packed attention is that of each document alone."""
    q, k, v, sinks = (
        random(i, *s, dtype=torch.float32) for i, s in enumerate(((2, 24, 4, 6), (2, 24, 2, 6), (2, 24, 2, 6), (4,)))
    )
    out = attention(q, k, v, 0.4, window, sinks, (MIXED, LONG))
    for row, starts in enumerate((MIXED, LONG)):
        for first, last in itertools.pairwise((*starts, LENGTH)):
            alone = (x[row : row + 1, first:last] for x in (q, k, v))
            assert_near(out[row, first:last], attention(*alone, 0.4, window, sinks)[0], 1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_case_034_logits_of_a_document_are_those_of_it_alone(family: str) -> None:
    """Positions restart with it. Routing may gather other rows beside: equal to rounding."""
    spec = make_spec(architecture=family, training={"compute_dtype": "float64", "sequence_length": LENGTH})
    tokens = torch.randint(64, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with single(spec) as world, torch.no_grad():
        engine = build(spec, world)
        packed = logits_of(engine, tokens, [MIXED])[0]
        for first, last in itertools.pairwise((*MIXED, LENGTH)):
            assert_near(packed[first:last], logits_of(engine, tokens[:, first:last])[0], 1e-12)
        stream = logits_of(engine, tokens)[0]
        assert (stream[4:] - packed[4:]).abs().max() > 1e-3, "without the mask documents see each other"


def test_the_weight_gradient_of_a_view_of_the_latent_s_output() -> None:
    """`Latent.backward` against its definition, alone."""
    c, kr, w = random(0, 1, 5, 7), random(1, 1, 5, 1, 2), random(2, 27, 7)
    weight = Weight("w", w, torch.zeros_like(w))
    own = Latent(weight, 3, 4)
    c_, kr_, w_ = leaves(c, kr, w)
    kv = (c_ @ w_.t()).unflatten(-1, (3, 9))
    k, v = torch.cat((kv[..., :4], kr_.expand(-1, -1, 3, -1)), -1), kv[..., 4:]
    dk, dv = random(3, 1, 5, 3, 6), random(4, 1, 5, 3, 5)
    want = torch.autograd.grad((k * dk).sum() + (v * dv).sum(), (c_, kr_, w_))
    for x, y in zip(own.forward(c, kr), (k, v), strict=True):
        assert torch.equal(x, y.detach())
    (dc, dkr), dy, x = own.backward(dk, dv, c, kr)
    add_weight_grad(weight.main_grad, 1, dy, x)
    for found, expected in zip((dc, dkr, weight.main_grad), want, strict=True):
        assert_near(found, expected, 1e-13)
