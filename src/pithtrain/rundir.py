"""The run directory: every path of a run as a property, and the few small files that more than one process reads.

One noun for paths. Whatever a run leaves behind stands under one folder, so that "what happened to it?" is
answered by reading files, on any machine that sees the folder, without the process that made it:

    runs/tiny/
        spec.yaml  submit.json  plan.json   the resolved spec; command, code state, versions, jobs; what was promised
        code/                               the snapshot of the package that the workers import
        slurm/                              submission.sh and submitit's own files
        attempts.jsonl                      one line an attempt: job, host, start, end, how it ended, its steps
        logs/attempt-1/rank-0.log ...       logs/latest points to the newest; the attempt's spec lies beside the logs
        errors/attempt-1/rank-3.json        time, type, message, traceback, written by the dying rank itself
        metrics.jsonl  events.jsonl         one line a logged step, one line an event
        profiles/attempt-1/rank-0.json.gz   of the ranks and steps that `profiling` names (profiling.py)
        checkpoints/step-00000100/          complete or invisible (checkpoint.py)
        hf/step-00000100/                   the same in Hugging Face form, where checkpoint.export_hf asks for it
        wandb/  wandb.id                    the id is made with the directory: one W&B run over all attempts
        DONE STOP REQUEUE                   markers, stamped with the attempt; stale ones are cleared at attempt start

Two rules keep it true for readers, who take no lock. A directory and an attempt are *claimed* by `mkdir`, which one
caller wins; and a file that is read while it changes is written aside and renamed, so a reader sees the old text or the
new one. Who changes a part of submit.json or attempts.jsonl writes all of it anew, and keeps others out (`_merging`):
the launcher of one attempt may still write how it ended while the next one, which was resumed, begins. Lines of
a `.jsonl` file are appended whole; a torn last line (the writer was killed) is skipped by readers and cut by the next
writer.
"""

import contextlib
import dataclasses
import difflib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import yaml

import pithtrain
from pithtrain import catalog, errors
from pithtrain.errors import RunDirError

# What of the environment is written down: by name, since anything else may be a secret
CAPTURED = re.compile(
    r"(NCCL|GLOO|UCX|FI|OMP|MKL|TORCH|PYTORCH|CUDA|CUDNN|NVIDIA)_(?!.*(KEY|TOKEN|SECRET|PASSWORD)).*"
    r"|SLURM_CONF|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|LOADEDMODULES"
)
MERGE_S = 5.0  # a merge takes milliseconds; what is waited for longer hangs, or is a file system's lock that does
RESERVE_BYTES = 256 * 1024  # a traceback a rank
TAIL_BYTES = 64 * 1024  # holds the last line of any metrics.jsonl


