"""What became of a run: words and causes from files and a fake queue; ending, saving, resuming, sweeping by command."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import fake_slurm
from fake_run import FINISHES, WAITS_FOR_STOP, is_waiting, make_run, spec_file, wait_for
from fake_slurm import queue_row
from pithtrain import jobs, rundir, slurm, submit
from pithtrain.errors import RunDirError, SlurmError
from pithtrain.rundir import RunDir
from pithtrain.spec import MoeSection, load
from test_cli import pithtrain


def on_slurm(folder: Path, name: str = "fake", **fields: Any) -> RunDir:
    """A run that was submitted as job 7."""
    run, _ = make_run(folder, FINISHES, name=name)
    entry = {"job_id": "7", "launcher": "slurm", "host": "login", "time": time.time(), "token": "t1"}
    rundir.record_job(run, 1, **{**entry, "first": 1, "lane": None, **fields})
    run.logs(1).mkdir(parents=True)
    return run


def queue(state: str, **fields: Any) -> jobs.Queue:
    return slurm.read_queue(queue_row("7", state, **fields))


def error(run: RunDir, attempt: int, rank: int | None, **fields: Any) -> None:
    run.errors(attempt).mkdir(parents=True, exist_ok=True)
    report = {"time": 1.0, "rank": rank, "host": "n1", "type": "ValueError", "message": "the cause"}
    report |= {"secondary": False, "exit_code": 1, "traceback": "", "retry": True} | fields
    path = run.error(attempt, rank) if rank is not None else run.errors(attempt) / "node-n1.json"
    path.write_text(json.dumps(report))


# ---- words -----------------------------------------------------------------------------------------------------------


def test_while_slurm_knows_the_job_its_word_counts(tmp_path: Path) -> None:
    run = on_slurm(tmp_path)
    assert jobs.state(run, queue("PENDING", reason="Resources")).word == "pending"
    assert "waits for nodes" in (jobs.state(run, queue("PENDING", reason="Resources")).why or "")
    assert jobs.state(run, queue("PENDING", reason="JobHeldUser")).word == "held"
    assert jobs.state(run, queue("RUNNING")).word == "running"
    rundir.write_atomic(run.heartbeat, json.dumps({"phase": "save", "step": 3, "time": time.time(), "attempt": 1}))
    saving = jobs.state(run, queue("RUNNING"))
    assert (saving.why, saving.step, saving.nodes, saving.time_left_s) == ("save", 3, "n0", 1740)
    # a failed attempt of a job that is queued again is no failed run
    error(run, 1, 1)
    again = jobs.state(run, queue("PENDING", reason="BeginTime", restarts=1))
    assert (again.word, again.attempt, again.alive) == ("pending", 2, True)


@pytest.mark.parametrize(
    ("marks", "row", "slurm_says", "word"),
    [
        ({"done": {"step": 4}}, {}, None, "done"),
        ({"stop": {"step": 2}}, {}, "COMPLETED", "stopped"),
        ({"stop": {}}, {}, "CANCELLED", "cancelled"),
        ({}, {}, "CANCELLED", "cancelled"),  # no accounting, and a scancel by hand
        ({}, {"end": 1.0, "ended": "cancelled", "why": "cancelled (scancel); not saved, at step 3"}, None, "cancelled"),
        (
            {"requeue": {"step": 2}},
            {"end": 1.0, "ended": "stopped", "why": "could not be started again"},
            None,
            "stopped",
        ),
        ({}, {"end": 1.0, "ended": "failed", "why": "rank 1: it fell"}, None, "failed"),
        ({}, {}, None, "lost"),
        ({}, {"end": 1.0}, "NODE_FAIL", "lost"),
    ],
)
def test_when_it_has_ended(
    tmp_path: Path, marks: dict[str, dict[str, int]], row: dict[str, Any], slurm_says: str | None, word: str
) -> None:
    run = on_slurm(tmp_path)
    rundir.record_attempt(run, 1, start=1.0, **row)
    for marker, fields in marks.items():
        rundir.mark(getattr(run, marker), 1, **fields)
    now = jobs.state(run, queue(slurm_says) if slurm_says else {})
    assert (now.word, now.alive) == (word, False)
    assert now.why


def test_a_job_whose_id_was_never_written_down_is_adopted(tmp_path: Path) -> None:
    """Case 19 of the service's matrix, seen from `status`: the job still waits."""
    run = on_slurm(tmp_path, job_id=None)
    assert jobs.state(run, {}).word == "lost" or jobs.state(run, {}).word == "not started"
    comment = "pithtrain t1 step=3 loss=2.1 attempt=1"
    now = jobs.state(run, slurm.read_queue(queue_row("99", "PENDING", comment=comment)))
    assert (now.word, now.job_id) == ("pending", "99")
    assert rundir.jobs(run)[0]["job_id"] == "99"
    assert jobs.state(run, slurm.read_queue(queue_row("98", "PENDING", comment="pithtrain other-1"))).word != "pending"


