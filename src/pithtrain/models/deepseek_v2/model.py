"""DeepSeek-V2 and V3, told whole: latent attention, both routers, shared experts, and how a layer is put together.

    q = W_q x,  or  W_qb norm(W_qa x)                    per head: nope + rope wide
    c, kr = W_kva x;   k, v = W_kvb norm(c)              c: one latent per token;  kr: one rotated key for all heads
    mid = h + o_proj(attention([q, rope(qr)], [k, rope(kr)], v))        x = norm(h);  v has its own width
    n   = norm(mid)
    MoE:    w, ids = router(n);   h' = mid + shared(n) + sum over experts of w * down(silu(gate) * up)
    dense:  h' = mid + down(silu(gate(n)) * up(n))

Pre-norm, RMSNorm in fp32. Every norm takes rms_norm_eps, those of the two latents too, as the reports have it; the
transformers classes (5.24) leave 1e-6 in those two whatever the config says, which a comparison has to set right.
A region hands out norm(c) and rope(kr), which is what travels where sequences are cut over ranks; whole keys and values
are made of them where they are used (`Latent`).

Legend: B sequences, S positions, T = B * S tokens, H hidden, E experts, K experts per token, N heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.models.contract import Layer
from pithtrain.models.deepseek_v2.config import Config
from pithtrain.ops.experts import Experts
from pithtrain.ops.linear import Linears, Region, Weight, accumulate_dtype, split, take
from pithtrain.ops.norm import rms_norm
from pithtrain.ops.ring import Core
from pithtrain.ops.rope import Yarn, rope_tables, rotate_halves, rotate_pairs, yarn_mscale
from pithtrain.ops.router import Balance, Groups, Routing, route_sigmoid, route_softmax
from pithtrain.ops.swiglu import swiglu

Vectors = Mapping[str, Tensor]


def rope(config: Config, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rotary tables of `length` positions, made once per run; `dtype` is the accumulate dtype."""
    rope, yarn = config.rope_parameters, None
    if rope.rope_type == "yarn":
        amplitude = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
        original = rope.original_max_position_embeddings
        yarn = Yarn(rope.factor, original, rope.beta_fast, rope.beta_slow, truncate=True, amplitude=amplitude)
    return rope_tables(config.qk_rope_head_dim, rope.rope_theta, length, device, dtype, yarn)


def softmax_scale(config: Config) -> float:
    """1 / sqrt(width of query and key), times YaRN's squared factor; older ports leave the factor out."""
    rope = config.rope_parameters
    factor = yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2 if rope.rope_type == "yarn" else 1
    return config.qk_head_dim**-0.5 * factor


