"""The engine's state while it simulates a step: ranks in their programs, calls in flight, and the queue of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.schedule import Action
from meshwright.core.span import Span
from meshwright.simulate.fair_sharing import Flow
from meshwright.simulate.network_model import OverlapBehavior

Port = tuple[Any, ...]  # rank class, link, direction; or a stream key, where only the calls of one group run one after the other
StreamKey = tuple[Any, ...]  # kind and axis, then the rank classes of a group, or of a message's source and target; calls of one stream run in order


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A collective or message that is running, or that waits for some of its ranks."""

    action: Action
    ranks: tuple[int, ...]
    missing: int
    ports: tuple[Port, ...]
    stream: StreamKey
    waiters: list[RankState | DeferredCall] = field(default_factory=list)
    participants: list[tuple[RankState, float, Action]] = field(default_factory=list)
    program_index: int = 0  # in the program of the rank that arrived first
    ready: float = -1.0  # when the last rank arrived
    exposed_s: dict[int, float] = field(default_factory=dict)
    peer_wait_s: dict[int, float] = field(default_factory=dict)
    flow: Flow | None = None
    done: bool = False
    failed: bool = False  # one of its ranks has died: it never completes


@dataclass(slots=True, eq=False)
class RankState:
    """One class of ranks: its position in its program, its clock and its calls."""

    rank_class: int
    program: tuple[Action, ...]
    factor: Iterator[float]
    slowdown: float
    overlap: OverlapBehavior
    program_counter: int = 0
    clock: float = 0.0
    pending: int = 0
    blocked_since: float = 0.0
    interference_debt: float = 0.0  # seconds by which calls in flight will still delay its computation
    finished: bool = False
    failed: bool = False
    calls_by_name: dict[str, InFlightCall] = field(default_factory=dict)
    streams: dict[tuple[str, int, str], tuple[StreamKey, tuple[int, ...]]] = field(default_factory=dict)  # by call site
    call_counts: dict[tuple[StreamKey, bool], int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class DeferredCall:
    """A call that the device launches once the calls that it depends on are complete, while the rank goes on."""

    rank: RankState
    action: Action
    call: InFlightCall
    pending: int
    blocked_since: float = 0.0
    clock: float = 0.0


Event = Callable[[float], None]  # called with the time at which it occurs


class EventQueue:
    """Pending events in order of time; of equal times by `order`, then first come, first served."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[float, ...], int, Event]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, when: float, event: Event, order: tuple[float, ...] = ()) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, order, self._count, event))

    def run_next(self) -> None:
        now, _, _, event = heapq.heappop(self._heap)
        event(now)
