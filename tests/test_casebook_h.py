"""The casebook's area (h), each row played: how the batch is cut, one norm, the clip, fp32 sums, padding, decay."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Pool, Shards, assemble, distance, first_gradients, make_spec, shards, synthetic
from pithtrain import catalog, checkpoint, rundir, tape, train
from pithtrain.batches import read_batches
from pithtrain.build import Engine, build
from pithtrain.ops.cross_entropy import IGNORE
from pithtrain.pipeline import MicroBatch
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, from_dict
from pithtrain.train import train_step
from pithtrain.watch import Watch
from pithtrain.world import Place, connect

pytestmark = pytest.mark.slow

Whole = dict[str, np.ndarray]
Mesh = tuple[int, int, int]  # pp, dp, ep
FLOAT64 = {"compute_dtype": "float64"}
NO_BALANCE = {"load_balance_type": "none", "aux_loss_coef": 0.0}  # that loss is defined per micro-batch
T0 = {
    "num_hidden_layers": 3,  # the first dense; T0 has four
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "vocab_size": 512,
}


def name_of(mesh: Mesh) -> str:
    return "pp{}dp{}ep{}".format(*mesh)


# ---- 103 and 110: how many labels are valid, and where ---------------------------------------------------------------


class Samples:
    """Stands for a corpus: sample i keeps its first valid[i] labels; without any it is padding from end to end."""

    fingerprint, document_mask = "0" * 64, False

    def __init__(self, spec: RunSpec, valid: Sequence[int]) -> None:
        self.spec, self.valid = spec, valid

    def require(self, samples: int) -> None:
        assert samples == len(self.valid)

    def passes(self, first: int, last: int) -> list[dict[str, Any]]:
        return []

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, labels = (torch.stack(x) for x in zip(*(self._sample(first + i) for i in range(count)), strict=True))
        return tokens.numpy(), labels.numpy()

    def _sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = synthetic(self.spec, index)
        labels = tokens.roll(-1)
        labels[self.valid[index] :] = IGNORE
        return tokens if self.valid[index] else torch.zeros_like(tokens), labels


def logged_job(place: Place, fields: dict[str, Any], folder: Path, valid: Sequence[int]) -> Shards:
    """A run of one step as users start it; its summed gradients."""
    grads: list[Shards] = []
    real = train.train_step

    def recording(engine: Engine, spec: RunSpec, batches: list[MicroBatch], lr: float) -> Any:
        grads.append(first_gradients(spec, engine, batches))
        return real(engine, spec, batches, lr)

    spec = from_dict(fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "open_dataset", lambda spec: Samples(spec, valid))
        patch.setattr(train, "train_step", recording)
        train.run(spec, RunDir(folder), place, Watch(RunDir(folder), place.attempt, place.rank))
    return grads[0]


class Step:
    """One step over the samples of `valid` labels each: whole gradients, and the loss and norm that the run logs."""

    def __init__(self, pool: Pool, folder: Path, mesh: Mesh, valid: Sequence[int], mbs: int = 1) -> None:
        training = {
            **FLOAT64,
            "max_steps": 1,
            "micro_batch_size": mbs,
            "global_batch_size": len(valid),
            "sequence_length": 64,
        }
        spec = make_spec(*mesh, model=T0, training=training, moe=NO_BALANCE)
        folder.mkdir()
        parts = pool.run(spec.world_size, logged_job, spec.model_dump(mode="json"), folder, valid)
        self.grads: Whole = assemble(parts)
        [row] = rundir.read_lines(RunDir(folder).metrics)
        self.loss, self.norm = row["loss"], row["grad_norm"]

    def assert_equal(self, want: "Step") -> None:
        assert self.loss == pytest.approx(want.loss, rel=1e-9)
        assert self.norm == pytest.approx(want.norm, rel=1e-9)
        for name, grad in want.grads.items():
            assert distance(self.grads[name], grad) <= 1e-9, name


def test_case_103_however_the_batch_is_cut_gradient_and_loss_are_the_mean_over_its_tokens(
    pool: Pool, tmp_path: Path
) -> None:
    """Sequences of 1 and 63 valid tokens, twice each. With dp = 2 rank 0 holds the short ones and rank 1 the others, so
    a mean of ranks' means weighs 1 token like 63; accumulation 4 and 2 likewise."""
    valid = (1, 63, 1, 63)
    short, long = (Step(pool, tmp_path / str(kept), (1, 1, 1), kept) for kept in ((1, 0, 1, 0), (0, 63, 0, 63)))
    whole = Step(pool, tmp_path / "4", (1, 1, 1), valid)
    assert whole.loss == pytest.approx((short.loss + 63 * long.loss) / 64, rel=1e-9)
    assert abs(whole.loss - (short.loss + long.loss) / 2) > 1e-3 * whole.loss, "the case can be told from its fault"
    for name, grad in whole.grads.items():
        assert distance(grad, (short.grads[name] + 63 * long.grads[name]) / 64) <= 1e-9, name
    for mesh, mbs in (((1, 1, 1), 2), ((1, 2, 1), 1), ((1, 1, 2), 1), ((2, 1, 1), 1)):
        Step(pool, tmp_path / f"{name_of(mesh)}-{mbs}", mesh, valid, mbs).assert_equal(whole)


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2)], ids=name_of)
def test_case_110_a_micro_batch_of_padding_on_one_rank_contributes_nothing(
    pool: Pool, tmp_path: Path, mesh: Mesh
) -> None:
    """The second data rank has samples 1 and 3: one is padding, then both are."""
    for valid in ((64, 0, 20, 64), (64, 0, 20, 0)):
        got = Step(pool, tmp_path / str(valid), mesh, valid)
        assert all(np.isfinite(grad).all() for grad in got.grads.values())
        got.assert_equal(Step(pool, tmp_path / f"{valid} alone", (1, 1, 1), valid))
    padding = Step(pool, tmp_path / "one", (1, 1, 1), (64, 0, 0, 0))
    without = Step(pool, tmp_path / "other", (1, 1, 1), (64, 0))
    padding.assert_equal(without)


