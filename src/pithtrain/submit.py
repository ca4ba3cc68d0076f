"""How a run starts: in the foreground, as the same thing behind a forked process, or through submitit and Slurm.

submitit renders the sbatch script, calls sbatch and starts one Python entry per rank; its checkpoint and requeue
machinery stays unused (it acts on rank 0 alone, inside a signal handler). What runs is always the snapshot in the run
directory, and what is pickled is the name of a function and a path:

    spec --> create run/ --> a fresh process: cwd and PYTHONPATH = run/code, cleaned environment
                                 `python -m pithtrain.submit run/`  -->  executor.submit(worker.entry, "run/")
                                                                         or, without Slurm, a fork: foreground(run)

The fresh process, in a session of its own, makes three things true at once: the job sees nothing of an outer job's
variables, the pickle names the snapshot's module, and Ctrl-C or a closed terminal at the submitting side does not reach
a local run. It costs half a second.
"""

import contextlib
import itertools
import math
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any, Literal

from pithtrain import catalog, jobs, rundir, slurm, watch, worker
from pithtrain.errors import (
    CheckpointError,
    DataError,
    Problem,
    RunDirError,
    RunFailed,
    SlurmError,
    SpecError,
    StoppedEarly,
    me,
    show,
)
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, load

Launcher = Literal["slurm", "local"]

# Variables of an outer job or launcher: inherited, they would place a new run's ranks in the old run's world
OUTER_JOB = re.compile(
    r"(SLURM|SBATCH|SRUN|SALLOC|PMI|PMIX|OMPI|SUBMITIT|TORCHELASTIC|PITHTRAIN)_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
KEPT = ("SLURM_CONF",)  # says where the cluster is, not which job this is

REQUEUE_SETTLES_S = 5.0  # from the end of an attempt to the start of the next one in the same job
END_GRACE_S = 15.0  # from one rank's failure to SIGKILL; workers end by themselves within worker.GRACE_S + POLL_S
LAST_GRACE_S = 300.0  # from one rank's clean end to SIGKILL of the rest: rank 0 may still be uploading


# ---- Slurm and submitit ----------------------------------------------------------------------------------------------


def launcher() -> Launcher:
    """`slurm` where Slurm is installed and configured, else `local`. Raises SlurmError where its controller does not
    answer: a run meant for a cluster must not start on a login node."""
    if not slurm.configured():
        return "local"
    slurm.call("sinfo", "--noheader")
    return "slurm"


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables of any outer job or launcher."""
    return {name: value for name, value in env.items() if name in KEPT or not OUTER_JOB.fullmatch(name)}


def task_environment(run: RunDir, spec: RunSpec, attempt: int) -> dict[str, str]:
    """The environment of an attempt's processes on this host: ours cleaned, the spec's, the snapshot first."""
    env = clean_environment(os.environ) | spec.slurm.env
    paths = [str(run.code), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"PYTHONPATH": os.pathsep.join(paths), "PITHTRAIN_ATTEMPT": str(attempt)}


def parameters(spec: RunSpec, run: RunDir, attempt: int, token: str, lane: str | None = None) -> dict[str, Any]:
    """The keyword arguments for submitit's SlurmExecutor. One task per GPU; on a CPU `gpus_per_node` tasks per node.
    `token`: names the submission in the job's comment, before it has an id. `lane`: a job name of which one job runs at
    a time; without one the job is named as the run."""
    slurm = spec.slurm
    exports = {**slurm.env, "PITHTRAIN_ATTEMPT": str(attempt), "PITHTRAIN_TOKEN": token}
    python, path = shlex.quote(sys.executable), shlex.quote(str(run.path))
    theirs = slurm.additional_parameters.get("dependency")
    after = f"{python} -m pithtrain.batch after {path}"
    # srun has not inherited it since Slurm 22.05
    cpus = [] if slurm.cpus_per_task is None else [f"--cpus-per-task={slurm.cpus_per_task}"]
    same = ("nodes", "cpus_per_task", "mem", "signal_delay_s", "account", "partition", "qos", "constraint", "exclude")
    wanted: dict[str, Any] = {
        **{name: getattr(slurm, name) for name in same},
        "job_name": lane or run.name,
        "time": slurm.time_minutes,
        "ntasks_per_node": slurm.gpus_per_node,
        "gpus_per_node": slurm.gpus_per_node if spec.training.device != "cpu" else None,
        "exclusive": slurm.exclusive or None,
        "comment": f"pithtrain {token}",
        "setup": [
            "trap : TERM USR2  # signals are for the ranks: this shell stays, to say what comes next",
            *slurm.setup,  # first: a module it loads must not come before the snapshot
            "set +eu  # whatever the lines above want: this script goes on after a failure",
            f"export PYTHONPATH={shlex.quote(str(run.code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
            f'[ -x {python} ] || {{ echo "error: no Python at" {python} "on $(hostname)" >&2; exit 127; }}',
            f"{python} -m pithtrain.batch before {path} || {{ {after} $?; exit $?; }}",
        ],
        "srun_args": [
            "--kill-on-bad-exit=1",  # one rank's end ends the step ...
            "--wait=120",  # ... and so does a rank that is done, when another still uploads: events.WANDB_TIMEOUT_S
            *cpus,
            *slurm.srun_args,
        ],
        "teardown": ["rc=$?", f"{after} $rc", "exit $?"],
        "additional_parameters": {
            "chdir": str(run.code),
            "requeue": True,
            **slurm.additional_parameters,
            **({"dependency": ",".join(filter(None, ["singleton", theirs]))} if lane else {}),
        },
    }
    # submitit's own default is wckey=submitit, which sites with wckeys refuse
    return {name: value for name, value in wanted.items() if value is not None} | {"wckey": None}


def held_python(run: RunDir) -> str:
    """How each rank's Python starts: with signals held back until there are handlers for them."""
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(run.code / 'pithtrain' / 'held.py'))}"


