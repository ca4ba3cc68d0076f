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

from collections.abc import Iterator
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from pithtrain.models.contract import (
    NO_EFFECT,
    Carried,
    HfTensor,
    Parameter,
    PlainRope,
    Positive,
    Strict,
    causal_keys,
    check,
    linear,
    matrix,
    one_rope,
    only,
    put,
    rename,
    usual_files,
    vector,
    whole_table,
)


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


class Yarn(Strict):
    """A rotary embedding stretched to a longer context (Peng et al. 2023)."""

    rope_type: Literal["yarn"] = Field(description="how the waves are scaled")
    rope_theta: float = Field(gt=1, description="base of the rotation's wave lengths")
    factor: float = Field(ge=1, description="how many times longer the slow waves become")
    original_max_position_embeddings: Positive = Field(
        description="context before the stretch, in tokens; it alone sets which waves are slow"
    )
    beta_fast: float = Field(gt=0, description="a wave with more turns than this within that context keeps its length")
    beta_slow: float = Field(gt=0, description="a wave with fewer turns than this is stretched by the whole factor")
    truncate: bool = Field(description="whether the two bounds are rounded to whole pairs")
    attention_factor: float | None = Field(
        default=None, gt=0, description="what cos and sin are multiplied by; null: 0.1 ln(factor) + 1"
    )


