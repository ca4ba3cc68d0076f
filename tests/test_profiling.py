"""Profiled windows: what is written, when, by whom; and that neither the numbers nor a run without one change."""

import gzip
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import ALONE, Pool
from pithtrain import profiling
from pithtrain.errors import SpecError
from pithtrain.rundir import RunDir, read_lines
from pithtrain.spec import RunSpec
from pithtrain.train import run
from pithtrain.watch import Watch
from test_train import StopsAfter, alone, corpus, events, make_run, numbers, train, train_spec

__all__ = ["corpus"]
WINDOW = {"torch": True, "start_step": 2, "end_step": 3}


def profiled(corpus: Path, max_steps: int = 4, ep: int = 1, **keys: Any) -> RunSpec:
    """Two layers and two micro-batches: writing takes some 30 us an operator."""
    training = {"max_steps": max_steps, "global_batch_size": 2 * ep}
    model = {"num_hidden_layers": 2}
    return train_spec(corpus, ep=ep, training=training, model=model, profiling={**WINDOW, **keys})


def records(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def steps(path: Path) -> list[str]:
    return [one["name"] for one in records(path) if one.get("cat") == "user_annotation" and "step " in one["name"]]


def test_a_window_is_recorded_and_changes_no_number(corpus: Path, tmp_path: Path) -> None:
    alone(profiled(corpus), tmp_path / "on")
    path = RunDir(tmp_path / "on").trace(1, 0)
    assert steps(path) == ["step 2", "step 3"]
    ranges = {one["name"]: one for one in records(path) if one.get("cat") == "user_annotation"}
    begin, end = ranges["step 2"]["ts"], ranges["step 3"]["ts"] + ranges["step 3"]["dur"]
    operators = [one for one in records(path) if one.get("cat") == "cpu_op" and one["name"] == "aten::mm"]
    assert operators and all(begin <= one["ts"] <= end for one in operators)
    [row] = events(tmp_path / "on", "profiled")
    assert (row["path"], row["first_step"], row["step"]) == (str(path), 2, 3)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing is left beside it"

    alone(profiled(corpus, torch=False, start_step=None, end_step=None), tmp_path / "off")
    assert numbers(tmp_path / "on") == numbers(tmp_path / "off")


def test_a_run_without_a_window_imports_nothing_of_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pithtrain.profiling", None)  # an import of it fails
    alone(profiled(corpus, max_steps=3, torch=False, start_step=None, end_step=None), tmp_path)
    with pytest.raises(ImportError):
        alone(profiled(corpus), tmp_path / "on")
    assert not (tmp_path / "profiles").exists()


@pytest.mark.slow
def test_a_stop_inside_the_window_writes_and_the_next_attempt_records_the_rest(corpus: Path, tmp_path: Path) -> None:
    spec, run_dir = profiled(corpus, max_steps=6, end_step=5), make_run(tmp_path)
    outcome = run(spec, run_dir, ALONE, StopsAfter(run_dir, ALONE, 3))
    assert not outcome.finished
    assert steps(run_dir.trace(1, 0)) == ["step 2", "step 3"]
    run(spec, run_dir, ALONE, Watch(run_dir, 2, 0))
    assert steps(run_dir.trace(2, 0)) == ["step 4", "step 5"]


@pytest.mark.slow
def test_the_ranks_that_are_named_record_and_rank_zero_tells(corpus: Path, tmp_path: Path) -> None:
    """In processes of their own: torch's profiler has crashed one that had run hundreds of other tests before."""
    fresh = Pool()
    try:
        train(fresh, profiled(corpus, max_steps=3, ep=2, ranks=[1]), tmp_path)
    finally:
        fresh.close()
    path = RunDir(tmp_path).trace(1, 1)
    assert steps(path) == ["step 2", "step 3"]
    assert [entry.name for entry in path.parent.iterdir()] == ["rank-1.json.gz"]
    assert [row["path"] for row in events(tmp_path, "profiled")] == [str(path)]


def test_a_profile_that_cannot_be_written_warns_and_training_goes_on(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("in the way")
    assert alone(profiled(corpus), tmp_path).finished
    [row] = events(tmp_path, "warning")
    assert "rank 0 could not write its profile" in row["message"]
    assert not events(tmp_path, "profiled")


def test_without_cuda_two_of_the_three_warn_once(corpus: Path, tmp_path: Path) -> None:
    alone(profiled(corpus, torch=False, nsys=True, memory_snapshot=True), tmp_path)
    [row] = events(tmp_path, "warning")
    assert row["message"].startswith("profiling.nsys and profiling.memory_snapshot record nothing")
    assert not (tmp_path / "profiles").exists()


def test_writing_is_no_time_of_a_step(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = profiling.Profile.end
    monkeypatch.setattr(profiling.Profile, "end", lambda self, step, last: end(self, step, last) + 1000 * (step == 3))
    alone(profiled(corpus), tmp_path)
    assert read_lines(RunDir(tmp_path).metrics)[2]["step_time_s"] < 0


@pytest.mark.parametrize(
    ("keys", "path", "rule"),
    [
        ({"start_step": None}, "profiling.start_step", "must be given"),
        ({"end_step": None, "torch": False, "nsys": True}, "profiling.end_step", "must be given"),
        ({"start_step": 4}, "profiling.start_step", "at most profiling.end_step = 3"),
        ({"end_step": 5}, "profiling.end_step", "at most training.max_steps = 4"),
        ({"ranks": [0, 1]}, "profiling.ranks", "each below 1"),
        ({"ranks": []}, "profiling.ranks", "at least one rank"),
        ({"torch": False, "start_step": None}, "profiling.end_step", "has no effect: none of torch, nsys"),
    ],
)
def test_a_window_that_cannot_be_recorded_is_refused(keys: dict[str, Any], path: str, rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        profiled(Path("unused"), **keys)
    [problem] = caught.value.problems
    assert problem.path == path and rule in problem.rule


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_recorded_too(corpus: Path, tmp_path: Path) -> None:
    """Kernels in the trace, allocations in the snapshot, the profiler's calls harmless without nsys; equal numbers."""
    training = {"max_steps": 4, "device": "cuda", "compute_dtype": "bfloat16", "deterministic": True}
    alone(train_spec(corpus, training=training), tmp_path / "off")
    keys = {**WINDOW, "nsys": True, "memory_snapshot": True}
    alone(train_spec(corpus, training=training, profiling=keys), tmp_path / "on")
    assert numbers(tmp_path / "on") == numbers(tmp_path / "off")
    run_dir = RunDir(tmp_path / "on")
    assert steps(run_dir.trace(1, 0)) == ["step 2", "step 3"]
    assert sum(one.get("cat") == "kernel" for one in records(run_dir.trace(1, 0))) > 100
    with run_dir.memory_snapshot(1, 0).open("rb") as file:
        snapshot = pickle.load(file)
    assert any(snapshot["device_traces"])
    assert len(events(tmp_path / "on", "profiled")) == 2
    assert not events(tmp_path / "on", "warning")
