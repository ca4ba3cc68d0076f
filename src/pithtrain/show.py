"""What the commands print: tables and summaries for people, as text. Programs read `--json`, which never comes here."""

import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pithtrain import rundir
from pithtrain.errors import me
from pithtrain.jobs import State, wandb_address
from pithtrain.rundir import RunDir
from pithtrain.slurm import words
from pithtrain.spec import RunSpec


def console() -> Console:
    """Standard output; a pipe has no width, and gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def states_table(states: Sequence[State]) -> Table:
    """One line a run."""
    table = Table(box=None, pad_edge=False)
    numbers = ("step", "loss", "tokens/s", "last step", "time left", "attempt", "saved")
    for title in ("run", "state", "nodes", *numbers, "job", ""):
        table.add_column(title, justify="right" if title in numbers else "left", no_wrap=title != "")
    for each in states:
        table.add_row(
            each.name,
            each.word,
            each.nodes or "",
            "" if each.max_steps is None else f"{each.step or 0}/{each.max_steps}",
            "" if each.loss is None else f"{each.loss:.4f}",
            "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}",
            "" if each.step_age_s is None else f"{words(each.step_age_s)} ago",
            "" if each.time_left_s is None else words(each.time_left_s),
            str(each.attempt),
            "" if each.checkpoint is None else str(each.checkpoint),
            "" if each.job_id is None else f"{each.launcher} {each.job_id}",
            Text(each.why or ""),
        )
    return table


def detail(run: RunDir, state: State) -> Iterable[Table | Text]:
    """One run: its line, its attempts with how each ended, and the next commands."""
    if state.word in ("failed", "lost", "damaged") and state.why:
        yield Text(f"{state.word}: {state.why}\n")
    yield states_table([state])
    rows = rundir.read_lines(run.attempts)
    if rows:
        table = Table(box=None, pad_edge=False, title="\nattempts", title_justify="left")
        for title in ("attempt", "job", "nodes", "began", "took", "steps", "ended", "why"):
            table.add_column(title, no_wrap=title != "why")
        for row in rows:
            table.add_row(*_attempt_cells(row))
        yield table
    lines = [f"\ndirectory  {run.path}", *([f"W&B        {state.wandb}"] if state.wandb else [])]
    for row in [row for row in rundir.read_lines(run.events) if row["event"] == "validated"][-1:]:  # the newest
        for key in (key for key in row if key.startswith("val_loss/")):
            loss = "not finite" if row[key] is None else f"{row[key]:.4f}"
            lines.append(f"held out   {key} {loss} at step {row['step']}")
    yield Text("\n".join(lines))
    commands = {"done": ["logs"], "failed": ["logs", "resume"], "lost": ["logs", "resume"]}
    commands |= {"running": ["logs", "save", "cancel"], "pending": ["resume", "cancel"], "held": ["resume", "cancel"]}
    name = run.name if (Path("runs") / run.name).absolute() == run.path else run.path
    for command in commands.get(state.word, ["logs", "cancel"] if state.alive else ["resume"]):
        errors = " --err" if command == "logs" and state.word in ("failed", "lost") else ""
        yield Text(f"{command:<9}  {me()} {command} {name}{errors}")


def _attempt_cells(row: dict[str, Any]) -> list[Text]:
    start, end = row.get("start"), row.get("end")
    cells = (
        str(row["attempt"]),
        str(row.get("job_id") or ""),
        str(row.get("nodes") or ""),
        time.strftime("%m-%d %H:%M:%S", time.localtime(start)) if start else "",
        words(end - start) if start and end else "",
        f"{row['first_step']}-{row['last_step']}" if row.get("first_step") else "",
        f"{row.get('ended') or ''}{', requeued' if row.get('requeued') else ''}",
        row.get("why") or "",
    )
    return [Text(cell) for cell in cells]


def submitted(run: RunDir, spec: RunSpec, job: dict[str, Any], notes: Sequence[str] = ()) -> str:
    """What `submit` says: the run, its job, its directory, W&B, and the next commands."""
    where = f"Slurm job {job['job_id']}" if job["launcher"] == "slurm" else f"local processes of {job['job_id']}"
    size = f"{spec.slurm.nodes} x {spec.slurm.gpus_per_node} ranks"
    lines = [f"{run.name}: {where}, {size}, attempt {job['attempt']}", *(f"  note       {note}" for note in notes)]
    lines.append(f"  directory  {run.path}")
    if address := wandb_address(run, spec.model_dump(mode="json")["logging"]["wandb"]):
        lines.append(f"  W&B        {address}")
    lines += [f"  {command:<9}  {me()} {command} {run.path}" for command in ("status", "logs", "cancel", "resume")]
    return "\n".join(lines)


INSPECTED = ("step", "kind", "tokens", "saved_at")  # of a checkpoint's marker, for the line that it has in a list


def inspected(
    rows: Sequence[dict[str, Any]],
    skipped: Sequence[str],
    newest: dict[str, Any] | None,
    problems: Sequence[str] | None,
) -> Iterable[Table | Text]:
    """What `inspect` found: one line a complete checkpoint, what was skipped, and all of the newest one's marker."""
    if len(rows) > 1 or (rows and skipped):
        table = Table("step", "kind", "tokens", "size", "saved", "folder", box=None, pad_edge=False)
        for row in reversed(rows):
            age, size = words(time.time() - row["saved_at"]), _size(row["bytes"])
            name = Path(row["path"]).name
            table.add_row(str(row["step"]), row["kind"], f"{row['tokens'] or 0:,}", size, f"{age} ago", Text(name))
        yield table
    yield from (Text(f"not counted: {reason}") for reason in skipped)
    if newest is None:
        yield Text("there is no complete checkpoint")
        return
    model, when = newest["model"], time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest["saved_at"]))
    sizes = [f"{key} {value}" for key, value in model.items() if re.fullmatch("num_.*|.*_size", key)]
    mesh = " ".join(f"{axis}={size}" for axis, size in newest["mesh"].items()) if newest["mesh"] else "one process"
    facts = {
        "step": f"{newest['step']}: {newest['updates']} updates, {newest['samples']:,} sequences",
        "tokens": f"{newest['tokens'] or 0:,}",
        "holds": "weights, moments and position" if newest["kind"] == "full" else "weights alone, for init_from",
        "run": f"{newest.get('run') or '-'}, spec {newest.get('spec_hash') or '-'}",
        "model": ", ".join([model["architecture"], *sizes]),
        "tokenizer": f"{newest.get('tokenizer') or '-'} {newest.get('tokenizer_path') or ''}",
        "written": f"{when} by torch {newest['torch']} on {mesh}",
        "size": f"{_size(newest['bytes'])} in {len(newest['files']) + 1} files",
    }
    lines = [f"{label:<9}  {text}" for label, text in facts.items()]
    yield Text("\n".join([f"\n{newest['path']}", *lines, ""]))
    yield _tensors(newest["tensors"])
    if problems is not None:
        yield Text("\nverified: every tensor is the one that was saved" if not problems else "\n".join(["", *problems]))