def render(spec: RunSpec, run: RunDir, attempt: int = 1, token: str = "TOKEN") -> str:
    """The sbatch script of an attempt, byte for byte what `submit` hands to sbatch, which makes the token. Pure."""
    from submitit.slurm import slurm

    command = f"{held_python(run)} -u -m submitit.core._submit {shlex.quote(str(run.slurm))}"
    make = slurm._make_sbatch_string  # pyright: ignore[reportPrivateUsage]  # its text is tested against the executor's
    return make(command=command, folder=run.slurm, **parameters(spec, run, attempt, token))


def check(spec: RunSpec, by: Launcher, force: bool = False, resumed: bool = False) -> list[str]:
    """What can be known before anything is made: notes for the user, among them Slurm's estimate of the start. Raises
    SpecError for what cannot start this way, SlurmError with Slurm's own words where it refuses the script. `force`:
    what we would refuse is a note, and Slurm and the ranks decide."""
    missing = unfound(spec, resumed)
    if missing and not force:
        raise DataError("\n".join([*missing, "  where the ranks see other files than this machine: --force"]))
    return missing + _check_place(spec, by, force)


def unfound(spec: RunSpec, resumed: bool = False) -> list[str]:
    """What the ranks would miss when they start, as far as this machine sees it: corpora, the tokenizer and, unless the
    run is `resumed`, which goes by its own checkpoints, what it is to begin with."""
    from pithtrain import data  # and numpy, which most commands do without

    found: list[str] = []
    try:
        data.check(spec, resumed)
    except DataError as error:
        found.append(str(error))
    try:
        if not resumed:
            catalog.check_beginning(spec.init_from, spec.resume, spec.optimizer.type)
    except CheckpointError as error:
        found.append(str(error))
    return found


def _check_place(spec: RunSpec, by: Launcher, force: bool) -> list[str]:
    if by == "slurm":
        cluster = slurm.cluster_facts(spec)
        notes = _possible(spec, cluster, force)
        script = render(spec, RunDir(spec.output_dir / spec.name))
        parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        if parsed.returncode != 0:
            rule = f"is no shell text: {parsed.stderr.strip().splitlines()[0]}"
            raise SpecError([Problem("slurm.setup", "; ".join(spec.slurm.setup), rule)], "Slurm")
        try:
            return [*notes, slurm.test_only(script, may_wait=not cluster.whole)]
        except SlurmError as refused:
            if not force:
                raise
            return [*notes, str(refused)]
    if spec.slurm.nodes > 1:
        rule = "more than one node needs Slurm, and none is configured on this machine"
        raise SpecError([Problem("slurm.nodes", spec.slurm.nodes, rule, "run where `sinfo` answers, or set it to 1")])
    unused = [key for key in ("setup", "srun_args", "additional_parameters") if getattr(spec.slurm, key)]
    return [f"slurm.{key} is not used without Slurm" for key in unused]


