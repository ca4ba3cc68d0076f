"""Each skill is run as an agent would run it, on real runs of two processes whose engine is a few lines of text.

The package that is submitted is a copy of ours with that engine in it, put before ours on PYTHONPATH: a run's snapshot
is taken from what was imported.
"""

import csv
import gzip
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fake_run import (
    FINISHES,
    HEAD,
    TAIL,
    WAITS_FOR_STOP,
    WORLD,
    is_waiting,
    make_run,
    some_corpus,
    spec_file,
    start_workers,
    wait_for,
)
from pithtrain import jobs, rundir
from pithtrain.rundir import RunDir
from test_submit import FAILS_ON_ONE

ROOT = Path(__file__).parent.parent
SUBMIT = "submit-and-monitor/scripts/submit_and_monitor.py"
DIAGNOSE = "diagnose-failed-run/scripts/diagnose.py"
CONVERT = "convert-checkpoint/scripts/convert_checkpoint.py"
ADD_MODEL = "add-model/scripts/check_model.py"
CAPTURE = "capture-profile/scripts/capture_profile.py"
REPORT = "report-heavy-kernels/scripts/report_heavy_kernels.py"
VALIDATE = "validate-correctness/scripts/validate_correctness.py"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
ONE_LESS = '**{key: why for key, why in NO_EFFECT.items() if key != "use_cache"},'


