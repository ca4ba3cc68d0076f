"""The commands. Each reads its arguments, calls one room, prints; `pithtrain COMMAND --help` ends with an example.

Nothing heavy is imported at the top: `--help` and `validate` answer in well under a second because torch, submitit and
wandb come in only where a command needs them. Results go to stdout, errors to stderr as text, and the exit code is the
error's own (`errors`): a traceback here means our mistake, never the user's.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pithtrain.errors import ABSENT, PithtrainError, Problem, RunDirError, RunFailed, SpecError, StoppedEarly

if TYPE_CHECKING:
    from pithtrain.jobs import State
    from pithtrain.rundir import RunDir
    from pithtrain.spec import RunSpec
    from pithtrain.submit import Launcher

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
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, directory or job id.", show_default=False)]
OutputDir = Annotated[Path, typer.Option("--output-dir", help="The folder that holds the run directories.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]

DEMO_LOSS = 5.3  # nats per token, mean of the last 20 steps: what `make demo` must reach from ln(4096) = 8.3
MEAN_OVER = 20


def example(*lines: str) -> str:
    """The epilog of a command's help."""
    return "Example:\n\n" + "\n\n".join(f"`{line}`" for line in lines)


# ---- before a run ----------------------------------------------------------------------------------------------------


@app.command(epilog=example("pithtrain validate configs/tiny.yaml --set optimizer.lr=1e-3"))
def validate(config: Config, overrides: Set = None) -> None:
    """Print the resolved spec, every default written out, or every error at once."""
    from pithtrain.spec import load

    print(load(config, overrides or ()).to_yaml(), end="")


@app.command(epilog=example("pithtrain plan configs/tiny.yaml --json"))
def plan(config: Config, overrides: Set = None, as_json: Json = False) -> None:
    """Numbers before a GPU is asked for: ranks, micro-batches, layers per stage, parameters, FLOPs per token."""
    from pithtrain.plan import plan as make_plan
    from pithtrain.spec import load

    numbers = make_plan(load(config, overrides or ()))
    print(json.dumps(numbers.to_dict()) if as_json else numbers.text())


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

    with _progress() as progress:
        report = corpus.tokenize(
            inputs, output, tokenizer, text_key=text_key, eos=eos, overwrite=overwrite, progress=progress
        )
    print(report)


@app.command(name="build-stdlib", epilog=example("pithtrain build-stdlib --output data/stdlib"))
def build_stdlib(
    output: Annotated[Path, typer.Option(help="Where tokenizer and tokens are made.")] = Path("data/stdlib"),
) -> None:
    """Make the demo's corpus and tokenizer from the Python standard library's own text, once (about 20 s)."""
    from pithtrain import corpus

    print(corpus.build_stdlib(output) or f"{output} is there already")


# ---- starting a run --------------------------------------------------------------------------------------------------


@app.command(epilog=example("pithtrain submit configs/tiny.yaml --name first --wait", "pithtrain submit C --dry-run"))
def submit(
    config: Config,
    overrides: Set = None,
    name: Annotated[str | None, typer.Option(help="The run's name; the spec's own otherwise.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print spec and sbatch script, touch nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the run has ended, showing the loss.")] = False,
) -> None:
    """Start a run through Slurm where it answers, else as local processes in the background."""
    from pithtrain import rundir
    from pithtrain import submit as starting

    spec = _load(config, overrides, name)
    if dry_run:
        run = rundir.RunDir(spec.output_dir / spec.name)
        print(spec.to_yaml(), end="")
        print(f"\n# ---- {run.slurm}/JOBID_submission.sh\n{starting.render(spec, run)}", end="")
        return
    run = _submit(spec)
    if wait:
        _wait(run)


@app.command(epilog=example("pithtrain train configs/tiny.yaml --set training.max_steps=50 --name short"))
def train(
    config: Config,
    overrides: Set = None,
    name: Annotated[str | None, typer.Option(help="The run's name; the spec's own otherwise.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run directory itself, instead of output_dir/name.")] = None,
) -> None:
    """Train in the foreground: one process per rank on this host, or under torchrun or srun if one started this.

    Ctrl-C saves at the next step and ends with exit code 4.
    """
    spec = _load(config, overrides, name)
    _foreground(lambda: _create(spec, run_dir))


