"""Which collective a run hangs in: from what ranks recorded, in words; and from real ranks that hang."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from typer.testing import CliRunner

from fake_run import change_snapshot, ends, start_workers
from pithtrain import flight, jobs, rundir
from pithtrain.cli import app
from test_watch import FAULTS, add, real_run

EP, PP = "ep_fwd_group of ranks 0 1", "pp_group of ranks 0 2"
A, B = "all_to_all", "all_reduce"


def group(name: str, done: int, *opened: tuple[str, int], width: int = 8) -> dict[str, Any]:
    """Of one rank: `done` have ended; those after it are open, each an operation and its number."""
    found = [{"number": n, "operation": operation, "sizes": [[width]], "at": -n} for operation, n in opened]
    newest = found[-1] if found else {"number": done, "operation": B, "sizes": [[width]], "at": 0}
    return {"group": name, "begun": newest["number"], "done": done, "newest": newest, "open": found}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ({0: [group(EP, 9)], 1: [group(EP, 9)]}, []),
        ({}, []),
        (
            {0: [group(EP, 9, (A, 10), (A, 11))], 1: [group(EP, 9)]},
            ["all_to_all 10 of ep_fwd_group: rank 0 waited in it, rank 1 had not begun it"],
        ),
        (  # gloo ends what breaks off when a peer goes
            {0: [group(EP, 10)], 1: [group(EP, 9)]},
            ["all_reduce 10 of ep_fwd_group: rank 0 waited in it, rank 1 had not begun it"],
        ),
        ({0: [{**group(EP, 10), "newest": {"number": 10, "operation": "broadcast", "at": 0}}], 1: [group(EP, 9)]}, []),
        ({0: [group(EP, 9, (A, 10))]}, ["all_to_all 10 of ep_fwd_group: rank 0 waited in it, rank 1 told nothing"]),
        (
            {0: [group(EP, 9, (A, 10))], 1: [group(EP, 9, (B, 10))]},
            ["collective 10 of ep_fwd_group: rank 0 calls all_to_all, rank 1 calls all_reduce [[8]]"],
        ),
        (
            {0: [group(EP, 9, (B, 10))], 1: [group(EP, 9, (B, 10), width=7)]},
            ["collective 10 of ep_fwd_group: rank 0 calls all_reduce [[8]], rank 1 calls all_reduce [[7]]"],
        ),
        (  # how many rows travel differs by rank
            {0: [group(EP, 9, (A, 10))], 1: [group(EP, 9, (A, 10), width=7)]},
            [
                "all_to_all 10 of ep_fwd_group: ranks 0, 1 waited in it, and nobody was missing: "
                "a device or the network between them stood still"
            ],
        ),
        (  # it was through with it, and is in the next one
            {0: [group(EP, 9, (A, 10))], 1: [group(EP, 10, (A, 11))]},
            [
                "all_to_all 10 of ep_fwd_group: rank 0 waited in it, and nobody was missing: a device or the network "
                "between them stood still"
            ],
        ),
        (  # NCCL's are queued behind each other: the oldest is the one
            {0: [group("world_group of ranks 0 1", 4, (B, 5)), group(EP, 9, (A, 10))], 1: []},
            [
                "all_to_all 10 of ep_fwd_group: rank 0 waited in it, rank 1 had not begun it",
                "all_reduce 5 of world_group: rank 0 waited in it, rank 1 had not begun it",
            ],
        ),
        (  # 0 waits for 2, 2 for 3, which waits for nobody: that one first
            {
                0: [group(PP, 4, (B, 5))],
                2: [group(PP, 4), group("ep_fwd_group of ranks 2 3", 9, (A, 10))],
                3: [group("ep_fwd_group of ranks 2 3", 9)],
            },
            [
                "all_to_all 10 of ep_fwd_group: rank 2 waited in it, rank 3 had not begun it",
                "all_reduce 5 of pp_group: rank 0 waited in it, rank 2 had not begun it",
            ],
        ),
        (
            {0: [group(f"{PP} between two", 4, ("recv 0<-2", 5))], 2: []},
            ["messages of pp_group: rank 0 in recv 0<-2 [[8]]"],
        ),
        (
            {r: [group("pp_group of ranks 1-25:3", 4, *([(B, 5)] if r != 22 else []))] for r in range(1, 24, 3)},
            [
                "all_reduce 5 of pp_group: ranks 1, 4, 7, 10, 13, 16, 19 waited in it, rank 22 had not begun it, "
                "rank 25 told nothing"
            ],
        ),
        (
            {0: [group("default_pg", 1, (B, 2))], 1: []},
            ["all_reduce 2 of default_pg: rank 0 waited in it, rank 1 had not begun it"],
        ),
    ],
)
def test_lines(records: dict[int, list[dict[str, Any]]], said: list[str]) -> None:
    assert flight.lines(records) == said


@pytest.mark.parametrize(
    "ranks", [[3], [0, 1], [0, 2, 5], [*range(9)], [*range(2, 80, 4)], [0, 1, 2, 3, 4, 5, 6, 7, 9]]
)
def test_a_name_holds_the_members(ranks: list[int]) -> None:
    [line] = flight.lines({ranks[0]: [group(flight.name("dp_group", ranks), 0, (B, 1))]})
    silent = re.findall(r"\d+", line.partition("waited in it, ")[2])
    assert [ranks[0], *map(int, silent)] == ranks
    assert len(flight.name("dp", [*range(1024)])) < 40


def entry(operation: str, state: str, retired: bool) -> dict[str, Any]:
    names = {"process_group": ["1", EP], "is_p2p": False, "collective_seq_id": 3, "p2p_seq_id": 0, "time_created_ns": 1}
    return {
        **names,
        "profiling_name": operation,
        "state": state,
        "retired": retired,
        "input_sizes": [[1]],
        "time_created_ns": 1,
    }


@pytest.mark.parametrize(
    ("operation", "state", "retired", "ended"),
    [
        ("gloo:all_reduce", "scheduled", True, True),
        ("gloo:all_reduce", "scheduled", False, False),
        ("nccl:all_reduce", "completed", False, True),
        ("nccl:all_reduce", "started", True, False),  # the watchdog gave it up
    ],
)
def test_what_has_ended(
    monkeypatch: pytest.MonkeyPatch, operation: str, state: str, retired: bool, ended: bool
) -> None:
    dump = json.dumps({"entries": [entry(operation, state, retired)]}).encode()
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: dump)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: b"{}", raising=False)
    [one] = flight.recorded()
    assert (one["begun"], one["done"], len(one["open"])) == (3, 3 * ended, not ended)


def test_nothing_is_recorded_where_torch_is_not_there() -> None:
    code = "import sys; from pithtrain import flight; assert flight.recorded() == [] and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


RECORDS = """
import sys, torch, torch.distributed as dist
from pithtrain import flight
store, backend = dist.FileStore(sys.argv[1], 1), sys.argv[2]
device = "cuda" if backend == "nccl" else "cpu"
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group = dist.new_group([0], backend=backend, group_desc=flight.name("ep_fwd_group", [0]))
for _ in range(3):
    dist.all_reduce(torch.ones(2, device=device), group=group)
