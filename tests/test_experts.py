"""Routed experts, forward and by-hand backward, against loops and autograd in float64."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import Pool, Ran, batches_of, distance, gather_ran, make_spec, single, steps_job
from pithtrain.build import build
from pithtrain.ops import router
from pithtrain.ops.experts import Experts, ExpertSegment, Received, Recompute
from pithtrain.ops.grouped import add_grouped_sum, add_grouped_weight_grad, grouped_linear, grouped_linear_dx
from pithtrain.ops.linear import Weight, WeightGrad, accumulate_dtype
from pithtrain.ops.swiglu import SILU, Glu
from pithtrain.spec import RunSpec, from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect
from reference import assert_near, distinct_ids, gradients, leaves, make_weight, moe, poisoned_memory, random

H, I, E = 6, 5, 4  # noqa: E741
CUT = Glu(1.702, 1.0, 1.0)  # a limit that cuts about a fifth of the gates and half of the ups
DTYPES = [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]

ROUTINGS = {
    "random, with padding": [[1, 0], [2, -1], [0, 3], [3, -1], [2, 1]],
    "two experts without rows": [[3, -1], [1, 3], [1, -1]],
    "all rows on one expert": [[2, -1]] * 5,
    "top-1": [[1], [0], [3], [1], [2], [1]],
    "one row": [[2, 0]],
    "every expert": [[3, 1, 0, 2], [0, 1, 2, 3]],
    "a row without slots": [[-1, -1], [0, 1], [-1, -1]],
    "no rows": [],
}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def make_experts(dtype: torch.dtype, glu: Glu = SILU) -> Experts:
    """With biases where the activation is not SwiGLU."""
    gate_up = make_weight("gate_up", random(1, E, 2 * I, H, dtype=dtype))
    down = make_weight("down", random(2, E, H, I, dtype=dtype))
    if glu is SILU:
        return Experts(gate_up, down)
    biases = (random(seed, E, n, dtype=accumulate_dtype(dtype)) for seed, n in ((11, 2 * I), (12, H)))
    return Experts(gate_up, down, *(make_weight("bias", data) for data in biases), glu=glu)


def weights_of(experts: Experts) -> tuple[Weight, ...]:
    return tuple(
        weight
        for weight in (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
        if weight is not None
    )


def by_loops(
    n_TH: Tensor, w_TK: Tensor, ids_TK: Tensor, glu: Glu, gate_up: Tensor, down: Tensor, b_gu: Tensor, b_d: Tensor
) -> Tensor:
    """As `reference.moe`, with biases and any Glu."""
    rows = []
    for t, j in ((t, j) for t in range(len(ids_TK)) for j in range(ids_TK.shape[1])):
        x = int(ids_TK[t, j])
        gate, up = (gate_up[x] @ n_TH[t] + b_gu[x]).chunk(2)
        limit = float("inf") if glu.limit is None else glu.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        act = (up + glu.offset) * gate / (1 + torch.exp(-glu.alpha * gate))
        rows.append(w_TK[t, j] * (down[x] @ act + b_d[x]) if x >= 0 else torch.zeros(H, dtype=n_TH.dtype))
    return torch.stack(rows).view(*ids_TK.shape, H).sum(1) if rows else n_TH * 0


def make_received(local: Tensor, dtype: torch.dtype, seed: int = 3) -> Received:
    """Padding carries a NaN weight: it must not be read."""
    weights = random(seed, *local.shape, dtype=torch.promote_types(dtype, torch.float32)).abs()
    rows = random(seed + 1, local.shape[0], H, dtype=dtype)
    return Received(rows, local, weights.where(local >= 0, float("nan")), int((local >= 0).sum()))


def run(experts: Experts, received: Received, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    segment = ExpertSegment(experts)
    out = segment.forward(received)
    ready: list[WeightGrad] = []
    drows, dweights = segment.backward(dout, ready)
    assert len(ready) == len(weights_of(experts)), "one closure each, with or without rows"
    for weight in weights_of(experts):
        assert not weight.main_grad.any(), "a weight gradient did not wait"
    for closure in reversed(ready):
        closure()
    return out, drows, dweights


@pytest.mark.parametrize("glu", [SILU, CUT], ids=["swiglu", "biases and limit"])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_equal_to_loops_and_autograd(routing: list[list[int]], dtype: torch.dtype, tolerance: float, glu: Glu) -> None:
    local = torch.tensor(routing, dtype=torch.int64).reshape(len(routing), -1 if routing else 2)
    experts, received = make_experts(dtype, glu), make_received(local, dtype)
    dout = random(7, len(routing), H, dtype=dtype)
    out, drows, dweights = run(experts, received, dout)

    given = (received.rows_UH, received.weights_Uq.nan_to_num(), *(weight.data for weight in weights_of(experts)))
    rows, weights, *parameters = leaves(*given)
    if glu is SILU:
        expected = moe(rows, weights, local, *parameters)
    else:
        expected = by_loops(rows, weights, local, glu, *parameters)
    grads = gradients((expected * dout.double()).sum(), (rows, weights, *parameters))
    assert out.dtype == drows.dtype == dtype and dweights.dtype == received.weights_Uq.dtype
    found = (out, drows, dweights, *(weight.main_grad for weight in weights_of(experts)))
    for a, b in zip(found, (expected.detach(), *grads), strict=True):
        assert_near(a, b, tolerance)
    for e in set(range(E)) - {x for row in routing for x in row}:
        assert not any(weight.main_grad[e].any() for weight in weights_of(experts))


@pytest.mark.parametrize(("recompute", "wide"), [("none", "slots"), ("selective", "rows"), ("full", "rows")])
def test_a_weight_gradient_put_aside_keeps_rows_not_slots(recompute: Recompute, wide: str) -> None:
    """What its closures hold of width H: received rows and their gradients, unless the slots were kept anyway."""
    local = distinct_ids(1, 5, E, 3)
    received = make_received(local, torch.float32)
    segment, ready = ExpertSegment(make_experts(torch.float32), recompute), list[WeightGrad]()
    segment.forward(received)
    segment.backward(random(7, 5, H, dtype=torch.float32), ready)
    held, left = list[Tensor](), list[Any](ready)
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            held.append(one)
        elif hasattr(one, "__closure__"):
            left += [cell.cell_contents for cell in one.__closure__ or ()]
    assert {len(x) for x in held if x.ndim == 2 and x.shape[1] == H} == {5 if wide == "rows" else 15}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_micro_batches_in_flight_add_up(order: tuple[int, ...]) -> None:
    """Three calls through the same experts, backwards and closures in another order than the forwards."""
    experts = make_experts(torch.float64)
    batches = [(distinct_ids(b, 3 + b, E, 2), 10 * b) for b in range(3)]
    segments, douts = [], []
    for local, seed in batches:
        segments.append(ExpertSegment(experts))
        segments[-1].forward(make_received(local, torch.float64, seed))
        douts.append(random(seed + 7, local.shape[0], H))
    ready: list[WeightGrad] = []
    for b in order:
        segments[b].backward(douts[b], ready)
    for closure in reversed(ready):
        closure()
    gate_up, down = leaves(experts.gate_up.data, experts.down.data)
    total = torch.zeros((), dtype=torch.float64)
    for (local, seed), dout in zip(batches, douts, strict=True):
        received = make_received(local, torch.float64, seed)
        total = total + (moe(received.rows_UH, received.weights_Uq, local, gate_up, down) * dout).sum()
    for weight, grad in zip((experts.gate_up, experts.down), gradients(total, (gate_up, down)), strict=True):
        assert_near(weight.main_grad, grad, 1e-13)


def test_nan_neighbours_are_not_read() -> None:
    """A NaN row, a NaN gradient of a row, and NaN experts spoil only what depends on them."""
    local = torch.tensor([[1, 0], [0, -1], [2, 1]])
    clean, dirty = make_experts(torch.float64), make_experts(torch.float64)
    received, dout = make_received(local, torch.float64), random(7, 3, H)
    expected = run(clean, received, dout)
    for weight in (dirty.gate_up, dirty.down):
        weight.data[2:] = float("nan")  # expert 2 serves the last row only, expert 3 none
    out, drows, dweights = run(dirty, received, dout)
    for a, b in zip((out, drows, dweights), expected, strict=True):
        assert torch.equal(a[:2].nan_to_num(7), b[:2].nan_to_num(7))
    assert out[2].isnan().all() and drows[2].isnan().all()
    assert dweights[2, 0].isnan() and dweights[2, 1] == expected[2][2, 1]
    for weight, same in ((dirty.gate_up, clean.gate_up), (dirty.down, clean.down)):
        assert torch.equal(weight.main_grad[:2], same.main_grad[:2])
        assert not weight.main_grad[3].any()

    spoilt = make_experts(torch.float64)
    rows, dout = received.rows_UH.clone(), dout.clone()
    rows[2], dout[2] = float("nan"), float("nan")
    out, drows, dweights = run(spoilt, Received(rows, local, received.weights_Uq, received.num_slots), dout)
    for a, b in zip((out, drows, dweights), expected, strict=True):
        assert torch.equal(a[:2], b[:2])
    assert out[2].isnan().all() and drows[2].isnan().all() and dweights[2].isnan().all()
    for weight, same in ((spoilt.gate_up, clean.gate_up), (spoilt.down, clean.down)):
        assert torch.equal(weight.main_grad[0], same.main_grad[0])  # expert 1 and 2 did serve that row


def test_padding_has_gradient_zero() -> None:
    experts = make_experts(torch.float32)
    _, _, dweights = run(
        experts,
        make_received(torch.tensor([[2, -1, -1], [0, 1, -1]]), torch.float32),
        random(7, 2, H, dtype=torch.float32),
    )
    assert (dweights != 0).tolist() == [[True, False, False], [True, True, False]]


def test_the_weight_enters_before_the_one_rounding() -> None:
    """bf16: a = w * silu(g) u is rounded once. A weight of 1 + 3/1024 is lost when it is itself rounded to bf16."""
    gate_up = torch.tensor([[[64.0], [1.5 / 64]]], dtype=torch.bfloat16)  # silu(64) = 64 exactly
    down = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[1 + 3 / 1024]])
    segment = ExpertSegment(Experts(make_weight("gate_up", gate_up), make_weight("down", down)))
    out = segment.forward(Received(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[0]]), weight, 1))
    assert out.item() == torch.tensor(1.5 * weight.item()).bfloat16().item() > 1.5
    (_, dweight) = segment.backward(torch.ones(1, 1, dtype=torch.bfloat16), [])
    assert dweight.dtype == torch.float32 and dweight.item() == 1.5


def test_biases_are_added_in_fp32_and_survive_bf16() -> None:
    """3/1024 beside 1, of the up half and of the output, would be lost if rounded with its sum; dw shows both."""
    one, tiny = torch.ones(1, 1, 1, dtype=torch.bfloat16), 3 / 1024
    gate_up, down = make_weight("gate_up", one.expand(1, 2, 1)), make_weight("down", one)
    up_bias, down_bias = (make_weight("bias", torch.tensor(b)) for b in ([[0.0, tiny]], [[tiny]]))
    segment = ExpertSegment(Experts(gate_up, down, up_bias, down_bias))
    segment.forward(Received(one[0], torch.tensor([[0]]), torch.ones(1, 1), 1))
    _, dweight = segment.backward(one[0], [])
    silu = 1 / (1 + math.exp(-1))
    assert dweight.item() == pytest.approx(silu * (1 + tiny) + tiny, rel=1e-6)


@pytest.mark.parametrize("ends", [[0, 0, 0], [3, 3, 3], [0, 3, 3], [1, 1, 3], [0, 0, 3]])
@pytest.mark.parametrize("beta", [0, 1])
def test_grouped_matmuls(ends: list[int], beta: int) -> None:
    rows = ends[-1]
    w_ENK, x_RK, dy_RN = random(0, 3, 4, 5), random(1, rows, 5), random(2, rows, 4)
    main = random(3, 3, 4, 5)
    bias = random(4, 3, 4)
    expected_main, expected_bias = beta * main, beta * bias
    ends_E = torch.tensor(ends, dtype=torch.int32)
    y, dx = grouped_linear(x_RK, w_ENK, ends_E), grouped_linear_dx(dy_RN, w_ENK, ends_E)
    if not beta:
        main.fill_(math.nan), bias.fill_(math.nan)
    add_grouped_weight_grad(main, beta, dy_RN, x_RK, ends_E)
    add_grouped_sum(bias, beta, dy_RN, torch.arange(rows), ends_E)
    assert y.shape == (rows, 4) and dx.shape == (rows, 5)
    for r in range(rows):
        e = sum(end <= r for end in ends)
        assert_near(y[r], w_ENK[e] @ x_RK[r], 1e-14)
        assert_near(dx[r], w_ENK[e].t() @ dy_RN[r], 1e-14)
        expected_main[e] += torch.outer(dy_RN[r], x_RK[r])
        expected_bias[e] += r * dy_RN[r]
    assert_near(main, expected_main, 1e-14)
    assert_near(bias, expected_bias, 1e-14)


# ---- in the engine: experts and ranks that few tokens or none reach --------------------------------------------------

Table = list[list[float]]  # what is added to the scores that choose, for [micro-batch of the global batch][expert]
FAMILIES = {  # two MoE layers each; experts of gpt_oss have biases
    "qwen3_moe": {"num_hidden_layers": 3},
    "gpt_oss": {"num_hidden_layers": 2},
}


def small(family: str, dp: int = 1, ep: int = 1, **sections: Any) -> RunSpec:
    """Eight experts, and four sequences of eight tokens a step, in float64."""
    sizes = {"global_batch_size": 4, "sequence_length": 8}
    training = {**sizes, "compute_dtype": "float64", **sections.pop("training", {})}
    model = {**FAMILIES[family], **sections.pop("model", {})}
    architecture = None if family == "qwen3_moe" else family
    return make_spec(1, dp, ep, architecture=architecture, model=model, training=training, **sections)


def pinned_job(place: Place, fields: dict[str, Any], steps: int, table: Table) -> dict[str, Any]:
    """`steps_job` with `table` added to the scores that choose, as a selection bias is, on whatever mesh."""
    spec = from_dict(fields)
    calls: Counter[int] = Counter()
    choose = router._choose

    def pinned(scores_TE: Tensor, *rest: Any) -> Tensor:
        layer = rest[-1]
        micro_batch = calls[layer] % spec.num_micro_batches
        calls[layer] += 1
        row = table[micro_batch * spec.world_size + place.rank]
        return choose(scores_TE + torch.tensor(row, dtype=scores_TE.dtype), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "_choose", pinned)
        return steps_job(place, fields, steps)


def run_pinned(pool: Pool, spec: RunSpec, steps: int, table: Table) -> Ran:
    return gather_ran(pool.run(spec.world_size, pinned_job, spec.model_dump(mode="json"), steps, table))


def assert_same(got: Ran, want: Ran) -> None:
    np.testing.assert_array_equal(got.counts, want.counts, "experts chosen")
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-9)
    for mine, theirs in ((got.first_grads, want.first_grads), (got.masters, want.masters)):
        for name, tensor in theirs.items():
            assert distance(mine[name], tensor) <= 1e-9, name


def of_experts(tensors: dict[str, np.ndarray], spec: RunSpec) -> dict[str, np.ndarray]:
    """[8, ...] of each parameter of the experts."""
    kinds = {info.name: info.kind for info in spec.model.config.parameters()}
    return {name: tensor.reshape(8, -1) for name, tensor in tensors.items() if kinds[name] == "expert"}


def avoiding(*experts: int) -> list[float]:
    return [-1e9 if i in experts else 0.0 for i in range(8)]


LOW, HIGH, FREE = avoiding(4, 5, 6, 7), avoiding(0, 1, 2, 3), avoiding()


@pytest.mark.parametrize(
    ("family", "even", "odd"),
    [
        pytest.param("qwen3_moe", LOW, LOW, id="rank 1 receives nothing"),
        pytest.param("gpt_oss", LOW, LOW, id="rank 1 receives nothing, experts with biases"),
        pytest.param("gpt_oss", LOW, FREE, id="rank 0 sends nothing away"),
        pytest.param("gpt_oss", LOW, HIGH, id="nothing is sent away"),
        pytest.param("gpt_oss", HIGH, LOW, id="all is sent away"),
    ],
)
def test_case_068_a_rank_that_receives_or_sends_nothing(
    pool: Pool, family: str, even: list[float], odd: list[float]
) -> None:
    """ep = 2, experts 4 to 7 on rank 1; the even micro-batches are rank 0's. Two steps, as on one process."""
    spec = small(family)
    want = run_pinned(pool, spec, 2, [even, odd] * 2)
    assert_same(run_pinned(pool, small(family, ep=2), 2, [even, odd] * 2), want)
    for name, grad in of_experts(want.first_grads, spec).items():
        assert all(one.any() for one in grad[:4]), name
        assert any(one.any() for one in grad[4:]) == (odd is not LOW or even is not LOW), name


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_case_066_an_expert_without_tokens_on_one_replica_or_on_both(pool: Pool, family: str) -> None:
    """dp = 2: expert 7 gets none of rank 1's tokens, expert 3 none at all. Ten steps, as on one process.

    Expert 3's gradient is exactly zero, its moments so too: on every replica it decays as AdamW says, and no more.
    """
    lr, decay = 1e-2, 0.1
    specs = [small(family, dp, optimizer={"lr": lr, "weight_decay": decay}) for dp in (1, 2)]
    want, got = (run_pinned(pool, spec, 10, [avoiding(3), avoiding(3, 7)] * 2) for spec in specs)
    assert_same(got, want)
    with single(specs[0]) as world:
        begun = of_experts({n: one.master.numpy() for n, one in build(specs[0], world).zero.sharded.items()}, specs[0])
    grads, masters = (of_experts(x, specs[0]) for x in (got.first_grads, got.masters))
    decays = {info.name: info.decay for info in specs[0].model.config.parameters()}
    for name, before in begun.items():
        kept = (1 - lr * decay) ** 10 if decays[name] else 1.0
        np.testing.assert_allclose(masters[name][3], before[3] * kept, rtol=1e-9, err_msg=name)
        assert not grads[name][3].any() and distance(masters[name][7], before[7] * kept) > 1e-3, name


def replicas_job(place: Place, fields: dict[str, Any], steps: int) -> dict[str, np.ndarray]:
    """This rank's whole weights after some steps."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(steps):
            train_step(engine, spec, batches_of(spec, engine, step), spec.optimizer.lr)
        engine.zero.wait_for_weights()
        return {name: weight.data.numpy().copy() for name, weight in engine.zero.weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dp", "ep"), [("qwen3_moe", 2, 1), ("gpt_oss", 1, 2)])
def test_case_067_many_experts_and_few_tokens(pool: Pool, family: str, dp: int, ep: int) -> None:
    """64 experts, four tokens a rank, 50 steps: ranks use different experts, call the same collectives, stay equal."""
    count = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    model = {count: 64, "num_hidden_layers": 2}
    spec = small(family, dp, ep, model=model, training={"sequence_length": 2})  # two micro-batches a rank
    one, other = pool.run(2, replicas_job, spec.model_dump(mode="json"), 50)
    for name, weight in one.items():
        assert np.isfinite(weight).all(), name
        if dp == 2 or ".experts." not in name:
            np.testing.assert_array_equal(other[name], weight, name)
