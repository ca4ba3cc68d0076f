"""How a run starts: in the foreground, through submitit's local executor, or through submitit and Slurm.

submitit renders the sbatch script, calls sbatch and starts one Python entry per rank; its checkpoint and requeue
machinery stays unused (it acts on rank 0 alone, inside a signal handler). What runs is always the snapshot in the run
directory, and what is pickled is the name of a function and a path:

    spec --> create run/ --> a fresh process: cwd and PYTHONPATH = run/code, cleaned environment
                                 `python -m pithtrain.submit run/`  -->  executor.submit(worker.entry, "run/")

The fresh process, in a session of its own, makes three things true at once: the job sees nothing of an outer job's
variables, the pickle names the snapshot's module, and Ctrl-C or a closed terminal at the submitting side does not reach
a local run. It costs half a second.

`parameters` and `render` are pure functions of (spec, run directory, attempt): `--dry-run` prints the text that sbatch
would get, on a machine without Slurm too.
"""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pithtrain import rundir, worker
from pithtrain.errors import PithtrainError, Problem, RunFailed, SpecError, StoppedEarly
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, load

Launcher = Literal["slurm", "local"]

# Variables of an outer job or launcher: inherited, they would place a new run's ranks in the old run's world
OUTER_JOB = re.compile(
    r"(SLURM|SBATCH|SRUN|SALLOC|PMI|PMIX|OMPI|SUBMITIT|TORCHELASTIC|PITHTRAIN)_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
KEPT = ("SLURM_CONF",)  # says where the cluster is, not which job this is

UNLIMITED_MIN = 10 * 365 * 24 * 60  # submitit's local executor needs a limit
END_GRACE_S = 15.0  # from one rank's failure to SIGKILL; workers end by themselves within worker.GRACE_S + POLL_S
LAST_GRACE_S = 300.0  # from one rank's clean end to SIGKILL of the rest: rank 0 may still be uploading


# ---- Slurm and submitit ----------------------------------------------------------------------------------------------


def launcher() -> Launcher:
    """`slurm` where `sbatch` exists and a controller answers `sinfo`, else `local`."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        return "local"
    try:
        answer = subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "local"
    return "slurm" if answer.returncode == 0 else "local"


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables of any outer job or launcher."""
    return {name: value for name, value in env.items() if name in KEPT or not OUTER_JOB.fullmatch(name)}


def task_environment(run: RunDir, spec: RunSpec, attempt: int) -> dict[str, str]:
    """The environment of an attempt's processes on this host: ours cleaned, the spec's, the snapshot first."""
    env = clean_environment(os.environ) | spec.slurm.env
    paths = [str(run.code), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"PYTHONPATH": os.pathsep.join(paths), "PITHTRAIN_ATTEMPT": str(attempt)}


def parameters(spec: RunSpec, run: RunDir, attempt: int) -> dict[str, Any]:
    """The keyword arguments for submitit's SlurmExecutor. One task per GPU; on a CPU `gpus_per_node` tasks per node."""
    slurm = spec.slurm
    exports = {**slurm.env, "PITHTRAIN_ATTEMPT": str(attempt)}
    # srun has not inherited it since Slurm 22.05
    cpus = [] if slurm.cpus_per_task is None else [f"--cpus-per-task={slurm.cpus_per_task}"]
    wanted: dict[str, Any] = {
        "job_name": run.name,
        "time": slurm.time_minutes,
        "nodes": slurm.nodes,
        "ntasks_per_node": slurm.gpus_per_node,
        "gpus_per_node": slurm.gpus_per_node if spec.training.device != "cpu" else None,
        "cpus_per_task": slurm.cpus_per_task,
        "mem": slurm.mem,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "exclusive": slurm.exclusive or None,
        "signal_delay_s": slurm.signal_delay_s,
        "setup": [
            *slurm.setup,  # first: a module it loads must not come before the snapshot
            f"export PYTHONPATH={shlex.quote(str(run.code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        ],
        "srun_args": [
            "--kill-on-bad-exit=1",  # one rank's end ends the step ...
            "--wait=60",  # ... and so does a rank that is done while another is not, a minute later
            *cpus,
            *slurm.srun_args,
        ],
        "additional_parameters": {"chdir": str(run.code), **slurm.additional_parameters},
    }
    # submitit's own default is wckey=submitit, which sites with wckeys refuse
    return {name: value for name, value in wanted.items() if value is not None} | {"wckey": None}


def render(spec: RunSpec, run: RunDir, attempt: int = 1) -> str:
    """The sbatch script of an attempt, byte for byte what `submit` hands to sbatch."""
    from submitit.slurm import slurm

    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(run.slurm))}"
    make = slurm._make_sbatch_string  # pyright: ignore[reportPrivateUsage]  # its text is tested against the executor's
    return make(command=command, folder=run.slurm, **parameters(spec, run, attempt))


