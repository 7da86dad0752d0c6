"""A point of the search space: a plan that is not made yet, by what tells it from the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.core.mesh import Mesh
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.cost.pipeline_cost import PipelineSpec
from meshwright.plan.layer_totals import RecomputeChoice


@dataclass(frozen=True)
class SearchPoint:
    """A plan that is not made yet."""

    mesh: Mesh
    zero: int
    micro_batches: int
    recompute: RecomputeChoice
    sequence_parallel: bool = False
    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = 0  # stages a rank; 0: as many as is usual

    @cached_property
    def pipeline_spec(self) -> PipelineSpec:
        return PipelineSpec(self.schedule, self.mesh.pp, self.micro_batches, self.stages_per_rank or schedule_traits(self.schedule).stages_per_rank)


def is_basic_mesh(mesh: Mesh) -> bool:
    """Neither shared positions nor experts' ranks nor a grid of tensor-parallel ranks."""
    return mesh.cp == mesh.ep == len(mesh.tp) == 1
