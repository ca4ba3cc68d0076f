"""bf16 moments: the rounding, what it is keyed by, and a whole update with it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import Pool, Shards, assemble, batches_of, distance, make_spec, run_mesh, shards, single
from pithtrain.build import Engine, build
from pithtrain.ops import rounding
from pithtrain.ops.init import hash32, keys_of
from pithtrain.ops.rounding import round_to_bf16, rounding_keys, store_moments
from pithtrain.spec import from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect
from test_mesh import assert_bitwise, assert_same_run, mesh_name

BF16 = {"moments_dtype": "bfloat16", "lr": 1e-3}
EXACT = {**BF16, "betas": [0.5, 0.75]}
KEYS = rounding_keys(7, "w")


def rounded(values: Tensor, update: int = 1, first: int = 0, keys: tuple[int, int] = KEYS) -> tuple[Tensor, Tensor]:
    """Both moments given the same values."""
    out, out_sq = (torch.empty_like(values, dtype=torch.bfloat16) for _ in range(2))
    store_moments((out, out_sq), (values, values), keys, torch.tensor(float(update)), first)
    return out, out_sq


# ---- the rounding ----------------------------------------------------------------------------------------------------


def test_every_value_of_the_16_bits_is_counted_right() -> None:
    """Over all 2^16 random numbers a value goes up as often as its lower 16 bits say: the mean is exact."""
    noise = torch.arange(1 << 16)
    for value in (1.0, 1.001, -1.001, 3.14159e-3, -2.71828e20, 1e-40, 1.9999999, float(2**-126)):
        x = torch.tensor(value)
        got = round_to_bf16(x.expand(1 << 16).contiguous(), noise).double()
        low = torch.tensor(x.view(torch.int32).item() & ~0xFFFF, dtype=torch.int32).view(torch.float32).double()
        assert len(got.unique()) <= 2 and low in got, "one of the two neighbours"
        assert got.mean().item() == pytest.approx(x.double().item(), rel=1e-12)
        spacing = (got - low).abs().max()
        assert spacing == 0 or (x - low).abs() < spacing <= low.abs().clamp(min=2.0**-126) * 2**-7


def test_what_bf16_holds_and_what_is_not_finite_pass_through() -> None:
    held = torch.randn(1000).bfloat16().float()
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    for values in (held, special):
        for noise in (0, 0xFFFF):
            got = round_to_bf16(values, torch.full(values.shape, noise))
            assert torch.equal(got.view(torch.int16), values.bfloat16().view(torch.int16))
    strange = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(strange, torch.full((3,), 0xFFFF)).isnan().all(), "no carry, and no bit that is cut off"
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert round_to_bf16(largest, torch.tensor([0])).isfinite() and round_to_bf16(largest, torch.tensor([1])).isinf()


@pytest.mark.parametrize(
    "over", ["elements", *(pytest.param(x, marks=pytest.mark.slow) for x in ("updates", "names", "seeds"))]
)
def test_unbiased_over_whatever_it_is_keyed_by(over: str) -> None:
    """Five standard deviations of a mean of 4096; both moments, and what they have in common is nothing."""
    n = 4096
    x = torch.full((n,), 1.0 + 0.3 * 2**-7)
    if over == "elements":
        pair = rounded(x, first=(1 << 32) - n // 2)  # where the index gets a second half
    else:
        one = x[:1]
        keyed: dict[str, Any] = {
            "updates": lambda i: rounded(one, update=1 + i),
            "names": lambda i: rounded(one, keys=rounding_keys(0, str(i))),
            "seeds": lambda i: rounded(one, keys=rounding_keys(i, "w")),
        }
        both = [keyed[over](i) for i in range(n)]
        pair = tuple(torch.cat(column) for column in zip(*both, strict=True))
    ups = [(y.double() > 1).double() for y in pair]
    deviation = 5 * (0.3 * 0.7 / n) ** 0.5
    assert all(abs(up.mean().item() - 0.3) < deviation for up in ups)
    assert abs((ups[0] * ups[1]).mean().item() - 0.09) < 5 * (0.09 * 0.91 / n) ** 0.5


def test_neighbours_in_index_and_in_time_have_nothing_in_common() -> None:
    bits = torch.stack([hash32(torch.arange(1 << 14), KEYS[0], step) for step in range(4)]).double() / 2**32 - 0.5
    for a, b in ((bits[0], bits[1]), (bits[0, 1:], bits[0, :-1]), (bits[0, 1:], bits[3, :-1])):
        assert abs((a * b).mean().item()) < 5 / 12 / len(a) ** 0.5


def test_a_second_moment_that_falls_from_1_to_a_quarter_gets_there() -> None:
    """ENGINE.md section 7: to the nearest it stays at 1.0 for beta2 = 0.999, and at 0.27 for 0.95."""
    for beta2, updates, stalls_at in ((0.999, 3000, 1.0), (0.95, 300, 0.27)):
        nearest = torch.ones(256, dtype=torch.bfloat16)
        first, second = torch.zeros_like(nearest), torch.ones_like(nearest)
        for update in range(1, updates + 1):
            nearest = (beta2 * nearest.float() + (1 - beta2) * 0.25).bfloat16()
            values = first.float(), beta2 * second.float() + (1 - beta2) * 0.25
            store_moments((first, second), values, KEYS, torch.tensor(float(update)), 0)
        exact = 0.25 + 0.75 * beta2**updates
        assert nearest[0].item() == pytest.approx(stalls_at, rel=0.01)
        assert second.float().mean().item() == pytest.approx(exact, rel=5e-3)
        assert second.float().std().item() < 0.05 * exact
        assert not first.any()


# ---- in an engine ----------------------------------------------------------------------------------------------------


def test_keys_are_others_than_those_of_the_initial_values() -> None:
    assert {*rounding_keys(3, "w")}.isdisjoint(keys_of(3, "w")[:4])


def test_blocks_of_a_large_moment_go_on_where_the_one_before_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    whole = rounded(values)
    monkeypatch.setattr(rounding, "BLOCK", 1000)
    assert all(torch.equal(a, b) for a, b in zip(whole, rounded(values), strict=True))


def given(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    """A whole gradient, the same on every mesh; 64ths, so that EXACT moments need no rounding to fp32."""
    seed = [step, *name.encode()]
    return torch.from_numpy(np.random.default_rng(seed).integers(-127, 128, shape).astype(np.float32) / 64)


def fill(engine: Engine, step: int) -> None:
    for name, one in engine.zero.sharded.items():
        rows = given(name, step, one.info.stored_shape)[one.first_row :]
        one.grad.copy_(rows[: len(one.grad)])


def update_job(place: Place, fields: dict[str, Any], skip: int) -> list[Shards]:
    """Four updates by given gradients, one of them skipped: masters and both moments."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(4):
            fill(engine, step)
            norm = torch.tensor(float("nan") if step == skip else 8.0)
            engine.zero.update(engine.optimizer, 1e-2, norm, 1.0, engine.counts_LE, 0.0)
        return [shards(engine, lambda p, kind=kind: getattr(p, kind)) for kind in ("master", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("mesh", [(1, 1, 2), pytest.param((2, 1, 2), marks=pytest.mark.slow), (1, 3, 1)], ids=mesh_name)
def test_the_random_bits_of_an_element_go_with_it_to_any_mesh(pool: Pool, mesh: tuple[int, int, int]) -> None:
    """By the same gradients moments are bitwise the same, of matrices with sizes that nothing divides. torch's own
    update rounds the last elements of a shard otherwise than the first: exact numbers hide that in the moments."""
    sizes = {"vocab_size": 97, "moe_intermediate_size": 15, "intermediate_size": 49}
    training = {"global_batch_size": 12}
    specs = [make_spec(*each, model=sizes, training=training, optimizer=EXACT) for each in ((), mesh)]
    want, got = (
        [assemble(list(kind)) for kind in zip(*parts, strict=True)]
        for parts in (pool.run(s.world_size, update_job, s.model_dump(mode="json"), 1) for s in specs)
    )
    for kind, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for name, tensor in theirs.items():
            np.testing.assert_allclose(mine[name], tensor, rtol=0, atol=1e-7 if kind == 0 else 0, err_msg=name)


def test_a_skipped_update_leaves_moments_alone_and_takes_no_random_bits() -> None:
    """The state after it is bitwise the one before, and what follows is as if it had not been."""
    spec = make_spec(optimizer=BF16)
    with single(spec) as world:
        found = []
        for steps in ([0, 1, None, 2], [0, 1, 2]):
            engine = build(spec, world)
            for step in steps:
                before = {n: (p.exp_avg.clone(), p.exp_avg_sq.clone()) for n, p in engine.zero.sharded.items()}
                fill(engine, step or 0)
                norm = torch.tensor(float("nan") if step is None else 5.0)
                engine.zero.update(engine.optimizer, 1e-2, norm, 1.0, engine.counts_LE, 0.0)
                for name, one in engine.zero.sharded.items():
                    same = torch.equal(one.exp_avg, before[name][0]) and torch.equal(one.exp_avg_sq, before[name][1])
                    assert same == (step is None), name
            assert engine.zero.updates == 3
            found.append([getattr(p, k) for p in engine.zero.sharded.values() for k in ("master", "exp_avg_sq")])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_update_takes_the_moments_before_they_are_rounded() -> None:
    """The first one is fp32's bit for bit, moments are its own rounded; after four the masters differ by little."""
    with single(make_spec()) as world:
        wide, narrow = (build(make_spec(optimizer=o), world) for o in ({"lr": 1e-3}, BF16))
        for step in range(4):
            for engine in (wide, narrow):
                fill(engine, step)
                engine.zero.update(engine.optimizer, 1e-2, torch.tensor(0.5), 1.0, engine.counts_LE, 0.0)
            for name, one in wide.zero.sharded.items():
                mine = narrow.zero.sharded[name]
                assert mine.exp_avg.dtype == mine.exp_avg_sq.dtype == torch.bfloat16
                if step == 0:
                    assert torch.equal(mine.master, one.master)
                for kind in ("exp_avg", "exp_avg_sq"):
                    exact, found = getattr(one, kind), getattr(mine, kind).float()
                    scale = exact.abs().amax() if kind == "exp_avg" else exact.abs()  # a first moment may cancel
                    assert ((found - exact).abs() <= (step + 1) * 2**-7 * scale).all(), (name, kind, step)
        for name, one in wide.zero.sharded.items():
            assert 0 < distance(narrow.zero.sharded[name].master.numpy(), one.master.numpy()) < 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2)], ids=mesh_name)
