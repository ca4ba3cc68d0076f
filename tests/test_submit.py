"""How a run starts and ends: the sbatch text, submitit's local executor, the foreground; sbatch is a fake."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import fake_slurm
from fake_run import FINISHES, WAITS_FOR_STOP, is_waiting, make_run, spec_file, wait_for
from fake_slurm import queue_row
from pithtrain import jobs, rundir, slurm, submit
from pithtrain.errors import DataError, RunFailed, SlurmError, SpecError, StoppedEarly
from pithtrain.rundir import RunDir
from pithtrain.spec import load
from test_cli import pithtrain

FAILS_ON_ONE = """
def run(spec, run_dir, place, watch):
    if place.rank == 1:
        raise ValueError("the cause")
    time.sleep(1000)
"""


# ---- the text --------------------------------------------------------------------------------------------------------


def test_clean_environment() -> None:
    """Case 21 of the service's matrix: nothing of an outer job, and everything else."""
    outer = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPUS_PER_TASK": "2",
        "SBATCH_ACCOUNT": "a",
        "PMIX_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "SUBMITIT_EXECUTOR": "slurm",
        "PITHTRAIN_ATTEMPT": "9",
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "MY_RANK": "3", "HOME": "/home/a"}
    assert submit.clean_environment(outer | kept) == kept


def test_the_script_as_text(tmp_path: Path) -> None:
    overrides = [
        "slurm.time=1-00:00:30",
        "slurm.nodes=2",
        "slurm.partition=high",
        "slurm.exclusive=true",
        "slurm.env={NCCL_DEBUG: it's fine}",
        "slurm.setup=[module load cuda]",
        "slurm.srun_args=[--cpu-bind=none]",
        "training.device=cuda",
    ]
    run, py = RunDir(Path("/shared/runs/fake")), sys.executable
    expected = f"""\
    #!/bin/bash

    # Parameters
    #SBATCH --chdir=/shared/runs/fake/code
    #SBATCH --comment='pithtrain TOKEN'
    #SBATCH --cpus-per-task=1
    #SBATCH --error=/shared/runs/fake/slurm/%j_0_log.err
    #SBATCH --exclusive
    #SBATCH --gpus-per-node=2
    #SBATCH --job-name=fake
    #SBATCH --mem=0
    #SBATCH --nodes=2
    #SBATCH --ntasks-per-node=2
    #SBATCH --open-mode=append
    #SBATCH --output=/shared/runs/fake/slurm/%j_0_log.out
    #SBATCH --partition=high
    #SBATCH --requeue
    #SBATCH --signal=USR2@300
    #SBATCH --time=1441

    # setup
    trap : TERM USR2  # signals are for the ranks: this shell stays, to say what comes next
    module load cuda
    set +eu  # whatever the lines above want: this script goes on after a failure
    export PYTHONPATH=/shared/runs/fake/code${{PYTHONPATH:+:$PYTHONPATH}}
    export NCCL_DEBUG='it'"'"'s fine'
    export PITHTRAIN_ATTEMPT=3
    export PITHTRAIN_TOKEN=TOKEN
    [ -x {py} ] || {{ echo "error: no Python at" {py} "on $(hostname)" >&2; exit 127; }}
    {py} -m pithtrain.batch before /shared/runs/fake \
|| {{ {py} -m pithtrain.batch after /shared/runs/fake $?; exit $?; }}

    # command
    export SUBMITIT_EXECUTOR=slurm
    srun --unbuffered --output /shared/runs/fake/slurm/%j_%t_log.out --error /shared/runs/fake/slurm/%j_%t_log.err \
--kill-on-bad-exit=1 --wait=120 --cpus-per-task=1 --cpu-bind=none \
{py} /shared/runs/fake/code/pithtrain/held.py -u -m submitit.core._submit /shared/runs/fake/slurm


    # teardown
    rc=$?
    {py} -m pithtrain.batch after /shared/runs/fake $rc
    exit $?"""
    spec = load(spec_file(tmp_path), overrides)
    text = submit.render(spec, run, attempt=3)
    assert text == textwrap.dedent(expected)
    told = (Path(__file__).parents[1] / "docs/slurm.md").read_text().splitlines()
    always = [line for line in text.splitlines() if line.startswith(("# ", "trap", "set ", "rc=", "exit"))]
    assert len(always) > 6 and not [line for line in always if line not in told], "docs/slurm.md has another script"


