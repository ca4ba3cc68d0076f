"""What became of a run: its state, from the run directory and the job behind it, its first cause, and how to end it.

Answers come from files first, so they are the same after the job has left Slurm's memory; Slurm is asked once for all
runs (one `squeue`), and only for what files cannot tell: whether something still runs or waits. In the order of belief:

    the job waits or runs                pending, running, or what its last heartbeat says
    DONE of this attempt                 done
    STOP, or Slurm's own word            cancelled
    an error file, or a crash            failed
    STOP or REQUEUE with a step          stopped: the state is saved, resume it
    nothing of these                     lost: killed from outside; resume goes on from the last checkpoint

A Slurm job is known by its id and, until someone has written that down, by the token in its comment: a submission that
died between sbatch and bookkeeping is found here and adopted.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pithtrain import flight, rundir, slurm
from pithtrain.errors import PithtrainError, RunDirError, RunFailed, SlurmError, me
from pithtrain.rundir import RunDir
from pithtrain.watch import lives, process_start

POLL_S = 0.5
SLURM_POLL_S = 5.0  # one squeue each: the controller serves everyone
FRESH_S = 60.0  # a heartbeat younger than this is one of a living run
SILENT_S = 3600.0  # a run of another host that has not moved for so long may be gone with it

Queue = Mapping[str, slurm.Job]


@dataclasses.dataclass(frozen=True)
class State:
    """One run at one moment; None where nothing is known (yet). `why` is one line: a cause, or what it waits for. Times
    are seconds: `step_age_s` since the last finished step, `time_left_s` of the job's time limit."""

    name: str
    word: str
    attempt: int = 0
    job_id: str | None = None
    launcher: str | None = None
    alive: bool = False
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    nodes: str | None = None
    step_age_s: float | None = None
    time_left_s: float | None = None
    checkpoint: int | None = None
    why: str | None = None
    wandb: str | None = None


# ---- state -----------------------------------------------------------------------------------------------------------


def states(found: Sequence[RunDir]) -> list[State]:
    """The state of each run. One that cannot be read, or whose launcher does not answer, says so in its own line."""
    queue: Queue | None = None
    problem = ""
    out: list[State] = []
    for run in found:
        try:
            if queue is None and not problem and rundir.last_job(run).get("launcher") == "slurm":
                try:
                    queue = slurm.queue()
                except SlurmError as error:
                    problem = str(error).splitlines()[0]
            out.append(state(run, queue or {}, problem))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RunDirError) as error:
            out.append(State(run.name, "damaged", why=f"{type(error).__name__}: {' '.join(str(error).split())}"))
    return out


def state(run: RunDir, queue: Queue | None = None, unknown: str = "") -> State:
    """The run's state now. `queue`: what squeue said, asked here where it is None (raises SlurmError when it does not
    answer); `unknown`: why Slurm cannot be asked, for a listing that goes on without it."""
    job = rundir.last_job(run)
    if job.get("launcher") == "slurm" and queue is None:
        queue = slurm.queue()
    known = _find_job(run, job, queue or {})
    last = rundir.last_attempt(run)
    attempt = max(job.get("attempt", 0) + (known.restarts if known else 0), last.get("attempt", 0))
    if last.get("attempt") != attempt:
        last = {}
    row, beat = rundir.last_line(run.metrics), rundir.read_json(run.heartbeat)
    living, spec = _living(run, job, known, last, beat), _read_spec(run)
    alive = living is not None
    final = rundir.stamp(run.done, attempt) or (last.get("end") and last.get("requeued") is False)
    if not spec and not alive:
        word, why = "damaged", f"{run.spec_yaml} cannot be read"
    elif unknown and job.get("launcher") == "slurm" and not final:
        word, why = "unknown", unknown
    else:
        word, why = living or _ended(run, job, known, attempt, last)
    saved = rundir.numbers(run.checkpoints, r"step-(\d+)") if run.checkpoints.exists() else set[int]()
    beat_here = beat if beat.get("attempt") == attempt else {}
    return State(
        name=run.name,
        word=word,
        attempt=attempt,
        job_id=(known.job_id if known else None) or job.get("job_id"),
        launcher=job.get("launcher"),
        alive=alive,
        step=max(filter(None, (row.get("step"), beat_here.get("step"))), default=None),
        max_steps=spec["training"]["max_steps"] if spec else None,
        loss=row.get("loss"),
        tokens_per_second=row.get("tokens_per_second"),
        nodes=(known.nodes if known else None) or last.get("nodes"),
        step_age_s=time.time() - beat_here["time"] if alive and "time" in beat_here else None,
        time_left_s=known.time_left_s if known and alive else None,
        checkpoint=max(saved, default=None),
        why=why,
        wandb=wandb_address(run, spec["logging"]["wandb"]) if spec else None,
    )


