"""Runs whose engine is a few lines of text: the run directory's snapshot is what workers import, so it is put there.

A fake `train.py` defines `run(spec, run_dir, place, watch)`; `Outcome` and `emit(run_dir, place, step)` are there
for it, and the marker of its end is written for it. No torch is imported, so a run of two processes takes about a
second.
"""

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pithtrain import rundir
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, load

SPEC = """
name: {name}
output_dir: {output_dir}
model:
  architecture: qwen3_moe
  vocab_size: 512
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 16
  intermediate_size: 32
  moe_intermediate_size: 32
  num_experts: 4
  num_experts_per_tok: 2
  norm_topk_prob: true
  rms_norm_eps: 1e-6
  rope_theta: 10000.0
  tie_word_embeddings: false
  initializer_range: 0.02
training: {{max_steps: 4, global_batch_size: 8, micro_batch_size: 1, sequence_length: 16, device: cpu}}
optimizer: {{lr: 1e-3}}
data: {{sources: [{{path: {corpus}}}], repeat: true}}
slurm: {{gpus_per_node: {ranks}, cpus_per_task: 1}}
"""

WORLD = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Place:
    rank: int
    world_size: int
    local_rank: int
    init_method: str
    attempt: int
"""

HEAD = """
import dataclasses, json, os, signal, sys, time
from pithtrain.errors import *

@dataclasses.dataclass
class Outcome:
    step: int
    finished: bool

def emit(run_dir, place, step):
    if place.rank == 0:
        with run_dir.metrics.open("a") as file:
            row = {"step": step, "loss": 8.0 - step, "tokens_seen": step, "tokens_per_second": 1.0}
            print(json.dumps(row | {"attempt": place.attempt}), file=file)
"""

TAIL = """
_run = run

def run(spec, run_dir, place, watch):
    outcome = _run(spec, run_dir, place, watch)
    watch.ended(outcome.step, outcome.finished)
    return outcome
"""

FINISHES = """
def run(spec, run_dir, place, watch):
    print("hello from", place)
    for step in range(1, spec.training.max_steps + 1):
        emit(run_dir, place, step)
    return Outcome(spec.training.max_steps, True)
"""

WAITS_FOR_STOP = """
def run(spec, run_dir, place, watch):
    emit(run_dir, place, 1)
    print("waiting")
    while not watch.should_stop():
        time.sleep(0.05)
    return Outcome(1, False)
"""


def spec_file(folder: Path, name: str = "fake", ranks: int = 2) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(SPEC.format(name=name, output_dir=folder / "runs", ranks=ranks, corpus=some_corpus()))
    return path


@functools.cache
def some_corpus() -> Path:
    """A corpus that nobody trains on; `submit` looks whether there is one."""
    from test_data import make  # which wants pytest's path; other programs import this file without it

    folder = Path(tempfile.mkdtemp(prefix="corpus-"))
    atexit.register(shutil.rmtree, folder)
    return make(folder / "made", [range(10, 100)] * 10) / "tokens"


def make_run(
    folder: Path, train: str, name: str = "fake", ranks: int = 2, overrides: Sequence[str] = ()
) -> tuple[RunDir, RunSpec]:
    """A run directory whose snapshot trains with the source text `train`."""
    spec = load(spec_file(folder, name, ranks), overrides)
    run = rundir.create(spec.output_dir / spec.name, spec.to_yaml(), {}, ["test"])
    (run.code / "pithtrain" / "world.py").write_text(WORLD)
    (run.code / "pithtrain" / "train.py").write_text(HEAD + train + TAIL)
    return run, spec


def change_snapshot(run: RunDir, module: str, **constants: float) -> None:
    """Give a run's own copy of a module other constants."""
    path = run.code / "pithtrain" / f"{module}.py"
    text = path.read_text()
    for name, value in constants.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1, name
    path.write_text(text)


def ends(tasks: Sequence["subprocess.Popen[str]"], seconds: float = 30) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; a task that does not end in time fails the test and is killed."""
    deadline = time.monotonic() + seconds
    try:
        results: list[tuple[int, str, str]] = []
        for task in tasks:
            out, err = task.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((task.returncode, out, err))
        return results
    finally:
        for task in tasks:
            task.kill()
            task.communicate()


def is_waiting(run: RunDir, ranks: Sequence[int], attempt: int = 1) -> bool:
    """Whether these ranks have come to the loop of WAITS_FOR_STOP."""
    logs = [run.log(attempt, rank) for rank in ranks]
    return all(log.exists() and "waiting" in log.read_text() for log in logs)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Poll until `condition` holds; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def start_workers(
    run: RunDir, ranks: Sequence[int], attempt: int = 1, size: int = 2, command: Sequence[str] = ("-m",), **more: str
) -> list["subprocess.Popen[str]"]:
    """Worker processes as a launcher without supervision would start them. `more`: further variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SUBMITIT_"))}
    paths = os.pathsep.join(filter(None, [str(run.code), os.environ.get("PYTHONPATH")]))
    env = clean | {"PYTHONPATH": paths, "PITHTRAIN_ATTEMPT": str(attempt), "WORLD_SIZE": str(size)}
    return [
        subprocess.Popen(
            [sys.executable, *command, "pithtrain.worker", str(run.path)],
            env=env | {"RANK": str(rank)} | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
