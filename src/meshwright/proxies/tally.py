"""From spans to figures: for each collective of a rank, and over ranks, how often, how much, how long, how much of it hidden."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.schedule import wire_factor
from meshwright.core.span import Span
from meshwright.schedule.ledger import run_name


@dataclass
class Tally:
    """All calls of one name, operation and group on one rank. Lists hold one entry a call, or one a step."""

    name: str
    op: str
    axis: str
    group: int
    calls: int = 0  # in one step
    bytes: int = 0  # in one step
    times: list[float] = field(default_factory=list)  # a call
    spent: list[float] = field(default_factory=list)  # a step
    held: list[float] = field(default_factory=list)  # a step


@dataclass
class RankTally:
    """One rank, or several that are alike."""

    ranks: list[int]
    steps: list[float]
    compute: list[float]  # a step
    calls: list[Tally]


def tally(ranks: Sequence[int], steps: Iterable[Sequence[Span]]) -> RankTally:
    """Sum up the steps of one rank."""
    found: dict[tuple[str, str, str, int], Tally] = {}
    times, compute = [], []
    for spans in steps:
        times.append(max((s.ended for s in spans), default=0.0))
        compute.append(sum(s.seconds for s in spans if not s.group))
        now: dict[tuple[str, str, str, int], list[Span]] = {}
        for span in spans:
            if span.group:
                now.setdefault((run_name(span.name), span.op, span.axis, span.group), []).append(span)
        for key, mine in now.items():
            kept = found.setdefault(key, Tally(*key))
            kept.calls, kept.bytes = len(mine), sum(s.bytes for s in mine)
            kept.times += [s.seconds for s in mine]
            kept.spent.append(sum(s.seconds for s in mine))
            kept.held.append(sum(s.held for s in mine))
    return RankTally(list(ranks), times, compute, list(found.values()))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and largest."""
    ordered = sorted(values) or [0.0]
    return {"median": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], "max": ordered[-1]}


def row(parts: Sequence[Tally], weights: Sequence[int], step_s: float) -> dict[str, Any]:
    """One collective over the ranks that make it: calls and bytes of the one that makes most, times over all calls, sums as a mean over ranks."""
    first = parts[0]
    times = spread([t for part in parts for t in part.times])
    most = max(parts, key=lambda p: p.bytes)
    each = most.bytes / most.calls
    spent = _mean([statistics.median(p.spent) for p in parts], weights)
    held = _mean([statistics.median(p.held) for p in parts], weights)
    median = times["median"]
    return {
        "name": first.name,
        "op": first.op,
        "axis": first.axis,
        "group": first.group,
        "calls": most.calls,
        "bytes": most.bytes,
        "median_s": median,
        "p95_s": times["p95"],
        "max_s": times["max"],
        "bandwidth": each / median if median else None,
        "bus_bandwidth": each * wire_factor(first.op, first.group) / median if median else None,
        "share": spent / step_s if step_s else 0.0,
        "exposed_s": held,
        "overlapped_s": max(spent - held, 0.0),
    }


def summary(ranks: Sequence[RankTally]) -> dict[str, Any]:
    """The whole: a step takes as long as its slowest rank."""
    steps = [max(times) for times in zip(*(r.steps for r in ranks), strict=True)]
    step = spread(steps)
    keys = dict.fromkeys((t.name, t.op, t.axis, t.group) for r in ranks for t in r.calls)
    everyone = []
    for key in keys:
        mine = [(t, len(r.ranks)) for r in ranks for t in r.calls if (t.name, t.op, t.axis, t.group) == key]
        everyone.append(row([t for t, _ in mine], [n for _, n in mine], step["median"]))
    return {
        "step_s": step,
        "compute_s": max((statistics.median(r.compute) for r in ranks if r.compute), default=0.0),
        "collectives": everyone,
        "ranks": [
            {
                "ranks": r.ranks if len(r.ranks) <= 8 else [*r.ranks[:8], f"… {len(r.ranks)} in all"],
                "step_s": spread(r.steps),
                "compute_s": statistics.median(r.compute) if r.compute else 0.0,
                "collectives": [row([t], [1], step["median"]) for t in r.calls],
            }
            for r in ranks
        ],
    }


def csv_rows(result: dict[str, Any]) -> list[list[Any]]:
    """A header, the collectives over all ranks, and those of each rank (the first of those alike)."""
    columns = list(result["collectives"][0]) if result["collectives"] else ["name"]
    rows = [["rank", *columns], *(["all", *line.values()] for line in result["collectives"])]
    for rank in result["ranks"]:
        rows += [[rank["ranks"][0], *line.values()] for line in rank["collectives"]]
    return rows


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
