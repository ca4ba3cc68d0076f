"""Every folder of models/ keeps the contract and equals transformers' model: no table names them, this file walks them.

Equal means logits, loss and every gradient within 1e-5 (relative 2-norm of a tensor) in fp32, for the tiny config and
each of its variants, which together give every field another value. `oracle.py` says how the two are compared.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pithtrain
from harness import Pool, assemble, batches_of, fields_of, make_spec, single, tiny
from oracle import (
    LENGTH,
    TOLERANCE,
    Differences,
    compare,
    configs,
    fields,
    hf_config,
    logits_of,
    oracle,
    spec_of,
    tensors,
    untried,
)
from pithtrain import convert
from pithtrain.build import EMBEDDING, FINAL_NORM, HEAD, build
from pithtrain.errors import SpecError
from pithtrain.models.contract import ModelConfig, architectures, load_config, load_model
from pithtrain.spec import from_dict, read_model
from pithtrain.train import train_step
from pithtrain.world import Place, connect
from reference import poisoned_memory
from test_zero import init_job

PACKAGE = Path(pithtrain.__file__).parent
FOLDERS = architectures()
CASES = [pytest.param(name, label, id=f"{name}: {label}") for name in FOLDERS for label in configs(name)]
MLA = "deepseek_v2"
STEP = 1e-7  # of a finite difference in float64, so short that no token changes its experts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 32 rows are not worth a second thread, and two that wait for each other spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def routers(config: ModelConfig) -> list[str]:
    """Names of the router matrices: the one kind of matrix that is kept in fp32."""
    return [info.name for info in config.parameters() if info.fp32 and info.init == "normal" and len(info.shape) == 2]


@cache
def compared(name: str, label: str) -> Differences:
    return compare(name, configs(name)[label])


def changed(name: str, **changes: Any) -> ModelConfig:
    return read_model({"architecture": name, **fields_of(tiny(name)), **changes}).config


def assert_equal(found: Differences, tolerance: float = TOLERANCE) -> None:
    assert found.logits < tolerance
    assert found.logits_max < tolerance, "logits are of about unit size"
    assert found.loss < tolerance
    assert found.gradients
    wrong = {name: value for name, value in found.gradients.items() if not value < tolerance}
    assert not wrong, f"gradients that differ: {wrong}"


# ---- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_its_table_is_complete_and_consistent(name: str) -> None:
    for config in configs(name).values():
        assert isinstance(config, load_config(name))
        table = config.parameters()
        names = [info.name for info in table]
        assert len(set(names)) == len(names)
        assert {EMBEDDING, FINAL_NORM} <= set(names)
        assert (HEAD in names) != config.tie_word_embeddings
        for info in table:
            assert info.kind == "dense" or info.shape[0] == config.num_experts, info
            assert not info.decay or info.init == "normal", "decay reaches matrices alone"
            assert info.fp32 or len(info.shape) > 1, "1-D parameters stay in fp32"
            assert (info.std > 0) == (info.init == "normal"), info
            assert (info.layer is None) == (not info.name.startswith("model.layers.")), info
            assert info.update == "gradient" or (info.fp32 and not info.decay), info
        assert {info.layer for info in table} >= set(range(config.num_hidden_layers))
        assert config.IGNORED.keys().isdisjoint(type(config).model_fields)
        moe = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
        assert len(routers(config)) == moe > 0, "this file knows a router by being a matrix in fp32"


@pytest.mark.parametrize(("name", "label"), CASES)
def test_a_step_reaches_every_parameter(name: str, label: str) -> None:
    """Every weight is used and gets a gradient, the router's too; every layer is what its config says."""
    spec = spec_of(name, configs(name)[label])
    with single(spec) as world:
        engine = build(spec, world)
        for stage in engine.pipeline.stages:
            for layer in stage.layers:
                assert (layer.experts is not None) == spec.model.config.is_moe(layer.index)
        result = train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        assert torch.isfinite(result.stats.loss)
        for parameter, one in engine.zero.sharded.items():
            assert one.grad.any() == (one.info.update == "gradient"), parameter


