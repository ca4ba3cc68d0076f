"""Who is to blame for a hang, signals that nobody steals, markers, and what a rank leaves behind when another ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fake_run import FINISHES, WAITS_FOR_STOP, change_snapshot, ends, is_waiting, make_run, start_workers, wait_for
from harness import MODEL, make_spec
from pithtrain import catalog, jobs, rundir, watch
from pithtrain.rundir import RunDir
from test_data import make

HURRY = {"POLL_S": 0.2, "GRACE_S": 1.0}
SHORT = ["distributed.step_timeout_s=2"]


def error(run: RunDir, rank: int) -> dict[str, object]:
    found = rundir.read_json(run.error(1, rank))
    assert found, f"rank {rank} wrote no error"
    return found


# ---- hangs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["step", pytest.param("save", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_names_itself_though_all_outlive_the_limit(tmp_path: Path, phase: str) -> None:
    """In `save` its own limit is far away: it learns from the others that they wait in vain."""
    train = f"""
import threading

def hangs():
    time.sleep(1000)

def run(spec, run_dir, place, watch):
    peer = threading.Event()
    if place.rank == 1:
        watch.enter("{phase}", 7)
        hangs()
    watch.enter("step", 7)
    peer.wait()
"""
    run, _ = make_run(tmp_path, train, ranks=4, overrides=SHORT)
    change_snapshot(run, "watch", **HURRY)
    assert [end[0] for end in ends(start_workers(run, range(4), size=4))] == [1, 1, 1, 1]
    first = rundir.first_error(run, 1)
    assert first is not None
    assert (first["rank"], first["type"], first["secondary"], first["retry"]) == (1, "Stalled", False, True)
    assert (first["phase"], first["step"]) == (phase, 7)
    assert f"the phase {phase} has lasted" in first["message"]
    assert "the last finished step is 7" in first["message"]
    assert "train.py" in first["message"]
    assert first["message"].endswith(" hangs")
    assert "time.sleep(1000)" in first["traceback"]
    for rank in (0, 2, 3):
        assert error(run, rank)["secondary"]
        assert "peer.wait()" in str(error(run, rank)["traceback"])
    assert "time.sleep" in (run.log(1, 1)).read_text() or "hangs" in run.log(1, 1).read_text()


@pytest.mark.slow
def test_time_in_which_a_process_stood_still_is_no_phase_s(tmp_path: Path) -> None:
    """As when Slurm suspends a job: it goes on where it was, and its limits hold as before."""
    train = """
def run(spec, run_dir, place, watch):
    watch.enter("step", 7)
    print("waiting", flush=True)
    time.sleep(1000)
"""
    run, _ = make_run(tmp_path, train, ranks=1, overrides=["distributed.step_timeout_s=3"])
    change_snapshot(run, "watch", **HURRY, FROZEN_S=1.0)
    (task,) = start_workers(run, [0], size=1)
    wait_for(lambda: is_waiting(run, [0]))
    task.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    woken = time.monotonic()
    task.send_signal(signal.SIGCONT)
    assert ends([task])[0][0] == 1
    assert time.monotonic() - woken > 2.5
    assert "this process stood still for" in str(error(run, 0)["message"])


@pytest.mark.slow
def test_an_interpreter_that_hangs_is_ended_from_below(tmp_path: Path) -> None:
    """No Python thread runs while the GIL is held; the others then say who is silent."""
    train = """
import ctypes, threading

def run(spec, run_dir, place, watch):
    watch.enter("step", 7)
    if place.rank == 1:
        ctypes.PyDLL(None).sleep(1000)
    threading.Event().wait()
"""
    run, _ = make_run(tmp_path, train, overrides=SHORT)
    change_snapshot(run, "watch", **HURRY, MARGIN_S=1.0)
    assert [end[0] for end in ends(start_workers(run, [0, 1]))] == [1, 1]
    assert error(run, 0)["secondary"]
    assert not run.error(1, 1).exists()
    assert "Timeout (0:00:03)!" in run.log(1, 1).read_text()
    assert "rank 1 stopped answering" in jobs.cause(run, 1).line


@pytest.mark.slow
def test_a_rank_that_was_killed_ends_the_others_without_any_supervision(tmp_path: Path) -> None:
    """In its first second, and with no connection between them that could break."""
    train = """