def test_a_damaged_run_and_a_silent_controller_do_not_end_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    fake_slurm.install(tmp_path, monkeypatch, squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    good, bad = on_slurm(tmp_path, "good"), on_slurm(tmp_path, "bad")
    other, _ = make_run(tmp_path, FINISHES, name="other")
    bad.spec_yaml.write_text("training: 3\n")
    finished = on_slurm(tmp_path, "finished")
    rundir.mark(finished.done, 1, step=4)
    fell = on_slurm(tmp_path, "fell")
    rundir.record_attempt(fell, 1, end=1.0, ended="failed", why="it fell", requeued=False)
    words = {each.name: each for each in jobs.states([good, bad, other, finished, fell])}
    assert words["good"].word == "unknown"
    assert "Slurm does not answer" in (words["good"].why or "")
    assert words["bad"].word == "damaged"
    assert words["other"].word == "not started"
    assert (words["finished"].word, words["fell"].word) == ("done", "failed")
    assert fake_slurm.called(tmp_path).count("squeue") == 4  # one question, tried four times, for all runs
    with pytest.raises(SlurmError):
        jobs.state(good)


# ---- causes ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_only_srun_saw_dying_is_named(tmp_path: Path) -> None:
    """With kill-on-bad-exit nobody else gets to write: srun's own lines are all there is, one file for all attempts."""
    run = on_slurm(tmp_path)
    log = run.slurm / "7_0_log.err"
    log.write_text(
        f"{jobs.header(1)}\nsrun: error: n0: task 0: Segmentation fault\n"
        f"{jobs.header(2)}\nsrun: error: n0: task 2: Exited with exit code 1\nsrun: error: n1: task 3: Killed\n"
    )
    assert jobs.cause(run, 1, step_log=log).line.startswith("rank 2") is False
    found = jobs.cause(run, 2, step_log=log)
    assert found.line == "rank 3 on n1 was killed by SIGKILL (the kernel does that when memory runs out)"
    assert found.retry
    error(run, 2, 1, message="the real one", retry=False)
    assert (jobs.cause(run, 2, step_log=log).line, jobs.cause(run, 2).retry) == (
        "rank 1: ValueError: the real one",
        False,
    )


def test_the_rank_that_wrote_nothing_while_all_waited_for_it(tmp_path: Path) -> None:
    run = on_slurm(tmp_path)
    for rank in range(3):
        run.log(1, rank).write_text("")
    for rank in (0, 2):
        error(run, 1, rank, type="Stalled", message="no step for 300 s", secondary=True)
    assert jobs.cause(run, 1).line == "rank 1 stopped answering: the others lost their connection to it"
    error(run, 1, None, message="node n1: 3 of 4 GPUs answer", time=0.5, retry=False)
    assert jobs.cause(run, 1).line == "node n1: 3 of 4 GPUs answer"


# ---- commands --------------------------------------------------------------------------------------------------------


def test_cancel_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_slurm(tmp_path)
    fake_slurm.install(tmp_path, monkeypatch, squeue=f"cat {tmp_path}/row")
    (tmp_path / "row").write_text(queue_row("7", "PENDING") + "\n")
    assert "was waiting in the queue" in jobs.cancel(run)
    assert "scancel 7" in fake_slurm.called(tmp_path)
    assert rundir.read_json(run.stop)["attempt"] == 1  # so that it is known to be cancelled, not lost
    (tmp_path / "row").write_text(queue_row("7", "RUNNING") + "\n")
    assert "saves at its next step" in jobs.cancel(run)
    assert "scancel --signal=USR2 7" in fake_slurm.called(tmp_path)
    assert "without a save" in jobs.cancel(run, at_once=True)
    with pytest.raises(RunDirError, match="fake is running"):
        jobs.refuse_if_live(jobs.state(run), run)
    (tmp_path / "row").write_text("")
    assert jobs.cancel(run) == "fake is over: cancelled while it waited in the queue"


@pytest.mark.parametrize(
    ("marker", "ended", "text"),
    [
        ("done", "done", "fake is over: done, finished at step 4"),
        ("stop", "stopped", "fake is over: stopped, cancelled; saved at step 4"),
        ("requeue", "stopped", "fake is over: stopped, saved at step 4 on SIGTERM"),
        (None, "failed", "fake is over: failed, rank 1: it fell"),
        (None, None, "fake does not run: not started"),
    ],
)
def test_cancel_of_a_run_that_is_over_says_how_it_ended_and_is_no_error(
    tmp_path: Path, marker: str | None, ended: str | None, text: str
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    if ended is not None:
        rundir.record_job(run, 1, job_id="1", launcher="train", host=os.uname().nodename, time=0)
        rundir.record_attempt(run, 1, end=1.0, ended=ended, **({} if marker else {"why": "rank 1: it fell"}))
    if marker is not None:
        rundir.mark(getattr(run, marker), 1, step=4, reason="SIGTERM")
    done = pithtrain("cancel", "fake", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{text}\n")


def test_a_local_run_that_is_killed_by_cancel_says_so(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, WAITS_FOR_STOP)
    submit.submit(run, spec, "local")
    wait_for(lambda: is_waiting(run, [0, 1]))
    assert jobs.cancel(run, at_once=True) == "fake is ended without a save"
    wait_for(lambda: not jobs.state(run).alive)
    assert rundir.last_attempt(run)["why"] == "cancelled; not saved, at step 1"
    assert jobs.cancel(run) == "fake is over: cancelled; not saved, at step 1"


def test_a_second_cancel_keeps_what_the_first_one_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_slurm(tmp_path)
    fake_slurm.install(tmp_path, monkeypatch, squeue=f'printf "{queue_row("7", "RUNNING")}\\n"')
    rundir.mark(run.stop, 1, step=31)
    assert jobs.cancel(run) == "fake has saved step 31 and is ending"
    assert rundir.read_json(run.stop)["step"] == 31


def test_cancel_reaches_a_run_through_its_marker_where_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    run = on_slurm(tmp_path)
    fake_slurm.install(tmp_path, monkeypatch, squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError):  # nothing has begun that could read a marker
        jobs.cancel(run)
    rundir.record_attempt(run, 1, start=1.0, end=None)
    assert "was asked by its marker" in jobs.cancel(run)
    assert rundir.read_json(run.stop)["attempt"] == 1


def test_a_number_that_came_again_is_not_our_job(tmp_path: Path) -> None:
    run = on_slurm(tmp_path, name="mine")
    assert jobs.state(run, queue("RUNNING", comment="pithtrain other")).word == "lost"  # the row's name is fake
    assert jobs.state(run, queue("RUNNING", comment="pithtrain t1 step=3")).word == "running"


def test_damaged_papers_of_a_living_run_start_no_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_slurm(tmp_path)
    fake_slurm.install(tmp_path, monkeypatch, squeue=f'printf "{queue_row("7", "RUNNING")}\\n"')
    spec, submitted = run.spec_yaml.read_text(), run.submit_json.read_text()
    run.spec_yaml.write_text("torn: [")
    assert "saves at its next step" in jobs.cancel(run)
    run.spec_yaml.write_text(spec)
    run.submit_json.write_text(submitted[:200])
    assert jobs.states([run])[0].word == "damaged"
    done = pithtrain("resume", run.path, cwd=tmp_path)
    assert done.returncode == 2
    assert "submit.json is damaged" in done.stderr
    run.heartbeat.write_bytes(b"\xff\xfe")
    assert jobs.reached(run) == 0


def test_save_and_stacks_ask_a_running_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_slurm(tmp_path)
    fake_slurm.install(tmp_path, monkeypatch, squeue=f"cat {tmp_path}/row")
    (tmp_path / "row").write_text(queue_row("7", "PENDING") + "\n")
    for ask in (jobs.ask_to_save, jobs.dump_stacks):
        with pytest.raises(RunDirError, match="does not run: it is pending"):
            ask(run)
    (tmp_path / "row").write_text(queue_row("7", "RUNNING") + "\n")
    with pytest.raises(RunDirError, match="still starting"):
        jobs.dump_stacks(run)
    run.pid(1, 0).write_text("{}")
    jobs.dump_stacks(run)
    jobs.ask_to_save(run)
    assert "scancel --signal=USR1 7" in fake_slurm.called(tmp_path)
    assert rundir.read_json(run.save)["attempt"] == 1


def test_nothing_is_promised_of_a_run_with_forced_routing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_slurm(tmp_path)
    fake_slurm.install(tmp_path, monkeypatch, squeue=f"cat {tmp_path}/row")
    (tmp_path / "row").write_text(queue_row("7", "RUNNING") + "\n")
    moe = MoeSection(force_load_balance=True)
    run.spec_yaml.write_text(load(run.spec_yaml).model_copy(update={"moe": moe}).to_yaml())
    with pytest.raises(RunDirError, match="saves nothing: moe"):
        jobs.ask_to_save(run)
    assert "it saves nothing" in jobs.cancel(run)


def test_resume_changes_a_job_that_waits_and_lets_it_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_slurm(tmp_path)
    held = queue_row("7", "PENDING", reason="JobHeldUser")
    fake_slurm.install(tmp_path, monkeypatch, squeue=f'printf "{held}\\n"')
    changes = ["--set", "training.max_steps=6", "--set", "slurm.time=90"]
    done = pithtrain("resume", run.path, "--exclude", "n1", *changes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = fake_slurm.called(tmp_path)
    assert "scontrol update JobId=7 ExcNodeList=n1 TimeLimit=90" in said.replace(
        "TimeLimit=90 ExcNodeList=n1", "ExcNodeList=n1 TimeLimit=90"
    )
    assert "scontrol release 7" in said
    assert "sbatch" not in said
    assert "changed: slurm.exclude: None -> n1" in done.stdout
    assert "max_steps: 6" in run.spec_yaml.read_text()
    before = run.spec_yaml.read_text()
    refused = pithtrain("resume", run.path, "--set", "slurm.mem=8G", cwd=tmp_path)
    assert refused.returncode == 2
    assert "slurm.mem = '8G': cannot change while job 7 waits" in refused.stderr
    assert run.spec_yaml.read_text() == before


def test_one_of_two_resumes_at_the_same_moment_wins(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    with rundir.locked(run):
        done = pithtrain("resume", run.path, cwd=tmp_path)
    assert done.returncode == 2
    assert "another command is starting fake right now" in done.stderr
    with rundir.locked(run):  # free again
        pass


@pytest.mark.slow
def test_resume_force_goes_past_a_host_that_is_gone(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    rundir.record_job(run, 1, job_id="5", launcher="local", host="gone", time=0.0)
    rundir.record_attempt(run, 1, start=1.0, end=None)
    assert "--force" in pithtrain("resume", run.path, cwd=tmp_path).stderr
    done = pithtrain("resume", run.path, "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rundir.jobs(run)[-1]["attempt"] == 2
    jobs.wait(run)


@pytest.mark.slow
def test_a_sweep_submits_a_run_for_each_point_into_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = (
        f'[ "$1" = --test-only ] && exit 0; echo x >> {tmp_path}/n; echo "Submitted batch job $(wc -l < {tmp_path}/n)"'
    )
    fake_slurm.install(tmp_path, monkeypatch, sbatch=count)
    monkeypatch.setenv("SLURM_CONF", os.devnull)
    grid = ["--grid", "optimizer.lr=1e-3,2e-3", "--grid", "training.seed=1,2"]
    call = ["sweep", spec_file(tmp_path), *grid, "--max-parallel", 3]
    listed = pithtrain(*call, "--dry-run", cwd=tmp_path)
    assert len(listed.stdout.splitlines()) == 4
    assert not (tmp_path / "runs").exists()
    done = pithtrain(*call, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = rundir.runs(tmp_path / "runs")
    assert len(made) == 4
    scripts = [next(run.slurm.glob("*_submission.sh")).read_text() for run in made]
    lanes = sorted(line for text in scripts for line in text.splitlines() if "--job-name" in line)
    assert lanes == [f"#SBATCH --job-name=fake-lane{lane}" for lane in (0, 0, 1, 2)]
    assert all("--dependency=singleton" in text for text in scripts)
    assert all("group: fake" in run.spec_yaml.read_text() for run in made)
    again = pithtrain(*call, cwd=tmp_path)
    assert again.returncode == 2
    assert "exists" in again.stderr
    parts = ["--grid", "slurm.partition=train,trian", "--name", "p"]
    assert "did you mean train?" in pithtrain("sweep", spec_file(tmp_path), *parts, cwd=tmp_path).stderr
    assert len(rundir.runs(tmp_path / "runs")) == 4
    wrong = pithtrain("sweep", spec_file(tmp_path), "--grid", "optimizer.lrr=1,2", "--name", "w", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "optimizer.lrr" in wrong.stderr


def test_force_leaves_the_decision_to_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm.install(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_CONF", os.devnull)
    call = ["submit", spec_file(tmp_path), "--set", "slurm.partition=trian"]
    refused = pithtrain(*call, cwd=tmp_path)
    assert refused.returncode == 2
    assert "did you mean train?" in refused.stderr
    assert not (tmp_path / "runs").exists()
    done = pithtrain(*call, "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "did you mean train?" in done.stdout


@pytest.mark.slow
def test_logs_follow_a_run_to_its_end_and_err_shows_the_first(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, WAITS_FOR_STOP)
    submit.submit(run, spec, "local")
    wait_for(lambda: is_waiting(run, [0, 1]))
    jobs.cancel(run)
    text = "".join(jobs.follow(run, 1, None))
    assert text == run.log(1, 1).read_text()
    error(run, 1, 1, traceback="Traceback: here\n")
    done = pithtrain("logs", run.path, "--err", cwd=tmp_path)
    assert done.stdout == "rank 1: ValueError: the cause\n\nTraceback: here\n"


@pytest.mark.slow
def test_cancel_now_ends_a_local_run_without_a_save(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, WAITS_FOR_STOP)
    submit.submit(run, spec, "local")
    wait_for(lambda: is_waiting(run, [0, 1]))
    assert "without a save" in jobs.cancel(run, at_once=True)
    assert jobs.wait(run).word == "cancelled"
    assert not list(jobs.local_pids(run, rundir.jobs(run)[0]))


def test_secrets_reach_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the environment and in the remote of the checkout that is snapshot: in no file of the run directory,
    no log, no script, no comment."""
    planted = "hunter2-0123456789abcdef"
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "NCCL_SECRET_TOKEN", "MINE"):
        monkeypatch.setenv(name, planted)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "remote.origin.url")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"https://me:{planted}@example.com/x.git")
    run, spec = make_run(tmp_path, FINISHES)
    fake_slurm.install(tmp_path, monkeypatch)
    submit.submit(run, spec, "slurm")
    submit.foreground(run, spec)
    assert planted not in fake_slurm.called(tmp_path)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 30
    for path in files:
        assert planted.encode() not in path.read_bytes(), path
        assert not path.stat().st_mode & 0o002, path
    assert os.environ["WANDB_API_KEY"] == planted
    assert rundir.read_json(run.submit_json)["environment"]["NCCL_DEBUG"] == "WARN"
