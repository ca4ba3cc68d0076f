"""The papers against the real tree: each path, command, option, make target, symbol and key that one names exists.

What stands in backquotes or in an indented or fenced block is taken by its word; prose is not.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from pithtrain.cli import app
from pithtrain.spec import RunSpec

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "pithtrain"
PAPERS = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("skills/*/SKILL.md")),
]

# what a run directory, a checkpoint, a user's own folder or another machine holds
ELSEWHERE = re.compile(
    r"(\.venv|runs|logs|errors|checkpoints|hf|wandb|data|notes|code|shared|slurm/NAME\.yaml)"
    r"|test_ROOM|val_loss/NAME|(attempts|metrics|events)\.jsonl|(submit|plan|heartbeat|checkpoint|tokenizer|config|rank-\w+)\.json"
    r"|(master|exp_avg|exp_avg_sq)/|spec\.yaml|slurm\.conf|x\.yaml|configs/mine\.yaml"
)
PATH = re.compile(r"\.?[\w-]+(\.[\w-]+)*(/[\w.-]+)+/?|[\w-]+\.(py|md|ya?ml|toml|jsonl?)")


def code(paper: Path) -> list[str]:
    """The pieces of a paper that are no prose: words in backquotes, lines of indented and fenced blocks.

    Of a block with a prompt (`$ ...`) only what was typed; a block fenced as `text` is an output and names nothing.
    """
    text = paper.read_text()
    blocks = re.findall(r"^```\w*\n.*?^```|^(?: {4}[^\n]+\n|\n(?= {4}))+", text, re.MULTILINE | re.DOTALL)
    pieces: list[str] = []
    for block in blocks:
        lines = [] if block.startswith("```text") else [line.strip() for line in block.splitlines()]
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        pieces += typed or [line for line in lines if not line.startswith("```")]
        text = text.replace(block, "\n")
    return pieces + re.findall(r"`([^`\n]+)`", text)


def named(pattern: str, paper: Path) -> Iterator[tuple[str, ...]]:
    for piece in code(paper):
        for match in re.finditer(pattern, piece):
            yield match.groups()


paper = pytest.mark.parametrize("paper", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_papers_that_must_be_there_are() -> None:
    names = {str(path.relative_to(ROOT)) for path in PAPERS}
    assert {"docs/slurm.md", "skills/submit-and-monitor/SKILL.md", "skills/diagnose-failed-run/SKILL.md"} <= names


@paper
def test_every_path_exists(paper: Path) -> None:
    for piece in code(paper):
        for word in re.split(r"[\s,;:()'\"=]+", piece):
            if PATH.fullmatch(word) and not ELSEWHERE.match(word):
                places = [root / word for root in (ROOT, PACKAGE, ROOT / "tests", paper.parent)]
                assert any(place.exists() for place in places), f"{paper.name} names {word}"


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words begin with, and the rest of them."""
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words:
        name, *words = words
        assert name in command.commands, f"there is no `{name}` among {sorted(command.commands)}"
        command = command.commands[name]
    return command, words


@paper
def test_every_command_and_each_of_its_options_exists(paper: Path) -> None:
    seen = 0
    # a command ends at a comment, a pipe, a second command, or two blanks before an explanation
    for (line,) in named(r"(?:^|[ /`(])pithtrain ((?:[a-z][\w-]*)(?: [^|;#&`]*)?)", paper):
        words = re.split(r"  |->", line)[0].split()
        try:
            command, rest = command_of(words)
        except AssertionError as error:
            raise AssertionError(f"{paper.name}: pithtrain {line}: {error}") from None
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            if re.fullmatch(r"--?[a-z][\w-]*", word := word.strip("[].,)").split("=")[0]):
                assert word in known, f"{paper.name}: pithtrain {command.name} has no {word}, it has {sorted(known)}"
        seen += 1
    assert seen or paper.name == "AGENTS.md"


@paper
def test_every_make_target_exists(paper: Path) -> None:
    heads = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for head in heads for target in head.split()}
    for (target,) in named(r"(?:^|[ /`(])make ([a-z-]+)", paper):
        assert target in targets, f"{paper.name} names make {target}"


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}
SECTIONS = {name: field.annotation for name, field in RunSpec.model_fields.items()}


