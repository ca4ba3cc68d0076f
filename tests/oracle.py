"""Our model against transformers' own of the same fields: logits, loss, every gradient. One code for every family.

    oracle(config)                 their model, built from `config.hf_config()`, random weights everywhere
    compare(architecture, config)  both on the same tokens -> Differences

Weights go from theirs to ours as a user's would: `save_pretrained`, then `convert.init`. Gradients take the same road:
each is put into its parameter's place, saved, and read by `convert.HfFolder` into our layout. So fused, transposed or
interleaved tensors need no second mapping here, and a fault in the one there is shows as wrong logits.

Their RMSNorms get the config's epsilon: DeepSeek's norms inside attention are built with a class default instead.
"""

import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

import torch
import torch.nn.functional as F
import transformers
from pydantic import BaseModel
from torch import Tensor

from harness import batches_of, distance, fields_of, play, single, tiny, variants
from pithtrain import convert
from pithtrain.build import Engine, build
from pithtrain.errors import SpecError
from pithtrain.models.contract import ModelConfig, load_config
from pithtrain.ops.cross_entropy import IGNORE
from pithtrain.ops.linear import Segment, accumulate_dtype
from pithtrain.ops.parts import Part
from pithtrain.spec import RunSpec, from_dict, read_model
from pithtrain.tape import forward, new_stats, run_forward
from reference import Documents

transformers.utils.logging.disable_progress_bar()
LENGTH = 24  # tokens of a sequence: longer than any window of a tiny config
TOLERANCE = 1e-5  # fp32, ||ours - theirs|| / ||theirs|| of a tensor


# ---- the configs of a folder -----------------------------------------------------------------------------------------


def configs(architecture: str) -> dict[str, ModelConfig]:
    """ "tiny", then each of the variants, of a folder of models/ or one outside the package."""
    found = {"tiny": tiny(architecture)}
    for name, changes in variants(architecture).items():
        found[name] = read_model({"architecture": architecture, **fields_of(found["tiny"]), **changes}).config
    return found


def spec_of(
    architecture: str, config: ModelConfig, *, moe: Mapping[str, Any] | None = None, **training: Any
) -> RunSpec:
    """A run of one process with this model; no balance loss unless `moe` says so."""
    sizes = {"max_steps": 1, "micro_batch_size": 2, "global_batch_size": 4, "sequence_length": LENGTH}
    return from_dict(
        {
            "name": "tiny",
            "model": {"architecture": architecture, **fields_of(config)},
            "training": {**sizes, "device": "cpu", "compute_dtype": "float32", **training},
            "optimizer": {"lr": 1e-3},
            "moe": {"load_balance_type": "none", "aux_loss_coef": 0.0, **(moe or {})},
            "data": {"sources": [{"path": "unused"}], "document_mask": False},
        }
    )


# ---- transformers ----------------------------------------------------------------------------------------------------


def hf_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """Their config of these fields; none of ours may be lost on the way."""
    fields = cast(dict[str, Any], config.hf_config())
    theirs = transformers.AutoConfig.for_model(**fields)
    for name, value in fields.items():
        got = getattr(theirs, name, None)
        if name not in ("architectures", "rope_theta"):  # rope_theta: for readers before rope_parameters
            assert got == value or list(got or ()) == value, f"{name}: transformers has {got!r}, hf_config {value!r}"
    return theirs


def randomise(model: torch.nn.Module, config: ModelConfig, seed: int = 7) -> None:
    """No tensor is left as a constructor made it: gains around 1; matrices, biases, sinks, saved buffers around 0."""
    generator = torch.Generator().manual_seed(seed)
    gains: set[str] = set()
    module: Any
    for name, module in model.named_modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config.rms_norm_eps
            gains.add(f"{name}.weight")
    with torch.no_grad():
        for name, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=generator) * 0.1
            value.copy_(1 + noise if name in gains else noise)


