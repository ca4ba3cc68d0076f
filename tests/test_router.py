"""The routers, their balance and z losses and the bias update, against transformers, loops, and finite differences."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from pithtrain.ops.linear import Region, Segment, WeightGrad
from pithtrain.ops.router import (
    Balance,
    Groups,
    Routing,
    bias_step,
    forced_order,
    route_sigmoid,
    route_softmax,
    route_top_k,
    top_k,
)
from reference import assert_near, make_weight, random

Kind = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
KINDS: list[Kind] = ["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
NONE = torch.zeros(8, dtype=torch.int64)  # before the first step


def balance_of(
    kind: Kind,
    tokens: int,
    coef: float = 0.0,
    z: float = 0.0,
    sequence: int = 1,
    counts: Tensor = NONE,
    forced: Tensor | None = None,
) -> Balance:
    return Balance(kind, coef, z, tokens, sequence, counts, forced)


OFF = balance_of("none", 1)


@dataclass(frozen=True)
class Router:
    """One way to route, called alike whatever its kind; `plain` is the same in loops."""

    how: Literal["softmax", "sigmoid", "top_k"]
    normalize: bool = False
    factor: float = 1.0
    groups: Groups | None = None

    def bias(self, logits: Tensor) -> Tensor:
        """A selection bias, negative for some experts and below minus the score of some."""
        return random(99, logits.shape[1], dtype=logits.dtype, scale=0.4)

    def __call__(
        self, logits: Tensor, k: int, balance: Balance = OFF, bias: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        if self.how == "top_k":
            return route_top_k(logits, k, balance)
        rest = (k, self.normalize, self.factor, self.groups, balance)
        if self.how == "softmax":
            return route_softmax(logits, *rest)
        return route_sigmoid(logits, self.bias(logits) if bias is None else bias, *rest)

    def probs(self, logits: Tensor) -> Tensor:
        scores = 1 / (1 + torch.exp(-logits)) if self.how == "sigmoid" else torch.exp(logits)
        return scores / scores.sum(-1, keepdim=True)

    def plain(self, logits: Tensor, k: int) -> tuple[list[list[int]], Tensor]:
        """(ids, weights with gradient), token by token."""
        ids, weights = [], []
        for z, p in zip(logits, self.probs(logits), strict=True):
            s = 1 / (1 + torch.exp(-z)) if self.how == "sigmoid" else p
            choice = {"softmax": p, "sigmoid": s + self.bias(logits), "top_k": z}[self.how].tolist()
            chosen = choose(choice, k, self.groups, 2 if self.how == "sigmoid" else 1)
            w = torch.stack([s[i] for i in chosen])
            if self.normalize or self.how == "top_k":
                w = w / w.sum()
            ids.append(chosen)
            weights.append(w * self.factor)
        return ids, torch.stack(weights)


def choose(scores: list[float], k: int, groups: Groups | None, best: int) -> list[int]:
    allowed = list(range(len(scores)))
    if groups is not None:
        size = len(scores) // groups.num
        members = [allowed[g * size : (g + 1) * size] for g in range(groups.num)]
        rank = [sum(sorted((scores[i] for i in group), reverse=True)[:best]) for group in members]
        kept = sorted(range(groups.num), key=lambda g: (-rank[g], g))[: groups.kept]
        allowed = sorted(i for g in kept for i in members[g])
    return sorted(allowed, key=lambda i: (-scores[i], i))[:k]


ROUTERS = {
    "softmax": Router("softmax", factor=2.5),
    "softmax normalised": Router("softmax", normalize=True),
    "softmax in groups": Router("softmax", factor=16.0, groups=Groups(4, 2)),
    "sigmoid": Router("sigmoid"),
    "sigmoid in groups": Router("sigmoid", normalize=True, factor=2.5, groups=Groups(4, 2)),
    "top-k": Router("top_k"),
}
every_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


def loss_by_formula(router: Router, logits: Tensor, ids: list[list[int]], balance: Balance) -> Tensor:
    """The module's text written out: f a constant, sets weighted by their tokens, the z-loss a mean over tokens."""
    tokens, experts = logits.shape
    size = balance.sequence_length if balance.kind == "seq_aux_loss" else tokens
    loss = balance.z_coef * torch.log(torch.exp(logits).sum(-1)).square().sum() / balance.global_tokens
    for first in range(0, tokens if balance.kind != "none" else 0, size):
        slots = [i for row in ids[first : first + size] for i in row]
        f = [slots.count(i) / len(slots) for i in range(experts)]
        if balance.kind == "global_aux_loss":
            f = [int(n) / 28 for n in balance.counts_E]
        p = router.probs(logits)[first : first + size].mean(0)
        bal = experts * sum((f[i] * p[i] for i in range(experts)), torch.zeros(()))
        loss = loss + balance.coef * bal * size / balance.global_tokens
    return loss


