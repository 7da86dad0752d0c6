"""Events of a run, in the order in which each rank records them, and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One line of events-RANK.jsonl."""

    time: float  # seconds since the epoch
    rank: int
    kind: str  # start, applied, step, validation, fault, stop, end …
    step: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 0  # how often the ranks had been restarted


@dataclass(frozen=True)
class Fault:
    """One failure: which rank, what it was, and whether it only follows from another rank's failure."""

    time: float
    rank: int
    kind: str  # exception class, "killed by SIGKILL", "exit 3"
    message: str
    traceback: str = ""
    secondary: bool = False  # a peer's connection closed: the cause is on another rank
    rollback: bool = False  # the run is to go on from its last good state: what ranks hold is not wanted
