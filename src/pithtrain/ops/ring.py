"""Attention of one layer and micro-batch, over whole sequences or, with keys that go round a ring, over parts of them.

**Parts.** With C = cp ranks a sequence is cut into 2C chunks and rank c holds chunks c and 2C-1-c (zigzag), so every
rank has as much to see as any other. Tokens, labels and positions are cut alike; `chunks` is where that stands.

**Ring.** At step t a rank holds the keys and values of rank j = (c - t) mod C. Without windows and documents:

    j = c   all queries, all keys, causal      (a part is in the order of its positions, so causal here is causal there)
    j < c   all queries, the keys of j's first chunk, all visible
    j > c   the queries of the second chunk, all keys, all visible

half a square each. With documents or a window the own chunks are one packed call, and what a query chunk sees of an
earlier key chunk is one rectangle a sequence: the only document that reaches from one into the other holds the end of
the one and the start of the other, and a window cuts the rectangle by a diagonal (`_rectangle`). No work is done for
what is not seen; the keys travel on.

Blocks are merged in fp32, with one rounding at the end and sinks once, last:

    new = logaddexp(lse, lse_t);   acc = acc exp(lse - new) + O_t exp(lse_t - new);   lse = new

The backward gives every block the final (O, lse). dQ stays; the gradients of keys and values travel behind them in fp32
and are home after C hops. Keys of step t + 1 fly while t computes, between two buffers; so do gradients. So memory does
not grow with C. What is kept for the backward: q, this rank's keys and values, (O, lse).

**What travels** is what the layer's keys and values are made of: themselves, or MLA's latent and one rotated key, 1,152
bytes a token instead of 10,240, from which every block is made on arrival (`Expand`).

Bytes on the wire per rank, layer and micro-batch, m tokens on the rank: forward (C - 1) m w, backward (C - 1) m w + C m
(2 w), with w = 2 (Hkv (Dk + Dv)) in bf16: 1,024 Hkv for heads of 128.

Legend: B sequences, S positions on this rank, n = S / 2 of a chunk, Hq query and Hkv key/value heads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.ops.attention import Packed, Sight, add_sinks, kernels_for, sinks_grad
from pithtrain.ops.dispatch import Lane
from pithtrain.ops.linear import Weight, WeightGrad, accumulate_dtype, add_sum, add_weight_grad, has_kernel

ALL = slice(None)


# ---- which positions a rank holds, and what they see -----------------------------------------------------------------


def chunks(length: int, cp: int, rank: int) -> tuple[slice, ...]:
    """The positions of a sequence that a rank holds, in their order."""
    if cp == 1:
        return (slice(0, length),)
    n = length // (2 * cp)
    return tuple(slice(chunk * n, (chunk + 1) * n) for chunk in (rank, 2 * cp - 1 - rank))


class Call(NamedTuple):
    """One call of a kernel pair: of these sequences, these queries of the part and these keys of the block."""

    rows: slice
    queries: slice
    keys: slice
    sight: Sight


class Part:
    """What one rank holds of the sequences of a micro-batch, and what of it sees what. Host arithmetic, and two tensors
    copied to the device."""

    def __init__(
        self,
        rows: int,
        length: int,
        device: torch.device,
        cp: int = 1,
        rank: int = 0,
        documents: Sequence[Sequence[int]] | None = None,
    ):
        """`length`: of a whole sequence. `documents`: where those of each sequence begin, 0 first, ascending; None: the
        sequence is one stream in which everything is seen."""
        own = chunks(length, cp, rank)
        self.rows, self.length, self.cp, self.rank = rows, length, cp, rank
        # rows of one document each are streams, and take the faster kernels
        self.documents = None if documents is None or all(len(starts) == 1 for starts in documents) else documents
        whole = torch.arange(length).expand(rows, -1)
        if self.documents is not None:
            begin = torch.zeros(rows, length, dtype=torch.int64)
            for row, starts in enumerate(self.documents):
                begin[row, list(starts)] = torch.tensor(starts)
            whole = whole - begin.cummax(1).values
        self.positions_BS = to_device(torch.cat([whole[:, chunk] for chunk in own], 1), device)
        self.packed = None
        if self.documents is not None or cp > 1:
            cuts = [0]
            for row in range(rows):
                inner = () if self.documents is None else self.documents[row]
                for chunk in own:  # a document begins within it, or a piece of one at its start
                    at = cuts[-1] - chunk.start
                    cuts += [at + s for s in inner if chunk.start < s < chunk.stop] + [at + chunk.stop]
            longest = max(b - a for a, b in itertools.pairwise(cuts))
            self.packed = Packed(tuple(cuts), to_device(torch.tensor(cuts, dtype=torch.int32), device), longest)
        self._steps: dict[int | None, list[list[Call]]] = {}

    def steps(self, window: int | None) -> list[list[Call]]:
        """The calls of each ring step; the first of all covers every query."""
        if window is not None and window >= self.length:
            window = None
        if window not in self._steps:
            self._steps[window] = [self._step((self.rank - t) % self.cp, window) for t in range(self.cp)]
        return self._steps[window]

    def _step(self, owner: int, window: int | None) -> list[Call]:
        """What this rank's queries see of the keys of the rank `owner`."""
        stream = self.documents is None and window is None
        own = [Call(ALL, ALL, ALL, Sight(True, window, None if stream else self.packed))] if owner == self.rank else []
        if self.cp == 1 or (stream and own):
            return own
        n = self.length // (2 * self.cp)
        if stream:
            queries, keys = (ALL, slice(0, n)) if owner < self.rank else (slice(n, 2 * n), ALL)
            return [Call(ALL, queries, keys, Sight(causal=False))]
        calls = own
        mine, theirs = (chunks(self.length, self.cp, rank) for rank in (self.rank, owner))
        rows = [ALL] if self.documents is None else [slice(row, row + 1) for row in range(self.rows)]
        for row, (i, a), (j, b) in itertools.product(rows, enumerate(mine), enumerate(theirs)):
            if b.start < a.start:
                starts = (0,) if self.documents is None else self.documents[row.start]
                begin = max(s for s in starts if s < b.stop)  # of the document that holds the last key of b
                end = min((s for s in starts if s >= b.stop), default=self.length)
                keys, queries = range(max(begin, b.start), b.stop), range(a.start, min(end, a.stop))
                if found := _rectangle(queries, keys, window):
                    keys, queries, sight = found
                    at = slice(queries.start - a.start + i * n, queries.stop - a.start + i * n)
                    calls.append(Call(row, at, slice(keys.start - b.start + j * n, keys.stop - b.start + j * n), sight))
        return calls