def _read_spec(run: RunDir) -> dict[str, Any]:
    """The resolved spec as plain values; {} where it cannot be read, which must not hide what a run does."""
    try:
        spec = yaml.safe_load(run.spec_yaml.read_text(encoding="utf-8"))
        assert isinstance(spec["training"]["max_steps"], int)
        return {**spec, "ranks": spec["slurm"]["nodes"] * spec["slurm"]["gpus_per_node"]}
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AssertionError):
        return {}


def wandb_address(run: RunDir, options: Mapping[str, Any]) -> str | None:
    """Where the run is seen on W&B, from the spec's `logging.wandb`; None where it is disabled."""
    if options["mode"] == "disabled":
        return None
    if options["mode"] == "offline":
        return f"offline, in {run.path}/wandb"
    site = os.environ.get("WANDB_BASE_URL", "https://wandb.ai").rstrip("/")
    run_id = run.wandb_id.read_text(encoding="utf-8").strip()
    return f"{site}/{options['entity'] or '<your entity>'}/{options['project']}/runs/{run_id}"


def reached(run: RunDir) -> int:
    """The highest finished step that left a trace."""
    return max(one.get("step") or 0 for one in (rundir.last_line(run.metrics), rundir.read_json(run.heartbeat)))


def _find_job(run: RunDir, job: dict[str, Any], queue: Queue) -> slurm.Job | None:
    """Slurm's view of the run's newest job; an id that was never written down is written down now."""
    if job.get("launcher") != "slurm":
        return None
    # the comment is `pithtrain TOKEN step=...`; a number alone may come again, after Slurm has lost its state
    if job.get("job_id") is not None:
        known = queue.get(job["job_id"])
        ours = known and (job.get("token") in known.comment.split() or known.name in (run.name, job.get("lane")))
        return known if ours else None
    found = next((one for one in queue.values() if job["token"] in one.comment.split()), None)
    if found is not None:
        with contextlib.suppress(OSError):  # someone else's run is only read
            rundir.record_job(run, job["attempt"], job_id=found.job_id, adopted=time.time())
    return found


def _living(
    run: RunDir, job: dict[str, Any], known: slurm.Job | None, last: dict[str, Any], beat: dict[str, Any]
) -> tuple[str, str | None] | None:
    """The word for a run behind which something runs or waits to run, and what it waits for; None for any other."""
    phase = beat.get("phase", "step").replace("_", " ")
    running = "running", None if phase == "step" else phase
    # Slurm may be about to turn such an end into a new start: nobody has closed the attempt
    requeues = known is not None and known.state in ("PREEMPTED", "NODE_FAIL") and not last.get("end")
    if known is not None and (known.state not in slurm.ENDED or requeues):
        if known.state == "PENDING":
            return "held" if known.held else "pending", slurm.pending_in_words(known, time.time())
        if known.state in ("RUNNING", "SIGNALING"):
            return running
        return {"COMPLETING": "ending", "CONFIGURING": "starting"}.get(known.state, known.state.lower()), None
    if not job or job["launcher"] == "slurm":
        beats = time.time() - beat.get("time", 0) < FRESH_S and beat.get("attempt") == last.get("attempt")
        if job and known is None and beats and not last.get("end"):
            return "running", "its heart beats, and Slurm does not show its job to this user"
        return None
    here = job["host"] == socket.gethostname()
    if last.get("end") and (job["launcher"] == "train" or not here):
        return None  # what called a run in the foreground may live on
    if not here:
        age = time.time() - max(beat.get("time", 0), job["time"])
        quiet = f"on {job['host']}, silent for {age:.0f} s: if that host is gone, `resume --force`"
        return "running", quiet if age > SILENT_S else f"on {job['host']}"
    return running if any(local_pids(run, job)) else None