def run(spec, run_dir, place, watch):
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""
    run, _ = make_run(tmp_path, train, ranks=4)
    change_snapshot(run, "watch", **HURRY)
    assert [end[0] for end in ends(start_workers(run, range(4), size=4))] == [1, -signal.SIGKILL, 1, 1]
    assert {error(run, rank)["message"] for rank in (0, 2, 3)} == {"left: rank 1 was killed"}
    assert "rank 1 was killed" in jobs.cause(run, 1).line


@pytest.mark.parametrize("then", ["removed", "moved", "made anew"])
def test_ranks_end_where_their_run_directory_is_not_theirs_any_more(tmp_path: Path, then: str) -> None:
    """Else they would train on unseen, or write into another run of that name."""
    run, _ = make_run(tmp_path, WAITS_FOR_STOP)
    change_snapshot(run, "watch", **HURRY)
    tasks = start_workers(run, [0, 1])
    wait_for(lambda: is_waiting(run, [0, 1]))
    run.path.rename(tmp_path / "elsewhere")
    if then == "removed":
        shutil.rmtree(tmp_path / "elsewhere")
    elif then == "made anew":
        make_run(tmp_path, WAITS_FOR_STOP)
    assert [end[0] for end in ends(tasks)] == [1, 1]
    assert run.path.exists() == (then == "made anew")
    assert not run.heartbeat.exists() and not run.errors(1).exists()
    if then == "moved":
        assert "was removed, moved or made anew" in RunDir(tmp_path / "elsewhere").log(1, 0).read_text()


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, WAITS_FOR_STOP, ranks=4)
    change_snapshot(run, "watch", **HURRY, START_S=1.0)
    assert [end[0] for end in ends(start_workers(run, [0, 2, 3], size=4))] == [1, 1, 1]
    assert "rank 1 never started" in str(error(run, 0)["message"])


@pytest.mark.slow
def test_a_slow_start_of_another_host_is_waited_for_and_then_named(tmp_path: Path) -> None:
    """Under Slurm only the limit of `init` ends the wait."""
    run, _ = make_run(tmp_path, WAITS_FOR_STOP, ranks=4, overrides=["distributed.init_timeout_s=3"])
    change_snapshot(run, "watch", **HURRY, START_S=0.5)
    began = time.monotonic()
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_NODELIST": "h"}
    ends([task for rank in "013" for task in start_slurm_worker(run, 1, {**step, "SLURM_PROCID": rank})])
    assert time.monotonic() - began > 3
    first = rundir.first_error(run, 1)
    assert first is not None
    assert first["message"].endswith("never started: ranks 2")


def test_a_rank_that_ended_well_is_no_casualty(tmp_path: Path) -> None:
    """It signs out: rank 0 may upload for a while after all others have left."""
    train = """
def run(spec, run_dir, place, watch):
    if place.rank == 0:
        while not (run_dir.path / "go").exists():
            time.sleep(0.05)
    return Outcome(4, True)
"""
    run, _ = make_run(tmp_path, train)
    change_snapshot(run, "watch", **HURRY)
    zero, one = start_workers(run, [0, 1])
    assert one.wait(30) == 0
    wait_for(lambda: not run.pid(1, 1).exists())
    time.sleep(1.0)  # five looks
    (run.path / "go").touch()
    assert [end[0] for end in ends([zero, one])] == [0, 0]
    assert not list(run.logs(1).glob("*.pid"))


