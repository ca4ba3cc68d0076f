"""What a model promises to the rest: its numbers without torch (`config.py`), its blocks with it (`model.py`).

A model is one folder with these two files and `tiny.yaml`; the spec names the folder (`model.architecture`), and
nothing else knows of it. There is no table to add to. This page holds what all configs have (`ModelConfig`,
`GroupedQueryConfig`), what a `model.py` must define (`ModelModule`), the rows of a config's tables (`Parameter`,
`HfTensor`) and what writes them, the FLOPs of any model from those rows, the rules by which text becomes a `Config`
(and a section of the spec), and what imports a folder. `load_model` is the one function here that loads torch.

`config.py` defines `Config`, a `ModelConfig`. `tiny.yaml` is for tests
    tiny      a Config of a few thousand parameters
    variants  {what is different: HF fields}: changes of it that together give every field that the forward reads
              another value; each is held against transformers

Worked example: the rows of expert weights are whole (every expert), a rank of `ep` ranks holds `shape[0] / ep` of them.

    Parameter("model.layers.1.mlp.experts.down_proj", (8, 64, 48), "normal", fp32=False, layer=1, std=0.02)
"""

import importlib
import importlib.machinery
import importlib.util
import math
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pithtrain.errors import Problem, SpecError, show

if TYPE_CHECKING:  # this page is read where there is no torch
    import torch
    from torch import Tensor

    from pithtrain.ops.experts import Experts
    from pithtrain.ops.linear import Region, Weight
    from pithtrain.ops.ring import Core
    from pithtrain.ops.router import Balance


@dataclass(frozen=True)
class Parameter:
    """A row of the parameter table."""

    name: str  # canonical: the HF name, experts stacked per layer and projection
    shape: tuple[int, ...]  # whole, unsharded
    init: Literal["normal", "ones", "zeros"]
    fp32: bool  # kept in fp32 in compute: 1-D parameters and the router
    layer: int | None = None  # None: embedding, final norm, head
    std: float = 0.0  # of the normal; 0 otherwise
    update: Literal["gradient", "load"] = "gradient"  # load: no gradient; a selection bias that follows expert load
    exact: bool = False  # multiplied in compute dtype whatever the run's `fp8` says
    parts: int = 1  # matrices that lie one above the other: gate and up

    @property
    def kind(self) -> Literal["dense", "expert"]:
        """expert: dim 0 is the expert."""
        return "expert" if ".experts." in self.name else "dense"

    @property
    def decay(self) -> bool:
        """Weight decay applies: to matrices only."""
        return len(self.shape) - (self.kind == "expert") > 1

    @property
    def size(self) -> int:
        """Number of elements, whole."""
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """By gradient: it has a main gradient, moments, a part in the norm."""
        return self.update == "gradient"

    @property
    def fp8(self) -> bool:
        """Whether `fp8.enabled` makes 8-bit operands of it: matrices of layers, but for the router."""
        return self.layer is not None and len(self.shape) > 1 and not self.fp32 and not self.exact

    @property
    def matrix_rows(self) -> int:
        """Rows of each of the matrices that a parameter holds in its stored shape, such as one expert's gate."""
        return self.shape[-2] // self.parts if self.decay else 0

    def moments(self, muon: bool) -> int:
        """How many an optimizer keeps of it. `muon`: one of each matrix of a layer, where AdamW has two; embedding and
        head are tables of words and stay AdamW's."""
        return 0 if not self.trained else 1 if muon and self.decay and self.layer is not None else 2

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in a checkpoint and in the optimizer: experts are rows, [E * out, in]."""
        return (self.shape[0] * self.shape[1], *self.shape[2:]) if self.kind == "expert" else self.shape


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face file: which rows of which stored parameter it is, and how its values lie in the file.

    Worked example, the up half (16 rows) of expert 3 of [E, 2I, H] = [8, 32, 64], beginning at row 3 * 32 + 16:

        HfTensor("...mlp.experts.3.up_proj.weight", (16, 64), "...mlp.experts.gate_up_proj", 112)
    """

    name: str
    shape: tuple[int, ...]
    parameter: str  # canonical
    row: int = 0  # its first row in `Parameter.stored_shape`; the rows that follow are as many as its elements fill
    copy: bool = False  # a second copy that some writers add: never written, may be missing, must hold equal values
    transposed: bool = False  # [E, in, out] in the file
    interleaved: bool = False  # gate and up alternate along `out` in the file; ours holds all of gate, then all of up
    mxfp4: bool = False  # a file may hold NAME_blocks and NAME_scales, [E, out, in] in 4 bits: read, never written


