"""Which checkpoints a folder holds, which of them are complete, which may go. No torch: names, sizes and one JSON file.

    checkpoints/step-00000100/           complete: checkpoint.json was written last and every file has the size it says
                step-00000200.partial    a save under way, or one that was killed
                step-00000100.old        what a second save of a step replaces; counts until the new one stands
                step-00000050.removed    being deleted

Nothing points at a checkpoint: the newest complete one is found by looking, so nothing can point at a wrong one. A name
is read as a number, whatever its width. What is skipped is said, and never deleted but for leftovers of our own saves
(`.partial`, `.removed`) when the run's next save begins, and a damaged one when its step is saved again.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from pithtrain.errors import CheckpointError, RunFailed, show

FORMAT = 2
MARKER = "checkpoint.json"
MANY = 60  # lines of an error
_NAME = re.compile(r"step-([0-9]{1,18})(\.old)?")
_LEFTOVER = re.compile(r"step-[0-9]+\.(partial|removed)")


class IncompleteError(CheckpointError):
    """A checkpoint whose save did not end, or that has lost a part since."""


class FormatError(CheckpointError):
    """A checkpoint that another version wrote."""


class TensorFacts(TypedDict):
    """What the marker says of a tensor: `norm` is the 2-norm, `sum` is `checkpoint.fingerprint` in hexadecimal."""

    shape: list[int]
    dtype: str
    norm: float
    sum: str


class Marker(TypedDict):
    """checkpoint.json. `docs/checkpoint-format.md` tells what each key is."""

    format: int
    kind: Literal["full", "weights"]
    step: int
    samples: int
    tokens: int
    updates: int
    run: str
    spec_hash: str | None
    model: dict[str, Any]
    tokenizer: str | None
    tokenizer_path: str | None
    data: dict[str, Any] | None
    expert_counts: NotRequired[list[list[int]] | None]
    recent_losses: NotRequired[list[float] | None]
    mesh: dict[str, int] | None
    torch: str
    saved_at: int
    tensors: dict[str, TensorFacts]
    files: dict[str, int]
    sha256: str


def folder(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def partial(final: Path) -> Path:
    """Where `final` is written."""
    return final.with_name(final.name + ".partial")


def read(path: Path) -> Marker:
    """The marker of a complete checkpoint. Raises IncompleteError, FormatError, and RunFailed for a disk that does not
    answer, which says nothing of what lies on it."""
    if _LEFTOVER.fullmatch(path.name):
        raise IncompleteError(f"{path.name} is a save under way or cut off, or a removal")
    try:
        content: Any = json.loads((path / MARKER).read_text())
        written_by = content["format"]
        if isinstance(written_by, int) and written_by != FORMAT:
            told = f"{path} has format {written_by}, this version reads {FORMAT}"
            raise FormatError(f"{told}: load it with its own version")
        if content["sha256"] != _sha256(content):
            raise ValueError("it is not as it was written: its sha256 differs")
        for name, size in content["files"].items():
            have = (path / name).stat().st_size if (path / name).exists() else None
            if have != size:
                what = "is gone" if have is None else f"has {have} bytes of {size}"
                raise IncompleteError(f"{path.name} is incomplete: {name} {what}")
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteError(f"{path.name} is incomplete: it has no {MARKER}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IncompleteError(f"{path.name} is incomplete: its {MARKER} cannot be read ({error})") from None
    except OSError as error:
        raise RunFailed(f"{path} cannot be read ({error}); no older checkpoint is taken for that") from error
    return content


def _sha256(content: Mapping[str, Any]) -> str:
    """Of the marker without this entry itself."""
    told = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def complete(checkpoints: Path, report: Callable[[str], None]) -> list[Path]:
    """The complete checkpoints, newest first. `report` hears of each one that is skipped, and why. Raises FormatError
    where the newest is another version's: going on without it would lose its steps."""
    found: list[tuple[int, bool, Path]] = []
    foreign: dict[int, FormatError] = {}
    for path in sorted(checkpoints.glob("step[-_]*")):
        match = _NAME.fullmatch(path.name)
        if match is None and not _LEFTOVER.fullmatch(path.name):
            report(f"{path.name} is not a checkpoint: its name is not step-<number>")
            continue
        try:
            step = read(path)["step"]
        except IncompleteError as error:
            report(str(error))
        except FormatError as error:
            foreign[int(match[1]) if match else 0] = error
        else:
            if match is None or int(match[1]) != step:
                report(f"{path.name} is not a checkpoint of that step: its {MARKER} is of step {step}")
            else:
                found.append((step, match[2] is None, path))
    found.sort(reverse=True)
    for number, error in foreign.items():
        if not found or number > found[0][0]:
            raise error
        report(str(error))
    return [path for _, _, path in found]


def newest(checkpoints: Path, report: Callable[[str], None]) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    return next(iter(complete(checkpoints, report)), None)


def candidates(path: Path, report: Callable[[str], None]) -> list[Path]:
    """What a user names: a checkpoint's folder, or a run directory: all of it, newest first. Raises CheckpointError."""
    if (path / MARKER).exists():
        read(path)
        return [path]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    found = complete(path if path.name == "checkpoints" else path / "checkpoints", report)
    if not found:
        raise CheckpointError(f"{path} is neither a complete checkpoint nor a run directory that has one")
    return found


