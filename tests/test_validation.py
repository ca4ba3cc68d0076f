"""Held-out text: its loss is that of training's forward, the same on every mesh, and looking at it changes nothing."""

import errno
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from harness import ALONE, MODEL, Alive, Pool, batches_of, make_spec, play, single
from pithtrain import catalog, checkpoint, rundir, tape
from pithtrain.batches import read_batches
from pithtrain.build import build, device_type
from pithtrain.data import Dataset
from pithtrain.errors import DataError
from pithtrain.events import Events
from pithtrain.ops import fp8
from pithtrain.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_loss
from pithtrain.ops.linear import Weight
from pithtrain.pipeline import Pipeline
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec, from_dict
from pithtrain.tape import new_stats
from pithtrain.train import Outcome, loss_scale, run
from pithtrain.watch import Watch
from pithtrain.world import Place, connect
from test_data import make
from test_train import StopsAt, alone, events, lines, make_run, numbers, stop_job, train

SAMPLES = 11  # of the odd corpus: no number of ranks or micro-batches divides them


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`train`; `even` and `odd`, with as many documents as they like; `other`, of another tokenizer."""
    place, rng = tmp_path_factory.mktemp("held-out"), np.random.default_rng(5)

    def corpus(name: str, tokens: int, vocab: int = MODEL["vocab_size"]) -> Path:
        documents: list[list[int]] = []
        while (left := tokens - sum(len(ids) + 1 for ids in documents)) > 1:
            documents.append(rng.integers(10, vocab, min(int(rng.integers(3, 40)), left - 1)).tolist())
        return make(place / name, documents, vocab) / "tokens"

    made = {name: corpus(name, tokens) for name, tokens in (("train", 4000), ("even", 16 * 16 + 1))}
    return made | {"odd": corpus("odd", SAMPLES * 16 + 3), "other": corpus("other", 400, 80)}


def spec_of(corpora: dict[str, Path], *mesh: int, sources: tuple[str, ...] = ("odd",), **sections: Any) -> RunSpec:
    named = [{"path": str(corpora[name]), "name": name} for name in sources]
    data = {"sources": [{"path": str(corpora["train"])}], "repeat": True, "document_mask": True}
    sections["validation"] = {"interval": 2, "sources": named, **sections.get("validation", {})}
    sections["training"] = {"max_steps": 5, "global_batch_size": 8, **sections.get("training", {})}
    return make_spec(*(mesh or (1, 1, 1)), **{"data": data, **sections})


def val_loss(folder: Path, name: str = "odd") -> dict[int, float]:
    return {row["step"]: row[f"val_loss/{name}"] for row in lines(folder) if f"val_loss/{name}" in row}


# ---- the forwards alone ----------------------------------------------------------------------------------------------


def evaluate_job(place: Place, fields: dict[str, Any]) -> tuple[bool, bool]:
    """Whether loss and counts are bitwise those of the step, and whether nothing else has changed."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, device_type(spec), spec.distributed) as world:
        engine = build(spec, world)
        batches, config = batches_of(spec, engine, 0), spec.model.config
        trained = play(engine, spec, batches)
        weights = list(engine.zero.weights.values())
        for weight in weights:
            weight.main_grad.fill_(math.nan)
        before = [(weight.beta, weight.version, weight.data.clone()) for weight in weights]
        seen = new_stats(config.num_hidden_layers, config.num_experts, world.device, trained.loss.dtype)
        engine.pipeline.evaluate(batches, loss_scale(batches, engine), seen)
        same = all(torch.equal(getattr(seen, key), getattr(trained, key)) for key in ("loss", "counts_LE", "balance_L"))
        left = [(weight.beta, weight.version) == (b, v) for weight, (b, v, _) in zip(weights, before, strict=True)]
        left += [torch.equal(weight.data, data) for weight, (*_, data) in zip(weights, before, strict=True)]
        left += [bool(weight.main_grad.isnan().all()) for weight in weights]
        return same, all(left)


