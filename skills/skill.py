"""What the skills' scripts share: the checkout's environment, the last line, a command of ours, reading a trace."""

import gzip
import importlib.metadata
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]


def end(word: str, text: str) -> NoReturn:
    """The last line, PASS or FAIL, and the exit code that says the same."""
    print(f"{word}  {text}", flush=True)
    raise SystemExit(word == "FAIL")


def use_environment(fails: str = "") -> None:
    """Go on in the checkout's .venv, for a caller outside any environment that has the package. Call it before the
    package is imported; `fails`: `not checked: `, or what else did not happen where there is no .venv."""
    python = ROOT / ".venv" / "bin" / "python"
    if list(importlib.metadata.distributions(name="pithtrain")) or Path(sys.prefix) == ROOT / ".venv":
        return
    if not python.exists():
        end("FAIL", f"{fails}there is no .venv; run `make setup` first")
    os.execv(python, [str(python), *sys.argv])


def pithtrain(fails: str, *arguments: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command of ours, its output passed on; where it fails, that ends the script with its first error."""
    command = [sys.executable, "-m", "pithtrain", *map(str, arguments)]
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode != 0:
        print(done.stderr, end="", flush=True)
        lines = done.stderr.strip().splitlines() or ["no word"]
        first = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
        end("FAIL", f"{fails}: `pithtrain {arguments[0]}` ended with {done.returncode}: {first}")


def read_trace(path: Path) -> dict[str, Any]:
    """A trace that torch.profiler wrote, `.json` or `.json.gz`; ends the script where it is not whole."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            trace: Any = json.load(file)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # a cut file: EOFError, or JSON that does not end
        end("FAIL", f"{path} cannot be read, or is cut: {error}")
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        end("FAIL", f"{path} is no trace of torch.profiler: it has no traceEvents")
    return trace


def steps(trace: Mapping[str, Any]) -> list[int]:
    """The steps whose ranges it holds."""
    names = (one["name"] for one in trace["traceEvents"] if one.get("cat") == "user_annotation")
    return sorted(int(name[5:]) for name in names if name.startswith("step ") and name[5:].isdigit())


def on_device(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its kernels, copies and fills on a GPU."""
    return [one for one in trace["traceEvents"] if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def operators(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one for one in trace["traceEvents"] if one.get("cat") == "cpu_op"]
