"""Plans a model whose samples may meet: one device needs the dataflow only where its plan splits the batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.dataflow import Dataflow
from meshwright.core.model import ModelProfile
from meshwright.core.workload import Workload
from meshwright.plan import Constraints, Ranking, rank_plans


def rank_plans_traced(
    profile: ModelProfile, cluster: Cluster, workload: Workload, calibration: Calibration, constraints: Constraints,
    trace: Callable[[], Dataflow | None],
) -> Ranking:  # fmt: skip
    """Rank plans. If the best one has micro-batches and the constraints have no dataflow, `trace` the model and rank again: samples may meet."""
    ranking = rank_plans(profile, cluster, workload, calibration, constraints)
    if constraints.flow is not None or ranking.best.plan.micro_batches == 1 or (flow := trace()) is None:
        return ranking
    return rank_plans(profile, cluster, workload, calibration, replace(constraints, flow=flow))
