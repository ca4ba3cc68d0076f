"""The loop: stop and resume bitwise, what a resume may change, learning rates, non-finite numbers, its lines."""

import errno
import itertools
import json
import math
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import ALONE, MODEL, Pool, batches_of, make_spec, play, single
from pithtrain import build as build_module
from pithtrain import catalog, checkpoint, rundir, submit
from pithtrain import train as train_module
from pithtrain.build import build
from pithtrain.errors import CheckpointError, DataError, LossStoodOut, NotFiniteError, RunFailed
from pithtrain.events import Events
from pithtrain.models.contract import active_parameters, architectures, flops_per_token
from pithtrain.ops.parts import Part
from pithtrain.pipeline import MicroBatch
from pithtrain.rundir import RunDir
from pithtrain.spec import LrSchedulerSection, RunSpec, from_dict
from pithtrain.train import Outcome, _attention_flops, learning_rate, run
from pithtrain.watch import Phase, Watch
from pithtrain.world import Place, World
from pithtrain.zero import Zero
from test_checkpoint import flip
from test_data import make

STEPS = 9


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    documents = [rng.integers(10, MODEL["vocab_size"], 40).tolist() for _ in range(100)]
    return make(tmp_path_factory.mktemp("corpus") / "made", documents, MODEL["vocab_size"]) / "tokens"


def train_spec(corpus: Path, *mesh: int, ep: int = 1, **sections: Any) -> RunSpec:
    data = {"sources": [{"path": str(corpus)}], "repeat": True}
    sections = {"lr_scheduler": {"type": "cosine", "warmup_steps": 1}, "data": data, **sections}
    sections["training"] = {"max_steps": STEPS, "global_batch_size": 8, **sections.get("training", {})}
    return make_spec(*(mesh or (1, 1, ep)), **sections)


def make_run(path: Path) -> RunDir:
    path.mkdir(parents=True, exist_ok=True)
    return RunDir(path)


class StopsAfter(Watch):
    """Asked to stop on the last rank alone, during the step `stop_after`."""

    def __init__(self, run_dir: RunDir, place: Place, stop_after: int | None) -> None:
        super().__init__(run_dir, place.attempt, place.rank)
        self.asked, self.stop_after = -1, stop_after if place.rank == place.world_size - 1 else None  # -1: at the start

    def should_stop(self) -> bool:
        self.asked += 1
        return self.asked == self.stop_after


def run_job(place: Place, fields: dict[str, Any], folder: Path, stop_after: int | None) -> Outcome:
    """`stop_after`: the last rank alone raises its flag, during that step."""
    watch = StopsAfter(RunDir(folder), place, stop_after)
    return run(from_dict(fields), RunDir(folder), place, watch)


def train(pool: Pool, spec: RunSpec, folder: Path, stop_after: int | None = None) -> Outcome:
    run_dir = make_run(folder)
    outcomes = pool.run(spec.world_size, run_job, spec.model_dump(mode="json"), run_dir.path, stop_after)
    assert all(outcome == outcomes[0] for outcome in outcomes), "case 158: all ranks stop at one step"
    return outcomes[0]


def trained(folder: Path, spec: RunSpec, step: int) -> dict[str, np.ndarray]:
    """Masters and moments of a checkpoint, whole, whatever mesh wrote them."""
    alone = {**spec.model_dump(mode="json"), "parallelism": {}, "slurm": {}}
    one = from_dict(alone)
    with single(one) as world:
        zero = build(one, world).zero
        path = catalog.folder(RunDir(folder).checkpoints, step)
        checkpoint.load(path, zero, world, catalog.read(path))
        return {
            f"{kind} {name}": getattr(one, kind).numpy()
            for name, one in zero.sharded.items()
            for kind in ("master", "exp_avg", "exp_avg_sq")
        }


def lines(folder: Path) -> list[dict[str, Any]]:
    return rundir.read_lines(RunDir(folder).metrics)


def numbers(folder: Path) -> list[tuple[int, float, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in lines(folder)]


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stops", [pytest.param([4], marks=pytest.mark.slow, id="one stop"), pytest.param([3, 2], id="two stops")]
)
def test_stopped_and_resumed_is_bitwise_the_straight_run(
    pool: Pool, corpus: Path, tmp_path: Path, mesh: tuple[int, int, int], stops: list[int]
) -> None:
    """Also cases 117 and 118: the learning rates are those of the straight run. With two stops, saves go on behind the
    steps and the older ones are deleted."""
    spec = train_spec(corpus, *mesh)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert train(pool, spec, straight) == Outcome(STEPS, finished=True)
    if len(stops) == 2:
        spec = train_spec(corpus, *mesh, checkpoint={"interval": 1, "async_save": True, "keep_last": 2})
    at = 0
    for stop in stops:
        at += stop
        assert train(pool, spec, stopped, stop_after=stop) == Outcome(at, finished=False)
    assert train(pool, spec, stopped) == Outcome(STEPS, finished=True)

    assert numbers(stopped) == numbers(straight)
    assert [step for step, *_ in numbers(straight)] == list(range(1, STEPS + 1))
    want, got = trained(straight, spec, STEPS), trained(stopped, spec, STEPS)
    for name, tensor in want.items():
        np.testing.assert_array_equal(got[name], tensor, name)


