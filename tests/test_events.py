"""What a run says: stable keys, no step twice, and a W&B that can fail in any way without stopping training."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_run import FINISHES, make_run
from pithtrain import rundir
from pithtrain.events import Events, Metrics, console_line, layer_load

KEYS = [
    "step",
    "tokens_seen",
    "loss",
    "aux_loss",
    "router_z_loss",
    "head_z_loss",
    "lr",
    "grad_norm",
    "step_time_s",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "memory_peak_gib",
    "data_wait_s",
    "checkpoint_stall_s",
    "validation_s",
    "expert_load_max_over_mean",
    "expert_load_entropy",
    "dead_experts",
    "force_load_balance",
    "attempt",
]


def metrics(step: int, **fields: Any) -> Metrics:
    row: dict[str, Any] = dict.fromkeys(KEYS)
    row |= {"step": step, "tokens_seen": 16 * step, "loss": 1.5, "lr": 0.1, "grad_norm": 0.5, "attempt": 1}
    return Metrics(**(row | fields))


def test_the_keys_of_a_line_are_those_of_the_contract_in_order() -> None:
    row = metrics(1).flat()
    assert list(row) == KEYS
    assert row["mfu"] is None
    assert [field.name for field in dataclasses.fields(Metrics)] == [*KEYS, "expert_load"]


def test_a_number_that_is_not_finite_is_null_since_json_has_none() -> None:
    row = metrics(1, loss=float("nan"), grad_norm=float("inf")).flat()
    assert row["loss"] is row["grad_norm"] is None


def test_the_console_line_shows_what_is_known() -> None:
    line = metrics(20, aux_loss=1.021, tokens_per_second=9120.4, tflops_per_device=0.021, memory_peak_gib=0.9)
    expected = (
        "step 20/300 | loss 1.5000 | aux 1.021 | lr 1.00e-01 | grad 0.500 | 9,120 tok/s | 0.021 TFLOP/s | 0.9 GiB"
    )
    assert console_line(line, 300) == expected
    assert console_line(metrics(1), 300) == "step 1/300 | loss 1.5000 | lr 1.00e-01 | grad 0.500"
    assert console_line(metrics(1, force_load_balance=True), 300).endswith(" | grad 0.500 | forced routing")


def test_the_load_of_a_layer() -> None:
    def figures(*counts: int) -> tuple[float, float, int]:
        load = layer_load(3, counts)
        assert load["layer"] == 3 and load["counts"] == counts
        return load["max_over_mean"], load["entropy"], load["dead"]

    assert figures(5, 5, 5, 5) == (1.0, 1.0, 0)
    assert figures(0, 8, 0, 0) == (4.0, 0.0, 3)
    assert figures(4, 4, 0, 0) == (2.0, 0.5, 2)
    assert figures(0, 0, 0) == (0.0, 0.0, 3)
    assert figures(7) == (1.0, 1.0, 0)
    uneven = -(0.7 * math.log(0.1) + 0.3 * math.log(0.3)) / math.log(8)
    assert figures(*[1] * 7, 3)[1] == pytest.approx(uneven)
    assert all(0 <= figures(*[n] * e)[1] <= 1 for n in range(1, 50) for e in range(2, 50))


def test_case_150_no_step_is_there_twice_after_two_resumes(tmp_path: Path) -> None:
    """Attempts that end beyond their last checkpoint, one of them inside a line; floats stay as they were."""
    run, spec = make_run(tmp_path, FINISHES)
    for attempt, (start, end) in enumerate(((0, 7), (5, 9), (8, 12)), start=1):
        events = Events(run, spec, attempt)
        events.rewind(start)
        for step in range(start + 1, end + 1):
            events.metrics(metrics(step, attempt=attempt, loss=1 / 3))
        events.close(exit_code=1)
        with run.metrics.open("a") as file:
            file.write('{"step": 99, "lo')
    rows = rundir.read_lines(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["attempt"] for row in rows] == [1] * 5 + [2] * 3 + [3] * 4
    assert {row["loss"] for row in rows} == {1 / 3}
    assert [row["event"] for row in rundir.read_lines(run.events)] == ["rewound", "rewound"]


def test_an_event_is_a_line_with_time_and_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    run.events.write_bytes(b'{"event": "torn')
    events = Events(run, spec, 3)
    events.event("saved", step=100)
    events.close(exit_code=0)
    (row,) = rundir.read_lines(run.events)
    assert row.pop("time") > 0
    assert row == {"event": "saved", "attempt": 3, "step": 100}
    assert capsys.readouterr().out == "saved: step 100\n"


# ---- W&B, for real, each in a process of its own since it keeps threads and a service -------------------------------

WRITE = """
    import sys
    from pathlib import Path
    from pithtrain import events, rundir
    from pithtrain.spec import load
    sys.path.insert(0, {tests!r})
    from test_events import metrics

    events.WANDB_TIMEOUT_S = 5
    run = rundir.RunDir(Path({path!r}))
    spec = load(run.spec_yaml, ["logging.wandb.mode={mode}"])
    opened = events.Events(run, spec, {attempt})
    opened.rewind({start})
    for step in range({start} + 1, {start} + 4):
        opened.metrics(metrics(step))
    opened.close(**{end})
    print("training went on")
