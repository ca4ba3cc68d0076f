"""DualPipeV as data: what one pipeline rank does in a step, in order. Pure Python, no torch; `pipeline` plays it.

A model is cut into 2P stages for P pipeline ranks. Rank r owns stage r (phase 0) and stage 2P-1-r (phase 1): a V, down
the ranks and back up. Rank 0 has the embedding, the head and the loss; the turn, stage P-1 to P, stays on rank P-1.

    P = 2       rank 0            rank 1
    phase 0     stage 0  --F0-->  stage 1        F0 and B1 travel to rank r+1,
                                     |           F1 and B0 to rank r-1
    phase 1     stage 3  <--F1--  stage 2

Why a V: a rank always has a forward of one phase beside a backward of the other. The two run as one overlapped pair
(FB), in which the expert all-to-all of one hides under the compute of the other. Why weight gradients are put aside
(b, then W later): the warm-up and the tail have gaps, and W waits for nobody.

What it costs, F, B, W being the times of one stage and one micro-batch (F = B - W), FB that of a pair: the longest idle
time over ranks is (P-1)(FB + B - 3W) a step; a rank keeps the activations of at most 2P+1 chunks (a chunk is one
micro-batch in one stage) and at most r+1 bundles of weight gradients put aside.

Worked example, P=1 N=3 (`[F1.1|B0.0]` is a pair: phase 1 of micro-batch 1 forward, phase 0 of micro-batch 0 backward):

    F0.0 F1.0 F0.1 B1.0 [F1.1|B0.0] [F0.2|B1.1] [F1.2|B0.1] B1.2 b0.2 W

Messages carry no tags: on each ordered pair of ranks they match first in, first out, and two kinds of one shape share a
link, so a wrong order would be a silent swap of activations. The rule: an action's receives are queued just before it,
its sends just after it, and the queue is flushed as one grouped batch (`Action.before`) right before every action. A
pair queues F before B. The three exceptions stand in steps 2, 3 and 4 with their reasons; the tests prove that both
ends of each link agree on the order and that no set of batches waits in a circle, for P = 1..8.

The paper's schedule: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.2.1, folded into a V.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Op = Literal["F", "B", "b", "FB", "W", "end"]
Kind = Literal["F0", "F1", "B0", "B1"]
_FORWARD: tuple[Kind, Kind] = ("F0", "F1")  # by phase
_BACKWARD: tuple[Kind, Kind] = ("B0", "B1")


@dataclass(frozen=True)
class P2P:
    """One message: the input (receive) or the output (send) of F or B of a phase, for micro-batch `chunk`."""

    send: bool
    kind: Kind
    chunk: int
    peer: int  # a pp rank, not a global one


@dataclass(frozen=True)
class Action:
    """One turn of a rank's compute.

    F forward, B whole backward, b backward with its weight gradients put aside, FB an overlapped pair of F and B,
    W run the oldest bundle put aside, end nothing but its batch. `fwd` and `bwd` are (phase, chunk). `before` is the
    one grouped batch of sends and receives flushed right before this action, in order; empty: no communication.
    """

    op: Op
    fwd: tuple[int, int] | None
    bwd: tuple[int, int] | None
    before: tuple[P2P, ...]


@dataclass
class _Rank:
    """Writes one rank's actions down: numbers the chunks of each kind and collects messages until the next action."""

    pp_size: int
    pp_rank: int
    actions: list[Action] = field(default_factory=list[Action])
    queue: list[P2P] = field(default_factory=list[P2P])
    counts: Counter[tuple[str, Kind]] = field(default_factory=Counter[tuple[str, Kind]])  # (run|send|receive, kind)

    def forward(self, phase: int, receive: bool = True, send: bool = True) -> None:
        if receive:
            self.receive(_FORWARD[phase])
        self._act("F", self._next(_FORWARD, phase), None)
        if send:
            self.send(_FORWARD[phase])

    def backward(self, phase: int, split: bool = False) -> None:
        self.receive(_BACKWARD[phase])
        self._act("b" if split else "B", None, self._next(_BACKWARD, phase))
        self.send(_BACKWARD[phase])

    def pair(self, fwd: int, bwd: int, receive_fwd: bool = True) -> None:
        if receive_fwd:
            self.receive(_FORWARD[fwd])
        self.receive(_BACKWARD[bwd])
        self._act("FB", self._next(_FORWARD, fwd), self._next(_BACKWARD, bwd))
        self.send(_FORWARD[fwd])
        self.send(_BACKWARD[bwd])

    def weights(self) -> None:
        self._act("W", None, None)

    def end(self) -> None:
        self._act("end", None, None)

    def receive(self, kind: Kind) -> None:
        self._message(False, kind)

    def send(self, kind: Kind) -> None:
        self._message(True, kind)

    def _message(self, send: bool, kind: Kind) -> None:
        down = kind in ("F0", "B1")  # travels from rank r to r+1
        peer = self.pp_rank + (1 if down == send else -1)
        if 0 <= peer < self.pp_size:  # else no neighbour: the embedding, the loss, or the turn
            self.queue.append(P2P(send, kind, self._count("send" if send else "receive", kind), peer))

    def _next(self, direction: tuple[Kind, Kind], phase: int) -> tuple[int, int]:
        return phase, self._count("run", direction[phase])

    def _count(self, verb: str, kind: Kind) -> int:
        self.counts[verb, kind] += 1
        return self.counts[verb, kind] - 1

    def _act(self, op: Op, fwd: tuple[int, int] | None, bwd: tuple[int, int] | None) -> None:
        self.actions.append(Action(op, fwd, bwd, tuple(self.queue)))
        self.queue.clear()