FAMILIES = ("qwen3_moe", "deepseek_v2", "gpt_oss")
MESHES = [
    (1, 1, 1, 1),
    *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 1, 2, 1), (2, 1, 1, 2), (4, 1, 1, 1))),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_is_the_forward_of_a_step_and_leaves_nothing(
    pool: Pool, family: str, mode: str, mesh: tuple[int, int, int, int]
) -> None:
    layers = {"num_hidden_layers": 8} if mesh[0] == 4 and family != "gpt_oss" else {}
    data = {"sources": [{"path": "unused"}], "document_mask": True}
    spec = make_spec(*mesh, architecture=family, model=layers, data=data, activation_checkpoint={"mode": mode})
    assert pool.run(spec.world_size, evaluate_job, spec.model_dump(mode="json")) == [(True, True)] * spec.world_size


@pytest.mark.slow
def test_an_evaluation_keeps_one_chunk() -> None:
    """Its memory is that of one stage and one micro-batch, however many there are."""
    peaks: list[int] = []
    for count in (2, 8):
        spec = make_spec(training={"global_batch_size": count})
        with single(spec) as world:
            engine, config = build(spec, world), spec.model.config
            batches, dtype = batches_of(spec, engine, 0), torch.float32
            stats = new_stats(config.num_hidden_layers, config.num_experts, world.device, dtype)
            with Alive() as alive:
                engine.pipeline.evaluate(batches, torch.ones(()), stats)
            peaks.append(alive.peak)
            assert alive.bytes() < 100, "the sums alone are left"
            with Alive() as alive:  # stage by stage, with what is handed on and nothing else between them
                given, part, labels = batches[0].tokens, engine.pipeline.part, batches[0].labels
                for stage in engine.pipeline.stages:
                    wanted = None if labels is None else tape.Labels(labels, torch.ones(()), learn=False)
                    given = tape.run_forward(tape.forward(stage, given, part, engine.pipeline.traffic, wanted, stats))[
                        0
                    ]
            peaks.append(alive.peak)
    assert peaks == pytest.approx([peaks[1]] * 4, rel=0.05), peaks  # routing differs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_alone_is_the_loss(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    h, w = torch.randn(5000, 24).to(dtype), torch.randn(97, 24).to(dtype)
    labels = torch.randint(97, (5000,))
    labels[::7] = -100
    scale = torch.tensor(1 / 4000)
    want = linear_cross_entropy(h, Weight("w", w, torch.zeros(97, 24)), labels, scale)[0]
    assert torch.equal(linear_cross_entropy_loss(h, w, labels, scale), want)


# ---- in a run --------------------------------------------------------------------------------------------------------


def test_a_run_that_validates_is_bitwise_the_one_that_does_not(corpora: dict[str, Path], tmp_path: Path) -> None:
    """In the lines of every second step and of the last, each corpus apart, and nowhere else."""
    spec = spec_of(corpora, sources=("even", "odd"))
    plain = spec_of(corpora, sources=(), validation={"interval": None})
    alone(spec, tmp_path / "with")
    alone(plain, tmp_path / "without")
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    for name in ("even", "odd"):
        found = val_loss(tmp_path / "with", name)
        assert [*found] == [2, 4, 5] and all(0 < loss < 2 * math.log(96) for loss in found.values())
    assert [row["validation_s"] is not None for row in lines(tmp_path / "with")] == [False, True, False, True, True]
    assert all(row["validation_s"] is None for row in lines(tmp_path / "without"))


def test_it_is_the_mean_over_every_held_out_token(corpora: dict[str, Path], tmp_path: Path) -> None:
    """Against one forward and backward over all samples at once, of the weights that were saved."""
    spec = spec_of(corpora, training={"max_steps": 2})
    alone(spec, tmp_path)
    fields = spec.model_dump(mode="json")
    fields["training"]["global_batch_size"] = SAMPLES
    fields["data"]["sources"], fields["validation"] = [{"path": str(corpora["odd"])}], {}
    whole = from_dict(fields)
    with single(whole) as world:
        engine = build(whole, world)
        path = catalog.folder(RunDir(tmp_path).checkpoints, 2)
        checkpoint.load(path, engine.zero, world, catalog.read(path))
        engine.zero.wait_for_weights()
        data = Dataset(whole.data, 16, whole.training.seed, 96)
        loss = play(engine, whole, read_batches(data, whole, world, 0)).loss.item()
    assert val_loss(tmp_path)[2] == pytest.approx(loss, rel=1e-6)


