"""Search: estimates every legal plan, or the best by lower bounds on large clusters, and ranks them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.gc_control import gc_disabled
from meshwright.core.heterogeneous import homogeneous_average, is_heterogeneous
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.rank_devices import assign_rank_devices
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.plan.best_first_search import TOP_K, BestFirstSearch, SearchMemory
from meshwright.plan.bounds import LowerBounds
from meshwright.plan.heterogeneous_planner import SearchInputs, balanced_variants, with_axis_orders, with_device_orders
from meshwright.plan.mesh_proposals import MeshProposer
from meshwright.plan.objective import check_objective, complexity_penalty, objective_cost, placement_penalty
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.recompute_planner import choose_mixed_recompute
from meshwright.plan.search_space import Constraints, PartitionCache, candidates, check_constraints, sample_coupling
from meshwright.plan.tuning import tune

_NUM_TOP_PLANS = 12
_MEAN_DEVICE_TOLERANCE = 1.1  # factor by which mean devices, with one kind's links and kernels, may be overestimated
MAX_EXHAUSTIVE_DEVICES = 8  # up to so many devices every legal plan is priced; beyond, bounds select
_MIN_OFFLOAD_GAIN = 0.01  # relative: predictions are not more precise
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
    search_memory: SearchMemory | None = None  # for another search of the same inputs
    best_equal_split: ScoredPlan | None = None  # the best plan with equal shares, on heterogeneous devices

    @property
    def best(self) -> ScoredPlan:
        return self.scored[0]

    @property
    def alternatives(self) -> list[Plan]:
        """The best plan, then the best of every other strategy that fits: what to use where the best cannot be."""
        first: dict[tuple[str, int, bool], Plan] = {}
        for plan in (self.best.plan, *(s.plan for s in self.scored[1:] if s.estimate.fits)):
            first.setdefault((plan.strategy, plan.world, plan.tensor.is_sequence_parallel), plan)
        return list(first.values())

    @property
    def speedup_over_equal(self) -> float | None:
        """Step time of the best plan with equal shares divided by that of the best plan; None on homogeneous devices, or if no equal split fits."""
        equal = self.best_equal_split
        return equal.estimate.step_s / self.best.estimate.step_s if equal is not None and equal.estimate.fits else None

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
    if previous is None and _should_keep_batch_whole(profile, constraints):
        with suppress(RequestError):
            ranking = rank_plans(profile, cluster, workload, calibration, replace(constraints, samples="together"))
            if ranking.best.estimate.fits:
                return ranking
    problem = PlanningProblem(profile, cluster, workload, calibration, constraints)
    ranking = _rank_equal_split(problem, previous)
    if is_heterogeneous(cluster, calibration, constraints.world or len(cluster.devices)):
        ranking = _rank_heterogeneous(problem, ranking, previous)
    if previous is not None or not _is_memory_bound(ranking):
        return ranking
    cost_limit = (1 - _MIN_OFFLOAD_GAIN) * _sort_key(ranking.best, workload, cluster)[1] if ranking.best.estimate.fits else math.inf
    offloading = replace(problem, constraints=replace(constraints, offload="optimizer"))
    other = _rank_equal_split(offloading, ranking, cost_limit, earlier=ranking.search_memory)
    scored = tuple(sorted((*ranking.scored, *other.scored), key=lambda s: _sort_key(s, workload, cluster)))
    notes = ranking.tuning_notes if scored[0] is ranking.best else other.tuning_notes
    considered = ranking.num_considered + other.num_considered if ranking.num_considered else 0
    return replace(ranking, scored=scored, tuning_notes=notes, num_considered=considered)


def _should_keep_batch_whole(profile: ModelProfile, constraints: Constraints) -> bool:
    """Whether samples are compared with each other, and the request leaves it open how a batch is split."""
    is_open = constraints.samples is None and constraints.mesh is None and constraints.zero is None and constraints.micro_batches is None
    return is_open and sample_coupling(profile, constraints).compares_samples


def _rank_heterogeneous(problem: PlanningProblem, ranking: Ranking, previous: Ranking | None) -> Ranking:
    """Add plans with unequal shares (see [Note: heterogeneous shares]). Their seeds are the best plans with equal shares, and the best plans for a
    cluster of mean devices."""
    profile, cluster, workload = problem.profile, problem.cluster, problem.workload
    calibration, constraints = problem.calibration, problem.constraints
    partition_cache = ranking.partition_cache or PartitionCache(profile, workload, constraints)
    inputs = SearchInputs(profile, cluster, workload, calibration, partition_cache)
    seeds, mean, key = _seed_plans(ranking), None, partial(_sort_key, workload=workload, cluster=cluster)
    if not assign_rank_devices(cluster, len(cluster.devices)):
        mean = homogeneous_average(cluster, calibration, workload.precision)
        averaged = PlanningProblem(profile, mean[0], workload, mean[1], constraints)
        others = _seed_plans(_rank_equal_split(averaged, previous, force_bounded=needs_bounded_search(profile, cluster, constraints)))
        seeds += [plan for plan in others if plan not in seeds]

    def price(plan: Plan) -> ScoredPlan:
        return ScoredPlan(plan, problem.estimate(plan))

    def min_step_s(plan: Plan) -> float:
        """Lower bound on a plan's step time with any shares: its time on as many mean devices. 0 for plans on some of the devices, which may be
        faster than the mean."""
        if mean is None or plan.world < len(cluster.devices) or workload.objective == "memory":
            return 0.0
        return estimate(plan, profile, workload, *mean).step_s / _MEAN_DEVICE_TOLERANCE

    def plans_that_fit(plans: list[Plan]) -> list[Plan]:
        """The plans that fit, or else the one closest to fitting: the others need no time estimate."""
        memory = [(plan, estimate(plan, profile, workload, cluster, calibration, with_time=False)) for plan in plans]
        return [plan for plan, need in memory if need.fits] or [min(memory, key=lambda pair: max(pair[1].memory_bytes))[0]]

    def fastest_step_s(scored_plans: list[ScoredPlan]) -> float:
        return min((s.estimate.step_s for s in scored_plans if s.estimate.fits), default=math.inf)

    equal, unequal = list(ranking.scored), list[ScoredPlan]()
    for lower_bound, seed in sorted(((min_step_s(plan), plan) for plan in seeds), key=lambda pair: pair[0]):
        placed = list(with_device_orders(seed, inputs, constraints.reorder))
        if lower_bound <= fastest_step_s(equal):
            equal += map(price, placed)
        if lower_bound <= fastest_step_s([*equal, *unequal]):
            variants = [list(balanced_variants(ordered, inputs)) for plan in placed for ordered in with_axis_orders(plan)]
            unequal += [min(map(price, plans_that_fit(plans)), key=key) for plans in variants if plans]
    scored = sorted([*equal, *unequal], key=key)
    notes = ranking.tuning_notes if scored[0] is ranking.best else ()
    return replace(ranking, scored=tuple(scored), best_equal_split=min(equal, key=key), tuning_notes=notes)


def _seed_plans(ranking: Ranking) -> list[Plan]:
    """The best plans, and the fastest of every strategy and world size."""
    seeds = [*ranking.scored[:_NUM_TOP_PLANS], *_first_of_strategies(ranking.scored)]
    return list({id(s.plan): s.plan for s in seeds}.values())


def _first_of_strategies(scored: Iterable[ScoredPlan]) -> list[ScoredPlan]:
    """The first plan of every strategy and world size."""
    first: dict[tuple[str, int], ScoredPlan] = {}
    for s in scored:
        first.setdefault((s.plan.strategy, s.plan.world), s)
    return list(first.values())


def _is_memory_bound(ranking: Ranking) -> bool:
    best = ranking.best
    saves_memory = not best.estimate.fits or bool(best.plan.memory.recompute_modes)
    return saves_memory and best.plan.device == "cuda" and ranking.constraints.offload is None


def _rank_equal_split(
    problem: PlanningProblem, previous: Ranking | None, cost_limit: float = math.inf, force_bounded: bool = False, earlier: SearchMemory | None = None
) -> Ranking:
    """Rank plans with equal shares. Plans that cost at least `cost_limit` are skipped; `force_bounded` prunes by bounds however few plans there
    are."""
    profile, cluster, workload = problem.profile, problem.cluster, problem.workload
    calibration, constraints = problem.calibration, problem.constraints
    check_objective(workload)
    start_s = time.process_time()
    scored: list[ScoredPlan] = []
    if constraints.mesh is None and (force_bounded or needs_bounded_search(profile, cluster, constraints, previous is not None)):
        check_constraints(constraints, len(cluster.devices))
        search = BestFirstSearch(problem, previous.partition_cache if previous else None, 1 if previous else TOP_K, cost_limit, earlier)
        scored = [ScoredPlan(*priced) for priced in search.search()]
        considered, partition_cache, memory = search.num_considered, search.partition_cache, search.memory
        if not scored and previous is not None:
            return replace(previous, scored=(), num_considered=considered)
    else:
        considered, partition_cache, memory = 0, PartitionCache(profile, workload, constraints), None
        proposer = MeshProposer(cluster, workload, constraints, partition_cache, LowerBounds(problem))
        for plan in candidates(profile, cluster, workload, constraints, partition_cache, proposer.meshes):
            if not (scored and _is_dominated(plan, scored[-1], workload)):
                scored.append(ScoredPlan(plan, problem.estimate(plan)))
            if not scored[-1].estimate.fits and plan.memory.recompute == "none" and constraints.recompute is None and workload.objective != "memory":
                other = choose_mixed_recompute(plan, profile, workload, cluster, calibration)
                scored += [ScoredPlan(other, problem.estimate(other))] if other is not None else []
    scored.sort(key=lambda s: _sort_key(s, workload, cluster))
    best = scored[0]
    plan, tuned, notes = tune(best.plan, best.estimate, constraints, calibration.rates_for(best.plan.world), problem.estimate)
    scored[0] = ScoredPlan(plan, tuned)
    search_s = time.process_time() - start_s
    inputs = (profile, cluster, workload, calibration, constraints)
    return Ranking(tuple(scored), *inputs, notes, considered, search_s, partition_cache, memory)


def needs_bounded_search(profile: ModelProfile, cluster: Cluster, constraints: Constraints, best_only: bool = False) -> bool:
    """Whether there are too many plans to price each one: many devices, a deep model, several kinds of devices (each priced separately), or a
    search for the best plan alone. Jobs that mix CPU and GPU ranks are small, and all their plans are priced."""
    world = constraints.world or len(cluster.devices)
    is_slow = len(profile.layers) > _MANY_LAYERS or len({device.name for device in cluster.devices[:world]}) > 1
    is_too_slow = best_only or (world > MAX_EXHAUSTIVE_DEVICES // 2 and is_slow)
    return world > MAX_EXHAUSTIVE_DEVICES or (is_too_slow and not assign_rank_devices(cluster, world))


def rescore_best(ranking: Ranking, cluster: Cluster, calibration: Calibration, memory_only: bool = False) -> ScoredPlan:
    """The best plan on another cluster, among the top plans here and the fastest and the smallest of every strategy. `memory_only`: the clusters
    differ in memory alone, so step times are kept."""
    fastest = _first_of_strategies(ranking.scored)
    smallest = _first_of_strategies(sorted(ranking.scored, key=lambda s: max(s.estimate.memory_bytes)))
    # Each estimate on a large cluster takes a while.
    near = [*fastest[:2], *smallest[:1]] if ranking.num_considered else [*ranking.scored[:_NUM_TOP_PLANS], *fastest, *smallest]

    def rescore(scored: ScoredPlan) -> ScoredPlan:
        there = estimate(scored.plan, ranking.profile, ranking.workload, cluster, calibration, with_time=not memory_only)
        return ScoredPlan(scored.plan, replace(scored.estimate, fits=there.fits, reason=there.reason) if memory_only else there)

    return min(map(rescore, {id(s.plan): s for s in near}.values()), key=lambda s: _sort_key(s, ranking.workload, cluster))


def _is_dominated(plan: Plan, previous: ScoredPlan, workload: Workload) -> bool:
    """Whether a plan only adds selective recomputation to one that fits without it, which costs time and gains nothing."""
    same = previous.plan.memory.recompute == "none" and replace(previous.plan.memory, recompute="selective") == plan.memory
    return workload.objective == "time" and same and previous.estimate.fits and previous.plan.mesh == plan.mesh


def _sort_key(scored: ScoredPlan, workload: Workload, cluster: Cluster) -> tuple[bool, float]:
    plan, memory = scored.plan, float(max(scored.estimate.memory_bytes))
    if not scored.estimate.fits:
        return True, memory  # closest to fitting first
    if workload.objective == "memory":
        return False, memory
    return False, objective_cost(workload, scored.estimate.step_s, plan.world, memory) * plan_penalty(plan, cluster)


def plan_penalty(plan: Plan, cluster: Cluster) -> float:
    """The factor by which the cost of a plan is multiplied when plans are ranked (see `complexity_penalty` and `placement_penalty`)."""
    stages_per_rank, recomputes = max(len(plan.stages) // plan.mesh.pp, 1), bool(plan.memory.recompute_modes)
    mechanisms = (plan.mesh, plan.memory.zero, plan.micro_batches, plan.tensor.is_sequence_parallel, recomputes, plan.schedule, stages_per_rank)
    return complexity_penalty(*mechanisms) * placement_penalty(plan.mesh, len(cluster.nodes[0].devices))
