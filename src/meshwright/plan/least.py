"""The plan that needs the least memory: whether anything fits at all, and what would make it fit, follow from this one.

What keeps more is left out (micro-batches are one, or as many as there are samples; ZeRO cuts over all ranks), so there is far less to look at than
in a search for the fastest. Points are priced in the order of what they need at least (`plan/bounds.py`), until nothing that is left can need less.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.hybrid import places
from meshwright.core.model import ModelProfile
from meshwright.core.recompute import Recompute
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.plan.amounts import Layers
from meshwright.plan.axes import Axes
from meshwright.plan.bounds import Bounds
from meshwright.plan.problem import PlanningProblem
from meshwright.plan.search import Scored, many, rank_plans
from meshwright.plan.search_point import SearchPoint
from meshwright.plan.space import Cutter, Wishes, divisors, make, micro_batches, sequences, worlds

_SMALL: tuple[Recompute, ...] = ("full", "selective", "none")  # which keeps less depends on what a block's products give


class Least:
    """Asks for one model and workload under one set of wishes; `cutter` may come from another search of the model. Meshes are those that a search
    weighs."""

    def __init__(self, profile: ModelProfile, workload: Workload, calibration: Calibration, wishes: Wishes, cutter: Cutter | None = None) -> None:
        self._profile, self._workload, self._calibration, self._wishes = profile, workload, calibration, wishes
        self.cutter = cutter or Cutter(profile, workload, wishes)
        self._known: dict[tuple[int, int], Scored | None] = {}  # by number of ranks, and the memory of the smallest device

    def on(self, cluster: Cluster, most: bool = False) -> Scored | None:
        """The plan for this cluster that needs the least memory on its largest rank; None where no plan is legal. With `most`, among those that use
        (nearly) all devices: the more there are, the less each holds."""
        if self._wishes.mesh is not None or places(cluster, len(cluster.devices)):
            return self._of_all(cluster)
        found = [
            best for world in worlds(len(cluster.devices), self._wishes)[-2 if most else 0 :] if (best := self._with(cluster, world)) is not None
        ]
        return min(found, key=_rank, default=None)

    def fits(self, cluster: Cluster) -> bool:
        found = self.on(cluster, most=True)
        return found is not None and found.estimate.fits

    @property
    def total(self) -> float:
        """Bytes of parameters and gradients, which all devices together must hold whatever the plan."""
        return 2.0 * sum(t.bytes for t in self._profile.tensors if t.trainable)

    def _lean(self, cluster: Cluster) -> tuple[Wishes, ...]:
        """The wishes, and the same with states in host memory where that is not the device's own and nobody minds."""
        if self._wishes.offload is not None or cluster.devices[0].kind != "cuda":
            return (self._wishes,)
        return self._wishes, replace(self._wishes, offload="optimizer")

    def _of_all(self, cluster: Cluster) -> Scored | None:
        """Where the mesh is given, or ranks are not alike, there are few plans."""
        try:
            return rank_plans(self._profile, cluster, replace(self._workload, objective="memory"), self._calibration, self._wishes).best
        except RequestError:
            return None

    def _with(self, cluster: Cluster, world: int) -> Scored | None:
        if world > len(cluster.devices):
            return None
        key = (world, cluster.least_memory(world))
        if key not in self._known:
            found = [self._search(cluster, world, wishes) for wishes in self._lean(cluster)]
            self._known[key] = min((s for s in found if s is not None), key=_rank, default=None)
        return self._known[key]

    def _search(self, cluster: Cluster, world: int, wishes: Wishes) -> Scored | None:
        bounds = Bounds(PlanningProblem(self._profile, cluster, self._workload, self._calibration, wishes))
        axes = Axes(cluster, self._workload, wishes, self.cutter, bounds)
        queue: list[tuple[float, int, bool, SearchPoint]] = []

        def push(number: int, point: SearchPoint, stages: Layers = ()) -> None:
            try:
                cut = self.cutter.parts(point.mesh, point.sequence)
            except RequestError:
                return
            heapq.heappush(queue, (bounds.memory.bytes(point, cut, axes.compiled(point.mesh, cut), stages), number, bool(stages), point))

        for number, point in enumerate(self._points(cluster, world, axes)):
            push(number, point)
        best: Scored | None = None
        while queue and (best is None or queue[0][0] < _need(best)):
            _, number, looked, point = heapq.heappop(queue)
            if point.mesh.pp > 1 and not looked:
                push(number, point, self._layers(point))
                continue
            found = self._made(cluster, point, wishes)
            best = min((s for s in (best, found) if s is not None), key=_need, default=None)
        return best

    def _layers(self, point: SearchPoint) -> Layers:
        """The layers of each stage; of a model that cannot be cut so, any: it is refused when it is made."""
        try:
            return tuple(stage.layers for stage in self.cutter.cut(point.mesh, point.sequence, point.schedule).stages)
        except RequestError:
            return (self._profile.layer_names,) * point.mesh.pp * point.order.chunks

    def _points(self, cluster: Cluster, world: int, axes: Axes) -> Iterator[SearchPoint]:
        """Of all meshes that a search would weigh."""
        wishes = self._wishes
        near = len(cluster.nodes[0].devices) if many(self._profile, cluster, replace(wishes, world=world)) else world
        lines = axes.lines(world, world, near)
        for wide in (*lines, *(grid for mesh in lines for grid in axes.grids(mesh))):
            for sequence in sequences(wide, wishes):
                counts = micro_batches(self._workload.global_batch, wide, wishes)
                for micro in dict.fromkeys((counts[-1], counts[0])):  # small ones, or one for which no gradients are kept
                    for zero in (wishes.zero,) if wishes.zero is not None else (0, 1, 2, 3):
                        shards = [d for d in divisors(wide.dp) if d > 1] if zero and wide.dp > 1 else [1]
                        for shard in shards[-1:]:  # cut over all, each holds the least
                            if (zero > 0) == (shard > 1) or world == 1:
                                mesh = replace(wide, dp=wide.dp // shard, shard=shard)
                                for recompute in (wishes.recompute,) if wishes.recompute else _SMALL:
                                    yield SearchPoint(mesh, zero, micro, recompute, sequence, wishes.schedule or "1f1b")

    def _made(self, cluster: Cluster, point: SearchPoint, wishes: Wishes) -> Scored | None:
        try:
            cuts = self.cutter.cut(point.mesh, point.sequence, point.schedule)
            plan = make(self._profile, cluster, self._workload, wishes, point, cuts)
        except RequestError:
            return None
        return Scored(plan, estimate(plan, self._profile, self._workload, cluster, self._calibration, timed=False))


def _rank(scored: Scored) -> tuple[bool, int]:
    return not scored.estimate.fits, _need(scored)


def _need(scored: Scored) -> int:
    return max(scored.estimate.memory_bytes)
