"""A run as frozen data: YAML and `--set a.b=c` in, a `RunSpec` out, or every mistake at once.

Why one strict spec. A run that trains on a default because a key was mistyped costs days, so nothing is dropped, no
string becomes a number, and what cannot work is refused here, on a login node, in 0.2 s and without torch.

- **Text.** YAML 1.2's core rules: `1e-4` is a float, `off` and `12:30` are strings, `true` is no number. A key given
  twice is refused with both lines. `--set` and config.json are read alike.
- **A place.** `slurm.profile` names a file of `slurm/` with the facts of a cluster, which lie below what the spec and
  `--set` say. The resolved spec holds the result and needs that file no more.
- **Rules** between sections are functions whose parameters are the sections they read, so that a mistake in one section
  does not hide those in others. A check never changes what it checks.

Worked example, a mesh of four ranks with 16 sequences a step, one per micro-batch:

    world = slurm.nodes 1 x slurm.gpus_per_node 4 = pp 2 x dp 1 x cp 1 x ep 2
    N     = global_batch_size 16 / (micro_batch_size 1 x dp 1 x ep 2) = 8 micro-batches, at least 2 pp = 4

    spec = load(Path("configs/tiny.yaml"), ["training.max_steps=20"])
    spec.mesh, spec.num_micro_batches      # Mesh(pp=2, dp=1, cp=1, ep=2), 8
"""

import difflib
import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

import pydantic
import yaml
from pydantic import BeforeValidator, Field, SkipValidation, ValidationError
from pydantic.fields import FieldInfo

from pithtrain.errors import ABSENT, Problem, SpecError, show
from pithtrain.models.contract import Integer, ModelConfig, Positive, Strict, load_config, only

Count = Annotated[Integer, Field(ge=0)]
Coefficient = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Written = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]  # often as a bare number, such as 90 minutes
Lines = Annotated[tuple[str, ...], Field(strict=False)]
Problems = Iterator[Problem]


def _absolute(value: object) -> object:
    if isinstance(value, str) and not value.isprintable():
        raise ValueError("holds a character that cannot be printed")
    return Path(os.path.abspath(os.path.expanduser(value))) if isinstance(value, str | Path) and str(value) else value


def _resume(value: object) -> object:
    if value == "never":
        raise ValueError(
            "is auto or a path: a new run directory has nothing to resume, and an old one must lose nothing"
        )
    return value if value in ("auto", "") or not isinstance(value, str) else str(_absolute(value))


Location = Annotated[Path, BeforeValidator(_absolute)]  # a relative one is taken against the caller's directory


def _key(default: Any, description: str, **limits: Any) -> Any:
    """A key that may be left out."""
    return Field(default=default, description=description, **limits)


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid: pp outermost, ep innermost, so that expert peers are neighbours (NVLink)."""

    pp: int
    dp: int
    cp: int
    ep: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.ep

    def rank(self, pp: int, dp: int, cp: int, ep: int) -> int:
        """The rank at these coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.ep + ep

    def coords(self, rank: int) -> tuple[int, int, int, int]:
        """(pp, dp, cp, ep) of a rank in [0, size)."""
        rank, ep = divmod(rank, self.ep)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return pp, dp, cp, ep


class ModelSection(Strict):
    """Which model, and its numbers. In YAML the HF fields stand beside `architecture`, or in `config_file`."""

    architecture: str = Field(description="a folder of pithtrain/models, or the path of one outside the package")
    config: SkipValidation[ModelConfig] = Field(description="an instance of that folder's class Config")

    @pydantic.model_serializer
    def _inline(self) -> dict[str, object]:
        return {"architecture": self.architecture, **self.config.model_dump(mode="json")}


