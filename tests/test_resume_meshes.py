"""Saved on one mesh, gone on with on another: the same numbers under the same names, and the same training after."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import MODEL, Pool, assemble, batches_of, distance, make_spec, shards
from pithtrain import catalog, checkpoint
from pithtrain.build import Engine, build, initialise
from pithtrain.checkpoint import KINDS, Position, Saver
from pithtrain.spec import RunSpec, from_dict
from pithtrain.train import Outcome, train_step
from pithtrain.world import Place, connect
from test_data import make
from test_train import numbers, train, train_spec

pytestmark = pytest.mark.slow

Mesh = tuple[int, int, int]  # pp, dp, ep
Whole = dict[str, np.ndarray]
LATER = 2  # steps after the save

# five layers over 4 stages, 8 or 6 (some hold none); 97 rows of the vocabulary, 8 x 30 of experts, 49 of a dense layer
ODD = {"num_hidden_layers": 5, "vocab_size": 97, "moe_intermediate_size": 15, "intermediate_size": 49}
# (saved on, loaded on, whether `make test-fast` plays it)
PAIRS: list[tuple[Mesh, Mesh, bool]] = [
    ((1, 1, 1), (1, 1, 4), True),
    ((1, 1, 1), (2, 1, 2), False),
    ((4, 1, 1), (1, 1, 1), True),
    ((4, 1, 1), (2, 2, 1), False),
    ((4, 1, 1), (1, 1, 4), False),
    ((1, 1, 4), (1, 1, 1), True),
    ((1, 1, 4), (1, 2, 2), False),
    ((1, 1, 4), (4, 1, 1), False),
    ((1, 3, 1), (1, 2, 1), True),
    ((1, 3, 1), (1, 1, 2), False),
    ((1, 3, 1), (3, 1, 1), False),
    ((2, 1, 2), (1, 4, 1), True),
    ((2, 1, 2), (1, 1, 1), False),
    ((2, 1, 2), (1, 2, 1), False),
    ((2, 1, 2), (1, 3, 1), False),
    ((2, 1, 2), (2, 2, 1), False),
    ((2, 1, 2), (2, 1, 2), False),
]


def name_of(mesh: Mesh) -> str:
    return "pp{}dp{}ep{}".format(*mesh)


def pairs() -> list[Any]:
    return [
        pytest.param(old, new, marks=() if fast else pytest.mark.slow, id=f"{name_of(old)}-{name_of(new)}")
        for old, new, fast in PAIRS
    ]


# ---- the state, and the steps after it -------------------------------------------------------------------------------


@dataclass
class Went:
    """The state at the save (or after the load) and LATER more steps; tensors are this rank's rows, or whole."""

    state: dict[str, Any]  # kind -> tensors
    weights: Any  # what the forward of the next step uses
    updates: int
    losses: list[float]
    norms: list[float]
    counts: list[np.ndarray]
    masters: Any  # after the last step


def go_on(spec: RunSpec, engine: Engine, done: int) -> Went:
    world = engine.world
    state = {kind: shards(engine, lambda p, kind=kind: getattr(p, kind)) for kind in KINDS}
    engine.zero.wait_for_weights()
    weights = shards(engine, lambda p: p._own(p._data)[: p.master.shape[0]].float())
    went = Went(state, weights, engine.zero.updates, [], [], [], None)
    for step in range(done, done + LATER):
        result = train_step(engine, spec, batches_of(spec, engine, step), 1e-3)
        went.losses.append(world.sum(result.stats.loss.double()).item())
        went.norms.append(result.norm.item())
        went.counts.append(world.sum(result.stats.counts_LE.clone()).numpy())
    went.masters = shards(engine, lambda p: p.master)
    return went


def save_job(place: Place, fields: dict[str, Any], folder: Path, steps: int) -> Went:
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(steps):
            train_step(engine, spec, batches_of(spec, engine, step), 1e-3)
        saver = Saver(folder, engine.zero, world, {"model": {}, "tokenizer": None})
        saver.save(Position(steps, 12 * steps, 192 * steps))
        assert saver.wait() is not None
        return go_on(spec, engine, steps)


