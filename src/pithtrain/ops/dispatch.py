"""The four transfers of one MoE layer and one micro-batch: tokens to their experts and back, and the transposes.

    dispatch    rows = n[token]; (rows, expert ids, weights) to the ranks that own the experts
    combine     one weighted sum per row comes home;    h = mid + shared + sum over ranks           (fp32, rounded once)
    combine'    dh[token] to the experts
    dispatch'   (drows, dweights) come home;            dn = sum over ranks of drows, + dn of the shared experts

Deduplication holds both ways: one row per (token, rank), not per (token, expert) (ENGINE.md section 5). An edge keeps
indices only, so its transposes need nothing saved. Each transfer is *launched* the moment its producer is queued and
*finished* where its result is used; what runs between hides it. The one host synchronisation of a layer is
`wait_counts`. With expert-parallel size 1 (`LocalExchange`) the same calls move nothing.

What it costs where ep > 1, per layer and micro-batch: seven all-to-alls (all ranks' counts; rows and records; combine;
combine'; drows and dweights) and one host wait. Each is launched on every rank, also for zero rows. They are
collectives (NCCL, gloo) or, inside an NVLink domain, copies into the peers' memory (`ops/symmetric`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.ops.experts import Received
from pithtrain.ops.permute import gather_rows, ordered_sum, plan_rows, unpack
from pithtrain.ops.symmetric import Blocks, Peers

ROUND_ROWS = 1024  # of a buffer on CUDA: the caching allocator meets few sizes, and does not fragment


@dataclass
class Transfer:
    """An all-to-all in flight of one or more tensors. `finish` makes the current stream wait for it; what was sent is
    kept until then. `lent`: what arrived lies in a buffer of the lane, which its next exchange may overwrite."""

    received: list[Tensor]
    sent: Sequence[Tensor]
    wait: Callable[[], None] | None
    lent: bool

    def finish(self) -> list[Tensor]:
        assert self.wait is not None, "a transfer is finished once"
        self.wait()
        self.sent, self.wait = (), None
        return self.received


class Lane:
    """One direction's expert traffic: how it travels, and the stream that it is launched from. It travels by the
    group's collectives or, where there are `peers`, by copy engines (`ops/symmetric`), with bitwise equal results.

    A collective waits for everything queued on the stream that launches it. Launched from the compute stream it would
    also wait for the overlapped partner's work; so each direction launches from a stream of its own that has waited
    for the producer alone. On CPU there is no stream and `after` does nothing.

    A lane has one exchange in flight: each is finished before the next is launched, on every rank in one order.

    Memory: what the launch stream reads was made on the compute stream, and its holder (tape, exchange, generator)
    keeps it until the transfer is finished there; what it makes for the compute stream is recorded in `finish`.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, peers: Peers | None = None):
        self.group, self.peers = group, peers
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        on_cuda = group is not None and device.type == "cuda"
        # before the partner's next blocks: its kernels are small, and others wait for them
        self._stream = torch.cuda.Stream(device, priority=-1) if on_cuda else None

    def mark(self) -> torch.cuda.Event | None:
        """An event behind what has been queued on the compute stream so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def after(self, producer: torch.cuda.Event | None) -> Iterator[None]:
        """Queue on the launch stream, behind `producer`."""
        if self._stream is None or producer is None:
            yield
            return
        self._stream.wait_event(producer)
        with torch.cuda.stream(self._stream):
            yield

    def tell(self, counts_G2: Tensor) -> Tensor:
        """All counts to all: [G, G, 2] int32, what each rank has for each, from the [G, 2] that we have. Where there
        are peers it is lent until the lane's next launch."""
        blocks = Blocks([self.size] * self.size, [self.size] * self.size, [self.rank * self.size] * self.size)
        [told] = self.exchange([counts_G2.repeat(self.size, 1)], blocks).finish()
        return told.view(self.size, self.size, 2)

    def exchange(self, tensors: Sequence[Tensor], blocks: Blocks) -> Transfer:
        """All-to-all of the leading dims, which are alike."""
        if self.peers is not None:
            return self._put(self.peers, tensors, blocks)
        out: list[Tensor] = []
        works: list[dist.Work] = []
        total = sum(blocks.received)
        for rows in tensors:
            room = -(-total // ROUND_ROWS) * ROUND_ROWS if rows.is_cuda else total
            out.append(rows.new_empty(room, *rows.shape[1:])[:total])
            work = dist.all_to_all_single(out[-1], rows, blocks.received, blocks.sent, group=self.group, async_op=True)
            assert work is not None
            works.append(work)

        def wait() -> None:
            for work, rows in zip(works, out, strict=True):
                work.wait()
                if rows.is_cuda:
                    rows.record_stream(torch.cuda.current_stream())

        return Transfer(out, tensors, wait, lent=False)

    def _put(self, peers: Peers, tensors: Sequence[Tensor], blocks: Blocks) -> Transfer:
        arriving, channel = peers.put(tensors, blocks)
        gone = self.mark()  # on the launch stream: behind our copies, which read what was sent

        def wait() -> None:
            if gone is not None:
                torch.cuda.current_stream().wait_event(gone)
            peers.wait(channel)

        return Transfer(arriving, tensors, wait, lent=True)


class Places(NamedTuple):
    """Of an exchange: the blocks of the way out and of the way home, the slots that arrive, and the most rows that each
    rank receives on either way."""

    out: Blocks
    home: Blocks
    slots: int
    most: list[int]


def places(counts_GG2: np.ndarray[Any, Any], rank: int) -> Places:
    """From the (rows, slots) that every rank has for every other. The host's part: a few sums of G^2 numbers."""
    rows_GG = counts_GG2[:, :, 0]
    sent, received = rows_GG[rank].tolist(), rows_GG[:, rank].tolist()
    out = rows_GG[:rank].sum(0)  # rows for each rank of the ranks before this one
    home = rows_GG[:, :rank].sum(1)  # the same of the transpose
    most = np.maximum(rows_GG.sum(0), rows_GG.sum(1))
    slots = int(counts_GG2[:, rank, 1].sum())
    return Places(Blocks(sent, received, out.tolist()), Blocks(received, sent, home.tolist()), slots, most.tolist())


def open_exchange(ids_TK: Tensor, w_TK: Tensor, num_experts: int, forward: Lane, backward: Lane, dedup: bool) -> "Edge":
    """The exchange of one layer call, from its expert ids and routing weights. `forward` and `backward` have one
    size."""
    if forward.size == 1:
        return LocalExchange(ids_TK, w_TK)
    return Exchange(ids_TK, w_TK, num_experts // forward.size, forward, backward, dedup)


class LocalExchange:
    """Expert-parallel size 1: the rows are the tokens, nothing is copied or sent."""

    def __init__(self, ids_TK: Tensor, w_TK: Tensor):
        self._held: tuple[Tensor, ...] = (ids_TK, w_TK)

    def launch_counts(self) -> None:
        pass

    def wait_counts(self) -> None:
        pass

    def launch_dispatch(self, n_TH: Tensor) -> None:
        self._held = (n_TH, *self._held)

    def received(self, keep: bool = True) -> Received:
        n_TH, ids_TK, w_TK = self._take()
        return Received(n_TH, ids_TK, w_TK, ids_TK.numel())

    def launch_combine(self, out_UH: Tensor) -> None:
        self._held = (out_UH,)

    def combined(self, mid_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        [out] = self._take()
        return _plus(out, mid_TH, shared_TH)

    def launch_combine_t(self, dh_TH: Tensor) -> None:
        self._held = (dh_TH,)

    def received_t(self, keep: bool = True) -> Tensor:
        return self._take()[0]

    def launch_dispatch_t(self, drows_UH: Tensor, dw_Uq: Tensor) -> None:
        self._held = (drows_UH, dw_Uq)

    def returned_t(self, dn_TH: Tensor | None) -> tuple[Tensor, Tensor]:
        drows, dw = self._take()
        return _plus(drows, dn_TH), dw

    def _take(self) -> tuple[Tensor, ...]:
        held, self._held = self._held, ()
        return held


class Exchange:
    """Expert-parallel size > 1. Construction does the index work on the device, without a host synchronisation. Shapes:
    T tokens, H hidden, K experts per token, U received rows, q slots. `keep`: received rows are read after the next
    launch of their direction."""

    def __init__(self, ids_TK: Tensor, w_TK: Tensor, experts_per_rank: int, forward: Lane, backward: Lane, dedup: bool):
        self._forward, self._backward = forward, backward
        rows = plan_rows(ids_TK, w_TK, forward.size, experts_per_rank, dedup)
        self._counts, self._records, self._token = rows.counts_G2, rows.records_Ur, rows.token_U
        self._row_TK, self._col_TK, self._row_TGC = rows.row_TK, rows.col_TK, rows.row_TGC
        self._weight_dtype = w_TK.dtype
        self._ready = forward.mark()
        self._flight: Transfer | None = None

    def launch_counts(self) -> None:
        """All ranks' (rows, slots) for all; then one copy to pinned host memory behind one event."""
        lane = self._forward
        with lane.after(self._ready):
            self._told = told = lane.tell(self._counts)
            if told.is_cuda:
                self._told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
                self._told.copy_(told, non_blocking=True)
                self._copied = torch.cuda.current_stream().record_event()
        del self._counts

    def wait_counts(self) -> None:
        """The layer's only host synchronisation: how many rows and slots go and come."""
        lane = self._forward
        if self._token.is_cuda:
            self._copied.synchronize()
        self._places = places(self._told.numpy(), lane.rank)
        if lane.peers is not None:
            lane.peers.require_room(self._places.most)
        self.rows_sent = sum(self._places.out.sent)
        self._token = self._token[: self.rows_sent]
        del self._told

    def launch_dispatch(self, n_TH: Tensor) -> None:
        """n [T, H] in compute dtype, whose producer came before this exchange was made."""
        lane = self._forward
        with lane.after(self._ready):
            tensors = [gather_rows(n_TH, self._token), self._records[: self.rows_sent]]
            self._flight = lane.exchange(tensors, self._places.out)
        del self._records  # which the transfer keeps while it needs them: an edge keeps indices only

    def received(self, keep: bool = True) -> Received:
        rows, records = self._land(keep)
        return Received(rows, *unpack(records, self._weight_dtype), self._places.slots)

    def launch_combine(self, out_UH: Tensor) -> None:
        lane = self._forward
        with lane.after(lane.mark()):
            self._flight = lane.exchange([out_UH], self._places.home)

    def combined(self, mid_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        [rows] = self._land()
        return self._sum_over_ranks(rows, mid_TH, shared_TH)

    def launch_combine_t(self, dh_TH: Tensor) -> None:
        lane = self._backward
        with lane.after(lane.mark()):
            self._flight = lane.exchange([gather_rows(dh_TH, self._token)], self._places.out)

    def received_t(self, keep: bool = True) -> Tensor:
        [rows] = self._land(keep)
        return rows

    def launch_dispatch_t(self, drows_UH: Tensor, dw_Uq: Tensor) -> None:
        lane = self._backward
        with lane.after(lane.mark()):
            self._flight = lane.exchange([drows_UH, dw_Uq], self._places.home)

    def returned_t(self, dn_TH: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (dn [T, H] in compute dtype, dw [T, K] fp32)."""
        drows, dw_Uq = self._land()
        dw_TK = dw_Uq[self._row_TK, self._col_TK]
        return self._sum_over_ranks(drows, dn_TH), dw_TK

    def _land(self, keep: bool = False) -> list[Tensor]:
        """What arrived, with `keep` its rows for as long as they are held; else until the lane's next launch."""
        flight, self._flight = self._flight, None
        assert flight is not None, "it was launched"
        first, *rest = flight.finish()
        return [first.clone() if keep and flight.lent else first, *rest]

    def _sum_over_ranks(self, rows_UH: Tensor, *plus: Tensor | None) -> Tensor:
        """Per rank the copies in order, then over ranks in order: the same for dedup and plain dispatch."""
        return ordered_sum(rows_UH, self._row_TGC, plus=[term for term in plus if term is not None])


Edge = LocalExchange | Exchange


def _plus(rows_TH: Tensor, *plus: Tensor | None) -> Tensor:
    """The same sum where each token has its one row: nothing to find."""
    terms = [term for term in plus if term is not None]
    if len(terms) > 1:
        return ordered_sum(rows_TH, torch.arange(len(rows_TH), device=rows_TH.device)[:, None, None], plus=terms)
    return rows_TH + terms[0] if terms else rows_TH  # torch adds two in fp32 too, and rounds once