class _At:
    """A path below a run directory, as an attribute of `RunDir`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", owner: type["RunDir"]) -> Path:
        return run.path / self.name


@dataclasses.dataclass(frozen=True)
class RunDir:
    """The paths of one run; nothing here touches the disk."""

    path: Path

    spec_yaml = _At("spec.yaml")
    submit_json = _At("submit.json")
    plan_json = _At("plan.json")
    code = _At("code")  # the folder to put on PYTHONPATH: it holds `pithtrain/`
    slurm = _At("slurm")
    attempts = _At("attempts.jsonl")
    latest_logs = _At("logs/latest")
    metrics = _At("metrics.jsonl")
    events = _At("events.jsonl")
    heartbeat = _At("heartbeat.json")
    checkpoints = _At("checkpoints")
    hf = _At("hf")
    wandb_id = _At("wandb.id")
    done = _At("DONE")
    stop = _At("STOP")
    requeue = _At("REQUEUE")
    save = _At("SAVE")
    lock = _At(".lock")
    merging = _At(".merging")
    reserve = _At(".reserve")  # room for last words on a full disk

    @property
    def name(self) -> str:
        return self.path.name

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def log(self, attempt: int, rank: int) -> Path:
        return self.logs(attempt) / f"rank-{rank}.log"

    def pid(self, attempt: int, rank: int) -> Path:
        return self.logs(attempt) / f"rank-{rank}.pid"

    def attempt_spec(self, attempt: int) -> Path:
        return self.logs(attempt) / "spec.yaml"

    def rendezvous(self, attempt: int) -> Path:
        """The file store of torch.distributed on a single host."""
        return self.logs(attempt) / "rendezvous"

    def errors(self, attempt: int) -> Path:
        return self.path / "errors" / f"attempt-{attempt}"

    def error(self, attempt: int, rank: int) -> Path:
        return self.errors(attempt) / f"rank-{rank}.json"

    def collectives(self, attempt: int, rank: int) -> Path:
        return self.errors(attempt) / f"rank-{rank}.collectives"

    def trace(self, attempt: int, rank: int) -> Path:
        return self.path / "profiles" / f"attempt-{attempt}" / f"rank-{rank}.json.gz"

    def memory_snapshot(self, attempt: int, rank: int) -> Path:
        return self.path / "profiles" / f"attempt-{attempt}" / f"rank-{rank}.pickle"


# ---- files that are read while they change ---------------------------------------------------------------------------


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Write `text` aside, rename it to `path`; `durable`: flushed to the disk first, which costs milliseconds."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    aside.replace(path)


def write_last_words(run: RunDir, path: Path, text: str) -> None:
    """As `write_atomic`, for what tells how something ended: a full disk gives back the run's reserve for it."""
    try:
        write_atomic(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        run.reserve.unlink(missing_ok=True)
        write_atomic(path, text)


def keep_reserve(run: RunDir) -> None:
    """Set aside the space that `write_last_words` may need."""
    with contextlib.suppress(OSError):  # there is none to set aside
        if not run.reserve.exists():
            run.reserve.write_bytes(os.urandom(RESERVE_BYTES))  # zeros may take no room


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} where there is no such file or it is not (yet) a whole object."""
    try:
        return _object(path.read_bytes())
    except FileNotFoundError:
        return {}


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object that this text is; {} where it is none, or no text at all."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file in order, without lines that are not whole; [] where the file is missing."""
    return read_lines_from(path, 0)[0]


