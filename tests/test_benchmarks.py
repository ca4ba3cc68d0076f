"""The benchmarks run and print numbers that fit each other; how large they are is no test's matter."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pithtrain.models.contract import flops_per_token
from pithtrain.spec import load

ROOT = Path(__file__).parent.parent
ALONE = [
    *("parallelism.pipeline_parallel_size=1", "parallelism.expert_parallel_size=1", "slurm.gpus_per_node=1"),
    *("training.global_batch_size=2", "model.num_hidden_layers=2", "training.sequence_length=32"),
]


@pytest.mark.slow
def test_checkpoint_bench_measures_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/checkpoint.py", "--folder", tmp_path, "--sample-gib", "0.03", "--steps", "1"]
    sets = ["training.global_batch_size=2", "model.num_hidden_layers=2", "data.sources=[{path: none}]"]
    command += [word for text in [*sets, "data.tokenizer=null"] for word in ("--set", text)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    share = found["async_stall_s"] / found["save_s"]
    assert found["async_stall_of_save"] == pytest.approx(share, rel=0.05, abs=0.01) and share > 0
    for name in ("save", "load", "async_write"):
        assert found[f"{name}_gb_s"] == pytest.approx(found["bytes"] / found[f"{name}_s"] / 1e9, abs=2e-3)
    assert set(found["disk_write_gb_s"]) == set(found["disk_read_gb_s"]) == {"1", "4"}
    assert found["save_of_disk"] > 0 and found["load_of_disk"] > 0 and found["step_s"] > 0
    assert list(tmp_path.iterdir()) == []


# ---- throughput ------------------------------------------------------------------------------------------------------


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(ROOT)
    return importlib.import_module("throughput")


def called(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of the script with these arguments."""
    monkeypatch.setattr(sys, "argv", [bench.__name__, *map(str, words)])
    with pytest.raises(SystemExit) as left:
        bench.main()
    return int(left.value.code or 0)


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def test_throughput_prints_one_table_and_the_same_as_json(
    throughput: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["configs/tiny.yaml", "configs/tiny-gpt-oss.yaml", *sets(*ALONE), "--steps", 2, "--json", out]
    assert called(throughput, monkeypatch, *words, "--force-load-balance", "--profile") == 0
    told, text = json.loads(out.read_text()), capsys.readouterr().out
    assert set(told["machine"]) >= {"device", "torch", "triton", "cuda", "cudnn", "clocks"}
    assert [row["config"] for row in told["rows"]] == ["tiny", "tiny-gpt-oss"]
    assert told["set"] == [*ALONE, "moe.force_load_balance=true"]
    for row in told["rows"]:
        assert row["micro_batch"] == 1 and row["accumulation"] == 2 and row["routing"] == "forced"
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["step_ms"])
        spec = load(Path(f"configs/{row['config']}.yaml"), ALONE)
        flops = row["tokens_per_second"] * flops_per_token(spec.model.config, 32)
        assert row["tflops_per_device"] == pytest.approx(flops / 1e12)
        if not torch.cuda.is_available():
            assert row["mfu_percent"] is row["allocated_gib"] is row["floor_percent"] is None
            (line,) = (line for line in text.splitlines() if line.split()[:1] == [row["config"]])
            assert line.split()[-8:] == ["-"] * 8 and f"{row['tokens_per_second']:,.0f}" in line
    assert text.count("tokens/s") == 1 and torch.__version__ in text


