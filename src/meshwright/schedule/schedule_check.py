"""Checks of a self-contained schedule: names, dependencies, groups, and that the ranks of a group agree on their collectives."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COLLECTIVE_OPS, COMPUTE_OPS, P2P_OPS, Action, Schedule

_KNOWN_OPS = (*COMPUTE_OPS, *COLLECTIVE_OPS, *P2P_OPS, "wait")
CollectiveCall = tuple[str, int]  # operation and bytes


def check_schedule(schedule: Schedule, where: str = "") -> None:
    """Raise a RequestError that names the first problem: an action that waits for one that nobody does would hang a run."""
    place = f"{where}: " if where else ""
    for problem in schedule_problems(schedule):
        raise RequestError(f"{place}{problem}")


def schedule_problems(schedule: Schedule) -> Iterator[str]:
    if schedule.world < 1 or not schedule.programs:
        yield f"a schedule for {schedule.world} ranks with {len(schedule.programs)} programs runs nowhere: give world and programs"
        return
    for rank, index in schedule.program_of_rank.items():
        if not 0 <= index < len(schedule.programs):
            yield f"rank {rank} has program {index}, there are {len(schedule.programs)}"
            return
    for number, program in enumerate(schedule.programs):
        yield from _program_problems(number, program)
    yield from _communication_problems(schedule)


def _program_problems(index: int, program: tuple[Action, ...]) -> Iterator[str]:
    seen: set[str] = set()
    for action in program:
        if action.op not in _KNOWN_OPS:
            yield f"program {index}, {action.name}: unknown operation '{action.op}'"
        missing = [name for name in action.depends_on if name not in seen]
        if missing:
            yield f"program {index}, {action.name}: waits for '{missing[0]}', which does not come before it"
        if action.name in seen:
            yield f"program {index}: two actions are called '{action.name}'"
        if min(action.bytes, action.seconds, action.flops) < 0:
            yield f"program {index}, {action.name}: bytes, seconds and flops are at least 0"
        seen.add(action.name)


def _communication_problems(schedule: Schedule) -> Iterator[str]:
    """Check that all members of a group make the same collectives in the same order, and that every send is received, with as many bytes."""
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[CollectiveCall]]] = {}
    sent: dict[tuple[str, int, int], list[int]] = {}
    received: dict[tuple[str, int, int], list[int]] = {}
    home: dict[tuple[str, int], tuple[int, ...]] = {(name, rank): g for name, groups in schedule.groups.items() for g in groups for rank in g}
    for rank in range(schedule.world):
        for action in schedule.program_for(rank):
            if action.op not in (*COLLECTIVE_OPS, *P2P_OPS):
                continue
            group = home.get((action.axis, rank))
            if group is None:
                yield f"rank {rank}, {action.name}: it is in no group called '{action.axis}'"
                return
            if action.op in COLLECTIVE_OPS:
                calls.setdefault((action.axis, group), {}).setdefault(rank, []).append((action.op, action.bytes))
                continue
            if not 0 <= action.peer < len(group) or group[action.peer] == rank:
                yield f"rank {rank}, {action.name}: its peer {action.peer} is not another member of a group of {len(group)}"
                return
            other = group[action.peer]
            channel = (action.axis, rank, other) if action.op == "send" else (action.axis, other, rank)
            (sent if action.op == "send" else received).setdefault(channel, []).append(action.bytes)
    for (axis, group), lists in calls.items():
        first = lists.get(group[0], [])
        for rank in group:
            if lists.get(rank, []) != first:
                yield f"group {axis} of ranks {_abbreviate(group)}: rank {rank} makes other collectives than rank {group[0]}"
                return
    for axis, source, target in dict.fromkeys([*sent, *received]):
        if sent.get((axis, source, target), []) != received.get((axis, source, target), []):
            yield f"group {axis}: what rank {source} sends and what rank {target} receives from it differ"
            return


def _abbreviate(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