def matrix(name: str, shape: tuple[int, ...], *, fp32: bool = False, exact: bool = False, parts: int = 1) -> Parameter:
    """A row for a matrix; one with `.experts.` in its name is the experts' own, stacked."""
    return Parameter(name, shape, "normal", fp32, exact=exact, parts=parts)


def vector(name: str, shape: tuple[int, ...], init: Literal["ones", "zeros"]) -> Parameter:
    """A row for a norm's gain (ones) or a bias (zeros), one per expert too: fp32, no weight decay."""
    return Parameter(name, shape, init, fp32=True)


def linear(
    name: str, shape: tuple[int, int], *, bias: bool, fp32: bool = False, exact: bool = False
) -> Iterator[Parameter]:
    """Rows of `x W^T (+ b)`: NAME.weight [out, in] and, with `bias`, NAME.bias [out]."""
    yield matrix(f"{name}.weight", shape, fp32=fp32, exact=exact)
    if bias:
        yield vector(f"{name}.bias", shape[:1], "zeros")


def mlp(name: str, hidden: int, width: int, *, bias: bool = False) -> Iterator[Parameter]:
    """Rows of a dense SwiGLU: NAME.gate_proj and NAME.up_proj [width, H], NAME.down_proj [H, width]."""
    for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield from linear(f"{name}.{part}_proj", shape, bias=bias)


def experts(name: str, count: int, hidden: int, width: int, *, bias: bool = False) -> Iterator[Parameter]:
    """Rows of E routed SwiGLU experts of width I: NAME.gate_up_proj [E, 2I, H], gate rows before those of up, and
    NAME.down_proj [E, H, I]; with `bias` one for each expert and either product."""
    for part, parts, (out, into) in (("gate_up", 2, (2 * width, hidden)), ("down", 1, (hidden, width))):
        yield matrix(f"{name}.{part}_proj", (count, out, into), parts=parts)
        if bias:
            yield vector(f"{name}.{part}_proj_bias", (count, out), "zeros")


class Carried(NamedTuple):
    """A layer's attention: `core_width`, a query's and a value's numbers over all heads; and what keys and values are
    made of: that many `numbers` per token, which travel where sequences are cut. `window`: keys that a query sees.
    Where keys are made on arrival, `product`: the width of the linear that makes them and the values, and `keys`: that
    of whole keys, which then lie beside it."""

    core_width: int
    numbers: int
    window: int | None = None
    product: int = 0
    keys: int = 0


