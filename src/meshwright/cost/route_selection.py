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

_LINE_MARGIN = 0.05  # by lines: a smaller lead is noise, and the first backend keeps the call
_POINT_MARGIN = 0.02  # by points: a smaller lead does not replace the route of the next smaller size
_SHARED_MEMORY_BONUS = 0.025  # credit to shared memory: its waiting ranks sleep, while MPI's busy-wait on cores that compute. With both margins, 5%
_MAX_BYTES = 1 << 40  # largest size at which a crossover is considered
_STEPS_BETWEEN_SIZES = 8  # interpolation steps between two measured sizes


def choose_routes(rates: Rates, backends: Sequence[str], operations: Iterable[str], nodes: Sequence[int] = ()) -> tuple[Route, ...]:
    """Routes for the calls that are faster than on the first backend's own collectives. Only measured routes are chosen."""
    routes: list[Route] = []
    for op in operations:
        names = measured_routes(rates, backends, op, nodes)
        if len(names) < 2:
            continue
        choose = _choose_by_points if all(f"{name}/{op}" in rates.curves for name in names) else _choose_by_lines
        before = backends[0]
        for start, best in choose(rates, names, op):
            if best != before:
                backend, algorithm = parse_route_name(best)
                routes.append(Route(op, backend, int(start), algorithm))  # type: ignore[arg-type]
                before = best
    return tuple(routes)


def measured_routes(rates: Rates, backends: Sequence[str], op: str, nodes: Sequence[int] = ()) -> list[str]:
    """Measured routes of an operation, the first backend's own first. Shared memory is the same under every backend: only the first is listed."""
    known = ("flat", *ALGORITHMS.get(op, ()))  # a calibration may name algorithms that this version lacks

    def is_usable(route: str) -> bool:
        backend, algorithm = parse_route_name(route)
        return backend in backends and algorithm in known and is_applicable(algorithm, range(rates.ranks), nodes)

    measured = [name.removesuffix(f"/{op}") for name in rates.collectives if name.endswith(f"/{op}")]
    routes = sorted(filter(is_usable, measured), key=lambda route: (backends.index(parse_route_name(route)[0]), ":" in route))
    shared = [route for route in routes if parse_route_name(route)[1] == "shared"]
    return [route for route in routes if route not in shared[1:]]


def _choose_by_points(rates: Rates, route_names: Sequence[str], op: str) -> list[tuple[float, str]]:
    """(size from which the route holds, route)."""
    sizes = sorted({sent for name in route_names for sent, _ in rates.curves[f"{name}/{op}"]})
    steps = [0.0, *(a * (b / a) ** (i / _STEPS_BETWEEN_SIZES) for a, b in pairwise(sizes) for i in range(_STEPS_BETWEEN_SIZES)), *sizes[-1:]]
    steps += [size for size in (sizes[-1] * 2**k for k in range(1, 8)) if size < _MAX_BYTES]
    factors = {name: 1 - _SHARED_MEMORY_BONUS * (parse_route_name(name)[1] == "shared") for name in route_names}
    choices: list[tuple[float, str]] = []
    current = route_names[0]
    for sent in steps:
        seconds = {name: (rates.measured_seconds(f"{name}/{op}", sent) or 0.0) * factors[name] for name in route_names}
        best = min(seconds, key=seconds.__getitem__)
        if seconds[current] > (1 + _POINT_MARGIN) * seconds[best]:
            current = best
        choices.append((sent, current))
    return choices


def _choose_by_lines(rates: Rates, route_names: Sequence[str], op: str) -> list[tuple[float, str]]:
    lines = {name: rates.collectives[f"{name}/{op}"] for name in route_names}
    own = lines[route_names[0]]
    lines[route_names[0]] = AlphaBetaModel(own.alpha_s / (1 + _LINE_MARGIN), own.bytes_per_s * (1 + _LINE_MARGIN))
    starts = sorted({0.0, *(s for a in lines.values() for b in lines.values() if 0 < (s := _crossover_bytes(a, b)) < _MAX_BYTES)})
    return [(start, min(lines, key=lambda name: lines[name].seconds((start + end) / 2))) for start, end in pairwise([*starts, 2.0 * _MAX_BYTES])]


def keep_used_routes(plan: Plan, ledger_lines: Iterable[LedgerLine]) -> Plan:
    """The plan with only the routes that its own calls take; none if all calls stay on the plan's backend."""
    calls = [line for line in ledger_lines if line.axis != "pp"]
    routed = {line.op for line in calls if choose_route(plan.sync.routes, line.op, line.sent / line.calls, plan.backend) != plan.backend}
    routes = tuple(r for r in plan.sync.routes if r.op in routed)
    nodes = plan.sync.ranks_per_node if any(r.algorithm in ("two-level", "shared") for r in routes) else ()
    return replace(plan, sync=replace(plan.sync, routes=routes, ranks_per_node=nodes))


def explain_routes(plan: Plan, rates: Rates) -> list[str]:
    """A sentence for each routed operation."""
    sentences = []
    for op in dict.fromkeys(r.op for r in plan.sync.routes):
        routes = [r for r in plan.sync.routes if r.op == op]
        first = [f"{plan.backend} below {show_bytes(routes[0].min_sent_bytes)}"] if routes[0].min_sent_bytes else []
        ranges = first + [r.route_name + (f" from {show_bytes(r.min_sent_bytes)} on" if r.min_sent_bytes else "") for r in routes]
        measured = measured_routes(rates, plan.backends, op, plan.sync.ranks_per_node)
        shown = [name for name in measured if name in {plan.backend, *(r.route_name for r in routes)}]
        others = f"; {len(measured) - len(shown)} other routes were measured" if len(measured) > len(shown) else ""
        sentences.append(f"{op} goes over {', '.join(ranges)} ({_describe_measurements(rates, shown, op)}{others}).")
    return sentences


def _describe_measurements(rates: Rates, route_names: Sequence[str], op: str) -> str:
    if not all(f"{name}/{op}" in rates.curves for name in route_names):
        lines = {name: rates.collectives[f"{name}/{op}"] for name in route_names}
        return "; ".join(f"{name} {show_seconds(line.alpha_s)} a call and {show_rate(line.bytes_per_s, 'B/s')}" for name, line in lines.items())
    sizes = [sent for sent, _ in rates.curves[f"{route_names[0]}/{op}"]]
    shown = dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    times = {name: ", ".join(show_seconds(rates.measured_seconds(f"{name}/{op}", sent) or 0.0) for sent in shown) for name in route_names}
    return f"measured at {', '.join(show_bytes(int(s)) for s in shown)} sent: " + "; ".join(f"{name} {seconds}" for name, seconds in times.items())


def _crossover_bytes(a: AlphaBetaModel, b: AlphaBetaModel) -> float:
    """Bytes at which both take equally long; 0 where they never do."""
    slope = 1 / a.bytes_per_s - 1 / b.bytes_per_s
    return (b.alpha_s - a.alpha_s) / slope if slope else 0.0
