"""The schedule against the golden sequences, torch's private twin, and small simulators of its messages and its time.

The checkers below take any world (a list of action lists, one per rank), so that the last tests can hand them schedules
with a planted fault and see each caught.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pithtrain.schedule import P2P, Action, dualpipev, forwards

World = list[list[Action]]
SHAPES = [(P, N) for P in range(1, 9) for N in range(2 * P, 2 * P + 14)]

GOLDEN = """
P=1 N=3 r=0: F0.0 F1.0 F0.1 B1.0 [F1.1|B0.0] [F0.2|B1.1] [F1.2|B0.1] B1.2 b0.2 W
P=2 N=5 r=0: F0.0 F0.1 F0.2 F1.0 b1.0 W F1.1 [F0.3|B1.1] [F1.2|B0.0] [F0.4|B1.2] [F1.3|B0.1] B1.3 [F1.4|B0.2] B1.4 b0.3 W b0.4 W
P=2 N=5 r=1: F0.0 F1.0 F0.1 F1.1 F0.2 B1.0 [F1.2|B0.0] [F0.3|B1.1] [F1.3|B0.1] [F0.4|B1.2] [F1.4|B0.2] B1.3 B0.3 b1.4 b0.4 W W
P=3 N=7 r=1: F0.0 F0.1 F0.2 F1.0 F0.3 F1.1 b1.0 W F1.2 [F0.4|B1.1] [F1.3|B0.0] [F0.5|B1.2] [F1.4|B0.1] [F0.6|B1.3] [F1.5|B0.2] B1.4 [F1.6|B0.3] B1.5 B0.4 b1.6 b0.5 W b0.6 W W
P=4 N=9 r=0: F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F1.0 b1.0 W F1.1 b1.1 W F1.2 b1.2 W F1.3 [F0.7|B1.3] [F1.4|B0.0] [F0.8|B1.4] [F1.5|B0.1] B1.5 [F1.6|B0.2] B1.6 [F1.7|B0.3] B1.7 [F1.8|B0.4] B1.8 b0.5 W b0.6 W b0.7 W b0.8 W
P=4 N=9 r=3: F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F0.3 F1.3 F0.4 B1.0 [F1.4|B0.0] [F0.5|B1.1] [F1.5|B0.1] [F0.6|B1.2] [F1.6|B0.2] [F0.7|B1.3] [F1.7|B0.3] [F0.8|B1.4] [F1.8|B0.4] B1.5 B0.5 B1.6 B0.6 b1.7 b0.7 b1.8 b0.8 W W W W
"""  # noqa: E501

GOLDEN_BATCHES = """
P=2 N=4 r=0: F0.0 {-F0.0} F0.1 {-F0.1} F0.2 {+F1.0} F1.0 {-F0.2} b1.0 {-B1.0 +F1.1} W F1.1 [F0.3|B1.1] {-F0.3 -B1.1 +F1.2 +B0.0} [F1.2|B0.0] B1.2 {-B1.2 +F1.3 +B0.1} [F1.3|B0.1] B1.3 {-B1.3 +B0.2} b0.2 W {+B0.3} b0.3 W
P=2 N=4 r=1: {+F0.0} F0.0 {+F0.1} F1.0 {-F1.0} F0.1 {+F0.2} F1.1 F0.2 {-F1.1 +B1.0} B1.0 [F1.2|B0.0] {-F1.2 -B0.0 +F0.3 +B1.1} [F0.3|B1.1] [F1.3|B0.1] {-F1.3 -B0.1 +B1.2} B1.2 B0.2 {-B0.2 +B1.3} b1.3 b0.3 {-B0.3} W W
"""  # noqa: E501


def world(P: int, N: int) -> World:
    return [dualpipev(P, r, N) for r in range(P)]


def spell(action: Action) -> str:
    fwd = "F{}.{}".format(*action.fwd) if action.fwd else ""
    bwd = "{}{}.{}".format("b" if action.op == "b" else "B", *action.bwd) if action.bwd else ""
    return {"W": "W", "FB": f"[{fwd}|{bwd}]"}.get(action.op, fwd + bwd)


def spell_batch(batch: tuple[P2P, ...]) -> str:
    return "{" + " ".join(f"{'-' if m.send else '+'}{m.kind}.{m.chunk}" for m in batch) + "}" if batch else ""


def golden_lines(text: str) -> list[tuple[int, int, int, str]]:
    lines = [line.split(": ") for line in text.strip().splitlines()]
    return [(*(int(word.split("=")[1]) for word in head.split()), body) for head, body in lines]  # type: ignore[misc]


# --- checkers ---


def check_counts(actions: list[Action], P: int, r: int, N: int) -> None:
    """Each forward and backward once, in order, F before its B; W's FIFO and live chunks as ENGINE section 2 says."""
    done: dict[str, list[int]] = {"F0": [], "F1": [], "B0": [], "B1": []}
    live: Counter[int] = Counter()
    peak, peak_phases, put_aside, deepest = 0, (0, 0), 0, 0
    for action in actions:
        if action.fwd:
            phase, chunk = action.fwd
            done[f"F{phase}"].append(chunk)
            live[phase] += 1
        if sum(live.values()) > peak:
            peak, peak_phases = sum(live.values()), (live[0], live[1])
        if action.bwd:
            phase, chunk = action.bwd
            assert chunk in done[f"F{phase}"], f"B{phase}.{chunk} before its forward"
            assert action.op != "FB" or action.bwd != action.fwd
            done[f"B{phase}"].append(chunk)
            live[phase] -= 1
        put_aside += {"b": 1, "W": -1}.get(action.op, 0)
        deepest = max(deepest, put_aside)
        assert put_aside >= 0, "W with nothing put aside"
    assert all(chunks == list(range(N)) for chunks in done.values())
    ops = Counter(action.op for action in actions)
    assert ops["W"] == ops["b"] == 2 * P - 1 - r
    assert (put_aside, deepest) == (0, r + 1)
    assert (peak, peak_phases) == (2 * P + 1, (2 * P - r, r + 1))


