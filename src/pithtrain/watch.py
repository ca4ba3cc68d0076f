"""What a rank keeps an eye on while it trains: requests to stop or to save, its own progress, and the other ranks.

The main thread says where it stands (`enter`) and asks at step boundaries (`should_stop`, `should_save`). A thread of
its own looks around once a second. It takes no lock of the engine and nothing of it can block but the file system, so
it works while the main thread waits in a collective for ever.

    it sees                                       it does
    SIGTERM, SIGUSR2, SIGINT                      (the handler) sets the flag that `should_stop` reads, nothing else
    the launcher died; STOP of this attempt       the same
    SAVE of this attempt                          sets the flag that `should_save` reads
    another rank's error file                     grants the main thread `GRACE_S` to fail by itself, then leaves
    a process of this host gone, without a word   the same (where no `srun` ends the others)
    a phase that outlived its limit               writes all stacks and where the main thread stands, then leaves

Who is to blame for a hang. When one rank hangs, all ranks outlive their limit at the same moment, and most of them only
wait for the one. So a stall, like a lost connection, is `secondary` where the main thread stands in a collective or
waits for a device. A rank that must leave because others stalled, and that waits for nobody itself, says that it is
the one. The first rank to end makes `srun` kill the rest; so who has only a secondary error to tell stays until all
living ranks have told theirs (`hold`). What remains silent is then the rank that was killed or is frozen. One that is
woken again, as Slurm does before it kills, notices by its own clock that it stood still, and says so.

Below all this lies `faulthandler`: a C thread that ends the process `MARGIN_S` after a limit, also where the
interpreter itself hangs and no Python thread can run.

Cost: `enter` takes 0.05 ms, on rank 0 a small file's rename more; the thread lists two folders a second.
"""

import contextlib
import faulthandler
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from pithtrain import flight, rundir
from pithtrain.errors import PithtrainError, RunFailed, Stalled
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec

Phase = Literal["init", "load", "first_step", "step", "validation", "save"]

# Which key of `distributed` limits a phase. Reading a checkpoint takes as long as writing one.
LIMITS: dict[Phase, str] = {
    "init": "init_timeout_s",
    "load": "save_timeout_s",
    "first_step": "train_timeout_s",
    "step": "step_timeout_s",
    "validation": "step_timeout_s",  # of each global batch
    "save": "save_timeout_s",
}
REASONS = ("SIGINT", "SIGUSR2", "SIGTERM", "the launcher died", "cancelled")
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}
POLL_S = 1.0  # between two looks
LOOKS_LOST = 3  # at a run directory that is another's, before a rank ends
GRACE_S = 5.0  # from another rank's error to leaving: our own main thread may fail by itself, with a better traceback
HOLD_S = POLL_S + GRACE_S + 2.0  # by then every living rank has seen the first error and written its own
FROZEN_S = 10.0  # a process that did not run at all for so long was stopped from outside, or starved
START_S = 60.0  # by then a launcher of this host has started all its processes
RECORD_S = 2.0  # for what the flight recorder has: 2,000 collectives are told in milliseconds
MARGIN_S = 30.0  # from a limit to the C thread that ends the process
COMMENT_S = 60.0  # between two updates of the job's comment: the controller serves everyone

# Our own lines in which a main thread waits for other ranks, or for a device that may wait for them
WAITS = re.compile(
    r"\bwait|wait\(|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|isend|irecv|agreed\("
    r"|synchronize\(|\.item\(|\.tolist\(|\.cpu\("
)


class _Standing(NamedTuple):
    """`step` is the last finished one, `since` a monotonic time."""

    phase: Phase
    step: int
    since: float


