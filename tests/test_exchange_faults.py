"""A rank that dies or hangs in the middle of an expert exchange, with its peer waiting: all end in time, cause named.

The engine itself over each transport; the fault is a few lines behind its snapshot's `ops/dispatch.py`. The peer waits
in gloo, in a NCCL kernel, or on its device for a signal that never comes; its host stands where it reads counts.
"""

import re
import signal
import time
from pathlib import Path

import pytest
import torch

from fake_run import change_snapshot, ends, start_workers
from harness import make_spec
from pithtrain import jobs, rundir
from test_data import make

CALL = 2 * 8 + 3  # of launch_combine: in the third step, which has 4 micro-batches x 2 layers

WIDTHS = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}  # that a GPU's kernels take

FAULT = """

import os, signal, time

_launch, _calls = Exchange.launch_combine, [0]

def hangs():
    time.sleep(1000)

def _faulty(self, out_UH):
    _calls[0] += 1
    if dist.get_rank() == 1 and _calls[0] == CALL:
        FAULT
    _launch(self, out_UH)

Exchange.launch_combine = _faulty
"""

on_two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "hung"])
@pytest.mark.parametrize(
    ("device", "transport"),
    [("cpu", "auto"), *(pytest.param("cuda", name, marks=on_two_gpus) for name in ("nccl", "symmetric"))],
)
def test_a_rank_lost_in_an_exchange_ends_all_and_is_named(
    tmp_path: Path, device: str, transport: str, fault: str
) -> None:
    corpus = make(tmp_path / "corpus", [[n % 90 + 5 for n in range(5000)]], 96)
    spec = make_spec(
        ep=2,
        model={**WIDTHS, "num_hidden_layers": 2, "mlp_only_layers": []},
        training={"global_batch_size": 8, "max_steps": 50, "device": device, "compute_dtype": "auto"},
        moe={"transport": transport},
        data={"sources": [{"path": str(corpus / "tokens")}], "repeat": True},
        distributed={"train_timeout_s": 90, "step_timeout_s": 8},
        output_dir=str(tmp_path),
    )
    run = rundir.create(tmp_path / "run", spec.to_yaml(), {}, ["test"])
    change_snapshot(run, "watch", POLL_S=0.2, GRACE_S=1.0)
    does = "os.kill(os.getpid(), signal.SIGKILL)" if fault == "killed" else "hangs()"
    with (run.code / "pithtrain/ops/dispatch.py").open("a") as file:
        file.write(FAULT.replace("CALL", str(CALL)).replace("FAULT", does))

    tasks = start_workers(run, [0, 1])
    began = time.monotonic()
    codes = [end[0] for end in ends(tasks, 150)]
    print(f"{device} {transport} {fault}: ended {time.monotonic() - began:.0f} s after the start")
    if device == "cuda":
        [told] = [row for row in rundir.read_lines(run.events) if row["event"] == "transport"]
        assert told["used"] == transport
    assert [row["step"] for row in rundir.read_lines(run.metrics)] == [1, 2]
    line = jobs.cause(run, 1).line
    if fault == "killed":
        assert codes[0] != 0 and codes[1] == -signal.SIGKILL
        assert "rank 1 was killed" in line
    else:
        assert codes == [1, 1]
        assert re.match(r"rank 1: on \S+ the phase step has lasted .* hangs", line), line
        first = rundir.first_error(run, 1)
        assert first is not None and (first["rank"], first["type"], first["step"]) == (1, "Stalled", 2)
        assert rundir.read_json(run.error(1, 0))["secondary"]
