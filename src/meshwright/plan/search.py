"""Search: estimates every legal plan, or the best by lower bounds on large clusters, and ranks them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.gc_control import gc_disabled
from meshwright.core.heterogeneous import homogeneous_average, is_heterogeneous
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.rank_devices import assign_rank_devices
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.plan.best_first_search import TOP_K, BestFirstSearch, CoarsePoints
from meshwright.plan.bounds import LowerBounds
from meshwright.plan.heterogeneous_planner import SearchInputs, balanced_variants, with_axis_orders, with_device_orders
from meshwright.plan.mesh_proposals import MeshProposer
from meshwright.plan.objective import check_objective, complexity_penalty, objective_cost
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.recompute_planner import choose_mixed_recompute
from meshwright.plan.search_space import Constraints, PartitionCache, candidates, check_constraints
from meshwright.plan.tuning import tune

_NUM_TOP_PLANS = 12
_MEAN_DEVICE_TOLERANCE = 1.1  # factor by which mean devices, with one kind's links and kernels, may be overestimated
MAX_EXHAUSTIVE_DEVICES = 8  # up to so many devices every legal plan is priced; beyond, bounds select
_MANY_LAYERS = 24  # from so many layers on, pricing all plans takes minutes even on few devices


@dataclass(frozen=True)
class ScoredPlan:
    """A plan and what it would cost."""

    plan: Plan
    estimate: Estimate


@dataclass(frozen=True)
class Ranking:
    """All legal plans, best first, and the inputs of the search, with which `explain` finds out what would change the choice."""

    scored: tuple[ScoredPlan, ...]
    profile: ModelProfile
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    constraints: Constraints
    tuning_notes: tuple[str, ...] = ()  # what was tuned after the best plan was chosen, and why
    num_considered: int = 0  # plans compared by their bounds, where not all were priced
    search_s: float = 0.0  # computing time of the search
    partition_cache: PartitionCache | None = None  # partitions of the model, for reuse in another search of the same model
    coarse_points: CoarsePoints = ()  # the coarse points of the search, with their cost bounds
    best_equal_split: ScoredPlan | None = None  # the best plan with equal shares, on heterogeneous devices

    @property
    def best(self) -> ScoredPlan:
        return self.scored[0]

    @property
    def speedup_over_equal(self) -> float | None:
        """Step time of the best plan with equal shares divided by that of the best plan; None on homogeneous devices, or if no equal split fits."""
        return (
            self.best_equal_split.estimate.step_s / self.best.estimate.step_s
            if self.best_equal_split is not None and self.best_equal_split.estimate.fits
            else None
        )

    @property
    def runner_up(self) -> ScoredPlan | None:
        """The best plan of another strategy or world size: the next plan of the same kind would tell the user nothing."""
        first = self.best.plan
        return next((s for s in self.scored[1:] if (s.plan.strategy, s.plan.world) != (first.strategy, first.world)), None)


@gc_disabled
def rank_plans(
    profile: ModelProfile, cluster: Cluster, workload: Workload, calibration: Calibration, constraints: Constraints,
    previous: Ranking | None = None,
) -> Ranking:  # fmt: skip
    """Every legal plan with its estimate: those that fit first, then by the workload's objective. On a large cluster, the best plans and those
    that were priced on the way. `previous` is a ranking of the same model under the same constraints; with it, only the best plan is searched.

    Offloading optimizer states to host memory costs time and saves only memory, so it is considered only where memory is the bottleneck.
    """
    found = _rank_equal_split(PlanningProblem(profile, cluster, workload, calibration, constraints), previous)
    if is_heterogeneous(cluster, calibration, constraints.world or len(cluster.devices)):
        found = _rank_heterogeneous(found, previous)
    if previous is not None or not _is_memory_bound(found):
        return found
    below = _sort_key(found.best, workload)[1] if found.best.estimate.fits else math.inf
    offloading = PlanningProblem(profile, cluster, workload, calibration, replace(constraints, offload="optimizer"))
    other = _rank_equal_split(offloading, found, below, coarse_points=found.coarse_points)
    scored = tuple(sorted((*found.scored, *other.scored), key=lambda s: _sort_key(s, workload)))
    tuned = found.tuning_notes if scored[0] is found.best else other.tuning_notes
    return replace(found, scored=scored, tuning_notes=tuned, num_considered=found.num_considered + other.num_considered)


def _rank_heterogeneous(ranking: Ranking, previous: Ranking | None) -> Ranking:
    """Add plans with unequal shares (see [Note: heterogeneous shares]). Their seeds are the best plans with equal shares, and the best plans for a
    cluster of mean devices."""
    cluster, workload, calibration, constraints = ranking.cluster, ranking.workload, ranking.calibration, ranking.constraints
    inputs = SearchInputs(
        ranking.profile, cluster, workload, calibration, ranking.partition_cache or PartitionCache(ranking.profile, workload, constraints)
    )
    seeds, mean = _seed_plans(ranking), None
    if not assign_rank_devices(cluster, len(cluster.devices)):
        mean = homogeneous_average(cluster, calibration, workload.precision)
        averaged = PlanningProblem(ranking.profile, mean[0], workload, mean[1], constraints)
        others = _seed_plans(_rank_equal_split(averaged, previous, force_bounded=needs_bounded_search(ranking.profile, cluster, constraints)))
        seeds += [plan for plan in others if plan not in seeds]

    def price(plan: Plan) -> ScoredPlan:
        return ScoredPlan(plan, estimate(plan, ranking.profile, workload, cluster, calibration))

    def key(scored: ScoredPlan) -> tuple[bool, float]:
        return _sort_key(scored, workload)

    def min_step_s(plan: Plan) -> float:
        """Lower bound on a plan's step time with any shares: its time on as many mean devices. 0 for plans on some of the devices, which may be
        faster than the mean."""
        if mean is None or plan.world < len(cluster.devices) or workload.objective == "memory":
            return 0.0
        return estimate(plan, ranking.profile, workload, *mean).step_s / _MEAN_DEVICE_TOLERANCE

    def plans_that_fit(plans: list[Plan]) -> list[Plan]:
        """The plans that fit, or else the one closest to fitting: the others need no time estimate."""
        rough = [(plan, estimate(plan, ranking.profile, workload, cluster, calibration, with_time=False)) for plan in plans]
        return [plan for plan, found in rough if found.fits] or [min(rough, key=lambda pair: max(pair[1].memory_bytes))[0]]

    def fastest_step_s(scored_plans: list[ScoredPlan]) -> float:
        return min((s.estimate.step_s for s in scored_plans if s.estimate.fits), default=math.inf)

    equal, sharded = list(ranking.scored), list[ScoredPlan]()
    for seconds, plan in sorted(((min_step_s(plan), plan) for plan in seeds), key=lambda pair: pair[0]):
        placed = list(with_device_orders(plan, inputs, constraints.reorder))
        if seconds <= fastest_step_s(equal):
            equal += map(price, placed)
        if seconds <= fastest_step_s([*equal, *sharded]):
            parts = (list(balanced_variants(other, inputs)) for device_index in placed for other in with_axis_orders(device_index))
            sharded += [min(map(price, plans_that_fit(every)), key=key) for every in parts if every]
    scored = sorted([*equal, *sharded], key=key)
    return replace(
        ranking, scored=tuple(scored), best_equal_split=min(equal, key=key), tuning_notes=ranking.tuning_notes if scored[0] is ranking.best else ()
    )


def _seed_plans(ranking: Ranking) -> list[Plan]:
    """The best plans, and the fastest of every strategy and world size."""
    first: dict[tuple[str, int], Plan] = {}
    for scored in ranking.scored:
        first.setdefault((scored.plan.strategy, scored.plan.world), scored.plan)
    found = [*(s.plan for s in ranking.scored[:_NUM_TOP_PLANS]), *first.values()]
    return list({id(plan): plan for plan in found}.values())


def _is_memory_bound(ranking: Ranking) -> bool:
    best = ranking.best
    saving = not best.estimate.fits or bool(best.plan.memory.recompute_modes)
    return saving and best.plan.device == "cuda" and ranking.constraints.offload is None


def _rank_equal_split(
    problem: PlanningProblem, previous: Ranking | None, cost_limit: float = math.inf, force_bounded: bool = False, coarse_points: CoarsePoints = ()
) -> Ranking:
    """Rank plans with equal shares. Plans that cost at least `cost_limit` are skipped; `force_bounded` prunes by bounds however few plans there
    are."""
    profile, cluster, workload, calibration, constraints = (
        problem.profile,
        problem.cluster,
        problem.workload,
        problem.calibration,
        problem.constraints,
    )
    check_objective(workload)
    begun = time.process_time()
    scored: list[ScoredPlan] = []
    if constraints.mesh is None and (force_bounded or needs_bounded_search(profile, cluster, constraints, previous is not None)):
        check_constraints(constraints, len(cluster.devices))
        search = BestFirstSearch(problem, previous.partition_cache if previous else None, 1 if previous else TOP_K, cost_limit, coarse_points)
        scored = [ScoredPlan(*found) for found in search.search()]
        considered, cutter, coarse_points = search.num_considered, search.partition_cache, search.coarse_points
        if not scored and previous is not None:
            return replace(previous, scored=(), num_considered=considered)
    else:
        considered, cutter, coarse_points = 0, PartitionCache(profile, workload, constraints), ()
        axes = MeshProposer(cluster, workload, constraints, cutter, LowerBounds(problem))
        for plan in candidates(profile, cluster, workload, constraints, cutter, axes.meshes):
            if not (scored and _is_dominated(plan, scored[-1], workload)):
                scored.append(ScoredPlan(plan, problem.estimate(plan)))
            if not scored[-1].estimate.fits and plan.memory.recompute == "none" and constraints.recompute is None and workload.objective != "memory":
                other = choose_mixed_recompute(plan, profile, workload, cluster, calibration)
                scored += [ScoredPlan(other, problem.estimate(other))] if other is not None else []
    scored.sort(key=lambda s: _sort_key(s, workload))
    best = scored[0]
    plan, tuned, notes = tune(best.plan, best.estimate, constraints, calibration.rates_for(best.plan.world), problem.estimate)
    scored[0] = ScoredPlan(plan, tuned)
    took_s = time.process_time() - begun
    return Ranking(tuple(scored), profile, cluster, workload, calibration, constraints, notes, considered, took_s, cutter, coarse_points)


def needs_bounded_search(profile: ModelProfile, cluster: Cluster, constraints: Constraints, best_only: bool = False) -> bool:
    """Whether there are too many plans to price each one: many devices, a deep model, several kinds of devices (each priced separately), or a
    search for the best plan alone. Jobs that mix CPU and GPU ranks are small, and all their plans are priced."""
    world = constraints.world or len(cluster.devices)
    dear = len(profile.layers) > _MANY_LAYERS or len({device.name for device in cluster.devices[:world]}) > 1
    return world > MAX_EXHAUSTIVE_DEVICES or (
        (best_only or (world > MAX_EXHAUSTIVE_DEVICES // 2 and dear)) and not assign_rank_devices(cluster, world)
    )


def rescore_best(ranking: Ranking, cluster: Cluster, calibration: Calibration, memory_only: bool = False) -> ScoredPlan:
    """The best plan on another cluster, among the top plans here and the fastest and the smallest of every strategy. `memory_only`: the clusters
    differ in memory alone, so step times are kept."""
    quickest: dict[tuple[str, int], ScoredPlan] = {}
    smallest: dict[tuple[str, int], ScoredPlan] = {}
    for found, order in ((quickest, ranking.scored), (smallest, sorted(ranking.scored, key=lambda s: max(s.estimate.memory_bytes)))):
        for scored in order:
            found.setdefault((scored.plan.strategy, scored.plan.world), scored)
    near = (*ranking.scored[:_NUM_TOP_PLANS], *quickest.values(), *smallest.values())
    if ranking.num_considered:  # each estimate on a large cluster takes a while
        near = (*list(quickest.values())[:2], *list(smallest.values())[:1])

    def rescore(scored: ScoredPlan) -> ScoredPlan:
        found = estimate(scored.plan, ranking.profile, ranking.workload, cluster, calibration, with_time=not memory_only)
        return ScoredPlan(scored.plan, replace(scored.estimate, fits=found.fits, reason=found.reason) if memory_only else found)

    return min(map(rescore, {id(s.plan): s for s in near}.values()), key=lambda s: _sort_key(s, ranking.workload))


def _is_dominated(plan: Plan, previous: ScoredPlan, workload: Workload) -> bool:
    """Whether a plan only adds selective recomputation to one that fits without it, which costs time and gains nothing."""
    same = previous.plan.memory.recompute == "none" and replace(previous.plan.memory, recompute="selective") == plan.memory
    return workload.objective == "time" and same and previous.estimate.fits and previous.plan.mesh == plan.mesh


def _sort_key(scored: ScoredPlan, workload: Workload) -> tuple[bool, float]:
    found, plan = scored.estimate, scored.plan
    memory = float(max(found.memory_bytes))
    if not found.fits:
        return True, memory  # closest to fitting first
    if workload.objective == "memory":
        return False, memory
    each = max(len(plan.stages) // plan.mesh.pp, 1)
    extra = complexity_penalty(
        plan.mesh, plan.memory.zero, plan.micro_batches, plan.tensor.is_sequence_parallel, bool(plan.memory.recompute_modes), plan.schedule, each
    )
    return False, objective_cost(workload, found.step_s, plan.world, memory) * extra