def well_ended(run: RunDir, attempt: int) -> str | None:
    """How an attempt came to an end of its own, as `batch.decide` words it; None where its markers tell of none."""
    done, stop, requeue = (rundir.stamp(marker, attempt) for marker in (run.done, run.stop, run.requeue))
    if done:
        return f"finished at step {done['step']}"
    if "step" in stop:
        return f"cancelled; {_kept(run, stop)}"
    return f"{_kept(run, requeue)} on {requeue.get('reason') or 'request'}" if "step" in requeue else None


def _kept(run: RunDir, marker: dict[str, Any]) -> str:
    return "nothing saved" if rundir.saves_nothing(run) else f"saved at step {marker['step']}"


def _ended(
    run: RunDir, job: dict[str, Any], known: slurm.Job | None, attempt: int, last: dict[str, Any]
) -> tuple[str, str | None]:
    """The word for a run behind which nothing lives, and one line that explains it."""
    done, stop, requeue = (rundir.stamp(marker, attempt) for marker in (run.done, run.stop, run.requeue))
    why = last.get("why")
    if attempt == 0:
        return "not started", "its submission did not come to its end" if job else None
    if done:
        return "done", why or well_ended(run, attempt)
    if "step" in stop:
        return "stopped", why or well_ended(run, attempt)
    theirs = known.state if known else None
    if theirs is None and job.get("launcher") == "slurm" and job.get("job_id") and not last.get("end"):
        theirs = slurm.accounting_state(job["job_id"])
    if stop or theirs == "CANCELLED" or last.get("ended") == "cancelled":
        return "cancelled", why or "cancelled before it could save: goes on from the last checkpoint"
    if last.get("ended") == "failed" or rundir.first_error(run, attempt) is not None:
        return "failed", why or cause(run, attempt).line
    if "step" in requeue:
        return "stopped", why or well_ended(run, attempt)
    if job.get("job_id") is None:
        return "not started", "its submission did not come to its end, and Slurm knows no such job"
    slurm_says = f"Slurm says {theirs.lower()}; " if theirs else ""
    return "lost", why or f"{slurm_says}killed from outside: resume goes on from the last checkpoint"


# ---- processes of this host ------------------------------------------------------------------------------------------


def local_pids(run: RunDir, job: Mapping[str, Any]) -> Iterator[int]:
    """The processes of the run's newest attempt that live on this host: the launcher, then the ranks."""
    if job["host"] != socket.gethostname():
        return
    started = process_start(int(job["job_id"])) if job.get("job_id") else None
    # the record was written just after the process began: one that began later only has the same number
    if started is not None and started < job["time"] + 5:
        yield int(job["job_id"])
    yield from rank_pids(run, job["attempt"])


