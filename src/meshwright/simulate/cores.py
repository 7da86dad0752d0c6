"""Ranks that share the cores of one machine. There a call is work for cores: calls under way at once share them, and handing one over takes its
rank's own time, more of it after a computation than right after another call. All of it was measured: calls of all groups at once, of one group
alone, and how long a rank was busy handing one over. A call that its rank stands still for takes another path than one that runs beside it.
A call is at work on the cores of its ranks, a message on its receiver's, who copies it; what a rank has to do for one that it hands over beside its
computation is work for its core, too, where calls under way have to wait for it.
Times are taken as they were measured at each size: what a call costs however small it is changes with the path that its size takes, and no one
line goes through that."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.core.calibration import Line, Points
from meshwright.core.schedule import COLLECTIVES, COMPUTES, MESSAGES, Action, Schedule, wire_factor
from meshwright.simulate.network import Call, Habits
from meshwright.simulate.topology import NOTHING_DOWN, Hop

_OWN = "core"  # the name of the groups of one rank each, whose calls are work of its own, in units of
_UNIT_S = 1e-9
_USUAL = tuple(2.0**n for n in range(17, 23))  # bytes sent at which the share is taken: it hardly depends on them, and one alone may be disturbed


@dataclass(frozen=True)
class Curve:
    """Seconds by the bytes that a rank sends, as measured: straight between points and beyond the last, level before the first."""

    points: Points  # two or more, in the order of their sizes

    def seconds(self, sent: float) -> float:
        at = min(max(bisect_left(self.points, (sent,)), 1), len(self.points) - 1)
        (smaller, before), (larger, after) = self.points[at - 1 : at + 1]
        return max(before + (after - before) * (max(sent, smaller) - smaller) / (larger - smaller), 0.0)


@dataclass(frozen=True)
class Taken:
    """What one operation among so many ranks takes once it is handed over, by the bytes that a rank sends: while `groups` of them are at it on one
    core, and while one is."""

    together: Curve | Line
    alone: Curve | Line
    hand: Curve | Line  # of the rank's own time, before the call is under way, right after another call
    rested: Curve | Line  # what more it takes after a computation, when nothing of it is in the caches: of its core's time, if it runs beside it
    groups: int = 1

    def share(self) -> float:
        """Of its cores, what one call keeps busy."""
        least = 1.0 / self.groups
        together, alone = (sum(times.seconds(sent) for sent in _USUAL) for times in (self.together, self.alone))
        return min(max(together / alone * least, least), 1.0)

    def work(self, sent: float, share: float) -> float:
        """Seconds of a call that keeps that share of its cores busy. Where taking turns costs something, all groups at once take what they took."""
        return max(self.alone.seconds(sent), self.together.seconds(sent) / (self.groups * share))


@dataclass(frozen=True)
class Cores:
    """By operation and number of ranks, like all_reduce/2, calls that run `beside` their ranks and those that their ranks stand still for. Both
    directions of a message are `send/2`, and always run beside. Ranks stay where they are: `places` has a number for each rank, the same for those
    that share a core."""

    beside: Mapping[str, Taken]
    blocking: Mapping[str, Taken]
    places: tuple[int, ...]
    duplex: bool = True

    def habits(self, rank: int) -> Habits:
        return Habits()

    def call(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> Call:
        if len(ranks) < 2:
            return Call(sent=size * _UNIT_S, most=1.0)
        work = self._of(op, ranks, blocks).work(size * wire_factor(op, len(ranks)), self._of(op, ranks, False).share())
        return Call(sent=work, most=1.0)  # seconds of work, one a second at most

    def like(self, ranks: tuple[int, ...]) -> Hashable:
        return len(ranks)

    def wire(self, ranks: tuple[int, ...]) -> str:
        return ""

    def uses(self, op: str, ranks: tuple[int, ...], without: frozenset[str] = NOTHING_DOWN) -> Mapping[Hop, float]:
        share = self._of(op, ranks, False).share() if len(ranks) > 1 else 1.0
        return {Hop(f"core/{place}", 0.0, 1.0): share for place in at_work(op, ranks, self.places)}

    def handed(self, schedule: Schedule) -> Schedule:
        """The schedule with what its ranks are busy with when they hand calls over."""
        by_program = {number: rank for rank in reversed(range(schedule.world)) for number in [schedule.ranks.get(str(rank), 0)]}
        programs = (tuple(self._with_hands(program, schedule.members(by_program.get(number, 0)))) for number, program in enumerate(schedule.programs))
        groups = {**schedule.groups, _OWN: tuple((rank,) for rank in range(schedule.world))}
        return replace(schedule, programs=tuple(programs), groups=groups)

    def _with_hands(self, program: tuple[Action, ...], groups: Mapping[str, tuple[int, ...]]) -> Iterator[Action]:
        rested = False
        for action in program:
            if action.op in COLLECTIVES or action.op in MESSAGES:
                ranks = groups[action.axis][:2] if action.op in MESSAGES else groups[action.axis]
                size = action.bytes if action.likely is None else action.likely
                taken, sent = self._of(action.op, ranks, action.blocks), size * wire_factor(action.op, len(ranks))
                own, more = taken.hand.seconds(sent), taken.rested.seconds(sent) if rested else 0.0
                if action.blocks and action.op not in MESSAGES:
                    own, more = own + more, 0.0
                yield Action(f"{action.name}/handed over", "forward", seconds=own, waits=action.waits)
                if more:
                    yield Action(f"{action.name}/made ready", "broadcast", axis=_OWN, bytes=round(more / _UNIT_S), blocks=True)
                rested = False
            elif action.op in COMPUTES and action.seconds > 0:
                rested = True
            yield action

    def _of(self, op: str, ranks: tuple[int, ...], blocks: bool) -> Taken:
        return (self.blocking if blocks and op not in MESSAGES else self.beside)[_kind(op, ranks)]


def at_work(op: str, ranks: tuple[int, ...], places: tuple[int, ...]) -> set[int]:
    """Where somebody has work with a call."""
    return {places[rank] for rank in (ranks[1:] if op in MESSAGES else ranks)}


def _kind(op: str, ranks: tuple[int, ...]) -> str:
    return "send/2" if op in MESSAGES else f"{op}/{len(ranks)}"
