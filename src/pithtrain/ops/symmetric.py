"""The expert exchange by copy engines: rows go straight into the peers' memory, a signal behind them says so.

NCCL's all-to-all is a kernel: beside GEMMs that fill the device it hides nothing of itself. A copy between two GPUs of
one NVLink domain needs no multiprocessor and hides by 85 to 100 % (two H200s: 381 GB/s). So each rank maps its peers'
buffers (torch's symmetric memory; multicast stays off), and an exchange is, on the lane's launch stream,

    for each peer: copy its block of rows to where it belongs in that peer's buffer, then signal
    where the result is used (the compute stream): wait for each peer's signal; read the buffer in place

**Places.** Rows are grouped by destination already. Where a rank's block begins in a receiver's buffer follows from how
many rows the ranks before it send there, so each rank tells all its counts to all (`dispatch.places`).
Rows arrive without gaps in the order in which NCCL would bring them: every sum is bitwise the same.

**Capacity.** With deduplication a rank receives at most every token of every rank once, G T rows; usual is D / G of it,
two thirds for Qwen3 at ep 8. So the worst case is reserved and nothing can overflow; a bound that was too low would be
a CapacityError on all ranks, which all know all counts, before a row is sent. Two sets for each of the two directions,
as forward and backward are both in flight: 4 G T (2 H + 8 q) bytes in bf16, 0.5 GiB for 16k tokens of width 2048 at
ep 2, outside of the caching allocator's figures.

**Why two sets are enough, without acknowledgements.** The exchanges of a direction take turns with its two sets. Let
n, n+1, n+2 follow each other. Rank a may write exchange n+2 over n in b's set when b has read n. It has:

    a puts n+2        behind a's wait for n+1 from b      program order: a lane finishes one before it launches the next
    b puts n+1 to a   behind b's producer of n+1, and that behind all that b queued before, its reads of n among it

This needs that (1) every rank signals every other in every exchange, also for no rows; (2) what an exchange brought is
read, or copied (`keep`), before the lane's next launch: by the compute stream, behind which that launch's producer
lies, or, as counts are, by the launch stream itself. So an exchange lends its rows until the next one.

**Why nothing can lock up.** A wait at place p of the program waits for signals put at places before p, on whatever
rank: all ranks of a group play one schedule. So streams that share one hardware queue, a module loaded late, a host
that drains its device anywhere: all only delay. Signals are flags, 0 or 1; by the argument above a flag has been taken
back before its set's next turn, so a put never waits.

A peer that is gone leaves its memory mapped and the waits spinning; the host sees that as it sees a hung collective: a
step outlives its limit (`watch`). The waits have no time limit of their own, whose end would be a CUDA error without a
cause. Collectives of the group are not used after the start.

Legend: G ranks of the group, T tokens, H hidden, q slots of a row, U rows.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.errors import CapacityError, RunFailed

ALIGN = 256  # bytes: where a tensor of an exchange begins
SETS = 2  # of a direction


class Blocks(NamedTuple):
    """Rows of an all-to-all, per rank: to it, from it, and where ours begin in what it receives (copy engines only)."""

    sent: list[int]
    received: list[int]
    begin: list[int]


class Signals(Protocol):
    """What is used of torch's symmetric memory, on the current stream: set a flag of a peer; wait for a peer's and take
    it back."""

    def put_signal(self, dst_rank: int, channel: int) -> None: ...
    def wait_signal(self, src_rank: int, channel: int) -> None: ...


def regions(capacity: int, row_bytes: Sequence[int]) -> list[int]:
    """Where each tensor of an exchange begins in a set, in bytes, if all have `capacity` rows; then the whole size."""
    begins = [0]
    for each in row_bytes:
        begins.append(begins[-1] + -(-capacity * each // ALIGN) * ALIGN)
    return begins


def set_bytes(capacity: int, row_bytes: Sequence[int], ranks: int) -> int:
    """Of one set, which holds the counts of all ranks too."""
    return regions(capacity, [max(sum(row_bytes), 1)])[-1] + ALIGN * len(row_bytes) + regions(ranks**2, [8])[-1]


class Peers:
    """One direction's buffers on all ranks of a group, and whose turn it is. `capacity`: rows that fit."""

    def __init__(self, signals: Signals, rank: int, sets: Sequence[Tensor], capacity: int, channel: int):
        """sets: [2, bytes] uint8 of each rank, its own included; `channel` and the next one are this direction's."""
        self._signals, self._rank, self._sets = signals, rank, sets
        self._capacity, self._channel, self._turn = capacity, channel, 0
        self._others = [(rank + step) % len(sets) for step in range(1, len(sets))]  # each begins with another

    def require_room(self, most: Sequence[int]) -> None:
        """Raises CapacityError, on all ranks alike, where some rank would receive more than fits."""
        if max(most) > self._capacity:
            raise CapacityError(
                f"rank {most.index(max(most))} of its expert-parallel group would receive {max(most)} rows in one "
                f"exchange and its buffers hold {self._capacity}; moe.transport=nccl has no such limit"
            )

    def put(self, tensors: Sequence[Tensor], blocks: Blocks) -> tuple[list[Tensor], int]:
        """Copy each rank's block of rows and signal, on the current stream -> (what arrives, in place; the channel to
        wait for). The tensors are contiguous, [sum(sent), ...], and must live until the copies are over."""
        turn, self._turn = self._turn, (self._turn + 1) % SETS
        sizes = [prod(x.shape[1:]) * x.element_size() for x in tensors]
        begins = regions(self._capacity, sizes)[:-1]
        for peer in (*self._others, self._rank):
            first, count = sum(blocks.sent[:peer]), blocks.sent[peer]
            for x, size, begin in zip(tensors, sizes, begins, strict=True):
                if count * size:
                    assert x.is_contiguous(), "blocks of rows are copied as bytes"
                    at = begin + blocks.begin[peer] * size
                    block = x[first : first + count].view(-1).view(torch.uint8)
                    self._sets[peer][turn, at : at + count * size].copy_(block)
            if peer != self._rank:
                self._signals.put_signal(peer, self._channel + turn)
        own, total = self._sets[self._rank][turn], sum(blocks.received)
        arriving = [
            own[begin : begin + total * size].view(x.dtype).view(total, *x.shape[1:])
            for x, size, begin in zip(tensors, sizes, begins, strict=True)
        ]
        return arriving, self._channel + turn

    def wait(self, channel: int) -> None:
        """The current stream waits for every peer's signal."""
        for peer in self._others:
            self._signals.wait_signal(peer, channel)


