"""Ranks that share the cores of one machine. There a call is work for cores: calls under way at once share them, and handing one over takes its
rank's own time. All three were measured: calls of all groups at once, of one group alone, and how long a rank was busy handing one over."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from meshwright.core.calibration import Line
from meshwright.core.schedule import COLLECTIVES, MESSAGES, Action, Schedule, wire_factor
from meshwright.simulate.network import Call, Habits
from meshwright.simulate.topology import NOTHING_DOWN, Hop

_CORES = Hop("cores", 0.0, 1.0)  # what all of them do in a second
_USUAL = 2.0**19  # bytes sent at which the share is taken: it hardly depends on them


@dataclass(frozen=True)
class Taken:
    """What one operation among so many ranks takes once it is handed over, by the bytes that a rank sends: while `groups` of them are at it, and
    while one is."""

    together: Line
    alone: Line
    hand: Line  # of the rank's own time, before the call is under way
    groups: int = 1

    def share(self) -> float:
        """Of the cores, by one call that has them to itself."""
        least = 1.0 / self.groups
        return min(max(self.together.seconds(_USUAL) / self.alone.seconds(_USUAL) * least, least), 1.0)

    def work(self, sent: float) -> float:
        """Seconds of a call that has all the cores it can use. Where taking turns costs something, all groups at once take what they took."""
        return max(self.alone.seconds(sent), self.together.seconds(sent) / (self.groups * self.share()))


@dataclass(frozen=True)
class Cores:
    """`taken` by operation and number of ranks, like all_reduce/2; both directions of a message are `send/2`."""

    taken: Mapping[str, Taken]
    duplex: bool = True

    def habits(self, rank: int) -> Habits:
        return Habits()

    def call(self, op: str, size: int, ranks: tuple[int, ...]) -> Call:
        if len(ranks) < 2:
            return Call()
        return Call(sent=self._of(op, ranks).work(size * wire_factor(op, len(ranks))), most=1.0)  # seconds of work, one a second at most

    def like(self, ranks: tuple[int, ...]) -> Hashable:
        return len(ranks)

    def wire(self, ranks: tuple[int, ...]) -> str:
        return ""

    def uses(self, op: str, ranks: tuple[int, ...], without: frozenset[str] = NOTHING_DOWN) -> Mapping[Hop, float]:
        return {_CORES: self._of(op, ranks).share()} if len(ranks) > 1 else {}

    def handed(self, schedule: Schedule) -> Schedule:
        """The schedule with what its ranks are busy with when they hand calls over."""
        by_program = {number: rank for rank in reversed(range(schedule.world)) for number in [schedule.ranks.get(str(rank), 0)]}
        programs = (
            tuple(a for action in program for a in self._with_hand(action, schedule.members(by_program.get(number, 0))))
            for number, program in enumerate(schedule.programs)
        )
        return replace(schedule, programs=tuple(programs))

    def _with_hand(self, action: Action, groups: Mapping[str, tuple[int, ...]]) -> tuple[Action, ...]:
        if action.op not in COLLECTIVES and action.op not in MESSAGES:
            return (action,)
        ranks = groups[action.axis][:2] if action.op in MESSAGES else groups[action.axis]
        size = action.bytes if action.likely is None else action.likely
        busy = self._of(action.op, ranks).hand.seconds(size * wire_factor(action.op, len(ranks)))
        return Action(f"{action.name}/handed over", "forward", seconds=busy, waits=action.waits), action

    def _of(self, op: str, ranks: tuple[int, ...]) -> Taken:
        return self.taken[f"{'send' if op in MESSAGES else op}/{2 if op in MESSAGES else len(ranks)}"]
