"""Qwen3-MoE in numbers: Hugging Face fields, parameter table, FLOPs. No torch.

The family of Qwen3-30B-A3B: pre-norm blocks; grouped-query attention with RMSNorm per head on q and k before the
rotary embedding (halves); a feed-forward of routed SwiGLU experts behind a softmax router, or a dense SwiGLU in the
layers that `mlp_only_layers` and `decoder_sparse_step` pick out.

Every field that the forward reads is required, since a config.json that leaves one out would take a class default and
train another model; but for decoder_sparse_step, mlp_only_layers and attention_bias, without which every layer is MoE
and none has a bias. Fields of which one case is built accept that case alone, `IGNORED` lists those without effect, and
what is on neither list is refused.

FLOPs per token (forward and backward, `6 x` the weights a token meets, plus the attention core): for the 30B shape at
4096 tokens 48 x (6 x 56.9 M + 0.101 G) + 6 x 311 M = 23.083 GFLOP; 30.53 B parameters, of which 3.042 B meet a token.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pithtrain.models.contract import (
    NO_EFFECT,
    Carried,
    HfTensor,
    Integer,
    Parameter,
    PlainRope,
    Positive,
    Strict,
    causal_keys,
    check,
    linear,
    matrix,
    mlp,
    one_rope,
    only,
    rename,
    usual_files,
    vector,
    whole_table,
)


class Config(Strict):
    """The HF fields of Qwen3-MoE. Raises SpecError when fields contradict each other."""

    model_type: Literal["qwen3_moe"] = Field(default="qwen3_moe", description="HF's name of this architecture")
    vocab_size: Positive = Field(description="rows of the embedding and of the head")
    hidden_size: Positive = Field(description="H, width of the residual stream")
    num_hidden_layers: Positive = Field(le=256, description="L, number of blocks; the search for a cut ends at 256")
    num_attention_heads: Positive = Field(description="query heads")
    num_key_value_heads: Positive = Field(description="key/value heads; each serves an equal group of query heads")
    head_dim: Positive = Field(description="width of a head, even (rotary halves); need not be hidden_size / heads")
    intermediate_size: Positive = Field(description="width of a dense feed-forward")
    moe_intermediate_size: Positive = Field(description="I, width of one expert")
    num_experts: Positive = Field(description="E, routed experts of an MoE layer")
    num_experts_per_tok: Positive = Field(description="k, experts that a token visits")
    norm_topk_prob: bool = Field(description="whether the k routing weights are divided by their sum")
    decoder_sparse_step: Positive = Field(default=1, description="layer l is MoE only if (l + 1) is a multiple of this")
    mlp_only_layers: tuple[Annotated[Integer, Field(ge=0)], ...] = Field(
        default=(), strict=False, description="layers (from 0) that are dense whatever decoder_sparse_step says"
    )
    attention_bias: bool = Field(default=False, description="biases on q, k, v and o")
    rms_norm_eps: float = Field(gt=0, description="epsilon of every norm, those of q and k included")
    rope_parameters: PlainRope = Field(description="or rope_theta beside the other fields; no scaling is built")
    max_position_embeddings: Positive | None = Field(
        default=None, description="longest sequence allowed, in tokens; a limit only"
    )
    tie_word_embeddings: bool = Field(description="whether the head is the embedding")
    initializer_range: float = Field(gt=0, description="standard deviation of every matrix at the start")
    hidden_act: Annotated[str, only("silu")] = Field(default="silu", description="activation of the gate")
    attention_dropout: Annotated[float, only(0.0)] = Field(default=0.0, description="no dropout is built")
    use_sliding_window: Annotated[bool, only(False)] = Field(
        default=False, description="no window is built for this model"
    )

    @classmethod
    def canonical(cls, fields: dict[str, object]) -> dict[str, object]:
        """`rope_theta` = `rope_parameters` without scaling; `num_local_experts` = `num_experts`; mlp_only_layers null
        is an empty list."""
        fields = dict(fields)
        one_rope(fields)
        rename(fields, "num_local_experts", "num_experts")
        if fields.get("mlp_only_layers", ()) is None:
            fields["mlp_only_layers"] = []
        return fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        heads, k, E = self.num_attention_heads, self.num_experts_per_tok, self.num_experts
        last = self.num_hidden_layers - 1
        check(
            self,
            (
                "num_key_value_heads",
                heads % self.num_key_value_heads == 0,
                f"must divide num_attention_heads = {heads}",
            ),
            ("num_experts_per_tok", k <= E, f"a token cannot visit more experts than num_experts = {E}"),
            ("head_dim", self.head_dim % 2 == 0, "must be even: the rotary embedding turns two halves"),
            ("mlp_only_layers", max(self.mlp_only_layers, default=0) <= last, f"layers are numbered 0 to {last}"),
        )
        return self

    def is_moe(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def _layer_parameters(self, layer: int) -> Iterator[Parameter]:
        H, E, D, std = self.hidden_size, self.num_experts, self.head_dim, self.initializer_range
        q_width, kv_width = self.num_attention_heads * D, self.num_key_value_heads * D
        prefix = f"model.layers.{layer}"
        yield vector(f"{prefix}.input_layernorm.weight", (H,), "ones", layer)
        for name, shape in (("q", (q_width, H)), ("k", (kv_width, H)), ("v", (kv_width, H)), ("o", (H, q_width))):
            yield from linear(f"{prefix}.self_attn.{name}_proj", shape, std, layer, bias=self.attention_bias)
        yield vector(f"{prefix}.self_attn.q_norm.weight", (D,), "ones", layer)
        yield vector(f"{prefix}.self_attn.k_norm.weight", (D,), "ones", layer)
        yield vector(f"{prefix}.post_attention_layernorm.weight", (H,), "ones", layer)
        if self.is_moe(layer):
            width = self.moe_intermediate_size
            yield matrix(f"{prefix}.mlp.gate.weight", (E, H), std, layer, fp32=True)
            yield matrix(f"{prefix}.mlp.experts.gate_up_proj", (E, 2 * width, H), std, layer)  # gate rows, then up
            yield matrix(f"{prefix}.mlp.experts.down_proj", (E, H, width), std, layer)
        else:
            yield from mlp(f"{prefix}.mlp", H, self.intermediate_size, std, layer)

    def parameters(self) -> tuple[Parameter, ...]:
        return whole_table(self, self.initializer_range, self._layer_parameters)

    def hf_tensors(self) -> tuple[HfTensor, ...]:
        """As the family is published: one matrix per expert and projection, out x in as ours, rotary halves as ours."""
        return usual_files(self)

    def hf_config(self) -> dict[str, object]:
        """Every field of ours; the rope base under its old name too, for readers before transformers 5."""
        fields = self.model_dump(mode="json", exclude_none=True)
        return {"architectures": ["Qwen3MoeForCausalLM"], **fields, "rope_theta": self.rope_parameters.rope_theta}

    def linear_weights(self, layer: int) -> int:
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads  # q and o, k and v
        weights = heads * self.head_dim * self.hidden_size
        if not self.is_moe(layer):
            return weights + 3 * self.intermediate_size * self.hidden_size
        experts = 3 * self.num_experts_per_tok * self.moe_intermediate_size
        return weights + (self.num_experts + experts) * self.hidden_size

    def attention_flops(self, layer: int, sequence_length: int) -> float:
        return 6 * self.num_attention_heads * 2 * self.head_dim * causal_keys(sequence_length)

    def carried(self, layer: int) -> Carried:
        return Carried(2 * self.num_key_value_heads * self.head_dim)


IGNORED = {
    **NO_EFFECT,
    "sliding_window": "use_sliding_window, which has to be false, decides",
    "max_window_layers": "use_sliding_window, which has to be false, decides",
}
