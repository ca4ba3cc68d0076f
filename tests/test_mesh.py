"""Results do not depend on the mesh (DESIGN.md section 4): losses, gradients, norm, and parameters after five steps.

Every mesh runs the same 5 x 16 sequences as one process. Expert ids must agree first: else nothing could.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import MODEL, Pool, Ran, distance, make_spec, run_mesh
from pithtrain import catalog
from pithtrain.models.contract import architectures
from pithtrain.models.deepseek_v2.config import VARIANTS as DEEPSEEK
from test_resume_meshes import assert_same_state, load_job, save_job, whole

STEPS = 5
Mesh = tuple[int, int, int]  # pp, dp, ep
MESHES: list[Mesh] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 2, 2)]
FLOAT64 = {"training": {"compute_dtype": "float64"}}
FAMILIES: dict[str, dict[str, Any]] = {  # MODEL is the one left out; layers over 4 stages are uneven: the head weighs
    **{name: {"architecture": name} for name in architectures() if name != MODEL["architecture"]},
    # groups of sigmoid scores, and a bias that follows the load
    "deepseek_v3": {"architecture": "deepseek_v2", "model": DEEPSEEK["V3"], "moe": {"bias_update_rate": 1e-2}},
}
VARIANTS = {
    "plain": {},
    "five layers": {"model": {"num_hidden_layers": 5}},
    "tied head, top-4, dense last": {
        "model": {"tie_word_embeddings": True, "num_experts_per_tok": 4, "mlp_only_layers": [3]}
    },
}


def mesh_name(mesh: Mesh) -> str:
    return "pp{}dp{}ep{}".format(*mesh)


def variants(fast: str) -> list[Any]:
    """All of them; `make test-fast` plays one."""
    return [pytest.param(v, marks=() if v == fast else pytest.mark.slow) for v in VARIANTS]


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> dict[tuple[str, str], Ran]:
    return {
        (variant, dtype): run_mesh(pool, make_spec(**changes, training={"compute_dtype": dtype}), STEPS)
        for variant, changes in VARIANTS.items()
        for dtype in ("float32", "float64")
    }


def assert_same_run(got: Ran, want: Ran, loss: float, grads: float, parameters: float) -> None:
    """Bounds are relative 2-norms per tensor."""
    for got_counts, want_counts in zip(got.counts, want.counts, strict=True):
        np.testing.assert_array_equal(got_counts, want_counts, "experts chosen")
    np.testing.assert_allclose(got.losses, want.losses, rtol=loss, atol=0)
    np.testing.assert_allclose(got.norms, want.norms, rtol=grads, atol=0)
    np.testing.assert_allclose(got.balance, want.balance, rtol=grads, atol=0)
    assert got.first_grads.keys() == want.first_grads.keys()
    for name, grad in want.first_grads.items():
        assert distance(got.first_grads[name], grad) <= grads, f"gradient of {name}"
    for name, master in want.masters.items():
        assert distance(got.masters[name], master) <= parameters, f"{name} after {STEPS} steps"


@pytest.mark.parametrize("variant", variants(fast="plain"))
@pytest.mark.parametrize("mesh", MESHES, ids=mesh_name)
def test_fp32_equals_one_process(pool: Pool, one_process: dict[tuple[str, str], Ran], mesh: Mesh, variant: str) -> None:
    got = run_mesh(pool, make_spec(*mesh, **VARIANTS[variant]), STEPS)
    assert_same_run(got, one_process[variant, "float32"], loss=1e-6, grads=1e-5, parameters=1e-4)


@pytest.mark.parametrize("variant", variants(fast="five layers"))
@pytest.mark.parametrize("mesh", MESHES, ids=mesh_name)
def test_float64_equals_one_process(
    pool: Pool, one_process: dict[tuple[str, str], Ran], mesh: Mesh, variant: str
) -> None:
    changes = {**VARIANTS[variant], **FLOAT64}
    got = run_mesh(pool, make_spec(*mesh, **changes), STEPS)
    assert_same_run(got, one_process[variant, "float64"], loss=1e-9, grads=1e-9, parameters=1e-9)


@pytest.fixture(scope="module")
def one_process_of(pool: Pool) -> Callable[[str, str], Ran]:
    @cache
    def ran(family: str, dtype: str) -> Ran:
        return run_mesh(pool, make_spec(**FAMILIES[family], training={"compute_dtype": dtype}), STEPS)

    return ran


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1)], ids=mesh_name)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_each_family_equals_one_process(
    pool: Pool, one_process_of: Callable[[str, str], Ran], family: str, mesh: Mesh
) -> None:
    """Shared experts, sinks, windows, biases of experts, selection biases: whatever MODEL lacks."""
    got = run_mesh(pool, make_spec(*mesh, **FAMILIES[family]), STEPS)
    assert_same_run(got, one_process_of(family, "float32"), loss=1e-6, grads=1e-5, parameters=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_equals_one_process_in_float64(
    pool: Pool, one_process_of: Callable[[str, str], Ran], family: str
) -> None:
    want = one_process_of(family, "float64")
    got = run_mesh(pool, make_spec(2, 1, 2, **{**FAMILIES[family], **FLOAT64}), STEPS)
    assert_same_run(got, want, loss=1e-9, grads=1e-9, parameters=1e-9)
    biases = {name: value for name, value in got.masters.items() if name.endswith("correction_bias")}
    assert bool(biases) == (family == "deepseek_v3")
    for name, bias in biases.items():
        np.testing.assert_array_equal(bias, want.masters[name], "a bias counts in whole steps: bitwise equal")
        assert bias.any()


def test_float64_and_fp32_are_the_same_model(one_process: dict[tuple[str, str], Ran]) -> None:
    """The two families of the tests above are one run: fp32 differs from float64 by its rounding alone."""
    single, double = one_process["plain", "float32"], one_process["plain", "float64"]
    np.testing.assert_allclose(single.losses, double.losses, rtol=1e-5)


@pytest.mark.slow
def test_some_expert_gets_no_token_and_stays_in_step(pool: Pool) -> None:
    """16 experts, 2 sequences of 4 tokens a micro-batch: many experts are empty in a micro-batch, some in a whole step.

    Their gradient is exactly zero, and they decay like all others on every rank.
    """
    changes = {
        "model": {"num_experts": 16, "num_experts_per_tok": 1},
        "training": {"sequence_length": 2, "global_batch_size": 8, "compute_dtype": "float64"},
    }
    want = run_mesh(pool, make_spec(**changes), STEPS)
    empty = [(layer, expert) for layer, expert in np.argwhere(want.counts[0] == 0) if layer > 0]
    assert empty, "the case needs an expert without a token in the first step"
    for mesh in [(1, 2, 2), (2, 1, 2)]:
        got = run_mesh(pool, make_spec(*mesh, **changes), STEPS)
        assert_same_run(got, want, loss=1e-9, grads=1e-9, parameters=1e-9)
        for layer, expert in empty:
            grad = got.first_grads[f"model.layers.{layer}.mlp.experts.down_proj"].reshape(16, -1)
            assert not grad[expert].any()


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [2, 4])
def test_plain_dispatch_is_bitwise_equal_to_dedup(pool: Pool, top_k: int) -> None:
    runs = [
        run_mesh(pool, make_spec(1, 2, 2, model={"num_experts_per_tok": top_k}, moe={"dispatch": dispatch}), STEPS)
        for dispatch in ("dedup", "plain")
    ]
    assert_bitwise(*runs)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)], ids=mesh_name)
def test_rerun_is_bitwise_equal(pool: Pool, mesh: Mesh) -> None:
    assert_bitwise(*(run_mesh(pool, make_spec(*mesh), STEPS) for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rerun_of_each_family_is_bitwise_equal(pool: Pool, family: str) -> None:
    assert_bitwise(*(run_mesh(pool, make_spec(2, 1, 2, **FAMILIES[family]), STEPS) for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_of_each_family_is_bitwise_equal(pool: Pool, tmp_path: Path, family: str) -> None:
    """Saved after two steps, loaded into engines of other initial values, and two steps more on both sides."""
    sections = {**FAMILIES[family], "training": {"global_batch_size": 12}}
    fields = make_spec(2, 1, 2, **sections).model_dump(mode="json")
    want = whole(pool.run(4, save_job, fields, tmp_path, 2))
    got = whole(pool.run(4, load_job, fields, catalog.folder(tmp_path, 2), 2))
    assert_same_state(got, want)
    assert (got.losses, got.norms) == (want.losses, want.norms)
    for name, master in want.masters.items():
        np.testing.assert_array_equal(got.masters[name], master, name)


def assert_bitwise(a: Ran, b: Ran) -> None:
    assert a.losses == b.losses
    assert a.norms == b.norms
    for mine, theirs in ((a.first_grads, b.first_grads), (a.masters, b.masters)):
        for name, tensor in mine.items():
            np.testing.assert_array_equal(tensor, theirs[name], name)


def test_case_096_the_number_of_micro_batches_does_not_change_the_gradient(pool: Pool) -> None:
    """Two sequences a micro-batch instead of one: the loss is a mean over the tokens of the global batch (case 103).

    The balance loss is defined per micro-batch, so it is off here.
    """
    off = {"moe": {"load_balance_type": "none", "aux_loss_coef": 0.0}, **FLOAT64}
    one = run_mesh(pool, make_spec(**off), 2)
    training = {**FLOAT64["training"], "micro_batch_size": 2}
    two = run_mesh(pool, make_spec(2, 1, 2, **{**off, "training": training}), 2)
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-12)
    for name, grad in one.first_grads.items():
        assert distance(two.first_grads[name], grad) <= 1e-9, name
