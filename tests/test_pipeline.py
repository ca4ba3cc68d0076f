"""The pipeline's share of the casebook (g) and the mesh's share of (e) and (h), on processes of this machine."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pithtrain.world
from harness import Pool, Ran, assemble, batches_of, distance, first_gradients, make_spec, run_mesh, single
from pithtrain.build import build
from pithtrain.ops.cross_entropy import IGNORE
from pithtrain.ops.linear import Weight
from pithtrain.pipeline import MicroBatch
from pithtrain.spec import RunSpec, from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect

FLOAT64 = {"compute_dtype": "float64"}
NO_BALANCE = {"load_balance_type": "none", "aux_loss_coef": 0.0}


def groups_job(place: Place, fields: dict[str, Any]) -> dict[str, int]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        groups = {
            "pp": world.pp_group,
            "ep_fwd": world.ep_fwd_group,
            "ep_bwd": world.ep_bwd_group,
            "dense": world.dense_group,
            "expert": world.expert_group,
            "world": world.world_group,
        }
        return {name: 1 if group is None else group.size() for name, group in groups.items()}


@pytest.mark.parametrize("experts", [8, 2])
def test_case_009_the_expert_group_has_ep_ranks_whatever_the_number_of_experts(pool: Pool, experts: int) -> None:
    spec = make_spec(2, 1, 2, model={"num_experts": experts})
    want = {"pp": 2, "ep_fwd": 2, "ep_bwd": 2, "dense": 2, "expert": 1, "world": 4}
    assert pool.run(4, groups_job, spec.model_dump(mode="json")) == [want] * 4
    spec = make_spec(1, 2, 2, model={"num_experts": experts})
    want = {"pp": 1, "ep_fwd": 2, "ep_bwd": 2, "dense": 4, "expert": 2, "world": 4}
    assert pool.run(4, groups_job, spec.model_dump(mode="json")) == [want] * 4


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3, 5, 7, 9])
def test_case_094_every_layer_is_held_exactly_once(pool: Pool, layers: int) -> None:
    """`assemble` refuses a row that no rank, or more than one rank, holds; stages without a layer included."""
    spec = make_spec(2, 1, 1, model={"num_hidden_layers": layers, "mlp_only_layers": []}, training=FLOAT64)
    got = run_mesh(pool, spec)
    assert {name: tensor.size for name, tensor in got.masters.items()} == {
        info.name: info.size for info in spec.model.config.parameters()
    }
    want = run_mesh(pool, make_spec(model={"num_hidden_layers": layers, "mlp_only_layers": []}, training=FLOAT64))
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-12)


def test_case_095_103_the_norm_with_uneven_labels_is_that_of_the_global_mean(pool: Pool) -> None:
    """One valid label in one sequence, 64 in another: a mean of means would weigh them alike."""
    want, got = (pool.run(n, uneven_job, uneven_spec(*mesh).model_dump(mode="json")) for n, mesh in UNEVEN.items())
    reference = assemble([part[1] for part in want])
    for parts in (want, got):
        for name, grad in assemble([part[1] for part in parts]).items():
            assert distance(grad, reference[name]) < 1e-12, name
    alone = uneven_reference(uneven_spec())
    assert want[0][0] == pytest.approx(alone, rel=1e-12)
    assert got[0][0] == pytest.approx(alone, rel=1e-12)


UNEVEN = {1: (1, 1, 1), 4: (2, 1, 2)}


def uneven_spec(*mesh: int) -> RunSpec:
    return make_spec(*mesh, training={**FLOAT64, "global_batch_size": 8}, moe=NO_BALANCE)


def uneven(batches: list[MicroBatch], spec: RunSpec, first: int, stride: int) -> list[MicroBatch]:
    """Sequence 0 keeps its last label alone, 1 has none at all (case 110), the others keep all."""
    for a, batch in enumerate(batches):
        index = first + a * stride
        batch.labels[:] = batch.tokens.roll(-1, 1)
        if index < 2:
            batch.labels[:, : spec.training.sequence_length - 1 + index] = IGNORE
    return batches


def uneven_job(place: Place, fields: dict[str, Any]) -> tuple[float, Any]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        batches = uneven(batches_of(spec, engine, 0), spec, world.data_rank, world.data_size)
        grads = first_gradients(spec, engine, batches)
        return engine.zero.grad_norm().item(), grads


def test_documents_that_nobody_told_are_no_stream() -> None:
    """With the mask a micro-batch says where they are, on every rank: a stage that was not told would mask others."""
    spec = make_spec(data={"document_mask": True})
    with single(spec) as world:
        engine = build(spec, world)
        batches = [MicroBatch(batch.tokens, batch.labels) for batch in batches_of(spec, engine, 0)]
        with pytest.raises(AssertionError, match="known on every rank"):
            first_gradients(spec, engine, batches)


def uneven_reference(spec: RunSpec) -> float:
    """The norm from one run per sequence, put together by hand: sum over valid tokens, divided once."""
    total: dict[str, np.ndarray] = {}
    valid = 0
    with single(spec) as world:
        engine = build(spec, world)
        batches = uneven(batches_of(spec, engine, 0), spec, 0, 1)
        for batch in batches:
            count = int((batch.labels != IGNORE).sum())
            silent = MicroBatch(batch.tokens, torch.full_like(batch.labels, IGNORE))
            one = [batch] + [silent] * (spec.num_micro_batches - 1)
            grads = assemble([first_gradients(spec, engine, one)])
            for name, grad in grads.items():
                total[name] = total.get(name, 0) + grad * count
            valid += count
    return float(np.sqrt(sum(((g / valid) ** 2).sum() for g in total.values())))


def test_case_110_a_batch_without_any_label_trains_nothing(pool: Pool) -> None:
    parts = pool.run(2, silent_job, make_spec(1, 1, 2, moe=NO_BALANCE).model_dump(mode="json"))
    for norm, grads in parts:
        assert norm == 0.0
        assert not any(rows.any() for _, _, rows in grads.values())


def silent_job(place: Place, fields: dict[str, Any]) -> tuple[float, Any]:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        batches = batches_of(spec, engine, 0)
        for batch in batches:
            batch.labels.fill_(IGNORE)
        grads = first_gradients(spec, engine, batches)
        return engine.zero.grad_norm().item(), grads


@pytest.mark.slow
def test_case_098_a_tied_embedding_is_one_parameter_with_two_gradients(pool: Pool) -> None:
    """In the V both ends are on rank 0, so there is no copy that could drift; equality over meshes is in test_mesh."""
    spec = make_spec(2, 1, 1, model={"tie_word_embeddings": True})
    got = run_mesh(pool, spec, 3)
    assert "lm_head.weight" not in got.masters
    want = run_mesh(pool, make_spec(model={"tie_word_embeddings": True}), 3)
    name = "model.embed_tokens.weight"
    assert distance(got.masters[name], want.masters[name]) < 1e-6
    untied = run_mesh(pool, make_spec(2, 1, 1), 1)
    assert distance(got.first_grads[name], untied.first_grads[name]) > 0.1, "the head's part is in it"


@pytest.mark.slow
def test_case_099_a_stage_without_experts_clips_by_the_same_norm(pool: Pool) -> None:
    model = {"mlp_only_layers": [1, 2]}  # with pp = 2, rank 1 holds the two dense layers in the middle
    spec = make_spec(2, 1, 2, model=model, training={**FLOAT64, "max_grad_norm": 0.1})
    got = run_mesh(pool, spec, 3)
    want = run_mesh(pool, make_spec(model=model, training={**FLOAT64, "max_grad_norm": 0.1}), 3)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-12)
    for name, master in want.masters.items():
        assert distance(got.masters[name], master) < 1e-9, name


@pytest.mark.slow
def test_case_100_messages_too_large_to_be_buffered_do_not_block(pool: Pool) -> None:
    """32 MB activations: a send that waited for its receive, and a receive behind that send, would stand still."""
    model = {"hidden_size": 2048, "num_hidden_layers": 2, "mlp_only_layers": [], "vocab_size": 32}
    spec = make_spec(2, 1, 1, model=model, training={"sequence_length": 4096, "global_batch_size": 4})
    parts = pool.run(2, message_job, spec.model_dump(mode="json"), timeout_s=200)
    assert sorted(parts[0]) == sorted((k, c, s * float(c)) for k, s in (("F1", 1), ("B0", -1)) for c in range(4))


def message_job(place: Place, fields: dict[str, Any]) -> list[tuple[str, int, float]]:
    """The pipeline's own traffic with chunks that hand their input on: no compute, all messages."""
    spec = from_dict(fields)
    from pithtrain.ops.dispatch import Lane
    from pithtrain.ops.parts import Part
    from pithtrain.pipeline import Pipeline
    from pithtrain.tape import Stage, Traffic, new_stats

    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        device = torch.device("cpu")
        traffic = Traffic(8, Lane(None, device), Lane(None, device), True)
        shape = (1, spec.training.sequence_length, spec.model.config.hidden_size)
        empty = (Stage((), None, None), Stage((), None, None))
        pipeline = Pipeline(
            world, empty, traffic, shape, torch.float32, spec.num_micro_batches, Part(1, shape[1], device)
        )
        seen: list[tuple[str, int, float]] = []
        begin, end = pipeline._forward, pipeline._backward

        def first_stage(step: Any, fwd: tuple[int, int]) -> Any:
            if world.pp == 0 and fwd[0] == 0:
                step.incoming["F0", fwd[1]] = torch.full(shape, float(fwd[1]))
            return begin(step, fwd)

        def last_stage(step: Any, bwd: tuple[int, int]) -> Any:
            if world.pp == 0 and bwd[0] == 1:
                seen.append(("F1", bwd[1], step.outgoing.pop(("F1", bwd[1])).mean().item()))
                step.incoming["B1", bwd[1]] = torch.full(shape, -float(bwd[1]))
            return end(step, bwd)

        pipeline._forward, pipeline._backward = first_stage, last_stage  # type: ignore[method-assign]
        pipeline._hand_on = keep_last(pipeline._hand_on, world.pp, seen)  # type: ignore[method-assign]
        pipeline.step([], torch.ones(()), new_stats(1, 1, device, torch.float32))
        return seen


