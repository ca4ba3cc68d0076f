"""Once per task: the environment as text in, the place out; every rank ends soon after one has failed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fake_run import FINISHES, WAITS_FOR_STOP, change_snapshot, ends, is_waiting, make_run, start_workers, wait_for
from pithtrain import rundir, slurm, worker
from pithtrain.errors import RunDirError, SpecError
from pithtrain.rundir import RunDir
from pithtrain.world import Place

RUN = RunDir(Path("/runs/tiny"))

SLURM = {
    "SUBMITIT_EXECUTOR": "slurm",
    "PITHTRAIN_ATTEMPT": "3",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "13",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "5",
    "SLURM_NNODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}
SPAWN = {"RANK": "1", "WORLD_SIZE": "4", "PITHTRAIN_ATTEMPT": "2"}


def port(job: int, step: int = 0) -> int:
    return int(
        worker.init_method(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, Path()).split(":")[-1]
    )


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (SLURM, Place(13, 16, 5, f"tcp://10.1.2.3:{15000 + 4711}", 3)),
        (SLURM | {"SLURM_RESTART_COUNT": "2"}, Place(13, 16, 5, f"tcp://10.1.2.3:{15000 + 4711}", 5)),
        (SPAWN, Place(1, 4, 1, "file:///runs/tiny/logs/attempt-2/rendezvous", 2)),
        # a run started inside another job's allocation is its own world, not a rank of that job
        (SLURM | SPAWN, Place(1, 4, 1, "file:///runs/tiny/logs/attempt-2/rendezvous", 2)),
        (  # the job around it was requeued, this run was not
            SLURM | SPAWN | {"SLURM_RESTART_COUNT": "2"},
            Place(1, 4, 1, "file:///runs/tiny/logs/attempt-2/rendezvous", 2),
        ),
    ],
)
def test_place_from_environment(env: dict[str, str], place: Place) -> None:
    assert worker.place_from_environment(env, RUN) == place


def test_without_a_launcher_there_is_one_rank() -> None:
    for env in ({}, {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}):  # the second: a batch script
        assert (worker.seat(env).launcher, worker.seat(env).world_size) == ("alone", 1)
    interactive = SLURM | {"SLURM_STEP_ID": "4294967290"}  # the shell of salloc
    assert worker.seat(interactive).launcher == "alone"


def test_without_a_launch_node_ranks_meet_at_the_first_node_or_where_the_user_says() -> None:
    env = {name: value for name, value in SLURM.items() if name != "SLURM_LAUNCH_NODE_IPADDR"}
    assert worker.init_method(env, Path()) == f"tcp://gpu003:{15000 + 4711}"
    assert worker.init_method(env | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "9"}, Path()) == "tcp://[fe80::1]:9"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n0", "n0"), ("n0,n1", "n0"), ("gpu[003-010,12],x1", "gpu003"), ("a[1,3]-ib,b2", "a1-ib"), ("r1n[7]", "r1n7")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert slurm.hostnames(nodes)[0] == first


def test_case_015_ports_of_jobs_and_steps_differ_and_are_not_ephemeral() -> None:
    ports = {port(job) for job in range(100_000, 117_000)}
    assert len(ports) == 17_000
    assert min(ports) >= 15_000
    assert max(ports) < 32_768
    assert len({port(42, step) for step in range(100)}) == 100


def test_threads_are_shared_out_and_a_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert worker.prepare_environment(SPAWN)["OMP_NUM_THREADS"] == "2"
    assert worker.prepare_environment(SLURM | {"SLURM_CPUS_PER_TASK": "6"})["OMP_NUM_THREADS"] == "6"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert worker.prepare_environment(SPAWN)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in worker.prepare_environment(SPAWN | {"OMP_NUM_THREADS": "7"})
    # several hosts need the real interface
    assert "GLOO_SOCKET_IFNAME" in worker.prepare_environment(SPAWN)
    assert "GLOO_SOCKET_IFNAME" not in worker.prepare_environment(SLURM)


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2811", True),
        ("Read error [127.0.0.1]:41: Connection reset by peer", True),
        ("NCCL error: remote process exited or there was a network error", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("the gradient norm was not finite in 1 of the steps up to 7", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_a_lost_peer_is_told_from_a_cause(message: str, lost: bool) -> None:
    assert (worker.LOST_PEER.search(message) is not None) == lost


def test_a_variable_that_is_no_number_is_said(tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "PITHTRAIN_ATTEMPT"):
        with pytest.raises(SpecError, match=rf"{name} = 'x': is not a whole number; .* unset {name}"):
            worker.place_from_environment(SPAWN | {name: "x"}, RUN)
    with pytest.raises(RunDirError, match="start a run with `pithtrain submit`"):
        worker.attempt_of({})
    run, _ = make_run(tmp_path, FINISHES, ranks=1)
    ((code, _, err),) = ends(start_workers(run, [0], size=1, RANK="x"))
    assert code == 2
    assert "Traceback" not in err


# ---- whole processes -------------------------------------------------------------------------------------------------


def test_a_run_that_finishes(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    (code, out, err), (other, other_out, _) = ends(start_workers(run, [0, 1]))
    assert (code, other) == (0, 0)
    assert "hello from Place(rank=0" in out  # rank 0's console
    assert other_out == err == ""
    assert "hello from Place(rank=1" in run.log(1, 1).read_text()
    assert run.log(1, 0).read_text() == out
    assert rundir.read_json(run.done)
    assert run.attempt_spec(1).read_text() == run.spec_yaml.read_text()
    (attempt,) = rundir.read_lines(run.attempts)
    assert (attempt["ended"], attempt["first_step"], attempt["last_step"], attempt["launcher"]) == (
        "done",
        1,
        4,
        "spawn",
    )
    assert attempt["end"] >= attempt["start"]


@pytest.mark.parametrize(
    ("raises", "code", "said"),
    [
        pytest.param(
            "DataError('no corpus in data/none')", 2, "rank 1: no corpus in data/none", marks=pytest.mark.slow
        ),
        ("ValueError('three')", 1, "rank 1: ValueError: three"),
        pytest.param("KeyboardInterrupt()", 1, "rank 1: KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param("MemoryError()", 1, "rank 1: MemoryError", marks=pytest.mark.slow),
    ],
)
def test_case_161_an_exception_on_one_rank_ends_all_without_any_supervision(
    tmp_path: Path, raises: str, code: int, said: str
) -> None:
    """Rank 0 hangs for ever, as in a collective; a library's thread that is no daemon hangs on rank 1."""
    hang = "time.sleep(1000)"
    train = f"""
import threading

def run(spec, run_dir, place, watch):
    if place.rank == 1:
        threading.Thread(target=lambda: {hang}).start()
        raise {raises}
    {hang}
"""
    run, _ = make_run(tmp_path, train)
    change_snapshot(run, "watch", POLL_S=0.2, GRACE_S=1.0)
    began = time.monotonic()
    zero, one = ends(start_workers(run, [0, 1]))
    assert time.monotonic() - began < 20
    assert zero[0] == code
    assert one[0] == code
    first = rundir.first_error(run, 1)
    assert first is not None
    assert rundir.describe_error(first) == said
    assert "in run" in first["traceback"]
    assert f"left: {said}" in run.log(1, 0).read_text()
    assert "time.sleep" not in zero[2]
    assert not run.done.exists()
    assert rundir.read_lines(run.attempts)[-1]["ended"] == "failed"


