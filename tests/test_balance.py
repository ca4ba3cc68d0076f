"""Balance, from the spec to the numbers of a step: the same on every mesh and for every cut into micro-batches, kept by
checkpoints, told by the log.

The model is DeepSeek-V3's kind: sigmoid scores, groups, and a selection bias that follows the load.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness import ALONE, Pool, assemble, batches_of, distance, fields_of, make_spec, play, shards, single, variants
from pithtrain import catalog, checkpoint, rundir, train
from pithtrain.build import Engine, build
from pithtrain.checkpoint import Position, Reader, Saver
from pithtrain.errors import CheckpointError, NotFiniteError
from pithtrain.plan import plan
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, from_dict
from pithtrain.train import Outcome, StepResult, train_step
from pithtrain.watch import Watch
from pithtrain.world import Place, connect
from test_data import make
from test_train import StopsAfter, alone, events, lines, make_run, run_job, trained
from test_train import train as train_run

V3 = make_spec(
    architecture="deepseek_v2", model={**variants("deepseek_v2")["V3"], "vocab_size": 96, "initializer_range": 0.2}
).model.config
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
GATE = "model.layers.{}.mlp.gate.weight"
MOE = [layer for layer in range(V3.num_hidden_layers) if V3.is_moe(layer)]
RATE, COEF, Z_COEF = 0.01, 0.05, 0.002
KINDS = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
STEPS = 3


def balance_spec(*mesh: int, kind: str = "global_aux_loss", rate: float = RATE, **sections: Any) -> RunSpec:
    """A run of V3 in float64, in which experts are chosen alike on any mesh, unless a section says otherwise."""
    training = {"compute_dtype": "float64", "max_grad_norm": None, **sections.pop("training", {})}
    moe = {"load_balance_type": kind, "aux_loss_coef": COEF if kind != "none" else 0.0, "z_loss_coef": Z_COEF}
    moe |= {"bias_update_rate": rate, **sections.pop("moe", {})}
    return make_spec(*mesh, architecture="deepseek_v2", model=fields_of(V3), training=training, moe=moe, **sections)


def steps_job(place: Place, fields: dict[str, Any], steps: int) -> dict[str, Any]:
    """Loss, bal and z of each step, whole; the gradients of the last one, which begins with uneven shares; masters."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        told: list[list[float]] = []
        for step in range(steps):
            stats = train_step(engine, spec, batches_of(spec, engine, step), spec.optimizer.lr).stats
            sums = torch.cat([x.double().view(-1) for x in (stats.loss, stats.balance_L, stats.z_L)])
            told.append(world.sum(sums).tolist())
        return {
            "told": np.array(told),
            "grads": shards(engine, lambda p: p.grad),
            "masters": shards(engine, lambda p: p.master),
        }


def went(pool: Pool, spec: RunSpec, steps: int = STEPS) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    parts = pool.run(spec.world_size, steps_job, spec.model_dump(mode="json"), steps)
    return parts[0]["told"], assemble([p["grads"] for p in parts]), assemble([p["masters"] for p in parts])


def biases(masters: dict[str, np.ndarray]) -> np.ndarray:
    return np.stack([masters[BIAS.format(layer)] for layer in MOE])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["global_aux_loss", "seq_aux_loss", "aux_loss"])
@pytest.mark.parametrize("meshes", [[(2, 1, 2), (1, 2, 2), (2, 2, 1)]], ids=str)
def test_case_050_nothing_of_balance_depends_on_the_mesh(
    pool: Pool, kind: str, meshes: list[tuple[int, int, int]]
) -> None:
    """Loss, bal, z and gradients up to rounding, the biases bit for bit."""
    want, want_grads, want_masters = went(pool, balance_spec(kind=kind))
    assert (want[:, 1:][:, MOE] >= 0.99).all() and want[-1, 1 + MOE[0]] > 1.001
    assert (biases(want_masters) != 0).any() and np.abs(biases(want_masters)).max() <= STEPS * RATE * (1 + 1e-6)
    for mesh in meshes:
        got, grads, masters = went(pool, balance_spec(*mesh, kind=kind))
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=0, err_msg=f"{mesh}")
        for name, grad in want_grads.items():
            assert distance(grads[name], grad) < 1e-9, (name, mesh)
        np.testing.assert_array_equal(biases(masters), biases(want_masters), f"{mesh}")