def submit(
    run: RunDir, spec: RunSpec, by: Launcher, lane: str | None = None, first: int | None = None
) -> dict[str, Any]:
    """Claim an attempt and start it; returns its entry in submit.json, which stands before sbatch is called: whatever
    dies in between, the job can be found by its token. `lane`: see `parameters`; `first`: the first attempt of the
    chain of jobs that this one continues. Raises RunFailed with sbatch's own words where it refuses."""
    rundir.require_own(run)
    attempt = rundir.claim_attempt(run)
    entry = {"job_id": None, "launcher": by, "host": socket.gethostname(), "time": time.time()}
    entry |= {"token": secrets.token_hex(6), "first": first or attempt, "lane": lane, "spec": spec.stable_hash()}
    rundir.record_job(run, attempt, **entry)
    env = task_environment(run, spec, attempt)
    if by == "slurm" and "SLURM_JOB_ID" in os.environ:  # an outer job's devices and scratch folder end with it
        env = {name: value for name, value in env.items() if name not in ("CUDA_VISIBLE_DEVICES", "TMPDIR")}
    output = run.slurm / f"submit-{attempt}.log"
    command = [sys.executable, "-m", "pithtrain.submit", str(run.path), by, str(attempt)]
    with output.open("w") as file:
        subprocess.run(
            command, cwd=run.code, env=env, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True
        )
    job = rundir.last_job(run)
    if job.get("job_id") is None and by == "slurm":  # an answer of sbatch that got lost: the job is found by its token
        job |= {"job_id": jobs.state(run).job_id}
    if job.get("job_id") is None:
        said = "\n".join(dict.fromkeys(output.read_text().strip().splitlines()))  # submitit repeats what sbatch says
        if by == "slurm" and slurm.AWAY.search(said):
            unknown = f"it is not known whether Slurm took {run.name}: {said}"
            raise SlurmError(f"{unknown}\n  see:  {me()} status {run.path}")
        rundir.forget_job(run, attempt)
        raise RunFailed(f"could not submit {run.name}: {said or 'no output'}")
    return job


def submit_from_snapshot(run: RunDir, by: Launcher, attempt: int) -> None:
    """The half of `submit` that runs in the fresh process."""
    spec = load(run.spec_yaml)
    entry = rundir.last_job(run)
    assert entry.get("attempt") == attempt, "`submit` has just written it"
    if by == "local":
        if pid := os.fork():
            rundir.record_job(run, attempt, job_id=str(pid), time=time.time())
        else:
            foreground(run, spec, attempt, spec.slurm.time_minutes)
        return
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError

    executor = SlurmExecutor(folder=run.slurm, python=held_python(run))
    executor.update_parameters(**parameters(spec, run, attempt, entry["token"], entry["lane"]))
    try:
        job = executor.submit(worker.entry, str(run.path))
    except FailedJobError as error:
        raise SystemExit(str(error)) from None
    rundir.record_job(run, attempt, job_id=job.job_id, time=time.time())


def write_pickle(run: RunDir, job_id: str) -> None:
    """What submitit's task reads, where the submitting process died before it gave the file the job's id."""
    path = run.slurm / f"{job_id}_submitted.pkl"
    if not path.exists():
        from submitit.core.utils import DelayedSubmission

        DelayedSubmission(worker.entry, str(run.path)).dump(path)


# ---- resuming --------------------------------------------------------------------------------------------------------


def resume(run: RunDir, changes: Sequence[str], force: bool = False, excludes: bool = False) -> list[str]:
    """Let a run go on through Slurm or local processes; returns what was changed and done, in lines. Call it with the
    run's lock held. A job that waits or is held is changed in place and released; one that is gone is submitted again.
    `excludes`: nodes are taken out of the job, which may be running: it saves and is queued again first, since a job
    cannot change its own nodes. Raises RunDirError for a run that is live or done."""
    now = jobs.state(run)
    if excludes and now.word == "running" and now.launcher == "slurm" and now.job_id is not None:
        _, spec = _changed_spec(run, changes)
        _possible(spec, slurm.cluster_facts(spec), force)  # before anything is stopped
        slurm.cancel(now.job_id, "USR2")
        while (now := jobs.state(run)).alive and now.word not in ("pending", "held"):
            time.sleep(1.0)
    if now.alive and now.word in ("pending", "held"):
        before, spec = _changed_spec(run, changes)
        _possible(spec, slurm.cluster_facts(spec), force)
        return _change_waiting(run, now, before, spec)
    by = launcher()
    lines = prepare_resume(run, changes, by, force)
    spec = load(run.spec_yaml)
    job = submit(run, spec, by, lane=rundir.last_job(run).get("lane"))
    return [*lines, f"{run.name}: {job['launcher']} {job['job_id']}, attempt {job['attempt']}"]