@app.command(epilog=example("pithtrain resume tiny --set training.max_steps=400"))
def resume(run: Run, overrides: Set = None, output_dir: OutputDir = Path("runs")) -> None:
    """Go on from the newest checkpoint: in the foreground for a run made by `train`, else submitted again."""
    from pithtrain import rundir, worker
    from pithtrain import submit as starting
    from pithtrain.spec import load

    found = rundir.find(run, output_dir)
    if (rundir.last_job(found) or {}).get("launcher") == "train" or worker.seat(os.environ).world_size > 1:
        _foreground(lambda: _prepare_resume(found, overrides))
    else:
        by = starting.launcher()
        _prepare_resume(found, overrides, by)
        spec = load(found.spec_yaml)
        _say_submitted(found, spec, starting.submit(found, spec, by))


@app.command(epilog=example("pithtrain demo"))
def demo(
    config: Annotated[Path, typer.Option(help="The spec to run.")] = Path("configs/tiny.yaml"),
    name: Annotated[str | None, typer.Option(help="The run's name; demo-1, demo-2, ... otherwise.")] = None,
) -> None:
    """Everything once, on this machine: text, tokens, a submitted run of four processes, a falling loss."""
    from pithtrain import corpus, rundir
    from pithtrain.spec import load

    print("corpus: the Python standard library's own text")
    print(corpus.build_stdlib(Path("data/stdlib")) or "data/stdlib is there already")
    taken = {run.name for run in rundir.runs(load(config).output_dir)}
    name = name or next(free for number in range(1, 10**6) if (free := f"demo-{number}") not in taken)
    run = _submit(_load(config, None, name))
    began = time.time()
    _wait(run)
    _summary(run, time.time() - began)


def _foreground(prepare: "Callable[[], RunDir]") -> None:
    """Train in the run directory that `prepare` gives, in processes of our own or as one of torchrun's or srun's."""
    from pithtrain import rundir, worker
    from pithtrain import submit as starting
    from pithtrain.spec import load

    if worker.seat(os.environ).world_size == 1:
        run = prepare()
        starting.foreground(run, load(run.spec_yaml))
        print(f"done: {run.path}")
        return

    os.environ.update(worker.prepare_environment(os.environ))  # before torch is imported

    def claim() -> dict[str, Any]:
        run = prepare()
        return {"path": str(run.path), "attempt": starting.claim_for_this_process(run)}

    # rank 0 does it for all; its store is the server of the rendezvous, so it is kept until the end
    shared, store = worker.share_from_rank_zero(os.environ, claim)
    here = worker.seat(os.environ)
    os.environ["PITHTRAIN_ATTEMPT"] = str(shared["attempt"] - here.restarts)  # main adds the launcher's restarts
    run = rundir.RunDir(Path(shared["path"]))
    worker.main(run.path)
    if here.rank == 0:
        try:
            starting.report_end(run, shared["attempt"], [0])
            print(f"done: {run.path}")
        except StoppedEarly as stopped:  # the launcher would take any other code than 0 for a crash
            print(stopped, file=sys.stderr)
    del store


def _prepare_resume(run: "RunDir", overrides: list[str] | None, by: "Launcher | None" = None) -> "RunDir":
    """Check that `run` can go on, and bring its spec and code up to date, saying what changes. `by`: how it will be
    submitted, None in the foreground."""
    from pithtrain import jobs, rundir
    from pithtrain import submit as starting
    from pithtrain.spec import load

    jobs.refuse_if_live(run)
    before, spec = load(run.spec_yaml), load(run.spec_yaml, overrides or ())
    fixed = [name for name in ("name", "output_dir", "model") if getattr(before, name) != getattr(spec, name)]
    if fixed:
        rule = "cannot change at a resume; start another run"
        raise SpecError([Problem(name, ABSENT, rule) for name in fixed])
    if by is not None:
        starting.check(spec, by)
    done_at = (rundir.read_json(run.done) or {}).get("step", 0)
    if done_at >= spec.training.max_steps:
        raise RunDirError(
            f"{run.name} is done at step {done_at} = training.max_steps\n"
            f"  go on:  pithtrain resume {run.path} --set training.max_steps={2 * done_at}"
        )
    old, new = run.spec_yaml.read_text(encoding="utf-8"), spec.to_yaml()
    for change in rundir.spec_difference(old, new):
        print(f"changed: {change}")
    rundir.write_atomic(run.spec_yaml, new)
    for file in rundir.renew_code(run):
        print(f"changed: code/pithtrain/{file}")
    return run