def test_case_110_a_global_batch_without_a_label_is_left_out_with_a_warning(pool: Pool, tmp_path: Path) -> None:
    """The first of two steps, with balance losses on, which would train alone: nothing moves, moments and counts
    neither, and the second step is that of a run that never had the first. On a rank without the loss too; with cp one
    rank holds padding alone."""
    moe = {"load_balance_type": "global_aux_loss", "aux_loss_coef": 0.5, "z_loss_coef": 0.1}
    training = {**FLOAT64, "max_steps": 2, "global_batch_size": 4, "sequence_length": 64}
    for i, (mesh, padded) in enumerate((((1, 1, 1, 1), 64), ((2, 1, 1, 2), 64), ((1, 1, 1, 2), 16))):
        spec = make_spec(*mesh, model=T0, training=training, moe=moe)
        fields = spec.model_dump(mode="json")
        (folder := tmp_path / str(i)).mkdir()
        pool.run(spec.world_size, logged_job, fields, folder, [0] * 4 + [padded] * 4)
        run = RunDir(folder)
        empty, second = rundir.read_lines(run.metrics)
        warnings = [row["message"] for row in rundir.read_lines(run.events) if row["event"] == "warning"]
        assert "no token had a label in 1 of the steps up to 1: those updates were left out" in warnings
        assert len([w for w in warnings if "no token had" in w]) == 1
        assert (empty["loss"], empty["grad_norm"]) == (0.0, 0.0)
        assert np.isfinite(second["loss"]) and second["grad_norm"] > 0
        updates = pool.run(spec.world_size, updates_job, fields, str(run.checkpoints))
        assert updates == [1] * spec.world_size


def updates_job(place: Place, fields: dict[str, Any], folder: str) -> int:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        path = catalog.folder(Path(folder), 2)
        checkpoint.load(path, engine.zero, world, catalog.read(path))
        return engine.zero.updates


# ---- 104: one norm ---------------------------------------------------------------------------------------------------

LOUD = "model.layers.1.mlp.experts.down_proj"