def test_a_cpu_run_asks_for_tasks_and_no_gpu(tmp_path: Path) -> None:
    spec = load(spec_file(tmp_path))
    text = submit.render(spec, RunDir(tmp_path / "run"))
    assert "--gpus" not in text
    assert "--ntasks-per-node=2" in text
    assert "wckey" not in text


def test_hostile_paths_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs, with a fake srun: a folder name with blanks, quotes and a command in it stays a name."""
    folder = tmp_path / "it's $(touch pwned) `touch pwned` a\"b"
    folder.mkdir()
    made, spec = make_run(tmp_path, FINISHES)
    run = RunDir(folder / "run")
    made.path.rename(run.path)
    values = {"slurm.env": "{VALUE: $(touch pwned)'\"}", "output_dir": json.dumps(str(folder)), "name": "run"}
    spec = load(run.spec_yaml, [f"{key}={value}" for key, value in values.items()])
    rundir.write_atomic(run.spec_yaml, spec.to_yaml())
    shows = '[[ "$*" = *_submit* ]] && printf "%s\\n" "$PYTHONPATH" "$VALUE" "${@: -1}"; exit 0'
    fake_slurm.install(tmp_path, monkeypatch, srun=shows)
    env = {**submit.clean_environment(os.environ), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0"}
    env.pop("PYTHONPATH", None)
    rundir.record_job(run, 1, job_id="7", launcher="slurm", token="TOKEN")
    script = submit.render(spec, run)
    done = subprocess.run(
        ["bash", "-c", script], cwd=run.code, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines()[:3] == [f"{folder}/run/code", "$(touch pwned)'\"", f"{folder}/run/slurm"], (
        done.stderr
    )
    assert done.returncode == 1  # no rank has left a marker
    assert "attempt 1: it ended without a word; no restart: no step was made" in done.stdout
    assert not list(tmp_path.rglob("pwned"))


def test_a_stray_job_s_script_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old job that somebody requeued: the whole script, with a fake srun."""
    run, spec = make_run(tmp_path, FINISHES)
    rundir.record_job(run, 2, job_id="8", launcher="slurm", token="t2")
    fake_slurm.install(tmp_path, monkeypatch, srun="exit 0")
    env = {**submit.clean_environment(os.environ), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0"}
    script = submit.render(spec, run, token="t1")
    done = subprocess.run(
        ["bash", "-c", script], cwd=run.code, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "job 7 is not the newest of fake, which is 8: nothing to do" in done.stdout
    assert not (tmp_path / "called").exists()
    assert not run.attempts.exists()


def test_case_024_a_missing_interpreter_is_named_at_once(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    script = submit.render(spec, run).replace(sys.executable, "/gone/bin/python")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 127
    assert done.stderr.startswith("error: no Python at /gone/bin/python on ")


# ---- Slurm, with a fake sbatch ---------------------------------------------------------------------------------------


def test_sbatch_gets_what_render_shows_from_a_clean_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = f'cp "$1" {tmp_path}/script; env > {tmp_path}/env; pwd > {tmp_path}/pwd; echo "Submitted batch job 4711"'
    running = f'printf "{queue_row("4711", "RUNNING")}\\n"'
    fake_slurm.install(tmp_path, monkeypatch, sbatch=keep, squeue=running)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    run, spec = make_run(tmp_path, FINISHES)
    assert submit.launcher() == "slurm"
    job = submit.submit(run, spec, "slurm")
    assert (job["job_id"], job["launcher"], job["attempt"]) == ("4711", "slurm", 1)
    script = submit.render(spec, run, attempt=1, token=job["token"])
    assert (tmp_path / "script").read_text() == script
    assert (run.slurm / "4711_submission.sh").read_text() == script
    assert (tmp_path / "pwd").read_text().strip() == str(run.code)
    env = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID" not in env
    assert "PITHTRAIN_CUDA_VISIBLE_DEVICES" not in env
    assert rundir.find("4711", spec.output_dir) == run
    assert jobs.state(run).word == "running"

    # what is pickled is a name and a path: no code, no spec
    pickled = (run.slurm / "4711_submitted.pkl").read_bytes()
    assert b"pithtrain.worker" in pickled
    assert len(pickled) < 1000


def test_sbatch_s_own_words_reach_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "sbatch: error: invalid partition specified: trian"
    fake_slurm.install(tmp_path, monkeypatch, sbatch=f'echo "{refusal}" >&2; exit 1')
    run, spec = make_run(tmp_path, FINISHES)
    with pytest.raises(RunFailed, match=refusal):
        submit.submit(run, spec, "slurm")
    assert rundir.last_job(run) == {}


def test_without_slurm_it_is_local_and_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit.launcher() == "local"
    spec = load(spec_file(tmp_path), ["slurm.nodes=2"])
    with pytest.raises(SpecError, match="more than one node needs Slurm"):
        submit.check(spec, "local")
    installed = "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1"
    fake_slurm.install(tmp_path, monkeypatch, sinfo=installed)  # commands without a cluster
    assert submit.launcher() == "local"
    spec = load(spec_file(tmp_path), ["slurm.setup=[module load cuda]", "slurm.srun_args=[--label]"])
    assert submit.check(spec, "local") == [f"slurm.{key} is not used without Slurm" for key in ("setup", "srun_args")]


def test_setup_that_is_no_shell_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm.install(tmp_path, monkeypatch)
    spec = load(spec_file(tmp_path), ['slurm.setup=["echo \'abc"]'])
    with pytest.raises(SpecError, match=r"slurm\.setup = .*is no shell text"):
        submit.check(spec, "slurm")


def test_a_controller_that_does_not_answer_starts_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is meant for a cluster must not begin on its login node."""
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    away = "echo 'slurm_load_partitions: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    fake_slurm.install(tmp_path, monkeypatch, sinfo=away)
    monkeypatch.setenv("SLURM_CONF", os.devnull)
    with pytest.raises(SlurmError, match="Slurm does not answer"):
        submit.launcher()
    assert fake_slurm.called(tmp_path).count("sinfo --noheader") == 4


def test_an_answer_of_sbatch_that_got_lost_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    monkeypatch.setattr(submit.secrets, "token_hex", lambda count: "t1")
    row = queue_row("99", "PENDING", comment="pithtrain t1")
    fake_slurm.install(tmp_path, monkeypatch, sbatch="exit 1", squeue=f'printf "{row}\\n"')
    assert submit.submit(run, spec, "slurm")["job_id"] == "99"


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        (["optimizer.lr=1e-3,2e-3"], ["tiny-lr-1e-3", "tiny-lr-2e-3"]),
        (["a.b=1,2", "a.c=x"], ["tiny-b-1-c-x", "tiny-b-2-c-x"]),
        (["optimizer.betas=[0.9, 0.95],[0.8, 0.9]"], ["tiny-betas-_0.9_0.95_", "tiny-betas-_0.8_0.9_"]),
    ],
)
def test_a_grid_is_a_product_with_names(axes: list[str], names: list[str]) -> None:
    assert [submit.grid_name("tiny", point) for point in submit.grid(axes)] == names


@pytest.mark.parametrize("axes", [["lr"], ["a.b="], ["a.b=1,,2"], ["a.b=1", "a.b=2"]])
def test_a_wrong_grid_is_refused(axes: list[str]) -> None:
    with pytest.raises(SpecError):
        submit.grid(axes)


# ---- local processes in the background -------------------------------------------------------------------------------


def test_case_025_a_local_run_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 25 too: an outer job's id changes nothing. The user's devices and the snapshot reach the ranks."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    shows = FINISHES.replace('print("hello', 'print(os.environ["CUDA_VISIBLE_DEVICES"], __file__, "hello')
    run, spec = make_run(tmp_path, shows)
    job = submit.submit(run, spec, "local")
    seen: list[int] = []
    state = jobs.wait(run, lambda row: seen.append(row["step"]))
    assert (state.word, state.step, state.attempt) == ("done", 4, 1)
    assert seen == [1, 2, 3, 4]
    assert job["launcher"] == "local"
    for rank in (0, 1):
        log = run.log(1, rank).read_text()
        assert f"2,3 {run.code}/pithtrain/train.py hello from Place(rank={rank}, world_size=2" in log
    assert rundir.last_attempt(run) == rundir.read_lines(run.attempts)[0]
    assert not list(run.slurm.glob("*.pkl.save_tmp"))


@pytest.mark.slow
def test_case_022_a_local_failure_is_a_failure_with_its_cause(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, FAILS_ON_ONE)
    submit.submit(run, spec, "local")
    began = time.monotonic()
    state = jobs.wait(run)
    assert time.monotonic() - began < 30
    assert state.word == "failed"
    assert "rank 1: ValueError: the cause" in str(jobs.failure(run, 1))


RANK_1_IS_KILLED = """
def run(spec, run_dir, place, watch):
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise RuntimeError("Connection closed by peer")
"""


@pytest.mark.slow
def test_a_local_rank_that_is_killed_is_named_though_only_its_peers_could_write(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, RANK_1_IS_KILLED)
    submit.submit(run, spec, "local")
    assert jobs.wait(run).word == "failed"
    assert "rank 1 was killed" in str(jobs.failure(run, 1))


@pytest.mark.slow
def test_cancel_saves_and_the_next_attempt_has_logs_of_its_own(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, WAITS_FOR_STOP)
    submit.submit(run, spec, "local")
    wait_for(lambda: is_waiting(run, [0, 1]))
    assert jobs.state(run).word == "running"
    assert jobs.cancel(run) == "fake saves at its next step and stops"
    assert jobs.wait(run).word == "stopped"
    assert rundir.read_json(run.stop)["step"] == 1
    assert rundir.last_attempt(run)["why"] == "cancelled; saved at step 1"
    assert jobs.cancel(run) == "fake is over: stopped, cancelled; saved at step 1"

    first_log = run.log(1, 0).read_text()
    job = submit.submit(run, spec, "local")
    assert job["attempt"] == 2
    wait_for(lambda: is_waiting(run, [0, 1], attempt=2))
    assert not run.stop.exists()  # the first attempt's
    os.kill(int(job["job_id"]), signal.SIGTERM)  # its launcher passes it on
    assert jobs.wait(run).word == "stopped"
    assert run.log(1, 0).read_text() == first_log
    assert (run.path / "logs" / "latest").resolve() == run.logs(2)


@pytest.mark.slow
def test_a_run_killed_from_outside_is_lost(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, WAITS_FOR_STOP, ranks=1)
    job = submit.submit(run, spec, "local")
    wait_for(lambda: is_waiting(run, [0]))
    os.kill(int(rundir.read_lines(run.attempts)[-1]["pid"]), signal.SIGKILL)
    assert jobs.wait(run).word == "lost"
    assert jobs.process_start(int(job["job_id"])) is None  # ended, or not yet collected by its parent
    assert "ended without a word" in str(jobs.failure(run, 1))


@pytest.mark.slow
def test_case_018_the_time_limit_of_a_local_run_is_a_request_to_stop(tmp_path: Path) -> None:
    """signal_delay_s before the limit, whatever the limit's length: the state is saved and a marker says so."""
    run, _ = make_run(tmp_path, WAITS_FOR_STOP, ranks=1)
    spec = load(run.spec_yaml, ["slurm.time=1", "slurm.signal_delay_s=29"])
    rundir.write_atomic(run.spec_yaml, spec.to_yaml())
    submit.submit(run, spec, "local")
    assert jobs.wait(run).word == "stopped"
    marker = rundir.read_json(run.requeue)
    assert (marker["reason"], marker["step"]) == ("SIGUSR2", 1)


def test_a_process_number_used_again_is_not_the_run(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    host = os.uname().nodename
    job = {"job_id": str(os.getpid()), "launcher": "local", "attempt": 1, "host": host}
    assert list(jobs.local_pids(run, job | {"time": time.time()})) == [os.getpid()]
    assert list(jobs.local_pids(run, job | {"time": time.time() - 10**6})) == []
    rundir.record_job(run, **job | {"host": "elsewhere", "time": 0})
    assert jobs.state(run).word == "running"
    assert "resume --force" in (jobs.state(run).why or "")
    rundir.record_attempt(run, 1, end=1.0)
    assert jobs.state(run).word == "lost"


@pytest.mark.slow
def test_case_155_one_wandb_run_and_nothing_of_it_left_when_a_rank_fails(tmp_path: Path) -> None:
    """Rank 0 alone opens it; when rank 1 fails, W&B's helper process does not keep the job alive."""
    train = """
from pithtrain.events import Events

def run(spec, run_dir, place, watch):
    events = Events(run_dir, spec, place.attempt) if place.rank == 0 else None
    emit(run_dir, place, 1)
    while not run_dir.metrics.exists():
        time.sleep(0.1)
    if place.rank == 1:
        raise ValueError("the cause")
    time.sleep(1000)
"""
    run, _ = make_run(tmp_path, train)
    spec = load(run.spec_yaml, ["logging.wandb.mode=offline"])
    rundir.write_atomic(run.spec_yaml, spec.to_yaml())
    began = time.monotonic()
    with pytest.raises(RunFailed, match="the cause"):
        submit.foreground(run, spec)
    wait_for(lambda: not processes_of(run))
    assert time.monotonic() - began < 45  # of which the start and W&B's take ten
    assert len(list((run.path / "wandb").glob("offline-run-*"))) == 1


def processes_of(run: RunDir) -> list[str]:
    """Live processes, of any kind, that were started with this run's snapshot on their path."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(run.code).encode() in (entry / "environ").read_bytes() and "Z" not in _state(entry):
                found.append((entry / "cmdline").read_text())
        except OSError:  # it ended meanwhile
            continue
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


# ---- the foreground --------------------------------------------------------------------------------------------------


def test_foreground_runs_to_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    submit.foreground(run, spec)
    out, err = capfd.readouterr()
    assert "hello from Place(rank=0" in out
    assert "rank=1" not in out
    assert err == ""
    assert jobs.state(run).word == "done"
    assert [row["ended"] for row in rundir.read_lines(run.attempts)] == ["done"]


@pytest.mark.slow
def test_foreground_reports_the_first_cause_with_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, spec = make_run(tmp_path, FAILS_ON_ONE.replace("ValueError(", "DataError("))
    with pytest.raises(RunFailed, match=r"rank 1: the cause\n  log: .*rank-1.log") as failure:
        submit.foreground(run, spec)
    assert failure.value.exit_code == 2
    assert "the cause" not in "".join(capfd.readouterr())  # said once, by the command


def test_foreground_names_a_killed_rank(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, RANK_1_IS_KILLED)
    with pytest.raises(RunFailed, match="rank 1 was killed by SIGKILL"):
        submit.foreground(run, spec)


def test_foreground_ends_a_rank_that_hangs_after_another_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "END_GRACE_S", 1.0)
    train = """
def run(spec, run_dir, place, watch):
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""
    run, spec = make_run(tmp_path, train)
    with pytest.raises(RunFailed, match="rank 1 was killed by SIGKILL"):
        submit.foreground(run, spec)
    assert rundir.read_lines(run.attempts)[-1]["ended"] == "killed"


def test_a_signal_to_the_foreground_saves_and_ends_with_code_4(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, WAITS_FOR_STOP)

    def interrupt() -> None:
        wait_for(lambda: is_waiting(run, [0, 1]))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(StoppedEarly, match=r"stopped: saved at step 1 on SIGTERM\n.*pithtrain resume") as stopped:
        submit.foreground(run, spec)
    thread.join()
    assert stopped.value.exit_code == 4
    assert jobs.state(run).word == "stopped"
    assert json.loads(run.requeue.read_text())["reason"] == "SIGTERM"
    assert rundir.last_attempt(run)["why"] == jobs.state(run).why == "saved at step 1 on SIGTERM"


@pytest.mark.slow
def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    deaf = WAITS_FOR_STOP.replace("not watch.should_stop()", "True")
    run, spec = make_run(tmp_path, deaf)

    def interrupt() -> None:
        wait_for(lambda: is_waiting(run, [0, 1]))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(RunFailed, match="ended without a word"):
        submit.foreground(run, spec)
    thread.join()


@pytest.mark.slow
def test_case_015_two_runs_at_the_same_moment_are_separate_worlds(tmp_path: Path) -> None:
    """The real engine, twice two processes, three times over: both finish with equal losses."""
    for turn in range(3):
        names = [f"left-{turn}", f"right-{turn}"]
        tasks = [
            subprocess.Popen(
                [sys.executable, "-m", "pithtrain", "train", str(spec_file(tmp_path, name))],
                env=submit.clean_environment(os.environ),
                stdout=subprocess.DEVNULL,
            )
            for name in names
        ]
        assert [task.wait(120) for task in tasks] == [0, 0]
        left, right = ([r["loss"] for r in rundir.read_lines(tmp_path / "runs" / n / "metrics.jsonl")] for n in names)
        assert left == right
        assert len(left) == 4


def test_a_corpus_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """Not after hours in a queue; where the ranks may see what this machine does not, `--force` makes it a note."""
    missing = ["data.sources=[{path: gone}]"]
    with pytest.raises(DataError, match=r"gone: there is no corpus here.*\n  where the ranks .*--force"):
        submit.check(load(spec_file(tmp_path), missing), "local")
    [note] = submit.check(load(spec_file(tmp_path), missing), "local", force=True)
    assert "gone: there is no corpus here" in note
    long = load(spec_file(tmp_path), ["data.repeat=false", "training.max_steps=100"])
    with pytest.raises(DataError, match="the run needs 800 samples"):
        submit.check(long, "local")
    assert submit.check(long, "local", resumed=True) == []  # at the checkpoint's position, which the ranks know
    held_out = ["validation.interval=1", "validation.sources=[{path: gone}]"]
    with pytest.raises(DataError, match="gone: there is no corpus here"):
        submit.check(load(spec_file(tmp_path), held_out), "local")


@pytest.mark.parametrize(
    ("change", "files", "words"),
    [
        ("init_from", None, "init_from: .*/old does not exist"),
        ("init_from", [], "init_from: .*/old is neither a complete checkpoint nor a run directory that has one"),
        ("init_from", ["checkpoints/step-1/x"], "init_from: .*/old is neither a complete checkpoint nor"),
        ("init_from", ["config.json"], r"init_from: .*/old has a config.json and no \.safetensors"),
        ("init_from", ["config.json", "model.safetensors"], None),
        ("resume", None, "resume: .*/old does not exist"),
        ("data.tokenizer", None, "old: cannot read this tokenizer: No such file"),
    ],
)
def test_what_a_run_begins_with_is_looked_for_before_anything_is_made(
    tmp_path: Path, change: str, files: list[str] | None, words: str | None
) -> None:
    old = tmp_path / "old"
    for file in files or []:
        (old / file).parent.mkdir(parents=True, exist_ok=True)
        (old / file).touch()
    if files is not None:
        old.mkdir(exist_ok=True)
    spec = load(spec_file(tmp_path), [f"{change}={old}"])
    if words is None:
        assert submit.check(spec, "local") == []
        return
    with pytest.raises(DataError, match=rf"^.*{words}.*\n  where the ranks .*--force"):
        submit.check(spec, "local")
    [note] = submit.check(spec, "local", force=True)
    assert re.search(words, note)
    if change != "data.tokenizer":  # a resumed run goes by its own checkpoints
        assert submit.check(spec, "local", resumed=True) == []
    validated = pithtrain("validate", tmp_path / "fake.yaml", "--set", f"{change}={old}", cwd=tmp_path)
    assert validated.returncode == 0 and re.search(f"note: .*{words}", validated.stderr)


def test_a_corpus_by_another_path_is_the_same_corpus(tmp_path: Path) -> None:
    """The spec compares paths as they are written; what lies on the disk tells of a link."""
    config = spec_file(tmp_path)
    corpus = load(config).data.sources[0].path
    (tmp_path / "link").symlink_to(corpus)
    (tmp_path / "above").symlink_to(corpus.parent)
    for other in (tmp_path / "link", tmp_path / "above" / corpus.name):
        held_out = load(config, ["validation.interval=1", f"validation.sources=[{{path: {other}, name: other}}]"])
        with pytest.raises(DataError, match=f"{other}: is {corpus} by another path, which is trained on"):
            submit.check(held_out, "local")
        both = f"data.sources=[{{path: {corpus}, weight: 0.5}}, {{path: {other}, weight: 0.5}}]"
        with pytest.raises(DataError, match=f"{other}: is {corpus} by another path; give it once"):
            submit.check(load(config, [both]), "local")
    spelled = f"validation.sources=[{{path: {corpus.parent}/x/../{corpus.name}, name: other}}]"
    with pytest.raises(SpecError, match=r"is trained on, in data\.sources"):
        load(config, ["validation.interval=1", spelled])


def test_case_017_code_edited_after_submission_does_not_run(tmp_path: Path) -> None:
    """The installed package would fail here (there is no corpus); the snapshot is what runs."""
    run, spec = make_run(tmp_path, FINISHES, overrides=["data.sources=[{path: none}]"])
    submit.foreground(run, spec)
    assert (
        str(run.code)
        in subprocess.run(
            [sys.executable, "-c", "import pithtrain; print(pithtrain.__file__)"],
            cwd=run.code,
            env=submit.task_environment(run, spec, 1),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


FOREGROUND = """
import sys
from pathlib import Path
from pithtrain import submit
from pithtrain.errors import PithtrainError
from pithtrain.rundir import RunDir
from pithtrain.spec import load

run = RunDir(Path(sys.argv[1]))
try:
    submit.foreground(run, load(run.spec_yaml))
except PithtrainError as error:
    sys.exit(error.exit_code)
"""


def workers_of(run: RunDir) -> list[str]:
    """Command lines of living worker processes of this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if f"pithtrain.worker {run.path}" in line]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_stop_in_the_first_moment_leaves_nobody_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Sent as soon as the first worker is there, before any of them has a handler: all hear it and save."""
    run, _ = make_run(tmp_path, WAITS_FOR_STOP)
    train = subprocess.Popen([sys.executable, "-c", FOREGROUND, str(run.path)], start_new_session=True)
    wait_for(lambda: bool(workers_of(run)))
    os.kill(train.pid, number)
    assert train.wait(timeout=60) == 4
    assert not workers_of(run)
