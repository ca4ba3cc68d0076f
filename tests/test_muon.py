"""Muon: its direction against a decomposition, its update against a plain one and torch's, and both on any mesh."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import (
    Pool,
    Ran,
    assemble,
    batches_of,
    distance,
    first_gradients,
    make_spec,
    run_mesh,
    single,
)
from pithtrain import catalog, zero
from pithtrain.build import Engine, build
from pithtrain.ops import muon
from pithtrain.spec import RunSpec, from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect
from pithtrain.zero import Sharded, share_out
from test_mesh import assert_same_run
from test_resume_meshes import assert_same_state, load_job, save_job, whole
from test_zero import LR, STEPS, trajectory_job

MUON = {"type": "muon", "momentum": 0.9, "weight_decay": 0.3}
Mesh = tuple[int, int, int]


def spec_of(mesh: Mesh = (1, 1, 1), dtype: str = "float64", moments: str = "float32", **more: Any) -> RunSpec:
    """Three data ranks cut matrices of experts too: 12 sequences are many enough."""
    training = {"compute_dtype": dtype, "global_batch_size": 12}
    return make_spec(*mesh, training=training, optimizer={**MUON, "lr": 1e-3, "moments_dtype": moments}, **more)


def by_decomposition(matrix: Tensor) -> Tensor:
    """What five steps make of the singular values, without a step."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for _ in range(muon.STEPS):
        a, b, c = muon.COEFFICIENTS
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 40), (4, 33, 5), (1, 1, 7), (0, 4, 4)])
def test_the_direction_has_the_singular_vectors_and_turned_values(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = muon.orthogonalize(matrices)
    assert got.shape == matrices.shape
    for one, direction in zip(matrices, got, strict=True):
        torch.testing.assert_close(direction, by_decomposition(one), rtol=1e-10, atol=1e-10)
        values = torch.linalg.svdvals(direction)
        assert values.min() > 0.6 and values.max() < 1.3


def test_a_matrix_of_zeros_has_no_direction_and_its_neighbour_keeps_its_own() -> None:
    matrices = torch.stack([torch.zeros(4, 6), torch.randn(4, 6)])
    got = muon.orthogonalize(matrices)
    assert not got[0].any()
    torch.testing.assert_close(got[1:], muon.orthogonalize(matrices[1:]))


def matrices_of(stored: Tensor, rows: int) -> Tensor:
    return stored.view(-1, rows, stored.shape[1])


SLOWER = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in [(1, 1, 1), (2, 1, 2)]]


@pytest.mark.parametrize("mesh", [(1, 3, 1), *SLOWER])
def test_update_is_nesterovs_momentum_turned_matrix_by_matrix(pool: Pool, mesh: Mesh) -> None:
    """Against a plain one by decomposition for matrices of layers, each expert's gate, up and down by itself, and
    torch's AdamW for the rest."""
    spec, lr = spec_of(mesh), LR
    table = {info.name: info for info in spec.model.config.parameters()}
    parts = pool.run(spec.world_size, trajectory_job, spec.model_dump(mode="json"))
    with single(spec_of()) as world:
        start = {n: one.master.clone() for n, one in build(spec_of(), world).zero.sharded.items()}
    moved = {n for n, info in table.items() if info.moments(True) == 1}
    assert {n.split(".")[-2 if n.endswith("weight") else -1] for n in moved} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj", "gate_up_proj")
    }
    momentum = {n: torch.zeros_like(start[n]) for n in moved}
    rest = {n: torch.nn.Parameter(start[n].clone()) for n in table.keys() - moved}
    o = spec.optimizer
    groups = [
        {"params": [p for n, p in rest.items() if table[n].decay == decays], "weight_decay": 0.3 * decays}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(o.betas[0], o.betas[1]), eps=o.eps)
    for step in range(STEPS):
        grads = {n: torch.from_numpy(g) for n, g in assemble([part[step][0] for part in parts]).items()}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        clip = max(1.0, norm.item())
        for name, p in rest.items():
            p.grad = grads[name] / clip
        adamw.step()
        masters = assemble([part[step][1] for part in parts])
        for name in moved:
            momentum[name] = 0.9 * momentum[name] + 0.1 * grads[name] / clip
            ahead = matrices_of(0.1 * grads[name] / clip + 0.9 * momentum[name], table[name].matrix_rows)
            far = 0.2 * max(ahead.shape[1:]) ** 0.5
            turned = torch.stack([by_decomposition(x) if x.any() else x for x in ahead]) * far
            start[name] = start[name] * (1 - lr * 0.3) - lr * turned.view(start[name].shape)
        for name in table:
            want = start[name] if name in moved else rest[name].detach()
            assert distance(masters[name], want.numpy()) < 1e-8, name  # the clip factor is an fp32 number


