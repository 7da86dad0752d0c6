"""Time, memory and communication totals of the stages and the pipeline ranks of a search point, summed over their layers."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.plan import CompileMode, Plan, SyncPolicy
from meshwright.plan.layer_totals import LayerTotals, LayerTotalsCache, StageLayers
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.search_point import SearchPoint


class PointTotals:
    """The totals for one planning problem; sums are cached for all searches of the model."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        bucket_bytes = problem.constraints.bucket_bytes or SyncPolicy.bucket_bytes
        self._layer_totals = LayerTotalsCache.of(problem.profile, problem.workload.precision, problem.units, bucket_bytes)

    def of_stages(self, point: SearchPoint, sharding: Plan, compile_mode: CompileMode, stages: StageLayers) -> list[LayerTotals]:
        """Totals by stage; of the whole model where `stages`, the layers of each, are not known. `sharding` is how a rank shards every layer."""
        share = self._problem.workload.global_batch // point.mesh.data_parallel_size
        rates = self._problem.rates(point.mesh.size)
        return self._layer_totals.stage_totals(-(-share // point.micro_batches), compile_mode, rates, sharding, stages)

    def of_ranks(self, point: SearchPoint, stage_totals: Sequence[LayerTotals], stages: StageLayers) -> list[LayerTotals]:
        """Totals by pipeline rank; of the mean rank where the stages are not known."""
        stages_by_rank = [point.pipeline_spec.stages(rank) for rank in range(point.mesh.pp)] if stages else ()
        return self._layer_totals.rank_totals(stage_totals, point.schedule, stages_by_rank, point.mesh.pp)

    def is_in_unit(self, module: str) -> bool:
        return self._layer_totals.is_inside_unit(module)