@pytest.mark.slow
def test_throughput_of_several_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = sets(*ALONE[:1], "slurm.gpus_per_node=2", "training.global_batch_size=4", *ALONE[4:])
    command = [sys.executable, "benchmarks/throughput.py", "configs/tiny.yaml", *words, "--steps", "2", "--json", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ranks"] == 2 and row["accumulation"] == 2 and row["tokens_per_second"] > 0


def test_throughput_refuses_what_it_cannot_measure(
    throughput: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = "configs/tiny.yaml"
    for words in ([], [tiny, "--steps", 0], [tiny, *sets("training.no_such=1")], ["no-such.yaml"]):
        assert called(throughput, monkeypatch, *words) == 2
    assert "no_such" in capsys.readouterr().err

    def fail(*_: object) -> dict[str, Any]:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(throughput, "measure", fail)
    out = tmp_path / "out.json"
    assert called(throughput, monkeypatch, tiny, tiny, *sets(*ALONE), "--json", out) == 1
    assert [row["error"] for row in json.loads(out.read_text())["rows"]] == ["OutOfMemoryError: too large"] * 2
    assert "tiny: OutOfMemoryError: too large" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_the_floor_does_every_flop_of_the_model(throughput: ModuleType, name: str) -> None:
    (path,) = (ROOT / "configs").glob(f"{name}-*layer-1gpu.yaml")
    spec = load(path)
    floor, arch = throughput.floor_ms(spec), spec.model.architecture
    forward, backward = throughput.ATTENTION[arch]
    flops = (floor["dense"] + floor["head"]) * throughput.DENSE + floor["grouped"] * throughput.GROUPED[arch]
    flops += 3 * floor["attention"] / (1 / forward + 2.5 / backward)
    assert flops / 1e3 == pytest.approx(8 * 4096 * flops_per_token(spec.model.config, 4096))
    if name == "qwen3-30b-a3b":
        assert sum(floor.values()) == pytest.approx(283, abs=2)


def test_what_is_read_from_a_trace(throughput: ModuleType) -> None:
    """Two steps over 100 ns, 80 of them busy: kernels that overlap count once."""
    device = [
        ("gemm", 0, 40),
        ("gemm", 20, 40),
        ("cudnn_fprop", 60, 10),
        ("Memset (Device)", 90, 10),
    ]
    events = [(name, True, start, length) for name, start, length in device]
    host = [("cudaStreamSynchronize", False, 0, 5), ("cudaLaunchKernel", False, 0, 1)]
    told = throughput.digest([*events, *host], 2)
    assert told["idle_percent"] == pytest.approx(20)
    assert told["kernels_per_step"] == round(3 / 2) and told["copies_per_step"] == round(1 / 2)
    assert told["syncs_per_step"] == 0.5 and told["attention_kernels_per_step"] == {"cudnn": round(1 / 2)}
    assert told["heaviest"][0] == {"kernel": "gemm", "ms_per_step": 40e-6, "per_step": 1}
    assert throughput.digest(events, 2)["syncs_per_step"] is None  # nothing of the host: not "no synchronisation"
    assert throughput.digest(host, 2) == {}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(throughput: ModuleType) -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("kernels")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_every_row_of_the_kernel_bench_compares_like_with_like(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(kernels, monkeypatch, "--check") == 0
    text = capsys.readouterr().out
    source = (ROOT / "src/pithtrain/ops/kernels.py").read_text()
    functions = [line.split("(")[0].removeprefix("def ") for line in source.splitlines() if line.startswith("def ")]
    for function in functions:
        assert function.startswith("_") or f"equal: {function.removeprefix('add_')}" in text, function
    monkeypatch.setattr(kernels.kernels, "glu", lambda da, *_: da[:, : da.shape[1] // 2])
    assert called(kernels, monkeypatch, "--check", "--only", "glu") == 1
    assert "DIFFERS: glu at tiny" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_tiles_are_told_best_first(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels.kernels.WEIGHT_GRAD_TILES in kernels.CANDIDATES
    monkeypatch.setattr(kernels, "CANDIDATES", (kernels.kernels.WEIGHT_GRAD_TILES, kernels.Tiles(64, 32, 16, 4, 2)))
    found = kernels.tune(kernels.TINY[:1])
    assert [row["part"] for row in found] == ["gate_up"] * 2 + ["down"] * 2
    assert found[0]["ms"] <= found[1]["ms"] and found[2]["ms"] <= found[3]["ms"]
    assert capsys.readouterr().out.count("now ") == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures here")
def test_the_kernel_bench_wants_a_gpu(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(kernels, monkeypatch) == 2
    assert "--check" in capsys.readouterr().err
