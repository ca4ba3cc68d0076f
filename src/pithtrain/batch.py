"""What an sbatch script does around `srun`: a look at every node before it, and the decision what comes next after it.

    python -m pithtrain.batch before RUN       may this job train? each node is looked at by one task; exit 0: train
    srun ... one worker per GPU
    python -m pithtrain.batch after RUN RC     done, requeue, or give up; its exit code is the job's

Why the script decides and no rank does. The exit code of `srun` tells nothing of a cause (the first rank to end kills
the others, and 1, 9, 137 and 143 all stand for anything), Slurm never requeues a job that ends by itself in the grace
time of a preemption nor one at its time limit, and a rank that requeues its own job is killed by that. So the ranks
leave files, and `decide`, a pure function of what they say, is asked when all of them are gone:

    DONE                                 the run is done                                 exit 0
    STOP                                 `pithtrain cancel`, saved or not                exit 0 or RC
    Slurm takes the job back: scancel    leave                                           exit RC
      a lost node, or a preemption       Slurm requeues it (where it cancels, a successor)
      its time limit                     a successor, a new job
    attempts in a row without a step     give up: it would go on for ever                exit RC
    REQUEUE with a step                  saved: go on in the same job                    scontrol requeue
    preempted before it could save       go on from the last checkpoint                  scontrol requeue
    a crash                              requeue if the cause may pass, `slurm.max_requeues` is not used up and a step
                                         was gained since the crash before; else the job fails

Where a requeue is refused, too, the run submits its own successor, a job of the same name that waits for this one to
end (`--dependency=singleton`). This module needs no torch: it costs 0.2 s of a job's start and end.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal

from pithtrain import jobs, rundir, slurm, submit
from pithtrain.errors import PithtrainError, SlurmError
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, load
from pithtrain.watch import node_name
from pithtrain.worker import attempt_of

CLOCK_SKEW_S = 60.0  # a task may start this long after it was asked for; no clock may be further off
DEVICE_TIMEOUT_S = 30  # nvidia-smi answers in one or two; with a GPU that fell off the bus, never
NODE_TIMEOUT_S = 180  # a node that has not answered by then does not start a task
KILLED_S = 120  # how long a requeued job waits to be killed
LISTING_S = 30.0  # how long a network file system may show an old listing: another node's error file
NOTHING_TO_DO = 77  # the exit code of `before` for a job that is not the run's, or no longer; ranks end with 0 to 4
MAX_IDLE = 5  # attempts in a row that gained no step: preemptions may come that thick, a loop does for ever


# ---- before ----------------------------------------------------------------------------------------------------------


def before(run: RunDir) -> int:
    """Make the job known, see to what the last attempt left, look at each node. Returns 0 where training may start.
    Whatever else it returns, `after` is asked next, which ends the job at once where there is NOTHING_TO_DO."""
    attempt, job_id = attempt_of(os.environ), os.environ["SLURM_JOB_ID"]
    print(jobs.header(attempt), file=sys.stderr, flush=True)
    rundir.require_own(run)
    refuse_stray(run, attempt, job_id)
    rundir.keep_reserve(run)
    spec = load(run.spec_yaml)
    # whoever submitted may have died right after sbatch: the job makes itself known, and brings what submitit left out
    rundir.record_job(run, int(os.environ["PITHTRAIN_ATTEMPT"]), job_id=job_id)
    submit.write_pickle(run, job_id)
    for stale in run.slurm.glob("*.save_tmp"):  # submitit refuses to start over one
        stale.unlink()
    last = rundir.last_attempt(run)
    if last and last["attempt"] < attempt and last.get("job_id") == job_id and not last.get("requeued"):
        # not we: a node was lost, with the batch script or under it
        why = "its job was killed: the node was lost, or Slurm took it back before it could save"
        fields = {"ended": last.get("ended") or "killed", "why": why, "requeued": True, "reached": jobs.reached(run)}
        rundir.record_end(run, last["attempt"], **fields)
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    rundir.point_latest(run, attempt)
    run.errors(attempt).mkdir(parents=True, exist_ok=True)
    nodes = os.environ["SLURM_JOB_NODELIST"]
    rundir.record_attempt(run, attempt, launcher="slurm", job_id=job_id, nodes=nodes, start=time.time(), end=None)
    if idle_attempts(run, attempt) >= MAX_IDLE:
        return 1
    need = int(rundir.read_json(run.plan_json).get("checkpoint_bytes", 0))
    free = shutil.disk_usage(run.path).free
    if free < need:
        room = f"{free / 2**20:,.0f} MiB left, and one checkpoint takes {need / 2**20:,.0f}"
        message = f"No space left on device: {run.path} has {room}; make room, then:  pithtrain resume {run.path}"
        write_error(run, attempt, socket.gethostname(), message, retry=False)
        return 1
    problem = look_at_nodes(run, spec, nodes)
    if problem is not None and rundir.first_error(run, attempt) is None:
        problem = look_at_nodes(run, spec, nodes)  # a controller that is restarted, a slow node: once more
    if problem is None:
        return 0
    if rundir.first_error(run, attempt) is None:
        write_error(run, attempt, nodes, problem, retry=True)
    return 1


def refuse_stray(run: RunDir, attempt: int, job_id: str) -> None:
    """Raises SystemExit(NOTHING_TO_DO) where this job is not the run's, or has been decided. An old job that somebody
    requeued, or a site's rule about exit codes, must not train beside the newest one or against a verdict."""
    newest = rundir.last_job(run)
    if newest.get("token") != os.environ.get("PITHTRAIN_TOKEN") or newest.get("job_id") not in (None, job_id):
        print(f"job {job_id} is not the newest of {run.name}, which is {newest.get('job_id')}: nothing to do")
        raise SystemExit(NOTHING_TO_DO)
    last = rundir.last_attempt(run)
    mine = last.get("job_id") == job_id and last.get("attempt", 0) < attempt
    if mine and rundir.stamp(run.stop, last["attempt"]):  # cancelled while the requeue was on its way
        why = f"{last.get('why')}; cancelled before it did"
        rundir.record_attempt(run, last["attempt"], why=why, requeued=False)
        print(f"attempt {last['attempt']} was the last: {why}")
        raise SystemExit(NOTHING_TO_DO)
    if mine and (last.get("ended") in ("done", "cancelled") or last.get("crash")) and not last.get("requeued"):
        print(f"attempt {last['attempt']} was the last: {last['why']}\n  to go on:  pithtrain resume {run.path}")
        raise SystemExit(NOTHING_TO_DO)


