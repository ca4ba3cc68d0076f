"""Compiled regions: one graph per kind of region, no break, no recompilation, and the gradients of eager.

The backend is `aot_eager`, which traces, partitions and guards as the real one does and compiles nothing; one test runs
the real one where there is a C++ compiler.
"""

import functools
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from harness import ALONE, Pool, Ran, batches_of, distance, gather_ran, make_spec, single, steps_job
from pithtrain.build import build
from pithtrain.spec import RunSpec
from pithtrain.train import train_step
from pithtrain.world import Place

# torch's own, while it traces
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
KINDS = {"qwen3_moe": 4, "deepseek_v2": 5, "gpt_oss": 3}  # before; after: dense, experts; shared; the last norm


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def spec_of(family: str, enabled: bool = True, **sections: Any) -> RunSpec:
    return make_spec(architecture=family, compile={"enabled": enabled}, training={"global_batch_size": 4}, **sections)


def ran(family: str, enabled: bool) -> Ran:
    return gather_ran([steps_job(ALONE, spec_of(family, enabled).model_dump(mode="json"), 2)])


def assert_same(got: Ran, want: Ran, tolerance: float) -> None:
    for mine, theirs in zip(got.counts, want.counts, strict=True):
        assert (mine == theirs).all()
    assert max(distance(got.first_grads[name], grad) for name, grad in want.first_grads.items()) <= tolerance
    assert max(distance(got.masters[name], master) for name, master in want.masters.items()) <= 10 * tolerance


@pytest.mark.parametrize("family", [x if x == "gpt_oss" else pytest.param(x, marks=pytest.mark.slow) for x in KINDS])
@pytest.mark.usefixtures("traced")
def test_gradients_are_those_of_eager_from_one_graph_a_kind(family: str) -> None:
    """Layers that differ in numbers alone share a graph: selection counts, a forced order, weights."""
    assert_same(ran(family, True), ran(family, False), 1e-6)
    assert counters["stats"]["unique_graphs"] == KINDS[family]
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.usefixtures("traced")
def test_regions_are_compiled_for_the_compute_dtype(dtype: str) -> None:
    """Rerun for the backward, with the head's z-loss: bitwise as eager."""

    def one_step(enabled: bool) -> Ran:
        training = {"global_batch_size": 4, "compute_dtype": dtype, "z_loss_coef": 1e-3}
        sections = {"compile": {"enabled": enabled}, "activation_checkpoint": {"mode": "full"}, "training": training}
        return gather_ran([steps_job(ALONE, make_spec(**sections).model_dump(mode="json"), 1)])

    assert_same(one_step(True), one_step(False), 0.0)
    assert counters["stats"]["unique_graphs"] == 2 * KINDS["qwen3_moe"] - 1  # with and without gradients, but the last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "moe"),
    [
        ("qwen3_moe", {"load_balance_type": "global_aux_loss", "aux_loss_coef": 0.01}),
        ("deepseek_v2", {"load_balance_type": "seq_aux_loss", "aux_loss_coef": 0.01, "z_loss_coef": 0.01}),
        ("gpt_oss", {"load_balance_type": "none", "aux_loss_coef": 0.0, "force_load_balance": True}),
    ],
)
@pytest.mark.usefixtures("traced")
def test_case_168_nothing_is_compiled_again_whatever_the_routing(family: str, moe: dict[str, Any]) -> None:
    """30 steps; a recompilation after the first one raises. Expert inputs are ragged, and no region sees them."""
    spec = spec_of(family, moe=moe)
    with single(spec) as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-2)
        assert counters["stats"]["unique_graphs"] == KINDS[family]
        seen = set()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(1, 30):
                result = train_step(engine, spec, batches_of(spec, engine, step), 1e-2)
                seen.add(tuple(result.stats.counts_LE.flatten().tolist()))
        assert len(seen) > 20 or spec.moe.force_load_balance
        assert counters["stats"]["unique_graphs"] == KINDS[family]
        assert not counters["graph_break"]


@pytest.mark.usefixtures("traced")
def test_too_many_graphs_are_an_error_and_no_silent_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pithtrain.build.COMPILED_GRAPHS", 1)
    spec = spec_of("qwen3_moe")
    with single(spec) as world:
        engine = build(spec, world)
        with pytest.raises(FailOnRecompileLimitHit):
            train_step(engine, spec, batches_of(spec, engine, 0), 1e-2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_case_167_the_real_compiler_on_this_machine() -> None:
    """Two steps; the versions stand in a run's submit.json."""
    assert_same(ran("qwen3_moe", True), ran("qwen3_moe", False), 1e-5)
    assert counters["stats"]["unique_graphs"] == KINDS["qwen3_moe"]


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.usefixtures("traced")
def test_nothing_is_compiled_again_whatever_the_documents(family: str) -> None:
    """Their number and lengths reach no region: 12 steps of other documents, from the graphs of streams."""
    spec = spec_of(family, data={"document_mask": True})
    with single(spec) as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-2)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(1, 12):
                train_step(engine, spec, batches_of(spec, engine, step), 1e-2)
    assert counters["stats"]["unique_graphs"] == KINDS[family]
    assert not counters["graph_break"]


def traced_job(place: Place, fields: dict[str, Any], steps: int) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        out = steps_job(place, fields, steps)
    assert not counters["graph_break"]
    return out | {"graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_cut_sequences_in_compiled_regions(pool: Pool, family: str, mode: str) -> None:
    """The ring and the sum of counts lie between regions; sums of probabilities leave theirs as one more output."""
    moe = {"load_balance_type": "seq_aux_loss", "aux_loss_coef": 0.05}
    sections = {"moe": moe, "data": {"document_mask": True}, "activation_checkpoint": {"mode": mode}}
    training = {"global_batch_size": 4, "compute_dtype": "float64"}
    fields, eager = (
        make_spec(cp=cp, architecture=family, compile={"enabled": cp > 1}, training=training, **sections).model_dump(
            mode="json"
        )
        for cp in (2, 1)
    )
    parts = pool.run(2, traced_job, fields, 3, timeout_s=300)
    assert_same(gather_ran(parts), gather_ran([steps_job(ALONE, eager, 3)]), 1e-9)
    assert [part["graphs"] for part in parts] == [KINDS[family] if mode == "none" else 2 * KINDS[family] - 1] * 2
