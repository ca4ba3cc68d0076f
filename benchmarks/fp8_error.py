"""How far 8-bit products lead from those in bf16, layer by layer: forward, input gradient, weight gradients.

    .venv/bin/python benchmarks/fp8_error.py configs/qwen3-30b-a3b-6layer-1gpu.yaml --recipe rowwise [--steps 20]

One micro-batch of random tokens goes forward and backward in the run's compute dtype. Each layer then runs again in 8
bits, from the same input and with the same gradient of its output, so that a row tells what this layer adds. What the
residual stream carries through is taken out first. Routing is forced: a near tie that turns would hide everything else.

    forward, dgrad    ||8 bits - bf16|| / ||bf16|| of the layer's own part
    wgrad             the same, over all its matrices together, and of the worst one
    1 - cos           of the forward; one product alone has some 7e-4, a layer is a few of them in a row

`--steps`: train so many before, on random tokens; weights then are no longer those of the beginning. One rank.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.build import Engine, build, device_type
from pithtrain.errors import PithtrainError
from pithtrain.models.contract import Layer
from pithtrain.ops.linear import accumulate_dtype
from pithtrain.ops.parts import Part
from pithtrain.pipeline import MicroBatch
from pithtrain.spec import RunSpec, load
from pithtrain.tape import Labels, Stage, Stats, backward, forward, new_stats, run_backward, run_forward, run_now
from pithtrain.train import train_step
from pithtrain.world import Place, connect
from throughput import align, machine, machine_text

Ran = tuple[Tensor, Tensor | None, dict[str, Tensor]]  # the layer's own output, that of its backward, weight gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--recipe", choices=("blockwise", "rowwise", "mxfp8"), default="rowwise")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=C")
    parser.add_argument("--steps", type=int, default=0)
    arguments = parser.parse_args()
    eight = [f"fp8.recipe={arguments.recipe}", "fp8.enabled=true", "moe.force_load_balance=true"]
    try:
        spec = load(arguments.config, [*arguments.overrides, *eight])
    except PithtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    with connect(Place(0, 1, 0, "", 1), spec.mesh, device_type(spec), spec.distributed) as world, torch.no_grad():
        rows = measure(spec, build(spec, world), arguments.steps)
    print(machine_text(machine()))
    print(f"{arguments.config.stem}, {arguments.recipe}, after {arguments.steps} steps, against the compute dtype\n")
    print(align([["layer", "forward", "1 - cos", "dgrad", "wgrad", "worst", "of"], *rows]))


def draw(spec: RunSpec, part: Part, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S]."""
    device, shape = part.positions_BS.device, (spec.training.micro_batch_size, spec.training.sequence_length + 1)
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(spec.model.config.vocab_size, shape, device=device, generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def measure(spec: RunSpec, engine: Engine, steps: int) -> list[list[str]]:
    count, training = spec.num_micro_batches, spec.training
    part = Part(training.micro_batch_size, training.sequence_length, engine.world.device)  # streams, no documents
    for step in range(steps):
        batches = [MicroBatch(*draw(spec, part, step * count + i), part) for i in range(count)]
        train_step(engine, spec, batches, spec.optimizer.lr)
    engine.zero.wait_for_weights()
    engine.zero.begin_step(1000)  # no bucket fills: nothing is reduced
    stages = engine.pipeline.stages
    layers, head = (*stages[0].layers, *stages[1].layers), stages[1].head
    assert head is not None and stages[0].embedding is not None, "one rank holds all"
    tokens, targets = draw(spec, part, -1)
    inputs = [stages[0].embedding.data[tokens]]
    use(engine, None)
    for layer in layers:
        inputs.append(inputs[-1] + run(spec, engine, layer, part, inputs[-1], None)[0])
    scale = torch.full((), 1 / targets.numel(), device=targets.device)
    last, stats = Stage((), None, head), statistics(spec, engine)
    labels = Labels(targets, scale)
    _, tape = run_forward(forward(last, inputs[-1], part, engine.pipeline.traffic, labels, stats))
    dh = run_backward(backward(last, tape, None), run_now)
    rows: list[list[str]] = []
    for layer, h in reversed(list(zip(layers, inputs, strict=False))):
        assert dh is not None
        use(engine, None)
        want = run(spec, engine, layer, part, h, dh)
        use(engine, spec)
        found = run(spec, engine, layer, part, h, dh)
        assert want[1] is not None and found[1] is not None
        wgrads = {name: apart(found[2][name], grad) for name, grad in want[2].items()}
        whole = [torch.cat([grads[name].flatten() for name in wgrads]) for grads in (found[2], want[2])]
        worst = max(wgrads, key=lambda name: wgrads[name])
        cos = F.cosine_similarity(found[0].double().flatten(), want[0].double().flatten(), dim=0).item()
        figures = [apart(found[0], want[0]), 1 - cos, apart(found[1], want[1]), apart(*whole), wgrads[worst]]
        short = worst.removeprefix(f"model.layers.{layer.index}.").removesuffix(".weight")
        rows.append([str(layer.index), *(f"{figure:.2e}" for figure in figures), short])
        dh = dh + want[1]
    return rows[::-1]


def use(engine: Engine, spec: RunSpec | None) -> None:
    """8 bits as the spec says, or none."""
    for one in engine.zero.sharded.values():
        one.weight.recipe = spec.fp8.recipe if spec is not None and one.info.fp8 else None


def statistics(spec: RunSpec, engine: Engine) -> Stats:
    config, dtype = spec.model.config, accumulate_dtype(engine.dtype)
    return new_stats(config.num_hidden_layers, config.num_experts, engine.world.device, dtype)


def run(spec: RunSpec, engine: Engine, layer: Layer, part: Part, h: Tensor, dh: Tensor | None) -> Ran:
    """One layer forward and, with `dh`, backward; without what the residual stream carries. Gradients of matrices."""
    own = {n: one for n, one in engine.zero.sharded.items() if one.info.layer == layer.index and one.info.trained}
    for one in own.values():
        one.weight.beta = 0
    stage = Stage((layer,), None, None, tables=engine.pipeline.stages[0].tables)
    out, tape = run_forward(forward(stage, h, part, engine.pipeline.traffic, None, statistics(spec, engine)))
    assert out is not None
    if dh is None:
        return out - h, None, {}
    dx = run_backward(backward(stage, tape, dh), run_now)
    assert dx is not None
    return out - h, dx - dh, {n: one.weight.main_grad.clone() for n, one in own.items() if one.info.fp8}


def apart(found: Tensor, want: Tensor) -> float:
    return ((found.double() - want.double()).norm() / want.double().norm()).item()


if __name__ == "__main__":
    main()
