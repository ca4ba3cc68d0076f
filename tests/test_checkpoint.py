"""Checkpoints: complete or not there; incomplete ones skipped; what must not change refused."""

import contextlib
import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Pool, Shards, assemble, batches_of, make_spec, shards, single
from pithtrain import catalog, checkpoint
from pithtrain.build import build
from pithtrain.catalog import MARKER
from pithtrain.checkpoint import DamagedError, Position, Reader, Saved, SaveError, Saver, as_hex, fingerprint
from pithtrain.errors import CheckpointError, RunFailed
from pithtrain.spec import from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, World, connect
from pithtrain.zero import Zero

KINDS = ("master", "exp_avg", "exp_avg_sq")
ABOUT = {"model": {"vocab_size": 96}, "tokenizer": "abc"}
SAVED_ON = (2, 1, 2)


def save(folder: Path, zero: Zero, world: World, position: Position, **options: Any) -> Saved:
    saver = Saver(folder, zero, world, ABOUT, **options)
    saver.save(position)
    saved = saver.wait()
    assert saved is not None
    return saved


def save_job(place: Place, fields: dict[str, Any], folder: Path) -> dict[str, Shards]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(2):
            train_step(engine, spec, batches_of(spec, engine, step), 1e-3)
        save(folder, engine.zero, world, Position(2, 32, 512))
        return {kind: shards(engine, lambda p, kind=kind: getattr(p, kind)) for kind in KINDS}


def spec_fields(mesh: tuple[int, int, int]) -> dict[str, Any]:
    return make_spec(*mesh, model={"num_hidden_layers": 5}).model_dump(mode="json")


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    parts = pool.run(4, save_job, spec_fields(SAVED_ON), folder)
    return catalog.folder(folder, 2), {kind: assemble([part[kind] for part in parts]) for kind in KINDS}


def mark(path: Path, step: int, **content: Any) -> Path:
    """A checkpoint of no tensors that counts as complete."""
    path.mkdir(parents=True)
    whole = {"format": catalog.FORMAT, "kind": "full", "step": step, "samples": 1, "tokens": 1, "updates": 1}
    whole |= {"run": "", "spec_hash": None, "model": {}, "tokenizer": None, "tokenizer_path": None, "data": None}
    whole |= {"mesh": None, "torch": torch.__version__, "saved_at": 1, "files": {}, "tensors": {}, **content}
    (path / MARKER).write_text(json.dumps({**whole, "sha256": catalog._sha256(whole)}))
    return path


def test_case_115_the_newest_is_found_by_number_whatever_lies_beside_it(tmp_path: Path) -> None:
    for name in ("step-50", "step-900", "step-1000", "step-00001100"):
        mark(tmp_path / name, int(name[5:]))
    for junk in ("step-00001200.partial", "step-00001300.removed", "step_10.bak", "step-10.bak", "step-123456789"):
        (tmp_path / junk).mkdir()
    mark(tmp_path / "step-00001150", 1150)
    (tmp_path / "step-00001150" / MARKER).write_text('{"format": 2, "st')  # case 112: torn
    (tmp_path / "step_9999").write_text("a file")
    (tmp_path / "step-9999").write_text("a file")
    skipped: list[str] = []
    assert catalog.newest(tmp_path, skipped.append) == tmp_path / "step-00001100"
    assert {text.split()[0]: text.split(" is ", 1)[1].split(":")[0] for text in skipped} == {
        "step-00001150": "incomplete",
        "step-00001200.partial": "a save under way or cut off, or a removal",
        "step-00001300.removed": "a save under way or cut off, or a removal",
        "step-123456789": "incomplete",
        "step-10.bak": "not a checkpoint",
        "step-9999": "incomplete",
        "step_10.bak": "not a checkpoint",
        "step_9999": "not a checkpoint",
    }