def rank_pids(run: RunDir, attempt: int) -> Iterator[int]:
    """The ranks of an attempt that live on this host."""
    for path in sorted(run.logs(attempt).glob("rank-*.pid")):
        mine = rundir.read_json(path)
        if mine.get("host") == socket.gethostname() and lives(mine):
            yield mine["pid"]


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ---- causes ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why an attempt failed: one line, the log that tells more, its exit code, and whether it may pass by itself."""

    line: str
    log: Path
    exit_code: int = 1
    retry: bool = True


SRUN_SAYS = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)


def cause(run: RunDir, attempt: int, exit_codes: Sequence[int] = (), step_log: Path | None = None) -> Cause:
    """The first cause of a failed attempt. `exit_codes`: of the ranks, negative for a signal, where they are known;
    `step_log`: what srun wrote. An error file that is no other rank's lost connection is the cause. Else a rank died
    without a word: whoever saw its exit names it, or it is the one that wrote no error while the others did."""
    first = rundir.first_error(run, attempt)
    stalled = first is not None and first["type"] == "Stalled"
    lost = first is not None and (stalled or first["secondary"])
    waits = "".join(f"; {line}" for line in collectives(run, attempt)[:1]) if lost else ""
    if first is not None and not first["secondary"]:
        log = run.log(attempt, first["rank"]) if first["rank"] is not None else run.slurm
        return Cause(rundir.describe_error(first) + waits, log, first["exit_code"], first.get("retry", True))
    for rank, code in enumerate(exit_codes):
        if code < 0:
            return Cause(f"rank {rank} was killed by {_signal(signal.Signals(-code).name)}", run.log(attempt, rank))
    written = step_log.read_text(errors="replace") if step_log is not None and step_log.exists() else ""
    text = written.rpartition(header(attempt))[2]
    said = SRUN_SAYS.findall(text)
    killed = [(host, ranks, what) for host, ranks, what in said if not what.startswith("Exited")]
    silent = [rank for rank in range(_read_spec(run).get("ranks", 0)) if not run.error(attempt, rank).exists()]
    if killed and not stalled:  # after a stall srun kills the innocent too
        host, ranks, what = killed[0]
        how = _signal("SIGKILL") if what.startswith("Killed") else what
        return Cause(f"rank {ranks} on {host} was killed by {how}", run.log(attempt, int(re.split(r"[,-]", ranks)[0])))
    if first is not None and silent:
        what = "stopped answering" if stalled else "was killed"
        line = f"rank {silent[0]} {what}: the others lost their connection to it{waits}"
        return Cause(line, run.log(attempt, silent[0]))
    if first is not None:
        return Cause(rundir.describe_error(first) + waits, run.log(attempt, first["rank"]))
    if ours := re.findall(r"^error: (.+)$", text, re.MULTILINE):
        return Cause(ours[-1], run.slurm)  # of the batch script, before there were ranks
    if said:
        host, ranks, what = said[0]
        return Cause(f"rank {ranks} on {host}: {what}, without a word", run.slurm)
    return Cause("it ended without a word", run.logs(attempt))


def collectives(run: RunDir, attempt: int) -> list[str]:
    """What the ranks of a failed attempt waited for, a line per group."""
    paths = (run.collectives(attempt, rank) for rank in range(_read_spec(run).get("ranks", 0)))
    told = {rank: rundir.read_json(path).get("groups") for rank, path in enumerate(paths)}
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # a torn file must hide no cause
        return flight.lines({rank: groups for rank, groups in told.items() if groups})
    return []


def header(attempt: int) -> str:
    """The line with which an attempt begins in the output of its batch script, which all attempts of a job share."""
    return f"---- attempt {attempt} begins ----"


def _signal(name: str) -> str:
    return f"{name} (the kernel does that when memory runs out)" if name == "SIGKILL" else name


def failure(run: RunDir, attempt: int, exit_codes: Sequence[int] = ()) -> PithtrainError:
    """The first cause of a failed attempt as an error with its exit code."""
    job = rundir.last_job(run).get("job_id")
    found = cause(run, attempt, exit_codes, run.slurm / f"{job}_0_log.err")
    error = RunFailed(f"{found.line}\n  log:    {found.log}")
    error.exit_code = found.exit_code
    return error


# ---- waiting and ending ----------------------------------------------------------------------------------------------


def _patient_state(run: RunDir) -> State:
    """`state`, for who stays: a controller that is away for minutes ends no waiting."""
    while True:
        try:
            return state(run)
        except SlurmError as error:
            print(f"still waiting: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            time.sleep(SLURM_POLL_S)


def wait(run: RunDir, report: Callable[[dict[str, Any]], None] = lambda row: None) -> State:
    """Wait until the run has ended and its processes are gone; `report` gets each new line of metrics.jsonl."""
    seen = position = 0
    while True:
        now = _patient_state(run)
        rows, position = rundir.read_lines_from(run.metrics, position)
        for row in rows:
            if row["step"] > seen:
                seen = row["step"]
                report(row)
        if not now.alive:
            return now
        time.sleep(SLURM_POLL_S if now.launcher == "slurm" else POLL_S)


def follow(run: RunDir, rank: int, attempt: int | None) -> Iterator[str]:
    """The text of a rank's log as it grows, attempt after attempt (or of the given one), until the run has ended."""
    number, position, asked = attempt or max(1, rundir.last_attempt(run).get("attempt", 1)), 0, 0.0
    while True:
        ended = False
        if time.monotonic() - asked > SLURM_POLL_S:
            ended, asked = not _patient_state(run).alive, time.monotonic()
        path = run.log(number, rank)
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
            if text:
                yield text
                continue
        if attempt is None and run.log(number + 1, rank).exists():
            number, position = number + 1, 0
        elif ended or (attempt is not None and rundir.last_attempt(run).get("attempt", 0) > attempt):
            return
        else:
            time.sleep(POLL_S)