def look_at_nodes(run: RunDir, spec: RunSpec, nodes: str) -> str | None:
    """Run `node` once on each node of this job; None, or what is wrong. The nodes write their own error files."""
    count = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    spread = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=30"]
    task = [sys.executable, "-m", "pithtrain.batch", "node", str(run.path), str(time.time())]
    command = ["srun", *spread, *spec.slurm.srun_args, *task]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NODE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"a node of {nodes} did not start a task within {NODE_TIMEOUT_S} s"
    except OSError as error:
        return f"srun cannot be called: {error}"
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no word from srun"]
    said = [line for line in lines if "error" in line.lower()] or lines
    return f"a node of {nodes} cannot start a task: {said[0].removeprefix('srun: error: ')}"


def node(run: RunDir, asked_at: float) -> int:
    """On each node: can a rank work here? Writes errors/attempt-N/node-HOST.json where it cannot."""
    host = node_name()
    skew = time.time() - asked_at
    if not -CLOCK_SKEW_S / 30 < skew < CLOCK_SKEW_S:
        print(f"warning: the clock of {host} is {skew:+.0f} s off that of the first node", flush=True)
    problems = node_problems(run, load(run.spec_yaml))
    if not problems:
        return 0
    message = f"node {host}: {'; '.join(problems)} (without it:  pithtrain resume {run.path} --exclude {host})"
    with contextlib.suppress(OSError):  # it may be just the folder that cannot be written
        write_error(run, attempt_of(os.environ), host, message, retry=False)
    print(f"srun: error: {message}", file=sys.stderr, flush=True)
    return 1


def write_error(run: RunDir, attempt: int, host: str, message: str, retry: bool) -> None:
    """An error file of a node, before there are ranks."""
    report = {"time": time.time(), "rank": None, "host": host, "type": "Preflight", "message": message}
    report |= {"secondary": False, "retry": retry, "exit_code": 1, "traceback": ""}
    rundir.record_error(run, attempt, f"node-{host}", report)