@pytest.mark.slow
def test_a_limit_is_that_of_the_phase(tmp_path: Path) -> None:
    train = """
def run(spec, run_dir, place, watch):
    for phase in ("save", "step", "save"):
        watch.enter(phase, 3)
        time.sleep({"save": 2.5, "step": 0.5}[phase])
    return Outcome(4, True)
"""
    overrides = ["distributed.step_timeout_s=2", "distributed.save_timeout_s=9"]
    run, _ = make_run(tmp_path, train, ranks=1, overrides=overrides)
    change_snapshot(run, "watch", POLL_S=0.2)
    assert ends(start_workers(run, [0], size=1))[0][0] == 0


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_case_019_signals_that_a_library_took_are_ours_again(tmp_path: Path) -> None:
    """One takes them in Python, one in C and unseen; the log says which signals do what."""
    train = """
import ctypes

def run(spec, run_dir, place, watch):
    signal.signal(signal.SIGTERM, lambda *_: None)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        ctypes.CDLL(None).signal(number, signal.SIG_IGN)
    watch.enter("first_step", 0)
    print("waiting", flush=True)
    while not watch.should_stop():
        time.sleep(0.05)
    return Outcome(1, False)
"""
    run, _ = make_run(tmp_path, train)
    tasks = start_workers(run, [0, 1])
    wait_for(lambda: is_waiting(run, [0, 1]))
    for rank in (0, 1):
        assert "SIGTERM: a library had taken them; they are ours again" in run.log(1, rank).read_text()
        assert "SIGUSR2, SIGTERM save and stop at a step boundary, SIGUSR1" in run.log(1, rank).read_text()
    tasks[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: "most recent call first" in run.log(1, 0).read_text())
    tasks[0].send_signal(signal.SIGTERM)
    tasks[1].send_signal(signal.SIGUSR2)
    assert [end[0] for end in ends(tasks)] == [0, 0]
    assert rundir.read_json(run.requeue)["reason"] == "SIGTERM"


def test_signals_that_come_before_there_is_a_handler_are_heard(tmp_path: Path) -> None:
    """As `srun` starts a rank: its imports take a while. Nothing stays held back, in threads and children neither."""
    train = """
import subprocess, threading

def blocked(text):
    return next(line.split()[1] for line in text.splitlines() if line.startswith("SigBlk"))

def run(spec, run_dir, place, watch):
    of_thread = []
    read = lambda: of_thread.append(open(f"/proc/self/task/{threading.get_native_id()}/status").read())
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    print("blocked", *map(blocked, (open("/proc/self/status").read(), of_thread[0], child)))
    print("umask", oct(os.umask(0)), "path", sys.path[0], "arguments", sys.argv[1:])
    while not watch.should_stop():
        time.sleep(0.05)
    return Outcome(1, False)
"""
    run, _ = make_run(tmp_path, train, ranks=1)
    spec = run.code / "pithtrain" / "spec.py"
    spec.write_text(
        spec.read_text() + "\nimport time\nopen('importing', 'w').close()\n"
        "while not os.path.exists('go'):\n    time.sleep(0.02)\n"
    )
    held = (str(run.code / "pithtrain" / "held.py"), "-u", "-m")
    before, umask = os.getcwd(), os.umask(0o002)
    os.chdir(run.code)
    try:
        (task,) = start_workers(run, [0], size=1, command=held)
    finally:
        os.chdir(before)
        os.umask(umask)
    wait_for((run.code / "importing").exists)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        task.send_signal(number)
    (run.code / "go").touch()
    assert ends([task])[0][0] == 0
    log = run.log(1, 0).read_text()
    zero = "0000000000000000"
    assert f"blocked {zero} {zero} {zero}" in log
    assert f"umask 0o22 path {run.code} arguments ['{run.path}']" in log
    assert "most recent call first" in log, "SIGUSR1 waited for the log"
    assert rundir.read_json(run.requeue)["step"] == 1


# ---- markers, heartbeat, comment -------------------------------------------------------------------------------------

SAVES = """
def run(spec, run_dir, place, watch):
    watch.enter("step", 5)
    print("waiting", flush=True)
    while not watch.should_stop():
        if watch.should_save():
            watch.enter("save", 6)
            print("saving", flush=True)
            watch.saved()
        time.sleep(0.05)
    return Outcome(6, False)
"""


