"""A point of the search space: the choices that distinguish one plan from another, before the plan is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.core.mesh import Mesh
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.cost.pipeline_cost import PipelineSpec
from meshwright.plan.layer_totals import RecomputeChoice


@dataclass(frozen=True)
class SearchPoint:
    """The choices from which `make_plan` builds a plan."""

    mesh: Mesh
    zero: int
    micro_batches: int
    recompute: RecomputeChoice
    sequence_parallel: bool = False
    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = 0  # 0: the schedule's default

    @cached_property
    def pipeline_spec(self) -> PipelineSpec:
        return PipelineSpec(self.schedule, self.mesh.pp, self.micro_batches, self.stages_per_rank or schedule_traits(self.schedule).stages_per_rank)


def is_basic_mesh(mesh: Mesh) -> bool:
    """Whether the mesh has no context parallelism, no expert parallelism and no 2D tensor parallelism."""
    return mesh.cp == mesh.ep == len(mesh.tp) == 1
