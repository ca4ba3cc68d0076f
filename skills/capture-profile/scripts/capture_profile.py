#!/usr/bin/env python3
"""Train a config for a few steps under torch.profiler and look whether the traces hold them. PASS or FAIL."""

import argparse
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skill import ROOT, end, on_device, operators, pithtrain, read_trace, steps, use_environment

use_environment("not captured: ")

from pithtrain.rundir import RunDir, read_lines  # noqa: E402
from pithtrain.spec import load  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides")
    parser.add_argument("--first", type=int, default=4, help="first step of the window; those before it warm up")
    parser.add_argument("--steps", type=int, default=2, help="how many it has")
    parser.add_argument("--run-dir", type=Path, help="runs/profile-CONFIG-TIME otherwise")
    given = parser.parse_args()
    last = given.first + given.steps - 1
    run = RunDir(given.run_dir or Path("runs") / f"profile-{given.config.stem}-{time.strftime('%m%d-%H%M%S')}")
    window = f"{{torch: true, start_step: {given.first}, end_step: {last}}}"
    overrides = [f"training.max_steps={last}", "lr_scheduler={}", "checkpoint={}", "logging.wandb.mode=disabled"]
    overrides += [f"profiling={window}", *given.overrides]
    pairs = [word for pair in overrides for word in ("--set", pair)]
    pithtrain("not captured", "train", given.config, "--run-dir", run.path, *pairs)
    shutil.rmtree(run.checkpoints, ignore_errors=True)  # a run saves at its end, and this one's state is of no use

    keys = load(run.spec_yaml).profiling
    wanted = list(range(keys.start_step or 1, (keys.end_step or 0) + 1))
    device = next(row["device"] for row in read_lines(run.events) if row["event"] == "started")
    for rank in keys.ranks:
        path = run.trace(1, rank)
        if not path.exists():
            said = [row["message"] for row in read_lines(run.events) if row["event"] == "warning"]
            end("FAIL", f"{path} is not there: {'; '.join(said) or 'profiling.torch is off'}")
        trace = read_trace(path)
        kernels = len(on_device(trace))
        print(f"trace  {path}, {path.stat().st_size / 2**20:.1f} MiB")
        print(f"holds  steps {steps(trace)}, {len(operators(trace))} operators, {kernels} kernels and copies")
        if steps(trace) != wanted:
            end("FAIL", f"{path} holds the steps {steps(trace)}, and {wanted} were asked for")
        if not operators(trace):
            end("FAIL", f"{path} holds no operator")
        if device.startswith("cuda") and not kernels:
            end("FAIL", f"{path} holds no kernel of {device}: does nsys or another profiler hold the GPU's counters?")
    report = ROOT / "skills/report-heavy-kernels/scripts/report_heavy_kernels.py"
    print(f"next   {report} {run.trace(1, keys.ranks[0])}")
    ranks = f"ranks {', '.join(map(str, keys.ranks))}"
    end("PASS", f"{run.path / 'profiles'}: steps {wanted[0]}-{wanted[-1]} of {ranks} on {device}")


if __name__ == "__main__":
    main()