def test_a_save_marker_of_this_attempt_is_heard_once_and_vanishes(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, SAVES, ranks=1)
    change_snapshot(run, "watch", POLL_S=0.2)
    (task,) = start_workers(run, [0], attempt=2, size=1)
    wait_for(lambda: is_waiting(run, [0], attempt=2))
    rundir.mark(run.save, 1)
    time.sleep(0.6)  # three looks
    assert "saving" not in run.log(2, 0).read_text()
    beat = rundir.read_json(run.heartbeat)
    assert (beat["phase"], beat["step"], beat["attempt"], beat["pid"]) == ("step", 5, 2, task.pid)
    assert abs(beat["time"] - time.time()) < 30
    rundir.mark(run.save, 2)
    wait_for(lambda: not run.save.exists())
    wait_for(lambda: rundir.read_json(run.heartbeat)["phase"] == "save")
    task.send_signal(signal.SIGTERM)
    assert ends([task])[0][0] == 0
    assert run.log(2, 0).read_text().count("saving") == 1


@pytest.mark.slow
def test_the_job_s_comment_tells_how_far_it_is_and_a_missing_scontrol_is_nothing(tmp_path: Path) -> None:
    train = """
def run(spec, run_dir, place, watch):
    while not watch.should_stop():
        emit(run_dir, place, 3)
        watch.enter("step", 3)
        time.sleep(0.05)
    return Outcome(3, False)
"""
    run, _ = make_run(tmp_path, train, ranks=1)
    change_snapshot(run, "watch", POLL_S=0.2)
    said = tmp_path / "said"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    slurm |= {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n0", "PITHTRAIN_TOKEN": "abc-1", "WORLD_SIZE": ""}
    paths = f"{scontrol.parent}:/usr/bin:/bin"
    for attempt, script in ((1, None), (2, f'#!/bin/sh\nprintf "%s\\n" "$@" >> {said}\n')):
        if script is not None:
            scontrol.write_text(script)
            scontrol.chmod(0o755)
        env = {name: value for name, value in slurm.items() if value}
        (task,) = start_slurm_worker(run, attempt, env | {"PATH": paths})
        wait_for(lambda: rundir.read_json(run.heartbeat).get("step") == 3)
        if script is not None:
            wait_for(said.exists)
        time.sleep(0.6)  # three looks
        task.send_signal(signal.SIGTERM)
        assert ends([task])[0][0] == 0
    assert said.read_text().splitlines() == [
        "update",
        "JobId=42",
        "Comment=pithtrain abc-1 step=3 loss=5.0000 attempt=2",
    ]


def start_slurm_worker(run: RunDir, attempt: int, env: dict[str, str]) -> list["subprocess.Popen[str]"]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "pithtrain.worker", str(run.path)]
    env = clean | {"PYTHONPATH": str(run.code), "PITHTRAIN_ATTEMPT": str(attempt)} | env
    return [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)]


def test_a_heartbeat_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    one = watch.Watch(RunDir(tmp_path / "gone"), 1, 0)
    one.enter("step", 1)


def test_a_process_number_used_again_is_another_process() -> None:
    mine = watch.process_start(os.getpid())
    assert mine is not None
    assert abs(mine - time.time()) < 24 * 3600
    child = subprocess.Popen(["true"])
    wait_for(lambda: watch.process_start(child.pid) is None)  # a zombie, since nobody has asked for its end
    child.wait()


# ---- the real engine -------------------------------------------------------------------------------------------------


WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 128, "moe_intermediate_size": 128}  # what a GPU needs
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_two])])


def real_run(
    folder: Path, max_steps: int, interval: int | None = None, device: str = "cpu", **distributed: int
) -> RunDir:
    rng = np.random.default_rng(5)
    documents = [rng.integers(10, MODEL["vocab_size"], 40).tolist() for _ in range(50)]
    tokens = make(folder / "corpus", documents, MODEL["vocab_size"]) / "tokens"
    spec = make_spec(
        ep=2,
        model=WIDE if device == "cuda" else None,
        training={"max_steps": max_steps, "global_batch_size": 8, "device": device},
        data={"sources": [{"path": str(tokens)}], "repeat": True},
        checkpoint={"interval": interval},
        distributed=distributed,
    )
    return rundir.create(folder / "run", spec.to_yaml(), {}, ["test"])