def test_its_time_is_no_time_of_a_step(
    corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the line of its own step nor the next one's: the clock goes 1000 s ahead in each."""
    real, ahead = time.perf_counter, 0.0

    def evaluate(*_: Any) -> None:
        nonlocal ahead
        ahead += 1000

    monkeypatch.setattr(Pipeline, "evaluate", evaluate)
    monkeypatch.setattr(time, "perf_counter", lambda: real() + ahead)
    alone(spec_of(corpora), tmp_path)
    assert [row["validation_s"] and round(row["validation_s"], -3) for row in lines(tmp_path)] == [
        *(None, 2000, None, 2000, 2000)
    ]
    assert all(0 < row["step_time_s"] < 500 for row in lines(tmp_path))
    assert [*val_loss(tmp_path).values()] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 1, 1), (2, 1, 2, 1), (1, 1, 2, 2), (2, 2, 1, 1)], ids=str)
def test_case_008_an_odd_corpus_on_any_mesh(
    pool: Pool, corpora: dict[str, Path], tmp_path: Path, mesh: tuple[int, int, int, int]
) -> None:
    """All of it, though neither ranks nor micro-batches divide it: filled up with what does not count."""
    sections: dict[str, Any] = {"training": {"max_steps": 2, "compute_dtype": "float64"}}
    alone(spec_of(corpora, **sections), tmp_path / "one")
    train(pool, spec_of(corpora, *mesh, **sections), tmp_path / "many")
    one, many = val_loss(tmp_path / "one"), val_loss(tmp_path / "many")
    assert [*one] == [*many] == [2] and many[2] == pytest.approx(one[2], rel=1e-9)


def test_steps_of_it_are_drawn_from_all_of_it_alike_whatever_the_seed(
    corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int, int]] = []
    real = Dataset.batch

    def batch(self: Any, first: int, count: int) -> Any:
        if self.streams[0].corpus.path == corpora["even"]:
            read.extend(self.locate(counter) for counter in range(first, first + count))
        return real(self, first, count)

    monkeypatch.setattr(Dataset, "batch", batch)
    for seed in (0, 1):
        training = {"max_steps": 2, "seed": seed}
        alone(spec_of(corpora, sources=("even",), validation={"steps": 1}, training=training), tmp_path / str(seed))
    assert read[:8] == read[8:] and len(read) == 16
    samples = [sample for *_, sample in read[:8]]
    assert len({*samples}) == 8 and samples != sorted(samples) and max(samples) >= 8


@pytest.mark.slow
def test_case_153_lines_and_validations_keep_their_steps_over_a_resume(
    pool: Pool, corpora: dict[str, Path], tmp_path: Path
) -> None:
    sections = {"logging": {"interval": 2}, "validation": {"interval": 4}, "training": {"max_steps": 10}}
    spec = spec_of(corpora, **sections)
    train(pool, spec, tmp_path / "straight")
    # asked twice in the validation of step 4
    assert train(pool, spec, tmp_path / "stopped", stop_after=7 + 2) == Outcome(7, finished=False)
    train(pool, spec, tmp_path / "stopped")
    assert [row["step"] for row in lines(tmp_path / "stopped")] == [2, 4, 6, 7, 8, 10]
    assert val_loss(tmp_path / "stopped") == val_loss(tmp_path / "straight")
    assert [*val_loss(tmp_path / "stopped")] == [4, 8, 10]


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_a_stop_at_a_step_that_is_due_loses_no_validation(
    pool: Pool, corpora: dict[str, Path], tmp_path: Path, mesh: tuple[int, int, int]
) -> None:
    """The state is saved first; who resumes validates, and completes the line of that step."""
    spec = spec_of(corpora, *mesh)
    train(pool, spec, tmp_path / "straight")
    # asked twice in the validation of step 2
    assert train(pool, spec, tmp_path / "stopped", stop_after=4 + 2) == Outcome(4, finished=False)
    assert [*val_loss(tmp_path / "stopped")] == [2]
    train(pool, spec, tmp_path / "stopped")
    assert (
        val_loss(tmp_path / "stopped") == val_loss(tmp_path / "straight") and len(val_loss(tmp_path / "stopped")) == 3
    )
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "straight")