def load_job(place: Place, fields: dict[str, Any], path: Path, steps: int) -> Went:
    """Into an engine of other initial values, whose first all-gather may still be under way."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        initialise(engine.zero, 99)
        position = checkpoint.load(path, engine.zero, world, catalog.read(path))
        assert position == Position(steps, 12 * steps, 192 * steps)
        return go_on(spec, engine, steps)


def whole(parts: list[Went]) -> Went:
    for part in parts:
        assert (part.updates, part.losses, part.norms) == (parts[0].updates, parts[0].losses, parts[0].norms)
    state = {kind: assemble([part.state[kind] for part in parts]) for kind in KINDS}
    weights, masters = (assemble([getattr(part, key) for part in parts]) for key in ("weights", "masters"))
    one = parts[0]
    return Went(state, weights, one.updates, one.losses, one.norms, one.counts, masters)


def fields_of(mesh: Mesh, dtype: str, moments: str = "float32") -> dict[str, Any]:
    training = {"global_batch_size": 12, "compute_dtype": dtype}
    optimizer = {"lr": 1e-3, "moments_dtype": moments}
    return make_spec(*mesh, model=ODD, training=training, optimizer=optimizer).model_dump(mode="json")


Saved = Callable[..., tuple[Path, Went]]
Loaded = Callable[..., Went]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """saved(mesh, steps, dtype): each is trained and saved once."""

    @cache
    def save(mesh: Mesh, steps: int = 2, dtype: str = "float32") -> tuple[Path, Went]:
        folder = tmp_path_factory.mktemp(name_of(mesh))
        parts = pool.run(int(np.prod(mesh)), save_job, fields_of(mesh, dtype), folder, steps)
        return catalog.folder(folder, steps), whole(parts)

    return save


@pytest.fixture(scope="module")
def loaded(pool: Pool, saved: Saved) -> Loaded:
    """loaded(old mesh, new mesh, steps, dtype)."""

    @cache
    def load(old: Mesh, new: Mesh, steps: int = 2, dtype: str = "float32") -> Went:
        path, _ = saved(old, steps, dtype)
        return whole(pool.run(int(np.prod(new)), load_job, fields_of(new, dtype), path, steps))

    return load


def assert_same_state(got: Went, want: Went) -> None:
    assert got.updates == want.updates
    for kind in KINDS:
        assert got.state[kind].keys() == want.state[kind].keys()
        for name, tensor in want.state[kind].items():
            assert got.state[kind][name].dtype == tensor.dtype == np.float32
            np.testing.assert_array_equal(got.state[kind][name], tensor, f"{kind} of {name}")


@pytest.mark.parametrize(("old", "new"), pairs())
def test_any_mesh_loads_it_bitwise(saved: Saved, loaded: Loaded, old: Mesh, new: Mesh) -> None:
    """Case 120: masters and both moments under their canonical names, and the weights that follow from them."""
    want, got = saved(old)[1], loaded(old, new)
    assert_same_state(got, want)
    for name, weight in got.weights.items():
        np.testing.assert_array_equal(weight, want.state["master"][name], f"weight {name} follows its master")
    for name, tensor in want.state["exp_avg"].items():
        assert tensor.any() and want.state["exp_avg_sq"][name].any(), f"{name}: zeros would be equal on any mesh"


@pytest.mark.parametrize(("old", "new"), pairs())
def test_case_120_training_goes_on_as_the_straight_run(saved: Saved, loaded: Loaded, old: Mesh, new: Mesh) -> None:
    """Against the saver, which went on on its own mesh; the bounds are those of DESIGN.md section 4."""
    want, got = saved(old)[1], loaded(old, new)
    for got_counts, want_counts in zip(got.counts, want.counts, strict=True):
        np.testing.assert_array_equal(got_counts, want_counts, "experts chosen")
    same = old == new
    np.testing.assert_allclose(got.losses, want.losses, rtol=0 if same else 1e-6, atol=0)
    np.testing.assert_allclose(got.norms, want.norms, rtol=0 if same else 1e-5, atol=0)
    for name, master in want.masters.items():
        assert distance(got.masters[name], master) <= (0 if same else 1e-4), name
        moved = distance(master, want.state["master"][name])
        assert moved > 5e-4, f"{name}: it moved so little that its bound says nothing"


@pytest.mark.slow
def test_case_120_moments_of_a_bf16_run_stay_fp32(saved: Saved, loaded: Loaded) -> None:
    old, new = (2, 1, 2), (1, 2, 1)
    want, got = saved(old, dtype="bfloat16")[1], loaded(old, new, dtype="bfloat16")
    assert_same_state(got, want)
    for kind in KINDS:
        tensor = torch.from_numpy(got.state[kind]["lm_head.weight"])
        assert not torch.equal(tensor.bfloat16().float(), tensor), f"{kind} has more digits than bf16 holds"


@pytest.mark.parametrize(
    ("old", "new"),
    [((2, 1, 2), (2, 1, 2)), ((2, 1, 2), (1, 3, 1)), ((1, 1, 4), (1, 1, 1)), ((1, 3, 1), (2, 2, 1))],
    ids=name_of,
)
def test_bf16_moments_on_any_mesh(pool: Pool, tmp_path: Path, old: Mesh, new: Mesh) -> None:
    """State bitwise, and then the training: on the mesh that saved it bitwise too, random bits included."""
    fields, moved = (fields_of(mesh, "float32", "bfloat16") for mesh in (old, new))
    want = whole(pool.run(int(np.prod(old)), save_job, fields, tmp_path, 2))
    path = catalog.folder(tmp_path, 2)
    got = whole(pool.run(int(np.prod(new)), load_job, moved, path, 2))
    assert_same_state(got, want)
    kinds = {key.partition("/")[0]: one["dtype"] for key, one in catalog.read(path)["tensors"].items()}
    assert kinds == {"master": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}
    assert [*checkpoint.verify(path, lambda *_: None)] == []
    same = old == new
    np.testing.assert_allclose(got.losses, want.losses, rtol=0 if same else 1e-6, atol=0)
    for name, master in want.masters.items():
        assert distance(got.masters[name], master) <= (0 if same else 1e-4), name


@pytest.mark.parametrize(("saved_in", "loaded_in"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_are_loaded_in_another_type(pool: Pool, tmp_path: Path, saved_in: str, loaded_in: str) -> None:
    """On another mesh: bf16 widened, or fp32 to the nearest bf16; masters are untouched, and training goes on. One
    changed bit is seen before it could be rounded away."""
    old, new = (2, 1, 2), (1, 3, 1)
    want = whole(pool.run(4, save_job, fields_of(old, "float32", saved_in), tmp_path, 2))
    path, fields = catalog.folder(tmp_path, 2), fields_of(new, "float32", loaded_in)
    got = whole(pool.run(3, load_job, fields, path, 2))
    for name, tensor in want.state["exp_avg_sq"].items():
        whole_sq = torch.from_numpy(tensor)
        expected = whole_sq if saved_in == "bfloat16" else whole_sq.bfloat16().float()
        np.testing.assert_array_equal(got.state["exp_avg_sq"][name], expected.numpy(), name)
        np.testing.assert_array_equal(got.state["master"][name], want.state["master"][name], name)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-3, atol=0)
    assert got.losses[0] == pytest.approx(want.losses[0], rel=1e-6), "moments have no part in the next loss"
    file, at = where(path, "exp_avg_sq/lm_head.weight")
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(AssertionError, match=r"DamagedError.*exp_avg_sq/lm_head.weight"):
        pool.run(3, load_job, fields, path, 2)


def where(path: Path, key: str) -> tuple[Path, int]:
    """The file and the place of the first value of a tensor."""
    values = checkpoint.Reader(path).tensor(key).flatten()[:4].view(torch.int16).numpy().tobytes()
    return next((f, f.read_bytes().index(values)) for f in path.glob("*.distcp") if values in f.read_bytes())


@pytest.mark.slow
def test_case_119_the_moments_of_every_expert_come_back_to_it(saved: Saved, loaded: Loaded) -> None:
    """ep = 2 after ten steps, resumed on 2 and on 4 ranks. No two experts of a layer have like moments, so one that
    lands with another's would show."""
    want = saved((1, 1, 2), 10)[1]
    names = [name for name in want.state["master"] if ".experts." in name]
    assert len(names) == 2 * 4, "two projections in each of four layers"
    for new in ((1, 1, 2), (1, 1, 4)):
        got = loaded((1, 1, 2), new, 10)
        for kind in ("exp_avg", "exp_avg_sq"):
            for name in names:
                mine, theirs = (went.state[kind][name].reshape(MODEL["num_experts"], -1) for went in (got, want))
                assert len(np.unique(theirs, axis=0)) == len(theirs)
                for expert, moments in enumerate(theirs):
                    np.testing.assert_array_equal(mine[expert], moments, f"{kind} of expert {expert} of {name}")