def steps(run: RunDir) -> list[int]:
    return [row["step"] for row in rundir.read_lines(run.metrics)]


BEGINS = ("preflight", "started", "transport", "weight_decay", "data")  # events before the first step


def kinds(run: RunDir) -> list[str]:
    return [row["event"] for row in rundir.read_lines(run.events)]


@pytest.mark.slow
@DEVICES
def test_case_158_a_signal_to_rank_1_stops_all_at_one_step(tmp_path: Path, device: str) -> None:
    """Rank 0 gets one a step later. On the way: a requested save, a preflight, a clean end."""
    run = real_run(tmp_path, max_steps=100_000, device=device)
    zero, one = start_workers(run, [0, 1])
    wait_for(lambda: len(steps(run)) >= 2, 90)
    rundir.mark(run.save, 1)
    wait_for(lambda: not run.save.exists())
    asked = len(steps(run))
    one.send_signal(signal.SIGUSR2)
    wait_for(lambda: len(steps(run)) > asked)
    zero.send_signal(signal.SIGUSR2)
    assert [end[0] for end in ends([zero, one])] == [0, 0]
    stopped = rundir.read_json(run.requeue)["step"]
    assert steps(run) == list(range(1, stopped + 1))
    assert catalog.read(catalog.folder(run.checkpoints, stopped))["step"] == stopped
    assert kinds(run) == [*BEGINS, "saved", "saved", "preempted"]
    saved = [row for row in rundir.read_lines(run.events) if row["event"] == "saved"]
    assert [row["requested"] for row in saved] == [True, False]
    assert not list(run.logs(1).glob("*.pid"))
    assert rundir.read_lines(run.attempts)[-1]["ended"] == "stopped"


@pytest.mark.slow
@DEVICES
def test_a_frozen_rank_is_the_silent_one(tmp_path: Path, device: str) -> None:
    """Its peer stands in a real collective, and knows that it only waits. Woken again, it says that it stood still."""
    run = real_run(tmp_path, max_steps=100_000, device=device, step_timeout_s=3)
    change_snapshot(run, "watch", HOLD_S=1.0, FROZEN_S=1.0)
    zero, one = start_workers(run, [0, 1])
    wait_for(lambda: len(steps(run)) >= 2, 90)
    one.send_signal(signal.SIGSTOP)
    try:
        assert zero.wait(30) == 1
        assert (error(run, 0)["type"], error(run, 0)["secondary"]) == ("Stalled", True)
        assert "waiting for other ranks or a device" in str(error(run, 0)["message"])
        assert "rank 1 stopped answering" in jobs.cause(run, 1).line
        one.send_signal(signal.SIGCONT)
        assert one.wait(30) == 1
        assert error(run, 1)["type"] == "Stalled"
        line = jobs.cause(run, 1).line
        assert line.startswith("rank 1: on ")
        assert "this process stood still for" in line
    finally:
        one.kill()
        ends([zero, one])


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize("where", ["loader", "forward"])
def test_a_rank_that_hangs_in_the_engine_is_named_with_its_line(tmp_path: Path, device: str, where: str) -> None:
    run = real_run(tmp_path, max_steps=100_000, device=device, step_timeout_s=4)
    module, text = FAULTS[where]
    add(run, module, text.replace('raise ValueError("the cause")', "time.sleep(1000)"))
    assert [end[0] for end in ends(start_workers(run, [0, 1]), 90)] == [1, 1]
    line = jobs.cause(run, 1).line
    assert line.startswith("rank 1: on ")
    assert f"{module}.py:" in line
    assert error(run, 0)["secondary"]


FAULTS = {
    "forward": (
        "pipeline",
        """
_forward, _calls = forward, 0

def forward(*args):
    global _calls
    _calls += 1
    if RANK_1 and _calls > 40:
        raise ValueError("the cause")
    return _forward(*args)
""",
    ),
    "loader": (
        "data",
        """
_batch = Dataset.batch

def _fails(self, first, count):
    if RANK_1 and first >= 16:
        raise ValueError("the cause")
    return _batch(self, first, count)

Dataset.batch = _fails
""",
    ),
    "save": (
        "checkpoint",
        """
_save = dcp_saver.save

def _fails(*args, **kwargs):
    if RANK_1:
        raise ValueError("the cause")
    return _save(*args, **kwargs)

dcp_saver.save = _fails
""",
    ),
}