class ParallelismSection(Strict):
    """How the world is cut; data parallel is what is left of it."""

    pipeline_parallel_size: Positive = _key(1, "pp, ranks of a pipeline, two stages each")
    expert_parallel_size: Positive = _key(1, "ep, ranks that share the experts of a layer")
    context_parallel_size: Positive = _key(1, "cp, ranks that share a sequence, each two chunks of 2 cp")

    def mesh(self, world_size: int) -> Mesh:
        """The grid of so many ranks; smaller than the world where these sizes do not divide it."""
        pp, cp, ep = self.pipeline_parallel_size, self.context_parallel_size, self.expert_parallel_size
        return Mesh(pp, world_size // (pp * cp * ep), cp, ep)


class TrainingSection(Strict):
    """The step."""

    max_steps: Positive = Field(description="optimizer steps; may be raised at a resume")
    micro_batch_size: Positive = Field(description="sequences of one forward on one rank")
    global_batch_size: Positive = Field(description="sequences of one step, over all ranks")
    sequence_length: Positive = Field(description="tokens of a sequence")
    max_grad_norm: float | None = _key(1.0, "global norm to clip at; null does not clip", gt=0)
    seed: Count = _key(0, "of the initial weights and the data order", lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "auto: cuda where there is one")
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = _key(
        "auto", "auto: bfloat16 on cuda, float32 on cpu; float64 on cpu is for proofs"
    )
    z_loss_coef: Coefficient = _key(0.0, "of the LM head's log partition function squared; 1e-4 is usual", le=1)
    deterministic: bool = _key(False, "bitwise reruns on a GPU too, at the cost of slower kernels")


class OptimizerSection(Strict):
    """The update."""

    type: Literal["adamw", "muon"] = _key(
        "adamw",
        "muon: the matrices of layers, experts' and routers' too, move along their momentum made orthogonal, as far as "
        "adamw would at this lr, for one moment each instead of two; embedding, head and vectors stay adamw's",
    )
    lr: float = Field(gt=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = _key((0.9, 0.95), "decay of the first and the second moment", strict=False)
    eps: float = _key(1e-8, "added to the root of the second moment; fp32 has none much smaller", ge=1e-30)
    weight_decay: Coefficient = _key(0.1, "per step and unit of lr, on matrices only")
    momentum: Beta = _key(0.95, "muon: decay of its moment; Nesterov's")
    moments_dtype: Literal["float32", "bfloat16"] = _key(
        "float32", "of the moments; bfloat16: 4 bytes per parameter less (muon: 2), rounded stochastically"
    )


class LrSchedulerSection(Strict):
    """The learning rate over steps counted from 1. linear and cosine reach min_lr at decay_steps, warm-up included;
    wsd falls to it over its last decay_steps."""

    type: Literal["constant", "linear", "cosine", "wsd"] = _key("constant", "shape after warm-up")
    warmup_steps: Count = _key(0, "steps of linear rise to lr")
    decay_steps: Positive | None = _key(None, "step that reaches min_lr, default max_steps; wsd: length of the decay")
    min_lr: Coefficient = _key(0.0, "where the decay ends")


class MoeSection(Strict):
    """Routing: balance, and how tokens travel to experts."""

    load_balance_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = _key(
        "none", "tokens over which shares are counted: a micro-batch, a sequence, the global batch of the step before"
    )
    aux_loss_coef: Coefficient = _key(0.0, "of a loss that is 1 per layer when balanced")
    z_loss_coef: Coefficient = _key(0.0, "of the router's log partition function squared, a layer", le=1)
    bias_update_rate: Coefficient = _key(
        0.0, "what a step adds to or takes from each selection bias, of scores below 1; 0.001 is usual", lt=1
    )
    force_load_balance: bool = _key(
        False, "tokens go round robin, for speed measurements only: no checkpoints, no validation"
    )
    dispatch: Literal["dedup", "plain"] = _key("dedup", "a token travels once per rank; plain: once per expert")
    transport: Literal["auto", "nccl", "symmetric"] = _key(
        "auto",
        "symmetric: copy engines write into the peers' memory, of one host; nccl: collectives (gloo on cpu); auto: "
        "symmetric where NVLink joins all ranks of every expert-parallel group and memory can be mapped, else nccl",
    )


class Fp8Section(Strict):
    """8-bit matrix products of the layers, forward and for input gradients. Checkpoints know nothing of it."""

    enabled: bool = _key(False, "off on Hopper unless measured to be faster; a CPU emulates it")
    recipe: Literal["blockwise", "rowwise", "mxfp8"] = _key(
        "blockwise",
        "what shares a scale. blockwise (Hopper): 128 values of a row, 128 x 128 of a weight; rowwise: a row; mxfp8 "
        "(Blackwell): 32 values",
    )


class CompileSection(Strict):
    """torch.compile of the regions between communication edges."""

    enabled: bool = _key(False, "costs a minute or two at the first step")


class ActivationCheckpointSection(Strict):
    """Recomputing instead of keeping activations."""

    mode: Literal["none", "selective", "full"] = _key(
        "none", "what a backward computes again; selective: gathers of expert inputs; full: all but embedding and head"
    )


class DataSource(Strict):
    """One corpus of token shards."""

    path: Location = Field(description="folder of shards written by `pithtrain tokenize`")
    weight: float = _key(1.0, "share of the samples that are read; the shares sum to 1", gt=0)


class DataSection(Strict):
    """What is read."""

    sources: tuple[DataSource, ...] = Field(strict=False, description="corpora to draw from")
    tokenizer: Location | None = _key(None, "tokenizer.json the corpus must have been made with")
    document_mask: bool = _key(
        True,
        "tokens see their own document alone, from position 0 on, and nothing is predicted across its end. On, since "
        "what stands before a document by chance tells nothing of it, and costs work. Off: one stream",
    )
    shuffle: bool = _key(True, "a new order each epoch, a function of (seed, epoch)")
    epochs: Positive = _key(1, "passes over the corpus; a run that needs more is refused")
    repeat: bool = _key(False, "as many passes as max_steps needs, instead of epochs")


_LABEL = r"^[A-Za-z0-9_.-]+$"


class HeldOutSource(Strict):
    """One corpus that is not trained on."""

    path: Location = Field(description="folder of shards written by `pithtrain tokenize` with the training's tokenizer")
    name: Annotated[str, Field(pattern=_LABEL)] | None = _key(
        None, "of its loss, val_loss/NAME: letters, digits, '_', '.' and '-'; null: the folder's"
    )

    @property
    def label(self) -> str:
        """`name`, or the folder's."""
        return self.name or self.path.name


class ValidationSection(Strict):
    """Loss on held-out text, every `interval` steps and after the last one: the mean over tokens, in nats. The samples
    are the same at every step, on every mesh and in every run of this sequence length (with `steps`: and this batch
    size), whatever its seed."""

    interval: Positive | None = _key(None, "steps between validations, a multiple of logging.interval; null: never")
    steps: Positive | None = _key(
        None, "global batches that one validation reads of each corpus, drawn from all of it; null: each sample once"
    )
    sources: tuple[HeldOutSource, ...] = _key((), "corpora, each with a loss of its own", strict=False)


class CheckpointSection(Strict):
    """Full state on disk, 12 bytes per parameter a step (8 with bf16 moments; 8 and 6 of what Muon moves). Whatever
    stands here, a run saves at its last step, where it is stopped and where it is asked to.

    keep_last: an older one goes once the next is whole on the disk, which so needs room for one more. async_save:
    training waits for a copy to host memory (as many bytes over all ranks) instead of the write; a save that finds the
    one before unfinished waits for it, and so does the end of the run.
    """

    interval: Positive | None = _key(None, "steps between saves: what a crash may cost; null: none but those above")
    keep_last: Positive | None = _key(None, "newest checkpoints kept; null: all")
    keep_interval: Positive | None = _key(None, "steps whose multiples are kept for good; null: none beside keep_last")
    async_save: bool = _key(False, "write while training goes on")
    export_hf: Literal["final"] | None = _key(None, "final: the last step in Hugging Face form too, in bfloat16")


class WandbSection(Strict):
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = _key("disabled", "a missing login only warns")
    project: Text = _key("pithtrain", "W&B project")
    entity: Text | None = _key(None, "W&B team; null: the login's own")
    group: Text | None = _key(None, "joins runs on a W&B page")
    tags: Lines = _key((), "W&B tags")
    name: Text | None = _key(None, "null: the run's name")


class LoggingSection(Strict):
    """What is told while it runs."""

    interval: Positive = _key(1, "steps between lines")
    expert_load_interval: Positive | None = _key(
        100, "steps between lines that hold the load of every expert of every layer too; null: none does"
    )
    wandb: WandbSection = _key(WandbSection(), "Weights & Biases")


class GuardsSection(Strict):
    """When a number goes wrong."""

    non_finite: Literal["stop", "skip"] = _key(
        "stop",
        "what a NaN or infinite gradient norm or router does beside leaving that update out. stop: saves and ends the "
        "run with the next line; skip: goes on and warns",
    )
    loss_spike_sigma: float | None = _key(
        None,
        "a step whose loss lies more than so many standard deviations above the mean of the 128 before it, of 64 at "
        "least, makes no update, and the run warns; 6 is usual. null: every finite loss is trained on",
        gt=0,
    )
    max_consecutive_skips: Positive = _key(
        10, "with non_finite: skip or loss_spike_sigma, updates left out in a row that end the run too"
    )


class ProfilingSection(Strict):
    """A window of whole steps under a profiler. Nothing is recorded, and nothing paid, outside it."""

    torch: bool = _key(False, "a torch.profiler trace of each rank, in the run directory's profiles/")
    nsys: bool = _key(False, "CUDA: a range a step, the window for `nsys profile --capture-range=cudaProfilerApi`")
    memory_snapshot: bool = _key(False, "CUDA: allocations with their stacks, in profiles/ too")
    start_step: Positive | None = _key(None, "first step of the window; there is none by itself")
    end_step: Positive | None = _key(None, "last step of the window")
    ranks: tuple[Count, ...] = _key((0,), "ranks that record", strict=False)

    @property
    def on(self) -> bool:
        return self.torch or self.nsys or self.memory_snapshot


class DistributedSection(Strict):
    """How long a collective may take."""

    init_timeout_s: Positive = _key(600, "seconds; longer than the slowest node's start")
    train_timeout_s: Positive = _key(900, "seconds; longer than the slowest first compile")
    step_timeout_s: Positive = _key(300, "seconds; a step after the first")
    save_timeout_s: Positive = _key(1800, "seconds; longer than the slowest checkpoint")
    flight_recorder: Count = _key(
        2000, "last collectives that each rank remembers, to name the one a run hangs in and who is missing; 0: none"
    )


class Link(Strict):
    """One way of communication: a message of b bytes takes latency_us + b / gb_s."""

    latency_us: float = Field(ge=0, description="microseconds of a message without content")
    gb_s: float = Field(gt=0, description="10^9 bytes a second that a rank sends, while it receives as many")


class LinksSection(Strict):
    """What `benchmarks/links.py` measured on this place's GPUs: `plan` tells communication times where it stands."""

    all_to_all: Link | None = _key(None, "the collective of expert traffic; bytes to other ranks")
    p2p: Link | None = _key(None, "a pipeline's messages, both ways at once")
    copy_engine: Link | None = _key(None, "expert traffic where moe.transport is, or resolves to, symmetric")


class SlurmSection(Strict):
    """What is asked of Slurm, under sbatch's long option names; without Slurm, gpus_per_node processes run here."""

    profile: Text | None = _key(None, "NAME of slurm/NAME.yaml, or a path: facts of a place, below what stands here")
    account: Text | None = _key(None, "who pays")
    partition: Text | None = _key(None, "null: the cluster's default")
    qos: Text | None = _key(None, "quality of service")
    time: Annotated[Written, Field(pattern=r"^((\d+-)?\d+:[0-5]\d:[0-5]\d|\d+)$")] | None = _key(
        None, "[D-]HH:MM:SS, as in 1-12:00:00, or whole minutes, as in 90; null: the partition's default"
    )
    nodes: Positive = _key(1, "machines")
    gpus_per_node: Positive = _key(1, "ranks of a machine, one per GPU; processes on a CPU")
    cpus_per_task: Positive | None = _key(None, "cores of a rank; null: the cluster's default")
    mem: Annotated[Written, Field(pattern=r"^\d+[KMGT]?$")] = _key(
        "0",
        "memory of a node in K, M, G or T, as in 64G; 0: all of it. Always sent: a cluster's default may block others",
    )
    constraint: Text | None = _key(None, "features a node must have")
    exclude: Text | None = _key(None, "nodes not to use")
    exclusive: bool = _key(False, "no other job on our nodes")
    signal_delay_s: Positive = _key(300, "seconds before the time limit at which the run saves")
    max_requeues: Count = _key(10, "restarts after a crash, each only if a step was gained since the one before")
    setup: Lines = _key((), "shell lines before the run")
    env: dict[str, str] = _key({}, "environment of the ranks")
    additional_parameters: dict[str, Any] = _key({}, "other sbatch options, with underscores")
    srun_args: Lines = _key((), "further arguments of srun")
    links: LinksSection = _key(LinksSection(), "measured speeds of communication, for `plan` alone")

    @property
    def time_minutes(self) -> int | None:
        """The time limit in whole minutes, rounded up; None is the partition's default."""
        if self.time is None:
            return None
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":") if ":" in clock else ("0", clock, "0"))
        return (int(days or 0) * 24 + hours) * 60 + minutes + (seconds > 0)


