"""Spec -> this rank's engine: which layers its two stages hold, their weights, their initial values.

The model folder says what a layer is, `plan.partition` which stage holds it, `zero` where its numbers live. What is
put together here is passed on as values; nothing keeps a reference to the spec.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pithtrain.errors import CapacityError, RunFailed
from pithtrain.models.contract import Layer, ModelConfig, load_model
from pithtrain.ops.attention import require_cudnn
from pithtrain.ops.dispatch import Lane
from pithtrain.ops.fp8 import require_device
from pithtrain.ops.init import normal_
from pithtrain.ops.linear import Linears, Region, Weight, accumulate_dtype, call, compiled
from pithtrain.ops.norm import rms_norm
from pithtrain.ops.parts import Part, chunks
from pithtrain.ops.ring import Ring
from pithtrain.ops.router import Balance, forced_order, with_sums
from pithtrain.ops.symmetric import Seat, open_peers, seat, why_not
from pithtrain.pipeline import Pipeline
from pithtrain.plan import exchange_rows, partition
from pithtrain.spec import RunSpec
from pithtrain.tape import Head, Stage, Traffic
from pithtrain.world import World
from pithtrain.zero import Optimizer, Zero

# the names that every model gives to the three parameters outside its layers
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
RECENT = 128  # steps whose losses say what a spike is
COMPILED_GRAPHS = 64  # of all regions of a run: kinds of layers, times two with and without gradients


class Transport(NamedTuple):
    """How tokens reach experts on other ranks, and why so."""

    name: Literal["symmetric", "nccl", "gloo", "none"]
    why: str


@dataclass(frozen=True)
class Engine:
    """One rank's part of the run. `dtype` is the compute dtype, `layers` are those of its two stages. counts_LE int64:
    slots per expert in the global batch of the last step that was not skipped, zeros for layers of other ranks.
    losses fp64 [RECENT]: of the last steps that were not skipped, newest last, NaN where there was none; kept with
    `guards.loss_spike_sigma`."""

    world: World
    zero: Zero
    pipeline: Pipeline
    optimizer: Optimizer
    dtype: torch.dtype
    layers: tuple[int, ...]
    counts_LE: Tensor
    losses: Tensor
    transport: Transport


def device_type(spec: RunSpec) -> str:
    """`auto` means CUDA where there is a device."""
    wanted = spec.training.device
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def compute_dtype(spec: RunSpec, device: torch.device) -> torch.dtype:
    """`auto` means bf16 on CUDA, fp32 on CPU."""
    wanted = spec.training.compute_dtype
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, wanted)


def build(spec: RunSpec, world: World) -> Engine:
    """Allocate, initialise from the seed, and publish the weights of this rank's stages."""
    config = spec.model.config
    dtype = compute_dtype(spec, world.device)
    if dtype == torch.bfloat16:
        require_cudnn(world.device)
    if spec.fp8.enabled:
        require_device(spec.fp8.recipe, world.device)
    last = 2 * world.mesh.pp - 1
    stages = (world.pp, last - world.pp)  # the V: phase 0 and phase 1
    layers = partition(config, world.mesh.pp, spec.training.sequence_length)
    held = tuple(layer for stage in stages for layer in layers[stage])
    table = [info for info in config.parameters() if info.layer in held or (info.layer is None and world.pp == 0)]
    tied = EMBEDDING if config.tie_word_embeddings else None
    keys = spec.optimizer
    muon = keys.type == "muon"
    zero = Zero(table, world, dtype, tied, keys.moments_dtype == "bfloat16", spec.training.seed, muon)
    initialise(zero, spec.training.seed)
    if spec.fp8.enabled:
        for one in zero.sharded.values():
            one.weight.recipe = spec.fp8.recipe if one.info.fp8 else None

    counts_LE = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64, device=world.device)
    built = tuple(_build_stage(spec, world, stage, last, layers[stage], zero, counts_LE) for stage in stages)
    transport, lanes = open_lanes(spec, world)
    ring = None if world.cp_group is None else Ring(world.cp_group)
    traffic = Traffic(config.num_experts, *lanes, dedup=spec.moe.dispatch == "dedup", ring=ring)
    training, cp = spec.training, world.mesh.cp
    part = None  # with documents, each micro-batch brings its own
    if not spec.data.document_mask:
        part = Part(training.micro_batch_size, training.sequence_length, world.device, cp, world.cp)
    pipeline = Pipeline(world, (built[0], built[1]), traffic, _hidden(spec), dtype, spec.num_micro_batches, part)
    optimizer = Optimizer(keys.betas, keys.eps, keys.weight_decay, keys.momentum)
    losses = torch.full((RECENT,), torch.nan, dtype=torch.float64, device=world.device)
    return Engine(world, zero, pipeline, optimizer, dtype, held, counts_LE, losses, transport)


