"""Checkpoints: saved on one mesh, loaded bitwise on another; incomplete ones skipped; what must not change refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import Pool, Shards, assemble, batches_of, make_spec, shards
from pithtrain import checkpoint
from pithtrain.build import build
from pithtrain.checkpoint import MARKER, Position
from pithtrain.errors import CheckpointError
from pithtrain.spec import from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect

KINDS = ("master", "exp_avg", "exp_avg_sq")
ABOUT = {"model": {"vocab_size": 96}, "tokenizer": "abc"}
SAVED_ON = (2, 1, 2)
# rows that do not divide: 96 over 3; experts of 8 x 32 rows over 3 ranks of one expert group; 5 layers over 4 stages
LOADED_ON = [(1, 1, 1), (1, 1, 4), (1, 3, 1), (4, 1, 1), (1, 2, 2), (2, 2, 1), (3, 1, 1), (2, 1, 2)]


def save_job(place: Place, fields: dict[str, Any], folder: Path) -> dict[str, Shards]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", 60, 60) as world:
        engine = build(spec, world)
        for step in range(2):
            train_step(engine, spec, batches_of(spec, engine, step), 1e-3)
        checkpoint.save(folder, engine.zero, world, Position(2, 32), ABOUT)
        return {kind: shards(engine, lambda p, kind=kind: getattr(p, kind)) for kind in KINDS}


def load_job(place: Place, fields: dict[str, Any], path: Path) -> tuple[Position, dict[str, Shards], Shards, int]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", 60, 60) as world:
        engine = build(from_dict({**fields, "training": {**fields["training"], "seed": 99}}), world)
        position = checkpoint.load(path, engine.zero, world, ABOUT)
        found = {kind: shards(engine, lambda p, kind=kind: getattr(p, kind)) for kind in KINDS}
        weights = shards(engine, lambda p: p._own(p._data)[: p.master.shape[0]])
        return position, found, weights, engine.zero.updates


def spec_fields(mesh: tuple[int, int, int]) -> dict[str, Any]:
    training = {"global_batch_size": 12 if mesh[1] == 3 else 16}
    return make_spec(*mesh, model={"num_hidden_layers": 5}, training=training).model_dump(mode="json")


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    parts = pool.run(4, save_job, spec_fields(SAVED_ON), folder)
    return checkpoint.folder(folder, 2), {kind: assemble([part[kind] for part in parts]) for kind in KINDS}


@pytest.mark.parametrize("mesh", LOADED_ON, ids=lambda mesh: "pp{}dp{}ep{}".format(*mesh))
def test_any_mesh_loads_it_bitwise(
    pool: Pool, saved: tuple[Path, dict[str, dict[str, np.ndarray]]], mesh: tuple[int, int, int]
) -> None:
    path, want = saved
    parts = pool.run(mesh[0] * mesh[1] * mesh[2], load_job, spec_fields(mesh), path)
    for position, _, _, updates in parts:
        assert (position, updates) == (Position(2, 32), 2)
    for kind in KINDS:
        got = assemble([part[1][kind] for part in parts])
        assert got.keys() == want[kind].keys()
        for name, tensor in want[kind].items():
            np.testing.assert_array_equal(got[name], tensor, f"{kind} of {name}")
    for name, tensor in assemble([part[2] for part in parts]).items():
        np.testing.assert_array_equal(tensor, want["master"][name], f"weight {name} follows its master")


def test_newest_complete_is_found_whatever_lies_beside_it(tmp_path: Path) -> None:
    """Cases 112 and 115: by number, not by text; without a readable marker it is not there."""
    for name in ("step-00000050", "step-00000900", "step-00001000", "step-00001100", "step-123456789"):
        (tmp_path / name).mkdir()
        if name != "step-123456789":
            (tmp_path / name / MARKER).write_text(json.dumps({"format": checkpoint.FORMAT}))
    (tmp_path / "step-00001100" / MARKER).write_text('{"format": 1, "st')  # torn
    for junk in ("step-00001200.partial", "step_10.bak"):
        (tmp_path / junk).mkdir()
    (tmp_path / "step-9999").write_text("a file")
    skipped: list[str] = []
    assert checkpoint.newest(tmp_path, skipped.append) == tmp_path / "step-00001000"
    assert sorted(text.split()[0] for text in skipped) == [
        "step-00001100",
        "step-00001200.partial",
        "step-123456789",
        "step-9999",
    ]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "missing", pytest.fail) is None


def test_named_checkpoint_must_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a complete checkpoint nor a run directory"):
        checkpoint.resolve(str(tmp_path), pytest.fail)


def load_with(path: Path, about: dict[str, Any]) -> Position:
    spec = make_spec(model={"num_hidden_layers": 5})
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cpu", 60, 60) as world:
        return checkpoint.load(path, build(spec, world).zero, world, about)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"model": {"vocab_size": 97}}, "model.vocab_size: the checkpoint has 96, the spec 97"),
        ({"model": {"vocab_size": 96}, "tokenizer": "xyz"}, "tokenizer: the checkpoint has 'abc', the spec 'xyz'"),
    ],
)
def test_what_must_not_change_is_refused_with_both_values(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], about: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_with(saved[0], about)


def test_incomplete_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_with(tmp_path / "step-00000002", ABOUT)


def test_a_save_replaces_what_a_killed_save_left(pool: Pool, tmp_path: Path) -> None:
    partial = checkpoint.folder(tmp_path, 2).with_name("step-00000002.partial")
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_text("half")
    pool.run(2, save_job, spec_fields((1, 1, 2)), tmp_path)
    assert not partial.exists()
    assert checkpoint.newest(tmp_path, pytest.fail) == checkpoint.folder(tmp_path, 2)
