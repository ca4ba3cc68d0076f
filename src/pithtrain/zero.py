"""ZeRO-1: parameters and fp32 main gradients whole on each rank, masters and optimizer state sharded.

Per parameter of P elements shared by n ranks: weight in compute dtype (2P bytes in bf16), main gradient (4P), and a
shard of master, first and second moment (12P / n; 8P / n with moments in bf16, `ops/rounding`). One step:

    last W of a bucket  -> reduce-scatter of its main gradients, while other chunks still compute
    all buckets         -> norm: one all-reduce of one scalar; shards are disjoint, so each parameter counts once
    update              -> fused AdamW on the shards; clip and skip are device tensors, no host synchronisation;
                           with Muon the matrices of layers are turned first (`ops/muon`)
    all-gather          -> new weights, layer by layer in forward order; a layer waits for its own (`Zero.arrived`)

Layout: a parameter of `rows` (experts: [E * out, in]) is cut along dim 0 into chunks of ceil(rows / n), which is
DTensor's Shard(0). Buffers have n * chunk rows and are used through a view of the real ones; pad rows stay zero. So
collectives need no packing. Worked example, 10 rows on n = 4: chunks of 3, shards of 3, 3, 3, 1 rows, buffers of 12.

Gradients are *summed*; the loss carried 1 / (valid tokens of the global batch), and nothing else scales them.

Muon's direction is one of whole matrices, of which a shard may hold a part. Where chunks end between matrices, as those
of many experts do, each rank turns its own. Else each matrix has an owner in the group, the same at every step and so
chosen that over all layers the ranks have as much to do: an all-to-all brings a layer's momenta there in compute dtype,
another takes the directions back. All momenta leave first (4 bytes of memory for each number of a cut shard), then each
rank turns what it owns, then layer by layer directions arrive. Which way a matrix goes changes rounding alone.

A parameter of update "load" (a router's selection bias) has a master and a weight alone; `update` moves it by the
expert load of the whole global batch.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from pithtrain.models.contract import Parameter
from pithtrain.ops import muon
from pithtrain.ops.linear import Weight, accumulate_dtype
from pithtrain.ops.rounding import rounding_keys, store_moments
from pithtrain.ops.router import bias_step
from pithtrain.world import World, all_gather, all_to_all, reduce_scatter

KINDS = ("dense", "expert")
TURNED = 1 << 26  # numbers that are turned at once: what that takes beside them is as much again, several times


@dataclass(frozen=True)
class Optimizer:
    """AdamW (Loshchilov & Hutter, Decoupled Weight Decay Regularization), decay on matrices only; and Muon, with the
    same decay, for the parameters that `Zero` gives it."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float


@dataclass(frozen=True)
class Update:
    """What one update of all parameters is made with: device scalars but for the rate. `updates` counts this one,
    `clip` divides gradients, and where `skipped` is 1 nothing changes."""

    optimizer: Optimizer
    lr: float
    updates: Tensor
    clip: Tensor
    skipped: Tensor
    by_kernel: bool


