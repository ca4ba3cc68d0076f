"""A hundred random faults over one run on a real local Slurm; it ends bitwise like an undisturbed run. Not in CI.

    .venv/bin/python tests/faults.py --faults 100 --seed 0        (as root: it mounts a small disk to fill)

Each fault waits until the attempt has gained a step over all before it, then strikes after a random delay. Kind, rank
and instant are drawn from the seed:

    signal      USR2 or TERM to one rank or to all            saved, requeued
    preempt     a job of the partition high                   saved, requeued
    timelimit   the limit is set to the next minute           saved, requeued
    kill        SIGKILL of one rank                           requeued, goes on from the last checkpoint
    hang        SIGSTOP of one rank                           the watchdog names it, requeued
    node        slurmd of a node and its tasks die            Slurm requeues
    controller  slurmctld is gone for some seconds            nothing happens to the run
    disk        the run's disk is full at the next save       the save fails, older checkpoints stand, requeued

It prints a line a fault and a table: attempts, steps lost (must be 0), steps trained again, causes named right.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("slurm", "demo")]  # as pyproject.toml has it

import cluster
from harness import MODEL
from pithtrain import rundir
from pithtrain.catalog import folder as checkpoint_folder
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, load
from test_data import make
from test_service import AT_STEPS, SITE
from test_train import trained

KINDS = ("signal", "preempt", "timelimit", "kill", "hang", "node", "controller", "disk")
WEIGHTS = (25, 15, 6, 20, 12, 6, 8, 8)
CAUSES = {
    "signal": r"saved at step \d+ on SIG(USR2|TERM)",
    "preempt": r"saved at step \d+ on SIG(TERM|USR2)|preempted",
    "timelimit": r"saved at step \d+ on SIGUSR2",
    "kill": r"rank {rank}\b.* was killed",
    "hang": r"rank {rank}: on \S+ the phase|rank {rank} stopped answering",
    "node": r"its job was killed: the node was lost|node lost|rank {rank} on n{rank} was killed",
    "disk": r"[Nn]o space left|cannot be written \(.* GiB free",
}
SPEC = """
name: faults
output_dir: {folder}/runs
model: {model}
parallelism: {{pipeline_parallel_size: 2}}
training: {{max_steps: {steps}, global_batch_size: 16, micro_batch_size: 1, sequence_length: 256, device: cpu, seed: 3}}
optimizer: {{lr: 1e-3}}
lr_scheduler: {{type: cosine, warmup_steps: 10}}
moe: {{load_balance_type: aux_loss, aux_loss_coef: 0.01}}
data: {{sources: [{{path: {folder}/corpus/tokens}}], repeat: true}}
checkpoint: {{interval: 2}}
distributed: {{init_timeout_s: 60, train_timeout_s: 60, step_timeout_s: 10, save_timeout_s: 12}}
slurm: {{nodes: 2, gpus_per_node: 1, cpus_per_task: 1, mem: 2G, partition: train, time: 60, signal_delay_s: 50,
  setup: [export PYTHONPATH={folder}/pace], max_requeues: {budget}}}
