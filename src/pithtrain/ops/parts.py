"""Which positions of a sequence a rank holds, and which calls of the attention kernels show its queries what they see.

**Parts.** With C = cp ranks a sequence is cut into 2C chunks and rank c holds chunks c and 2C-1-c (zigzag), so every
rank has as much to see as any other. Tokens, labels and positions are cut alike; `chunks` is where that stands.

**Steps.** What a rank sees, it sees in blocks of keys (`ring` brings them). Whole, at step t those of the rank
j = (c - t) mod C; without windows and documents

    j = c   all queries, all keys, causal      (a part is in the order of its positions, so causal here is causal there)
    j < c   all queries, the keys of j's first chunk, all visible
    j > c   the queries of the second chunk, all keys, all visible

half a square each. With documents or a window the own chunks are one packed call, and what a query chunk sees of
earlier keys is one rectangle a sequence: the only document that reaches from one into the other holds the end of the
one and the start of the other, and a window cuts the rectangle by a diagonal (`_rectangle`). Neighbours are one call,
so that one long document takes the calls of a stream. No work is done for what is not seen.

A window that reaches no further than the chunk before a query's own has three steps and no more, on every rank: the own
keys, the last `halo` keys of chunk c-1, and those of chunk 2C-2-c.

Legend: B sequences, S positions on this rank, n = S / 2 of a chunk.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pithtrain.ops.attention import Packed, Sight, is_long

ALL = slice(None)


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
    """What one rank holds of the sequences of a micro-batch, and what of it sees what. Host arithmetic, and a few
    small tensors copied to the device."""

    def __init__(
        self,
        rows: int,
        length: int,
        device: torch.device,
        cp: int = 1,
        rank: int = 0,
        documents: Sequence[Sequence[int]] | None = None,
    ):
        """`length`: of a whole sequence. `documents`: where those of each sequence begin, 0 among them; one without a
        token begins where its neighbour does. None: the sequence is one stream in which everything is seen."""
        own = chunks(length, cp, rank)
        self.rows, self.length, self.cp, self.rank = rows, length, cp, rank
        self._chunk = length // (2 * cp)
        self.documents = None if documents is None else [sorted({*starts}) for starts in documents]
        if self.documents is not None and all(len(starts) == 1 for starts in self.documents):
            self.documents = None  # rows of one document each are streams, and take the faster kernels
        places_S = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in own])
        begins_BS = torch.zeros(rows, len(places_S), dtype=torch.int64)
        for begins_S, starts in zip(begins_BS, map(torch.tensor, self.documents or ()), strict=False):
            begins_S.copy_(starts[torch.searchsorted(starts, places_S, right=True) - 1])
        self.positions_BS = to_device(places_S - begins_BS, device)
        self.packed = None
        if self.documents is not None or cp > 1:
            cuts = [0]
            for row in range(rows):
                inner = () if self.documents is None else self.documents[row]
                for chunk in own:  # a document begins within it, or a piece of one at its start
                    at = cuts[-1] - chunk.start
                    cuts += [at + s for s in inner if chunk.start < s < chunk.stop] + [at + chunk.stop]
            self.packed = pack(cuts, device)
        self._steps: dict[int | None, list[list[Call]]] = {}

    def halo(self, window: int | None) -> int | None:
        """How many of a chunk's last keys the chunk behind it sees, and nobody else of what lies behind; None: a window
        reaches further, or there is none. The same on all ranks."""
        return window - 1 if self.cp > 1 and window is not None and window - 1 <= self._chunk else None

    def ragged(self, q: Tensor, k: Tensor) -> bool:
        """Whether a call's queries [B, Sq, ...] or keys [B, Sk, ...] are not whole chunks."""
        return any(x.shape[1] % self._chunk for x in (q, k))

    def steps(self, window: int | None) -> list[list[Call]]:
        """The calls of each step; the first of all covers every query and key of this rank."""
        if window is not None and window >= self.length:
            window = None
        if window not in self._steps:
            self._steps[window] = self._made(window)
        return self._steps[window]

    def _made(self, window: int | None) -> list[list[Call]]:
        stream = self.documents is None and window is None
        first = Call(ALL, ALL, ALL, Sight(True, window, None if stream else self.packed))
        n, mine = self._chunk, chunks(self.length, self.cp, self.rank)
        others = [(self.rank - t) % self.cp for t in range(1, self.cp)]
        if stream:
            sees = Sight(causal=False)
            before, after = Call(ALL, ALL, slice(0, n), sees), Call(ALL, slice(n, 2 * n), ALL, sees)
            return [[first], *([before if other < self.rank else after] for other in others)]
        blocks = [chunks(self.length, self.cp, other) for other in others]
        if (halo := self.halo(window)) is not None:  # nothing comes before chunk 0, and chunk C-1 is behind its own
            there = self.rank > 0, self.rank < self.cp - 1
            blocks = [(slice(c.start - halo, c.start),) * is_there for c, is_there in zip(mine, there, strict=True)]
        own, *others = (_joined(self._rectangles(block, window)) for block in (mine, *blocks))
        return [[first, *own], *others]

    def _rectangles(self, block: Sequence[slice], window: int | None) -> Iterator[Call]:
        """What this rank's queries see of the keys of earlier chunks, or of their ends, that lie behind each other in
        `block`."""
        n, mine = self._chunk, chunks(self.length, self.cp, self.rank)
        rows = [ALL] if self.documents is None else [slice(row, row + 1) for row in range(self.rows)]
        for row, (i, a), (j, b) in itertools.product(rows, enumerate(mine), enumerate(block)):
            if b.start < a.start:
                starts = (0,) if self.documents is None else self.documents[row.start]
                begin = max(s for s in starts if s < b.stop)  # of the document that holds the last key of b
                end = min((s for s in starts if s >= b.stop), default=self.length)
                keys, queries = range(max(begin, b.start), b.stop), range(a.start, min(end, a.stop))
                q, k = i * n - a.start, j * (b.stop - b.start) - b.start
                for found_keys, found_queries, sight in _rectangle(queries, keys, window):
                    at = slice(found_queries.start + q, found_queries.stop + q)
                    yield Call(row, at, slice(found_keys.start + k, found_keys.stop + k), sight)