@pytest.mark.slow
def test_case_159_a_stop_is_heard_in_a_validation(pool: Pool, corpora: dict[str, Path], tmp_path: Path) -> None:
    """By all ranks at one batch: it is left, the run saves where it stands, and the next attempt validates."""
    spec = spec_of(corpora, 1, 2, 1)
    outcomes = pool.run(2, stop_job, spec.model_dump(mode="json"), make_run(tmp_path / "stopped").path, "validation")
    assert outcomes == [Outcome(2, finished=False)] * 2
    assert val_loss(tmp_path / "stopped") == {}
    train(pool, spec, tmp_path / "stopped")
    train(pool, spec, tmp_path / "straight")
    assert val_loss(tmp_path / "stopped") == val_loss(tmp_path / "straight")


@pytest.mark.parametrize("stop_after", [5 + 4, 5 + 4 + 1])  # asked twice in each of two validations before
def test_the_last_validation_is_owed_until_it_is_made(
    pool: Pool, corpora: dict[str, Path], tmp_path: Path, stop_after: int
) -> None:
    """A stop at the last step, or in its validation: all is trained and saved, and the run is not done without it."""
    spec = spec_of(corpora, training={"max_steps": 5}, checkpoint={"export_hf": "final"})
    assert train(pool, spec, tmp_path, stop_after=stop_after) == Outcome(5, finished=False)
    assert [*val_loss(tmp_path)] == [2, 4] and not RunDir(tmp_path).done.exists()
    assert train(pool, spec, tmp_path, stop_after=1) == Outcome(5, finished=False), "asked in the first batch of it"
    assert not RunDir(tmp_path).hf.exists()
    assert train(pool, spec, tmp_path) == Outcome(5, finished=True)
    assert [*val_loss(tmp_path)] == [2, 4, 5] and [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert RunDir(tmp_path).done.exists() and RunDir(tmp_path).hf.exists()


@pytest.mark.slow
def test_a_late_validation_compiles_within_the_limit_of_a_first_step(
    pool: Pool, corpora: dict[str, Path], tmp_path: Path
) -> None:
    spec = spec_of(corpora)
    train(pool, spec, tmp_path, stop_after=4 + 2)
    phases: list[tuple[str, int]] = []

    class Seen(Watch):
        def enter(self, phase: Any, step: int) -> None:
            super().enter(phase, step)
            phases.append((phase, step))

    run(spec, RunDir(tmp_path), ALONE, Seen(RunDir(tmp_path), 2, 0))
    assert [entry for entry in phases if entry[0] in ("first_step", "validation")] == [
        *[("first_step", 4)] * 3,  # two batches, and the step
        *[("validation", 5)] * 2,
    ]


@pytest.mark.parametrize("interval", [None, 2])
def test_the_state_is_saved_before_it_is_validated(
    corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    """So what goes wrong in a validation costs none of it; and a stop in one saves where no save was due."""

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Pipeline, "evaluate", fails)
    spec = spec_of(corpora, checkpoint={"interval": 2}, training={"max_steps": 4})
    with pytest.raises(RuntimeError, match="no memory"):
        alone(spec, tmp_path / "fails")
    assert [path.name for path in RunDir(tmp_path / "fails").checkpoints.iterdir()] == ["step-00000002"]
    spec = spec_of(corpora, checkpoint={"interval": interval, "async_save": True}, training={"max_steps": 4})
    stop_at = StopsAt(RunDir(make_run(tmp_path / "stops").path), ALONE, "validation")
    assert run(spec, RunDir(tmp_path / "stops"), ALONE, stop_at) == Outcome(2, finished=False)
    assert [path.name for path in RunDir(tmp_path / "stops").checkpoints.iterdir()] == ["step-00000002"]


def vanish_job(place: Place, fields: dict[str, Any], folder: Path) -> Outcome:
    """The last rank cannot read the second half of the held-out corpus."""
    spec, real = from_dict(fields), Dataset.batch

    def batch(self: Dataset, first: int, count: int) -> Any:
        if self.streams[0].corpus.path == spec.validation.sources[0].path and first + count > 6 and place.rank:
            raise DataError("the shard is gone")
        return real(self, first, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dataset, "batch", batch)
        return run(spec, RunDir(folder), place, Watch(RunDir(folder), 1, place.rank))


@pytest.mark.slow
def test_a_held_out_corpus_that_vanishes_is_a_warning(pool: Pool, corpora: dict[str, Path], tmp_path: Path) -> None:
    """Told by rank 0, whichever rank has met it; the losses of training are those of any other run."""
    spec = spec_of(corpora, 1, 2, 1)
    run_dir = make_run(tmp_path / "gone")
    assert pool.run(2, vanish_job, spec.model_dump(mode="json"), run_dir.path) == [Outcome(5, finished=True)] * 2
    said = [row["message"] for row in events(run_dir.path, "warning")]
    assert said == [f"step {step} is not validated: the shard is gone" for step in (2, 4, 5)]
    train(pool, spec, tmp_path / "there")
    assert numbers(run_dir.path) == numbers(tmp_path / "there") and val_loss(run_dir.path) == {}


@pytest.mark.slow
def test_a_stop_in_a_validation_closes_an_open_window(corpora: dict[str, Path], tmp_path: Path) -> None:
    spec = spec_of(corpora, profiling={"torch": True, "start_step": 2, "end_step": 4})
    run_dir = make_run(tmp_path)
    assert run(spec, run_dir, ALONE, StopsAt(run_dir, ALONE, "validation")) == Outcome(2, finished=False)
    assert run_dir.trace(1, 0).exists() and len(events(tmp_path, "profiled")) == 1
    run(spec, run_dir, ALONE, Watch(run_dir, 2, 0))
    assert len(events(tmp_path, "profiled")) == 2


def test_figures_that_are_not_finite_and_a_full_disk_end_nothing(
    corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Events._rewrite

    def full(self: Events, rows: Any) -> None:
        if rows[-1]["step"] == 4:
            raise OSError(errno.ENOSPC, "full")
        written(self, rows)

    monkeypatch.setattr(Events, "_rewrite", full)
    monkeypatch.setattr(Pipeline, "evaluate", lambda self, batches, one, stats: stats.loss.fill_(math.nan))
    assert alone(spec_of(corpora), tmp_path).finished
    assert val_loss(tmp_path) == {2: None, 5: None} and [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in events(tmp_path, "validated")] == [2, 4, 5]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("sections", [{"compile": {"enabled": True}}, {"fp8": {"enabled": True, "recipe": "rowwise"}}])
def test_compiled_and_in_8_bits(corpora: dict[str, Path], tmp_path: Path, sections: Any, traced: None) -> None:
    """With no graph that training has not, and weights that are quantised no more often."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    counts: list[tuple[int, int]] = []
    for interval in (None, 1):
        named = {"interval": interval, "sources": [] if interval is None else [{"path": str(corpora["odd"])}]}
        torch._dynamo.reset()
        counters.clear()
        quantised = 0
        real = fp8.quantize_weight

        def counted(*arguments: Any, real: Any = real) -> Any:
            nonlocal quantised
            quantised += 1
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fp8, "quantize_weight", counted)
            spec = spec_of(corpora, model=wide, validation=named, training={"max_steps": 2}, **sections)
            alone(spec, tmp_path / str(interval))
        counts.append((counters["stats"]["unique_graphs"], quantised))
    extra = counts[1][1] - counts[0][1]  # of the weights after the last update, which only a validation reads
    assert counts[0][0] == counts[1][0] and (counts[0][1] == extra == 0 or extra == counts[0][1] // 2)
    assert numbers(tmp_path / "None") == numbers(tmp_path / "1")


def test_corpora_that_cannot_be_held_out_are_refused_before_the_first_step(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    spec = spec_of(corpora, sources=("other",))
    with pytest.raises(DataError, match=r"was made with another tokenizer .* tokenize it again"):
        alone(spec, tmp_path / "other")
    spec = spec_of(corpora, validation={"steps": 2})
    with pytest.raises(DataError, match=r"holds 11 samples of 16 tokens, and validation.steps 2 x global_batch_size 8"):
        alone(spec, tmp_path / "few")
    assert not lines(tmp_path / "other") and not lines(tmp_path / "few")


def test_a_validation_that_hangs_has_a_limit_and_a_name(corpora: dict[str, Path], tmp_path: Path) -> None:
    spec, run_dir = spec_of(corpora), make_run(tmp_path)
    beats: list[tuple[str, int]] = []

    class Seen(Watch):
        def enter(self, phase: Any, step: int) -> None:
            super().enter(phase, step)
            beats.append((rundir.read_json(run_dir.heartbeat)["phase"], step))

    run(spec, run_dir, ALONE, Seen(run_dir, 1, 0))
    assert [step for phase, step in beats if phase == "validation"] == [2, 2, 4, 4, 5, 5], "each batch begins anew"
    assert events(tmp_path, "done")
