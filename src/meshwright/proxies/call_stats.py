"""Statistics of spans: for each collective, per rank and over all ranks, its calls, bytes, times and overlapped time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.schedule import wire_factor
from meshwright.core.span import Span
from meshwright.schedule.planned_ledger import ledger_name


@dataclass
class CallStats:
    """All calls of one name, operation and group on one rank. Lists have one entry per call or per step."""

    name: str
    op: str
    axis: str
    group: int
    calls: int = 0  # in one step
    bytes: int = 0  # in one step
    call_seconds: list[float] = field(default_factory=list)  # per call
    step_seconds: list[float] = field(default_factory=list)  # per step
    exposed_seconds: list[float] = field(default_factory=list)  # per step


@dataclass
class RankStats:
    """Statistics of one rank, or of several ranks with the same times."""

    ranks: list[int]
    steps: list[float]
    compute: list[float]  # seconds per step
    call_stats: list[CallStats]


def collect_stats(ranks: Sequence[int], steps: Iterable[Sequence[Span]]) -> RankStats:
    """Collect the statistics of the steps of one rank, or of `ranks` with the same times."""
    by_key: dict[tuple[str, str, str, int], CallStats] = {}
    step_times, compute = [], []
    for spans in steps:
        step_times.append(max((s.end_s for s in spans), default=0.0))
        compute.append(sum(s.seconds for s in spans if not s.group_size))
        step: dict[tuple[str, str, str, int], list[Span]] = {}
        for span in spans:
            if span.group_size:
                step.setdefault((ledger_name(span.name), span.op, span.axis, span.group_size), []).append(span)
        for key, calls in step.items():
            stats = by_key.setdefault(key, CallStats(*key))
            stats.calls, stats.bytes = len(calls), sum(s.bytes for s in calls)
            stats.call_seconds += [s.seconds for s in calls]
            stats.step_seconds.append(sum(s.seconds for s in calls))
            stats.exposed_seconds.append(sum(s.exposed_s for s in calls))
    return RankStats(list(ranks), step_times, compute, list(by_key.values()))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and largest."""
    ordered = sorted(values) or [0.0]
    return {"median": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], "max": ordered[-1]}


def collective_row(stats: Sequence[CallStats], weights: Sequence[int], step_s: float) -> dict[str, Any]:
    """One collective over the ranks that call it: calls and bytes of the rank with most bytes, times over all calls, sums as a mean over ranks."""
    times = percentiles([seconds for rank in stats for seconds in rank.call_seconds])
    largest = max(stats, key=lambda rank: rank.bytes)
    call_bytes, median = largest.bytes / largest.calls, times["median"]
    total = _weighted_mean([statistics.median(rank.step_seconds) for rank in stats], weights)
    exposed = _weighted_mean([statistics.median(rank.exposed_seconds) for rank in stats], weights)
    return {
        **{key: getattr(largest, key) for key in ("name", "op", "axis", "group", "calls", "bytes")},
        "median_s": median,
        "p95_s": times["p95"],
        "max_s": times["max"],
        "bandwidth": call_bytes / median if median else None,
        "bus_bandwidth": call_bytes * wire_factor(largest.op, largest.group) / median if median else None,
        "share": total / step_s if step_s else 0.0,
        "exposed_s": exposed,
        "overlapped_s": max(total - exposed, 0.0),
    }


def summarize(rank_stats: Sequence[RankStats]) -> dict[str, Any]:
    """The result of a run: step times (of the slowest rank), and the collectives over all ranks and per rank."""
    steps = [max(times) for times in zip(*(r.steps for r in rank_stats), strict=True)]
    step = percentiles(steps)
    by_key: dict[tuple[str, str, str, int], list[tuple[CallStats, int]]] = {}
    for rank in rank_stats:
        for calls in rank.call_stats:
            by_key.setdefault((calls.name, calls.op, calls.axis, calls.group), []).append((calls, len(rank.ranks)))
    return {
        "step_s": step,
        "compute_s": max((statistics.median(r.compute) for r in rank_stats if r.compute), default=0.0),
        "collectives": [collective_row([calls for calls, _ in ranks], [n for _, n in ranks], step["median"]) for ranks in by_key.values()],
        "ranks": [
            {
                "ranks": r.ranks if len(r.ranks) <= 8 else [*r.ranks[:8], f"… {len(r.ranks)} in all"],
                "step_s": percentiles(r.steps),
                "compute_s": statistics.median(r.compute) if r.compute else 0.0,
                "collectives": [collective_row([t], [1], step["median"]) for t in r.call_stats],
            }
            for r in rank_stats
        ],
    }


def csv_rows(result: dict[str, Any]) -> list[list[Any]]:
    """A header, the collectives over all ranks, and those of each rank (the first of ranks with the same times)."""
    columns = list(result["collectives"][0]) if result["collectives"] else ["name"]
    rows = [["rank", *columns], *(["all", *line.values()] for line in result["collectives"])]
    for rank in result["ranks"]:
        rows += [[rank["ranks"][0], *line.values()] for line in rank["collectives"]]
    return rows


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