class RunSpec(Strict):
    """A run. Made by `load` or `from_dict`; one that breaks a rule cannot be made (SpecError)."""

    version: Annotated[Integer, only(1, "there is one format")] = _key(1, "of this format")
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        description="names the run's folder in output_dir: at most 100 letters, digits, '.', '_', '-', no sign first"
    )
    output_dir: Location = _key(Path("runs"), "where run directories are made")
    init_from: Location | None = _key(
        None,
        "Hugging Face folder, checkpoint or run directory whose weights a run without a checkpoint of its own begins "
        "with; moments, schedule and data begin anew. null: weights from training.seed",
    )
    resume: Annotated[Text, BeforeValidator(_resume)] = _key(
        "auto", "a path: where a run without a checkpoint of its own begins. Its own newest complete one always wins"
    )
    model: ModelSection
    parallelism: ParallelismSection = ParallelismSection()
    training: TrainingSection
    optimizer: OptimizerSection
    lr_scheduler: LrSchedulerSection = LrSchedulerSection()
    moe: MoeSection = MoeSection()
    fp8: Fp8Section = Fp8Section()
    compile: CompileSection = CompileSection()
    activation_checkpoint: ActivationCheckpointSection = ActivationCheckpointSection()
    data: DataSection
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    guards: GuardsSection = GuardsSection()
    profiling: ProfilingSection = ProfilingSection()
    distributed: DistributedSection = DistributedSection()
    slurm: SlurmSection = SlurmSection()

    @pydantic.field_validator("*")
    @classmethod
    def _note(cls, value: object, info: pydantic.ValidationInfo) -> object:
        if info.context is not None:  # what parsed, for `from_dict`: other rules are looked at when some key is wrong
            info.context[info.field_name] = value
        return value

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(_broken_rules(dict(self))):
            raise SpecError(problems)
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks asked for."""
        return self.slurm.nodes * self.slurm.gpus_per_node

    @property
    def mesh(self) -> Mesh:
        """The ranks as a grid."""
        return self.parallelism.mesh(self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """N, micro-batches per step of one data rank; (dp, ep) pairs hold different sequences."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.mesh.dp * self.mesh.ep)

    def to_yaml(self) -> str:
        """The spec with every default written out; `load` of it is equal to this."""
        fields = self.model_dump(mode="json")
        return yaml.dump(fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)

    def stable_hash(self) -> str:
        """16 hex digits that two specs share only if all their values are equal."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_mesh(parallelism: ParallelismSection, slurm: SlurmSection) -> Problems:
    world = slurm.nodes * slurm.gpus_per_node
    mesh = parallelism.mesh(world)
    cut = mesh.pp * mesh.cp * mesh.ep
    if world % cut:
        rule = (
            f"world = slurm.nodes {slurm.nodes} x slurm.gpus_per_node {slurm.gpus_per_node} = {world} must equal "
            f"pp {mesh.pp} x dp x cp {mesh.cp} x ep {mesh.ep} with a whole dp >= 1, but {world} / {cut} is not whole"
        )
        yield Problem("parallelism", ABSENT, rule, f"ask Slurm for a multiple of {cut} ranks, or cut less")


def _check_batch(parallelism: ParallelismSection, slurm: SlurmSection, training: TrainingSection) -> Problems:
    world, at, batch = slurm.nodes * slurm.gpus_per_node, "training.global_batch_size", training.global_batch_size
    mesh = parallelism.mesh(world)
    if mesh.size != world:
        return  # said by _check_mesh
    product = f"micro_batch_size {training.micro_batch_size} x dp {mesh.dp} x ep {mesh.ep}"
    per_turn, least = training.micro_batch_size * mesh.dp * mesh.ep, 2 * mesh.pp
    turns = batch // per_turn
    if batch % per_turn:
        rule = f"must be a multiple of {product} = {per_turn}: every data rank takes the same number of micro-batches"
        near = sorted({max(least, turns) * per_turn, max(least, turns + 1) * per_turn})
        yield Problem(at, batch, rule, f"nearest: {' or '.join(map(str, near))}")
    elif turns < least:
        rule = f"gives N = {batch} / ({product}) = {turns} micro-batches, and DualPipeV with pp = {mesh.pp} needs "
        yield Problem(at, batch, f"{rule}N >= 2 pp = {least}", f"at least {least * per_turn} works")


def _check_experts(parallelism: ParallelismSection, model: ModelSection) -> Problems:
    experts, ep = model.config.num_experts, parallelism.expert_parallel_size
    if experts % ep:
        rule = f"must divide the model's {experts} experts: every rank holds the same number of them"
        fits = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
        yield Problem("parallelism.expert_parallel_size", ep, rule, f"{fits} work")


def _check_sequence(training: TrainingSection, model: ModelSection, parallelism: ParallelismSection) -> Problems:
    length, longest = training.sequence_length, model.config.max_position_embeddings
    cp, cut = parallelism.context_parallel_size, 2 * parallelism.context_parallel_size
    if cp > 1 and length % cut:
        rule = f"must be a multiple of 2 x context_parallel_size {cp} = {cut}: every rank holds two chunks"
        near = [n * cut for n in (length // cut, length // cut + 1) if n and n * cut <= (longest or math.inf)]
        hint = f"nearest: {' or '.join(map(str, near))}" if near else ""
        yield Problem("training.sequence_length", length, rule, hint)
    if longest is not None and length > longest:
        yield Problem("training.sequence_length", length, f"must be at most model.max_position_embeddings = {longest}")


def _check_dtype(training: TrainingSection) -> Problems:
    if training.compute_dtype == "float64" and training.device != "cpu":
        rule = f"is for proofs on the CPU, and training.device is {training.device}"
        yield Problem("training.compute_dtype", "float64", rule, "set training.device=cpu")


def _check_optimizer(training: TrainingSection, optimizer: OptimizerSection) -> Problems:
    momentum, default = optimizer.momentum, OptimizerSection.model_fields["momentum"].default
    if optimizer.type == "adamw" and momentum != default:
        rule = "has no effect with type: adamw, whose first moment decays by betas"
        yield Problem("optimizer.momentum", momentum, rule, f"set optimizer.type=muon, or this to {default}")
    if training.compute_dtype == "float64" and optimizer.moments_dtype == "bfloat16":
        rule = "would make a proof of 8 digits: training.compute_dtype is float64, whose moments are float64 too"
        yield Problem("optimizer.moments_dtype", "bfloat16", rule, "set it to float32, or compute in float32")


def _check_lr(lr_scheduler: LrSchedulerSection, optimizer: OptimizerSection, training: TrainingSection) -> Problems:
    warmup, decay, min_lr = lr_scheduler.warmup_steps, lr_scheduler.decay_steps, lr_scheduler.min_lr
    at, last = "lr_scheduler", training.max_steps
    if min_lr > optimizer.lr:
        yield Problem(f"{at}.min_lr", min_lr, f"must be at most optimizer.lr = {optimizer.lr}")
    if lr_scheduler.type == "constant":
        for key, value, off in (("decay_steps", decay, None), ("min_lr", min_lr, 0.0)):
            if value != off:
                yield Problem(f"{at}.{key}", value, "has no effect with type: constant", f"set it to {show(off)}")
        if warmup > last:
            yield Problem(f"{at}.warmup_steps", warmup, f"must be at most training.max_steps = {last}")
    elif lr_scheduler.type != "wsd":
        end = f"training.max_steps = {last}" if decay is None else f"decay_steps = {decay}"
        if warmup >= (decay or last):
            yield Problem(f"{at}.warmup_steps", warmup, f"must be below {end}, which counts the warm-up too")
        if decay is not None and decay < last and min_lr == 0:
            rule = f"ends at a rate of 0 before training.max_steps = {last}, and nothing is learnt after it"
            yield Problem(f"{at}.decay_steps", decay, rule, f"set {at}.min_lr above 0, or {at}.decay_steps to {last}")
    elif decay is None:
        yield Problem(f"{at}.decay_steps", None, "type: wsd needs the length of its last decay, in steps")
    elif warmup + decay > last:
        rule = f"warmup_steps {warmup} + decay_steps {decay} must be at most training.max_steps = {last}"
        yield Problem(f"{at}.decay_steps", decay, rule)


def _check_moe(moe: MoeSection) -> Problems:
    kind, coef = moe.load_balance_type, moe.aux_loss_coef
    if kind == "none" and coef:
        hint = "set moe.load_balance_type=aux_loss, or the coefficient to 0"
        yield Problem("moe.aux_loss_coef", coef, "has no effect with load_balance_type: none", hint)
    elif kind != "none" and not coef:
        rule = f"load_balance_type: {kind} needs a coefficient above 0"
        yield Problem("moe.aux_loss_coef", coef, rule, "0.001 is usual")


def _check_transport(
    moe: MoeSection, parallelism: ParallelismSection, training: TrainingSection, slurm: SlurmSection
) -> Problems:
    ep, here = parallelism.expert_parallel_size, slurm.gpus_per_node
    if moe.transport != "symmetric":
        return
    if ep == 1:
        rule = "has no effect with parallelism.expert_parallel_size = 1: no token leaves its rank"
    elif training.device == "cpu":
        rule = "needs the copy engines of GPUs, and training.device is cpu"
    elif slurm.nodes > 1 and here % ep:
        rule = f"needs every expert-parallel group on one host, and {here} GPUs of a host hold no whole groups of {ep}"
    else:
        return
    yield Problem("moe.transport", "symmetric", rule, "use auto")


def _check_balance(moe: MoeSection, model: ModelSection) -> Problems:
    config = model.config
    if not any(config.is_moe(layer) for layer in range(config.num_hidden_layers)):
        for key in ("load_balance_type", "aux_loss_coef", "z_loss_coef", "bias_update_rate", "force_load_balance"):
            off = MoeSection.model_fields[key].default
            if (value := getattr(moe, key)) != off:
                rule = "has no effect: no layer of this model has experts"
                yield Problem(f"moe.{key}", value, rule, f"set it to {show(off)}")
    elif moe.bias_update_rate and all(info.trained for info in model.config.parameters()):
        rule = "needs a router with a selection bias, and this model has none"
        hint = "set it to 0 and balance with moe.load_balance_type, or take a model whose router has one"
        yield Problem("moe.bias_update_rate", moe.bias_update_rate, rule, hint)


def _check_forced(moe: MoeSection, checkpoint: CheckpointSection) -> Problems:
    if moe.force_load_balance and checkpoint.export_hf is not None:  # the run warns that it saves nothing either
        rule = "has no effect with moe.force_load_balance: true: its weights are worth nothing and not saved"
        yield Problem("checkpoint.export_hf", checkpoint.export_hf, rule, "set it to null")


def _check_fp8(fp8: Fp8Section, model: ModelSection, training: TrainingSection) -> Problems:
    if not fp8.enabled:
        return
    dtype = training.compute_dtype
    if dtype == "float64" or (dtype == "float32" and training.device != "cpu"):
        rule = f"makes 8-bit operands of bfloat16, and training.compute_dtype is {dtype}"
        hint = "set it to bfloat16; float32 works with training.device=cpu, which emulates"
        yield Problem("fp8.enabled", True, rule, hint)
    multiples = {"rowwise": 16, "mxfp8": 32, "blockwise": 128}
    ours = multiples[fp8.recipe]
    odd = [p for p in model.config.parameters() if p.fp8 and any(size % ours for size in p.shape[-2:])]
    if odd:
        first, kinds = odd[0], len({re.sub(r"\.\d+\.", ".*.", p.name) for p in odd})
        fits = [name for name, n in multiples.items() if all(size % n == 0 for p in odd for size in p.shape[-2:])]
        rule = f"needs matrices whose sizes are multiples of {ours}, and {first.name} is {first.shape[-2]} x "
        rule += f"{first.shape[-1]}" + (f" (of {kinds} kinds)" if kinds > 1 else "")
        hint = f"use {' or '.join(fits)}" if fits else "set fp8.enabled=false, or change the model's widths"
        yield Problem("fp8.recipe", fp8.recipe, rule, hint)


def _check_fp8_tokens(fp8: Fp8Section, training: TrainingSection, parallelism: ParallelismSection) -> Problems:
    cp = parallelism.context_parallel_size
    tokens = training.micro_batch_size * training.sequence_length // cp
    if fp8.enabled and fp8.recipe == "blockwise" and tokens % 4:
        rule = f"needs a multiple of 4 tokens a micro-batch on each rank, and here are {tokens}"
        hint = f"a multiple of {4 * cp} works; or use rowwise"
        yield Problem("training.sequence_length", training.sequence_length, f"fp8.recipe: blockwise {rule}", hint)


def _twice(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _nearest(value: int, step: int) -> str:
    """The multiples of `step` beside a value, in words."""
    below = value - value % step
    return f"nearest: {' or '.join(map(str, sorted({max(step, below), below + step})))}"


def _check_data(data: DataSection) -> Problems:
    weights = [source.weight for source in data.sources]
    total = sum(Fraction(str(weight)) for weight in weights)  # as they are written: three tenths are 0.3
    if not weights:
        yield Problem("data.sources", [], "must hold a corpus", "give [{path: ...}]")
    elif total != 1:
        share = "give each corpus its share of the samples, as in 0.3334, 0.3333, 0.3333"
        hint = "leave it out" if len(weights) == 1 else share
        yield Problem("data.sources", weights, f"the weights sum to {float(total):.12g}, not to 1", hint)
    if twice := _twice([str(source.path) for source in data.sources]):
        yield Problem("data.sources", twice, "is given twice", "give it once, with the sum of the weights")
    if data.repeat and data.epochs != 1:
        rule = "has no effect with data.repeat: true, which takes as many passes as max_steps needs"
        yield Problem("data.epochs", data.epochs, rule, "give one of the two")


def _check_validation(validation: ValidationSection, logging: LoggingSection, data: DataSection) -> Problems:
    at, every, names = "validation", validation.interval, [source.label for source in validation.sources]
    if every is None:
        for key, value in (("steps", validation.steps), ("sources", names)):
            if value:
                rule = "has no effect with interval: null, which never validates"
                yield Problem(f"{at}.{key}", value, rule, f"set {at}.interval, or leave it out")
        return
    if every % logging.interval:
        rule = f"must be a multiple of logging.interval = {logging.interval}: its loss stands in the line of a step"
        yield Problem(f"{at}.interval", every, rule, _nearest(every, logging.interval))
    if not names:
        yield Problem(f"{at}.sources", [], "must hold a corpus", "give [{path: ...}], or leave the section out")
    trained = {source.path for source in data.sources}
    for number, source in enumerate(validation.sources):
        if not re.fullmatch(_LABEL, source.label):
            rule = "is no name of a loss: letters, digits, '_', '.' and '-'"
            yield Problem(
                f"{at}.sources.{number}.path", str(source.path), rule, "give it a name: {path: ..., name: ...}"
            )
        if source.path in trained:
            rule = "is trained on, in data.sources: its loss tells nothing of other text"
            yield Problem(f"{at}.sources.{number}.path", str(source.path), rule, "tokenize text that is left out there")
    if twice := _twice(names):
        rule = "must have a name each, and there is more than one"
        yield Problem(f"{at}.sources", names, f"{rule} {', '.join(twice)}", "give them [{path: ..., name: ...}]")


def _check_checkpoint(checkpoint: CheckpointSection) -> Problems:
    at, kept, every = "checkpoint.keep_interval", checkpoint.keep_interval, checkpoint.interval
    if kept is None:
        return
    if checkpoint.keep_last is None:
        rule = "has no effect with keep_last: null, which keeps every checkpoint"
        yield Problem(at, kept, rule, f"set checkpoint.keep_last, or {at} to null")
    if every is None:
        rule = "has no effect with interval: null, which saves at no multiple of anything"
        yield Problem(at, kept, rule, f"set checkpoint.interval, or {at} to null")
    elif kept % every:
        rule = f"must be a multiple of checkpoint.interval = {every}, the steps that are saved"
        yield Problem(at, kept, rule, _nearest(kept, every))


def _check_host_memory(
    model: ModelSection,
    training: TrainingSection,
    optimizer: OptimizerSection,
    checkpoint: CheckpointSection,
    slurm: SlurmSection,
) -> Problems:
    """A save copies a node's part of the state to host memory; the kernel's killer would say nothing of it."""
    if slurm.mem.strip("KMGT") == "0" or (training.device == "cpu" and not checkpoint.async_save):
        return
    have = int(slurm.mem.rstrip("KMGT")) * 1024 ** (" KMGT".find(slurm.mem[-1]) if slurm.mem[-1] in "KMGT" else 2)
    moment = 4 if optimizer.moments_dtype == "float32" else 2
    state = (p.size * (4 + moment * p.moments(optimizer.type == "muon")) for p in model.config.parameters())
    need = sum(state) / slurm.nodes
    if need > have:
        gib = need / 2**30
        rule = f"is less than the {gib:.1f} GiB of each node that a checkpoint is copied to before it is written"
        yield Problem("slurm.mem", slurm.mem, rule, f"give {math.ceil(1.3 * gib)}G or more, or 0 for all of it")


def _check_beginning(init_from: Path | None, resume: str) -> Problems:
    if init_from is not None and resume != "auto":
        rule = f"is one beginning and resume = {show(resume)} another: weights alone, or full state"
        hint = "drop one: the run's own newest checkpoint comes before either"
        yield Problem("init_from", init_from, rule, hint)


def _check_guards(guards: GuardsSection) -> Problems:
    most, off = guards.max_consecutive_skips, GuardsSection.model_fields["max_consecutive_skips"].default
    if guards.non_finite == "stop" and guards.loss_spike_sigma is None and most != off:
        rule = "has no effect with non_finite: stop and without loss_spike_sigma: nothing is left out then and gone on"
        hint = f"set guards.non_finite=skip or guards.loss_spike_sigma=6, or this to {off}"
        yield Problem("guards.max_consecutive_skips", most, rule, hint)


def _check_profiling(profiling: ProfilingSection, training: TrainingSection, slurm: SlurmSection) -> Problems:
    at, first, last, ranks = "profiling", profiling.start_step, profiling.end_step, profiling.ranks
    if not profiling.on:
        for name, value in (("start_step", first), ("end_step", last)):
            if value is not None:
                rule = "has no effect: none of torch, nsys and memory_snapshot is on"
                yield Problem(f"{at}.{name}", value, rule, "turn one on, or leave the window out")
        return
    if first is None or last is None:
        rule = "must be given: the steps to record, a few after the first ones, which compile and warm up"
        yield Problem(f"{at}.{'start' if first is None else 'end'}_step", None, rule, "4 to 6 are usual")
    elif first > last:
        yield Problem(f"{at}.start_step", first, f"must be at most {at}.end_step = {last}")
    elif last > training.max_steps:
        yield Problem(f"{at}.end_step", last, f"must be at most training.max_steps = {training.max_steps}")
    world = slurm.nodes * slurm.gpus_per_node
    if not ranks or max(ranks) >= world or len({*ranks}) < len(ranks):
        yield Problem(f"{at}.ranks", list(ranks), f"must name at least one rank, each below {world} and once")


OWN_ENVIRONMENT = re.compile(r"RANK|WORLD_SIZE|LOCAL_RANK|PYTHONPATH|(SLURM|SUBMITIT|PITHTRAIN)_.*")
OWN_OPTIONS = (
    *SlurmSection.model_fields,
    *("job_name", "ntasks", "ntasks_per_node", "signal", "output", "error", "open_mode", "chdir", "wait", "wrap"),
    *("parsable", "test_only", "export"),
    *("comment", "requeue", "no_requeue"),  # how a run is followed and started again
    *("mem_per_cpu", "mem_per_gpu"),  # mem is always sent, and sbatch takes one of them
    "array",  # copies of a run in one run directory
)
_NAME = (
    r"[\w-]*(?:key|token|secret|pass(?:w(?:or)?d|phrase)?|pwd|auth|credentials?|jwt)(?![a-z])[\w-]*"
    r"(?<!_file)(?<!_path)(?<!_dir)"
)
SECRET_NAME = re.compile(_NAME, re.IGNORECASE)  # WANDB_API_KEY, and neither TOKENIZERS_PARALLELISM nor a file's name
SECRET = re.compile(  # in a line of shell; a value that begins with $ or ` is read from elsewhere when it runs
    rf"""(?:{_NAME}=|--{_NAME}\s+(?!-))['"]?(?![$`'"\s])."""  # export HF_TOKEN=..., --password ...
    r"|://[^/\s:@]*:[^/\s@$]+@|https?://[^/\s:@$]+@"  # user:password@host, token@host
    r"|\b(?:bearer|basic)\s+(?![$`])[\w+/=]{6}|\bwandb\s+login\b[^;&|]*\s[\w-]{40,}|[\w-]+key:\s*(?![$`])\w"
    r"|\b(?:curl|wget)\b[^;&|]*\s(?:-u|--user)[\s=]*[^\s:$`]+:[^\s$`]|--password-stdin|[?&](?:sig|x-amz-signature)="
    # what the services themselves give out
    r"|\b(?:hf_|gh[opsu]_|glpat-|sk-|xox[bp]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b|(?<![\w/-])[0-9a-f]{40}(?![\w/-])",
    re.IGNORECASE,
)


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every string in it, by its path."""
    if isinstance(value, str | Path):
        yield path, str(value)
    elif isinstance(value, Strict):
        yield from _texts(dict(value), path)
    elif isinstance(value, tuple):
        yield from _texts(dict(enumerate(cast("tuple[object]", value))), path)
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _texts(item, f"{path}.{key}")


def _secret(path: str) -> Problem:
    hint = "export it in the shell you submit from (the job inherits it), or in setup: NAME=$(cat FILE)"
    return Problem(path, "...", "looks like a secret, and a spec is kept and shown", hint)


def _check_words(output_dir: Path, init_from: Path | None, data: DataSection, logging: LoggingSection) -> Problems:
    if "%" in str(output_dir) or "\\" in str(output_dir):
        yield Problem("output_dir", output_dir, "holds a % or a \\, which Slurm reads as its own in file names")
    told = {"output_dir": output_dir, "init_from": init_from, "data": data, "logging": logging}
    for path, text in _texts(told, ""):
        if SECRET.search(text):
            yield _secret(path.lstrip("."))


def _check_slurm(slurm: SlurmSection) -> Problems:
    minutes, delay = slurm.time_minutes, slurm.signal_delay_s
    if minutes == 0:
        yield Problem("slurm.time", slurm.time, "must be above 0")
    elif minutes is not None and 2 * delay >= 60 * minutes:
        rule = f"must be below half of slurm.time = {slurm.time}, which is {60 * minutes} s, to train more than save"
        yield Problem("slurm.signal_delay_s", delay, rule, f"at most {30 * minutes - 1}")
    for key, value in slurm.env.items():
        if OWN_ENVIRONMENT.fullmatch(key):
            yield Problem(f"slurm.env.{key}", value, "is set by pithtrain or Slurm for every rank")
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            yield Problem("slurm.env", key, "is no name of a variable: letters, digits and _")
    for key, value in slurm.additional_parameters.items():
        name = key.replace("-", "_")
        hint = f"set slurm.{name}" if name in SlurmSection.model_fields else "it follows from the mesh and the run"
        if not re.fullmatch(r"[a-z][a-z0-9_]+", name):
            yield Problem("slurm.additional_parameters", key, "is no long option of sbatch, such as mail_type")
        elif any(own.startswith(name) for own in OWN_OPTIONS):  # sbatch takes a beginning for the whole
            yield Problem(f"slurm.additional_parameters.{key}", value, "is ours to set", hint)
        elif value is False or not isinstance(value, str | int | float):
            yield Problem(f"slurm.additional_parameters.{key}", value, "must be a string, a number or true")
    for path, text in _texts(slurm, "slurm"):
        if SECRET_NAME.fullmatch(path.rpartition(".")[2]) or SECRET.search(text):
            yield _secret(path)
        elif not (re.sub(r"[\t\n]", "", text) if path.startswith("slurm.setup") else text).isprintable():
            yield Problem(path, text, "holds a character that cannot be printed")


def _broken_rules(parts: Mapping[str, Any]) -> Problems:
    """What is wrong with these parts of a spec; a rule that reads a section which did not parse is left out."""
    checks = _check_mesh, _check_batch, _check_experts, _check_sequence, _check_dtype, _check_optimizer, _check_lr
    checks += _check_moe, _check_transport, _check_balance, _check_forced, _check_fp8, _check_fp8_tokens, _check_data
    checks += _check_validation, _check_checkpoint, _check_beginning, _check_host_memory
    checks += _check_guards, _check_profiling, _check_words, _check_slurm
    for check in checks:
        needed = inspect.signature(check).parameters
        if needed.keys() <= parts.keys():
            yield from check(*(parts[name] for name in needed))


_TAG = "tag:yaml.org,2002:"
_CORE = {  # how a plain scalar of each kind is written, in the order in which they are tried. YAML 1.2, section 10.3.2
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """Plain scalars by the core rules alone; a key that is no string, or given twice, is an error."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            mark = key.start_mark
            if key.tag != f"{_TAG}str":
                raise yaml.MarkedYAMLError(problem="a key must be a string: quote it", problem_mark=mark)
            if key.value in lines:
                twice = f"{key.value} is given twice, in lines {lines[key.value]} and {mark.line + 1}"
                raise yaml.MarkedYAMLError(problem=twice, problem_mark=mark)
            lines[key.value] = mark.line + 1
        return super().construct_mapping(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML version would take for something else than a string."""


_Loader.add_constructor(f"{_TAG}int", lambda _, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10))
for _kind, _pattern in _CORE.items():
    for _class in (_Loader, _Dumper):
        _rule = re.compile(f"^(?:{_pattern})$")
        _class.add_implicit_resolver(_TAG + _kind, _rule, None)  # pyright: ignore[reportUnknownMemberType]


def _read(text: str, at: str = "") -> object:
    """YAML text as plain data; `at` is its place in the spec. Raises SpecError with the line."""
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, KeyError) as error:
        mark = getattr(error, "problem_mark", None)
        said = [str(part) for name in ("context", "problem", "reason") if (part := getattr(error, name, None))]
        rule = f"cannot be read: {', '.join(said) or error}"
        raise SpecError([Problem(at, ABSENT, f"line {mark.line + 1}: {rule}" if mark else rule)]) from None


def _put(place: object, keys: Sequence[str], value: object, at: str = "") -> object:
    """A copy of `place` with `value` under `keys`: sections on the way are made, items of a list go by number."""
    if not keys:
        return value
    key, inside = keys[0], f"{at}.{keys[0]}".lstrip(".")
    if place is None or isinstance(place, dict):
        section = cast(dict[str, object], place or {})
        return {**section, key: _put(section.get(key), keys[1:], value, inside)}
    items = cast(list[object], place) if isinstance(place, list) else []
    if not key.isdecimal() or int(key) >= len(items):
        raise SpecError([Problem(at, ABSENT, f"has no {key}, so --set cannot reach {inside}")])
    return [_put(item, keys[1:], value, inside) if i == int(key) else item for i, item in enumerate(items)]


_SYNONYMS = {  # what others call our keys
    "learning_rate": "optimizer.lr",
    "batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "grad_clip": "training.max_grad_norm",
    "dp": "slurm.gpus_per_node (data parallel is what pp, cp and ep leave of the world)",
}
_WORDS = {  # what pydantic says, and what we say
    "^Value error, ": "",
    r"^\w+ should": "must",
    "a valid dictionary.*": "a mapping of keys to values",
    "a valid tuple": "a list",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "an instance of Path": "a path",
    "a valid": "a",
    "None": "null",
}


def _fields(owner: type[Strict], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key below a section, by its full path, and what it means, with the words that it takes if those are few."""
    for name, info in owner.model_fields.items():
        kinds = info.annotation, *get_args(info.annotation)  # itself, one of several, those of a list
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Strict)]
        yield prefix + name, _meaning([info])
        for kind in (kind for kind in below if kind is not ModelConfig):  # `read_model` adds those of the model
            yield from _fields(kind, f"{prefix}{name}.")
        if isinstance(tag := info.discriminator, str):  # the key that all kinds have, each with words of its own
            yield f"{prefix}{name}.{tag}", _meaning([kind.model_fields[tag] for kind in below])