def resolves(word: str) -> bool | None:
    """Whether `room.name` or `section.key` is there; None where the first part is neither a room nor a section."""
    first, *rest = word.removeprefix("pithtrain.").split(".")
    answers: list[bool] = []
    if first in MODULES:
        value: object = importlib.import_module(f"pithtrain.{first}")
        for name in rest:
            value = getattr(value, name, None) or getattr(value, "__annotations__", {}).get(name)
        answers.append(value is not None)
    if first in SECTIONS:
        kind = SECTIONS[first]
        for name in rest:
            fields = getattr(kind, "model_fields", {})
            kind = fields[name].annotation if name in fields else None
        # below a mapping such as slurm.env any key is a user's; the model's keys are its architecture's
        answers.append(kind is not None or first == "model" or rest[0] in ("env", "additional_parameters"))
    return any(answers) if answers else None


@paper
def test_every_symbol_and_key_exists(paper: Path) -> None:
    for piece in code(paper):
        for word in re.findall(r"(?<![\w./-])(?:pithtrain\.)?[a-z]\w*(?:\.[A-Za-z_]\w*)+(?![\w/-])", piece):
            if not PATH.fullmatch(word):
                assert resolves(word) is not False, f"{paper.name} names {word}"


@paper
def test_every_test_that_is_named_exists(paper: Path) -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"\btest_\w+(?:\.\.\.)?", paper.read_text()):
        if not (ROOT / "tests" / f"{name}.py").exists() and name != "test_ROOM":
            assert f"def {name.removesuffix('...')}" in tests, f"{paper.name} names {name}"


# ---- skills ----------------------------------------------------------------------------------------------------------

SKILLS = sorted(path.parent for path in ROOT.glob("skills/*/SKILL.md"))


@pytest.mark.parametrize("skill", SKILLS, ids=lambda path: path.name)
def test_a_skill_says_when_it_is_wanted_and_its_scripts_run(skill: Path) -> None:
    head = re.match(r"---\nname: ([\w-]+)\ndescription: (.+)\n---\n", (skill / "SKILL.md").read_text())
    assert head is not None
    assert head[1] == skill.name
    assert "Use when" in head[2]
    scripts = list((skill / "scripts").iterdir())
    for script in scripts:
        if script.is_file():
            assert script.stat().st_mode & 0o111, f"{script} is not executable"
            assert script.read_text().startswith("#!"), f"{script} has no interpreter"
    assert any(script.is_file() for script in scripts)


@pytest.mark.parametrize("folder", [".claude", ".agents"])
def test_each_kind_of_agent_finds_the_skills(folder: str) -> None:
    link = ROOT / folder / "skills"
    assert link.is_symlink()
    assert link.readlink() == Path("../skills")
    assert {path.name for path in link.iterdir()} == {path.name for path in (ROOT / "skills").iterdir()}


# ---- the checks themselves see what they are for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("`src/pithtrain/nowhere.py`", test_every_path_exists),
        ("`schedul.py`", test_every_path_exists),
        ("    pithtrain submitt configs/tiny.yaml\n", test_every_command_and_each_of_its_options_exists),
        ("`pithtrain submit C --dryrun`", test_every_command_and_each_of_its_options_exists),
        ("    .venv/bin/pithtrain status --wach  # look\n", test_every_command_and_each_of_its_options_exists),
        ("```sh\nmake moon\n```\n", test_every_make_target_exists),
        ("`submit.rendr`", test_every_symbol_and_key_exists),
        ("`slurm.max_requeue`", test_every_symbol_and_key_exists),
        ("`logging.wandb.mod=online`", test_every_symbol_and_key_exists),
        ("`test_of_nothing`", test_every_test_that_is_named_exists),
    ],
)
def test_a_wrong_name_is_found(text: str, check: object, tmp_path: Path) -> None:
    wrong = tmp_path / "PAPER.md"
    wrong.write_text(f"Words.\n\n{text}\n")
    assert callable(check)
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize(
    "text", ["`submit.render`", "`slurm.max_requeues`", "`logging.wandb.mode=online`", "`make test`"]
)
def test_a_right_name_passes(text: str, tmp_path: Path) -> None:
    right = tmp_path / "AGENTS.md"
    right.write_text(f"Words.\n\n{text}\n")
    test_every_symbol_and_key_exists(right)
    test_every_make_target_exists(right)