# ---- the choice and the weights --------------------------------------------------------------------------------------

CASES_064: dict[str, tuple[Any, Any, dict[str, Any], Router]] = {
    "Qwen3, normalised": (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"norm_topk_prob": True}, Router("softmax", True)),
    "Qwen3, as they are": (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"norm_topk_prob": False}, Router("softmax")),
    "V2 greedy": (
        DeepseekV2TopkRouter,
        DeepseekV2Config,
        {"topk_method": "greedy", "routed_scaling_factor": 1.5},
        Router("softmax", factor=1.5),
    ),
    "V2 in groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config,
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        Router("softmax", factor=16.0, groups=Groups(4, 2)),
    ),
    "V3, normalised": (
        DeepseekV3TopkRouter,
        DeepseekV3Config,
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        Router("sigmoid", True, 2.5, Groups(4, 2)),
    ),
    "V3, as they are": (
        DeepseekV3TopkRouter,
        DeepseekV3Config,
        {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
        Router("sigmoid", False, 1.0, Groups(2, 1)),
    ),
    "V3, one group": (
        DeepseekV3TopkRouter,
        DeepseekV3Config,
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        Router("sigmoid", True, 2.5),
    ),
    "GPT-OSS": (GptOssTopKRouter, GptOssConfig, {}, Router("top_k")),
}


@pytest.mark.parametrize("family", CASES_064)
@pytest.mark.parametrize(
    ("experts", "k", "tokens"), [(8, 1, 33), (8, 2, 1), (8, 4, 33), (8, 8, 33), (128, 8, 200), (32, 6, 64)]
)
def test_case_064_equal_to_transformers(family: str, experts: int, k: int, tokens: int) -> None:
    """The same experts with the same weights in fp32; the order of a token's slots is free, as theirs is."""
    module, config, fields, router = CASES_064[family]
    if router.groups is not None and k > experts // router.groups.num * router.groups.kept:
        k = experts // router.groups.num * router.groups.kept  # all that is open to a token
    count = "num_experts" if config is Qwen3MoeConfig else "num_local_experts"
    count = "n_routed_experts" if "Deepseek" in config.__name__ else count
    shape = {"hidden_size": 16, "num_attention_heads": 2}
    theirs = module(config(num_experts_per_tok=k, **shape, **{count: experts}, **fields))
    assert theirs.weight.shape == (experts, 16) and theirs.top_k == k
    torch.nn.init.normal_(theirs.weight, generator=torch.Generator().manual_seed(0))
    bias = random(98, experts, dtype=torch.float32)
    if family.startswith("V3"):
        theirs.e_score_correction_bias.copy_(bias)  # most biased scores are negative where the bias is
        assert (bias < -1).any()
    if family == "GPT-OSS":
        theirs.bias.data.copy_(bias)
    with torch.no_grad():
        logits, weights, ids = theirs(random(1, 1, tokens, 16, dtype=torch.float32).flatten(0, 1))
    found, routing = router(logits, k, bias=bias)
    assert found.dtype == torch.float32 and routing.ids_TK.dtype == torch.int64
    (mine, order), (other, others) = routing.ids_TK.sort(-1), ids.sort(-1)
    assert torch.equal(mine, other)
    torch.testing.assert_close(found.gather(1, order), weights.gather(1, others), rtol=2e-6, atol=1e-7)
    assert routing.counts_E.tolist() == [int((ids == i).sum()) for i in range(experts)]