def test_nothing_outside_its_folder_names_a_family() -> None:
    """So that adding a model touches one folder. Docstrings and comments may tell of families; code may not."""
    words = re.compile("|".join(name.replace("_", "[-_]?") for name in FOLDERS), re.IGNORECASE)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.parent.name == "models":
            continue
        tree = ast.parse(path.read_text())
        blocks = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
        prose = {id(line.value) for body in blocks for line in body if isinstance(line, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in prose:
                assert not words.search(str(node.value)), f"{path}:{node.lineno}: {node.value!r}"
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
            module = getattr(node, "module", None)
            assert not words.search(f"{name} {module}"), f"{path}:{getattr(node, 'lineno', 0)}: {name} {module}"


YARN = [name for name in FOLDERS if fields_of(tiny(name))["rope_parameters"]["rope_type"] == "yarn"]


@pytest.mark.parametrize("name", YARN)
@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"factor": None}, "factor", "missing; "),
        ({"rope_type": "linear"}, "rope_type", "= 'linear': must be one of 'default', 'yarn'"),
        ({"rope_type": None}, "rope_type", "missing; one of 'default', 'yarn': how the waves are scaled"),
        ({"rope_theta": 1.0}, "rope_theta", "must be greater than 1"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast", "must not be below beta_slow"),
        ({"rope_type": "default"}, "factor", "is a key of another kind of rope_parameters"),
        ({"betafast": 1.0}, "betafast", "is not a key; did you mean model.rope_parameters.beta_fast?"),
    ],
)
def test_yarn_is_told_whole(name: str, changes: dict[str, Any], path: str, words: str) -> None:
    """No number of it has a default, and an error names the key as one writes it."""
    rope = fields_of(tiny(name))["rope_parameters"] | changes
    with pytest.raises(SpecError) as error:
        changed(name, rope_parameters=rope)
    problem = {problem.path: str(problem) for problem in error.value.problems}[f"model.rope_parameters.{path}"]
    assert words in problem
    assert len(error.value.problems) == 1 or "kind" in words


@pytest.mark.parametrize("name", YARN)
def test_a_rope_that_is_told_twice_must_be_the_same(name: str) -> None:
    rope = fields_of(tiny(name))["rope_parameters"]
    assert changed(name, rope_scaling=rope, rope_theta=rope["rope_theta"]) == tiny(name)
    for other in ({"rope_theta": 7.0}, {"rope_scaling": {"factor": 7.0}}):
        with pytest.raises(SpecError, match=r"= 7\.0: contradicts rope_parameters\.\w+ = "):
            changed(name, **other)


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "label"), CASES)
def test_it_equals_transformers(name: str, label: str) -> None:
    assert_equal(compared(name, label))


@pytest.mark.parametrize("name", FOLDERS)
def test_no_gradient_is_compared_with_nothing_but_zeros(name: str) -> None:
    always = set.intersection(*(set(compared(name, label).zero_gradients) for label in configs(name)))
    assert not always


@pytest.mark.parametrize("name", FOLDERS)
def test_bf16_on_the_cpu(name: str) -> None:
    """Against transformers in fp32, from weights that bf16 can hold. A near tie may send a token to another expert, so
    logits are judged by the median token, within 2 %, and gradients by the median tensor, within 10 %; the loss within
    2e-3."""
    found = compare(name, tiny(name), torch.bfloat16)
    assert 1e-4 < found.logits_median < 0.02, "above: wrong; below: no bf16 was used"
    assert found.loss < 2e-3
    assert np.median(list(found.gradients.values())) < 0.1