def check_links(ranks: World) -> None:
    """On every ordered pair of ranks, the sender's list of (kind, chunk) equals the receiver's."""
    for src, sender in enumerate(ranks):
        for dst, receiver in enumerate(ranks):
            sent = [(m.kind, m.chunk) for a in sender for m in a.before if m.send and m.peer == dst]
            received = [(m.kind, m.chunk) for a in receiver for m in a.before if not m.send and m.peer == src]
            assert sent == received, f"rank {src} -> {dst}"


def check_causality(ranks: World) -> None:
    """Nothing is sent before it was computed, and what an action needs from a neighbour was received before it."""
    for r, actions in enumerate(ranks):
        have: set[tuple[str, int]] = set()
        computed: set[tuple[str, int]] = set()
        for action in actions:
            for m in action.before:
                assert not m.send or (m.kind, m.chunk) in computed, f"rank {r} sends {m} too early"
            have |= {(m.kind, m.chunk) for m in action.before if not m.send}
            for direction, what in (("F", action.fwd), ("B", action.bwd)):
                if what is None:
                    continue
                kind = f"{direction}{what[0]}"
                source = r - 1 if kind in ("F0", "B1") else r + 1
                if 0 <= source < len(ranks):
                    assert (kind, what[1]) in have, f"rank {r} runs {spell(action)} without its input"
                computed.add((kind, what[1]))


