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

from meshwright.core.calibration import AlphaBetaModel, SizeCurve
from meshwright.core.schedule import COLLECTIVE_OPS, COMPUTE_OPS, P2P_OPS, Action, Schedule, wire_factor
from meshwright.simulate.network_model import CallCost, OverlapBehavior
from meshwright.simulate.network_topology import NO_LINKS, DirectedLink

_SELF_AXIS = "core"  # the name of the groups of one rank each, whose calls are work of its own, in units of
_UNIT_S = 1e-9
_TYPICAL_BYTES = tuple(
    2.0**n for n in range(17, 23)
)  # bytes sent at which the share is taken: it hardly depends on them, and one alone may be disturbed


@dataclass(frozen=True)
class TimeCurve:
    """Seconds by the bytes that a rank sends, as measured: straight between points and beyond the last, level before the first."""

    points: SizeCurve  # two or more, in the order of their sizes

    def seconds(self, bytes_sent: float) -> float:
        at = min(max(bisect_left(self.points, (bytes_sent,)), 1), len(self.points) - 1)
        (smaller, before), (larger, after) = self.points[at - 1 : at + 1]
        return max(before + (after - before) * (max(bytes_sent, smaller) - smaller) / (larger - smaller), 0.0)


@dataclass(frozen=True)
class CallTiming:
    """What one operation among so many ranks takes once it is handed over, by the bytes that a rank sends: while `groups` of them are at it on one
    core, and while one is."""

    contended: TimeCurve | AlphaBetaModel
    uncontended: TimeCurve | AlphaBetaModel
    launch_overhead: TimeCurve | AlphaBetaModel  # of the rank's own time, before the call is under way, right after another call
    cold_launch_overhead: (
        TimeCurve | AlphaBetaModel
    )  # what more it takes after a computation, when nothing of it is in the caches: of its core's time, if it runs beside it
    groups: int = 1

    def core_share(self) -> float:
        """Of its cores, what one call keeps busy."""
        least = 1.0 / self.groups
        together, alone = (sum(times.seconds(sent) for sent in _TYPICAL_BYTES) for times in (self.contended, self.uncontended))
        return min(max(together / alone * least, least), 1.0)

    def core_seconds(self, bytes_sent: float, share: float) -> float:
        """Seconds of a call that keeps that share of its cores busy. Where taking turns costs something, all groups at once take what they took."""
        return max(self.uncontended.seconds(bytes_sent), self.contended.seconds(bytes_sent) / (self.groups * share))


@dataclass(frozen=True)
class CoreNetwork:
    """By operation and number of ranks, like all_reduce/2, calls that run `async_timings` their ranks and those that their ranks stand still
    for. Both directions of a message are `send/2`, and always run beside. Ranks stay where they are: `rank_cores` has a number for each rank,
    the same for those that share a core."""

    async_timings: Mapping[str, CallTiming]
    blocking: Mapping[str, CallTiming]
    rank_cores: tuple[int, ...]
    duplex: bool = True

    def overlap_behavior(self, rank: int) -> OverlapBehavior:
        return OverlapBehavior()

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        if len(ranks) < 2:
            return CallCost(bytes_sent=size * _UNIT_S, max_rate=1.0)
        work = self._timing(op, ranks, blocks).core_seconds(size * wire_factor(op, len(ranks)), self._timing(op, ranks, False).core_share())
        return CallCost(bytes_sent=work, max_rate=1.0)  # seconds of work, one a second at most

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        return len(ranks)

    def exclusive_link(self, ranks: tuple[int, ...]) -> str:
        return ""

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        share = self._timing(op, ranks, False).core_share() if len(ranks) > 1 else 1.0
        return {DirectedLink(f"core/{place}", 0.0, 1.0): share for place in busy_cores(op, ranks, self.rank_cores)}

    def with_launch_overhead(self, schedule: Schedule) -> Schedule:
        """The schedule with what its ranks are busy with when they hand calls over."""
        by_program = {number: rank for rank in reversed(range(schedule.world)) for number in [schedule.program_of_rank.get(str(rank), 0)]}
        programs = (
            tuple(self._add_launch_overhead(program, schedule.groups_of(by_program.get(number, 0))))
            for number, program in enumerate(schedule.programs)
        )
        groups = {**schedule.groups, _SELF_AXIS: tuple((rank,) for rank in range(schedule.world))}
        return replace(schedule, programs=tuple(programs), groups=groups)

    def _add_launch_overhead(self, program: tuple[Action, ...], groups: Mapping[str, tuple[int, ...]]) -> Iterator[Action]:
        rested = False
        for action in program:
            if action.op in COLLECTIVE_OPS or action.op in P2P_OPS:
                ranks = groups[action.axis][:2] if action.op in P2P_OPS else groups[action.axis]
                size = action.bytes if action.expected_bytes is None else action.expected_bytes
                taken, sent = self._timing(action.op, ranks, action.is_blocking), size * wire_factor(action.op, len(ranks))
                own, more = taken.launch_overhead.seconds(sent), taken.cold_launch_overhead.seconds(sent) if rested else 0.0
                if action.is_blocking and action.op not in P2P_OPS:
                    own, more = own + more, 0.0
                yield Action(f"{action.name}/handed over", "forward", seconds=own, depends_on=action.depends_on)
                if more:
                    yield Action(f"{action.name}/made ready", "broadcast", axis=_SELF_AXIS, bytes=round(more / _UNIT_S), is_blocking=True)
                rested = False
            elif action.op in COMPUTE_OPS and action.seconds > 0:
                rested = True
            yield action

    def _timing(self, op: str, ranks: tuple[int, ...], blocks: bool) -> CallTiming:
        return (self.blocking if blocks and op not in P2P_OPS else self.async_timings)[_timing_key(op, ranks)]


def busy_cores(op: str, ranks: tuple[int, ...], rank_cores: tuple[int, ...]) -> set[int]:
    """Where somebody has work with a call."""
    return {rank_cores[rank] for rank in (ranks[1:] if op in P2P_OPS else ranks)}


def _timing_key(op: str, ranks: tuple[int, ...]) -> str:
    return "send/2" if op in P2P_OPS else f"{op}/{len(ranks)}"
