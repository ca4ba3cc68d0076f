"""The softmax router and its balance loss against transformers, loops, and autograd of the formula."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from pithtrain.ops.linear import Region, Segment, WeightGrad
from pithtrain.ops.router import Balance, Routing, route_softmax, top_k
from reference import assert_near, make_weight, random

OFF = Balance(coef=0.0, global_tokens=1)


def balance_by_formula(logits_TE: Tensor, ids_TK: Tensor, global_tokens: int) -> Tensor:
    """E / T * sum_t sum_i f_i p_ti, with f a constant."""
    tokens, experts = logits_TE.shape
    slots = [sum(x == i for row in ids_TK.tolist() for x in row) for i in range(experts)]
    share = torch.tensor(slots, dtype=torch.float64) / (tokens * ids_TK.shape[1])
    probs = torch.exp(logits_TE) / torch.exp(logits_TE).sum(-1, keepdim=True)
    return experts / global_tokens * (probs * share).sum()


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 8), (8, 1), (128, 8)])
def test_equal_to_transformers(experts: int, k: int, normalize: bool) -> None:
    config = Qwen3MoeConfig(num_experts=experts, num_experts_per_tok=k, norm_topk_prob=normalize, hidden_size=16)
    theirs = Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(theirs.weight, generator=torch.Generator().manual_seed(0))
    x = random(1, 33, 16, dtype=torch.float32)
    with torch.no_grad():
        logits, weights, ids = theirs(x)
    found, routing = route_softmax(logits, k, normalize, OFF)
    assert torch.equal(routing.ids_TK, ids)
    assert found.dtype == torch.float32 and routing.ids_TK.dtype == torch.int64
    assert_near(found, weights, 1e-6)
    assert routing.counts_E.tolist() == [int((ids == i).sum()) for i in range(experts)]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_ties_go_to_the_lowest_index(k: int) -> None:
    scores = random(2, 40, 6, dtype=torch.float32).round()  # few distinct values
    assert any(len(set(row)) < 6 for row in scores.tolist())
    expected = [sorted(range(6), key=lambda i: (-row[i], i))[:k] for row in scores.tolist()]
    assert top_k(scores, k).tolist() == expected


@pytest.mark.parametrize("normalize", [True, False])
def test_tied_logits_are_weighted_as_in_transformers(normalize: bool) -> None:
    """Which of the tied it takes differs (torch.topk has no rule); the weights do not."""
    logits = random(2, 40, 6, dtype=torch.float32).round()
    config = Qwen3MoeConfig(num_experts=6, num_experts_per_tok=2, norm_topk_prob=normalize, hidden_size=6)
    theirs = Qwen3MoeTopKRouter(config)
    torch.nn.init.eye_(theirs.weight)
    with torch.no_grad():
        _, weights, _ = theirs(logits)
    found, routing = route_softmax(logits, 2, normalize, OFF)
    assert_near(found, weights, 1e-6)
    assert torch.equal(routing.ids_TK, top_k(logits.softmax(-1), 2))
    zero = route_softmax(torch.zeros(5, 6), 2, normalize, OFF)[1]
    assert zero.ids_TK.tolist() == [[0, 1]] * 5


def test_not_a_number_still_gives_distinct_ids_in_range() -> None:
    logits = random(3, 4, 6, dtype=torch.float32)
    logits[0] = float("nan")
    logits[1, 2] = float("nan")
    logits[2, :] = float("inf")
    logits[3, 1] = float("-inf")
    ids = route_softmax(logits, 4, True, OFF)[1].ids_TK
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist())


@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_of_the_weights(normalize: bool) -> None:
    logits = random(4, 7, 5).requires_grad_()
    dw = random(5, 7, 3)
    weights, routing = route_softmax(logits, 3, normalize, OFF)
    (found,) = torch.autograd.grad(weights, logits, dw)
    probs = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    rows = torch.arange(7)[:, None]
    expected = probs[rows, routing.ids_TK]
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    (reference,) = torch.autograd.grad(expected, logits, dw)
    assert_near(weights, expected, 1e-14)
    assert_near(found, reference, 1e-13)
    assert not (routing.balance.requires_grad or routing.counts_E.requires_grad)


# ---- balance ---------------------------------------------------------------------------------------------------------


def test_balance_is_one_for_uniform_probabilities() -> None:
    assert route_softmax(torch.zeros(9, 8), 2, True, Balance(0.01, 9))[1].balance.item() == pytest.approx(1.0, abs=1e-6)


def test_balance_is_one_for_uniform_load_whatever_the_probabilities() -> None:
    """Each expert has the same share of the slots: E * sum_i p_i / E = 1."""
    logits = torch.stack([torch.roll(torch.tensor([3.0, 1.0, -1.0, -2.0], dtype=torch.float64), i) for i in range(4)])
    routing = route_softmax(logits, 1, True, Balance(0.01, 4))[1]
    assert routing.counts_E.tolist() == [1, 1, 1, 1]
    assert routing.balance.item() == pytest.approx(1.0, abs=1e-14)


def test_balance_of_a_collapsed_router_is_the_number_of_experts_over_k() -> None:
    logits = torch.full((5, 8), -200.0, dtype=torch.float64)
    logits[:, 3] = 0.0
    assert route_softmax(logits, 1, True, Balance(0.0, 5))[1].balance.item() == pytest.approx(8.0)
    assert route_softmax(logits, 2, True, Balance(0.0, 5))[1].balance.item() == pytest.approx(4.0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_transformers_value_is_k_times_ours_on_one_layer(k: int) -> None:
    logits = random(6, 50, 8, dtype=torch.float32)
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=k)
    assert isinstance(theirs, Tensor)
    ours = route_softmax(logits, k, True, Balance(0.01, 50))[1].balance
    assert theirs.item() == pytest.approx(k * ours.item(), rel=1e-5)


def test_parts_of_the_global_batch_add_up_to_the_mean() -> None:
    """Micro-batches of 10 and 54 tokens: each is weighted by its tokens, in either order."""
    parts = [random(7, 10, 8), random(8, 54, 8)]
    alone = [route_softmax(x, 2, True, Balance(0.01, len(x)))[1].balance.item() for x in parts]
    together = [route_softmax(x, 2, True, Balance(0.01, 64))[1].balance.item() for x in parts]
    assert sum(together) == pytest.approx((10 * alone[0] + 54 * alone[1]) / 64, rel=1e-14)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("k", "global_tokens"), [(2, 11), (2, 176), (4, 11), (1, 22)])
def test_gradient_is_that_of_the_formula(k: int, global_tokens: int, normalize: bool) -> None:
    """Total gradient - gradient without balance = coef * d bal / d logits, on any part of a batch."""
    logits, dw = random(9, 11, 5).requires_grad_(), random(10, 11, k)
    total = torch.autograd.grad(route_softmax(logits, k, normalize, Balance(0.3, global_tokens))[0], logits, dw)[0]
    plain, routing = route_softmax(logits, k, normalize, Balance(0.0, global_tokens))
    without = torch.autograd.grad(plain, logits, dw)[0]
    bal = balance_by_formula(logits, routing.ids_TK, global_tokens)
    assert_near(total - without, torch.autograd.grad(0.3 * bal, logits)[0], 1e-12)
    assert routing.balance.item() == pytest.approx(bal.item(), rel=1e-14)


def test_the_gradient_does_not_depend_on_the_gradient_of_the_weights() -> None:
    """The carrier is an identity: scaling the loss of the model does not scale the balance loss."""
    logits, dw = random(11, 6, 4).requires_grad_(), random(12, 6, 2)
    extra = []
    for scale in (0.0, 1.0, 1000.0):
        with_loss, _ = route_softmax(logits, 2, True, Balance(0.5, 6))
        without, _ = route_softmax(logits, 2, True, OFF)
        assert torch.equal(with_loss, without)
        grads = [torch.autograd.grad(w, logits, scale * dw)[0] for w in (with_loss, without)]
        extra.append(grads[0] - grads[1])
    assert extra[0].any()
    assert_near(extra[1], extra[0], 1e-13)
    assert_near(extra[2], extra[0], 1e-10)


def router_gradient(coef: float, dw_scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gradient of the router weight, of its input, the weight, the input), through a segment as training has it."""
    weight = make_weight("gate", random(13, 8, 6))

    def body(lin, vectors, x: Tensor) -> tuple[tuple[Tensor], Routing]:
        weights, routing = route_softmax(lin("gate", x), 2, True, Balance(coef, 64))
        return (weights,), routing

    x = random(14, 16, 6)
    segment = Segment(Region(body, {"gate": weight}, {}), x)
    ready: list[WeightGrad] = []
    (dx,) = segment.backward((dw_scale * random(15, 16, 2),), ready)
    for closure in ready:
        closure()
    return weight.main_grad, dx, weight.data, x


