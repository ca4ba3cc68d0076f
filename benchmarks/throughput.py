"""Tokens per second of a spec on this machine: a short run in a folder of its own, and the median over its second half.

    .venv/bin/python benchmarks/throughput.py --config configs/tiny.yaml --steps 40 --set parallelism...

Prints one JSON line: ranks, steps, tokens/s, TFLOP/s per device, seconds a step, peak memory, expert imbalance.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pithtrain.rundir import read_lines
from pithtrain.spec import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.yaml"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=C")
    arguments = parser.parse_args()
    overrides = [f"training.max_steps={arguments.steps}", "checkpoint.interval=null", "logging.interval=1"]
    overrides += arguments.overrides
    spec = load(arguments.config, overrides)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = [option for override in overrides for option in ("--set", override)]
        command = [sys.executable, "-m", "pithtrain.cli", "train", str(arguments.config), "--run-dir", str(run)]
        subprocess.run([*command, *options], stdout=sys.stderr, check=True)
        rows = read_lines(run / "metrics.jsonl")
    rows = rows[len(rows) // 2 :]
    keys = ("tokens_per_second", "tflops_per_device", "step_time_s", "memory_peak_gib", "expert_load_max_over_mean")
    medians = {key: statistics.median(row[key] for row in rows if row[key] is not None) for key in keys}
    print(json.dumps({"config": str(arguments.config), "ranks": spec.world_size, "steps": len(rows), **medians}))


if __name__ == "__main__":
    main()
