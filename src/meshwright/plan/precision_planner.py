"""Chooses the precision where the user leaves it open: runs the same search in each precision that the devices support, and takes the best."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.workload import Precision
from meshwright.plan.memory_planner import check_precision
from meshwright.plan.objective import objective_cost, show_cost
from meshwright.plan.search import Ranking, rank_plans

TraceInPrecision = Callable[[Precision], tuple[ModelProfile, Dataflow | None]]
PRECISIONS_WIDEST_FIRST: tuple[Precision, ...] = ("fp32", "bf16", "fp8")  # no fp16: its smaller range loses small gradients
_MIN_GAIN = 0.01  # relative: predictions are not more precise, and a wider precision does no harm


def available_precisions(cluster: Cluster, calibration: Calibration) -> tuple[Precision, ...]:
    """fp32, and the precisions that the cluster supports and whose matmul rate is known for every device, measured or from its data sheet."""
    known = set.intersection(*({key.partition("/")[2] for key in rates.compute if key.startswith("matmul/")} for rates in calibration.layouts))
    return tuple(p for p in PRECISIONS_WIDEST_FIRST if p == "fp32" or (p in known and _supports(p, cluster)))


def _supports(precision: Precision, cluster: Cluster) -> bool:
    with suppress(RequestError):
        check_precision(precision, cluster)
        return True
    return False


def best_precision(ranking: Ranking, retrace: TraceInPrecision) -> Ranking:
    """The ranking in the precision whose best plan costs least, with a note on what the others would cost. The widest wins a tie."""
    rankings: dict[Precision, Ranking] = {}
    for precision in available_precisions(ranking.cluster, ranking.calibration):
        if precision == ranking.workload.precision:
            rankings[precision] = ranking
            continue
        profile, flow = retrace(precision)
        inputs = (ranking.cluster, replace(ranking.workload, precision=precision), ranking.calibration, replace(ranking.constraints, flow=flow))
        with suppress(RequestError):  # the constraints are legal only in other precisions
            rankings[precision] = rank_plans(profile, *inputs)
    chosen = next(iter(rankings))
    for precision, candidate in rankings.items():
        if _is_better(candidate, rankings[chosen]):
            chosen = precision
    costs = ", ".join(f"{precision} {_describe_cost(candidate)}" for precision, candidate in rankings.items())
    return replace(rankings[chosen], tuning_notes=(f"Precision: {chosen} (predicted: {costs}).", *rankings[chosen].tuning_notes))


def _ranking_cost(ranking: Ranking) -> float:
    best = ranking.best
    return objective_cost(ranking.workload, best.estimate.step_s, best.plan.world, max(best.estimate.memory_bytes))


def _is_better(candidate: Ranking, current: Ranking) -> bool:
    if candidate.best.estimate.fits != current.best.estimate.fits:
        return candidate.best.estimate.fits
    return _ranking_cost(candidate) < (1 - _MIN_GAIN) * _ranking_cost(current)


def _describe_cost(ranking: Ranking) -> str:
    best = ranking.best
    text = show_cost(ranking.workload, best.estimate.step_s, best.plan.world, max(best.estimate.memory_bytes))
    return text if best.estimate.fits else f"does not fit ({text})"
