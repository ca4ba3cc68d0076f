"""The arrows between rooms, and the papers' words: AGENTS.md and README.md against the real tree."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "pithtrain"
HEAVY = {"torch", "triton", "wandb", "submitit", "transformers"}


class Room(NamedTuple):
    path: str  # below src/pithtrain; a folder ends in /
    may_import: frozenset[str]
    no_torch: bool


def table() -> dict[str, Room]:
    """The rows of AGENTS.md's room table."""
    rows: dict[str, Room] = {}
    for line in (ROOT / "AGENTS.md").read_text().splitlines():
        if match := re.fullmatch(r"\| (\S+) \| `(\S+)` \|(.*)\|(.*)\|", line):
            name, path, may_import, no_torch = match.groups()
            allowed = frozenset(word for word in re.split(r",\s*", may_import.strip()) if word)
            rows[name] = Room(path, allowed, no_torch.strip() == "yes")
    return rows


ROOMS = table()


def room_of(module: str) -> str:
    """The room that holds a module such as `pithtrain.ops.linear`."""
    path = module.removeprefix("pithtrain.").replace(".", "/")
    found = [
        name
        for name, room in ROOMS.items()
        if f"{path}.py" == room.path or (room.path.endswith("/") and f"{path}/".startswith(room.path))
    ]
    assert found, f"{module} is in no room of AGENTS.md"
    return found[0]


def modules() -> dict[str, ast.Module]:
    found: dict[str, ast.Module] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__init__.py":
            assert path.read_text() == "", f"{path} must be empty"
            continue
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name] = ast.parse(path.read_text())
    return found


def names(node: ast.AST) -> Iterator[str]:
    """The modules that an import statement names; `from pithtrain import x` names pithtrain.x."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are written in full"
        assert node.module is not None
        for alias in node.names:
            inner = PACKAGE.parent / (node.module.replace(".", "/") + "/" + alias.name)
            is_module = inner.with_suffix(".py").exists() or inner.is_dir()
            yield f"{node.module}.{alias.name}" if is_module else node.module


def at_import(tree: ast.Module) -> Iterator[str]:
    """What importing a module imports: its top level, without functions and TYPE_CHECKING blocks."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield from names(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_what_its_line_says(module: str) -> None:
    """Lazy imports too; a folder's modules may import each other."""
    room = room_of(module)
    for node in ast.walk(MODULES[module]):
        for name in names(node):
            if name.startswith("pithtrain."):
                other = room_of(name)
                assert other == room or other in ROOMS[room].may_import, f"{module} imports {name}"


def test_the_arrows_never_turn_round() -> None:
    """The table itself has no cycle, and every name in it is a room whose path exists."""
    graph = {name: room.may_import - {name} for name, room in ROOMS.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == set(ROOMS)
    for room in ROOMS.values():
        assert (PACKAGE / room.path).exists()


def test_no_line_of_the_table_is_stale() -> None:
    """What a room may import it does import, somewhere, but for errors: any room may raise them."""
    used: dict[str, set[str]] = {name: set() for name in ROOMS}
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            used[room_of(module)] |= {room_of(name) for name in names(node) if name.startswith("pithtrain.")}
    for name, room in ROOMS.items():
        stale = room.may_import - used[name] - {"errors"}
        assert not stale, f"{name} does not import {sorted(stale)}"


def test_models_know_nothing_of_the_engine() -> None:
    for name, room in ROOMS.items():
        if name.startswith("models/") or name == "ops":
            assert room.may_import <= {"models/contract", "ops", "errors"}


QUIET = [module for module in MODULES if ROOMS[room_of(module)].no_torch or module.endswith(".config")]


@pytest.mark.parametrize("module", QUIET)
def test_rooms_without_torch_reach_none_at_import(module: str) -> None:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in at_import(MODULES[current]) if current in MODULES else ():
            assert name.split(".")[0] not in HEAVY, f"{current} imports {name}"
            waiting.append(name)


def test_a_real_import_of_the_rooms_without_torch_loads_none() -> None:
    code = f"import sys, {', '.join(QUIET)}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- the papers ------------------------------------------------------------------------------------------------------


def test_the_map_names_every_module() -> None:
    text = (ROOT / "README.md").read_text()
    for module in MODULES:
        path = module.replace(".", "/")
        folder = f"src/{'/'.join(path.split('/')[:2])}/"
        assert f"`src/{path}.py`" in text or f"`{folder}`" in text, f"README.md's map lacks {module}"


def test_each_config_begins_with_the_command_that_runs_it() -> None:
    for config in (ROOT / "configs").glob("*.yaml"):
        first = config.read_text().splitlines()[0]
        assert re.match(rf"# pithtrain (submit|train) configs/{re.escape(config.name)}\b", first), config.name


def test_the_one_line_file_points_here() -> None:
    assert (ROOT / "CLAUDE.md").read_text().count("\n") == 1
    assert "AGENTS.md" in (ROOT / "CLAUDE.md").read_text()


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = (
        "help",
        "setup",
        "demo",
        "test",
        "test-fast",
        "lint",
        "format",
        "submit",
        "status",
        "logs",
        "cancel",
        "bench",
    )
    for target in targets:
        assert f"make {target} " in done.stdout