@pytest.mark.slow
def test_case_055_neither_bias_nor_global_shares_see_the_micro_batches(pool: Pool) -> None:
    """2, 4, 8 and 16 micro-batches of the same global batch; also trap 8. bal of `aux_loss` is a micro-batch's own."""
    want, want_grads, want_masters = went(pool, balance_spec(training={"micro_batch_size": 8}))
    assert (biases(want_masters) != 0).any() and np.abs(biases(want_masters)).max() <= STEPS * RATE * (1 + 1e-6)
    for size in (4, 2, 1):
        got, grads, masters = went(pool, balance_spec(training={"micro_batch_size": size}))
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=0)
        for name, grad in want_grads.items():
            assert distance(grads[name], grad) < 1e-9, (name, size)
        np.testing.assert_array_equal(biases(masters), biases(want_masters))


# ---- what is trained on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "seq_aux_loss" else pytest.mark.slow) for kind in KINDS]
)
def test_case_054_the_total_is_the_loss_and_each_coefficient_times_its_metric(kind: str) -> None:
    """The gradient of the routers is that of loss + MoE layers x (coef x aux_loss + z_loss_coef x router_z_loss), by
    differences, after a step that has left counts and biases uneven. The loss that is logged has none of the others: it
    is bit for bit that of a run without balance."""
    coef = 0.0 if kind == "none" else 0.3
    spec = balance_spec(kind=kind, moe={"aux_loss_coef": coef, "z_loss_coef": 0.05})
    plain = balance_spec(kind="none", moe={"z_loss_coef": 0.0})
    with single(spec) as world:
        engine, other = build(spec, world), build(plain, world)
        batches = batches_of(spec, engine, 0)
        assert torch.equal(play(engine, spec, batches).loss, play(other, plain, batches).loss)
        train_step(engine, spec, batches, 1e-3)
        batches = batches_of(spec, engine, 1)
        play(engine, spec, batches)
        gates = [engine.zero.weights[GATE.format(layer)] for layer in MOE]
        grads = [gate.main_grad.clone() for gate in gates]
        norm = float(torch.stack([grad.norm() for grad in grads]).norm())

        def total(by: float) -> float:
            for gate, grad in zip(gates, grads, strict=True):
                gate.data += by / norm * grad
            stats = play(engine, spec, batches)
            aux, z = (sum(x[layer] for layer in MOE) / len(MOE) for x in (stats.balance_L, stats.z_L))
            return (stats.loss + len(MOE) * (coef * aux + 0.05 * z)).item()

        ahead = total(1e-6)
        assert (ahead - total(-2e-6)) / 2e-6 == pytest.approx(norm, rel=1e-5)


# ---- ties ------------------------------------------------------------------------------------------------------------