@pytest.mark.parametrize(
    ("name", "label"),
    [
        pytest.param(*case.values, marks=[] if case.values[1] == "tiny" else pytest.mark.slow, id=case.id)
        for case in CASES
    ],
)
def test_case_064_a_checkpoint_that_transformers_made_is_imported(name: str, label: str, tmp_path: Path) -> None:
    """Its config.json and tensors, by `import_hf`: logits within 1e-4, with and without renormalised weights."""
    config = configs(name)[label]
    model = oracle(config)
    model.save_pretrained(tmp_path / "theirs")
    # the one field that transformers does not follow: see `oracle`
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["rms_norm_eps"] == config.rms_norm_eps
    native = convert.import_hf(tmp_path / "theirs", tmp_path / "ours", name)
    spec = spec_of(name, config)
    with single(spec) as world:
        engine = build(spec, world)
        told: list[str] = []
        convert.init(native, engine.zero, world, spec.model, told.append)
        told = [line for line in told if "and null in the spec" not in line]  # a default, said by the one alone
        assert not told
        tokens = batches_of(spec, engine, 0)[0].tokens
        with torch.no_grad():
            assert (logits_of(engine, tokens) - model(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "label"), CASES)
def test_every_field_of_theirs_is_read_ignored_or_refused(name: str, label: str) -> None:
    """What transformers' config class holds of a family; nothing is left without a word."""
    config = configs(name)[label]
    lost = {one.name: one.why for one in fields(name, config) if one.use == "LOST"}
    assert not lost, "read it in Config, refuse it there by only(...), or list it in IGNORED"


@pytest.mark.parametrize(("name", "label"), CASES)
def test_theirs_is_right_by_no_default_of_its_own(name: str, label: str) -> None:
    """Every field that we read is handed to transformers: else the two could agree by a default of its class."""
    config = configs(name)[label]
    ours = {path: value for path, value in fields_of(config).items() if value is not None}
    for key in hf_config(config).to_dict().keys() & ours.keys():
        assert key in config.hf_config(), key


@pytest.mark.parametrize("name", FOLDERS)
def test_every_field_has_two_values_among_the_configs(name: str) -> None:
    """So that each is compared with transformers where a constant in our code would show. Nested fields too."""
    assert not untried(name)


@pytest.mark.parametrize("name", FOLDERS)
def test_its_tensors_are_those_that_transformers_saves(name: str) -> None:
    """In layout as in name: files of the family are read as the family is published, never as a fused guess."""
    for config in configs(name).values():
        assert [one for one in tensors(config) if one.theirs != one.ours] == []


