"""The commands. Each reads its arguments, calls one room, prints; `pithtrain COMMAND --help` ends with an example.

Nothing heavy is imported at the top: `--help` and `validate` answer in well under a second because torch, submitit,
wandb and numpy come in only where a command needs them. Results go to stdout, errors to stderr as text, and the exit
code is the error's own (`errors`): a traceback here means our mistake, never the user's.
"""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Generator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pithtrain import catalog, jobs, rundir, show, slurm, worker
from pithtrain import submit as starting
from pithtrain.errors import (
    DataError,
    PithtrainError,
    ReaderLeft,
    RunDirError,
    RunFailed,
    SlurmError,
    SpecError,
    StoppedEarly,
    me,
)
from pithtrain.plan import plan as make_plan
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, load

app = typer.Typer(
    help="Trains Mixture-of-Experts language models from a declarative run spec.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A run spec, a YAML file.", show_default=False)]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one key of the spec; may be repeated.")
]
Name = Annotated[str | None, typer.Option("--name", help="The run's name; the spec's own otherwise.")]
Force = Annotated[bool, typer.Option("--force", help="Let Slurm decide about what our checks refuse.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, directory or job id.", show_default=False)]
RunOrFolder = Annotated[
    str, typer.Argument(metavar="RUN|FOLDER", help="A run, or the folder of a checkpoint.", show_default=False)
]
OutputDir = Annotated[Path, typer.Option("--output-dir", help="The folder that holds the run directories.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


def example(*lines: str) -> str:
    """The epilog of a command's help."""
    return "Example:\n\n" + "\n\n".join(f"`{line}`" for line in lines)


# ---- before a run ----------------------------------------------------------------------------------------------------


@app.command(epilog=example("pithtrain validate configs/tiny.yaml --set optimizer.lr=1e-3"))
def validate(config: Config, overrides: Set = None) -> None:
    """Print the resolved spec, every default written out, or every error at once; what the cluster lacks, too, and
    what it would read and is not on this machine."""
    spec = load(config, overrides or ())
    for missing in starting.unfound(spec):
        _note(missing)
    if slurm.configured():
        try:
            problems, notes = slurm.problems(spec, slurm.cluster_facts(spec))
        except SlurmError as error:
            problems, notes = [], [f"the cluster could not be asked: {error}"]
        for note in notes:
            _note(note)
        if problems:
            raise SpecError(problems, str(config))
    print(spec.to_yaml(), end="")


@app.command(epilog=example("pithtrain plan configs/tiny.yaml --json"))
def plan(config: Config, overrides: Set = None, as_json: Json = False) -> None:
    """Numbers before a GPU is asked for: ranks, micro-batches, layers per stage, parameters, FLOPs per token."""
    spec = load(config, overrides or ())
    numbers = make_plan(spec, _document_length(spec))
    print(json.dumps(numbers.to_dict()) if as_json else numbers.text())


def _document_length(spec: RunSpec) -> float | None:
    """Mean tokens of a document; None where they are not kept apart or a corpus is not here."""
    from pithtrain.corpus import open_corpus

    if not spec.data.document_mask:
        return None
    with contextlib.suppress(DataError):
        found = [(source.weight, open_corpus(source.path)) for source in spec.data.sources]
        return 1 / sum(weight * corpus.num_documents / corpus.num_tokens for weight, corpus in found)
    return None


@app.command(epilog=example("pithtrain tokenize notes/ more.jsonl.zst --tokenizer tokenizer.json --output data/notes"))
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help="Files (text, .jsonl, .jsonl.gz, .jsonl.zst) or folders.")],
    output: Annotated[Path, typer.Option(help="The folder to make, for `data.sources`.", show_default=False)],
    tokenizer: Annotated[Path, typer.Option(help="A `tokenizer.json`.", show_default=False)],
    text_key: Annotated[str, typer.Option(help="The key of the text in a JSON line.")] = "text",
    eos: Annotated[str, typer.Option(help="The token that ends each document.")] = "<|endoftext|>",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
) -> None:
    """Turn text into token shards."""
    from pithtrain import corpus

    with _progress(lambda tokens: f"{tokens:,} tokens") as progress:
        report = corpus.tokenize(
            inputs, output, tokenizer, text_key=text_key, eos=eos, overwrite=overwrite, progress=progress
        )
    _say(str(report))


