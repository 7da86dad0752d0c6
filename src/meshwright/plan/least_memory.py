"""The plan that needs the least memory: it decides whether anything fits at all, and what would make it fit.

Choices that need more memory are left out (one micro-batch, or as many as there are samples; ZeRO shards over all ranks), so the space is far
smaller than in a search for the fastest plan. Points are priced in the order of their lower bound on memory (`plan/bounds.py`), until no other
point can need less.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.rank_devices import assign_rank_devices
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.plan.bounds import LowerBounds
from meshwright.plan.layer_totals import StageLayers
from meshwright.plan.mesh_proposals import MeshProposer
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.search import ScoredPlan, needs_bounded_search, rank_plans
from meshwright.plan.search_point import SearchPoint
from meshwright.plan.search_space import Constraints, PartitionCache, make_plan, micro_batch_counts, sequence_parallel_choices, world_sizes

_MODES_LEAST_MEMORY_FIRST: tuple[RecomputeMode, ...] = ("full", "selective", "none")  # the order of the first two depends on a block's matmul outputs


class LeastMemorySearch:
    """A search for one model and workload under one set of constraints, over the meshes that a full search considers. `cache` may come from
    another search of the model."""

    def __init__(
        self, profile: ModelProfile, workload: Workload, calibration: Calibration, constraints: Constraints, cache: PartitionCache | None = None
    ) -> None:
        self._profile, self._workload, self._calibration, self._constraints = profile, workload, calibration, constraints
        self.partition_cache = cache or PartitionCache(profile, workload, constraints)
        self._plans_by_key: dict[tuple[int, int], ScoredPlan | None] = {}  # by (number of ranks, memory of the smallest device)

    def smallest_plan(self, cluster: Cluster, largest_worlds_only: bool = False) -> ScoredPlan | None:
        """The plan for this cluster whose largest rank needs the least memory; None where no plan is legal. With `largest_worlds_only`, only the
        two largest world sizes are searched: the more ranks there are, the less each holds."""
        if self._constraints.mesh is not None or assign_rank_devices(cluster, len(cluster.devices)):
            return self._smallest_of_all(cluster)
        worlds = world_sizes(len(cluster.devices), self._constraints)[-2 if largest_worlds_only else 0 :]
        return _smallest(self._smallest_for_world(cluster, world) for world in worlds if world <= len(cluster.devices))

    def fits(self, cluster: Cluster) -> bool:
        smallest = self.smallest_plan(cluster, largest_worlds_only=True)
        return smallest is not None and smallest.estimate.fits

    @property
    def min_total_bytes(self) -> float:
        """Bytes of parameters and gradients, which all devices together must hold whatever the plan."""
        return 2.0 * sum(t.bytes for t in self._profile.tensors if t.trainable)

    def _offload_variants(self, cluster: Cluster) -> tuple[Constraints, ...]:
        """The constraints and, on GPUs where the user has not set `offload`, the same with optimizer states in host memory."""
        if self._constraints.offload is not None or cluster.devices[0].kind != "cuda":
            return (self._constraints,)
        return self._constraints, replace(self._constraints, offload="optimizer")

    def _smallest_of_all(self, cluster: Cluster) -> ScoredPlan | None:
        """Price all plans: a given mesh, or a mix of CPU and GPU ranks, leaves few of them."""
        try:
            return rank_plans(self._profile, cluster, replace(self._workload, objective="memory"), self._calibration, self._constraints).best
        except RequestError:
            return None

    def _smallest_for_world(self, cluster: Cluster, world: int) -> ScoredPlan | None:
        key = (world, cluster.least_memory(world))
        if key not in self._plans_by_key:
            self._plans_by_key[key] = _smallest(self._search(cluster, world, constraints) for constraints in self._offload_variants(cluster))
        return self._plans_by_key[key]

    def _search(self, cluster: Cluster, world: int, constraints: Constraints) -> ScoredPlan | None:
        bounds = LowerBounds(PlanningProblem(self._profile, cluster, self._workload, self._calibration, constraints))
        proposer = MeshProposer(cluster, self._workload, constraints, self.partition_cache, bounds)
        queue: list[tuple[float, int, bool, SearchPoint]] = []  # (lower bound in bytes, insertion order, whether stages are known, point)

        def push(insertion_order: int, point: SearchPoint, stages: StageLayers = ()) -> None:
            try:
                sharding = self.partition_cache.sharding(point.mesh, point.sequence_parallel)
            except RequestError:
                return
            need = bounds.memory.bytes(point, sharding, proposer.compile_mode(point.mesh, sharding), stages)
            heapq.heappush(queue, (need, insertion_order, bool(stages), point))

        for number, point in enumerate(self._search_points(cluster, world, proposer)):
            push(number, point)
        best: ScoredPlan | None = None
        while queue and (best is None or queue[0][0] < _peak_bytes(best)):
            _, number, staged, point = heapq.heappop(queue)
            if point.mesh.pp > 1 and not staged:
                push(number, point, self._stage_layers(point))
                continue
            priced = self._price_point(cluster, point, constraints)
            best = min((s for s in (best, priced) if s is not None), key=_peak_bytes, default=None)
        return best

    def _stage_layers(self, point: SearchPoint) -> StageLayers:
        """The layers of each stage. If the model cannot be split into these stages, each gets all layers: `make_plan` refuses the plan later."""
        try:
            return tuple(stage.layers for stage in self.partition_cache.partition(point.mesh, point.sequence_parallel, point.schedule).stages)
        except RequestError:
            return (self._profile.layer_names,) * point.mesh.pp * point.pipeline_spec.chunks

    def _search_points(self, cluster: Cluster, world: int, mesh_proposer: MeshProposer) -> Iterator[SearchPoint]:
        """The points of all meshes that a full search would consider."""
        constraints = self._constraints
        bounded = needs_bounded_search(self._profile, cluster, replace(constraints, world=world))
        for wide in mesh_proposer.meshes(world, len(cluster.nodes[0].devices) if bounded else world):
            for sequence in sequence_parallel_choices(wide, constraints):
                counts = micro_batch_counts(self._workload.global_batch, wide, constraints)
                for micro in dict.fromkeys((counts[-1], counts[0])):  # the smallest micro-batches, or a single one, which accumulates no gradients
                    for zero in (constraints.zero,) if constraints.zero is not None else (0, 1, 2, 3):
                        shard = wide.dp if zero else 1  # sharded over all data ranks, each holds the least
                        if (zero > 0) == (shard > 1) or world == 1:
                            mesh = replace(wide, dp=wide.dp // shard, shard=shard)
                            for recompute in (constraints.recompute,) if constraints.recompute else _MODES_LEAST_MEMORY_FIRST:
                                yield SearchPoint(mesh, zero, micro, recompute, sequence, constraints.schedule or "1f1b")

    def _price_point(self, cluster: Cluster, point: SearchPoint, constraints: Constraints) -> ScoredPlan | None:
        try:
            partition = self.partition_cache.partition(point.mesh, point.sequence_parallel, point.schedule)
            plan = make_plan(self._profile, cluster, self._workload, constraints, point, partition)
        except RequestError:
            return None
        return ScoredPlan(plan, estimate(plan, self._profile, self._workload, cluster, self._calibration, with_time=False))


def _smallest(plans: Iterable[ScoredPlan | None]) -> ScoredPlan | None:
    """The plan that needs the least memory; those that fit come first."""
    return min((s for s in plans if s is not None), key=lambda s: (not s.estimate.fits, _peak_bytes(s)), default=None)


def _peak_bytes(scored: ScoredPlan) -> int:
    return max(scored.estimate.memory_bytes)
