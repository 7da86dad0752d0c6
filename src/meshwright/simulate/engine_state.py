"""What the engine keeps while a step is simulated: ranks on their way through their programs, calls under way, and what is to happen when."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.schedule import Action
from meshwright.core.span import Span
from meshwright.simulate.fair_sharing import Flow
from meshwright.simulate.network_model import OverlapBehavior

Port = tuple[Any, ...]  # class of ranks, wire, direction; or a lane, where only calls of one group go one after the other
StreamKey = tuple[Any, ...]  # kind and axis, then the classes that meet, or a message's source and target: calls of one lane go in order


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call under way, or one that still waits for somebody."""

    action: Action
    ranks: tuple[int, ...]
    missing: int
    ports: tuple[Port, ...]
    stream: StreamKey
    waiters: list[RankState | DeferredCall] = field(default_factory=list)
    participants: list[tuple[RankState, float, Action]] = field(default_factory=list)
    program_index: int = 0  # in the program of whoever came first
    ready: float = -1.0  # since when everybody is there
    exposed_s: dict[int, float] = field(default_factory=dict)
    peer_wait_s: dict[int, float] = field(default_factory=dict)
    flow: Flow | None = None
    done: bool = False
    failed: bool = False  # one of its ranks has died: it will never be done


@dataclass(slots=True, eq=False)
class RankState:
    """One class of ranks: where it stands in its program, and since when."""

    rank_class: int
    program: tuple[Action, ...]
    factor: Iterator[float]
    slowdown: float
    overlap: OverlapBehavior
    program_counter: int = 0
    clock: float = 0.0
    pending: int = 0
    blocked_since: float = 0.0
    interference_debt: float = 0.0  # seconds of computation that calls under way will take from it
    finished: bool = False
    failed: bool = False
    calls_by_name: dict[str, InFlightCall] = field(default_factory=dict)
    streams: dict[tuple[str, int, str], tuple[StreamKey, tuple[int, ...]]] = field(default_factory=dict)  # what a call here meets
    call_counts: dict[tuple[StreamKey, bool], int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class DeferredCall:
    """A call that a device makes by itself once others are over."""

    rank: RankState
    action: Action
    call: InFlightCall
    pending: int
    blocked_since: float = 0.0
    clock: float = 0.0


# What happens to a flight besides landing.


@dataclass(slots=True, eq=False)
class StartEvent:
    """It would start."""

    call: InFlightCall


@dataclass(slots=True, eq=False)
class TransferStartEvent:
    """Its first byte leaves."""

    call: InFlightCall


@dataclass(slots=True, eq=False)
class TransferEndEvent:
    """Its last byte leaves, unless its rate has changed since this was foreseen."""

    call: InFlightCall
    version: int


@dataclass(slots=True, eq=False)
class PortsFreedEvent:
    """The last byte of a call has left its wire."""

    call: InFlightCall


@dataclass(slots=True, eq=False)
class RankFailureEvent:
    """A device fails."""

    rank: RankState


@dataclass(slots=True, eq=False)
class LinkChangeEvent:
    """Links are others from here on."""

    epoch: int


EngineEvent = RankState | InFlightCall | StartEvent | TransferStartEvent | TransferEndEvent | PortsFreedEvent | RankFailureEvent | LinkChangeEvent


class EventQueue:
    """What is still to happen, in the order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, float, int, int, EngineEvent]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, when: float, what: EngineEvent) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, 0, 0.0, 0, self._count, what))

    def request_start(self, flight: InFlightCall, now: float) -> None:
        """After all else that happens now: who is first for a wire must not depend on the order in which ranks are looked at."""
        self._count += 1
        heapq.heappush(self._heap, (now, 1, flight.ready, flight.program_index, self._count, StartEvent(flight)))

    def pop(self) -> tuple[float, EngineEvent]:
        now, *_, what = heapq.heappop(self._heap)
        return now, what
