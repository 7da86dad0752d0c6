"""The time of one action on one rank. Runs and simulations both produce spans, so one report and one timeline serve both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one action, in seconds since the step began on this rank. `exposed_s` is how long the rank was blocked on it (exposed
    communication); for computation, how much longer it took because of what ran concurrently."""

    name: str
    op: str
    axis: str
    group_size: int  # ranks that take part; 0 for computation
    bytes: int
    start_s: float  # for communication, when it was issued: waiting for other ranks is included
    end_s: float
    exposed_s: float = 0.0
    waiting_s: float = 0.0  # of `exposed_s`, how long other ranks had not arrived; known to a simulation, not to a run

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s
