"""Where this rank stands: its rank, device, mesh coordinates, and one process group per axis and class of traffic.

Axes, outer to inner: pp, dp, cp, ep. Operations on one communicator run in launch order, so traffic that may be in
flight at the same time has a communicator of its own (ENGINE.md section 1), a field of `World`. A group of size 1 is
None and its operations return their input. Every rank creates every group, in one order.
"""

import datetime
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from pithtrain import flight
from pithtrain.errors import CapacityError
from pithtrain.spec import DistributedSection, Mesh

Group = dist.ProcessGroup | None
T = TypeVar("T")
AXES = ("pp", "dp", "cp", "ep")  # of `Mesh.coords`

# torch 2.13 renamed the two; 2.11 has the old names only
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Place:
    """What the launcher says of this process. `init_method`: "file:///path" or "tcp://host:port"."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str
    attempt: int


@dataclass(frozen=True)
class World:
    """This rank's view of all ranks; coordinates are places on the axes of `mesh`."""

    mesh: Mesh
    rank: int
    pp: int
    dp: int
    cp: int
    ep: int
    device: torch.device
    control_group: Group  # all ranks, on CPU: flags, checkpoint agreement
    save_group: Group  # all ranks, on CPU: a checkpoint that is written behind the steps
    world_group: Group  # all ranks, on the device: the gradient norm and the step's statistics
    pp_group: Group  # activations and their gradients, point to point
    ep_fwd_group: Group  # expert exchange forward
    ep_bwd_group: Group  # and backward: the same ranks
    cp_group: Group  # keys and values round the ranks that share a sequence, counts of its routers
    dense_group: Group  # ranks that share the dense parameters of a stage: dp x cp x ep
    expert_group: Group  # ranks that share the same experts: dp x cp

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` data-parallel ranks this is, and so which micro-batches it reads."""
        return self.dp * self.mesh.ep + self.ep

    @property
    def data_size(self) -> int:
        return self.mesh.dp * self.mesh.ep

    def pp_peer(self, pp_rank: int) -> int:
        """Global rank of the process at `pp_rank` in this rank's pipeline."""
        return self.mesh.rank(pp_rank, self.dp, self.cp, self.ep)

    def max(self, *flags: int) -> Callable[[], list[int]]:
        """Start agreeing on flags, in one message; the returned function waits for the highest of each."""
        if self.control_group is None:
            return lambda: list(flags)
        value = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control_group, async_op=True)

        def answer() -> list[int]:
            if work is not None:
                work.wait()
            return value.tolist()

        return answer

    def sum(self, value: Tensor) -> Tensor:
        """Sum in place over all ranks, on the device."""
        return all_reduce_sum(value, self.world_group)

    def from_rank_zero(self, value: T, group: Group = None) -> T:
        """Rank 0's value on every rank; it must be picklable. `group`: another one of all ranks, for another thread."""
        box = [value]
        if self.control_group is not None:
            dist.broadcast_object_list(box, src=0, group=group or self.control_group)
        return box[0]

    def to_rank_zero(self, value: T) -> list[T]:
        """Every rank's value in rank order on rank 0, [] elsewhere; it must be picklable."""
        if self.control_group is None:
            return [value]
        found: list[T | None] = [None] * self.mesh.size
        dist.gather_object(value, found if self.rank == 0 else None, dst=0, group=self.control_group)
        return cast(list[T], found) if self.rank == 0 else []

    def barrier(self) -> None:
        """Wait on the host for every rank."""
        self.max(0)()


def all_reduce_sum(value: Tensor, group: Group) -> Tensor:
    """Sum in place over a group."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def reduce_scatter(whole: Tensor, part: Tensor, group: Group) -> dist.Work | None:
    """Start summing `whole` over the group; this rank's chunk of dim 0 goes into `part`, which may be part of whole."""
    return None if group is None else _reduce_scatter(part, whole, group=group, async_op=True)


def all_gather(part: Tensor, whole: Tensor, group: Group) -> dist.Work | None:
    """Start collecting every rank's `part` into `whole`, chunk by chunk of dim 0."""
    return None if group is None else _all_gather(whole, part, group=group, async_op=True)


def all_to_all(sent: Tensor, to: Sequence[int], received: Tensor, of: Sequence[int], group: Group) -> dist.Work | None:
    """Start sending to[r] numbers of `sent` to each rank r of the group, and receiving of[r] from it, in rank order."""
    assert group is not None, "alone, there is nobody to send to"
    return dist.all_to_all_single(received, sent, [*of], [*to], group=group, async_op=True)


@contextmanager
def connect(place: Place, mesh: Mesh, device_type: str, timeouts: DistributedSection) -> Iterator[World]:
    """Join the job and leave it at the end. `device_type`: "cpu" (gloo) or "cuda" (NCCL; one process per GPU). Raises
    CapacityError when this process has no device of its own."""
    assert place.world_size == mesh.size, f"{place.world_size} ranks on a mesh of {mesh.size}"
    device = _device(place, device_type)
    alone, limit = mesh.size == 1, datetime.timedelta(seconds=timeouts.init_timeout_s)
    if alone:  # torch's checkpoint wants a process group even then; this one has no network and no peer
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    else:
        store = next(rendezvous(place.init_method, place.rank, place.world_size, timeout=limit))[0]
        store.set_timeout(limit)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=mesh.size, timeout=limit)
    if device.type == "cuda" and not alone:
        _require_own_device(place, device)
    try:
        yield _world(place, mesh, device, timeouts)
    except BaseException:
        if alone:  # else a peer may be gone, and the process is about to end
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _device(place: Place, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 else place.local_rank
    if index >= visible or (visible == 1 and place.local_rank and place.init_method.startswith("file:")):
        raise CapacityError(
            f"rank {place.rank} (local rank {place.local_rank}) has no GPU of its own: {visible} visible. "
            "Set slurm.gpus_per_node to the GPUs of a node, or training.device: cpu."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _require_own_device(place: Place, device: torch.device) -> None:
    """NCCL would say so in words of its own, or hang. Costs one small exchange."""
    found: list[str | None] = [None] * place.world_size
    dist.all_gather_object(found, f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}")
    refuse_shared(found)


def refuse_shared(devices: Sequence[str | None]) -> None:
    """`devices`: a name for each rank's, which no other device has. Raises CapacityError where two ranks share one."""
    for rank, device in enumerate(devices):
        if device in devices[:rank]:
            raise CapacityError(
                f"ranks {devices.index(device)} and {rank} have the same GPU ({device}). Give each task its own "
                "(slurm.gpus_per_node; no CUDA_VISIBLE_DEVICES in slurm.env), or train on fewer ranks."
            )


def _world(place: Place, mesh: Mesh, device: torch.device, timeouts: DistributedSection) -> World:
    backend = "nccl" if device.type == "cuda" else "gloo"

    def group(what: str, *same: str, timeout_s: int = timeouts.train_timeout_s, on: str = backend) -> Group:
        """The ranks that stand where this one does on the axes `same`; `what`: the field it is."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.size):
            coords = mesh.coords(rank)
            members.setdefault(tuple(coords[AXES.index(axis)] for axis in same), []).append(rank)
        mine: Group = None
        for ranks in members.values():
            if len(ranks) > 1:
                limit, told = datetime.timedelta(seconds=timeout_s), flight.name(what, ranks)
                created = dist.new_group(ranks, timeout=limit, backend=on, group_desc=told)
                if place.rank in ranks:
                    assert isinstance(created, dist.ProcessGroup)
                    mine = created
        if mine is not None and on == "nccl":  # NCCL connects at the first call, which must not be a part of the ranks
            dist.all_reduce(torch.zeros(1, device=device), group=mine)
        return mine

    (pp, dp, cp, ep), save_s = mesh.coords(place.rank), timeouts.save_timeout_s
    return World(
        mesh=mesh,
        rank=place.rank,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        device=device,
        # a synchronous save writes while the others wait here
        control_group=group("control_group", timeout_s=max(timeouts.train_timeout_s, save_s), on="gloo"),
        save_group=group("save_group", timeout_s=save_s, on="gloo"),
        world_group=group("world_group"),
        pp_group=group("pp_group", "dp", "cp", "ep"),
        ep_fwd_group=group("ep_fwd_group", "pp", "dp", "cp"),
        ep_bwd_group=group("ep_bwd_group", "pp", "dp", "cp"),
        cp_group=group("cp_group", "pp", "dp", "ep"),
        dense_group=group("dense_group", "pp"),
        expert_group=group("expert_group", "pp", "ep"),
    )