def longest_idle(ranks: World, F: float = 1, B: float = 2, W: float = 1, FB: float = 3) -> float:
    """Play a step in time and return the idle time of the idlest rank; a circle of waiting ranks fails as a deadlock.

    F, B (whole), W: times of one chunk, FB: of one pair; messages take no time. A rank posts a batch when its compute
    so far and its batches before have ended. A batch is a rendezvous: it ends when the peer of each member has posted
    the matching operation, the k-th send on a link matching the k-th receive. Every action but W waits for it.
    """
    cost = {"F": F, "B": B, "b": B - W, "W": W, "FB": FB, "end": 0}
    where: dict[tuple[int, int, bool], list[int]] = {}  # (rank, peer, send) -> action whose batch holds the k-th
    for r, actions in enumerate(ranks):
        for i, action in enumerate(actions):
            for m in action.before:
                where.setdefault((r, m.peer, m.send), []).append(i)
    posted: list[list[float]] = [[] for _ in ranks]  # per rank and action, the time its batch was posted
    compute, network = [0.0] * len(ranks), [0.0] * len(ranks)  # when each rank's last action and last batch end
    ended: Counter[tuple[int, int, bool]] = Counter()

    done = [0] * len(ranks)  # actions ended

    def advance(r: int) -> bool:  # whether anything happened
        i = done[r]
        if i == len(ranks[r]):
            return False
        action = ranks[r][i]
        if len(posted[r]) == i:
            posted[r].append(max(compute[r], network[r]) if action.before else compute[r])
            return True
        end, seen = posted[r][i], ended.copy()
        for m in action.before:
            key, partner = (r, m.peer, m.send), where.get((m.peer, r, not m.send), [])
            if seen[key] >= len(partner) or partner[seen[key]] >= len(posted[m.peer]):
                return False
            end = max(end, posted[m.peer][partner[seen[key]]])
            seen[key] += 1
        ended.update(seen - ended)
        network[r] = max(network[r], end) if action.before else network[r]
        compute[r] = (compute[r] if action.op == "W" else max(compute[r], network[r])) + cost[action.op]
        done[r] += 1
        return True

    while any(advance(r) for r in range(len(ranks))):
        pass
    stuck = {r: spell_batch(ranks[r][i].before) for r, i in enumerate(done) if i < len(ranks[r])}
    assert not stuck, f"deadlock, the pending batch per rank: {stuck}"
    return max(max(compute) - sum(cost[a.op] for a in actions) for actions in ranks)


# --- the schedule ---


@pytest.mark.parametrize(("P", "N", "r", "body"), golden_lines(GOLDEN))
def test_golden_sequences(P: int, N: int, r: int, body: str) -> None:
    assert " ".join(spell(a) for a in dualpipev(P, r, N)) == body


@pytest.mark.parametrize(("P", "N", "r", "body"), golden_lines(GOLDEN_BATCHES))
def test_golden_batches(P: int, N: int, r: int, body: str) -> None:
    assert " ".join(word for a in dualpipev(P, r, N) for word in (spell_batch(a.before), spell(a)) if word) == body


def test_counts_order_weights_and_live_chunks() -> None:
    for P, N in SHAPES:
        for r in range(P):
            check_counts(dualpipev(P, r, N), P, r, N)


def test_messages_match_first_in_first_out_and_never_wait_in_a_circle() -> None:
    for P, N in SHAPES:
        ranks = world(P, N)
        check_links(ranks)
        check_causality(ranks)
        longest_idle(ranks)


def test_too_few_micro_batches_are_refused() -> None:
    for P in range(1, 9):
        with pytest.raises(AssertionError, match=f"at least 2 x {P} micro-batches a step, there are {2 * P - 1}"):
            dualpipev(P, 0, 2 * P - 1)


def test_order_equals_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")
    theirs = getattr(schedules, "ScheduleDualPipeV", None)
    operations = getattr(theirs, "_calculate_single_rank_operations", None)
    if operations is None:
        pytest.skip("torch moved its private ScheduleDualPipeV")
    for P, N in SHAPES:
        for r in range(P):
            expected = [str(a) for a in operations(SimpleNamespace(pp_group_size=P, _n_microbatches=N), r)]
            assert [torch_name(a, P, r) for a in with_weights_named(dualpipev(P, r, N))] == expected, (P, N, r)


def with_weights_named(actions: list[Action]) -> list[Action]:
    """W carries no name here: it runs the oldest bundle. Name it for the comparison."""
    put_aside = deque(a.bwd for a in actions if a.op == "b")
    return [dataclasses.replace(a, bwd=put_aside.popleft()) if a.op == "W" else a for a in actions]


def torch_name(action: Action, P: int, r: int) -> str:
    def name(letter: str, what: tuple[int, int] | None) -> str:
        assert what is not None
        return f"{2 * P - 1 - r if what[0] else r}{letter}{what[1]}"

    if action.op == "FB":
        return f"({name('F', action.fwd)};{name('B', action.bwd)})OVERLAP_F_B"
    return name({"b": "I"}.get(action.op, action.op), action.fwd or action.bwd)


@pytest.mark.parametrize("hidden", [0, 0.5])
@pytest.mark.parametrize(("B", "W"), [(2, 1), (1.6, 0.6)])
def test_idle_time_is_the_formula(B: float, W: float, hidden: float) -> None:
    FB = 1 + B - hidden
    for P in range(1, 9):
        for N in (2 * P, 2 * P + 5):  # F = B - W = 1
            assert longest_idle(world(P, N), 1, B, W, FB) == pytest.approx((P - 1) * (FB + B - 3 * W)), (P, N)


