"""The plan: where layers go, how much they cost, what a rank holds. ENGINE section 11's tables are the oracle."""

import itertools
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from harness import make_spec
from harness import tiny as tiny_config
from pithtrain.models.contract import Carried, ModelConfig, active_parameters, flops_per_token, head_flops, layer_flops
from pithtrain.models.qwen3_moe.config import Config
from pithtrain.plan import SLACK, Plan, _ring, partition, plan
from pithtrain.spec import RunSpec, load

TINY_YAML = Path(__file__).parent.parent / "configs/tiny.yaml"

FILES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def published(name: str) -> ModelConfig:
    """The model of configs/NAME.yaml."""
    return load(TINY_YAML.parent / f"{name}.yaml", []).model.config


QWEN3_30B = cast(Config, published("qwen3-30b-a3b-pp2-ep8"))
TINY = cast(Config, tiny_config("qwen3_moe"))


@dataclass(frozen=True)
class Costs:
    """A model of which only the times matter."""

    layers: tuple[float, ...]
    head: float

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    def linear_weights(self, layer: int) -> int:
        return 0

    def attention_flops(self, layer: int, sequence_length: int) -> float:
        return self.layers[layer]

    vocab_size = 1

    @property
    def hidden_size(self) -> float:
        return self.head / 6


def cut(layers: tuple[float, ...], head: float, pp: int) -> tuple[tuple[int, ...], ...]:
    return partition(cast(ModelConfig, Costs(layers, head)), pp, 1)


