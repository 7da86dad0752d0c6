"""Search: price every legal plan and rank them."""

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
_MEAN_DEVICE_TOLERANCE = 1.1  # times as long as on unlike devices a plan may be said to take on mean ones, whose links and kernels are one kind's
MAX_EXHAUSTIVE_DEVICES = 8  # devices up to which every legal plan is priced; beyond, bounds choose what is
_MANY_LAYERS = 24  # layers from which that would take minutes on as few


@dataclass(frozen=True)
class ScoredPlan:
    """A plan and what it would cost."""

    plan: Plan
    estimate: Estimate


@dataclass(frozen=True)
class Ranking:
    """All legal plans, best first, and the inputs they were judged on, so that `explain` can ask what would change the choice."""

    scored: tuple[ScoredPlan, ...]
    profile: ModelProfile
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    constraints: Constraints
    tuning_notes: tuple[str, ...] = ()  # what of the best plan was chosen after it, and why
    num_considered: int = 0  # plans that were weighed by bounds, where not all of them were priced
    search_s: float = 0.0  # computing time of the search
    partition_cache: PartitionCache | None = None  # how it takes the model apart: another search of the same model need not find out again
    coarse_points: CoarsePoints = ()  # what was weighed by bounds first, with what each costs at least
    best_equal_split: ScoredPlan | None = None  # the best plan that deals everything out equally, where devices are not alike

    @property
    def best(self) -> ScoredPlan:
        return self.scored[0]

    @property
    def speedup_over_equal(self) -> float | None:
        """How many times as long a step takes with the best plan that deals everything out equally; None where devices are alike or none fits."""
        return (
            self.best_equal_split.estimate.step_s / self.best.estimate.step_s
            if self.best_equal_split is not None and self.best_equal_split.estimate.fits
            else None
        )

    @property
    def runner_up(self) -> ScoredPlan | None:
        """The best plan of another strategy or world size: the next of the same kind would teach nothing."""
        first = self.best.plan
        return next((s for s in self.scored[1:] if (s.plan.strategy, s.plan.world) != (first.strategy, first.world)), None)


@gc_disabled
def rank_plans(
    profile: ModelProfile, cluster: Cluster, workload: Workload, calibration: Calibration, constraints: Constraints,
    previous: Ranking | None = None,
) -> Ranking:  # fmt: skip
    """Every legal plan with its estimate; those that fit first, then by the workload's objective. On a large cluster the best, and those that
    were looked at on the way: `previous` is a ranking of the same model under the same wishes, after which the best alone is asked for.

    States in host memory cost time and free nothing but memory, so they are weighed where that binds."""
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
    """The same, with parts for unlike devices (see [Note: parts for unlike devices]) of the plans that are good when dealt out equally, and of those
    that would be good if all devices were like the mean one."""
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
        """No parts make it quicker than it would be on as many mean devices; some devices alone may be quicker than those."""
        if mean is None or plan.world < len(cluster.devices) or workload.objective == "memory":
            return 0.0
        return estimate(plan, ranking.profile, workload, *mean).step_s / _MEAN_DEVICE_TOLERANCE

    def plans_that_fit(plans: list[Plan]) -> list[Plan]:
        """Those that fit, or the one that comes nearest to it: the others need not be timed."""
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
    """The best, and the quickest of every strategy on every number of ranks."""
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
    """What costs at least `cost_limit` need not be looked at; `force_bounded`: nor what bounds leave out, however few plans there are."""
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
    tuned = tune(best.plan, best.estimate, constraints, calibration.rates_for(best.plan.world), problem.estimate)
    scored[0] = ScoredPlan(tuned.plan, tuned.estimate)
    took_s = time.process_time() - begun
    return Ranking(tuple(scored), profile, cluster, workload, calibration, constraints, tuned.notes, considered, took_s, cutter, coarse_points)


def needs_bounded_search(profile: ModelProfile, cluster: Cluster, constraints: Constraints, best_only: bool = False) -> bool:
    """Whether there are more plans than are priced one by one: because there are many, because the model is deep or devices have several kinds,
    each with a price of its own, or because the best alone is asked for. Jobs on CPUs beside GPUs are small, and priced plan by plan."""
    world = constraints.world or len(cluster.devices)
    dear = len(profile.layers) > _MANY_LAYERS or len({device.name for device in cluster.devices[:world]}) > 1
    return world > MAX_EXHAUSTIVE_DEVICES or (
        (best_only or (world > MAX_EXHAUSTIVE_DEVICES // 2 and dear)) and not assign_rank_devices(cluster, world)
    )


def rescore_best(ranking: Ranking, cluster: Cluster, calibration: Calibration, memory_only: bool = False) -> ScoredPlan:
    """The best plan on another machine, among those that were near the front here and, of every strategy, the quickest and the smallest. One that
    is `memory_only` has another memory alone."""
    quickest: dict[tuple[str, int], ScoredPlan] = {}
    smallest: dict[tuple[str, int], ScoredPlan] = {}
    for found, order in ((quickest, ranking.scored), (smallest, sorted(ranking.scored, key=lambda s: max(s.estimate.memory_bytes)))):
        for scored in order:
            found.setdefault((scored.plan.strategy, scored.plan.world), scored)
    near = (*ranking.scored[:_NUM_TOP_PLANS], *quickest.values(), *smallest.values())
    if ranking.num_considered:  # of a large cluster's plans each takes a while
        near = (*list(quickest.values())[:2], *list(smallest.values())[:1])

    def rescore(scored: ScoredPlan) -> ScoredPlan:
        found = estimate(scored.plan, ranking.profile, ranking.workload, cluster, calibration, with_time=not memory_only)
        return ScoredPlan(scored.plan, replace(scored.estimate, fits=found.fits, reason=found.reason) if memory_only else found)

    return min(map(rescore, {id(s.plan): s for s in near}.values()), key=lambda s: _sort_key(s, ranking.workload))


def _is_dominated(plan: Plan, previous: ScoredPlan, workload: Workload) -> bool:
    """Where a plan fits that keeps everything, recomputing a part only costs time."""
    same = previous.plan.memory.recompute == "none" and replace(previous.plan.memory, recompute="selective") == plan.memory
    return workload.objective == "time" and same and previous.estimate.fits and previous.plan.mesh == plan.mesh


def _sort_key(scored: ScoredPlan, workload: Workload) -> tuple[bool, float]:
    found, plan = scored.estimate, scored.plan
    memory = float(max(found.memory_bytes))
    if not found.fits:
        return True, memory  # nearest to fitting first
    if workload.objective == "memory":
        return False, memory
    each = max(len(plan.stages) // plan.mesh.pp, 1)
    extra = complexity_penalty(
        plan.mesh, plan.memory.zero, plan.micro_batches, plan.tensor.is_sequence_parallel, bool(plan.memory.recompute_modes), plan.schedule, each
    )
    return False, objective_cost(workload, found.step_s, plan.world, memory) * extra