def test_a_second_error_caused_by_the_first_does_not_hide_it(tmp_path: Path) -> None:
    train = """
def run(spec, run_dir, place, watch):
    if place.rank == 0:
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:2811")
    time.sleep(0.5)
    raise ZeroDivisionError("the real one")
"""
    run, _ = make_run(tmp_path, train)
    assert [end[0] for end in ends(start_workers(run, [0, 1]))] == [1, 1]
    first = rundir.first_error(run, 1)
    assert first is not None
    assert (first["rank"], first["type"]) == (1, "ZeroDivisionError")


def test_a_wrong_number_of_processes_is_said(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    (code, _, _), *_ = ends(start_workers(run, [0, 1, 2], size=3))
    assert code == 2
    first = rundir.first_error(run, 1)
    assert first is not None
    assert "the spec's mesh has 2 ranks, and spawn started 3" in first["message"]


def test_a_damaged_spec_is_said(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    run.spec_yaml.write_text("name: [")
    (code, _, _), *_ = ends(start_workers(run, [0, 1]))
    assert code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_sets_the_flag_and_the_marker_says_where_it_stopped(tmp_path: Path, number: signal.Signals) -> None:
    run, _ = make_run(tmp_path, WAITS_FOR_STOP)
    tasks = start_workers(run, [0, 1])
    wait_for(lambda: is_waiting(run, [0, 1]))
    for task in tasks:
        task.send_signal(number)
    assert [end[0] for end in ends(tasks)] == [0, 0]
    marker = rundir.read_json(run.requeue)
    assert (marker["step"], marker["reason"], marker["attempt"]) == (1, number.name, 1)
    assert rundir.read_lines(run.attempts)[-1]["ended"] == "stopped"


def test_a_stop_marker_of_this_attempt_stops_and_a_stale_one_does_not(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, WAITS_FOR_STOP, ranks=1)
    change_snapshot(run, "watch", POLL_S=0.2)
    rundir.mark(run.stop, 1)
    tasks = start_workers(run, [0], attempt=2, size=1)
    wait_for(run.metrics.exists)
    time.sleep(0.5)  # two looks
    assert tasks[0].poll() is None
    rundir.mark(run.stop, 2)
    assert ends(tasks)[0][0] == 0
    assert rundir.read_json(run.stop)["step"] == 1
    assert not run.requeue.exists()


def test_usr1_writes_the_stacks_into_the_log_and_the_run_goes_on(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, WAITS_FOR_STOP, ranks=1)
    tasks = start_workers(run, [0], size=1)
    wait_for(run.metrics.exists)
    tasks[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: "in run" in run.log(1, 0).read_text())
    assert tasks[0].poll() is None
    tasks[0].send_signal(signal.SIGTERM)
    assert ends(tasks)[0][0] == 0


def test_case_160_ranks_whose_launcher_was_killed_save_and_end(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, WAITS_FOR_STOP, ranks=1)
    env = dict(os.environ) | {"PYTHONPATH": str(run.code), "PITHTRAIN_ATTEMPT": "1", "RANK": "0", "WORLD_SIZE": "1"}
    script = f"{sys.executable} -m pithtrain.worker {run.path} & wait"
    launcher = subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.DEVNULL)
    wait_for(run.metrics.exists)
    launcher.kill()
    launcher.wait()
    wait_for(run.requeue.exists)
    wait_for(lambda: rundir.read_lines(run.attempts)[-1]["ended"] == "stopped")
    assert rundir.read_json(run.requeue)["reason"] == "the launcher died"


def test_what_c_writes_is_in_the_log_and_a_closed_console_ends_nothing(tmp_path: Path) -> None:
    train = """
def run(spec, run_dir, place, watch):
    os.write(2, b"from the library\\n")
    for line in range(10000):
        print("a line for a console that is gone")
    return Outcome(4, True)
"""
    run, _ = make_run(tmp_path, train, ranks=1)
    (task,) = start_workers(run, [0], size=1)
    assert task.stdout is not None
    task.stdout.close()
    task.stdout = None
    assert ends([task])[0][0] == 0
    log = run.log(1, 0).read_text()
    assert "from the library" in log
    assert log.count("a line") == 10000


def test_the_error_file_is_whole_json_with_the_contract_s_keys(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "def run(*a):\n    raise OSError(28, 'No space left on device')\n", ranks=1)
    ((code, _, _),) = ends(start_workers(run, [0], size=1))
    assert code == 1
    error = json.loads(run.error(1, 0).read_text())
    assert {"time", "type", "message", "traceback"} <= error.keys()
    assert "No space left" in error["message"]