class Config(Strict):
    """The HF fields of GPT-OSS. Raises SpecError when fields contradict each other."""

    model_type: Literal["gpt_oss"] = Field(default="gpt_oss", description="HF's name of this architecture")
    vocab_size: Positive = Field(description="rows of the embedding and of the head")
    hidden_size: Positive = Field(description="H, width of the residual stream")
    num_hidden_layers: Positive = Field(le=256, description="L, number of blocks; the search for a cut ends at 256")
    num_attention_heads: Positive = Field(description="query heads")
    num_key_value_heads: Positive = Field(description="key/value heads; each serves an equal group of query heads")
    head_dim: Positive = Field(description="width of a head, even (rotary halves); need not be hidden_size / heads")
    intermediate_size: Positive = Field(description="I, width of one expert")
    num_local_experts: Positive = Field(description="E, routed experts of a layer")
    num_experts_per_tok: Positive = Field(description="k, experts that a token visits")
    sliding_window: Positive = Field(description="keys that a query of a sliding layer sees, its own included")
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = Field(
        default=None, strict=False, description="per layer; null: alternate, the first one sliding"
    )
    attention_bias: bool = Field(description="biases on q, k, v and o")
    rms_norm_eps: float = Field(gt=0, description="epsilon of every norm")
    rope_parameters: PlainRope | Yarn = Field(
        discriminator="rope_type", description="or rope_scaling and rope_theta beside the other fields"
    )
    swiglu_alpha: float = Field(
        default=1.702, gt=0, description="slope of the gate's sigmoid; HF's own value, which released files leave out"
    )
    swiglu_limit: float = Field(gt=0, description="cuts the gate from above and the up projection both ways")
    max_position_embeddings: Positive | None = Field(
        default=None, description="longest sequence allowed, in tokens; a limit only"
    )
    tie_word_embeddings: bool = Field(description="whether the head is the embedding")
    initializer_range: float = Field(gt=0, description="standard deviation of every matrix at the start")
    hidden_act: Annotated[str, only("silu")] = Field(
        default="silu", description="what the files say; the experts' own activation is the clamped SwiGLU"
    )
    attention_dropout: Annotated[float, only(0.0)] = Field(default=0.0, description="no dropout is built")
    quantization_config: Annotated[object, only(None, "mxfp4 is the one stored kind that is read")] = Field(
        default=None, description="how a file stores the experts; one of quant_method mxfp4 is read and forgotten"
    )

    @classmethod
    def canonical(cls, fields: dict[str, object]) -> dict[str, object]:
        """`rope_scaling` with `rope_theta` = `rope_parameters`; `num_experts` = `num_local_experts`;
        `experts_per_token` = `num_experts_per_tok`; `initial_context_length` repeats the rope's
        original_max_position_embeddings; layer_types that alternate are null, so that another num_hidden_layers needs
        no list."""
        fields = dict(fields)
        rope = one_rope(fields, theta_alone=False)
        rename(fields, "num_experts", "num_local_experts")
        rename(fields, "experts_per_token", "num_experts_per_tok")
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        rope, heads, k, E = self.rope_parameters, self.num_attention_heads, self.num_experts_per_tok, self.num_experts
        types, layers = self.layer_types, self.num_hidden_layers
        ramp = rope.rope_type == "default" or rope.beta_fast >= rope.beta_slow
        every = types is None or len(types) == layers
        check(
            self,
            ("rope_parameters.beta_fast", ramp, "must not be below beta_slow"),
            (
                "num_key_value_heads",
                heads % self.num_key_value_heads == 0,
                f"must divide num_attention_heads = {heads}",
            ),
            ("num_experts_per_tok", k <= E, f"a token cannot visit more experts than num_local_experts = {E}"),
            ("head_dim", self.head_dim % 2 == 0, "must be even: the rotary embedding turns two halves"),
            ("layer_types", every, f"must have num_hidden_layers = {layers} entries; null alternates, sliding first"),
        )
        return self

    @property
    def num_experts(self) -> int:
        """E, under the name that all models share."""
        return self.num_local_experts

    def is_moe(self, layer: int) -> bool:
        """Every layer has routed experts."""
        return True

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer (from 0) sees, its own included; None: all before it."""
        types = self.layer_types or _alternating(self.num_hidden_layers)
        return self.sliding_window if types[layer] == "sliding_attention" else None

    def _layer_parameters(self, layer: int) -> Iterator[Parameter]:
        H, E, width, std = self.hidden_size, self.num_experts, self.intermediate_size, self.initializer_range
        q_width, kv_width = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        prefix = f"model.layers.{layer}"
        yield vector(f"{prefix}.input_layernorm.weight", (H,), "ones", layer)
        for name, shape in (("q", (q_width, H)), ("k", (kv_width, H)), ("v", (kv_width, H)), ("o", (H, q_width))):
            yield from linear(f"{prefix}.self_attn.{name}_proj", shape, std, layer, bias=self.attention_bias)
        yield vector(f"{prefix}.self_attn.sinks", (self.num_attention_heads,), "zeros", layer)
        yield vector(f"{prefix}.post_attention_layernorm.weight", (H,), "ones", layer)
        yield from linear(f"{prefix}.mlp.router", (E, H), std, layer, bias=True, fp32=True)
        yield matrix(f"{prefix}.mlp.experts.gate_up_proj", (E, 2 * width, H), std, layer)  # gate rows, then up
        yield vector(f"{prefix}.mlp.experts.gate_up_proj_bias", (E, 2 * width), "zeros", layer)
        yield matrix(f"{prefix}.mlp.experts.down_proj", (E, H, width), std, layer)
        yield vector(f"{prefix}.mlp.experts.down_proj_bias", (E, H), "zeros", layer)

    def parameters(self) -> tuple[Parameter, ...]:
        return whole_table(self, self.initializer_range, self._layer_parameters)

    def hf_tensors(self) -> tuple[HfTensor, ...]:
        """Experts stacked, in x out where ours are out x in, gate and up in turns; the release has them in 4 bits."""
        return usual_files(self, _stacked)

    def hf_config(self) -> dict[str, object]:
        """Every field of ours, null layer_types told; the rope under its old names too, for readers before
        transformers 5."""
        fields = self.model_dump(mode="json", exclude_none=True)
        fields.setdefault("layer_types", _alternating(self.num_hidden_layers))
        scaling = dict(fields["rope_parameters"])
        theta = scaling.pop("rope_theta")
        return {"architectures": ["GptOssForCausalLM"], **fields, "rope_scaling": scaling, "rope_theta": theta}

    def linear_weights(self, layer: int) -> int:
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads  # q and o, k and v
        experts = 3 * self.num_experts_per_tok * self.intermediate_size
        return (heads * self.head_dim + self.num_experts + experts) * self.hidden_size

    def attention_flops(self, layer: int, sequence_length: int) -> float:
        keys = causal_keys(sequence_length, self.window(layer))
        return 6 * self.num_attention_heads * 2 * self.head_dim * keys

    def carried(self, layer: int) -> Carried:
        return Carried(2 * self.num_key_value_heads * self.head_dim, self.window(layer))


def _stacked(info: Parameter) -> Iterator[HfTensor]:
    name, shape, pairs = info.name, info.shape, "gate_up_proj" in info.name
    if len(shape) == 2:
        yield HfTensor(name, shape, name, interleaved=pairs)
    else:
        shape = (shape[0], shape[2], shape[1])
        yield HfTensor(name, shape, name, transposed=True, interleaved=pairs, mxfp4=True)


IGNORED = NO_EFFECT