def test_a_run_may_change_the_type_of_its_moments_and_says_so(corpus: Path, tmp_path: Path) -> None:
    for step, moments in enumerate(("float32", "bfloat16", "bfloat16", "float32"), 1):
        optimizer = {"lr": 1e-3, "moments_dtype": moments}
        steps, flat = {"max_steps": step}, {"type": "constant"}
        spec = train_spec(corpus, training=steps, optimizer=optimizer, lr_scheduler=flat)
        assert alone(spec, tmp_path).finished
    said = [row["message"] for row in events(tmp_path, "warning")]
    changed = "optimizer.moments_dtype: moments were {} up to step {} and are {} from here on"
    assert said == [changed.format("float32", 1, "bfloat16"), changed.format("bfloat16", 3, "float32")]


class StopsAt(Watch):
    """Asked to stop on the last rank when it enters `phase`."""

    def __init__(self, run_dir: RunDir, place: Place, phase: Phase) -> None:
        super().__init__(run_dir, place.attempt, place.rank)
        self.phase = phase if place.rank == place.world_size - 1 else None

    def enter(self, phase: Phase, step: int) -> None:
        super().enter(phase, step)
        if phase == self.phase:
            self.stop("SIGUSR2")


def stop_job(place: Place, fields: dict[str, Any], folder: Path, phase: Phase) -> Outcome:
    return run(from_dict(fields), RunDir(folder), place, StopsAt(RunDir(folder), place, phase))


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "at"), [("load", 0), ("first_step", 1), ("step", 2)])
def test_case_159_a_stop_while_it_starts_is_heard_at_the_next_boundary(
    pool: Pool, corpus: Path, tmp_path: Path, phase: Phase, at: int
) -> None:
    """Before the first step there is nothing to save; then the step that runs, and at most one more."""
    spec = train_spec(corpus, ep=2)
    outcomes = pool.run(2, stop_job, spec.model_dump(mode="json"), make_run(tmp_path).path, phase)
    assert outcomes == [Outcome(at, finished=False)] * 2
    marker = rundir.read_json(RunDir(tmp_path).requeue)
    assert (marker["step"], marker["reason"]) == (at, "SIGUSR2")
    assert len(lines(tmp_path)) == at
    assert len(list(RunDir(tmp_path).checkpoints.glob("step-*"))) == (at > 0)
    assert train(pool, spec, tmp_path) == Outcome(STEPS, finished=True)


@pytest.mark.slow
def test_a_signal_that_comes_too_late_is_told_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = catalog.finish

    def slow(*args: Any) -> int:
        time.sleep(0.7)
        return real(*args)

    monkeypatch.setattr(catalog, "finish", slow)
    for limit, count in (("10", 1), (None, 0)):
        slurm = {"time": limit, "signal_delay_s": 1}
        spec = train_spec(corpus, training={"max_steps": 2}, checkpoint={"interval": 1}, slurm=slurm)
        alone(spec, tmp_path / str(limit))
        rows = rundir.read_lines(RunDir(tmp_path / str(limit)).events)
        warned = [row["message"] for row in rows if row["event"] == "warning"]
        assert len(warned) == count
        assert all("slurm.signal_delay_s = 1 is shorter than 1.5 x a save" in text for text in warned)


