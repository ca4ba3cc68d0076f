"""The commands as a person or a program meets them: text, exit codes, speed."""

import ast
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fake_slurm
from fake_run import FINISHES, WAITS_FOR_STOP, is_waiting, make_run, spec_file, wait_for
from pithtrain import cli, errors, rundir, submit
from pithtrain.cli import app
from pithtrain.errors import RunDirError
from pithtrain.rundir import RunDir
from pithtrain.spec import load

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


def pithtrain(*arguments: object, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pithtrain", *map(str, arguments)],
        cwd=cwd,
        env=submit.clean_environment(os.environ) | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_that_it_takes(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert re.search(rf"Example:\s+pithtrain {command}\b", done.stdout), done.stdout


def test_help_and_validate_answer_within_a_second(tmp_path: Path) -> None:
    """Processor seconds of whole processes, in one of three: what the wall shows where no other process competes."""
    config = spec_file(tmp_path)
    for arguments in (["--help"], ["validate", config], ["plan", config]):
        seconds: list[float] = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert pithtrain(*arguments, cwd=tmp_path).returncode == 0
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            if seconds[-1] < 1.0:
                break
        assert min(seconds) < 1.0, (arguments, seconds)


def test_validate_prints_the_resolved_spec(tmp_path: Path) -> None:
    config = spec_file(tmp_path)
    done = pithtrain("validate", config, "--set", "optimizer.lr=3e-4", cwd=tmp_path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(done.stdout)
    assert load(resolved) == load(config, ["optimizer.lr=3e-4"])


def test_a_wrong_spec_is_said_on_stderr_with_code_2(tmp_path: Path) -> None:
    config = spec_file(tmp_path)
    for command in ("validate", "plan", "submit", "train"):
        done = pithtrain(command, config, "--set", "optimizer.lrr=1", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "optimizer.lrr" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_plan_prints_one_json_object(tmp_path: Path) -> None:
    done = pithtrain("plan", spec_file(tmp_path), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["ranks"] == 2


def test_dry_run_prints_spec_and_script_and_touches_nothing(tmp_path: Path) -> None:
    config = spec_file(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = pithtrain("submit", config, "--dry-run", "--name", "other", cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(tmp_path.rglob("*")) == before
    spec = load(config, ["name=other"])
    script = submit.render(spec, RunDir(tmp_path / "runs" / "other"))
    assert done.stdout.startswith(spec.to_yaml())
    assert done.stdout.endswith(script)


def test_an_existing_run_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, FINISHES)
    for command in ("train", "submit"):
        done = pithtrain(command, tmp_path / "fake.yaml", cwd=tmp_path)
        assert done.returncode == 2
        assert "exists" in done.stderr
        assert "pithtrain resume" in done.stderr


@pytest.mark.slow
def test_train_fails_with_one_readable_cause(tmp_path: Path) -> None:
    """The real engine on a corpus that is not there: cause on screen and in the run directory, nothing left behind."""
    began = time.monotonic()
    missing = ["--set", "data.sources=[{path: none}]"]
    done = pithtrain("train", spec_file(tmp_path), "--run-dir", "here", *missing, cwd=tmp_path)
    assert time.monotonic() - began < 30
    assert done.returncode == 2
    assert done.stderr.count("there is no corpus here") == 1
    assert "Traceback" not in done.stderr
    first = rundir.first_error(RunDir(tmp_path / "here"), 1)
    assert first is not None
    assert "there is no corpus here" in first["message"]
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.slow
def test_resume_runs_in_the_foreground_what_train_made(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    rundir.record_job(run, 1, job_id="1", launcher="train", host="elsewhere", time=0)
    rundir.record_attempt(run, 1, end=1.0, ended="stopped")
    run.logs(1).mkdir(parents=True)
    # resume takes a new snapshot where the code has changed: here the fake engine counts as the old one
    done = pithtrain("resume", "fake", "--set", "training.max_steps=6", cwd=tmp_path)
    assert "changed: training.max_steps: 4 -> 6" in done.stdout
    assert "changed: code/pithtrain/train.py" in done.stdout
    assert done.returncode == 0 and len(rundir.read_lines(run.metrics)) == 6  # the installed engine ran
    assert load(run.spec_yaml).training.max_steps == 6
    assert (run.path / "code-before-1" / "pithtrain" / "train.py").exists()
    assert load(run.attempt_spec(2)).training.max_steps == 6


def test_a_finished_run_is_not_resumed_unless_it_gets_more_steps(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    submit.foreground(run, spec)
    done = pithtrain("resume", "fake", cwd=tmp_path)
    assert done.returncode == 2
    assert "is done at step 4 = training.max_steps" in done.stderr
    assert "--set training.max_steps=8" in done.stderr


@pytest.mark.slow
def test_status_logs_cancel_and_resume_of_a_live_run(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, WAITS_FOR_STOP)
    submit.submit(run, spec, "local")
    wait_for(lambda: is_waiting(run, [0, 1]))

    (row,) = json.loads(pithtrain("status", "--json", cwd=tmp_path).stdout)
    assert (row["name"], row["word"], row["step"], row["max_steps"], row["attempt"]) == ("fake", "running", 1, 4, 1)
    table = pithtrain("status", cwd=tmp_path).stdout.splitlines()
    assert len(table) == 2
    assert re.match(r"fake\s+running\s+\S+\s+1/4\s+7\.0000\s+1\s+\d+s ago\s+1\s+local \d+", table[1])

    refused = pithtrain("resume", run.path, cwd=tmp_path)
    assert refused.returncode == 2
    assert "fake is running" in refused.stderr

    assert pithtrain("logs", "fake", "--rank", 1, cwd=tmp_path).stdout == run.log(1, 1).read_text()
    missing = pithtrain("logs", "fake", "--rank", 7, cwd=tmp_path)
    assert missing.returncode == 2
    assert "logs/attempt-1/rank-1.log" in missing.stderr

    assert "saves at its next step" in pithtrain("cancel", "fake", cwd=tmp_path).stdout
    wait_for(lambda: "stopped" in pithtrain("status", "fake", cwd=tmp_path).stdout)


def test_a_submission_that_sbatch_refuses_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "echo 'sbatch: error: invalid partition' >&2; exit 1"
    for sbatch in (refusal, f'[ "$1" = --test-only ] && exit 0; {refusal}'):
        fake_slurm.install(tmp_path, monkeypatch, sbatch=sbatch)
        done = pithtrain("submit", spec_file(tmp_path), cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.count("sbatch: error: invalid partition") == 1
        assert not (tmp_path / "runs" / "fake").exists()


def test_status_of_nothing_and_of_an_unknown_run(tmp_path: Path) -> None:
    nothing = pithtrain("status", cwd=tmp_path)
    assert (nothing.returncode, nothing.stdout) == (0, "no runs in runs\n")
    make_run(tmp_path, FINISHES)
    unknown = pithtrain("status", "fale", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "nearest: fake" in unknown.stderr
    assert "not started" in pithtrain("status", cwd=tmp_path).stdout


def test_status_of_a_failed_run_names_the_cause(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "def run(*a):\n    raise DataError('the shard is torn')\n", ranks=1)
    done = subprocess.run(
        [sys.executable, "-c", f"from pithtrain import submit, rundir; from pithtrain.spec import load; "
         f"from pathlib import Path; run = rundir.RunDir(Path({str(run.path)!r})); "
         "submit.foreground(run, load(run.spec_yaml))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    text = pithtrain("status", "fake", cwd=tmp_path).stdout
    assert "failed" in text
    assert "rank 0: the shard is torn" in text


def test_status_of_a_run_tells_its_newest_losses_on_text_held_out(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    for step, loss in ((2, 3.5), (4, 3.25)):
        with run.events.open("a") as file:
            print(json.dumps({"event": "validated", "step": step, "val_loss/a": loss, "val_loss/b": None}), file=file)
    text = pithtrain("status", "fake", cwd=tmp_path).stdout
    assert "val_loss/a 3.2500 at step 4" in text and "val_loss/b not finite at step 4" in text and "3.5" not in text


FAKE_ENGINE = """
import sys; from pathlib import Path; from pithtrain import cli, rundir
run = rundir.RunDir(Path(sys.argv.pop()))
cli._create = lambda *_: run
cli.main()
"""  # the program, on the run that its last argument names


@pytest.mark.parametrize("command", ["train", "submit --wait"])
def test_a_reader_that_leaves_does_not_fail_the_run(tmp_path: Path, command: str) -> None:
    """As `pithtrain train ... | head`: nobody reads the last lines, and the run is done all the same."""
    run, _ = make_run(tmp_path, FINISHES)
    read, write = os.pipe()
    os.close(read)
    arguments = [*command.split(), str(tmp_path / "fake.yaml"), str(run.path)]
    done = subprocess.run(
        [sys.executable, "-c", FAKE_ENGINE, *arguments], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rundir.stamp(run.done, 1)["step"] == 4


@pytest.mark.parametrize(
    "command",
    [
        *("validate fake.yaml", "plan fake.yaml", "submit fake.yaml --dry-run", "status", "status fake --json"),
        *("logs fake", "logs fake -f", "logs fake --rank 1", "logs fake --err", "inspect runs/fake/checkpoints/step-1"),
        "--help",
    ],
)
def test_a_reader_that_leaves_ends_a_command_that_tells_something_as_it_ends_cat(tmp_path: Path, command: str) -> None:
    """As `pithtrain logs RUN | head -1`: without a word, be the text in a buffer still or too long for one."""
    run, _ = make_run(tmp_path, FINISHES)
    (run.checkpoints / "step-1").mkdir(parents=True)
    for rank, text in enumerate(("short\n", "long\n" * 100_000)):
        run.log(1, rank).parent.mkdir(parents=True, exist_ok=True)
        run.log(1, rank).write_text(text)
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "pithtrain", *command.split()]
    done = subprocess.run(program, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_that_leaves_fails_nothing_that_was_done(tmp_path: Path) -> None:
    make_run(tmp_path, FINISHES)
    read, write = os.pipe()
    os.close(read)
    for command, code in ((["cancel", "fake"], 0), (["cancel", "other"], 2), (["train", "fake.yaml"], 2)):
        program = [sys.executable, "-m", "pithtrain", *command]
        assert subprocess.run(program, cwd=tmp_path, stdout=write, stderr=write, check=False).returncode == code
    os.close(write)


def test_output_that_a_full_disk_does_not_take_is_told(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        program = [sys.executable, "-m", "pithtrain", "plan", str(spec_file(tmp_path))]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output cannot be written to: No space left on device\n",
    )


@pytest.mark.parametrize("ending", [">&-", ">&- 2>&-", "> /dev/full"])
def test_outputs_that_are_closed_or_full_do_not_fail_the_run(tmp_path: Path, ending: str) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    (tmp_path / "train.py").write_text(FAKE_ENGINE)
    command = f"{sys.executable} {tmp_path}/train.py train {tmp_path}/fake.yaml {run.path} {ending}"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert rundir.stamp(run.done, 1)["step"] == 4


def test_a_hint_can_be_typed_where_there_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.shutil, "which", lambda name: None)
    for called, hint in (
        ("x/pithtrain/__main__.py", f"{sys.executable} -m pithtrain"),
        ("/a/pithtrain", "/a/pithtrain"),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        assert errors.me() == hint
    monkeypatch.setattr(errors.shutil, "which", lambda name: "/usr/bin/pithtrain")
    assert errors.me() == "pithtrain"


def test_a_hint_of_any_room_is_spelled_as_the_program_was_called(tmp_path: Path) -> None:
    """Run as `python -m pithtrain` where there is no `pithtrain`: what an error says to type can be typed."""
    run, spec = make_run(tmp_path, FINISHES)
    for command, hint in (
        (["submit", "fake.yaml"], f"resume {run.path}"),
        (["submit", "fake.yaml", "--name", "new", "--set", "data.sources=[{path: none}]"], "tokenize"),
        (["resume", "fake"], f"resume {run.path} --set training.max_steps=8"),
    ):
        if command[0] == "resume":
            submit.foreground(run, spec)
        done = pithtrain(*command, cwd=tmp_path, PATH="/usr/bin:/bin")
        assert f"{sys.executable} -m pithtrain {hint}" in done.stderr


def test_no_room_spells_the_program_itself() -> None:
    """But for what is no person's call (a batch job, its ranks), for examples and for what a key means."""
    called = re.compile(rf"\bpithtrain ({'|'.join(COMMANDS)})\b")
    package = Path(cli.__file__).parent
    found = {
        path.name
        for path in package.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and called.search(node.value)
        if "\n\n" not in node.value and f'"""{node.value}' not in path.read_text()  # a docstring
    }
    assert found == {"batch.py", "cli.py", "preflight.py", "spec.py", "worker.py"}


def test_a_call_that_is_wrong_ends_with_code_2(tmp_path: Path) -> None:
    for arguments in (["trian"], ["train"], ["train", "missing.yaml"], ["status", "--bogus"]):
        done = pithtrain(*arguments, cwd=tmp_path)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("change", ["name=other", "output_dir=elsewhere", "model.hidden_size=64"])
def test_resume_refuses_what_would_be_another_run_and_leaves_the_spec(tmp_path: Path, change: str) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    before = run.spec_yaml.read_text()
    done = pithtrain("resume", run.path, "--set", change, cwd=tmp_path)
    assert done.returncode == 2
    key = change.split("=")[0]
    assert re.search(rf"{re.escape(key)} = .*: was .* and cannot change at a resume; start another run", done.stderr)
    assert run.spec_yaml.read_text() == before


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE say that this is rank 1 of 2"),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"},
            "SLURM_PROCID and SLURM_NTASKS say that this is rank 1 of 2",
        ),
    ],
    ids=["torchrun", "srun"],
)
def test_a_rank_of_another_launcher_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], names: str
) -> None:
    """`train` and `resume` start ranks themselves: under a launcher each of its tasks would."""
    run, _ = make_run(tmp_path, FINISHES)
    rundir.record_job(run, 1, job_id="1", launcher="train", host="elsewhere", time=0)
    rundir.record_attempt(run, 1, end=1.0, ended="stopped")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for start in (lambda: cli.train(run.spec_yaml, name="other"), lambda: cli.resume(str(run.path))):
        with pytest.raises(RunDirError, match=names):
            start()
    assert not list(run.path.parent.glob("other")) and rundir.last_attempt(run)["attempt"] == 1


def test_a_resume_in_the_foreground_says_that_it_runs_before_the_next_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the start of ranks, from two terminals: the second is refused."""
    run, _ = make_run(tmp_path, FINISHES)
    rundir.record_job(run, 1, job_id="1", launcher="train", host="elsewhere", time=0)
    rundir.record_attempt(run, 1, end=1.0, ended="stopped")
    started: list[int | None] = []

    def foreground(run: rundir.RunDir, spec: object, attempt: int | None) -> None:
        started.append(attempt)
        if len(started) == 1:  # the second terminal, before the first has a rank
            cli.resume(str(run.path))

    monkeypatch.setattr(submit, "foreground", foreground)
    with pytest.raises(RunDirError, match="running"):
        cli.resume(str(run.path))
    assert started == [2]
