"""Search among more plans than can be priced one by one: best first, by bounds, until nothing that is left can be better.

[Note: best first]
A point stands for a plan. It waits in a queue under what it costs at least, and is looked at more closely whenever it is the best that is left:
first its kind (mesh and micro-batches) by what it computes, cut into stages if it is a pipeline, then with ZeRO's stage and recomputation by memory
and gradients too, then as the estimate that decides. Every look can only raise the cost. Once `FRONT` estimates are cheaper than all that waits,
they are the best there are: the search has left out nothing that could have been among them (tests compare it with all plans on small clusters).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import Mesh
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.plan import Compile, Plan
from meshwright.plan.amounts import Choice, Layers
from meshwright.plan.axes import Axes
from meshwright.plan.bounds import Bounds
from meshwright.plan.memory import RECOMPUTES
from meshwright.plan.objective import burden, cost
from meshwright.plan.problem import PlanningProblem
from meshwright.plan.recompute import mixed
from meshwright.plan.search_point import SearchPoint, is_basic_mesh
from meshwright.plan.space import Cutter, divisors, make, micro_batches, runs_by_itself, schedules, sequences, worlds

FRONT = 3  # so many of the best are exact
_SMALLEST = 6  # where nothing fits, so many of those that need the least are priced
_OTHERS = 2  # so many plans of other strategies are priced, where the best all have one
_MOST_STAGES = 128
_STAGES_EACH = (4,)  # of a rank, beside the usual number, where a schedule takes any
_KIND, _STAGED_KIND, _PLAN, _STAGED_PLAN = range(4)  # looks

Kinds = Sequence[tuple[float, SearchPoint]]


@dataclass(frozen=True)
class _Found:
    plan: Plan
    estimate: Estimate
    key: float


class Front:
    """One search."""

    def __init__(
        self, problem: PlanningProblem, cutter: Cutter | None = None, front: int = FRONT, below: float = math.inf, kinds: Kinds = ()
    ) -> None:  # fmt: skip
        """What costs at least `below` is not looked for. `kinds` are those that another search of the same inputs has found, which had no more to
        update."""
        self._problem, self._bounds = problem, Bounds(problem)
        self._profile, self._cluster, self._workload, self._wishes = problem.profile, problem.cluster, problem.workload, problem.wishes
        self.cutter = cutter or Cutter(self._profile, self._workload, self._wishes)
        self._axes = Axes(self._cluster, self._workload, self._wishes, self.cutter, self._bounds)
        self._front, self._below = front, below
        self._order = itertools.count()
        self._queue: list[tuple[float, int, int, SearchPoint]] = []
        self._small: list[tuple[float, int, SearchPoint]] = []  # what does not fit, by what it needs at least
        self._reason: RequestError | None = None
        self._ranks: dict[tuple[int, int, tuple[int, ...], bool, str, int], Layers] = {}
        self._spread = cache(lambda mesh, shard: replace(mesh, dp=mesh.dp // shard, shard=shard))
        self._known = kinds
        self.kinds: list[tuple[float, SearchPoint]] = []  # with what each costs at least
        self.considered = 0

    def search(self) -> list[tuple[Plan, Estimate]]:
        """The best plans and their estimates, and whatever else was priced on the way; unsorted. None, where none can cost less than `below`."""
        for least, point in self._known or ((0.0, point) for point in self._kinds()):
            if least < self._below:
                self._push(point, _KIND, least)
        self.kinds = [(least, point) for least, _, _, point in self._queue]
        found: list[_Found] = []
        best: list[float] = []
        while self._queue and self._queue[0][0] < (best[self._front - 1] if len(best) >= self._front else self._below):
            priced = self._looked()
            if priced is None:
                continue
            found.append(priced)
            if priced.estimate.fits:
                best = sorted([*best, priced.key])
        if best and self._front > 1:
            found += self._another(found)
        if not best and self._below == math.inf:
            found += self._nearest()
        if not found and self._below == math.inf:
            raise self._reason or RequestError("no plan is legal here: relax --mesh, --nproc or --set")
        return [(f.plan, f.estimate) for f in found]

    def _looked(self) -> _Found | None:
        """Look more closely at the best that waits: the plan, if that was the last look."""
        least, _, look, point = heapq.heappop(self._queue)
        if look == _KIND:
            for grid in self._axes.grids(point.mesh) if not point.sequence else ():  # computes as much as the line, so its turn comes now
                self._push(replace(point, mesh=grid), _KIND)
        if look in (_KIND, _PLAN) and point.mesh.pp > 1:
            self._push(point, look + 1, least)
        elif look < _PLAN:
            for finer in self._finer(point):
                seconds = self._push(finer, _PLAN, least)
                for other in self._axes.orders(finer, seconds) if seconds is not None else ():
                    self._push(other, _PLAN, least)
        else:
            return self._made(point)
        return None

    def _another(self, found: Sequence[_Found]) -> list[_Found]:
        """A plan of another strategy, where all that were priced have the same: the best of those that bounds put first."""
        known = {(f.plan.strategy, f.plan.world) for f in found if f.estimate.fits}
        tried: list[_Found] = []
        seen = {_sort(f.plan.mesh, f.plan.memory.zero) for f in found}
        while len(known) == 1 and self._queue and len(tried) < _OTHERS:
            if self._queue[0][2] >= _PLAN and _sort(self._queue[0][3].mesh, self._queue[0][3].zero) in seen:
                heapq.heappop(self._queue)
                continue
            priced = self._looked()
            if priced is not None:
                tried.append(priced)
                seen |= {_sort(priced.plan.mesh, priced.plan.memory.zero)}
        return tried

    # -- points --

    def _kinds(self) -> Iterator[SearchPoint]:
        """Meshes without ZeRO, with every number of micro-batches and every schedule; tensor parallelism stays within a node."""
        near = max(len(node.devices) for node in self._cluster.nodes[:1])
        for mesh in self._meshes(near) or self._meshes():
            for sequence in sequences(mesh, self._wishes):
                for micro in micro_batches(self._workload.global_batch, mesh, self._wishes):
                    for schedule, each in self._schedules(mesh, micro):
                        if self._workload.global_batch % (mesh.data_width * micro) == 0:
                            yield SearchPoint(mesh, 0, micro, self._wishes.recompute or "none", sequence, schedule, each)

    def _meshes(self, most: int = 0) -> list[Mesh]:
        """With at most so many tensor-parallel ranks, if a number is given."""
        sizes = worlds(len(self._cluster.devices), self._wishes)
        return [mesh for world in sizes for mesh in self._axes.lines(world, _MOST_STAGES, most or world)]

    def _schedules(self, mesh: Mesh, micro: int) -> Iterator[tuple[PipelineSchedule, int]]:
        """With the number of stages a rank: the shorter they are, the sooner all ranks have something to do, and the more is sent."""
        for schedule in schedules(mesh, self._wishes) if micro >= mesh.pp or self._wishes.schedule is not None else ():
            yield schedule, 0
            if schedule_traits(schedule).any_stages_per_rank and mesh.pp > 1:
                yield from ((schedule, each) for each in _STAGES_EACH if each * mesh.pp <= len(self._profile.layers))

    def _finer(self, kind: SearchPoint) -> Iterator[SearchPoint]:
        """The same with every stage of ZeRO and way to recompute."""
        mesh = kind.mesh
        for zero in (self._wishes.zero,) if self._wishes.zero is not None else (0, 1, 2, 3):
            for shard in self._shards(mesh, zero):
                spread = self._spread(mesh, shard)
                for recompute in self._recomputes():
                    finer = replace(kind, mesh=spread, zero=zero, recompute=recompute)
                    if self._goes(finer):
                        yield finer

    def _recomputes(self) -> tuple[Choice, ...]:
        """As asked. Else what is mixed takes no more time than what all units do alike; it may need more memory."""
        if self._wishes.recompute:
            return (self._wishes.recompute,)
        return RECOMPUTES if self._workload.objective == "memory" else ("none", "mixed")

    def _goes(self, point: SearchPoint) -> bool:
        """False where a plan would refuse itself, as far as that can be told from here."""
        tensor, piped, traits = point.mesh.degree("tp") > 1, point.mesh.pp > 1, schedule_traits(point.schedule)
        if point.recompute == "selective" and tensor and self._compiled(point) != "none":
            return False
        if piped and traits.splits_backward and (point.recompute != "none" or point.zero == 3):
            return False
        if piped and traits.stages_per_rank > 1 and point.zero == 2:
            return False
        return is_basic_mesh(point.mesh) or self._axes.goes(point)

    def _shards(self, mesh: Mesh, zero: int) -> list[int]:
        """Over how many ranks ZeRO may cut: all, or a power of two times a node's."""
        if zero == 0 or mesh.dp == 1:
            return [1] if zero == 0 else []
        near = len(self._cluster.nodes[0].devices)
        return [d for d in divisors(mesh.dp) if d > 1 and (d == mesh.dp or mesh.dp <= near or _power_of_two(d))]

    # -- looks --

    def _compiled(self, point: SearchPoint, cut: Plan | None = None) -> Compile:
        eager = point.mesh.pp > 1 and schedule_traits(point.schedule).splits_backward
        return "none" if eager and self._wishes.compile is None else self._axes.compiled(point.mesh, cut)

    def _push(self, point: SearchPoint, look: int, known: float = 0.0) -> float | None:
        """Into the queue, if it may be legal and fit: the seconds that it takes at least. It costs no less than what is `known` of it."""
        try:
            cut = self.cutter.parts(point.mesh, point.sequence)
        except RequestError as error:
            self._reason = self._reason or error
            return None
        self.considered += look in (_KIND, _PLAN)
        compiled, workload = self._compiled(point, cut), self._workload
        staged, plan = look in (_STAGED_KIND, _STAGED_PLAN), look >= _PLAN
        stages = self._layers(point) if staged else ()
        if staged and not stages:
            return None
        need = self._bounds.memory.bytes(point, cut, compiled, stages) if plan else 0.0
        if plan and need > self._bounds.memory.limit(point):
            heapq.heappush(self._small, (need, next(self._order), point))
            return None
        seconds = self._bounds.seconds(point, cut, compiled, plan, stages)
        least = cost(workload, seconds, point.mesh.size, need) * self._burden(point, point.sequence, point.recompute != "none")
        heapq.heappush(self._queue, (max(least, known), next(self._order), look, point))
        return seconds

    def _layers(self, point: SearchPoint) -> Layers:
        """The layers of each stage; none where the model cannot be cut so, or torch would not run it."""
        key = (point.mesh.pp, point.mesh.cp, point.mesh.tp, point.sequence, point.schedule, point.stages_each)
        if key not in self._ranks:
            try:
                stages = self.cutter.cut(point.mesh, point.sequence, point.schedule, point.stages_each).stages
                stages = stages if runs_by_itself(point.schedule, stages, self._wishes) else ()
            except RequestError as error:
                self._reason, stages = self._reason or error, ()
            self._ranks[key] = tuple(stage.layers for stage in stages)
        return self._ranks[key]

    def _made(self, point: SearchPoint) -> _Found | None:
        """The plan and its estimate; None where it turns out not to be legal."""
        try:
            cuts = self.cutter.cut(point.mesh, point.sequence, point.schedule, point.stages_each)
            alike = replace(point, recompute="none") if point.recompute == "mixed" else point
            plan = make(self._profile, self._cluster, self._workload, self._wishes, alike, cuts)
        except RequestError as error:
            self._reason = self._reason or error
            return None
        if point.recompute == "mixed":
            found = mixed(plan, self._profile, self._workload, self._cluster, self._problem.calibration)
            if found is None:
                heapq.heappush(self._small, (0.0, next(self._order), point))
                return None
            plan = found
        priced, workload = self._problem.estimate(plan), self._workload
        extra = self._burden(point, plan.tensor.sequence, bool(plan.memory.modes))
        return _Found(plan, priced, cost(workload, priced.step_s, plan.world, max(priced.memory_bytes[:1])) * extra)

    def _burden(self, point: SearchPoint, sequence: bool, recomputes: bool) -> float:
        if self._workload.objective == "memory":
            return 1.0
        return burden(point.mesh, point.zero, point.micro_batches, sequence, recomputes, point.schedule, point.order.chunks)

    def _nearest(self) -> list[_Found]:
        """Nothing fits: those that need the least."""
        found: list[_Found] = []
        while self._small and len(found) < (_SMALLEST if self._front > 1 else 1):
            point = heapq.heappop(self._small)[2]
            priced = self._made(replace(point, recompute="full") if point.recompute == "mixed" else point)
            found += [priced] if priced is not None else []
        return found


def _sort(mesh: Mesh, zero: int) -> tuple[object, ...]:
    """What makes a strategy, roughly."""
    return mesh.size, mesh.pp, mesh.cp, mesh.ep, mesh.tp, zero


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
