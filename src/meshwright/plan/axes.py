"""Which axes beside data, ZeRO, pipelines and lines of tensor-parallel ranks are worth weighing: grids, owners, shared positions.

[Note: worth weighing]
An axis is proposed where the dataflow allows it and a bound says that it may gain something, so that models and batches which have no use for it
are planned as quickly as without it.
- A grid of tensor-parallel ranks computes what a line of them does. It is weighed where its meetings take less time than the line's.
- Owners of experts or tables keep less and send tokens instead of gradients. They are weighed wherever something can be owned.
- Ranks that share positions compute what replicas do, and meet at attention (or at borders) besides. They are weighed where there are fewer samples
  than replicas, in as few pieces as that takes and in twice as many, and where one sample does not fit into a device even if all is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Compile, MemoryPolicy, Plan
from meshwright.core.workload import Workload
from meshwright.plan.bounds import Bounds
from meshwright.plan.orders import orders
from meshwright.plan.partition import choose_units
from meshwright.plan.search_point import SearchPoint
from meshwright.plan.space import Cutter, Wishes, default_compile, divisors, model_parallel

_WORTH_AN_ORDER = 0.02  # relatively: predictions are not finer
_MANY = 512  # devices from which on some share positions only if all of them do
_WORTH_A_GRID = 0.05  # of the work: where a line's meetings take less, nothing is to be had from a better shape


class Axes:
    """The shapes of meshes for one model, batch and cluster."""

    def __init__(self, cluster: Cluster, workload: Workload, wishes: Wishes, cutter: Cutter, bounds: Bounds) -> None:
        self._device, self._batch, self._wishes, self._cutter, self._bounds = cluster.devices[0].kind, workload.global_batch, wishes, cutter, bounds
        self._units, self._many = choose_units(cutter.profile), len(cluster.devices) > _MANY
        self._world = wishes.world or len(cluster.devices)
        self._refused: set[tuple[int, int, tuple[int, ...], bool]] = set()
        self._several = len(cluster.nodes) > 1
        self._memory = cache(lambda zero, recompute: MemoryPolicy(zero, self._units, recompute))
        self._ordered = cache(lambda mesh: tuple(orders(mesh, cluster)))
        self._better: dict[SearchPoint, tuple[Mesh, ...]] = {}
        self._most_owners = self._count_owners()

    def shapes(self, world: int) -> list[Mesh]:
        """Meshes of so many devices whose dp is all that the other axes leave; the plain ones first."""
        lines = self.lines(world, world, world)
        return [*lines, *(grid for mesh in lines for grid in self.grids(mesh))]

    def lines(self, world: int, most_stages: int, most_tensor: int) -> list[Mesh]:
        """The same with lines of tensor-parallel ranks only."""
        every = model_parallel(world, self._wishes)
        plain = [mesh for mesh in every if mesh.pp <= most_stages and mesh.degree("tp") <= most_tensor]
        if self._wishes.flow is None or self._wishes.sequence:
            return plain
        owned = [*plain, *(found for mesh in plain for found in self._owners(mesh))]
        shared = owned if world == self._world or not self._many else ()
        return [*owned, *(found for mesh in shared for found in self._positions(mesh))]

    def compiled(self, mesh: Mesh, cut: Plan | None = None) -> Compile:
        """As asked, or else as `make` has it."""
        usual: Compile = "none" if cut is not None and cut.context.attends else default_compile(self._device, mesh.size)
        return self._wishes.compile or usual

    def goes(self, point: SearchPoint) -> bool:
        """Whether a plan of this kind is legal, as far as that can be told before its stages are cut."""
        cut = self._cut(point.mesh)
        if cut is None:
            return False
        try:
            recompute = "full" if point.recompute == "mixed" else point.recompute
            memory = self._memory(point.zero, recompute)
            how = {"mesh": point.mesh, "micro_batches": point.micro_batches, "schedule": point.schedule, "compile": self.compiled(point.mesh, cut)}
            replace(cut, global_batch=self._batch, memory=memory, device=self._device, **how)  # type: ignore[arg-type]
        except RequestError:
            return False
        return True

    def _cut(self, mesh: Mesh) -> Plan | None:
        """What ranks of such a mesh have of the model; None where the model cannot be taken apart so. Refusals are as dear to find as cuts."""
        key = (mesh.cp, mesh.ep, mesh.tp, mesh.pp > 1)
        if key in self._refused:
            return None
        try:
            cut = self._cutter.parts(mesh, False)
            return cut if mesh.pp == 1 or not (cut.spatial.grid or cut.owners.tables) else None
        except RequestError:
            self._refused.add(key)
            return None

    def _at(self, mesh: Mesh, zero: int = 0, samples: int = 0) -> SearchPoint:
        """A step of a mesh, with so many samples in a micro-batch, or with all of them in one."""
        share = max(self._batch // mesh.data_width, 1)
        return SearchPoint(mesh, zero, max(share // samples, 1) if samples else 1, "none")

    def orders(self, point: SearchPoint, seconds: float) -> Iterator[SearchPoint]:
        """The same plan with other axes next to each other, where that takes less of what its ranks send; `seconds` is its own bound."""
        if self._several and not point.mesh.order:
            key = replace(point, recompute="none")  # which changes nothing of what they send to each other in one go
            if key not in self._better:
                self._better[key] = tuple(self._reordered(point, seconds))
            yield from (replace(point, mesh=mesh) for mesh in self._better[key])

    def _reordered(self, point: SearchPoint, seconds: float) -> Iterator[Mesh]:
        others = self._ordered(point.mesh)
        if not others:
            return
        cut = self._cutter.parts(point.mesh, point.sequence)
        compiled, now = self.compiled(point.mesh, cut), seconds + self._bounds.comm.pipeline_seconds(point, cut)
        if now < (1 + _WORTH_AN_ORDER) * self._bounds.seconds(point, cut, compiled, travel=False):
            return
        for mesh in others:
            other = replace(point, mesh=mesh)
            if self._bounds.seconds(other, cut, compiled) + self._bounds.comm.pipeline_seconds(other, cut) < (1 - _WORTH_AN_ORDER) * now:
                yield mesh

    # -- grids --

    def grids(self, line: Mesh) -> Iterator[Mesh]:
        """Grids of as many tensor-parallel ranks whose meetings take less time."""
        ways = line.degree("tp")
        sides = [side for side in divisors(ways) if 1 < side < ways] if len(line.tp) == 1 and not self._wishes.sequence else []
        plain = self._cut(line) if sides and self._batch >= line.data_width else None
        if plain is None:
            return
        each = [self._at(line), self._at(line, samples=1)]
        work = [self._bounds.seconds(point, plain, self.compiled(line), travel=False) for point in each]
        before = [self._bounds.comm.layer_seconds(point, plain) for point in each]
        if all(met < _WORTH_A_GRID * worked for met, worked in zip(before, work, strict=True)):
            return
        for side in sides:
            grid = replace(line, tp=(side, ways // side))
            cut = self._cut(grid)
            after = [self._bounds.comm.layer_seconds(replace(point, mesh=grid), cut) for point in each] if cut is not None else before
            if any(new < old for new, old in zip(after, before, strict=True)):
                yield grid

    # -- owners --

    def _count_owners(self) -> int:
        """How many there can be at most: each has an expert of every mixture, or a table."""
        try:
            owned = self._cutter.owners(1) if self._wishes.flow is not None else None
        except RequestError:
            return 1
        return min((m.experts for m in owned.mixtures), default=len(owned.tables)) if owned else 1

    def _owners(self, mesh: Mesh) -> Iterator[Mesh]:
        for ep in divisors(mesh.dp) if self._most_owners > 1 else ():
            found = replace(mesh, dp=mesh.dp // ep, ep=ep)
            if 1 < ep <= self._most_owners and self._cut(found) is not None:
                yield found

    # -- positions --

    def _positions(self, mesh: Mesh) -> Iterator[Mesh]:
        ways = [cp for cp in divisors(mesh.dp) if cp > 1]
        enough = [cp for cp in ways if self._batch % (mesh.data_width // cp) == 0 and self._batch >= mesh.data_width // cp * mesh.pp]
        few = self._batch < mesh.data_width
        tried = enough[:2] if few else []
        if not (few and tried[:1] == ways[:1]):
            tried += [cp for cp in self._until_it_fits(mesh, enough) if cp not in tried]
        yield from (found for cp in tried if self._cut(found := replace(mesh, dp=mesh.dp // cp, cp=cp)) is not None)

    def _until_it_fits(self, mesh: Mesh, ways: list[int]) -> Iterator[int]:
        """Numbers of pieces up to the first in which a sample fits with all that may be computed again, and the next, for it was a bound that
        fitted; none where it fits as it is."""
        fitted = False
        for cp in (1, *ways):
            spread = replace(mesh, dp=1, shard=mesh.dp // cp, cp=cp)
            cut = self._cut(spread)
            if cut is None:
                return
            if cp > 1:
                yield cp
            if fitted:
                return
            how = replace(self._at(spread, 3, 1), recompute=self._wishes.recompute or "full")
            fitted = self._bounds.memory.fits(how, cut, self.compiled(spread, cut))
            if fitted and cp == 1:
                return
