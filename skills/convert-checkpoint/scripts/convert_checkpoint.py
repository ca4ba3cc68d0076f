#!/usr/bin/env python3
"""Export a checkpoint as a Hugging Face folder and prove it: read back bit for bit, loaded by transformers. CPU alone.

The last line is PASS or FAIL."""

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

NAMES_SHOWN = 5

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skill import end, use_environment  # noqa: E402

use_environment("not exported: ")

import torch  # noqa: E402

from pithtrain import catalog, rundir  # noqa: E402
from pithtrain.checkpoint import Reader  # noqa: E402
from pithtrain.errors import PithtrainError  # noqa: E402
from pithtrain.spec import read_model  # noqa: E402


def pithtrain(*arguments: str | Path) -> str:
    """A command's output; ends the script where it fails."""
    command = [sys.executable, "-m", "pithtrain", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stderr.splitlines():
        if line.startswith("note: "):
            print(line)
    if done.returncode != 0:
        print(done.stdout + done.stderr, end="")
        first = (done.stderr.strip().splitlines() or ["no word"])[-1 if "Traceback" in done.stderr else 0]
        end("FAIL", f"`pithtrain {arguments[0]}` ended with {done.returncode}: {first.removeprefix('error: ')}")
    return done.stdout


def resolve(source: str, output_dir: Path) -> tuple[Path, catalog.Marker]:
    """The checkpoint that is meant, by the name of a run, its directory or a folder, and its marker."""
    try:
        path = Path(source) if Path(source).is_dir() else rundir.find(source, output_dir).path
        path = catalog.candidates(path, lambda reason: print(f"skipped: {reason}"))[0]
        return path, catalog.read(path)
    except PithtrainError as error:
        end("FAIL", f"not exported: {error}")


def compare(source: Path, back: Path, dtype: torch.dtype) -> int:
    """How many parameters came back as the masters rounded to their dtype; ends the script where one did not."""
    ours, theirs = Reader(source), Reader(back)
    table = read_model(ours.content["model"]).config.parameters()
    wrong: list[str] = []
    for info in table:
        want = ours.tensor(f"master/{info.name}")
        if not info.fp32:
            want = want.to(dtype)
        if not torch.equal(want.float(), theirs.tensor(f"master/{info.name}")):
            wrong.append(info.name)
    if wrong:
        more = f" and {len(wrong) - NAMES_SHOWN} more" if len(wrong) > NAMES_SHOWN else ""
        end("FAIL", f"other values came back: {', '.join(wrong[:NAMES_SHOWN])}{more}")
    return len(table)


def load_in_transformers(out: Path) -> str:
    """What transformers says of the folder; ends the script where a key is missing, unexpected or of another shape."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size * 1.2 > room:
        return f"not loaded in transformers: it takes {size / 2**30:.0f} GiB of memory, {room / 2**30:.0f} are free"
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    except Exception as error:
        end("FAIL", f"transformers cannot load it: {error!r}")
    for kind, names in info.items():
        if names:
            listed = sorted(map(str, names)) if not isinstance(names, str) else [names]
            end("FAIL", f"transformers has {kind}: {', '.join(listed[:NAMES_SHOWN])}")
    with torch.no_grad():
        logits = model(torch.arange(8)[None] % model.config.vocab_size).logits
    if not logits.isfinite().all():
        end("FAIL", "transformers loads it, and its logits are not finite")
    return f"transformers {transformers.__version__} loads it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="RUN|CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the matrices")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"), help="the folder that holds the runs")
    given = parser.parse_args()

    source, content = resolve(given.source, given.output_dir)
    print(f"source: {source}, step {content['step']}, run {content['run']}")
    print(f"exported: {pithtrain('export-hf', source, given.out, '--dtype', given.dtype).strip()}", flush=True)
    with tempfile.TemporaryDirectory(dir=given.out.absolute().parent, prefix="check-") as folder:
        back = Path(folder) / "back"
        pithtrain("import-hf", given.out, back, "--architecture", content["model"]["architecture"])
        count = compare(source, back, getattr(torch, given.dtype))
    print(f"read back: {count} parameters, bit for bit", flush=True)
    end(
        "PASS",
        f"{given.out}: step {content['step']}, {count} parameters bit for bit; {load_in_transformers(given.out)}",
    )


if __name__ == "__main__":
    main()