def keep_last(hand_on: Any, pp: int, seen: list[tuple[str, int, float]]) -> Any:
    def keep(step: Any, direction: str, at: tuple[int, int], out: torch.Tensor) -> None:
        if direction == "B" and pp == 0 and at[0] == 0:
            seen.append(("B0", at[1], out.mean().item()))
        else:
            hand_on(step, direction, at, out)

    return keep


# ---- (e) and (h): gradients on the mesh ------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_071_expert_gradients_are_not_scaled_by_ep(pool: Pool) -> None:
    """The ratio is 1 before any optimizer could hide it; likewise case 75 for everything upstream of an MoE block."""
    want = run_mesh(pool, make_spec(training=FLOAT64))
    got = run_mesh(pool, make_spec(1, 2, 2, training=FLOAT64))
    for name, grad in want.first_grads.items():
        assert np.linalg.norm(got.first_grads[name]) / np.linalg.norm(grad) == pytest.approx(1.0, rel=1e-9), name
    upstream = ["model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate.weight"]
    for name in upstream:
        assert distance(got.first_grads[name], want.first_grads[name]) < 1e-9, name


@pytest.mark.slow
def test_case_104_one_norm_on_every_rank_equal_to_one_process(pool: Pool) -> None:
    """`gather_ran` has compared the ranks; here one expert's large gradient reaches every rank's clip."""
    spec = make_spec(1, 1, 2, training={**FLOAT64, "max_grad_norm": 1e-2})
    got = run_mesh(pool, spec, 5)
    want = run_mesh(pool, make_spec(training={**FLOAT64, "max_grad_norm": 1e-2}), 5)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-9)
    assert min(want.norms) > 10 * 1e-2, "the clip is at work"


