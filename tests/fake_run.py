"""Runs whose engine is a few lines of text: the run directory's snapshot is what workers import, so it is put there.

A fake `train.py` defines `run(spec, run_dir, place, should_stop)`; `Outcome` and `emit(run_dir, place, step)` are there
for it. No torch is imported, so a run of two processes takes about a second.
"""

import os
import subprocess
import sys
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
data: {{sources: [{{path: {output_dir}/none}}]}}
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

FINISHES = """
def run(spec, run_dir, place, should_stop):
    print("hello from", place)
    for step in range(1, spec.training.max_steps + 1):
        emit(run_dir, place, step)
    return Outcome(spec.training.max_steps, True)
"""

WAITS_FOR_STOP = """
def run(spec, run_dir, place, should_stop):
    emit(run_dir, place, 1)
    print("waiting")
    while not should_stop():
        time.sleep(0.05)
    return Outcome(1, False)
"""


def spec_file(folder: Path, name: str = "fake", ranks: int = 2) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(SPEC.format(name=name, output_dir=folder / "runs", ranks=ranks))
    return path


def make_run(folder: Path, train: str, name: str = "fake", ranks: int = 2) -> tuple[RunDir, RunSpec]:
    """A run directory whose snapshot trains with the source text `train`."""
    spec = load(spec_file(folder, name, ranks))
    run = rundir.create(spec.output_dir / spec.name, spec.to_yaml(), {}, ["test"])
    (run.code / "pithtrain" / "world.py").write_text(WORLD)
    (run.code / "pithtrain" / "train.py").write_text(HEAD + train)
    return run, spec


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


def start_workers(run: RunDir, ranks: Sequence[int], attempt: int = 1, size: int = 2) -> list["subprocess.Popen[str]"]:
    """Worker processes as a launcher without supervision would start them."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SUBMITIT_"))}
    env = clean | {"PYTHONPATH": str(run.code), "PITHTRAIN_ATTEMPT": str(attempt), "WORLD_SIZE": str(size)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "pithtrain.worker", str(run.path)],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