def read_lines_from(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """As `read_lines`, from byte `start` on, and the byte to go on from. A negative start counts from the end."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            # a file that is shorter than before was written anew
            start = file.seek(start if 0 <= start <= size else max(0, size + start) if start < 0 else 0)
            text = file.read()
    except FileNotFoundError:
        return [], 0
    whole = text[: text.rfind(b"\n") + 1]  # what follows the last newline is a torn line, or nothing
    return [row for line in whole.split(b"\n") if (row := _object(line))], start + len(whole)


def last_line(path: Path) -> dict[str, Any]:
    """The newest whole object of a `.jsonl` file, read from its end; {} where there is none."""
    return (read_lines_from(path, -TAIL_BYTES)[0] or [{}])[-1]


def mark(marker: Path, attempt: int, **fields: Any) -> None:
    """Set a marker (DONE, STOP, REQUEUE, SAVE), stamped with the attempt and the time."""
    write_atomic(marker, json.dumps({"attempt": attempt, "time": time.time(), **fields}) + "\n")


def stamp(marker: Path, attempt: int) -> dict[str, Any]:
    """What a marker says of this attempt; {} where it is another's or not there."""
    fields = read_json(marker)
    return fields if fields.get("attempt") == attempt else {}


def clear_stale_markers(run: RunDir, attempt: int) -> None:
    """Remove markers of earlier attempts. One set for `attempt` itself stays: it was cancelled before it began."""
    for marker in (run.done, run.stop, run.requeue, run.save):
        if read_json(marker).get("attempt", 0) < attempt:
            marker.unlink(missing_ok=True)


# ---- making and finding ----------------------------------------------------------------------------------------------


def create(path: Path, spec_yaml: str, plan: dict[str, Any], command: list[str]) -> RunDir:
    """Make the run directory `path`, exclusively, with the spec, the plan, the code snapshot and the W&B id. Raises
    RunDirError where the directory exists: it says how its spec differs and what to type instead."""
    run = RunDir(path.absolute())
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir(mode=0o755)
        run.path.chmod(0o755)  # whatever the umask: no one else writes what this user's jobs run
    except FileExistsError:
        raise RunDirError(_exists_message(run, spec_yaml)) from None
    except OSError as error:
        raise RunDirError(f"cannot make the run directory {run.path}: {error.strerror}") from error
    try:
        _fill(run, spec_yaml, plan, command)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise RunDirError(f"cannot fill the run directory {run.path}: {error}") from error
    return run


def _fill(run: RunDir, spec_yaml: str, plan: dict[str, Any], command: list[str]) -> None:
    run.slurm.mkdir()
    keep_reserve(run)
    run.wandb_id.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    write_atomic(run.spec_yaml, spec_yaml)
    write_atomic(run.plan_json, json.dumps(plan, indent=2) + "\n")
    packages = ("pithtrain", "torch", "numpy", "pydantic", "submitit", "wandb")
    versions = {package: version for package in packages if (version := installed(package))}
    about = {
        "name": run.name,
        "command": command,
        "time": time.time(),
        "host": socket.gethostname(),
        "code": snapshot_code(run),
        "versions": {"python": platform.python_version(), **versions, "executable": sys.executable},
        "environment": {name: value for name, value in os.environ.items() if CAPTURED.fullmatch(name)},
        "jobs": [],
    }
    write_atomic(run.submit_json, json.dumps(about, indent=2) + "\n")


def snapshot_code(run: RunDir) -> dict[str, Any]:
    """Copy the running package, as it is on the disk, to `run.code`; return its hash and, from a git checkout, commit
    and `dirty`: the difference to the commit is kept as `code/dirty.diff`. About 1 MB and 20 ms."""
    package = Path(pithtrain.__file__).parent
    shutil.copytree(package, run.code / "pithtrain", ignore=shutil.ignore_patterns("__pycache__"))
    about: dict[str, Any] = {"sha256": tree_hash(run.code / "pithtrain")}
    git = functools.partial(answer, "git", "-C", str(package))
    commit = git("rev-parse", "HEAD")  # None outside a checkout, without git, or before the first commit
    if commit is not None:
        difference = git("diff", "HEAD", "--", ".") or ""
        untracked = git("ls-files", "--others", "--exclude-standard", "--", ".")
        tree = (git("rev-parse", "HEAD^{tree}") or "").strip()
        about |= {"commit": commit.strip(), "tree": tree, "dirty": bool(difference or untracked)}
        if difference:
            (run.code / "dirty.diff").write_text(difference, encoding="utf-8")
    return about


def renew_code(run: RunDir) -> list[str]:
    """For an explicit resume: a new snapshot where the package has changed; the old one stays. Returns what differs."""
    old, new = _file_hashes(run.code / "pithtrain"), _file_hashes(Path(pithtrain.__file__).parent)
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if changed:
        before = len(list(run.path.glob("code-before-*")))
        run.code.rename(run.path / f"code-before-{before + 1}")
        code = snapshot_code(run)
        with _merging(run):
            _update_submit(run, code=code)
    return changed


def tree_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of a folder's files, caches left out."""
    return hashlib.sha256(json.dumps(sorted(_file_hashes(folder).items())).encode()).hexdigest()


def find(reference: str, output_dir: Path) -> RunDir:
    """The run meant by a directory, a name under `output_dir`, or a job's id. Raises RunDirError with near names."""
    for path in (Path(reference), output_dir / reference):
        if (path / "spec.yaml").exists():
            return RunDir(path.absolute())
    known = runs(output_dir)
    for run in reversed(known):  # a number may come again: the newest run is meant
        if any(job.get("job_id") == reference for job in jobs(run)):
            return run
    names = [run.name for run in known]
    near = difflib.get_close_matches(Path(reference).name, names, n=3, cutoff=0.4) or names[-3:]
    hint = f"nearest: {', '.join(near)}" if near else "there are no runs yet"
    raise RunDirError(f"no run {reference!r} in {output_dir}; {hint}")


def runs(output_dir: Path) -> list[RunDir]:
    """All runs under `output_dir`, oldest first."""
    found = [RunDir(spec.parent.absolute()) for spec in output_dir.glob("*/spec.yaml")]
    return sorted(found, key=lambda run: (run.spec_yaml.stat().st_mtime, run.name))


def _update_submit(run: RunDir, **fields: Any) -> None:
    """Change top-level fields of submit.json; inside `_merging`."""
    write_atomic(run.submit_json, json.dumps(read_json(run.submit_json) | fields, indent=2) + "\n")


def jobs(run: RunDir) -> list[dict[str, Any]]:
    """The jobs of submit.json: one an explicit submission, with the attempt it began with (a requeue counts on). Raises
    RunDirError where the file is there and damaged: a run that lives must not be taken for one that never began."""
    about = read_json(run.submit_json)
    if not about and run.submit_json.exists():
        raise RunDirError(f"{run.submit_json} is damaged: it says which jobs the run has; put it right first")
    return about.get("jobs", [])


def record_job(run: RunDir, attempt: int, **fields: Any) -> None:
    """Write fields into the entry of the job that began with `attempt`. The submitting command, the job and whoever
    asks for its state may each complete it: they write the same values."""
    with _merging(run):
        entries = {entry["attempt"]: entry for entry in jobs(run)}
        entries[attempt] = entries.get(attempt, {"attempt": attempt}) | fields
        _update_submit(run, jobs=[entries[key] for key in sorted(entries)])


def forget_job(run: RunDir, attempt: int) -> None:
    """Take out the entry of a submission that was refused."""
    with _merging(run):
        _update_submit(run, jobs=[entry for entry in jobs(run) if entry["attempt"] != attempt])


def last_job(run: RunDir) -> dict[str, Any]:
    """The newest job of submit.json; {} before the first."""
    return next(reversed(jobs(run)), dict[str, Any]())


@contextlib.contextmanager
def locked(run: RunDir) -> Generator[None, None, None]:
    """Keep other commands from starting or resuming this run meanwhile; a dead process has no lock. Raises RunDirError
    where another has it. Where the file system has no locks, `claim_attempt` still decides."""
    with _open_lock(run.lock) as file:
        if not _taken(file):
            busy = f"another command is starting {run.name} right now: look with `{errors.me()} status`"
            raise RunDirError(busy)
        yield


@contextlib.contextmanager
def _merging(run: RunDir) -> Generator[None, None, None]:
    """Keep other processes from reading what is about to be written anew. A lock of its own: who starts a run holds the
    other one while the run writes. Without it, where it cannot be had: a full disk or a hanging file system must not
    swallow how something ended."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file, deadline = held.enter_context(_open_lock(run.merging)), time.monotonic() + MERGE_S
            while not _taken(file) and time.monotonic() < deadline:
                time.sleep(0.01)
        yield


def _open_lock(path: Path) -> TextIO:
    return open(path, "a", opener=functools.partial(os.open, mode=0o600))  # for this user alone


def _taken(file: TextIO) -> bool:
    """Whether the lock is ours now; also where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def require_own(run: RunDir) -> None:
    """Raises RunDirError unless this user alone can write to the folders whose contents get unpickled and run."""
    for path in (run.path, run.code, run.slurm):
        about = path.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RunDirError(
                f"{path} belongs to uid {about.st_uid}, mode {stat.filemode(about.st_mode)}: a run starts only from "
                f"folders that are yours and that no one else can write to\n  if it is yours:  chmod go-w {path}"
            )


# ---- attempts and errors ---------------------------------------------------------------------------------------------


def claim_attempt(run: RunDir) -> int:
    """Take the next attempt number for this caller alone and point logs/latest to it: one above every attempt that left
    a trace, and `mkdir` decides between two callers, so a log is never written twice."""
    folder = run.path / "logs"
    folder.mkdir(exist_ok=True)
    taken = numbers(folder, r"attempt-(\d+)")
    attempt = max(taken | {row["attempt"] for row in read_lines(run.attempts)}, default=0) + 1
    while True:
        try:
            run.logs(attempt).mkdir()
        except FileExistsError:
            attempt += 1
            continue
        point_latest(run, attempt)
        return attempt


def point_latest(run: RunDir, attempt: int) -> None:
    """Make logs/latest a link to this attempt's logs (relative, so that the run directory can be moved)."""
    aside = run.latest_logs.with_name(f".latest.{attempt}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(run.logs(attempt).name)
    aside.replace(run.latest_logs)


def record_attempt(run: RunDir, attempt: int, **fields: Any) -> None:
    """Write fields into the attempt's line of attempts.jsonl: rank 0 while it lives, its launcher afterwards."""
    with _merging(run):
        rows = {row["attempt"]: row for row in read_lines(run.attempts)}
        rows[attempt] = rows.get(attempt, {"attempt": attempt}) | fields
        write_last_words(run, run.attempts, "".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))


def record_end(run: RunDir, attempt: int, **fields: Any) -> None:
    """`record_attempt` of how it ended, with the first and last step that it logged and that still stand."""
    steps = [row["step"] for row in read_lines(run.metrics) if row.get("attempt") == attempt] or [None]
    record_attempt(run, attempt, **fields, first_step=steps[0], last_step=steps[-1])


def last_attempt(run: RunDir) -> dict[str, Any]:
    """The newest line of attempts.jsonl; {} before the first."""
    return last_line(run.attempts)


def first_error(run: RunDir, attempt: int) -> dict[str, Any] | None:
    """The error that began it: the earliest of this attempt that is not another rank's lost connection. When a rank
    dies, its peers' collectives fail within milliseconds, on a cluster by clocks that differ; those errors say
    `secondary: true`, and count only where nothing else was written (a rank was killed from outside)."""
    found = [error for path in run.errors(attempt).glob("*-*.json") if (error := read_json(path))]
    return min(found, key=lambda error: (error["secondary"], error["time"]), default=None)


def record_error(run: RunDir, attempt: int, who: str, report: Mapping[str, Any]) -> None:
    """Write an error file; `who`: `rank-N`, or `node-HOST` before there are ranks."""
    write_last_words(run, run.errors(attempt) / f"{who}.json", json.dumps(report, indent=2) + "\n")


def record_collectives(run: RunDir, attempt: int, rank: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """Write what a failing rank's flight recorder has (`flight.recorded`), after its error. On a full disk nothing:
    the reserve is for errors."""
    if groups:
        write_atomic(run.collectives(attempt, rank), json.dumps({"groups": groups}) + "\n")


def describe_error(report: Mapping[str, Any]) -> str:
    """One readable cause from an error file: `rank 3: ValueError: ...`; our own errors need no class name."""
    message: str = report["message"]
    if report["rank"] is None:  # of a node, before there were ranks
        return message
    ours = hasattr(errors, report["type"])
    prefix = "" if ours or report["type"] in message else f"{report['type']}: "
    return f"rank {report['rank']}: {prefix}{message}"


# ---- small things ----------------------------------------------------------------------------------------------------


def numbers(folder: Path, pattern: str) -> set[int]:
    """N of the names in a folder that are like `rank-N.pid`."""
    return {int(match[1]) for entry in folder.iterdir() if (match := re.fullmatch(pattern, entry.name))}


def saves_nothing(run: RunDir) -> bool:
    """Whether its routing is forced, which no checkpoint may keep."""
    text = run.spec_yaml.read_text(encoding="utf-8") if run.spec_yaml.exists() else ""
    return "\n  force_load_balance: true\n" in text  # as `RunSpec.to_yaml` writes it; a torn file says nothing


def spec_difference(old_yaml: str, new_yaml: str) -> list[str]:
    """`path: old -> new` for every key in which two resolved specs differ."""
    found = catalog.differences("", yaml.safe_load(old_yaml), yaml.safe_load(new_yaml))
    return [f"{key[1:]}: {old} -> {new}" for key, old, new in found]


def _exists_message(run: RunDir, spec_yaml: str) -> str:
    if not run.spec_yaml.exists():
        return f"{run.path} exists and is not a run directory; choose another --name or --run-dir"
    changes = spec_difference(run.spec_yaml.read_text(encoding="utf-8"), spec_yaml)
    differs = "its spec is the same" if not changes else "its spec differs in\n    " + "\n    ".join(changes)
    done = f"it is done at step {read_json(run.done).get('step')}" if run.done.exists() else "it is not done"
    return (
        f"the run directory {run.path} exists; {done}; {differs}\n"
        f"  go on with it:   {errors.me()} resume {run.path}\n"
        "  a separate run:  the same command with --name NEW"
    )


def installed(package: str) -> str | None:
    """Its version; None where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _file_hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def answer(*command: str) -> str | None:
    """A command's output; None where it is missing, fails or hangs, as nvidia-smi with a GPU off the bus."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, input="", stderr=subprocess.DEVNULL, text=True, timeout=30, errors="replace"
        )
    return None