def check(spec: RunSpec, by: Launcher) -> None:
    """Raises SpecError for what cannot start this way; call it before a run directory is made."""
    if by == "local" and spec.slurm.nodes > 1:
        rule = "more than one node needs Slurm, and none answers on this machine"
        raise SpecError([Problem("slurm.nodes", spec.slurm.nodes, rule, "run where `sinfo` answers, or set it to 1")])


def submit(run: RunDir, spec: RunSpec, by: Launcher) -> dict[str, Any]:
    """Claim an attempt and start it; returns its record in submit.json (job_id, launcher, attempt, host, time).

    Raises RunFailed with sbatch's own words where it refuses.
    """
    check(spec, by)
    attempt = rundir.claim_attempt(run)
    env = task_environment(run, spec, attempt)
    if by == "local" and "CUDA_VISIBLE_DEVICES" in env:
        env[worker.GIVEN_DEVICES] = env["CUDA_VISIBLE_DEVICES"]
    output = run.slurm / f"submit-{attempt}.log"
    with output.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "pithtrain.submit", str(run.path), by, str(attempt)],
            cwd=run.code,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=False,
        )
    job = rundir.last_job(run)
    if done.returncode != 0 or job is None or job["attempt"] != attempt:
        said = "\n".join(dict.fromkeys(output.read_text().strip().splitlines()))  # submitit repeats what sbatch says
        raise RunFailed(f"could not submit {run.name}: {said or 'no output'}")
    return job


def submit_from_snapshot(run: RunDir, by: Launcher, attempt: int) -> None:
    """The half of `submit` that runs in the fresh process."""
    from submitit import LocalExecutor, SlurmExecutor
    from submitit.core.utils import FailedJobError

    spec = load(run.spec_yaml)
    if by == "slurm":
        executor = SlurmExecutor(folder=run.slurm)
        executor.update_parameters(**parameters(spec, run, attempt))
    else:
        executor = LocalExecutor(folder=run.slurm)
        executor.update_parameters(
            tasks_per_node=spec.world_size,
            timeout_min=spec.slurm.time_minutes or UNLIMITED_MIN,
            signal_delay_s=spec.slurm.signal_delay_s,
        )
    try:
        job = executor.submit(worker.entry, str(run.path))
    except FailedJobError as error:
        raise SystemExit(str(error)) from None
    host = socket.gethostname()
    record = {"job_id": job.job_id, "launcher": by, "attempt": attempt, "host": host, "time": time.time()}
    rundir.add_job(run, record)


# ---- in the foreground -----------------------------------------------------------------------------------------------


def foreground(run: RunDir, spec: RunSpec) -> None:
    """Start one process per rank on this host and stay until all have ended.

    Ctrl-C and SIGTERM ask the run to save and stop; a second Ctrl-C kills it. Raises RunFailed with the first cause and
    its exit code, StoppedEarly when the run saved its state before its last step.
    """
    check(spec, "local")
    attempt = claim_for_this_process(run)
    size = spec.world_size
    env = task_environment(run, spec, attempt) | {worker.PARENT: str(os.getpid())}
    # held back until there is a handler, here and in each worker, which inherits the mask: nobody dies unheard
    signal.pthread_sigmask(signal.SIG_BLOCK, worker.STOP_SIGNALS)
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "pithtrain.worker", str(run.path)],
            cwd=run.code,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
            stdin=subprocess.DEVNULL,
            # a session of its own: Ctrl-C reaches this process alone, which passes on a request to save
            start_new_session=True,
        )
        for rank in range(size)
    ]
    report_end(run, attempt, supervise(tasks))