def node_problems(run: RunDir, spec: RunSpec) -> list[str]:
    """What keeps this host from training the run, in words."""
    import importlib.util

    found: list[str] = []
    if importlib.util.find_spec("torch") is None:
        found.append(f"{sys.executable} has no torch")
    try:
        probe = run.slurm / f".probe-{socket.gethostname()}-{os.getpid()}"
        probe.write_text("probe")
        probe.unlink()
    except OSError as error:
        found.append(f"{run.path} cannot be written to ({error.strerror})")
    smi = shutil.which("nvidia-smi")
    if spec.training.device == "cuda" and smi is None:
        found.append("there is no nvidia-smi: no driver is installed")
    # a binding of the site's own may show this one task less than all
    if spec.training.device != "cpu" and smi is not None and not any("gpu" in arg for arg in spec.slurm.srun_args):
        want = spec.slurm.gpus_per_node
        try:
            listed = subprocess.run([smi, "--list-gpus"], capture_output=True, text=True, timeout=DEVICE_TIMEOUT_S)
            have = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
            if have < want:
                said = (listed.stderr or listed.stdout).strip().splitlines()
                found.append(f"{have} of {want} GPUs answer{': ' + said[-1] if listed.returncode and said else ''}")
        except subprocess.TimeoutExpired:
            found.append(f"nvidia-smi gave no answer within {DEVICE_TIMEOUT_S} s: a GPU hangs")
    return found


# ---- after -----------------------------------------------------------------------------------------------------------

Ending = Literal[
    "cancelled (scancel)",
    "time limit",
    "node lost",
    "preempted: the grace time was over",
    "queued again by Slurm",  # for a reason that it does not tell, `scontrol requeue` among them
    "unknown",
]
# what Slurm writes into the batch script's log when it kills a job that it has queued again
KILLED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ DUE TO (NODE FAILURE|PREEMPTION)")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known when all ranks are gone. Steps are the highest finished ones; None: there was none. `cancelled`:
    `pithtrain cancel` asked for this end. `ending`: Slurm is already taking the job back, and has queued it again where
    `slurm_requeues`. `preempted`: Slurm says so. `retry`: the cause may pass by itself. `crashes`: crashes of this job
    before this one, `last_crash_step` how far the run was at the newest of them. `idle`: attempts in a row, this one
    included, that gained no step."""

    exit_code: int
    done_step: int | None = None
    cancelled: bool = False
    saved_step: int | None = None
    reason: str = ""
    ending: Ending | None = None
    slurm_requeues: bool = True
    preempted: bool = False
    cause: str = ""
    retry: bool = True
    reached: int = 0
    crashes: int = 0
    last_crash_step: int | None = None
    idle: int = 0
    max_requeues: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`action`: `restarts` is left to Slurm, `successor` is a new job. `ended`: the attempt's word; `why`: one line for
    people; `crash`: it counts against the budget."""

    action: Literal["leave", "restarts", "requeue", "successor"]
    ended: str
    why: str
    exit_code: int
    crash: bool = False


def decide(facts: Facts) -> Verdict:
    """What becomes of the job. Pure: the table at the top of this file, tested line by line."""
    if facts.done_step is not None:
        return Verdict("leave", "done", f"finished at step {facts.done_step}", 0)
    code = facts.exit_code or 1  # ranks that end well leave a marker
    saved = facts.saved_step is not None
    state = f"saved at step {facts.saved_step}" if saved else f"not saved, at step {facts.reached}"
    ended = "stopped" if saved else "killed"
    if facts.cancelled:
        return Verdict("leave", "stopped" if saved else "cancelled", f"cancelled; {state}", 0 if saved else code)
    if facts.ending == "cancelled (scancel)":
        return Verdict("leave", ended if saved else "cancelled", f"{facts.ending}; {state}", code)
    if facts.ending == "unknown":  # nobody is known to have cancelled it: should Slurm start the job again, it goes on
        return Verdict("leave", ended, f"{facts.ending}; {state}", code)
    if facts.idle >= MAX_IDLE:
        last = facts.ending or (f"stopped by {facts.reason}" if saved else facts.cause)
        why = f"{facts.idle} attempts in a row gained no step; the last: {last}"
        return Verdict("leave", "failed", why, code, crash=True)
    if facts.ending is not None:
        action = "restarts" if facts.slurm_requeues else "successor"
        return Verdict(action, ended, f"{facts.ending}; {state}; restarts", code)
    if saved:
        return Verdict("requeue", "stopped", f"{state} on {facts.reason}; restarts", 0)
    if facts.preempted:
        return Verdict("requeue", "killed", f"preempted; {state}; restarts from the last checkpoint", 0)
    if not facts.retry:
        return Verdict("leave", "failed", facts.cause, code, crash=True)
    if facts.crashes >= facts.max_requeues:
        why = f"{facts.cause}; no restart: slurm.max_requeues = {facts.max_requeues} is used up"
        return Verdict("leave", "failed", why, code, crash=True)
    if facts.reached <= (facts.last_crash_step or 0):
        gained = f"was gained since the crash at step {facts.last_crash_step}"
        since = "was made" if facts.last_crash_step is None else gained
        return Verdict("leave", "failed", f"{facts.cause}; no restart: no step {since}", code, crash=True)
    return Verdict("requeue", "failed", f"{facts.cause}; restarts from the last checkpoint", 0, crash=True)


