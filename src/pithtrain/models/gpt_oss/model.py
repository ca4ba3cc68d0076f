"""GPT-OSS (gpt-oss-20b, -120b), told whole: attention, router, and how a layer is put together.

    mid = h + o_proj(attention(rope(q), rope(k), v; window, sinks))         q, k, v from norm(h); grouped queries
    n   = norm(mid)
    z, ids = the k best logits of router(n) and their experts;  w = softmax(z)
    h'  = mid + sum over experts of w * (down(act) + bias)
    act = (up + 1) * gate * sigmoid(alpha * gate),  gate = min(gate, limit),  up = clamp(up, -limit, limit)

Pre-norm, RMSNorm in fp32, biases on every linear but the head. A sink is a logit per head that joins the softmax's
denominator alone, so that a head may look at nothing. Every second layer sees a window (`Config.window`).
Attention, the routed experts and the sum are the tape's; this file holds what lies between two of them.

Legend: B sequences, S positions, T = B * S tokens, H hidden, D head width, E experts, K experts per token.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from pithtrain.models.contract import Layer
from pithtrain.models.gpt_oss.config import Config
from pithtrain.ops.experts import Experts
from pithtrain.ops.linear import Linears, Region, Weight, split, take
from pithtrain.ops.norm import rms_norm
from pithtrain.ops.ring import Core
from pithtrain.ops.rope import Yarn, rope_tables, rotate_halves, yarn_mscale
from pithtrain.ops.router import Balance, Routing, route_top_k
from pithtrain.ops.swiglu import Glu

Vectors = Mapping[str, Tensor]


def rope(config: Config, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rotary tables of `length` positions, made once per run; `dtype` is the accumulate dtype."""
    rope, yarn = config.rope_parameters, None
    if rope.rope_type == "yarn":
        amplitude = yarn_mscale(rope.factor) if rope.attention_factor is None else rope.attention_factor
        original = rope.original_max_position_embeddings
        yarn = Yarn(rope.factor, original, rope.beta_fast, rope.beta_slow, rope.truncate, amplitude)
    return rope_tables(config.head_dim, rope.rope_theta, length, device, dtype, yarn)


def build_layer(config: Config, index: int, weights: Mapping[str, Weight], balance: Balance) -> Layer:
    """Layer `index` over the weights of this rank, found by their canonical names."""
    matrices, vectors = split(weights, f"model.layers.{index}.")
    gate_up, gate_up_bias, down, down_bias = (
        matrices.pop(f"mlp.experts.{name}")
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    )
    experts = Experts(gate_up, down, gate_up_bias, down_bias, Glu(config.swiglu_alpha, config.swiglu_limit, 1.0))
    names = [f"self_attn.{p}_proj" for p in "qkv"]
    before = Region(
        partial(_before, config),
        take(matrices, *names, *(f"{name}.bias" for name in names)),
        take(vectors, "input_layernorm"),
    )
    width = config.num_attention_heads * config.head_dim
    core = Core(config.head_dim**-0.5, width, config.window(index), vectors.pop("self_attn.sinks"))
    return Layer(index, before, core, Region(partial(_after, config, balance), matrices, vectors), None, experts)


def _before(
    config: Config, lin: Linears, vectors: Vectors, h_BSH: Tensor, turns: Tensor
) -> tuple[tuple[Tensor, ...], None]:
    """h -> q [B, S, query heads, D], k and v [B, S, key heads, D]."""
    x = rms_norm(h_BSH, vectors["input_layernorm"], config.rms_norm_eps)
    q, k, v = (lin(f"self_attn.{p}_proj", x).unflatten(-1, (-1, config.head_dim)) for p in "qkv")
    return (rotate_halves(q, turns), rotate_halves(k, turns), v), None


def _after(
    config: Config,
    balance: Balance,
    lin: Linears,
    vectors: Vectors,
    h_BSH: Tensor,
    out: Tensor,
    ids_TK: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Routing]:
    """h, out of attention -> (mid [B, S, H], n [T, H], weights [T, K] fp32), routing."""
    mid = h_BSH + lin("self_attn.o_proj", out)
    n = rms_norm(mid, vectors["post_attention_layernorm"], config.rms_norm_eps).flatten(0, 1)
    logits = lin("mlp.router", n)
    weights_TK, routing = route_top_k(logits, config.num_experts_per_tok, balance, ids_TK)
    return (mid, n, weights_TK), routing