@pytest.mark.parametrize(("phi", "idle"), [(1, 6.0), (0.66, 8.06), (0.5, 9.5), (0, 14.0)])
def test_idle_time_when_a_part_of_the_weight_gradients_can_wait(phi: float, idle: float) -> None:
    assert longest_idle(world(4, 16), W=phi) == pytest.approx(idle)


# --- forwards alone ---


def test_forwards_alone_take_two_slots_a_chunk_and_never_wait_in_a_circle() -> None:
    assert " ".join(spell(a) for a in forwards(3, 1, 3)[:-1]) == "F0.0 F0.1 F1.0 F0.2 F1.1 F1.2"
    for P in range(1, 9):
        for N in (1, 2, 3, 2 * P, 2 * P + 5):
            ranks = [forwards(P, r, N) for r in range(P)]
            for actions in ranks:
                done = [a.fwd for a in actions if a.fwd]
                assert [chunk for phase, chunk in done if phase == 0] == [*range(N)]
                assert [chunk for phase, chunk in done if phase == 1] == [*range(N)]
                assert actions[-1].op == "end" and not any(a.bwd for a in actions)
            check_links(ranks)
            check_causality(ranks)
            assert longest_idle(ranks) == 2 * (N - 1) + 2 * P - 2 * N, (P, N)


# --- planted faults: each checker sees its own ---


def rebatched(ranks: World, r: int, change: Callable[[list[list[P2P]]], None]) -> World:
    """The same world with the batches of rank r edited in place by `change` (a list per action)."""
    batches = [list(a.before) for a in ranks[r]]
    change(batches)
    edited = [dataclasses.replace(a, before=tuple(b)) for a, b in zip(ranks[r], batches, strict=True)]
    return [edited if i == r else actions for i, actions in enumerate(ranks)]


def test_two_swapped_sends_are_caught() -> None:
    def swap(batches: list[list[P2P]]) -> None:
        batch = next(b for b in batches if len([m for m in b if m.send]) == 2)
        i, j = (i for i, m in enumerate(batch) if m.send)
        batch[i], batch[j] = batch[j], batch[i]

    ranks = rebatched(world(2, 5), 0, swap)
    longest_idle(ranks)  # a silent swap: everything still runs
    with pytest.raises(AssertionError, match="rank 0 -> 1"):
        check_links(ranks)


@pytest.mark.parametrize("P", range(2, 9))
def test_a_send_that_is_not_withheld_is_caught(P: int) -> None:
    def hurry(batches: list[list[P2P]]) -> None:
        lone = next(i for i, a in enumerate(last) if spell(a) == f"F0.{P}")
        assert last[lone + 1].before[0].kind == "F1"
        batches[lone].append(batches[lone + 1].pop(0))

    ranks = world(P, 2 * P)
    last = ranks[P - 1]
    ranks = rebatched(ranks, P - 1, hurry)
    check_links(ranks)  # the order on the link is the same
    slow_b = {"B": 3, "FB": 4}
    assert longest_idle(ranks, **slow_b) >= longest_idle(world(P, 2 * P), **slow_b) + 1  # the lone F0 waits for a b1


def test_an_off_by_one_step_is_caught() -> None:
    actions = dualpipev(3, 1, 8)
    w = next(i for i, a in enumerate(actions) if a.op == "W")
    with pytest.raises(AssertionError):  # step 3 one turn short: b, W, F1 missing
        check_counts([a for i, a in enumerate(actions) if i not in (w - 1, w, w + 1)], 3, 1, 8)
    later = [*actions[: w - 1], actions[w], actions[w - 1], *actions[w + 1 :]]  # a W one action early
    with pytest.raises(AssertionError, match="nothing put aside"):
        check_counts(later, 3, 1, 8)
    ranks = world(3, 8)
    shifted = rebatched(ranks, 1, lambda batches: batches.insert(0, batches.pop()))  # every batch one action late
    with pytest.raises(AssertionError):
        check_causality(shifted)
    ranks[1] = dualpipev(3, 1, 9)  # one rank plays another number of micro-batches
    with pytest.raises(AssertionError, match="deadlock"):
        longest_idle(ranks)
