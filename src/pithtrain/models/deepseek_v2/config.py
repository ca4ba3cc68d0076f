"""DeepSeek-V2 and V3 in numbers: Hugging Face fields, parameter table, FLOPs. No torch.

Pre-norm blocks; multi-head latent attention (keys and values come from one narrow latent per token, the rotary part
of the key is shared by all heads); a feed-forward of routed experts plus shared ones that every token visits, dense in
the first layers. `model_type` decides the router: V2 a softmax, plain top-k or within the best groups; V3 a sigmoid
whose choice, never its weights, is moved by a bias that follows the load.

FLOPs per token (forward and backward, `6 x` the weights a token meets, plus the attention core): for V2-Lite at 4096
tokens 27 x (6 x 13.8 M + 62.9 M) + 6 x (67.2 M dense + 26 x 69.3 M MoE) + 6 x 209.7 M (head) = 16.407 GFLOP; 15.71 B
parameters, of which 2.451 B meet a token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pithtrain.models.contract import (
    NO_EFFECT,
    Carried,
    Integer,
    ModelConfig,
    Parameter,
    PlainRope,
    Positive,
    Rule,
    YarnRope,
    experts,
    linear,
    matrix,
    mlp,
    only,
    vector,
)


class Yarn(YarnRope):
    """On the `qk_rope_head_dim` part. Hugging Face and the published code read an absent or zero mscale differently, so
    both are needed and above 0."""

    mscale: float = Field(gt=0, description="strength of the factor on cos and sin")
    mscale_all_dim: float = Field(
        gt=0, description="strength of the squared factor on the softmax scale, taken off cos and sin"
    )


ROUTERS = {
    "deepseek_v2": ("softmax greedy", "softmax group_limited_greedy"),
    "deepseek_v3": ("sigmoid noaux_tc",),
}
"""scoring_func and topk_method of each model_type."""


class Config(ModelConfig):
    """The HF fields of DeepSeek-V2 and V3."""

    IGNORED: ClassVar[Mapping[str, str]] = {
        **NO_EFFECT,
        "aux_loss_alpha": "balance coefficients come from moe",
        "seq_aux": "the kind of balance comes from moe.load_balance_type",
        "ep_size": "where experts live comes from parallelism",
        "pretraining_tp": "a way to cut products that changes no result",
        "num_nextn_predict_layers": "the multi-token prediction layers behind the model are not built",
        "num_mtp_layers": "the multi-token prediction layers behind the model are not built",
        "head_dim": "it is qk_rope_head_dim, whatever stands there",
        "qk_head_dim": "it is qk_nope_head_dim + qk_rope_head_dim, whatever stands there",
        "auto_map": "names code in a model's folder, which is never run",
    }
    EXPERTS: ClassVar[str] = "n_routed_experts"
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
    }

    model_type: Literal["deepseek_v2", "deepseek_v3"] = Field(description="HF's name; it decides the router")
    num_key_value_heads: Positive | None = Field(default=None, description="as many as heads: the latent is shared")
    q_lora_rank: Positive | None = Field(description="width of the query's latent; null: one matrix makes the queries")
    kv_lora_rank: Positive = Field(description="width of the latent that keys and values come from")
    qk_nope_head_dim: Positive = Field(description="width of a head's query and key without position")
    qk_rope_head_dim: Positive = Field(description="width of the rotated part, even; the key's is shared by all heads")
    v_head_dim: Positive = Field(description="width of a head's value")
    attention_bias: bool = Field(description="biases on the query's and the key/value's down projection, and on o")
    intermediate_size: Positive = Field(description="width of a dense feed-forward")
    mlp_bias: bool = Field(
        default=False, description="V2: biases in dense and shared feed-forwards; files leave it out"
    )
    moe_intermediate_size: Positive = Field(description="I, width of one expert")
    n_routed_experts: Positive = Field(description="E, routed experts of an MoE layer")
    n_shared_experts: Positive = Field(description="experts that every token visits, one matrix of this many times I")
    first_k_dense_replace: Annotated[Integer, Field(ge=0)] = Field(description="layers at the start that are dense")
    moe_layer_freq: Annotated[Integer, only(1)] = Field(default=1, description="every later layer has experts")
    scoring_func: Literal["softmax", "sigmoid"] = Field(description="follows from model_type where it is left out")
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = Field(
        description="how experts are chosen; noaux_tc follows from deepseek_v3 where it is left out"
    )
    n_group: Positive | None = Field(default=None, description="groups of experts; greedy reads none")
    topk_group: Positive | None = Field(default=None, description="groups open to a token; greedy reads none")
    norm_topk_prob: bool = Field(description="V3: whether the k routing weights are divided by their sum")
    routed_scaling_factor: float = Field(gt=0, description="multiplies the routing weights at the end")
    rope_parameters: PlainRope | Yarn = Field(
        discriminator="rope_type", description="or rope_theta and rope_scaling beside the other fields"
    )
    rope_interleave: bool = Field(
        default=True, description="rotated pairs are neighbours, as in every file without the field; V3 may say halves"
    )
    quantization_config: Annotated[
        object, only(None, "fp8 files are not read: convert them to bf16, then take this field out of config.json")
    ] = Field(default=None, description="of files in fp8")

    @classmethod
    def canonical(cls, fields: dict[str, object]) -> dict[str, object]:
        """scoring_func, and V3's topk_method, by model_type where they are left out."""
        follow = {
            "deepseek_v2": {"scoring_func": "softmax"},
            "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        }
        return {**follow.get(str(fields.get("model_type")), {}), **super().canonical(fields)}

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        E, k, v3, heads = self.n_routed_experts, self.num_experts_per_tok, self.sigmoid, self.num_attention_heads
        yield "num_key_value_heads", self.num_key_value_heads in (None, heads), f"must be num_attention_heads = {heads}"
        yield "qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "must be even: the rotary embedding turns pairs"
        neighbours = "deepseek_v2 rotates neighbours, whatever a file says"
        yield "rope_interleave", v3 or self.rope_interleave, neighbours
        yield "mlp_bias", not (v3 and self.mlp_bias), "deepseek_v3 has no such biases"
        two_readings = "the published V2 code then leaves routed_scaling_factor out, transformers ignores the field"
        yield "norm_topk_prob", v3 or not self.norm_topk_prob, f"must be false for deepseek_v2: {two_readings}"
        router, built = f"{self.scoring_func} {self.topk_method}", ROUTERS[self.model_type]
        yield "topk_method", router in built, f"{self.model_type} has {' or '.join(built)}, not {router}"
        if self.topk_method == "greedy":
            return
        num, kept, least = self.n_group or E + 1, self.topk_group or 0, 2 if v3 else 1
        size = E // num
        groups = f"must divide n_routed_experts = {E} into groups of at least {least}; 1 is one group"
        yield "n_group", E % num == 0 and size >= least, groups
        left = f"must be at most n_group and leave num_experts_per_tok = {k} experts open"
        yield "topk_group", 0 < kept <= num and kept * size >= k, left

    @property
    def num_experts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.n_routed_experts

    @property
    def sigmoid(self) -> bool:
        """Whether the router is V3's."""
        return self.model_type == "deepseek_v3"

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def _projections(self) -> Iterator[tuple[str, int, int, bool]]:
        """Attention's matrices: name, out, in, whether attention_bias gives it a bias."""
        H, heads = self.hidden_size, self.num_attention_heads
        if self.q_lora_rank is None:
            yield "q_proj", heads * self.qk_head_dim, H, False
        else:
            yield "q_a_proj", self.q_lora_rank, H, True
            yield "q_b_proj", heads * self.qk_head_dim, self.q_lora_rank, False
        yield "kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim, H, True
        yield "kv_b_proj", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank, False
        yield "o_proj", H, heads * self.v_head_dim, True

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        H, E, I = self.hidden_size, self.n_routed_experts, self.moe_intermediate_size  # noqa: E741
        yield vector("input_layernorm.weight", (H,), "ones")
        for name, out, width, biased in self._projections():
            bias = biased and self.attention_bias
            latent = name.startswith("kv_")  # narrow, and what all keys and values are made of, on whatever rank
            yield from linear(f"self_attn.{name}", (out, width), bias=bias, exact=latent)
        if self.q_lora_rank is not None:
            yield vector("self_attn.q_a_layernorm.weight", (self.q_lora_rank,), "ones")
        yield vector("self_attn.kv_a_layernorm.weight", (self.kv_lora_rank,), "ones")
        yield vector("post_attention_layernorm.weight", (H,), "ones")
        if not self.is_moe(layer):
            yield from mlp("mlp", H, self.intermediate_size, bias=self.mlp_bias)
            return
        yield matrix("mlp.gate.weight", (E, H), fp32=True)
        if self.sigmoid:
            yield replace(vector("mlp.gate.e_score_correction_bias", (E,), "zeros"), update="load")
        yield from experts("mlp.experts", E, H, I)
        yield from mlp("mlp.shared_experts", H, self.n_shared_experts * I, bias=self.mlp_bias)

    def hf_config(self) -> dict[str, Any]:
        """Null too where HF's default is a number; the rope's scaling under its old name too, for the published code
        and readers before transformers 5; no multi-token prediction layers."""
        fields = super().hf_config()
        rope = fields["rope_parameters"]
        if rope["rope_type"] != "default":
            fields["rope_scaling"] = rope | {"type": rope["rope_type"]}
            fields["rope_parameters"] = fields["rope_scaling"]  # transformers 5 takes the one for the other
        return {
            **fields,
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": self.q_lora_rank,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "num_nextn_predict_layers": 0,
        }

    def carried(self, layer: int) -> Carried:
        heads, rope = self.num_attention_heads, self.qk_rope_head_dim
        product = heads * (self.qk_nope_head_dim + self.v_head_dim)
        core_width = heads * (self.qk_head_dim + self.v_head_dim)
        return Carried(core_width, self.kv_lora_rank + rope, None, product, heads * self.qk_head_dim)
