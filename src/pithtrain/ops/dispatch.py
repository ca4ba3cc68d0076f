"""The four transfers of one MoE layer and one micro-batch: tokens to their experts and back, and the transposes.

    dispatch    rows = n[token]; (rows, expert ids, weights) to the ranks that own the experts
    combine     one weighted sum per row comes home;    h = mid + shared + sum over ranks           (fp32, rounded once)
    combine'    dh[token] to the experts
    dispatch'   (drows, dweights) come home;            dn = sum over ranks of drows, + dn of the shared experts

Deduplication holds both ways: one row per (token, rank), not per (token, expert) (ENGINE.md section 5). An edge keeps
indices only, so its transposes need nothing saved. Each transfer is *launched* the moment its producer is queued and
*finished* where its result is used; what runs between hides it. The one host synchronisation of a layer is
`wait_counts`. With expert-parallel size 1 (`LocalExchange`) the same calls move nothing.

What it costs where ep > 1, per layer and micro-batch: seven all-to-alls (counts; rows and records; combine; combine';
drows and dweights) and one host wait. Every collective is called on every rank, also for zero rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.ops.experts import Received
from pithtrain.ops.permute import gather_rows, ordered_sum, plan_rows

ROUND_ROWS = 1024  # of a buffer on CUDA: the caching allocator meets few sizes, and does not fragment


@dataclass
class Transfer:
    """An all-to-all in flight. `finish` makes the current stream wait for it; the sent tensor is kept until then."""

    received: Tensor
    sent: Tensor | None
    work: dist.Work | None

    def finish(self) -> Tensor:
        assert self.work is not None, "a transfer is finished once"
        self.work.wait()
        if self.received.is_cuda:
            self.received.record_stream(torch.cuda.current_stream())
        self.sent = self.work = None
        return self.received


class Lane:
    """One direction's expert traffic: a communicator and the stream its collectives are launched from.

    A collective waits for everything queued on the stream that launches it. Launched from the compute stream it would
    also wait for the overlapped partner's work; so each direction launches from a stream of its own that has waited
    for the producer alone. On CPU there is no stream and `after` does nothing.

    Memory: what the launch stream reads was made on the compute stream, and its holder (tape, exchange, generator)
    keeps it until the transfer is finished there; what it makes for the compute stream is recorded in `finish`.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group = group
        self.size = 1 if group is None else group.size()
        self._stream = torch.cuda.Stream(device) if group is not None and device.type == "cuda" else None

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

    def exchange(self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Transfer:
        """All-to-all of the leading dim with these row counts per rank (None: one equal part each)."""
        total = rows.shape[0] if received is None else sum(received)
        room = -(-total // ROUND_ROWS) * ROUND_ROWS if rows.is_cuda else total
        out = rows.new_empty(room, *rows.shape[1:])[:total]
        work = dist.all_to_all_single(out, rows, received, sent, group=self.group, async_op=True)
        return Transfer(out, rows, work)


class Edge(Protocol):
    """What the tape needs of an exchange. Shapes: T tokens, H hidden, K experts per token, U received rows, q slots."""

    def launch_counts(self) -> None: ...
    def wait_counts(self) -> None: ...
    def launch_dispatch(self, n_TH: Tensor, w_TK: Tensor) -> None: ...
    def received(self) -> Received: ...
    def launch_combine(self, out_UH: Tensor) -> None: ...
    def combined(self, mid_TH: Tensor, shared_TH: Tensor | None) -> Tensor: ...
    def launch_combine_t(self, dh_TH: Tensor) -> None: ...
    def received_t(self) -> Tensor: ...
    def launch_dispatch_t(self, drows_UH: Tensor, dw_Uq: Tensor) -> None: ...
    def returned_t(self, dn_TH: Tensor | None) -> tuple[Tensor, Tensor]: ...


def open_exchange(ids_TK: Tensor, num_experts: int, forward: Lane, backward: Lane, dedup: bool) -> Edge:
    """The exchange of one layer call, from its expert ids [T, K]. `forward` and `backward` have one size."""
    if forward.size == 1:
        return LocalExchange(ids_TK)
    return Exchange(ids_TK, num_experts // forward.size, forward, backward, dedup)


class LocalExchange:
    """Expert-parallel size 1: the rows are the tokens, nothing is copied or sent."""

    def __init__(self, ids_TK: Tensor):
        self._ids_TK = ids_TK
        self._held: tuple[Tensor, ...] = ()

    def launch_counts(self) -> None:
        pass

    def wait_counts(self) -> None:
        pass

    def launch_dispatch(self, n_TH: Tensor, w_TK: Tensor) -> None:
        self._held = (n_TH, w_TK)

    def received(self) -> Received:
        n_TH, w_TK = self._take()
        return Received(n_TH, self._ids_TK, w_TK, self._ids_TK.numel())

    def launch_combine(self, out_UH: Tensor) -> None:
        self._held = (out_UH,)

    def combined(self, mid_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        [out] = self._take()
        return _plus(out, mid_TH, shared_TH)

    def launch_combine_t(self, dh_TH: Tensor) -> None:
        self._held = (dh_TH,)

    def received_t(self) -> Tensor:
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
    """Expert-parallel size > 1. Construction does the index work on the device, without a host synchronisation."""

    def __init__(self, ids_TK: Tensor, experts_per_rank: int, forward: Lane, backward: Lane, dedup: bool):
        self._forward, self._backward = forward, backward
        self._rows = plan_rows(ids_TK, forward.size, experts_per_rank, dedup)
        self._ready = forward.mark()
        self._flights: list[Transfer] = []

    def launch_counts(self) -> None:
        """(rows, slots) for each rank, exchanged; then one copy to pinned host memory behind one event."""
        lane, counts = self._forward, self._rows.counts_G2
        with lane.after(self._ready):
            sent = counts.to(torch.int32)
            both = torch.stack((sent, lane.exchange(sent).finish()))
            if both.is_cuda:
                self._counts = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
                self._counts.copy_(both, non_blocking=True)
                self._copied = torch.cuda.current_stream().record_event()
            else:
                self._counts = both

    def wait_counts(self) -> None:
        """The layer's only host synchronisation: how many rows and slots go and come."""
        if self._rows.token_U.is_cuda:
            self._copied.synchronize()
        (self._sent, _), (self._received, slots) = (side.t().tolist() for side in self._counts)
        self._num_slots = sum(slots)
        self.rows_sent = sum(self._sent)
        self._token = self._rows.token_U[: self.rows_sent]

    def launch_dispatch(self, n_TH: Tensor, w_TK: Tensor) -> None:
        """n [T, H] in compute dtype and w [T, K] fp32, whose producer came before this exchange was made."""
        lane, rows, total = self._forward, self._rows, self.rows_sent
        with lane.after(self._ready):
            weights = w_TK.new_zeros(rows.local_Uq.shape)
            weights[rows.row_TK, rows.col_TK] = w_TK
            records = torch.cat((rows.local_Uq[:total].to(torch.int32), weights[:total].view(torch.int32)), dim=1)
            self._flights = [
                lane.exchange(gather_rows(n_TH, self._token), self._sent, self._received),
                lane.exchange(records, self._sent, self._received),
            ]
        self._weight_dtype = w_TK.dtype

    def received(self) -> Received:
        rows, records = self._land()
        per_row = self._rows.local_Uq.shape[1]
        # a copy, not `contiguous`: one row's slice counts as contiguous and cannot be viewed as 8-byte floats
        local, weights = records[:, :per_row], records[:, per_row:].clone(memory_format=torch.contiguous_format)
        return Received(rows, local.to(torch.int64), weights.view(self._weight_dtype), self._num_slots)

    def launch_combine(self, out_UH: Tensor) -> None:
        lane = self._forward
        with lane.after(lane.mark()):
            self._flights = [lane.exchange(out_UH, self._received, self._sent)]

    def combined(self, mid_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        return self._sum_over_ranks(*self._land(), mid_TH, shared_TH)

    def launch_combine_t(self, dh_TH: Tensor) -> None:
        lane = self._backward
        with lane.after(lane.mark()):
            self._flights = [lane.exchange(gather_rows(dh_TH, self._token), self._sent, self._received)]

    def received_t(self) -> Tensor:
        return self._land()[0]

    def launch_dispatch_t(self, drows_UH: Tensor, dw_Uq: Tensor) -> None:
        lane = self._backward
        with lane.after(lane.mark()):
            self._flights = [lane.exchange(x, self._received, self._sent) for x in (drows_UH, dw_Uq)]

    def returned_t(self, dn_TH: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (dn [T, H] in compute dtype, dw [T, K] fp32)."""
        drows, dw_Uq = self._land()
        dw_TK = dw_Uq[self._rows.row_TK, self._rows.col_TK]
        return self._sum_over_ranks(drows, dn_TH), dw_TK

    def _land(self) -> list[Tensor]:
        flights, self._flights = self._flights, []
        return [flight.finish() for flight in flights]

    def _sum_over_ranks(self, rows_UH: Tensor, *plus: Tensor | None) -> Tensor:
        """Per rank the copies in order, then over ranks in order: the same for dedup and plain dispatch."""
        return ordered_sum(rows_UH, self._rows.row_TGC, plus=[term for term in plus if term is not None])


def _plus(rows_TH: Tensor, *plus: Tensor | None) -> Tensor:
    """The same sum where each token has its one row: nothing to find."""
    terms = [term for term in plus if term is not None]
    if len(terms) > 1:
        return ordered_sum(rows_TH, torch.arange(len(rows_TH), device=rows_TH.device)[:, None, None], plus=terms)
    return rows_TH + terms[0] if terms else rows_TH  # torch adds two in fp32 too, and rounds once