class Watch:
    """The watch of one rank. `install` takes the signals, `start` begins to look; without them it holds flags and
    writes the heartbeat, all that a test of the engine needs. `parent`: the launcher's pid, if we may outlive it."""

    def __init__(
        self, run: RunDir, attempt: int, rank: int, launcher: str = "alone", parent: int | None = None
    ) -> None:
        self.run, self.attempt, self.rank, self.launcher = run, attempt, rank, launcher
        self.reason: str | None = None  # why to stop; None: go on
        self._save_asked = False
        self._standing = _Standing("init", 0, time.monotonic())
        self._limits: dict[Phase, int] = {}
        self._size = 1
        self._began = time.monotonic()
        self._asleep_since: float | None = None  # the thread, between two looks
        self._frozen_s, self._thawed = 0.0, 0.0  # how long this process stood still, and when that ended
        self._parent = os.getppid() if parent is None else parent
        self._log: TextIO | None = None  # there is one where the signals are taken
        self._stop_said = False  # whether the log says that a stop was asked for
        self._comment_due = 0.0
        self._comment_step: int = 0
        self._scontrol: subprocess.Popen[bytes] | None = None
        self._lost = 0  # looks in a row at which the run directory was not ours
        self._finished = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    # ---- signals -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Take the signals that ask to stop, and let those in that a launcher held back until now. A thread that a
        library started before keeps its mask, which is harmless: the kernel picks a thread that lets a signal in."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def log_to(self, log: TextIO) -> None:
        """From now on crashes, and all stacks on SIGUSR1, are written to `log`."""
        self._log = log
        faulthandler.enable(log, all_threads=True)
        # what unregistering brings back: never the default, which kills
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        faulthandler.register(signal.SIGUSR1, log, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop(signal.Signals(number).name)

    def _take_again(self, log: TextIO) -> None:
        """Install the handlers once more: a library that was loaded since may have taken a signal, in C and unseen."""
        if others := [one.name for one in sorted(STOP_SIGNALS) if signal.getsignal(one) != self._on_signal]:
            print(f"{', '.join(others)}: a library had taken them; they are ours again", flush=True)
        self.install()
        faulthandler.unregister(signal.SIGUSR1)  # registering twice would leave the library's handler in place
        self.log_to(log)

    # ---- what the main thread says and asks --------------------------------------------------------------------------

    def start(self, spec: RunSpec) -> None:
        """Sign in with a pid file, begin the phase `init` and the looking."""
        self._limits = {phase: getattr(spec.distributed, key) for phase, key in LIMITS.items()}
        self._size = spec.world_size
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "start": process_start(os.getpid())}
        rundir.write_atomic(self.run.pid(self.attempt, self.rank), json.dumps(mine) + "\n", durable=False)
        self._began = time.monotonic()
        self.enter("init", 0)
        self._thread.start()

    def finish(self) -> None:
        """The main thread is through: nothing is watched any more. The signals stay taken."""
        self._finished.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        self.run.pid(self.attempt, self.rank).unlink(missing_ok=True)

    def enter(self, phase: Phase, step: int) -> None:
        """The main thread begins a phase, or the next step of one, whose limit counts from here; `step` is the last
        finished one. Rank 0 writes the heartbeat; a file system in trouble must not end the run for that."""
        began = phase != self._standing.phase
        self._standing = _Standing(phase, step, time.monotonic())
        if self._limits and self._log is not None:
            faulthandler.dump_traceback_later(self._limits[phase] + MARGIN_S, exit=True, file=self._log)
        if self.rank == 0:
            beat = {"phase": phase, "step": step, "time": time.time(), "attempt": self.attempt}
            beat |= {"host": socket.gethostname(), "pid": os.getpid()}
            with contextlib.suppress(OSError):
                rundir.write_atomic(self.run.heartbeat, json.dumps(beat) + "\n", durable=False)
        if self._log is not None and began and phase in ("first_step", "step"):
            self._take_again(self._log)
            if phase == "first_step":
                names = ", ".join(number.name for number in sorted(STOP_SIGNALS))
                print(f"signals: {names} save and stop at a step boundary, SIGUSR1 writes all stacks here", flush=True)

    def should_stop(self) -> int:
        """0, or the number of the reason to stop, which all ranks agree on."""
        return 0 if self.reason is None else REASONS.index(self.reason) + 1

    def agreed(self, stop: int) -> None:
        """All ranks stop for the reason of this number: another rank's, where this one was not asked."""
        if stop:
            self.stop(REASONS[stop - 1])

    def should_save(self) -> bool:
        return self._save_asked

    def stop(self, reason: str) -> None:
        """Ask to stop; the first reason stays."""
        self.reason = self.reason or reason

    def saved(self) -> None:
        """A requested save is on the disk: whoever asked sees its marker vanish."""
        if self.rank == 0:
            self.run.save.unlink(missing_ok=True)
        self._save_asked = False

    def ended(self, step: int, finished: bool) -> None:
        """Rank 0, when the state of `step` is saved: mark how it ended, before anything slow that may be cut off."""
        if self.rank != 0:
            return
        if finished:
            rundir.mark(self.run.done, self.attempt, step=step)
        elif self.run.stop.exists():  # asked for by `pithtrain cancel`: nobody starts it again
            rundir.mark(self.run.stop, self.attempt, step=step)
        else:
            rundir.mark(self.run.requeue, self.attempt, step=step, reason=self.reason)
        self.end_attempt("done" if finished else "stopped", 0)

    def end_attempt(self, ended: str, exit_code: int) -> None:
        """Rank 0's last word in attempts.jsonl; whoever started the run adds what it knows."""
        rundir.record_end(self.run, self.attempt, end=time.time(), ended=ended, exit_code=exit_code)

    # ---- a bad end ---------------------------------------------------------------------------------------------------

    def report(self, error: BaseException, message: str, stack: str, secondary: bool) -> dict[str, object]:
        """The contents of this rank's error file."""
        phase, step, _ = self._standing
        return {
            "time": time.time(),
            "rank": self.rank,
            "host": node_name(),
            "type": type(error).__name__,
            "message": message,
            "secondary": secondary,
            "retry": error.retry if isinstance(error, PithtrainError) else True,
            "exit_code": error.exit_code if isinstance(error, PithtrainError) else 1,
            "phase": phase,
            "step": step,
            "traceback": stack,
        }

    def record_collectives(self) -> None:
        """After the error, and by a thread that is not waited for long: a device that hangs may never answer."""

        def record() -> None:
            with contextlib.suppress(Exception):
                rundir.record_collectives(self.run, self.attempt, self.rank, flight.recorded())

        thread = threading.Thread(target=record, name="collectives", daemon=True)
        thread.start()
        thread.join(RECORD_S)

    def stood_still(self) -> float:
        """For how many seconds this process did not run at all, where the main thread has not moved on since; else 0.
        The thread sleeps for `POLL_S`: what it slept beyond that, nothing here ran."""
        if (overslept := self._overslept()) > FROZEN_S:
            return overslept
        return self._frozen_s if self._thawed > self._standing.since else 0.0

    def _overslept(self) -> float:
        asleep_since = self._asleep_since
        return 0.0 if asleep_since is None else time.monotonic() - asleep_since - POLL_S

    def end_alone(self) -> None:
        """The calling thread is going to end this process; where the other one already is, wait for that."""
        self._finished.set()
        self._ending.acquire()

    def hold(self, seconds: float = HOLD_S) -> None:
        """Stay a while with a secondary error: until a cause is written, or all ranks that can have told theirs."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                first = rundir.first_error(self.run, self.attempt)
                if first is not None and not first["secondary"]:
                    return
                told = self._told()
                if all(self._gone(rank) for rank in self._signed_in() - told - {self.rank}):
                    return
            time.sleep(POLL_S / 4)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        said = ""
        while not self._sleep():
            trouble = None
            try:
                self._require_home()
                trouble = self._look()
            except Exception as error:
                # a network file system answers ESTALE or EIO now and then; and a watch that dies guards nobody
                if said != (said := repr(error)):
                    _write(f"watch: {said}")
            phase, _, since = self._standing
            # time in which this process stood still, as all ranks do when Slurm suspends a job, is no phase's
            if time.monotonic() - max(since, self._thawed) > self._limits[phase]:
                where, waits = standing()
                self._end(Stalled(self.stall_text(where, waits)), secondary=waits, hold_s=HOLD_S)
            # the main thread may be failing by itself right now: its own traceback is worth the wait
            elif trouble is not None and (self.stood_still() or not self._finished.wait(GRACE_S)):
                self._leave(trouble)

    def _sleep(self) -> bool:
        """Until the next look; true when there is none to come."""
        self._asleep_since = time.monotonic()
        finished = self._finished.wait(POLL_S)
        if (overslept := self._overslept()) > FROZEN_S:
            _write(f"this process stood still for {overslept:.0f} s")
            self._frozen_s, self._thawed = overslept, time.monotonic()
        self._asleep_since = None
        return finished

    def _require_home(self) -> None:
        """End this process where its run directory is gone, or another run's: it would write into that one's files. The
        file with which this rank signed in tells; not at the first look, a file system may be late."""
        mine = rundir.read_json(self.run.pid(self.attempt, self.rank))
        ours = (mine.get("pid"), mine.get("host")) == (os.getpid(), socket.gethostname())
        self._lost = 0 if ours else self._lost + 1
        if self._lost > LOOKS_LOST:
            _write(f"{self.run.path} was removed, moved or made anew: this rank ends; what it had not saved is lost")
            os._exit(1)

    def _look(self) -> str | None:
        """Set the flags where asked to; answer what is wrong with another rank, in words."""
        if os.getppid() != self._parent:
            self.stop("the launcher died")
        if self.rank == 0:  # alone, and only at a stamp of this attempt: a stale marker must stop nobody
            if rundir.read_json(self.run.stop).get("attempt", 0) >= self.attempt:
                self.stop("cancelled")
            if rundir.read_json(self.run.save).get("attempt", 0) >= self.attempt:
                self._save_asked = True
            self._comment()
        if self.reason is not None and not self._stop_said:
            self._stop_said = True
            _write(f"asked to stop ({self.reason}): this rank saves and stops at a step boundary")
        death = self._silent_death() if self.launcher == "spawn" else None
        if self._told() - {self.rank}:
            first = rundir.first_error(self.run, self.attempt)
            if first is not None and not (first["secondary"] and death):
                return rundir.describe_error(first)
        return death

    def _silent_death(self) -> str | None:
        """Where the launcher ends nobody when a rank is killed: look for its process, on this one host."""
        for rank in sorted(self._signed_in() - {self.rank}):
            if self._gone(rank):
                return f"rank {rank} was killed"
        if time.monotonic() - self._began > START_S and (missing := self._missing()):
            return f"rank {missing[0]} never started"
        return None

    def _signed_in(self) -> set[int]:
        return rundir.numbers(self.run.logs(self.attempt), r"rank-(\d+)\.pid")

    def _told(self) -> set[int]:
        """The ranks that have written an error."""
        return rundir.numbers(self.run.errors(self.attempt), r"rank-(\d+)\.json")

    def _missing(self) -> list[int]:
        """The ranks that have not signed in while this one still connects."""
        return sorted(set(range(self._size)) - self._signed_in()) if self._standing.phase == "init" else []

    def _gone(self, rank: int) -> bool:
        """Whether the process of a rank that signed in on this host has ended, and neither told nor signed out."""
        path = self.run.pid(self.attempt, rank)
        mine = rundir.read_json(path)
        return mine.get("host") == socket.gethostname() and not lives(mine) and path.exists()

    def stall_text(self, where: str, waits: bool) -> str:
        phase, step, since = self._standing
        text = f"on {node_name()} the phase {phase} has lasted {time.monotonic() - since:.0f} s (distributed."
        text += f"{LIMITS[phase]} = {self._limits[phase]}), the last finished step is {step}; "
        text += f"the main thread stands at {where}" + (", waiting for other ranks or a device" if waits else "")
        if frozen_s := self.stood_still():
            text += f"; this process stood still for {frozen_s:.0f} s"
        if missing := self._missing():
            text += f"; never started: ranks {', '.join(map(str, missing))}"
        return text

    def _leave(self, trouble: str) -> None:
        """Another rank has failed. If it waited in vain, and this one did not, this one is the cause."""
        where, waits = standing()
        told = self._told()
        reports = [rundir.read_json(self.run.error(self.attempt, rank)) for rank in told]
        secondary = all(report.get("secondary") for report in reports)
        stalled = any(report.get("type") == "Stalled" or "imed out" in report.get("message", "") for report in reports)
        if secondary and stalled and (not waits or self.stood_still()):
            self._end(Stalled(self.stall_text(where, waits)), secondary=False)
        self._end(RunFailed(f"left: {trouble}"), secondary=True, hold_s=2 * POLL_S)

    def _end(self, error: PithtrainError, secondary: bool, hold_s: float = 0.0) -> None:
        """End this process from the watching thread. Never returns."""
        self._ending.acquire()
        code = 1
        with contextlib.suppress(Exception):
            _write(str(error))  # to the descriptor, which is the log: on the console the cause is said once
            faulthandler.dump_traceback(2, all_threads=True)
            report = self.report(error, str(error), main_stack(), secondary)
            rundir.record_error(self.run, self.attempt, f"rank-{self.rank}", report)
            self.record_collectives()
            if secondary:
                self.hold(hold_s)
            first = rundir.first_error(self.run, self.attempt)
            code = first["exit_code"] if first is not None else 1
            if self.rank == 0:
                self.end_attempt("failed", code)
        os._exit(code)

    def _comment(self) -> None:
        """Now and then, tell Slurm how far the run is: `squeue` shows the job's comment. A failure is nobody's."""
        if self._scontrol is not None and self._scontrol.poll() is None:
            if time.monotonic() > self._comment_due:
                self._scontrol.kill()
            return
        if self.launcher != "slurm" or time.monotonic() < self._comment_due:
            return
        step, row = self._standing.step, rundir.last_line(self.run.metrics)
        if step == self._comment_step:
            return
        self._comment_due, self._comment_step = time.monotonic() + COMMENT_S, step
        loss = f" loss={row['loss']:.4f}" if isinstance(row.get("loss"), float) else ""
        token = os.environ.get("PITHTRAIN_TOKEN", "-")
        text = f"Comment=pithtrain {token} step={step}{loss} attempt={self.attempt}"
        command = ["scontrol", "update", f"JobId={os.environ['SLURM_JOB_ID']}", text]
        null = subprocess.DEVNULL
        with contextlib.suppress(OSError):  # there may be no scontrol
            self._scontrol = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


# ---- small things ----------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def node_name() -> str:
    """This node's name as Slurm's options take it; it need not be the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def standing() -> tuple[str, bool]:
    """Where the main thread is, as `file:line function`, and whether it waits there for other ranks or a device. It
    does where torch.distributed was called, or where our own innermost line says so."""
    frames, package = _main_frames(), Path(__file__).parent
    ours = next((i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(package)), None)
    called = frames if ours is None else frames[: ours + 1]
    waits = any(re.search(r"/torch/distributed/(?!checkpoint/)", frame.filename) for frame in called)
    if ours is not None:
        waits = waits or WAITS.search(frames[ours].line or "") is not None
    where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in (called[0], called[-1])]
    return " in ".join(dict.fromkeys(where)), waits


