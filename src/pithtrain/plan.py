"""The numbers of a run before a GPU is asked for: how it is cut, what it computes, what it keeps. No torch.

**Partition.** Rank r of P owns stage r and stage 2P-1-r of the V, and its time is the sum of the two. So layers are cut
into 2P contiguous blocks such that the slowest rank (the head counts on rank 0) is as fast as can be; among the cuts
within 2 % of that, the one with the least sum over ranks of (a - b)^2 + (a + b)^2 / 4, a and b the times of a rank's
stages: equal pairs, since a pair overlaps as far as the shorter one goes, and work for every rank even where the head
alone sets the pace. Costs are FLOPs. Empty stages are legal: a model may have fewer layers than stages. With one rank
no cut is faster and no neighbour waits, so the head, which has nothing to hide, does not count: two equal halves.

    partition(Qwen3-30B-A3B, pp=4, sequence_length=4096): rank 0 takes 7 layers and, beside the head, 2; the others 6
    and 7. Slowest over mean 1.01; an even cut has 1.24.

**Search.** From the outside in, (rank, layers taken in front, layers taken behind) is all that matters. A cap on a
rank's time leaves few of these states, so it starts at a lower bound and grows until a cut exists: some 20 ms for 48
layers on 8 ranks.

**Bytes.** What is held from the first step to the last, exactly as `zero` allocates it: whole weights in the compute
type, with `fp8.enabled` 2 bytes a parameter more for a weight's 8-bit forms, whole main gradients, a shard of masters
and two moments, one where Muon moves (these in `optimizer.moments_dtype`). Where experts may be reached by copy
engines, the buffers of that for the worst case beside it (`exchange_rows`, `ops/symmetric`). And, about, what forwards
keep for their backwards, at the step's fullest moment, when rank r holds 2P - r micro-batches of its first stage and
r + 1 of its second. A layer
keeps of each token of the rank (its chunks alone, with cp)

    none        four times H; what each linear gives, or takes where it gives H; k slots of H and of gate and up
    selective   the same with the D rows that came in its place of the k slots of H
    full        H, and D rows of H

and but for `full`, where keys and values are made on arrival (MLA), whole keys too, or with cp nothing of either. All
with even routing; D is the mean number of ranks that a token visits (ENGINE.md section 5). Transient buffers, the
logits of the loss and what the allocator loses come on top.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pithtrain.models.contract import ModelConfig, active_parameters, flops_per_token, head_flops, layer_flops
from pithtrain.spec import Mesh, RunSpec

SLACK = 1.02  # of the slowest rank's time, given away for pairs of equal stages
GROWTH = 1.02  # of the cap, from one attempt to the next

Cut = tuple[float, tuple[tuple[int, int], ...]]
"""A score to be minimal, and (layers in front, layers behind) of each rank from some rank on."""


def _search(layers: Sequence[float], head: float, pp: int, cap: float, pairs: bool) -> Cut | None:
    """The best cut with no rank above `cap`, in FLOPs: by the slowest rank, or (`pairs`) by the sum of squares above.
    None when there is no cut under this cap."""
    before = [0.0, *itertools.accumulate(layers)]

    @functools.cache
    def best(rank: int, front: int, back: int) -> Cut | None:
        """Ranks `rank`..pp-1 share the layers `front`..`back`-1."""
        if rank == pp:
            return (0.0, ()) if front == back else None
        found: Cut | None = None
        extra = head if rank == 0 else 0.0
        for i in range(front, back + 1):
            first = before[i] - before[front]
            if first + extra > cap:
                break
            for j in range(back, i - 1, -1):
                second = before[back] - before[j] + extra
                if first + second > cap:
                    break
                if before[j] - before[i] > cap * (pp - rank - 1):
                    continue  # more is left than the other ranks can take
                if rest := best(rank + 1, i, j):
                    squares = rest[0] + (first - second) ** 2 + (first + second) ** 2 / 4
                    score = squares if pairs else max(rest[0], first + second)
                    if found is None or score < found[0] * (1 - 1e-12):
                        found = (score, ((i - front, back - j), *rest[1]))
        return found

    return best(0, 0, len(layers))


def partition(config: ModelConfig, pp: int, sequence_length: int) -> tuple[tuple[int, ...], ...]:
    """The layers of each of the 2 pp stages, in order; a stage may be empty. `sequence_length` in tokens weighs
    attention against the rest."""
    layers = [layer_flops(config, layer, sequence_length) for layer in range(config.num_hidden_layers)]
    head = head_flops(config)
    cap = max((sum(layers) + head) / pp, head, *layers) * (1 + 1e-9)  # no cut has a faster slowest rank
    while (fastest := _search(layers, head, pp, cap, pairs=False)) is None:
        cap *= GROWTH
    cut = _search(layers, head if pp > 1 else 0.0, pp, fastest[0] * SLACK, pairs=True)
    assert cut is not None, "the cut found under this cap is gone"
    numbers = iter(range(len(layers)))
    sizes = [a for a, _ in cut[1]] + [b for _, b in reversed(cut[1])]
    return tuple(tuple(itertools.islice(numbers, size)) for size in sizes)


@dataclass(frozen=True)
class Plan:
    """What `pithtrain plan` tells. Lists over ranks are over pipeline ranks: dp, cp and ep ranks hold alike sizes."""

    name: str
    ranks: int
    mesh: Mesh
    micro_batches: int  # N, per step and data rank
    tokens_per_step: int
    stage_layers: tuple[tuple[int, ...], ...]  # 2 pp stages in layer order
    rank_time_over_mean: tuple[float, ...]  # FLOPs of a pipeline rank over their mean; the largest sets the pace
    idle_units: int  # longest idle time of a rank in a step, in forwards of one stage
    busy_units: int  # its work in the same unit: 2 N forwards, as many backwards of two
    experts_per_rank: int
    parameters: int
    active_parameters: int  # that one token meets in matrix products
    rank_parameters: tuple[int, ...]  # held whole by a pipeline rank, experts cut over ep
    flops_per_token: float  # forward and backward, recomputation not counted; with documents, as many as can be
    document_flops_per_token: float | None  # of as many equal pieces as windows can cut documents into: no fewer
    tokens_per_rank: int  # of a micro-batch: with cp, this rank's chunks of its sequences
    rank_weight_bytes: tuple[int, ...]
    rank_gradient_bytes: tuple[int, ...]
    rank_optimizer_bytes: tuple[int, ...]  # masters and moments, sharded
    communication_ms: dict[str, float]  # of a rank's step before overlap, uniform routing; empty without slurm.links
    exchange_bytes: int  # of buffers that peers write into, on each rank, if moe.transport is symmetric in the end
    rank_activation_bytes: tuple[int, ...]  # about, and not in rank_bytes

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes held all the time by a pipeline rank; `rank_activation_bytes` come on top."""
        parts = (self.rank_weight_bytes, self.rank_gradient_bytes, self.rank_optimizer_bytes)
        return tuple(sum(each) for each in zip(*parts, strict=True))

    @property
    def checkpoint_bytes(self) -> int:
        """On the disk: masters and moments of all ranks, each once."""
        return sum(self.rank_optimizer_bytes) * self.ranks // self.mesh.pp

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {**asdict(self), "rank_bytes": self.rank_bytes, "checkpoint_bytes": self.checkpoint_bytes}

    def text(self) -> str:
        """The same for people, a line per idea."""
        mesh, worst = self.mesh, max(range(self.mesh.pp), key=lambda rank: self.rank_bytes[rank])

        def gib(num_bytes: float, digits: int = 2) -> str:
            return f"{num_bytes / 2**30:.{digits}f} GiB"

        held = f"weights {gib(self.rank_weight_bytes[worst])}, main gradients {gib(self.rank_gradient_bytes[worst])}"
        held += f", masters and moments {gib(self.rank_optimizer_bytes[worst])}"
        lines = {
            "run": self.name,
            "ranks": f"{self.ranks} = pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} x ep {mesh.ep}",
            "step": f"{self.micro_batches} micro-batches per data rank, each of {self.tokens_per_rank:,} tokens on a "
            f"rank, {self.tokens_per_step:,} tokens in all",
            **{f"pipeline rank {rank}": self._rank_text(rank) for rank in range(mesh.pp)},
            "balance": f"slowest pipeline rank over mean {max(self.rank_time_over_mean):.2f}",
            "idle": f"{self.idle_units} of {self.idle_units + self.busy_units} units of one stage's forward",
            "experts per rank": f"{self.experts_per_rank}",
            "parameters": f"{_short(self.parameters)}, {_short(self.active_parameters)} active in matrix products",
            "per token": self._flops_text(),
            "bytes per rank": f"{gib(self.rank_bytes[worst])} at most ({held})",
            "activations": f"about {gib(max(self.rank_activation_bytes), 1)} a rank at most; buffers come on top",
        }
        if self.communication_ms:
            parts = ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.communication_ms.items())
            lines["communication"] = f"{parts} per step, before overlap, with uniform routing"
        if self.exchange_bytes:
            lines["exchange"] = f"{gib(self.exchange_bytes)} more per rank where tokens travel by copy engines"
        lines["checkpoint"] = (
            f"{gib(self.checkpoint_bytes)} each, and as much host memory over all nodes (but for synchronous saves on "
            "CPUs)"
        )
        return "\n".join(f"{key:<17} {value}" for key, value in lines.items())

    def _flops_text(self) -> str:
        most, least = self.flops_per_token, self.document_flops_per_token
        if least is None:
            return f"{_short(most)}FLOP, forward and backward"
        told = "forward and backward: in documents as even as can be, or in one a sequence"
        return f"{_short(least)} to {_short(most)}FLOP, {told}"

    def _rank_text(self, rank: int) -> str:
        first, second = self.stage_layers[rank], self.stage_layers[-1 - rank]
        return f"layers {_span(first)} and {_span(second)}, {_short(self.rank_parameters[rank])} parameters"


