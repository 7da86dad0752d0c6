"""What one action took on one rank. A run and a simulation both give these, so one report and one timeline serve the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Times are seconds since the step began on this rank. `exposed_s` is how long the rank stood still for it: what is
    exposed; of computation, how much longer it took for what ran beside it."""

    name: str
    op: str
    axis: str
    group_size: int  # ranks that take part; 0 for computation
    bytes: int
    start_s: float  # handed over, for communication; it may then wait for others, and its time counts from here
    end_s: float
    exposed_s: float = 0.0
    waiting_s: float = 0.0  # of `exposed_s`, how long somebody else was not there yet; a run cannot tell, a simulation can

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s
