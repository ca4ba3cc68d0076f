"""A run as frozen data: YAML and `--set a.b=c` in, a `RunSpec` out, or every mistake at once.

Why one strict spec. A run that trains on a default because a key was mistyped costs days, so nothing is dropped, no
string becomes a number, and what cannot work is refused here, on a login node, in 0.2 s and without torch.

- **Text.** YAML 1.2's core rules: `1e-4` is a float, `off` and `12:30` are strings, `true` is no number. A key given
  twice is refused with both lines. Whole-number fields take `1e3` as well. `--set` reads its value by the same rules.
- **Types.** pydantic, frozen and strict, unknown keys refused with the nearest valid one or the section it belongs to.
  Relative paths are taken against the caller's directory and stored absolute.
- **Arithmetic.** `CHECKS` holds the rules between sections: each is a function from the sections it names to a list of
  problems, so that a mistake in one section does not hide those in others. A check never changes what it checks.
- **Not built yet.** Keys of features to come exist, with their "off" default; any other value is refused (`NOT_BUILT`).

Worked example, a mesh of four ranks with 16 sequences a step, one per micro-batch:

    world = slurm.nodes 1 x slurm.gpus_per_node 4 = pp 2 x dp 1 x cp 1 x ep 2
    N     = global_batch_size 16 / (micro_batch_size 1 x dp 1 x ep 2) = 8 micro-batches, at least 2 pp = 4

    spec = load(Path("configs/tiny.yaml"), ["training.max_steps=20"])
    spec.mesh, spec.num_micro_batches      # Mesh(pp=2, dp=1, cp=1, ep=2), 8
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    model_serializer,
    model_validator,
)

from pithtrain.errors import ABSENT, Problem, SpecError, show
from pithtrain.models.contract import Integer, ModelConfig, Positive, Strict, load_config, load_ignored, only

Count = Annotated[Integer, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


def _absolute(value: object) -> object:
    return Path(os.path.abspath(os.path.expanduser(value))) if isinstance(value, str | Path) and str(value) else value


Location = Annotated[Path, BeforeValidator(_absolute)]
"""A path; a relative one is taken against the caller's directory."""


def _text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


# ---------------------------------------------------------------------------------------------------- the sections