def loud_job(place: Place, fields: dict[str, Any]) -> dict[str, Any]:
    """Five steps after expert 0 of one layer was scaled by 1000; expert 0 is on ep rank 0 alone."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        if (one := engine.zero.sharded.get(LOUD)) is not None:
            own = spec.model.config.hidden_size - one.first_row  # rows of expert 0 from this shard's first on
            one.master[: max(own, 0)] *= 1000
        engine.zero.publish()
        norms = []
        for step in range(5):
            batches = read_batches(Samples(spec, [64] * 40), spec, world, 8 * step)  # type: ignore[arg-type]
            norms.append(train_step(engine, spec, batches if world.pp == 0 else [], spec.optimizer.lr).norm.item())
        engine.zero.wait_for_weights()
        held = engine.zero.sharded.values()
        dense = {one.info.name: one.weight.data.numpy().copy() for one in held if one.info.kind == "dense"}
        return {"norms": norms, "dense": dense, "masters": shards(engine, lambda p: p.master)}


def test_case_104_a_loud_expert_on_one_rank_is_in_the_one_norm_that_all_ranks_clip_by(pool: Pool) -> None:
    """Dense weights are compared rank by rank, whole and bitwise: a rank that clips by a norm of its own drifts."""
    training = {"global_batch_size": 8, "sequence_length": 64, "max_grad_norm": 1.0}

    def ran(*mesh: int) -> list[dict[str, Any]]:
        spec = make_spec(*mesh, model=T0, training=training)
        return pool.run(spec.world_size, loud_job, spec.model_dump(mode="json"))

    [want] = ran(1, 1, 1)
    assert min(want["norms"]) > 1.0, "the clip is at work in every step"
    for mesh in ((1, 1, 2), (2, 1, 2)):
        parts = ran(*mesh)
        masters = assemble([part["masters"] for part in parts])
        for part in parts:
            assert part["norms"] == parts[0]["norms"]
            np.testing.assert_allclose(part["norms"], want["norms"], rtol=1e-5)
            for name, weight in part["dense"].items():
                np.testing.assert_array_equal(weight, masters[name], f"{name} on {mesh}")
        for name, master in assemble([want["masters"]]).items():
            assert distance(masters[name], master) <= 1e-4, f"{name} on {mesh}"


# ---- 106: the clip ---------------------------------------------------------------------------------------------------


def movement_job(place: Place, fields: dict[str, Any], steps: int) -> list[tuple[float, Shards]]:
    """Per step the norm before the clip, and how far the masters moved."""
    spec = from_dict(fields)
    found = []
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(steps):
            before = {n: one.master.clone() for n, one in engine.zero.sharded.items()}
            batches = read_batches(Samples(spec, [16] * 48), spec, world, 16 * step) if world.pp == 0 else []  # type: ignore[arg-type]
            norm = train_step(engine, spec, batches, spec.optimizer.lr).norm.item()
            found.append((norm, shards(engine, lambda p, before=before: p.master - before[p.info.name])))
    return found


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)], ids=name_of)
def test_case_106_the_clip_bounds_how_far_a_step_moves(pool: Pool, mesh: Mesh) -> None:
    """With eps = 1, far above any gradient, AdamW moves by lr x (mean of the clipped gradients): at most lr x max_norm.
    With a small eps its step is about lr in each element, whatever the clip; there the clip shows in no movement."""
    lr, max_norm = 10.0, 1e-3
    optimizer = {"lr": lr, "eps": 1.0, "weight_decay": 0.0}

    def moved(max_grad_norm: float | None) -> list[tuple[float, float]]:
        spec = make_spec(*mesh, training={**FLOAT64, "max_grad_norm": max_grad_norm}, optimizer=optimizer)
        parts = pool.run(spec.world_size, movement_job, spec.model_dump(mode="json"), 3)
        steps = []
        for ranks in zip(*parts, strict=True):
            assert all(norm == ranks[0][0] for norm, _ in ranks)
            whole = assemble([movement for _, movement in ranks])
            steps.append((ranks[0][0], float(np.sqrt(sum((x**2).sum() for x in whole.values())))))
        return steps

    clipped = moved(max_norm)
    assert all(norm > 100 * max_norm for norm, _ in clipped), "grad_norm is told before the clip"
    assert all(distance <= lr * max_norm for _, distance in clipped), clipped
    assert clipped[0][1] == pytest.approx(lr * max_norm, rel=2 * max_norm), "and the clip takes no more than it must"
    assert moved(None)[0][1] > 100 * lr * max_norm


# ---- 108: sums in fp32 -----------------------------------------------------------------------------------------------


def opposed_job(place: Place, fields: dict[str, Any], factors: Sequence[float]) -> Shards:
    """Summed gradients of one step of equal micro-batches, the loss of global micro-batch i times factors[i]."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world, pytest.MonkeyPatch.context() as patch:
        engine = build(spec, world)
        tokens, labels = (torch.stack([x] * spec.training.micro_batch_size) for x in synthetic(spec, 1))
        mine: Iterator[float] = iter(factors[world.data_rank :: world.data_size])
        loss = tape.linear_cross_entropy
        patch.setattr(tape, "linear_cross_entropy", lambda h, w, y, scale, z: loss(h, w, y, scale * next(mine), z))
        batches = [MicroBatch(tokens, labels) for _ in range(spec.num_micro_batches)]
        return first_gradients(spec, engine, batches if world.pp == 0 else [])