# ---- starting a run --------------------------------------------------------------------------------------------------


@app.command(epilog=example("pithtrain submit configs/tiny.yaml --name first --wait", "pithtrain submit C --dry-run"))
def submit(
    config: Config,
    overrides: Set = None,
    name: Name = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print spec and sbatch script, touch nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the run has ended, showing the loss.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Start a run through Slurm where it is configured, else as local processes in the background."""
    spec = _load(config, overrides, name)
    if dry_run:
        run = RunDir(spec.output_dir / spec.name)
        print(spec.to_yaml(), end="")
        print(f"\n# ---- {run.slurm}/JOBID_submission.sh\n{starting.render(spec, run)}", end="")
        return
    by = starting.launcher()
    notes = starting.check(spec, by, force)
    run = _create(spec)
    job = _start(run, spec, by)
    _say(json.dumps({"path": str(run.path), **job}) if as_json else show.submitted(run, spec, job, notes))
    if wait:
        _wait(run)


@app.command(epilog=example("pithtrain train configs/tiny.yaml --set training.max_steps=50 --name short"))
def train(
    config: Config,
    overrides: Set = None,
    name: Name = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run directory itself, instead of output_dir/name.")] = None,
) -> None:
    """Train in the foreground: one process per rank, all on this host.

    Ctrl-C saves at the next step and ends with exit code 4.
    """
    _require_alone()
    _foreground(_create(_load(config, overrides, name), run_dir))


@app.command(epilog=example("pithtrain resume tiny --set training.max_steps=400", "pithtrain resume tiny --exclude n7"))
def resume(
    run: Run,
    overrides: Set = None,
    exclude: Annotated[str | None, typer.Option(metavar="NODES", help="Nodes not to use from now on.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Though it seems to run on a host that is gone; and as `submit --force`.")
    ] = False,
    output_dir: OutputDir = Path("runs"),
) -> None:
    """Go on from the newest checkpoint: in the foreground for a run made by `train`, else through Slurm or locally.

    A job that still waits or is held is changed in place and released; one that Slurm has forgotten is submitted again.
    """
    found = rundir.find(run, output_dir)
    changes = list(overrides or ())
    if exclude is not None:
        before = load(found.spec_yaml).slurm.exclude
        changes.append(f"slurm.exclude={json.dumps(','.join(filter(None, [before, exclude])))}")
    if rundir.last_job(found).get("launcher") == "train":
        _require_alone()
        with rundir.locked(found):  # until it says that it runs: another `resume` waits, and is refused
            _say("\n".join(starting.prepare_resume(found, changes, "local", force)))
            attempt = starting.claim_here(found)
        _foreground(found, attempt)
        return
    with rundir.locked(found):
        _say("\n".join(starting.resume(found, changes, force, exclude is not None)))


@app.command(epilog=example("pithtrain sweep configs/tiny.yaml --grid optimizer.lr=1e-3,2e-3 --grid training.seed=1,2"))
def sweep(
    config: Config,
    grid: Annotated[list[str], typer.Option(metavar="A.B=V1,V2", help="A key and its values; may be repeated.")],
    overrides: Set = None,
    name: Annotated[str | None, typer.Option(help="Names the sweep; the spec's own name otherwise.")] = None,
    max_parallel: Annotated[int | None, typer.Option(min=1, help="Jobs of the sweep that run at a time.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, touch nothing.")] = False,
    force: Force = False,
) -> None:
    """Submit one ordinary run for each point of a grid; they share a W&B group. Needs Slurm.

    With --max-parallel N the jobs go into N lanes, names of which Slurm runs one job at a time.
    """
    base = _load(config, overrides, name)
    points = starting.grid(grid)
    group = [] if base.logging.wandb.group else [f"logging.wandb.group={json.dumps(base.name)}"]
    # every mistake is said before the first job
    specs = [
        _load(config, [*(overrides or ()), *group, *(f"{key}={value}" for key, value in point.items())], label)
        for label, point in ((starting.grid_name(base.name, point), point) for point in points)
    ]
    for spec in specs:
        if (spec.output_dir / spec.name).exists():
            raise RunDirError(f"the run directory {spec.output_dir / spec.name} exists; choose another --name")
    if len({spec.name for spec in specs}) < len(specs):
        raise RunDirError("two points of the grid have the same name: give values that differ in letters or digits")
    if dry_run:
        for spec, point in zip(specs, points, strict=True):
            print(f"{spec.name}: {' '.join(f'{key}={value}' for key, value in point.items())}")
        return
    by = starting.launcher()
    if by != "slurm":
        one = f"{me()} train {config} --name {specs[0].name}"
        raise RunDirError(f"a sweep needs Slurm, and none is configured here; one after the other:  {one} --set ...")
    looked_at = {"slurm", "data", "validation", "init_from", "resume"}  # by a check, which takes seconds
    for spec in {json.dumps(spec.model_dump(mode="json", include=looked_at)): spec for spec in specs}.values():
        starting.check(spec, by, force)
    for number, spec in enumerate(specs):
        lane = None if max_parallel is None else f"{base.name}-lane{number % max_parallel}"
        try:
            job = _start(_create(spec), spec, by, lane)
        except PithtrainError:
            if number:
                print(f"the {number} runs above are submitted; `{me()} cancel RUN` ends one", file=sys.stderr)
            raise
        _say(f"{spec.name}: Slurm job {job['job_id']}{'' if lane is None else f', lane {lane}'}")


def _require_alone() -> None:
    if (here := worker.seat(os.environ)).world_size > 1:
        names = "RANK and WORLD_SIZE" if here.launcher == "spawn" else "SLURM_PROCID and SLURM_NTASKS"
        rule = f"{names} say that this is rank {here.rank} of {here.world_size}"
        raise RunDirError(f"{rule}, and a run's ranks are started here: call it once, without a launcher around it")


def _foreground(run: RunDir, attempt: int | None = None) -> None:
    starting.foreground(run, load(run.spec_yaml), attempt)
    _say(f"done: {run.path}")


def _load(config: Path, overrides: list[str] | None, name: str | None) -> RunSpec:
    return load(config, [*(overrides or ()), *([f"name={json.dumps(name)}"] if name is not None else [])])


def _create(spec: RunSpec, run_dir: Path | None = None) -> RunDir:
    path = run_dir or spec.output_dir / spec.name
    return rundir.create(path, spec.to_yaml(), make_plan(spec).to_dict(), sys.argv)


def _start(run: RunDir, spec: RunSpec, by: starting.Launcher, lane: str | None = None) -> dict[str, Any]:
    """Submit a run whose directory was just made; where that is refused, the same command works once it is mended."""
    try:
        with rundir.locked(run):
            return starting.submit(run, spec, by, lane)
    except RunFailed:
        shutil.rmtree(run.path)  # nothing runs in it
        raise


# ---- watching and ending a run ---------------------------------------------------------------------------------------


@app.command(epilog=example("pithtrain status", "pithtrain status tiny --watch", "pithtrain status tiny --json"))
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run in detail.", show_default=False)] = None,
    output_dir: OutputDir = Path("runs"),
    watch: Annotated[bool, typer.Option("--watch", help="Again every few seconds, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """One line a run: state, step, loss, speed, age of the last step, what it waits for or why it ended.

    With RUN: its attempts too, the first cause of a failure on top, and the next commands.
    """

    def look() -> tuple[list[jobs.State], list[Any]]:
        """The states, and what is printed of them."""
        chosen = rundir.runs(output_dir) if run is None else [rundir.find(run, output_dir)]
        found = jobs.states(chosen)
        one = run is not None and found[0].word != "damaged"
        return found, list(show.detail(chosen[0], found[0])) if one else [show.states_table(found)]

    states, tables = look()
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in states]))
        return
    if not states:
        print(f"no runs in {output_dir}")
        return
    out = show.console()
    if not watch:
        for table in tables:
            out.print(table)
        return
    from rich.console import Group
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(Group(*tables), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(jobs.SLURM_POLL_S)
            live.update(Group(*look()[1]), refresh=True)


@app.command(epilog=example("pithtrain logs tiny --rank 3", "pithtrain logs tiny -f", "pithtrain logs tiny --err"))
def logs(
    run: Run,
    rank: Annotated[int, typer.Option(min=0, help="Whose log.")] = 0,
    attempt: Annotated[int | None, typer.Option(min=1, help="The newest attempt otherwise.")] = None,
    err: Annotated[bool, typer.Option("--err", help="The earliest error of any rank instead.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay, over attempts too, until the run ends.")
    ] = False,
    output_dir: OutputDir = Path("runs"),
) -> None:
    """Print the log of one rank, or the first error."""
    found = rundir.find(run, output_dir)
    number = attempt or rundir.last_attempt(found).get("attempt", 1)
    if err:
        rows = {row["attempt"]: row for row in rundir.read_lines(found.attempts)}
        first, why = rundir.first_error(found, number), rows.get(number, {}).get("why")
        if first is None:
            print(why or f"no rank of attempt {number} has written an error")
        elif first["secondary"]:  # a rank that died without a word: the others only lost it
            print(f"{why or jobs.cause(found, number).line}\n\nafter it, {rundir.describe_error(first)}")
        else:
            print(f"{rundir.describe_error(first)}\n\n{first['traceback']}", end="")
        if waited := jobs.collectives(found, number):
            print("\ncollectives in which ranks waited:", *waited, sep="\n  ")
        return
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for text in jobs.follow(found, rank, attempt):
                sys.stdout.write(text)
                sys.stdout.flush()
        return
    path = found.log(number, rank)
    if not path.exists():
        have = [*found.path.glob("logs/attempt-*/rank-*.log"), *found.slurm.glob("*_log.*")]
        names = sorted(str(log.relative_to(found.path)) for log in have)
        raise RunDirError(f"there is no {path}; there are: {', '.join(names) or 'no logs yet'}")
    sys.stdout.write(path.read_text(encoding="utf-8", errors="replace"))


@app.command(epilog=example("pithtrain cancel tiny"))
def cancel(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Without a save (scancel).")] = False,
    output_dir: OutputDir = Path("runs"),
) -> None:
    """Save at the next step, then stop for good."""
    _say(jobs.cancel(rundir.find(run, output_dir), now))


@app.command(epilog=example("pithtrain save tiny"))
def save(run: Run, output_dir: OutputDir = Path("runs")) -> None:
    """Ask for a checkpoint at the next step; the run goes on."""
    _say(jobs.ask_to_save(rundir.find(run, output_dir)))


@app.command(epilog=example("pithtrain stacks tiny"))
def stacks(run: Run, output_dir: OutputDir = Path("runs")) -> None:
    """Write the stacks of all ranks into their logs; the run goes on."""
    _say(jobs.dump_stacks(rundir.find(run, output_dir)))


@app.command(epilog=example("pithtrain inspect tiny", "pithtrain inspect runs/tiny/checkpoints/step-00000200 --verify"))
def inspect(
    what: RunOrFolder,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every tensor; compare it with what was saved.")
    ] = False,
    output_dir: OutputDir = Path("runs"),
    as_json: Json = False,
) -> None:
    """Tell what a checkpoint holds, each tensor with its shape and norm; of a run, all of them, and the newest in full.

    Reads names, sizes and one small file. Exit code 1: none is complete, or --verify found what is not as it was saved.
    """
    root, skipped = _place(what, output_dir), list[str]()
    if (root / "spec.yaml").exists():
        root = RunDir(root).checkpoints
    folders = catalog.complete(root, skipped.append) if root.name == "checkpoints" else [root]
    rows, newest = list[dict[str, Any]](), None
    for path in folders:
        try:
            content = catalog.read(path)
        except catalog.IncompleteError as error:  # the one that was named; or it was deleted meanwhile
            skipped.append(str(error))
            continue
        size = sum(content["files"].values()) + (path / catalog.MARKER).stat().st_size
        rows.append({"path": str(path), "bytes": size, **{key: content.get(key) for key in show.INSPECTED}})
        newest = newest or {**rows[-1], **content}
    problems = None
    if verify and newest is not None:
        from pithtrain import checkpoint

        with _progress(lines=True) as progress:
            problems = list(checkpoint.verify(Path(rows[0]["path"]), progress))
    if as_json:
        told = {"checkpoints": rows, "skipped": skipped, "newest": newest, "problems": problems}
        print(json.dumps(json.loads(json.dumps(told), parse_constant=lambda _: None)))  # JSON has no NaN
    else:
        for part in show.inspected(rows, skipped, newest, problems):
            show.console().print(part)
    if newest is None or problems:
        raise SystemExit(1)


def _place(what: str, output_dir: Path) -> Path:
    """The directory of a run, by name or path, or the folder of a checkpoint."""
    root = Path(what).absolute()
    if not root.is_dir() or any((path / "spec.yaml").exists() for path in (root, output_dir / what)):
        return rundir.find(what, output_dir).path
    return root


@app.command(
    name="export-hf",
    epilog=example("pithtrain export-hf tiny hf/tiny", "pithtrain export-hf STEP_FOLDER hf/tiny --dtype float32"),
)
def export_hf(
    source: RunOrFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Of the matrices; norms and routers stay float32.")] = Dtype.bfloat16,
    output_dir: OutputDir = Path("runs"),
) -> None:
    """Write a run's newest checkpoint, or any other, as a Hugging Face folder, tokenizer included. No GPU."""
    import torch

    from pithtrain import convert

    path = _place(source, output_dir)
    with _progress(lines=True) as progress:
        size = convert.export_hf(path, out, getattr(torch, dtype), note=_note, progress=progress)
    _say(f"{out}: {size / 2**30:.2f} GiB, {dtype}")


@app.command(name="import-hf", epilog=example("pithtrain import-hf Qwen3-30B-A3B checkpoints/qwen3-30b"))
def import_hf(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A Hugging Face folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint to make.", show_default=False)],
    architecture: Annotated[
        str | None, typer.Option(help="A folder of pithtrain/models; the config's model_type otherwise.")
    ] = None,
) -> None:
    """Write a Hugging Face folder as a checkpoint of weights, for `init_from`, which takes the folder itself too."""
    from pithtrain import convert

    with _progress(lines=True) as progress:
        convert.import_hf(source, out, architecture, _note, progress)
    _say(f"{out}\n  begin with it:  {me()} submit CONFIG --set init_from={shlex.quote(str(out))}")


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _say(text: str) -> None:
    """A line about what was done. Where it cannot be written (`| head`, a full disk), nothing fails by that."""
    with contextlib.suppress(PithtrainError):
        print(text, flush=True)


class _Output(io.FileIO):
    """Standard output or error below its buffer. Where a write fails, it and what follows go nowhere. Of standard
    output that is an error of ours, which no library on the way takes for its own; a note that is lost ends nothing."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() == 1:
                words = f"standard output cannot be written to: {error.strerror}"
                raise ReaderLeft(words) if isinstance(error, BrokenPipeError) else PithtrainError(words) from None
            return memoryview(data).nbytes


def _open_outputs() -> None:
    """Standard output and error as `_Output`; where the caller closed one (`>&-`), what is written there goes nowhere,
    by ranks too."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)  # where the lowest free descriptor was this one
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        old = getattr(sys, name)
        lines = old.line_buffering or old.write_through
        below = io.BufferedWriter(_Output(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(below, old.encoding, old.errors, line_buffering=lines))


def _wait(run: RunDir) -> None:
    """Stay until the run has ended, printing about twenty lines of the loss; raise if it did not succeed."""
    max_steps = jobs.state(run).max_steps or 1
    every = max(1, max_steps // 20)

    def report(row: dict[str, Any]) -> None:
        if row["step"] % every == 0 or row["step"] in (1, max_steps):
            speed = "" if row["tokens_per_second"] is None else f"  {row['tokens_per_second']:>9,.0f} tokens/s"
            _say(f"step {row['step']:>6}/{max_steps}  loss {row['loss']:.4f}{speed}")

    try:
        ended = jobs.wait(run, report)
    except KeyboardInterrupt:
        print(f"\nthe run goes on:  {me()} status {run.path}   {me()} cancel {run.path}", file=sys.stderr)
        raise SystemExit(130) from None
    if ended.word in ("stopped", "cancelled"):
        raise RunFailed(f"{run.name} is {ended.word}: {ended.why}\n  go on:  {me()} resume {run.path}")
    if ended.word != "done":
        raise jobs.failure(run, ended.attempt)


# ---- the machine -----------------------------------------------------------------------------------------------------


@app.command(epilog=example("pithtrain doctor", "pithtrain doctor --nodes 4"))
def doctor(
    nodes: Annotated[int | None, typer.Option(min=1, help="On so many nodes of the cluster, through srun.")] = None,
    config: Annotated[Path | None, typer.Option(help="With --nodes: ask for them as this spec would.")] = None,
    output_dir: OutputDir = Path("runs"),
    as_json: Json = False,
) -> None:
    """Check what a run needs of this machine, or of the cluster's nodes: OK, WARN or FAIL, with the mend."""
    from pithtrain import doctor as checking

    site = None if config is None else load(config).slurm
    checks = checking.check_host(output_dir) if nodes is None else checking.check_nodes(nodes, output_dir, site)
    print(json.dumps([dataclasses.asdict(each) for each in checks]) if as_json else checking.text(checks))
    if any(check.verdict == "FAIL" for check in checks):
        raise SystemExit(1)


@contextlib.contextmanager
def _progress(
    describe: Callable[[Any], str] = str, lines: bool = False
) -> Generator[Callable[[int, int, Any], None], None, None]:
    """A bar on stderr for (bytes done, bytes in all, what `describe` words); elsewhere a line each 10 % if `lines`."""
    from rich.console import Console
    from rich.progress import Progress

    told = 0
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, size: int, what: Any) -> None:
            nonlocal told
            bar.update(task, completed=done, total=size, description=describe(what))
            if lines and bar.disable and (percent := 100 * done // size // 10 * 10) > told:
                print(f"{percent:3d} %  {describe(what)}", file=sys.stderr)
                told = percent

        yield update


# ---- the door --------------------------------------------------------------------------------------------------------


def main() -> None:
    """The console script: the only place that turns an error into text and an exit code.

    A reader that leaves (`pithtrain logs RUN | head -1`) ends a command that tells something as it ends `cat`: without
    a word, and with the code of `ReaderLeft`. One that does something goes on, and its code says what came of it
    (`_say`).
    """
    _open_outputs()
    os.umask(os.umask(0o022) | 0o022)  # what runs is read from the run directory: nobody else writes there
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # at the interpreter's end nobody could answer
    except ReaderLeft as error:
        sys.exit(error.exit_code)
    except PithtrainError as error:
        print(error if isinstance(error, StoppedEarly) else f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
