"""Proposes meshes for a model, batch and cluster: data, pipeline and 1D tensor parallelism, and where they may pay, 2D tensor, expert and context
parallelism.

[Note: mesh pruning]
An axis is proposed where the dataflow allows it and a bound says that it may gain something, so that models and batches without use for it are
planned as quickly as before.
- 2D tensor parallelism computes the same as 1D. It is proposed where its collectives take less time; on many devices only for groups that
  leave their node, since inside one the links are fast and it adds collectives.
- Expert parallelism (experts or embedding tables) stores less on each rank and sends tokens instead of gradients. It is proposed wherever a model
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
_MANY_DEVICES = 512  # above this number, cp is proposed only for meshes of all devices
_MIN_GRID_SHARE = 0.05  # of the compute: where 1D collectives take less, a 2D mesh gains nothing


class MeshProposer:
    """Proposes meshes for one model, batch and cluster."""

    def __init__(self, cluster: Cluster, workload: Workload, constraints: Constraints, partition_cache: PartitionCache, bounds: LowerBounds) -> None:
        self._device, self._batch, self._constraints = cluster.devices[0].kind, workload.global_batch, constraints
        self._partition_cache, self._bounds = partition_cache, bounds
        self._units, self._is_large = choose_units(partition_cache.profile), len(cluster.devices) > _MANY_DEVICES
        self._world, self._node_size = constraints.world or len(cluster.devices), len(cluster.nodes[0].devices)
        self._rejected: set[tuple[int, int, tuple[int, ...], bool]] = set()
        self._is_multi_node = len(cluster.nodes) > 1
        self._memory = cache(lambda zero, recompute: MemoryPolicy(zero, self._units, recompute))
        self._axis_orders = cache(lambda mesh: tuple(alternative_axis_orders(mesh, cluster)))
        self._better_orders: dict[SearchPoint, tuple[Mesh, ...]] = {}
        self._max_ep_degree = self._find_max_ep_degree()

    def meshes(self, world: int, max_tensor_degree: int = 0) -> list[Mesh]:
        """Meshes of `world` ranks in which dp has the degree that the other axes leave; 1D tensor parallelism first."""
        meshes_1d = self.meshes_1d_tensor(world, world, max_tensor_degree or world)
        return [*meshes_1d, *(mesh for mesh_1d in meshes_1d for mesh in self.meshes_2d_tensor(mesh_1d))]

    def meshes_1d_tensor(self, world: int, max_stages: int, max_tensor_degree: int) -> list[Mesh]:
        """The same without 2D tensor parallelism."""
        meshes = self._all_meshes_1d(world, max_stages, max_tensor_degree)
        whole = [m for m in meshes if m.data_parallel_size == 1]
        return whole or meshes[:1] if self._constraints.samples == "together" else meshes  # the first is refused, with the reason

    def _all_meshes_1d(self, world: int, max_stages: int, max_tensor_degree: int) -> list[Mesh]:
        meshes = [m for m in model_parallel_meshes(world, self._constraints) if m.pp <= max_stages and m.degree("tp") <= max_tensor_degree]
        if self._constraints.flow is None or self._constraints.sequence:
            return meshes
        meshes += [expert for mesh in meshes for expert in self._expert_meshes(mesh)]
        return meshes + [m for mesh in meshes for m in self._context_meshes(mesh)] if world == self._world or not self._is_large else meshes

    def compile_mode(self, mesh: Mesh, sharding: Plan | None = None) -> CompileMode:
        """The requested compile mode, or the one that `make_plan` sets."""
        default: CompileMode = "none" if sharding is not None and sharding.context.attention_sites else default_compile(self._device, mesh.size)
        return self._constraints.compile or default

    def is_legal(self, point: SearchPoint) -> bool:
        """Whether a plan at this point is legal, as far as that is known before its stages are chosen."""
        sharding = self._sharding_or_none(point.mesh)
        if sharding is None:
            return False
        try:
            memory = self._memory(point.zero, "full" if point.recompute == "mixed" else point.recompute)
            replace(
                sharding,
                mesh=point.mesh,
                global_batch=self._batch,
                memory=memory,
                device=self._device,
                micro_batches=point.micro_batches,
                schedule=point.schedule,
                compile=self.compile_mode(point.mesh, sharding),
            )
        except RequestError:
            return False
        return True

    def _sharding_or_none(self, mesh: Mesh) -> Plan | None:
        """Which shard of the model a rank of the mesh holds; None if the model cannot be sharded so. Refusals are cached: they take as long to
        find."""
        key = (mesh.cp, mesh.ep, mesh.tp, mesh.pp > 1)
        if key in self._rejected:
            return None
        try:
            sharding = self._partition_cache.sharding(mesh, False)
            return sharding if mesh.pp == 1 or not (sharding.spatial.grid or sharding.expert.tables) else None
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
            key = replace(point, recompute="none")  # recomputation does not change the bytes of a collective
            if key not in self._better_orders:
                self._better_orders[key] = tuple(self._find_better_orders(point, seconds))
            yield from (replace(point, mesh=mesh) for mesh in self._better_orders[key])

    def _find_better_orders(self, point: SearchPoint, seconds: float) -> Iterator[Mesh]:
        others = self._axis_orders(point.mesh)
        if not others:
            return
        bounds, sharding = self._bounds, self._partition_cache.sharding(point.mesh, point.sequence_parallel)
        compile_mode, default = self.compile_mode(point.mesh, sharding), seconds + bounds.comm.pipeline_seconds(point, sharding)
        if default < (1 + _MIN_ORDER_GAIN) * bounds.seconds(point, sharding, compile_mode, with_communication=False):
            return
        for mesh in others:
            other = replace(point, mesh=mesh)
            if bounds.seconds(other, sharding, compile_mode) + bounds.comm.pipeline_seconds(other, sharding) < (1 - _MIN_ORDER_GAIN) * default:
                yield mesh

    # -- 2D tensor parallelism --

    def meshes_2d_tensor(self, mesh_1d: Mesh) -> Iterator[Mesh]:
        """2D tensor meshes of the same degree whose collectives take less time."""
        degree = mesh_1d.degree("tp")
        if self._is_large and self._is_multi_node and degree <= self._node_size:
            return
        sides = [side for side in divisors(degree) if 1 < side < degree] if len(mesh_1d.tp) == 1 and not self._constraints.sequence else []
        sharding_1d = self._sharding_or_none(mesh_1d) if sides and self._batch >= mesh_1d.data_parallel_size else None
        if sharding_1d is None:
            return
        points = [self._point(mesh_1d), self._point(mesh_1d, samples=1)]
        compute = [self._bounds.seconds(point, sharding_1d, self.compile_mode(mesh_1d), with_communication=False) for point in points]
        comm_1d = [self._bounds.comm.layer_seconds(point, sharding_1d) for point in points]
        if all(comm < _MIN_GRID_SHARE * seconds for comm, seconds in zip(comm_1d, compute, strict=True)):
            return
        for side in sides:
            mesh = replace(mesh_1d, tp=(side, degree // side))
            sharding = self._sharding_or_none(mesh)
            comm_2d = [self._bounds.comm.layer_seconds(replace(point, mesh=mesh), sharding) for point in points] if sharding is not None else comm_1d
            if any(new < old for new, old in zip(comm_2d, comm_1d, strict=True)):
                yield mesh

    # -- expert parallelism --

    def _find_max_ep_degree(self) -> int:
        """The largest ep degree: each rank holds at least one expert of every MoE layer, or one embedding table."""
        try:
            policy = self._partition_cache.expert_policy(1) if self._constraints.flow is not None else None
        except RequestError:
            return 1
        return min((m.num_experts for m in policy.moe_layers), default=len(policy.tables)) if policy else 1

    def _expert_meshes(self, mesh: Mesh) -> Iterator[Mesh]:
        for ep in divisors(mesh.dp) if self._max_ep_degree > 1 else ():
            if 1 < ep <= self._max_ep_degree and self._sharding_or_none(expert := replace(mesh, dp=mesh.dp // ep, ep=ep)) is not None:
                yield expert

    # -- context parallelism --

    def _context_meshes(self, mesh: Mesh) -> Iterator[Mesh]:
        batch, replicas = self._batch, mesh.data_parallel_size
        degrees = [cp for cp in divisors(mesh.dp) if cp > 1]
        sufficient = [cp for cp in degrees if batch % (replicas // cp) == 0 and batch >= replicas // cp * mesh.pp]
        too_few_samples = batch < replicas
        proposed = sufficient[:2] if too_few_samples else []
        if not (too_few_samples and proposed[:1] == degrees[:1]):
            proposed += [cp for cp in self._cp_degrees_until_fit(mesh, sufficient) if cp not in proposed]
        yield from (context for cp in proposed if self._sharding_or_none(context := replace(mesh, dp=mesh.dp // cp, cp=cp)) is not None)

    def _cp_degrees_until_fit(self, mesh: Mesh, cp_degrees: list[int]) -> Iterator[int]:
        """Yield the cp degrees up to the first at which a sample fits with full recomputation, and the next, since that was only a lower bound;
        none if a sample fits without cp."""
        fits = False
        for cp in (1, *cp_degrees):
            sharded = replace(mesh, dp=1, shard=mesh.dp // cp, cp=cp)
            sharding = self._sharding_or_none(sharded)
            if sharding is None:
                return
            if cp > 1:
                yield cp
            if fits:
                return
            point = replace(self._point(sharded, 3, 1), recompute=self._constraints.recompute or "full")
            fits = self._bounds.memory.fits(point, sharding, self.compile_mode(sharded, sharding))
            if fits and cp == 1:
                return