def test_a_training_equals_one_process(pool: Pool, mesh: tuple[int, int, int]) -> None:
    """Gradients differ in their last bits from mesh to mesh, which turns one rounding in some ten thousand: the bounds
    are those of fp32 moments."""
    one, got = (run_mesh(pool, make_spec(*each, optimizer=BF16), 5) for each in ((), mesh))
    assert_same_run(got, one, loss=1e-6, grads=1e-5, parameters=1e-4)


@pytest.mark.slow
def test_a_rerun_is_bitwise_equal_and_another_seed_rounds_otherwise(pool: Pool) -> None:
    spec = make_spec(1, 1, 2, optimizer=BF16)
    assert_bitwise(*(run_mesh(pool, spec, 3) for _ in range(2)))
    assert rounding_keys(0, "w") != rounding_keys(1, "w") != rounding_keys(1, "v")


@pytest.mark.slow
def test_the_loss_is_that_of_fp32_moments_over_a_hundred_steps() -> None:
    """Eight batches over and over, until they are half known by heart. Cut instead of rounded, they are 1 % off."""
    losses = []
    for moments in ("float32", "bfloat16"):
        optimizer = {"lr": 1e-3, "betas": [0.9, 0.999], "moments_dtype": moments}
        spec = make_spec(optimizer=optimizer, training={"global_batch_size": 4}, model={"num_hidden_layers": 2})
        with single(spec) as world:
            engine = build(spec, world)
            steps = [train_step(engine, spec, batches_of(spec, engine, n % 8), 1e-3) for n in range(120)]
            losses.append(np.array([step.stats.loss.item() for step in steps]))
    wide, narrow = losses
    assert wide[-8:].mean() < 0.6 * wide[:8].mean(), "it has learnt"
    assert (wide != narrow).any()
    assert narrow[-24:].mean() == pytest.approx(wide[-24:].mean(), rel=0.003)
    assert np.abs(narrow / wide - 1).max() < 0.02