def check_beginning(init_from: Path | None, resume: str, optimizer: str) -> None:
    """Whether there is anything where a run is to begin, by names and markers alone. `optimizer`: its type. Raises
    CheckpointError."""
    if init_from is not None and (init_from / "config.json").exists():  # of a Hugging Face folder
        if not any(init_from.glob("*.safetensors")):
            raise CheckpointError(f"init_from: {init_from} has a config.json and no .safetensors: download it whole")
        return
    for key, path in (("init_from", init_from), ("resume", None if resume == "auto" else Path(resume))):
        if path is not None:
            try:
                newest = candidates(path, lambda reason: None)[0]
                if key == "resume":
                    check_optimizer(newest, read(newest), optimizer)
            except CheckpointError as error:
                raise CheckpointError(f"{key}: {error}") from error


def check(path: Path, content: Marker, about: dict[str, Any]) -> None:
    """Raises CheckpointError when the checkpoint's model or tokenizer is not that of `about`, with both values."""
    problems = [
        f"{key}: the checkpoint has {show(theirs)}, the spec {show(ours)}"
        for kind in ("model", "tokenizer")
        if kind in about
        for key, theirs, ours in differences(kind, content.get(kind), about[kind])
    ]
    if problems:
        raise CheckpointError("\n  ".join([f"{path} is of another run and cannot be resumed:", *problems]))


def differences(key: str, theirs: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    """Dotted key, their value, our value, wherever two JSON values differ; null beside a mapping has none of its
    keys."""
    sides = [{} if side is None else side for side in (theirs, ours)] if theirs or ours else [theirs, ours]
    if all(isinstance(side, dict) for side in sides):
        left, right = cast(list[dict[str, Any]], sides)
        keys = sorted({*left, *right})
        return [item for k in keys for item in differences(f"{key}.{k}", left.get(k), right.get(k))]
    return [] if theirs == ours else [(key, theirs, ours)]


def check_optimizer(path: Path, content: Marker, ours: str) -> None:
    """Raises CheckpointError where the state is another `optimizer.type`'s: Muon keeps one moment of matrices."""
    names = [key.partition("/")[2] for key in content["tensors"] if key.startswith("exp_avg/")]
    theirs = "adamw" if all(f"exp_avg_sq/{name}" in content["tensors"] for name in names) else "muon"
    if names and theirs != ours:
        raise CheckpointError(
            f"{path} was saved with optimizer.type = {theirs}, this run's is {ours}, which keeps other moments; "
            f"resume with --set optimizer.type={theirs}, or begin a run with its weights (init_from)"
        )


def check_tensors(path: Path, have: Mapping[str, Sequence[int]], want: Mapping[str, Sequence[int]]) -> None:
    """Raises CheckpointError naming every tensor that is missing, that nobody asked for, or that has another shape.
    Names that differ in numbers alone share a line where there are very many: a large model has tens of thousands."""
    wrong = [("missing:", name, "") for name in want if name not in have]
    wrong += [("unexpected:", name, "") for name in have if name not in want]
    wrong += [
        ("shape of", name, f": {list(have[name])} there, {list(want[name])} here")
        for name in want
        if name in have and list(have[name]) != list(want[name])
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
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def begin(final: Path) -> Path:
    """A new folder beside `final` to write it in. Raises OSError, also where there is one: it may be anybody's."""
    place = partial(final)
    try:
        place.mkdir(parents=True)
    except FileExistsError:
        raise FileExistsError(f"{place} is there, of a try that was killed, or yours: remove it") from None
    return place


def finish(final: Path, files: Iterable[str], content: Mapping[str, Any]) -> int:
    """Write the marker and make what was written visible as `final`; each step is on the disk before the next begins.
    `files`: the names that must be there. A checkpoint of the same step (the step was done again) stays until then.
    -> the bytes written. Raises OSError."""
    place = partial(final)
    sizes = {name: (place / name).stat().st_size for name in files}
    whole = {"format": FORMAT, **content, "files": sizes}
    with (place / MARKER).open("w") as file:
        json.dump({**whole, "sha256": _sha256(whole)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    old = final.with_name(final.name + ".old")
    sync(place)
    if os.path.lexists(final):  # else `old` may be all there is, after a death between these two renames
        _remove(old)
        final.rename(old)
    place.rename(final)
    sync(final.parent)
    _remove(old)
    return sum(sizes.values()) + (final / MARKER).stat().st_size


def retire(saved: Path, keep_last: int | None, keep_interval: int | None) -> None:
    """Delete complete checkpoints older than `saved`, the newest, beyond the `keep_last` newest with it, but for those
    at multiples of `keep_interval`.

    Call it when `saved` is complete. Newer ones are those of a run that went back behind a damaged one, and stay. A
    rename comes first: a deletion that is killed leaves nothing that looks like a checkpoint. Raises OSError.
    """
    if keep_last is None:
        return
    # the name of a complete one is its step: no marker is read again for it
    older = [path for path in complete(saved.parent, lambda reason: None) if _step(path) < _step(saved)]
    for path in older[keep_last - 1 :]:
        if keep_interval is None or _step(path) % keep_interval:
            shutil.rmtree(path.rename(path.with_name(path.name.removesuffix(".old") + ".removed")))


def _step(path: Path) -> int:
    return int(path.name.removesuffix(".old").removeprefix("step-"))


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