def _tensors(tensors: dict[str, dict[str, Any]]) -> Table:
    """One line a parameter, as stored: the experts of a layer are one matrix [E * out, in]."""
    kinds = [kind for kind in ("master", "exp_avg", "exp_avg_sq") if any(key.startswith(f"{kind}/") for key in tensors)]
    types = {kind: {one["dtype"] for key, one in tensors.items() if key.startswith(f"{kind}/")} for kind in kinds}
    heads = (f"norm of {k}" + (f" ({' '.join(types[k])})" if types[k] != types["master"] else "") for k in kinds)
    table = Table("parameter", "shape", "type", *heads, box=None, pad_edge=False)
    names = [key.partition("/")[2] for key in tensors if key.startswith("master/")]
    for name in names:
        of = [
            tensors.get(f"{kind}/{name}") for kind in kinds
        ]  # what follows expert load has no moments, what Muon moves one
        master = tensors[f"master/{name}"]
        norms = (f"{one['norm']:.6g}" if one else "" for one in of)
        table.add_row(name, Text(str(master["shape"])), master["dtype"], *norms)
    count = sum(math.prod(tensors[f"master/{name}"]["shape"]) for name in names)
    of_kind = ((one["norm"] for key, one in tensors.items() if key.startswith(f"{kind}/")) for kind in kinds)
    table.add_row(f"{len(names)} parameters", f"{count:,}", "", *(f"{math.hypot(*norms):.6g}" for norms in of_kind))
    return table


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