@every_router
@pytest.mark.parametrize("k", [1, 3, 4])
def test_choice_weights_and_their_gradient_are_those_of_loops(router: Router, k: int) -> None:
    logits, dw = random(4, 9, 8).requires_grad_(), random(5, 9, k)
    found, routing = router(logits, k)
    ids, expected = router.plain(logits, k)
    assert routing.ids_TK.tolist() == ids
    assert_near(found, expected, 1e-14)
    grads = [torch.autograd.grad(w, logits, dw)[0] for w in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)
    assert not any(x.requires_grad for x in (routing.balance, routing.z, routing.counts_E))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_ties_go_to_the_lowest_index(k: int) -> None:
    scores = random(2, 40, 6, dtype=torch.float32).round()  # few distinct values
    assert any(len(set(row)) < 6 for row in scores.tolist())
    assert top_k(scores, k).tolist() == [choose(row, k, None, 1) for row in scores.tolist()]


@every_router
def test_case_062_ties_go_to_the_lowest_index_and_group(router: Router) -> None:
    """All logits equal, as a zero router weight has them; then logits of few values."""
    ids = router(torch.zeros(5, 8), 3, bias=torch.zeros(8))[1].ids_TK
    assert ids.tolist() == [[0, 1, 2]] * 5
    logits = random(2, 60, 8).round()
    assert router(logits, 3)[1].ids_TK.tolist() == router.plain(logits, 3)[0]
    if router.groups is not None:  # groups 1 and 3 tie for the second place behind group 2
        tied = torch.tensor([[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]])
        assert router(tied, 4, bias=torch.zeros(8))[1].ids_TK.tolist() == [[4, 5, 2, 3]]


@pytest.mark.parametrize("normalize", [True, False])
def test_tied_logits_are_weighted_as_in_transformers(normalize: bool) -> None:
    """Which of the tied it takes differs (torch.topk has no rule); the weights do not."""
    logits = random(2, 40, 6, dtype=torch.float32).round()
    config = Qwen3MoeConfig(num_experts=6, num_experts_per_tok=2, norm_topk_prob=normalize, hidden_size=6)
    theirs = Qwen3MoeTopKRouter(config)
    torch.nn.init.eye_(theirs.weight)
    with torch.no_grad():
        _, weights, _ = theirs(logits)
    assert_near(Router("softmax", normalize)(logits, 2)[0], weights, 1e-6)


def test_case_061_scores_are_not_rounded_before_the_choice() -> None:
    """Probabilities 0.5001 and 0.4999, then 0.4999 and 0.5001: one number in bf16, and the larger one is chosen."""
    p = torch.tensor([[0.5001, 0.4999], [0.4999, 0.5001]])
    assert len(set(p.bfloat16().flatten().tolist())) == 1
    for router in (Router("softmax"), Router("top_k")):
        assert router(p.log(), 1)[1].ids_TK.tolist() == [[0], [1]]
    assert Router("sigmoid")((p / (1 - p)).log(), 1, bias=torch.zeros(2))[1].ids_TK.tolist() == [[0], [1]]


