"""The last word of `make demo`: what the run reached, where it lies and what to type next. Fails if the loss did not.

.venv/bin/python demo/summary.py runs/demo-1
"""

import sys
from pathlib import Path

from rich.table import Table

from pithtrain import rundir, show
from pithtrain.rundir import RunDir

MEAN_OVER = 20
LOSS = 5.3  # nats per token, mean of the last MEAN_OVER steps: what must be reached from ln(4096) = 8.3


def main(run: RunDir) -> None:
    rows = rundir.read_lines(run.metrics)
    last = [row["loss"] for row in rows[-MEAN_OVER:]]
    final = sum(last) / len(last)
    held_out = next((row["val_loss/held-out"] for row in reversed(rows) if "val_loss/held-out" in row), None)
    speeds = sorted(row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None)
    attempt = rundir.read_lines(run.attempts)[-1]
    table = Table(show_header=False, title=f"{run.name}: done")
    for label, text in (
        ("steps", f"{rows[-1]['step']} in {attempt['end'] - attempt['start']:.0f} s"),
        ("tokens", f"{rows[-1]['tokens_seen']:,}"),
        ("first loss", f"{rows[0]['loss']:.4f}"),
        (f"last loss, mean of {len(last)}", f"{final:.4f}"),
        ("loss on text held out", f"{held_out:.4f}" if held_out is not None else "-"),
        ("tokens/s, median", f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "-"),
        ("run directory", str(run.path)),
        ("its log", f".venv/bin/pithtrain logs {run.name}"),
        ("go on with it", f".venv/bin/pithtrain resume {run.name} --set training.max_steps={2 * rows[-1]['step']}"),
        ("your own run", "cp configs/tiny.yaml configs/mine.yaml; .venv/bin/pithtrain validate configs/mine.yaml"),
    ):
        table.add_row(label, text)
    show.console().print(table)
    if not final < LOSS:
        sys.exit(f"error: the mean of the last {len(last)} losses is {final:.4f}, not below {LOSS}")


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1]).absolute()))