def after(run: RunDir, exit_code: int) -> int:
    """Decide, write it down, act. Returns the exit code of the batch script; a requeued job does not return."""
    if exit_code == NOTHING_TO_DO:
        return 0
    attempt, job_id = attempt_of(os.environ), os.environ["SLURM_JOB_ID"]
    try:
        facts = gather(run, attempt, job_id, exit_code)
    except Exception:  # whatever is damaged: a saved run goes on
        traceback.print_exc()
        requeue = rundir.stamp(run.requeue, attempt)
        cause = "the end of this attempt could not be read; the batch script's log has the traceback"
        facts = Facts(
            exit_code, saved_step=requeue.get("step"), reason=str(requeue.get("reason")), cause=cause, retry=False
        )
    if rundir.stamp(run.stop, attempt):  # asked for while the facts were gathered
        facts = dataclasses.replace(facts, cancelled=True)
    verdict = decide(facts)
    row = {"end": time.time(), "ended": verdict.ended, "why": verdict.why, "exit_code": verdict.exit_code}
    row |= {"reached": facts.reached, "crash": verdict.crash, "requeued": verdict.action != "leave"}
    with contextlib.suppress(OSError):  # a full disk: the exit code and the log still tell
        rundir.record_end(run, attempt, **row)
    print(f"attempt {attempt}: {verdict.why}", flush=True)
    if verdict.action in ("leave", "restarts"):
        return verdict.exit_code
    with contextlib.suppress(OSError):
        run.requeue.unlink(missing_ok=True)
    if verdict.action == "successor":
        return submit_successor(run, attempt, facts.ending or "")
    try:
        slurm.requeue(job_id)
    except (SlurmError, OSError) as refused:
        about = ask_for_job(job_id, 15.0)  # it may have worked, and only the answer was lost
        if about.get("JobState", "RUNNING") == "RUNNING":
            return submit_successor(run, attempt, str(refused))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(KILLED_S)
    print("error: requeued, and not killed for it", file=sys.stderr)
    return 1


def submit_successor(run: RunDir, attempt: int, refusal: str) -> int:
    """Where this job cannot go on: submit one that starts when it has ended."""
    print(f"this job cannot be requeued ({refusal}); a successor is submitted", flush=True)
    mine = job_entry(run, os.environ["SLURM_JOB_ID"])
    try:
        lane = mine.get("lane") or run.name  # the name this job has: the successor waits for its end
        job = submit.submit(run, load(run.spec_yaml), "slurm", lane=lane, first=mine.get("first", attempt))
    except (PithtrainError, OSError) as error:
        why = f"it could not be started again ({refusal}; {error}); what is saved stays"
        with contextlib.suppress(OSError):
            rundir.record_attempt(run, attempt, why=why, requeued=False)
        print(f"error: {why}\n  go on:  pithtrain resume {run.path}", file=sys.stderr)
        return 1
    print(f"successor: job {job['job_id']}, attempt {job['attempt']}", flush=True)
    return 0


