"""The engine: every rank walks through its program; computation takes its time, communication starts when all who take part are there.

[Note: what a rank does at once]
A rank computes one thing at a time, in the order of its program. A collective or message is handed over and runs beside; `waits` and `blocks`
say where the rank stands still for it. What is under way when a program ends is waited for. A message is a rendezvous: it starts when both
sides have come. On a network with wires, one call at a time keeps a rank's wire busy in each direction, first come, first served; on one whose links
are known, calls of one group go in order and all that cross a link share it; without either, calls of one group go in order and others beside each
other, so that a faster network can never make a step slower. Whichever, a call arrives some latency after its last byte left, and the next one need
not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COLLECTIVES, COMPUTES, MESSAGES, Action, Schedule
from meshwright.core.span import Span
from meshwright.simulate.call_matching import CallMatcher
from meshwright.simulate.disturb import Disturbances
from meshwright.simulate.flight import Changes, Deferred, Dies, EventQueue, Flight, Flown, Flows, Freed, Rank, Starts
from meshwright.simulate.fold import Fold, fold
from meshwright.simulate.jitter import factors
from meshwright.simulate.network import Network
from meshwright.simulate.transfers import Transfers


@dataclass(frozen=True)
class Lost:
    """A step that does not end: a device died, or a link is down that nothing goes around."""

    since: float  # the first rank that others keep waiting for ever stands still from here on
    ranks: int  # how many stand still, or are dead
    waits_for: str


@dataclass(frozen=True)
class Simulation:
    """One simulated step. Ranks that are alike share one list of spans."""

    step_s: float  # of a step that is lost: until nothing happens any more
    ends: tuple[float, ...]  # by class
    spans: tuple[tuple[Span, ...], ...]  # by class, in order of their ends
    fold: Fold
    lost: Lost | None = None

    def of(self, rank: int) -> tuple[Span, ...]:
        return self.spans[self.fold.of[rank]]


def simulate(schedule: Schedule, network: Network, disturbed: Disturbances | None = None, *, folded: bool = True) -> Simulation:
    """Run one step. With jitter no two ranks are alike; all else sets apart only those that it reaches."""
    faults = disturbed or Disturbances()
    found = fold(schedule, network, faults, apart=bool(faults.jitter) or not folded)
    return _Engine(schedule, network, found, faults).run()


class _Engine:
    """One run; made, run and dropped."""

    def __init__(self, schedule: Schedule, network: Network, found: Fold, faults: Disturbances) -> None:
        self.schedule, self.network, self.fold, self.faults = schedule, network, found, faults
        self.events = EventQueue()
        self.matcher = CallMatcher(network, found)
        self.transfers = transfers = Transfers(network, found, self.events)
        self.acts: dict[type, Callable[[Any, float], None]] = {
            Rank: lambda rank, _: self._advance(rank), Flight: self._land, Dies: self._die,
            Starts: transfers.start, Flows: transfers.start_flow, Flown: transfers.end_flow, Changes: transfers.change_links,
            Freed: lambda freed, now: transfers.release_ports(freed.flight, now),
        }  # fmt: skip

    def run(self) -> Simulation:
        speeds, deaths, seed, jitter = self.faults.speeds, self.faults.deaths, self.faults.seed, self.faults.jitter
        ranks = [
            Rank(number, self.schedule.of(first), factors(seed, first, 0, jitter), speeds.get(first, 1.0), self.network.habits(first))
            for number, first in enumerate(self.fold.first)
        ]
        for rank, first in zip(ranks, self.fold.first, strict=True):
            if first in deaths:
                self.events.push(deaths[first], Dies(rank))
        for moment in range(1, len(self.fold.links)):
            self.events.push(self.fold.links[moment].at, Changes(moment))
        for rank in ranks:
            self.events.push(0.0, rank)
        while self.events:
            now, what = self.events.pop()
            self.acts[type(what)](what, now)
        lost = self._lost(ranks)
        return Simulation(max(r.now for r in ranks), tuple(r.now for r in ranks), tuple(tuple(r.spans) for r in ranks), self.fold, lost)

    # -- ranks --

    def _advance(self, rank: Rank) -> None:
        """On through the program, until it must wait or computes."""
        while rank.at < len(rank.program) and not rank.dead:
            action = rank.program[rank.at]
            flies = action.op in COLLECTIVES or action.op in MESSAGES
            if action.waits and not (flies and rank.habits.queued) and self._hold(rank, [rank.flights.get(w) for w in action.waits]):
                return
            rank.at += 1
            if flies:
                if self._hand_over(rank, action):
                    return
            elif action.op in COMPUTES and action.seconds > 0:
                self._compute(rank, action)
                return
        rank.over = not rank.dead and not self._hold(rank, list(rank.flights.values()))

    def _compute(self, rank: Rank, action: Action) -> None:
        """Calls under way take their part of the time, as long as they are: what they cost this rank is paid while it computes."""
        begun, alone, steals = rank.now, action.seconds * rank.slow * next(rank.factor), rank.habits.steals
        stolen = min(rank.debt, alone * steals / (1.0 - steals)) if rank.debt else 0.0
        rank.debt -= stolen
        rank.now += alone + stolen
        rank.spans.append(Span(action.name, action.op, "", 0, 0, begun, rank.now, stolen))
        self.events.push(rank.now, rank)

    def _hand_over(self, rank: Rank, action: Action) -> bool:
        """Does the rank stand still for it?"""
        flight = self._join(rank, action)
        if action.blocks:
            return self._hold(rank, [flight])
        steals = rank.habits.steals
        if not steals or action.op == "recv":
            return False
        stolen = steals * self.transfers.seconds_alone(flight)
        if steals < 1:
            rank.debt += stolen
            return False
        flight.held[rank.number] = flight.held.get(rank.number, 0.0) + stolen
        rank.now += stolen
        self.events.push(rank.now, rank)
        return True

    def _hold(self, rank: Rank, flights: list[Flight | None]) -> bool:
        """Does the rank have to wait for any of these?"""
        open_ones = [f for f in flights if f is not None and not f.done]
        for flight in open_ones:
            flight.waiting.append(rank)
        rank.pending, rank.since = len(open_ones), rank.now
        return bool(open_ones)

    def _join(self, rank: Rank, action: Action) -> Flight:
        flight = self.matcher.match(rank, action)
        rank.flights[action.name] = flight
        before = [f for w in action.waits if (f := rank.flights.get(w)) is not None and not f.done] if rank.habits.queued else []
        if before:  # left to the device: it joins when what it waits for is over
            later = Deferred(rank, action, flight, len(before))
            for other in before:
                other.waiting.append(later)
        else:
            self._arrive(flight, rank, action, rank.now)
        return flight

    def _arrive(self, flight: Flight, rank: Rank, action: Action, now: float) -> None:
        if rank.dead:
            return
        flight.joined.append((rank, now, action))
        flight.missing -= 1
        if not flight.missing:
            flight.ready = now
            self.events.request_start(flight, now)

    # -- calls --

    def _land(self, flight: Flight, now: float) -> None:
        if flight.lost:
            return
        flight.done = True
        for rank in flight.waiting:
            if isinstance(rank, Rank):
                flight.held[rank.number] = flight.held.get(rank.number, 0.0) + now - rank.since
                flight.waited[rank.number] = flight.waited.get(rank.number, 0.0) + max(flight.ready - rank.since, 0.0)
                rank.debt = max(rank.debt - rank.habits.steals * (now - rank.since), 0.0)  # a rank that stands still has nothing to lose
        for rank, begun, action in flight.joined:
            count = 2 if action.op in MESSAGES else len(flight.ranks)
            held, waited = flight.held.get(rank.number, 0.0), flight.waited.get(rank.number, 0.0)
            rank.spans.append(Span(action.name, action.op, action.axis, count, action.bytes, begun, now, held, waited))
        self.transfers.release_ports(flight, now)
        for waiter in flight.waiting:
            waiter.pending -= 1
            waiter.since = now
            if not waiter.pending:
                waiter.now = now
                if isinstance(waiter, Rank):
                    self._advance(waiter)
                else:
                    self._arrive(waiter.flight, waiter.rank, waiter.action, now)

    # -- what goes wrong --

    def _die(self, event: Dies, now: float) -> None:
        """What the rank takes part in is never done; what it has not joined waits for ever."""
        rank = event.rank
        if rank.over:
            return
        rank.dead, rank.since, rank.now = True, now, now
        rank.spans[:] = [span if span.ended <= now else _cut_short(span, now) for span in rank.spans if span.begun < now]
        for flight in rank.flights.values():
            if not flight.done:
                self.transfers.fail(flight, now)

    def _lost(self, ranks: list[Rank]) -> Lost | None:
        stuck = [rank for rank in ranks if not rank.over]
        if not stuck:
            return None
        if not (self.faults.fail or self.faults.degrade):
            raise self._deadlock(stuck[0])
        alive = [rank for rank in stuck if not rank.dead]
        sizes = self.fold.sizes
        first = min(alive or stuck, key=lambda rank: rank.since)
        return Lost(first.since, sum(sizes[rank.number] for rank in stuck), next(_unfinished_calls(first), ""))

    def _deadlock(self, rank: Rank) -> RequestError:
        return RequestError(
            f"schedule {self.schedule.name or ''}: rank {self.fold.first[rank.number]} waits for ever at '{next(_unfinished_calls(rank), '?')}', "
            f"action {rank.at} of {len(rank.program)}: what it waits for is never done".replace("  ", " ")
        )


def _unfinished_calls(rank: Rank) -> Iterator[str]:
    """Their names, the last that it joined first."""
    return (name for name, flight in reversed(rank.flights.items()) if not flight.done)


def _cut_short(span: Span, now: float) -> Span:
    return Span(span.name, span.op, span.axis, span.group, span.bytes, span.begun, now, span.held, span.waited)