@pytest.mark.slow
def test_killed_between_checkpoints_repeats_and_loses_no_step(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    """Case 150: the lines beyond the checkpoint are cut and written again."""
    spec = train_spec(corpus, checkpoint={"interval": 4})
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(pool, spec, straight)
    train(pool, spec, killed)
    final = catalog.folder(RunDir(killed).checkpoints, STEPS)
    (final / catalog.MARKER).unlink()  # as if killed inside the last save
    newest = catalog.folder(RunDir(killed).checkpoints, 8)
    (newest / catalog.MARKER).write_text("{")
    assert train(pool, spec, killed) == Outcome(STEPS, finished=True)
    assert numbers(killed) == numbers(straight)
    skipped = [
        row["reason"] for row in rundir.read_lines(RunDir(killed).events) if row["event"] == "skipped_checkpoint"
    ]
    assert any("step-00000008 is incomplete" in reason for reason in skipped)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rundir.read_lines(RunDir(folder).events) if row["event"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "async_save"),
    [(8, False), pytest.param(8, True, marks=pytest.mark.slow), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_a_full_disk_is_waited_for_and_costs_no_step(
    pool: Pool, corpus: Path, tmp_path: Path, first: int, async_save: bool
) -> None:
    """An asynchronous save that failed is made anew from the state of the step that hears of it."""
    keys = {"interval": 4, "async_save": async_save}
    train(pool, train_spec(corpus, checkpoint=keys), tmp_path / "straight")
    spec = train_spec(corpus, checkpoint=keys, distributed={"save_timeout_s": 20})
    path = make_run(tmp_path / "run").path
    assert pool.run(1, full_disk_job, spec.model_dump(mode="json"), path, first, 3) == [""]
    assert numbers(path) == numbers(tmp_path / "straight")
    failed = [(row["step"], row["message"]) for row in events(path, "save_failed")]
    assert len(failed) == 3
    assert all("No space left" in text and "tried again until 20 s are over" in text for _, text in failed)
    heard = failed[0][0]
    assert heard >= first
    assert (heard > first) == async_save
    assert [row["step"] for row in events(path, "saved")] == sorted({4, 8, STEPS} - {first} | {heard})


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_the_older_checkpoint(
    pool: Pool, corpus: Path, tmp_path: Path
) -> None:
    spec = train_spec(corpus, checkpoint={"interval": 4}, distributed={"save_timeout_s": 1})
    path = make_run(tmp_path).path
    [message] = pool.run(1, full_disk_job, spec.model_dump(mode="json"), path, 8, -1)
    assert re.search(r"step-00000008 cannot be written .*No space left.*older checkpoints are intact", message)
    assert catalog.complete(RunDir(path).checkpoints, pytest.fail) == [catalog.folder(RunDir(path).checkpoints, 4)]
    assert pool.run(1, full_disk_job, spec.model_dump(mode="json"), path, 8, 0) == [""]
    assert [row["step"] for row in events(path, "resumed")] == [4]


def full_disk_job(place: Place, fields: dict[str, Any], folder: Path, first: int, times: int) -> str:
    """The disk is full from the save of step `first` on, `times` times (-1: for good). -> the error that ended it."""
    begin, count = catalog.begin, 0

    def full(final: Path) -> Path:
        nonlocal count
        if int(final.name[5:]) >= first and count != times:
            count += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return begin(final)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "begin", full)
        try:
            run_job(place, fields, folder, None)
        except RunFailed as error:
            return str(error)
    return ""


def test_a_full_disk_between_saves_ends_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What metrics.jsonl and events.jsonl cannot take is no reason to lose the state."""
    init = Events.__init__

    def full(self: Events, *args: Any) -> None:
        init(self, *args)
        self._metrics_file.close()
        self._events_file.close()
        self._metrics_file, self._events_file = (open("/dev/full", "w") for _ in range(2))  # noqa: SIM115

    monkeypatch.setattr(Events, "__init__", full)
    assert alone(train_spec(corpus, training={"max_steps": 3}), tmp_path) == Outcome(3, finished=True)
    checkpoints = RunDir(tmp_path).checkpoints
    assert catalog.newest(checkpoints, pytest.fail) == catalog.folder(checkpoints, 3)


def test_other_data_at_a_resume_are_told(corpus: Path, tmp_path: Path) -> None:
    alone(train_spec(corpus, training={"max_steps": 2}), tmp_path)
    alone(train_spec(corpus, training={"max_steps": 3, "seed": 5, "sequence_length": 8}), tmp_path)
    told = [row["message"].split(":")[0] for row in events(tmp_path, "warning")]
    assert told == [
        "data.seed was 0 up to step 2 and is 5 from here on",
        "data.sequence_length was 16 up to step 2 and is 8 from here on",
    ]
    assert lines(tmp_path)[-1]["tokens_seen"] == 2 * 8 * 16 + 8 * 8


def test_a_save_asked_for_during_an_asynchronous_one_is_that_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAVE is there from the first step on; the write takes several steps; one checkpoint is made of it, then none."""
    go = threading.Event()
    finish = catalog.finish

    def held(*args: Any) -> int:
        assert go.wait(60)
        return finish(*args)

    class Asked(Watch):
        asked = 0

        def should_save(self) -> bool:
            Asked.asked += 1
            if Asked.asked == 5:
                go.set()
            return self.run.save.exists()

    monkeypatch.setattr(catalog, "finish", held)
    spec = train_spec(corpus, checkpoint={"async_save": True})
    run_dir = make_run(tmp_path)
    rundir.mark(run_dir.save, 1)
    run(spec, run_dir, ALONE, Asked(run_dir, 1, 0))
    assert [(row["step"], row["requested"]) for row in events(tmp_path, "saved")] == [(1, True), (STEPS, False)]
    assert not run_dir.save.exists()


@pytest.mark.slow
def test_case_112_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    pool: Pool, corpus: Path, tmp_path: Path
) -> None:
    """Bits that changed behind the right sizes. Nothing is deleted; when all are damaged, that is the end."""
    spec = train_spec(corpus, 1, 1, 2, checkpoint={"interval": 4})
    train(pool, spec, tmp_path / "straight")
    train(pool, spec, tmp_path / "run", stop_after=8)
    checkpoints = RunDir(tmp_path / "run").checkpoints
    newest, *older = catalog.complete(checkpoints, pytest.fail)
    flip(newest, "exp_avg/model.norm.weight")
    before = sorted(checkpoints.iterdir())
    assert train(pool, spec, tmp_path / "run") == Outcome(STEPS, finished=True)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "straight")
    [skipped] = events(tmp_path / "run", "skipped_checkpoint")
    assert f"{newest} gives other numbers back" in skipped["reason"]
    assert "exp_avg/model.norm.weight" in skipped["reason"]
    assert events(tmp_path / "run", "resumed")[-1]["path"] == str(older[0])
    assert set(before) <= set(checkpoints.iterdir())


@pytest.mark.slow
def test_when_every_checkpoint_is_damaged_nothing_begins_anew(corpus: Path, tmp_path: Path) -> None:
    spec = train_spec(corpus, training={"max_steps": 2}, checkpoint={"interval": 1})
    alone(spec, tmp_path)
    for path in catalog.complete(RunDir(tmp_path).checkpoints, pytest.fail):
        flip(path, "master/model.norm.weight")
    before = lines(tmp_path)
    with pytest.raises(CheckpointError, match="step-00000001 gives other numbers back than were saved"):
        alone(train_spec(corpus, training={"max_steps": 3}), tmp_path)
    assert lines(tmp_path) == before


