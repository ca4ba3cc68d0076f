"""The ways a run ends badly, as a tree: each class carries its exit code, and its text is the whole message.

Nothing else in the package decides an exit code. A command catches `PithtrainError`, prints `str(error)` and exits
with `error.exit_code`; any other exception is our own mistake and keeps its traceback.

    code  meaning
    0     success
    1     the run failed: a rank raised, a number was not finite
    2     the spec, its data or the call is wrong; trying again cannot help
    3     it cannot fit this memory or device
    4     stopped before its end with its state saved (`train` only)
    141   nobody reads the output any more, as in `| head -1`: a shell's code for what SIGPIPE has ended

Worked example, two mistakes reported at once:

    raise SpecError([Problem("optimizer.lr", -1, "must be greater than 0"),
                     Problem("training.lr", 0.1, "is not a key of training", "did you mean optimizer.lr?")], "a.yaml")

    a.yaml: 2 problems
      optimizer.lr = -1: must be greater than 0
      training.lr = 0.1: is not a key of training; did you mean optimizer.lr?
"""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import cast

LONGEST_VALUE = 120  # characters of a refused value that are shown: enough to recognise it, not a page of YAML


class PithtrainError(Exception):
    """The root: `str(error)` is a readable message that says what to do next.

    `retry`: whether a batch script may start the run again after it. What a class of ours names comes back by itself
    if nothing is changed; anything unforeseen (a lost node, a driver's error) is worth one more try.
    """

    exit_code = 1
    retry = False


class Absent(Enum):
    """Stands for the value of a key that is not there, also in another process: a message shows no value then."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


def show(value: object) -> str:
    """A value as YAML spells it on one line, cut to a length at which one still recognises it."""
    text = _spell(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def _spell(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spell, cast('Sequence[object]', value)))}]"
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return f"{{{', '.join(f'{key}: {_spell(item)}' for key, item in items)}}}"
    return repr(str(value) if isinstance(value, Path) else value)


def me() -> str:
    """How to call this program again, for a hint: by its name, or as it was called where no activated environment has
    it. A batch job and its ranks, whose words are read later and by anybody, say `pithtrain`."""
    path = Path(sys.argv[0])
    if path.parts[-2:] == ("pithtrain", "__main__.py") and shutil.which("pithtrain") is None:
        return f"{sys.executable} -m pithtrain"
    if shutil.which("pithtrain") is not None or path.name != "pithtrain":
        return "pithtrain"
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a spec: full dotted path ("" = the file itself), the value found, the rule it breaks,
    and what would work."""

    path: str
    value: object
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        value = "" if self.value is ABSENT else f" = {show(self.value)}"
        text = f"{self.path}{value}: {self.rule}" if self.path else self.rule
        return f"{text}; {self.hint}" if self.hint else text


class SpecError(PithtrainError):
    """The run spec is wrong. Holds every problem found, not the first alone."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str = "spec") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.source = source
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))


class DataError(PithtrainError):
    """A corpus or tokenizer is missing, corrupt, too short, or holds ids beyond the model's vocabulary."""

    exit_code = 2


class RunDirError(PithtrainError):
    """A run directory exists already, is unknown, or is owned by a live run."""

    exit_code = 2


class CheckpointError(PithtrainError):
    """Nothing complete to resume from, or a checkpoint of another shape."""

    exit_code = 2


class CapacityError(PithtrainError):
    """The run cannot fit this memory or this device."""

    exit_code = 3


class RunFailed(PithtrainError):  # noqa: N818  it is a state of the run, and read as one
    """A rank failed; the message is the first cause."""

    retry = True


class Stalled(PithtrainError):  # noqa: N818
    """A phase of a rank outlived its limit; the message says which, and where the rank stands."""

    retry = True


class SlurmError(PithtrainError):
    """Slurm refused, in its own words, or its controller does not answer."""


class NotFiniteError(PithtrainError):
    """A gradient norm or router was NaN or infinite: once with `guards.non_finite: stop`, else too often in a row."""


class LossStoodOut(PithtrainError):  # noqa: N818
    """`guards.loss_spike_sigma` left out `max_consecutive_skips` updates in a row."""


class StoppedEarly(PithtrainError):  # noqa: N818
    """Asked to stop before the last step; the state is saved and the run can be resumed."""

    exit_code = 4


class ReaderLeft(PithtrainError):  # noqa: N818
    """Whoever read what a command told has what it wanted: no failure, and no word is said."""

    exit_code = 128 + signal.SIGPIPE
