"""Results do not depend on the mesh (DESIGN.md section 4): losses, gradients, norm, and parameters after five steps.

Every mesh runs the same 5 x 16 sequences as one process. Expert ids must agree first: else nothing could.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import MODEL, Pool, Ran, distance, make_spec, run_mesh, variants
from pithtrain import catalog
from pithtrain.models.contract import architectures
from test_resume_meshes import assert_same_state, load_job, save_job, whole

STEPS = 5
Mesh = tuple[int, int, int]  # pp, dp, ep
MESHES: list[Mesh] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 2, 2)]
FLOAT64 = {"training": {"compute_dtype": "float64"}}
FAMILIES: dict[str, dict[str, Any]] = {  # MODEL is the one left out; layers over 4 stages are uneven: the head weighs
    **{name: {"architecture": name} for name in architectures() if name != MODEL["architecture"]},
    # groups of sigmoid scores, and a bias that follows the load
    "deepseek_v3": {
        "architecture": "deepseek_v2",
        "model": variants("deepseek_v2")["V3"],
        "moe": {"bias_update_rate": 1e-2},
    },
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


def every_mesh(fast_variant: str, *fast: Mesh) -> pytest.MarkDecorator:
    """Each variant on each mesh; `make test-fast` plays one on a few."""
    cases = [(mesh, variant, variant == fast_variant and mesh in fast) for mesh in MESHES for variant in VARIANTS]
    marked = [
        pytest.param(mesh, variant, marks=() if plays else pytest.mark.slow, id=f"{mesh_name(mesh)}-{variant}")
        for mesh, variant, plays in cases
    ]
    return pytest.mark.parametrize(("mesh", "variant"), marked)


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> Callable[[str, str], Ran]:
    @cache
    def ran(variant: str, dtype: str) -> Ran:
        return run_mesh(pool, make_spec(**VARIANTS[variant], training={"compute_dtype": dtype}), STEPS)

    return ran


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


@every_mesh("plain", (1, 2, 1), (2, 1, 2))
def test_fp32_equals_one_process(pool: Pool, one_process: Callable[[str, str], Ran], mesh: Mesh, variant: str) -> None:
    got = run_mesh(pool, make_spec(*mesh, **VARIANTS[variant]), STEPS)
    assert_same_run(got, one_process(variant, "float32"), loss=1e-6, grads=1e-5, parameters=1e-4)


@every_mesh("five layers", (2, 2, 1))
def test_float64_equals_one_process(
    pool: Pool, one_process: Callable[[str, str], Ran], mesh: Mesh, variant: str
) -> None:
    changes = {**VARIANTS[variant], **FLOAT64}
    got = run_mesh(pool, make_spec(*mesh, **changes), STEPS)
    assert_same_run(got, one_process(variant, "float64"), loss=1e-9, grads=1e-9, parameters=1e-9)


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


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "deepseek_v3" else pytest.mark.slow) for f in FAMILIES]
)
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


@pytest.mark.slow
def test_float64_and_fp32_are_the_same_model(one_process: Callable[[str, str], Ran]) -> None:
    """The two families of the tests above are one run: fp32 differs from float64 by its rounding alone."""
    single, double = one_process("plain", "float32"), one_process("plain", "float64")
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# ---- sequences cut over ranks, and documents -------------------------------------------------------------------------

CUTS = [  # pp, dp, ep, cp
    *((1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 4), (1, 1, 2, 4), (2, 1, 2, 2)),
]
SEQ_AUX = {"moe": {"load_balance_type": "seq_aux_loss", "aux_loss_coef": 0.05, "z_loss_coef": 0.01}}
LONG: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    **FAMILIES,
    "deepseek_v2": {**FAMILIES["deepseek_v2"], **SEQ_AUX},
}


def cut_name(mesh: tuple[int, ...]) -> str:
    return "pp{}dp{}ep{}cp{}".format(*mesh)


def long_spec(*mesh: int, family: str, mask: bool, dtype: str, **sections: Any) -> Any:
    """Two sequences of 16 tokens a micro-batch, whose documents `harness.documents_of` lists: one alone, some of one
    token, one longer than any chunk."""
    changes = {**LONG[family], **sections, "data": {"document_mask": mask}}
    changes["training"] = {"micro_batch_size": 2, "compute_dtype": dtype, **changes.get("training", {})}
    return make_spec(*mesh, **changes)


@pytest.fixture(scope="module")
def whole_sequences(pool: Pool) -> Callable[[str, bool, str], Ran]:
    @cache
    def ran(family: str, mask: bool, dtype: str) -> Ran:
        return run_mesh(pool, long_spec(family=family, mask=mask, dtype=dtype), STEPS)

    return ran


@pytest.mark.parametrize("mask", [True, False], ids=["documents", "stream"])
@pytest.mark.parametrize("mesh", CUTS, ids=cut_name)
@pytest.mark.parametrize("family", LONG)
@pytest.mark.slow
def test_cut_sequences_equal_whole_ones(
    pool: Pool, whole_sequences: Callable[[str, bool, str], Ran], family: str, mesh: tuple[int, ...], mask: bool
) -> None:
    """Loss, balance, every gradient and five updates, in float64 and in fp32: also cases 51, 109 and 148."""
    for dtype, bounds in (("float64", (1e-9, 1e-9, 1e-9)), ("float32", (1e-6, 1e-5, 1e-4))):
        got = run_mesh(pool, long_spec(*mesh, family=family, mask=mask, dtype=dtype), STEPS)
        assert_same_run(got, whole_sequences(family, mask, dtype), *bounds)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3_moe", (2, 1, 1, 2)),
        pytest.param("deepseek_v2", (1, 1, 2, 2), marks=pytest.mark.slow),
        pytest.param("gpt_oss", (1, 1, 1, 4), marks=pytest.mark.slow),
    ],
)
def test_case_109_148_cut_sequences_and_documents(
    pool: Pool, whole_sequences: Callable[[str, bool, str], Ran], family: str, mesh: tuple[int, ...]
) -> None:
    """One mesh a family. dp = 2 gives the same too: no factor of cp anywhere."""
    want = whole_sequences(family, True, "float64")
    for one in (mesh, (1, 2, 1, 1)) if family == "qwen3_moe" else (mesh,):
        got = run_mesh(pool, long_spec(*one, family=family, mask=True, dtype="float64"), STEPS)
        assert_same_run(got, want, 1e-9, 1e-9, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_case_051_balance_counts_every_token_of_a_cut_sequence_once(pool: Pool, kind: str) -> None:
    """The losses, their gradients and the counts of each kind, with coefficients that outweigh the loss."""
    coefs = {"aux_loss_coef": 0.0 if kind == "none" else 1.0, "z_loss_coef": 0.5}
    moe = {"load_balance_type": kind, **coefs}
    want, got = (
        run_mesh(pool, long_spec(*mesh, family="qwen3_moe", mask=True, dtype="float64", moe=moe), 3)
        for mesh in ((1, 1, 1, 1), (1, 1, 1, 2))
    )
    assert_same_run(got, want, 1e-9, 1e-9, 1e-9)
    assert (want.balance[1][1:] >= 0.9).all() == (kind != "none")


@pytest.mark.slow
def test_forced_routing_is_that_of_whole_sequences(pool: Pool) -> None:
    """24 tokens: chunks of 6, which are no whole rounds over the experts."""
    moe = {"load_balance_type": "none", "aux_loss_coef": 0.0, "force_load_balance": True}
    sections = {"moe": moe, "training": {"sequence_length": 24, "global_batch_size": 8}}
    want, *others = (
        run_mesh(pool, long_spec(*mesh, family="qwen3_moe", mask=False, dtype="float64", **sections), 1)
        for mesh in ((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 2))
    )
    for got in others:
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-12)
        for name, grad in want.first_grads.items():
            assert distance(got.first_grads[name], grad) <= 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_cut_sequences_are_recomputed_and_resumed_bitwise(pool: Pool, tmp_path: Path, family: str) -> None:
    mesh = (1, 1, 1, 2)
    runs = [
        run_mesh(
            pool,
            long_spec(*mesh, family=family, mask=True, dtype="float32", activation_checkpoint={"mode": mode}),
            3,
        )
        for mode in ("none", "selective", "full", "full")
    ]
    for run in runs[1:]:
        assert_bitwise(run, runs[0])
    fields = long_spec(*mesh, family=family, mask=True, dtype="float32").model_dump(mode="json")
    want = whole(pool.run(2, save_job, fields, tmp_path, 2))
    got = whole(pool.run(2, load_job, fields, catalog.folder(tmp_path, 2), 2))
    assert_same_state(got, want)
    one = long_spec(family=family, mask=True, dtype="float32").model_dump(mode="json")
    other = whole(pool.run(1, load_job, one, catalog.folder(tmp_path, 2), 2))  # on one rank
    np.testing.assert_allclose(other.losses, want.losses, rtol=1e-5)
