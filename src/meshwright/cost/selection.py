"""Which backend is quickest for an operation of a given size, by the lines that were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.core.calibration import Rates
from meshwright.core.schedule import wire_factor

MARGIN = 0.05  # a lead smaller than this is noise: then the first backend keeps the call


def quickest(rates: Rates, backends: Sequence[str], group: int) -> Callable[[str, int], str]:
    """A choice by operation and bytes. A backend that was not measured is not chosen unless none was; the first wins ties."""

    def choose(op: str, size: int) -> str:
        sent = size * wire_factor(op, group)
        times = {b: rates.collectives[f"{b}/{op}"].seconds(sent) for b in backends if f"{b}/{op}" in rates.collectives}
        if not times:
            return backends[0]
        best = min(times, key=lambda b: times[b])
        first = backends[0]
        return first if first in times and times[first] <= times[best] * (1 + MARGIN) else best

    return choose


def crossings(rates: Rates, backends: Sequence[str], group: int, op: str) -> list[tuple[int, str]]:
    """(from so many bytes on, backend): the choice written out, for a plan to say."""
    choose = quickest(rates, backends, group)
    found: list[tuple[int, str]] = []
    for power in range(3, 31):
        way = choose(op, 1 << power)
        if not found or found[-1][1] != way:
            found.append((0 if power == 3 else 1 << power, way))
    return found