def refuse_if_live(now: State, run: RunDir) -> None:
    """Raises RunDirError while something trains, or waits to train, in this run directory."""
    if now.alive:
        what = ", ".join(filter(None, [f"attempt {now.attempt}", f"{now.launcher} {now.job_id}", now.why]))
        raise RunDirError(f"{run.name} is {now.word} ({what})\n  stop it first:  {me()} cancel {run.path}")


def cancel(run: RunDir, at_once: bool = False) -> str:
    """Ask the run to save at its next step and stop, or end it `at_once`; returns what was done, in words. The STOP
    marker reaches a run on any host within a second or so, also one whose ranks are still starting; the signal, where
    there is a way to send it, at once. A job that has not begun is taken out of the queue. A run that is over is told
    of, and no error: who cancels wants a run that does not train, and may ask twice."""
    job, last = rundir.last_job(run), rundir.last_attempt(run)
    try:
        now = state(run)
    except SlurmError as silent:
        if last.get("end") or not last:
            raise
        rundir.mark(run.stop, last["attempt"])
        return f"{run.name} was asked by its marker to save and stop; {str(silent).splitlines()[0]}"
    if not now.alive:
        what = "is over" if now.attempt and now.word != "damaged" else "does not run"
        why = now.why or ""
        return f"{run.name} {what}: " + (why if why.startswith(now.word) else f"{now.word}, {why}".removesuffix(", "))
    saved = rundir.stamp(run.stop, now.attempt).get("step")
    if saved is not None and not at_once:
        return f"{run.name} has saved step {saved} and is ending"
    if saved is None:
        rundir.mark(run.stop, now.attempt)
    if job["launcher"] == "slurm":
        assert now.job_id is not None, "Slurm was asked just now"
        if now.word in ("pending", "held"):
            slurm.cancel(now.job_id)
            why = "cancelled while it waited in the queue"
            rundir.record_attempt(run, now.attempt, job_id=now.job_id, end=time.time(), ended="cancelled", why=why)
            return f"{run.name} was waiting in the queue; job {now.job_id} is cancelled"
        try:
            slurm.cancel(now.job_id, None if at_once else "USR2")
        except SlurmError as refused:
            return f"{run.name} was asked by its marker to save and stop; {refused}"
    elif job["host"] == socket.gethostname():
        _send(signal.SIGKILL if at_once else signal.SIGTERM, local_pids(run, job))
        if at_once:  # nobody is left who could
            why = f"cancelled; not saved, at step {reached(run)}"
            rundir.record_end(run, now.attempt, end=time.time(), ended="cancelled", why=why)
    elif at_once:
        raise RunDirError(f"{run.name} runs on {job['host']}: it saves and stops; to kill it, run this command there")
    if at_once:
        return f"{run.name} is ended without a save"
    if rundir.saves_nothing(run):
        return f"{run.name} stops at its next step; it saves nothing"
    return f"{run.name} saves at its next step and stops"


def _running(run: RunDir) -> State:
    """The state of a run whose ranks live. Raises RunDirError for any other."""
    now = state(run)
    if not now.alive or now.word in ("pending", "held"):
        raise RunDirError(f"{run.name} does not run: it is {now.word}")
    return now


def ask_to_save(run: RunDir) -> str:
    """Ask the run for a checkpoint at its next step."""
    now = _running(run)
    if rundir.saves_nothing(run):
        raise RunDirError(f"{run.name} saves nothing: moe.force_load_balance is true")
    rundir.mark(run.save, now.attempt)
    return f"{run.name} saves at its next step and goes on"


def dump_stacks(run: RunDir) -> str:
    """Make every rank write its stacks into its log; the run goes on."""
    now = _running(run)
    if not list(run.logs(now.attempt).glob("rank-*.pid")):  # the signal would end a process that has no handler yet
        raise RunDirError(f"the ranks of {run.name} are still starting: try again in a few seconds")
    host = rundir.last_job(run).get("host")
    if now.launcher == "slurm":
        assert now.job_id is not None, "Slurm was asked just now"
        slurm.cancel(now.job_id, "USR1")
    elif host == socket.gethostname():
        _send(signal.SIGUSR1, rank_pids(run, now.attempt))
    else:
        raise RunDirError(f"{run.name} runs on {host}: run this command there")
    return f"the stacks are in {run.logs(now.attempt)}/rank-*.log"
