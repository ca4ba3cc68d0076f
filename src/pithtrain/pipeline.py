"""Plays a schedule: activations in and out, forwards, backwards, overlapped pairs, and weight gradients put aside.

`schedule` decides what happens when; this file only knows how. Before each action its grouped batch of sends and
receives is launched; an action that computes waits for the batches launched so far, W waits for none. What a stage
sends was produced by it alone, and is kept until its batch has been waited for.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.ops.parts import Part
from pithtrain.schedule import P2P, Action, dualpipev, forwards
from pithtrain.tape import (
    Closures,
    Labels,
    Stage,
    Stats,
    Tape,
    Traffic,
    backward,
    forward,
    overlap,
    run_backward,
    run_forward,
    run_now,
)
from pithtrain.world import World


@dataclass(frozen=True)
class MicroBatch:
    """tokens and labels [mbs, S] int64 on the device, S positions of this rank; on pipeline rank 0 only. `part`: where
    its documents are, on every rank; None: each sequence is one stream."""

    tokens: Tensor | None
    labels: Tensor | None
    part: Part | None = None


@dataclass
class _Step:
    """What lives during one step, keyed by (kind of message, micro-batch) or (phase, micro-batch)."""

    batches: Sequence[MicroBatch]
    scale: Tensor
    stats: Stats
    learn: bool
    incoming: dict[tuple[str, int], Tensor] = field(default_factory=dict[tuple[str, int], Tensor])
    outgoing: dict[tuple[str, int], Tensor] = field(default_factory=dict[tuple[str, int], Tensor])
    tapes: dict[tuple[int, int], Tape] = field(default_factory=dict[tuple[int, int], Tape])
    aside: deque[Closures] = field(default_factory=deque[Closures])
    flying: list[tuple[dist.Work, list[Tensor]]] = field(default_factory=list[tuple[dist.Work, list[Tensor]]])


@dataclass(eq=False)
class Pipeline:
    """This rank's two stages and the actions it plays with them each step. Needs micro_batches >= 2 pp."""

    world: World
    stages: tuple[Stage, Stage]
    traffic: Traffic
    hidden_shape: tuple[int, int, int]  # [mbs, S, H] of a message
    dtype: torch.dtype  # of a message
    micro_batches: int
    part: Part | None  # that of all micro-batches; None: each has its own

    def __post_init__(self) -> None:
        self.actions: list[Action] = dualpipev(self.world.mesh.pp, self.world.pp, self.micro_batches)
        self._last = self.world.pp == self.world.mesh.pp - 1

    @torch.no_grad()
    def step(self, batches: Sequence[MicroBatch], scale: Tensor, stats: Stats) -> None:
        """All forwards and backwards of a step. When it returns, `stats` holds this rank's losses, and the sums of main
        gradients over ranks are in flight (`Zero.grad_norm` waits for them).

        `batches`: one per micro-batch; empty where this rank has no tokens and no micro-batch a part of its own.
        `scale`: one over the valid tokens of the global batch, a device scalar.
        """
        step = _Step(batches, scale, stats, learn=True)
        for action in self.actions:
            self._communicate(step, action.before)
            if action.op == "W":
                bundle = step.aside.popleft()
                while bundle:  # what came last first: the embedding's gradient has the longest sum over ranks
                    bundle.pop()()
                continue
            self._wait(step)
            fwd, bwd = action.fwd, action.bwd
            if fwd and bwd:
                (h, step.tapes[fwd]), dx = overlap(self._forward(step, fwd), self._backward(step, bwd), run_now)
                self._hand_on(step, "F", fwd, h)
                self._hand_on(step, "B", bwd, dx)
            elif fwd:
                h, step.tapes[fwd] = run_forward(self._forward(step, fwd))
                self._hand_on(step, "F", fwd, h)
            elif bwd:
                bundle: Closures = []
                dx = run_backward(self._backward(step, bwd), bundle.extend if action.op == "b" else run_now)
                if action.op == "b":
                    step.aside.append(bundle)
                self._hand_on(step, "B", bwd, dx)
        self._wait(step)
        left = (step.incoming, step.outgoing, step.tapes, step.aside)
        assert not any(left), f"a step left {[len(x) for x in left]} inputs, outputs, tapes and bundles behind"

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], scale: Tensor, stats: Stats) -> None:
        """The forwards of a step alone: `stats` as `step` leaves it, but for the head's z-loss, and no gradient. Any
        number of micro-batches, as many on every rank. What a chunk keeps for a backward lives while it runs."""
        step = _Step(batches, scale, stats, learn=False)
        for action in forwards(self.world.mesh.pp, self.world.pp, len(batches)):
            self._communicate(step, action.before)
            self._wait(step)
            if action.fwd:
                h = run_forward(self._forward(step, action.fwd))[0]
                self._hand_on(step, "F", action.fwd, h)
        assert not step.incoming and not step.outgoing, "every stage's output has gone to the next"

    def _forward(self, step: _Step, fwd: tuple[int, int]) -> Generator[None, None, tuple[Tensor | None, Tape]]:
        phase, micro_batch = fwd
        stage = self.stages[phase]
        batch = step.batches[micro_batch] if step.batches else MicroBatch(None, None)
        x = batch.tokens if stage.embedding is not None else step.incoming.pop((f"F{phase}", micro_batch))
        labels = None
        if stage.head is not None:
            assert batch.labels is not None, "pipeline rank 0 has the labels"
            labels = Labels(batch.labels, step.scale, step.learn)
        assert x is not None, "pipeline rank 0 has the tokens"
        part = self.part if batch.part is None else batch.part
        assert part is not None, "documents are known on every rank, or each stage would mask others"
        return forward(stage, x, part, self.traffic, labels, step.stats)

    def _backward(self, step: _Step, bwd: tuple[int, int]) -> Generator[Closures, None, Tensor | None]:
        phase, micro_batch = bwd
        stage = self.stages[phase]
        dh = None if stage.head is not None else step.incoming.pop((f"B{phase}", micro_batch))
        return backward(stage, step.tapes.pop(bwd), dh)

    def _hand_on(self, step: _Step, direction: Literal["F", "B"], at: tuple[int, int], out: Tensor | None) -> None:
        """What a forward or a backward gives, to whom it is for: nobody at the model's ends; this rank itself at the
        turn, from stage P-1 to P and back."""
        phase, micro_batch = at
        turn = 0 if direction == "F" else 1
        if self._last and phase == turn:
            assert out is not None, "the turn is no end of the model"
            step.incoming[f"{direction}{1 - phase}", micro_batch] = out
        elif out is not None:
            step.outgoing[f"{direction}{phase}", micro_batch] = out

    def _communicate(self, step: _Step, messages: tuple[P2P, ...]) -> None:
        """Launch one grouped batch, in the schedule's order: messages of a pair of ranks match first in, first out."""
        if not messages:
            return
        ops: list[dist.P2POp] = []
        sent: list[Tensor] = []
        for message in messages:
            key = (message.kind, message.chunk)
            peer = self.world.pp_peer(message.peer)
            if message.send:
                sent.append(step.outgoing.pop(key).contiguous())
                ops.append(dist.P2POp(dist.isend, sent[-1], peer, self.world.pp_group))
            else:
                buffer = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.world.device)
                step.incoming[key] = buffer
                ops.append(dist.P2POp(dist.irecv, buffer, peer, self.world.pp_group))
        step.flying.extend((work, sent) for work in dist.batch_isend_irecv(ops))

    def _wait(self, step: _Step) -> None:
        for work, _ in step.flying:
            work.wait()
        step.flying.clear()