def _load(config: Path, overrides: list[str] | None, name: str | None) -> "RunSpec":
    from pithtrain.spec import load

    return load(config, [*(overrides or ()), *([f"name={json.dumps(name)}"] if name is not None else [])])


def _create(spec: "RunSpec", run_dir: Path | None = None) -> "RunDir":
    from pithtrain import rundir
    from pithtrain.plan import plan as make_plan

    path = run_dir or spec.output_dir / spec.name
    return rundir.create(path, spec.to_yaml(), make_plan(spec).to_dict(), sys.argv)


def _submit(spec: "RunSpec") -> "RunDir":
    from pithtrain import submit as starting

    by = starting.launcher()
    starting.check(spec, by)
    run = _create(spec)
    try:
        job = starting.submit(run, spec, by)
    except PithtrainError:
        shutil.rmtree(run.path)  # nothing runs in it: the same command works once the cause is mended
        raise
    _say_submitted(run, spec, job)
    return run


# ---- watching and ending a run ---------------------------------------------------------------------------------------


@app.command(epilog=example("pithtrain status", "pithtrain status tiny --json"))
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run only.", show_default=False)] = None,
    output_dir: OutputDir = Path("runs"),
    as_json: Json = False,
) -> None:
    """One line a run: state, attempt, step, loss, speed; for one failed run its first cause too."""
    from pithtrain import jobs, rundir

    chosen = rundir.runs(output_dir) if run is None else [rundir.find(run, output_dir)]
    states = [jobs.state(each) for each in chosen]
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in states]))
        return
    if not states:
        print(f"no runs in {output_dir}")
        return
    _print_states(states)
    if run is not None and states[0].word in ("failed", "lost"):
        from pithtrain.submit import failure

        print(failure(chosen[0], states[0].attempt))


@app.command(epilog=example("pithtrain logs tiny --rank 3", "pithtrain logs tiny --attempt 1"))
def logs(
    run: Run,
    rank: Annotated[int, typer.Option(help="Whose log.")] = 0,
    attempt: Annotated[int | None, typer.Option(help="The newest attempt otherwise.")] = None,
    output_dir: OutputDir = Path("runs"),
) -> None:
    """Print the log of one rank."""
    from pithtrain import jobs, rundir

    found = rundir.find(run, output_dir)
    path = found.log(attempt or jobs.state(found).attempt, rank)
    if not path.exists():
        have = sorted(str(log.relative_to(found.path)) for log in found.path.glob("logs/attempt-*/rank-*.log"))
        raise RunDirError(f"there is no {path}; there are: {', '.join(have) or 'no logs yet'}")
    sys.stdout.write(path.read_text(encoding="utf-8", errors="replace"))


@app.command(epilog=example("pithtrain cancel tiny"))
def cancel(run: Run, output_dir: OutputDir = Path("runs")) -> None:
    """Save at the next step, then stop."""
    from pithtrain import jobs, rundir

    print(jobs.cancel(rundir.find(run, output_dir)))


