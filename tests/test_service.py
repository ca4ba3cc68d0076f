"""The service's matrix of faults on a real local Slurm: 2 nodes x 2 ranks over gloo, a tiny model, 21 cases.

A case is submitted as a user would, hurt, and passes when the run is DONE, every step stands in metrics.jsonl exactly
once, and losses, masters and moments are bitwise those of the undisturbed run (`straight`, case 1), unless it says
otherwise. What goes wrong inside the engine (a hang, an exception, a slow save) is brought in from outside the package:
`slurm.setup` puts a folder on PYTHONPATH whose `sitecustomize.py` runs a few lines after the engine was imported, or
puts a few lines in its place where a case needs no arithmetic (`fake_run`).

A requeued job waits two minutes by itself; `Service.until` starts it as soon as Slurm lets it.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import cluster
import pithtrain
from conftest import NO_SLURM
from fake_run import FINISHES, HEAD, TAIL, WAITS_FOR_STOP, WORLD
from harness import MODEL
from pithtrain import catalog, rundir
from pithtrain.rundir import RunDir
from pithtrain.spec import load
from test_data import make
from test_train import numbers, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NO_SLURM is not None, reason=NO_SLURM or ""),
]

STEPS, EVERY = 30, 10  # of a run; between its checkpoints
AT = 17  # where it is hurt: well behind a checkpoint, well before the end

SITE = '''
"""Changes rooms of the package as they are imported: ROOM.instead.py stands for a room, ROOM.after.py runs in it."""
import importlib.machinery, importlib.util, pathlib, sys

HERE = pathlib.Path(__file__).parent

class Finder:
    def find_spec(self, name, path, target=None):
        package, _, room = name.partition(".")
        instead, after = HERE / f"{room}.instead.py", HERE / f"{room}.after.py"
        if package != "pithtrain" or not (instead.exists() or after.exists()):
            return None
        if instead.exists():
            return importlib.util.spec_from_file_location(name, instead)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            exec(compile(after.read_text(), after, "exec"), module.__dict__)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
'''

# in train.py: `at(rank, step)` is called before each step, and 0.1 s makes room to hurt it
AT_STEPS = """
import os
ATTEMPT = int(os.environ["PITHTRAIN_ATTEMPT"]) + int(os.environ.get("SLURM_RESTART_COUNT", 0))
_train_step = train_step

def train_step(engine, spec, batches, lr):
    time.sleep(PACE_S)
    at(engine.world.rank, engine.zero.updates + 1)
    return _train_step(engine, spec, batches, lr)

def at(rank, step):
    pass

