"""Recomputing: bitwise the gradients of keeping everything, from experts chosen once, and fewer bytes between a forward
and its backward."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from harness import (
    ALONE,
    Alive,
    Pool,
    Ran,
    assemble,
    batches_of,
    distance,
    first_gradients,
    gather_ran,
    make_spec,
    run_mesh,
    single,
    steps_job,
    variants,
)
from pithtrain import tape
from pithtrain.build import build
from pithtrain.ops import router
from pithtrain.plan import _kept, partition
from pithtrain.spec import RunSpec
from pithtrain.train import train_step
from pithtrain.world import Place

AUX = {"load_balance_type": "aux_loss", "aux_loss_coef": 0.05, "z_loss_coef": 0.01}
SEQ = {**AUX, "load_balance_type": "seq_aux_loss"}
GLOBAL = {**AUX, "load_balance_type": "global_aux_loss"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe": AUX},
    "deepseek_v2": {"architecture": "deepseek_v2", "moe": SEQ},
    "deepseek_v3": {
        "architecture": "deepseek_v2",
        "model": variants("deepseek_v2")["V3"],
        "moe": {**GLOBAL, "bias_update_rate": 0.01},
    },
    "gpt_oss": {"architecture": "gpt_oss", "moe": AUX},
}
MODES = ("none", "selective", "full")


def spec_of(family: str, mode: str, *mesh: int, **sections: Any) -> RunSpec:
    """Four micro-batches on one rank, 16 sequences a step on a mesh."""
    training = {"global_batch_size": 16 if mesh else 4, **sections.pop("training", {})}
    sections = {**FAMILIES[family], **sections}
    return make_spec(*mesh, activation_checkpoint={"mode": mode}, training=training, **sections)


def assert_same(got: Ran, want: Ran) -> None:
    """Bitwise, statistics too: nothing is counted twice."""
    assert (got.losses, got.norms) == (want.losses, want.norms)
    for mine, theirs in ((got.balance, want.balance), (got.counts, want.counts)):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in ((got.first_grads, want.first_grads), (got.masters, want.masters)):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, name)


def alone(spec: RunSpec, steps: int = 2) -> Ran:
    return gather_ran([steps_job(ALONE, spec.model_dump(mode="json"), steps)])


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [f if f == "gpt_oss" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_recomputing_is_bitwise_keeping(family: str) -> None:
    """Whole, overlapped and split backwards; every kind of router and of balance loss."""
    want = alone(spec_of(family, "none"))
    for mode in MODES[1:]:
        assert_same(alone(spec_of(family, mode)), want)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_is_bitwise_keeping_on_a_mesh(pool: Pool, family: str) -> None:
    """(pp, dp, ep) = (2, 1, 2): weight gradients put aside, exchanges of both directions in flight."""
    want = run_mesh(pool, spec_of(family, "none", 2, 1, 2), 2)
    for mode in MODES[1:]:
        assert_same(run_mesh(pool, spec_of(family, mode, 2, 1, 2), 2), want)


# ---- the choice of experts -------------------------------------------------------------------------------------------


def fickle_job(place: Place, fields: dict[str, Any], steps: int, tied: bool) -> dict[str, Any]:
    """`steps_job` where no two calls choose alike, as if each rounded in its own way: a call turns the chosen experts
    on by its number. `tied`: equal logits, always."""
    choose, calls = router._choose, 0
    route_softmax = router.route_softmax

    def fickle(scores_TE: Tensor, *rest: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return (choose(scores_TE, *rest) + calls) % scores_TE.shape[1]

    def levelled(logits_TE: Tensor, *rest: Any) -> Any:
        return route_softmax(0 * logits_TE, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "_choose", fickle)
        if tied:
            patch.setattr("pithtrain.models.qwen3_moe.model.route_softmax", levelled)
        return {**steps_job(place, fields, steps), "calls": calls}


def test_experts_are_chosen_once_and_replayed() -> None:
    """A choice made again would differ, and the gradients with it."""
    ran = [fickle_job(ALONE, spec_of("qwen3_moe", mode).model_dump(mode="json"), 2, False) for mode in MODES]
    assert [part["calls"] for part in ran] == [3 * 4 * 3] * 3  # plays, micro-batches and layers with experts
    for part in ran[1:]:
        assert_same(gather_ran([part]), gather_ran([ran[0]]))


@pytest.mark.slow
def test_case_062_ties_are_routed_in_a_rerun_as_they_were(pool: Pool) -> None:
    """All logits equal, 20 steps on two ranks, and every call breaks ties in another way."""
    ran = []
    for mode in ("none", "full"):
        sizes = {"global_batch_size": 4, "sequence_length": 8}
        fields = spec_of("qwen3_moe", mode, 1, 1, 2, training=sizes).model_dump(mode="json")
        ran.append(gather_ran(pool.run(2, fickle_job, fields, 20, True)))
    assert_same(ran[1], ran[0])
    assert any((counts != ran[0].counts[0]).any() for counts in ran[0].counts)


# ---- bytes -----------------------------------------------------------------------------------------------------------


# what the plan tells of what is kept: inputs of norms of heads and latents are not in it, nor what is fp32
LEAST_TOLD = {"qwen3_moe": 0.77, "deepseek_v2": 0.85, "deepseek_v3": 0.83, "gpt_oss": 0.91}


def kept(spec: RunSpec) -> int:
    """Bytes that the first half of the layers keeps of one micro-batch."""
    with single(spec) as world, torch.no_grad():
        engine = build(spec, world)
        stage, traffic = engine.pipeline.stages[0], engine.pipeline.traffic
        config, (batch, *_) = spec.model.config, batches_of(spec, engine, 0)
        stats = tape.new_stats(config.num_hidden_layers, config.num_experts, world.device, torch.float32)
        with Alive() as alive:
            left = tape.run_forward(tape.forward(stage, batch.tokens, engine.pipeline.part, traffic, None, stats))[1]
            assert left.entries
            return alive.bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_between_forward_and_backward_shrink(family: str) -> None:
    """To the byte where it can be told: `selective` drops the gathered slots, `full` leaves leaves. fp32, ep = 1."""
    spec = spec_of(family, "none")
    none, selective, full = (kept(spec_of(family, mode)) for mode in MODES)
    assert none > selective > full
    config, tokens = spec.model.config, spec.training.sequence_length
    layers = partition(config, 1, tokens)[0]
    moe = sum(config.is_moe(layer) for layer in layers)
    k, hidden = config.num_experts_per_tok, config.hidden_size
    assert moe and none - selective == moe * 4 * tokens * k * hidden
    for mode, bytes_kept in zip(MODES, (none, selective, full), strict=True):  # what `pithtrain plan` tells, about
        told = tokens * sum(_kept(config, mode, 1, 1, 4)[layer] for layer in layers)
        assert LEAST_TOLD[family] < told / bytes_kept < 1, mode
    rotary = 4 * tokens * 8  # rows of the table, once a stage
    assert full == rotary + len(layers) * 4 * tokens * hidden + moe * 4 * tokens * (hidden + k)  # h; n, w in slot order


# ---- compiled --------------------------------------------------------------------------------------------------------

KINDS = {"qwen3_moe": 3, "deepseek_v2": 4, "deepseek_v3": 4, "gpt_oss": 2}  # before; after: dense, experts; shared


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "family", [x if x == "qwen3_moe" else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES]
)
@pytest.mark.usefixtures("traced")
def test_a_compiled_rerun_is_one_graph_more_a_kind(family: str) -> None:
    """One without gradients, one with ids given; the last norm has one. Nothing is compiled again in ten steps,
    whatever the routing, and the gradients are those of eager."""
    want = alone(spec_of(family, "none"), 1)
    spec = spec_of(family, "full", compile={"enabled": True})
    with single(spec) as world:
        engine = build(spec, world)
        grads = assemble([first_gradients(spec, engine, batches_of(spec, engine, 0))])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(10):
                train_step(engine, spec, batches_of(spec, engine, step), 1e-2)
    assert max(distance(grads[name], grad) for name, grad in want.first_grads.items()) <= 1e-6
    assert counters["stats"]["unique_graphs"] == 2 * KINDS[family] + 1
    assert not counters["graph_break"]
