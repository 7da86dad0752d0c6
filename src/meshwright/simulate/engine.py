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

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COLLECTIVES, COMPUTES, MESSAGES, Action, Schedule
from meshwright.core.span import Span
from meshwright.simulate.disturb import Disturbances
from meshwright.simulate.flight import Changes, Deferred, Dies, Event, Flight, Flown, Flows, Freed, Lane, Rank, Starts
from meshwright.simulate.fold import Fold, fold
from meshwright.simulate.jitter import factors
from meshwright.simulate.network import Call, Network
from meshwright.simulate.sharing import Flow, Sharing


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
        self.events: list[tuple[float, int, float, int, int, Event]] = []
        self.count = 0
        self.flights: dict[tuple[Lane, int], Flight] = {}
        self.prices: dict[tuple[str, int, bool, Lane], tuple[Call, int, float]] = {}
        self.wires: dict[tuple[int, ...], str] = {}
        self.lanes: dict[Lane, float] = {}
        self.busy: dict[Any, list[Flight]] = {}  # a wire or lane in use, and who waits for it
        self.sharing = Sharing(found.links) if found.links else None
        self.flying: dict[Flow, Flight] = {}
        self.acts: dict[type, Callable[[Any, float], None]] = {
            Rank: lambda rank, _: self._advance(rank), Flight: self._land, Starts: self._start, Flows: self._flow, Flown: self._flown,
            Freed: lambda freed, now: self._free(freed.flight, now), Dies: self._die, Changes: self._change,
        }  # fmt: skip

    def run(self) -> Simulation:
        speeds, deaths, seed, jitter = self.faults.speeds, self.faults.deaths, self.faults.seed, self.faults.jitter
        ranks = [
            Rank(number, self.schedule.of(first), factors(seed, first, 0, jitter), speeds.get(first, 1.0), self.network.habits(first))
            for number, first in enumerate(self.fold.first)
        ]
        for rank, first in zip(ranks, self.fold.first, strict=True):
            if first in deaths:
                self._push(deaths[first], Dies(rank))
        for moment in range(1, len(self.fold.links)):
            self._push(self.fold.links[moment].at, Changes(moment))
        for rank in ranks:
            self._push(0.0, rank)
        while self.events:
            now, *_, what = heapq.heappop(self.events)
            self.acts[type(what)](what, now)
        lost = self._lost(ranks)
        return Simulation(max(r.now for r in ranks), tuple(r.now for r in ranks), tuple(tuple(r.spans) for r in ranks), self.fold, lost)

    def _push(self, when: float, what: Event) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, 0, 0.0, 0, self.count, what))

    def _ask(self, flight: Flight, now: float) -> None:
        """To start, after all else that happens now: who is first for a wire must not depend on the order in which ranks are looked at."""
        self.count += 1
        heapq.heappush(self.events, (now, 1, flight.ready, flight.place, self.count, Starts(flight)))

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
        self._push(rank.now, rank)

    def _hand_over(self, rank: Rank, action: Action) -> bool:
        """Does the rank stand still for it?"""
        flight = self._join(rank, action)
        if action.blocks:
            return self._hold(rank, [flight])
        steals = rank.habits.steals
        if not steals or action.op == "recv":
            return False
        stolen = steals * self._price(flight)[2]
        if steals < 1:
            rank.debt += stolen
            return False
        flight.held[rank.number] = flight.held.get(rank.number, 0.0) + stolen
        rank.now += stolen
        self._push(rank.now, rank)
        return True

    def _hold(self, rank: Rank, flights: list[Flight | None]) -> bool:
        """Does the rank have to wait for any of these?"""
        open_ones = [f for f in flights if f is not None and not f.done]
        for flight in open_ones:
            flight.waiting.append(rank)
        rank.pending, rank.since = len(open_ones), rank.now
        return bool(open_ones)

    def _join(self, rank: Rank, action: Action) -> Flight:
        key, group = self._key(rank, action)
        flight = self.flights.get(key)
        if flight is None:
            flight = self.flights[key] = self._open(rank, action, group, key[0])
            flight.place = rank.at
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
            self._ask(flight, now)

    def _key(self, rank: Rank, action: Action) -> tuple[tuple[Lane, int], tuple[int, ...]]:
        """Which call this is: the n-th of its group, or of the messages from one rank to another."""
        site = (action.axis, action.peer, action.op if action.op in MESSAGES else "")
        if site not in rank.sites:
            rank.sites[site] = self._lane(rank, action)
        lane, group = rank.sites[site]
        turn = (lane, action.op == "recv")
        number = rank.calls[turn] = rank.calls.get(turn, -1) + 1
        return (lane, number), group

    def _lane(self, rank: Rank, action: Action) -> tuple[Lane, tuple[int, ...]]:
        group = self.fold.meetings.group(action.axis, self.fold.first[rank.number])
        if action.op not in MESSAGES:
            return ("collective", action.axis, *sorted({self.fold.of[r] for r in group})), group
        other = self.fold.of[group[action.peer]]
        ends = (rank.number, other) if action.op == "send" else (other, rank.number)
        return ("message", action.axis, *ends), group

    def _open(self, rank: Rank, action: Action, group: tuple[int, ...], lane: Lane) -> Flight:
        met = lane[2:]
        if action.op in MESSAGES:
            mine, other = self.fold.first[rank.number], group[action.peer]
            pair = (mine, other) if action.op == "send" else (other, mine)
            wire = self._wire(pair)
            away, home = ("out", "in") if self.network.duplex else ("both", "both")
            return Flight(action, pair, 2, ((met[0], wire, away), (met[1], wire, home)) if wire else self._in_order(lane), lane)
        wire = self._wire(group)
        ways = ("out", "in") if self.network.duplex else ("both",)
        ports = tuple((number, wire, way) for number in met for way in ways) if wire else self._in_order(lane)
        return Flight(action, group, len(met), ports, lane)

    def _in_order(self, lane: Lane) -> tuple[Lane, ...]:
        """How long a call takes that shares links is not known when it starts: then its lane is in use until it ends."""
        return (lane,) if self.sharing is not None else ()

    def _wire(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self.wires:
            self.wires[ranks] = self.network.wire(ranks)
        return self.wires[ranks]

    # -- calls --

    def _start(self, asked: Starts, now: float) -> None:
        """Everybody is there. It may have to wait for a wire, or for the call before it in its lane."""
        flight = asked.flight
        taken = next((port for port in flight.ports if port in self.busy), None)
        if flight.lost:
            return
        if taken is not None:
            self.busy[taken].append(flight)
            return
        for port in flight.ports:
            self.busy[port] = []
        call, kind, _ = self._price(flight)
        if kind >= 0:
            flight.flow = Flow(kind, call.sent, call.most)
            self._push(now + call.gap_s, Flows(flight))
            return
        begin = now if flight.ports else max(now, self.lanes.get(flight.lane, 0.0))
        self.lanes[flight.lane] = begin + call.busy_s
        if flight.ports and call.rest_s:
            self._push(begin + call.busy_s, Freed(flight))
        self._push(begin + call.busy_s + call.rest_s, flight)

    def _flow(self, asked: Flows, now: float) -> None:
        flow = asked.flight.flow
        if flow is not None and self.sharing is not None and not asked.flight.lost:
            self.flying[flow] = asked.flight
            self._foresee(self.sharing.add(flow, now))

    def _foresee(self, changed: Iterable[Flow]) -> None:
        for flow in changed:
            if flow.end < float("inf"):
                self._push(flow.end, Flown(self.flying[flow], flow.version))

    def _flown(self, foreseen: Flown, now: float) -> None:
        flight, flow = foreseen.flight, foreseen.flight.flow
        if flow is None or flow.version != foreseen.version or self.sharing is None:
            return
        flight.flow = None
        del self.flying[flow]
        self._foresee(self.sharing.remove(flow, now))
        self._free(flight, now)
        self._push(now + self._price(flight)[0].rest_s, flight)

    def _free(self, flight: Flight, now: float) -> None:
        """Its wires are free for those that wait, in the order in which they came."""
        ports, flight.ports = flight.ports, ()
        for other in [other for port in ports for other in self.busy.pop(port, [])]:
            self._ask(other, now)

    def _price(self, flight: Flight) -> tuple[Call, int, float]:
        """What a call costs; its class where it shares links, else -1; and its seconds with nobody beside it but its like."""
        action = flight.action
        op = "send" if action.op in MESSAGES else action.op
        size = action.bytes if action.likely is None else action.likely
        key = (op, size, action.blocks, flight.lane)
        if key not in self.prices:
            call, kind = self.network.call(op, size, flight.ranks, blocks=action.blocks), -1
            most = call.most
            if self.sharing is not None:
                ends = flight.ranks if op == "send" else (flight.ranks[0], -1)
                kind = int(self.fold.edges[self.fold.meetings.edge(op, action.axis, *ends)])
                links = self.fold.links[0]
                most = min([most, *(links.capacity[link] / load for link, load in links.loads.get(kind, ()))])
            alone = call.gap_s + (call.sent / most if most else 0.0)
            self.prices[key] = call, kind, alone
        return self.prices[key]

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
        self._free(flight, now)
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
                flight.lost = True
                if flight.flow in self.flying and self.sharing is not None:
                    del self.flying[flight.flow]
                    self._foresee(self.sharing.remove(flight.flow, now))
                flight.flow = None
                self._free(flight, now)

    def _change(self, event: Changes, now: float) -> None:
        if self.sharing is not None:
            self._foresee(self.sharing.change(event.moment, now))

    def _lost(self, ranks: list[Rank]) -> Lost | None:
        stuck = [rank for rank in ranks if not rank.over]
        if not stuck:
            return None
        if not (self.faults.fail or self.faults.degrade):
            self._refuse(stuck[0])
        alive = [rank for rank in stuck if not rank.dead]
        sizes = self.fold.sizes
        first = min(alive or stuck, key=lambda rank: rank.since)
        return Lost(first.since, sum(sizes[rank.number] for rank in stuck), next(self._open_calls(first), ""))

    def _open_calls(self, rank: Rank) -> Iterator[str]:
        return (name for name, flight in reversed(rank.flights.items()) if not flight.done)

    def _refuse(self, rank: Rank) -> None:
        raise RequestError(
            f"schedule {self.schedule.name or ''}: rank {self.fold.first[rank.number]} waits for ever at '{next(self._open_calls(rank), '?')}', "
            f"action {rank.at} of {len(rank.program)}: what it waits for is never done".replace("  ", " ")
        )


def _cut_short(span: Span, now: float) -> Span:
    return Span(span.name, span.op, span.axis, span.group, span.bytes, span.begun, now, span.held, span.waited)