def choose_transport(spec: RunSpec, world: World) -> Transport:
    """`moe.transport`, resolved alike on all ranks; a collective for auto and symmetric. Raises CapacityError where it
    cannot be."""
    wanted, mesh = spec.moe.transport, spec.mesh
    collectives = _collectives(world)
    if mesh.ep == 1:
        return Transport("none", "no expert is on another rank")
    if wanted == "nccl":
        return Transport(collectives, "moe.transport says so")
    seats: list[Seat] = world.from_rank_zero(world.to_rank_zero(seat(world.device)))
    groups = [seats[first : first + mesh.ep] for first in range(0, mesh.size, mesh.ep)]  # ep is innermost
    reason = next(filter(None, (why_not(group, nvlink=wanted == "auto") for group in groups)), "")
    if wanted == "symmetric" and reason:
        raise CapacityError(f"moe.transport = 'symmetric': {reason}; use auto or nccl")
    if reason:
        return Transport(collectives, reason)
    joined = "NVLink joins" if wanted == "auto" else "peer access between"
    return Transport("symmetric", f"{joined} all ranks of each group")


def _collectives(world: World) -> Literal["nccl", "gloo"]:
    return "nccl" if world.device.type == "cuda" else "gloo"


def open_lanes(spec: RunSpec, world: World) -> tuple[Transport, tuple[Lane, Lane]]:
    """How expert traffic goes, its forward and its backward lane. Memory that peers cannot map after all (a private
    /tmp, a container for each rank) is an error where it was asked for, and NCCL under auto, on all ranks alike."""
    transport, group, forward, backward = choose_transport(spec, world), world.ep_fwd_group, None, None
    if transport.name == "symmetric" and group is not None:
        failed = ""
        try:
            forward, backward = open_peers(group, world.device, *exchange_rows(spec))
        except RunFailed as error:
            if spec.moe.transport == "symmetric":
                raise
            failed = str(error)
        if why := next(filter(None, world.from_rank_zero(world.to_rank_zero(failed))), ""):
            transport, forward, backward = Transport(_collectives(world), why), None, None
    return transport, (Lane(group, world.device, forward), Lane(world.ep_bwd_group, world.device, backward))


def _hidden(spec: RunSpec) -> tuple[int, int, int]:
    """[mbs, S, H] of a micro-batch on one rank."""
    training = spec.training
    return training.micro_batch_size, training.sequence_length // spec.mesh.cp, spec.model.config.hidden_size


def initialise(zero: Zero, seed: int) -> None:
    """Masters from (seed, canonical name, global index), moments zero, weights from masters."""
    for one in zero.sharded.values():
        info = one.info
        if info.init == "normal":
            row_size = info.size // info.stored_shape[0]
            normal_(one.master, seed, info.name, one.first_row * row_size, info.std)
        else:
            one.master.fill_(1.0 if info.init == "ones" else 0.0)
    zero.publish()


