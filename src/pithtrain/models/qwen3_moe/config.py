"""Qwen3-MoE in numbers: Hugging Face fields, parameter table, FLOPs, a tiny size. No torch.

The family of Qwen3-30B-A3B: pre-norm blocks; grouped-query attention with RMSNorm per head on q and k before the
rotary embedding (halves); a feed-forward of routed SwiGLU experts behind a softmax router, or a dense SwiGLU in the
layers that `mlp_only_layers` and `decoder_sparse_step` pick out.

Every field that the forward reads is required: a config.json that leaves one out would take a class default and train
another model. Fields of which one case is built accept that case alone, `IGNORED` lists those without effect, and what
is on neither list is refused.

FLOPs per token (forward and backward, `6 x` the weights a token meets, plus the attention core): for the 30B shape at
4096 tokens 48 x (6 x 56.9 M + 0.101 G) + 6 x 311 M = 23.083 GFLOP; 30.53 B parameters, of which 3.042 B meet a token.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from pithtrain.errors import Problem, SpecError
from pithtrain.models.contract import HfTensor, Integer, Parameter, Positive, Strict, only


class RopeParameters(Strict):
    """Rotary embedding. A scaled kind is refused: its keys are not read here."""

    rope_type: Annotated[str, only("default")] = Field(description="no scaling is built for this model")
    rope_theta: float = Field(gt=0, description="base of the rotation's wave lengths")


class Config(Strict):
    """The HF fields of Qwen3-MoE. `rope_theta` and `num_local_experts` are read as the spellings of other versions of
    the format, of `rope_parameters` and `num_experts`. Raises SpecError when fields contradict each other."""

    model_type: Annotated[str, only("qwen3_moe")] = Field(
        default="qwen3_moe", description="HF's name of this architecture"
    )
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
    rope_parameters: RopeParameters = Field(description="or rope_theta beside the other fields")
    rope_scaling: None = Field(default=None, description="no scaling is built for this model")
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
        """The spellings of other versions of the format moved to ours. Where both stand (an export of ours has both for
        old and new readers) they must say the same; else the other is left, and then refused as unknown."""
        fields = dict(fields)
        if "rope_theta" in fields:
            rope = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
            if fields.setdefault("rope_parameters", rope) == rope:
                del fields["rope_theta"]
        if "num_local_experts" in fields:
            experts = fields["num_local_experts"]
            if fields.setdefault("num_experts", experts) == experts:
                del fields["num_local_experts"]
        if fields.get("mlp_only_layers", ()) is None:
            fields["mlp_only_layers"] = []
        return fields

    @model_validator(mode="before")
    @classmethod
    def _read_other_spellings(cls, fields: Any) -> Any:
        return cls.canonical(cast(dict[str, object], fields)) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[Problem] = []
        if self.num_attention_heads % self.num_key_value_heads:
            rule = f"must divide num_attention_heads = {self.num_attention_heads}"
            problems.append(Problem("num_key_value_heads", self.num_key_value_heads, rule))
        if self.num_experts_per_tok > self.num_experts:
            rule = f"a token cannot visit more experts than num_experts = {self.num_experts}"
            problems.append(Problem("num_experts_per_tok", self.num_experts_per_tok, rule))
        if self.head_dim % 2:
            problems.append(Problem("head_dim", self.head_dim, "must be even: the rotary embedding turns two halves"))
        beyond = [layer for layer in self.mlp_only_layers if layer >= self.num_hidden_layers]
        if beyond:
            rule = f"layers are numbered 0 to {self.num_hidden_layers - 1}, so {beyond} do not exist"
            problems.append(Problem("mlp_only_layers", list(self.mlp_only_layers), rule))
        if problems:
            raise SpecError(problems)
        return self

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embedding."""
        return self.rope_parameters.rope_theta

    def is_moe(self, layer: int) -> bool:
        """Whether this layer (from 0) has routed experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def _matrix(self, name: str, shape: tuple[int, ...], layer: int | None) -> Parameter:
        kind: Literal["dense", "expert"] = "expert" if ".experts." in name else "dense"
        fp32 = name.endswith(".mlp.gate.weight")
        return Parameter(name, shape, kind, "normal", self.initializer_range, layer, decay=True, fp32=fp32)

    def _vector(self, name: str, size: int, layer: int | None) -> Parameter:
        init: Literal["ones", "zeros"] = "zeros" if name.endswith(".bias") else "ones"
        return Parameter(name, (size,), "dense", init, 0.0, layer, decay=False, fp32=True)

    def _layer_parameters(self, layer: int) -> Iterator[Parameter]:
        H, E, D = self.hidden_size, self.num_experts, self.head_dim
        q_width, kv_width = self.num_attention_heads * D, self.num_key_value_heads * D
        prefix = f"model.layers.{layer}"
        yield self._vector(f"{prefix}.input_layernorm.weight", H, layer)
        for name, shape in (
            ("q", (q_width, H)),
            ("k", (kv_width, H)),
            ("v", (kv_width, H)),
            ("o", (H, q_width)),
        ):
            yield self._matrix(f"{prefix}.self_attn.{name}_proj.weight", shape, layer)
            if self.attention_bias:
                yield self._vector(f"{prefix}.self_attn.{name}_proj.bias", shape[0], layer)
        yield self._vector(f"{prefix}.self_attn.q_norm.weight", D, layer)
        yield self._vector(f"{prefix}.self_attn.k_norm.weight", D, layer)
        yield self._vector(f"{prefix}.post_attention_layernorm.weight", H, layer)
        if self.is_moe(layer):
            width = self.moe_intermediate_size
            yield self._matrix(f"{prefix}.mlp.gate.weight", (E, H), layer)
            yield self._matrix(f"{prefix}.mlp.experts.gate_up_proj", (E, 2 * width, H), layer)  # gate rows, then up
            yield self._matrix(f"{prefix}.mlp.experts.down_proj", (E, H, width), layer)
        else:
            width = self.intermediate_size
            yield self._matrix(f"{prefix}.mlp.gate_proj.weight", (width, H), layer)
            yield self._matrix(f"{prefix}.mlp.up_proj.weight", (width, H), layer)
            yield self._matrix(f"{prefix}.mlp.down_proj.weight", (H, width), layer)

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, under its canonical name; a tied head is the embedding and has no row."""
        table = [self._matrix("model.embed_tokens.weight", (self.vocab_size, self.hidden_size), None)]
        for layer in range(self.num_hidden_layers):
            table.extend(self._layer_parameters(layer))
        table.append(self._vector("model.norm.weight", self.hidden_size, None))
        if not self.tie_word_embeddings:
            table.append(self._matrix("lm_head.weight", (self.vocab_size, self.hidden_size), None))
        return tuple(table)

    def hf_tensors(self) -> tuple[HfTensor, ...]:
        """As the family is published: one matrix per expert and projection, out x in as ours, rotary halves as ours."""
        rows: list[HfTensor] = []
        for info in self.parameters():
            if info.kind == "dense":
                rows.append(HfTensor(info.name, info.shape, info.name))
                continue
            experts, out, width = info.shape
            prefix, _, name = info.name.rpartition(".")
            parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
            height = out // len(parts)
            for expert in range(experts):
                for place, part in enumerate(parts):
                    row = expert * out + place * height
                    rows.append(HfTensor(f"{prefix}.{expert}.{part}.weight", (height, width), info.name, row))
        if self.tie_word_embeddings:
            embedding = rows[0]
            rows.append(HfTensor("lm_head.weight", embedding.shape, embedding.parameter, copy=True))
        return tuple(rows)

    def hf_config(self) -> dict[str, object]:
        """Every field of ours; the rope base under its old name too, for readers before transformers 5."""
        fields = self.model_dump(mode="json", exclude_none=True)
        return {"architectures": ["Qwen3MoeForCausalLM"], **fields, "rope_theta": self.rope_theta}

    def _linear_weights(self, layer: int) -> int:
        """Weights of one layer that a token meets in matrix products: k of the E experts."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads  # q and o, k and v
        weights = heads * self.head_dim * self.hidden_size
        if not self.is_moe(layer):
            return weights + 3 * self.intermediate_size * self.hidden_size
        experts = 3 * self.num_experts_per_tok * self.moe_intermediate_size
        return weights + (self.num_experts + experts) * self.hidden_size

    def active_parameters(self) -> int:
        """Weights that one token meets in matrix products; the embedding's lookup is none."""
        layers = sum(self._linear_weights(layer) for layer in range(self.num_hidden_layers))
        return layers + self.vocab_size * self.hidden_size

    def layer_flops(self, layer: int, sequence_length: int) -> float:
        """FLOPs per token of one layer: `6 d_in d_out` per linear, `6 heads (d_qk + d_v) (s + 1) / 2` for the core."""
        core = 6 * self.num_attention_heads * 2 * self.head_dim * (sequence_length + 1) / 2
        return 6 * self._linear_weights(layer) + core

    def head_flops(self) -> float:
        """FLOPs per token of the head."""
        return 6.0 * self.vocab_size * self.hidden_size

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs per token of the model, forward and backward, recomputation not counted."""
        layers = (self.layer_flops(layer, sequence_length) for layer in range(self.num_hidden_layers))
        return sum(layers) + self.head_flops()


IGNORED = {
    "architectures": "model.architecture names the code",
    "transformers_version": "says who wrote the file",
    "_name_or_path": "says where the file came from",
    "dtype": "the compute type comes from training.compute_dtype",
    "torch_dtype": "the compute type comes from training.compute_dtype",
    "use_cache": "training keeps no key/value cache",
    "bos_token_id": "special tokens come from the tokenizer",
    "eos_token_id": "special tokens come from the tokenizer",
    "pad_token_id": "the token corpus holds no padding",
    "sliding_window": "use_sliding_window, which has to be false, decides",
    "max_window_layers": "use_sliding_window, which has to be false, decides",
    "output_router_logits": "balance coefficients come from moe",
    "router_aux_loss_coef": "balance coefficients come from moe",
    "output_attentions": "what a forward returns is no matter of training",
    "output_hidden_states": "what a forward returns is no matter of training",
    "return_dict": "what a forward returns is no matter of training",
    "id2label": "labels of a classifier",
    "label2id": "labels of a classifier",
    "problem_type": "labels of a classifier",
    "chunk_size_feed_forward": "memory of inference",
    "is_encoder_decoder": "the architecture is a decoder",
}

TINY = Config(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    mlp_only_layers=(0,),
    rms_norm_eps=1e-6,
    rope_parameters=RopeParameters(rope_type="default", rope_theta=10000.0),
    tie_word_embeddings=False,
    initializer_range=0.02,
)