def pairs(stages: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """(layers in front, layers behind) of each pipeline rank."""
    return [(len(stages[rank]), len(stages[-1 - rank])) for rank in range(len(stages) // 2)]


def times(stages: tuple[tuple[int, ...], ...], layers: tuple[float, ...], head: float) -> list[tuple[float, float]]:
    """Time of each pipeline rank's two stages."""
    cost = [sum(layers[layer] for layer in stage) for stage in stages]
    cost[-1] += head
    return [(cost[rank], cost[-1 - rank]) for rank in range(len(stages) // 2)]


def tiny(*overrides: str) -> RunSpec:
    return load(TINY_YAML, overrides)


# -------------------------------------------------------------------------------------------------------- partition


@pytest.mark.parametrize(
    ("pp", "expected", "over_mean"),
    [
        (2, [(13, 9), (13, 13)], 1.00),
        (4, [(7, 2), *[(6, 7)] * 3], 1.01),
        (8, [(2, 0), *[(3, 3)] * 3, *[(3, 4)] * 4], 1.07),
    ],
)
def test_partition_of_qwen3_30b(pp: int, expected: list[tuple[int, int]], over_mean: float) -> None:
    """The table of ENGINE section 11."""
    stages = partition(QWEN3_30B, pp, 4096)
    assert pairs(stages) == expected
    costs = tuple(layer_flops(QWEN3_30B, layer, 4096) for layer in range(48))
    ranks = [a + b for a, b in times(stages, costs, head_flops(QWEN3_30B))]
    assert max(ranks) * pp / sum(ranks) == pytest.approx(over_mean, abs=0.005)


def test_partition_of_two_kinds_of_layers() -> None:
    """GPT-OSS-20B: full and windowed attention alternate; the table of ENGINE section 11."""
    config = published("gpt-oss-20b-pp2-ep4")
    layers = tuple(layer_flops(config, layer, 4096) for layer in range(24))
    assert layers[0] < layers[1] and layers[:2] * 12 == layers
    assert pairs(partition(config, 2, 4096)) == [(7, 3), (7, 7)]
    for pp, over_mean in ((2, 1.01), (4, 1.02), (8, 1.21)):
        ranks = [a + b for a, b in times(partition(config, pp, 4096), layers, head_flops(config))]
        assert max(ranks) * pp / sum(ranks) == pytest.approx(over_mean, abs=0.005)


def test_partition_against_all_cuts() -> None:
    """The slowest rank is within SLACK of the fastest possible, and no such cut has a smaller sum of squares."""

    def score(cost: list[tuple[float, float]]) -> float:
        if len(cost) == 1:  # the head, on the second stage, has nothing to hide
            return (cost[0][0] - (cost[0][1] - head)) ** 2
        return sum((a - b) ** 2 + (a + b) ** 2 / 4 for a, b in cost)

    cases = [((1.0,) * 7, 4.2), ((1.0, 3.0, 1.0, 1.0, 2.0, 5.0), 0.5), ((2.0, 1.0) * 4, 0.0), ((1.0,) * 3, 9.0)]
    for (layers, head), pp in itertools.product(cases, (1, 2, 3)):
        found = times(cut(layers, head, pp), layers, head)
        every: list[list[tuple[float, float]]] = []
        for marks in itertools.combinations_with_replacement(range(len(layers) + 1), 2 * pp - 1):
            ends = (0, *marks, len(layers))
            stages = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
            every.append(times(stages, layers, head))
        fastest = min(max(a + b for a, b in cost) for cost in every)
        assert max(a + b for a, b in found) <= fastest * SLACK * (1 + 1e-9)
        good = [cost for cost in every if max(a + b for a, b in cost) <= fastest * SLACK]
        assert score(found) == pytest.approx(min(map(score, good)))


def test_case_094() -> None:
    """Counts that the stages do not divide: every layer exactly once, in order; the same parameters as on one rank."""
    for layers, pp in itertools.product((1, 2, 3, 5, 7, 9, 30), (1, 2, 3, 4)):
        config = TINY.model_copy(update={"num_hidden_layers": layers})
        stages = partition(config, pp, 64)
        assert len(stages) == 2 * pp
        assert [layer for stage in stages for layer in stage] == list(range(layers))
    one = plan(tiny("parallelism.pipeline_parallel_size=1", "parallelism.expert_parallel_size=1"))
    for layers in (3, 5, 7, 9):
        count = f"model.num_hidden_layers={layers}"
        two = plan(tiny(count, "parallelism.expert_parallel_size=1"))
        flat = plan(tiny(count, "parallelism.pipeline_parallel_size=1", "parallelism.expert_parallel_size=1"))
        assert sum(two.rank_parameters) == two.parameters == flat.rank_parameters[0] == flat.parameters
        assert two.parameters != one.parameters


def test_every_rank_works_where_the_head_alone_sets_the_pace() -> None:
    """A head of four layers' cost on four ranks of eight layers: no rank is left without any."""
    assert pairs(cut((1.0,) * 8, 4.0, 4)) == [(0, 0), (1, 1), (1, 1), (2, 2)]


def test_partition_is_fast() -> None:
    """Well under a second for the largest shapes in use."""
    start = time.process_time()  # of this process alone: other work on the machine does not count
    partition(QWEN3_30B, 8, 4096)
    partition(QWEN3_30B.model_copy(update={"num_hidden_layers": 94}), 16, 4096)
    assert time.process_time() - start < 3  # 0.4 s on an idle core


# ------------------------------------------------------------------------------------------------ parameters, FLOPs


@pytest.mark.parametrize(
    ("name", "total", "active", "flops"),  # 1e9 of each; FLOPs per token at 2048, 4096, 8192
    [
        ("qwen3-30b-a3b-pp2-ep8", 30.53, 3.042, (20.667, 23.083, 27.915)),
        ("deepseek-v2-lite-pp2-ep4", 15.71, 2.451, (15.558, 16.407, 18.106)),
        ("gpt-oss-20b-pp2-ep4", 20.9, 3.607, (22.320, 22.925, 24.134)),
        ("gpt-oss-120b-pp4-ep8", 116.8, 5.131, (31.803, 32.710, 34.523)),
    ],
)
def test_numbers_of_the_published_models(
    name: str, total: float, active: float, flops: tuple[float, float, float]
) -> None:
    """The table of ENGINE section 11, to every digit given: parameters, those in matrix products, FLOPs per token."""
    spec = load(TINY_YAML.parent / f"{name}.yaml", [])
    config = spec.model.config
    digits = len(str(total).partition(".")[2])
    assert round(plan(spec).parameters / 1e9, digits) == total
    assert round(active_parameters(config) / 1e9, 3) == active
    assert tuple(round(flops_per_token(config, length) / 1e9, 3) for length in (2048, 4096, 8192)) == flops


@pytest.mark.parametrize(
    ("name", "linear", "whole"),
    [
        ("qwen3-30b-a3b-pp2-ep8", 5.5, 4.2),
        ("deepseek-v2-lite-pp2-ep4", 2.5, 2.2),
        ("gpt-oss-20b-pp2-ep4", 4.6, 4.3),
    ],
)
def test_the_head_in_layers(name: str, linear: float, whole: float) -> None:
    """How many mean layers the head is worth, by linears alone and with attention at 4096: why a stage has fewer."""
    config = published(name)
    layers, head = config.num_hidden_layers, head_flops(config)
    assert head * layers / (6 * active_parameters(config) - head) == pytest.approx(linear, abs=0.05)
    assert head * layers / (flops_per_token(config, 4096) - head) == pytest.approx(whole, abs=0.05)


def test_case_152() -> None:
    """FLOPs per token: linear in the experts visited, and of the experts there are only the router's row counts."""
    few = QWEN3_30B.model_copy(update={"num_experts": 64})
    assert flops_per_token(QWEN3_30B, 4096) - flops_per_token(few, 4096) == pytest.approx(48 * 6 * 64 * 2048)
    one, two, three = (
        flops_per_token(QWEN3_30B.model_copy(update={"num_experts_per_tok": k}), 4096) for k in (1, 2, 3)
    )  # fmt: skip
    assert two - one == pytest.approx(three - two) == pytest.approx(48 * 6 * 3 * 768 * 2048)
    dense = QWEN3_30B.model_copy(update={"mlp_only_layers": tuple(range(48))})
    difference = layer_flops(dense, 0, 4096) - layer_flops(QWEN3_30B, 0, 4096)
    assert difference == pytest.approx(6 * 2048 * (3 * 6144 - 128 - 8 * 3 * 768))
    core = flops_per_token(QWEN3_30B, 3) - flops_per_token(QWEN3_30B, 1)  # kbar = 2 and 1
    assert core == pytest.approx(48 * 6 * 32 * (128 + 128))


def test_parameter_table_is_the_oracles() -> None:
    """Names, shapes and count of `transformers`' own state dict, experts stacked; biases, tied head, dense layers."""
    transformers = pytest.importorskip("transformers")
    for changes in ({}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"decoder_sparse_step": 2}):
        config = TINY.model_copy(update=changes)
        theirs = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**config.model_dump(mode="json", exclude_none=True))
        )
        shapes = {name: tuple(value.shape) for name, value in theirs.named_parameters()}
        table = config.parameters()
        assert len({parameter.name for parameter in table}) == len(table)
        assert {parameter.name: parameter.shape for parameter in table} == shapes
        for parameter in table:
            layer = parameter.name.split(".")[2] if ".layers." in parameter.name else None
            assert parameter.layer == (None if layer is None else int(layer))
            matrix = len(parameter.shape) > 1
            assert parameter.decay == matrix and parameter.init == (
                "normal" if matrix else "zeros" if "bias" in parameter.name else "ones"
            )
            assert parameter.std == (0.02 if matrix else 0.0)
            assert parameter.fp32 == (not matrix or parameter.name.endswith("mlp.gate.weight"))
            assert parameter.kind == ("expert" if "experts" in parameter.name else "dense")


def test_which_layers_are_moe() -> None:
    """mlp_only_layers and decoder_sparse_step together."""
    config = TINY.model_copy(update={"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": (3,)})
    assert [layer for layer in range(8) if config.is_moe(layer)] == [1, 5, 7]


# ------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_is_planned(path: Path) -> None:
    """It says what it is: its own name, and the mesh that its name gives; every layer is somewhere, ranks are even."""
    spec = load(path, [])
    numbers = plan(spec)
    assert spec.name == path.stem
    assert [*itertools.chain(*numbers.stage_layers)] == [*range(spec.model.config.num_hidden_layers)]
    if mesh := re.search(r"pp(\d+)-ep(\d+)", path.stem):
        assert (spec.mesh.pp, spec.mesh.ep) == tuple(map(int, mesh.groups()))
        assert (spec.training.global_batch_size, spec.training.max_steps) == (1024, 25), "as the peers' figures"
        assert max(numbers.rank_time_over_mean) < 1.03
        prose = " ".join(path.read_text().replace("\n#", "").split())
        assert f"{max(numbers.rank_bytes) / 2**30:.0f} GiB of weights" in prose
        size = numbers.checkpoint_bytes / 1e9
        assert (f"{size:.0f} GB" if size < 1000 else f"{size / 1000:.1f} TB") in prose


def test_plan_of_tiny() -> None:
    """Mesh, batch, layers, parameters; experts per rank = E / ep (casebook 9)."""
    numbers = plan(tiny())
    assert (numbers.ranks, numbers.micro_batches, numbers.tokens_per_step) == (4, 8, 2048)
    assert numbers.experts_per_rank == 4
    assert sum(map(len, numbers.stage_layers)) == 8 and len(numbers.stage_layers) == 4
    assert (numbers.idle_units, numbers.busy_units) == (2, 48)
    spec = tiny()
    table = spec.model.config.parameters()
    halves = sum(parameter.size // (2 if parameter.kind == "expert" else 1) for parameter in table)
    assert sum(numbers.rank_parameters) == halves
    assert numbers.parameters == sum(parameter.size for parameter in table)
    assert numbers.flops_per_token == flops_per_token(spec.model.config, 128)
    assert sum(numbers.rank_time_over_mean) == pytest.approx(2)


def test_bytes_are_what_zero_allocates() -> None:
    """One rank: weight, main gradient, master and two moments of every parameter; then cut over dp and ep, padded."""
    one = ["slurm.gpus_per_node=1", "parallelism={}"]
    count = plan(tiny(*one)).parameters
    assert plan(tiny(*one)).rank_bytes == (count * (4 + 4 + 12),)
    assert plan(tiny(*one, "training.compute_dtype=float64")).rank_bytes == (count * 2 * (4 + 4 + 12),)
    narrow = plan(tiny(*one, "training.compute_dtype=bfloat16"))
    wide = sum(parameter.size for parameter in tiny().model.config.parameters() if parameter.fp32)
    assert narrow.rank_weight_bytes == (2 * count + 2 * wide,)
    halved = plan(tiny(*one, "optimizer.moments_dtype=bfloat16"))
    assert halved.rank_bytes == (count * (4 + 4 + 8),) and halved.checkpoint_bytes == count * 8
    assert plan(tiny(*one, "training.device=auto")).rank_bytes == narrow.rank_bytes  # cuda is assumed
    turned = sum(p.size for p in tiny().model.config.parameters() if p.layer is not None and len(p.shape) > 1)
    assert plan(tiny(*one, "optimizer.type=muon")).checkpoint_bytes == count * 12 - turned * 4

    uneven = tiny("slurm.gpus_per_node=4", "parallelism={expert_parallel_size: 2}", "model.vocab_size=4097")
    split = plan(uneven)
    weights = gradients = optimizer = 0
    for parameter in uneven.model.config.parameters():
        shape, shards = parameter.shape, 4
        if parameter.kind == "expert":
            shape, shards = (shape[0] // 2 * shape[1], *shape[2:]), 2
        chunk = -(-shape[0] // shards)
        width = parameter.size // parameter.shape[0] if parameter.kind == "dense" else parameter.shape[2]
        weights += chunk * shards * width * 4
        gradients += chunk * shards * width * 4
        optimizer += chunk * width * 12
    assert (split.rank_weight_bytes, split.rank_gradient_bytes) == ((weights,), (gradients,))
    assert split.rank_optimizer_bytes == (optimizer,)


def test_communication_takes_what_the_links_of_the_place_say() -> None:
    """tiny on pp 2, ep 2: N = 8 micro-batches of 128 tokens [128] fp32, 8 experts of which 2 are chosen. A token misses
    a rank with probability C(4, 2) / C(8, 2) = 3/14, so it visits 11/7 of 2, and half of that is not at home."""
    path = Path(__file__).parent.parent / "configs/tiny.yaml"
    assert plan(load(path)).communication_ms == {} and "communication" not in plan(load(path)).text()
    measured = [f"slurm.links.{name}={{latency_us: 50, gb_s: 2}}" for name in ("all_to_all", "p2p")]
    measured.append("slurm.links.copy_engine={latency_us: 10, gb_s: 4}")
    measured += ["training.device=auto", "training.compute_dtype=float32", "moe.transport=auto"]
    found = plan(load(path, measured))
    layers = max(len(found.stage_layers[r]) + len(found.stage_layers[-1 - r]) for r in (0, 1))
    sent = 11 / 14 * 128 * (4 * 128 * 4 + 2 * 8 * 2)  # four times the row, twice two slots of 8 bytes
    expert = 8 * layers * (5 * 0.01 + sent / 4e6)
    pipeline = 4 * 8 * (0.05 + 128 * 128 * 4 / 2e6)
    assert found.communication_ms == pytest.approx({"expert traffic by copy engines": expert, "pipeline": pipeline})
    assert f"expert traffic by copy engines {expert:.1f} ms, pipeline {pipeline:.1f} ms per step" in found.text()
    plain = plan(load(path, [*measured[:-1], "moe.transport=nccl", "moe.dispatch=plain"]))
    expert = 8 * layers * (5 * 0.05 + 128 * (4 * 128 * 4 + 2 * 8) / 2e6)
    assert plain.communication_ms["expert traffic by all-to-all"] == pytest.approx(expert)


def test_the_exchanges_of_cut_sequences() -> None:
    """cp 4, 2 x 64 tokens on a rank, chunks of 32: six hops of the keys' and values' fp32 numbers and four of their
    gradients; of a window of 3, three exchanges of two edges of 2 tokens."""
    lines = ["context_parallel_size=4", "expert_parallel_size=1", "pipeline_parallel_size=1"]
    lines = [f"parallelism.{line}" for line in lines] + ["slurm.gpus_per_node=4", "training.micro_batch_size=2"]
    lines += ["training.sequence_length=256", "training.compute_dtype=float32"]
    spec = tiny(*lines, "slurm.links.p2p={latency_us: 50, gb_s: 2}")
    config, numbers = spec.model.config, 2 * 2 * 32
    assert config.carried(0) == Carried(2 * 4 * 32, numbers) and plan(spec).tokens_per_rank == 128
    layer = 10 * 0.05 + 10 * 128 * numbers * 4 / 2e6
    times = spec.num_micro_batches * config.num_hidden_layers
    assert plan(spec).communication_ms == pytest.approx({"ring": times * layer})
    full = tiny(*lines, "slurm.links.p2p={latency_us: 50, gb_s: 2}", "activation_checkpoint.mode=full")
    assert plan(full).communication_ms == pytest.approx({"ring": times * layer * 1.3})
    pair = [line.replace("size=4", "size=2").replace("node=4", "node=2") for line in lines]
    for mask, wide in (("true", 4), ("false", 2)):
        sent = 2 * 128 * numbers * (2 * 2 + 2 * wide)
        assert _ring(tiny(*pair, f"data.document_mask={mask}"), 0, 2) == (4, sent)
    two = {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    for window, want in ((3, (3, 3 * 2 * 2 * 2 * numbers * 4)), (33, (3, 3 * 2 * 2 * 32 * numbers * 4)), (34, None)):
        sizes, model = {"micro_batch_size": 2, "sequence_length": 256}, {**two, "sliding_window": window}
        other = make_spec(cp=4, architecture="gpt_oss", model=model, training=sizes)
        layers = range(other.model.config.num_hidden_layers)
        assert want is None or {want} == {_ring(other, i, 4) for i in layers if other.model.config.carried(i).window}
        assert (10, 10 * 128 * numbers * 4) in {_ring(other, i, 4) for i in layers}
        assert want is not None or len({_ring(other, i, 4) for i in layers}) == 1, "that reaches two chunks back"


@pytest.mark.parametrize("mean", [5.0, 40.0, 128.0, 1000.0])
def test_no_documents_of_that_mean_cost_less_than_told(mean: float) -> None:
    """Windows cut documents too: of whatever lengths, and of lengths that are all the same."""
    spec = tiny("parallelism.context_parallel_size=2", "parallelism.expert_parallel_size=1")
    config, length, rng = spec.model.config, spec.training.sequence_length, np.random.default_rng(0)
    for drawn in (rng.exponential(mean, 4000), np.full(4000, mean)):
        ends = np.cumsum(np.maximum(1, drawn).astype(int))
        edges = np.union1d(np.append(0, ends), np.arange(0, ends[-1], length))
        pieces, counts = np.unique(np.diff(edges), return_counts=True)
        work = sum(int(n) * int(c) * flops_per_token(config, int(n)) for n, c in zip(pieces, counts, strict=True))
        told = plan(spec, ends[-1] / len(ends)).document_flops_per_token
        assert told is not None and told <= work / ends[-1] <= 1.05 * plan(spec).flops_per_token


def test_plan_is_plain_data_and_plain_text() -> None:
    """--json is the dataclass; the text names what a person asks for."""
    numbers = plan(tiny())
    fields = cast(dict[str, Any], json.loads(json.dumps(numbers.to_dict())))
    assert set(Plan.__dataclass_fields__) | {"rank_bytes", "checkpoint_bytes"} == set(fields)
    assert fields["checkpoint_bytes"] == 12 * fields["parameters"]
    assert fields["mesh"] == {"pp": 2, "dp": 1, "cp": 1, "ep": 2}
    text = numbers.text()
    for words in (
        "pp 2 x dp 1 x cp 1 x ep 2",
        "8 micro-batches",
        "layers 0-1 and none",
        "2 of 50 units",
        "GiB at most",
    ):
        assert words in text


def test_documents_and_cut_sequences_in_the_numbers() -> None:
    """Even pieces give the least FLOPs, one document a sequence the most; cp cuts tokens, not FLOPs."""
    spec = tiny("parallelism.context_parallel_size=2", "parallelism.expert_parallel_size=1")
    config = spec.model.config
    numbers = plan(spec, 40.5)
    assert numbers.tokens_per_rank == spec.training.micro_batch_size * 64
    assert numbers.flops_per_token == flops_per_token(config, 128)
    assert numbers.document_flops_per_token == flops_per_token(config, 30) < numbers.flops_per_token  # 30.76
    assert plan(spec, 1e6).document_flops_per_token == flops_per_token(config, 127)
    assert plan(spec).document_flops_per_token is None
    whole = plan(tiny("parallelism.expert_parallel_size=1", "slurm.gpus_per_node=2"))
    assert whole.rank_activation_bytes == tuple(2 * n for n in numbers.rank_activation_bytes), "each rank has its half"
    full = plan(tiny("activation_checkpoint.mode=full", "parallelism.expert_parallel_size=1", "slurm.gpus_per_node=2"))
    hidden, moe = 4 * config.hidden_size, [config.is_moe(layer) for layer in range(config.num_hidden_layers)]
    kept = [[hidden * (1 + moe[layer]) for layer in layers] for layers in full.stage_layers]
    live = [(4, 1), (3, 2)]  # micro-batches of a rank's two stages
    tokens = 2 * numbers.tokens_per_rank
    want = [tokens * (a * sum(kept[r]) + b * sum(kept[-1 - r])) for r, (a, b) in enumerate(live)]
    assert list(full.rank_activation_bytes) == want
    assert f"{numbers.tokens_per_rank} tokens on a rank" in numbers.text()
    assert "FLOP, forward and backward: in documents as even as can be, or in one a sequence" in numbers.text()
