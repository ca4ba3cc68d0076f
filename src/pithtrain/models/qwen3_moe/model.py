"""Qwen3-MoE (Qwen3-30B-A3B and its family), told whole: attention, router, dense MLP, and how a layer is put together.

    mid = h + o_proj(attention(rope(norm_q(q)), rope(norm_k(k)), v))        q, k, v from norm(h); grouped queries
    n   = norm(mid)
    MoE:    w, ids = top-k of softmax(gate(n));   h' = mid + sum over experts of w * down(silu(gate) * up)
    dense:  h' = mid + down(silu(gate(n)) * up(n))

Pre-norm, RMSNorm in fp32, no biases but those of `attention_bias`, RMSNorm per head on q and k before the rotation.
Attention, the routed experts and the sum are the tape's; this file holds what lies between two of them.

Legend: B sequences, S positions, T = B * S tokens, H hidden, D head width, E experts, K experts per token.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from pithtrain.models.contract import Layer
from pithtrain.models.qwen3_moe.config import Config
from pithtrain.ops.experts import Experts
from pithtrain.ops.linear import Linears, Region, Weight, split, take
from pithtrain.ops.norm import rms_norm
from pithtrain.ops.ring import Core
from pithtrain.ops.rope import rope_tables, rotate_halves
from pithtrain.ops.router import Balance, Routing, route_softmax
from pithtrain.ops.swiglu import swiglu

Vectors = Mapping[str, Tensor]


def rope(config: Config, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rotary tables of `length` positions, made once per run; `dtype` is the accumulate dtype."""
    return rope_tables(config.head_dim, config.rope_parameters.rope_theta, length, device, dtype)


def build_layer(config: Config, index: int, weights: Mapping[str, Weight], balance: Balance) -> Layer:
    """Layer `index` over the weights of this rank, found by their canonical names."""
    matrices, vectors = split(weights, f"model.layers.{index}.")
    names = [f"self_attn.{p}_proj" for p in "qkv"]
    before = Region(
        partial(_before, config),
        take(matrices, *names, *(f"{name}.bias" for name in names)),
        take(vectors, "input_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    )
    core = Core(config.head_dim**-0.5, config.num_attention_heads * config.head_dim)
    experts = None
    if config.is_moe(index):
        experts = Experts(matrices.pop("mlp.experts.gate_up_proj"), matrices.pop("mlp.experts.down_proj"))
    after = partial(_after, config, balance if experts else None)
    return Layer(index, before, core, Region(after, matrices, vectors), None, experts)


def _before(
    config: Config, lin: Linears, vectors: Vectors, h_BSH: Tensor, turns: Tensor
) -> tuple[tuple[Tensor, ...], None]:
    """h -> q [B, S, query heads, D], k and v [B, S, key heads, D]."""
    eps = config.rms_norm_eps
    x = rms_norm(h_BSH, vectors["input_layernorm"], eps)
    q, k, v = (lin(f"self_attn.{p}_proj", x).unflatten(-1, (-1, config.head_dim)) for p in "qkv")
    q = rotate_halves(rms_norm(q, vectors["self_attn.q_norm"], eps), turns)
    k = rotate_halves(rms_norm(k, vectors["self_attn.k_norm"], eps), turns)
    return (q, k, v), None


def _after(
    config: Config,
    balance: Balance | None,
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
        return (mid + lin("mlp.down_proj", swiglu(lin("mlp.gate_proj", n), lin("mlp.up_proj", n))),), None
    n, k, normalize = n.flatten(0, 1), config.num_experts_per_tok, config.norm_topk_prob
    weights_TK, routing = route_softmax(lin("mlp.gate", n), k, normalize, 1.0, None, balance, ids_TK)
    return (mid, n, weights_TK), routing