def dualpipev(pp_size: int, pp_rank: int, micro_batches: int) -> list[Action]:
    """The actions of `pp_rank` in one step of `micro_batches` chunks per phase. Needs micro_batches >= 2 * pp_size.
    Each phase does its forwards and its backwards once each, in the order of the chunks."""
    P, r, N = pp_size, pp_rank, micro_batches
    assert 0 <= r < P, f"pp_rank {r} is not one of {P} pipeline ranks"
    assert N >= 2 * P, f"DualPipeV needs at least 2 x {P} micro-batches a step, there are {N}"
    rank = _Rank(P, r)
    is_last = r == P - 1

    # Step 1: F0, to fill the stages below
    for _ in range(2 * (P - r - 1)):
        rank.forward(0)

    # Step 2: F0 F1. The receive of the next F0 is queued one turn ahead, beside F1's own: the neighbour sends the two
    # together. F1's send goes first, the neighbour above waits for it longer. One F0 receive is left for step 4.
    rank.receive("F0")
    for turn in range(r + 1):
        rank.forward(0, receive=False, send=False)
        rank.receive("F0")
        rank.forward(1, send=False)
        # Withheld on the last rank until after the lone F0 of step 4: the peer posts that receive after its own b1.
        if not (is_last and turn == r):
            rank.send("F1")
        rank.send("F0")

    # Step 3: b1 W F1. F1's receive rides in one batch with b1's send, so W hides both.
    for _ in range(P - r - 1):
        rank.backward(1, split=True)
        rank.receive("F1")
        rank.weights()
        rank.forward(1, receive=False)

    # Step 4: overlapped pairs, (F0 B1) (F1 B0). The last rank has its first B1 ready too late to pair it with F0.
    for turn in range(N - 2 * P + r + 1):
        if turn == 0 and is_last:
            rank.forward(0, receive=False)
            rank.send("F1")
            rank.backward(1)
        else:
            rank.pair(0, 1, receive_fwd=turn > 0)
        rank.pair(1, 0)

    # Step 5: B1 (F1 B0), the forwards of phase 0 being over
    for _ in range(P - r - 1):
        rank.backward(1)
        rank.pair(1, 0)

    # Step 6: B1 B0. The second half of these backwards puts its weight gradients aside for the gaps of step 7.
    for j in range(2 * (r + 1)):
        rank.backward(1 - j % 2, split=j >= r + 1)

    # Step 7: W b0
    for _ in range(P - r - 1):
        rank.weights()
        rank.backward(0, split=True)

    # Step 8: W
    for _ in range(r + 1):
        rank.weights()

    assert not rank.queue, f"messages left after the last action: {rank.queue}"
    return rank.actions


def forwards(pp_size: int, pp_rank: int, micro_batches: int) -> list[Action]:
    """The forwards alone of one batch, any number of chunks: F0.i in slot 2i + r and F1.i in slot 2i + 2P-1-r, of which
    no two are the same. It takes 2 (N-1) + 2P slots, of one chunk each."""
    P, r, N = pp_size, pp_rank, micro_batches
    rank = _Rank(P, r)
    for _, phase in sorted((2 * i + (2 * P - 1 - r if phase else r), phase) for i in range(N) for phase in (0, 1)):
        rank.forward(phase)
    rank.end()
    return rank.actions