def test_case_122_tensors_that_are_missing_unexpected_or_misshapen_are_all_named(corpus: Path, tmp_path: Path) -> None:
    spec = train_spec(corpus, training={"max_steps": 2})
    alone(spec, tmp_path)
    marker = catalog.folder(RunDir(tmp_path).checkpoints, 2) / catalog.MARKER
    content = json.loads(marker.read_text())
    tensors = content["tensors"]
    tensors["master/stray"] = tensors.pop("master/model.norm.weight")
    tensors["exp_avg/lm_head.weight"]["shape"] = [1, 2]
    marker.write_text(json.dumps({**content, "sha256": catalog._sha256(content)}))
    with pytest.raises(CheckpointError) as error:
        alone(train_spec(corpus, training={"max_steps": 3}), tmp_path)
    assert str(error.value).splitlines()[1:] == [
        "  missing: master/model.norm.weight",
        "  unexpected: master/stray",
        "  shape of exp_avg/lm_head.weight: [1, 2] there, [96, 32] here",
    ]


def test_thousands_of_wrong_names_are_told_by_their_pattern() -> None:
    want = {f"model.layers.{layer}.mlp.experts.{e}.up_proj": (4, 2) for layer in range(48) for e in range(128)}
    have = {**want, "model.layers.3.mlp.experts.7.up_proj": (2, 4)}
    with pytest.raises(CheckpointError, match=r"\n  shape of model.layers.3.mlp.experts.7.up_proj: \[2, 4\] there"):
        catalog.check_tensors(Path("x"), have, want)
    with pytest.raises(CheckpointError) as error:
        catalog.check_tensors(Path("x"), {}, want)
    assert str(error.value).splitlines()[1:] == ["  missing: model.layers.*.mlp.experts.*.up_proj (6144 of them)"]


