"""What the engine keeps while a step is simulated: ranks on their way through their programs, calls under way, and what is to happen when."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.schedule import Action
from meshwright.core.span import Span
from meshwright.simulate.network import Habits
from meshwright.simulate.sharing import Flow

Port = tuple[Any, ...]  # class of ranks, wire, direction; or a lane, where only calls of one group go one after the other
Lane = tuple[Any, ...]  # kind and axis, then the classes that meet, or a message's source and target: calls of one lane go in order


@dataclass(slots=True, eq=False)
class Flight:
    """A call under way, or one that still waits for somebody."""

    action: Action
    ranks: tuple[int, ...]
    missing: int
    ports: tuple[Port, ...]
    lane: Lane
    waiting: list[Rank | Deferred] = field(default_factory=list)
    joined: list[tuple[Rank, float, Action]] = field(default_factory=list)
    place: int = 0  # in the program of whoever came first
    ready: float = -1.0  # since when everybody is there
    held: dict[int, float] = field(default_factory=dict)
    waited: dict[int, float] = field(default_factory=dict)
    flow: Flow | None = None
    done: bool = False
    lost: bool = False  # one of its ranks has died: it will never be done


@dataclass(slots=True, eq=False)
class Rank:
    """One class of ranks: where it stands in its program, and since when."""

    number: int
    program: tuple[Action, ...]
    factor: Iterator[float]
    slow: float
    habits: Habits
    at: int = 0
    now: float = 0.0
    pending: int = 0
    since: float = 0.0
    debt: float = 0.0  # seconds of computation that calls under way will take from it
    over: bool = False
    dead: bool = False
    flights: dict[str, Flight] = field(default_factory=dict)
    sites: dict[tuple[str, int, str], tuple[Lane, tuple[int, ...]]] = field(default_factory=dict)  # what a call here meets
    calls: dict[tuple[Lane, bool], int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Deferred:
    """A call that a device makes by itself once others are over."""

    rank: Rank
    action: Action
    flight: Flight
    pending: int
    since: float = 0.0
    now: float = 0.0


# What happens to a flight besides landing.


@dataclass(slots=True, eq=False)
class Starts:
    """It would start."""

    flight: Flight


@dataclass(slots=True, eq=False)
class Flows:
    """Its first byte leaves."""

    flight: Flight


@dataclass(slots=True, eq=False)
class Flown:
    """Its last byte leaves, unless its rate has changed since this was foreseen."""

    flight: Flight
    version: int


@dataclass(slots=True, eq=False)
class Freed:
    """The last byte of a call has left its wire."""

    flight: Flight


@dataclass(slots=True, eq=False)
class Dies:
    """A device fails."""

    rank: Rank


@dataclass(slots=True, eq=False)
class Changes:
    """Links are others from here on."""

    moment: int


Event = Rank | Flight | Starts | Flows | Flown | Freed | Dies | Changes


class EventQueue:
    """What is still to happen, in the order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, float, int, int, Event]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, when: float, what: Event) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, 0, 0.0, 0, self._count, what))

    def request_start(self, flight: Flight, now: float) -> None:
        """After all else that happens now: who is first for a wire must not depend on the order in which ranks are looked at."""
        self._count += 1
        heapq.heappush(self._heap, (now, 1, flight.ready, flight.place, self._count, Starts(flight)))

    def pop(self) -> tuple[float, Event]:
        now, *_, what = heapq.heappop(self._heap)
        return now, what
