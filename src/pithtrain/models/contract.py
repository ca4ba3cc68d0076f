"""What a model promises to the rest: its numbers without torch (`config.py`), its blocks with it (`model.py`).

A model is one folder that holds exactly these two files; the spec names the folder (`model.architecture`), and nothing
else knows of it. There is no table to add to. This page holds

- `ModelConfig`, the Protocol that a folder's class `Config` satisfies: sizes, the parameter table, FLOPs;
- `ModelModule`, what `model.py` defines, and `Layer`, what it builds;
- `Parameter`, a row of that table: build allocates and initialises from it, zero shards by it, checkpoint names by it;
- `HfTensor`, a tensor of a Hugging Face file and its place among our parameters: convert reads and writes by it;
- `Strict`, `Integer`, `Positive` and `only`, the rules by which text becomes a `Config` (and a section of the spec);
- `load_config` and `load_model`, which import the folder. `load_model` is the one function here that loads torch.

A `config.py` defines
    Config   a frozen `Strict` model whose fields carry the Hugging Face names and which satisfies `ModelConfig`;
             rules over several fields raise `SpecError` with one `Problem` per broken rule, paths relative to the model
    IGNORED  {HF field: why it has no effect here}; a field that is neither in Config nor here is refused
    TINY     a Config of a few thousand parameters for tests

Worked example: the rows of expert weights are whole (every expert), a rank of `ep` ranks holds `shape[0] / ep` of them.

    Parameter("model.layers.1.mlp.experts.down_proj", (8, 64, 48), "expert", "normal", 0.02, layer=1, decay=True,
              fp32=False)
"""

import importlib
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pithtrain.errors import Problem, SpecError, show

if TYPE_CHECKING:  # this page is read where there is no torch
    import torch
    from torch import Tensor

    from pithtrain.ops.experts import Experts
    from pithtrain.ops.linear import Region, Weight
    from pithtrain.ops.router import Balance


@dataclass(frozen=True)
class Parameter:
    """A row of the parameter table."""

    name: str  # canonical: the HF name, experts stacked per layer and projection
    shape: tuple[int, ...]  # whole, unsharded
    kind: Literal["dense", "expert"]  # expert: dim 0 is the expert
    init: Literal["normal", "ones", "zeros"]
    std: float  # of the normal; 0 otherwise
    layer: int | None  # None: embedding, final norm, head
    decay: bool  # weight decay applies: matrices only
    fp32: bool  # kept in fp32 in compute: 1-D parameters and the router

    @property
    def size(self) -> int:
        """Number of elements, whole."""
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in a checkpoint and in the optimizer: experts are rows, [E * out, in]."""
        return (self.shape[0] * self.shape[1], *self.shape[2:]) if self.kind == "expert" else self.shape


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face file: which rows of which stored parameter it is. Values are never permuted; a family
    whose files hold them transposed or interleaved adds a field for that here.

    Worked example, the up half (16 rows) of expert 3 of [E, 2I, H] = [8, 32, 64], beginning at row 3 * 32 + 16:

        HfTensor("...mlp.experts.3.up_proj.weight", (16, 64), "...mlp.experts.gate_up_proj", 112)
    """

    name: str
    shape: tuple[int, ...]
    parameter: str  # canonical
    row: int = 0  # its first row in `Parameter.stored_shape`; the rows that follow are as many as its elements fill
    copy: bool = False  # a second copy that some writers add: never written, may be missing, must hold equal values


class ModelConfig(Protocol):
    """What the engine and the plan read of a model; properties, so that a frozen class satisfies it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int | None: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...

    @classmethod
    def canonical(cls, fields: dict[str, object]) -> dict[str, object]:
        """HF fields under the names that this class has, whatever version of the format wrote them."""
        ...

    def is_moe(self, layer: int) -> bool:
        """Whether this layer (from 0) has routed experts."""
        ...

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter of the model once, embedding first, then the layers in order, then norm and head."""
        ...

    def hf_tensors(self) -> tuple[HfTensor, ...]:
        """Every tensor of the family's usual files. A parameter without any has no place in that format: an export
        names it as lost."""
        ...

    def hf_config(self) -> dict[str, object]:
        """`config.json` without `dtype`: every field that the forward reads is there, whatever HF's defaults are."""
        ...

    def active_parameters(self) -> int:
        """Weights that one token meets in matrix products (the head, not the embedding's lookup)."""
        ...

    def layer_flops(self, layer: int, sequence_length: int) -> float:
        """FLOPs per token of one layer, forward and backward, causal attention counted exactly."""
        ...

    def head_flops(self) -> float:
        """FLOPs per token of the head, forward and backward."""
        ...

    def flops_per_token(self, sequence_length: int) -> float:
        """The model's FLOPs per token, forward and backward, recomputation not counted."""
        ...


@dataclass(frozen=True)
class Layer:
    """What `model.build_layer` returns: a layer as the regions between its communication edges.

    `attend`: h [B, S, H] -> (mid [B, S, H], n [T, H], weights [T, K]) and a `Routing`; without experts h -> (h',).
    `shared`: n [T, H] -> (x [T, H],), experts that every token visits, or None. `experts`: this rank's routed ones.
    """

    index: int
    attend: "Region"
    shared: "Region | None"
    experts: "Experts | None"


class ModelModule(Protocol):
    """What a folder's `model.py` defines; `config` is an instance of its own Config."""

    def rope(self, config: Any, length: int, device: "torch.device", dtype: "torch.dtype") -> "Tensor":
        """Position tables of a run, for `build_layer`; `dtype` is the accumulate dtype."""
        ...

    def build_layer(
        self, config: Any, index: int, weights: "Mapping[str, Weight]", tables: "Tensor", balance: "Balance"
    ) -> Layer:
        """Layer `index` over this rank's weights, found by their canonical names."""
        ...


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


def _part(architecture: str, part: Literal["config", "model"]) -> ModuleType:
    """Imports one file of a model's folder: by name from this package, by path (anything with a slash) from outside."""
    if "/" not in architecture:
        here = Path(__file__).parent
        folders = sorted(file.parent.name for file in here.glob("*/config.py"))
        if architecture not in folders:
            rule = "is no folder of pithtrain/models"
            hint = f"have {', '.join(folders)}; a folder outside the package is given by its path, with a slash"
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


def load_ignored(architecture: str) -> Mapping[str, str]:
    """The HF fields that a model accepts without effect, with the reason."""
    return cast(Mapping[str, str], _part(architecture, "config").IGNORED)


def load_model(architecture: str) -> ModelModule:
    """The module `model` of a model's folder. Imports torch."""
    return cast(ModelModule, _part(architecture, "model"))