def claim_for_this_process(run: RunDir) -> int:
    """Claim an attempt that this process runs itself or supervises."""
    attempt = rundir.claim_attempt(run)
    job = {"job_id": str(os.getpid()), "launcher": "train", "attempt": attempt, "host": socket.gethostname()}
    rundir.add_job(run, job | {"time": time.time()})
    return attempt


def supervise(tasks: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    """Wait for all tasks and return their exit codes, negative for a signal, 1 for one that had to be killed here.

    Forwards SIGINT and SIGTERM as SIGTERM; the second SIGINT kills. Ends all soon after the first that fails.
    """
    asked = 0

    def forward(number: int, frame: object) -> None:
        nonlocal asked
        asked += number == signal.SIGINT
        if asked == 1:
            print("asked to stop: saving at the next step (Ctrl-C again kills it)", file=sys.stderr)
        for task in tasks:
            task.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, worker.STOP_SIGNALS)
    deadline = math.inf
    try:
        while None in (codes := [task.poll() for task in tasks]) and asked < 2 and time.monotonic() < deadline:
            ended = [code for code in codes if code is not None]
            if ended:
                deadline = min(deadline, time.monotonic() + (END_GRACE_S if any(ended) else LAST_GRACE_S))
            time.sleep(0.1)
        return [1 if code is None else code for code in codes]
    finally:
        for task in tasks:
            if task.poll() is None:
                task.kill()
            task.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def report_end(run: RunDir, attempt: int, exit_codes: Sequence[int]) -> None:
    """Say how an attempt ended, from the run directory and, where it is silent, the processes' exit codes.

    Raises RunFailed or StoppedEarly; returns when the run is done.
    """
    marks = {marker.name: rundir.read_json(marker) or {} for marker in (run.done, run.stop, run.requeue)}
    if not any(exit_codes):
        if marks["DONE"].get("attempt") == attempt:
            return
        for stamp in (marks["STOP"], marks["REQUEUE"]):
            if stamp.get("attempt") == attempt and "step" in stamp:
                message = f"stopped at step {stamp['step']} with its state saved\n  go on:  pithtrain resume {run.path}"
                raise StoppedEarly(message)
    last = rundir.last_attempt(run) or {}
    if last.get("attempt") == attempt and last.get("end") is None:
        with contextlib.suppress(OSError):  # a full disk hides no cause
            rundir.record_attempt(run, attempt, end=time.time(), ended="killed")
    raise failure(run, attempt, exit_codes)


def failure(run: RunDir, attempt: int, exit_codes: Sequence[int] = ()) -> PithtrainError:
    """The first cause of a failed attempt as an error with the exit code of that cause.

    Where every error is another rank's lost connection, the cause is a rank that wrote none: it was killed.
    """
    first = rundir.first_error(run, attempt)
    if first is not None and not first["secondary"]:
        error = RunFailed(f"{worker.describe_error(first)}\n  log:    {run.log(attempt, first['rank'])}")
        error.exit_code = first["exit_code"]
        return error
    for rank, code in enumerate(exit_codes):
        if code < 0:
            name = signal.Signals(-code).name
            why = " (the kernel does that when memory runs out)" if name == "SIGKILL" else ""
            return RunFailed(f"rank {rank} was killed by {name}{why}\n  log:    {run.log(attempt, rank)}")
    if first is not None:
        ranks = range(len(list(run.logs(attempt).glob("rank-*.log"))))
        silent = [rank for rank in ranks if not run.error(attempt, rank).exists()]
        if silent:
            who, rank = f"rank {silent[0]} was killed: the others lost their connection to it", silent[0]
        else:
            who, rank = worker.describe_error(first), first["rank"]
        return RunFailed(f"{who}\n  log:    {run.log(attempt, rank)}")
    return RunFailed(f"attempt {attempt} ended without a word\n  logs:   {run.logs(attempt)}, {run.slurm}")


if __name__ == "__main__":
    submit_from_snapshot(RunDir(Path(sys.argv[1])), "slurm" if sys.argv[2] == "slurm" else "local", int(sys.argv[3]))
