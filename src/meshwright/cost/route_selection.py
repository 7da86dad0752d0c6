"""Chooses the fastest measured route (backend and algorithm) for each collective by message size, and explains the choice.

[Note: routes from measured sizes]
An α–β line through measured sizes is off by half where a backend switches its own algorithm. So where sizes were measured one by one (`bench
comm`) the choice uses their medians: at each measured size the fastest route, and between two sizes the fastest by interpolation. Beyond the
largest size, and where only lines exist, the lines decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.core.calibration import AlphaBetaModel, Rates
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes, show_rate, show_seconds
from meshwright.core.routes import ALGORITHMS, Route, choose_route, is_applicable, parse_route_name
from meshwright.schedule import LedgerLine

LINE_MARGIN = 0.05  # by lines: a smaller lead is noise, and the first backend keeps the call
POINT_MARGIN = 0.02  # by points: a smaller lead does not replace the route of the next smaller size
SHARED_MEMORY_BONUS = (
    0.025  # credit to shared memory: its waiting ranks sleep, while MPI's busy-waiting takes the core that computes. With both margins, 5%
)
_MAX_BYTES = 1 << 40  # largest size at which a crossover is considered
_STEPS_BETWEEN_SIZES = 8  # interpolation steps between two measured sizes


def choose_routes(rates: Rates, backends: Sequence[str], operations: Iterable[str], nodes: Sequence[int] = ()) -> tuple[Route, ...]:
    """Routes for the calls that are faster than on the first backend's own collectives. Only measured routes are chosen."""
    found: list[Route] = []
    for op in operations:
        routes = measured_routes(rates, backends, op, nodes)
        if len(routes) < 2:
            continue
        turns = _choose_by_points(rates, routes, op) if all(f"{w}/{op}" in rates.curves for w in routes) else _choose_by_lines(rates, routes, op)
        before = backends[0]
        for start, best in turns:
            if best != before:
                backend, algorithm = parse_route_name(best)
                found.append(Route(op, backend, int(start), algorithm))  # type: ignore[arg-type]
                before = best
    return tuple(found)


def measured_routes(rates: Rates, backends: Sequence[str], op: str, nodes: Sequence[int] = ()) -> list[str]:
    """Measured routes of an operation, the first backend's own first. Shared memory performs the same under every backend: only the first one's is
    listed."""
    named = [name.removesuffix(f"/{op}") for name in rates.collectives if name.endswith(f"/{op}")]
    known = ("flat", *ALGORITHMS.get(op, ()))  # a calibration may name algorithms that this version lacks
    fitting = [
        w
        for w in named
        if parse_route_name(w)[0] in backends and parse_route_name(w)[1] in known and is_applicable(parse_route_name(w)[1], range(rates.ranks), nodes)
    ]
    found = sorted(fitting, key=lambda w: (backends.index(parse_route_name(w)[0]), ":" in w))
    shared = [w for w in found if parse_route_name(w)[1] == "shared"]
    return [w for w in found if w not in shared[1:]]


def _choose_by_points(rates: Rates, route_names: Sequence[str], op: str) -> list[tuple[float, str]]:
    """(size from which the route holds, route)."""
    sizes = sorted({sent for w in route_names for sent, _ in rates.curves[f"{w}/{op}"]})
    steps = [0.0, *(a * (b / a) ** (i / _STEPS_BETWEEN_SIZES) for a, b in pairwise(sizes) for i in range(_STEPS_BETWEEN_SIZES)), *sizes[-1:]]
    steps += [size for size in (sizes[-1] * 2**k for k in range(1, 8)) if size < _MAX_BYTES]
    found: list[tuple[float, str]] = []
    held = route_names[0]
    for sent in steps:
        seconds = {
            w: (rates.measured_seconds(f"{w}/{op}", sent) or 0.0) * (1 - SHARED_MEMORY_BONUS * (parse_route_name(w)[1] == "shared"))
            for w in route_names
        }
        best = min(route_names, key=lambda w: seconds[w])
        if seconds[held] > (1 + POINT_MARGIN) * seconds[best]:
            held = best
        found.append((sent, held))
    return found