def test_update_is_torchs_muon_to_the_digits_of_bf16() -> None:
    """torch turns in bf16 whatever the parameter's type, and knows single matrices alone. Gradients are random: a
    step's are near to a lower rank, of which bf16 says little."""
    spec, one_more = spec_of(), torch.Generator().manual_seed(3)
    with single(spec) as world:
        engine = build(spec, world)
        ours = {n: one for n, one in engine.zero.sharded.items() if one.by_muon and one.info.kind == "dense"}
        theirs = {n: torch.nn.Parameter(one.master.clone()) for n, one in ours.items()}
        reference = torch.optim.Muon(
            theirs.values(), lr=1e-2, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        )
        for _ in range(3):
            before = {n: p.detach().clone() for n, p in theirs.items()}
            for name, one in ours.items():
                one.master.copy_(before[name])
                one.grad.copy_(torch.randn(one.grad.shape, dtype=torch.float64, generator=one_more))
                theirs[name].grad = one.grad.clone()
            reference.step()
            engine.zero.update(engine.optimizer, 1e-2, torch.ones(()), None, engine.counts_LE, 0.0)
            for name, one in ours.items():
                moved, far = one.master - before[name], theirs[name].detach() - before[name]
                assert distance(moved.numpy(), far.numpy()) < 0.05, name


# ---- any mesh --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> Callable[[str], Ran]:
    return cache(lambda dtype: run_mesh(pool, spec_of(dtype=dtype), 4))


