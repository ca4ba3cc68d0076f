"""`pithtrain inspect`: what is complete, what is not and why, the table of tensors, and a reading of all of them."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_run import FINISHES, make_run
from harness import Pool, batches_of, make_spec
from pithtrain import catalog
from pithtrain.cli import app
from pithtrain.rundir import RunDir
from pithtrain.spec import from_dict
from pithtrain.world import Place, connect
from test_cli import pithtrain

TENSORS = {
    f"{kind}/{name}": {"shape": shape, "dtype": "float32", "norm": norm, "sum": "00000000000000ff"}
    for kind, norm in (("master", 3.0), ("exp_avg", 0.5), ("exp_avg_sq", 0.25))
    for name, shape in (("model.embed_tokens.weight", [512, 32]), ("lm_head.weight", [512, 32]))
}


def make_checkpoint(checkpoints: Path, step: int, saved_at: float | None = None, **more: Any) -> Path:
    """A folder that is complete for whoever reads names, sizes and the marker."""
    final = catalog.folder(checkpoints, step)
    partial = catalog.begin(final)
    (partial / "__0_0.distcp").write_bytes(b"x" * 2**20)
    content: dict[str, Any] = {
        "kind": "full",
        "step": step,
        "samples": 8 * step,
        "tokens": 128 * step,
        "updates": step,
        "run": "fake",
        "spec_hash": "0123456789abcdef",
        "model": {"architecture": "qwen3_moe", "hidden_size": 32, "num_experts": 4},
        "tokenizer": None,
        "tokenizer_path": None,
        "mesh": {"pp": 2, "dp": 1, "cp": 1, "ep": 2},
        "torch": "2.13.0",
        "saved_at": int(saved_at or time.time()),
        "tensors": TENSORS,
    }
    catalog.finish(final, ["__0_0.distcp"], {"data": None} | content | more)
    return final


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Three saves, the newest of which lost half of a file, and one that did not end."""
    run, _ = make_run(tmp_path, FINISHES)
    for step in (100, 1000, 1200):
        make_checkpoint(run.checkpoints, step, time.time() - 7200)
    (run.checkpoints / "step-00001200" / "__0_0.distcp").write_bytes(b"x" * 2**19)
    (run.checkpoints / "step-00001300.partial").mkdir()
    return run


def test_a_run_shows_its_checkpoints_and_the_newest_complete_one(run: RunDir, tmp_path: Path) -> None:
    done = pithtrain("inspect", "fake", cwd=tmp_path)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert lines[0].split() == ["step", "kind", "tokens", "size", "saved", "folder"]
    assert lines[1].split() == ["100", "full", "12,800", "1.00", "MiB", "2h", "ago", "step-00000100"]
    assert lines[2].split() == ["1000", "full", "128,000", "1.00", "MiB", "2h", "ago", "step-00001000"]
    assert lines[3] == (f"not counted: step-00001200 is incomplete: __0_0.distcp has {2**19} bytes of {2**20}")
    assert lines[4].startswith("not counted: step-00001300.partial is ")
    rest = "\n".join(lines[5:])
    for text in (
        str(run.checkpoints / "step-00001000"),
        "step       1000: 1000 updates, 8,000 sequences",
        "tokens     128,000",
        "run        fake, spec 0123456789abcdef",
        "model      qwen3_moe, hidden_size 32, num_experts 4",
        "by torch 2.13.0 on pp=2 dp=1 cp=1 ep=2",
        "in 2 files",
    ):
        assert text in rest
    assert lines[-2].split() == ["lm_head.weight", "[512,", "32]", "float32", "3", "0.5", "0.25"]
    total = f"{math.sqrt(18):.6g}"
    assert lines[-1].split()[:4] == ["2", "parameters", f"{2 * 512 * 32:,}", total]
    assert pithtrain("inspect", run.path, cwd=tmp_path).stdout == done.stdout
    assert pithtrain("inspect", run.checkpoints, cwd=tmp_path).stdout == done.stdout