@pytest.mark.slow
def test_case_114_an_end_waits_for_the_save_behind_it(
    pool: Pool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk, and asynchronous saves: when the run says done, or saved, it is on the disk; not before."""
    told: list[tuple[str, bool]] = []
    finish, event = catalog.finish, Events.event

    def slow(*args: Any) -> int:
        time.sleep(0.1)
        return finish(*args)

    def listen(self: Events, kind: str, **fields: Any) -> None:
        if kind in ("saved", "done"):
            told.append((kind, catalog.read(catalog.folder(self.run.checkpoints, fields["step"]))["step"] > 0))
        event(self, kind, **fields)

    monkeypatch.setattr(catalog, "finish", slow)
    monkeypatch.setattr(Events, "event", listen)
    spec = train_spec(corpus, checkpoint={"interval": 2, "async_save": True, "keep_last": 1})
    assert alone(spec, tmp_path) == Outcome(STEPS, finished=True)
    assert told[-2:] == [("saved", True), ("done", True)]
    assert all(there for _, there in told)
    assert [path.name for path in RunDir(tmp_path).checkpoints.iterdir()] == [f"step-{STEPS:08d}"]
    saved = events(tmp_path, "saved")
    assert all(row["write_s"] >= 0.1 for row in saved)


@pytest.mark.slow
def test_the_last_step_is_exported_once_and_another_run_begins_with_it(
    pool: Pool, corpus: Path, tmp_path: Path
) -> None:
    """`export_hf: final` by two ranks, then `init_from` of the folder, of the checkpoint and of the run: equal first
    losses but for the folder's bfloat16. A run's own checkpoint goes before it."""
    spec = train_spec(corpus, 1, 1, 2, checkpoint={"export_hf": "final"}, training={"max_steps": 3})
    train(pool, spec, tmp_path / "first")
    first = RunDir(tmp_path / "first")
    out = first.hf / "step-00000003"
    assert {"config.json", "model.safetensors"} <= {file.name for file in out.iterdir()}
    train(pool, spec, tmp_path / "first")  # there is nothing to do, and nothing to export
    assert [row["step"] for row in events(tmp_path / "first", "exported")] == [3]

    losses = []
    for name, source in (("run", first.path), ("checkpoint", first.checkpoints / "step-00000003"), ("hf", out)):
        fields = {**spec.model_dump(mode="json"), "init_from": str(source), "checkpoint": {}}
        train(pool, from_dict(fields), tmp_path / name, stop_after=2)
        train(pool, from_dict(fields), tmp_path / name)
        assert [row["step"] for row in lines(tmp_path / name)] == [1, 2, 3], "a resume does not begin with it again"
        losses.append(lines(tmp_path / name)[0]["loss"])
    began = lines(tmp_path / "first")[0]["loss"]
    assert losses[0] == losses[1] != began
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
def test_resume_on_another_mesh_goes_on_as_if_nothing_happened(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    spec = train_spec(corpus)
    train(pool, spec, straight)
    train(pool, train_spec(corpus, 2, 1, 2), moved, stop_after=4)
    train(pool, train_spec(corpus, 1, 2, 1), moved)
    for (step, loss, norm, lr), (_, want_loss, want_norm, want_lr) in zip(
        numbers(moved), numbers(straight), strict=True
    ):
        assert lr == want_lr
        assert loss == pytest.approx(want_loss, rel=1e-5), step
        assert norm == pytest.approx(want_norm, rel=1e-4), step


@pytest.mark.slow
def test_case_016_resume_names_another_run(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    """A path is where a fresh run begins; its own progress wins from then on (case 16)."""
    spec = train_spec(corpus)
    train(pool, spec, tmp_path / "a", stop_after=4)
    other = from_dict({**spec.model_dump(mode="json"), "resume": str(tmp_path / "a")})
    train(pool, other, tmp_path / "b", stop_after=2)
    assert [step for step, *_ in numbers(tmp_path / "b")] == [5, 6]
    train(pool, other, tmp_path / "b", stop_after=1)
    assert [step for step, *_ in numbers(tmp_path / "b")] == [5, 6, 7]


def test_a_saved_run_without_a_complete_checkpoint_is_refused_and_keeps_its_lines(corpus: Path, tmp_path: Path) -> None:
    """Case 39's kind: starting again at 0 would cut what the run has written."""
    alone(train_spec(corpus, training={"max_steps": 2}), tmp_path)
    before = lines(tmp_path)
    shutil.rmtree(RunDir(tmp_path).checkpoints)
    with pytest.raises(CheckpointError, match=r"step 2 was saved, and .* holds no complete checkpoint any more"):
        alone(train_spec(corpus, training={"max_steps": 4}), tmp_path)
    assert lines(tmp_path) == before


def alone(spec: RunSpec, folder: Path) -> Outcome:
    return run(spec, make_run(folder), ALONE, Watch(RunDir(folder), 1, 0))


def test_fewer_steps_than_done_is_refused(corpus: Path, tmp_path: Path) -> None:
    alone(train_spec(corpus, training={"max_steps": 3}), tmp_path)
    with pytest.raises(CheckpointError, match=r"step 3, beyond training.max_steps = 2; raise max_steps"):
        alone(train_spec(corpus, training={"max_steps": 2}), tmp_path)
    assert alone(train_spec(corpus, training={"max_steps": 4}), tmp_path) == Outcome(4, finished=True)


@pytest.mark.parametrize(("theirs", "ours"), [("adamw", "muon"), ("muon", "adamw")])
def test_state_of_another_optimizer_is_refused_and_its_weights_are_taken(
    corpus: Path, tmp_path: Path, theirs: str, ours: str
) -> None:
    alone(train_spec(corpus, training={"max_steps": 2}, optimizer={"type": theirs, "lr": 1e-3}), tmp_path / "a")
    told = [row for row in rundir.read_lines(RunDir(tmp_path / "a").events) if row["event"] == "muon"]
    assert len(told) == (theirs == "muon")
    for row in told:
        assert "model.layers.*.mlp.experts.gate_up_proj" in row["muon"]
        assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(row["adamw"])
    changes: dict[str, Any] = {"training": {"max_steps": 3}, "optimizer": {"type": ours, "lr": 1e-3}}
    with pytest.raises(CheckpointError, match=f"saved with optimizer.type = {theirs}, this run's is {ours}"):
        alone(train_spec(corpus, **changes), tmp_path / "a")
    path = catalog.folder(RunDir(tmp_path / "a").checkpoints, 2)
    with pytest.raises(CheckpointError, match=f"--set optimizer.type={theirs}, or begin a run"):
        catalog.check_beginning(None, str(path), ours)
    catalog.check_beginning(None, str(path), theirs)
    catalog.check_beginning(path, "auto", ours)
    spec = train_spec(corpus, training={"max_steps": 2}, optimizer={"type": theirs, "lr": 1e-3})
    RunDir(tmp_path / "a").spec_yaml.write_text(spec.to_yaml())
    with pytest.raises(CheckpointError, match=f"--set optimizer.type={theirs}, or begin a run"):
        submit._changed_spec(RunDir(tmp_path / "a"), [f"optimizer.type={ours}"])
    begun = train_spec(corpus, **changes, init_from=str(tmp_path / "a"))
    assert alone(begun, tmp_path / "b") == Outcome(3, finished=True)


def test_finished_run_does_nothing_more(corpus: Path, tmp_path: Path) -> None:
    spec = train_spec(corpus, training={"max_steps": 2})
    alone(spec, tmp_path)
    before = lines(tmp_path)
    assert alone(spec, tmp_path) == Outcome(2, finished=True)
    assert lines(tmp_path) == before


def test_a_line_holds_what_the_file_promises(corpus: Path, tmp_path: Path) -> None:
    spec = train_spec(corpus, training={"max_steps": 4}, logging={"interval": 3})
    alone(spec, tmp_path)
    assert [row["step"] for row in lines(tmp_path)] == [3, 4], "multiples of the interval, and the last step"
    row = lines(tmp_path)[0]
    assert row["tokens_seen"] == 3 * 8 * 16
    assert row["loss"] == pytest.approx(math.log(96), rel=0.2)
    assert 1.0 <= row["aux_loss"] < 4
    assert row["expert_load_max_over_mean"] >= 1
    assert row["mfu"] is None, "a CPU has no quoted peak"
    per_second = row["tokens_per_second"] * flops_per_token(spec.model.config, 16) / 1e12
    assert row["tflops_per_device"] == pytest.approx(per_second)
    assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_time_s"])
    for key in ("router_z_loss", "head_z_loss"):
        assert row[key] is None, "off"
    for key in ("memory_peak_gib", "data_wait_s", "grad_norm", "lr", "attempt", "checkpoint_stall_s"):
        assert row[key] is not None


@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_z_loss_is_trained_on_and_has_a_number_of_its_own(tied: bool) -> None:
    """The gradient of the head, by differences, is that of loss + z_loss_coef x head_z; with a tied one the embedding's
    part comes on top. The loss is bit for bit that of a run without."""
    changes = {"model": {"tie_word_embeddings": tied}, "moe": {"load_balance_type": "none", "aux_loss_coef": 0.0}}
    spec = make_spec(training={"compute_dtype": "float64", "z_loss_coef": 0.2}, **changes)
    plain = make_spec(training={"compute_dtype": "float64"}, **changes)
    with single(spec) as world:
        engine, other = build(spec, world), build(plain, world)
        batches = batches_of(spec, engine, 0)
        stats, without = play(engine, spec, batches), play(other, plain, batches)
        assert torch.equal(stats.loss, without.loss) and without.head_z == 0
        assert stats.head_z.item() == pytest.approx(math.log(MODEL["vocab_size"]) ** 2, rel=0.1)
        weight = engine.zero.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        grad = weight.main_grad.clone()

        def total(by: float) -> float:
            weight.data += by * grad / grad.norm()
            stats = play(engine, spec, batches)
            return (stats.loss + 0.2 * stats.head_z).item()

        ahead = total(1e-6)
        assert (ahead - total(-2e-6)) / 2e-6 == pytest.approx(grad.norm().item(), rel=1e-6)


@pytest.mark.slow
def test_the_heads_z_loss_in_the_lines_of_a_run_on_any_mesh(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    """Steps with it end with a smaller lse than those without, and a mesh of four says what one process says."""
    rows: list[list[dict[str, Any]]] = []
    for mesh, coef in (((1, 1, 1), 0.1), ((2, 1, 2), 0.1), ((1, 1, 1), 1e-9)):
        training = {"z_loss_coef": coef, "compute_dtype": "float64"}
        spec = train_spec(corpus, *mesh, training=training, optimizer={"lr": 1e-2})
        train(pool, spec, tmp_path / str(len(rows)))
        rows.append(lines(tmp_path / str(len(rows))))
    for key in ("loss", "head_z_loss", "grad_norm"):
        one, four = ([row[key] for row in rows[n]] for n in (0, 1))
        np.testing.assert_allclose(four, one, rtol=1e-9, err_msg=key)
    assert rows[0][0]["loss"] == rows[2][0]["loss"]
    assert rows[0][-1]["head_z_loss"] < 0.9 * rows[2][-1]["head_z_loss"]


def test_case_111_the_run_says_what_decays(corpus: Path, tmp_path: Path) -> None:
    spec = train_spec(corpus, training={"max_steps": 2}, optimizer={"weight_decay": 0.1})
    alone(spec, tmp_path)
    [told] = events(tmp_path, "weight_decay")
    assert told["value"] == 0.1
    assert "model.layers.*.mlp.experts.down_proj" in told["decayed"]
    assert told["kept"] == sorted(
        ["model.norm.weight"]
        + [f"model.layers.*.{name}_layernorm.weight" for name in ("input", "post_attention")]
        + [f"model.layers.*.self_attn.{name}_norm.weight" for name in "qk"]
    )


def test_non_finite_gradient_stops_the_run_and_keeps_the_last_checkpoint(corpus: Path, tmp_path: Path) -> None:
    constant = {"lr_scheduler": {"type": "constant"}}
    spec = train_spec(corpus, training={"max_steps": 3}, checkpoint={"interval": 1}, **constant)
    alone(spec, tmp_path)
    huge = from_dict({**spec.model_dump(mode="json"), "optimizer": {"lr": 1e38}})
    raised = {**huge.model_dump(mode="json"), "training": {**spec.training.model_dump(mode="json"), "max_steps": 9}}
    with pytest.raises(NotFiniteError, match=r"at step 5, and at 1 of the steps up to 5; .* step 5 is saved"):
        alone(from_dict(raised), tmp_path)
    marks = [json.loads(p.read_text()) for p in sorted(RunDir(tmp_path).checkpoints.glob(f"*/{catalog.MARKER}"))]
    assert [(mark["step"], mark["updates"]) for mark in marks] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)]