class Strict(BaseModel):
    """Frozen, no unknown key, no bool as int, no string as number, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
"""A whole number; `1e3` is one, `1.5` and `true` are not."""

Positive = Annotated[Integer, Field(gt=0)]
"""A whole number from 1."""


def only(allowed: object, why: str = "nothing else is built for this model") -> AfterValidator:
    """Refuses any value of a field but one: for HF fields that exist and of which we build one case."""

    def check(value: object) -> object:
        if value != allowed:
            raise ValueError(f"must be {show(allowed)}: {why}")
        return value

    return AfterValidator(check)


Rule = tuple[str, bool, str]
"""Of several fields: the one that is to blame (its path, relative to the model), whether the rule holds, the rule."""


class PlainRope(Strict):
    """A rotary embedding without scaling."""

    rope_type: Literal["default"] = Field(description="how the waves are scaled; default: not at all")
    rope_theta: float = Field(gt=1, description="base of the rotation's wave lengths")


class YarnRope(Strict):
    """A rotary embedding stretched to a longer context (YaRN, arXiv 2309.00071); families add what scales cos, sin."""

    rope_type: Literal["yarn"] = Field(description="how the waves are scaled")
    rope_theta: float = Field(gt=1, description="base of the rotation's wave lengths")
    factor: float = Field(ge=1, description="how many times longer the slow waves become")
    original_max_position_embeddings: Positive = Field(
        description="context before the stretch, in tokens; it alone sets which waves are slow"
    )
    beta_fast: float = Field(gt=0, description="a wave with more turns than this within that context keeps its length")
    beta_slow: float = Field(gt=0, description="a wave with fewer turns than this is stretched by the whole factor")


def put(fields: dict[str, object], key: str, value: object, said: str, ours: str) -> None:
    """`fields[key] = value`, given as `said`; what stands there already, as `ours`, must be the same."""
    if fields.setdefault(key, value) != value:
        raise SpecError([Problem(said, value, f"contradicts {ours} = {show(fields[key])}", "drop one of the two")])


def rename(fields: dict[str, object], other: str, ours: str) -> None:
    """A field that other versions of the format call `other`, moved. Raises SpecError where both stand and differ."""
    if other in fields:
        put(fields, ours, fields.pop(other), other, ours)


def one_rope(fields: dict[str, object], theta_alone: bool = True) -> dict[str, object]:
    """`rope_scaling` and `rope_theta`, which stood beside the other fields before transformers 5, moved into
    `rope_parameters`, and `type` to `rope_type` there; a null is as good as absent. -> `rope_parameters`.
    `theta_alone`: a base without either mapping means no scaling. Raises SpecError where two of them differ, or one is
    no mapping."""
    given = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name) is not None}
    if odd := [name for name, values in given.items() if not isinstance(values, dict)]:
        raise SpecError([Problem(name, given[name], "must be a mapping of keys to values") for name in odd])
    rope: dict[str, object] = {}
    for name, values in (*given.items(), ("", {"rope_theta": fields.pop("rope_theta", None)})):
        for key, value in cast("dict[str, object]", values).items():
            ours = "rope_type" if key == "type" else key
            if value is not None:
                put(rope, ours, value, f"{name}.{key}".lstrip("."), f"rope_parameters.{ours}")
    fields.pop("rope_scaling", None)
    if rope:
        rope |= {} if given or not theta_alone else {"rope_type": "default"}
        fields["rope_parameters"] = rope
    return rope


NO_EFFECT = {
    "architectures": "model.architecture names the code",
    "transformers_version": "says who wrote the file",
    "_name_or_path": "says where the file came from",
    **dict.fromkeys(("dtype", "torch_dtype"), "the compute type comes from training.compute_dtype"),
    "use_cache": "training keeps no key/value cache",
    **dict.fromkeys(("bos_token_id", "eos_token_id"), "special tokens come from the tokenizer"),
    "pad_token_id": "the token corpus holds no padding",
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), "balance coefficients come from moe"),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "return_dict"), "what a forward returns is no matter of training"
    ),
    **dict.fromkeys(("id2label", "label2id", "problem_type"), "labels of a classifier"),
    "chunk_size_feed_forward": "memory of inference",
    "is_encoder_decoder": "the architecture is a decoder",
}
"""HF fields that a config.json of any family may hold, and why each changes nothing here."""


class ModelConfig(Strict):
    """What all families' configs have, and what the engine and the plan read of one.

    Fields carry the Hugging Face names. One that the forward reads has no default, since a config.json that leaves it
    out would train another model; one of which a single case is built takes that alone (`only`); one that is neither
    here nor in `IGNORED` is refused. A family adds its own fields, a Literal of all that it is for as `model_type`,
    `rope_parameters`, rules over several fields, and `num_experts`: as a field, or as a property and `EXPERTS`.
    """

    IGNORED: ClassVar[Mapping[str, str]] = NO_EFFECT  # {HF field: why it has no effect here}
    EXPERTS: ClassVar[str] = "num_experts"  # HF's name of E
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}  # {what other versions of the format call a field: ours}

    vocab_size: Positive = Field(description="rows of the embedding and of the head")
    hidden_size: Positive = Field(description="H, width of the residual stream")
    num_hidden_layers: Positive = Field(le=256, description="L, number of blocks; the search for a cut ends at 256")
    num_attention_heads: Positive = Field(description="query heads")
    num_experts_per_tok: Positive = Field(description="k, routed experts that a token visits")
    rms_norm_eps: float = Field(gt=0, description="epsilon of every norm, those inside attention included")
    max_position_embeddings: Positive | None = Field(
        default=None, description="longest sequence allowed, in tokens; a limit only"
    )
    tie_word_embeddings: bool = Field(description="whether the head is the embedding")
    initializer_range: float = Field(gt=0, description="standard deviation of every matrix at the start")
    hidden_act: Annotated[str, only("silu")] = Field(default="silu", description="activation of the gate")
    attention_dropout: Annotated[float, only(0.0)] = Field(default=0.0, description="no dropout is built")

    if TYPE_CHECKING:  # each family's own, fields but for a property where HF calls it otherwise
        model_type: Any
        rope_parameters: Any
        num_experts: int

    @classmethod
    def canonical(cls, fields: dict[str, object]) -> dict[str, object]:
        """HF fields under the names that this class has, whatever version of the format wrote them; others stay.
        Raises SpecError where two spellings of one field contradict each other."""
        fields = dict(fields)
        one_rope(fields)
        for other, ours in cls.OTHER_NAMES.items():
            rename(fields, other, ours)
        return fields

    def rules(self) -> Iterator[Rule]:
        """Rules over several fields: a family adds its own."""
        k, E, rope = self.num_experts_per_tok, self.num_experts, self.rope_parameters
        yield "num_experts_per_tok", k <= E, f"a token cannot visit more experts than {self.EXPERTS} = {E}"
        ramp = rope.rope_type == "default" or rope.beta_fast >= rope.beta_slow
        yield "rope_parameters.beta_fast", ramp, "must not be below beta_slow"

    @model_validator(mode="after")
    def _check(self) -> Self:
        broken = [Problem(path, attrgetter(path)(self), rule) for path, holds, rule in self.rules() if not holds]
        if broken:
            raise SpecError(broken)
        return self

    @abstractmethod
    def is_moe(self, layer: int) -> bool:
        """Whether this layer (from 0) has routed experts."""

    @abstractmethod
    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        """The rows of one layer, by their names in it: `parameters` adds place and std."""

    @abstractmethod
    def carried(self, layer: int) -> Carried:
        """What the attention of one layer is made of."""

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter of the model once, embedding first, then the layers in order, then norm and head. A tied head
        is the embedding and has no row."""
        words = (self.vocab_size, self.hidden_size)
        table = [matrix("model.embed_tokens.weight", words)]
        for layer in range(self.num_hidden_layers):
            for row in self.layer_parameters(layer):
                table.append(replace(row, name=f"model.layers.{layer}.{row.name}", layer=layer))
        table.append(vector("model.norm.weight", words[1:], "ones"))
        if not self.tie_word_embeddings:
            table.append(matrix("lm_head.weight", words))
        return tuple(replace(row, std=self.initializer_range) if row.init == "normal" else row for row in table)

    def expert_files(self, info: Parameter) -> Iterator[HfTensor]:
        """A parameter of kind "expert" as the family's files have it. Here as most are published: one [out, in] matrix
        per expert and projection, `experts.3.up_proj.weight`."""
        count, out, width = info.shape
        prefix, _, name = info.name.rpartition(".")
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        height = out // len(parts)
        for expert in range(count):
            for place, part in enumerate(parts):
                row = expert * out + place * height
                yield HfTensor(f"{prefix}.{expert}.{part}.weight", (height, width), info.name, row)

    def hf_tensors(self) -> tuple[HfTensor, ...]:
        """Every tensor of the family's usual files: dense parameters as they are here; a tied head may be there as a
        copy. A parameter without any has no place in that format: an export names it as lost."""
        rows: list[HfTensor] = []
        for info in self.parameters():
            dense = HfTensor(info.name, info.shape, info.name)
            rows.extend(self.expert_files(info) if info.kind == "expert" else [dense])
        if self.tie_word_embeddings:
            rows.append(replace(rows[0], name="lm_head.weight", copy=True))
        return tuple(rows)

    def hf_config(self) -> dict[str, Any]:
        """`config.json` without `dtype`: every field that the forward reads is there, whatever HF's defaults are; the
        rope's base under its old name too, for readers before transformers 5. `architectures` is the class that
        transformers calls by `model_type` in capitals; a family whose class is called otherwise says so."""
        name = "".join(word.capitalize() for word in self.model_type.split("_"))
        fields = self.model_dump(mode="json", exclude_none=True)
        return {"architectures": [f"{name}ForCausalLM"], **fields, "rope_theta": self.rope_parameters.rope_theta}

    def linear_weights(self, layer: int) -> int:
        """Weights of one layer that a token meets in matrix products: k of the E experts."""
        k, E = self.num_experts_per_tok, self.num_experts
        rows = (info for info in self.layer_parameters(layer) if info.decay)
        return sum(info.size * k // E if info.kind == "expert" else info.size for info in rows)

    def attention_flops(self, layer: int, sequence_length: int) -> float:
        """FLOPs per token of a layer's attention core, forward and backward: `6 heads (d_qk + d_v)` per key, and
        `causal_keys` of them."""
        carried = self.carried(layer)
        return 6 * carried.core_width * causal_keys(sequence_length, carried.window)


class GroupedQueryConfig(ModelConfig):
    """A family with grouped-query attention and a rotary embedding of halves."""

    num_key_value_heads: Positive = Field(description="key/value heads; each serves an equal group of query heads")
    head_dim: Positive = Field(description="width of a head, even (rotary halves); need not be hidden_size / heads")
    attention_bias: bool = Field(description="biases on q, k, v and o")

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        yield "num_key_value_heads", heads % shared == 0, f"must divide num_attention_heads = {heads}"
        yield "head_dim", self.head_dim % 2 == 0, "must be even: the rotary embedding turns two halves"

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer (from 0) sees, its own included; None: all before it."""
        return None

    def projections(self) -> Iterator[Parameter]:
        """Rows of q, k, v and o."""
        H, D = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * D, self.num_key_value_heads * D
        for name, shape in (("q", (q, H)), ("k", (kv, H)), ("v", (kv, H)), ("o", (H, q))):
            yield from linear(f"self_attn.{name}_proj", shape, bias=self.attention_bias)

    def carried(self, layer: int) -> Carried:
        D = self.head_dim
        return Carried(2 * self.num_attention_heads * D, 2 * self.num_key_value_heads * D, self.window(layer))


def causal_keys(sequence_length: int, window: int | None = None) -> float:
    """Keys that a query sees, its own included, in the mean over a sequence; `window` ends there too."""
    s = sequence_length
    w = s if window is None else min(window, s)
    return (w * (w + 1) / 2 + (s - w) * w) / s


def layer_flops(config: ModelConfig, layer: int, sequence_length: int) -> float:
    """FLOPs per token of one layer, forward and backward; recomputation is not counted, here and below."""
    return 6.0 * config.linear_weights(layer) + config.attention_flops(layer, sequence_length)


def head_flops(config: ModelConfig) -> float:
    """FLOPs per token of the head."""
    return 6.0 * config.vocab_size * config.hidden_size


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs per token of the model."""
    layers = range(config.num_hidden_layers)
    attention = sum(config.attention_flops(layer, sequence_length) for layer in layers)
    return 6.0 * active_parameters(config) + attention


def active_parameters(config: ModelConfig) -> int:
    """Weights that one token meets in matrix products: the head, not the embedding's lookup."""
    layers = sum(config.linear_weights(layer) for layer in range(config.num_hidden_layers))
    return layers + config.vocab_size * config.hidden_size


@dataclass(frozen=True)
class Layer:
    """What `model.build_layer` returns: a layer as the regions between its communication edges.

    `before`: h [B, S, H] and the rotary table's rows of its positions [2, B, S, D / 2] -> (q, and what keys and values
    are made of), heads apart. `core`: the attention between them. `after`: h and its output [B, S, heads * width] ->
    (mid [B, S, H], n [T, H], weights [T, K]) and a `Routing`; without experts (h',).
    `shared`: n [T, H] -> (x [T, H],), experts that every token visits, or None. `experts`: this rank's routed ones.
    """

    index: int
    before: "Region"
    core: "Core"
    after: "Region"
    shared: "Region | None"
    experts: "Experts | None"


class ModelModule(Protocol):
    """What a folder's `model.py` defines; `config` is an instance of its own Config."""

    def rope(self, config: Any, length: int, device: "torch.device", dtype: "torch.dtype") -> "Tensor":
        """Rotary tables [2, length, D / 2] of a run; `dtype` is the accumulate dtype."""
        ...

    def build_layer(self, config: Any, index: int, weights: "Mapping[str, Weight]", balance: "Balance") -> Layer:
        """Layer `index` over this rank's weights, found by their canonical names."""
        ...


def architectures() -> list[str]:
    """The folders of this package, by name."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/config.py"))


def architecture_of(model_type: str) -> str:
    """The folder that is for this `model_type`; where there is none the word itself, which `load_config` refuses."""
    for folder in architectures():
        if model_type in get_args(load_config(folder).model_fields["model_type"].annotation):
            return folder
    return model_type


def _part(architecture: str, part: Literal["config", "model"]) -> ModuleType:
    """Imports one file of a model's folder: by name from this package, by path (anything with a slash) from outside."""
    if "/" not in architecture:
        if architecture not in architectures():
            rule = "is no folder of pithtrain/models"
            hint = f"have {', '.join(architectures())}; a folder outside the package is given by its path, with a slash"
            raise SpecError([Problem("model.architecture", architecture, rule, hint)])
        return importlib.import_module(f"pithtrain.models.{architecture}.{part}")
    folder = Path(architecture).resolve()
    if not (folder / "config.py").is_file():
        raise SpecError([Problem("model.architecture", architecture, f"{folder} holds no config.py")])
    package = sys.modules.get(folder.name)
    if package is None:  # a package of the folder's name, so that its model.py can import its config.py
        spec = importlib.machinery.ModuleSpec(folder.name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        package = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    if list(getattr(package, "__path__", ())) != [str(folder)]:
        rule = f"the name {folder.name} belongs to another Python module"
        raise SpecError([Problem("model.architecture", architecture, rule, "rename the folder")])
    return importlib.import_module(f"{folder.name}.{part}")


def load_config(architecture: str) -> type[ModelConfig]:
    """The class Config of a model. Raises SpecError naming the folders there are."""
    return cast(type[ModelConfig], _part(architecture, "config").Config)


def load_model(architecture: str) -> ModelModule:
    """The module `model` of a model's folder. Imports torch."""
    return cast(ModelModule, _part(architecture, "model"))