def _build_stage(
    spec: RunSpec, world: World, stage: int, last: int, layers: tuple[int, ...], zero: Zero, counts_LE: Tensor
) -> Stage:
    config, training, weights = spec.model.config, spec.training, zero.weights
    module = load_model(spec.model.architecture)
    wide = accumulate_dtype(compute_dtype(spec, world.device))
    tables = module.rope(config, training.sequence_length, world.device, wide)
    built: list[Layer] = []
    for index in layers:
        balance = _balance(spec, world, index, counts_LE[index])
        layer = module.build_layer(config, index, weights, balance)
        if balance.shared and layer.experts is not None:
            layer = replace(layer, after=replace(layer.after, fn=partial(with_sums, layer.after.fn)))
        built.append(layer)
    head = _head(config, weights, training.z_loss_coef) if stage == last else None
    if spec.compile.enabled:
        built, head = compile_regions(built, head, _hidden(spec), compute_dtype(spec, world.device), tables)
    embedding = weights[EMBEDDING] if stage == 0 else None
    return Stage(tuple(built), embedding, head, spec.activation_checkpoint.mode, zero.arrived, tables)


def compile_regions(
    layers: list[Layer], head: Head | None, hidden: tuple[int, int, int], dtype: torch.dtype, tables: Tensor
) -> tuple[list[Layer], Head | None]:
    """The same layers and head with their regions compiled. Experts and edges are ragged and never are, nor is
    attention: its documents are, and its ring waits. More than COMPILED_GRAPHS graphs, or one that breaks, is an error
    and never a silent fall back to eager. `hidden`: [mbs, S, H]. `tables`: rotary."""
    torch._dynamo.config.recompile_limit = COMPILED_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compiled_call = torch.compile(call, fullgraph=True, dynamic=False)
    h, tokens = (hidden, dtype), ((hidden[0] * hidden[1], hidden[2]), dtype)
    turns = ((2, *hidden[:2], tables.shape[-1]), tables.dtype)
    compiled_layers = [
        replace(
            layer,
            before=compiled(layer.before, compiled_call, h, turns),
            after=compiled(layer.after, compiled_call, h, ((*hidden[:2], layer.core.width), dtype)),
            shared=None if layer.shared is None else compiled(layer.shared, compiled_call, tokens),
        )
        for layer in layers
    ]
    if head is not None:
        head = replace(head, norm=compiled(head.norm, compiled_call, h))
    return compiled_layers, head


def _balance(spec: RunSpec, world: World, layer: int, counts_E: Tensor) -> Balance:
    training, moe, mesh = spec.training, spec.moe, spec.mesh
    token_T = None
    if moe.force_load_balance and mesh.cp > 1:
        whole = torch.arange(training.micro_batch_size * training.sequence_length, device=world.device)
        rows = whole.view(training.micro_batch_size, -1)
        own = chunks(training.sequence_length, mesh.cp, world.cp)
        token_T = torch.cat([rows[:, chunk] for chunk in own], 1).flatten()
    return Balance(
        kind=moe.load_balance_type,
        coef=moe.aux_loss_coef,
        z_coef=moe.z_loss_coef,
        global_tokens=training.global_batch_size * training.sequence_length,
        sequence_length=training.sequence_length // mesh.cp,
        counts_E=counts_E,
        forced_E=forced_order(len(counts_E), layer).to(counts_E.device) if moe.force_load_balance else None,
        token_T=token_T,
        shared=mesh.cp > 1 and moe.load_balance_type in ("aux_loss", "seq_aux_loss"),
    )


def _head(config: ModelConfig, weights: Mapping[str, Weight], z_coef: float) -> Head:
    def norm(lin: Linears, vectors: Mapping[str, Tensor], h: Tensor) -> tuple[tuple[Tensor], None]:
        return (rms_norm(h, vectors["norm"], config.rms_norm_eps),), None

    return Head(
        norm=Region(norm, {}, {"norm": weights[FINAL_NORM]}),
        weight=weights[EMBEDDING if config.tie_word_embeddings else HEAD],
        z_coef=z_coef,
    )