class Sharded:
    """One parameter on this rank: whole weight and main gradient, and this rank's shard of everything else. Without
    gradient (update "load") main gradient and moments have no rows; nor has the second moment of what Muon moves."""

    def __init__(self, info: Parameter, world: World, dtype: torch.dtype, moments: torch.dtype, seed: int, muon: bool):
        """Allocates; every value is zero until `build` initialises the master or a checkpoint is loaded."""
        self.info, self.dtype = info, dtype
        self.moments = info.moments(muon)
        self.group = world.expert_group if info.kind == "expert" else world.dense_group
        self.parts = 1 if self.group is None else self.group.size()
        self.part = 0 if self.group is None else dist.get_rank(self.group)
        shape = (info.shape[0] // world.mesh.ep, *info.shape[1:]) if info.kind == "expert" else info.shape
        flat = (shape[0] * shape[1], *shape[2:]) if info.kind == "expert" else shape
        self.rows = flat[0]
        self.shard_rows = -(-self.rows // self.parts)
        self.first_row = (world.ep * self.rows if info.kind == "expert" else 0) + self.part * self.shard_rows

        wide = accumulate_dtype(dtype)
        device = world.device
        padded = (self.parts * self.shard_rows, *flat[1:])
        self._data = torch.zeros(padded, dtype=wide if info.fp32 else dtype, device=device)
        trained = info.trained
        self._grad = torch.zeros(padded if trained else (0,), dtype=wide, device=device)
        main_grad = self._grad[: self.rows].view(shape) if trained else self._grad
        self.weight = Weight(info.name, self._data[: self.rows].view(shape), main_grad)
        own = min(max(self.rows - self.part * self.shard_rows, 0), self.shard_rows)  # 0: more ranks than chunks
        self._masters = torch.zeros(self.shard_rows, *flat[1:], dtype=wide, device=device)
        self.master = self._masters[:own]
        self.exp_avg = torch.zeros_like(self.master if trained else self.master[:0], dtype=moments)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg if self.moments == 2 else self.exp_avg[:0])
        self._keys = rounding_keys(seed, info.name)
        self._first = self.first_row * (self._data.numel() // len(self._data))  # index of this shard's first element

    def _own(self, whole: Tensor) -> Tensor:
        return whole[self.part * self.shard_rows : (self.part + 1) * self.shard_rows]

    @property
    def grad(self) -> Tensor:
        """This rank's shard of the main gradient, summed over the group once `reduce` has been waited for."""
        return self._own(self._grad)[: self.master.shape[0]]

    def adamw(self, now: Update) -> None:
        """The update of the shard. By the kernel, which writes this rank's rows of the weight too, one pass: 16 bytes a
        parameter read, 12 and the weight written; 4 less each way with moments in bf16."""
        adam = now.optimizer
        decay = adam.weight_decay if self.info.decay else 0.0
        kept = self.exp_avg, self.exp_avg_sq
        if now.by_kernel:
            from pithtrain.ops import kernels

            kernels.adamw(
                *(self.master, *kept, self.grad, self._own(self._data)),
                *(now.updates, now.clip, now.skipped, now.lr, adam.betas, adam.eps, decay, self._keys, self._first),
            )
            return
        wide = kept[0].to(self.master.dtype), kept[1].to(self.master.dtype)  # themselves, unless in bf16
        adamw(
            *([self.master], [self.grad], [wide[0]], [wide[1]], [], [now.updates - 1]),
            fused=True,
            grad_scale=now.clip,
            found_inf=now.skipped,
            amsgrad=False,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            lr=now.lr,
            weight_decay=decay,
            eps=adam.eps,
            maximize=False,
        )
        if wide[0] is not kept[0]:  # what was not changed comes back as it was
            store_moments(kept, wide, self._keys, now.updates, self._first)

    @property
    def by_muon(self) -> bool:
        return self.moments == 1

    @property
    def cut(self) -> bool:
        """Whether Muon moves it and shards hold parts of matrices."""
        return self.by_muon and self.parts > 1 and self.shard_rows % self.info.matrix_rows != 0

    @property
    def chunk(self) -> torch.Size:
        """Shape of every rank's shard with its pad rows."""
        return self._masters.shape

    def look_ahead(self, now: Update, rows: slice) -> Tensor:
        """One step of the momentum, for some rows of the shard; -> Nesterov's, in compute dtype: where it will be after
        the next one if the gradient stays. By the kernel 8 bytes a parameter read, 6 written."""
        kept, grad, momentum = self.exp_avg[rows], self.grad[rows], now.optimizer.momentum
        first = self._first + rows.start * math.prod(self.chunk[1:])
        if now.by_kernel:
            from pithtrain.ops import kernels

            ahead, scalars = torch.empty_like(grad, dtype=self.dtype), (now.updates, now.clip, now.skipped)
            kernels.look_ahead(kept, grad, ahead, *scalars, momentum, self._keys, first)
            return ahead
        grad = torch.where(now.skipped > 0, 0.0, grad / now.clip)  # NaN times nothing is NaN
        wide = kept.to(grad.dtype)  # itself, unless in bf16
        wide.lerp_(grad, (1 - momentum) * (1 - now.skipped.to(grad.dtype)))
        if wide is not kept:
            store_moments([kept], [wide], self._keys, now.updates, first)
        return grad.lerp_(wide, momentum).to(self.dtype)

    def turn(self, ahead: Tensor) -> Tensor:
        """Whole matrices, rows one above the other, to their directions; some at a time."""
        rows, width = self.info.matrix_rows, ahead.shape[1]
        parts = [muon.orthogonalize(part.view(-1, rows, width)).view(-1, width) for part in self._some(ahead)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(max(1, TURNED // (self.info.matrix_rows * rows.shape[1])) * self.info.matrix_rows)

    def move(self, direction: Tensor, now: Update, rows: slice) -> None:
        """Decay these rows of the master, then move them along, as far as AdamW would. By the kernel, which writes the
        weight too, 6 bytes a parameter read, 4 and the weight written."""
        master, decay = self.master[rows], now.optimizer.weight_decay
        length = muon.SCALE * max(self.info.matrix_rows, self.chunk[1]) ** 0.5
        if now.by_kernel:
            from pithtrain.ops import kernels

            kernels.move(master, direction, self._own(self._data)[rows], now.skipped, now.lr, length, decay)
            return
        lr = now.lr * (1 - now.skipped.to(master.dtype))
        master *= 1 - decay * lr
        master.addcmul_(direction.to(master.dtype), lr, value=-length)

    def turn_own(self, now: Update) -> None:
        """The update where this rank has whole matrices, some at a time."""
        first = 0
        for rows in self._some(self.master):
            part = slice(first, first + len(rows))
            self.move(self.turn(self.look_ahead(now, part)), now, part)
            first += len(rows)

    def rows_of(self, part: int) -> tuple[int, int]:
        """First row and end, in this group's whole, of the shard of a rank of the group."""
        return min(part * self.shard_rows, self.rows), min((part + 1) * self.shard_rows, self.rows)

    def reduce(self) -> dist.Work | None:
        """Start the sum over the group, in place: this rank's chunk of the main gradient receives it."""
        return reduce_scatter(self._grad, self._own(self._grad), self.group)

    def publish(self, written: bool) -> dist.Work | None:
        """Start writing masters, rounded to compute dtype, into the whole weight of every rank of the group. `written`:
        this rank's own rows hold them already."""
        if not written:
            self._own(self._data).copy_(self._masters)
        self.weight.version += 1
        return all_gather(self._own(self._data), self._data, self.group)


class Bucket:
    """Parameters whose reductions start together, when the step's last contribution to any of them is in."""

    def __init__(self, members: Sequence[Sharded], contributions: int):
        """`contributions`: how many weight gradients one micro-batch adds to the members."""
        self._members = members
        self._contributions = contributions
        self._left = 0
        self._works: list[dist.Work | None] = []
        for member in members:
            member.weight.contributed = self._count

    def begin(self, micro_batches: int) -> None:
        """Let the first contribution overwrite the last step's, and count down from a step's contributions."""
        for member in self._members:
            member.weight.beta = 0
        self._left = micro_batches * self._contributions

    def _count(self) -> None:
        self._left -= 1
        assert self._left >= 0, "a weight gradient arrived after its bucket was reduced"
        if self._left == 0:
            self._works = [member.reduce() for member in self._members]

    def wait(self) -> None:
        names = ", ".join(member.info.name for member in self._members[:3])
        assert self._left == 0, f"{self._left} weight gradients of the bucket of {names} ... are missing"
        works, self._works = self._works, []  # gloo would deliver the sum once more at a second wait
        _wait(works)


class Segment(NamedTuple):
    """Matrices of a parameter that one rank of its group turns: rows `first` up to `end` of the group's whole."""

    of: Sharded
    first: int
    end: int
    owner: int

    def held(self, part: int) -> tuple[int, int]:
        """First row and end of what a rank of the group holds of it."""
        first, end = self.of.rows_of(part)
        first = max(first, self.first)
        return first, max(first, min(end, self.end))

    def size(self, part: int) -> int:
        """Numbers that a rank holds of it."""
        first, end = self.held(part)
        return (end - first) * self.of.chunk[1]


class Gathering:
    """Brings the momenta of matrices that a group's shards cut to their owners, and the directions back."""

    def __init__(self, segments: Sequence[Segment]):
        one = segments[0].of
        self._group, self._part, parts = one.group, one.part, range(one.parts)
        self._segments = sorted(segments, key=lambda each: each.owner)
        self._own = [(each.of, [each.size(part) for part in parts]) for each in segments if each.owner == one.part]
        self._sizes = [each.size(one.part) for each in self._segments]
        self.members = list({id(each.of): each.of for each in segments}.values())
        self._to = [sum(each.size(one.part) for each in segments if each.owner == part) for part in parts]
        self._from = [sum(sizes[part] for _, sizes in self._own) for part in parts]

    def start(self, now: Update) -> None:
        """Take a step of the momentum, and send it to the owners."""
        ahead = {id(one): one.look_ahead(now, slice(0, len(one.master))) for one in self.members}
        pieces: list[Tensor] = []
        for each in self._segments:
            (begin, _), (first, end) = each.of.rows_of(self._part), each.held(self._part)
            pieces.append(ahead[id(each.of)][first - begin : end - begin].flatten())
        self._home = torch.cat(pieces)
        self._away = self._home.new_empty(sum(self._from))
        self._work = all_to_all(self._home, self._to, self._away, self._from, self._group)

    def turn(self) -> None:
        """Turn what this rank owns, and send it back."""
        _wait([self._work])
        sections, every = self._away.split(self._from), zip(*(sizes for _, sizes in self._own), strict=True)
        by_rank = [
            section.split(sizes) for section, sizes in zip(sections, every, strict=False)
        ]  # none where none is own
        for (one, sizes), pieces in zip(self._own, zip(*by_rank, strict=True), strict=True):
            turned = one.turn(torch.cat(pieces).view(-1, one.chunk[1]))
            for piece, direction in zip(pieces, turned.flatten().split(sizes), strict=True):
                piece.copy_(direction)
        self._work = all_to_all(self._away, self._from, self._home, self._to, self._group)

    def arrived(self) -> Iterator[tuple[Sharded, Tensor]]:
        """Every member, and the direction of this rank's rows of it."""
        _wait([self._work])
        pieces = self._home.split(self._sizes)
        del self._work, self._home, self._away  # the pieces alone keep what arrived
        placed = sorted(zip(self._segments, pieces, strict=True), key=lambda pair: pair[0].first)
        for one in self.members:
            rows = torch.cat([piece for each, piece in placed if each.of is one])
            yield one, rows.view(-1, one.chunk[1])


def share_out(cut: Sequence[Sharded]) -> list[Segment]:
    """Who turns what of these parameters, so that over all of them the ranks of a group have as much to do; alike on
    all ranks. Neighbouring matrices of a parameter stay together where there are more of them than ranks."""
    work: dict[str, list[int]] = {}
    found: list[Segment] = []
    for one in sorted(cut, key=_cost, reverse=True):
        done = work.setdefault(one.info.kind, [0] * one.parts)
        count = one.rows // one.info.matrix_rows
        bounds = [count * n // min(count, one.parts) for n in range(min(count, one.parts) + 1)]
        for first, end in sorted(itertools.pairwise(bounds), key=lambda pair: pair[0] - pair[1]):  # most first
            owner = done.index(min(done))
            found.append(Segment(one, first * one.info.matrix_rows, end * one.info.matrix_rows, owner))
            done[owner] += _cost(one) * (end - first) // count
    return found


def _cost(one: Sharded) -> int:
    """FLOPs of turning a parameter."""
    return one.rows // one.info.matrix_rows * muon.flops(one.info.matrix_rows, one.chunk[1])


class Zero:
    """All parameters of this rank's two stages, their buckets, and the update."""

    def __init__(
        self,
        table: Iterable[Parameter],
        world: World,
        dtype: torch.dtype,
        tied: str | None,
        bf16_moments: bool,
        seed: int,
        muon: bool,
    ):
        """`table`: the parameters of this rank's stages. `tied`: the name of the embedding that is also the head, which
        gets two gradients per micro-batch. `seed`: of the rounding of `bf16_moments`. `muon`: of the matrices of
        layers."""
        moments = torch.bfloat16 if bf16_moments else accumulate_dtype(dtype)
        self.sharded = {info.name: Sharded(info, world, dtype, moments, seed, muon) for info in table}
        self._world = world
        groups: dict[tuple[int | None, str], list[Sharded]] = {}
        self._trained = [one for one in self.sharded.values() if one.info.trained]
        for one in self._trained:
            # a layer's dense parameters, or its experts; embedding, final norm and head each alone
            kind = one.info.name if one.info.layer is None else one.info.kind
            groups.setdefault((one.info.layer, kind), []).append(one)
        self._buckets = [
            Bucket(members, sum(2 if one.info.name == tied else 1 for one in members)) for members in groups.values()
        ]
        self._units: dict[int | str, list[Sharded]] = {}  # what `arrived` is asked for, in the order of first use
        for one in self.sharded.values():
            self._units.setdefault(one.info.name if one.info.layer is None else one.info.layer, []).append(one)
        self._coming: dict[int | str, Sequence[dist.Work | None]] = {}
        segments = share_out([one for one in self._trained if one.cut])
        self._gatherings: dict[int | str, list[Gathering]] = {}
        for unit, members in self._units.items():
            kinds = ([each for each in segments if each.of in members and each.of.info.kind == k] for k in KINDS)
            self._gatherings[unit] = [Gathering(cut) for cut in kinds if cut]
        self._updates = torch.zeros((), dtype=torch.float32, device=world.device)
        self._kernels = world.device.type == "cuda" and dtype == torch.bfloat16

    @property
    def weights(self) -> dict[str, Weight]:
        return {name: one.weight for name, one in self.sharded.items()}

    def begin_step(self, micro_batches: int) -> None:
        """Main gradients begin anew; say how many contributions will come."""
        for bucket in self._buckets:
            bucket.begin(micro_batches)

    def arrived(self, unit: int | str) -> None:
        """Wait for the weights of a layer, or of the parameter of this name outside the layers: before their first use
        in a step."""
        _wait(self._coming.pop(unit, ()))

    def wait_for_weights(self) -> None:
        """All weights of this rank."""
        for unit in [*self._coming]:
            self.arrived(unit)

    def grad_norm(self, flaw: Tensor | float = 0.0) -> Tensor:
        """Global 2-norm of the gradient over all parameters of all ranks, a device scalar; waits for the reductions.
        `flaw`: 0, or NaN where this rank has seen what must not be trained on: then the norm is NaN on every rank."""
        for bucket in self._buckets:
            bucket.wait()
        shards = [one.grad for one in self._trained]
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if total.is_cuda and shards:
            total += get_total_norm(shards).to(torch.float64).square()
        else:  # torch's sum of squares on a CPU runs in fp32 from end to end: 8e-5 off at 4 M elements
            total += sum(torch.linalg.vector_norm(shard, dtype=torch.float64).square() for shard in shards)
        return self._world.sum(total + flaw).sqrt()

    def update(
        self,
        optimizer: Optimizer,
        lr: float,
        norm: Tensor,
        max_norm: float | None,
        counts_LE: Tensor,
        bias_rate: float,
        leave_out: Tensor | bool = False,
    ) -> Tensor:
        """One step of the optimizer with clip by the global norm, and one of the selection biases by `bias_rate`
        against `counts_LE`, slots per expert in the whole global batch by global layer index; both skipped on every
        rank if the norm is not finite, or to `leave_out`. Starts the all-gather of the new weights. -> 1.0 where
        skipped, a device scalar."""
        skipped = (norm.isfinite().logical_not() | leave_out).to(torch.float32)
        clip = (norm / max_norm).clamp(min=1.0) if max_norm is not None else torch.ones_like(norm)
        clip = clip.to(torch.float32)
        self._updates += 1 - skipped
        now = Update(optimizer, lr, self._updates, clip, skipped, self._kernels)
        self.wait_for_weights()
        gatherings = [*itertools.chain.from_iterable(self._gatherings.values())]
        for gathering in gatherings:
            gathering.start(now)
        for gathering in gatherings:
            gathering.turn()
        for unit, members in self._units.items():
            for one in members:
                if not one.info.trained:
                    assert one.info.layer is not None, one.info.name
                    step_E = bias_step(counts_LE[one.info.layer], bias_rate) * (1 - skipped)
                    one.master += step_E[one.first_row :][: len(one.master)]
                elif not one.by_muon:
                    one.adamw(now)
                elif not one.cut:
                    one.turn_own(now)
            for one, direction in (pair for each in self._gatherings[unit] for pair in each.arrived()):
                one.move(direction, now, slice(0, len(one.master)))
            self._publish(unit, written=self._kernels)
        return skipped

    @property
    def updates(self) -> int:
        """Updates made: steps less the skipped ones. Reads the device."""
        return int(self._updates.item())

    def loaded(self, updates: int) -> None:
        """Masters and moments have been written: set the counters and make the weights follow, before anything else."""
        self._updates.fill_(updates)
        self.publish()
        self.wait_for_weights()

    def publish(self) -> None:
        """Start making every rank's weights follow the masters; `wait_for_weights` ends it."""
        self.wait_for_weights()  # an earlier all-gather that lands later would bring the old weights back
        for unit in self._units:
            self._publish(unit, written=False)

    def _publish(self, unit: int | str, written: bool) -> None:
        """`written`: kernels have written the weights of this rank that it trains."""
        self._coming[unit] = [one.publish(written and one.info.trained) for one in self._units[unit]]


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
