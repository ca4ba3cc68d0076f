"""The benchmarks run and print numbers that fit each other; how large they are is no test's matter."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
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
    assert found["async_stall_of_save"] == pytest.approx(share, abs=1e-3) and share > 0
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


@pytest.mark.slow
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
            assert line.split()[-11:] == ["-"] * 10 + ["none"] and f"{row['tokens_per_second']:,.0f}" in line
    assert text.count("tokens/s") == 1 and torch.__version__ in text


@pytest.mark.slow
def test_throughput_of_several_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = sets(*ALONE[:1], "slurm.gpus_per_node=2", "training.global_batch_size=4", *ALONE[4:])
    losses: list[float] = []
    for flags, pairs in ([], "overlap"), (["--no-overlap"], "in turn"):
        command = [
            sys.executable,
            "benchmarks/throughput.py",
            "configs/tiny.yaml",
            *words,
            "--steps",
            "2",
            "--json",
            out,
        ]
        done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(out.read_text())["rows"]
        assert row["ranks"] == 2 and row["accumulation"] == 2 and row["tokens_per_second"] > 0
        assert row["pairs"] == pairs and f"  {pairs}  " in done.stdout
        losses.append(row["loss"])
    assert losses[0] == losses[1], "who runs when changes no number"


def test_a_figure_is_the_median_after_the_warm_up(
    throughput: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, played, step = tmp_path / "out.json", 0, throughput.train_step

    def counted(*arguments: Any) -> Any:
        nonlocal played
        played += 1
        return step(*arguments)

    def times(step: Callable[[], object], steps: int, world: Any) -> list[float]:
        assert (played, steps) == (throughput.WARM_UP, 3) and played > 1
        return [1.0, 9.0, 2.0]

    monkeypatch.setattr(throughput, "train_step", counted)
    monkeypatch.setattr(throughput, "timed", times)
    words = ["configs/tiny.yaml", *sets(*ALONE), "--steps", 3, "--json", out]
    assert called(throughput, monkeypatch, *words) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert row["step_ms"] == 2000 and row["step_ms_range"] == [1000, 9000]
    broken = torch.tensor(float("nan"))
    monkeypatch.setattr(throughput, "train_step", lambda *arguments: replace(step(*arguments), norm=broken))
    monkeypatch.setattr(throughput, "timed", lambda *_: [1.0])
    assert called(throughput, monkeypatch, *words) == 1
    [row] = json.loads(out.read_text())["rows"]
    assert "norm" in row["error"], "a step that trains nothing is no measurement"


def test_the_floor_counts_the_bytes_of_the_moments(throughput: ModuleType) -> None:
    config = Path("configs/qwen3-30b-a3b-6layer-1gpu.yaml")
    wide, narrow = (
        throughput.floor_ms(load(config, [f"optimizer.moments_dtype={kind}"])) for kind in ("float32", "bfloat16")
    )
    assert wide["optimizer"] / narrow["optimizer"] == pytest.approx(30 / 22)
    assert {**wide, "optimizer": 0} == {**narrow, "optimizer": 0}


def test_the_floor_multiplies_what_muon_does(throughput: ModuleType) -> None:
    """Six layers of 128 experts, each with three matrices of 768 and 2,048; one moment of them, two of the words."""
    muon = ["optimizer.type=muon"]
    floor = throughput.floor_ms(load(Path("configs/qwen3-30b-a3b-6layer-1gpu.yaml"), muon))["optimizer"] / 1e3
    sides = [(768, 2048)] * 3 * 128 + [(2048, 4096)] * 2 + [(512, 2048)] * 2 + [(128, 2048)]
    flops = 6 * sum(10 * (2 * m * m * n + m**3) for m, n in sides)
    layers = 6 * (sum(m * n for m, n in sides))
    rest = 2 * 151936 * 2048 + 6 * (2 * 2048 + 2 * 128) + 2048
    assert floor == pytest.approx(flops / throughput.DENSE + (22 * layers + 30 * rest) / throughput.COPY, rel=1e-9)


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
    events = [throughput.Event(name, True, start, length) for name, start, length in device]
    calls = [("cudaStreamSynchronize", 5), ("cudaLaunchKernel", 1)]
    host = [throughput.Event(name, False, 0, length) for name, length in calls]
    told = throughput.digest([*events, *host], 2)
    assert told["idle_percent"] == pytest.approx(20)
    assert told["kernels_per_step"] == round(3 / 2) and told["copies_per_step"] == round(1 / 2)
    assert told["syncs_per_step"] == 0.5 and told["attention_kernels_per_step"] == {"cudnn": round(1 / 2)}
    assert told["heaviest"][0] == {"kernel": "gemm", "ms_per_step": 40e-6, "per_step": 1}
    assert throughput.digest(events, 2)["syncs_per_step"] is None  # nothing of the host: not "no synchronisation"
    assert throughput.digest(host, 2) == {}


@pytest.mark.parametrize("copies", [True, False])
def test_what_part_of_communication_is_hidden(throughput: ModuleType, copies: bool) -> None:
    """Two pairs, 100..200 and 300..400; what lies outside of them does not count, nor copies of other streams. In pairs
    communication runs 110..150 and 340..400, kernels 90..130 and 350..360: hidden 20 + 10 of 100. With signals the
    compute stream also waits, 130..170 and 160..165; so 130..170, 340..350 and 360..400 are exposed."""
    name, lane = ("Memcpy PtoP", 7) if copies else ("ncclDevKernel_SendRecv(x)", 20)
    device = [
        *(("spin_kernel(long)", at, 10, 1) for at in (90, 200, 290, 400)),
        *((name, start, end - start, lane) for start, end in ((50, 60), (110, 150), (340, 420))),
        *(("gemm", start, end - start, 1) for start, end in ((90, 130), (120, 125), (350, 360), (500, 600))),
        ("Memcpy DtoD", 170, 20, 1),
    ]
    if copies:
        device += [("put_signal_kernel", 150, 2, lane), ("wait_signal_kernel", 130, 40, 1)]
        device += [("wait_signal_kernel", 160, 5, lane)]
    events = [throughput.Event(name, True, start, length, stream) for name, start, length, stream in device]
    [(share, exposed_ms)] = throughput.hidden(events, 1)
    assert share == pytest.approx(30)
    assert exposed_ms == pytest.approx(((40 if copies else 20) + 10 + 40) / 1e6)
    first, second = throughput.hidden(events, 2)
    assert (first[0], second[0]) == pytest.approx((50, 50 / 3))
    assert (first[1], second[1]) == pytest.approx(((40 if copies else 20) / 1e6, 50 / 1e6))
    assert throughput.hidden([event for event in events if event.stream != lane], 2) == []


def test_curves_that_part_are_told_and_drawn(
    throughput: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {"bf16": 1.0, "near": 1.004, "apart": 1.006}
    for name, factor in curves.items():
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": factor * (5 - step / 100)} for step in range(1, 101)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench, (base, near, apart) = importlib.import_module("fp8_parity"), (tmp_path / name for name in curves)
    assert called(bench, monkeypatch, base, near, "--svg", tmp_path / "out.svg") == 0
    assert "near: last 50 +0.400 %, furthest +0.400 %" in capsys.readouterr().out
    assert (tmp_path / "out.svg").read_text().count("<polyline") == 2
    assert called(bench, monkeypatch, base, near, apart) == 1


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
@pytest.mark.slow
def test_tiles_are_told_best_first(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels.kernels.WEIGHT_GRAD_TILES in kernels.CANDIDATES
    monkeypatch.setattr(kernels, "CANDIDATES", (kernels.kernels.WEIGHT_GRAD_TILES, kernels.Tiles(64, 32, 16, 4, 2)))
    found = kernels.tune(kernels.TINY[:1])
    assert [row["part"] for row in found] == ["gate_up"] * 2 + ["down"] * 2
    assert found[0]["ms"] <= found[1]["ms"] and found[2]["ms"] <= found[3]["ms"]
    assert capsys.readouterr().out.count("now ") == 3 + 1
    for name in ("COLUMNS", "WEIGHTS"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name)[::5])
    now = kernels.fp8_kernels.PRODUCT_TILES
    assert all(tiles in kernels.PRODUCTS[group] for group, tiles in now.items())
    monkeypatch.setattr(kernels, "PRODUCTS", {group: (tiles,) for group, tiles in now.items()})
    found = kernels.tune_eight_bits("fp8", kernels.TINY[:1])
    products = {f"{part} rowwise" for each in ("gate_up", "down") for part in (each, f"{each} dgrad")}
    assert {row["part"] for row in found} == {"glu", "glu_backward", "gate_up", "down", *products}
    assert capsys.readouterr().out.count("now ") == 4 + 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures here")
def test_the_kernel_bench_wants_a_gpu(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(kernels, monkeypatch) == 2
    assert "--check" in capsys.readouterr().err


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def test_the_error_of_8_bits_is_told_for_each_layer(
    throughput: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some percent of a layer's forward, input gradient and weight gradients; a direction within 1 %."""
    bench = importlib.import_module("fp8_error")
    words = ["configs/tiny.yaml", "--steps", 1, *(word for text in ALONE for word in ("--set", text))]
    monkeypatch.setattr(sys, "argv", ["fp8_error", *map(str, words)])
    bench.main()
    title, *lines = capsys.readouterr().out.splitlines()[3:]
    rows = [line.split() for line in lines]
    assert title.split()[0] == "layer" and [row[0] for row in rows] == ["0", "1"]
    for _, ahead, turned, back, weights, worst, _ in rows:
        assert all(0.01 < float(figure) < 0.3 for figure in (ahead, back, weights, worst))
        assert float(worst) >= float(weights) and 1e-5 < float(turned) < 1e-2


