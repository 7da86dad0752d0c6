"""The simulation engine: runs every rank's program event by event on a network model and returns the spans of one step.

[Note: what a rank does concurrently]
A rank computes one action at a time, in program order. A collective or message runs asynchronously; `depends_on` and `is_blocking` say where the rank
waits for it. At the end of its program a rank waits for all its calls. A call starts when all its ranks have arrived; a message is a rendezvous of
both sides. If the network has exclusive links, a rank's link runs one call at a time in each direction, first come, first served. If it has shared
links, calls of one group run in order and all calls that cross a link share it. If it has neither, calls of one group run in order and other calls
concurrently, so that a faster network can never make a step slower. In all cases a call completes some latency after its last byte has left, and
the next call need not wait for that latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COLLECTIVE_OPS, COMPUTE_OPS, P2P_OPS, Action, Schedule
from meshwright.core.span import Span
from meshwright.simulate.call_matching import CallMatcher
from meshwright.simulate.disturbances import Disturbances
from meshwright.simulate.engine_state import (
    DeferredCall,
    EventQueue,
    InFlightCall,
    LinkChangeEvent,
    PortsFreedEvent,
    RankFailureEvent,
    RankState,
    StartEvent,
    TransferEndEvent,
    TransferStartEvent,
)
from meshwright.simulate.jitter import jitter_factors
from meshwright.simulate.network_model import Network
from meshwright.simulate.rank_partition import RankPartition, partition_ranks
from meshwright.simulate.transfers import Transfers


@dataclass(frozen=True)
class LostStep:
    """A step that does not end, because a device died or a link without a detour is down."""

    since_s: float  # when the first rank began to wait for ever
    num_stuck: int  # ranks that wait for ever or are dead
    waiting_on: str


@dataclass(frozen=True)
class Simulation:
    """One simulated step. Ranks of one class share one list of spans."""

    step_s: float  # for a lost step, the time of the last event
    end_times: tuple[float, ...]  # by rank class
    spans: tuple[tuple[Span, ...], ...]  # by rank class, in order of end time
    rank_partition: RankPartition
    lost: LostStep | None = None

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        return self.spans[self.rank_partition.class_of[rank]]


def simulate(schedule: Schedule, network: Network, disturbances: Disturbances | None = None, *, merge_ranks: bool = True) -> Simulation:
    """Simulate one step. With jitter every rank is a class of its own; other disturbances separate only the ranks that they affect."""
    faults = disturbances or Disturbances()
    found = partition_ranks(schedule, network, faults, separate=bool(faults.jitter) or not merge_ranks)
    return _Engine(schedule, network, found, faults).run()


class _Engine:
    """The simulation of one step; used once."""

    def __init__(self, schedule: Schedule, network: Network, rank_partition: RankPartition, disturbances: Disturbances) -> None:
        self.schedule, self.network, self.rank_partition, self.disturbances = schedule, network, rank_partition, disturbances
        self.events = EventQueue()
        self.matcher = CallMatcher(network, rank_partition)
        self.transfers = transfers = Transfers(network, rank_partition, self.events)
        self.handlers: dict[type, Callable[[Any, float], None]] = {
            RankState: lambda rank, _: self._advance(rank),
            InFlightCall: self._complete_call,
            RankFailureEvent: self._fail_rank,
            StartEvent: transfers.start,
            TransferStartEvent: transfers.start_flow,
            TransferEndEvent: transfers.end_flow,
            LinkChangeEvent: transfers.change_links,
            PortsFreedEvent: lambda freed, now: transfers.release_ports(freed.call, now),
        }

    def run(self) -> Simulation:
        speeds, deaths, seed, jitter = self.disturbances.slowdowns, self.disturbances.failure_times, self.disturbances.seed, self.disturbances.jitter
        ranks = [
            RankState(
                number,
                self.schedule.program_for(first),
                jitter_factors(seed, first, 0, jitter),
                speeds.get(first, 1.0),
                self.network.overlap_behavior(first),
            )
            for number, first in enumerate(self.rank_partition.representatives)
        ]
        for rank, first in zip(ranks, self.rank_partition.representatives, strict=True):
            if first in deaths:
                self.events.push(deaths[first], RankFailureEvent(rank))
        for moment in range(1, len(self.rank_partition.link_epochs)):
            self.events.push(self.rank_partition.link_epochs[moment].start_s, LinkChangeEvent(moment))
        for rank in ranks:
            self.events.push(0.0, rank)
        while self.events:
            now, what = self.events.pop()
            self.handlers[type(what)](what, now)
        lost = self._find_lost_step(ranks)
        return Simulation(max(r.clock for r in ranks), tuple(r.clock for r in ranks), tuple(tuple(r.spans) for r in ranks), self.rank_partition, lost)

    # -- ranks --

    def _advance(self, rank: RankState) -> None:
        """Continue the rank's program until it waits or computes."""
        while rank.program_counter < len(rank.program) and not rank.failed:
            action = rank.program[rank.program_counter]
            flies = action.op in COLLECTIVE_OPS or action.op in P2P_OPS
            if (
                action.depends_on
                and not (flies and rank.overlap.stream_ordered)
                and self._block_on(rank, [rank.calls_by_name.get(w) for w in action.depends_on])
            ):
                return
            rank.program_counter += 1
            if flies:
                if self._launch(rank, action):
                    return
            elif action.op in COMPUTE_OPS and action.seconds > 0:
                self._compute(rank, action)
                return
        rank.finished = not rank.failed and not self._block_on(rank, list(rank.calls_by_name.values()))

    def _compute(self, rank: RankState, action: Action) -> None:
        """Run a computation, slowed down by calls in flight: it pays off the rank's interference debt at no more than the interference rate."""
        begun, alone, steals = rank.clock, action.seconds * rank.slowdown * next(rank.factor), rank.overlap.interference
        stolen = min(rank.interference_debt, alone * steals / (1.0 - steals)) if rank.interference_debt else 0.0
        rank.interference_debt -= stolen
        rank.clock += alone + stolen
        rank.spans.append(Span(action.name, action.op, "", 0, 0, begun, rank.clock, stolen))
        self.events.push(rank.clock, rank)

    def _launch(self, rank: RankState, action: Action) -> bool:
        """Join a call; return whether the rank stops for it."""
        flight = self._join_call(rank, action)
        if action.is_blocking:
            return self._block_on(rank, [flight])
        steals = rank.overlap.interference
        if not steals or action.op == "recv":
            return False
        stolen = steals * self.transfers.seconds_alone(flight)
        if steals < 1:
            rank.interference_debt += stolen
            return False
        flight.exposed_s[rank.rank_class] = flight.exposed_s.get(rank.rank_class, 0.0) + stolen
        rank.clock += stolen
        self.events.push(rank.clock, rank)
        return True

    def _block_on(self, rank: RankState, calls: list[InFlightCall | None]) -> bool:
        """Register the rank as a waiter of the calls that are not done; return whether there are any."""
        open_ones = [f for f in calls if f is not None and not f.done]
        for flight in open_ones:
            flight.waiters.append(rank)
        rank.pending, rank.blocked_since = len(open_ones), rank.clock
        return bool(open_ones)

    def _join_call(self, rank: RankState, action: Action) -> InFlightCall:
        flight = self.matcher.match(rank, action)
        rank.calls_by_name[action.name] = flight
        before = [f for w in action.depends_on if (f := rank.calls_by_name.get(w)) is not None and not f.done] if rank.overlap.stream_ordered else []
        if before:  # the device defers the call until its dependencies are done
            later = DeferredCall(rank, action, flight, len(before))
            for other in before:
                other.waiters.append(later)
        else:
            self._arrive(flight, rank, action, rank.clock)
        return flight

    def _arrive(self, call: InFlightCall, rank: RankState, action: Action, now: float) -> None:
        if rank.failed:
            return
        call.participants.append((rank, now, action))
        call.missing -= 1
        if not call.missing:
            call.ready = now
            self.events.request_start(call, now)

    # -- calls --

    def _complete_call(self, call: InFlightCall, now: float) -> None:
        if call.failed:
            return
        call.done = True
        for rank in call.waiters:
            if isinstance(rank, RankState):
                call.exposed_s[rank.rank_class] = call.exposed_s.get(rank.rank_class, 0.0) + now - rank.blocked_since
                call.peer_wait_s[rank.rank_class] = call.peer_wait_s.get(rank.rank_class, 0.0) + max(call.ready - rank.blocked_since, 0.0)
                rank.interference_debt = max(
                    rank.interference_debt - rank.overlap.interference * (now - rank.blocked_since), 0.0
                )  # calls cause no interference while the rank waits
        for rank, begun, action in call.participants:
            count = 2 if action.op in P2P_OPS else len(call.ranks)
            held, waited = call.exposed_s.get(rank.rank_class, 0.0), call.peer_wait_s.get(rank.rank_class, 0.0)
            rank.spans.append(Span(action.name, action.op, action.axis, count, action.bytes, begun, now, held, waited))
        self.transfers.release_ports(call, now)
        for waiter in call.waiters:
            waiter.pending -= 1
            waiter.blocked_since = now
            if not waiter.pending:
                waiter.clock = now
                if isinstance(waiter, RankState):
                    self._advance(waiter)
                else:
                    self._arrive(waiter.call, waiter.rank, waiter.action, now)

    # -- failures --

    def _fail_rank(self, event: RankFailureEvent, now: float) -> None:
        """Fail the rank and the calls that it has joined. Calls that it has not joined wait for ever."""
        rank = event.rank
        if rank.finished:
            return
        rank.failed, rank.blocked_since, rank.clock = True, now, now
        rank.spans[:] = [span if span.end_s <= now else _truncate_span(span, now) for span in rank.spans if span.start_s < now]
        for flight in rank.calls_by_name.values():
            if not flight.done:
                self.transfers.fail(flight, now)

    def _find_lost_step(self, ranks: list[RankState]) -> LostStep | None:
        stuck = [rank for rank in ranks if not rank.finished]
        if not stuck:
            return None
        if not (self.disturbances.fail or self.disturbances.degrade):
            raise self._deadlock(stuck[0])
        alive = [rank for rank in stuck if not rank.failed]
        sizes = self.rank_partition.class_sizes
        first = min(alive or stuck, key=lambda rank: rank.blocked_since)
        return LostStep(first.blocked_since, sum(sizes[rank.rank_class] for rank in stuck), next(_unfinished_calls(first), ""))

    def _deadlock(self, rank: RankState) -> RequestError:
        return RequestError(
            f"schedule {self.schedule.name or ''}: rank {self.rank_partition.representatives[rank.rank_class]} "
            f"waits for ever at '{next(_unfinished_calls(rank), '?')}', "
            f"action {rank.program_counter} of {len(rank.program)}: what it waits for is never done".replace("  ", " ")
        )


def _unfinished_calls(rank: RankState) -> Iterator[str]:
    """Names of the rank's calls that are not done, last joined first."""
    return (name for name, flight in reversed(rank.calls_by_name.items()) if not flight.done)


def _truncate_span(span: Span, now: float) -> Span:
    return Span(span.name, span.op, span.axis, span.group_size, span.bytes, span.start_s, now, span.exposed_s, span.waiting_s)