def publish_job(place: Place, fields: dict[str, Any]) -> int:
    """How often the weights are not those of the last of two publishes."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        zero = build(spec, world).zero
        wrong = 0
        for turn in range(10):
            for value in (2.0 * turn, 2.0 * turn + 1):
                for one in zero.sharded.values():
                    one.master.fill_(value)
                zero.publish()
            zero.wait_for_weights()
            wrong += any(bool((one.weight.data != value).any()) for one in zero.sharded.values())
        return wrong


def test_a_load_during_the_first_all_gather_leaves_the_loaded_weights(pool: Pool) -> None:
    """A load publishes while the initial values' all-gather may be under way; two in flight land in any order."""
    spec = make_spec(1, 1, 4)
    assert pool.run(4, publish_job, spec.model_dump(mode="json")) == [0] * 4


# ---- the learning rate -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(7)
    documents = [rng.integers(10, MODEL["vocab_size"], 40).tolist() for _ in range(20)]
    return make(tmp_path_factory.mktemp("corpus") / "made", documents, MODEL["vocab_size"]) / "tokens"


def scheduled(corpus: Path, max_steps: int, **schedule: Any) -> RunSpec:
    training = {"max_steps": max_steps, "global_batch_size": 2, "sequence_length": 8}
    return train_spec(corpus, training=training, model={"num_hidden_layers": 2}, lr_scheduler=schedule)