def _rectangle(queries: range, keys: range, window: int | None) -> tuple[range, range, Sight] | None:
    """(keys, queries, sight) of what is left of positions of which all keys lie before all queries, in a window of so
    many keys: keys that no query sees and queries that see no key are cut away. None where nothing is left."""
    if window is not None and len(queries):
        keys = range(max(keys.start, queries.start - window + 1), keys.stop)
        queries = range(queries.start, min(queries.stop, keys.stop - 1 + window))
    if not len(keys) or not len(queries):
        return None
    if window is None or queries[-1] - keys.start < window:
        return keys, queries, Sight(causal=False)
    # a kernel takes query i of Sq to stand at key i + Sk - Sq
    return keys, queries, Sight(False, window - (queries.stop - keys.stop))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what is queued."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.contiguous()


# ---- the ring --------------------------------------------------------------------------------------------------------


class Ring:
    """The ranks that share sequences. What they exchange is launched from the lane's stream, behind what was queued by
    then, so that it flies beside what is queued next. Every rank makes the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self._lane, self.size = group, Lane(group, device), group.size()
        ranks, rank = dist.get_process_group_ranks(group), group.rank()
        self._next, self._previous = ranks[(rank + 1) % self.size], ranks[rank - 1]

    def hop(self, sent: Tensor, received: Tensor) -> list[dist.Work]:
        """`sent` to the next rank while the previous one's arrives in `received`."""
        with self._lane.after(self._lane.mark()):
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, self._next, self._group),
                    dist.P2POp(dist.irecv, received, self._previous, self._group),
                ]
            )

    def sum(self, value: Tensor) -> dist.Work:
        """Start summing in place."""
        with self._lane.after(self._lane.mark()):
            work = dist.all_reduce(value, group=self._group, async_op=True)
        assert work is not None
        return work


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


