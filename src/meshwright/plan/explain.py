"""Explain: in plain language, why the first plan won, what came second, what binds, and what would change the choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.core.calibration import Calibration, Line
from meshwright.core.cluster import Cluster, Link, Node
from meshwright.core.errors import RequestError
from meshwright.core.units import show_bytes, show_seconds
from meshwright.core.workload import Workload
from meshwright.plan.remedy import Retrace, too_big
from meshwright.plan.search import Ranking, Scored, best_again, rank_plans


def explain(ranking: Ranking, retrace: Retrace | None = None) -> str:
    """A few sentences, one a line; where nothing fits, one that says what would help."""
    best = ranking.best
    if not best.estimate.fits:
        return too_big(ranking, retrace)
    lines = [_choice(best), _time(best), _memory(best, ranking), *ranking.tuned]
    second = ranking.runner_up
    if second is not None:
        lines.append(_second(best, second))
    lines += _what_if(ranking)
    if ranking.calibration.source != "probe":
        here = ": `meshwright describe cluster --probe` would measure this machine" if ranking.cluster.name == "here" else ""
        lines.append(f"Rates come from {ranking.calibration.source}{here}.")
    return "\n".join(lines)


def _choice(best: Scored) -> str:
    found = best.estimate
    rate = f", {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else f", {found.samples_per_s:,.0f} samples/s"
    return f"Chosen: {best.plan.summary()}: {show_seconds(found.step_s)} a step (±{found.error:.0%}){rate}."


def _time(best: Scored) -> str:
    parts = sorted(best.estimate.breakdown.items(), key=lambda item: -item[1])
    share = ", ".join(f"{name} {seconds / best.estimate.step_s:.0%}" for name, seconds in parts if seconds > 0.005 * best.estimate.step_s)
    return f"Where the time goes: {share}."


def _memory(best: Scored, ranking: Ranking) -> str:
    kinds = sorted(best.estimate.memory_kinds.items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {show_bytes(size)}" for name, size in kinds[:3] if size)
    tight = [s for s in ranking.scored if not s.estimate.fits]
    binding = f"memory rules out {len(tight)} of {len(ranking.scored)} plans" if tight else "memory is no constraint: every legal plan fits"
    binding += f" that were priced, of {ranking.considered:,} that were weighed" if ranking.considered else ""
    slowest = max(best.estimate.breakdown.items(), key=lambda item: item[1])[0]
    return f"Memory: {best.estimate.reason} (mostly {most}). What binds: {slowest} time; {binding}."


def _second(best: Scored, second: Scored) -> str:
    ratio = second.estimate.step_s / best.estimate.step_s
    if not second.estimate.fits:
        return f"Runner-up: {second.plan.summary()}: {second.estimate.reason}."
    slower = f"{ratio:.2f}× the time" if ratio >= 1.005 else "about as fast, and more complicated" if ratio >= 0.995 else f"{ratio:.2f}× the time"
    saved = 1 - max(second.estimate.memory_bytes) / max(best.estimate.memory_bytes)
    memory = f"{saved:.0%} less memory" if saved > 0.02 else f"{-saved:.0%} more memory" if saved < -0.02 else "the same memory"
    return f"Runner-up: {second.plan.summary()}: {slower}, {memory}."


def _what_if(ranking: Ranking) -> list[str]:
    """Ask the planner again with one thing changed; report the changes that change the strategy."""
    first = ranking.best.plan
    found = []
    batch = ranking.workload.global_batch
    changes: dict[str, dict[str, Any]] = {
        "a quarter of the memory": {"cluster": _less_memory(ranking.cluster, 0.25)},
        "a tenth of the memory": {"cluster": _less_memory(ranking.cluster, 0.1)},
        "a network ten times faster": _faster_network(ranking, 10.0),
        "a network ten times slower": _faster_network(ranking, 0.1),
    }
    if not ranking.considered:  # on a large cluster another batch is another search, as long as the first
        changes[f"a global batch of {batch * 8}"] = {"workload": replace(ranking.workload, global_batch=batch * 8)}
    for words, change in changes.items():
        try:
            other = _asked_again(ranking, **change)
        except RequestError:
            continue
        if not other.estimate.fits:
            found.append(f"{words} → nothing fits")
        elif (other.plan.strategy, other.plan.world, other.plan.memory.recompute) != (first.strategy, first.world, first.memory.recompute):
            found.append(f"{words} → {other.plan.summary()}")
    if not found:
        return [f"What would change the choice: none of {', '.join(changes)}."]
    return ["What would change the choice: " + "; ".join(found) + "."]


def _asked_again(
    ranking: Ranking, cluster: Cluster | None = None, calibration: Calibration | None = None, workload: Workload | None = None
) -> Scored:
    """The best plan with one thing changed. Another batch has other plans; another machine has the same ones, at other prices."""
    if workload is not None:
        return rank_plans(ranking.profile, ranking.cluster, workload, ranking.calibration, ranking.wishes, ranking).best
    return best_again(ranking, cluster or ranking.cluster, calibration or ranking.calibration)


def _less_memory(cluster: Cluster, factor: float) -> Cluster:
    def less(node: Node) -> Node:
        devices = tuple(replace(d, memory_bytes=int(d.memory_bytes * factor)) for d in node.devices)
        return replace(node, memory_bytes=int(node.memory_bytes * factor), devices=devices)

    return replace(cluster, nodes=cluster.each_node(less))


def _faster_network(ranking: Ranking, factor: float) -> dict[str, Any]:
    """Measured collectives and the links themselves: where nothing was measured, these are what is priced."""

    def link(found: Link) -> Link:
        return replace(found, latency_s=found.latency_s / factor, bandwidth=found.bandwidth * factor)

    def line(found: Line) -> Line:
        return Line(found.alpha_s / factor, found.bytes_per_s * factor)

    layouts = tuple(
        replace(
            r,
            collectives={k: line(v) for k, v in r.collectives.items()},
            curves={k: tuple((sent, seconds / factor) for sent, seconds in points) for k, points in r.curves.items()},
        )
        for r in ranking.calibration.layouts
    )
    return {
        "cluster": ranking.cluster.with_links(link),
        "calibration": replace(ranking.calibration, layouts=layouts),
    }