PACE_S = 0.1
"""


@dataclass(frozen=True)
class Service:
    """One case's folder, the cluster's environment, and what a user can do."""

    folder: Path
    env: dict[str, str]
    corpus: Path

    @property
    def cluster(self) -> Path:
        return Path(self.env["SLURM_CONF"]).parent

    def ask(self, command: str) -> str:
        """A shell command's output, stripped."""
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def pithtrain(self, *arguments: object, code: int = 0, **env: str) -> str:
        """A command of ours; its whole output, after its exit code was seen to be `code`."""
        done = subprocess.run(
            [sys.executable, "-m", "pithtrain", *map(str, arguments)],
            cwd=self.folder,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{arguments}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def spec(self, name: str = "run", **slurm: Any) -> Path:
        """The spec file of a run of this case; `slurm` goes over its section."""
        fields = {
            "name": name,
            "output_dir": str(self.folder / "runs"),
            "model": MODEL,
            "parallelism": {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
            "training": {"max_steps": STEPS, "global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 16}
            | {"device": "cpu", "compute_dtype": "float32"},
            "optimizer": {"lr": 1e-3},
            "lr_scheduler": {"type": "cosine", "warmup_steps": 3},
            "moe": {"load_balance_type": "aux_loss", "aux_loss_coef": 0.01},
            "data": {"sources": [{"path": str(self.corpus)}], "repeat": True},
            "checkpoint": {"interval": EVERY},
            "distributed": {"init_timeout_s": 60, "train_timeout_s": 60, "step_timeout_s": 8, "save_timeout_s": 60},
            "slurm": {"nodes": 2, "gpus_per_node": 2, "cpus_per_task": 1, "mem": "2G", "partition": "train", "time": 10}
            | {"signal_delay_s": 20}
            | slurm,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(fields, sort_keys=False))
        return path

    def faults(self, **rooms: str) -> str:
        """The setup line that brings in lines of text: `train_after` runs in train.py, `train_instead` replaces it."""
        folder = self.folder / "faults"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITE)
        for key, text in rooms.items():
            room, _, how = key.rpartition("_")
            (folder / f"{room}.{how}.py").write_text(textwrap.dedent(text))
        return f"export PYTHONPATH={folder}"

    def engine(self, text: str) -> str:
        """The setup line for an engine of a few lines, without torch: an attempt takes two seconds."""
        return self.faults(train_instead=HEAD + text + TAIL, world_instead=WORLD)

    def submit(self, at: str | None = "", *, sets: tuple[str, ...] = (), name: str = "run", **slurm: Any) -> RunDir:
        """Submit a run of this case. `at`: the lines of `at(rank, step)` in the real engine."""
        if at is not None:
            slurm["setup"] = [self.faults(train_after=AT_STEPS + textwrap.dedent(at))]
        overrides = [word for pair in sets for word in ("--set", pair)]
        self.pithtrain("submit", self.spec(name, **slurm), *overrides)
        return RunDir(self.folder / "runs" / name)

    def job(self, run: RunDir) -> str:
        return rundir.last_job(run)["job_id"]

    def squeue(self, run: RunDir) -> str:
        """`STATE REASON` of the run's newest job; empty where the controller has forgotten it."""
        return self.ask(f"squeue --noheader --states=all --jobs={self.job(run)} --format='%T %r' 2>&1 || true")

    def status(self, run: RunDir) -> dict[str, Any]:
        return json.loads(self.pithtrain("status", run.path, "--json"))[0]

    def until(self, run: RunDir, condition: Callable[[], object], seconds: float = 120) -> None:
        """Poll until `condition` holds; a job that waits out its requeue is told to start."""
        deadline = time.monotonic() + seconds
        waits_since = None
        while not condition():
            now = time.monotonic()
            assert now < deadline, f"it did not happen within {seconds} s\n{self.picture(run)}"
            waits_since = (waits_since or now) if self.squeue(run) == "PENDING BeginTime" else None
            # started sooner, it is taken for the one that was killed, whose last message is still on its way: FAILED
            if waits_since is not None and now - waits_since > 4:
                self.ask(f"scontrol update JobId={self.job(run)} StartTime=now")
                waits_since = None
            time.sleep(0.1)

    def until_step(self, run: RunDir, step: int, attempt: int = 1) -> None:
        def reached() -> bool:
            return any(row["step"] >= step and row["attempt"] == attempt for row in rundir.read_lines(run.metrics))

        self.until(run, reached)

    def until_ended(self, run: RunDir, state: str, seconds: float = 120) -> None:
        """Until the job is in a terminal state, which must be `state`."""
        self.until(run, lambda: self.squeue(run).startswith(("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")), seconds)
        assert self.squeue(run).startswith(state), self.picture(run)

    def until_done(self, run: RunDir, seconds: float = 120) -> None:
        self.until_ended(run, "COMPLETED", seconds)
        assert run.done.exists(), self.picture(run)

    def picture(self, run: RunDir) -> str:
        """What one would look at: the queue, the attempts, the ends of the newest logs."""
        texts = [self.ask("squeue --states=all; sinfo"), *map(str, rundir.read_lines(run.attempts))]
        for log in [*sorted(run.latest_logs.glob("*.log")), *sorted(run.slurm.glob("*_0_log.*"))]:
            texts += [f"--- {log}", *log.read_text(errors="replace").splitlines()[-12:]]
        return "\n".join(texts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    documents = [rng.integers(10, MODEL["vocab_size"], 40).tolist() for _ in range(100)]
    return make(tmp_path_factory.mktemp("corpus") / "made", documents, MODEL["vocab_size"]) / "tokens"


@pytest.fixture
def service(slurm: dict[str, str], corpus: Path, tmp_path: Path) -> Iterator[Service]:
    """A cluster without jobs, and one without jobs again afterwards."""
    service = Service(tmp_path, slurm, corpus)
    idle(service)
    yield service
    service.ask("scancel --signal=KILL --full --user=$(id -u); scancel --user=$(id -u)")
    idle(service)


def idle(service: Service) -> None:
    deadline = time.monotonic() + 60
    while service.ask("squeue --noheader") or set(cluster.status(service.cluster).nodes.values()) != {"idle"}:
        assert time.monotonic() < deadline, service.ask("squeue; sinfo")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def straight(slurm: dict[str, str], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The undisturbed run."""
    service = Service(tmp_path_factory.mktemp("straight"), slurm, corpus)
    idle(service)
    run = service.submit()
    service.until_done(run)
    return run


def same(run: RunDir, straight: RunDir) -> None:
    """Each step once, with the same numbers, and the same masters and moments at the end."""
    assert [step for step, *_ in numbers(run.path)] == list(range(1, STEPS + 1))
    assert numbers(run.path) == numbers(straight.path)
    ours, theirs = (trained(one.path, load(one.spec_yaml), STEPS) for one in (run, straight))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, name)


def attempts(run: RunDir) -> list[dict[str, Any]]:
    return rundir.read_lines(run.attempts)


def ends(run: RunDir) -> list[tuple[str, bool]]:
    """How each attempt ended and whether the job was started again."""
    return [(row["ended"], row["requeued"]) for row in attempts(run)]


def resumed_at(run: RunDir) -> list[int]:
    """The steps at which attempts went on, from their own events."""
    return [event["step"] for event in rundir.read_lines(run.events) if event["event"] == "resumed"]


# ---- the matrix ------------------------------------------------------------------------------------------------------


def test_matrix_01_no_fault(straight: RunDir) -> None:
    assert [step for step, *_ in numbers(straight.path)] == list(range(1, STEPS + 1))
    assert ends(straight) == [("done", False)]
    assert attempts(straight)[0]["nodes"] == "n[0-1]"


def test_matrix_02_a_signal_saves_and_requeues(service: Service, straight: RunDir) -> None:
    run = service.submit()
    service.until_step(run, AT)
    began = time.monotonic()
    service.ask(f"scancel --signal=USR2 {service.job(run)}")
    service.until(run, lambda: "PENDING" in service.squeue(run))
    assert time.monotonic() - began < 25, "the job hung in COMPLETING until Slurm killed it"
    service.until_done(run)
    same(run, straight)
    assert ends(run) == [("stopped", True), ("done", False)]
    [saved] = resumed_at(run)
    assert AT <= saved < STEPS
    assert attempts(run)[0]["why"] == f"saved at step {saved} on SIGUSR2; restarts"
    assert len({job["job_id"] for job in rundir.jobs(run)}) == 1


@pytest.fixture
def user_signal(service: Service) -> Iterator[None]:
    """The cluster tells a preempted job first with the signal that it asked for, as some sites do."""
    conf = Path(service.env["SLURM_CONF"])
    before = conf.read_text()
    conf.write_text(before + "SlurmctldParameters=preempt_send_user_signal\n")
    try:
        service.ask("scontrol reconfigure")
        yield
    finally:
        conf.write_text(before)
        service.ask("scontrol reconfigure")


def preempt(service: Service) -> None:
    service.ask("sbatch --partition=high --nodes=2 --exclusive --output=/dev/null --wrap='sleep 1'")


def preempted(service: Service, straight: RunDir, told_with: str) -> None:
    run = service.submit()
    service.until_step(run, AT)
    preempt(service)
    service.until_done(run)
    same(run, straight)
    assert ends(run) == [("stopped", True), ("done", False)]
    assert attempts(run)[0]["why"] == f"saved at step {resumed_at(run)[0]} on {told_with}; restarts"


@pytest.mark.usefixtures("user_signal")
def test_matrix_03_preempted_with_the_user_signal(service: Service, straight: RunDir) -> None:
    preempted(service, straight, "SIGUSR2")


def test_matrix_04_preempted_with_sigterm(service: Service, straight: RunDir) -> None:
    preempted(service, straight, "SIGTERM")


def test_matrix_05_a_killed_rank(service: Service, straight: RunDir) -> None:
    run = service.submit()
    service.until_step(run, AT)
    os.kill(rundir.read_json(run.pid(1, 2))["pid"], signal.SIGKILL)
    service.until_done(run)
    same(run, straight)
    assert ends(run) == [("failed", True), ("done", False)]
    assert re.match(r"rank 2 .*was killed.*; restarts from the last checkpoint", attempts(run)[0]["why"])
    assert resumed_at(run) == [EVERY]


def test_matrix_06_a_rank_that_hangs(service: Service, straight: RunDir) -> None:
    hang = f"""
    def at(rank, step):
        if ATTEMPT == 1 and rank == 2 and step == {AT}:
            time.sleep(1000)
    """
    run = service.submit(hang)
    service.until_done(run)
    same(run, straight)
    assert ends(run) == [("failed", True), ("done", False)]
    assert re.match(r"rank 2\b.*train.after.py:\d+", attempts(run)[0]["why"]), "who hangs, and where"
    assert resumed_at(run) == [EVERY]


def test_matrix_07_an_exception_at_a_fixed_step(service: Service) -> None:
    """One retry, since it may pass by itself; a second one that gained no step ends it."""
    raises = f"""
    def at(rank, step):
        if rank == 1 and step == {AT}:
            raise ValueError("the cause")
    """
    run = service.submit(raises)
    service.until_ended(run, "FAILED")
    assert ends(run) == [("failed", True), ("failed", False)]
    assert attempts(run)[0]["why"] == "rank 1: ValueError: the cause; restarts from the last checkpoint"
    assert attempts(run)[1]["why"].startswith("rank 1: ValueError: the cause; no restart: no step was gained")
    status = service.status(run)
    assert (status["word"], status["checkpoint"]) == ("failed", EVERY)
    assert "the cause" in status["why"]
    service.pithtrain("submit", service.spec(), "--wait", code=2)  # the run directory is taken


@pytest.mark.timeout(600)
def test_matrix_08_links_over_the_time_limit(service: Service, straight: RunDir) -> None:
    """A minute's limit, the signal 20 s before it or up to 13 s earlier: the start and 36 s of steps take longer."""
    run = service.submit("PACE_S = 1.2", time=1, signal_delay_s=20)
    service.until_done(run, 500)
    same(run, straight)
    assert len(attempts(run)) >= 2
    assert ends(run) == [*[("stopped", True)] * (len(attempts(run)) - 1), ("done", False)]
    assert len({row["job_id"] for row in attempts(run)}) == 1


def test_matrix_09_scancel(service: Service, straight: RunDir) -> None:
    run = service.submit()
    service.until_step(run, AT)
    service.ask(f"scancel {service.job(run)}")
    service.until_ended(run, "CANCELLED")
    assert ends(run) == [("stopped", False)]
    assert "cancelled" in attempts(run)[0]["why"]
    status = service.status(run)
    assert status["word"] == "cancelled"
    assert status["checkpoint"] >= AT
    rundir.mark(run.requeue, 1, step=AT, reason="stale")
    service.pithtrain("resume", run.path)
    service.until_done(run)
    same(run, straight)
    assert resumed_at(run) == [status["checkpoint"]]
    assert not run.requeue.exists()


def test_matrix_10_preempted_with_a_save_longer_than_the_grace(service: Service, straight: RunDir) -> None:
    """Everything of the save is on the disk but the rename that makes it count."""
    slow = f"""
    _finish = catalog.finish

    def slow_finish(final, files, content):
        if ATTEMPT == 1 and int(final.name[-8:]) > {EVERY}:
            time.sleep(1000)
        return _finish(final, files, content)

    catalog.finish = slow_finish
    """
    service.ask("scontrol update PartitionName=train GraceTime=5")
    try:
        run = service.submit(slow)
        service.until_step(run, AT)
        preempt(service)
        service.until_done(run)
    finally:
        service.ask("scontrol update PartitionName=train GraceTime=20")
    same(run, straight)
    assert [row["requeued"] for row in attempts(run)] == [True, False]
    why = attempts(run)[0]["why"]  # the batch script's words, or, if it was killed first, those of the next one
    assert "the grace time was over" in why or "Slurm took it back before it could save" in why
    assert resumed_at(run) == [EVERY]
    skipped = [row["reason"] for row in rundir.read_lines(run.events) if row["event"] == "skipped_checkpoint"]
    assert any("is a save under way or cut off" in reason for reason in skipped)


CANNOT_SAVE = """
def run(spec, run_dir, place, watch):
    emit(run_dir, place, place.attempt)
    while place.attempt == 1:
        watch.enter("step", 1)
        if watch.should_stop():
            raise RuntimeError("cannot save")
        time.sleep(0.05)
    return Outcome(spec.training.max_steps, True)
"""


def test_matrix_10_preempted_without_a_grace_time(service: Service) -> None:
    """Slurm has queued the job again by the time its end is looked into, and tells no more of a preemption."""
    service.ask("scontrol update PartitionName=train GraceTime=0")
    try:
        run = service.submit(None, setup=[service.engine(CANNOT_SAVE)])
        service.until_step(run, 1)
        preempt(service)
        service.until_done(run)
    finally:
        service.ask("scontrol update PartitionName=train GraceTime=20")
    assert ends(run) == [("killed", True), ("done", False)]
    assert attempts(run)[0]["why"] == "preempted: the grace time was over; not saved, at step 1; restarts"


def processes_on(node: str, job: str) -> list[int]:
    """The tasks of a job on a node, told by their environment, and the step daemons above them."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in environ and f"SLURM_JOB_ID={job}".encode() in environ:
                found.append(int(process.name))
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd"):
                    found.append(parent)
    return found


def test_matrix_11_a_node_dies(service: Service, straight: RunDir) -> None:
    run = service.submit()
    service.until_step(run, AT)
    node_dies(service, run)
    service.until_done(run)
    same(run, straight)
    # a slow machine gets a step or two further, and Slurm may repeat its kill to n1 for a job that runs again already
    *lost, done = attempts(run)
    assert all(row["requeued"] for row in lost)
    assert not done["requeued"]
    assert lost[0]["why"]
    assert resumed_at(run)[0] in (EVERY, 2 * EVERY), "the last checkpoint before it"


# in slurm.py: the batch script asks after its job when the node is up again, if it is before the script is killed
WHEN_IT_IS_UP = """
import sys
_show_job = show_job

def show_job(job_id):
    deadline = time.monotonic() + 8
    while "after" in sys.argv and time.monotonic() < deadline:
        if "n1 idle" in call("sinfo", "--noheader", "--Node", "--format=%N %T"):
            break
        time.sleep(0.1)
    return _show_job(job_id)
"""


def test_matrix_11_a_node_dies_and_is_back_at_once(service: Service) -> None:
    """By the time its end is looked into, nothing shows that a node was lost, and Slurm has queued the job again."""
    engine = {"train_instead": HEAD + CANNOT_SAVE + TAIL, "world_instead": WORLD}
    run = service.submit(None, setup=[service.faults(**engine, slurm_after=WHEN_IT_IS_UP)])
    service.until_step(run, 1)
    node_dies(service, run)
    service.until_done(run)
    assert ends(run) == [("killed", True), ("done", False)]
    assert attempts(run)[0]["why"] == "node lost; not saved, at step 1; restarts"


def node_dies(service: Service, run: RunDir) -> None:
    """Node n1 dies with its half of the run; as soon as Slurm has noticed, it comes up again."""
    tasks = processes_on("n1", service.job(run))
    assert len(tasks) >= 4, "two ranks, a step daemon, which is named twice"
    kill_daemon(service, "slurmd-n1")
    for pid in tasks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    service.until(run, lambda: cluster.status(service.cluster).nodes["n1"].startswith("down"))
    assert cluster.up(service.cluster)


def kill_daemon(service: Service, daemon: str) -> None:
    os.kill(int((service.cluster / "run" / f"{daemon}.pid").read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 60  # asked in the instant of its death, a controller is waited for
    while cluster.status(service.cluster).daemons[daemon]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_matrix_12_slurmd_restarted(service: Service, straight: RunDir) -> None:
    run = service.submit()
    service.until_step(run, AT)
    kill_daemon(service, "slurmd-n1")
    assert cluster.up(service.cluster)
    service.until_done(run)
    same(run, straight)
    assert ends(run) == [("done", False)]


def test_matrix_13_slurmctld_away(service: Service, straight: RunDir) -> None:
    run = service.submit()
    service.until_step(run, AT)
    kill_daemon(service, "slurmctld")
    asking = subprocess.Popen(
        [sys.executable, "-m", "pithtrain", "status", str(run.path), "--json"],
        env=service.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(5)  # the fault itself
    assert cluster.up(service.cluster)
    answer = json.loads(asking.communicate(timeout=60)[0])[0]
    assert asking.returncode == 0
    assert answer["alive"] or answer["word"] == "done", answer
    service.until_done(run)
    same(run, straight)
    assert ends(run) == [("done", False)]


def test_matrix_14_resume_without_a_node(service: Service, straight: RunDir) -> None:
    run = service.submit(nodes=1, gpus_per_node=4)
    service.until_step(run, AT)
    service.ask(f"scancel --signal=USR2 {service.job(run)}")
    deadline = time.monotonic() + 60
    while "PENDING" not in service.squeue(run):  # not `until`, which would start it where it was
        assert time.monotonic() < deadline, service.picture(run)
        time.sleep(0.1)
    service.pithtrain("resume", run.path, "--exclude", "n0")
    service.until_done(run)
    same(run, straight)
    assert [row["nodes"] for row in attempts(run)] == ["n0", "n1"]
    assert len({row["job_id"] for row in attempts(run)}) == 1
    assert load(run.spec_yaml).slurm.exclude == "n0", "the next job of this run leaves it out too"


def test_matrix_15_the_snapshot_runs(service: Service) -> None:
    """Package and spec file are edited while the job is held; a copy of the package, since others use this one."""
    source = service.folder / "src"
    shutil.copytree(Path(pithtrain.__file__).parent, source / "pithtrain", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "pithtrain" / "train.py").write_text(HEAD + FINISHES + TAIL)
    (source / "pithtrain" / "world.py").write_text(WORLD)
    spec = service.spec(additional_parameters={"hold": True})
    service.pithtrain("submit", spec, PYTHONPATH=str(source))
    run = RunDir(service.folder / "runs" / "run")
    assert service.status(run)["word"] == "held"
    for file in source.rglob("*.py"):
        file.write_text("raise RuntimeError('the edited package runs')\n")
    spec.write_text("edited: true\n")
    service.ask(f"scontrol release {service.job(run)}")
    service.until_done(run)
    assert "hello from" in run.log(1, 3).read_text()


def test_matrix_16_two_jobs_on_one_node_have_their_own_devices(service: Service) -> None:
    devices = """
    def run(spec, run_dir, place, watch):
        emit(run_dir, place, 1)
        (run_dir.path / f"devices-{place.rank}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        while not watch.should_stop():
            time.sleep(0.05)
        return Outcome(1, False)
    """
    one_node = {"nodes": 1, "gpus_per_node": 2, "additional_parameters": {"nodelist": "n0"}}
    setup = [service.engine(textwrap.dedent(devices))]
    mesh = ("parallelism.expert_parallel_size=1", "training.device=auto")
    runs = [service.submit(None, name=name, sets=mesh, setup=setup, **one_node) for name in ("a", "b")]
    for run in runs:
        service.until(run, lambda run=run: len(list(run.path.glob("devices-*"))) == 2)
    seen = [{(run.path / f"devices-{rank}").read_text() for rank in (0, 1)} for run in runs]
    assert seen == [{"0,1"}, {"2,3"}], "ranks of a run see the same two, of which each takes its own"
    for run in runs:
        service.pithtrain("cancel", run.path)
        service.until_ended(run, "COMPLETED")
        assert service.status(run)["word"] == "stopped"


def test_matrix_17_scancel_without_accounting(service: Service) -> None:
    """`submit --wait` ends too: nothing waits for a result that a cancelled job never leaves."""
    spec = service.spec(setup=[service.engine(WAITS_FOR_STOP)])
    waiting = subprocess.Popen(
        [sys.executable, "-m", "pithtrain", "submit", str(spec), "--wait"],
        env=service.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = RunDir(service.folder / "runs" / "run")
    deadline = time.monotonic() + 60
    while not run.metrics.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    service.ask(f"scancel {service.job(run)}")
    assert "cancelled" in waiting.communicate(timeout=60)[1]
    assert waiting.returncode == 1
    assert "cancelled" in service.pithtrain("status", run.path)


BAD = {
    "partition": ({"partition": "trian"}, r'partition.*"?trian.*train.*high.*did you mean .*train'),
    "nodes": ({"nodes": 4}, r"slurm\.nodes = 4.*train has 2"),
    "time": ({"time": "2-00:00:00"}, r"slurm\.time.*at most 1"),
    "gpus": ({"gpus_per_node": 8, "cpus_per_task": None}, r"gpu.*4"),
    "cpus": ({"cpus_per_task": 8}, r"2 tasks x 8 cpus = 16 > 4 per node"),
    "dependency": ({"additional_parameters": {"dependency": "afterok:99999"}}, r"99999 is unknown to Slurm"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_matrix_18_what_slurm_would_let_through(service: Service, mistake: str) -> None:
    slurm, message = BAD[mistake]
    sets = ["training.global_batch_size=32", f"training.device={'auto' if mistake == 'gpus' else 'cpu'}"]
    said = service.pithtrain("submit", service.spec(**slurm), "--set", sets[0], "--set", sets[1], code=2)
    assert re.search(message, said), said
    assert service.ask("squeue --noheader --states=all --name=run | grep -c PENDING || true") == "0"
    assert not (service.folder / "runs").exists(), "nothing is left behind"


def test_matrix_18_what_can_only_be_warned_of(service: Service) -> None:
    said = service.pithtrain(
        "submit", service.spec(account="nobody-pays"), "--set", "slurm.additional_parameters.hold=true"
    )
    assert "nobody-pays" in said
    [script] = (service.folder / "runs" / "run" / "slurm").glob("*_submission.sh")
    assert "#SBATCH --mem=2G" in script.read_text()


def test_matrix_19_killed_between_sbatch_and_bookkeeping(service: Service) -> None:
    """sbatch answers, and at that moment both processes of the submission die."""
    binaries = service.folder / "bin"
    binaries.mkdir()
    (binaries / "sbatch").write_text(
        f'#!/bin/bash\n{shutil.which("sbatch")} "$@" || exit\n'
        'case "$*" in *--test-only*) exit 0;; esac\n'
        "above=$(ps -o ppid= -p $PPID)\nkill -9 $above $PPID\n"
    )
    (binaries / "sbatch").chmod(0o755)
    spec = service.spec(setup=[service.engine(FINISHES)], additional_parameters={"hold": True})
    service.pithtrain("submit", spec, code=-9, PATH=f"{binaries}:{service.env['PATH']}")
    run = RunDir(service.folder / "runs" / "run")
    assert service.job(run) is None
    assert service.status(run)["word"] == "held", "found by the token in its comment"
    assert re.fullmatch(r"\d+", service.job(run)), "and adopted"
    service.pithtrain("resume", run.path)
    service.until_done(run)
    assert ends(run) == [("done", False)]


@pytest.fixture
def small_disk(service: Service) -> Iterator[Path]:
    """A disk of 16 MB for the run directories."""
    runs = service.folder / "runs"
    runs.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(runs)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no disk to fill: {mounted.stderr.strip()}")
    yield runs
    service.ask("scancel --signal=KILL --full --user=$(id -u); scancel --user=$(id -u)")
    idle(service)
    subprocess.run(["umount", str(runs)], check=True)


def test_matrix_20_the_disk_is_full(service: Service, straight: RunDir, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    fills = f"""
    import contextlib
    _begin = catalog.begin

    def begin(final):
        if ATTEMPT == 1 and final.name == "step-{2 * EVERY:08d}":
            with contextlib.suppress(OSError), open({str(ballast)!r}, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        return _begin(final)

    catalog.begin = begin
    """
    run = service.submit(fills, sets=("distributed.save_timeout_s=10",))
    service.until_ended(run, "FAILED")
    status = service.status(run)
    assert status["attempt"] <= 2, "no retry loop: a second attempt finds the disk still full, and that is the end"
    assert "No space left" in status["why"], service.picture(run)
    [first] = [row for row in attempts(run) if row["attempt"] == 1]
    assert re.search(r"step-00000020 cannot be written .*No space left .*older checkpoints are intact", first["why"])
    ballast.unlink()
    catalog.read(catalog.folder(run.checkpoints, EVERY))
    service.pithtrain("resume", run.path)
    service.until_done(run)
    same(run, straight)
    assert resumed_at(run)[0] == EVERY


DUMPS = """
def run(spec, run_dir, place, watch):
    (run_dir.path / f"environ-{place.rank}.json").write_text(json.dumps(dict(os.environ)))
    return Outcome(spec.training.max_steps, True)
"""
OF_A_LAUNCHER = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|SUBMITIT|PITHTRAIN)_.*|.*RANK|.*WORLD_SIZE|MASTER_.*")
# these tell one job from another, or one moment
OF_ONE_JOB = re.compile(r".*(JOB_?ID|JOB_NAME|TOKEN|_PORT|_PID|GTIDS|STEP_.*|TASK_PID|SUBMIT_DIR|START_TIME|END_TIME)")


def test_matrix_21_from_inside_another_job(service: Service) -> None:
    setup = [service.engine(DUMPS)]
    clean = service.submit(None, name="clean", setup=setup)
    service.until_done(clean)
    submit = f"{sys.executable} -m pithtrain submit {service.spec('inside', setup=setup)}"
    outer = "RANK=5 WORLD_SIZE=9 LOCAL_RANK=5 MASTER_ADDR=nowhere MASTER_PORT=1 SBATCH_PARTITION=high"
    service.ask(f"srun --ntasks=1 --cpus-per-task=2 --mem=100 --gpus=1 env {outer} {submit}")
    inside = RunDir(service.folder / "runs" / "inside")
    service.until_done(inside)

    def script(run: RunDir) -> str:
        [path] = run.slurm.glob("*_submission.sh")
        text = path.read_text().replace(rundir.last_job(run)["token"], "TOKEN")
        return text.replace(str(run.path), "RUN").replace(f"--job-name={run.name}", "--job-name=NAME")

    def environment(run: RunDir, rank: int) -> dict[str, str]:
        seen = rundir.read_json(run.path / f"environ-{rank}.json")
        kept = {name for name in seen if OF_A_LAUNCHER.fullmatch(name) and not OF_ONE_JOB.fullmatch(name)}
        return {name: seen[name].replace(str(run.path), "RUN") for name in kept}

    assert script(inside) == script(clean)
    for rank in range(4):
        assert environment(inside, rank) == environment(clean, rank)