def prepare_resume(run: RunDir, changes: Sequence[str], by: Launcher, force: bool) -> list[str]:
    """Check that `run` can go on, and bring its spec and code up to date; returns what changes, in lines. `force`:
    though it seems to run on another host, and as in `check`."""
    rundir.require_own(run)
    now = jobs.state(run)
    elsewhere = rundir.last_job(run).get("host") != socket.gethostname() and now.launcher != "slurm"
    if not (force and elsewhere):
        jobs.refuse_if_live(now, run)
    before, spec = _changed_spec(run, changes)
    done_at = rundir.read_json(run.done).get("step", 0)
    if done_at >= spec.training.max_steps:
        raise RunDirError(
            f"{run.name} is done at step {done_at} = training.max_steps\n"
            f"  go on:  {me()} resume {run.path} --set training.max_steps={2 * done_at}"
        )
    return [*check(spec, by, force, resumed=True), *_renew(run, before, spec)]


def _possible(spec: RunSpec, cluster: slurm.Cluster, force: bool) -> list[str]:
    """Warnings about this spec there. Raises SpecError for what can never run; with `force` that is a warning too."""
    problems, warnings = slurm.problems(spec, cluster)
    if problems and not force:
        raise SpecError(problems, "Slurm")
    return [*map(str, problems), *warnings]


def _changed_spec(run: RunDir, changes: Sequence[str]) -> tuple[RunSpec, RunSpec]:
    """The run's spec before and after a resume's changes. Raises SpecError for what would make it another run, and
    CheckpointError where the other optimizer has nothing to go on from."""
    before, spec = load(run.spec_yaml), load(run.spec_yaml, changes)
    names = ("name", "output_dir", "model")
    old, new = (each.model_dump(mode="json", include=set(names)) for each in (before, spec))
    if fixed := [one for name in names for one in catalog.differences(name, old[name], new[name])]:
        rule = "cannot change at a resume; start another run"
        raise SpecError([Problem(key, ours, f"was {show(theirs)} and {rule}") for key, theirs, ours in fixed])
    if spec.optimizer.type != before.optimizer.type:
        for newest in catalog.complete(run.checkpoints, lambda reason: None)[:1]:
            catalog.check_optimizer(newest, catalog.read(newest), spec.optimizer.type)
    return before, spec


def _renew(run: RunDir, before: RunSpec, spec: RunSpec) -> list[str]:
    """Spec and code snapshot as they are now, and the differences."""
    rundir.write_atomic(run.spec_yaml, spec.to_yaml())
    files = rundir.renew_code(run)
    changed = [*rundir.spec_difference(before.to_yaml(), spec.to_yaml()), *(f"code/pithtrain/{file}" for file in files)]
    return [f"changed: {change}" for change in changed]


def _change_waiting(run: RunDir, now: jobs.State, before: RunSpec, spec: RunSpec) -> list[str]:
    """Change what Slurm can change of a job that waits or is held, release it, and let it start."""
    assert now.job_id is not None, "Slurm has just spoken of it"
    old, new = dict(before.slurm), dict(spec.slurm)
    keys = {"exclude": "ExcNodeList", "time": "TimeLimit", "partition": "Partition", "account": "Account", "qos": "QOS"}
    changed = {key for key in new if old[key] != new[key]}
    if stays := sorted(changed - keys.keys() - {"max_requeues"}):
        rule = f"cannot change while job {now.job_id} waits"
        hint = f"{me()} cancel {run.path}, then resume"
        raise SpecError([Problem(f"slurm.{key}", new[key], rule, hint) for key in stays])
    fields = {keys[key]: new[key] if key != "time" else spec.slurm.time_minutes for key in changed & keys.keys()}
    if fields:
        slurm.update(now.job_id, **{key: "" if value is None else str(value) for key, value in fields.items()})
    lines = _renew(run, before, spec)
    if now.word == "held":
        slurm.release(now.job_id)
    else:
        # started within three seconds of its end, Slurm finds the job's old credential revoked and fails it for good
        ended = rundir.last_attempt(run).get("end") or 0
        time.sleep(min(REQUEUE_SETTLES_S, max(0.0, REQUEUE_SETTLES_S - (time.time() - ended))))
        slurm.update(now.job_id, StartTime="now")
    return [*lines, f"{run.name}: job {now.job_id} was {now.word}, and starts as soon as Slurm has the nodes"]


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def grid(axes: Sequence[str]) -> list[dict[str, str]]:
    """The points of a grid, from `a.b=v1,v2` texts; the last axis varies fastest. Commas inside brackets stay."""
    values: dict[str, list[str]] = {}
    for axis in axes:
        key, equals, text = axis.partition("=")
        parts = [part.strip() for part in re.split(r",(?![^\[{(]*[\]})])", text)]
        if not equals or not key or "" in parts:
            raise SpecError([Problem("--grid", axis, "is not of the form a.b=v1,v2")], "sweep")
        if key in values:
            raise SpecError([Problem("--grid", axis, f"{key} is given twice")], "sweep")
        values[key] = parts
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def grid_name(base: str, point: Mapping[str, str]) -> str:
    """A run's name from its point: `tiny-lr-1e-3-seed-2`."""
    parts = (f"{key.rpartition('.')[2]}-{re.sub(r'[^A-Za-z0-9._-]+', '_', value)}" for key, value in point.items())
    return "-".join([base, *parts])