def test_case_049_the_balance_loss_trains_the_router() -> None:
    """Coefficient 10, main loss times 0: the router's gradient is that of the formula; coefficient 0: exactly 0."""
    found_w, found_x, weight, x = router_gradient(10.0, 0.0)
    weight, x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    logits = x @ weight.t()
    ids = torch.tensor([sorted(range(8), key=lambda i: (-row[i], i))[:2] for row in logits.tolist()])
    expected_w, expected_x = torch.autograd.grad(10 * balance_by_formula(logits, ids, 64), (weight, x))
    assert found_w.norm() > 1e-3
    assert_near(found_w, expected_w, 1e-12)
    assert_near(found_x, expected_x, 1e-12)
    for grad in router_gradient(0.0, 0.0)[:2]:
        assert not grad.any()


def test_without_grad_there_is_no_extra_term() -> None:
    with torch.no_grad():
        weights, routing = route_softmax(random(16, 5, 4), 2, True, Balance(0.5, 5))
    assert not weights.requires_grad and routing.balance > 0


def test_counts_are_exact_integers_of_pairs() -> None:
    """Counts are of (token, expert) pairs, integers, and sum to tokens times k."""
    logits = random(17, 300, 16, dtype=torch.float32)
    routing = route_softmax(logits, 4, True, OFF)[1]
    assert routing.counts_E.dtype == torch.int64 and routing.counts_E.sum() == 300 * 4
