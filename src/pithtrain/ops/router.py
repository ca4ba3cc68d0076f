"""Routing: which experts a token visits, with what weight, and how their load is balanced.

Everything is fp32 (float64 for float64 compute), so that rounding makes no ties between scores. Equal scores go to the
lowest expert index, by a stable sort; `torch.topk` would pick another. A sort gives a permutation, so the ids of a
token are distinct and in range whatever the logits hold, NaN included; `Routing.z` tells.

Balance (Switch Transformer, section 2.2; DeepSeek-V2, section 2.1.4), over a set of tokens:

    f_i = share of the slots that went to expert i (no gradient);  p_i = mean probability of expert i
    bal = E * sum_i f_i p_i           1.0 when balanced, E / K when all go to the same K experts

The sets: aux_loss, the micro-batch on one rank; seq_aux_loss, each sequence, then the mean; global_aux_loss takes f
from the global batch of the step before, so that no layer needs a collective (E equal shares before the first step).
Every token counts, whatever its label: routing does not know labels. On one layer the value in transformers is K times
this one; over L layers theirs pools what is summed here, so a coefficient from there is multiplied by K / L.

The loss to add is `coef * bal`, averaged over the sets of the *global* batch. Each call adds its own part, `coef *
(E / B) * sum_t sum_i f_i p_ti` with B the tokens of the global batch, and gradients are summed: the same on every mesh.
So is `z_coef / B * sum_t logsumexp(z_t)^2`. They enter the graph through an identity on the routing weights, so they
reach the router under any pipeline schedule with no side channel.

Where sequences are cut over ranks (context parallelism), so are the sets of aux_loss and seq_aux_loss, and their f is
known when counts have been summed over those ranks. So there sum_t p_ti, times E / B, leaves its region as one more
output (`with_sums`), and its gradient comes with the backward (`CutSets`): no graph waits for a collective.

Every router takes `ids_TK` where the choice has been made, by the call that a backward makes again.

Without a loss (DeepSeek-V3): a bias per expert that chooses and never weighs, moved once a step by `bias_step`.

Legend: T tokens of this micro-batch, E experts, K experts per token, L layers, N sets, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work


@dataclass(frozen=True)
class Balance:
    """How a layer's load is balanced. `counts_E` int64: its slots per expert in the global batch of the last step that
    was not skipped, zeros before the first; written in place once a step. `forced_E`: an order of its experts
    (`forced_order`), or None. Only tensors tell one layer from another, so that all share a compiled graph."""

    kind: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
    coef: float  # 0 for kind none
    z_coef: float
    global_tokens: int  # of a step
    sequence_length: int  # tokens of a micro-batch lie sequence after sequence
    counts_E: Tensor
    forced_E: Tensor | None
    token_T: Tensor | None = None  # which tokens of the micro-batch these are, for `forced_E`; None: all, in order
    shared: bool = False  # its sets lie on several ranks: `Routing.sums_NE` and `counts_NE` instead of a loss


def forced_order(experts: int, layer: int) -> Tensor:
    """By which benchmarks route: slot j of the micro-batch's token t goes to expert order[(t K + j) mod E], whatever
    the scores say, with the weight that they give it. A layer's order is that of the layer before, turned by one.

    The load is even over whole rounds of E slots, and the same on every mesh, as t counts within the micro-batch. The
    order is random, and fixed, so that a token's K experts lie on as many ranks as a router's choice does: in their own
    order they would be neighbours, and deduplication would send a token to one rank or two.
    """
    return torch.randperm(experts, generator=torch.Generator().manual_seed(0)).roll(-layer)


class Groups(NamedTuple):
    """Experts in `num` equal groups in their order, of which a token's best `kept` are open to it. Those hold at least
    K experts."""

    num: int
    kept: int


@dataclass(frozen=True)
class Routing:
    """What a router call leaves behind, without gradient.

    `ids_TK` int64, best first; `counts_E` int64 slots per expert; `balance` and `z` this micro-batch's `bal` (0 for
    kind none) and mean squared logsumexp, each times the micro-batch's share of the global batch, so that a sum over
    micro-batches is the mean. `z` is not finite if any logit or selection bias is not (or is so large, 1e17, that
    the sum of squares overflows).
    """

    ids_TK: Tensor
    counts_E: Tensor
    balance: Tensor
    z: Tensor
    counts_NE: Tensor | None = None  # with `Balance.shared`: of each set, this rank's part
    sums_NE: Tensor | None = None  # E / B * sum_t p_ti, with coef times its gradient


def with_sums(
    fn: Callable[..., tuple[tuple[Tensor, ...], Routing]], *args: Any
) -> tuple[tuple[Tensor | None, ...], Routing]:
    """A region's function, with `Routing.sums_NE` as its last output."""
    outputs, r = fn(*args)
    return (*outputs, r.sums_NE), replace(r, sums_NE=None)