def _kept(config: ModelConfig, mode: str, ep: int, cp: int, narrow: int) -> list[float]:
    """About so many bytes of a token each layer keeps until its backward."""
    hidden, k, experts = config.hidden_size, config.num_experts_per_tok, config.num_experts
    visited = ep * (1 - math.comb(experts - experts // ep, k) / math.comb(experts, k))
    kept = [0.0] * config.num_hidden_layers
    for layer in range(len(kept)):
        kept[layer] += hidden * (1 if mode == "full" else 4)
        if config.is_moe(layer):  # with ep = 1 the rows are an input that is kept anyway
            rows = visited if ep > 1 or mode == "full" else 0
            kept[layer] += hidden * (k if mode == "none" else rows)
        if mode != "full":
            kept[layer] += config.carried(layer).keys if cp == 1 else -config.carried(layer).product
    for p in config.parameters() if mode != "full" else ():
        if p.layer is not None and p.decay:
            out, into = p.shape[-2:]
            if p.kind == "dense":
                kept[p.layer] += into if out == hidden else out
            elif p.name.endswith("gate_up_proj"):
                kept[p.layer] += k * out
    return [narrow * each for each in kept]


def _span(layers: tuple[int, ...]) -> str:
    if len(layers) < 2:
        return "".join(map(str, layers)) or "none"
    return f"{layers[0]}-{layers[-1]}"


def _short(count: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.5g} {name}"
    return f"{count:g} "


def exchange_rows(spec: RunSpec) -> tuple[int, tuple[int, int]]:
    """The most rows that a rank can receive in one expert exchange, and the bytes of a row and of its routing record:
    every token of every expert-parallel rank, once, or with plain dispatch for each of its experts here."""
    config, training, ep = spec.model.config, spec.training, spec.mesh.ep
    slots = min(config.num_experts_per_tok, config.num_experts // ep)
    copies, carried = (1, slots) if spec.moe.dispatch == "dedup" else (slots, 1)
    narrow = 4 if training.compute_dtype == "float32" else 2
    rows = ep * training.micro_batch_size * training.sequence_length // spec.mesh.cp * copies
    return rows, (config.hidden_size * narrow, 8 * carried)  # an id and a weight of 4 bytes per slot


def _may_copy(spec: RunSpec) -> bool:
    """Whether expert traffic can go by copy engines; NVLink is found where the run starts."""
    on_one_host = spec.slurm.nodes == 1 or spec.slurm.gpus_per_node % spec.mesh.ep == 0
    return spec.mesh.ep > 1 and on_one_host and spec.moe.transport != "nccl" and spec.training.device != "cpu"


def communication(spec: RunSpec, cut: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Milliseconds of one rank's step by `slurm.links`, one message after the other, for what is measured there; of the
    rank that has most, each. `cut`: the layers of each pipeline rank.

    expert traffic   per layer and micro-batch counts, four transfers of the rows for other ranks, and their records
                     twice; with uniform routing a token goes to D = G (1 - C(E-e, k) / C(E, k)) of G ranks
    pipeline         per micro-batch two activations and two gradients [mbs, S, H]
    ring             per layer and micro-batch the exchanges of `ops/ring`: keys and values of C - 1 blocks forward,
                     as many backward, once more where all is recomputed, and the gradients of C blocks, in fp32 but
                     for two ranks of streams; or edges of window - 1 keys of either chunk, as often and once back
    """
    config, training, mesh, links = spec.model.config, spec.training, spec.mesh, spec.slurm.links
    experts, k, tokens = config.num_experts, config.num_experts_per_tok, training.micro_batch_size
    tokens *= training.sequence_length // mesh.cp
    _, (row, record) = exchange_rows(spec)
    found: dict[str, float] = {}
    link = links.copy_engine if _may_copy(spec) and links.copy_engine else links.all_to_all
    if mesh.ep > 1 and link is not None:
        missed = math.comb(experts - experts // mesh.ep, k) / math.comb(experts, k)
        sent = (mesh.ep * (1 - missed) if spec.moe.dispatch == "dedup" else k) * (mesh.ep - 1) / mesh.ep * tokens
        name = f"expert traffic by {'copy engines' if link is links.copy_engine else 'all-to-all'}"
        each = 5 * link.latency_us / 1e3 + sent * (4 * row + 2 * record) / link.gb_s / 1e6
        found[name] = spec.num_micro_batches * max(sum(map(config.is_moe, held)) for held in cut) * each
    if mesh.pp > 1 and links.p2p is not None:
        each = links.p2p.latency_us / 1e3 + tokens * row / links.p2p.gb_s / 1e6
        found["pipeline"] = 4 * spec.num_micro_batches * each
    if mesh.cp > 1 and links.p2p is not None:
        sent = [_ring(spec, layer, row // config.hidden_size) for layer in range(config.num_hidden_layers)]
        each = [n * links.p2p.latency_us / 1e3 + num_bytes / links.p2p.gb_s / 1e6 for n, num_bytes in sent]
        found["ring"] = spec.num_micro_batches * max(sum(each[layer] for layer in held) for held in cut)
    return found


def _ring(spec: RunSpec, layer: int, narrow: int) -> tuple[int, int]:
    """Messages of a layer and micro-batch, and their bytes."""
    training, cp = spec.training, spec.mesh.cp
    carried = spec.model.config.carried(layer)
    numbers, window = carried.numbers, carried.window
    passes = 3 if spec.activation_checkpoint.mode == "full" else 2
    chunk = training.sequence_length // (2 * cp)
    if window is not None and window - 1 <= chunk:
        return passes + 1, 2 * training.micro_batch_size * (window - 1) * numbers * narrow * (passes + 1)
    hops, wide = passes * (cp - 1), narrow if cp == 2 and window is None and not spec.data.document_mask else 4
    return hops + cp, 2 * training.micro_batch_size * chunk * numbers * (hops * narrow + wide * cp)


def plan(spec: RunSpec, document_length: float | None = None) -> Plan:
    """The numbers of a validated spec. `document_length`: mean tokens of the corpus's documents, where they are known
    and kept apart. Work grows with the squares of the pieces that windows cut them into: at most as many as there are
    documents and windows, and least where all are as long, 1 / (1 / document_length + 1 / sequence_length).
    """
    config, mesh, training = spec.model.config, spec.mesh, spec.training
    stages = partition(config, mesh.pp, training.sequence_length)
    owner = {layer: min(s, 2 * mesh.pp - 1 - s) for s, layers in enumerate(stages) for layer in layers}
    times = [head_flops(config)] + [0.0] * (mesh.pp - 1)
    for layer, rank in owner.items():
        times[rank] += layer_flops(config, layer, training.sequence_length)

    dtype = training.compute_dtype
    if dtype == "auto":
        dtype = "float32" if training.device == "cpu" else "bfloat16"  # a login node cannot ask: cuda is assumed
    wide = 8 if dtype == "float64" else 4  # main gradients, masters, moments, 1-D weights and the router
    moment = 2 if spec.optimizer.moments_dtype == "bfloat16" else wide
    narrow = 2 if dtype == "bfloat16" else wide
    held, weights, gradients, optimizer = ([0] * mesh.pp for _ in range(4))
    for parameter in config.parameters():
        rank = 0 if parameter.layer is None else owner[parameter.layer]  # embedding, last norm and head are on rank 0
        expert = parameter.kind == "expert"
        size = parameter.size // mesh.ep if expert else parameter.size
        rows = parameter.shape[0] // mesh.ep * parameter.shape[1] if expert else parameter.shape[0]
        shards = mesh.dp * mesh.cp * (1 if expert else mesh.ep)
        padded = size // rows * math.ceil(rows / shards) * shards  # buffers hold whole shards
        held[rank] += size
        weights[rank] += padded * (wide if parameter.fp32 else narrow)
        weights[rank] += 2 * size * (spec.fp8.enabled and parameter.fp8)
        gradients[rank] += padded * wide * parameter.trained
        optimizer[rank] += padded // shards * (wide + moment * parameter.moments(spec.optimizer.type == "muon"))
    cut = [stages[rank] + stages[-1 - rank] for rank in range(mesh.pp)]
    rows, row_bytes = exchange_rows(spec)
    mode = spec.activation_checkpoint.mode
    mode = "selective" if mode == "none" and spec.fp8.enabled else mode  # `ops/experts`: in 8 bits they are the same
    kept = _kept(config, mode, mesh.ep, mesh.cp, narrow)
    tokens = training.micro_batch_size * training.sequence_length // mesh.cp
    live = [(2 * mesh.pp - rank, rank + 1) for rank in range(mesh.pp)]  # micro-batches of either stage
    activations = [
        tokens * sum(n * sum(kept[i] for i in stages[s]) for n, s in zip(live[rank], (rank, -1 - rank), strict=True))
        for rank in range(mesh.pp)
    ]
    return Plan(
        name=spec.name,
        ranks=spec.world_size,
        mesh=mesh,
        micro_batches=spec.num_micro_batches,
        tokens_per_step=training.global_batch_size * training.sequence_length,
        stage_layers=stages,
        rank_time_over_mean=tuple(time * mesh.pp / sum(times) for time in times),
        idle_units=2 * (mesh.pp - 1),  # (P-1)(FB + B - 3W) with F = W = 1, B = 2, FB = 3
        busy_units=6 * spec.num_micro_batches,
        experts_per_rank=config.num_experts // mesh.ep,
        parameters=sum(parameter.size for parameter in config.parameters()),
        active_parameters=active_parameters(config),
        rank_parameters=tuple(held),
        flops_per_token=flops_per_token(config, training.sequence_length),
        document_flops_per_token=None
        if document_length is None
        else flops_per_token(config, max(1, int(1 / (1 / document_length + 1 / training.sequence_length)))),
        tokens_per_rank=tokens,
        rank_weight_bytes=tuple(weights),
        rank_gradient_bytes=tuple(gradients),
        rank_optimizer_bytes=tuple(optimizer),
        communication_ms=communication(spec, cut),
        exchange_bytes=4 * rows * sum(row_bytes) if _may_copy(spec) else 0,  # two sets for either direction
        rank_activation_bytes=tuple(map(int, activations)),
    )
