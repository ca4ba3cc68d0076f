"""Which checkpoints a folder holds, which of them are complete, which may go. No torch: names, sizes and one JSON file.

    checkpoints/step-00000100/           complete: checkpoint.json was written last and every file has the size it says
                step-00000200.partial    a save under way, or one that was killed
                step-00000100.old        what a second save of a step replaces; counts until the new one stands
                step-00000050.removed    being deleted

Nothing points at a checkpoint: the newest complete one is found by looking, so nothing can point at a wrong one. A name
is read as a number, whatever its width. What is skipped is said, and never deleted but for leftovers of our own saves
(`.partial`, `.removed`), when the run's next save begins.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from pithtrain.errors import CheckpointError

FORMAT = 2
MARKER = "checkpoint.json"
MANY = 60  # lines of an error
_NAME = re.compile(r"step-(\d+)(\.old)?")
_LEFTOVER = re.compile(r"step-\d+\.(partial|removed)")


class IncompleteError(CheckpointError):
    """A checkpoint whose save did not end, or that has lost a part since."""


def folder(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def read(path: Path) -> dict[str, Any]:
    """The marker of a complete checkpoint. Raises IncompleteError, or CheckpointError for another format."""
    try:
        content = json.loads((path / MARKER).read_text())
        written_by, files = content["format"], dict[str, int]()
        if written_by == FORMAT:
            files = dict(content["files"])
            if not all(isinstance(content[key], int) for key in ("step", "samples", "tokens", "updates")):
                raise TypeError
            if not isinstance(content["tensors"], dict) or content["kind"] not in ("full", "weights"):
                raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise IncompleteError(f"{path.name} is incomplete: it has no readable {MARKER}") from None
    if written_by != FORMAT:
        raise CheckpointError(
            f"{path} has format {written_by}, this version reads {FORMAT}: load it with its own version"
        )
    for name, size in files.items():
        file = path / name
        have = file.stat().st_size if file.exists() else None
        if have != size:
            raise IncompleteError(f"{path.name} is incomplete: {name} has {have} bytes of {size}")
    return content


def complete(checkpoints: Path, report: Callable[[str], None]) -> list[Path]:
    """The complete checkpoints, newest first. `report` hears of each one that is skipped, and why.

    Raises CheckpointError for one that another version wrote: going on without it would lose its steps.
    """
    found: list[tuple[int, bool, Path]] = []
    for path in sorted(checkpoints.glob("step[-_]*")):
        match = _NAME.fullmatch(path.name)
        if _LEFTOVER.fullmatch(path.name):
            report(f"{path.name} is a save under way or cut off, or a removal")
        elif match is None:
            report(f"{path.name} is not a checkpoint: its name is not step-<number>")
        else:
            try:
                read(path)
            except IncompleteError as error:
                report(str(error))
            else:
                found.append((int(match[1]), match[2] is None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def newest(checkpoints: Path, report: Callable[[str], None]) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    return next(iter(complete(checkpoints, report)), None)


def resolve(path: Path, report: Callable[[str], None]) -> Path:
    """The checkpoint that a user names: its folder, or a run directory, of which the newest. Raises CheckpointError."""
    if (path / MARKER).exists():
        return path
    found = newest(path / "checkpoints", report)
    if found is None:
        raise CheckpointError(f"{path} is neither a complete checkpoint nor a run directory that has one")
    return found


def check(path: Path, content: dict[str, Any], about: dict[str, Any]) -> None:
    """Raises CheckpointError when the checkpoint's model or tokenizer is not that of `about`, with both values."""
    problems = [
        f"{key}: the checkpoint has {theirs!r}, the spec {ours!r}"
        for kind in ("model", "tokenizer")
        if kind in about
        for key, theirs, ours in differences(kind, content.get(kind), about[kind])
    ]
    if problems:
        raise CheckpointError("\n  ".join([f"{path} is of another run and cannot be resumed:", *problems]))


def differences(key: str, theirs: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    """Dotted key, their value, our value, wherever two JSON values differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        left, right = cast(dict[str, Any], theirs), cast(dict[str, Any], ours)
        keys = sorted({*left, *right})
        return [item for k in keys for item in differences(f"{key}.{k}", left.get(k), right.get(k))]
    return [] if theirs == ours else [(key, theirs, ours)]


def check_tensors(path: Path, have: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError naming every tensor that is missing, that nobody asked for, or that has another shape.

    Names that differ in numbers alone share a line where there are very many: a large model has tens of thousands.
    """
    wrong = [("missing:", name, "") for name in want if name not in have]
    wrong += [("unexpected:", name, "") for name in have if name not in want]
    wrong += [
        ("shape of", name, f": {list(have[name])} there, {list(want[name])} here")
        for name in want
        if name in have and have[name] != want[name]
    ]
    lines: dict[str, int] = {}
    for what, name, shapes in wrong:
        shown = name if len(wrong) <= MANY else re.sub(r"\d+", "*", name)
        lines[f"{what} {shown}{shapes}"] = lines.get(f"{what} {shown}{shapes}", 0) + 1
    if wrong:
        told = [line + (f" ({count} of them)" if count > 1 else "") for line, count in lines.items()]
        raise CheckpointError("\n  ".join([f"{path} does not hold this model's tensors:", *told]))


def tidy(checkpoints: Path) -> None:
    """Delete what killed saves and killed deletions have left."""
    for path in checkpoints.glob("step-*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def begin(final: Path) -> Path:
    """An empty folder beside `final` to write it in."""
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(final: Path, partial: Path, content: dict[str, Any]) -> None:
    """Write the marker and make `partial` visible as `final`; each step is on the disk before the next one begins.

    A checkpoint of the same step (the step was done again) stays until then.
    """
    files = {file.name: file.stat().st_size for file in partial.iterdir()}
    with (partial / MARKER).open("w") as file:
        json.dump({"format": FORMAT, **content, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    old = final.with_name(final.name + ".old")
    sync(partial)
    if final.exists():  # else `old` may be all there is, after a death between these two renames
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def retire(checkpoints: Path, keep_last: int | None, keep_interval: int | None) -> None:
    """Delete complete checkpoints beyond the `keep_last` newest, but for those at multiples of `keep_interval`.

    Call it when a newer one is complete. A rename comes first: a deletion that is killed leaves nothing that looks
    like a checkpoint. Incomplete ones are left for people to look at. Raises OSError.
    """
    if keep_last is None:
        return
    for path in complete(checkpoints, lambda reason: None)[keep_last:]:
        if keep_interval is None or read(path)["step"] % keep_interval:
            removed = path.rename(path.with_name(path.name.removesuffix(".old") + ".removed"))
            shutil.rmtree(removed)


def size(path: Path) -> int:
    """Bytes of the files in a folder; one that vanishes meanwhile counts as none."""
    total = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