def test_a_disk_that_does_not_answer_is_no_incomplete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one would be taken, and the steps since be lost, for an error that passes."""
    for step in (1, 2):
        mark(catalog.folder(tmp_path, step), step)
    read_text = Path.read_text

    def sick(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.parent.name == "step-00000002":
            raise OSError(errno.EIO, "Input/output error")
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", sick)
    with pytest.raises(RunFailed, match=r"step-00000002 cannot be read .*Input/output error"):
        catalog.newest(tmp_path, pytest.fail)


def test_a_marker_with_any_bit_flipped_is_no_marker(tmp_path: Path) -> None:
    """Its numbers decide where a run goes on: what it says is as good as its own sum."""
    path = mark(catalog.folder(tmp_path, 12), 12, samples=48)
    good = (path / MARKER).read_bytes()
    for place in range(len(good)):
        for bit in (0, 1, 5):
            (path / MARKER).write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            try:
                assert catalog.read(path) == json.loads(good)  # blank against blank, e against E
            except catalog.IncompleteError:
                pass
            except catalog.FormatError:
                assert b'"format"' in good[max(place - 12, 0) : place]
    for text in ("[1, 2]", "null", "[" * 100_000, "{}"):
        (path / MARKER).write_text(text)
        with pytest.raises(catalog.IncompleteError, match="cannot be read"):
            catalog.read(path)


def test_a_folder_of_another_step_is_none(tmp_path: Path) -> None:
    mark(catalog.folder(tmp_path, 999), 12)
    mark(catalog.folder(tmp_path, 8), 8)
    told: list[str] = []
    assert catalog.complete(tmp_path, told.append) == [catalog.folder(tmp_path, 8)]
    assert told == ["step-00000999 is not a checkpoint of that step: its checkpoint.json is of step 12"]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert catalog.newest(tmp_path / "missing", pytest.fail) is None


def test_named_checkpoint_must_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        catalog.candidates(tmp_path / "nowhere", pytest.fail)
    with pytest.raises(CheckpointError, match="neither a complete checkpoint nor a run directory"):
        catalog.candidates(tmp_path, pytest.fail)


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
        catalog.check(saved[0], catalog.read(saved[0]), about)


def test_case_112_a_checkpoint_that_lost_a_part_is_skipped_by_name(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], tmp_path: Path
) -> None:
    for damage in ("cut", "gone", "empty"):
        older = mark(catalog.folder(tmp_path / damage, 1), 1)
        copy = shutil.copytree(saved[0], catalog.folder(tmp_path / damage, 2))
        shard = next(copy.glob("*.distcp"))
        if damage == "gone":
            shard.unlink()
        else:
            os.truncate(shard, shard.stat().st_size // 2 if damage == "cut" else 0)
        skipped: list[str] = []
        assert catalog.newest(tmp_path / damage, skipped.append) == older
        [reason] = skipped
        assert reason.startswith(f"step-00000002 is incomplete: {shard.name} ")
        assert copy.exists(), "it is for people to look at"


def test_another_format_is_refused_if_it_is_the_newest(tmp_path: Path) -> None:
    """Going on without it would lose its steps; an older one is of no matter."""
    foreign = catalog.folder(tmp_path, 7)
    foreign.mkdir()
    (foreign / MARKER).write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 2"):
        catalog.newest(tmp_path, pytest.fail)
    mark(catalog.folder(tmp_path, 8), 8)
    told: list[str] = []
    assert catalog.newest(tmp_path, told.append) == catalog.folder(tmp_path, 8)
    assert "has format 99" in told[0]


def test_a_shard_that_the_disk_does_not_give_is_worth_another_try(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], tmp_path: Path
) -> None:
    copy = shutil.copytree(saved[0], catalog.folder(tmp_path, 2))
    content = catalog.read(copy)
    next(copy.glob("*.distcp")).unlink()  # after it was read: another process tidies up
    spec = make_spec(model={"num_hidden_layers": 5})
    with (
        single(spec) as world,
        pytest.raises(RunFailed, match=r"cannot be read .*distcp"),
    ):
        checkpoint.load(copy, build(spec, world).zero, world, content)


def save_again_job(place: Place, fields: dict[str, Any], folder: Path, die_at: int) -> int:
    """Save step 2, twice in an empty folder; the last save dies before its file operation `die_at`. -> operations."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        if not folder.exists():
            save(folder, engine.zero, world, Position(2, 32, 512))
        done = 0
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (json, "dump"), (os, "fsync")):
                original = getattr(owner, name)

                def step(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                    nonlocal done
                    done += 1
                    if done == die_at:
                        raise RuntimeError
                    return original(*args, **kwargs)

                patch.setattr(owner, name, step)
            with contextlib.suppress(RuntimeError, RunFailed):
                save(folder, engine.zero, world, Position(2, 32, 512))
        return done


@pytest.mark.slow
def test_a_save_that_dies_anywhere_leaves_a_complete_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """The step is saved again over a complete one, and the saver dies before each of its file operations in turn."""
    fields = make_spec().model_dump(mode="json")
    [operations] = pool.run(1, save_again_job, fields, tmp_path / "whole", 0)
    assert operations >= 8

    def dies(folder: Path, die_at: int) -> Path:
        pool.run(1, save_again_job, fields, folder, die_at)
        newest = catalog.newest(folder, lambda text: None)
        assert newest is not None, f"nothing left after dying at operation {die_at}"
        assert catalog.read(newest)["step"] == 2
        return newest

    left = {die_at: dies(tmp_path / str(die_at), die_at) for die_at in range(1, operations + 1)}
    [between] = {path.parent for path in left.values() if path.name.endswith(".old")}  # only the old one is visible
    for die_at in range(1, operations + 1):  # and the save that follows dies as well
        dies(shutil.copytree(between, tmp_path / f"again-{die_at}"), die_at)


def test_what_is_in_the_way_of_a_save_is_moved(pool: Pool, tmp_path: Path) -> None:
    """A link to nowhere under the name of the step, a file under that of its folder."""
    catalog.folder(tmp_path, 2).symlink_to("/nowhere")
    catalog.partial(catalog.folder(tmp_path, 2)).write_text("a file")
    pool.run(1, save_job, spec_fields((1, 1, 1)), tmp_path)
    assert catalog.complete(tmp_path, pytest.fail) == [catalog.folder(tmp_path, 2)]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_save_replaces_what_a_killed_save_left(pool: Pool, tmp_path: Path) -> None:
    partial = catalog.folder(tmp_path, 2).with_name("step-00000002.partial")
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_text("half")
    pool.run(2, save_job, spec_fields((1, 1, 2)), tmp_path)
    assert not partial.exists()
    assert catalog.newest(tmp_path, pytest.fail) == catalog.folder(tmp_path, 2)


def test_another_users_checkpoint_is_not_unpickled(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved[0]
    monkeypatch.setattr(checkpoint.os, "getuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="cp -r"):
        checkpoint.load(path, None, None, catalog.read(path))  # type: ignore[arg-type]


# ---- asynchronous ----------------------------------------------------------------------------------------------------


def asynchronous_job(place: Place, fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Begin a save, change every shard while the write is held back on rank 0, let it end."""
    spec = from_dict(fields)
    go = threading.Event()
    finish = catalog.finish

    def held(*args: Any) -> int:
        assert go.wait(60)
        return finish(*args)

    with connect(place, spec.mesh, "cpu", spec.distributed) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "finish", held)
        engine = build(spec, world)
        want = {kind: shards(engine, lambda p, kind=kind: getattr(p, kind)) for kind in KINDS}
        saver = Saver(folder, engine.zero, world, ABOUT, asynchronous=True)
        saver.save(Position(1, 8, 128))
        begun = (saver.in_flight, saver.writing, catalog.newest(folder, lambda text: None))
        for one in engine.zero.sharded.values():
            for kind in KINDS:
                getattr(one, kind).fill_(7.0)
        go.set()
        saved = saver.wait()
        return {"want": want, "begun": begun, "saved": saved, "after": (saver.in_flight, saver.writing)}


def test_an_asynchronous_save_holds_the_state_of_its_step(pool: Pool, tmp_path: Path) -> None:
    fields = make_spec(1, 1, 2).model_dump(mode="json")
    parts = pool.run(2, asynchronous_job, fields, tmp_path)
    for part in parts:
        assert part["begun"] == (True, True, None), "invisible until it is complete"
        assert part["after"] == (False, False)
        assert part["saved"].path == catalog.folder(tmp_path, 1)
        assert part["saved"].write_s > 0
    reader = Reader(catalog.folder(tmp_path, 1))
    for kind in KINDS:
        for name, tensor in assemble([part["want"][kind] for part in parts]).items():
            np.testing.assert_array_equal(reader.tensor(f"{kind}/{name}").numpy(), tensor)


def failing_job(place: Place, fields: dict[str, Any], folder: Path, asynchronous: bool) -> list[str]:
    """A save that fails on rank 1's disk, another one that fails on rank 0's, one that does not. -> what was raised."""
    spec = from_dict(fields)
    raised = []
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        saver = Saver(folder, build(spec, world).zero, world, ABOUT, asynchronous=asynchronous)
        for rank, owner, name in ((1, os, "fsync"), (0, catalog, "begin"), (0, catalog, "finish"), (9, os, "fsync")):

            def full(*args: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            with pytest.MonkeyPatch.context() as patch:
                if world.rank == rank:
                    patch.setattr(owner, name, full)
                saver.save(Position(2, 32))
                try:
                    saver.wait()
                    raised.append("")
                except SaveError as error:
                    raised.append(str(error))
    return raised


@pytest.mark.parametrize("asynchronous", [False, True])
def test_case_163_a_failing_disk_is_an_error_on_every_rank_and_the_next_save_succeeds(
    pool: Pool, tmp_path: Path, asynchronous: bool
) -> None:
    """Case 163: an error behind the steps is not lost. Older checkpoints stand, nothing is left behind."""
    older = mark(catalog.folder(tmp_path, 1), 1)
    zero, one = pool.run(2, failing_job, make_spec(1, 1, 2).model_dump(mode="json"), tmp_path, asynchronous)
    assert [re.sub(r"[\d.]+ GiB", "", text) for text in zero] == [re.sub(r"[\d.]+ GiB", "", text) for text in one]
    assert [bool(text) for text in zero] == [True, True, True, False]
    assert re.search(
        r"step-00000002 cannot be written \(rank 1: .*No space left.*older checkpoints are intact", zero[0]
    )
    assert catalog.complete(tmp_path, pytest.fail) == [catalog.folder(tmp_path, 2), older]


def one_thread_fails_job(place: Place, fields: dict[str, Any], folder: Path, part: str) -> tuple[str, list[str]]:
    """The disk takes all files of a rank but one. -> the error, what is left in the folder."""
    spec, fsync = from_dict(fields), os.fsync

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(part):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with connect(place, spec.mesh, "cpu", spec.distributed) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        saver = Saver(folder, build(spec, world).zero, world, ABOUT, keep_last=1)
        saver.save(Position(2, 8))
        try:
            saver.wait()
        except SaveError as error:
            return str(error), sorted(path.name for path in folder.iterdir())
    return "", []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(checkpoint.THREADS))
def test_an_error_in_any_writing_thread_fails_the_save(pool: Pool, tmp_path: Path, part: int) -> None:
    mark(catalog.folder(tmp_path, 1), 1)
    fields = make_spec().model_dump(mode="json")
    [(error, left)] = pool.run(1, one_thread_fails_job, fields, tmp_path, f"__0_{part}0.distcp")
    assert "No space left" in error
    assert left == ["step-00000001"]


def endless_job(rank: int, folder: Path, store: Path, asynchronous: bool) -> None:
    """Go on from the newest checkpoint and save for ever, at every step other numbers."""
    spec = make_spec(1, 1, 2)
    place = Place(rank, 2, rank, f"file://{store}", 1)
    torch.set_num_threads(1)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        zero = build(spec, world).zero
        newest = world.from_rank_zero(catalog.newest(folder, lambda text: None))
        position = Position(0, 0)
        if newest is not None:
            position = checkpoint.load(newest, zero, world, catalog.read(newest))
        saver = Saver(folder, zero, world, ABOUT, asynchronous=asynchronous, keep_last=2)
        while True:
            position = Position(position.step + 1, position.samples + 8)
            for one in zero.sharded.values():
                one.master.add_(1.0)
                one.exp_avg.fill_(float(position.step))
            saver.wait()
            saver.save(position)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigkill_at_twenty_random_instants_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    """Any rank, at any instant of a synchronous or an asynchronous save, retention included."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_checkpoint"])
    rng = random.Random(11)
    folder = tmp_path / "checkpoints"
    reached = 0
    for kill in range(20):
        victim, asynchronous = rng.randrange(2), kill % 2 == 1
        ranks = [
            context.Process(target=endless_job, args=(rank, folder, tmp_path / f"store-{kill}", asynchronous))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + 60
        while catalog.newest(folder, lambda text: None) in (None, catalog.folder(folder, reached)):
            assert time.monotonic() < deadline, "no save since the last kill"
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        ranks[1 - victim].join(0.2)
        ranks[1 - victim].kill()
        for rank in ranks:
            rank.join()
        newest = catalog.newest(folder, lambda text: None)
        assert newest is not None
        reader = Reader(newest)
        step = reader.content["step"]
        assert step > reached
        for key in reader.content["tensors"]:  # each is checked against its sum
            tensor = reader.tensor(key)
            if key.startswith("exp_avg/"):
                assert (tensor == step).all(), key
        reached = step


# ---- retention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "left"),
    [(None, None, [1, 2, 3, 4, 5, 6]), (1, None, [6]), (2, None, [5, 6]), (1, 2, [2, 4, 6]), (2, 3, [3, 5, 6])],
)
def test_retention_keeps_the_newest_and_the_multiples(
    tmp_path: Path, keep_last: int | None, keep_interval: int | None, left: list[int]
) -> None:
    for step in range(1, 7):
        mark(catalog.folder(tmp_path, step), step)
        catalog.retire(catalog.folder(tmp_path, step), keep_last, keep_interval)
        assert catalog.newest(tmp_path, pytest.fail) == catalog.folder(tmp_path, step)
    assert sorted(tmp_path.iterdir()) == [catalog.folder(tmp_path, step) for step in left]


def test_retention_counts_complete_ones_alone_and_touches_no_other(tmp_path: Path) -> None:
    """The only complete one stays, whatever damaged ones are newer; those are for people to look at."""
    mark(catalog.folder(tmp_path, 1), 1)
    for step in (2, 3):
        mark(catalog.folder(tmp_path, step), step, files={"__0_0.distcp": 5})
    catalog.retire(catalog.folder(tmp_path, 1), 1, None)
    assert len(list(tmp_path.iterdir())) == 3
    assert catalog.newest(tmp_path, lambda text: None) == catalog.folder(tmp_path, 1)


def test_retention_goes_by_the_new_checkpoint_and_not_by_a_damaged_newer_one(tmp_path: Path) -> None:
    """A run that went back behind step 1000, whose sizes are right and whose values are not."""
    for step in (800, 900, 950, 1000):
        mark(catalog.folder(tmp_path, step), step)
    catalog.retire(catalog.folder(tmp_path, 950), 1, None)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000950", "step-00001000"]


def test_a_deletion_that_is_killed_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        (mark(catalog.folder(tmp_path, step), step) / "big").write_text("data")
    monkeypatch.setattr(shutil, "rmtree", lambda path: (path / MARKER).unlink())
    catalog.retire(catalog.folder(tmp_path, 2), 1, None)
    monkeypatch.undo()
    assert (tmp_path / "step-00000001.removed" / "big").exists()
    assert catalog.complete(tmp_path, lambda text: None) == [catalog.folder(tmp_path, 2)]
    catalog.tidy(tmp_path)
    assert sorted(tmp_path.iterdir()) == [catalog.folder(tmp_path, 2)]


def retiring_job(place: Place, fields: dict[str, Any], folder: Path) -> list[list[str]]:
    """Save steps 1 to 4 and keep one; the third cannot be written. -> what is there after each."""
    spec = from_dict(fields)
    seen = []
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        saver = Saver(folder, build(spec, world).zero, world, ABOUT, keep_last=1)
        for step in range(1, 5):
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SaveError):
                if step == 3:
                    patch.setattr(catalog, "finish", lambda *args: (_ for _ in ()).throw(OSError("read-only")))
                saver.save(Position(step, 8))
                saver.wait()
            seen.append(sorted(path.name for path in folder.iterdir()))
    return seen


def test_an_old_checkpoint_goes_only_once_the_new_one_is_complete(pool: Pool, tmp_path: Path) -> None:
    [seen] = pool.run(1, retiring_job, make_spec().model_dump(mode="json"), tmp_path)
    assert seen == [[f"step-{step:08d}"] for step in (1, 2, 2, 4)]


# ---- sums ------------------------------------------------------------------------------------------------------------


def test_a_fingerprint_adds_up_over_any_cut_and_sees_any_change() -> None:
    whole = torch.randn(11, 3, generator=torch.Generator().manual_seed(1))
    want = as_hex(int(fingerprint(whole)))
    for cut in ((4, 4, 3), (1, 10), (11, 0), (6, 0, 5)):
        total, row = 0, 0
        for rows in cut:
            total, row = total + int(fingerprint(whole[row : row + rows], row)), row + rows
        assert as_hex(total) == want, cut
    for place in range(33):
        for bit in (0, 31):
            changed = whole.clone()
            changed.view(torch.int32).view(-1)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert as_hex(int(fingerprint(changed))) != want
    swapped = whole.clone()
    swapped[[2, 7]] = swapped[[7, 2]]
    assert as_hex(int(fingerprint(swapped))) != want, "an expert in another's place"
    vector = torch.randn(7, dtype=torch.float64)
    parts = int(fingerprint(vector[:3])) + int(fingerprint(vector[3:], 3))
    assert as_hex(int(fingerprint(vector))) == as_hex(parts), "modulo 2^64"


@pytest.mark.parametrize("where", ["master", "exp_avg_sq"])
def test_one_flipped_bit_is_damage(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]], tmp_path: Path, where: str
) -> None:
    copy = flip(shutil.copytree(saved[0], catalog.folder(tmp_path, 2)), f"{where}/model.norm.weight")
    reader = Reader(copy)
    reader.tensor("exp_avg/model.norm.weight")
    with pytest.raises(DamagedError, match=rf"{where}/model.norm.weight is not what was saved"):
        reader.tensor(f"{where}/model.norm.weight")
    spec = make_spec(model={"num_hidden_layers": 5})
    with (
        single(spec) as world,
        pytest.raises(DamagedError, match=rf"other numbers back than were saved: {where}/model.norm.weight$"),
    ):
        checkpoint.load(copy, build(spec, world).zero, world, catalog.read(copy))


