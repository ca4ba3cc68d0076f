"""Attention of one layer and micro-batch, over whole sequences or, with keys that travel, over parts of them.

**Ring.** Each rank holds two chunks of a sequence (`parts`) and sees those of the others in blocks of keys that go
round: C - 1 hops, between two buffers, the keys of step t + 1 beside the compute of step t. What a window or a document
hides costs no work; the keys travel on. Blocks are summed in fp32, each rounded once by its kernel, and sinks come
once, last (`attention.merge`).

The backward gives every block the final (O, lse). dQ stays; the gradients of keys and values travel behind them in fp32
and are home after C hops. So memory does not grow with C. What is kept for the backward: q, this rank's keys and
values, (O, lse). Two ranks add up two terms, if sequences are streams; then every sum is in the compute type, where it
ends anyhow, and gradients travel so.

**Edges.** Where a window reaches no further than the chunk before a query's own, nothing goes round: the last
window - 1 keys of each chunk go to the rank of the chunk behind it, a neighbour, and their gradients come back: one
exchange each way, whatever C. A key then has one gradient beside that of its own chunk, and a query one output beside
its own: again two terms.

Every rank makes the same exchanges in the same order: they follow from C and the window, whatever the documents.

**What travels** is what the layer's keys and values are made of: themselves, or MLA's latent and one rotated key, 1,152
bytes a token instead of 10,240, from which every block is made on arrival (`Expand`).

Bytes on the wire per rank, layer and micro-batch, m tokens on the rank, w bytes of a token's keys and values in bf16:
2 Hkv (Dk + Dv), 512 Hkv for heads of 128. With recomputation of everything the forward's go twice; a balance loss adds
a sum of its counts, sets x experts.

    ring     forward (C - 1) m w; backward (C - 1) m w + C m (2 w), or 3 m w for streams on two ranks
    edges    forward 2 B (window - 1) w; backward twice that

Legend: B sequences, S positions on this rank, n = S / 2 of a chunk, Hq query and Hkv key/value heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.ops.attention import kernels_for, merge_for, sinks_grad
from pithtrain.ops.linear import Weight, WeightGrad, accumulate_dtype, add_sum, add_weight_grad
from pithtrain.ops.parts import ALL, Part

# ---- the ring --------------------------------------------------------------------------------------------------------


class Ring:
    """The ranks that share sequences. An exchange starts behind what is queued on the current stream by then, and runs
    beside what is queued next until it is waited for."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.size, self._rank = group, group.size(), group.rank()
        ranks = dist.get_process_group_ranks(group)
        self._next, self._previous = ranks[(self._rank + 1) % self.size], ranks[self._rank - 1]

    def hop(self, sent: Tensor, received: Tensor) -> list[dist.Work]:
        """`sent` to the next rank while the previous one's arrives in `received`."""
        return self._start((sent, received, self._next, self._previous))

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        """With the previous and the next rank, in this order; the first rank has none before it, the last none
        behind."""
        there = (self._rank > 0, self._previous), (self._rank < self.size - 1, self._next)
        pairs = zip(sent, received, there, strict=True)
        return self._start(*((out, into, peer, peer) for out, into, (is_there, peer) in pairs if is_there))

    def _start(self, *messages: tuple[Tensor, Tensor, int, int]) -> list[dist.Work]:
        ops: list[dist.P2POp] = []
        for sent, received, to, of in messages:
            ops += dist.P2POp(dist.isend, sent, to, self._group), dist.P2POp(dist.irecv, received, of, self._group)
        return dist.batch_isend_irecv(ops)

    def sum(self, value: Tensor) -> dist.Work:
        """Start summing in place."""
        work = dist.all_reduce(value, group=self._group, async_op=True)
        assert work is not None
        return work


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


Pieces = Sequence[tuple[slice, slice, Sequence[Tensor]]]  # of sequences and keys of a block, gradients of its sources


def _add(sources: Sequence[Tensor], pieces: Pieces) -> None:
    for rows, keys, grads in pieces:
        for source, grad in zip(sources, grads, strict=True):
            source[rows, keys] += grad


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """As one message."""
    return torch.cat([x.flatten() for x in tensors])