def with_engine(folder: Path, train: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which `import pithtrain` finds a copy whose engine is the source text `train`."""
    package = folder / "with-engine" / "pithtrain"
    shutil.copytree(ROOT / "src" / "pithtrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "world.py").write_text(WORLD)
    (package / "train.py").write_text(HEAD + train + TAIL)
    return {**base, "PYTHONPATH": str(package.parent)}


def skill(
    script: str, *arguments: str | Path, env: Mapping[str, str] | None = None, under: str | Path = "skills"
) -> list[str]:
    """Run a skill's script; its lines. The last one is PASS or FAIL, and the exit code says the same."""
    command = [str(ROOT / under / script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    word = lines[-1].split("  ")[0]
    assert (word, done.returncode) in (("PASS", 0), ("FAIL", 1)), (lines, done.stderr)
    assert not done.stderr, done.stderr
    return lines


def only_run(folder: Path) -> RunDir:
    [path] = (folder / "runs").iterdir()
    return RunDir(path)


# ---- submit-and-monitor ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_taken_from_its_config_to_its_end(tmp_path: Path) -> None:
    """As an agent finds it, through the link in .claude; --name and --set reach the run."""
    env = with_engine(tmp_path, FINISHES)
    options = ["--name", "mine", "--set", "training.max_steps=6"]
    lines = skill(SUBMIT, spec_file(tmp_path), *options, env=env, under=".claude/skills")
    run = only_run(tmp_path)
    assert lines[-1] == "PASS  done at step 6 of 6, loss 2.0000, attempt 1"
    assert run.name == "mine"
    assert any(line.startswith("parameters") for line in lines), "the plan"
    assert f"run directory  {run.path}" in lines
    assert skill(DIAGNOSE, run.path, env=env)[-1] == "PASS  done at step 6 of 6, attempt 1"


@pytest.mark.slow
def test_a_failed_run_ends_in_fail_and_the_other_skill_names_its_cause(tmp_path: Path) -> None:
    env = with_engine(tmp_path, FAILS_ON_ONE)
    lines = skill(SUBMIT, spec_file(tmp_path), env=env)
    run = only_run(tmp_path)
    assert lines[-1].startswith("FAIL  failed")
    assert "rank 1: ValueError: the cause" in lines[-1]
    # the command that the one skill ends with is the other
    script, path = lines[-1].split("next: ")[1].split()
    assert path == str(run.path)
    lines = skill(os.path.relpath(script, ROOT / "skills"), path, env=env)
    assert lines[-1].startswith("FAIL  failed at step ")
    assert "cause     rank 1: ValueError: the cause" in lines
    assert f"log       {run.log(1, 1)}" in lines
    assert f"next      pithtrain resume {run.path}" in lines
    assert sum(line.startswith("  1  on ") for line in lines) == 1, "one line for the one attempt"


def test_a_wrong_spec_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    lines = skill(SUBMIT, spec_file(tmp_path), "--set", "training.max_steps=0")
    assert lines[-1].startswith("FAIL  not started: `pithtrain validate` ended with 2")
    assert any("training.max_steps = 0" in line for line in lines)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_directory_that_exists_is_refused(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    lines = skill(SUBMIT, tmp_path / "fake.yaml")
    assert lines[-1].startswith("FAIL  not started: `pithtrain submit` ended with 2")
    assert str(run.path) in lines[-1]


@pytest.mark.slow
def test_a_run_that_outlasts_the_wait_goes_on(tmp_path: Path) -> None:
    """Then it is watched, stopped and diagnosed; nothing of it is lost."""
    env = with_engine(tmp_path, WAITS_FOR_STOP)
    lines = skill(SUBMIT, spec_file(tmp_path), "--wait", "0", env=env)
    run = only_run(tmp_path)
    assert lines[-1].startswith("FAIL  running")
    assert f"pithtrain status {run.path} --watch" in lines[-1]
    wait_for(lambda: is_waiting(run, [0, 1]))
    assert skill(DIAGNOSE, run.path, env=env)[-1].startswith("PASS  running")

    # a heartbeat that is far beyond its limit, and nobody left who acts on it
    beat = {"phase": "step", "step": 1, "time": time.time() - 5000, "attempt": 1}
    rundir.write_atomic(run.heartbeat, json.dumps(beat))
    last = skill(DIAGNOSE, run.path, env=env)[-1]
    assert last.startswith("FAIL  running, and silent for 50")
    assert f"pithtrain stacks {run.path}" in last

    jobs.cancel(run)
    wait_for(lambda: not jobs.state(run).alive)
    lines = skill(DIAGNOSE, run.path, env=env)
    assert lines[-1] == "PASS  stopped at step 1 of 4, attempt 1"
    assert f"next      pithtrain resume {run.path}" in lines


@pytest.mark.slow
def test_a_run_on_a_real_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    env = with_engine(tmp_path, FINISHES, slurm)
    two_nodes = [word for pair in ("nodes=2", "gpus_per_node=1", "mem=1G", "time=5", "signal_delay_s=60")
                 for word in ("--set", f"slurm.{pair}")]  # fmt: skip
    lines = skill(SUBMIT, spec_file(tmp_path), *two_nodes, env=env)
    assert lines[-1] == "PASS  done at step 4 of 4, loss 4.0000, attempt 1"
    run = only_run(tmp_path)
    assert any("Slurm job" in line for line in lines)
    assert skill(DIAGNOSE, run.path, env=env)[-1] == "PASS  done at step 4 of 4, attempt 1"


# ---- diagnose-failed-run ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_slurm(tmp_path: Path) -> dict[str, str]:
    """An environment without Slurm's commands, as on the machine to which a run directory was copied."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "python3").symlink_to(Path(sys.executable).resolve())
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return clean | {"PATH": str(binaries)}


def slurm_run(folder: Path, **attempt: object) -> RunDir:
    """A run of a Slurm job that this machine cannot ask for, with one attempt."""
    run, _ = make_run(folder, FINISHES)
    assert rundir.claim_attempt(run) == 1
    rundir.record_job(run, 1, job_id="7", launcher="slurm", host="login", time=time.time(), token="t-1", first=1)
    rundir.record_attempt(run, 1, launcher="slurm", job_id="7", nodes="n[0-1]", start=time.time() - 60, **attempt)
    return run


def error(run: RunDir, name: str, **fields: object) -> None:
    report = {"time": 1.0, "rank": 0, "host": "n1", "type": "ValueError", "message": "planted", "secondary": False}
    report |= {"exit_code": 1, "retry": True, "traceback": ""}
    run.errors(1).mkdir(parents=True, exist_ok=True)
    (run.errors(1) / f"{name}.json").write_text(json.dumps(report | fields))


ENDED = {"end": 1.0, "ended": "failed", "requeued": False, "first_step": 1, "last_step": 3}


@pytest.mark.parametrize(
    ("name", "fields", "advice"),
    [
        ("node-n1", {"rank": None, "type": "Preflight", "message": "node n1: 3 of 4 GPUs answer"}, "--exclude n1"),
        ("rank-0", {"secondary": True, "message": "Connection closed by peer"}, ""),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (
                    "rank-3",
                    {"rank": 3, "type": "Stalled", "message": "on n1 the phase step has lasted"},
                    "--exclude n1",
                ),
                ("rank-0", {"type": "NotFiniteError", "message": "the loss was NaN"}, "--set optimizer.lr=0.0005"),
                ("rank-0", {"type": "LossStoodOut", "message": "it stood out"}, "--set guards.loss_spike_sigma=12"),
                ("rank-0", {"exit_code": 2, "retry": False, "message": "data/x: there is no corpus"}, "--set A.B=C"),
                ("node-n0", {"rank": None, "message": "node n0: runs/x has 0.1 GiB left"}, "df -h"),
                ("rank-0", {"retry": False}, "--err"),
            ]
        ),
    ],
)
def test_the_next_command_follows_from_the_cause(
    name: str, fields: dict[str, object], advice: str, tmp_path: Path, no_slurm: dict[str, str]
) -> None:
    run = slurm_run(tmp_path, **ENDED)
    error(run, name, **fields)
    lines = skill(DIAGNOSE, run.path, env=no_slurm)
    assert lines[-1].startswith("FAIL  failed")
    [command] = [line for line in lines if line.startswith("next")]
    assert str(run.path) in command
    assert advice in command
    if not advice:
        assert command.endswith(f"pithtrain resume {run.path}")
    if not fields.get("secondary"):
        assert str(fields.get("message", "planted")) in lines[-1]


def test_without_slurm_a_fresh_heartbeat_says_that_it_runs(tmp_path: Path, no_slurm: dict[str, str]) -> None:
    run = slurm_run(tmp_path, end=None)
    beat = {"phase": "step", "step": 3, "time": time.time(), "attempt": 1}
    rundir.write_atomic(run.heartbeat, json.dumps(beat))
    lines = skill(DIAGNOSE, run.path, env=no_slurm)
    assert lines[-1] == "PASS  running at step 3 of 4, attempt 1"
    assert any(line.startswith("Slurm cannot be asked") for line in lines)

    rundir.write_atomic(run.heartbeat, json.dumps(beat | {"time": time.time() - 5000}))
    lines = skill(DIAGNOSE, run.path, env=no_slurm)
    assert lines[-1].startswith("FAIL  lost at step 3 of 4")
    assert f"next      pithtrain resume {run.path}" in lines


@pytest.mark.parametrize(
    ("ended", "saved", "last"),
    [("stopped", 3, "PASS  stopped"), ("cancelled", 3, "PASS  cancelled"), ("cancelled", 2, "FAIL  cancelled")],
)
def test_a_run_that_scancel_ended_passes_where_no_step_is_lost(
    ended: str, saved: int, last: str, tmp_path: Path, no_slurm: dict[str, str]
) -> None:
    run = slurm_run(tmp_path, end=1.0, ended=ended, why="cancelled (scancel)")
    run.metrics.write_text('{"step": 3, "loss": 1.0, "attempt": 1}\n')
    (run.checkpoints / f"step-{saved:08d}").mkdir(parents=True)
    if ended == "stopped":
        rundir.mark(run.requeue, 1, step=saved, reason="SIGTERM")
    lines = skill(DIAGNOSE, run.path, env=no_slurm)
    assert lines[-1].startswith(f"{last} at step 3 of 4")
    assert f"next      pithtrain resume {run.path}" in lines


@pytest.mark.slow
def test_a_rank_that_was_killed_is_the_cause(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, WAITS_FOR_STOP)
    assert rundir.claim_attempt(run) == 1
    tasks = start_workers(run, [0, 1])
    wait_for(lambda: is_waiting(run, [0, 1]))
    rundir.record_job(run, 1, job_id=str(tasks[0].pid), launcher="train", host=os.uname().nodename, time=time.time())
    tasks[1].kill()
    for task in tasks:
        task.communicate(timeout=60)
    assert "rank 1 was killed" in skill(DIAGNOSE, run.path)[-1]


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["one", "two"]])
def test_what_is_no_run_directory_is_said(arguments: list[str], tmp_path: Path) -> None:
    lines = skill(DIAGNOSE, *(tmp_path / word for word in arguments))
    assert len(lines) == 1
    assert "RUN_DIRECTORY" in lines[0] or "is not a run directory" in lines[0]


# ---- convert-checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_is_exported_and_proven(tmp_path: Path) -> None:
    from harness import make_spec
    from test_convert import native

    spec = make_spec(model={"tie_word_embeddings": True})
    checkpoint = native(tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000000", spec, run="tiny")
    run, hf = checkpoint.parents[1], tmp_path / "hf"
    last = skill(CONVERT, run, hf)[-1]
    assert last.startswith(f"PASS  {hf}: step 0, "), last
    assert re.search(r"\d+ parameters bit for bit; transformers [\d.]+ loads it$", last)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "runs"], "nothing is left beside it"
    lines = skill(CONVERT, checkpoint, tmp_path / "exact", "--dtype", "float32")
    assert lines[-1].startswith("PASS")
    assert "note: no tokenizer is written: the checkpoint names none" in lines

    assert "exists already" in skill(CONVERT, run, hf)[-1]
    assert skill(CONVERT, tmp_path, tmp_path / "out")[-1].startswith("FAIL  not exported: ")
    assert skill(CONVERT, "nowhere", tmp_path / "out")[-1].startswith("FAIL  not exported: ")


@pytest.mark.slow
def test_an_export_that_is_not_the_checkpoint_fails(tmp_path: Path) -> None:
    """Each of the proofs, with an engine whose export is wrong in a way that the ones before do not see."""
    from harness import make_spec
    from test_convert import native

    checkpoint = native(tmp_path / "step-00000000", make_spec(), run="tiny")
    for number, (old, new, said) in enumerate(
        (
            ("to(one.dtype)", "to(one.dtype).mul(0.5)", "FAIL  other values came back: model.embed_tokens.weight"),
            ('**model.config.hf_config(), "dtype"', '**model.config.hf_config(), "num_hidden_layers": 5, "dtype"', ""),
            ('"dtype": word,', '"dtype": "float33",', "FAIL  transformers cannot load it: "),
        )
    ):
        folder = tmp_path / f"with-{number}"
        package = folder / "pithtrain"
        shutil.copytree(ROOT / "src" / "pithtrain", package, ignore=shutil.ignore_patterns("__pycache__"))
        text = (package / "convert.py").read_text()
        assert text.count(old) == 1
        (package / "convert.py").write_text(text.replace(old, new))
        env = {**os.environ, "PYTHONPATH": str(folder)}
        assert skill(CONVERT, checkpoint, folder / "hf", env=env)[-1].startswith(said or "FAIL  `pithtrain import-hf`")
        assert not (folder / "hf.check").exists()


# ---- add-model -------------------------------------------------------------------------------------------------------


def model_folder(tmp_path: Path, change: Mapping[str, str]) -> Path:
    """The Qwen3-MoE folder outside the package, under another name; `change`s of its files."""
    folder = tmp_path / "copied"
    shutil.copytree(ROOT / "src/pithtrain/models/qwen3_moe", folder, ignore=shutil.ignore_patterns("__pycache__"))
    texts = {file: file.read_text().replace("pithtrain.models.qwen3_moe.", "copied.") for file in folder.iterdir()}
    for old in change:
        assert any(old in text for text in texts.values()), f"{old} stands nowhere: this plants nothing"
    for file, text in texts.items():
        for old, new in change.items():
            text = text.replace(old, new)
        file.write_text(text)
    return folder


@pytest.mark.slow
def test_a_model_outside_the_package_equals_transformers(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "vocab_size": 96, "sliding_window": 4096, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = model_folder(tmp_path, {})
    lines = skill(ADD_MODEL, folder, env=ONE_THREAD)
    assert re.match(
        r"PASS  \S+/copied equals transformers [\d.]+ in 7 configs, all within \d\.\de-0[67] in fp32", lines[-1]
    )
    assert "field   ignored: use_cache: training keeps no key/value cache" in lines
    expert = "model.layers.N.mlp.experts"
    assert f"tensor  {expert}.N.up_proj.weight [16, 32] x 24 -> {expert}.gate_up_proj  (tiny)" in lines
    assert sum(line.startswith("numbers ") for line in lines) == 7
    # a published config.json that lacks what the forward reads
    lines = skill(ADD_MODEL, folder, "--config", tmp_path / "config.json", env=ONE_THREAD)
    assert lines[-1].startswith("FAIL  ") and "model.hidden_size" in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"rotate_halves(": "rotate_pairs(", "rotate_halves": "rotate_halves, rotate_pairs"}, r"tiny differs by"),
        ({"**NO_EFFECT,": ONE_LESS}, r"field use_cache is neither read"),
        ({"config.norm_topk_prob": "True"}, r"biases, no renormalisation differs by"),
        ({"norm_topk_prob: false, ": ""}, r"field norm_topk_prob is True in every config"),
    ],
    ids=["rotary layout", "forgotten field", "constant", "untried field"],
)
def test_a_planted_fault_is_named(tmp_path: Path, change: Mapping[str, str], first: str) -> None:
    lines = skill(ADD_MODEL, model_folder(tmp_path, change), env=ONE_THREAD)
    assert re.search(rf"^FAIL  \S+/copied: \d+ differences; the first: {first}", lines[-1])


@pytest.mark.slow
def test_a_draft_lists_what_there_is(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = skill(ADD_MODEL, "--draft", tmp_path / "config.json", env=ONE_THREAD)
    assert lines[-1].startswith("PASS  qwen3_moe: ")
    assert "field   num_hidden_layers = 2" in lines
    assert any(re.match(r"field   rms_norm_eps = 1e-06  \(a default of the class", line) for line in lines)
    assert "tensor  model.layers.N.self_attn.q_norm.weight [128] x 2" in lines
    assert "buffers that no file holds: inv_freq, original_inv_freq" in lines
    assert skill(ADD_MODEL, "--draft", "llama_of_dreams", env=ONE_THREAD)[-1].startswith("FAIL  no draft: ")


# ---- capture-profile, report-heavy-kernels ---------------------------------------------------------------------------


def real_config(tmp_path: Path) -> Path:
    """A config of one rank that trains on a real corpus, in seconds."""
    import numpy as np

    from test_data import make

    documents = [np.random.default_rng(5).integers(10, 512, 400).tolist() for _ in range(4)]
    tokens = make(tmp_path / "corpus", documents, 512) / "tokens"
    config = spec_file(tmp_path, ranks=1)
    text = config.read_text().replace(str(some_corpus()), str(tokens))
    config.write_text(text.replace("global_batch_size: 8", "global_batch_size: 2"))
    return config


def test_every_kernel_of_ours_is_known_as_such() -> None:
    kernels = [
        importlib.import_module(f"pithtrain.ops.{name}") for name in ("kernels", "permute_kernels", "fp8_kernels")
    ]
    launched = {
        name for module in kernels for name in re.findall(r"^ +(_\w+)\[", Path(module.__file__).read_text(), re.M)
    }
    path = (ROOT / "skills" / REPORT).with_suffix("")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        report = importlib.import_module(path.name)
    assert {report.kind(name) for name in launched} == {"our kernels"}


@pytest.mark.slow
def test_a_profile_is_captured_and_its_operators_are_listed(tmp_path: Path) -> None:
    config, run = real_config(tmp_path), tmp_path / "captured"
    arguments = config, "--first", "2", "--run-dir", run, "--set", "data.repeat=true"
    lines = skill(CAPTURE, *arguments, env=ONE_THREAD)
    assert lines[-1] == f"PASS  {run}/profiles: steps 2-3 of ranks 0 on cpu"
    assert not (run / "checkpoints").exists()
    [following] = [line for line in lines if line.startswith("next")]
    script, trace = following.split()[1:]
    lines = skill(os.path.relpath(script, ROOT / "skills"), trace)
    assert re.match(r"PASS  \d+ operators of \d+ names, [\d.]+ ms, idle [\d.]+%; most of it ", lines[-1])
    assert "steps   [2, 3]" in lines
    with Path(f"{trace}.csv").open() as file:
        rows = list(csv.DictReader(file))
    kinds = {row["name"]: row["kind"] for row in rows}
    assert kinds["aten::mm"] == "dense GEMM" and kinds["aten::mul"] == "pointwise"
    assert {"copies", "dense GEMM", "pointwise"} <= set(kinds.values())  # of which attention is made on a CPU
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, abs=1e-3)

    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(Path(trace).read_bytes()[:-1000])
    assert skill(REPORT, cut)[-1].startswith(f"FAIL  {cut} cannot be read, or is cut: ")
    assert skill(CAPTURE, *arguments, env=ONE_THREAD)[-1].startswith("FAIL  not captured: `pithtrain")


@pytest.mark.slow
def test_a_trace_without_its_steps_is_no_profile(tmp_path: Path) -> None:
    package = tmp_path / "planted" / "pithtrain"
    shutil.copytree(ROOT / "src" / "pithtrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "profiling.py").read_text()
    assert text.count('record_function(f"step {step}")') == 1
    (package / "profiling.py").write_text(text.replace('record_function(f"step {step}")', 'record_function("step")'))
    env = {**ONE_THREAD, "PYTHONPATH": str(package.parent)}
    arguments = "--first", "1", "--steps", "1", "--run-dir", tmp_path / "run", "--set", "data.repeat=true"
    last = skill(CAPTURE, real_config(tmp_path), *arguments, env=env)[-1]
    assert last.startswith("FAIL  ") and last.endswith("holds the steps [], and [1] were asked for")


def trace_file(path: Path, spans: list[tuple[str, str, float, float]], gpus: int = 1) -> Path:
    """A trace as torch.profiler writes it: category, name, begin and length in microseconds."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {}}]
    events += [dict(zip(("cat", "name", "ts", "dur"), one, strict=True), ph="X", pid=0, tid=7) for one in spans]
    with gzip.open(path, "wt") as file:
        json.dump({"deviceProperties": [{"name": "H200"}] * gpus, "traceEvents": events}, file)
    return path


def test_kernels_are_sorted_into_kinds_and_the_gaps_between_them_counted(tmp_path: Path) -> None:
    kernels = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob": "attention",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<": "grouped GEMM",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "dense GEMM",
        "_ordered_sum": "our kernels",
        "triton_poi_fused__to_copy_add_mul_0": "pointwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "pointwise",
        "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>": "copies",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
        "void at::native::radixSortKVInPlace<2, -1, 128, 32>": "other",
    }
    spans = [("kernel", name, 200.0 * place, 100.0) for place, name in enumerate(kernels)]
    spans += [("kernel", "_ordered_sum", 50.0, 50.0), ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1700.0, 100.0)]
    spans += [("cpu_op", "aten::mm", 0.0, 9000.0), ("user_annotation", "step 4", 0.0, 9000.0)]
    trace = trace_file(tmp_path / "rank-0.json.gz", spans)
    lines = skill(REPORT, trace, "--csv", tmp_path / "out.csv")
    # 9 kernels with gaps as long as they are, a copy behind the last; one that ran beside another hides nothing
    assert lines[-1] == "PASS  11 kernels of 10 names, 1.8 ms, idle 44.4%; most of it pointwise, 19.0%"
    with (tmp_path / "out.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert {name: rows[name]["kind"] for name in kernels} == kernels
    own = rows["_ordered_sum"]
    assert (own["calls"], own["total_ms"], own["share"], own["mean_us"]) == ("2", "0.150000", "0.142857", "75.000")


@pytest.mark.parametrize(
    ("spans", "gpus", "said"),
    [
        ([("cpu_op", "aten::mm", 0.0, 1.0)], 1, "was taken beside H200 and holds no kernel"),
        ([("user_annotation", "step 4", 0.0, 1.0)], 0, "holds neither kernels nor operators"),
    ],
)
def test_a_trace_without_what_is_asked_for_fails(
    spans: list[tuple[str, str, float, float]], gpus: int, said: str, tmp_path: Path
) -> None:
    last = skill(REPORT, trace_file(tmp_path / "rank-0.json.gz", spans, gpus))[-1]
    assert last.startswith("FAIL  ") and said in last
    assert skill(REPORT, tmp_path / "nowhere.json")[-1].startswith("FAIL  ")


def test_an_operators_time_is_its_own(tmp_path: Path) -> None:
    spans = [("cpu_op", "aten::linear", 0.0, 10.0), ("cpu_op", "aten::mm", 2.0, 4.0), ("cpu_op", "aten::add", 6.0, 4.0)]
    trace = trace_file(tmp_path / "rank-0.json.gz", spans, gpus=0)
    assert skill(REPORT, trace)[-1].startswith("PASS  3 operators of 3 names, 0.0 ms, idle 0.0%")
    with Path(f"{trace}.csv").open() as file:
        assert [row["mean_us"] for row in csv.DictReader(file)] == ["4.000", "2.000", "4.000"]


# ---- validate-correctness --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tree_is_held_against_a_revision(tmp_path: Path) -> None:
    """In a checkout of its own: the same code, then a planted change, which a tolerance lets pass."""
    checkout = tmp_path / "checkout"
    for folder in ("src/pithtrain", "skills"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        done = subprocess.run(["git", *who, *arguments], cwd=checkout, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "base")
    (checkout / ".venv").symlink_to(sys.prefix)  # which the skill looks for beside itself
    config = real_config(tmp_path)
    options = "--config", config, "--steps", "2", "--set", "data.repeat=true"
    given: dict[str, Any] = {"env": ONE_THREAD, "under": checkout / "skills"}
    lines = skill(VALIDATE, *options, **given)
    assert re.fullmatch(r"PASS  2 steps as HEAD \([0-9a-f]+\), bit for bit", lines[-1])
    assert "note: src/pithtrain is the same in both" in lines

    train = checkout / "src/pithtrain/train.py"
    text = train.read_text()
    assert text.count("        return peak\n") == 1  # of a constant rate
    train.write_text(text.replace("        return peak\n", "        return 1.5 * peak\n"))
    lines = skill(VALIDATE, "HEAD", *options, **given)
    assert re.match(r"FAIL  differs from HEAD \([0-9a-f]+\) from loss of step 2 on, most by \S+ in ", lines[-1])
    assert skill(VALIDATE, *options, "--rtol", "0.5", **given)[-1].startswith("PASS  2 steps as HEAD")

    last = skill(VALIDATE, *options, "--set", "moe.nothing=1", **given)[-1]
    assert last.startswith("FAIL  not compared, base-run: `pithtrain train` ended with 2")
    assert skill(VALIDATE, "nowhere", **given)[-1].startswith("FAIL  not compared: `git rev-parse")
    assert len(git("worktree", "list").splitlines()) == 1, "no worktree is left"
