"""Which collective a run hangs in, and who is missing there: torch's flight recorder, as ranks leave it behind.

torch keeps the last `distributed.flight_recorder` collectives of a rank, with their number in their group and whether
they have ended. A rank that fails writes what it has of each group beside its error (`recorded`); whoever asks why the
run ended puts the ranks side by side (`lines`), which no single rank can:

    rank 0    ep_fwd_group of ranks 0 1    begun 34, done 33, in all_to_all [[2, 64]]
    rank 1    ep_fwd_group of ranks 0 1    begun 33, done 33
    all_to_all 34 of ep_fwd_group: rank 0 waited in it, rank 1 had not begun it

A group's name holds its members (`name`), so one rank's file says whom to expect. NCCL's messages between two ranks are
recorded too, gloo's are not; copies into peers' memory are no collectives.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OPEN = 4  # collectives of a group that a rank tells of which have not ended: the first is the one it waits in
ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # that have one size on all ranks
ONE_SIDED = ("broadcast", "gather", "scatter", "reduce", "send", "recv")  # that a rank may end before others begin
SPELLED = 8  # members of a group that are named one by one: each of the collectives kept holds the group's name


def name(what: str, ranks: Sequence[int]) -> str:
    """Of a process group, for torch and for `lines`: of ranks 0 1, or 0-62:2 where many are evenly apart."""
    first, last, step = ranks[0], ranks[-1], ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > SPELLED and [*ranks] == [*range(first, last + 1, step)]:
        return f"{what} of ranks {first}-{last}:{step}"
    return f"{what} of ranks {' '.join(map(str, ranks))}"


def _members(text: str) -> list[int]:
    if found := re.fullmatch(r"(\d+)-(\d+):(\d+)", text):
        first, last, step = map(int, found.groups())
        return [*range(first, last + 1, step)]
    return [int(each) for each in text.split()]


def recorded() -> list[dict[str, Any]]:
    """What this process has of each group: {group, begun, done, newest: {number, operation, sizes, at}, open: [same]}.
    `begun` is the number of the newest collective, `done` of the newest that has ended. [] where torch is not loaded or
    records none."""
    if "torch.distributed" not in sys.modules:
        return []
    from torch._C import _distributed_c10d as c10d

    # of gloo's groups, and in a build with CUDA of NCCL's
    dumps = [getattr(c10d, each)() for each in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, each)]
    groups: dict[str, dict[str, Any]] = {}
    for entry in (entry for dump in dumps for entry in json.loads(dump).get("entries", [])):
        operation = entry["profiling_name"].partition(":")[2]
        # what NCCL's watchdog gave up is retired too; gloo knows no other state
        nccl = entry["profiling_name"].startswith("nccl:")
        ended = entry["state"] == "completed" if nccl else entry["retired"]
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        kind = " between two" if entry["is_p2p"] else ""
        group = entry["process_group"][1] + kind
        call = {"number": number, "operation": operation, "sizes": entry["input_sizes"], "at": entry["time_created_ns"]}
        one = groups.setdefault(group, {"group": group, "begun": 0, "done": 0, "newest": call, "open": []})
        if number > one["begun"]:
            one |= {"begun": number, "newest": call}
        if ended:
            one["done"] = max(one["done"], number)
        elif len(one["open"]) < OPEN:
            one["open"].append(call)
    return list(groups.values())


def lines(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[str]:
    """What ranks wait for, a line for each group in which some do; first those where a rank is missing that waits
    nowhere itself, and of such the oldest, behind which a device has queued the others. `records`: by rank, as
    `recorded` gave them."""
    by_group: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, groups in sorted(records.items()):
        for one in groups:
            by_group.setdefault(one["group"], {})[rank] = one
    waiting = {rank for rank, groups in records.items() if any(one["open"] for one in groups)}
    found = [_line(group, ranks, records.keys(), waiting) for group, ranks in by_group.items()]
    return [line for *_, line in sorted(each for each in found if each)]


def _line(
    group: str, ranks: Mapping[int, Mapping[str, Any]], told: Any, waiting: set[int]
) -> tuple[int, int, str] | None:
    inside = {rank: one["open"][0] for rank, one in ranks.items() if one["open"]} or _broken_off(ranks)
    if not inside:
        return None
    number = min(each["number"] for each in inside.values())
    inside = {rank: each for rank, each in inside.items() if each["number"] == number}
    what, _, members = group.partition(" of ranks ")
    at = min(each["at"] for each in inside.values())
    if members.endswith("between two"):
        parts = (f"rank {rank} in {each['operation']} {each['sizes']}" for rank, each in inside.items())
        return 3, at, f"messages of {what}: {', '.join(parts)}"
    expected = _members(members) or sorted(told)
    absent = [rank for rank in expected if rank in told and ranks.get(rank, {}).get("begun", 0) < number]
    silent = [rank for rank in expected if rank not in told]
    calls = dict(zip(inside, _calls(inside), strict=True))
    if len({*calls.values()}) > 1:
        said = ", ".join(f"rank {rank} calls {call}" for rank, call in calls.items())
        return 0, at, f"collective {number} of {what}: {said}"
    head = f"{next(iter(inside.values()))['operation']} {number} of {what}"
    parts = [f"{_ranks(sorted(inside))} waited in it"]
    if absent:
        parts.append(f"{_ranks(absent)} had not begun it")
    if silent:
        parts.append(f"{_ranks(silent)} told nothing")
    if not absent and not silent:
        parts.append("and nobody was missing: a device or the network between them stood still")
    first = 1 if silent or not waiting.issuperset(absent) else 2
    return first, at, f"{head}: {', '.join(parts)}"


def _broken_off(ranks: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """What the ranks ahead of the others were in, where none is open any more: gloo ends what broke off, too."""
    last = min(one["begun"] for one in ranks.values())
    ahead = {rank: one["newest"] for rank, one in ranks.items() if one["begun"] == last + 1}
    return {rank: call for rank, call in ahead.items() if call["operation"] not in ONE_SIDED}


def _calls(inside: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """What each rank calls, as far as all must call the same."""
    for each in inside.values():
        yield each["operation"] + (f" {each['sizes']}" if re.search("|".join(ALIKE), each["operation"]) else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
