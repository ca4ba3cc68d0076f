"""Around srun: the decision as a table, what nodes are looked at for, and the facts read from a run directory."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

import fake_slurm
from fake_run import FINISHES, make_run
from pithtrain import batch, jobs, rundir
from pithtrain.batch import Facts, Verdict, decide
from pithtrain.errors import RunDirError
from pithtrain.rundir import RunDir

CRASH = "rank 1: RuntimeError: lost"


@pytest.mark.parametrize(
    ("facts", "action", "ended", "exit_code"),
    [
        (Facts(0, done_step=9), "leave", "done", 0),
        (Facts(1, done_step=9, saved_step=4), "leave", "done", 0),
        # `pithtrain cancel` counts before all else that may have happened meanwhile
        (Facts(0, cancelled=True, saved_step=5), "leave", "stopped", 0),
        (Facts(1, cancelled=True, cause=CRASH, reached=7, max_requeues=9), "leave", "cancelled", 1),
        (Facts(143, cancelled=True, preempted=True, reached=7), "leave", "cancelled", 143),
        # saved on a signal: again, whatever srun's exit code says (it masks)
        (Facts(0, saved_step=5, reason="SIGUSR2"), "requeue", "stopped", 0),
        (Facts(143, saved_step=5, reason="SIGTERM", preempted=True), "requeue", "stopped", 0),
        # Slurm is taking the job back: a requeue would be refused, or undo a scancel
        (Facts(143, ending="cancelled (scancel)", saved_step=5), "leave", "stopped", 143),
        (Facts(0, ending="cancelled (scancel)"), "leave", "cancelled", 1),
        (Facts(0, ending="unknown", saved_step=5), "leave", "stopped", 1),
        (Facts(0, ending="unknown"), "leave", "killed", 1),
        (Facts(143, ending="preempted: the grace time was over", preempted=True), "restarts", "killed", 143),
        (Facts(143, ending="preempted: the grace time was over", slurm_requeues=False), "successor", "killed", 143),
        (Facts(143, ending="node lost"), "restarts", "killed", 143),
        (Facts(143, ending="time limit", slurm_requeues=False, saved_step=5), "successor", "stopped", 143),
        # a preemption that met ranks without handlers costs nothing of the budget
        (Facts(143, preempted=True, cause=CRASH), "requeue", "killed", 0),
        # but nothing goes on for ever
        (Facts(0, saved_step=5, reason="SIGUSR2", idle=batch.MAX_IDLE), "leave", "failed", 1),
        (Facts(143, ending="node lost", idle=batch.MAX_IDLE), "leave", "failed", 143),
        # crashes
        (Facts(1, cause=CRASH, reached=7, max_requeues=1), "requeue", "failed", 0),
        (Facts(1, cause=CRASH, reached=7, max_requeues=0), "leave", "failed", 1),
        (Facts(1, cause=CRASH, reached=7, max_requeues=2, crashes=2, last_crash_step=3), "leave", "failed", 1),
        (Facts(1, cause=CRASH, reached=0, max_requeues=9), "leave", "failed", 1),
        (Facts(1, cause=CRASH, reached=7, max_requeues=9, crashes=1, last_crash_step=7), "leave", "failed", 1),
        (Facts(1, cause=CRASH, reached=8, max_requeues=9, crashes=1, last_crash_step=7), "requeue", "failed", 0),
        (Facts(2, cause="spec", reached=8, max_requeues=9, retry=False), "leave", "failed", 2),
        # ranks that all end with 0 and leave no marker have not done what was asked
        (Facts(0, cause="it ended without a word", max_requeues=9), "leave", "failed", 1),
    ],
)
def test_decide(facts: Facts, action: str, ended: str, exit_code: int) -> None:
    verdict = decide(facts)
    assert (verdict.action, verdict.ended, verdict.exit_code) == (action, ended, exit_code)
    assert verdict.why
    assert "\n" not in verdict.why
    assert verdict.crash == (ended == "failed")


def test_case_020_a_decision_not_to_requeue_says_why() -> None:
    """The same policy for a preemption and a time limit (above); a non-requeue is a decision with a reason."""
    used_up = decide(Facts(1, cause=CRASH, reached=7, max_requeues=2, crashes=2, last_crash_step=3))
    assert used_up.why == f"{CRASH}; no restart: slurm.max_requeues = 2 is used up"
    again = decide(Facts(1, cause=CRASH, reached=7, max_requeues=9, crashes=1, last_crash_step=7))
    assert again.why == f"{CRASH}; no restart: no step was gained since the crash at step 7"
    never = decide(Facts(1, cause=CRASH, max_requeues=9))
    assert never.why == f"{CRASH}; no restart: no step was made"


def in_job(monkeypatch: pytest.MonkeyPatch, folder: Path, scontrol: str, restarts: int = 0) -> None:
    """The environment of a batch script of job 7; `scontrol` answers with this text."""
    fake_slurm.install(folder, monkeypatch, scontrol=scontrol, sbatch='echo "Submitted batch job 8"')
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("PITHTRAIN_ATTEMPT", "1")
    monkeypatch.setenv("PITHTRAIN_TOKEN", "t1")


def metrics(run: RunDir, *steps: int) -> None:
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0, "attempt": 1}) + "\n" for step in steps))


def error(run: RunDir, attempt: int, rank: int = 1, **fields: Any) -> None:
    run.errors(attempt).mkdir(parents=True, exist_ok=True)
    report = {"time": 1.0, "rank": rank, "host": "n1", "type": "ValueError", "message": "the cause"}
    report |= {"secondary": False, "exit_code": 1, "traceback": "", "retry": True}
    run.error(attempt, rank).write_text(json.dumps(report | fields))


@pytest.mark.parametrize(
    ("how", "ending", "requeues", "action"),
    [
        ("runs", None, True, "requeue"),
        ("runs, preempted", None, True, "requeue"),
        ("node lost", "node lost", True, "restarts"),
        ("node lost, --no-requeue", "node lost", False, "successor"),
        ("preempted, PreemptMode=REQUEUE", "preempted: the grace time was over", True, "restarts"),
        ("preempted, PreemptMode=CANCEL", "preempted: the grace time was over", False, "successor"),
        ("scontrol requeue", "queued again by Slurm", True, "restarts"),
        ("time limit", "time limit", False, "successor"),
        ("scancel", "cancelled (scancel)", False, "leave"),
    ],
)
@pytest.mark.parametrize("restarts", [0, 2])
def test_what_slurm_does_with_the_job_is_told_apart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    ending: str | None,
    requeues: bool,
    action: str,
    restarts: int,
) -> None:
    """By what a real Slurm said, with every node up again."""
    run, _ = make_run(tmp_path, FINISHES)
    attempt = 1 + restarts
    in_job(monkeypatch, tmp_path, fake_slurm.show_job(how, restarts), restarts)
    error(run, attempt)
    metrics(run, 1, 2)
    rundir.write_atomic(run.slurm / "7_0_log.err", f"{jobs.header(attempt)}\n{fake_slurm.ENDINGS[how][-1]}")
    facts = batch.gather(run, attempt, "7", 143)
    assert (facts.ending, facts.slurm_requeues) == (ending, requeues)
    assert facts.preempted == (how in ("runs, preempted", "preempted, PreemptMode=CANCEL"))
    assert decide(dataclasses.replace(facts, max_requeues=1)).action == action


def test_a_job_that_is_queued_again_needs_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Slurm wrote of an earlier attempt names nothing, and the verdict does not hang on it."""
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job("node lost", 1), restarts=1)
    earlier = f"{jobs.header(1)}\n{fake_slurm.ENDINGS['node lost'][-1]}{jobs.header(2)}\n"
    rundir.write_atomic(run.slurm / "7_0_log.err", earlier)
    assert decide(batch.gather(run, 2, "7", 143)).why == "queued again by Slurm; not saved, at step 0; restarts"
    (run.slurm / "7_0_log.err").unlink()
    assert decide(batch.gather(run, 2, "7", 143)).action == "restarts"