@pytest.mark.slow
def test_a_skipped_step_loses_no_other(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logged every 5 steps and saved at the end only: a NaN at step 2 is found at 5, where the sound state is saved."""
    spec = train_spec(corpus, training={"max_steps": 9}, logging={"interval": 5})
    grad_norm, calls = Zero.grad_norm, 0

    def spoiled(self: Zero, flaw: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return grad_norm(self, flaw) * (float("nan") if calls == 2 else 1.0)

    monkeypatch.setattr(Zero, "grad_norm", spoiled)
    with pytest.raises(NotFiniteError, match=r"at step 2, and at 1 of the steps up to 5; .* is saved.*, then resume"):
        alone(spec, tmp_path)
    calls = 0
    with pytest.raises(NotFiniteError, match=r"up to 5; .* and nothing is saved.*, then start again$"):
        alone(train_spec(corpus, moe={"force_load_balance": True}, logging={"interval": 5}), tmp_path / "forced")
    assert all(np.isfinite(tensor).all() for tensor in trained(tmp_path, spec, 5).values())
    monkeypatch.undo()
    assert alone(spec, tmp_path) == Outcome(9, finished=True)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.slow
def test_skipped_steps_are_told_and_too_many_in_a_row_end_the_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    """Steps 2, 3 and 5, where 3 in a row are allowed for; then 7 to 9. Whatever else the run does is unchanged."""
    grad_norm, calls = Zero.grad_norm, 0

    def spoiled(self: Zero, flaw: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return grad_norm(self, flaw) * (float("nan") if calls in bad else 1.0)

    monkeypatch.setattr(Zero, "grad_norm", spoiled)
    guards = {"non_finite": "skip", "max_consecutive_skips": 3}
    spec = train_spec(corpus, training={"max_steps": 12}, guards=guards, logging={"interval": interval})
    bad = {2, 3, 5}
    assert alone(spec, tmp_path / "few") == Outcome(12, finished=True)
    told = [row["message"] for row in events(tmp_path / "few", "warning")]
    assert all("those updates were left out, as guards.non_finite = skip has it" in message for message in told)
    steps = [re.findall(r"at step (\d+), and at (\d+) of the steps up to (\d+)", message)[0] for message in told]
    want = [("2", "1", "2"), ("3", "1", "3"), ("5", "1", "5")] if interval == 1 else [("2", "2", "4"), ("5", "1", "8")]
    assert steps == want
    marker = catalog.read(catalog.folder(RunDir(tmp_path / "few").checkpoints, 12))
    assert marker["updates"] == 12 - 3
    if interval == 1:
        assert [row["step"] for row in lines(tmp_path / "few") if row["grad_norm"] is None] == [2, 3, 5]
    calls, bad = 0, {2, 3, 5, 7, 8, 9}
    found = 9 if interval == 1 else 12
    message = rf"up to {found}; .* step {found} is saved\. guards.max_consecutive_skips is 3: lower optimizer.lr"
    with pytest.raises(NotFiniteError, match=message):
        alone(spec, tmp_path / "many")


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_a_loss_that_stands_out_makes_no_update(
    pool: Pool, corpus: Path, tmp_path: Path, mesh: tuple[int, int, int]
) -> None:
    """Step 9 has other labels. It is noticed by a run that began before it and by one that was stopped before it alike,
    and changes nothing; without the guard it is trained on."""
    changes: dict[str, Any] = {"guards": {"loss_spike_sigma": 6.0}, "lr_scheduler": {"type": "constant"}}
    spec = train_spec(corpus, *mesh, training={"max_steps": 12}, optimizer={"lr": 1e-2}, **changes)
    found = {}
    for name, changes, stops in (("straight", {}, [None]), ("stopped", {}, [7, None]), ("off", {"guards": {}}, [None])):
        one = from_dict({**spec.model_dump(mode="json"), **changes})
        make_run(tmp_path / name)
        for stop in stops:
            pool.run(spec.world_size, spiked_job, one.model_dump(mode="json"), tmp_path / name, stop)
        told = [row["message"] for row in events(tmp_path / name, "warning") if "stood out" in row["message"]]
        marker = catalog.read(catalog.folder(RunDir(tmp_path / name).checkpoints, 12))
        found[name] = told, marker["updates"], numbers(tmp_path / name)
        assert (marker.get("recent_losses") is None) == (name == "off")
    told = "the loss stood out at step 9, and at 1 of the steps up to 9; those updates were left out, as "
    assert found["straight"][:2] == ([f"{told}guards.loss_spike_sigma = 6 has it"], 11)
    assert found["stopped"] == found["straight"] and found["off"][:2] == ([], 12)
    assert found["off"][2][:9] == found["straight"][2][:9] and found["off"][2][9] != found["straight"][2][9]


def spiked_job(place: Place, fields: dict[str, Any], folder: Path, stop_after: int | None) -> None:
    """A token that no text has is every label of step 9."""
    spec = from_dict(fields)
    original = train_module.read_batches

    def other_labels(dataset: Any, spec: RunSpec, world: World, first: int) -> list[MicroBatch]:
        batches = original(dataset, spec, world, first)
        if first == 8 * spec.training.global_batch_size:
            return [replace(one, labels=None if one.labels is None else one.labels * 0 + 3) for one in batches]
        return batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "RECENT", 8)
        patch.setattr(train_module, "read_batches", other_labels)
        run(spec, RunDir(folder), place, StopsAfter(RunDir(folder), place, stop_after))


@pytest.mark.parametrize(
    ("losses", "loss", "stands"),
    [
        ([2.0, 2.2, 1.8, 2.0], 3.1, True),
        ([2.0, 2.2, 1.8, 2.0], 2.9, False),  # 0.163 x 6 above 2
        ([2.0, 2.2, 1.8], 9.0, False),  # too few are known
        ([2.0, 2.2, 1.8, 2.0], 0.1, False),
        ([2.0, 2.2, 1.8, 2.0], math.nan, False),
        ([], 2.0, False),
    ],
)
def test_what_stands_out(losses: list[float], loss: float, stands: bool) -> None:
    recent = torch.tensor([math.nan] * (8 - len(losses)) + losses, dtype=torch.float64)
    assert bool(train_module.stands_out(torch.tensor(loss, dtype=torch.float64), recent, 6.0)) == stands


def test_too_many_losses_that_stand_out_end_the_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever non_finite says; the state is saved without those updates."""
    monkeypatch.setattr(train_module, "stands_out", lambda loss, losses, sigma: torch.tensor(True))
    guards = {"loss_spike_sigma": 6.0, "max_consecutive_skips": 3}
    spec = train_spec(corpus, training={"max_steps": 9}, guards=guards)
    message = (
        r"stood out at step 3, .* step 3 is saved\. .*max_consecutive_skips is 3: .* larger guards.loss_spike_sigma"
    )
    with pytest.raises(LossStoodOut, match=message):
        alone(spec, tmp_path)
    assert catalog.read(catalog.folder(RunDir(tmp_path).checkpoints, 3))["updates"] == 0


def test_ids_beyond_the_vocabulary_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab"):
        alone(train_spec(corpus, model={"vocab_size": 50}), tmp_path)


def test_too_short_a_corpus_is_refused_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    data = {"sources": [{"path": str(corpus)}], "epochs": 1}
    with pytest.raises(DataError, match=r"the run needs 8,000 samples"):
        alone(train_spec(corpus, data=data, training={"max_steps": 1000}), tmp_path)
    assert not lines(tmp_path)


# ---- learning rates --------------------------------------------------------------------------------------------------


def rates(max_steps: int, **fields: Any) -> list[float]:
    schedule = LrSchedulerSection(**fields)
    return [learning_rate(schedule, 1.0, max_steps, step) for step in range(1, max_steps + 1)]


def test_warm_up_is_linear_to_the_peak() -> None:
    assert rates(6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_min_lr_at_decay_steps() -> None:
    got = rates(8, type="linear", warmup_steps=2, decay_steps=6, min_lr=0.2)
    assert got == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    got = rates(10, type="cosine", warmup_steps=2, min_lr=0.1)
    assert got[1] == 1.0
    assert got[5] == pytest.approx(0.55)
    assert got[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(got[1:]))


def test_decay_beyond_max_steps_is_a_planned_continuation() -> None:
    assert rates(5, type="linear", decay_steps=10) == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])