def _unpack(packet: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views, of as many positions as there are."""
    widths = [x.shape[2:].numel() for x in like]
    positions = len(packet) // sum(widths)
    parts = packet.split([positions * width for width in widths])
    return [part.view(len(x), -1, *x.shape[2:]) for part, x in zip(parts, like, strict=True)]


class Round:
    """The sources of all keys go round the ranks, and their gradients behind them."""

    def __init__(self, ring: Ring, sources: Sequence[Tensor], stream: bool):
        self._ring, self._packet = ring, _pack(sources)
        self._own, dtype = _unpack(self._packet, sources), self._packet.dtype
        self.dtype = dtype if stream and ring.size == 2 else accumulate_dtype(dtype)  # of sums

    def blocks(self) -> Iterator[Sequence[Tensor]]:
        """Sources of each step's keys; while one is used the next arrives."""
        buffers = [torch.empty_like(self._packet) for _ in range(min(2, self._ring.size - 1))]
        block = self._packet
        for t in range(self._ring.size - 1):
            works = self._ring.hop(block, buffers[t % 2])
            yield _unpack(block, self._own)
            _wait(works)
            block = buffers[t % 2]
        yield _unpack(block, self._own)

    def give(self, t: int, pieces: Pieces) -> None:
        """The gradients of step t's sources."""
        if t == 0:
            first, *pieces = pieces
            self._grads = [torch.empty_like(self._packet, dtype=self.dtype) for _ in range(2)]
            torch.cat([grad.flatten() for grad in first[2]], out=self._grads[0])
            self._returning: list[dist.Work] = []
        _wait(self._returning)
        _add(_unpack(self._grads[t % 2], self._own), pieces)
        self._returning = self._ring.hop(self._grads[t % 2], self._grads[1 - t % 2])

    def home(self) -> list[Tensor]:
        """The gradients of this rank's sources, of all blocks."""
        _wait(self._returning)
        return [x.to(self._packet.dtype) for x in _unpack(self._grads[self._ring.size % 2], self._own)]


class Edges:
    """As `Round`, of the last `halo` positions of each chunk and the rank of the chunk behind it: the next rank for the
    first chunk, the previous one for the second."""

    def __init__(self, ring: Ring, sources: Sequence[Tensor], halo: int):
        self._ring, self._own, self._halo = ring, sources, halo
        self.dtype = sources[0].dtype

    def _ends(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What goes to the previous rank, and what to the next."""
        n, halo = tensors[0].shape[1] // 2, self._halo
        return [x[:, 2 * n - halo :] for x in tensors], [x[:, n - halo : n] for x in tensors]

    def blocks(self) -> Iterator[Sequence[Tensor]]:
        sent = [_pack(end) for end in self._ends(self._own)]
        received = [torch.empty_like(x) for x in sent]
        works = self._swap(sent, received)
        yield self._own
        _wait(works)
        yield from (_unpack(x, self._own) for x in received)

    def give(self, t: int, pieces: Pieces) -> None:
        if t == 0:
            (_, _, self._grads), *pieces = pieces
            _add(self._grads, pieces)
            size = sum(x.numel() for x in self._ends(self._own)[0])
            self._sent, self._received = ([self._own[0].new_zeros(size) for _ in range(2)] for _ in range(2))
            return
        _add(_unpack(self._sent[t - 1], self._own), pieces)
        if t == 2:
            self._returning = self._swap(self._sent, self._received)

    def home(self) -> list[Tensor]:
        _wait(self._returning)
        for end, packet in zip(self._ends(self._grads), self._received, strict=True):
            _add(end, [(ALL, ALL, _unpack(packet, self._own))])
        return [grad.to(self.dtype) for grad in self._grads]

    def _swap(self, sent: list[Tensor], received: list[Tensor]) -> list[dist.Work]:
        return self._ring.swap(sent, received) if self._halo else []


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
        self._core, self._part, self._q = core, part, q
        self._travel: Round | Edges | None = None
        if ring is None:
            self._sources = sources
            [[call]] = part.steps(core.window)
            k, v = self._kv = self._expand(sources)
            out, lse = kernels_for(q, call.sight).forward(q, k, v, core.scale, call.sight)
        else:
            halo = part.halo(core.window)
            stream = part.documents is None and core.window is None
            self._travel = Round(ring, sources, stream) if halo is None else Edges(ring, sources, halo)
            out, lse = self._forward(self._travel)
        if core.sinks is not None:
            out, sinks = out.contiguous(), core.sinks.data.to(lse.dtype)
            merge_for(q)(out, lse, None, sinks[:, None].expand_as(lse))
        self._out, self._lse = out.to(q.dtype).contiguous(), lse  # not part of what a kernel has padded
        self.out = self._out.flatten(2)

    def backward(self, dout: Tensor, ready: list[WeightGrad]) -> list[Tensor]:
        """Gradients of q and the sources. MLA's weight gradient is a closure in `ready`; with a ring it is summed block
        by block at once, since to put it aside would keep the expanded gradients of the whole sequence."""
        core, q, dout = self._core, self._q, dout.view_as(self._out)
        if core.sinks is not None:
            dsinks = sinks_grad(dout, self._out, self._lse, core.sinks.data)
            core.sinks.add(lambda main, beta: add_sum(main, beta, dsinks))
        if self._travel is not None:
            return self._backward(dout, self._travel)
        [[call]] = self._part.steps(core.window)
        pair = kernels_for(q, call.sight)
        dq, dk, dv = pair.backward(dout, q, *self._kv, self._out, self._lse, core.scale, call.sight)
        if (expand := core.expand) is None:
            return [dq, dk, dv]
        grads, dy, x = expand.backward(dk, dv, *self._sources)
        ready.append(lambda: expand.weight.add(lambda main, beta: add_weight_grad(main, beta, dy, x)))
        return [dq, *(grad.to(q.dtype) for grad in grads)]

    def _expand(self, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self._core.expand is not None:
            return self._core.expand.forward(*sources)
        k, v = sources
        return k, v

    def _forward(self, travel: Round | Edges) -> tuple[Tensor, Tensor]:
        part, q, core = self._part, self._q, self._core
        found: tuple[Tensor, Tensor] | None = None
        for block, calls in zip(travel.blocks(), part.steps(core.window), strict=True):
            for rows, queries, keys, sight in calls:
                k, v = self._expand([x[rows, keys] for x in block])
                mine = q[rows, queries]
                pair = kernels_for(q, sight, part.ragged(mine, k))
                out_t, lse_t = pair.forward(mine, k, v, core.scale, sight)
                if found is None:  # all queries
                    found = out_t.to(travel.dtype).contiguous(), lse_t.contiguous()
                else:
                    acc, lse = found
                    merge_for(q)(acc[rows, queries], lse[rows, :, queries], out_t, lse_t)
        assert found is not None
        return found

    def _backward(self, dout: Tensor, travel: Round | Edges) -> list[Tensor]:
        core, part, q, expand = self._core, self._part, self._q, self._core.expand
        dq: Tensor | None = None
        dweight = None if expand is None else torch.empty_like(expand.weight.main_grad)
        for t, (block, calls) in enumerate(zip(travel.blocks(), part.steps(core.window), strict=True)):
            pieces: list[tuple[slice, slice, Sequence[Tensor]]] = []
            for rows, queries, keys, sight in calls:
                sources = [x[rows, keys] for x in block]
                k, v = self._expand(sources)
                do, mine, out = (x[rows, queries] for x in (dout, q, self._out))
                pair = kernels_for(q, sight, part.ragged(mine, k))
                dq_t, *grads = pair.backward(do, mine, k, v, out, self._lse[rows, :, queries], core.scale, sight)
                if expand is not None and dweight is not None:
                    grads, dy, x = expand.backward(*grads, *sources)
                    add_weight_grad(dweight, int(dq is not None), dy, x)
                if dq is None:  # all queries
                    dq = dq_t.to(travel.dtype)
                else:
                    dq[rows, queries] += dq_t
                pieces.append((rows, keys, grads))
            travel.give(t, pieces)
        assert dq is not None
        dq = dq.to(q.dtype)
        if expand is not None and dweight is not None:
            expand.weight.add(lambda main, beta: add_sum(main, beta, dweight))
        return [dq, *travel.home()]
