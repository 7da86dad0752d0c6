"""The inputs of a search: find the best plan for this model on this cluster, for this workload and within these constraints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from meshwright.core.backends import backend_for
from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.plan.partition import choose_units
from meshwright.plan.search_space import Constraints


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """The inputs of one search."""

    profile: ModelProfile
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    constraints: Constraints

    def estimate(self, plan: Plan) -> Estimate:
        return estimate(plan, self.profile, self.workload, self.cluster, self.calibration)

    @cached_property
    def rates(self) -> Callable[[int], Rates]:
        """Measured rates by number of ranks."""
        return cache(self.calibration.rates_for)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The modules that plans gather, recompute and compile as one."""
        return choose_units(self.profile)

    @property
    def backend(self) -> str:
        return self.constraints.backend or backend_for(self.cluster.devices[0].kind)

    @property
    def offloads_optimizer(self) -> bool:
        return self.constraints.offload == "optimizer"