def cut_job(place: Place, fields: dict[str, Any]) -> set[tuple[str, bool]]:
    """{(kind, whether its matrices are cut)} of what Muon moves."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        left = [vars(gathering).keys() for each in engine.zero._gatherings.values() for gathering in each]
        assert not any({"_home", "_away", "_work"} & names for names in left), "buffers of every layer at once"
        return {(one.info.kind, one.cut) for one in engine.zero.sharded.values() if one.by_muon}


# (1, 3, 2): experts are cut within a part of the ranks, and 8 rows of a router leave one of six ranks without any
MESHES = [((1, 3, 1), True), ((1, 3, 2), True), ((2, 3, 1), True)]
MESHES += [((2, 1, 2), False), ((1, 2, 2), False), ((1, 1, 4), False), ((2, 2, 1), False)]


@pytest.mark.parametrize(
    ("mesh", "cut"),
    [pytest.param(*case, marks=() if case is MESHES[0] else pytest.mark.slow) for case in MESHES],
    ids=str,
)
def test_results_do_not_depend_on_the_mesh(
    pool: Pool, one_process: Callable[[str], Ran], mesh: Mesh, cut: bool
) -> None:
    kinds = set.union(*pool.run(int(np.prod(mesh)), cut_job, spec_of(mesh).model_dump(mode="json")))
    assert ("dense", True) in kinds and (("expert", True) in kinds) == cut
    got = run_mesh(pool, spec_of(mesh), 4)
    assert_same_run(got, one_process("float64"), loss=1e-9, grads=1e-9, parameters=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 3, 1)], ids=str)
def test_results_in_fp32_do_not_depend_on_the_mesh(pool: Pool, one_process: Callable[[str], Ran], mesh: Mesh) -> None:
    got = run_mesh(pool, spec_of(mesh, "float32"), 4)
    assert_same_run(got, one_process("float32"), loss=1e-6, grads=1e-4, parameters=1e-4)


class Cut:
    """What `share_out` reads of a parameter."""

    def __init__(self, kind: str, name: str, rows: int, width: int, parts: int, matrices: int = 1):
        self.info = type("Info", (), {"name": name, "kind": kind, "matrix_rows": rows})
        self.rows, self.chunk, self.parts = rows * matrices, torch.Size((-(-rows * matrices // parts), width)), parts
        self.shard_rows = self.chunk[0]
        self.rows_of = lambda part: Sharded.rows_of(cast(Any, self), part)


@pytest.mark.parametrize("parts", [2, 3, 8, 16, 64])
def test_owners_have_as_much_to_do_and_every_row_one(parts: int) -> None:
    """Twelve layers of a large model, with 16 experts on a rank, whose matrices 64 ranks cut: over all of them no rank
    turns more than the mean and one matrix of each kind."""
    shapes = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096), "gate": (128, 2048)}
    cut: list[Any] = [Cut("dense", f"{n}.{name}", *shape, parts) for n in range(12) for name, shape in shapes.items()]
    experts: list[Any] = [Cut("expert", f"{n}.down", 2048, 768, parts, matrices=16) for n in range(12)]
    segments = share_out([*cut, *experts])
    for of in (cut, experts):
        work = [sum(cost_of(each) for each in segments if each.of in of and each.owner == r) for r in range(parts)]
        assert max(work) <= sum(work) / parts + max(cost_of(each, 1) for each in segments if each.of in of)
    for one in (*cut, *experts):
        mine = sorted((each.first, each.end) for each in segments if each.of is one)
        assert [0, *(end for _, end in mine)] == [*(first for first, _ in mine), one.rows]
        assert all(first % one.info.matrix_rows == 0 for first, _ in mine)
        for part in range(parts):
            rows = one.rows_of(part)
            assert sum(each.size(part) for each in segments if each.of is one) == (rows[1] - rows[0]) * one.chunk[1]
    assert segments == share_out([*cut, *experts])


def cost_of(each: zero.Segment, matrices: int = 0) -> int:
    count = matrices or (each.end - each.first) // each.of.info.matrix_rows
    return count * muon.flops(each.of.info.matrix_rows, each.of.chunk[1])


# ---- state -----------------------------------------------------------------------------------------------------------


def updated(engine: Engine, spec: RunSpec, steps: int) -> dict[str, tuple[Tensor, Tensor]]:
    for step in range(steps):
        train_step(engine, spec, batches_of(spec, engine, step), 1e-2)
    return {n: (one.master.clone(), one.exp_avg.clone()) for n, one in engine.zero.sharded.items()}


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_how_many_matrices_are_turned_at_once_changes_nothing(moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random bits of a moment in bf16 are those of its global index, wherever a piece begins."""
    spec, found = spec_of(dtype="float32", moments=moments), []
    for most in (1 << 26, 1):
        monkeypatch.setattr(zero, "TURNED", most)
        with single(spec) as world:
            found.append(updated(build(spec, world), spec, 3))
    for name, (master, exp_avg) in found[0].items():
        torch.testing.assert_close(found[1][name][0], master, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(found[1][name][1], exp_avg, rtol=1e-2, atol=1e-6, msg=name)
        if moments == "bfloat16" and exp_avg.numel():
            assert exp_avg.dtype == torch.bfloat16
    first = next(n for n in found[0] if "gate_up" in n)
    assert torch.equal(found[0][first][1], found[1][first][1]) or moments == "float32"


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_step_that_is_skipped_leaves_everything(moments: str) -> None:
    spec = spec_of(dtype="float32", moments=moments)
    with single(spec) as world:
        engine = build(spec, world)
        before = updated(engine, spec, 2)
        first_gradients(spec, engine, batches_of(spec, engine, 2))
        for one in engine.zero.sharded.values():
            one.grad.fill_(float("nan"))
        engine.zero.update(engine.optimizer, 1e-2, engine.zero.grad_norm(), 1.0, engine.counts_LE, 0.0)
        for name, one in engine.zero.sharded.items():
            assert torch.equal(one.master, before[name][0]) and torch.equal(one.exp_avg, before[name][1]), name


def test_there_is_no_second_moment_of_what_it_moves() -> None:
    spec = spec_of()
    with single(spec) as world:
        for one in build(spec, world).zero.sharded.values():
            assert len(one.exp_avg) == len(one.master)
            assert len(one.exp_avg_sq) == (0 if one.info.layer is not None and one.info.decay else len(one.master))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, 1, 2), (1, 3, 1)),
        ((1, 3, 1), (1, 1, 4)),
        ((1, 3, 1), (1, 3, 1)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_checkpoint_is_taken_on_by_any_mesh(pool: Pool, tmp_path: Path, old: Mesh, new: Mesh) -> None:
    fields = {mesh: spec_of(mesh, "float32").model_dump(mode="json") for mesh in (old, new)}
    want = whole(pool.run(int(np.prod(old)), save_job, fields[old], tmp_path, 2))
    path = catalog.folder(tmp_path, 2)
    got = whole(pool.run(int(np.prod(new)), load_job, fields[new], path, 2))
    assert_same_state(got, want)
    for name, master in want.masters.items():
        assert distance(got.masters[name], master) <= (0 if old == new else 1e-4), name