def build_layer(config: Config, index: int, weights: Mapping[str, Weight], balance: Balance) -> Layer:
    """Layer `index` over the weights of this rank, found by their canonical names."""
    matrices, vectors = split(weights, f"model.layers.{index}.")
    bias = matrices.pop("mlp.gate.e_score_correction_bias", None)  # V3's; it has no gradient
    latent = Latent(matrices.pop("self_attn.kv_b_proj"), config.num_attention_heads, config.qk_nope_head_dim)
    core = Core(softmax_scale(config), config.num_attention_heads * config.v_head_dim, expand=latent)
    into = [f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")]
    before = Region(
        partial(_before, config),
        take(matrices, *into, *(f"{name}.bias" for name in into)),
        take(vectors, "input_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    )
    experts = shared = None
    if config.is_moe(index):
        experts = Experts(matrices.pop("mlp.experts.gate_up_proj"), matrices.pop("mlp.experts.down_proj"))
        names = [name for name in matrices if name.startswith("mlp.shared_experts.")]
        shared = Region(_shared, take(matrices, *names), {})
    after = partial(_after, config, balance if experts else None, None if bias is None else bias.data)
    return Layer(index, before, core, Region(after, matrices, vectors), shared, experts)


@dataclass(frozen=True)
class Latent:
    """Whole keys [B, S, N, nope + R] and values [B, S, N, width] of norm(c) [B, S, L] and rope(kr) [B, S, 1, R]."""

    weight: Weight  # W_kvb
    heads: int
    nope: int

    def forward(self, *sources: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = sources
        kv = F.linear(latent, self.weight.data).unflatten(-1, (self.heads, -1))
        return torch.cat((kv[..., : self.nope], k_rope.expand(-1, -1, self.heads, -1)), -1), kv[..., self.nope :]

    def backward(self, dk: Tensor, dv: Tensor, *sources: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Gradients of latent, and of k_rope in the accumulate dtype; dy and x of the weight's."""
        dkv = torch.cat((dk[..., : self.nope], dv), -1).flatten(2)
        dk_rope = dk[..., self.nope :].sum(2, keepdim=True, dtype=accumulate_dtype(dk.dtype))
        return (dkv @ self.weight.data, dk_rope), dkv, sources[0]


def _before(
    config: Config, lin: Linears, vectors: Vectors, h_BSH: Tensor, turns: Tensor
) -> tuple[tuple[Tensor, ...], None]:
    """h -> q [B, S, N, nope + rope], norm(c) [B, S, L], rope(kr) [B, S, 1, rope]."""
    eps, heads = config.rms_norm_eps, config.num_attention_heads
    nope, turned = config.qk_nope_head_dim, config.qk_rope_head_dim
    rotate = rotate_pairs if config.rope_interleave else rotate_halves
    x = rms_norm(h_BSH, vectors["input_layernorm"], eps)
    if config.q_lora_rank is None:
        q = lin("self_attn.q_proj", x)
    else:
        q = lin("self_attn.q_b_proj", rms_norm(lin("self_attn.q_a_proj", x), vectors["self_attn.q_a_layernorm"], eps))
    q_nope, q_rope = q.unflatten(-1, (heads, -1)).split((nope, turned), dim=-1)
    q = torch.cat((q_nope, rotate(q_rope, turns)), dim=-1)
    latent, k_rope = lin("self_attn.kv_a_proj_with_mqa", x).split((config.kv_lora_rank, turned), dim=-1)
    latent = rms_norm(latent, vectors["self_attn.kv_a_layernorm"], eps)
    return (q, latent, rotate(k_rope.unsqueeze(2), turns)), None


def _after(
    config: Config,
    balance: Balance | None,
    bias_E: Tensor | None,
    lin: Linears,
    vectors: Vectors,
    h_BSH: Tensor,
    out: Tensor,
    ids_TK: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Routing | None]:
    """h, out of attention -> (mid [B, S, H], n [T, H], weights [T, K] fp32), routing; without `balance`, in a dense
    layer, (h',)."""
    mid = h_BSH + lin("self_attn.o_proj", out)
    n = rms_norm(mid, vectors["post_attention_layernorm"], config.rms_norm_eps)
    if balance is None:
        return (mid + _mlp("mlp", lin, n),), None
    n = n.flatten(0, 1)
    k, normalize, factor = config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor
    groups = None
    if config.topk_method != "greedy" and config.n_group and config.topk_group:
        groups = Groups(config.n_group, config.topk_group)
    logits = lin("mlp.gate", n)
    if bias_E is None:
        weights_TK, routing = route_softmax(logits, k, normalize, factor, groups, balance, ids_TK)
    else:
        weights_TK, routing = route_sigmoid(logits, bias_E, k, normalize, factor, groups, balance, ids_TK)
    return (mid, n, weights_TK), routing


def _shared(lin: Linears, vectors: Vectors, n_TH: Tensor) -> tuple[tuple[Tensor], None]:
    """n -> (x,): the experts that every token visits, one MLP."""
    return (_mlp("mlp.shared_experts", lin, n_TH),), None


def _mlp(name: str, lin: Linears, n: Tensor) -> Tensor:
    return lin(f"{name}.down_proj", swiglu(lin(f"{name}.gate_proj", n), lin(f"{name}.up_proj", n)))