"""


class Faults:
    """One campaign: the cluster, the run, and the ways to hurt them."""

    def __init__(self, folder: Path, run: RunDir, env: dict[str, str], rng: random.Random) -> None:
        self.folder, self.run, self.env, self.rng = folder, run, env, rng

    def ask(self, *command: str) -> str:
        for _ in range(20):
            done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
            time.sleep(0.5)
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")

    @property
    def job(self) -> str:
        return rundir.jobs(self.run)[-1]["job_id"]

    def attempt(self) -> int:
        return rundir.last_attempt(self.run).get("attempt", 0)

    def step(self) -> int:
        """The last finished step of the attempt that runs, 0 where it has not finished one."""
        beat = rundir.read_json(self.run.heartbeat)
        return (
            beat.get("step", 0)
            if beat.get("attempt") == self.attempt() and beat.get("phase") in ("step", "save")
            else 0
        )

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {seconds} s: {what}\n{self.ask('squeue', '--states=all')}")
            self.hurry()
            time.sleep(0.2)

    def hurry(self) -> None:
        """A requeued job waits two minutes: start it now."""
        asked = self.ask("squeue", "--noheader", "--jobs", self.job, "--states=all", "--format=%T %r")
        row = rundir.last_attempt(self.run)
        if asked.startswith("PENDING BeginTime") and time.time() - (row.get("end") or row.get("start") or 0) > 5:
            subprocess.run(["scontrol", "update", f"JobId={self.job}", "StartTime=now"], env=self.env, check=False,
                           capture_output=True)  # fmt: skip
        if asked.split()[0] in ("FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"):
            raise SystemExit(f"the job is {asked}: {rundir.last_attempt(self.run)}")

    def state(self) -> str:
        return self.ask("squeue", "--noheader", "--jobs", self.job, "--states=all", "--format=%T")

    def ended(self, attempt: int) -> bool:
        rows = {row["attempt"]: row for row in rundir.read_lines(self.run.attempts)}
        return attempt + 1 in rows or self.run.done.exists()

    def pid(self, rank: int) -> int:
        return rundir.read_json(self.run.pid(self.attempt(), rank))["pid"]

    def strike(self, kind: str, rank: int) -> None:
        if kind == "signal":
            name = self.rng.choice(("USR2", "TERM"))
            if self.rng.random() < 0.5:
                self.ask("scancel", f"--signal={name}", self.job)
            else:
                os.kill(self.pid(rank), getattr(signal, f"SIG{name}"))
        elif kind == "preempt":
            self.ask("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        elif kind == "timelimit":
            shown = self.ask("scontrol", "show", "job", "-o", self.job)
            hours, minutes, _ = map(int, re.search(r"RunTime=(\S+)", shown)[1].split(":"))  # type: ignore[index]
            self.ask("scontrol", "update", f"JobId={self.job}", f"TimeLimit={60 * hours + minutes + 1}")
        elif kind == "kill":
            os.kill(self.pid(rank), signal.SIGKILL)
        elif kind == "hang":
            os.kill(self.pid(rank), signal.SIGSTOP)
        elif kind == "node":
            pids = [self.pid(0)] if rank == 0 else [self.pid(1)]
            cluster._signal(int((self.folder / "slurm" / "run" / f"slurmd-n{rank}.pid").read_text()), signal.SIGKILL)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        elif kind == "controller":
            os.kill(int((self.folder / "slurm" / "run" / "slurmctld.pid").read_text()), signal.SIGKILL)
            time.sleep(self.rng.uniform(1, 5))
            cluster.up(self.folder / "slurm")
        elif kind == "disk":
            with contextlib.suppress(OSError), (self.run.path.parent / "ballast").open("wb") as file:
                while True:  # until nothing goes in
                    file.write(bytes(1 << 20))

    def mend(self, kind: str, attempt: int) -> None:
        if kind == "disk":
            self.wait(lambda: self.state() != "RUNNING", 60, "the save fails")
            (self.run.path.parent / "ballast").unlink()
        if kind == "node":
            self.wait(lambda: self.state() != "RUNNING", 120, "node fails")
            cluster.up(self.folder / "slurm")
            self.ask("sinfo")
        if kind == "timelimit":
            self.wait(lambda: self.ended(attempt) or self.state() != "RUNNING", 120, "the limit")
            self.ask("scontrol", "update", f"JobId={self.job}", "TimeLimit=60")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1000.0, help="no more faults after so long; the run goes on")
    parser.add_argument("--straight", type=Path, help="an undisturbed run made before by this script, to compare with")
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    (folder / "runs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(folder / "runs")], check=True)
    documents = [np.random.default_rng(5).integers(10, MODEL["vocab_size"], 300).tolist() for _ in range(100)]
    make(folder / "corpus", documents, MODEL["vocab_size"])
    text = SPEC.format(folder=folder, model=json.dumps(MODEL), steps=options.steps, budget=2 * options.faults)
    (folder / "faults.yaml").write_text(text)
    (folder / "pace").mkdir()  # steps of a fraction of a second leave room for many faults
    (folder / "pace" / "sitecustomize.py").write_text(SITE)
    (folder / "pace" / "train.after.py").write_text(AT_STEPS.replace("PACE_S = 0.1", "PACE_S = 0.4"))
    cluster.up(folder / "slurm")
    env = cluster.environment(folder / "slurm")
    try:
        campaign(options, folder, env, rng)
    finally:
        cluster.down(folder / "slurm")
    subprocess.run(["umount", str(folder / "runs")], check=False)
    shutil.rmtree(folder)


def campaign(options: argparse.Namespace, folder: Path, env: dict[str, str], rng: random.Random) -> None:
    pithtrain = [sys.executable, "-m", "pithtrain"]
    config = str(folder / "faults.yaml")
    straight = RunDir(options.straight or folder / "straight")
    if options.straight is None:
        here = ["--set", "slurm.nodes=1", "--set", "slurm.gpus_per_node=2"]
        train = [*pithtrain, "train", config, "--run-dir", str(straight.path), *here]
        subprocess.run(train, env=env, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*pithtrain, "submit", config], env=env, check=True)
    run = RunDir(folder / "runs" / "faults")
    faults = Faults(folder, run, env, rng)
    struck: Counter[str] = Counter()
    named: Counter[str] = Counter()
    best, began = 0, time.monotonic()
    for number in range(1, options.faults + 1):
        if time.monotonic() - began > 60 * options.minutes:
            break
        kinds = options.kinds.split(",")
        kind = rng.choices(kinds, [WEIGHTS[KINDS.index(each)] for each in kinds])[0]
        rank = rng.randrange(2)
        goal = best + 1
        faults.wait(lambda goal=goal: faults.step() >= goal or run.done.exists(), 120, f"step {goal}")
        if run.done.exists():
            print(f"the run was done before fault {number}")
            break
        time.sleep(rng.uniform(0, 0.6))
        attempt = faults.attempt()
        best = max(best, faults.step())
        faults.strike(kind, rank)
        struck[kind] += 1
        faults.mend(kind, attempt)
        if kind == "controller":
            named[kind] += 1
            print(f"{number:>3} {kind:<10} at step {best}", flush=True)
            continue
        faults.wait(lambda attempt=attempt: faults.ended(attempt), 180, f"attempt {attempt} ends after {kind} {rank}")
        row = next(row for row in rundir.read_lines(run.attempts) if row["attempt"] == attempt)
        best = max(best, row.get("reached") or 0)
        right = re.search(CAUSES[kind].format(rank=rank), row["why"] or "") is not None
        named[kind] += right
        print(
            f"{number:>3} {kind:<10} rank {rank} at step {best}: {row['why']}{'' if right else '   <-- not named'}",
            flush=True,
        )
    faults.wait(run.done.exists, 60 + 2 * options.steps, "the run is done")
    report(straight, run, struck, named, time.monotonic() - began, options.steps)


def report(
    straight: RunDir, run: RunDir, struck: Counter[str], named: Counter[str], seconds: float, steps: int
) -> None:
    rows = rundir.read_lines(run.metrics)
    lost = steps - len({row["step"] for row in rows})
    again = sum(
        max(0, event.get("lines_cut", 0)) for event in rundir.read_lines(run.events) if event["event"] == "rewound"
    )
    losses = [row["loss"] for row in rows] == [row["loss"] for row in rundir.read_lines(straight.metrics)]
    spec: RunSpec = load(run.spec_yaml, ["slurm.nodes=1", "slurm.gpus_per_node=2"])
    ours, theirs = trained(run.path, spec, steps), trained(straight.path, spec, steps)
    equal = ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    print(f"\n{sum(struck.values())} faults in {seconds:.0f} s, {len(rundir.read_lines(run.attempts))} attempts")
    for kind in KINDS:
        print(f"  {kind:<10} {struck[kind]:>3}, cause named right {named[kind]:>3}")
    print(
        f"steps lost {lost}; lines twice {len(rows) - len({row['step'] for row in rows})}; steps trained again {again}"
    )
    print(f"losses equal: {losses}; masters and moments bitwise equal: {equal}")
    print(f"newest checkpoint {checkpoint_folder(run.checkpoints, steps).name}")
    if lost or not losses or not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
