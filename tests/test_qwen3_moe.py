"""Qwen3-MoE against transformers' Qwen3MoeForCausalLM: logits, loss and every gradient, on tiny weights in fp32."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from harness import MODEL, batches_of, distance, make_spec
from pithtrain.build import Engine, build
from pithtrain.ops.linear import Segment
from pithtrain.spec import RunSpec
from pithtrain.tape import Stage, forward, new_stats, run_forward
from pithtrain.train import loss_scale
from pithtrain.world import Place, connect

VARIANTS: dict[str, dict[str, Any]] = {
    "first layer dense": {},
    "tied head": {"tie_word_embeddings": True},
    "biases, no renormalisation": {"attention_bias": True, "norm_topk_prob": False},
    "every second layer MoE, wide heads": {"mlp_only_layers": [], "decoder_sparse_step": 2, "head_dim": 16},
    "eps, rope base, top-4": {"rms_norm_eps": 1e-3, "rope_theta": 500.0, "num_experts_per_tok": 4},
    "one key/value head": {"num_key_value_heads": 1, "mlp_only_layers": [1, 3]},
}


def hf_config(spec: RunSpec) -> Qwen3MoeConfig:
    fields = spec.model.model_dump(mode="json")
    return Qwen3MoeConfig(**{k: v for k, v in fields.items() if k != "architecture" and v is not None})


def oracle(spec: RunSpec) -> Qwen3MoeForCausalLM:
    """Hugging Face's model with random weights everywhere, norms and biases included."""
    config = hf_config(spec)
    config._attn_implementation = "eager"
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return model


def load_into(engine: Engine, model: Qwen3MoeForCausalLM) -> None:
    """Same names on both sides; every one of ours must be there and no other."""
    theirs = dict(model.named_parameters())
    ours = engine.zero.sharded
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert one.info.shape == tuple(theirs[name].shape), name
        one.master.copy_(theirs[name].detach().reshape(one.info.stored_shape))
    engine.zero.loaded(updates=0)


def logits_of(engine: Engine, tokens: Tensor) -> Tensor:
    """Through both chunks of a one-rank pipeline, with the last norm and the head's product done here."""
    first, last = engine.pipeline._stages
    assert last.head is not None
    stats = new_stats(16, 8, torch.device("cpu"), torch.float32)
    h, _ = run_forward(forward(first, tokens, engine.pipeline._traffic, None, stats))
    assert h is not None
    h, _ = run_forward(forward(Stage(last.layers, None, None), h, engine.pipeline._traffic, None, stats))
    assert h is not None
    return Segment(last.head.norm, h).outputs[0] @ last.head.weight.data.t()


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str) -> None:
    spec = make_spec(
        model=VARIANTS[variant],
        training={"global_batch_size": 4, "micro_batch_size": 2},
        moe={"load_balance_type": "none", "aux_loss_coef": 0.0},
    )
    model = oracle(spec)
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        load_into(engine, model)
        batches = batches_of(spec, engine, 0)
        tokens, labels = (torch.cat([getattr(b, k) for b in batches]) for k in ("tokens", "labels"))

        expected = model(tokens).logits
        assert distance(logits_of(engine, tokens).numpy(), expected.detach().numpy()) < 1e-5

        # labels are already shifted: transformers' own loss would shift them once more
        loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        stats = new_stats(spec.model.config.num_hidden_layers, 8, world.device, torch.float32)
        engine.zero.begin_step(spec.num_micro_batches)
        engine.pipeline.step(batches, loss_scale(batches, engine), stats)
        engine.zero.grad_norm()
        assert abs(stats.loss.item() - loss.item()) < 1e-5 * loss.item()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for name, one in engine.zero.sharded.items():
            expected_grad = gradients[name]
            assert expected_grad is not None, name
            assert expected_grad.abs().sum() > 0, name
            assert distance(one.grad.numpy(), expected_grad.reshape(one.info.stored_shape).numpy()) < 1e-5, name


def test_balance_loss_is_theirs_over_k_on_one_layer() -> None:
    """Theirs counts every slot's share, so it is k times ours; pooled over layers, where ours is summed."""
    from pithtrain.ops.router import Balance, route_softmax

    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    _, routing = route_softmax(logits, 2, True, Balance(coef=0.0, global_tokens=64))
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=2)
    assert isinstance(theirs, Tensor)
    np.testing.assert_allclose(2 * routing.balance.item(), theirs.item(), rtol=1e-6)


def test_total_minus_lm_loss_is_the_coefficient_times_layers_times_the_metric() -> None:
    """Case 54: the gradient of the whole training objective, by finite difference along one router direction."""
    coef = 0.5
    spec = make_spec(
        model={"mlp_only_layers": []},
        training={"global_batch_size": 2, "compute_dtype": "float64"},
        moe={"load_balance_type": "aux_loss", "aux_loss_coef": coef},
    )
    name = "model.layers.2.mlp.gate.weight"
    layers = spec.model.config.num_hidden_layers
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        batches = batches_of(spec, engine, 0)
        gate = engine.zero.sharded[name]

        def run() -> float:
            """LM loss + coef x layers x aux_loss, aux_loss being the reported mean."""
            stats = new_stats(layers, 8, world.device, torch.float64)
            engine.zero.begin_step(spec.num_micro_batches)
            engine.pipeline.step(batches, loss_scale(batches, engine), stats)
            engine.zero.grad_norm()
            aux_loss = stats.balance_L.sum() / layers
            return (stats.loss + coef * layers * aux_loss).item()

        run()
        gradient = gate.grad.clone()
        direction = torch.randn(gate.master.shape, generator=torch.Generator().manual_seed(1)).double()
        eps, totals = 1e-6, []
        start = gate.master.clone()
        for sign in (1, -1):
            gate.master.copy_(start + sign * eps * direction)
            engine.zero.loaded(0)
            totals.append(run())
        slope = (totals[0] - totals[1]) / (2 * eps)
    np.testing.assert_allclose(slope, (gradient * direction).sum().item(), rtol=1e-5)


def test_model_fixture_has_no_default_that_hides_a_field() -> None:
    """The oracle must not be right by a default of its own: every field we read is handed to it."""
    config = hf_config(make_spec())
    for field in MODEL.keys() - {"architecture", "rope_theta"}:
        assert getattr(config, field) == MODEL[field], field
    assert config.rope_parameters["rope_theta"] == MODEL["rope_theta"]
