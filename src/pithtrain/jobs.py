"""What became of a run: its state, read from the run directory and the process or job behind it, and how to end it.

Every answer comes from files first, so it is the same after the job has left Slurm's memory; the launcher is asked only
what files cannot tell, whether something still runs. In the order they are believed:

    DONE of this attempt                 done
    an error file of this attempt        failed
    process or job alive                 running, or Slurm's own word (pending)
    STOP or REQUEUE with a step          stopped: the state is saved, resume it
    nothing of these                     lost: killed from outside; resume goes on from the last checkpoint
"""

import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pithtrain import rundir
from pithtrain.errors import RunDirError
from pithtrain.rundir import RunDir

POLL_S = 0.5
SLURM_POLL_S = 5.0  # one squeue each: the controller serves everyone
TAIL_BYTES = 64 * 1024  # holds the last line of any metrics.jsonl


@dataclasses.dataclass(frozen=True)
class State:
    """One run at one moment; None where nothing is known yet."""

    name: str
    word: str
    attempt: int
    job_id: str | None
    launcher: str | None
    alive: bool
    step: int | None
    max_steps: int
    loss: float | None
    tokens_per_second: float | None


def state(run: RunDir) -> State:
    """The run's state now. Asks squeue for a Slurm job, the process table for a local one."""
    job = rundir.last_job(run) or {}
    attempt = max(job.get("attempt", 0), (rundir.last_attempt(run) or {}).get("attempt", 0))
    running = alive(run, job) if job else None
    row = (rundir.read_lines_from(run.metrics, -TAIL_BYTES)[0] or [{}])[-1]
    spec = yaml.safe_load(run.spec_yaml.read_text(encoding="utf-8"))
    return State(
        name=run.name,
        word=_word(run, attempt, running),
        attempt=attempt,
        job_id=job.get("job_id"),
        launcher=job.get("launcher"),
        alive=running is not None,
        step=row.get("step"),
        max_steps=spec["training"]["max_steps"],
        loss=row.get("loss"),
        tokens_per_second=row.get("tokens_per_second"),
    )


def _word(run: RunDir, attempt: int, running: str | None) -> str:
    def stamp(marker: Path) -> dict[str, Any]:
        fields = rundir.read_json(marker) or {}
        return fields if fields.get("attempt") == attempt else {}

    if attempt == 0:
        return "not started"
    if stamp(run.done):
        return "done"
    if rundir.first_error(run, attempt) is not None:
        return "failed"
    if running is not None:
        return running
    return "stopped" if "step" in stamp(run.stop) or "step" in stamp(run.requeue) else "lost"


def alive(run: RunDir, job: Mapping[str, Any]) -> str | None:
    """`running`, Slurm's state in lower case, or None where the job has ended.

    The process of another host cannot be seen from here: it counts as running until its attempt has an end. So does one
    that trains in the foreground, since what called it may live on.
    """
    if job["launcher"] == "slurm":
        return _slurm_state(job["job_id"])
    last = rundir.last_attempt(run) or {}
    if last.get("attempt") == job["attempt"] and last.get("end") and job["launcher"] == "train":
        return None
    if job["host"] != socket.gethostname():
        return None if last.get("end") else "running"
    started = process_start(int(job["job_id"]))
    # the record was written just after the process began: one that began later only has the same number
    return "running" if started is not None and started < job["time"] + 5 else None


def _slurm_state(job_id: str) -> str | None:
    """Raises RunDirError where the controller does not answer: an unknown state must not be taken for an end."""
    for wait_s in (1, 3, 9):
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            return asked.stdout.strip().split("\n")[0].lower() or None
        if "invalid job id" in asked.stderr.lower():  # it ended, and Slurm has forgotten it
            return None
        time.sleep(wait_s)
    raise RunDirError(f"Slurm does not answer: {asked.stderr.strip()}")  # pyright: ignore[reportPossiblyUnbound]


def process_start(pid: int) -> float | None:
    """When process `pid` began (Unix time; 0 where the system does not tell), None where there is none but a zombie."""
    try:
        # the name, in parentheses, may itself hold spaces and parentheses
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return 0.0
    if fields[0] in "ZX":
        return None
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def wait(run: RunDir, report: Callable[[dict[str, Any]], None] = lambda row: None) -> State:
    """Wait until the run has ended and its processes are gone; `report` gets each new line of metrics.jsonl."""
    seen = position = 0
    while True:
        now = state(run)
        rows, position = rundir.read_lines_from(run.metrics, position)
        for row in rows:
            if row["step"] > seen:
                seen = row["step"]
                report(row)
        if not now.alive:
            return state(run)
        time.sleep(SLURM_POLL_S if now.launcher == "slurm" else POLL_S)


def refuse_if_live(run: RunDir) -> None:
    """Raises RunDirError while something trains in this run directory."""
    now = state(run)
    if now.alive:
        raise RunDirError(
            f"{run.name} is {now.word} (attempt {now.attempt}, {now.launcher} {now.job_id})\n"
            f"  stop it first:  pithtrain cancel {run.path}"
        )


def cancel(run: RunDir) -> str:
    """Ask the run to save at its next step and stop; returns what was done, in words.

    The STOP marker reaches a run on any host within a second or so; the signal, where there is a way to send it, at
    once. A job that has not begun is taken out of the queue.
    """
    now, job = state(run), rundir.last_job(run)
    if not now.alive or job is None:
        return f"{run.name} does not run: it is {now.word}"
    if now.word == "pending":
        _scancel(job["job_id"])
        return f"{run.name} was waiting in the queue; job {job['job_id']} is cancelled"
    rundir.mark(run.stop, now.attempt)
    if job["launcher"] == "slurm":
        _scancel("--signal=USR2", job["job_id"])
    elif job["host"] == socket.gethostname():
        os.kill(int(job["job_id"]), signal.SIGTERM)
    return f"{run.name} saves at its next step and stops"


def _scancel(*arguments: str) -> None:
    done = subprocess.run(["scancel", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunDirError(f"scancel: {done.stderr.strip()}")
