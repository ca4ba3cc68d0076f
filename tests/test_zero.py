"""ZeRO-1 against torch's own AdamW with a plain clip; skipped steps; buckets; the norm counts each parameter once."""

from typing import Any

import numpy as np
import pytest
import torch

from harness import Pool, Shards, assemble, batches_of, distance, first_gradients, make_spec, play, shards, single
from pithtrain.build import build, initialise
from pithtrain.spec import from_dict
from pithtrain.tape import new_stats
from pithtrain.train import loss_scale, train_step
from pithtrain.world import Place, connect
from pithtrain.zero import Sharded

STEPS = 3
LR = 3e-3


def trajectory_job(place: Place, fields: dict[str, Any]) -> list[tuple[Shards, Shards, float]]:
    """Per step: gradients, masters after it, norm."""
    spec = from_dict(fields)
    found = []
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(STEPS):
            batches = batches_of(spec, engine, step)
            grads = first_gradients(spec, engine, batches)
            norm = train_step(engine, spec, batches, LR).norm.item()
            found.append((grads, shards(engine, lambda p: p.master), norm))
    return found


@pytest.mark.parametrize(
    ("mesh", "max_norm"),
    [
        ((2, 1, 2), 0.05),
        *(
            pytest.param(mesh, max_norm, marks=pytest.mark.slow)
            for mesh, max_norm in [((1, 1, 1), 0.05), ((1, 2, 2), 0.05)]
            + [(mesh, None) for mesh in [(1, 1, 1), (2, 1, 2), (1, 2, 2)]]
        ),
    ],
)
def test_update_is_adamw_with_a_global_clip(pool: Pool, mesh: tuple[int, int, int], max_norm: float | None) -> None:
    training = {"max_grad_norm": max_norm, "compute_dtype": "float64"}
    spec = make_spec(*mesh, training=training, optimizer={"weight_decay": 0.3})
    parts = pool.run(spec.world_size, trajectory_job, spec.model_dump(mode="json"))
    table = {info.name: info for info in spec.model.config.parameters()}
    with single(make_spec()) as world:
        start = build(make_spec(training=training), world)
        params = {n: torch.nn.Parameter(one.master.clone()) for n, one in start.zero.sharded.items()}
    o = spec.optimizer
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in params.items() if table[n].decay], "weight_decay": o.weight_decay},
            {"params": [p for n, p in params.items() if not table[n].decay], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
    )
    for step in range(STEPS):
        grads = assemble([part[step][0] for part in parts])
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        assert all(part[step][2] == pytest.approx(norm, rel=1e-12) for part in parts), "each parameter counts once"
        scale = 1.0 if max_norm is None else min(1.0, max_norm / norm)
        for name, p in params.items():
            p.grad = torch.from_numpy(grads[name] * scale)
        reference.step()
        masters = assemble([part[step][1] for part in parts])
        for name, p in params.items():  # the clip factor is an fp32 number inside torch's fused kernel
            assert distance(masters[name], p.detach().numpy()) < 1e-8, name


def test_decay_reaches_matrices_alone() -> None:
    """Case 111: zero gradients, so whatever shrinks was decayed."""
    spec = make_spec(model={"attention_bias": True}, optimizer={"weight_decay": 0.5})
    with single(spec) as world:
        engine = build(spec, world)
        for one in engine.zero.sharded.values():
            one.master.fill_(1.0)
        engine.zero.update(engine.optimizer, 0.1, torch.zeros(()), 1.0, engine.counts_LE, 0.0)
        shrunk = {n for n, one in engine.zero.sharded.items() if (one.master != 1.0).any()}
    assert shrunk == {n for n in engine.zero.sharded if not n.endswith(("norm.weight", "layernorm.weight", ".bias"))}
    assert len(shrunk) < len(engine.zero.sharded)


def nan_job(place: Place, fields: dict[str, Any]) -> tuple[float, int, bool]:
    """One rank's gradient has a NaN: (skipped, updates, whether the masters stayed as they were)."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), LR)
        before = [one.master.clone() for one in engine.zero.sharded.values()]
        first_gradients(spec, engine, batches_of(spec, engine, 1))
        if place.rank == 1:
            next(one for one in engine.zero.sharded.values() if one.grad.numel()).grad.view(-1)[0] = float("nan")
        norm = engine.zero.grad_norm()
        skipped = engine.zero.update(engine.optimizer, LR, norm, 1.0, engine.counts_LE, 0.0)
        same = all(torch.equal(one.master, old) for one, old in zip(engine.zero.sharded.values(), before, strict=True))
        return skipped.item(), engine.zero.updates, same


def test_a_nan_on_one_rank_skips_the_update_on_all(pool: Pool) -> None:
    spec = make_spec(2, 1, 2)
    assert pool.run(4, nan_job, spec.model_dump(mode="json")) == [(1.0, 1, True)] * 4


def test_missing_contribution_is_noticed() -> None:
    """A weight gradient that never arrives, or arrives twice, is an assertion and not a wrong update."""
    spec = make_spec()
    with single(spec) as world:
        engine = build(spec, world)
        engine.zero.begin_step(spec.num_micro_batches + 1)
        batches = batches_of(spec, engine, 0)
        stats = new_stats(4, 8, world.device, torch.float32)
        engine.pipeline.step(batches, torch.ones(()), stats)
        with pytest.raises(AssertionError, match="are missing"):
            engine.zero.grad_norm()
        engine.zero.begin_step(spec.num_micro_batches - 1)
        with pytest.raises(AssertionError, match="after its bucket was reduced"):
            engine.pipeline.step(batches, torch.ones(()), stats)


def test_weights_are_waited_for_before_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight of a step is poison until its layer, or it by name, is asked for; what nobody asks for stays so."""
    spec = make_spec(model={"num_hidden_layers": 3})
    with single(spec) as world:
        engine = build(spec, world)
        other = build(spec, world)
        want = play(other, spec, batches_of(spec, other, 0)).loss
        zero, asked = engine.zero, []
        zero.wait_for_weights()
        right = {name: one.weight.data.clone() for name, one in zero.sharded.items()}
        for one in zero.sharded.values():
            one.weight.data.fill_(float("nan"))

        class Landing:
            def __init__(self, name: str):
                self.name = name

            def wait(self) -> None:
                asked.append(self.name)
                zero.sharded[self.name].weight.data.copy_(right[self.name])

        for unit, members in zero._units.items():
            zero._coming[unit] = [Landing(one.info.name) for one in members]  # pyright: ignore[reportArgumentType]
        assert play(engine, spec, batches_of(spec, engine, 0)).loss == want
        assert sorted(asked) == sorted(right) and asked[0] == "model.embed_tokens.weight"
        zero.wait_for_weights()
        assert len(asked) == len(right)  # once


