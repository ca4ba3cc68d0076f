"""Qwen3-MoE in numbers: Hugging Face fields, parameter table, FLOPs. No torch.

The family of Qwen3-30B-A3B: pre-norm blocks; grouped-query attention with RMSNorm per head on q and k before the
rotary embedding (halves); a feed-forward of routed SwiGLU experts behind a softmax router, or a dense SwiGLU in the
layers that `mlp_only_layers` and `decoder_sparse_step` pick out.

Every field that the forward reads is required, but for decoder_sparse_step, mlp_only_layers and attention_bias, without
which every layer is MoE and none has a bias.

FLOPs per token (forward and backward, `6 x` the weights a token meets, plus the attention core): for the 30B shape at
4096 tokens 48 x (6 x 56.9 M + 0.101 G) + 6 x 311 M = 23.083 GFLOP; 30.53 B parameters, of which 3.042 B meet a token.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pithtrain.models.contract import (
    NO_EFFECT,
    GroupedQueryConfig,
    Integer,
    Parameter,
    PlainRope,
    Positive,
    Rule,
    experts,
    matrix,
    mlp,
    only,
    vector,
)


class Config(GroupedQueryConfig):
    """The HF fields of Qwen3-MoE."""

    IGNORED: ClassVar[Mapping[str, str]] = {
        **NO_EFFECT,
        "sliding_window": "use_sliding_window, which has to be false, decides",
        "max_window_layers": "use_sliding_window, which has to be false, decides",
    }
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    model_type: Literal["qwen3_moe"] = Field(default="qwen3_moe", description="HF's name of this architecture")
    intermediate_size: Positive = Field(description="width of a dense feed-forward")
    moe_intermediate_size: Positive = Field(description="I, width of one expert")
    num_experts: Positive = Field(description="E, routed experts of an MoE layer")
    norm_topk_prob: bool = Field(description="whether the k routing weights are divided by their sum")
    decoder_sparse_step: Positive = Field(default=1, description="layer l is MoE only if (l + 1) is a multiple of this")
    mlp_only_layers: tuple[Annotated[Integer, Field(ge=0)], ...] = Field(
        default=(), strict=False, description="layers (from 0) that are dense whatever decoder_sparse_step says"
    )
    attention_bias: bool = Field(default=False, description="biases on q, k, v and o")
    rope_parameters: PlainRope = Field(description="or rope_theta beside the other fields; no scaling is built")
    use_sliding_window: Annotated[bool, only(False)] = Field(
        default=False, description="no window is built for this model"
    )

    @classmethod
    def canonical(cls, fields: dict[str, object]) -> dict[str, object]:
        """mlp_only_layers null is an empty list."""
        fields = super().canonical(fields)
        if fields.get("mlp_only_layers", ()) is None:
            fields["mlp_only_layers"] = []
        return fields

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        last = self.num_hidden_layers - 1
        yield "mlp_only_layers", max(self.mlp_only_layers, default=0) <= last, f"layers are numbered 0 to {last}"

    def is_moe(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        H, E = self.hidden_size, self.num_experts
        yield vector("input_layernorm.weight", (H,), "ones")
        yield from self.projections()
        yield vector("self_attn.q_norm.weight", (self.head_dim,), "ones")
        yield vector("self_attn.k_norm.weight", (self.head_dim,), "ones")
        yield vector("post_attention_layernorm.weight", (H,), "ones")
        if self.is_moe(layer):
            yield matrix("mlp.gate.weight", (E, H), fp32=True)
            yield from experts("mlp.experts", E, H, self.moe_intermediate_size)
        else:
            yield from mlp("mlp", H, self.intermediate_size)