def tied_job(place: Place, fields: dict[str, Any], steps: int) -> tuple[list[float], list[Any]]:
    """(losses, counts) of steps that each begin with a router weight of zeros."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        losses, counts = [], []
        for step in range(steps):
            engine.zero.wait_for_weights()
            for layer in MOE:
                engine.zero.weights[GATE.format(layer)].data.zero_()
            result = train_step(engine, spec, batches_of(spec, engine, step), spec.optimizer.lr)
            losses.append(world.sum(result.stats.loss).item())
            counts.append(world.sum(result.stats.counts_LE)[MOE].tolist())
        return losses, counts


@pytest.mark.slow
def test_case_062_a_router_of_zeros_sends_every_token_to_the_first_experts(pool: Pool) -> None:
    """All logits equal, 20 steps on two ranks: the first K experts get everything, as on one process."""
    sizes = {"global_batch_size": 4, "sequence_length": 8}
    (want, _), (got, counts) = (
        pool.run(ep, tied_job, balance_spec(1, 1, ep, rate=0.0, training=sizes).model_dump(mode="json"), 20)[0]
        for ep in (1, 2)
    )
    k = V3.num_experts_per_tok
    assert counts == [[[4 * 8] * k + [0] * (V3.num_experts - k)] * len(MOE)] * 20
    np.testing.assert_allclose(got, want, rtol=1e-9)


# ---- the bias --------------------------------------------------------------------------------------------------------


def ones_up(rate: float = 0.001) -> tuple[RunSpec, torch.Tensor]:
    """A bf16 run, and counts by which expert 0 gets too little and the last too much, in every layer."""
    spec = balance_spec(kind="none", rate=rate, training={"compute_dtype": "bfloat16"})
    counts_E = torch.full((V3.num_experts,), 40960)
    counts_E[0], counts_E[-1] = 40840, 41080
    return spec, counts_E.expand(V3.num_hidden_layers, -1)


@pytest.mark.slow
def test_case_057_a_thousand_small_steps_arrive(tmp_path: Path) -> None:
    """In bf16 1.0 stalls at 0.5: +0.001 is below half of its spacing there. fp32 in memory, in the checkpoint and after
    a load, and in the weight that the router reads."""
    spec, counts_LE = ones_up()
    with single(spec) as world:
        engine = build(spec, world)
        zero = engine.zero
        for _ in range(1000):
            zero.update(engine.optimizer, 0.0, torch.ones(()), None, counts_LE, 0.001)
        saver = Saver(tmp_path, zero, world, {})
        saver.save(Position(1000, 0))
        saver.wait()
        path = catalog.folder(tmp_path, 1000)
        fresh = build(spec, world).zero
        checkpoint.load(path, fresh, world, catalog.read(path))
        for layer in MOE:
            name = BIAS.format(layer)
            stored = Reader(path).tensor(f"master/{name}")
            for bias in (zero.weights[name].data, fresh.sharded[name].master, fresh.weights[name].data, stored):
                assert bias.dtype == torch.float32
                assert bias[0].item() == pytest.approx(1.0, abs=1e-4) and bias[-1].item() == -bias[0].item()
                assert (bias[1:-1] == 0).all()
    about = catalog.read(path)["tensors"]
    kinds = {key.partition("/")[0] for key in about if key.endswith("correction_bias")}
    assert kinds == {"master"}, "nothing else is kept of a bias"
    assert {key: tuple(one["shape"]) for key, one in about.items()} == checkpoint.shapes(V3.parameters(), muon=False)


def test_case_058_the_direction_is_right_beside_large_counts() -> None:
    """40,840 against a mean of 40,960: neighbours in bf16. Sums over micro-batches and ranks are of integers."""
    spec, counts_LE = ones_up()
    with single(spec) as world:
        engine = build(spec, world)
        result = train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        assert result.stats.counts_LE.dtype == engine.counts_LE.dtype == torch.int64
        before = [engine.zero.sharded[BIAS.format(layer)].master.clone() for layer in MOE]
        engine.zero.update(engine.optimizer, 1e-3, torch.ones(()), None, counts_LE, 0.001)
        for layer, old in zip(MOE, before, strict=True):
            moved = engine.zero.sharded[BIAS.format(layer)].master - old
            assert moved.sign().tolist() == [1.0, *[0.0] * (V3.num_experts - 2), -1.0]


def test_a_bias_has_no_gradient_no_decay_and_no_part_in_the_norm() -> None:
    spec = balance_spec(rate=0.0, optimizer={"weight_decay": 0.5, "lr": 0.1})
    with single(spec) as world:
        engine = build(spec, world)
        biased = [engine.zero.sharded[BIAS.format(layer)] for layer in MOE]
        assert all((one.master == 0).all() for one in biased), "begins with zeros"
        for one in biased:
            one.master.fill_(0.25)
            assert one.grad.numel() == one.exp_avg.numel() == one.exp_avg_sq.numel() == 0
        engine.zero.publish()
        norm = train_step(engine, spec, batches_of(spec, engine, 0), 0.1).norm
        squares = sum(one.grad.square().sum() for one in engine.zero.sharded.values())
        assert norm.item() == pytest.approx(float(squares) ** 0.5, rel=1e-12)
        engine.zero.wait_for_weights()
        assert all((one.master == 0.25).all() and (one.weight.data == 0.25).all() for one in biased)


def test_a_skipped_step_leaves_biases_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = balance_spec()
    with single(spec) as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        counts = engine.counts_LE.clone()
        bias = [engine.zero.sharded[BIAS.format(layer)].master.clone() for layer in MOE]
        assert counts[MOE].sum(1).tolist() == [16 * 16 * V3.num_experts_per_tok] * len(MOE)
        monkeypatch.setattr(engine.zero, "grad_norm", lambda flaw: torch.tensor(float("nan"), dtype=torch.float64))
        train_step(engine, spec, batches_of(spec, engine, 1), 1e-3)
        assert torch.equal(engine.counts_LE, counts)
        assert all(
            torch.equal(engine.zero.sharded[BIAS.format(layer)].master, b) for layer, b in zip(MOE, bias, strict=True)
        )
        monkeypatch.undo()
        train_step(engine, spec, batches_of(spec, engine, 2), 1e-3)
        assert not torch.equal(engine.counts_LE, counts)


@pytest.mark.parametrize(
    ("mesh", "narrow"), [((1, 1, 1), False), ((1, 1, 2), False), ((2, 2, 1), False), ((2, 1, 2), True)]
)
def test_the_plan_counts_a_bias_as_it_is_held(pool: Pool, mesh: tuple[int, int, int], narrow: bool) -> None:
    """Also with moments in bf16."""
    changes = {"training": {"compute_dtype": "float32"}, "optimizer": {"lr": 1e-3, "moments_dtype": "bfloat16"}}
    spec = balance_spec(*mesh, **(changes if narrow else {}))
    numbers = plan(spec)
    held = pool.run(spec.world_size, held_job, spec.model_dump(mode="json"))
    per_pp = spec.world_size // mesh[0]
    for rank in range(mesh[0]):
        want = numbers.rank_weight_bytes[rank], numbers.rank_gradient_bytes[rank]
        assert all(each[:2] == want for each in held[rank * per_pp : (rank + 1) * per_pp])
    assert sum(kept for _, _, kept in held) == numbers.checkpoint_bytes
    wide, moment = (4, 2) if narrow else (8, 8)
    tables = sum(info.size * (wide + (0 if info.update == "load" else 2 * moment)) for info in V3.parameters())
    assert numbers.checkpoint_bytes == tables, "every size here divides"


def held_job(place: Place, fields: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of this rank: weights, main gradients, masters and moments."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        every = build(spec, world).zero.sharded.values()
        kept = sum(each.nbytes for one in every for each in (one.master, one.exp_avg, one.exp_avg_sq))
        return sum(one._data.nbytes for one in every), sum(one._grad.nbytes for one in every), kept


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    documents = [rng.integers(10, V3.vocab_size, 40).tolist() for _ in range(100)]
    return make(tmp_path_factory.mktemp("corpus") / "made", documents, V3.vocab_size) / "tokens"


def run_spec(corpus: Path, *mesh: int, **changes: Any) -> RunSpec:
    data = {"sources": [{"path": str(corpus)}], "repeat": True}
    training = {"max_steps": 6, "global_batch_size": 8, **changes.pop("training", {})}
    return balance_spec(*mesh, data=data, training=training, **changes)


def figures(folder: Path) -> list[list[float]]:
    keys = ("step", "loss", "aux_loss", "router_z_loss", "grad_norm", "expert_load_entropy", "dead_experts")
    return [[row[key] for key in keys] for row in lines(folder)]


@pytest.mark.slow
def test_a_resume_keeps_biases_and_shares_bitwise(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    """global_aux_loss takes its shares from the step before, which was made in another process; on another mesh the
    same biases come out. A checkpoint without counts (the first ones had none) begins with even shares."""
    spec, moved = run_spec(corpus, 1, 1, 2), run_spec(corpus, 2, 1, 1)
    assert train_run(pool, spec, tmp_path / "straight") == Outcome(6, finished=True)
    for name, goes_on in (("same", spec), ("moved", moved)):
        train_run(pool, spec, tmp_path / name, stop_after=3)
        train_run(pool, goes_on, tmp_path / name)
    assert figures(tmp_path / "same") == figures(tmp_path / "straight")
    np.testing.assert_allclose(figures(tmp_path / "moved"), figures(tmp_path / "straight"), rtol=1e-9)
    want = trained(tmp_path / "straight", spec, 6)
    assert any(np.abs(want[f"master {BIAS.format(layer)}"]).max() > 0 for layer in MOE)
    same, there = trained(tmp_path / "same", spec, 6), trained(tmp_path / "moved", spec, 6)
    for name, tensor in want.items():
        np.testing.assert_array_equal(same[name], tensor, name)
        if name.endswith("correction_bias"):
            np.testing.assert_array_equal(there[name], tensor, name)
    marks = [catalog.read(catalog.folder(RunDir(tmp_path / name).checkpoints, 6)) for name in ("straight", "moved")]
    counts = marks[0].get("expert_counts")
    assert counts is not None and counts == marks[1].get("expert_counts"), "of all stages, whatever the mesh"
    again = run_spec(corpus, 2, 1, 1, training={"max_steps": 8})
    pool.run(2, poisoned_job, again.model_dump(mode="json"), tmp_path / "moved", 1, 2, owner(again, 2), float("nan"))
    skipped = catalog.read(catalog.folder(RunDir(tmp_path / "moved").checkpoints, 7))
    assert skipped.get("expert_counts") == counts, "a first step that was skipped keeps what was loaded"
    per_layer = 8 * 16 * V3.num_experts_per_tok
    assert [sum(row) for row in counts] == [per_layer if layer in MOE else 0 for layer in range(V3.num_hidden_layers)]


def test_a_checkpoint_without_counts_begins_with_even_shares(corpus: Path, tmp_path: Path) -> None:
    """Those of earlier versions have none. A resume may also change the type of balance."""
    alone(run_spec(corpus, training={"max_steps": 2}, kind="none"), tmp_path)
    first = run_spec(corpus, training={"max_steps": 3})
    marker = catalog.folder(RunDir(tmp_path).checkpoints, 2) / catalog.MARKER
    content: dict[str, Any] = {**catalog.read(marker.parent)}
    counts = content.pop("expert_counts")
    seen: list[list[list[int]]] = []
    for told in ({"expert_counts": counts}, {}):
        whole = {**content, **told}
        marker.write_text(json.dumps({**whole, "sha256": catalog._sha256(whole)}))
        with single(first) as world:
            engine = build(first, world)
            about = {**train._about(first, RunDir(tmp_path), None), "tokenizer": content["tokenizer"]}
            run_dir = RunDir(tmp_path)
            job = train.Job(first, run_dir, world, None, Watch(run_dir, 1, 0))
            train._resume(job, engine, about)
            seen.append(engine.counts_LE.tolist())
    assert seen == [counts, [[0] * V3.num_experts] * V3.num_hidden_layers] and any(counts[MOE[0]])


def test_a_line_has_the_figures_of_balance_and_now_and_then_every_expert(corpus: Path, tmp_path: Path) -> None:
    alone(run_spec(corpus, logging={"interval": 2, "expert_load_interval": 3}, training={"max_steps": 7}), tmp_path)
    rows = lines(tmp_path)
    assert [row["step"] for row in rows] == [2, 4, 6, 7]
    assert [row["step"] for row in rows if "expert_load" in row] == [4, 6], "the first line at or after each multiple"
    for row in rows:
        assert row["aux_loss"] > 0.9 and row["router_z_loss"] > 0 and row["force_load_balance"] is None
        if "expert_load" not in row:
            continue
        load = row["expert_load"]
        assert [each["layer"] for each in load] == MOE
        assert all(sum(each["counts"]) == 8 * 16 * V3.num_experts_per_tok for each in load)
        assert row["expert_load_max_over_mean"] == max(each["max_over_mean"] for each in load)
        assert row["expert_load_entropy"] == min(each["entropy"] for each in load) < 1
        assert row["dead_experts"] == sum(each["counts"].count(0) for each in load)
        for each in load:
            assert each["max_over_mean"] == pytest.approx(max(each["counts"]) * 8 / sum(each["counts"]))
    alone(run_spec(corpus, kind="none", moe={"z_loss_coef": 0.0}, training={"max_steps": 1}), tmp_path / "none")
    assert lines(tmp_path / "none")[0]["aux_loss"] is lines(tmp_path / "none")[0]["router_z_loss"] is None


@pytest.mark.slow
def test_a_resume_writes_the_histograms_of_the_straight_run(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    """Which lines have them follows from the step alone, not from where the attempt began."""
    spec = run_spec(corpus, logging={"interval": 3, "expert_load_interval": 4})
    train_run(pool, spec, tmp_path / "straight")
    train_run(pool, spec, tmp_path / "resumed", stop_after=5)
    train_run(pool, spec, tmp_path / "resumed")
    want, got = (lines(tmp_path / name)[-1] for name in ("straight", "resumed"))
    assert got["step"] == 6 and got["expert_load"] == want["expert_load"]


class Saves(Watch):
    """Asked to save from the first step on, until it is told that it is done."""

    asked = 0

    def should_save(self) -> bool:
        Saves.asked += self.run.save.exists()
        return self.run.save.exists()


@pytest.mark.slow
def test_forced_routing_is_even_says_so_and_saves_nothing(
    pool: Pool, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at the end, not at a stop, not when asked. A finished run is done; one that was stopped begins anew."""
    cadence = {"interval": 2, "keep_last": 1, "async_save": True}
    spec = run_spec(corpus, moe={"force_load_balance": True}, logging={"expert_load_interval": 1}, checkpoint=cadence)
    run_dir = make_run(tmp_path / "asked")
    rundir.mark(run_dir.save, 1)
    assert train.run(spec, run_dir, ALONE, Saves(run_dir, 1, 0)) == Outcome(6, finished=True)
    assert not run_dir.save.exists() and Saves.asked == 1
    assert rundir.stamp(run_dir.done, 1)["step"] == 6
    told = capsys.readouterr().out.splitlines()
    assert all(line.endswith("| forced routing") for line in told if line.startswith("step "))

    for stop_after in (3, None):
        outcomes = pool.run(1, run_job, spec.model_dump(mode="json"), make_run(tmp_path / "stopped").path, stop_after)
        assert outcomes == [Outcome(0, False) if stop_after else Outcome(6, True)]
        if stop_after:
            assert rundir.read_json(RunDir(tmp_path / "stopped").requeue)["step"] == 0
    for name, times in (("asked", 1), ("stopped", 2)):
        folder = tmp_path / name
        rows = lines(folder)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert all(row["force_load_balance"] is True for row in rows)
        assert all(row["expert_load_max_over_mean"] == row["expert_load_entropy"] == 1.0 for row in rows)
        assert not list(RunDir(folder).checkpoints.glob("*")) and not events(folder, "saved")
        warned = [row["message"] for row in events(folder, "warning") if "force_load_balance" in row["message"]]
        assert len(warned) == times and "nothing is saved" in warned[0]