def scale_job(place: Place, fields: dict[str, Any]) -> tuple[float, int, list[bool]]:
    """The scale, this rank's valid tokens, and of each sum whether it was over the world."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world, pytest.MonkeyPatch.context() as patch:
        engine, groups, summed = build(spec, world), [], torch.distributed.all_reduce

        def noted(tensor: torch.Tensor, *rest: Any, group: Any = None, **more: Any) -> Any:
            groups.append(group is world.world_group)
            return summed(tensor, *rest, group=group, **more)

        patch.setattr(torch.distributed, "all_reduce", noted)
        batches = batches_of(spec, engine, 0)
        valid = sum(int((batch.labels >= 0).sum()) for batch in batches)
        return loss_scale(batches, engine).item(), valid, groups


def test_a_step_begins_without_a_sum_behind_the_weights_of_the_last(pool: Pool) -> None:
    """Operations of one group run in order, and those of data ranks still carry the new weights."""
    spec = make_spec(2, 1, 2)
    parts = pool.run(4, scale_job, spec.model_dump(mode="json"))
    valid = sum(one for _, one, _ in parts)
    assert [groups for *_, groups in parts] == [[True]] * 4 and {scale for scale, *_ in parts} == {parts[0][0]}
    assert parts[0][0] == pytest.approx(1 / valid)


def init_job(place: Place, fields: dict[str, Any]) -> Shards:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        initialise(engine.zero, spec.training.seed)
        return shards(engine, lambda p: p.master)


def test_initial_weights_do_not_depend_on_the_mesh(pool: Pool) -> None:
    """Cases 80 and 102: bitwise equal on every mesh, five layers over four stages included; no two experts alike."""
    model = {"num_hidden_layers": 5}
    want = assemble(pool.run(1, init_job, make_spec(model=model).model_dump(mode="json")))
    for mesh in [(1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 2, 1), (3, 1, 1)]:
        spec = make_spec(*mesh, model=model)
        got = assemble(pool.run(spec.world_size, init_job, spec.model_dump(mode="json")))
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            np.testing.assert_array_equal(got[name], tensor, f"{name} on {mesh}")
    matrices = [t.reshape(8, -1) for n, t in want.items() if n.endswith("experts.down_proj")]
    experts = np.concatenate(matrices)
    assert len(np.unique(experts, axis=0)) == len(experts)


def overlap_job(place: Place, fields: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of parameters whose reduction starts before the last action of a step, and of those after."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        actions = engine.pipeline.actions
        reduced: list[tuple[int, str]] = []
        begun = 0
        communicate, reduce = engine.pipeline._communicate, Sharded.reduce

        def counting(*args: Any) -> None:  # called once before each action
            nonlocal begun
            begun += 1
            communicate(*args)

        def recording(self: Sharded) -> Any:
            reduced.append((begun, self.info.name))
            return reduce(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.pipeline, "_communicate", counting)
            patch.setattr(Sharded, "reduce", recording)
            first_gradients(spec, engine, batches_of(spec, engine, 0))
        early = [name for turn, name in reduced if turn < len(actions)]
        return early, [name for turn, name in reduced if turn >= len(actions)]


def test_reductions_start_while_other_layers_still_compute(pool: Pool) -> None:
    spec = make_spec(2, 2, 1, model={"num_hidden_layers": 8})
    for early, late in pool.run(4, overlap_job, spec.model_dump(mode="json")):
        assert len(early) >= len(late) > 0, f"only {early} are reduced before the last action"


@pytest.mark.slow
def test_the_norm_of_a_large_tensor_is_exact() -> None:
    """4 M elements: an fp32 sum of squares is 8e-5 off, and the clip would depend on how a mesh cuts the tensor."""
    spec = make_spec(model={"vocab_size": 4096, "hidden_size": 1024}, training={"sequence_length": 2})
    with single(spec) as world:
        engine = build(spec, world)
        for one in engine.zero.sharded.values():
            one.grad.copy_(torch.randn(one.grad.shape, generator=torch.Generator().manual_seed(1)))
        want = sum(one.grad.double().square().sum() for one in engine.zero.sharded.values()) ** 0.5
        assert engine.zero.grad_norm().item() == pytest.approx(float(want), rel=1e-9)