# ---- in the foreground -----------------------------------------------------------------------------------------------


def claim_here(run: RunDir) -> int:
    """The next attempt, as this process's."""
    attempt = rundir.claim_attempt(run)
    here = {"job_id": str(os.getpid()), "launcher": "train", "host": socket.gethostname(), "time": time.time()}
    rundir.record_job(run, attempt, **here)
    return attempt


def foreground(run: RunDir, spec: RunSpec, attempt: int | None = None, minutes: float | None = None) -> None:
    """Start one process per rank on this host and stay until all have ended. Ctrl-C and SIGTERM ask the run to save and
    stop; a second Ctrl-C kills it. Raises RunFailed with the first cause and its exit code, StoppedEarly when the run
    saved its state before its last step. `attempt`: one that is claimed already; `minutes`: its time limit."""
    rundir.require_own(run)
    size = spec.world_size
    if attempt is None:
        attempt = claim_here(run)
    env = task_environment(run, spec, attempt) | {worker.PARENT: str(os.getpid())}
    # held back until there is a handler, here and in each worker, which inherits the mask: nobody dies unheard
    signal.pthread_sigmask(signal.SIG_BLOCK, watch.STOP_SIGNALS)
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "pithtrain.worker", str(run.path)],
            cwd=run.code,
            env=env | {"RANK": str(rank), "WORLD_SIZE": str(size)},
            stdin=DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes on a request to save
        )
        for rank in range(size)
    ]
    limit_s = math.inf if minutes is None else 60 * minutes - spec.slurm.signal_delay_s
    report_end(run, attempt, supervise(tasks, limit_s))


def supervise(tasks: Sequence["subprocess.Popen[bytes]"], limit_s: float = math.inf) -> list[int]:
    """Wait for all tasks and return their exit codes, negative for a signal, 1 for one that had to be killed here.
    Forwards SIGINT and SIGTERM as SIGTERM, and SIGUSR2; the second SIGINT kills. Sends SIGUSR2 after `limit_s`. Ends
    all soon after the first that fails."""
    asked, stop_at = 0, time.monotonic() + limit_s

    def send(number: int) -> None:
        for task in tasks:
            task.send_signal(number)

    def forward(number: int, frame: object) -> None:
        nonlocal asked
        asked += number == signal.SIGINT
        if asked == 1:
            print("asked to stop: saving at the next step (Ctrl-C again kills it)", file=sys.stderr)
        send(signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in watch.STOP_SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watch.STOP_SIGNALS)
    deadline = math.inf
    try:
        while None in (codes := [task.poll() for task in tasks]) and asked < 2 and time.monotonic() < deadline:
            ended = [code for code in codes if code is not None]
            if ended:
                deadline = min(deadline, time.monotonic() + (END_GRACE_S if any(ended) else LAST_GRACE_S))
            if time.monotonic() > stop_at:
                stop_at = math.inf
                send(signal.SIGUSR2)
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
    """Say how an attempt ended, by the run directory or exit codes. Raises RunFailed or StoppedEarly unless done."""
    well = None if any(exit_codes) else jobs.well_ended(run, attempt)
    last = rundir.last_attempt(run)
    if last.get("attempt") == attempt:
        with contextlib.suppress(OSError):  # a full disk hides no cause
            ended = {} if well or last.get("end") is not None else {"end": time.time(), "ended": "killed"}
            rundir.record_attempt(run, attempt, **ended, why=well or jobs.cause(run, attempt, exit_codes).line)
    if well is None:
        raise jobs.failure(run, attempt, exit_codes)
    if not rundir.stamp(run.done, attempt):
        raise StoppedEarly(f"stopped: {well}\n  go on:  {me()} resume {run.path}")


if __name__ == "__main__":
    try:
        path, by, attempt = sys.argv[1:]
        submit_from_snapshot(RunDir(Path(path)), "local" if by == "local" else "slurm", int(attempt))
    except (RunFailed, StoppedEarly) as end:  # of a fork: whoever asks finds it in the run directory
        sys.exit(str(end))