"""


def write_with_wandb(
    run: rundir.RunDir, mode: str, attempt: int = 1, start: int = 0, preempted: bool = False, **env: str
) -> str:
    end = {"exit_code": int(preempted), "preempted": preempted}
    tests = str(Path(__file__).parent)
    code = WRITE.format(tests=tests, path=str(run.path), mode=mode, attempt=attempt, start=start, end=end)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean | {"HOME": str(run.path)} | env,  # no login of whoever runs the tests
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "training went on" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_case_149_offline_wandb_is_one_run_over_all_attempts(tmp_path: Path) -> None:
    """The first is preempted. One id, `train/step` as the declared axis, every logged value in the file."""
    run, _ = make_run(tmp_path, FINISHES)
    for attempt, start in ((1, 0), (2, 2)):
        write_with_wandb(run, "offline", attempt, start, preempted=attempt == 1)
    identity = run.wandb_id.read_text().strip()
    files = sorted((run.path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2
    assert len(list((run.path / "wandb").glob("offline-run-*"))) == 2
    seen = [read_wandb(file) for file in files]
    assert [history["train/step"] for history in seen[0]["history"]] == [1, 2, 3]
    assert [history["train/step"] for history in seen[1]["history"]] == [3, 4, 5]
    assert seen[0]["history"][0]["train/loss"] == 1.5
    assert "train/step" in seen[0]["axes"]
    assert {each["id"] for each in seen} == {identity}
    assert [(each["preempting"], each["exit"]) for each in seen] == [(1, 1), (0, 0)], "it goes on, then it is done"


def read_wandb(path: Path) -> dict[str, Any]:
    """The id, the logged rows and the declared axes of an offline file.

    A file is a 7 byte header, then blocks of 32 KiB of chunks (CRC, length, kind; kinds 1 and 4 end a record).
    """
    code = f"""
        import json, struct
        from wandb.proto import wandb_internal_pb2 as pb
        data = open({str(path)!r}, "rb").read()
        seen = {{"history": [], "axes": [], "id": None, "preempting": 0, "exit": None}}
        at, record = 7, b""
        while at < len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind not in (1, 4):
                continue
            read = pb.Record()
            read.ParseFromString(record)
            record = b""
            match read.WhichOneof("record_type"):
                case "run":
                    seen["id"] = read.run.run_id
                case "preempting":
                    seen["preempting"] += 1
                case "exit":
                    seen["exit"] = read.exit.exit_code
                case "metric":
                    seen["axes"].append(read.metric.name or read.metric.step_metric)
                case "history":
                    items = read.history.item
                    seen["history"].append({{i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}})
        print(json.dumps(seen))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_wandb_gets_figures_of_layers_and_no_histograms(tmp_path: Path) -> None:
    """The load of each expert is 6,000 numbers a line for a large model: metrics.jsonl has them."""
    run, spec = make_run(tmp_path, FINISHES)
    opened = Events(run, spec, 1)
    seen: list[dict[str, Any]] = []
    opened._wandb = SimpleNamespace(log=seen.append, finish=lambda exit_code: None)
    load = {"layer": 1, "max_over_mean": 1.5, "entropy": 0.9, "dead": 2, "counts": [3, 1, 0, 0]}
    opened.metrics(metrics(1, dead_experts=2, expert_load_entropy=0.9, expert_load=[load]))
    opened.metrics(metrics(2, force_load_balance=True))
    opened.close(exit_code=0)
    of_layers = {key: value for key, value in seen[0].items() if not key.startswith("train/")}
    assert of_layers == {f"expert_load/{key}_layer_001": load[key] for key in ("max_over_mean", "entropy", "dead")}
    assert seen[0]["train/dead_experts"] == 2 and seen[0]["train/expert_load_entropy"] == 0.9
    assert seen[1]["train/force_load_balance"] is True and "train/force_load_balance" not in seen[0]
    first, second = rundir.read_lines(run.metrics)
    assert first["expert_load"] == [load] and "expert_load" not in second


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "not logged in"),
        pytest.param({"WANDB_API_KEY": "short"}, "W&B: ", marks=pytest.mark.slow),
        pytest.param(
            {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "W&B: ", marks=pytest.mark.slow
        ),
    ],
    ids=["no login", "bad key", "unreachable host"],
)
def test_case_154_wandb_trouble_is_one_warning(tmp_path: Path, env: dict[str, str], said: str) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    output = write_with_wandb(run, "online", **env)
    warnings = [row["message"] for row in rundir.read_lines(run.events) if row["event"] == "warning"]
    assert len(warnings) == 1
    assert said in warnings[0]
    assert "training goes on without it" in output
    assert len(rundir.read_lines(run.metrics)) == 3


def test_case_154_a_folder_wandb_cannot_write_is_one_warning(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, FINISHES)
    (run.path / "wandb").write_text("a file stands where the folder should be")
    write_with_wandb(run, "offline", WANDB_DATA_DIR=str(tmp_path / "data"))
    assert len(rundir.read_lines(run.metrics)) == 3


def test_wandb_is_not_imported_unless_asked_for(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path, FINISHES)
    assert spec.logging.wandb.mode == "disabled"
    code = (
        "import sys; from pathlib import Path; from pithtrain import events, rundir; from pithtrain.spec import load; "
        f"run = rundir.RunDir(Path({str(run.path)!r})); events.Events(run, load(run.spec_yaml), 1).close(0); "
        "assert 'wandb' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
