#!/usr/bin/env python3
"""A base revision against the working tree: loss and gradient norm of each step of one config. PASS or FAIL."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skill import ROOT, end, pithtrain, use_environment

use_environment("not compared: ")

from pithtrain.rundir import RunDir, read_lines, tree_hash  # noqa: E402

Numbers = list[tuple[int, float | None, float | None]]  # step, loss, gradient norm; null in JSON is not finite


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        end("FAIL", f"not compared: `git {' '.join(arguments)}`: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """A worktree of a revision, which is gone afterwards however this ends."""
    base = folder / "base"
    git("worktree", "add", "--detach", str(base), revision)
    try:
        yield base
    finally:
        git("worktree", "remove", "--force", str(base))


def train(source: Path, run: RunDir, config: Path, overrides: list[str]) -> Numbers:
    """The numbers of a run of the code in `source`, which its own copy of that code proves."""
    env = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    pairs = [word for pair in overrides for word in ("--set", pair)]
    pithtrain(f"not compared, {run.name}", "train", config, "--run-dir", run.path, *pairs, env=env)
    if tree_hash(run.code / "pithtrain") != tree_hash(source / "src/pithtrain"):
        end("FAIL", f"not compared: {run.name} ran other code than {source}/src")
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_lines(run.metrics)]


def difference(one: float | None, other: float | None) -> float:
    """Relative to the larger; infinite where either is not finite, since then there is nothing to compare."""
    if one is None or other is None:
        return float("inf")
    return 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", default="HEAD", help="a revision of git; HEAD otherwise")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/tiny.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rtol", type=float, default=0.0, help="where arithmetic changed on purpose; 0: bit for bit")
    given = parser.parse_args()
    if not 0 <= given.rtol < 1:
        parser.error(f"--rtol {given.rtol:g}: at least 0 and below 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the worktree goes on that way too

    overrides = [f"training.max_steps={given.steps}", "training.device=cpu", "parallelism={}", "lr_scheduler={}"]
    overrides += ["slurm={gpus_per_node: 1}", "checkpoint={}", "logging={}", *given.overrides]
    commit = git("rev-parse", "--verify", "--short", f"{given.base}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="validate-") as name, checked_out(commit, folder := Path(name)) as source:
        same = tree_hash(source / "src/pithtrain") == tree_hash(ROOT / "src/pithtrain")
        before = train(source, RunDir(folder / "base-run"), given.config, overrides)
        after = train(ROOT, RunDir(folder / "tree-run"), given.config, overrides)

    print("\nstep  loss base           loss tree           rel      norm base           norm tree           rel")
    worst, at, first = 0.0, "", ""
    for (step, loss, norm), (_, loss2, norm2) in zip(before, after, strict=False):
        apart = {"loss": difference(loss, loss2), "grad_norm": difference(norm, norm2)}
        cells = f"{loss!s:<18}  {loss2!s:<18}  {apart['loss']:.1e}"
        print(f"{step:4d}  {cells}  {norm!s:<18}  {norm2!s:<18}  {apart['grad_norm']:.1e}")
        for key, value in apart.items():
            if value > worst:
                worst, at = value, f"{key} of step {step}"
            if value > given.rtol and not first:
                first = f"{key} of step {step}"
    if same:
        print("note: src/pithtrain is the same in both")
    against = f"{given.base} ({commit})"
    if [row[0] for row in before] != [row[0] for row in after] or len(before) != given.steps:
        end("FAIL", f"{given.steps} steps asked for, {len(before)} lines of {against}, {len(after)} of the tree")
    if first:
        hint = f"rtol is {given.rtol:g}" if given.rtol else "if the arithmetic changed on purpose, say how far: --rtol"
        end("FAIL", f"differs from {against} from {first} on, most by {worst:.1e} in {at}; {hint}")
    end("PASS", f"{given.steps} steps as {against}, " + (f"within {worst:.1e}" if worst else "bit for bit"))


if __name__ == "__main__":
    main()