def test_json_is_one_object_with_the_marker_as_it_is(run: RunDir, tmp_path: Path) -> None:
    done = pithtrain("inspect", "fake", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert list(found) == ["checkpoints", "skipped", "newest", "problems"]
    assert [row["step"] for row in found["checkpoints"]] == [1000, 100]
    assert set(found["checkpoints"][0]) == {"path", "bytes", "step", "kind", "tokens", "saved_at"}
    assert len(found["skipped"]) == 2
    path = run.checkpoints / "step-00001000"
    size = sum(file.stat().st_size for file in path.iterdir())
    assert found["newest"] == {"path": str(path), "bytes": size, **catalog.read(path)}
    assert found["problems"] is None


def test_one_checkpoint_by_its_folder(run: RunDir, tmp_path: Path) -> None:
    path = run.checkpoints / "step-00000100"
    done = pithtrain("inspect", path, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1] == str(path)
    assert "1000" not in done.stdout.replace("step-00000100", "")


def test_moments_of_another_type_say_so(tmp_path: Path) -> None:
    narrow = {key: one | ({} if key.startswith("master/") else {"dtype": "bfloat16"}) for key, one in TENSORS.items()}
    path = make_checkpoint(tmp_path, 100, tensors=narrow)
    words = " ".join(pithtrain("inspect", path, cwd=tmp_path).stdout.split())
    assert "norm of master norm of exp_avg (bfloat16) norm of exp_avg_sq (bfloat16)" in words


def test_weights_alone_say_so(tmp_path: Path) -> None:
    masters = {key: one for key, one in TENSORS.items() if key.startswith("master/")}
    path = make_checkpoint(tmp_path, 0, kind="weights", tensors=masters, mesh=None, updates=0)
    text = pithtrain("inspect", path, cwd=tmp_path).stdout
    assert "weights alone, for init_from" in text and "on one process" in text and "exp_avg" not in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("step-00001200", f"__0_0.distcp has {2**19} bytes of {2**20}"),
        ("step-00001300.partial", "under way or cut off"),
        ("step-00000100", "its checkpoint.json cannot be read"),  # torn below
    ],
)
def test_an_incomplete_one_is_told_with_the_reason_and_code_1(
    run: RunDir, tmp_path: Path, name: str, reason: str
) -> None:
    marker = run.checkpoints / "step-00000100" / catalog.MARKER
    marker.write_text(marker.read_text()[:100])
    done = pithtrain("inspect", run.checkpoints / name, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "there is no complete checkpoint"
    assert reason in done.stdout
    found = json.loads(pithtrain("inspect", run.checkpoints / name, "--json", "--verify", cwd=tmp_path).stdout)
    assert (found["newest"], found["problems"], len(found["skipped"])) == (None, None, 1)


def test_a_run_that_saved_nothing_ends_with_code_1(tmp_path: Path) -> None:
    make_run(tmp_path, FINISHES)
    done = pithtrain("inspect", "fake", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "there is no complete checkpoint\n")


def test_a_wrong_call_ends_with_code_2(run: RunDir, tmp_path: Path) -> None:
    unknown = pithtrain("inspect", "fale", cwd=tmp_path)
    assert unknown.returncode == 2 and "nearest: fake" in unknown.stderr
    marker = run.checkpoints / "step-00001000" / catalog.MARKER
    marker.write_text(marker.read_text().replace(f'"format": {catalog.FORMAT}', '"format": 1'))
    older = pithtrain("inspect", "fake", cwd=tmp_path)
    assert older.returncode == 2 and "format 1" in older.stderr


def test_without_verify_no_torch_is_imported(run: RunDir) -> None:
    code = (
        "import sys; from pithtrain.cli import app\n"
        f"try: app(['inspect', {str(run.path)!r}])\n"
        "except SystemExit as end: print(end.code, {'torch', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 set()\n"


# ---- reading all of it -----------------------------------------------------------------------------------------------


def save_job(place: Place, fields: dict[str, Any], folder: Path) -> None:
    from pithtrain.build import build
    from pithtrain.checkpoint import Position, Saver
    from pithtrain.train import train_step

    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        saver = Saver(folder, engine.zero, world, {"model": spec.model.model_dump(mode="json"), "tokenizer": None})
        saver.save(Position(1, 16, 256))
        saver.wait()


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of four ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    fields = make_spec(2, 1, 2, model={"num_hidden_layers": 3}).model_dump(mode="json")
    pool.run(4, save_job, fields, folder)
    return catalog.folder(folder, 1)


@pytest.mark.slow
def test_verify_finds_every_tensor_as_it_was_saved(saved: Path, tmp_path: Path) -> None:
    """Experts, which four ranks wrote in parts, have the norm of the whole."""
    done = pithtrain("inspect", saved, "--verify", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("100 %")
    assert json.loads(done.stdout)["problems"] == []
    again = CliRunner().invoke(app, ["inspect", str(saved), "--verify"])
    assert again.stdout.splitlines()[-1] == "verified: every tensor is the one that was saved"


def flip(path: Path) -> None:
    """One bit of the largest file."""
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def garble_metadata(path: Path) -> None:
    file = path / ".metadata"
    file.write_bytes(b"x" * file.stat().st_size)


def other_shape(path: Path) -> None:
    marker = path / catalog.MARKER
    content = json.loads(marker.read_text())
    content["tensors"]["exp_avg/lm_head.weight"]["shape"] = [32, 96]
    marker.write_text(json.dumps({**content, "sha256": catalog._sha256(content)}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "is not what was saved: its shape or its sum differs"),
        (garble_metadata, ".metadata cannot be read"),
        (other_shape, "exp_avg/lm_head.weight is not what was saved"),
    ],
)
def test_verify_names_what_is_not_as_it_was(saved: Path, tmp_path: Path, damage: Any, words: str) -> None:
    """Sizes agree, so without --verify it passes."""
    path = tmp_path / saved.name
    shutil.copytree(saved, path)
    damage(path)
    assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 0
    done = CliRunner().invoke(app, ["inspect", str(path), "--verify"])
    assert done.exit_code == 1
    assert words in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_papers_run(saved: Path, number: int) -> None:
    """Ours prints what is there; the other reads the same values with torch alone."""
    text = (Path(__file__).parent.parent / "docs/checkpoint-format.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    example = example.replace("runs/tiny/checkpoints/step-00000200", str(saved))
    check = "assert torch.equal(tensor, __import__('pithtrain.checkpoint').checkpoint.Reader(Path(path)).tensor(key))"
    code = example if number == 0 else f"from pathlib import Path\n{example}\n{check}\nprint('equal')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fields = make_spec(2, 1, 2).model.config
    shape = fields.num_experts, fields.hidden_size, fields.moe_intermediate_size
    want = ["1 {'pp': 2, 'dp': 1, 'cp': 1, 'ep': 2}", f"torch.float32 {shape}"]
    assert done.stdout.splitlines() == (want if number == 0 else ["equal"])