# ---- links -----------------------------------------------------------------------------------------------------------


def test_a_line_is_laid_through_the_times_of_messages(throughput: ModuleType) -> None:
    links = importlib.import_module("links")
    sizes = [2**n for n in range(14, 28, 2)]
    latency_s, rate = links.fit([(size, 20e-6 + size / 250e9) for size in sizes])
    assert latency_s == pytest.approx(20e-6) and rate == pytest.approx(250e9)
    latency_s, rate = links.fit(
        [(size, (20e-6 + size / 250e9) * (1.1 if n % 2 else 0.9)) for n, size in enumerate(sizes)]
    )
    assert latency_s == pytest.approx(20e-6, rel=0.2) and rate == pytest.approx(250e9, rel=0.2)
    assert links.fit([(10, 9e-9), (100, 1e-7)])[0] == 0
    assert links.fit([(10, 4e-6), (1000, 3e-6), (100_000, 2e-6)]) == (2e-6, 5e10), "a host that got less busy"


@pytest.mark.slow
def test_the_lines_of_the_link_bench_are_a_profile_s(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/links.py", "--ranks", "2", "--largest-mib", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "here.yaml").write_text(done.stdout)
    links = load(Path("configs/tiny.yaml"), [f"slurm.profile={tmp_path}/here.yaml"]).slurm.links
    assert links.all_to_all is not None and links.p2p is not None and links.p2p.gb_s > 0.01
    if not torch.cuda.is_available():
        assert links.copy_engine is None and "# copy_engine: not measured, cpu has no copy engines" in done.stdout


# ---- a ring ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_ring_bench_tells_bytes_and_times(tmp_path: Path) -> None:
    """GPT-OSS's 8 key heads of 64 wide keys and values in bf16 over 8 tokens a rank: one hop forward, one and two of
    gradients backward. A window of 128 keys reaches further than a chunk of 4: its gradients are sums in fp32."""
    command = [sys.executable, "benchmarks/ring.py", "--ranks", "2", "--tokens", "8", "--only", "gpt-oss"]
    done = subprocess.run([*command, "--json", tmp_path / "out"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out").read_text())
    assert [row["name"] for row in rows[:2]] == ["gpt-oss forward", "gpt-oss backward"] and len(rows) % 4 == 0
    hop = 8 * 8 * (64 + 64) * 2
    assert [row["bytes"] for row in rows] == [hop, 3 * hop] * (len(rows) // 4) + [hop, 5 * hop] * (len(rows) // 4)
    for row in rows:
        hidden = 1 - (row["with_ms"] - row["without_ms"]) / row["alone_ms"]
        assert row["hidden"] == pytest.approx(hidden) and row["alone_ms"] > 0
