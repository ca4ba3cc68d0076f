"""Checkpoints: saved on one mesh, loaded bitwise on another; incomplete ones skipped; what must not change refused."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import Pool, Shards, assemble, batches_of, make_spec, shards
from pithtrain import checkpoint
from pithtrain.build import build
from pithtrain.checkpoint import MARKER, Position
from pithtrain.errors import CheckpointError, RunFailed
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
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(2):
            train_step(engine, spec, batches_of(spec, engine, step), 1e-3)
        checkpoint.save(folder, engine.zero, world, Position(2, 32), ABOUT)
        return {kind: shards(engine, lambda p, kind=kind: getattr(p, kind)) for kind in KINDS}


def load_job(place: Place, fields: dict[str, Any], path: Path) -> tuple[Position, dict[str, Shards], Shards, int]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(from_dict({**fields, "training": {**fields["training"], "seed": 99}}), world)
        position = checkpoint.load(path, engine.zero, world, checkpoint.read(path))
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
    whole = {"format": checkpoint.FORMAT, "files": {}, "step": 1, "samples": 1, "updates": 1}
    for name in ("step-00000050", "step-00000900", "step-00001000", "step-00001100", "step-123456789"):
        (tmp_path / name).mkdir()
        if name != "step-123456789":
            (tmp_path / name / MARKER).write_text(json.dumps(whole))
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
        checkpoint.check(saved[0], checkpoint.read(saved[0]), about)


def test_case_112_a_checkpoint_that_lost_a_part_is_skipped_by_name(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], tmp_path: Path
) -> None:
    for step, damage in ((1, "none"), (2, "cut"), (3, "gone"), (4, "empty")):
        copy = shutil.copytree(saved[0], checkpoint.folder(tmp_path, step))
        shard = next(copy.glob("*.distcp"))
        if damage == "gone":
            shard.unlink()
        elif damage != "none":
            os.truncate(shard, shard.stat().st_size // 2 if damage == "cut" else 0)
    skipped: list[str] = []
    assert checkpoint.newest(tmp_path, skipped.append) == checkpoint.folder(tmp_path, 1)
    assert len(skipped) == 3
    assert all("is incomplete" in text and "bytes of" in text for text in skipped)


def test_another_format_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    folder = checkpoint.folder(tmp_path, 7)
    folder.mkdir()
    (folder / MARKER).write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 1"):
        checkpoint.newest(tmp_path, pytest.fail)


def test_a_shard_that_cannot_be_read_is_a_checkpoint_error(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], tmp_path: Path
) -> None:
    copy = shutil.copytree(saved[0], checkpoint.folder(tmp_path, 2))
    content = checkpoint.read(copy)
    next(copy.glob("*.distcp")).unlink()  # after it was read: another process tidies up
    spec = make_spec(model={"num_hidden_layers": 5})
    with (
        connect(Place(0, 1, 0, "", 1), spec.mesh, "cpu", spec.distributed) as world,
        pytest.raises(CheckpointError, match=r"cannot be read .*distcp"),
    ):
        checkpoint.load(copy, build(spec, world).zero, world, content)


def save_again_job(place: Place, fields: dict[str, Any], folder: Path, die_at: int) -> int:
    """Save step 2, twice in an empty folder; the last save dies before its file operation `die_at`. -> operations."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        if not folder.exists():
            checkpoint.save(folder, engine.zero, world, Position(2, 32), ABOUT)
        done = 0
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (json, "dump"), (os, "fsync")):
                original = getattr(owner, name)

                def step(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                    nonlocal done
                    done += 1
                    if done == die_at:
                        raise KeyboardInterrupt
                    return original(*args, **kwargs)

                patch.setattr(owner, name, step)
            with contextlib.suppress(KeyboardInterrupt, RunFailed):
                checkpoint.save(folder, engine.zero, world, Position(2, 32), ABOUT)
        return done


def test_a_save_that_dies_anywhere_leaves_a_complete_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """The step is saved again over a complete one, and the saver dies before each of its file operations in turn."""
    fields = make_spec().model_dump(mode="json")
    [operations] = pool.run(1, save_again_job, fields, tmp_path / "whole", 0)
    assert operations >= 8

    def dies(folder: Path, die_at: int) -> Path:
        pool.run(1, save_again_job, fields, folder, die_at)
        newest = checkpoint.newest(folder, lambda text: None)
        assert newest is not None, f"nothing left after dying at operation {die_at}"
        assert checkpoint.read(newest)["step"] == 2
        return newest

    left = {die_at: dies(tmp_path / str(die_at), die_at) for die_at in range(1, operations + 1)}
    [between] = {path.parent for path in left.values() if path.name.endswith(".old")}  # only the old one is visible
    for die_at in range(1, operations + 1):  # and the save that follows dies as well
        dies(shutil.copytree(between, tmp_path / f"again-{die_at}"), die_at)


def test_a_save_replaces_what_a_killed_save_left(pool: Pool, tmp_path: Path) -> None:
    partial = checkpoint.folder(tmp_path, 2).with_name("step-00000002.partial")
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_text("half")
    pool.run(2, save_job, spec_fields((1, 1, 2)), tmp_path)
    assert not partial.exists()
    assert checkpoint.newest(tmp_path, pytest.fail) == checkpoint.folder(tmp_path, 2)


def test_another_users_checkpoint_is_not_unpickled(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved[0]
    monkeypatch.setattr(checkpoint.os, "getuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="cp -r"):
        checkpoint.load(path, None, None, checkpoint.read(path))  # type: ignore[arg-type]