def _wait(run: "RunDir") -> None:
    """Stay until the run has ended, printing about twenty lines of the loss; raise if it did not succeed."""
    from pithtrain import jobs
    from pithtrain.submit import failure

    max_steps = jobs.state(run).max_steps
    every = max(1, max_steps // 20)

    def show(row: dict[str, Any]) -> None:
        if row["step"] % every == 0 or row["step"] in (1, max_steps):
            speed = "" if row["tokens_per_second"] is None else f"  {row['tokens_per_second']:>9,.0f} tokens/s"
            print(f"step {row['step']:>6}/{max_steps}  loss {row['loss']:.4f}{speed}", flush=True)

    try:
        ended = jobs.wait(run, show)
    except KeyboardInterrupt:
        print(f"\nthe run goes on:  {_me()} status {run.path}   {_me()} cancel {run.path}", file=sys.stderr)
        raise SystemExit(130) from None
    if ended.word == "stopped":
        raise RunFailed(f"{run.name} was stopped with its state saved\n  go on:  pithtrain resume {run.path}")
    if ended.word != "done":
        raise failure(run, ended.attempt)


def _say_submitted(run: "RunDir", spec: "RunSpec", job: dict[str, Any]) -> None:
    where = f"Slurm job {job['job_id']}" if job["launcher"] == "slurm" else f"local processes of {job['job_id']}"
    print(f"{run.name}: {where}, {spec.slurm.nodes} x {spec.slurm.gpus_per_node} ranks, attempt {job['attempt']}")
    print(f"  directory  {run.path}")
    for command in ("status", "logs", "cancel", "resume"):
        print(f"  {command:<9}  {_me()} {command} {run.path}")


def _me() -> str:
    """How to call this program again: by its name, or by its path where no activated environment has it."""
    path = Path(sys.argv[0])
    if shutil.which("pithtrain") is not None or path.name != "pithtrain":
        return "pithtrain"
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


def _print_states(states: "list[State]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "attempt", "step", "loss", "tokens/s", "job"):
        table.add_column(title, justify="left" if title in ("run", "state", "job") else "right", no_wrap=True)
    for each in states:
        table.add_row(
            each.name,
            each.word,
            str(each.attempt),
            f"{each.step or 0}/{each.max_steps}",
            "" if each.loss is None else f"{each.loss:.4f}",
            "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}",
            "" if each.job_id is None else f"{each.launcher} {each.job_id}",
        )
    # a pipe has no width: a program gets whole lines
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def _summary(run: "RunDir", seconds: float) -> None:
    """The demo's table; raises RunFailed where the loss did not fall far enough."""
    from rich.console import Console
    from rich.table import Table

    from pithtrain import rundir

    rows = rundir.read_lines(run.metrics)
    last = [row["loss"] for row in rows[-MEAN_OVER:]]
    final = sum(last) / len(last)
    speeds = sorted(row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None)
    table = Table(show_header=False, title=f"{run.name}: done")
    for label, text in (
        ("steps", f"{rows[-1]['step']} in {seconds:.0f} s"),
        ("tokens", f"{rows[-1]['tokens_seen']:,}"),
        ("first loss", f"{rows[0]['loss']:.4f}"),
        (f"last loss, mean of {len(last)}", f"{final:.4f}"),
        ("tokens/s, median", f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "-"),
        ("run directory", str(run.path)),
        ("its log", f"{_me()} logs {run.name}"),
        ("go on with it", f"{_me()} resume {run.name} --set training.max_steps={2 * rows[-1]['step']}"),
        ("your own run", f"cp configs/tiny.yaml configs/mine.yaml; {_me()} validate configs/mine.yaml"),
    ):
        table.add_row(label, text)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    if not final < DEMO_LOSS:
        raise RunFailed(f"the mean of the last {len(last)} losses is {final:.4f}, not below {DEMO_LOSS}")


@contextlib.contextmanager
def _progress() -> Generator[Callable[[int, int, int], None], None, None]:
    """A bar on stderr for corpus's (bytes read, bytes in all, tokens written); nothing where no one looks."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("tokenizing", total=None)

        def update(read: int, size: int, tokens: int) -> None:
            bar.update(task, completed=read, total=size, description=f"{tokens:,} tokens")

        yield update


# ---- the door --------------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """The console script: the only place that turns an error into text and an exit code."""
    try:
        app()
    except StoppedEarly as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    except PithtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