def main_stack() -> str:
    """The main thread's stack as a traceback would show it, innermost last."""
    return "".join(traceback.format_list(_main_frames()[::-1]))


def _main_frames() -> list[traceback.FrameSummary]:
    """Innermost first; those of the thread that writes a checkpoint on top, where the main thread waits for it."""
    frames = _frames(threading.main_thread())
    if any(frame.name == "_join" for frame in frames):
        writers = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
        frames = [frame for writer in writers for frame in _frames(writer)] + frames
    return frames


def _frames(thread: threading.Thread) -> list[traceback.FrameSummary]:
    """Innermost first. No source is looked at, as `StackSummary.extract` does: a disk that hangs may be the trouble."""
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]  # the documented way
    if frame is None:
        return []
    return [
        traceback.FrameSummary(each.f_code.co_filename, line, each.f_code.co_name, lookup_line=False)
        for each, line in traceback.walk_stack(frame)
    ]


def process_start(pid: int) -> float | None:
    """When process `pid` began (Unix time; 0 where the system does not tell), None where there is none but a zombie."""
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return 0.0
        return None
    try:
        # the name, in parentheses, may itself hold spaces and parentheses
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")


@functools.cache
def _boot_time() -> int:
    return int(Path("/proc/stat").read_text().partition("\nbtime ")[2].split()[0])


def lives(signed_in: Mapping[str, Any]) -> bool:
    """Whether a process of this host that wrote a pid file runs; a later one may have the same number."""
    start = process_start(signed_in["pid"])
    return start is not None and abs(start - signed_in["start"]) < 1


def _write(text: str) -> None:
    """A line to the descriptor of stderr: no Python stream, whose lock the main thread may hold."""
    os.write(2, f"{text}\n".encode())