def test_forced_routing_does_not_go_on_with_a_real_training(corpus: Path, tmp_path: Path) -> None:
    alone(run_spec(corpus, training={"max_steps": 1}), tmp_path)
    with pytest.raises(CheckpointError, match="a run of its own"):
        alone(run_spec(corpus, moe={"force_load_balance": True}), tmp_path)
    assert [row["step"] for row in lines(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("spec", "name", "bad"),
    [
        (balance_spec(), BIAS.format(2), float("nan")),
        (make_spec(architecture="gpt_oss"), "model.layers.2.mlp.router.bias", -float("inf")),
    ],
    ids=["selection bias", "-inf"],
)
def test_case_060_nothing_is_trained_on_a_choice_that_is_not_finite(spec: RunSpec, name: str, bad: float) -> None:
    """A selection bias, or an expert whose probability is 0: loss and gradients look sound."""
    with single(spec) as world:
        engine = build(spec, world)
        engine.zero.sharded[name].master[1] = bad
        engine.zero.loaded(0)
        result = train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        assert result.stats.loss.isfinite() and result.norm.isnan() and result.not_finite
        assert result.stats.z_L.isfinite().logical_not().nonzero().flatten().tolist() == [2]


def owner(spec: RunSpec, layer: int) -> int:
    """The pipeline rank that holds it."""
    stages = plan(spec).stage_layers
    return next(rank for rank in range(spec.mesh.pp) if layer in stages[rank] or layer in stages[-1 - rank])


def poisoned_job(
    place: Place, fields: dict[str, Any], folder: Path, call: int, layer: int, rank: int, bad: float
) -> str:
    """A router row of `layer` is `bad` on one rank, in this call's `call`-th step alone. -> the error."""
    calls = itertools.count(1)

    def spoiled(engine: Engine, *rest: Any) -> StepResult:
        weights = engine.zero.weights
        if next(calls) == call and place.rank == rank:
            engine.zero.wait_for_weights()
            weights[GATE.format(layer)].data[1, :] = bad  # the next all-gather brings the sound one back
        return train_step(engine, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", spoiled)
        watch = StopsAfter(RunDir(folder), place, None)
        with pytest.raises(NotFiniteError) as error:
            train.run(from_dict(fields), RunDir(folder), place, watch)
        dist.destroy_process_group()  # which an error leaves
        return str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_case_060_router_logits_that_are_not_finite_are_named(
    pool: Pool, corpus: Path, tmp_path: Path, bad: float
) -> None:
    """The line of step 3 finds it; layer and rank are those of step 2, though the NaN has spread since. No id leads
    out of range meanwhile: the step ends, and so does the next."""
    spec = run_spec(corpus, 2, 2, 1, logging={"interval": 3}, training={"compute_dtype": "float32"})
    rank = 2 * owner(spec, 2) + 1  # the second data rank of the stage that holds layer 2
    path = make_run(tmp_path).path
    found = pool.run(4, poisoned_job, spec.model_dump(mode="json"), path, 2, 2, rank, bad)
    assert len(set(found)) == 1
    want = rf"not finite at step 2 \(non-finite router logits, layer 2, rank {rank}\), and at 1 of the steps up to 3"
    assert re.search(want, found[0]), found[0]
    assert "step 3 is saved" in found[0]