class ModelSection(Strict):
    """Which model, and its numbers. In YAML the HF fields stand beside `architecture`, or in `config_file`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    architecture: str = Field(description="a folder of pithtrain/models, or the path of one outside the package")
    config: SkipValidation[ModelConfig] = Field(description="an instance of that folder's class Config")

    @model_serializer
    def _inline(self) -> dict[str, object]:
        return {"architecture": self.architecture, **cast(BaseModel, self.config).model_dump(mode="json")}


class ParallelismSection(Strict):
    """How the world is cut; data parallel is what is left of it."""

    pipeline_parallel_size: Positive = Field(default=1, description="pp, ranks of a pipeline, two stages each")
    expert_parallel_size: Positive = Field(default=1, description="ep, ranks that share the experts of a layer")
    context_parallel_size: Positive = Field(default=1, description="cp, ranks that share a sequence")


class TrainingSection(Strict):
    """The step."""

    max_steps: Positive = Field(description="optimizer steps; may be raised at a resume")
    micro_batch_size: Positive = Field(description="sequences of one forward on one rank")
    global_batch_size: Positive = Field(description="sequences of one step, over all ranks")
    sequence_length: Positive = Field(description="tokens of a sequence")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="global norm to clip at; null does not clip")
    seed: Count = Field(default=0, lt=2**63, description="of the initial weights and the data order")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        default="auto", description="auto: bfloat16 on cuda, float32 on cpu; float64 on cpu is for proofs"
    )
    z_loss_coef: float = Field(default=0.0, ge=0, description="of the LM head's log partition function squared")
    deterministic: bool = Field(default=False, description="bitwise reruns on a GPU too, at the cost of slower kernels")


class OptimizerSection(Strict):
    """The update."""

    type: Literal["adamw", "muon"] = Field(default="adamw", description="muon: matrices only, the rest stays adamw")
    lr: float = Field(gt=0, description="peak learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="decay of the first and the second moment"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="per step and unit of lr, on matrices only")
    moments_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="type of the two moments")


class LrSchedulerSection(Strict):
    """The learning rate over steps counted from 1. linear and cosine reach min_lr at decay_steps, warm-up included;
    wsd falls to it over its last decay_steps."""

    type: Literal["constant", "linear", "cosine", "wsd"] = Field(default="constant", description="shape after warm-up")
    warmup_steps: Count = Field(default=0, description="steps of linear rise to lr")
    decay_steps: Positive | None = Field(
        default=None,
        description="linear, cosine: step that reaches min_lr, default max_steps; wsd: length of the decay",
    )
    min_lr: float = Field(default=0.0, ge=0, description="where the decay ends")


class MoeSection(Strict):
    """Routing: balance, and how tokens travel to experts."""

    load_balance_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = Field(
        default="none", description="set of tokens over which expert shares are counted"
    )
    aux_loss_coef: float = Field(default=0.0, ge=0, description="of a loss that is 1 per layer when balanced")
    z_loss_coef: float = Field(default=0.0, ge=0, description="of the router's log partition function squared")
    bias_update_rate: float = Field(default=0.0, ge=0, description="per step, of the selection bias")
    force_load_balance: bool = Field(default=False, description="tokens go round robin: for speed measurements only")
    dispatch: Literal["dedup", "plain"] = Field(
        default="dedup", description="a token travels once per rank; plain: once per expert, for comparison"
    )
    transport: Literal["nccl", "symmetric"] = Field(default="nccl", description="symmetric: NVLink copy engines")


class Fp8Section(Strict):
    """8-bit matrix products."""

    enabled: bool = Field(default=False, description="off on Hopper unless measured to be faster")
    recipe: Literal["blockwise", "rowwise", "mxfp8"] = Field(default="blockwise", description="what shares a scale")


class CompileSection(Strict):
    """torch.compile of the regions between communication edges."""

    enabled: bool = Field(default=False, description="costs minutes at the first step")
    mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(default="default", description="torch's modes")


class ActivationCheckpointSection(Strict):
    """Recomputing instead of keeping activations."""

    mode: Literal["none", "selective", "full"] = Field(default="none", description="how much is computed again")


class DataSource(Strict):
    """One corpus of token shards."""

    path: Location = Field(description="folder of shards written by `pithtrain tokenize`")
    weight: float = Field(default=1.0, gt=0, description="share of the samples; the shares sum to 1")


Sources = Annotated[tuple[DataSource, ...], Field(strict=False)]


class DataSection(Strict):
    """What is read."""

    sources: Sources = Field(description="corpora to draw from")
    tokenizer: Location | None = Field(default=None, description="tokenizer.json the corpus must have been made with")
    document_mask: bool = Field(default=False, description="tokens see their own document only")
    shuffle: bool = Field(default=True, description="a new order each epoch, a function of (seed, epoch)")
    epochs: Positive = Field(default=1, description="passes over the corpus; a run that needs more is refused")
    repeat: bool = Field(default=False, description="as many passes as max_steps needs, instead of epochs")


class ValidationSection(Strict):
    """Loss on held-out text."""

    interval: Positive | None = Field(default=None, description="steps between validations; null: never")
    steps: Positive | None = Field(default=None, description="batches of one validation")
    sources: Sources = Field(default=(), description="corpora, each reported apart")


class CheckpointSection(Strict):
    """Full state on disk. The last step of a run is always saved."""

    interval: Positive | None = Field(default=None, description="steps between saves; null: the last step alone")
    keep_last: Positive | None = Field(default=None, description="newest checkpoints kept; null: all")
    keep_interval: Positive | None = Field(default=None, description="steps whose multiples are kept for good")
    async_save: bool = Field(default=False, description="write while training goes on")
    export_hf: bool = Field(default=False, description="the last checkpoint in Hugging Face form too")


class WandbSection(Strict):
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = Field(default="disabled", description="a missing login only warns")
    project: Text = Field(default="pithtrain", description="W&B project")
    entity: Text | None = Field(default=None, description="W&B team; null: the login's own")
    group: Text | None = Field(default=None, description="joins runs on a W&B page")
    tags: tuple[Text, ...] = Field(default=(), strict=False, description="W&B tags")
    name: Text | None = Field(default=None, description="null: the run's name")


class LoggingSection(Strict):
    """What is told while it runs."""

    interval: Positive = Field(default=1, description="steps between lines")
    wandb: WandbSection = Field(default=WandbSection(), description="Weights & Biases")


class GuardsSection(Strict):
    """When a number goes wrong."""

    non_finite: Literal["stop", "skip"] = Field(default="stop", description="what a NaN or infinite loss or norm does")
    loss_spike_sigma: float | None = Field(default=None, gt=0, description="standard deviations; null: no guard")
    max_consecutive_skips: Positive = Field(default=10, description="skipped steps in a row after which the run stops")


class ProfilingSection(Strict):
    """A window of steps under a profiler."""

    torch: bool = Field(default=False, description="torch.profiler traces")
    nsys: bool = Field(default=False, description="ranges for Nsight Systems")
    memory_snapshot: bool = Field(default=False, description="allocator history")
    start_step: Positive | None = Field(default=None, description="first step of the window")
    end_step: Positive | None = Field(default=None, description="last step of the window")
    ranks: tuple[Count, ...] = Field(default=(0,), strict=False, description="ranks that profile")


class DistributedSection(Strict):
    """How long a collective may take."""

    init_timeout_s: Positive = Field(default=600, description="seconds; longer than the slowest node's start")
    train_timeout_s: Positive = Field(default=900, description="seconds; longer than the slowest first compile")
    save_timeout_s: Positive = Field(default=1800, description="seconds; longer than the slowest checkpoint")
    flight_recorder: bool = Field(default=False, description="the last collectives of each rank, written on a time-out")


_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d)|(?P<minutes>\d+)")


def _minutes(time: str) -> int:
    match = cast(re.Match[str], _TIME.fullmatch(time))
    if match["minutes"]:
        return int(match["minutes"])
    seconds = (int(match["d"] or 0) * 24 + int(match["h"])) * 3600 + int(match["m"]) * 60 + int(match["s"])
    return -(-seconds // 60)


def _check_time(time: str) -> str:
    if not _TIME.fullmatch(time) or _minutes(time) == 0:
        raise ValueError("must be [D-]HH:MM:SS, as in 1-12:00:00, or whole minutes above 0, as in 90")
    return time


def _check_mem(mem: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?", mem):
        raise ValueError("must be a whole number with K, M, G or T, as in 64G; 0 is all of the node")
    return mem


def _check_scalar(value: object) -> object:
    if not isinstance(value, str | int | float):
        raise ValueError("must be a string, a number, true or false")
    return value


class SlurmSection(Strict):
    """What is asked of Slurm, under sbatch's long option names; without Slurm, gpus_per_node processes run here."""

    profile: Text | None = Field(default=None, description="a file of slurm/: facts of a place")
    account: Text | None = Field(default=None, description="who pays")
    partition: Text | None = Field(default=None, description="null: the cluster's default")
    qos: Text | None = Field(default=None, description="quality of service")
    time: Annotated[str, BeforeValidator(_text), AfterValidator(_check_time)] | None = Field(
        default=None, description="[D-]HH:MM:SS or whole minutes; null: the partition's default"
    )
    nodes: Positive = Field(default=1, description="machines")
    gpus_per_node: Positive = Field(default=1, description="ranks of a machine, one per GPU; processes on a CPU")
    cpus_per_task: Positive | None = Field(default=None, description="cores of a rank; null: the cluster's default")
    mem: Annotated[str, BeforeValidator(_text), AfterValidator(_check_mem)] = Field(
        default="0", description="memory of a node; 0: all of it. Always sent: a cluster's default may block others"
    )
    constraint: Text | None = Field(default=None, description="features a node must have")
    exclude: Text | None = Field(default=None, description="nodes not to use")
    exclusive: bool = Field(default=False, description="no other job on our nodes")
    signal_delay_s: Positive = Field(default=300, description="seconds before the time limit at which the run saves")
    max_requeues: Count = Field(default=0, description="restarts after a crash")
    setup: tuple[str, ...] = Field(default=(), strict=False, description="shell lines before the run")
    env: dict[str, str] = Field(default={}, description="environment of the ranks")
    additional_parameters: dict[str, Annotated[Any, AfterValidator(_check_scalar)]] = Field(
        default={}, description="other sbatch options, with underscores"
    )
    srun_args: tuple[str, ...] = Field(default=(), strict=False, description="further arguments of srun")

    @property
    def time_minutes(self) -> int | None:
        """The time limit in whole minutes, rounded up; None is the partition's default."""
        return None if self.time is None else _minutes(self.time)


