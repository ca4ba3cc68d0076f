"""Every folder of models/ keeps the contract: no table names them, this file walks them."""

import importlib
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

import pithtrain
from harness import batches_of
from pithtrain.build import EMBEDDING, FINAL_NORM, HEAD, build
from pithtrain.models.contract import ModelConfig, load_config, load_ignored, load_model
from pithtrain.spec import RunSpec, from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect

FOLDERS = sorted(path.parent.name for path in (Path(pithtrain.__file__).parent / "models").glob("*/config.py"))


def tiny(name: str) -> ModelConfig:
    config = importlib.import_module(f"pithtrain.models.{name}.config").TINY
    assert isinstance(config, load_config(name))
    return config


def spec_of(name: str) -> RunSpec:
    config = tiny(name)
    assert isinstance(config, BaseModel)
    training = {"max_steps": 1, "micro_batch_size": 1, "global_batch_size": 2, "sequence_length": 8, "device": "cpu"}
    return from_dict(
        {
            "name": "tiny",
            "model": {"architecture": name, **config.model_dump(mode="json")},
            "training": training,
            "optimizer": {"lr": 1e-3},
            "data": {"sources": [{"path": "unused"}]},
        }
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_its_table_is_complete_and_consistent(name: str) -> None:
    config = tiny(name)
    table = config.parameters()
    names = [info.name for info in table]
    assert len(set(names)) == len(names)
    assert {EMBEDDING, FINAL_NORM} <= set(names)
    assert (HEAD in names) != config.tie_word_embeddings
    for info in table:
        assert info.kind == "dense" or info.shape[0] == config.num_experts, info
        assert info.decay == (info.init == "normal"), "decay reaches matrices alone"
        assert info.fp32 or len(info.shape) > 1, "1-D parameters stay in fp32"
        assert (info.layer is None) == (not info.name.startswith("model.layers.")), info
    assert {info.layer for info in table} >= set(range(config.num_hidden_layers))
    assert load_ignored(name).keys().isdisjoint(type(config).__annotations__)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_step_reaches_every_parameter(name: str) -> None:
    """Every weight is used and gets a gradient; every layer is what its config says."""
    spec = spec_of(name)
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        for stage in engine.pipeline._stages:
            for layer in stage.layers:
                assert (layer.experts is not None) == spec.model.config.is_moe(layer.index)
        result = train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        assert torch.isfinite(result.stats.loss)
        assert all(one.grad.abs().sum() > 0 for one in engine.zero.sharded.values())


@pytest.mark.parametrize("name", FOLDERS)
def test_its_module_has_what_the_engine_calls(name: str) -> None:
    module = load_model(name)
    assert callable(module.rope)
    assert callable(module.build_layer)