def test_a_job_that_runs_again_elsewhere_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of the batch script was cut off: Slurm has started the job anew when the old script's turn comes."""
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job("runs", 1))
    rundir.mark(run.requeue, 1, step=3, reason="SIGTERM")
    assert batch.after(run, 143) == 143
    assert "requeue" not in fake_slurm.called(tmp_path)
    assert rundir.read_lines(run.attempts)[0]["requeued"]


@pytest.mark.parametrize(("how", "goes_on"), [("node lost", True), ("unknown", True), ("scancel", False)])
def test_a_job_that_comes_again_goes_on_unless_it_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, goes_on: bool
) -> None:
    """After the verdict on its first attempt. A cancelled one comes again by `scontrol requeue` alone."""
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, "exit 0" if how == "unknown" else fake_slurm.show_job(how))
    rundir.record_job(run, 1, job_id="7", launcher="slurm", token="t1")
    assert batch.before(run) == 0
    assert batch.after(run, 143) == 143
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    if goes_on:
        assert batch.before(run) == 0
    else:
        with pytest.raises(SystemExit):
            batch.before(run)


def test_a_cancel_meets_a_crash_and_stays_a_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    rundir.mark(run.stop, 1)
    error(run, 1)
    metrics(run, 1, 2)
    assert batch.after(run, 1) == 1
    assert "requeue" not in fake_slurm.called(tmp_path)
    assert rundir.read_lines(run.attempts)[0]["why"] == "cancelled; not saved, at step 2"