def _meaning(same: Sequence[FieldInfo]) -> str:
    """What a key means, from its field in each kind of a mapping."""
    kinds = [info.annotation for info in same if get_origin(info.annotation) is Literal]
    words = [show(word) for kind in kinds for word in get_args(kind)]
    one_of = f"one of {', '.join(words)}" if len(words) > 1 else "".join(words)
    return ": ".join(filter(None, [one_of, same[0].description]))


def _suggest(path: str, known: Iterable[str]) -> str:
    """What a key that is not known may have meant: the nearest one here, else wherever there is one."""
    section, _, leaf = path.rpartition(".")
    places: dict[str, list[str]] = {word: [key] for word, key in _SYNONYMS.items()}
    for key in known:
        places.setdefault(key.rpartition(".")[2], []).append(key)
    near = difflib.get_close_matches(leaf.replace("-", "_").lower(), places, 1, 0.75)
    found = places[near[0]] if near else []
    here = [key for key in (found or known) if key.rpartition(".")[0] == section]
    if found:
        return f"did you mean {' or '.join(here or found)}?"
    return f"keys here: {', '.join(here)}" if here else ""


def _problem(detail: Any, prefix: str, known: Mapping[str, str]) -> Problem:
    """One of pydantic's errors in our words; `known` are all keys and what they mean, those of a list's items once."""
    path = (prefix + ".".join(map(str, detail["loc"]))).rstrip(".")
    value, kind, rule, hint = detail["input"], detail["type"], detail["msg"], ""
    for theirs, ours in _WORDS.items():
        rule = re.sub(theirs, ours, rule)
    if kind.startswith("union_tag"):  # of a mapping whose keys depend on one of them
        path += f".{detail['ctx']['discriminator'][1:-1]}"
        value, rule = detail["ctx"].get("tag", ABSENT), f"must be one of {detail['ctx'].get('expected_tags')}"
    key = re.sub(r"\.\d+\b", "", path)
    if kind in ("missing", "union_tag_not_found"):
        value, rule, hint = ABSENT, "missing", known.get(key, "")
    elif kind == "extra_forbidden":
        rule, hint = "is not a key", _suggest(key, known)
        if key in known:
            rule, hint = f"is a key of another kind of {path.split('.')[-2]}", ""
    elif kind == "string_pattern_mismatch":
        rule = f"is not of this form: {known[key]}"
    elif kind == "model_type" and "." not in path:
        hint = "leave the section out to take its defaults"
    elif kind == "string_type" and isinstance(value, int | float):
        hint = "quote it"
    elif path == "checkpoint.export_hf" and isinstance(value, bool):
        hint = f"true and false were its old spelling: write {'final' if value else 'null'}"
    elif kind in ("int_type", "float_type") and isinstance(value, str) and re.fullmatch(_CORE["float"], value):
        hint = "write it without quotes"
    return Problem(path, value, rule, hint)


