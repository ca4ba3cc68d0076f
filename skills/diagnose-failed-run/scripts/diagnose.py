#!/usr/bin/env python3
"""What became of a run, its first cause, the next command, from its directory alone. The last line is PASS or FAIL."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

LATE_S = 60.0  # beyond its limit a phase is ended by its own rank; a minute later nothing is left that could
LONGEST = 160  # characters of the cause in the last line

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skill import end, use_environment  # noqa: E402

use_environment()

from pithtrain import jobs, rundir  # noqa: E402
from pithtrain.errors import SlurmError  # noqa: E402
from pithtrain.rundir import RunDir  # noqa: E402
from pithtrain.spec import load  # noqa: E402
from pithtrain.watch import LIMITS  # noqa: E402


def look(run: RunDir) -> jobs.State:
    """The run's state. Where Slurm cannot be asked, a fresh heartbeat says that it runs."""
    try:
        return jobs.state(run)
    except SlurmError as error:
        print(f"Slurm cannot be asked: {str(error).splitlines()[0]}")
        now, last = jobs.state(run, {}), rundir.last_attempt(run)
        beats = rundir.read_json(run.heartbeat).get("attempt") == now.attempt
        if last.get("end") is None and beats and silent(run) is None:
            return dataclasses.replace(now, word="running", alive=True, why=None)
        return now


def silent(run: RunDir) -> str | None:
    """How long the newest heartbeat is overdue, in words; None where it is not."""
    beat = rundir.read_json(run.heartbeat)
    if not beat:
        return None
    limits = load(run.spec_yaml).distributed
    age, most = time.time() - beat["time"], getattr(limits, LIMITS.get(beat["phase"], "step_timeout_s"))
    return f"silent for {age:.0f} s in {beat['phase']}, where {most} s are the limit" if age > most + LATE_S else None


def attempts(run: RunDir) -> list[dict[str, Any]]:
    rows = rundir.read_lines(run.attempts)
    for row in rows:
        took = f"{row['end'] - row['start']:.0f} s" if row.get("end") and row.get("start") else "no end"
        steps = f"steps {row['first_step']}-{row['last_step']}" if row.get("first_step") else "no step"
        ended = f"{row.get('ended') or 'not ended'}{', requeued' if row.get('requeued') else ''}"
        line = f"  {row['attempt']}  on {row.get('nodes') or row.get('host') or 'no node'}, {took}, {steps}, {ended}"
        print(f"{line}: {row['why']}" if row.get("why") else line)
    return rows


def next_command(run: RunDir, now: jobs.State, error: dict[str, Any] | None) -> str:
    resume = f"pithtrain resume {run.path}"
    if now.alive:
        return resume if now.word == "held" else f"pithtrain status {run.path} --watch"
    if now.word == "done":
        return f"{resume} --set training.max_steps={2 * (now.max_steps or 1)}"
    if error is not None:
        if any(words in error["message"] for words in ("GiB left", "cannot be written", "No space left")):
            return f"df -h {run.path}; make room, then {resume}"
        if error["rank"] is None or error["type"] == "Stalled":  # a node that cannot work, a rank that hung there
            return f"{resume} --exclude {error['host']}"
        if error["type"] == "NotFiniteError":
            return f"{resume} --set optimizer.lr={load(run.spec_yaml).optimizer.lr / 2:g}"
        if error["type"] == "LossStoodOut":
            return f"{resume} --set guards.loss_spike_sigma={2 * (load(run.spec_yaml).guards.loss_spike_sigma or 6):g}"
        if error["exit_code"] in (2, 3):
            return f"{resume} --set A.B=C, with what the cause asks for"
        if not error.get("retry", True) or now.attempt > 1:
            return f"pithtrain logs {run.path} --err"
    return resume


def main() -> None:
    if len(sys.argv) != 2:
        end("FAIL", f"usage: {sys.argv[0]} RUN_DIRECTORY")
    run = RunDir(Path(sys.argv[1]).absolute())
    if not run.spec_yaml.exists():
        end("FAIL", f"{run.path} is not a run directory: it has no spec.yaml")
    now = look(run)
    error = rundir.first_error(run, now.attempt) if now.word == "failed" else None
    if error is not None and error["secondary"]:  # what another rank's death did to this one tells nothing
        error = None
    at = f"step {now.step or 0} of {now.max_steps}, attempt {now.attempt}"
    saved = "no checkpoint" if now.checkpoint is None else f"newest checkpoint: step {now.checkpoint}"
    print(f"run       {run.path}\nstate     {now.word} at {at}; {saved}")
    if now.word in ("failed", "lost", "cancelled", "damaged"):
        job = rundir.last_job(run).get("job_id")
        found = jobs.cause(run, now.attempt, step_log=run.slurm / f"{job}_0_log.err")
        print(f"cause     {now.why}")
        if error is not None:
            print(f"where     {error['host']}, {error['type']}")
        print(f"log       {found.log if found.log.exists() else 'none'}")
    print("attempts")
    attempts(run)
    print(f"next      {next_command(run, now, error)}")
    overdue = silent(run) if now.word == "running" else None
    if overdue is not None:
        end("FAIL", f"running, and {overdue}: `pithtrain stacks {run.path}`, then `pithtrain cancel {run.path} --now`")
    saved_last = now.checkpoint is not None and now.checkpoint >= (now.step or 0)
    if now.alive or now.word in ("done", "stopped") or (now.word == "cancelled" and saved_last):
        end("PASS", f"{now.word} at {at}")
    end("FAIL", f"{now.word} at {at}: {(now.why or 'no word of why').splitlines()[0][:LONGEST]}")


if __name__ == "__main__":
    main()