# ---- a layer's attention ---------------------------------------------------------------------------------------------


class Expand(Protocol):
    """How keys and values are made of what travels, and back. `weight` has one gradient: dy^T x."""

    @property
    def weight(self) -> Weight: ...

    def forward(self, *sources: Tensor) -> tuple[Tensor, Tensor]:
        """-> k, v"""
        ...

    def backward(self, dk: Tensor, dv: Tensor, *sources: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """-> gradients of the sources; dy and x of the weight's gradient."""
        ...


@dataclass(frozen=True)
class Core:
    """What one layer's attention is, beside its linears. `width`: of its output, Hq * Dv. `window`: keys that a query
    sees, its own included. `sinks` [Hq]: a logit per head in the denominator."""

    scale: float
    width: int
    window: int | None = None
    sinks: Weight | None = None
    expand: Expand | None = None


class Attention:
    """One call: `out` [B, S, Hq * Dv] from q [B, S, Hq, Dk] and the sources of k [B, S, Hkv, Dk] and v [B, S, Hkv, Dv].

    Query head h reads key/value head h // (Hq / Hkv).
    """

    def __init__(self, core: Core, part: Part, ring: Ring | None, q: Tensor, *sources: Tensor):
        """`ring`: None where the part is whole."""
        self._core, self._part, self._ring, self._q = core, part, ring, q
        self._kv: tuple[Tensor, Tensor] | None = None  # with one part: made once
        if ring is None:
            self._sources = sources
            [[call]] = part.steps(core.window)
            k, v = self._kv = self._expand(sources)
            out, lse = kernels_for(q, call.sight).forward(q, k, v, core.scale, call.sight)
        else:
            self._packet = torch.cat([x.flatten() for x in sources])
            self._shapes = [x.shape for x in sources]
            out, lse = self._forward(ring)
        if core.sinks is not None:
            out, lse = add_sinks(out, lse, core.sinks.data)
        self._out, self._lse = out.to(q.dtype), lse
        self.out = self._out.flatten(2)

    def backward(self, dout: Tensor, ready: list[WeightGrad]) -> list[Tensor]:
        """Gradients of q and the sources. MLA's weight gradient is a closure in `ready`; with a ring it is summed block
        by block at once, since to put it aside would keep the expanded gradients of the whole sequence."""
        core, q, dout = self._core, self._q, dout.view_as(self._out)
        if core.sinks is not None:
            dsinks = sinks_grad(dout, self._out, self._lse, core.sinks.data)
            core.sinks.add(lambda main, beta: add_sum(main, beta, dsinks))
        if self._ring is not None:
            return self._backward(dout, self._ring)
        assert self._kv is not None, "one part keeps its keys and values"
        [[call]] = self._part.steps(core.window)
        pair = kernels_for(q, call.sight)
        dq, dk, dv = pair.backward(dout, q, *self._kv, self._out, self._lse, core.scale, call.sight)
        if (expand := core.expand) is None:
            return [dq, dk, dv]
        grads, dy, x = expand.backward(dk, dv, *self._sources)
        ready.append(lambda: expand.weight.add(lambda main, beta: add_weight_grad(main, beta, dy, x)))
        return [dq, *grads]

    def _expand(self, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self._core.expand is not None:
            return self._core.expand.forward(*sources)
        k, v = sources
        return k, v

    def _views(self, packet: Tensor) -> list[Tensor]:
        """The sources in what travels."""
        parts = packet.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _forward(self, ring: Ring) -> tuple[Tensor, Tensor]:
        part, q, scale = self._part, self._q, self._core.scale
        buffers, block = [torch.empty_like(self._packet) for _ in range(2)], self._packet
        acc, lse = q.new_empty(0), q.new_empty(0)
        for t, calls in enumerate(part.steps(self._core.window)):
            works = ring.hop(block, buffers[t % 2]) if t + 1 < ring.size else []
            for i, (rows, queries, keys, sight) in enumerate(calls):
                k, v = self._expand([x[rows, keys] for x in self._views(block)])
                pair = kernels_for(q, sight, part.documents is not None)
                out_t, lse_t = pair.forward(q[rows, queries], k, v, scale, sight)
                if t == i == 0:
                    acc = torch.empty_like(
                        out_t, dtype=accumulate_dtype(q.dtype), memory_format=torch.contiguous_format
                    )
                    acc.copy_(out_t)
                    lse = lse_t.contiguous()
                else:
                    merge(acc[rows, queries], lse[rows, :, queries], out_t, lse_t)
            _wait(works)
            block = buffers[t % 2]
        return acc, lse

    def _backward(self, dout: Tensor, ring: Ring) -> list[Tensor]:
        core, part, q = self._core, self._part, self._q
        expand, wide = core.expand, accumulate_dtype(q.dtype)
        buffers, block = [torch.empty_like(self._packet) for _ in range(2)], self._packet
        grads = [torch.zeros_like(self._packet, dtype=wide), torch.empty_like(self._packet, dtype=wide)]
        dq = torch.zeros_like(q, dtype=wide)
        dweight = None if expand is None else torch.zeros_like(expand.weight.main_grad)
        returning: list[dist.Work] = []
        for t, calls in enumerate(part.steps(core.window)):
            works = ring.hop(block, buffers[t % 2]) if t + 1 < ring.size else []
            local: list[tuple[slice, slice, tuple[Tensor, ...]]] = []
            for rows, queries, keys, sight in calls:
                sources = [x[rows, keys] for x in self._views(block)]
                k, v = self._expand(sources)
                do, mine, out = (x[rows, queries] for x in (dout, q, self._out))
                pair = kernels_for(q, sight, part.documents is not None)
                dq_t, *dkv = pair.backward(do, mine, k, v, out, self._lse[rows, :, queries], core.scale, sight)
                dq[rows, queries] += dq_t
                if expand is not None and dweight is not None:
                    dkv, dy, x = expand.backward(*dkv, *sources)
                    add_weight_grad(dweight, 1, dy, x)
                local.append((rows, keys, tuple(dkv)))
            _wait(returning)
            for rows, keys, found in local:
                for view, grad in zip(self._views(grads[t % 2]), found, strict=True):
                    view[rows, keys] += grad
            returning = ring.hop(grads[t % 2], grads[1 - t % 2])
            _wait(works)
            block = buffers[t % 2]
        _wait(returning)
        if expand is not None and dweight is not None:
            expand.weight.add(lambda main, beta: add_sum(main, beta, dweight))
        return [dq.to(q.dtype), *(view.to(q.dtype) for view in self._views(grads[ring.size % 2]))]


def merge(acc: Tensor, lse: Tensor, out: Tensor, part_lse: Tensor) -> None:
    """Takes the attention over further keys, (out, part_lse), into (acc [B, S, Hq, Dv] fp32, lse [B, Hq, S]): the
    formula at the top."""
    if has_kernel(out):
        from pithtrain.ops import kernels

        kernels.merge(acc, lse, out, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    old, new = ((x - total).exp_().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    acc.mul_(old).add_(out * new)
    lse.copy_(total)
