"""Best-first search over more plans than can be priced one by one: points are refined in the order of their lower bounds, until no point left can
be better.

[Note: best-first search]
A point stands for a plan. The queue is ordered by a lower bound on cost, and the cheapest point is refined: first its coarse choices (mesh and
micro-batches) are bounded by compute time, with its stages if it is a pipeline; then its ZeRO stage and recomputation, by memory and gradients
too; then the estimate decides. Every refinement can only raise the cost. Once `TOP_K` estimates are cheaper than all points in the queue, they are
the best there are: the search has left out nothing that could have been among them (tests compare it with all plans on small clusters). On many
devices a small tolerance replaces "nothing": thousands of plans differ by less than any prediction is precise.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import Mesh
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.plan import CompileMode, Plan
from meshwright.plan.bounds import LowerBounds
from meshwright.plan.layer_totals import RecomputeChoice, StageLayers
from meshwright.plan.memory_planner import RECOMPUTE_MODES
from meshwright.plan.mesh_proposals import MeshProposer
from meshwright.plan.objective import complexity_penalty, objective_cost, placement_penalty
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.recompute_planner import choose_mixed_recompute
from meshwright.plan.search_point import SearchPoint, is_basic_mesh
from meshwright.plan.search_space import (
    PartitionCache,
    divisors,
    is_schedule_eligible,
    make_plan,
    micro_batch_counts,
    schedule_choices,
    sequence_parallel_choices,
    world_sizes,
)

TOP_K = 3  # this many of the best plans are exact
_MAX_TOO_LARGE = 6  # if nothing fits, this many of the plans that need the least memory are priced
_MAX_OTHER_STRATEGIES = 2  # if the best plans all have one strategy, this many plans of others are priced
_MAX_STAGES = 128
_MANY_DATA_RANKS = 32
_MANY_DEVICES = 512  # above this number, points of a world size are listed only when its bound comes up
_MANY_DEVICES_TOLERANCE = 0.02  # above `_MANY_DEVICES`: a plan that the search leaves out may cost this fraction less
_EXTRA_STAGES_PER_RANK = (4,)  # tried beside the default, where a schedule takes any number
_COARSE, _COARSE_STAGED, _REFINED, _REFINED_STAGED, _EXPECTED = range(5)  # refinement levels


@dataclass(frozen=True)
class _PricedPlan:
    plan: Plan
    estimate: Estimate
    cost: float


@dataclass
class SearchMemory:
    """What one search found out that another of the same model, cluster and workload can use, if its optimizer update takes no less time."""

    coarse_points: list[tuple[float, SearchPoint]] = field(default_factory=list)  # with their lower bounds on cost
    bounds_and_costs: dict[SearchPoint, tuple[float, float]] = field(default_factory=dict)  # of the first priced plan, by its point without shards


class BestFirstSearch:
    """One search for the best plans of a planning problem."""

    def __init__(
        self,
        problem: PlanningProblem,
        partition_cache: PartitionCache | None = None,
        top_k: int = TOP_K,
        cost_limit: float = math.inf,
        earlier: SearchMemory | None = None,
    ) -> None:
        """Plans that cost at least `cost_limit` are not searched."""
        self._problem, self._bounds = problem, LowerBounds(problem)
        self._profile, self._cluster, self._workload, self._constraints = problem.profile, problem.cluster, problem.workload, problem.constraints
        self.partition_cache = partition_cache or PartitionCache(self._profile, self._workload, self._constraints)
        self._mesh_proposer = MeshProposer(self._cluster, self._workload, self._constraints, self.partition_cache, self._bounds)
        self._top_k, self._cost_limit = top_k, cost_limit
        self._tolerance = _MANY_DEVICES_TOLERANCE if len(self._cluster.devices) > _MANY_DEVICES else 0.0
        self._push_counter = itertools.count()
        self._queue: list[tuple[float, int, int, SearchPoint]] = []
        self._too_large: list[tuple[float, int, SearchPoint]] = []  # points that do not fit, by their lower bound on memory
        self._first_error: RequestError | None = None
        self._stage_layers_by_key: dict[tuple[int, int, tuple[int, ...], bool, str, int], StageLayers] = {}
        self._with_shard = cache(lambda mesh, shard: replace(mesh, dp=mesh.dp // shard, shard=shard))
        self._known_points = earlier.coarse_points if earlier is not None else []
        self.memory = SearchMemory(bounds_and_costs=dict(earlier.bounds_and_costs) if earlier is not None else {})
        self.num_considered = 0
        self._last_bound = 0.0  # of the last point pushed

    def search(self) -> list[tuple[Plan, Estimate]]:
        """The best plans and their estimates, and whatever else the search priced; unsorted. Empty if no plan costs less than `cost_limit`."""
        worlds = [] if self._known_points else self._bounded_worlds()
        for bound, point in self._known_points:
            self._push_coarse(point, bound)
        plans: list[_PricedPlan] = []
        costs: list[float] = []  # of the plans that fit
        while worlds or self._queue:
            limit = (1 - self._tolerance) * costs[self._top_k - 1] if len(costs) >= self._top_k else self._cost_limit
            if worlds and worlds[-1][0] <= min(limit, self._queue[0][0] if self._queue else math.inf):
                for point in self._enumerate_coarse(worlds.pop()[1]):
                    self._push_coarse(point)
            elif not self._queue or self._queue[0][0] >= limit:
                break
            elif (priced := self._refine_next()) is not None:
                plans.append(priced)
                costs = sorted([*costs, priced.cost]) if priced.estimate.fits else costs
        if costs and self._top_k > 1:
            plans += self._price_other_strategies(plans)
        if not costs and self._cost_limit == math.inf:
            plans += self._closest_to_fitting()
        if not plans and self._cost_limit == math.inf:
            raise self._first_error or RequestError("no plan is legal here: relax --mesh, --nproc or --set")
        return [(p.plan, p.estimate) for p in plans]

    def _refine_next(self) -> _PricedPlan | None:
        """Refine the cheapest point in the queue; return the priced plan after the last refinement, else None."""
        bound, _, level, point = heapq.heappop(self._queue)
        if level == _COARSE and not point.sequence_parallel:
            for mesh in self._mesh_proposer.meshes_2d_tensor(point.mesh):  # 2D computes as much as 1D, so it has the same bound
                self._push(replace(point, mesh=mesh), _COARSE)
        if level in (_COARSE, _REFINED) and point.mesh.pp > 1:
            self._push(point, level + 1, bound)
        elif level < _REFINED:
            for refined in self._refinements(point):
                seconds = self._push(refined, _REFINED, bound)
                for other in self._mesh_proposer.reordered_points(refined, seconds) if seconds is not None else ():
                    self._push(other, _REFINED, bound)
        elif level != _EXPECTED and (expected := self._expected_cost(point, bound)) > bound:
            heapq.heappush(self._queue, (expected, next(self._push_counter), _EXPECTED, point))
        else:
            priced = self._price_point(point)
            if priced is not None and level != _EXPECTED:
                self.memory.bounds_and_costs.setdefault(_unsharded(point), (bound, priced.cost))
            return priced
        return None

    def _expected_cost(self, point: SearchPoint, bound: float) -> float:
        """On many devices, what a pipeline is expected to cost at least: as much as a priced plan that differs only in the number of shards, or in
        what it offloads; less in proportion where its bound is lower. What it costs beyond its bound is how stages wait for each other, which
        that changes little."""
        if not self._tolerance or point.mesh.pp == 1 or (known := self.memory.bounds_and_costs.get(_unsharded(point))) is None:
            return bound
        known_bound, known_cost = known
        return max(bound, (1 - self._tolerance) * known_cost * min(1.0, bound / known_bound))

    def _price_other_strategies(self, priced_plans: Sequence[_PricedPlan]) -> list[_PricedPlan]:
        """Plans of other strategies, priced in the order of their bounds, where all plans priced so far have the same strategy."""
        strategies = {(p.plan.strategy, p.plan.world) for p in priced_plans if p.estimate.fits}
        others: list[_PricedPlan] = []
        seen = {_strategy_key(p.plan.mesh, p.plan.memory.zero) for p in priced_plans}
        while len(strategies) == 1 and self._queue and len(others) < _MAX_OTHER_STRATEGIES:
            _, _, level, point = self._queue[0]
            if level >= _REFINED and _strategy_key(point.mesh, point.zero) in seen:
                heapq.heappop(self._queue)
            elif (priced := self._refine_next()) is not None:
                others.append(priced)
                seen.add(_strategy_key(priced.plan.mesh, priced.plan.memory.zero))
        return others

    # -- points --

    def _bounded_worlds(self) -> list[tuple[float, int]]:
        """World sizes, each with a lower bound on the cost of any plan of that size, the lowest last: on many devices, the computation of the whole
        batch at once, divided among them, since smaller calls are no faster."""
        sizes, one = world_sizes(len(self._cluster.devices), self._constraints), SearchPoint(Mesh(), 0, 1, "none")
        if max(sizes) <= _MANY_DEVICES or self._workload.objective == "memory":
            return [(0.0, world) for world in reversed(sizes)]
        sharding = self.partition_cache.sharding(one.mesh, False)
        modes: tuple[CompileMode, ...] = (self._constraints.compile,) if self._constraints.compile else ("none", "blocks", "model")
        seconds = min(self._bounds.seconds(one, sharding, mode, with_communication=False) for mode in modes)
        return sorted(((objective_cost(self._workload, seconds / world, world, 0.0), world) for world in sizes), reverse=True)

    def _enumerate_coarse(self, world: int) -> Iterator[SearchPoint]:
        """Yield meshes of a world size without ZeRO, with every number of micro-batches and every schedule; tensor parallelism stays within a node
        if any such mesh exists."""
        batch, constraints = self._workload.global_batch, self._constraints
        for mesh in self._meshes(world, len(self._cluster.nodes[0].devices)) or self._meshes(world, world):
            for sequence in sequence_parallel_choices(mesh, constraints):
                for micro in micro_batch_counts(batch, mesh, constraints):
                    for schedule, stages in self._schedule_choices(mesh, micro):
                        if batch % (mesh.data_parallel_size * micro) == 0:
                            yield SearchPoint(mesh, 0, micro, constraints.recompute or "none", sequence, schedule, stages)

    def _meshes(self, world: int, max_tensor_degree: int) -> list[Mesh]:
        return self._mesh_proposer.meshes_1d_tensor(world, _MAX_STAGES, max_tensor_degree)

    def _push_coarse(self, point: SearchPoint, bound: float = 0.0) -> None:
        """Push a coarse point that may cost less than the limit, and remember it with its bound for other searches."""
        if bound < self._cost_limit and self._push(point, _COARSE, bound) is not None:
            self.memory.coarse_points.append((self._last_bound, point))

    def _schedule_choices(self, mesh: Mesh, micro_batches: int) -> Iterator[tuple[PipelineSchedule, int]]:
        """Yield (schedule, stages per rank; 0 for the default). More and shorter stages fill the pipeline sooner and send more."""
        for schedule in schedule_choices(mesh, self._constraints) if micro_batches >= mesh.pp or self._constraints.schedule is not None else ():
            yield schedule, 0
            if schedule_traits(schedule).any_stages_per_rank and mesh.pp > 1:
                yield from ((schedule, n) for n in _EXTRA_STAGES_PER_RANK if n * mesh.pp <= len(self._profile.layers))

    def _refinements(self, coarse: SearchPoint) -> Iterator[SearchPoint]:
        """The point with every ZeRO stage and recompute choice."""
        for zero in (self._constraints.zero,) if self._constraints.zero is not None else (0, 1, 2, 3):
            for shard in self._shard_degrees(coarse.mesh, zero):
                mesh = self._with_shard(coarse.mesh, shard)
                for recompute in self._recompute_choices():
                    refined = replace(coarse, mesh=mesh, zero=zero, recompute=recompute)
                    if self._is_legal(refined):
                        yield refined

    def _recompute_choices(self) -> tuple[RecomputeChoice, ...]:
        """The requested mode, or else "mixed", which takes no more time than one mode for all units, though it may need more memory."""
        if self._constraints.recompute:
            return (self._constraints.recompute,)
        return RECOMPUTE_MODES if self._workload.objective == "memory" else ("none", "mixed")

    def _is_legal(self, point: SearchPoint) -> bool:
        """False where `Plan` would refuse the point, as far as that is known here."""
        if self._constraints.samples == "together" and point.mesh.data_parallel_size > 1:
            return False
        pipelined, traits = point.mesh.pp > 1, schedule_traits(point.schedule)
        if point.recompute == "selective" and point.mesh.degree("tp") > 1 and self._compile_mode(point) != "none":
            return False
        if pipelined and traits.splits_backward and (point.recompute != "none" or point.zero == 3):
            return False
        if pipelined and traits.stages_per_rank > 1 and point.zero == 2:
            return False
        return is_basic_mesh(point.mesh) or self._mesh_proposer.is_legal(point)

    def _shard_degrees(self, mesh: Mesh, zero: int) -> list[int]:
        """Numbers of ranks over which ZeRO may shard: all data ranks, or a power of two; any divisor if all fit on a node. Of many data ranks a
        node's, or a power of four: neighbouring powers of two cost nearly the same."""
        if zero == 0 or mesh.dp == 1:
            return [1] if zero == 0 else []
        node_size, many = len(self._cluster.nodes[0].devices), mesh.dp > _MANY_DATA_RANKS
        powers = [d for d in divisors(mesh.dp) if d.bit_count() == 1 and (not many or d == node_size or d.bit_length() % 2)]
        return [d for d in divisors(mesh.dp) if d > 1 and (d == mesh.dp or mesh.dp <= node_size or d in powers)]

    # -- bounding and pricing --

    def _compile_mode(self, point: SearchPoint, sharding: Plan | None = None) -> CompileMode:
        eager = point.mesh.pp > 1 and schedule_traits(point.schedule).splits_backward
        return "none" if eager and self._constraints.compile is None else self._mesh_proposer.compile_mode(point.mesh, sharding)

    def _push(self, point: SearchPoint, level: int, known_bound: float = 0.0) -> float | None:
        """Push a point into the queue if it may be legal and fit; return its lower bound in seconds, else None. Its cost is at least
        `known_bound`."""
        try:
            sharding = self.partition_cache.sharding(point.mesh, point.sequence_parallel)
        except RequestError as error:
            self._first_error = self._first_error or error
            return None
        self.num_considered += level in (_COARSE, _REFINED)
        compile_mode = self._compile_mode(point, sharding)
        staged, refined = level in (_COARSE_STAGED, _REFINED_STAGED), level >= _REFINED
        stages = self._stage_layers(point) if staged else ()
        if staged and not stages:
            return None
        memory = self._bounds.memory.bytes(point, sharding, compile_mode, stages) if refined else 0.0
        if refined and memory > self._bounds.memory.limit(point):
            heapq.heappush(self._too_large, (memory, next(self._push_counter), point))
            return None
        seconds = self._bounds.seconds(point, sharding, compile_mode, refined, stages)
        bound = self._cost(point, seconds, memory, point.sequence_parallel, point.recompute != "none")
        self._last_bound = max(bound, known_bound)
        heapq.heappush(self._queue, (self._last_bound, next(self._push_counter), level, point))
        return seconds

    def _stage_layers(self, point: SearchPoint) -> StageLayers:
        """The layers of each stage; empty if the model cannot be split into these stages, or torch cannot run the schedule."""
        key = (point.mesh.pp, point.mesh.cp, point.mesh.tp, point.sequence_parallel, point.schedule, point.stages_per_rank)
        if key not in self._stage_layers_by_key:
            try:
                stages = self.partition_cache.partition(point.mesh, point.sequence_parallel, point.schedule, point.stages_per_rank).stages
                stages = stages if is_schedule_eligible(point.schedule, stages, self._constraints) else ()
            except RequestError as error:
                self._first_error, stages = self._first_error or error, ()
            self._stage_layers_by_key[key] = tuple(stage.layers for stage in stages)
        return self._stage_layers_by_key[key]

    def _price_point(self, point: SearchPoint) -> _PricedPlan | None:
        """The plan and its estimate; None where it turns out not to be legal."""
        try:
            partition = self.partition_cache.partition(point.mesh, point.sequence_parallel, point.schedule, point.stages_per_rank)
            uniform = replace(point, recompute="none") if point.recompute == "mixed" else point
            plan = make_plan(self._profile, self._cluster, self._workload, self._constraints, uniform, partition)
        except RequestError as error:
            self._first_error = self._first_error or error
            return None
        if point.recompute == "mixed":
            mixed = choose_mixed_recompute(plan, self._profile, self._workload, self._cluster, self._problem.calibration)
            if mixed is None:
                heapq.heappush(self._too_large, (0.0, next(self._push_counter), point))
                return None
            plan = mixed
        estimate, sequence, recomputes = self._problem.estimate(plan), plan.tensor.is_sequence_parallel, bool(plan.memory.recompute_modes)
        return _PricedPlan(plan, estimate, self._cost(point, estimate.step_s, estimate.memory_bytes[0], sequence, recomputes))

    def _cost(self, point: SearchPoint, seconds: float, memory: float, sequence_parallel: bool, recomputes: bool) -> float:
        """The objective, with the penalties unless it is memory."""
        cost, mesh, chunks = objective_cost(self._workload, seconds, point.mesh.size, memory), point.mesh, point.pipeline_spec.chunks
        penalty = complexity_penalty(mesh, point.zero, point.micro_batches, sequence_parallel, recomputes, point.schedule, chunks)
        penalty *= placement_penalty(mesh, len(self._cluster.nodes[0].devices))
        return cost if self._workload.objective == "memory" else cost * penalty

    def _closest_to_fitting(self) -> list[_PricedPlan]:
        """The plans that need the least memory, for when nothing fits."""
        plans: list[_PricedPlan] = []
        while self._too_large and len(plans) < (_MAX_TOO_LARGE if self._top_k > 1 else 1):
            point = heapq.heappop(self._too_large)[2]
            priced = self._price_point(replace(point, recompute="full") if point.recompute == "mixed" else point)
            plans += [priced] if priced is not None else []
        return plans


def _unsharded(point: SearchPoint) -> SearchPoint:
    """The point on the mesh without shards, in the default order: an order may name the shard axis."""
    return replace(point, mesh=replace(point.mesh, dp=point.mesh.dp * point.mesh.shard, shard=1, order=()))


def _strategy_key(mesh: Mesh, zero: int) -> tuple[object, ...]:
    """A rough key of a point's strategy."""
    return mesh.size, mesh.pp, mesh.cp, mesh.ep, mesh.tp, zero