def open_peers(
    group: dist.ProcessGroup, device: torch.device, capacity: int, row_bytes: Sequence[int]
) -> tuple[Peers, Peers]:
    """The forward and the backward direction of a group whose ranks reach each other's memory; a collective.

    `row_bytes`: of a row in each tensor of the widest exchange. Raises RunFailed where memory cannot be mapped.
    """
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # we use none, and making it fails or hangs on some hosts
    shape = (2 * SETS, set_bytes(capacity, row_bytes, group.size()))
    try:
        # not `empty`: its pool may put two allocations into one block, which has one set of signals
        mine = _SymmetricMemory.empty_strided_p2p(shape, (shape[1], 1), torch.uint8, device)
        handle = _symmetric_memory.rendezvous(mine, group)
        sets = [handle.get_buffer(rank, shape, torch.uint8) for rank in range(group.size())]
    except RuntimeError as error:
        error = RunFailed(f"symmetric memory of the expert-parallel group: {error}; set moe.transport=nccl")
        error.retry = False
        raise error from None
    rank = group.rank()
    sets[rank] = mine  # which keeps the memory
    forward, backward = (
        Peers(handle, rank, [each[first : first + SETS] for each in sets], capacity, first) for first in (0, SETS)
    )
    return forward, backward


# ---- where it is possible --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """A rank's place in its host. `devices`: what this process sees; `links`: NVLinks from its own device to each of
    them, None without access to that one's memory."""

    host: str
    device: str
    devices: tuple[str, ...] = ()
    links: tuple[int | None, ...] = ()


def seat(device: torch.device) -> Seat:
    """This process's, of one of its devices."""
    if device.type != "cuda":
        return Seat(socket.gethostname(), str(device))
    from torch._C import _distributed_c10d as c10d
    from torch._C._autograd import DeviceType

    own, count = device.index, torch.cuda.device_count()
    try:  # the stubs do not know it
        found = getattr(c10d, "_detect_dma_connectivity")(DeviceType.CUDA, "nvlink").matrix[own]  # noqa: B009
    except RuntimeError:  # no detector in this build
        found = [0] * count
    links = tuple(
        found[other] if other == own or torch.cuda.can_device_access_peer(own, other) else None
        for other in range(count)
    )
    names = tuple(str(torch.cuda.get_device_properties(other).uuid) for other in range(count))
    return Seat(socket.gethostname(), names[own], names, links)


def why_not(group: Sequence[Seat], nvlink: bool) -> str:
    """Why these ranks cannot write into each other's memory, in words; "" where they can. `nvlink`: nor by NVLink."""
    for mine in group:
        if not mine.devices:
            return f"{mine.device} has no copy engines"
        for other in group:
            if mine.host != other.host:
                return f"the ranks of an expert-parallel group are on {mine.host} and {other.host}"
            if other.device not in mine.devices:
                return f"on {mine.host} a rank sees {len(mine.devices)} GPUs and not those of its peers"
            number = mine.devices.index(other.device)
            links, pair = mine.links[number], f"GPUs {mine.devices.index(mine.device)} and {number} of {mine.host}"
            if links is None:
                return f"{pair} have no access to each other's memory"
            if nvlink and not links and mine != other:
                return f"no NVLink joins {pair}"
    return ""
