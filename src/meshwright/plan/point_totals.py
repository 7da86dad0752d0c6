"""What the stages and the pipeline ranks of a search point take, summed over their layers."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.plan import Compile, Plan, SyncPolicy
from meshwright.plan.amounts import Amounts, Layers, Sum
from meshwright.plan.problem import PlanningProblem
from meshwright.plan.search_point import SearchPoint


class PointTotals:
    """Of one search. What was summed is kept, for all searches of the model."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        bucket_bytes = problem.wishes.bucket_bytes or SyncPolicy.bucket_bytes
        self._amounts = Amounts.of(problem.profile, problem.workload.precision, problem.units, bucket_bytes)

    def of_stages(self, point: SearchPoint, sharding: Plan, compile_mode: Compile, stages: Layers) -> list[Sum]:
        """By stage; the whole model where `stages`, the layers of each, are not known. `sharding` says what a rank has of every layer."""
        share = self._problem.workload.global_batch // point.mesh.data_width
        rates = self._problem.rates(point.mesh.size)
        return self._amounts.sums(-(-share // point.micro_batches), compile_mode, rates, sharding, stages)

    def of_ranks(self, point: SearchPoint, stage_totals: Sequence[Sum], stages: Layers) -> list[Sum]:
        """By pipeline rank; the mean one where its stages are not known."""
        mine = [point.order.stages(rank) for rank in range(point.mesh.pp)] if stages else ()
        return self._amounts.ranks(stage_totals, point.schedule, mine, point.mesh.pp)

    def is_in_unit(self, module: str) -> bool:
        return self._amounts.in_unit(module)
