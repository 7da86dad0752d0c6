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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COLLECTIVE_OPS, COMPUTE_OPS, P2P_OPS, Action, Schedule
from meshwright.core.span import Span
from meshwright.simulate.call_matching import CallMatcher
from meshwright.simulate.disturbances import Disturbances
from meshwright.simulate.engine_state import DeferredCall, EventQueue, InFlightCall, RankState
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
    disturbances = disturbances or Disturbances()
    partition = partition_ranks(schedule, network, disturbances, separate=bool(disturbances.jitter) or not merge_ranks)
    return _Engine(schedule, network, partition, disturbances).run()


class _Engine:
    """The simulation of one step; used once."""

    def __init__(self, schedule: Schedule, network: Network, partition: RankPartition, disturbances: Disturbances) -> None:
        self.schedule, self.partition, self.disturbances = schedule, partition, disturbances
        self.events = EventQueue()
        self.matcher = CallMatcher(network, partition)
        self.transfers = Transfers(network, partition, self.events, self._complete_call)
        self.ranks: list[RankState] = []
        for number, rank in enumerate(partition.representatives):
            jitter, slowdown = jitter_factors(disturbances.seed, rank, 0, disturbances.jitter), disturbances.slowdowns.get(rank, 1.0)
            self.ranks.append(RankState(number, schedule.program_for(rank), jitter, slowdown, network.overlap_behavior(rank)))

    def run(self) -> Simulation:
        failure_times = self.disturbances.failure_times
        for state, rank in zip(self.ranks, self.partition.representatives, strict=True):
            if rank in failure_times:
                self.events.push(failure_times[rank], partial(self._fail_rank, state))
        for epoch, links in enumerate(self.partition.link_epochs[1:], 1):
            self.events.push(links.start_s, partial(self.transfers.change_links, epoch))
        for state in self.ranks:
            self._resume_at_clock(state)
        while self.events:
            self.events.run_next()
        end_times, spans = tuple(r.clock for r in self.ranks), tuple(tuple(r.spans) for r in self.ranks)
        return Simulation(max(end_times), end_times, spans, self.partition, self._find_lost_step())

    # -- ranks --

    def _resume_at_clock(self, rank: RankState) -> None:
        self.events.push(rank.clock, lambda _: self._advance(rank))

    def _advance(self, rank: RankState) -> None:
        """Continue the rank's program until it waits or computes."""
        while rank.program_counter < len(rank.program) and not rank.failed:
            action = rank.program[rank.program_counter]
            is_call = action.op in COLLECTIVE_OPS or action.op in P2P_OPS
            dependencies = () if is_call and rank.overlap.stream_ordered else action.depends_on
            if dependencies and self._block_on(rank, [rank.calls_by_name.get(name) for name in dependencies]):
                return
            rank.program_counter += 1
            if is_call:
                if self._launch(rank, action):
                    return
            elif action.op in COMPUTE_OPS and action.seconds > 0:
                self._compute(rank, action)
                return
        rank.finished = not rank.failed and not self._block_on(rank, list(rank.calls_by_name.values()))

    def _compute(self, rank: RankState, action: Action) -> None:
        """Run a computation, slowed down by calls in flight: it pays off the rank's interference debt at no more than the interference rate."""
        start, seconds, interference = rank.clock, action.seconds * rank.slowdown * next(rank.factor), rank.overlap.interference
        delay = min(rank.interference_debt, seconds * interference / (1.0 - interference)) if rank.interference_debt else 0.0
        rank.interference_debt -= delay
        rank.clock += seconds + delay
        rank.spans.append(Span(action.name, action.op, "", 0, 0, start, rank.clock, delay))
        self._resume_at_clock(rank)

    def _launch(self, rank: RankState, action: Action) -> bool:
        """Join a call; return whether the rank stops for it."""
        call = self._join_call(rank, action)
        if action.is_blocking:
            return self._block_on(rank, [call])
        interference = rank.overlap.interference
        if not interference or action.op == "recv":
            return False
        delay = interference * self.transfers.seconds_alone(call)
        if interference < 1:
            rank.interference_debt += delay
            return False
        call.exposed_s[rank.rank_class] = call.exposed_s.get(rank.rank_class, 0.0) + delay
        rank.clock += delay
        self._resume_at_clock(rank)
        return True

    def _block_on(self, rank: RankState, calls: list[InFlightCall | None]) -> bool:
        """Register the rank as a waiter of the calls that are not done; return whether there are any."""
        pending = [call for call in calls if call is not None and not call.done]
        for call in pending:
            call.waiters.append(rank)
        rank.pending, rank.blocked_since = len(pending), rank.clock
        return bool(pending)

    def _join_call(self, rank: RankState, action: Action) -> InFlightCall:
        call = rank.calls_by_name[action.name] = self.matcher.match(rank, action)
        before = [rank.calls_by_name.get(name) for name in action.depends_on] if rank.overlap.stream_ordered else []
        pending = [other for other in before if other is not None and not other.done]
        if pending:  # the device launches the call when its dependencies are done
            deferred = DeferredCall(rank, action, call, len(pending))
            for other in pending:
                other.waiters.append(deferred)
        else:
            self._arrive(call, rank, action, rank.clock)
        return call

    def _arrive(self, call: InFlightCall, rank: RankState, action: Action, now: float) -> None:
        if rank.failed:
            return
        call.participants.append((rank, now, action))
        call.missing -= 1
        if not call.missing:
            call.ready = now
            self.transfers.request_start(call, now)

    # -- calls --

    def _complete_call(self, call: InFlightCall, now: float) -> None:
        if call.failed:
            return
        call.done = True
        for rank in call.waiters:
            if isinstance(rank, RankState):
                call.exposed_s[rank.rank_class] = call.exposed_s.get(rank.rank_class, 0.0) + now - rank.blocked_since
                call.peer_wait_s[rank.rank_class] = call.peer_wait_s.get(rank.rank_class, 0.0) + max(call.ready - rank.blocked_since, 0.0)
                # Calls cause no interference while the rank waits.
                rank.interference_debt = max(rank.interference_debt - rank.overlap.interference * (now - rank.blocked_since), 0.0)
        for rank, start, action in call.participants:
            group_size = 2 if action.op in P2P_OPS else len(call.ranks)
            exposed, waiting = call.exposed_s.get(rank.rank_class, 0.0), call.peer_wait_s.get(rank.rank_class, 0.0)
            rank.spans.append(Span(action.name, action.op, action.axis, group_size, action.bytes, start, now, exposed, waiting))
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

    def _fail_rank(self, rank: RankState, now: float) -> None:
        """Fail the rank and the calls that it has joined. Calls that it has not joined wait for ever."""
        if rank.finished:
            return
        rank.failed, rank.blocked_since, rank.clock = True, now, now
        rank.spans[:] = [span if span.end_s <= now else replace(span, end_s=now) for span in rank.spans if span.start_s < now]
        for call in rank.calls_by_name.values():
            if not call.done:
                self.transfers.fail(call, now)

    def _find_lost_step(self) -> LostStep | None:
        stuck = [rank for rank in self.ranks if not rank.finished]
        if not stuck:
            return None
        if not (self.disturbances.fail or self.disturbances.degrade):
            raise self._deadlock(stuck[0])
        alive = [rank for rank in stuck if not rank.failed]
        sizes = self.partition.class_sizes
        first = min(alive or stuck, key=lambda rank: rank.blocked_since)
        return LostStep(first.blocked_since, sum(sizes[rank.rank_class] for rank in stuck), next(_unfinished_calls(first), ""))

    def _deadlock(self, rank: RankState) -> RequestError:
        where = f"'{next(_unfinished_calls(rank), '?')}', action {rank.program_counter} of {len(rank.program)}"
        schedule = f"schedule {self.schedule.name}".strip()
        number = self.partition.representatives[rank.rank_class]
        return RequestError(f"{schedule}: rank {number} waits for ever at {where}: other ranks never join or complete this call")


def _unfinished_calls(rank: RankState) -> Iterator[str]:
    """Names of the rank's calls that are not done, last joined first."""
    return (name for name, call in reversed(rank.calls_by_name.items()) if not call.done)
