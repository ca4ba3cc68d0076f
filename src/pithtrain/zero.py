"""ZeRO-1: parameters and fp32 main gradients whole on each rank, masters and optimizer state sharded.

Per parameter of P elements shared by n ranks: weight in compute dtype (2P bytes in bf16), main gradient (4P), and a
shard of master, first and second moment (12P / n; 8P / n with moments in bf16, `ops/rounding`). One step:

    last W of a bucket  -> reduce-scatter of its main gradients, while other chunks still compute
    all buckets         -> norm: one all-reduce of one scalar; shards are disjoint, so each parameter counts once
    update              -> fused AdamW on the shards; clip and skip are device tensors, no host synchronisation
    all-gather          -> new weights, layer by layer in forward order; a layer waits for its own (`Zero.arrived`)

Layout: a parameter of `rows` (experts: [E * out, in]) is cut along dim 0 into chunks of ceil(rows / n), which is
DTensor's Shard(0). Buffers have n * chunk rows and are used through a view of the real ones; pad rows stay zero. So
collectives need no packing. Worked example, 10 rows on n = 4: chunks of 3, shards of 3, 3, 3, 1 rows, buffers of 12.

Gradients are *summed*; the loss carried 1 / (valid tokens of the global batch), and nothing else scales them.

A parameter of update "load" (a router's selection bias) has a master and a weight alone; `update` moves it by the
expert load of the whole global batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from pithtrain.models.contract import Parameter
from pithtrain.ops.linear import Weight, accumulate_dtype
from pithtrain.ops.rounding import rounding_keys, store_moments
from pithtrain.ops.router import bias_step
from pithtrain.world import World, all_gather, reduce_scatter


class Sharded:
    """One parameter on this rank: whole weight and main gradient, and this rank's shard of everything else. Without
    gradient (update "load") main gradient and moments have no rows."""

    def __init__(self, info: Parameter, world: World, dtype: torch.dtype, moments: torch.dtype, seed: int):
        """Allocates; every value is zero until `build` initialises the master or a checkpoint is loaded."""
        self.info = info
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
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self._keys = rounding_keys(seed, info.name)
        self._first = self.first_row * (self._data.numel() // len(self._data))  # index of this shard's first element

    def _own(self, whole: Tensor) -> Tensor:
        return whole[self.part * self.shard_rows : (self.part + 1) * self.shard_rows]

    @property
    def grad(self) -> Tensor:
        """This rank's shard of the main gradient, summed over the group once `reduce` has been waited for."""
        return self._own(self._grad)[: self.master.shape[0]]

    def adamw(self, adam: "AdamW", lr: float, updates: Tensor, clip: Tensor, skipped: Tensor, by_kernel: bool) -> None:
        """The update of the shard; `updates` counts this one, `clip` divides the gradient. By the kernel, which writes
        this rank's rows of the weight too, one pass: 16 bytes a parameter read, 12 and the weight written; 4 less each
        way with moments in bf16."""
        decay = adam.weight_decay if self.info.decay else 0.0
        kept = self.exp_avg, self.exp_avg_sq
        if by_kernel:
            from pithtrain.ops import kernels

            kernels.adamw(
                *(self.master, *kept, self.grad, self._own(self._data)),
                *(updates, clip, skipped, lr, adam.betas, adam.eps, decay, self._keys, self._first),
            )
            return
        wide = kept[0].to(self.master.dtype), kept[1].to(self.master.dtype)  # themselves, unless in bf16
        adamw(
            *([self.master], [self.grad], [wide[0]], [wide[1]], [], [updates - 1]),
            fused=True,
            grad_scale=clip,
            found_inf=skipped,
            amsgrad=False,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=adam.eps,
            maximize=False,
        )
        if wide[0] is not kept[0]:  # what was not changed comes back as it was
            store_moments(kept, wide, self._keys, updates, self._first)

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


@dataclass(frozen=True)
class AdamW:
    """Loshchilov & Hutter, Decoupled Weight Decay Regularization; decay on matrices only."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float


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
    ):
        """`table`: the parameters of this rank's stages. `tied`: the name of the embedding that is also the head, which
        gets two gradients per micro-batch. `seed`: of the rounding of `bf16_moments`."""
        moments = torch.bfloat16 if bf16_moments else accumulate_dtype(dtype)
        self.sharded = {info.name: Sharded(info, world, dtype, moments, seed) for info in table}
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
        self, adam: AdamW, lr: float, norm: Tensor, max_norm: float | None, counts_LE: Tensor, bias_rate: float
    ) -> Tensor:
        """One AdamW step with clip by the global norm, and one of the selection biases by `bias_rate` against
        `counts_LE`, slots per expert in the whole global batch by global layer index; both skipped on every rank if the
        norm is not finite. Starts the all-gather of the new weights. -> 1.0 where skipped, a device scalar."""
        skipped = norm.isfinite().logical_not().to(torch.float32)
        clip = (norm / max_norm).clamp(min=1.0) if max_norm is not None else torch.ones_like(norm)
        clip = clip.to(torch.float32)
        self._updates += 1 - skipped
        self.wait_for_weights()
        for unit, members in self._units.items():
            for one in members:
                if one.info.trained:
                    one.adamw(adam, lr, self._updates, clip, skipped, self._kernels)
                else:
                    assert one.info.layer is not None, one.info.name
                    step_E = bias_step(counts_LE[one.info.layer], bias_rate) * (1 - skipped)
                    one.master += step_E[one.first_row :][: len(one.master)]
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
        """`written`: AdamW's kernel has written the weights of this rank that it trains."""
        self._coming[unit] = [one.publish(written and one.info.trained) for one in self._units[unit]]


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