def test_a_masked_group_does_not_beat_a_negative_score() -> None:
    """Group 0 is kept for the sum of its two scores, of which one is below 0: masked experts rank behind it."""
    bias = torch.tensor([5.0, -2.0, 1.0, 1.0])
    router = Router("sigmoid", groups=Groups(2, 1))
    assert router(torch.zeros(1, 4), 2, bias=bias)[1].ids_TK.tolist() == [[0, 1]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """Experts 0 to 3 at -1e9 are out of reach while k others are left, and in again by index when not."""
    logits, bias = random(6, 20, 8, dtype=torch.float32), torch.tensor([-1e9] * 4 + [0.0] * 4)
    weights, routing = Router("sigmoid")(logits, 3, bias=bias)
    assert routing.ids_TK.min() == 4
    assert torch.equal(weights, logits.sigmoid().gather(1, routing.ids_TK))
    _, routing = Router("sigmoid")(logits, 6, bias=bias)
    assert routing.ids_TK[:, 4:].tolist() == [[0, 1]] * 20


@every_router
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_060_ids_stay_distinct_and_in_range_and_z_tells(router: Router, bad: float) -> None:
    """A token's logits of every kind of badness; one expert's column, as a bad router weight row makes it."""
    for k in (1, 4):
        logits = random(3, 6, 8, dtype=torch.float32)
        assert router(logits, k)[1].z.isfinite()
        logits[0] = bad
        logits[1, 2] = bad
        logits[2, 5:] = bad
        logits[3, 0], logits[3, 1] = math.inf, -math.inf
        column = random(4, 6, 8, dtype=torch.float32)
        column[:, 3] = bad
        for x in (logits, column):
            routing = router(x, k)[1]
            assert all(len(set(row)) == k and set(row) <= set(range(8)) for row in routing.ids_TK.tolist())
            assert routing.counts_E.sum() == 6 * k
        for token in (*logits[:4], *column):
            assert not router(torch.stack((logits[4], token)), k)[1].z.isfinite()
        assert router(logits[4:], k)[1].z.isfinite()


@every_router
def test_forced_routing_is_even_and_weighs_by_the_real_scores(router: Router) -> None:
    """T k a multiple of E: even counts in each layer. Slot (t, j) is place (t k + j + layer) mod E of the order."""
    logits, order = random(18, 12, 8), forced_order(8, 0)
    for k, layer in [(2, 0), (2, 5), (4, 9)]:
        weights, routing = router(logits, k, balance_of("none", 1, forced=forced_order(8, layer)))
        assert routing.ids_TK.tolist() == [[int(order[(t * k + j + layer) % 8]) for j in range(k)] for t in range(12)]
        assert routing.counts_E.tolist() == [12 * k // 8] * 8
        p = logits.sigmoid() if router.how == "sigmoid" else router.probs(logits)
        expected = p.gather(1, routing.ids_TK)
        if router.normalize or router.how == "top_k":
            expected = expected / expected.sum(-1, keepdim=True)
        assert_near(weights, expected * router.factor, 1e-14)


@pytest.mark.parametrize(("experts", "k", "ranks"), [(128, 8, 8), (64, 6, 4), (32, 4, 4)])
def test_forced_routing_sends_a_token_to_as_many_ranks_as_random_scores_do(experts: int, k: int, ranks: int) -> None:
    """Within 15 %, in every layer; neighbours would lie on one rank or two. And each rank gets the same load."""
    logits = random(22, 4 * experts, experts)

    def ranks_of(balance: Balance) -> float:
        ids = Router("softmax")(logits, k, balance)[1].ids_TK // (experts // ranks)
        if balance.forced_E is not None:
            assert ids.flatten().bincount().tolist() == [4 * experts * k // ranks] * ranks
        return sum(len(set(row)) for row in ids.tolist()) / len(ids)

    want = ranks_of(OFF)
    for layer in range(6):
        assert ranks_of(balance_of("none", 1, forced=forced_order(experts, layer))) == pytest.approx(want, rel=0.15)
    assert ranks_of(balance_of("none", 1, forced=torch.arange(experts))) < 0.7 * want


@every_router
def test_extreme_scores_leave_weights_balance_and_gradient_finite(router: Router) -> None:
    """Where exp and sigmoid underflow, forced to the experts of score 0 or not: no 0 / 0."""
    logits = torch.full((4, 8), -300.0)
    logits[2:, 7] = 300.0
    for forced in (torch.arange(8), None):
        balance = balance_of("aux_loss", 4, 0.1, 0.1, 4, forced=forced)
        x = logits.clone().requires_grad_()
        weights, routing = router(x, 2, balance)
        (grad,) = torch.autograd.grad(weights, x, torch.ones_like(weights))
        for found in (weights, routing.balance, routing.z, grad):
            assert found.isfinite().all()


# ---- balance ---------------------------------------------------------------------------------------------------------

SEQUENCE, TOKENS, K = 2, 6, 2
COUNTS = torch.arange(8)  # of the step before


@every_router
@pytest.mark.parametrize("z", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_formula_and_of_finite_differences(router: Router, kind: Kind, z: float) -> None:
    """d (<dw, weights> + coef bal + z_coef z) / d logits, on a part (6 of 24 tokens) of a batch: three sequences."""
    balance = balance_of(kind, 24, 0.0 if kind == "none" else 0.3, z, SEQUENCE, COUNTS)
    logits, dw = random(9, TOKENS, 8).requires_grad_(), random(10, TOKENS, K)

    def value(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, routing = router(x, K, balance)
        assert torch.equal(routing.ids_TK, ids)
        return weights, ((weights * dw).sum() + balance.coef * routing.balance + z * routing.z).detach()

    ids = router(logits, K)[1].ids_TK
    weights, total = value(logits)
    (found,) = torch.autograd.grad(weights, logits, dw)
    plain_ids, plain = router.plain(logits, K)
    formula = (plain * dw).sum() + loss_by_formula(router, logits, plain_ids, balance)
    assert total.item() == pytest.approx(formula.item(), rel=1e-13)
    assert_near(found, torch.autograd.grad(formula, logits)[0], 1e-12)
    for seed in range(3):
        step = 1e-5 * random(seed, TOKENS, 8)
        numeric = (value(logits.detach() + step)[1] - value(logits.detach() - step)[1]) / 2
        assert numeric.item() == pytest.approx((found * step).sum().item(), rel=1e-6)


def graph_nodes(x: Tensor) -> set[str]:
    found, stack = set[str](), [x.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found.add(node.name())
            stack.extend(parent for parent, _ in node.next_functions)
    return found


@every_router
@pytest.mark.parametrize("kind", KINDS)
def test_coefficient_zero_leaves_no_trace_in_the_graph(router: Router, kind: Kind) -> None:
    """Weights and graph are those of kind none; with a coefficient there is one node more."""
    logits = random(11, TOKENS, 8).requires_grad_()
    off = router(logits, K, balance_of("none", TOKENS))[0]
    zero = router(logits, K, balance_of(kind, TOKENS, 0.0, 0.0, SEQUENCE, COUNTS))[0]
    assert torch.equal(zero, off) and graph_nodes(zero) == graph_nodes(off)
    (grad,) = torch.autograd.grad(zero, logits, torch.zeros_like(zero))
    assert not grad.any()
    with_loss = router(logits, K, balance_of(kind, TOKENS, 0.0, 0.1, SEQUENCE, COUNTS))[0]
    assert torch.equal(with_loss, off)
    assert {name for name in graph_nodes(with_loss) - graph_nodes(off) if "WithLoss" in name}
    with torch.no_grad():
        weights, routing = router(logits, K, balance_of("aux_loss", TOKENS, 0.5))
    assert not weights.requires_grad and routing.balance > 0


def test_the_gradient_does_not_depend_on_the_gradient_of_the_weights() -> None:
    """The carrier is an identity: scaling the loss of the model does not scale the balance loss."""
    logits, dw = random(11, 6, 4).requires_grad_(), random(12, 6, 2)
    extra = []
    for scale in (0.0, 1.0, 1000.0):
        with_loss, without = (Router("top_k")(logits, 2, b)[0] for b in (balance_of("aux_loss", 6, 0.5), OFF))
        grads = [torch.autograd.grad(w, logits, scale * dw)[0] for w in (with_loss, without)]
        extra.append(grads[0] - grads[1])
    assert extra[0].any()
    assert_near(extra[1], extra[0], 1e-13)
    assert_near(extra[2], extra[0], 1e-10)


@every_router
@pytest.mark.parametrize("kind", KINDS[1:])
def test_balance_is_one_when_balanced(router: Router, kind: Kind) -> None:
    """Uniform probabilities whatever the load; even load whatever the probabilities (forced: 4 slots each)."""
    uniform = router(torch.zeros(16, 8), K, balance_of(kind, 16, 0.1, sequence=4))[1]
    assert uniform.balance.item() == 1.0
    balance = balance_of(kind, 16, 0.1, sequence=4, forced=torch.arange(8))
    routing = router(random(19, 16, 8), K, balance)[1]
    assert routing.counts_E.tolist() == [4] * 8
    assert routing.balance.item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_balance_of_a_collapsed_router_is_the_number_of_experts_over_k(k: int) -> None:
    logits = torch.full((5, 8), -200.0)
    logits[:, 3] = 0.0
    assert Router("softmax")(logits, k, balance_of("aux_loss", 5))[1].balance.item() == pytest.approx(8 / k)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_transformers_value_is_k_times_ours_on_one_layer(k: int) -> None:
    logits = random(6, 50, 8, dtype=torch.float32)
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=k)
    assert isinstance(theirs, Tensor)
    ours = Router("softmax")(logits, k, balance_of("aux_loss", 50))[1].balance
    assert theirs.item() == pytest.approx(k * ours.item(), rel=1e-5)


def test_over_layers_transformers_pools_what_is_summed_here() -> None:
    """Three equal layers: theirs is K times the value of one, the sum of ours three times: K / L."""
    logits = random(6, 50, 8, dtype=torch.float32)
    theirs = load_balancing_loss_func((logits,) * 3, num_experts=8, top_k=2)  # pyright: ignore[reportArgumentType]
    assert isinstance(theirs, Tensor)
    ours = 3 * Router("softmax")(logits, 2, balance_of("aux_loss", 50))[1].balance.item()
    assert theirs.item() == pytest.approx(2 / 3 * ours, rel=1e-5)


def parts(router: Router, kind: Kind, whole: Tensor, *sizes: int, sequence: int = 2) -> tuple[float, float, Tensor]:
    """(balance, z, gradient of both losses) of a batch in micro-batches of these sizes."""
    balance = balance_of(kind, len(whole), 0.3, 0.2, sequence, COUNTS)
    found, at = [], 0
    for size in sizes:
        x = whole[at : at + size].clone().requires_grad_()
        weights, routing = router(x, K, balance)
        found.append((routing, torch.autograd.grad(weights, x, torch.zeros_like(weights))[0]))
        at += size
    bal, z = (sum(getattr(routing, name).item() for routing, _ in found) for name in ("balance", "z"))
    return bal, z, torch.cat([grad for _, grad in found])


@every_router
@pytest.mark.parametrize("kind", KINDS[2:])
def test_case_069_sequence_and_global_balance_ignore_how_sequences_are_batched(router: Router, kind: Kind) -> None:
    """Two sequences of 16 in one micro-batch or in two: the set behind f is a sequence, or the step before."""
    whole = random(20, 32, 8)
    one, two = (parts(router, kind, whole, *sizes, sequence=16) for sizes in [(32,), (16, 16)])
    assert two[:2] == pytest.approx(one[:2], rel=1e-14)
    assert_near(two[2], one[2], 1e-13)
    together = parts(router, "aux_loss", whole, 32)
    assert together[0] != pytest.approx(one[0], rel=1e-4)  # another definition, which the boundary matters to


@every_router
def test_case_070_the_z_loss_is_a_mean_over_tokens(router: Router) -> None:
    """64 tokens as one sequence or as four of 16, in one micro-batch or in four; equal to a loop's mean."""
    whole = random(21, 64, 8)
    mean = sum(math.log(sum(map(math.exp, row))) ** 2 for row in whole.tolist()) / 64
    for kind, sizes, sequence in [("aux_loss", (64,), 64), ("seq_aux_loss", (64,), 16), ("none", (16,) * 4, 16)]:
        _, z, _ = parts(router, kind, whole, *sizes, sequence=sequence)  # pyright: ignore[reportArgumentType]
        assert z == pytest.approx(mean, rel=1e-13)
    assert_near(parts(router, "none", whole, *(16,) * 4)[2], parts(router, "none", whole, 64)[2], 1e-13)


@every_router
def test_case_052_parts_of_the_global_batch_add_up_to_the_mean_in_either_order(router: Router) -> None:
    """aux_loss is defined per micro-batch: of 10 and 54 tokens, each weighted by its tokens. Labels have no part."""
    first, second = random(7, 10, 8), random(8, 54, 8)
    alone = [parts(router, "aux_loss", x, len(x))[0] for x in (first, second)]
    one = parts(router, "aux_loss", torch.cat((first, second)), 10, 54)
    other = parts(router, "aux_loss", torch.cat((second, first)), 54, 10)
    assert one[0] == pytest.approx((10 * alone[0] + 54 * alone[1]) / 64, rel=1e-14)
    assert other[0] == pytest.approx(one[0], rel=1e-14)
    assert torch.equal(other[2], torch.cat((one[2][10:], one[2][:10])))


def router_gradient(router: Router, balance: Balance, dw_scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gradient of the router weight, of its input, the weight, the input), through a segment as training has it."""
    weight = make_weight("gate", random(13, 8, 6))

    def body(lin: Any, vectors: Any, x: Tensor) -> tuple[tuple[Tensor], Routing]:
        weights, routing = router(lin("gate", x), 2, balance)
        return (weights,), routing

    x = random(14, 16, 6)
    segment = Segment(Region(body, {"gate": weight}, {}), x)
    ready: list[WeightGrad] = []
    (dx,) = segment.backward((dw_scale * random(15, 16, 2),), ready)
    for closure in ready:
        closure()
    return weight.main_grad, dx, weight.data, x


@every_router
@pytest.mark.parametrize("kind", KINDS[1:])
def test_case_049_the_balance_loss_trains_the_router(router: Router, kind: Kind) -> None:
    """Coefficient 10, main loss times 0: the router's gradient is that of the formula; coefficient 0: exactly 0."""
    balance = balance_of(kind, 64, 10.0, 0.1, SEQUENCE, COUNTS)
    found_w, found_x, weight, x = router_gradient(router, balance, 0.0)
    weight, x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    logits = x @ weight.t()
    loss = loss_by_formula(router, logits, router.plain(logits, 2)[0], balance)
    expected_w, expected_x = torch.autograd.grad(loss, (weight, x))
    assert found_w.norm() > 1e-3
    assert_near(found_w, expected_w, 1e-12)
    assert_near(found_x, expected_x, 1e-12)
    for grad in router_gradient(router, balance_of(kind, 64, 0.0, 0.0, SEQUENCE, COUNTS), 0.0)[:2]:
        assert not grad.any()


# ---- the bias --------------------------------------------------------------------------------------------------------


def test_case_058_the_direction_of_the_bias_is_exact() -> None:
    """40,840 against a mean of 40,960, neighbours in bf16: up; and one token off, where fp32 has no such mean."""
    counts = torch.tensor([40_840, 41_080, 40_960, 40_960])
    assert counts.float().mean() == 40_960 and counts.bfloat16()[0] == 40_960 - 128
    for order in ([0, 1, 2, 3], [1, 3, 0, 2]):
        assert bias_step(counts[order], 1.0).tolist() == [[1.0, -1.0, 0.0, 0.0][i] for i in order]
    huge = torch.tensor([[2**40 + 1, 2**40, 2**40, 2**40], [0, 0, 0, 0]])
    assert bias_step(huge, 0.5).tolist() == [[-0.5, 0.5, 0.5, 0.5], [0.0] * 4]
    assert bias_step(counts, 0.001).dtype == torch.float32


def test_case_056_the_bias_stays_within_rate_times_steps_and_its_mean_chooses_nothing() -> None:
    """500 steps of routing skewed to two experts: not centred, so the mean drifts; the load evens out."""
    rate, steps, router = 0.002, 500, Router("sigmoid", True, 2.5)
    skew = torch.tensor([2.0, 2.0] + [0.0] * 6)
    bias, shares = torch.zeros(8), []
    for step in range(steps):
        logits = random(step, 64, 8, dtype=torch.float32, scale=0.5) + skew
        weights, routing = router(logits, 2, bias=bias)
        if step % 50 == 0:
            centred = router(logits, 2, bias=bias - bias.mean())
            assert torch.equal(centred[1].ids_TK, routing.ids_TK) and torch.equal(centred[0], weights)
        shares.append(routing.counts_E[:2].sum().item() / 128)
        bias += bias_step(routing.counts_E, rate)
        assert bias.abs().max() <= rate * (step + 1) * (1 + 1e-5)
    assert shares[0] > 0.9 and sum(shares[-50:]) / 50 == pytest.approx(0.25, abs=0.03)
    assert bias[:2].max() < bias[2:].min()
    assert not bias_step(torch.full((8,), 16), rate).any(), "what is balanced stays"