def test_a_saved_run_goes_on_though_nothing_else_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    rundir.mark(run.requeue, 1, step=3, reason="SIGUSR2")
    monkeypatch.setattr(batch, "KILLED_S", 0)
    text = run.spec_yaml.read_text()
    run.spec_yaml.write_text("torn: [")
    assert decide(batch.gather(run, 1, "7", 1)).action == "requeue"
    run.spec_yaml.write_text(text)


def test_a_saved_run_goes_on_though_its_papers_cannot_be_read_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    rundir.mark(run.requeue, 1, step=3, reason="SIGUSR2")
    run.submit_json.write_text("{")
    monkeypatch.setattr(batch, "KILLED_S", 0)
    batch.after(run, 1)
    assert "scontrol requeue 7" in fake_slurm.called(tmp_path)


def test_a_cancel_on_the_way_to_a_requeue_is_found_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job(), restarts=1)
    rundir.record_job(run, 1, job_id="7", launcher="slurm", token="t1")
    rundir.record_attempt(run, 1, job_id="7", end=1.0, ended="stopped", why="saved at step 3; restarts", requeued=True)
    rundir.mark(run.stop, 1)
    with pytest.raises(SystemExit):
        batch.before(run)
    row = rundir.read_lines(run.attempts)[0]
    assert (row["requeued"], row["why"]) == (False, "saved at step 3; restarts; cancelled before it did")


def test_attempts_that_gain_nothing_are_counted(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    for attempt, reached in ((1, 3), (2, 5), (3, 5), (4, 4)):
        rundir.record_attempt(run, attempt, reached=reached)
    metrics(run, 1, 2, 3, 4)
    assert [batch.idle_attempts(run, number) for number in (2, 3, 4, 5)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("token", "job_id", "last", "said"),
    [
        ("t2", "8", {}, "is not the newest"),  # an old job that somebody requeued
        ("t1", "9", {}, "is not the newest"),
        ("t1", "7", {"ended": "failed", "crash": True, "requeued": False, "why": "it fell"}, "was the last: it fell"),
        ("t1", "7", {"ended": "cancelled", "why": "cancelled"}, "was the last: cancelled"),
    ],
)
def test_a_stray_job_ends_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str,
    job_id: str,
    last: dict[str, Any],
    said: str,
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job(), restarts=1)
    rundir.record_job(run, 1, job_id=job_id, launcher="slurm", token=token)
    rundir.record_attempt(run, 1, job_id="7", **last)
    with pytest.raises(SystemExit):
        batch.before(run)
    assert said in capsys.readouterr().out
    assert not (tmp_path / "called").exists()


def test_facts_come_from_this_attempt_and_this_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    rundir.record_job(run, 1, job_id="6", launcher="slurm")
    rundir.record_job(run, 3, job_id="7", launcher="slurm", first=3)
    rundir.record_attempt(run, 1, crash=True, reached=2)
    rundir.record_attempt(run, 3, crash=True, reached=5)
    rundir.record_attempt(run, 4, crash=False, reached=8)
    rundir.mark(run.requeue, 4, step=8, reason="SIGUSR2")  # stale: of the attempt before
    metrics(run, 1, 2, 9)
    error(run, 5)
    facts = batch.gather(run, 5, "7", 1)
    assert (facts.saved_step, facts.crashes, facts.last_crash_step, facts.reached) == (None, 1, 5, 9)
    assert (facts.cause, facts.retry) == ("rank 1: ValueError: the cause", True)


def test_a_saved_run_is_requeued_once_and_its_marker_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    monkeypatch.setattr(batch, "KILLED_S", 0)
    rundir.mark(run.requeue, 1, step=3, reason="SIGUSR2")
    batch.after(run, 143)
    assert "scontrol requeue 7" in fake_slurm.called(tmp_path)
    assert not run.requeue.exists()
    row = rundir.read_lines(run.attempts)[0]
    assert (row["ended"], row["requeued"], row["why"]) == ("stopped", True, "saved at step 3 on SIGUSR2; restarts")


REFUSES = f"""
[ "$1" = requeue ] && echo "Requested operation is presently disabled" >&2 && exit 1
{fake_slurm.show_job()}
"""


def test_where_requeue_is_refused_a_successor_waits_for_this_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, REFUSES)
    attempt = rundir.claim_attempt(run)
    rundir.record_job(run, attempt, job_id="7", launcher="slurm", first=1, lane=None, host="h", time=0.0, token="t1")
    rundir.mark(run.requeue, 1, step=3, reason="SIGUSR2")
    assert batch.after(run, 0) == 0
    assert [(job["job_id"], job["attempt"], job["first"]) for job in rundir.jobs(run)] == [("7", 1, 1), ("8", 2, 1)]
    script = (run.slurm / "8_submission.sh").read_text()
    assert "#SBATCH --dependency=singleton" in script
    assert "#SBATCH --job-name=fake" in script
    assert "export PITHTRAIN_ATTEMPT=2" in script