def wrapped_job(place: Place, fields: dict[str, Any]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """The collectives of a step on gloo, in launch order, per communicator."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        engine.zero.wait_for_weights()
        names = {id(getattr(world, f.name)): f.name for f in dataclasses.fields(world) if f.name.endswith("_group")}
        calls: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, tensor in (
                (dist, "all_to_all_single", 1),
                (dist, "all_reduce", 0),
                (pithtrain.world, "_reduce_scatter", 1),
                (pithtrain.world, "_all_gather", 1),
            ):
                original = getattr(owner, name)

                def call(
                    *args: Any, original: Any = original, name: str = name, tensor: int = tensor, **kw: Any
                ) -> Any:
                    shape = () if name == "all_to_all_single" else tuple(args[tensor].shape)  # rows differ by rank
                    calls.setdefault(names[id(kw["group"])], []).append((name, shape))
                    return original(*args, **kw)

                patch.setattr(owner, name, call)
            train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
            engine.zero.wait_for_weights()
        return calls


@pytest.mark.slow
def test_case_079_every_collective_runs_on_gloo_in_one_order_per_communicator(pool: Pool) -> None:
    """Ranks that share a communicator launch the same calls in the same order: what NCCL would hang on otherwise."""
    spec = make_spec(2, 2, 2)
    parts = pool.run(8, wrapped_job, spec.model_dump(mode="json"))
    seen = {name for part in parts for calls in part.values() for name, _ in calls}
    assert seen == {"all_to_all_single", "all_reduce", "_reduce_scatter", "_all_gather"}
    same: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        "ep_fwd_group": lambda at: at[:3],
        "ep_bwd_group": lambda at: at[:3],
        "dense_group": lambda at: at[:1],
        "expert_group": lambda at: (at[0], at[3]),
        "world_group": lambda at: (),
    }
    for purpose, key in same.items():
        groups: dict[tuple[int, ...], Any] = {}
        for rank, part in enumerate(parts):
            first = groups.setdefault(key(spec.mesh.coords(rank)), part[purpose])
            assert part[purpose] == first, f"{purpose}, rank {rank}"


@pytest.mark.slow
def test_case_081_more_ranks_than_rows(pool: Pool) -> None:
    """Experts with 3 x 2 rows over 4 ranks of one expert group, heads with 8 rows: empty shards work."""
    model = {"num_experts": 3, "moe_intermediate_size": 1, "num_experts_per_tok": 1, "head_dim": 2}
    got: Ran = run_mesh(pool, make_spec(1, 4, 1, model=model, training=FLOAT64), 3)
    want = run_mesh(pool, make_spec(model=model, training=FLOAT64), 3)
    for name, master in want.masters.items():
        assert distance(got.masters[name], master) < 1e-9, name


def test_a_bundle_put_aside_ends_the_step_with_the_embedding_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sum over ranks takes longest, so all other weight gradients of the last bundle follow it."""
    order: list[str] = []
    add = Weight.add

    def recorded(self: Weight, contribution: Any) -> None:
        order.append(self.name)
        add(self, contribution)

    monkeypatch.setattr(Weight, "add", recorded)
    spec = make_spec(model={"tie_word_embeddings": False})
    with single(spec) as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
    after = order[len(order) - order[::-1].index("model.embed_tokens.weight") :]
    first_stage = {f"model.layers.{layer}" for layer in range(spec.model.config.num_hidden_layers // 2)}
    assert after and {".".join(name.split(".")[:3]) for name in after} == first_stage
    assert any("experts" in name for name in after)
