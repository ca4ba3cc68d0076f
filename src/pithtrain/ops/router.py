"""Routing: which experts a token visits, with what weight, and how their load is balanced.

Everything is fp32 (float64 for float64 compute). Ties go to the lowest expert index, by a stable sort; `torch.topk`
would pick another.

Balance (Switch Transformer, section 2.2; DeepSeek-V2, section 2.1.4), over one micro-batch on one rank:

    f_i = share of the slots that went to expert i (no gradient);  p_i = mean probability of expert i
    bal = E * sum_i f_i p_i           1.0 when balanced

The loss to add is `coef * bal`, averaged over the micro-batches of the *global* batch. Each call adds its own part,
`coef * (E / T) * sum_t sum_i f_i p_ti` with T the tokens of the global batch, and gradients are summed: the same on
every mesh. It enters the graph through an identity on the routing weights, so it reaches the router under any pipeline
schedule with no side channel.

Legend: T tokens of this micro-batch, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Balance:
    """How load is balanced: `coef` of the auxiliary loss (0: none) and the tokens of the global batch."""

    coef: float
    global_tokens: int


@dataclass(frozen=True)
class Routing:
    """What a router call leaves behind, without gradient. `ids_TK` int64; `counts_E` int64 slots per expert; `balance`
    this micro-batch's `bal` times its share of the global batch, so that a sum over micro-batches is the mean."""

    ids_TK: Tensor
    counts_E: Tensor
    balance: Tensor


class _WithLoss(torch.autograd.Function):
    """Identity on `carrier` whose backward hands gradient 1 to `loss`."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """Indices [T, K] of the k largest scores in descending order; equal scores by ascending index."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def route_softmax(logits_TE: Tensor, k: int, normalize: bool, balance: Balance) -> tuple[Tensor, Routing]:
    """Softmax over all experts, then top-k of the probabilities (Qwen3-MoE; `normalize` = `norm_topk_prob`).

    logits_TE fp32 -> (weights_TK fp32 with gradient, Routing).
    """
    tokens, experts = logits_TE.shape
    probs_TE = logits_TE.softmax(-1)
    ids_TK = top_k(probs_TE.detach(), k)
    weights_TK = probs_TE.gather(-1, ids_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    counts_E = torch.zeros(experts, dtype=torch.int64, device=ids_TK.device)
    counts_E.scatter_add_(0, ids_TK.flatten(), torch.ones_like(ids_TK.flatten()))
    share_E = counts_E.to(probs_TE.dtype) / (tokens * k)
    bal = experts / balance.global_tokens * (probs_TE.sum(0) * share_E).sum()
    if balance.coef and torch.is_grad_enabled():
        weights_TK = _WithLoss.apply(weights_TK, balance.coef * bal)
    return weights_TK, Routing(ids_TK, counts_E, bal.detach())  # pyright: ignore[reportArgumentType]