def flip(path: Path, key: str) -> Path:
    """Flip one bit of the first stored value of a tensor, in the file of the rank that wrote it."""
    data = Reader(path).tensor(key).numpy().ravel()[:3].tobytes()  # three values: enough to find them by
    for file in path.glob("*.distcp"):
        content = bytearray(file.read_bytes())
        at = content.find(data)
        if at >= 0:
            content[at] ^= 1
            file.write_bytes(bytes(content))
            return path
    raise AssertionError(f"{key} is in no file of {path}")


def test_another_dtype_is_refused_with_both_and_its_weights_are_taken(
    saved: tuple[Path, dict[str, dict[str, np.ndarray]]],
) -> None:
    spec = make_spec(model={"num_hidden_layers": 5}, training={"compute_dtype": "float64"})
    path, want = saved
    with single(spec) as world:
        zero = build(spec, world).zero
        with pytest.raises(CheckpointError, match=r"holds float32, this run's training.compute_dtype keeps float64"):
            checkpoint.load(path, zero, world, catalog.read(path))
        checkpoint.load_weights(path, zero, world, catalog.read(path))
        for name, one in zero.sharded.items():
            np.testing.assert_array_equal(one.master.numpy(), want["master"][name].reshape(one.master.shape))


def test_differences_of_nested_values_are_told_by_key_and_none_is_lost() -> None:
    """Null stands for a section without keys, nothing else that is empty does: 0 beside a mapping differs whole."""
    found = catalog.differences("x", {"a": 1, "b": None, "c": {"d": 2}}, {"a": 1, "b": {"e": 3}, "c": {"d": 4}})
    assert found == [("x.b.e", None, 3), ("x.c.d", 2, 4)]
    for theirs, ours in ((0, {}), (0, {"a": 1}), (None, {}), (False, {"a": None}), (None, 0), ("", {"a": 1})):
        assert catalog.differences("x", theirs, ours) == [("x", theirs, ours)]
    assert catalog.differences("x", {}, {}) == catalog.differences("x", None, None) == []