def test_case_021_no_scontrol_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, "")
    for name in ("scontrol", "sbatch", "squeue"):
        (tmp_path / "bin" / name).unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    rundir.claim_attempt(run)
    rundir.mark(run.requeue, 1, step=3, reason="SIGUSR2")
    assert batch.after(run, 0) == 1
    row = rundir.read_lines(run.attempts)[0]
    assert (row["requeued"], row["why"]) == (False, "unknown; saved at step 3")
    assert jobs.state(run, {}).word == "stopped"


def test_before_makes_the_job_known_and_looks_at_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 19 of the service's matrix: the submitting command died after sbatch, before it wrote anything down."""
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    rundir.record_job(run, 1, job_id=None, launcher="slurm", token="t1")
    assert batch.before(run) == 0
    assert rundir.jobs(run)[0]["job_id"] == "7"
    assert (run.slurm / "7_submitted.pkl").exists()
    assert "pithtrain.batch node" in fake_slurm.called(tmp_path)
    assert rundir.read_lines(run.attempts)[0]["nodes"] == "n[0-1]"


def test_an_attempt_that_could_not_speak_is_closed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job(), restarts=1)
    rundir.record_job(run, 1, job_id="7", launcher="slurm", token="t1")
    rundir.record_attempt(run, 1, job_id="7", start=1.0, end=None, ended=None)
    metrics(run, 1, 2)
    assert batch.before(run) == 0
    first, second = rundir.read_lines(run.attempts)
    assert first["why"].startswith("its job was killed")
    assert (first["ended"], first["requeued"], first["reached"]) == ("killed", True, 2)
    assert (second["attempt"], second["end"]) == (2, None)


def test_a_bad_node_is_named_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    rundir.record_job(run, 1, job_id="7", launcher="slurm", token="t1")
    run.errors(1).mkdir(parents=True)
    monkeypatch.setattr(batch, "node_problems", lambda run, spec: ["3 of 4 GPUs answer"])
    assert batch.node(run, 0.0) == 1
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 1\n")
    assert batch.before(run) == 1
    assert batch.after(run, 1) == 1
    assert "node n1: " in capsys.readouterr().err
    why = rundir.read_lines(run.attempts)[0]["why"]
    assert why.startswith("node n1: ")
    assert f"pithtrain resume {run.path} --exclude n1" in why


def test_no_room_for_one_checkpoint_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    rundir.record_job(run, 1, job_id="7", launcher="slurm", token="t1")
    rundir.write_atomic(run.plan_json, json.dumps({"checkpoint_bytes": 10**16}))
    assert batch.before(run) == 1
    assert batch.after(run, 1) == 1
    assert "srun" not in fake_slurm.called(tmp_path)
    assert rundir.read_lines(run.attempts)[0]["why"].startswith("No space left on device: ")


def test_a_look_that_fails_without_a_word_is_taken_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    in_job(monkeypatch, tmp_path, fake_slurm.show_job())
    rundir.record_job(run, 1, job_id="7", launcher="slurm", token="t1")
    (tmp_path / "bin" / "srun").write_text(
        f"#!/bin/bash\n[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 1; }}\n"
    )
    assert batch.before(run) == 0


GPUS = 'for i in 0 1 2; do echo "GPU $i: NVIDIA H100 (UUID: GPU-$i)"; done'


def test_devices_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, spec = make_run(tmp_path, FINISHES, ranks=4)
    cuda = spec.model_copy(update={"training": spec.training.model_copy(update={"device": "cuda"})})
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/bash\n{GPUS}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    assert batch.node_problems(run, cuda) == ["3 of 4 GPUs answer"]
    assert batch.node_problems(run, spec) == []
    smi.write_text("#!/bin/bash\nsleep 100\n")
    monkeypatch.setattr(batch, "DEVICE_TIMEOUT_S", 0.2)
    assert "a GPU hangs" in batch.node_problems(run, cuda)[0]


def test_nothing_that_others_can_write_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    rundir.require_own(run)
    run.slurm.chmod(0o777)
    with pytest.raises(RunDirError, match=r"chmod go-w"):
        rundir.require_own(run)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(RunDirError, match="folders that are yours"):
        rundir.require_own(run)


def test_a_verdict_is_frozen() -> None:
    assert decide(Facts(0, done_step=3)) == Verdict("leave", "done", "finished at step 3", 0)
