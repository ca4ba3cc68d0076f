#!/usr/bin/env python3
"""Validate, plan, dry-run, submit, wait: a run from its config to its end. The last line is PASS or FAIL."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 2.0

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skill import ROOT, end, use_environment  # noqa: E402

use_environment("not started: ")

from pithtrain.errors import PithtrainError  # noqa: E402
from pithtrain.spec import load  # noqa: E402


def pithtrain(*arguments: str) -> str:
    """A command's output; ends the script where it fails."""
    done = subprocess.run([sys.executable, "-m", "pithtrain", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, end="")
        first = (done.stderr.strip().splitlines() or ["no word"])[0].removeprefix("error: ")
        end("FAIL", f"not started: `pithtrain {arguments[0]}` ended with {done.returncode}: {first}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides")
    parser.add_argument("--name")
    parser.add_argument("--wait", type=float, default=3600, metavar="SECONDS", help="the run itself goes on after it")
    given = parser.parse_args()
    overrides = [*given.overrides, *([f"name={json.dumps(given.name)}"] if given.name else [])]
    options = [str(given.config), *(word for pair in overrides for word in ("--set", pair))]

    pithtrain("validate", *options)
    print(f"validate: {given.config} is a valid spec")
    print(f"plan:\n{pithtrain('plan', *options).rstrip()}")
    script = pithtrain("submit", *options, "--dry-run").partition("#!/bin/bash")[2]
    print(f"dry run: the batch script has {len(script.splitlines())} lines")
    print(pithtrain("submit", *options).rstrip(), flush=True)

    try:
        spec = load(given.config, overrides)
    except PithtrainError as error:
        end("FAIL", f"not started: {error}")
    run = spec.output_dir / spec.name
    deadline = time.monotonic() + given.wait
    told = ""
    while True:
        state: dict[str, Any] = json.loads(pithtrain("status", str(run), "--json"))[0]
        now = f"{state['word']}, attempt {state['attempt']}"
        if state["step"] is not None:
            loss = "" if state["loss"] is None else f", loss {state['loss']:.4f}"
            now = f"{state['word']} at step {state['step']} of {state['max_steps']}{loss}, attempt {state['attempt']}"
        if now != told:
            print(now, flush=True)
            told = now
        if not state["alive"] or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)

    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    print(f"run directory  {run}\nlogs           {run}/logs/latest/rank-0.log\nmetrics        {run}/metrics.jsonl")
    print(f"checkpoint     {run}/checkpoints/{saved[-1]}" if saved else "checkpoint     none yet")
    if state["word"] == "done":
        end("PASS", now)
    if state["alive"]:
        end("FAIL", f"{now}: still so after {given.wait:.0f} s; `pithtrain status {run} --watch`")
    advice = f"pithtrain resume {run}"
    if state["word"] not in ("stopped", "cancelled"):
        advice = f"{ROOT}/skills/diagnose-failed-run/scripts/diagnose.py {run}"
    end("FAIL", f"{now}: {state['why'] or 'no word of why'}; next: {advice}")


if __name__ == "__main__":
    main()
