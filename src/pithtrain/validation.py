"""The loss on held-out text: forwards alone, every `validation.interval` steps and after the last one.

It reads the same samples each time (`data.held_out`), whatever the mesh, and leaves nothing behind: no gradient, no
count, no random state. The last batch of a corpus has as many micro-batches as it needs, on all ranks alike, and is
filled up with samples that do not count. The run is saved before; a validation that a stop cuts short is owed, and the
attempt that goes on from that step begins with it.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pithtrain.batches import read_batches, valid_tokens
from pithtrain.build import Engine
from pithtrain.data import HeldOut
from pithtrain.errors import DataError
from pithtrain.events import Events
from pithtrain.ops.linear import accumulate_dtype
from pithtrain.pipeline import MicroBatch
from pithtrain.spec import RunSpec
from pithtrain.tape import new_stats
from pithtrain.watch import Phase, Watch


@dataclass(frozen=True)
class Validation:
    """`events`: of rank 0."""

    spec: RunSpec
    engine: Engine
    events: Events | None
    watch: Watch
    corpora: Sequence[HeldOut]

    def due(self, step: int) -> bool:
        """Whether `step` is validated when it is over."""
        every, last = self.spec.validation.interval, self.spec.training.max_steps
        return bool(self.corpora) and every is not None and step > 0 and (step % every == 0 or step == last)

    @torch.no_grad()
    def run(self, step: int, phase: Phase = "validation") -> int:
        """Complete the line of `step`, the newest one, with the mean loss per token of each corpus. Returns 0, or why
        to stop (`Watch.should_stop`), which is agreed on before each batch: then nothing is told. Where a corpus cannot
        be read any more, that is a warning. `phase`: whose limit holds for each batch. A collective of all ranks, with
        one answer."""
        spec, engine, watch = self.spec, self.engine, self.watch
        world, config = engine.world, spec.model.config
        batch, dtype = spec.training.global_batch_size, accumulate_dtype(engine.dtype)
        one = torch.ones((), dtype=dtype, device=world.device)
        begin, losses = time.perf_counter(), dict[str, float]()
        for corpus in self.corpora:
            sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # loss, tokens
            for first in range(0, corpus.samples, batch):
                watch.enter(phase, step)
                batches, problem = list[MicroBatch](), ""
                try:
                    batches = read_batches(corpus.dataset, spec, world, first, corpus.samples)
                except DataError as error:
                    problem = str(error)
                stop, unread = world.max(watch.should_stop(), bool(problem))()
                if stop:
                    return stop
                if unread:  # no reason to end a run that trains
                    said = next(filter(None, world.to_rank_zero(problem)), "")
                    if self.events is not None:
                        self.events.event("warning", message=f"step {step} is not validated: {said}")
                    return 0
                stats = new_stats(config.num_hidden_layers, config.num_experts, world.device, dtype)
                engine.pipeline.evaluate(batches, one, stats)
                sums += torch.stack((stats.loss.double(), valid_tokens(batches, world)))
            total, tokens = world.sum(sums).tolist()
            losses[corpus.name] = total / tokens if tokens else math.nan
        if self.events is not None:
            self.events.validated(step, losses, time.perf_counter() - begin)
        return 0