def _read_file(path: Path, at: str = "") -> dict[str, object]:
    """A YAML file, or a config.json: JSON is YAML but for the tabs that it may be indented with."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        files = [file.name for file in path.parent.glob(f"*{path.suffix}") if file.is_file() and file != path]
        near = difflib.get_close_matches(path.name, files, 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else ""
        raise SpecError([Problem(at, str(path), f"cannot be read: {error}", hint)]) from None
    fields = _read(text.replace("\t", " ") if path.suffix == ".json" else text, at)
    if not isinstance(fields, dict):
        raise SpecError([Problem(at, str(path), "must hold a mapping of keys to values")])
    return cast(dict[str, object], fields)


def read_model(value: object, known: dict[str, str] | None = None) -> ModelSection:
    """The model section of plain data; adds the model's keys to `known`. Raises SpecError, paths from `model.` on."""
    known = {} if known is None else known
    if not isinstance(value, dict):
        raise SpecError([Problem("model", value, "must be a mapping with architecture and the model's HF fields")])
    fields = dict(cast(dict[str, object], value))
    architecture = fields.pop("architecture", None)
    if not isinstance(architecture, str):
        rule = "must be a string that names a folder of pithtrain/models, or the path of one outside the package"
        raise SpecError([Problem("model.architecture", architecture, rule)])
    if "/" in architecture:
        architecture = str(_absolute(architecture))
    owner = load_config(architecture)
    known.update(_fields(owner, "model."))
    file = fields.pop("config_file", None)
    content = {} if file is None else _read_file(Path(str(file)), "model.config_file")
    try:
        # what stands in the spec wins over the file
        fields = owner.canonical({**owner.canonical(content), **fields})
        read = {key: item for key, item in fields.items() if key not in owner.IGNORED}
        return ModelSection(architecture=architecture, config=owner.model_validate(read))
    except SpecError as error:  # rules over several fields, paths relative to the model
        problems = [replace(problem, path=f"model.{problem.path}") for problem in error.problems]
    except ValidationError as error:
        unions = [name for name, info in owner.model_fields.items() if info.discriminator]
        problems: list[Problem] = []
        for detail in error.errors(include_url=False):
            key, *rest = detail["loc"]  # below a union pydantic puts the kind: rope_parameters.yarn.factor
            problems.append(_problem({**detail, "loc": (key, *rest[key in unions :])}, "model.", known))
    raise SpecError(problems)


