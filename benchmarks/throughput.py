"""Tokens per second of a spec on this machine: a short run in a folder of its own, and the median over its second half.

    .venv/bin/python benchmarks/throughput.py --config configs/tiny.yaml --steps 40 --set parallelism...
    .venv/bin/python benchmarks/throughput.py --config configs/tiny.yaml --steps 40 --force-load-balance

Prints one JSON line: routing, ranks, steps, tokens/s, TFLOP/s per device, seconds a step, peak memory, expert
imbalance. Natural routing is what a run does; with --force-load-balance tokens go round robin, so that figures of two
machines or versions differ by nothing that a router decided. Quote the word with the number.
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
    parser.add_argument("--force-load-balance", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=C")
    arguments = parser.parse_args()
    overrides = [f"training.max_steps={arguments.steps}", "checkpoint={}", "logging.interval=1"]
    overrides += [f"moe.force_load_balance={str(arguments.force_load_balance).lower()}"]
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
    about = {"config": str(arguments.config), "routing": "forced" if spec.moe.force_load_balance else "natural"}
    print(json.dumps({**about, "ranks": spec.world_size, "steps": len(rows), **medians}))


if __name__ == "__main__":
    main()
