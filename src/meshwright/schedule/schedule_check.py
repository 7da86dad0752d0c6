"""Checks of a self-contained schedule: names, dependencies, groups, and that the ranks of a group agree on their collectives."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COLLECTIVE_OPS, COMPUTE_OPS, P2P_OPS, Action, Schedule

_KNOWN_OPS = (*COMPUTE_OPS, *COLLECTIVE_OPS, *P2P_OPS, "wait")
CollectiveCall = tuple[str, int]  # operation and bytes


def check_schedule(schedule: Schedule, where: str = "") -> None:
    """Raise a RequestError that names the first problem: an action that waits for one that no rank runs would hang."""
    for problem in schedule_problems(schedule):
        raise RequestError(f"{where}: {problem}" if where else problem)


def schedule_problems(schedule: Schedule) -> Iterator[str]:
    if schedule.world < 1 or not schedule.programs:
        yield f"the schedule has {schedule.world} ranks and {len(schedule.programs)} programs: give at least one of each"
        return
    for rank, index in schedule.program_of_rank.items():
        if not 0 <= index < len(schedule.programs):
            yield f"rank {rank} has program {index}, and there are {len(schedule.programs)} programs: give one from 0 to {len(schedule.programs) - 1}"
            return
    for index, program in enumerate(schedule.programs):
        yield from _program_problems(index, program)
    yield from _communication_problems(schedule)


def _program_problems(index: int, program: tuple[Action, ...]) -> Iterator[str]:
    seen: set[str] = set()
    for action in program:
        if action.op not in _KNOWN_OPS:
            yield f"program {index}, {action.name}: unknown operation '{action.op}'"
        missing = [name for name in action.depends_on if name not in seen]
        if missing:
            yield f"program {index}, {action.name}: it depends on '{missing[0]}', which does not come before it"
        if action.name in seen:
            yield f"program {index}: two actions are called '{action.name}'"
        if min(action.bytes, action.seconds, action.flops) < 0:
            yield f"program {index}, {action.name}: bytes, seconds and flops must be at least 0"
        seen.add(action.name)


def _communication_problems(schedule: Schedule) -> Iterator[str]:
    """Check that all members of a group make the same collectives in the same order, and that every send is received, with as many bytes."""
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[CollectiveCall]]] = {}
    sent: dict[tuple[str, int, int], list[int]] = {}
    received: dict[tuple[str, int, int], list[int]] = {}
    group_of: dict[tuple[str, int], tuple[int, ...]] = {(name, rank): g for name, groups in schedule.groups.items() for g in groups for rank in g}
    for rank in range(schedule.world):
        for action in schedule.program_for(rank):
            if action.op not in (*COLLECTIVE_OPS, *P2P_OPS):
                continue
            group = group_of.get((action.axis, rank))
            if group is None:
                yield f"rank {rank}, {action.name}: the rank is in no group called '{action.axis}'"
                return
            if action.op in COLLECTIVE_OPS:
                calls.setdefault((action.axis, group), {}).setdefault(rank, []).append((action.op, action.bytes))
                continue
            if not 0 <= action.peer < len(group) or group[action.peer] == rank:
                yield f"rank {rank}, {action.name}: its peer {action.peer} is not another member of a group of {len(group)}"
                return
            peer = group[action.peer]
            if action.op == "send":
                sent.setdefault((action.axis, rank, peer), []).append(action.bytes)
            else:
                received.setdefault((action.axis, peer, rank), []).append(action.bytes)
    for (axis, group), by_rank in calls.items():
        for rank in group:
            if by_rank.get(rank) != by_rank.get(group[0]):
                members = ", ".join(map(str, group[:4])) + (", …" if len(group) > 4 else "")
                yield f"group {axis} of ranks {members}: rank {rank} makes other collectives than rank {group[0]}"
                return
    for channel in dict.fromkeys([*sent, *received]):
        if sent.get(channel) != received.get(channel):
            axis, source, target = channel
            yield f"group {axis}: the messages that rank {source} sends to rank {target} and those that rank {target} receives differ"
            return