def test_wsd_decays_over_its_last_steps() -> None:
    got = rates(8, type="wsd", warmup_steps=2, decay_steps=4, min_lr=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


# ---- documents and cut sequences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", architectures())
def test_flops_of_a_step_are_those_of_all_its_documents(family: str) -> None:
    """Of every micro-batch, whole rows too."""
    spec = make_spec(architecture=family, training={"micro_batch_size": 2})
    rows = [[[0, 3, 4], [0]], [[0], [0]], [[0, 15], [0, 8]]]
    batches = [MicroBatch(None, None, Part(2, 16, torch.device("cpu"), documents=each)) for each in rows]
    lengths = (3, 1, 12, 16, 16, 16, 15, 1, 8, 8)
    want = sum(n * flops_per_token(spec.model.config, n) for n in lengths) / sum(lengths)
    linear = 6 * active_parameters(spec.model.config)
    assert linear + _attention_flops(spec, batches) == pytest.approx(want, rel=1e-12)
    whole = _attention_flops(spec, [MicroBatch(None, None)] * 3)
    assert linear + whole == pytest.approx(flops_per_token(spec.model.config, 16))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1, 2), (2, 1, 1, 2)], ids=str)
def test_a_run_over_documents_is_the_same_on_cut_sequences(
    pool: Pool, corpus: Path, tmp_path: Path, mesh: tuple[int, ...]
) -> None:
    """From the corpus to the log, stopped and resumed on one rank. Documents of 41 tokens in windows of 32, so some
    windows hold a boundary and some none. FLOPs are those of the documents."""
    sections = {
        "data": {"sources": [{"path": str(corpus)}], "repeat": True, "document_mask": True},
        "training": {"max_steps": 6, "sequence_length": 32},
    }
    want, cut = train_spec(corpus, **sections), train_spec(corpus, *mesh, **sections)
    train(pool, want, tmp_path / "one")
    train(pool, cut, tmp_path / "cut", stop_after=3)
    train(pool, want, tmp_path / "cut")
    one, other = (lines(tmp_path / name) for name in ("one", "cut"))
    assert [row["step"] for row in other] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "aux_loss"):
        np.testing.assert_allclose([row[key] for row in other], [row[key] for row in one], rtol=1e-5)
    ratios = [1e12 * row["tflops_per_device"] / row["tokens_per_second"] for row in one]
    most = flops_per_token(want.model.config, 32)
    assert all(flops_per_token(want.model.config, 8) < ratio <= most * (1 + 1e-9) for ratio in ratios)
    assert min(ratios) < 0.999 * most


def test_a_run_tells_how_often_it_reads_each_corpus(corpus: Path, tmp_path: Path) -> None:
    """From where it goes on; other weights at a resume are told."""
    rng = np.random.default_rng(6)
    documents = [rng.integers(10, MODEL["vocab_size"], 30).tolist() for _ in range(9)]
    small = make(tmp_path / "small", documents, MODEL["vocab_size"]) / "tokens"

    def spec(steps: int, weight: float) -> RunSpec:
        sources = [{"path": str(corpus), "weight": 1 - weight}, {"path": str(small), "weight": weight}]
        return train_spec(corpus, data={"sources": sources, "repeat": True}, training={"max_steps": steps})

    for steps, weight in ((2, 0.25), (4, 0.25), (5, 0.5)):
        alone(spec(steps, weight), tmp_path / "run")
    told = events(tmp_path / "run", "data")
    assert [row["samples"] for row in told] == [12, 4, 12, 4, 4, 4]
    assert told[3]["corpus"] == str(small) and told[3]["epochs"] == pytest.approx(4 / 17, abs=1e-4)
    warned = [row["message"] for row in events(tmp_path / "run", "warning")]
    assert len(warned) == 1 and "sources" in warned[0] and "up to step 4" in warned[0]