if backend == "nccl":
    torch.cuda.synchronize()
print(__import__("json").dumps(flight.recorded()))
"""


ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=ON_A_GPU)])
@pytest.mark.parametrize("kept", [2000, 0])
def test_torch_records_as_many_as_it_is_told(tmp_path: Path, kept: int, backend: str) -> None:
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": str(kept)}
    command = [sys.executable, "-c", RECORDS, str(tmp_path / "store"), backend]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = [one for one in json.loads(result.stdout) if one["group"] == "ep_fwd_group of ranks 0"]
    for one in found:
        assert one["newest"].pop("at") > 0
    newest = {"number": 3, "operation": "all_reduce", "sizes": [[2]]}
    told = {"group": "ep_fwd_group of ranks 0", "begun": 3, "done": 3, "newest": newest, "open": []}
    assert found == ([told] if kept else [])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [2000, 0])
def test_a_rank_that_skips_a_collective_is_named_with_it(tmp_path: Path, kept: int) -> None:
    """Rank 1 stands in its loader: the exchange that rank 0 waits in is named, in `status`, and in `logs --err`."""
    run = real_run(tmp_path, max_steps=100_000, step_timeout_s=4, flight_recorder=kept)
    change_snapshot(run, "watch", POLL_S=0.2, GRACE_S=1.0)
    module, text = FAULTS["loader"]
    add(run, module, text.replace('raise ValueError("the cause")', "time.sleep(1000)"))
    assert [end[0] for end in ends(start_workers(run, [0, 1]), 90)] == [1, 1]
    line = jobs.cause(run, 1).line
    shown = CliRunner().invoke(app, ["logs", str(run.path), "--err"]).output
    waits = "rank 0 waited in it, rank 1 had not begun it"
    assert line.startswith("rank 1: on ") and (waits in line) == (waits in shown) == bool(kept)
    assert run.collectives(1, 0).exists() == bool(kept)
    first = rundir.first_error(run, 1)
    assert first is not None and first["rank"] == 1, "what is recorded is no error"
    if kept:
        for torn in ('{"groups": [{"gr', '{"groups": [{}]}', '{"groups": 3}', "null", ""):
            run.collectives(1, 1).write_text(torn)
            assert "rank 1 had not" not in jobs.cause(run, 1).line