def shares(counts_NE: Tensor, dtype: torch.dtype) -> Tensor:
    """f [N, E] from slots per expert of each set; even where there is none."""
    counts_NE = counts_NE + (counts_NE.sum() == 0)
    return counts_NE.to(dtype) / counts_NE.sum(1, keepdim=True)


class CutSets:
    """The balance of one layer and micro-batch whose sets lie on several ranks, while their counts are summed."""

    def __init__(self, sums_NE: Tensor, counts_NE: Tensor | None, start: Callable[[Tensor], Work]):
        """`start` begins to sum in place over the ranks."""
        assert counts_NE is not None, "a router with sums has counts"
        self._sums_NE, self._counts_NE, self._work = sums_NE, counts_NE, start(counts_NE)

    def finish(self) -> tuple[Tensor, Tensor]:
        """`bal`, this rank's part; the gradient of `sums_NE`."""
        self._work.wait()
        share_NE = shares(self._counts_NE, self._sums_NE.dtype)
        return (self._sums_NE * share_NE).sum(), share_NE


class _WithLoss(torch.autograd.Function):
    """Identity on `carrier` whose backward hands gradient 1 to `loss`."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """Indices [T, K] of the k largest scores in descending order; equal scores by ascending index. A copy: they are
    kept until the backward, and a view would keep all E columns."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def route_softmax(
    logits_TE: Tensor,
    k: int,
    normalize: bool,
    factor: float,
    groups: Groups | None,
    balance: Balance,
    ids_TK: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """Softmax over all experts, then top-k of the probabilities (Qwen3-MoE; DeepSeek-V2, whose `groups` are ranked by
    their best probability). `normalize` divides the K weights by their sum, `factor` then multiplies them.

    logits_TE fp32 -> (weights_TK fp32 with gradient, Routing).
    """
    probs_TE = logits_TE.softmax(-1)
    if ids_TK is None:
        ids_TK = _choose(probs_TE, k, groups, 1, balance)
    # p / (sum of the chosen p) is the softmax of the chosen logits, which has no 0 / 0 where forced ids have p = 0
    weights_TK = logits_TE.gather(-1, ids_TK).softmax(-1) if normalize else probs_TE.gather(-1, ids_TK)
    return _balanced(weights_TK * factor, ids_TK, logits_TE, probs_TE, balance)


