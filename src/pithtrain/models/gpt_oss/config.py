"""GPT-OSS in numbers: Hugging Face fields, parameter table, FLOPs. No torch.

The family of gpt-oss-20b and -120b: pre-norm blocks; grouped-query attention with biases and a learned sink per head,
every second layer over a window alone; rotary halves stretched by YaRN; in every layer routed experts with biases and
a clamped SwiGLU, behind a router that takes the softmax of the k best logits.

Every field that the forward reads is required, with three exceptions that are derived as Hugging Face derives them,
since a file may lack them: `swiglu_alpha` (1.702; released before the field existed), `layer_types` (null: alternate,
the first one sliding) and YaRN's `attention_factor`. A `rope_theta` without the rest is refused: older readers took it
for plain, newer ones for YaRN.

At the start the sinks and the router's bias are zeros, as every vector here but the gains. Hugging Face draws both from
the matrices' normal, 0.02 around 0; a sink of 0 weighs as much as one more key with score 0.

FLOPs per token (forward and backward, `6 x` the weights a token meets, plus the attention core): for the 20B shape at
4096 tokens 24 x 6 x 126.2 M + 12 x (0.101 G + 0.006 G) + 6 x 579 M = 22.925 GFLOP; 20.9 B parameters, 3.607 B active.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from pithtrain.models.contract import (
    GroupedQueryConfig,
    HfTensor,
    Parameter,
    PlainRope,
    Positive,
    Rule,
    YarnRope,
    experts,
    linear,
    one_rope,
    only,
    put,
    vector,
)


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


class Yarn(YarnRope):
    """With what GPT-OSS adds."""

    truncate: bool = Field(description="whether the two bounds are rounded to whole pairs")
    attention_factor: float | None = Field(
        default=None, gt=0, description="what cos and sin are multiplied by; null: 0.1 ln(factor) + 1"
    )


class Config(GroupedQueryConfig):
    """The HF fields of GPT-OSS."""

    EXPERTS: ClassVar[str] = "num_local_experts"
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    }

    model_type: Literal["gpt_oss"] = Field(default="gpt_oss", description="HF's name of this architecture")
    intermediate_size: Positive = Field(description="I, width of one expert")
    num_local_experts: Positive = Field(description="E, routed experts of a layer")
    sliding_window: Positive = Field(description="keys that a query of a sliding layer sees, its own included")
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = Field(
        default=None, strict=False, description="per layer; null: alternate, the first one sliding"
    )
    rope_parameters: PlainRope | Yarn = Field(
        discriminator="rope_type", description="or rope_scaling and rope_theta beside the other fields"
    )
    swiglu_alpha: float = Field(
        default=1.702, gt=0, description="slope of the gate's sigmoid; HF's own value, which released files leave out"
    )
    swiglu_limit: float = Field(gt=0, description="cuts the gate from above and the up projection both ways")
    hidden_act: Annotated[str, only("silu")] = Field(
        default="silu", description="what the files say; the experts' own activation is the clamped SwiGLU"
    )
    quantization_config: Annotated[object, only(None, "mxfp4 is the one stored kind that is read")] = Field(
        default=None, description="how a file stores the experts; one of quant_method mxfp4 is read and forgotten"
    )

    @classmethod
    def canonical(cls, fields: dict[str, object]) -> dict[str, object]:
        """`initial_context_length` repeats the rope's original_max_position_embeddings; layer_types that alternate are
        null, so that another num_hidden_layers needs no list."""
        fields = dict(fields)
        rope = one_rope(fields, theta_alone=False)
        fields = super().canonical(fields)
        original, repeated = "original_max_position_embeddings", "initial_context_length"
        if original in rope and repeated in fields:
            put(rope, original, fields.pop(repeated), repeated, f"rope_parameters.{original}")
        types = fields.get("layer_types")
        if isinstance(types, list | tuple):
            types = list(cast("list[str]", types))
            if len(types) == fields.get("num_hidden_layers") and types == _alternating(len(types)):
                fields["layer_types"] = None
        stored = fields.get("quantization_config")
        if isinstance(stored, dict) and cast(dict[str, object], stored).get("quant_method") == "mxfp4":
            del fields["quantization_config"]  # convert goes by the names of the tensors that it finds
        return fields

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        layers = self.num_hidden_layers
        every = self.layer_types is None or len(self.layer_types) == layers
        yield "layer_types", every, f"must have num_hidden_layers = {layers} entries; null alternates, sliding first"

    @property
    def num_experts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.num_local_experts

    def is_moe(self, layer: int) -> bool:
        return True

    def window(self, layer: int) -> int | None:
        types = self.layer_types or _alternating(self.num_hidden_layers)
        return self.sliding_window if types[layer] == "sliding_attention" else None

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        H, E = self.hidden_size, self.num_experts
        yield vector("input_layernorm.weight", (H,), "ones")
        yield from self.projections()
        yield vector("self_attn.sinks", (self.num_attention_heads,), "zeros")
        yield vector("post_attention_layernorm.weight", (H,), "ones")
        yield from linear("mlp.router", (E, H), bias=True, fp32=True)
        yield from experts("mlp.experts", E, H, self.intermediate_size, bias=True)

    def expert_files(self, info: Parameter) -> Iterator[HfTensor]:
        """Stacked, in x out where ours are out x in, gate and up in turns; the release has them in 4 bits."""
        pairs = "gate_up_proj" in info.name
        if len(info.shape) == 2:
            yield HfTensor(info.name, info.shape, info.name, interleaved=pairs)
        else:
            count, out, width = info.shape
            shape = (count, width, out)
            yield HfTensor(info.name, shape, info.name, transposed=True, interleaved=pairs, mxfp4=True)

    def hf_config(self) -> dict[str, Any]:
        """Null layer_types told; the rope's scaling under its old name too."""
        fields = super().hf_config()
        scaling = {key: value for key, value in fields["rope_parameters"].items() if key != "rope_theta"}
        return {"layer_types": _alternating(self.num_hidden_layers), **fields, "rope_scaling": scaling}
