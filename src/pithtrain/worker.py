"""Once per task: from the environment a launcher left, to a `Place`, to `train.run`, to an exit code.

The same function runs under every launcher. What differs is which variables say "you are rank 3 of 8", and how the
ranks find each other; by a file store or a derived port, two runs on one host never meet:

    launcher                rank, size, local rank                      rendezvous
    `submit.foreground`     RANK WORLD_SIZE                             file store in the attempt's log folder
    submitit, Slurm         SLURM_PROCID NTASKS LOCALID                 tcp, first node, port derived from the job id

What is promised here, beside what `watch` does (signals, hangs, killed ranks, a launcher that dies):

1. An exception on one rank ends every process within seconds, under any launcher: the dying rank writes
   errors/attempt-N/rank-R.json and leaves by `os._exit`, so that no hung collective or library thread can hold it; in
   every other rank `watch` sees the file and leaves too.
2. Each rank's output is in logs/attempt-N/rank-R.log, also what C libraries write; rank 0's Python output goes to the
   launcher's console as well.

torch is imported inside functions alone, after the thread counts are in the environment.
"""

import contextlib
import dataclasses
import io
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pithtrain import rundir
from pithtrain.errors import PithtrainError, Problem, RunDirError, SpecError, Stalled
from pithtrain.rundir import RunDir
from pithtrain.slurm import hostnames
from pithtrain.spec import load
from pithtrain.watch import Watch, standing, usable_cores

if TYPE_CHECKING:
    from pithtrain.world import Place

FIRST_PORT, NUM_PORTS = 15000, 17000  # below the kernel's ephemeral range, which starts at 32768
PARENT = "PITHTRAIN_PARENT"  # the pid of a launcher of ours: it may be dead before this process can ask
INTERACTIVE_STEP = 0xFFFFFFF0  # Slurm numbers its batch, extern and interactive steps from here on

