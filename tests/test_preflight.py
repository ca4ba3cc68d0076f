"""Before the first step: who is slow or different is named, with the command that goes on without it."""

import dataclasses
from typing import Any

import pytest

from harness import Pool, make_spec
from pithtrain import preflight
from pithtrain.errors import RunFailed
from pithtrain.preflight import Facts
from pithtrain.spec import from_dict
from pithtrain.world import Place, connect

VERSIONS = {"torch": "2.11", "cuda": "12.8", "nccl": "2.28"}


def fleet(*changes: tuple[int, dict[str, Any]], ranks: int = 8) -> list[Facts]:
    """Healthy ranks, four to a node, but for `changes` at some."""
    facts = [
        Facts(r, f"n{r // 4}", "NVIDIA H200", "0,1,2,3", 16, VERSIONS, 139.0, 1.0, 2e-4 + r * 1e-6, 1e-4)
        for r in range(ranks)
    ]
    for rank, fields in changes:
        facts[rank] = dataclasses.replace(facts[rank], **fields)
    return facts


def warnings(facts: list[Facts]) -> list[str]:
    return [fields["message"] for kind, fields in preflight.judge(facts, "tiny") if kind == "warning"]


def test_a_healthy_fleet_is_one_event() -> None:
    ((kind, fields),) = preflight.judge(fleet(), "tiny")
    assert kind == "preflight"
    assert (fields["ranks"], fields["hosts"], fields["devices"]) == (8, ["n0", "n1"], ["NVIDIA H200"])
    assert fields["slowest"] == {"rank": 7, "host": "n1"}
    assert fields["matmul_ms"] == {"median": 0.2035, "slowest": 0.207, "factor": 1.02}
    assert fields["versions"] == VERSIONS


def test_a_slow_rank_is_named_with_the_way_round_it() -> None:
    (said,) = warnings(fleet((5, {"matmul_s": 6.1e-4})))
    assert said.startswith("rank 5 on n1 computes 3.0 times slower than the median")
    assert said.endswith("pithtrain resume tiny --exclude n1")


def test_on_one_node_there_is_no_way_round_it() -> None:
    (said,) = warnings(fleet((3, {"matmul_s": 6.1e-4}), ranks=4))
    assert "--exclude" not in said


def test_a_gpu_in_use_by_something_else_is_told() -> None:
    (said,) = warnings(fleet((2, {"used_gib": 30.0})))
    assert "30.0 GiB of rank 2 on n0's GPU are in use by something else" in said


def test_on_a_cpu_times_are_told_and_not_judged() -> None:
    slow = (1, {"matmul_s": 1.0})
    assert not warnings([dataclasses.replace(one, device="cpu") for one in fleet(slow)])


def test_other_software_on_one_node_ends_the_run_and_names_it() -> None:
    other = [(rank, {"versions": VERSIONS | {"nccl": "2.26"}}) for rank in (4, 5)]
    with pytest.raises(RunFailed, match=r"versions of nccl: most have 2\.28, n1 has 2\.26\n.*--exclude n1") as raised:
        list(preflight.judge(fleet(*other), "tiny"))
    assert not raised.value.retry


def look_job(place: Place, fields: dict[str, Any]) -> list[Facts]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        return preflight.look(world)


@pytest.mark.parametrize("size", [1, 2])
def test_real_ranks_are_measured(pool: Pool, size: int) -> None:
    facts, *others = pool.run(size, look_job, make_spec(ep=size).model_dump(mode="json"))
    assert all(not other for other in others)
    assert [one.rank for one in facts] == list(range(size))
    for one in facts:
        assert 0 < one.matmul_s < 1
        assert 0 <= one.all_reduce_s < 1
        assert one.free_gib > 0
        assert one.versions.keys() == VERSIONS.keys()
    assert len(list(preflight.judge(facts, "tiny"))) == 1
