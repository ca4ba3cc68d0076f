"""The run directory: claimed once, read safely, explained when refused."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pithtrain
from fake_run import FINISHES, make_run, spec_file
from pithtrain import rundir
from pithtrain.errors import RunDirError
from pithtrain.rundir import RunDir
from pithtrain.spec import load


def test_paths_are_those_of_the_contract() -> None:
    run = RunDir(Path("runs/tiny"))
    expected = {
        run.spec_yaml: "spec.yaml",
        run.submit_json: "submit.json",
        run.plan_json: "plan.json",
        run.code: "code",
        run.slurm: "slurm",
        run.attempts: "attempts.jsonl",
        run.log(1, 0): "logs/attempt-1/rank-0.log",
        run.latest_logs: "logs/latest",
        run.error(1, 3): "errors/attempt-1/rank-3.json",
        run.metrics: "metrics.jsonl",
        run.events: "events.jsonl",
        run.checkpoints: "checkpoints",
        run.wandb_id: "wandb.id",
        run.done: "DONE",
        run.stop: "STOP",
        run.requeue: "REQUEUE",
    }
    assert {str(path.relative_to("runs/tiny")) for path in expected} == set(expected.values())
    assert all(str(path) == f"runs/tiny/{text}" for path, text in expected.items())


def test_create_writes_what_a_reader_needs(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    assert load(run.spec_yaml) == spec
    about = json.loads(run.submit_json.read_text())
    assert about["command"] == ["test"]
    assert about["versions"]["submitit"]
    assert len(about["code"]["sha256"]) == 64
    assert (run.code / "pithtrain" / "rundir.py").exists()
    assert not list(run.code.rglob("__pycache__"))
    assert run.wandb_id.read_text().strip()


def test_an_existing_directory_is_refused_naming_the_difference_and_the_way_on(tmp_path: Path) -> None:
    make_run(tmp_path, FINISHES)
    other = load(spec_file(tmp_path), ["training.max_steps=9"])
    with pytest.raises(RunDirError) as refusal:
        rundir.create(other.output_dir / other.name, other.to_yaml(), {}, [])
    message = str(refusal.value)
    assert "training.max_steps: 4 -> 9" in message
    assert "pithtrain resume" in message
    assert "--name" in message
    assert refusal.value.exit_code == 2


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunDirError, match="is not a run directory"):
        rundir.create(tmp_path / "mine", "", {}, [])


def test_of_two_creators_one_wins(tmp_path: Path) -> None:
    spec = load(spec_file(tmp_path))
    outcomes: list[str] = []

    def create() -> None:
        try:
            rundir.create(tmp_path / "same", spec.to_yaml(), {}, [])
            outcomes.append("made")
        except RunDirError:
            outcomes.append("refused")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["made"] + ["refused"] * 7


def test_case_023_an_attempt_is_claimed_once(tmp_path: Path) -> None:
    """Whoever starts, at whatever moment, gets a number and log folder that nobody had before."""
    run, _ = make_run(tmp_path, FINISHES)
    rundir.record_attempt(run, 2, end=1.0)  # an attempt whose logs were removed still counts
    claimed: list[int] = []
    threads = [threading.Thread(target=lambda: claimed.append(rundir.claim_attempt(run))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(3, 11))
    assert (run.path / "logs" / "latest").resolve().name in {f"attempt-{number}" for number in claimed}


def test_attempts_are_one_line_each_and_fields_join(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rundir.record_attempt(run, 1, start=1.0, end=None)
    rundir.record_attempt(run, 2, start=3.0)
    rundir.record_attempt(run, 1, end=2.0)
    assert rundir.read_lines(run.attempts) == [
        {"attempt": 1, "start": 1.0, "end": 2.0},
        {"attempt": 2, "start": 3.0},
    ]


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert [row["step"] for row in rundir.read_lines(path)] == [1, 2]
    path.write_bytes(b'{"step": 1}\n{"step": 2}')  # whole but unfinished: the writer would go on in this line
    assert [row["step"] for row in rundir.read_lines(path)] == [1]
    assert rundir.read_lines(tmp_path / "missing.jsonl") == []


def test_the_first_error_is_the_earliest_that_another_death_did_not_cause(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.errors(1).mkdir(parents=True)
    for rank, time, secondary in ((0, 1.0, True), (1, 3.0, False), (2, 2.0, False)):
        run.error(1, rank).write_text(json.dumps({"rank": rank, "time": time, "secondary": secondary}))
    (run.errors(1) / "rank-3.json").write_text("{")  # being written
    first = rundir.first_error(run, 1)
    assert first is not None
    assert first["rank"] == 2
    assert rundir.first_error(run, 2) is None


def test_stale_markers_are_cleared_and_fresh_ones_stay(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rundir.mark(run.done, 1, step=3)
    rundir.mark(run.stop, 2)
    run.requeue.write_text("")
    rundir.clear_stale_markers(run, 2)
    assert not run.done.exists()
    assert run.stop.exists()
    assert not run.requeue.exists()


def test_find_by_name_directory_and_job_id(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    rundir.record_job(run, 1, job_id="4711", launcher="slurm")
    for reference in ("fake", str(run.path), "4711"):
        assert rundir.find(reference, spec.output_dir) == run
    with pytest.raises(RunDirError, match="nearest: fake"):
        rundir.find("fakke", spec.output_dir)
    with pytest.raises(RunDirError, match="there are no runs yet"):
        rundir.find("fake", tmp_path / "nowhere")


def test_the_snapshot_takes_the_tree_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dirty and untracked files too; commit, dirtiness and difference are kept."""
    package = tmp_path / "repository" / "src" / "pithtrain"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "old.py").write_text("a = 1\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(package)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "one"], check=True)
    (package / "old.py").write_text("a = 2\n")
    (package / "new.py").write_text("b = 1\n")
    monkeypatch.setattr(pithtrain, "__file__", str(package / "__init__.py"))

    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    about = rundir.snapshot_code(run)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert about["commit"] == head
    assert about["dirty"] is True
    assert "+a = 2" in (run.code / "dirty.diff").read_text()
    assert (run.code / "pithtrain" / "new.py").exists()
    assert about["sha256"] == rundir.tree_hash(run.code / "pithtrain")

    rundir.write_atomic(run.submit_json, "{}")
    assert rundir.renew_code(run) == []
    (package / "old.py").write_text("a = 3\n")
    assert rundir.renew_code(run) == ["old.py"]
    assert (run.code / "pithtrain" / "old.py").read_text() == "a = 3\n"
    assert (run.path / "code-before-1" / "pithtrain" / "old.py").read_text() == "a = 2\n"


MERGES = """
import sys; from pathlib import Path; from pithtrain import rundir
run, first = rundir.RunDir(Path(sys.argv[1])), int(sys.argv[2])
for attempt in range(first, first + 40, 2):
    rundir.record_attempt(run, attempt, start=1.0)
    rundir.record_job(run, attempt, job_id=str(attempt))
"""


def test_two_processes_that_record_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """As the launcher of an attempt that says how it ended while rank 0 of the next one, resumed meanwhile, begins."""
    run, _ = make_run(tmp_path, FINISHES)
    tasks = [subprocess.Popen([sys.executable, "-c", MERGES, str(run.path), str(first)]) for first in (1, 2)]
    assert [task.wait(60) for task in tasks] == [0, 0]
    assert [row["attempt"] for row in rundir.read_lines(run.attempts)] == list(range(1, 41))
    assert [job["attempt"] for job in rundir.jobs(run)] == list(range(1, 41))


def test_a_lock_that_cannot_be_had_swallows_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    monkeypatch.setattr(rundir, "MERGE_S", 0.1)
    with rundir._merging(run):  # another process that hangs
        rundir.record_attempt(run, 1, ended="failed")
    run.merging.unlink()
    run.merging.mkdir()  # one that cannot be opened
    rundir.record_attempt(run, 2, ended="done")
    assert [row["ended"] for row in rundir.read_lines(run.attempts)] == ["failed", "done"]
