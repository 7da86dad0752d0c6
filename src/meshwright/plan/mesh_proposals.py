"""Proposes meshes for a model, batch and cluster: data, pipeline and 1D tensor parallelism, and where they may pay, 2D tensor, expert and context
parallelism.

[Note: mesh pruning]
An axis is proposed where the dataflow allows it and a bound says that it may gain something, so that models and batches which have no use for it
are planned as quickly as without it.
- 2D tensor parallelism computes the same as 1D. It is proposed where its collectives take less time.
- Expert parallelism (experts or embedding tables) keeps less on each rank and sends tokens instead of gradients. It is proposed wherever a model
  has experts or tables to shard.
- Context and spatial parallelism compute the same as data parallelism, and add collectives at attention (or halo exchanges). They are proposed
  where there are fewer samples than replicas, with the smallest sufficient degree and the next, and where one sample does not fit on a device even
  with full recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import CompileMode, MemoryPolicy, Plan
from meshwright.core.workload import Workload
from meshwright.plan.axis_order import alternative_axis_orders
from meshwright.plan.bounds import LowerBounds
from meshwright.plan.partition import choose_units
from meshwright.plan.search_point import SearchPoint
from meshwright.plan.search_space import Constraints, PartitionCache, default_compile, divisors, model_parallel_meshes

_MIN_ORDER_GAIN = 0.02  # relative: predictions are not more precise
_MANY_DEVICES = 512  # above so many devices, cp is proposed only for meshes of all devices
_MIN_GRID_SHARE = 0.05  # of the compute: where 1D collectives take less, a 2D mesh gains nothing


class MeshProposer:
    """Proposes meshes for one model, batch and cluster."""

    def __init__(self, cluster: Cluster, workload: Workload, constraints: Constraints, partition_cache: PartitionCache, bounds: LowerBounds) -> None:
        self._device, self._batch, self._constraints, self._partition_cache, self._bounds = (
            cluster.devices[0].kind,
            workload.global_batch,
            constraints,
            partition_cache,
            bounds,
        )
        self._units, self._is_large = choose_units(partition_cache.profile), len(cluster.devices) > _MANY_DEVICES
        self._world = constraints.world or len(cluster.devices)
        self._rejected: set[tuple[int, int, tuple[int, ...], bool]] = set()
        self._is_multi_node = len(cluster.nodes) > 1
        self._memory = cache(lambda zero, recompute: MemoryPolicy(zero, self._units, recompute))
        self._axis_orders = cache(lambda mesh: tuple(alternative_axis_orders(mesh, cluster)))
        self._better_orders: dict[SearchPoint, tuple[Mesh, ...]] = {}
        self._max_ep_degree = self._find_max_ep_degree()

    def meshes(self, world: int) -> list[Mesh]:
        """Meshes of `world` ranks in which dp takes all that the other axes leave; 1D tensor parallelism first."""
        lines = self.meshes_1d_tensor(world, world, world)
        return [*lines, *(grid for mesh in lines for grid in self.meshes_2d_tensor(mesh))]

    def meshes_1d_tensor(self, world: int, max_stages: int, max_tensor_degree: int) -> list[Mesh]:
        """The same without 2D tensor parallelism."""
        every = model_parallel_meshes(world, self._constraints)
        plain = [mesh for mesh in every if mesh.pp <= max_stages and mesh.degree("tp") <= max_tensor_degree]
        if self._constraints.flow is None or self._constraints.sequence:
            return plain
        owned = [*plain, *(found for mesh in plain for found in self._expert_meshes(mesh))]
        shared = owned if world == self._world or not self._is_large else ()
        return [*owned, *(found for mesh in shared for found in self._context_meshes(mesh))]

    def compile_mode(self, mesh: Mesh, sharding: Plan | None = None) -> CompileMode:
        """The compile mode: as asked, or as `make_plan` sets it."""
        usual: CompileMode = "none" if sharding is not None and sharding.context.attention_sites else default_compile(self._device, mesh.size)
        return self._constraints.compile or usual

    def is_legal(self, point: SearchPoint) -> bool:
        """Whether a plan at this point is legal, as far as that is known before its stages are cut."""
        cut = self._sharding_or_none(point.mesh)
        if cut is None:
            return False
        try:
            recompute = "full" if point.recompute == "mixed" else point.recompute
            memory = self._memory(point.zero, recompute)
            how = {
                "mesh": point.mesh,
                "micro_batches": point.micro_batches,
                "schedule": point.schedule,
                "compile": self.compile_mode(point.mesh, cut),
            }
            replace(cut, global_batch=self._batch, memory=memory, device=self._device, **how)  # type: ignore[arg-type]
        except RequestError:
            return False
        return True

    def _sharding_or_none(self, mesh: Mesh) -> Plan | None:
        """Which part of the model a rank of the mesh holds; None where the model cannot be sharded so. Refusals are cached, as they take as long
        to find."""
        key = (mesh.cp, mesh.ep, mesh.tp, mesh.pp > 1)
        if key in self._rejected:
            return None
        try:
            cut = self._partition_cache.sharding(mesh, False)
            return cut if mesh.pp == 1 or not (cut.spatial.grid or cut.expert.tables) else None
        except RequestError:
            self._rejected.add(key)
            return None

    def _point(self, mesh: Mesh, zero: int = 0, samples: int = 0) -> SearchPoint:
        """A point of the mesh, with `samples` in a micro-batch, or with a single micro-batch."""
        share = max(self._batch // mesh.data_parallel_size, 1)
        return SearchPoint(mesh, zero, max(share // samples, 1) if samples else 1, "none")

    def reordered_points(self, point: SearchPoint, seconds: float) -> Iterator[SearchPoint]:
        """The same point with other axis orders that take less communication time; `seconds` is the bound of the point itself."""
        if self._is_multi_node and not point.mesh.order:
            key = replace(point, recompute="none")  # recomputation does not change what a single collective sends
            if key not in self._better_orders:
                self._better_orders[key] = tuple(self._find_better_orders(point, seconds))
            yield from (replace(point, mesh=mesh) for mesh in self._better_orders[key])

    def _find_better_orders(self, point: SearchPoint, seconds: float) -> Iterator[Mesh]:
        others = self._axis_orders(point.mesh)
        if not others:
            return
        cut = self._partition_cache.sharding(point.mesh, point.sequence_parallel)
        compiled, now = self.compile_mode(point.mesh, cut), seconds + self._bounds.comm.pipeline_seconds(point, cut)
        if now < (1 + _MIN_ORDER_GAIN) * self._bounds.seconds(point, cut, compiled, with_communication=False):
            return
        for mesh in others:
            other = replace(point, mesh=mesh)
            if self._bounds.seconds(other, cut, compiled) + self._bounds.comm.pipeline_seconds(other, cut) < (1 - _MIN_ORDER_GAIN) * now:
                yield mesh

    # -- 2D tensor parallelism --

    def meshes_2d_tensor(self, mesh_1d: Mesh) -> Iterator[Mesh]:
        """2D tensor meshes of the same degree whose collectives take less time."""
        ways = mesh_1d.degree("tp")
        sides = [side for side in divisors(ways) if 1 < side < ways] if len(mesh_1d.tp) == 1 and not self._constraints.sequence else []
        plain = self._sharding_or_none(mesh_1d) if sides and self._batch >= mesh_1d.data_parallel_size else None
        if plain is None:
            return
        each = [self._point(mesh_1d), self._point(mesh_1d, samples=1)]
        work = [self._bounds.seconds(point, plain, self.compile_mode(mesh_1d), with_communication=False) for point in each]
        before = [self._bounds.comm.layer_seconds(point, plain) for point in each]
        if all(met < _MIN_GRID_SHARE * worked for met, worked in zip(before, work, strict=True)):
            return
        for side in sides:
            grid = replace(mesh_1d, tp=(side, ways // side))
            cut = self._sharding_or_none(grid)
            after = [self._bounds.comm.layer_seconds(replace(point, mesh=grid), cut) for point in each] if cut is not None else before
            if any(new < old for new, old in zip(after, before, strict=True)):
                yield grid

    # -- expert parallelism --

    def _find_max_ep_degree(self) -> int:
        """The largest ep degree: each rank holds at least one expert of every MoE layer, or one embedding table."""
        try:
            owned = self._partition_cache.expert_policy(1) if self._constraints.flow is not None else None
        except RequestError:
            return 1
        return min((m.num_experts for m in owned.moe_layers), default=len(owned.tables)) if owned else 1

    def _expert_meshes(self, mesh: Mesh) -> Iterator[Mesh]:
        for ep in divisors(mesh.dp) if self._max_ep_degree > 1 else ():
            found = replace(mesh, dp=mesh.dp // ep, ep=ep)
            if 1 < ep <= self._max_ep_degree and self._sharding_or_none(found) is not None:
                yield found

    # -- context parallelism --

    def _context_meshes(self, mesh: Mesh) -> Iterator[Mesh]:
        ways = [cp for cp in divisors(mesh.dp) if cp > 1]
        enough = [cp for cp in ways if self._batch % (mesh.data_parallel_size // cp) == 0 and self._batch >= mesh.data_parallel_size // cp * mesh.pp]
        few = self._batch < mesh.data_parallel_size
        tried = enough[:2] if few else []
        if not (few and tried[:1] == ways[:1]):
            tried += [cp for cp in self._cp_degrees_until_fit(mesh, enough) if cp not in tried]
        yield from (found for cp in tried if self._sharding_or_none(found := replace(mesh, dp=mesh.dp // cp, cp=cp)) is not None)

    def _cp_degrees_until_fit(self, mesh: Mesh, cp_degrees: list[int]) -> Iterator[int]:
        """Yield the cp degrees up to the first at which a sample fits with full recomputation, and the next, since only a lower bound has fitted;
        none where a sample fits without cp."""
        fitted = False
        for cp in (1, *cp_degrees):
            spread = replace(mesh, dp=1, shard=mesh.dp // cp, cp=cp)
            cut = self._sharding_or_none(spread)
            if cut is None:
                return
            if cp > 1:
                yield cp
            if fitted:
                return
            how = replace(self._point(spread, 3, 1), recompute=self._constraints.recompute or "full")
            fitted = self._bounds.memory.fits(how, cut, self.compile_mode(spread, cut))
            if fitted and cp == 1:
                return
