"""A rank among the others: its device, flags that all agree on, values that travel to rank 0."""

from typing import Any

import pytest
import torch

from harness import Pool, make_spec
from pithtrain import world
from pithtrain.errors import CapacityError
from pithtrain.spec import from_dict
from pithtrain.world import Place, connect


def agree_job(place: Place, fields: dict[str, Any]) -> tuple[list[int], list[int]]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as here:
        flags = here.max(3 * (place.rank == 1), place.rank == 7, 0)()
        return flags, here.to_rank_zero(10 * place.rank)


@pytest.mark.parametrize("size", [1, 2])
def test_case_158_flags_are_agreed_in_one_message(pool: Pool, size: int) -> None:
    spec = make_spec(ep=size)
    results = pool.run(size, agree_job, spec.model_dump(mode="json"))
    assert {tuple(flags) for flags, _ in results} == {(3 if size > 1 else 0, 0, 0)}
    assert [values for _, values in results] == ([[0]] if size == 1 else [[0, 10], []])


@pytest.mark.parametrize(
    ("visible", "local_rank", "method", "index"),
    [
        (8, 5, "tcp://n0:1", 5),
        (1, 0, "file:///x", 0),
        (1, 5, "tcp://n0:1", 0),  # the launcher binds one device to each task
        (4, 5, "tcp://n0:1", None),
        (1, 1, "file:///x", None),  # both ranks of this host would take it
        (0, 0, "file:///x", None),
    ],
)
def test_case_014_the_device_is_the_local_rank_th_of_those_given(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, method: str, index: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    place = Place(1, 16, local_rank, method, 1)
    if index is None:
        with pytest.raises(CapacityError, match=rf"local rank {local_rank}\) has no GPU of its own: {visible} visible"):
            world._device(place, "cuda")
    else:
        assert world._device(place, "cuda") == torch.device("cuda", index)


def test_case_014_two_ranks_on_one_device_are_refused() -> None:
    world.refuse_shared(["a of n0", "b of n0", "a of n1"])
    with pytest.raises(CapacityError, match=r"ranks 1 and 3 have the same GPU \(b of n0\)"):
        world.refuse_shared(["a of n0", "b of n0", "a of n1", "b of n0"])