def test_an_oracle_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the comparison itself: another epsilon in ours shows in logits and in gradients."""
    name = FOLDERS[0]
    found = compared(name, "tiny")
    monkeypatch.setattr("pithtrain.build.rms_norm", lambda x, gain, eps: x * gain)
    wrong = compare(name, tiny(name))
    assert wrong.logits > 1e-2 > found.logits
    assert wrong.worst()[1] > 1e-2 > found.worst()[1]


# ---- the casebook's (j) and (m) --------------------------------------------------------------------------------------


@pytest.mark.skipif(MLA not in FOLDERS, reason="no such model")
def test_case_137_the_long_context_scale_of_mla() -> None:
    """YaRN with factor 40 and mscale = mscale_all_dim = 1: the squared amplitude is in the softmax scale."""
    label = "mscale 1, factor 40"
    rope = fields_of(configs(MLA)[label])["rope_parameters"]
    assert (rope["factor"], rope["mscale"], rope["mscale_all_dim"]) == (40.0, 1.0, 1.0)
    assert_equal(compared(MLA, label))


@pytest.mark.skipif(MLA not in FOLDERS, reason="no such model")
def test_case_140_the_widths_of_mla_are_its_own() -> None:
    """hidden 64, 8 heads of 16 + 8 for keys and 12 for values: no width is hidden / heads."""
    label = "widths of heads"
    sizes = fields_of(configs(MLA)[label])
    keys = "hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    assert [sizes[key] for key in keys] == [64, 8, 16, 8, 12]
    assert_equal(compared(MLA, label))


@pytest.mark.parametrize("name", FOLDERS)
def test_case_141_every_norm_takes_the_configs_epsilon(name: str) -> None:
    """1e-3 or more, and weights so small that it decides; the norms inside attention included."""
    labels = [label for label, config in configs(name).items() if config.rms_norm_eps >= 1e-3]
    assert labels
    for label in labels:
        assert_equal(compared(name, label))


def tables_job(place: Place, spec_fields: dict[str, Any], poison: bool) -> list[np.ndarray]:
    """What each stage is built with."""
    spec = from_dict(spec_fields)
    module: Any = load_model(spec.model.architecture)
    given: list[Tensor] = []
    rope = module.rope

    def recording(*args: Any) -> Any:
        given.append(rope(*args))
        return given[-1]

    with pytest.MonkeyPatch.context() as patch, connect(place, spec.mesh, "cpu", spec.distributed) as world:
        patch.setattr(module, "rope", recording)
        if poison:
            with poisoned_memory():
                build(spec, world)
        else:
            build(spec, world)
    assert given and all(tables.dtype == torch.float32 for tables in given)
    return [tables.numpy() for tables in given]


@pytest.mark.parametrize("name", FOLDERS)
def test_case_165_rotary_tables_are_the_same_on_every_rank(pool: Pool, name: str) -> None:
    """fp32 in a bf16 run, and nothing in them is what the allocator left: its memory is full of NaN."""
    training = {"compute_dtype": "bfloat16"}
    one = make_spec(architecture=name, training=training).model_dump(mode="json")
    want = pool.run(1, tables_job, one, False)[0][0]
    assert np.isfinite(want).all()
    spec = make_spec(2, 1, 2, architecture=name, training=training)
    for tables in pool.run(4, tables_job, spec.model_dump(mode="json"), True):
        for table in tables:
            np.testing.assert_array_equal(table, want)


def with_experts(name: str, count: int) -> ModelConfig:
    [field] = {"num_experts", "n_routed_experts", "num_local_experts"} & fields_of(tiny(name)).keys()
    return changed(name, **{field: count, "num_experts_per_tok": 1})


@pytest.mark.parametrize("count", [2, 64])
@pytest.mark.parametrize("name", FOLDERS)
def test_case_166_experts_begin_with_the_spread_of_a_dense_matrix(name: str, count: int) -> None:
    """Each expert's own matrix has the standard deviation `initializer_range`, however many experts are stacked."""
    config = with_experts(name, count)
    spec = spec_of(name, config)
    with single(spec) as world:
        masters = {key: (one.info, one.master) for key, one in build(spec, world).zero.sharded.items()}
    for info, master in masters.values():
        if info.init != "normal" or info.size < 100:
            continue
        matrices = master.view(info.shape[0] if info.kind == "expert" else 1, -1)
        error = 5 / (2 * matrices.shape[1]) ** 0.5
        assert ((matrices.std(dim=1) / fields_of(config)["initializer_range"] - 1).abs() < error).all(), info


# ---- the mesh, and the objective -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n == "gpt_oss" else pytest.param(n, marks=pytest.mark.slow) for n in FOLDERS])
def test_initial_weights_do_not_depend_on_the_mesh(pool: Pool, name: str) -> None:
    """Bitwise; five layers, so that stages are uneven."""
    model = {"num_hidden_layers": 5, **({"layer_types": None} if "layer_types" in fields_of(tiny(name)) else {})}
    want = assemble(pool.run(1, init_job, make_spec(architecture=name, model=model).model_dump(mode="json")))
    for mesh in [(2, 1, 2), (1, 2, 2), (3, 1, 1)]:
        spec = make_spec(*mesh, architecture=name, model=model)
        got = assemble(pool.run(spec.world_size, init_job, spec.model_dump(mode="json")))
        assert got.keys() == want.keys()
        for key, tensor in want.items():
            np.testing.assert_array_equal(got[key], tensor, f"{key} on {mesh}")


def test_the_sequences_here_are_longer_than_any_window() -> None:
    for name in FOLDERS:
        for config in configs(name).values():
            assert (fields_of(config).get("sliding_window") or 0) < LENGTH
