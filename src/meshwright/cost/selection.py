"""Which backend is quickest for an operation of a given size, by the lines that were measured: a plan's routes, and why they are as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.core.calibration import Line, Rates
from meshwright.core.plan import Plan
from meshwright.core.routes import Route, way
from meshwright.core.units import show_bytes, show_rate, show_seconds
from meshwright.schedule import LedgerLine

MARGIN = 0.05  # a lead smaller than this is noise: then the first backend keeps the call
_MOST = 1 << 40  # bytes beyond which no crossing is looked for


def routes(rates: Rates, backends: Sequence[str], operations: Iterable[str]) -> tuple[Route, ...]:
    """Where calls go that are quicker over another backend than the first. One that was not measured is not chosen."""
    found: list[Route] = []
    for op in operations:
        lines = {b: rates.collectives[f"{b}/{op}"] for b in backends if f"{b}/{op}" in rates.collectives}
        if len(lines) < 2:
            continue
        if backends[0] in lines:
            lines[backends[0]] = _ahead(lines[backends[0]])
        before = backends[0]
        starts = sorted({0.0, *(s for a in lines.values() for b in lines.values() if 0 < (s := _crossing(a, b)) < _MOST)})
        for start, end in pairwise([*starts, 2.0 * _MOST]):
            middle = (start + end) / 2
            best = min(lines, key=lambda b: lines[b].seconds(middle))
            if best != before:
                found.append(Route(op, best, int(start)))
                before = best
    return tuple(found)


def used(plan: Plan, lines: Iterable[LedgerLine]) -> Plan:
    """The plan with those routes alone that its own calls take: where none leaves the plan's backend, there is nothing to route."""
    calls = [line for line in lines if line.axis != "pp"]
    ways = {line.op for line in calls if way(plan.sync.routes, line.op, line.sent / line.calls, plan.backend) != plan.backend}
    return replace(plan, sync=replace(plan.sync, routes=tuple(r for r in plan.sync.routes if r.op in ways)))


def reasons(plan: Plan, rates: Rates) -> list[str]:
    """A sentence for each operation that is routed."""
    said = []
    for op in dict.fromkeys(r.op for r in plan.sync.routes):
        turns = [r for r in plan.sync.routes if r.op == op]
        first = [f"{plan.backend} below {show_bytes(turns[0].sent)}"] if turns[0].sent else []
        where = first + [r.backend + (f" from {show_bytes(r.sent)} on" if r.sent else "") for r in turns]
        measured = {b: rates.collectives[f"{b}/{op}"] for b in plan.backends if f"{b}/{op}" in rates.collectives}
        costs = "; ".join(f"{b} {show_seconds(line.alpha_s)} a call and {show_rate(line.bytes_per_s, 'B/s')}" for b, line in measured.items())
        said.append(f"{op} goes over {', '.join(where)} ({costs}).")
    return said


def _ahead(line: Line) -> Line:
    return Line(line.alpha_s / (1 + MARGIN), line.bytes_per_s * (1 + MARGIN))


def _crossing(a: Line, b: Line) -> float:
    """Bytes at which both take as long; 0 where they never do."""
    slope = 1 / a.bytes_per_s - 1 / b.bytes_per_s
    return (b.alpha_s - a.alpha_s) / slope if slope else 0.0