# -------------------------------------------------------------------------------------------------- mesh and spec


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


def _resume(value: object) -> object:
    return value if value in ("auto", "never") or not isinstance(value, str) or not value else str(_absolute(value))


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError("names a folder: at most 100 letters, digits, '.', '_' or '-', the first a letter or digit")
    return name


class RunHead(Strict):
    """The keys of a run that stand in no section."""

    version: Annotated[Integer, only(1, "there is one format")] = Field(default=1, description="of this format")
    name: Annotated[str, AfterValidator(_check_name)] = Field(description="the run's directory is output_dir/name")
    output_dir: Location = Field(default=Path("runs"), description="where run directories are made")
    init_from: Location | None = Field(default=None, description="checkpoint whose weights alone are taken")
    resume: Annotated[Text, BeforeValidator(_resume)] = Field(
        default="auto", description="auto: this run's newest complete checkpoint if any; never; or the path of one"
    )


class RunSpec(RunHead):
    """A run. Made by `load` or `from_dict`; one that breaks a rule of `CHECKS` cannot be made (SpecError)."""

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [problem for _, check in CHECKS for problem in check(self)]
        if problems:
            raise SpecError(problems)
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks asked for."""
        return self.slurm.nodes * self.slurm.gpus_per_node

    @property
    def mesh(self) -> Mesh:
        """The ranks as a grid."""
        pp, cp = self.parallelism.pipeline_parallel_size, self.parallelism.context_parallel_size
        ep = self.parallelism.expert_parallel_size
        return Mesh(pp, self.world_size // (pp * cp * ep), cp, ep)

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


# ------------------------------------------------------------------------------------------- rules between sections


def _check_mesh(spec: RunSpec) -> Iterator[Problem]:
    pp, cp = spec.parallelism.pipeline_parallel_size, spec.parallelism.context_parallel_size
    ep, world = spec.parallelism.expert_parallel_size, spec.world_size
    if world % (pp * cp * ep):
        rule = (
            f"world = slurm.nodes {spec.slurm.nodes} x slurm.gpus_per_node {spec.slurm.gpus_per_node} = {world} must "
            f"equal pp {pp} x dp x cp {cp} x ep {ep} with a whole dp >= 1, but {world} / {pp * cp * ep} is not whole"
        )
        yield Problem("parallelism", ABSENT, rule, f"ask Slurm for a multiple of {pp * cp * ep} ranks, or cut less")


def _check_batch(spec: RunSpec) -> Iterator[Problem]:
    mesh, training = spec.mesh, spec.training
    if mesh.size != spec.world_size:
        return  # said by _check_mesh
    batch, micro = training.global_batch_size, training.micro_batch_size
    per_turn = micro * mesh.dp * mesh.ep
    if batch % per_turn:
        rule = (
            f"must be a multiple of micro_batch_size {micro} x dp {mesh.dp} x ep {mesh.ep} = {per_turn}: "
            "every data rank takes the same number of micro-batches"
        )
        turns = {max(2 * mesh.pp, batch // per_turn), max(2 * mesh.pp, batch // per_turn + 1)}
        near = sorted(turn * per_turn for turn in turns)
        yield Problem("training.global_batch_size", batch, rule, f"nearest: {' or '.join(map(str, near))}")
    elif batch // per_turn < 2 * mesh.pp:
        rule = (
            f"gives N = {batch} / (micro_batch_size {micro} x dp {mesh.dp} x ep {mesh.ep}) = {batch // per_turn} "
            f"micro-batches, and DualPipeV with pp = {mesh.pp} needs N >= 2 pp = {2 * mesh.pp}"
        )
        yield Problem("training.global_batch_size", batch, rule, f"at least {2 * mesh.pp * per_turn} works")


def _check_experts(spec: RunSpec) -> Iterator[Problem]:
    experts, ep = spec.model.config.num_experts, spec.parallelism.expert_parallel_size
    if experts % ep:
        rule = f"must divide model.num_experts {experts}: every rank holds the same number of experts"
        fits = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
        yield Problem("parallelism.expert_parallel_size", ep, rule, f"{fits} work")


def _check_sequence(spec: RunSpec) -> Iterator[Problem]:
    longest = spec.model.config.max_position_embeddings
    if longest is not None and spec.training.sequence_length > longest:
        rule = f"must be at most model.max_position_embeddings = {longest}"
        yield Problem("training.sequence_length", spec.training.sequence_length, rule)


def _check_dtype(spec: RunSpec) -> Iterator[Problem]:
    if spec.training.compute_dtype == "float64" and spec.training.device != "cpu":
        rule = f"is for proofs on the CPU, and training.device is {spec.training.device}"
        yield Problem("training.compute_dtype", "float64", rule, "set training.device=cpu")


def _check_lr(spec: RunSpec) -> Iterator[Problem]:
    schedule, last = spec.lr_scheduler, spec.training.max_steps
    warmup, decay, min_lr = schedule.warmup_steps, schedule.decay_steps, schedule.min_lr
    at = "lr_scheduler"
    if min_lr > spec.optimizer.lr:
        yield Problem(f"{at}.min_lr", min_lr, f"must be at most optimizer.lr = {spec.optimizer.lr}")
    match schedule.type:
        case "constant":
            if decay is not None:
                yield Problem(f"{at}.decay_steps", decay, "has no effect with type: constant", "set it to null")
            if min_lr:
                yield Problem(f"{at}.min_lr", min_lr, "has no effect with type: constant", "set it to 0")
            if warmup > last:
                yield Problem(f"{at}.warmup_steps", warmup, f"must be at most training.max_steps = {last}")
        case "linear" | "cosine":
            name, end = ("decay_steps", decay) if decay is not None else ("training.max_steps", last)
            if warmup >= end:
                rule = f"must be below {name} = {end}, which counts the warm-up too"
                yield Problem(f"{at}.warmup_steps", warmup, rule)
        case "wsd":
            if decay is None:
                yield Problem(f"{at}.decay_steps", None, "type: wsd needs the length of its last decay, in steps")
            elif warmup + decay > last:
                rule = f"warmup_steps {warmup} + decay_steps {decay} must be at most training.max_steps = {last}"
                yield Problem(f"{at}.decay_steps", decay, rule)


def _check_moe(spec: RunSpec) -> Iterator[Problem]:
    kind, coef = spec.moe.load_balance_type, spec.moe.aux_loss_coef
    if kind == "none" and coef:
        rule = "has no effect with load_balance_type: none"
        yield Problem("moe.aux_loss_coef", coef, rule, "set moe.load_balance_type=aux_loss, or the coefficient to 0")
    elif kind != "none" and not coef:
        rule = f"load_balance_type: {kind} needs a coefficient above 0"
        yield Problem("moe.aux_loss_coef", coef, rule, "0.001 is usual")


def _check_data(spec: RunSpec) -> Iterator[Problem]:
    sources = spec.data.sources
    total = sum(source.weight for source in sources)
    if not sources:
        yield Problem("data.sources", [], "must hold a corpus", "give [{path: ...}]")
    elif abs(total - 1) > 1e-6:
        yield Problem("data.sources", [source.weight for source in sources], f"the weights sum to {total:g}, not to 1")
    if len(sources) > 1:
        yield Problem("data.sources", len(sources), "more than one source is not implemented yet")
    if spec.data.repeat and spec.data.epochs != 1:
        rule = "has no effect with data.repeat: true, which takes as many passes as max_steps needs"
        yield Problem("data.epochs", spec.data.epochs, rule, "give one of the two")


OWN_ENVIRONMENT = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}
OWN_OPTIONS = set(SlurmSection.model_fields) | {"job_name", "ntasks", "ntasks_per_node", "signal", "output", "error"}


def _check_slurm(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.slurm
    minutes = slurm.time_minutes
    if minutes is not None and 2 * slurm.signal_delay_s >= 60 * minutes:
        rule = f"must be below half of slurm.time = {slurm.time}, which is {60 * minutes} s, to train more than save"
        yield Problem("slurm.signal_delay_s", slurm.signal_delay_s, rule, f"at most {30 * minutes - 1}")
    for key, value in slurm.env.items():
        if key in OWN_ENVIRONMENT or key.startswith("SLURM_"):
            yield Problem(f"slurm.env.{key}", value, "is set by pithtrain or Slurm for every rank")
    for key, value in slurm.additional_parameters.items():
        name = key.replace("-", "_")
        if name in OWN_OPTIONS:
            hint = f"set slurm.{name}" if name in SlurmSection.model_fields else "it follows from the mesh and the name"
            yield Problem(f"slurm.additional_parameters.{key}", value, "is ours to set", hint)


NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "init_from": (),
    "parallelism.context_parallel_size": (),
    "training.z_loss_coef": (),
    "optimizer.type": (),
    "optimizer.moments_dtype": (),
    "moe.load_balance_type": ("aux_loss",),
    "moe.z_loss_coef": (),
    "moe.bias_update_rate": (),
    "moe.force_load_balance": (),
    "moe.transport": (),
    "fp8": (),
    "compile": (),
    "activation_checkpoint": (),
    "data.document_mask": (),
    "validation": (),
    "checkpoint.keep_last": (),
    "checkpoint.keep_interval": (),
    "checkpoint.async_save": (),
    "checkpoint.export_hf": (),
    "guards": (),
    "profiling": (),
    "distributed.flight_recorder": (),
    "slurm.profile": (),
    "slurm.max_requeues": (),
}
"""Keys, or whole sections, of features to come, and the values beside their default that do work."""


def _check_built(spec: RunSpec) -> Iterator[Problem]:
    for place, also in NOT_BUILT.items():
        section, _, key = place.partition(".")
        if place in RunHead.model_fields:
            owner, section, key = spec, "", place
        elif section in spec.__dict__:
            owner = cast(Strict, getattr(spec, section))
        else:
            continue  # it did not parse, and has its own problem
        for name in [key] if key else type(owner).model_fields:
            value, default = getattr(owner, name, None), type(owner).model_fields[name].default
            if value != default and value not in also:
                hint = f"use {' or '.join(show(good) for good in (default, *also))}"
                yield Problem(f"{section}.{name}".lstrip("."), value, "is not implemented yet", hint)


CHECKS: tuple[tuple[tuple[str, ...], Callable[[RunSpec], Iterator[Problem]]], ...] = (
    (("parallelism", "slurm"), _check_mesh),
    (("parallelism", "slurm", "training"), _check_batch),
    (("parallelism", "model"), _check_experts),
    (("training", "model"), _check_sequence),
    (("training",), _check_dtype),
    (("lr_scheduler", "training", "optimizer"), _check_lr),
    (("moe",), _check_moe),
    (("data",), _check_data),
    (("slurm",), _check_slurm),
    ((), _check_built),
)
"""Each rule and the sections that it reads."""


# -------------------------------------------------------------------------------------------------- text to fields

_CORE = {  # tag: (what a plain scalar of it looks like, its first characters). YAML 1.2, section 10.3.2
    "null": (r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    "int": (r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+.0123456789"),
    ),
}
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes nodes; tags of plain scalars by the core rules, whose order (int before float) matters."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML version would take for something else than a string."""

    yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012