RUN_ONLY = {"profile", "time", "nodes", "exclude", "signal_delay_s", "max_requeues"}  # no facts of a place


def _on_profile(slurm: object, known: Mapping[str, str]) -> object:
    """The slurm section on top of its profile: mappings are joined key by key, lists come after the profile's."""
    section = cast("dict[str, Any]", slurm) if isinstance(slurm, dict) else {}
    name, at = section.get("profile"), "slurm.profile"
    if not isinstance(name, str):
        return cast("object", slurm)
    path = Path(name if "/" in name or name.endswith(".yaml") else f"slurm/{name}.yaml")
    if not path.expanduser().is_file():
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise SpecError([Problem(at, name, f"there is no file {_absolute(path)}", f"profiles there: {there}")])
    if section.keys() >= SlurmSection.model_fields.keys():
        rule = "changes nothing here: every key of slurm is given, as in the spec of a run directory"
        raise SpecError([Problem(at, name, rule, "set the keys themselves")])
    facts: dict[str, Any] = _read_file(path, at)
    rule = "belongs to a run and not to a place"
    problems = [Problem(f"slurm.{key}", facts[key], rule) for key in sorted(RUN_ONLY & facts.keys())]
    try:
        SlurmSection.model_validate(facts)
    except ValidationError as error:
        problems.extend(_problem(detail, "slurm.", known) for detail in error.errors(include_url=False))
    if problems:
        raise SpecError([replace(problem, path=f"{path}: {problem.path}") for problem in problems])
    joined = {**facts, **section, "profile": None}
    for key, mine in section.items():
        if isinstance(mine, dict | list) and type(facts.get(key)) is type(cast("object", mine)):
            joined[key] = facts[key] | mine if isinstance(mine, dict) else facts[key] + mine
    return joined


