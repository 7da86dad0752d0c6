"""The engine: every rank walks through its program; computation takes its time, communication starts when all who take part are there.

[Note: what a rank does at once]
A rank computes one thing at a time, in the order of its program. A collective or message is handed over and runs beside; `waits` and `blocks`
say where the rank stands still for it. What is under way when a program ends is waited for. A message is a rendezvous: it starts when both
sides have come. On a network with wires, one call at a time keeps a rank's wire busy in each direction, first come, first served; without, calls
of one group go in order and others beside each other, so that a faster network can never make a step slower. Either way a call arrives some
latency after its last byte left, and the next one need not wait for that.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COLLECTIVES, COMPUTES, MESSAGES, Action, Schedule
from meshwright.core.span import Span
from meshwright.simulate.fold import Fold, fold
from meshwright.simulate.jitter import factors
from meshwright.simulate.network import Network

Port = tuple[int, str, str]  # class of ranks, wire, direction
Lane = tuple[Any, ...]  # kind and axis, then the classes that meet, or a message's source and target: calls of one lane go in order


@dataclass(frozen=True)
class Simulation:
    """One simulated step. Ranks that are alike share one list of spans."""

    step_s: float
    ends: tuple[float, ...]  # by class
    spans: tuple[tuple[Span, ...], ...]  # by class, in order of their ends
    fold: Fold

    def of(self, rank: int) -> tuple[Span, ...]:
        return self.spans[self.fold.of[rank]]


def simulate(
    schedule: Schedule,
    network: Network,
    *,
    speeds: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    folded: bool = True,
) -> Simulation:
    """Run one step. `speeds` makes ranks slower (2.0 takes twice as long); `jitter` varies every computation by that share, and then no two
    ranks are alike."""
    found = fold(schedule, network, speeds or {}, apart=bool(jitter) or not folded)
    engine = _Engine(schedule, network, found, speeds or {})
    return engine.run([factors(seed, rank, 0, jitter) for rank in found.first])


@dataclass(slots=True, eq=False)
class _Flight:
    """A call under way, or one that still waits for somebody."""

    action: Action
    ranks: tuple[int, ...]
    missing: int
    ports: tuple[Port, ...]
    lane: Lane
    waiting: list[_Rank | _Deferred] = field(default_factory=list)
    joined: list[tuple[_Rank, float, Action]] = field(default_factory=list)
    place: int = 0  # in the program of whoever came first
    ready: float = -1.0  # since when everybody is there
    held: dict[int, float] = field(default_factory=dict)
    done: bool = False


@dataclass(slots=True, eq=False)
class _Freed:
    """The last byte of a call has left."""

    flight: _Flight


@dataclass(slots=True, eq=False)
class _Start:
    """A call that would start."""

    flight: _Flight


@dataclass(slots=True, eq=False)
class _Rank:
    """One class of ranks: where it stands in its program, and since when."""

    number: int
    program: tuple[Action, ...]
    factor: Iterator[float]
    slow: float
    at: int = 0
    now: float = 0.0
    pending: int = 0
    since: float = 0.0
    over: bool = False
    flights: dict[str, _Flight] = field(default_factory=dict)
    sites: dict[tuple[str, int, str], tuple[Lane, tuple[int, ...]]] = field(default_factory=dict)  # what a call here meets
    calls: dict[tuple[Lane, bool], int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


class _Engine:
    """One run; made, run and dropped."""

    def __init__(self, schedule: Schedule, network: Network, found: Fold, speeds: Mapping[int, float]) -> None:
        self.schedule, self.network, self.fold, self.speeds = schedule, network, found, speeds
        self.events: list[tuple[float, int, float, int, int, _Rank | _Flight | _Freed | _Start]] = []
        self.count = 0
        self.flights: dict[tuple[Lane, int], _Flight] = {}
        self.prices: dict[tuple[str, int, Lane], tuple[float, float]] = {}
        self.wires: dict[tuple[int, ...], str] = {}
        self.lanes: dict[Lane, float] = {}
        self.busy: dict[Port, list[_Flight]] = {}  # a wire in use, and who waits for it

    def run(self, jitter: list[Iterator[float]]) -> Simulation:
        ranks = [_Rank(number, self.schedule.of(rank), jitter[number], self.speeds.get(rank, 1.0)) for number, rank in enumerate(self.fold.first)]
        for rank in ranks:
            self._push(0.0, rank)
        while self.events:
            now, *_, who = heapq.heappop(self.events)
            if isinstance(who, _Rank):
                self._advance(who)
            elif isinstance(who, _Freed):
                self._free(who.flight, now)
            elif isinstance(who, _Start):
                self._start(who.flight, now)
            else:
                self._land(who, now)
        self._refuse_stuck(ranks)
        return Simulation(max(r.now for r in ranks), tuple(r.now for r in ranks), tuple(tuple(r.spans) for r in ranks), self.fold)

    def _push(self, when: float, who: _Rank | _Flight | _Freed) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, 0, 0.0, 0, self.count, who))

    def _ask(self, flight: _Flight, now: float) -> None:
        """To start, after all else that happens now: who is first for a wire must not depend on the order in which ranks are looked at."""
        self.count += 1
        heapq.heappush(self.events, (now, 1, flight.ready, flight.place, self.count, _Start(flight)))

    def _advance(self, rank: _Rank) -> None:
        """On through the program, until it must wait or computes."""
        while rank.at < len(rank.program):
            action = rank.program[rank.at]
            flies = action.op in COLLECTIVES or action.op in MESSAGES
            if action.waits and not (flies and self.network.queued) and self._hold(rank, [rank.flights.get(w) for w in action.waits]):
                return
            rank.at += 1
            if flies:
                flight = self._join(rank, action)
                if action.blocks and self._hold(rank, [flight]):
                    return
            elif action.op in COMPUTES and action.seconds > 0:
                begun = rank.now
                rank.now += action.seconds * rank.slow * next(rank.factor)
                rank.spans.append(Span(action.name, action.op, "", 0, 0, begun, rank.now))
                self._push(rank.now, rank)
                return
        rank.over = not self._hold(rank, list(rank.flights.values()))

    def _hold(self, rank: _Rank, flights: list[_Flight | None]) -> bool:
        """Does the rank have to wait for any of these?"""
        open_ones = [f for f in flights if f is not None and not f.done]
        for flight in open_ones:
            flight.waiting.append(rank)
        rank.pending, rank.since = len(open_ones), rank.now
        return bool(open_ones)

    def _join(self, rank: _Rank, action: Action) -> _Flight:
        key, group = self._key(rank, action)
        flight = self.flights.get(key)
        if flight is None:
            flight = self.flights[key] = self._open(rank, action, group, key[0])
            flight.place = rank.at
        rank.flights[action.name] = flight
        before = [f for w in action.waits if (f := rank.flights.get(w)) is not None and not f.done] if self.network.queued else []
        if before:  # left to the device: it joins when what it waits for is over
            later = _Deferred(self, rank, action, flight, len(before))
            for other in before:
                other.waiting.append(later)
        else:
            self.arrive(flight, rank, action)
        return flight

    def arrive(self, flight: _Flight, rank: _Rank, action: Action, when: float | None = None) -> None:
        now = rank.now if when is None else when
        flight.joined.append((rank, now, action))
        flight.missing -= 1
        if not flight.missing:
            flight.ready = now
            self._ask(flight, now)

    def _key(self, rank: _Rank, action: Action) -> tuple[tuple[Lane, int], tuple[int, ...]]:
        """Which call this is: the n-th of its group, or of the messages from one rank to another."""
        site = (action.axis, action.peer, action.op if action.op in MESSAGES else "")
        if site not in rank.sites:
            rank.sites[site] = self._lane(rank, action)
        lane, group = rank.sites[site]
        turn = (lane, action.op == "recv")
        number = rank.calls[turn] = rank.calls.get(turn, -1) + 1
        return (lane, number), group

    def _lane(self, rank: _Rank, action: Action) -> tuple[Lane, tuple[int, ...]]:
        group = self.fold.home[action.axis, self.fold.first[rank.number]]
        if action.op not in MESSAGES:
            return ("collective", action.axis, *sorted({self.fold.of[r] for r in group})), group
        other = self.fold.of[group[action.peer]]
        ends = (rank.number, other) if action.op == "send" else (other, rank.number)
        return ("message", action.axis, *ends), group

    def _open(self, rank: _Rank, action: Action, group: tuple[int, ...], lane: Lane) -> _Flight:
        met = lane[2:]
        if action.op in MESSAGES:
            pair = (self.fold.first[rank.number], group[action.peer])
            wire = self._wire(pair)
            away, home = ("out", "in") if self.network.duplex else ("both", "both")
            return _Flight(action, pair, 2, ((met[0], wire, away), (met[1], wire, home)) if wire else (), lane)
        wire = self._wire(group)
        ways = ("out", "in") if self.network.duplex else ("both",)
        ports = tuple((number, wire, way) for number in met for way in ways) if wire else ()
        return _Flight(action, group, len(met), ports, lane)

    def _wire(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self.wires:
            self.wires[ranks] = self.network.wire(ranks)
        return self.wires[ranks]

    def _start(self, flight: _Flight, now: float) -> None:
        """Everybody is there. On wires it may have to wait for one; without, for the call before it in its lane."""
        taken = next((port for port in flight.ports if port in self.busy), None)
        if taken is not None:
            self.busy[taken].append(flight)
            return
        for port in flight.ports:
            self.busy[port] = []
        busy, latency = self._price(flight)
        begin = now if flight.ports else max(now, self.lanes.get(flight.lane, 0.0))
        self.lanes[flight.lane] = begin + busy
        if flight.ports and latency:
            self._push(begin + busy, _Freed(flight))
        self._push(begin + busy + latency, flight)

    def _free(self, flight: _Flight, now: float) -> None:
        """Its wires are free for those that wait, in the order in which they came."""
        ports, flight.ports = flight.ports, ()
        for other in [other for port in ports for other in self.busy.pop(port)]:
            self._ask(other, now)

    def _price(self, flight: _Flight) -> tuple[float, float]:
        action = flight.action
        op = "send" if action.op in MESSAGES else action.op
        size = action.bytes if action.likely is None else action.likely
        key = (op, size, flight.lane)
        if key not in self.prices:
            self.prices[key] = self.network.seconds(op, size, flight.ranks)
        return self.prices[key]

    def _land(self, flight: _Flight, now: float) -> None:
        flight.done = True
        for rank in flight.waiting:
            if isinstance(rank, _Rank):
                flight.held[rank.number] = flight.held.get(rank.number, 0.0) + now - rank.since
        for rank, begun, action in flight.joined:
            held = flight.held.get(rank.number, 0.0)
            count = 2 if action.op in MESSAGES else len(flight.ranks)
            rank.spans.append(Span(action.name, action.op, action.axis, count, action.bytes, begun, now, held))
        self._free(flight, now)
        for rank in flight.waiting:
            rank.pending -= 1
            rank.since = now
            if not rank.pending:
                rank.now = now
                if isinstance(rank, _Rank):
                    self._advance(rank)
                else:
                    rank.go(now)

    def _refuse_stuck(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            if not rank.over:
                held = [name for name, f in rank.flights.items() if not f.done]
                raise RequestError(
                    f"schedule {self.schedule.name or ''}: rank {self.fold.first[rank.number]} waits for ever at '{held[-1] if held else '?'}', "
                    f"action {rank.at} of {len(rank.program)}: what it waits for is never done".replace("  ", " ")
                )


@dataclass(slots=True, eq=False)
class _Deferred:
    """A call that a device makes by itself once others are over."""

    engine: _Engine
    rank: _Rank
    action: Action
    flight: _Flight
    pending: int
    since: float = 0.0
    now: float = 0.0

    def go(self, now: float) -> None:
        self.engine.arrive(self.flight, self.rank, self.action, now)