@pytest.mark.parametrize("place", ["forward", "loader", "save"])
@pytest.mark.slow
def test_case_161_an_exception_on_rank_1_anywhere_ends_all(tmp_path: Path, place: str) -> None:
    run = real_run(tmp_path, max_steps=100_000, interval=3)
    add(run, *FAULTS[place])
    zero, one = ends(start_workers(run, [0, 1]), 90)
    assert zero[0] != 0
    assert one[0] != 0
    assert "the cause" in jobs.cause(run, 1).line
    assert "rank 1" in jobs.cause(run, 1).line
    assert rundir.read_lines(run.attempts)[-1]["ended"] == "failed"


def add(run: RunDir, module: str, text: str) -> None:
    path = run.code / "pithtrain" / f"{module}.py"
    path.write_text(path.read_text() + "\nimport os, time\n\nRANK_1 = os.environ['RANK'] == '1'\n" + text)


@pytest.mark.slow
def test_case_162_a_rank_that_dies_while_another_writes_spoils_no_checkpoint(tmp_path: Path) -> None:
    run = real_run(tmp_path, max_steps=6, interval=2)
    before = (run.code / "pithtrain" / "checkpoint.py").read_text()
    slow_and_dead = """
_sync = catalog.sync

def _slow(path):
    while path.name == "step-00000004.partial":  # the marker stands, the rename is to come
        time.sleep(0.1)
    _sync(path)

catalog.sync = _slow
_told = World.from_rank_zero

def _dies(self, value, group=None):
    if RANK_1 and group is not None and os.path.exists(os.environ["SECOND"] + "/.metadata"):
        while not os.path.exists(os.environ["SECOND"] + "/checkpoint.json"):
            time.sleep(0.05)
        os._exit(1)
    return _told(self, value, group)

World.from_rank_zero = _dies
"""
    add(run, "checkpoint", slow_and_dead)
    partial = run.checkpoints / "step-00000004.partial"
    ends(start_workers(run, [0, 1], SECOND=str(partial)), 90)
    assert not run.done.exists()
    (run.code / "pithtrain" / "checkpoint.py").write_text(before)
    assert [end[0] for end in ends(start_workers(run, [0, 1], attempt=2), 90)] == [0, 0]
    resumed = [row["step"] for row in rundir.read_lines(run.events) if row["event"] == "resumed"]
    assert resumed == [2]
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert rundir.read_json(run.done)["step"] == 6


def test_a_finished_run_says_so_before_it_uploads(tmp_path: Path) -> None:
    """The marker is on the disk while rank 0 still closes W&B: a grace time may end there."""
    run, _ = make_run(tmp_path, FINISHES, ranks=1)
    one = watch.Watch(run, 1, 0)
    one.ended(4, finished=True)
    assert rundir.read_json(run.done)["step"] == 4
    assert json.loads(run.attempts.read_text())["ended"] == "done"


def test_the_thread_that_writes_a_checkpoint_is_looked_at_where_the_main_thread_waits_for_it() -> None:
    """Else a rank whose disk hangs would look like one that waits for the others."""
    seen: list[tuple[str, bool]] = []
    stacks: list[str] = []
    ready = threading.Event()

    def writes_for_ever() -> None:
        ready.wait()
        while not stacks:
            time.sleep(0.01)

    def looks() -> None:
        ready.set()
        deadline = time.monotonic() + 30
        while "in _join" not in watch.main_stack() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(watch.standing())
        stacks.append(watch.main_stack())

    class Saver:
        def _join(self) -> None:
            writer.join()

    writer = threading.Thread(target=writes_for_ever, name="checkpoint")
    writer.start()
    looker = threading.Thread(target=looks)
    looker.start()
    Saver()._join()
    looker.join()
    assert "in writes_for_ever" in stacks[0]
    assert "in _join" in stacks[0]
    assert "writes_for_ever" in seen[0][0]
