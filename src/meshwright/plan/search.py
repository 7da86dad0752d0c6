"""Search: price every legal plan and rank them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.collector import uncollected
from meshwright.core.estimate import Estimate
from meshwright.core.hybrid import places
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.unlike import are_unlike, average
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.plan.axes import Axes
from meshwright.plan.bounds import Bounds
from meshwright.plan.front import FRONT, Front, Kinds
from meshwright.plan.objective import burden, check_objective, cost
from meshwright.plan.problem import PlanningProblem
from meshwright.plan.recompute import mixed
from meshwright.plan.space import Cutter, Wishes, candidates, check_wishes
from meshwright.plan.tuning import tune
from meshwright.plan.uneven import Inputs, dealt_out, reseated, turned

_NEAR_THE_FRONT = 12
_ABOUT = 1.1  # times as long as on unlike devices a plan may be said to take on mean ones, whose links and kernels are one kind's
EXHAUSTIVE = 8  # devices up to which every legal plan is priced; beyond, bounds choose what is
_DEEP = 24  # layers from which that would take minutes on as few


@dataclass(frozen=True)
class Scored:
    """A plan and what it would cost."""

    plan: Plan
    estimate: Estimate


@dataclass(frozen=True)
class Ranking:
    """All legal plans, best first, and the inputs they were judged on, so that `explain` can ask what would change the choice."""

    scored: tuple[Scored, ...]
    profile: ModelProfile
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    wishes: Wishes
    tuned: tuple[str, ...] = ()  # what of the best plan was chosen after it, and why
    considered: int = 0  # plans that were weighed by bounds, where not all of them were priced
    took_s: float = 0.0  # computing time of the search
    cutter: Cutter | None = None  # how it takes the model apart: another search of the same model need not find out again
    kinds: Kinds = ()  # what was weighed by bounds first, with what each costs at least
    equal: Scored | None = None  # the best plan that deals everything out equally, where devices are not alike

    @property
    def best(self) -> Scored:
        return self.scored[0]

    @property
    def gain(self) -> float | None:
        """How many times as long a step takes with the best plan that deals everything out equally; None where devices are alike or none fits."""
        return self.equal.estimate.step_s / self.best.estimate.step_s if self.equal is not None and self.equal.estimate.fits else None

    @property
    def runner_up(self) -> Scored | None:
        """The best plan of another strategy or world size: the next of the same kind would teach nothing."""
        first = self.best.plan
        return next((s for s in self.scored[1:] if (s.plan.strategy, s.plan.world) != (first.strategy, first.world)), None)


@uncollected
def rank_plans(
    profile: ModelProfile, cluster: Cluster, workload: Workload, calibration: Calibration, wishes: Wishes,
    like: Ranking | None = None,
) -> Ranking:  # fmt: skip
    """Every legal plan with its estimate; those that fit first, then by the workload's objective. On a large cluster the best, and those that
    were looked at on the way: `like` is a ranking of the same model under the same wishes, after which the best alone is asked for.

    States in host memory cost time and free nothing but memory, so they are weighed where that binds."""
    found = _ranked(PlanningProblem(profile, cluster, workload, calibration, wishes), like)
    if are_unlike(cluster, calibration, wishes.world or len(cluster.devices)):
        found = _unequal(found, like)
    if like is not None or not _short_of_memory(found):
        return found
    below = _key(found.best, workload)[1] if found.best.estimate.fits else math.inf
    offloading = PlanningProblem(profile, cluster, workload, calibration, replace(wishes, offload="optimizer"))
    other = _ranked(offloading, found, below, kinds=found.kinds)
    scored = tuple(sorted((*found.scored, *other.scored), key=lambda s: _key(s, workload)))
    tuned = found.tuned if scored[0] is found.best else other.tuned
    return replace(found, scored=scored, tuned=tuned, considered=found.considered + other.considered)


def _unequal(ranking: Ranking, like: Ranking | None) -> Ranking:
    """The same, with parts for unlike devices (see [Note: parts for unlike devices]) of the plans that are good when dealt out equally, and of those
    that would be good if all devices were like the mean one."""
    cluster, workload, calibration, wishes = ranking.cluster, ranking.workload, ranking.calibration, ranking.wishes
    inputs = Inputs(ranking.profile, cluster, workload, calibration, ranking.cutter or Cutter(ranking.profile, workload, wishes))
    seeds, mean = _good(ranking), None
    if not places(cluster, len(cluster.devices)):
        mean = average(cluster, calibration, workload.precision)
        averaged = PlanningProblem(ranking.profile, mean[0], workload, mean[1], wishes)
        others = _good(_ranked(averaged, like, bounded=many(ranking.profile, cluster, wishes)))
        seeds += [plan for plan in others if plan not in seeds]

    def price(plan: Plan) -> Scored:
        return Scored(plan, estimate(plan, ranking.profile, workload, cluster, calibration))

    def key(scored: Scored) -> tuple[bool, float]:
        return _key(scored, workload)

    def least(plan: Plan) -> float:
        """No parts make it quicker than it would be on as many mean devices; some devices alone may be quicker than those."""
        if mean is None or plan.world < len(cluster.devices) or workload.objective == "memory":
            return 0.0
        return estimate(plan, ranking.profile, workload, *mean).step_s / _ABOUT

    def fitting(plans: list[Plan]) -> list[Plan]:
        """Those that fit, or the one that comes nearest to it: the others need not be timed."""
        rough = [(plan, estimate(plan, ranking.profile, workload, cluster, calibration, timed=False)) for plan in plans]
        return [plan for plan, found in rough if found.fits] or [min(rough, key=lambda pair: max(pair[1].memory_bytes))[0]]

    def quickest(found: list[Scored]) -> float:
        return min((s.estimate.step_s for s in found if s.estimate.fits), default=math.inf)

    equal, dealt = list(ranking.scored), list[Scored]()
    for seconds, plan in sorted(((least(plan), plan) for plan in seeds), key=lambda pair: pair[0]):
        seated = list(reseated(plan, inputs, wishes.reorder))
        if seconds <= quickest(equal):
            equal += map(price, seated)
        if seconds <= quickest([*equal, *dealt]):
            parts = (list(dealt_out(other, inputs)) for seat in seated for other in turned(seat))
            dealt += [min(map(price, fitting(every)), key=key) for every in parts if every]
    scored = sorted([*equal, *dealt], key=key)
    return replace(ranking, scored=tuple(scored), equal=min(equal, key=key), tuned=ranking.tuned if scored[0] is ranking.best else ())


def _good(ranking: Ranking) -> list[Plan]:
    """The best, and the quickest of every strategy on every number of ranks."""
    first: dict[tuple[str, int], Plan] = {}
    for scored in ranking.scored:
        first.setdefault((scored.plan.strategy, scored.plan.world), scored.plan)
    found = [*(s.plan for s in ranking.scored[:_NEAR_THE_FRONT]), *first.values()]
    return list({id(plan): plan for plan in found}.values())


def _short_of_memory(ranking: Ranking) -> bool:
    best = ranking.best
    saving = not best.estimate.fits or bool(best.plan.memory.modes)
    return saving and best.plan.device == "cuda" and ranking.wishes.offload is None


def _ranked(problem: PlanningProblem, like: Ranking | None, below: float = math.inf, bounded: bool = False, kinds: Kinds = ()) -> Ranking:
    """What costs at least `below` need not be looked at; `bounded`: nor what bounds leave out, however few plans there are."""
    profile, cluster, workload, calibration, wishes = problem.profile, problem.cluster, problem.workload, problem.calibration, problem.wishes
    check_objective(workload)
    begun = time.process_time()
    scored: list[Scored] = []
    if wishes.mesh is None and (bounded or many(profile, cluster, wishes, like is not None)):
        check_wishes(wishes, len(cluster.devices))
        search = Front(problem, like.cutter if like else None, 1 if like else FRONT, below, kinds)
        scored = [Scored(*found) for found in search.search()]
        considered, cutter, kinds = search.considered, search.cutter, search.kinds
        if not scored and like is not None:
            return replace(like, scored=(), considered=considered)
    else:
        considered, cutter, kinds = 0, Cutter(profile, workload, wishes), ()
        axes = Axes(cluster, workload, wishes, cutter, Bounds(problem))
        for plan in candidates(profile, cluster, workload, wishes, cutter, axes.shapes):
            if not (scored and _pointless(plan, scored[-1], workload)):
                scored.append(Scored(plan, problem.estimate(plan)))
            if not scored[-1].estimate.fits and plan.memory.recompute == "none" and wishes.recompute is None and workload.objective != "memory":
                other = mixed(plan, profile, workload, cluster, calibration)
                scored += [Scored(other, problem.estimate(other))] if other is not None else []
    scored.sort(key=lambda s: _key(s, workload))
    best = scored[0]
    tuned = tune(best.plan, best.estimate, wishes, calibration.layout(best.plan.world), problem.estimate)
    scored[0] = Scored(tuned.plan, tuned.estimate)
    took_s = time.process_time() - begun
    return Ranking(tuple(scored), profile, cluster, workload, calibration, wishes, tuned.said, considered, took_s, cutter, kinds)


def many(profile: ModelProfile, cluster: Cluster, wishes: Wishes, again: bool = False) -> bool:
    """Whether there are more plans than are priced one by one: because there are many, because the model is deep or devices have several kinds,
    each with a price of its own, or because the best alone is asked for. Jobs on CPUs beside GPUs are small, and priced plan by plan."""
    world = wishes.world or len(cluster.devices)
    dear = len(profile.layers) > _DEEP or len({device.name for device in cluster.devices[:world]}) > 1
    return world > EXHAUSTIVE or ((again or (world > EXHAUSTIVE // 2 and dear)) and not places(cluster, world))


def best_again(ranking: Ranking, cluster: Cluster, calibration: Calibration, as_quick: bool = False) -> Scored:
    """The best plan on another machine, among those that were near the front here and, of every strategy, the quickest and the smallest. One that
    is `as_quick` has another memory alone."""
    quickest: dict[tuple[str, int], Scored] = {}
    smallest: dict[tuple[str, int], Scored] = {}
    for found, order in ((quickest, ranking.scored), (smallest, sorted(ranking.scored, key=lambda s: max(s.estimate.memory_bytes)))):
        for scored in order:
            found.setdefault((scored.plan.strategy, scored.plan.world), scored)
    near = (*ranking.scored[:_NEAR_THE_FRONT], *quickest.values(), *smallest.values())
    if ranking.considered:  # of a large cluster's plans each takes a while
        near = (*list(quickest.values())[:2], *list(smallest.values())[:1])

    def priced(scored: Scored) -> Scored:
        found = estimate(scored.plan, ranking.profile, ranking.workload, cluster, calibration, timed=not as_quick)
        return Scored(scored.plan, replace(scored.estimate, fits=found.fits, reason=found.reason) if as_quick else found)

    return min(map(priced, {id(s.plan): s for s in near}.values()), key=lambda s: _key(s, ranking.workload))


def _pointless(plan: Plan, before: Scored, workload: Workload) -> bool:
    """Where a plan fits that keeps everything, recomputing a part only costs time."""
    same = before.plan.memory.recompute == "none" and replace(before.plan.memory, recompute="selective") == plan.memory
    return workload.objective == "time" and same and before.estimate.fits and before.plan.mesh == plan.mesh


def _key(scored: Scored, workload: Workload) -> tuple[bool, float]:
    found, plan = scored.estimate, scored.plan
    memory = float(max(found.memory_bytes))
    if not found.fits:
        return True, memory  # nearest to fitting first
    if workload.objective == "memory":
        return False, memory
    each = max(len(plan.stages) // plan.mesh.pp, 1)
    extra = burden(plan.mesh, plan.memory.zero, plan.micro_batches, plan.tensor.sequence, bool(plan.memory.modes), plan.schedule, each)
    return False, cost(workload, found.step_s, plan.world, memory) * extra