def oracle(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model in its plainest form, random weights everywhere (the same ones in every dtype)."""
    model: Any = transformers.AutoModelForCausalLM.from_config(
        hf_config(config), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    randomise(model, config)
    return model.to(dtype)


def read_folder(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Whole parameters in our stored layout from a folder of theirs; those without a place in the format are left."""
    folder = convert.HfFolder(path)
    pieces = folder.match(config)
    return {
        info.name: folder.rows(info, pieces[info.name], 0, info.stored_shape[0])
        for info in config.parameters()
        if pieces[info.name]
    }


def theirs_on(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits fp32, and the loss, whose backward has run. `labels` are shifted already: their own loss would shift them
    once more."""
    logits = model(tokens).logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return logits.detach(), loss.detach()


def gradients_of(model: Any, config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Every gradient in our layout. Overwrites the model's values."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"transformers has no gradient for {name}"
        parameter.data.copy_(parameter.grad)
    model.float().save_pretrained(folder)
    found = read_folder(folder, config)
    return {info.name: found[info.name] for info in config.parameters() if info.update == "gradient"}


# ---- ours ------------------------------------------------------------------------------------------------------------


def logits_of(engine: Engine, tokens: Tensor, documents: Documents | None = None) -> Tensor:
    """[B, S, V] in the accumulate dtype: both chunks of a one-rank pipeline, then the last norm and the head here."""
    first, last = engine.pipeline.stages
    assert last.head is not None
    layers, experts = engine.counts_LE.shape
    wide = accumulate_dtype(engine.dtype)
    stats = new_stats(layers, experts, engine.world.device, wide)
    part, traffic = Part(*tokens.shape, engine.world.device, documents=documents), engine.pipeline.traffic
    h, _ = run_forward(forward(first, tokens, part, traffic, None, stats))
    assert h is not None
    h, _ = run_forward(forward(replace(last, embedding=None, head=None), h, part, traffic, None, stats))
    assert h is not None
    return Segment(last.head.norm, h).outputs[0].to(wide) @ last.head.weight.data.to(wide).t()


@dataclass(frozen=True)
class Ours:
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]  # stored layout; "load" parameters are not among them


def ours_on(engine: Engine, spec: RunSpec, tokens: Tensor) -> Ours:
    logits = logits_of(engine, tokens)
    stats = play(engine, spec, batches_of(spec, engine, 0))
    grads = {name: one.grad.clone() for name, one in engine.zero.sharded.items() if one.info.update == "gradient"}
    return Ours(logits, stats.loss.item(), grads)


# ---- both ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """Relative 2-norms, but for `logits_max`; logits of about unit size."""

    logits: float
    logits_max: float
    positions: list[float]  # of logits: a fault in the rotary embedding shows everywhere but at position 0
    logits_median: float  # over tokens: a token that bf16 sent to another expert does not count
    loss: float
    gradients: dict[str, float]
    zero_gradients: list[str]  # parameters that transformers gives none: nothing is proven of them

    def worst(self) -> tuple[str, float]:
        """The gradient that differs most."""
        return max(self.gradients.items(), key=lambda item: item[1])


def compare(architecture: str, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Differences:
    """Ours in `dtype` against theirs in fp32, on the same random weights (rounded to `dtype` where ours are)."""
    spec = spec_of(architecture, config, compute_dtype=str(dtype).removeprefix("torch."))
    model = oracle(config)
    if dtype != torch.float32:
        model = model.to(dtype).float()
    with tempfile.TemporaryDirectory() as folder, single(spec) as world:
        model.save_pretrained(Path(folder) / "weights")
        engine = build(spec, world)
        convert.init(Path(folder) / "weights", engine.zero, world, spec.model, lambda _: None)
        batches = batches_of(spec, engine, 0)
        tokens, labels = (torch.cat([getattr(b, key) for b in batches]) for key in ("tokens", "labels"))
        mine = ours_on(engine, spec, tokens)
        logits, loss = theirs_on(model, tokens, labels)
        return differences(mine, logits, loss, gradients_of(model, config, Path(folder) / "gradients"))


def relative(mine: Tensor, theirs: Tensor) -> float:
    """||mine - theirs|| / ||theirs||; infinite where either holds a NaN, which no bound would refuse."""
    found = distance(mine.numpy(), theirs.numpy())
    return found if found == found else math.inf


def differences(mine: Ours, logits: Tensor, loss: Tensor, gradients: Mapping[str, Tensor]) -> Differences:
    assert mine.gradients.keys() == gradients.keys(), mine.gradients.keys() ^ gradients.keys()
    per_token = (mine.logits - logits).norm(dim=-1) / logits.norm(dim=-1)
    return Differences(
        logits=relative(mine.logits, logits),
        logits_max=(mine.logits - logits).abs().max().item(),
        positions=[relative(mine.logits[:, at], logits[:, at]) for at in range(logits.shape[1])],
        logits_median=per_token.median().item(),
        loss=relative(torch.tensor(mine.loss), loss),
        gradients={name: relative(mine.gradients[name], grad) for name, grad in gradients.items()},
        zero_gradients=[name for name, grad in gradients.items() if not grad.any()],
    )


# ---- tensors and fields ----------------------------------------------------------------------------------------------


class TensorUse(NamedTuple):
    """A kind of tensor, numbers of layers and experts put as N; a shape is None where that side lacks it."""

    name: str
    theirs: tuple[int, ...] | None
    ours: tuple[int, ...] | None
    parameter: str  # where it goes
    times: int


def tensors(config: ModelConfig) -> list[TensorUse]:
    """What transformers saves of this model, beside `hf_tensors()`."""
    with tempfile.TemporaryDirectory() as folder:
        oracle(config).save_pretrained(folder)
        saved = {name: one.shape for name, one in convert.HfFolder(Path(folder)).tensors.items()}
    table = {row.name: row for row in config.hf_tensors() if not row.copy or row.name in saved}
    rows: list[tuple[str, Any]] = []
    for name in [*table, *(name for name in saved if name not in table)]:
        row = table.get(name)
        parameter = numberless(row.parameter) if row else ""
        rows.append((name, (saved.get(name), row.shape if row else None, parameter)))
    return [TensorUse(name, rest[0], rest[1], rest[2], times) for (name, rest), times in kinds(rows).items()]


def kinds(rows: Iterable[tuple[str, Any]]) -> Counter[tuple[str, Any]]:
    """How many rows there are of each kind, in order: numbers of layers and experts put as N."""
    return Counter((numberless(name), rest) for name, rest in rows)


def numberless(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".N", name)


class FieldUse(NamedTuple):
    """What becomes of a field of a family's config.json. `use`: read, one value, other spelling, ignored, refused, or
    LOST where nothing says; `why`: the description, the reason or the refusal."""

    name: str
    use: str
    why: str


def fields(architecture: str, config: ModelConfig) -> Iterator[FieldUse]:
    """Every field of transformers' config class and every key of `hf_config()`, tried where no list names it."""
    owner = load_config(architecture)
    theirs = hf_config(config).to_dict()
    for name in sorted({*theirs, *config.hf_config()}):
        if name in owner.model_fields:
            one = owner.model_fields[name]
            pinned = is_pinned(owner, name)
            yield FieldUse(name, "one value" if pinned else "read", one.description or "")
        elif name in owner.IGNORED:
            yield FieldUse(name, "ignored", owner.IGNORED[name])
        else:
            value = {**theirs, **config.hf_config()}[name]
            given = {"architecture": architecture, **fields_of(config), name: value}
            try:
                read_model(given)
                yield FieldUse(name, "other spelling", "moved to its name here by Config.canonical")
            except SpecError as error:
                told = not any(problem.rule.startswith("is not a key") for problem in error.problems)
                yield FieldUse(name, "refused" if told else "LOST", "; ".join(p.rule for p in error.problems))


def is_pinned(owner: type[BaseModel], name: str) -> bool:
    """Whether a field takes one value alone: `only(...)`, a Literal of one, or the type None."""
    info = owner.model_fields[name]
    checks = (getattr(getattr(rule, "func", None), "__qualname__", "") for rule in info.metadata)
    alone = info.annotation is type(None) or (
        get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1
    )
    return alone or any(check.startswith("only.") for check in checks)


def leaves(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """(dotted path, value, whether it is pinned) of every field, nested ones too."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            # of a mapping that is of several kinds, each kind
            yield f"{prefix}{name}", type(value), type(config).model_fields[name].annotation is type(value)
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, is_pinned(type(config), name)


def untried(architecture: str) -> dict[str, set[str]]:
    """Fields that have the same value in the tiny config and all variants, though they could have another: there a
    constant in our code would pass for the field. Nested fields by their path."""
    seen: dict[str, set[str]] = defaultdict(set)
    for config in configs(architecture).values():
        for path, value, pinned in leaves(cast(BaseModel, config)):
            if not pinned:
                seen[path].add(repr(value))
    return {path: values for path, values in seen.items() if len(values) < 2}