# An error that another rank's death causes, in the words of gloo, NCCL and the stores
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket timeout|timed out|remote process exited|ncclremoteerror"
    r"|application timeout|unhandled system error|process group has been aborted|failed to recv|recvvalue failed",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Seat:
    """What a launcher's environment says. `launcher`: spawn, slurm, or alone (0 of 1)."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


# ---- environment -> place --------------------------------------------------------------------------------------------


def seat(env: Mapping[str, str]) -> Seat:
    """Which launcher started this process and which of its tasks this is. Raises SpecError for what is no number."""
    if "RANK" in env and "WORLD_SIZE" in env:
        size, rank = _number(env, "WORLD_SIZE"), _number(env, "RANK")
        return Seat("spawn", rank, size, rank, size)
    if "SLURM_PROCID" in env and 0 <= _number(env, "SLURM_STEP_ID", -1) < INTERACTIVE_STEP:
        size = _number(env, "SLURM_NTASKS")
        local_size = _number(env, "SLURM_NTASKS_PER_NODE", size // _number(env, "SLURM_NNODES", 1))
        return Seat("slurm", _number(env, "SLURM_PROCID"), size, _number(env, "SLURM_LOCALID"), max(1, local_size))
    return Seat("alone", 0, 1, 0, 1)


def attempt_of(env: Mapping[str, str]) -> int:
    """The number of this attempt: what the submitting side has claimed, and one more for each requeue by Slurm since.
    So all processes of an attempt agree without asking each other, and no log is ever overwritten."""
    if "PITHTRAIN_ATTEMPT" not in env:
        raise RunDirError("PITHTRAIN_ATTEMPT is not set: start a run with `pithtrain submit`, `train` or `resume`")
    spawned = seat(env).launcher == "spawn"  # whatever job is around it
    restarts = 0 if spawned else _number(env, "SLURM_RESTART_COUNT", 0)
    return _number(env, "PITHTRAIN_ATTEMPT") + restarts


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"-?\d+", text):
        hint = f"a launcher sets it; if none started this process: unset {name}"
        raise SpecError([Problem(name, text, "is not a whole number", hint)], "environment")
    return int(text)


def init_method(env: Mapping[str, str], store: Path) -> str:
    """The rendezvous of torch.distributed: the file `store` on a single host, under Slurm host and port of rank 0.
    `slurm.env` may set MASTER_ADDR and MASTER_PORT where the site's network needs it. The launch node is where `srun`
    runs, the first node of a batch script; Slurm's node *names* need not resolve, so its address is preferred. Job ids
    that differ by less than 17000 never share a port; two steps of one job differ too."""
    if seat(env).launcher != "slurm":
        return f"file://{store}"
    host = env.get("MASTER_ADDR") or env.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        host = hostnames(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])[0]
    derived = FIRST_PORT + (int(env["SLURM_JOB_ID"]) + 7919 * int(env["SLURM_STEP_ID"])) % NUM_PORTS
    port = int(env.get("MASTER_PORT", derived))
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def place_from_environment(env: Mapping[str, str], run: RunDir) -> "Place":
    """The `Place` of this process."""
    from pithtrain.world import Place

    here, attempt = seat(env), attempt_of(env)
    method = init_method(env, run.rendezvous(attempt))
    return Place(here.rank, here.world_size, here.local_rank, method, attempt)


def prepare_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before torch is imported, where the user has not. The ranks of a host share its cores: if each
    took all of them, two ranks on two cores would be several times slower. On a single host gloo stays on the loopback
    interface, since it otherwise looks up the host's own name, which need not resolve."""
    here = seat(env)
    given = int(env.get("SLURM_CPUS_PER_TASK", 0)) if here.launcher == "slurm" else 0
    wanted = {"OMP_NUM_THREADS": str(given or max(1, usable_cores() // here.local_world_size))}
    if here.launcher != "slurm":
        wanted["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {name: value for name, value in wanted.items() if name not in env}


# ---- once per task ---------------------------------------------------------------------------------------------------


def entry(path: str) -> None:
    """Run `main` and end the process with its exit code: all is saved then, and no library's destructor may hold it.
    submitit pickles it by reference, so a waiting job holds no code and no spec. Never returns: submitit would pickle
    the result, and a rank killed meanwhile leaves a temporary file over which the next attempt dies."""
    code = 0
    try:
        main(Path(path))
    except PithtrainError as error:  # the environment is wrong: there is no rank yet that could have a log
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(path: Path) -> None:
    """Run this task of the run in `path`. Returns when the run finished, or stopped with its state saved; `train` has
    written the marker that says which. Does not return on failure: the process ends with the error's exit code."""
    run, here, attempt = RunDir(path.absolute()), seat(os.environ), attempt_of(os.environ)
    watch = Watch(run, attempt, here.rank, here.launcher, int(os.environ.get(PARENT, os.getppid())))
    watch.install()
    os.environ.update(prepare_environment(os.environ))
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    run.errors(attempt).mkdir(parents=True, exist_ok=True)
    with redirected(run.log(attempt, here.rank), copy=here.rank == 0) as (log, console):
        watch.log_to(log)
        try:
            spec = load(run.spec_yaml)
            if here.world_size != spec.world_size:
                rule = f"the spec's mesh has {spec.world_size} ranks, and {here.launcher} started {here.world_size}"
                raise SpecError([Problem("slurm.nodes x slurm.gpus_per_node", spec.world_size, rule)])
            if here.rank == 0:
                _begin(run, attempt, here)
            os.environ["TORCH_FR_BUFFER_SIZE"] = str(spec.distributed.flight_recorder)  # read with the first group
            watch.start(spec)
            from pithtrain import train

            train.run(spec, run, place_from_environment(os.environ, run), watch)
            watch.finish()
        except BaseException as error:  # KeyboardInterrupt too: whatever ends this rank must end the others
            _die(watch, here, error, log, console)


def _begin(run: RunDir, attempt: int, here: Seat) -> None:
    """Rank 0, before the first step: the attempt's own copy of the spec, its line, no stale markers."""
    rundir.clear_stale_markers(run, attempt)
    rundir.point_latest(run, attempt)
    run.attempt_spec(attempt).write_text(run.spec_yaml.read_text(encoding="utf-8"), encoding="utf-8")
    rundir.record_attempt(
        run,
        attempt,
        launcher=here.launcher,
        job_id=os.environ["SLURM_JOB_ID"] if here.launcher == "slurm" else rundir.last_job(run).get("job_id"),
        host=socket.gethostname(),
        pid=os.getpid(),
        nodes=os.environ.get("SLURM_JOB_NODELIST", socket.gethostname()),
        start=time.time(),
        end=None,
        ended=None,
    )


def _die(watch: Watch, here: Seat, error: BaseException, log: TextIO, console: TextIO) -> None:
    """Write what happened, say it in one line, leave at once (`Watch.hold` says when not). Never returns."""
    watch.end_alone()
    exit_code = error.exit_code if isinstance(error, PithtrainError) else 1
    try:
        message = str(error) or type(error).__name__
        secondary = not isinstance(error, PithtrainError) and LOST_PEER.search(message) is not None
        stack = "".join(traceback.format_exception(error))
        if secondary and watch.stood_still():  # woken up again, after the others had waited in vain and left
            error = Stalled(f"{watch.stall_text(*standing())}; then: {message}")
            message, secondary = str(error), False
        report = watch.report(error, message, stack, secondary)
        if not secondary and here.launcher != "spawn":  # there the parent says it, once
            print(f"error: {rundir.describe_error(report)}", file=console, flush=True)
        rundir.record_error(watch.run, watch.attempt, f"rank-{here.rank}", report)
        watch.record_collectives()
        print(report["traceback"], file=log, flush=True)
        if here.rank == 0:
            watch.end_attempt("failed", exit_code)
        if secondary:
            watch.hold()
    except BaseException:  # a full disk must not keep this process alive: the exit code still tells
        with contextlib.suppress(BaseException):
            traceback.print_exc(file=console)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(exit_code)


# ---- output ----------------------------------------------------------------------------------------------------------


class Tee(io.TextIOBase):
    """Text to the log and, as long as it can be written to, to the console's file descriptor."""

    def __init__(self, log: TextIO, console: int) -> None:
        self.log, self.console = log, console

    def write(self, text: str, /) -> int:
        # a closed pipe or a gone terminal is no reason to end a run, so nothing is kept back in a buffer for it
        with contextlib.suppress(OSError):
            os.write(self.console, text.encode(errors="replace"))
        with contextlib.suppress(OSError):  # nor is a full disk
            self.log.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.log.flush()

    def fileno(self) -> int:
        return self.log.fileno()


@contextlib.contextmanager
def redirected(path: Path, copy: bool) -> Generator[tuple[TextIO, TextIO], None, None]:
    """Send this process's output, down to the file descriptors, to the log at `path`; yields it and the old stderr.
    With `copy`, what Python prints goes to the old standard output too. The log is opened for appending and line by
    line: a process that is killed loses nothing but its current line."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = sys.stdout, sys.stderr
    kept = os.dup(1), os.dup(2)
    with (
        path.open("a", buffering=1, encoding="utf-8", errors="replace") as log,
        os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace") as console,
    ):
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        output = Tee(log, kept[0]) if copy else log
        sys.stdout = sys.stderr = output  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield log, console
        finally:
            output.flush()
            for number, old in enumerate(kept, start=1):
                os.dup2(old, number)
                os.close(old)
            sys.stdout, sys.stderr = before


if __name__ == "__main__":
    entry(sys.argv[1])