def _choose_by_lines(rates: Rates, route_names: Sequence[str], op: str) -> list[tuple[float, str]]:
    lines = {w: rates.collectives[f"{w}/{op}"] for w in route_names}
    lines[route_names[0]] = _with_margin(lines[route_names[0]])
    starts = sorted({0.0, *(s for a in lines.values() for b in lines.values() if 0 < (s := _crossover_bytes(a, b)) < _MAX_BYTES)})
    return [(start, min(lines, key=lambda w: lines[w].seconds((start + end) / 2))) for start, end in pairwise([*starts, 2.0 * _MAX_BYTES])]


def keep_used_routes(plan: Plan, ledger_lines: Iterable[LedgerLine]) -> Plan:
    """The plan with only the routes that its own calls take; none if all calls stay on the plan's backend."""
    calls = [line for line in ledger_lines if line.axis != "pp"]
    routes = {line.op for line in calls if choose_route(plan.sync.routes, line.op, line.sent / line.calls, plan.backend) != plan.backend}
    kept = tuple(r for r in plan.sync.routes if r.op in routes)
    nodes = plan.sync.ranks_per_node if any(r.algorithm in ("two-level", "shared") for r in kept) else ()
    return replace(plan, sync=replace(plan.sync, routes=kept, ranks_per_node=nodes))


def explain_routes(plan: Plan, rates: Rates) -> list[str]:
    """A sentence for each routed operation."""
    said = []
    for op in dict.fromkeys(r.op for r in plan.sync.routes):
        turns = [r for r in plan.sync.routes if r.op == op]
        first = [f"{plan.backend} below {show_bytes(turns[0].min_sent_bytes)}"] if turns[0].min_sent_bytes else []
        where = first + [r.route_name + (f" from {show_bytes(r.min_sent_bytes)} on" if r.min_sent_bytes else "") for r in turns]
        routes = measured_routes(rates, plan.backends, op, plan.sync.ranks_per_node)
        shown = [w for w in routes if w == plan.backend or w in {r.route_name for r in turns}]
        others = f"; {len(routes) - len(shown)} other ways were measured" if len(routes) > len(shown) else ""
        said.append(f"{op} goes over {', '.join(where)} ({_describe_measurements(rates, shown, op)}{others}).")
    return said


def _describe_measurements(rates: Rates, route_names: Sequence[str], op: str) -> str:
    """The measurements behind the choice, as text."""
    if not all(f"{w}/{op}" in rates.curves for w in route_names):
        lines = {w: rates.collectives[f"{w}/{op}"] for w in route_names}
        return "; ".join(f"{w} {show_seconds(line.alpha_s)} a call and {show_rate(line.bytes_per_s, 'B/s')}" for w, line in lines.items())
    sizes = [sent for sent, _ in rates.curves[f"{route_names[0]}/{op}"]]
    shown = dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    times = {w: ", ".join(show_seconds(rates.measured_seconds(f"{w}/{op}", sent) or 0.0) for sent in shown) for w in route_names}
    return f"measured at {', '.join(show_bytes(int(s)) for s in shown)} sent: " + "; ".join(f"{w} {seconds}" for w, seconds in times.items())


def _with_margin(line: AlphaBetaModel) -> AlphaBetaModel:
    return AlphaBetaModel(line.alpha_s / (1 + LINE_MARGIN), line.bytes_per_s * (1 + LINE_MARGIN))


def _crossover_bytes(a: AlphaBetaModel, b: AlphaBetaModel) -> float:
    """Bytes at which both take equally long; 0 where they never do."""
    slope = 1 / a.bytes_per_s - 1 / b.bytes_per_s
    return (b.alpha_s - a.alpha_s) / slope if slope else 0.0