def _masked(problem: Problem) -> Problem:
    """A problem without its value where that may be a secret: errors end in terminals, logs and tickets."""
    said = f"{problem.path.rpartition('.')[2]} {problem.value}"
    secret = SECRET_NAME.search(said) or SECRET.search(said)
    return replace(problem, value="...") if secret and not problem.path.startswith("model.") else problem


def from_dict(fields: Mapping[str, object]) -> RunSpec:
    """The spec of plain data as YAML gives it. Raises SpecError with every problem found."""
    known = dict(_fields(RunSpec))
    known["model.config_file"] = known.pop("model.config")
    made: dict[str, object] = {"model": None, "slurm": None}
    unmade: set[tuple[str]] = set()
    problems: list[Problem] = []
    parts: dict[str, Any] = {}
    for name, make in (("model", read_model), ("slurm", _on_profile)):
        try:
            made[name] = make(fields.get(name, {}), known)
        except SpecError as error:
            problems.extend(error.problems)
            unmade.add((name,))
    try:
        spec = RunSpec.model_validate({**fields, **made}, context=parts)
    except ValidationError as error:
        # a section that could not be made has said why
        details = [detail for detail in error.errors(include_url=False) if detail["loc"] not in unmade]
        problems.extend(_problem(detail, "", known) for detail in details)
        raise SpecError([*problems, *_broken_rules(parts)]) from None
    schedule, last = spec.lr_scheduler, spec.training.max_steps
    if schedule.type in ("linear", "cosine") and schedule.decay_steps is None:
        # written out, so that raising max_steps at a resume does not bend the schedule behind the run's back
        spec = spec.model_copy(update={"lr_scheduler": schedule.model_copy(update={"decay_steps": last})})
    return spec


def load(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Reads a run from a YAML file and `--set` texts `a.b=c`, which win. Raises SpecError with every problem found."""
    try:
        fields = _read_file(path)
        keys = [override.partition("=")[0].strip() for override in overrides]
        for key, override in zip(keys, overrides, strict=True):
            if "=" not in override or not all(key.split(".")):
                rule = "must be key=value with a dotted key, as in optimizer.lr=1e-4"
                raise SpecError([Problem("--set", override, rule)])
            if keys.count(key) > 1:
                raise SpecError([Problem(key, ABSENT, "given twice by --set")])
            fields = _put(fields, key.split("."), _read(override.partition("=")[2], key))
        return from_dict(cast(dict[str, object], fields))
    except SpecError as error:
        raise SpecError([*map(_masked, error.problems)], str(path)) from None