def played(pool: Pool, spec: RunSpec, folder: Path, stops: list[int]) -> list[tuple[int, float, float, float]]:
    """(step, loss, norm, lr) of every step of a run that is stopped after these steps and resumed each time."""
    at = 0
    for stop in stops:
        assert train(pool, spec, folder, stop_after=stop - at) == Outcome(stop, finished=False)
        at = stop
    assert train(pool, spec, folder) == Outcome(spec.training.max_steps, finished=True)
    return numbers(folder)


def test_case_117_a_cosine_of_40_steps_resumed_at_10_and_20(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    spec = scheduled(corpus, 40, type="cosine", warmup_steps=5, min_lr=1e-5)
    want = played(pool, spec, tmp_path / "straight", [])
    assert [step for step, *_ in want] == list(range(1, 41))
    rates = [lr for *_, lr in want]
    assert max(rates) == rates[4] == spec.optimizer.lr
    assert len(set(rates[5:])) == 35, "each rate tells its step"
    assert played(pool, spec, tmp_path / "stopped", [10, 20]) == want


@pytest.mark.parametrize(
    "schedule",
    [
        {"type": "cosine", "warmup_steps": 2},
        pytest.param({"type": "linear", "warmup_steps": 3, "decay_steps": 5, "min_lr": 1e-4}, marks=pytest.mark.slow),
        pytest.param({"type": "wsd", "warmup_steps": 1, "decay_steps": 3}, marks=pytest.mark.slow),
    ],
    ids=lambda schedule: schedule["type"],
)
def test_case_118_resumed_at_each_step_in_turn(
    pool: Pool, corpus: Path, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    """In the warm-up, at its end, at the peak, in the decay, before the last step; and at all of them in one run."""
    spec = scheduled(corpus, 6, **schedule)
    want = played(pool, spec, tmp_path / "straight", [])
    for stop in range(1, 6):
        assert played(pool, spec, tmp_path / str(stop), [stop]) == want, f"resumed at {stop}"
    assert played(pool, spec, tmp_path / "all", [1, 2, 3, 4, 5]) == want