def _joined(calls: Iterable[Call]) -> list[Call]:
    """Fewer and larger: those that lie beside each other, of one sequence and then of several."""
    joined = list(calls)
    for side in ("queries", "keys", "rows"):
        whole, joined = joined, []
        for call in whole:
            last = joined[-1] if joined else None
            if last is not None and (side == "rows" or call.sight.window is None):
                a, b = getattr(last, side), getattr(call, side)
                longer = slice(a.start, b.stop)
                if a.stop == b.start and last._replace(**{side: longer}) == call._replace(**{side: longer}):
                    joined[-1] = last._replace(**{side: longer})
                    continue
            joined.append(call)
    return joined


def _rectangle(queries: range, keys: range, window: int | None) -> Iterator[tuple[range, range, Sight]]:
    """(keys, queries, sight) of what is left of positions of which all keys lie before all queries, in a window of so
    many keys: keys that no query sees and queries that see no key are cut away. Under a window with more queries than
    keys those that see all keys are a call of their own: the flash ops, told of nothing behind a query's place, take
    that for Sk keys behind it, and with Sq > Sk it is not enough."""
    if window is not None and len(queries):
        keys = range(max(keys.start, queries.start - window + 1), keys.stop)
        queries = range(queries.start, min(queries.stop, keys.stop - 1 + window))
    if not len(keys) or not len(queries):
        return
    see_all = queries.stop if window is None else min(queries.stop, keys.start + window)
    if see_all == queries.stop:
        yield keys, queries, Sight(causal=False)
    elif len(queries) > len(keys):  # and so some see all
        yield keys, range(queries.start, see_all), Sight(causal=False)
        yield from _rectangle(range(see_all, queries.stop), keys, window)
    else:  # a kernel takes query i of Sq to stand at key i + Sk - Sq
        assert window is not None
        yield keys, queries, Sight(False, window - (queries.stop - keys.stop))


def pack(bounds: Sequence[int], device: torch.device) -> Packed:
    """`bounds`: 0, ..., B * S. Host arithmetic, and a tensor copied to the device for every run of short documents."""
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    pieces: list[tuple[int, int, Packed | None]] = []
    if is_long(longest):
        documents = itertools.pairwise(bounds)
        for long, found in itertools.groupby(documents, lambda document: is_long(document[1] - document[0])):
            run = list(found)
            if long:
                pieces += [(*document, None) for document in run]
            else:
                first, last = run[0][0], run[-1][1]
                pieces.append((first, last, pack([0, *(end - first for _, end in run)], device)))
    return Packed(tuple(bounds), to_device(torch.tensor(bounds, dtype=torch.int32), device), longest, tuple(pieces))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what is queued."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.contiguous()