for _name, (_pattern, _first) in _CORE.items():
    for _yaml_class in (_Loader, _Dumper):
        _rule = re.compile(f"^{_pattern}$")
        _yaml_class.add_implicit_resolver(_TAG + _name, _rule, _first)  # pyright: ignore[reportUnknownMemberType]


def _scalar(node: yaml.ScalarNode) -> object:
    text, tag = node.value, node.tag.removeprefix(_TAG)
    match tag:
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            raise ValueError(f"the tag {node.tag} is not read here")


def _convert(node: yaml.Node, path: tuple[str, ...], above: tuple[yaml.Node, ...], problems: list[Problem]) -> object:
    """A node as plain data, nothing shared between two places; appends what is wrong to `problems`."""
    line = node.start_mark.line + 1
    if node in above:
        problems.append(Problem(".".join(path), ABSENT, f"line {line}: an alias points at what contains it"))
        return None
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        return [_convert(item, (*path, str(i)), above, problems) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            at, key_line = ".".join((*path, key)), key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                problems.append(Problem(at, ABSENT, f"line {key_line}: a key must be a string", "quote it"))
            elif key in seen:
                problems.append(Problem(at, ABSENT, f"given twice, in lines {seen[key]} and {key_line}"))
            else:
                seen[key] = key_line
                result[key] = _convert(value_node, (*path, key), above, problems)
        return result
    try:
        return _scalar(cast(yaml.ScalarNode, node))
    except ValueError as error:
        problems.append(Problem(".".join(path), ABSENT, f"line {line}: {error}"))
        return None


def _read(text: str, path: tuple[str, ...], problems: list[Problem]) -> object:
    """YAML text as plain data, by the core rules."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        said = (getattr(error, "context", None), getattr(error, "problem", None), getattr(error, "reason", None))
        what = ", ".join(str(part) for part in said if part)
        problems.append(Problem(".".join(path), ABSENT, f"{where}this is not YAML: {what}"))
        return None
    return None if node is None else _convert(node, path, (), problems)


def _set(fields: dict[str, object], override: str, problems: list[Problem]) -> None:
    """Puts one `a.b=c` into `fields`, in place; sections on the way are made, items of a list go by number."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        problems.append(Problem("--set", override, "must be key=value with a dotted key, as in optimizer.lr=1e-4"))
        return
    value = _read(text, tuple(keys), problems)
    place: object = fields
    for depth, key in enumerate(keys):
        last, at = depth == len(keys) - 1, ".".join(keys[:depth])
        if isinstance(place, list):
            items = cast(list[object], place)
            if not key.isdecimal() or int(key) >= len(items):
                problems.append(Problem(at, ABSENT, f"is a list of {len(items)}, and --set {path} names no item of it"))
                return
            if last:
                items[int(key)] = value
            place = items[int(key)]
        elif isinstance(place, dict):
            section = cast("dict[str, object]", place)  # pyright: ignore[reportUnnecessaryCast]
            if last:
                section[key] = value
            elif section.get(key) is None:
                section[key] = {}
            place = section[key]
        else:
            problems.append(Problem(at, place, f"is no section, so --set {path} has no place in it"))
            return


# ---------------------------------------------------------------------------------------------------- fields to spec

_SYNONYMS = {  # what others call our keys
    "learning_rate": "optimizer.lr",
    "steps": "training.max_steps",
    "train_steps": "training.max_steps",
    "batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "seq_len": "training.sequence_length",
    "grad_clip": "training.max_grad_norm",
    "pp": "parallelism.pipeline_parallel_size",
    "ep": "parallelism.expert_parallel_size",
    "cp": "parallelism.context_parallel_size",
    "dp": "slurm.gpus_per_node (data parallel is what pp, cp and ep leave of the world)",
    "data_parallel_size": "slurm.gpus_per_node (data parallel is what pp, cp and ep leave of the world)",
    "top_k": "model.num_experts_per_tok",
}


def _keys(owner: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in owner.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _keys(info.annotation, f"{prefix}{name}.")


def _suggest(path: str, model: type[BaseModel] | None) -> str:
    """What a key that is not known may have meant."""
    section, _, leaf = path.rpartition(".")
    leaf = leaf.replace("-", "_").lower()
    keys = [key for key in _keys(RunSpec) if key != "model.config"]
    keys += ["model.config_file", *_keys(model, "model.")] if model is not None else ["model.config_file"]
    targets = [(key.rpartition(".")[2], key) for key in keys] + list(_SYNONYMS.items())
    scores: dict[str, float] = {}
    for word, key in targets:
        near = difflib.SequenceMatcher(None, leaf, word).ratio()
        scores[key] = max(scores.get(key, 0), near + (0.1 if key.rpartition(".")[0] == section else 0))
    best = max(scores.values())
    if best > 0.75:
        return f"did you mean {' or '.join(key for key, score in scores.items() if score == best)}?"
    here = [key for key in keys if key.rpartition(".")[0] == section]
    return f"keys here: {', '.join(key.rpartition('.')[2] for key in here)}" if here else ""


def _parse(
    owner: type[BaseModel], fields: object, prefix: str, model: type[BaseModel] | None, problems: list[Problem]
) -> BaseModel | None:
    """`fields` as an `owner`; what is wrong goes to `problems`. With unknown keys alone wrong, those are left out of
    the result, so that the rules between sections are still looked at; None when more is."""
    try:
        return owner.model_validate(fields)
    except SpecError as error:  # rules over several fields, paths relative to the owner
        problems.extend(Problem(f"{prefix}.{p.path}", p.value, p.rule, p.hint) for p in error.problems)
    except ValidationError as error:
        problems.extend(_problems(error, prefix, owner, model))
        details = error.errors(include_url=False)
        unknown = {detail["loc"][0] for detail in details if detail["type"] == "extra_forbidden"}
        if isinstance(fields, dict) and all(d["type"] == "extra_forbidden" and len(d["loc"]) == 1 for d in details):
            known = {key: value for key, value in cast(dict[str, object], fields).items() if key not in unknown}
            return _parse(owner, known, prefix, model, problems)
    return None


def _problems(
    error: ValidationError, prefix: str, owner: type[BaseModel], model: type[BaseModel] | None
) -> Iterator[Problem]:
    """pydantic's errors in our words."""
    for detail in error.errors(include_url=False):
        path = ".".join([*([prefix] if prefix else []), *map(str, detail["loc"])])
        value, kind = detail["input"], detail["type"]
        if kind == "missing":
            info = owner.model_fields.get(str(detail["loc"][0])) if len(detail["loc"]) == 1 else None
            yield Problem(path, ABSENT, f"missing ({info.description})" if info is not None else "missing")
        elif kind == "extra_forbidden":
            yield Problem(path, value, "is not a key", _suggest(path, model))
        elif kind == "model_type" or kind == "dict_type":
            hint = "" if detail["loc"] else "leave the section out to take its defaults"
            yield Problem(path, value, "must be a mapping of keys to values", hint)
        elif kind in ("int_type", "float_type", "int_from_float"):
            rule = "must be a number" if kind == "float_type" else "must be a whole number"
            yield Problem(path, value, rule, "write it without quotes" if _is_number(value) else "")
        elif kind == "literal_error":
            expected = detail.get("ctx", {}).get("expected", "")
            close = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", expected), 1)
            yield Problem(path, value, f"must be {expected}", f"did you mean {close[0]}?" if close else "")
        else:
            message = detail["msg"].removeprefix("Value error, ")
            rule = re.sub(r"^(Input|String|Value|Tuple|Dictionary) should ", "must ", message)
            for theirs, ours in (("a valid tuple", "a list"), ("a valid boolean", "true or false"), ("None", "null")):
                rule = rule.replace(theirs, ours)
            quote = kind == "string_type" and isinstance(value, int | float)
            yield Problem(path, value, rule.replace("valid ", ""), "quote it" if quote else "")


def _is_number(value: object) -> bool:
    return isinstance(value, str) and isinstance(_read(value, (), []), int | float)


def _read_config_file(value: object, problems: list[Problem]) -> dict[str, object]:
    at = "model.config_file"
    if not isinstance(value, str) or not value:
        problems.append(Problem(at, value, "must be the path of a Hugging Face config.json"))
        return {}
    path = cast(Path, _absolute(value))

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(items)
        if len(fields) < len(items):
            raise ValueError(f"a key is given twice among {', '.join(key for key, _ in items)}")
        return fields

    try:
        fields: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=pairs)
    except (OSError, ValueError) as error:
        problems.append(Problem(at, value, f"cannot be read: {error}"))
        return {}
    if not isinstance(fields, dict):
        problems.append(Problem(at, value, "must hold a mapping of fields"))
        return {}
    return cast(dict[str, object], fields)


def _read_model(value: object, problems: list[Problem]) -> tuple[ModelSection | None, type[BaseModel] | None]:
    """The model section and the class of its fields; what is wrong goes to `problems`."""
    if not isinstance(value, dict):
        problems.append(Problem("model", value, "must be a mapping with architecture and the model's HF fields"))
        return None, None
    fields = dict(cast(dict[str, object], value))
    architecture = fields.pop("architecture", ABSENT)
    if not isinstance(architecture, str) or not architecture:
        rule = "missing" if architecture == ABSENT else "must be a string"
        problems.append(Problem("model.architecture", architecture, rule, "it names a folder of pithtrain/models"))
        return None, None
    if "/" in architecture:
        architecture = str(_absolute(architecture))
    try:
        config_class = cast(type[BaseModel], load_config(architecture))
        ignored = load_ignored(architecture)
    except SpecError as error:
        problems.extend(error.problems)
        return None, None
    if "config_file" in fields:  # what stands in the spec wins over the file
        from_file = _read_config_file(fields.pop("config_file"), problems)
        fields = {**cast(type[ModelConfig], config_class).canonical(from_file), **fields}
    known = {key: item for key, item in fields.items() if key not in ignored}
    config = _parse(config_class, known, "model", config_class, problems)
    if config is None:
        return None, config_class
    return ModelSection(architecture=architecture, config=cast(ModelConfig, config)), config_class


def from_dict(fields: Mapping[str, object], source: str = "spec") -> RunSpec:
    """The spec of plain data as YAML gives it. Raises SpecError with every problem found; `source` heads its text."""
    problems: list[Problem] = []
    model, model_class = _read_model(fields.get("model", {}), problems)
    parts: dict[str, Any] = {"model": model} if model is not None else {}
    sections = {name: info for name, info in RunSpec.model_fields.items() if name not in RunHead.model_fields}
    head = _parse(
        RunHead, {key: item for key, item in fields.items() if key not in sections}, "", model_class, problems
    )
    parts.update(dict(head) if head is not None else {})
    for name, info in sections.items():
        if name != "model":
            owner = cast(type[BaseModel], info.annotation)
            part = _parse(owner, fields.get(name, {}), name, model_class, problems)
            parts.update({name: part} if part is not None else {})
    spec = RunSpec.model_construct(None, **parts)
    for needed, check in CHECKS:
        if all(name in parts for name in needed):
            problems.extend(check(spec))
    if problems:
        raise SpecError(problems, source)
    schedule, training = parts["lr_scheduler"], parts["training"]
    if schedule.type in ("linear", "cosine") and schedule.decay_steps is None:
        # written out, so that raising max_steps at a resume does not bend the schedule behind the run's back
        parts["lr_scheduler"] = schedule.model_copy(update={"decay_steps": training.max_steps})
    return RunSpec(**parts)


def load(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Reads a run from a YAML file and `--set` texts `a.b=c`, which win. Raises SpecError with every problem found."""
    problems: list[Problem] = []
    try:
        fields = _read(path.read_text(encoding="utf-8"), (), problems)
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.yaml")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else ""
        raise SpecError([Problem("", ABSENT, f"cannot be read: {error}", hint)], str(path)) from None
    if problems:  # with half of the file unread, whatever else is found would mislead
        raise SpecError(problems, str(path))
    if not isinstance(fields, dict):
        raise SpecError([Problem("", ABSENT, "must hold a mapping of sections")], str(path))
    fields = cast(dict[str, object], fields)
    given = [override.partition("=")[0].strip() for override in overrides]
    for override in overrides:
        _set(fields, override, problems)
    twice = sorted({key for key in given if given.count(key) > 1})
    problems.extend(Problem(key, ABSENT, "given twice by --set") for key in twice)
    if problems:
        raise SpecError(problems, str(path))
    return from_dict(fields, str(path))