def route_sigmoid(
    logits_TE: Tensor,
    bias_E: Tensor,
    k: int,
    normalize: bool,
    factor: float,
    groups: Groups | None,
    balance: Balance,
    ids_TK: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """Sigmoid scores; top-k of score + bias, which chooses and never weighs (DeepSeek-V3). A group is ranked by the sum
    of its best two biased scores. For `bal` the probabilities are the scores over their sum; 1e-20 keeps a sum of zeros
    from being a divisor.

    logits_TE, bias_E fp32 -> (weights_TK fp32 with gradient, Routing).
    """
    scores_TE = logits_TE.sigmoid()
    if ids_TK is None:
        ids_TK = _choose(scores_TE + bias_E, k, groups, 2, balance)
    weights_TK = scores_TE.gather(-1, ids_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    shown_TE = logits_TE + 0 * bias_E  # a bias that is not finite would choose forever, and shows nowhere else
    return _balanced(weights_TK * factor, ids_TK, shown_TE, probs_TE, balance)


def route_top_k(logits_TE: Tensor, k: int, balance: Balance, ids_TK: Tensor | None = None) -> tuple[Tensor, Routing]:
    """Top-k of the logits, then softmax over those k (GPT-OSS). For `bal` the softmax is over all experts.

    logits_TE fp32 -> (weights_TK fp32 with gradient, Routing).
    """
    if ids_TK is None:
        ids_TK = _choose(logits_TE, k, None, 1, balance)
    weights_TK = logits_TE.gather(-1, ids_TK).softmax(-1)
    return _balanced(weights_TK, ids_TK, logits_TE, logits_TE.softmax(-1), balance)


def _choose(scores_TE: Tensor, k: int, groups: Groups | None, best: int, balance: Balance) -> Tensor:
    """Expert ids [T, K]; a group is ranked by the sum of its `best` highest scores."""
    tokens, experts = scores_TE.shape
    scores_TE = scores_TE.detach()
    if balance.forced_E is not None:
        token_T = torch.arange(tokens, device=scores_TE.device) if balance.token_T is None else balance.token_T
        return balance.forced_E[(token_T[:, None] * k + torch.arange(k, device=scores_TE.device)) % experts]
    if groups is not None:
        grouped_TGe = scores_TE.unflatten(-1, (groups.num, -1))
        rank_TG = grouped_TGe.sort(dim=-1, descending=True).values[..., :best].sum(-1)
        kept_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter_(-1, top_k(rank_TG, groups.kept), True)
        # -inf and not 0, which would beat a negative score
        scores_TE = grouped_TGe.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)
    return top_k(scores_TE, k)


def _balanced(
    weights_TK: Tensor, ids_TK: Tensor, logits_TE: Tensor, probs_TE: Tensor, balance: Balance
) -> tuple[Tensor, Routing]:
    """The weights with the losses attached, and the statistics."""
    tokens, experts = probs_TE.shape
    sets = tokens // balance.sequence_length if balance.kind == "seq_aux_loss" else 1
    counts_NE = torch.zeros(sets, experts, dtype=torch.int64, device=ids_TK.device)
    chosen = ids_TK.reshape(sets, -1)
    counts_NE.scatter_add_(1, chosen, torch.ones_like(chosen))
    bal, sums_NE = probs_TE.new_zeros(()), None
    if balance.kind != "none":
        sums_NE = experts / balance.global_tokens * probs_TE.unflatten(0, (sets, -1)).sum(1)
        if not balance.shared:
            load_NE = balance.counts_E[None] if balance.kind == "global_aux_loss" else counts_NE
            bal = (sums_NE * shares(load_NE, probs_TE.dtype)).sum()
    z = logits_TE.logsumexp(-1).square().sum() / balance.global_tokens
    coef = balance.coef
    if balance.shared and sums_NE is not None:
        sums_NE, coef = sums_NE.detach() + coef * (sums_NE - sums_NE.detach()), 0.0
    if (coef or balance.z_coef) and weights_TK.requires_grad:
        weights_TK = _WithLoss.apply(weights_TK, coef * bal + balance.z_coef * z)
    strange = torch.where(logits_TE.isfinite(), 0, logits_TE).sum()  # logsumexp is finite with a logit of -inf
    routing = Routing(ids_TK, counts_NE.sum(0), bal.detach(), (z + strange).detach())
    return weights_TK, replace(routing, counts_NE=counts_NE, sums_NE=sums_NE) if balance.shared else routing


def bias_step(counts_E: Tensor, rate: float) -> Tensor:
    """What a step adds to the selection bias: `rate` up where an expert had less than the mean load, down where more.

    counts_E [..., E] int64, slots of the global batch -> [..., E] fp32, no gradient. The sign is taken between integers
    (E * load against the total): in bf16 40,840 and 40,960 are neighbours, and a mean need not be whole. The steps are
    not centred, as a shift that all experts share chooses nothing; so |bias| <= rate * steps is the bound on drift.
    """
    total = counts_E.sum(-1, keepdim=True)
    return rate * (total - counts_E.shape[-1] * counts_E).sign().to(torch.float32)