@pytest.mark.parametrize("dp", [1, 3], ids=["micro-batches of one rank", "three ranks"])
def test_case_108_gradients_of_256_1_and_minus_256_sum_to_1(pool: Pool, dp: int) -> None:
    """In bf16 256 + 1 is 256. Every weight of the model, each through the operator that adds its gradient: equal
    micro-batches in bf16 whose losses count 256, 1 and -256 times leave the gradient of one. Then the same over the
    sum of three ranks."""
    big, one = ((256.0, 1.0, -256.0), (0.0, 1.0, 0.0)) if dp == 1 else ((256.0, 1, -256, 0, 0, 0), (0.0, 1, 0, 0, 0, 0))
    model = {"attention_bias": True}
    training = {"compute_dtype": "bfloat16", "global_batch_size": len(one)}
    spec = make_spec(1, dp, 1, model=model, training=training, moe=NO_BALANCE)
    got, want = (assemble(pool.run(dp, opposed_job, spec.model_dump(mode="json"), factors)) for factors in (big, one))
    assert got.keys() == {info.name for info in spec.model.config.parameters()}
    for name, grad in want.items():
        assert grad.dtype == np.float32
        assert grad.any(), name
        assert distance(got[name], grad) < 1e-2, name


# ---- 111: weight decay -----------------------------------------------------------------------------------------------


def decay_job(place: Place, fields: dict[str, Any]) -> tuple[Shards, list[str]]:
    """Masters that all began at 1, after five updates with zero gradients; the names with a moment that is not 0."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine: Engine = build(spec, world)
        for one in engine.zero.sharded.values():
            one.master.fill_(1.0)
        for _ in range(5):
            engine.zero.begin_step(1)
            for one in engine.zero.sharded.values():
                one.weight.add(lambda main, beta: main.zero_())
            norm = engine.zero.grad_norm()
            max_norm, counts_LE = spec.training.max_grad_norm, engine.counts_LE
            engine.zero.update(engine.optimizer, spec.optimizer.lr, norm, max_norm, counts_LE, 0.0)
        moved = [n for n, one in engine.zero.sharded.items() if one.exp_avg.any() or one.exp_avg_sq.any()]
        return shards(engine, lambda p: p.master), moved


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)], ids=name_of)
def test_case_111_with_zero_gradients_matrices_shrink_and_nothing_else(pool: Pool, mesh: Mesh) -> None:
    """By name, independent of the table: embedding, head, projections, router and experts decay as the spec says of
    optimizer.weight_decay (matrices only); norm gains and biases stay exactly 1."""
    spec = make_spec(*mesh, model={"attention_bias": True}, optimizer={"lr": 0.1, "weight_decay": 0.5})
    parts = pool.run(spec.world_size, decay_job, spec.model_dump(mode="json"))
    assert not any(moved for _, moved in parts)
    after = assemble([masters for masters, _ in parts])
    matrix = re.compile(r"(embed_tokens|lm_head|[qkvo]_proj|mlp\.gate|(gate|up|down)_proj)\.weight|experts\.\w+_proj")
    shrunk = {name for name in after if matrix.search(name)}
    kept = {name for name in after if name.endswith(("norm.weight", ".bias"))}
    assert shrunk | kept == after.keys()
    assert not shrunk & kept
    for name, tensor in after.items():
        if name in kept:
            assert (tensor == 1.0).all(), name
        else:
            np.testing.assert_allclose(tensor, (1 - 0.1 * 0.5) ** 5, rtol=1e-6, err_msg=name)
