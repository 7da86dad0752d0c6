"""A network model of ranks that share the cores of one machine, where a call is work for cores and concurrent calls share them.

Launching a call takes the rank's own time, more after a computation than right after another call. All inputs are measured: calls of all groups at
once, calls of one group alone, and the time a rank needs to launch one. Blocking calls have timings of their own, because they take another code
path than async calls. A call occupies the cores of its ranks; a message occupies only its receiver's core, which copies it. Launching an async call
after a computation is work for the rank's core too, and competes with calls in flight.
Times are interpolated between the measured sizes: the fixed cost of a call changes with the code path that its size selects, so no single line
fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.core.calibration import AlphaBetaModel, SizeCurve
from meshwright.core.schedule import COLLECTIVE_OPS, COMPUTE_OPS, P2P_OPS, Action, Schedule, wire_factor
from meshwright.simulate.network_model import CallCost, Network
from meshwright.simulate.network_topology import NO_LINKS, DirectedLink

_SELF_AXIS = "core"  # axis of the one-rank groups whose calls are a rank's own work on its core; their bytes are units of
_UNIT_S = 1e-9
# Bytes sent at which `core_share` is evaluated: it hardly depends on the size, and a single measurement may be disturbed.
_TYPICAL_BYTES = tuple(2.0**n for n in range(17, 23))


@dataclass(frozen=True)
class TimeCurve:
    """Measured seconds by the bytes that a rank sends: linear between points and beyond the last, constant before the first."""

    points: SizeCurve  # two or more, sorted by size

    def seconds(self, bytes_sent: float) -> float:
        i = min(max(bisect_left(self.points, (bytes_sent,)), 1), len(self.points) - 1)
        (smaller, before), (larger, after) = self.points[i - 1 : i + 1]
        return max(before + (after - before) * (max(bytes_sent, smaller) - smaller) / (larger - smaller), 0.0)


@dataclass(frozen=True)
class CallTiming:
    """Seconds of one operation with one group size after its launch, by the bytes that a rank sends: with `groups` groups concurrently on one core
    (`contended`), and with one group (`uncontended`)."""

    contended: TimeCurve | AlphaBetaModel
    uncontended: TimeCurve | AlphaBetaModel
    launch_overhead: TimeCurve | AlphaBetaModel  # the rank's own time to launch the call right after another call
    cold_launch_overhead: TimeCurve | AlphaBetaModel  # additional time after a computation, with cold caches; for an async call on the rank's core
    groups: int = 1

    def core_share(self) -> float:
        """The share of its cores that one call keeps busy."""
        least = 1.0 / self.groups
        contended, uncontended = (sum(times.seconds(sent) for sent in _TYPICAL_BYTES) for times in (self.contended, self.uncontended))
        return min(max(contended / uncontended * least, least), 1.0)

    def core_seconds(self, bytes_sent: float, share: float) -> float:
        """Seconds of a call that keeps `share` of its cores busy. Long enough that all groups at once take their measured `contended` time."""
        return max(self.uncontended.seconds(bytes_sent), self.contended.seconds(bytes_sent) / (self.groups * share))


@dataclass(frozen=True)
class CoreNetwork(Network):
    """Timings of async calls (`async_timings`) and of blocking ones (`blocking`), by operation and number of ranks, such as all_reduce/2. Both
    directions of a message are `send/2`, and always async. Ranks are pinned: `rank_cores` has a core number for each rank, equal for ranks that
    share a core."""

    async_timings: Mapping[str, CallTiming]
    blocking: Mapping[str, CallTiming]
    rank_cores: tuple[int, ...]
    duplex: bool = True

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        if len(ranks) < 2:
            return CallCost(bytes_sent=size * _UNIT_S, max_rate=1.0)
        work = self._timing(op, ranks, blocks).core_seconds(size * wire_factor(op, len(ranks)), self._timing(op, ranks, False).core_share())
        return CallCost(bytes_sent=work, max_rate=1.0)  # in seconds of core time, at a rate of at most 1

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        return len(ranks)

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        share = self._timing(op, ranks, False).core_share() if len(ranks) > 1 else 1.0
        return {DirectedLink(f"core/{core}", 0.0, 1.0): share for core in busy_cores(op, ranks, self.rank_cores)}

    def with_launch_overhead(self, schedule: Schedule) -> Schedule:
        """The schedule with an action before each call for the time that its launch takes."""
        first_rank = {schedule.program_of_rank.get(str(rank), 0): rank for rank in reversed(range(schedule.world))}
        groups = [schedule.groups_of(first_rank.get(number, 0)) for number in range(len(schedule.programs))]
        programs = tuple(tuple(self._add_launch_overhead(*pair)) for pair in zip(schedule.programs, groups, strict=True))
        return replace(schedule, programs=programs, groups={**schedule.groups, _SELF_AXIS: tuple((rank,) for rank in range(schedule.world))})

    def _add_launch_overhead(self, program: tuple[Action, ...], groups: Mapping[str, tuple[int, ...]]) -> Iterator[Action]:
        after_compute = False
        for action in program:
            if action.op in COLLECTIVE_OPS or action.op in P2P_OPS:
                ranks = groups[action.axis][:2] if action.op in P2P_OPS else groups[action.axis]
                size = action.bytes if action.expected_bytes is None else action.expected_bytes
                timing, sent = self._timing(action.op, ranks, action.is_blocking), size * wire_factor(action.op, len(ranks))
                launch, cold = timing.launch_overhead.seconds(sent), timing.cold_launch_overhead.seconds(sent) if after_compute else 0.0
                if action.is_blocking and action.op not in P2P_OPS:
                    launch, cold = launch + cold, 0.0
                yield Action(f"{action.name}/handed over", "forward", seconds=launch, depends_on=action.depends_on)
                if cold:
                    yield Action(f"{action.name}/made ready", "broadcast", axis=_SELF_AXIS, bytes=round(cold / _UNIT_S), is_blocking=True)
                after_compute = False
            elif action.op in COMPUTE_OPS and action.seconds > 0:
                after_compute = True
            yield action

    def _timing(self, op: str, ranks: tuple[int, ...], blocks: bool) -> CallTiming:
        key = "send/2" if op in P2P_OPS else f"{op}/{len(ranks)}"
        return (self.blocking if blocks and op not in P2P_OPS else self.async_timings)[key]


def busy_cores(op: str, ranks: tuple[int, ...], rank_cores: tuple[int, ...]) -> set[int]:
    """The cores that a call occupies."""
    return {rank_cores[rank] for rank in (ranks[1:] if op in P2P_OPS else ranks)}