def gather(run: RunDir, attempt: int, job_id: str, exit_code: int) -> Facts:
    """The facts of an attempt whose ranks are gone. What cannot be read must not keep a saved run from going on."""
    stop, requeue = rundir.stamp(run.stop, attempt), rundir.stamp(run.requeue, attempt)
    about = ask_for_job(job_id, 120.0)
    preempted = about.get("PreemptTime", "None") not in ("None", "Unknown", "")
    log = run.slurm / f"{job_id}_0_log.err"
    text = log.read_text(errors="replace") if log.exists() else ""
    ending, slurm_requeues = how_it_ends(about, preempted, text.rpartition(jobs.header(attempt))[2])
    entry = job_entry(run, job_id)
    first = entry.get("first", entry.get("attempt", attempt))
    crashed = [row for row in rundir.read_lines(run.attempts) if first <= row["attempt"] < attempt and row.get("crash")]
    cause = find_cause(run, attempt, job_id, exit_code)
    try:
        max_requeues = load(run.spec_yaml).slurm.max_requeues
    except (PithtrainError, OSError):
        max_requeues = 0
    return Facts(
        exit_code=exit_code,
        done_step=rundir.stamp(run.done, attempt).get("step"),
        cancelled=bool(stop),
        saved_step=stop.get("step", requeue.get("step")),
        reason=requeue.get("reason") or "request",
        ending=ending,
        slurm_requeues=slurm_requeues,
        preempted=preempted,
        cause=cause.line,
        retry=cause.retry,
        reached=jobs.reached(run),
        crashes=len(crashed),
        last_crash_step=crashed[-1].get("reached") if crashed else None,
        idle=idle_attempts(run, attempt + 1),
        max_requeues=max_requeues,
    )


def how_it_ends(about: dict[str, str], preempted: bool, log: str) -> tuple[Ending | None, bool]:
    """Why Slurm is taking the job back, None where it is not, and whether it has queued it again. `log`: what this
    attempt's batch script wrote. The word for a job that is being killed, COMPLETING, hides the reason, and most of
    what told it may be gone by now: a lost node is up again, and a job that is queued again shows no PreemptTime,
    RunTime or Reason. Its count of restarts stays. Slurm raises it as it kills the job, above the count that this
    attempt began with, and not for a scancel. Where Slurm does not queue it again, the Reason stays instead."""
    if int(about.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        said = [*KILLED.findall(log), ""][0]  # words for people: the job goes on whatever the log says
        words: dict[str, Ending] = {"NODE FAILURE": "node lost", "PREEMPTION": "preempted: the grace time was over"}
        return words.get(said, "queued again by Slurm"), True
    state = about.get("JobState", "unknown")
    if state not in slurm.ENDED | {"COMPLETING", "unknown"}:
        return None, True
    if state == "unknown":
        return "unknown", False
    if preempted:
        return "preempted: the grace time was over", False
    reasons: dict[str, Ending] = {"NodeDown": "node lost", "TimeLimit": "time limit"}
    return reasons.get(about.get("Reason", ""), "cancelled (scancel)"), False


def ask_for_job(job_id: str, seconds: float) -> dict[str, str]:
    """What Slurm says of this job; a controller that is away is asked again for so long, then {}."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(SlurmError, OSError):
            return slurm.show_job(job_id)
        if time.monotonic() > deadline or shutil.which("scontrol") is None:
            return {}


def find_cause(run: RunDir, attempt: int, job_id: str, exit_code: int) -> jobs.Cause:
    """`jobs.cause`, after waiting for what another node wrote, where a network may show it late."""
    late = exit_code != 0 and slurm.file_system(run.path, slurm.mounts()) not in slurm.LOCAL_DISKS
    deadline = time.monotonic() + (LISTING_S if late else 0.0)
    while rundir.first_error(run, attempt) is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a change makes the listing of this host new
            (run.errors(attempt) / ".look").touch()
            (run.errors(attempt) / ".look").unlink(missing_ok=True)
        time.sleep(1.0)
    return jobs.cause(run, attempt, step_log=run.slurm / f"{job_id}_0_log.err")


def idle_attempts(run: RunDir, before_attempt: int) -> int:
    """How many attempts in a row, up to the one before `before_attempt`, gained no step over all before them."""
    best, idle = 0, 0
    for row in rundir.read_lines(run.attempts):
        if row["attempt"] < before_attempt:
            reached = row.get("reached")
            reached = jobs.reached(run) if reached is None else reached
            best, idle = max(best, reached), 0 if reached > best else idle + 1
    return idle


def job_entry(run: RunDir, job_id: str) -> dict[str, Any]:
    """What submit.json says of a job."""
    found = [job for job in rundir.jobs(run) if job.get("job_id") == job_id]
    return found[-1] if found else {}


def main(arguments: list[str]) -> int:
    os.umask(os.umask(0o022) | stat.S_IWGRP | stat.S_IWOTH)
    # signals are for the ranks: neither a grace time's end nor a request to stop may come between deciding and acting
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    what, run = arguments[0], RunDir(Path(arguments[1]))
    try:
        if what == "before":
            return before(run)
        if what == "node":
            return node(run, float(arguments[2]))
        return after(run, int(arguments[2]))
    except PithtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # `jobs.cause` finds it, if no file can be written
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
