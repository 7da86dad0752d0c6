"""The space of legal plans: every combination that `execute` can run on this cluster and that the user's constraints leave open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from typing import get_args

from meshwright.core.backends import backend_for
from meshwright.core.cluster import Cluster
from meshwright.core.compression_policy import Compression
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.expert_policy import ExpertPolicy
from meshwright.core.mesh import Mesh, check_runnable
from meshwright.core.model import ModelProfile
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.plan import BalancePolicy, CompileMode, Offload, Overlap, Plan, Stage, SyncPolicy
from meshwright.core.rank_devices import assign_rank_devices, device_kind
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.routes import Route, routes_for_world
from meshwright.core.sample_coupling import BatchNormMode, SampleCoupling, SampleMeeting, SampleSplit
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.core.tied_parameters import check_tied_parameters
from meshwright.core.workload import Workload
from meshwright.plan.axis_order import alternative_axis_orders
from meshwright.plan.balance import equal_balance
from meshwright.plan.cp_planner import TensorGrid, choose_cp_policies
from meshwright.plan.expert_planner import choose_expert_parallel
from meshwright.plan.memory_planner import RECOMPUTE_MODES, choose_memory
from meshwright.plan.partition import single_stage
from meshwright.plan.pipeline_planner import StageBoundaries, balanced_stages, find_stage_boundaries, reuses_parameters
from meshwright.plan.sample_analysis import find_sample_coupling
from meshwright.plan.search_point import SearchPoint
from meshwright.plan.tensor_planner import check_placements, choose_tensor_grid, reject_if_unsharded


@dataclass(frozen=True)
class Constraints:
    """What the user has fixed; None leaves it to the planner."""

    mesh: Mesh | None = None
    world: int | None = None
    zero: int | None = None
    recompute: RecomputeMode | None = None
    recompute_layers: Mapping[str, RecomputeMode] = field(default_factory=dict)  # by unit name
    offload: Offload | None = None
    compile: CompileMode | None = None
    micro_batches: int | None = None
    backend: str | None = None
    routes: tuple[Route, ...] | None = None  # collective routes other than the backend's own
    nodes: tuple[int, ...] | None = None  # ranks on each node, for routes that distinguish nodes
    compression: Compression | None = None
    allow: tuple[Compression, ...] = ()  # compressions that the planner may choose where they are faster
    compression_rank: int | None = None
    bucket_bytes: int | None = None
    overlap: tuple[Overlap, ...] | None = None
    timeout_s: float | None = None
    schedule: PipelineSchedule | None = None
    placements: Mapping[str, str] = field(default_factory=dict)
    sequence: bool | None = None  # sequence parallelism
    spatial: tuple[int, ...] = ()  # the grid of the cp ranks; empty: as square as possible
    order: tuple[str, ...] = ()  # mesh axes from outermost (farthest apart) to innermost; empty: the planner chooses
    reorder: bool = False  # whether ranks may be assigned to devices in another order: possible before they are started
    samples: SampleSplit | None = None  # whether a batch is kept whole on one data rank and in one micro-batch; None: where samples are compared
    batch_norm: BatchNormMode | None = None
    flow: Dataflow | None = None  # the model's dataflow; without it no tensor parallelism is considered


# Constraints copied by name into a plan's SyncPolicy; routes also depend on the number of ranks (see `_sync_policy`).
_SYNC_FIELDS = {f.name for f in fields(SyncPolicy)} & {f.name for f in fields(Constraints)} - {"routes", "nodes"}
_LEAST_MICRO_BATCH_RATIO = 1.3  # between the numbers of micro-batches that are searched


@dataclass(frozen=True)
class ModelPartition:
    """How one mesh partitions one model: a partial plan with its tensor, context, spatial and expert parallelism, and its pipeline stages."""

    sharding: Plan
    stages: tuple[Stage, ...]


MeshEnumerator = Callable[[int], list[Mesh]]  # world size → meshes in which dp takes all ranks that the other axes leave


def candidates(
    profile: ModelProfile, cluster: Cluster, workload: Workload, constraints: Constraints,
    partition_cache: PartitionCache | None = None, enumerate_meshes: MeshEnumerator | None = None,
) -> Iterator[Plan]:  # fmt: skip
    """Yield the legal plans. If the constraints allow none, raise the first error, which is about the simplest plan and says what to change."""
    check_constraints(constraints, len(cluster.devices))
    first_error: RequestError | None = None
    any_legal = False
    partition_cache = partition_cache or PartitionCache(profile, workload, constraints)
    layouts = mesh_layouts(cluster, constraints, enumerate_meshes or (lambda world: model_parallel_meshes(world, constraints)))
    modes = (constraints.recompute,) if constraints.recompute else RECOMPUTE_MODES
    for mesh, zero in ((ordered, zero) for layout, zero in layouts for ordered in _axis_order_variants(layout, cluster, constraints)):
        for sequence, schedule in product(sequence_parallel_choices(mesh, constraints), schedule_choices(mesh, constraints)):
            try:
                check_runnable(mesh)
                check_sample_split(mesh, constraints)
                partition = partition_cache.partition(mesh, sequence, schedule)
            except RequestError as error:
                first_error = first_error or error
                continue
            if not is_schedule_eligible(schedule, partition.stages, constraints):
                continue
            for micro, recompute in product(micro_batch_counts(workload.global_batch, mesh, constraints), modes):
                point = SearchPoint(mesh, zero, micro, recompute, sequence, schedule)
                try:
                    yield make_plan(profile, cluster, workload, constraints, point, partition)
                    any_legal = True
                except RequestError as error:
                    first_error = first_error or error
    if not any_legal:
        raise first_error or RequestError("no plan is legal here: relax --mesh, --nproc or --set")


def _axis_order_variants(mesh: Mesh, cluster: Cluster, constraints: Constraints) -> Iterator[Mesh]:
    """The mesh in the default axis order and in others; a mesh that the user gave keeps its order."""
    yield mesh
    if constraints.mesh is None:
        yield from alternative_axis_orders(mesh, cluster)


def check_constraints(constraints: Constraints, devices: int) -> None:
    """Raise for constraints that no mesh can satisfy, at once rather than as the reason for leaving out each mesh."""
    mesh, order = constraints.mesh, constraints.order
    if mesh is not None or constraints.flow is None or (constraints.world or devices) == 1:
        refuse_unused(mesh if mesh is not None else Mesh(), constraints.schedule, constraints.placements, constraints.sequence)
    if mesh is not None and Mesh(order=order).order and sum(mesh.degree(axis) > 1 for axis in order) < 2:
        raise RequestError(f"order={','.join(order)} orders the axes of a mesh, and {mesh} has fewer than two of them: leave it out")
    if constraints.flow is not None:
        check_placements(constraints.flow, constraints.placements)
    if constraints.samples == "together" and (constraints.micro_batches or 1) > 1:
        raise RequestError(f"samples=together keeps a batch whole, and micro_batches={constraints.micro_batches} splits it: leave one of them out")
    if constraints.batch_norm == "sync" and constraints.flow is not None and not find_sample_coupling(constraints.flow).batch_norms:
        raise RequestError("batchnorm=sync is for BatchNorm layers that are training, and this model has none: leave it out")
    if constraints.compression_rank is not None and "powersgd" not in (constraints.compression, *constraints.allow):
        raise RequestError(f"compression_rank={constraints.compression_rank} needs powersgd: set compression=powersgd, or leave it out")


def refuse_unused(mesh: Mesh, schedule: str | None, placements: Mapping[str, str], sequence_parallel: bool | None = None) -> None:
    """Raise for a setting that this mesh would ignore."""
    if schedule is not None and mesh.pp == 1:
        raise RequestError(f"schedule={schedule} needs pipeline stages, and mesh {mesh} has none: use --mesh pp=2, or leave it out")
    if placements and mesh.degree("tp") == 1:
        raise RequestError(f"placements need tensor parallelism, and mesh {mesh} has none: use --mesh tp=2, or leave them out")
    if sequence_parallel and mesh.degree("tp") == 1:
        raise RequestError(f"sequence=true needs tensor parallelism, and mesh {mesh} has none: use --mesh tp=2, or leave it out")


def sequence_parallel_choices(mesh: Mesh, constraints: Constraints) -> tuple[bool, ...]:
    """Values of `sequence_parallel` to search: the constraint, or both where the mesh supports it."""
    if constraints.sequence is not None:
        return (constraints.sequence,)
    return (False, True) if len(mesh.tp) == 1 < mesh.degree("tp") and mesh.cp == mesh.ep == 1 else (False,)


def schedule_choices(mesh: Mesh, constraints: Constraints) -> tuple[PipelineSchedule, ...]:
    """Pipeline schedules to search: the constraint, or all whose traits say `searched`."""
    if constraints.schedule is not None or mesh.pp == 1:
        return (constraints.schedule or "1f1b",)
    return tuple(schedule for schedule in get_args(PipelineSchedule) if schedule_traits(schedule).searched)


def is_schedule_eligible(schedule: str, stages: tuple[Stage, ...], constraints: Constraints) -> bool:
    """Whether the planner may choose a schedule by itself. torch splits backward only where each stage passes on one activation that needs
    gradients, and uses each parameter once."""
    if not schedule_traits(schedule).splits_backward or constraints.schedule is not None:
        return True
    passes_one = all(len(s.boundary_activations) == 1 and s.boundary_activations[0].needs_grad for s in stages[1:])
    return passes_one and not (constraints.flow is not None and reuses_parameters(constraints.flow, stages))


UNSHARDED: TensorGrid = (TensorPolicy(), TensorPolicy())


class PartitionCache:
    """Partitions a model for one mesh after another and caches what meshes have in common."""

    def __init__(self, profile: ModelProfile, workload: Workload, constraints: Constraints) -> None:
        self.profile, self.workload, self.constraints = profile, workload, constraints
        self.tensor_grid = cache(self._choose_tensor)
        self._stages = cache(self._choose_stages)
        self._cached_sharding = cache(self._choose_sharding)
        self.expert_policy = cache(lambda ep: choose_expert_parallel(self._require_dataflow(f"ep={ep}: expert parallelism needs"), ep))
        self._chosen_tensor: dict[tuple[int, bool, bool], TensorGrid] = {}
        self._boundaries: dict[tuple[int, int], tuple[TensorGrid, StageBoundaries]] = {}
        self._single_stage = single_stage(profile)

    def partition(self, mesh: Mesh, sequence_parallel: bool, schedule: str = "1f1b", stages_per_rank: int = 0) -> ModelPartition:
        sharding = self.sharding(mesh, sequence_parallel)
        count = mesh.pp * (stages_per_rank or schedule_traits(schedule).stages_per_rank)
        stages = self._stages(count, mesh.tp, mesh.cp, sequence_parallel) if mesh.pp > 1 else self._single_stage
        return ModelPartition(sharding, stages)

    def sharding(self, mesh: Mesh, sequence_parallel: bool) -> Plan:
        """A partial plan that says how ranks shard every layer: tensor, context, spatial and expert parallelism."""
        return self._cached_sharding(Mesh(cp=mesh.cp, ep=mesh.ep, tp=mesh.tp), mesh.pp > 1, sequence_parallel)

    def _choose_sharding(self, mesh: Mesh, pipelined: bool, sequence_parallel: bool) -> Plan:
        grid = self.tensor_grid(mesh.tp, pipelined, sequence_parallel) if mesh.degree("tp") > 1 else UNSHARDED
        (first, second), context, spatial = choose_cp_policies(mesh, self.constraints.flow, grid, self.workload.precision, self.constraints.spatial)
        expert = self.expert_policy(mesh.ep) if mesh.ep > 1 else ExpertPolicy()
        return Plan("", mesh.ep, mesh, tensor=first, tensor_y=second, context=context, spatial=spatial, expert=expert)

    def _require_dataflow(self, requirement: str) -> Dataflow:
        if self.constraints.flow is None:
            raise RequestError(f"{requirement} the model's dataflow, and this model's loss is not known: pass loss_fn")
        return self.constraints.flow

    def _choose_tensor(self, tp_degrees: tuple[int, ...], pipelined: bool, sequence_parallel: bool) -> TensorGrid:
        flow = self._require_dataflow(f"mesh {Mesh(tp=tp_degrees)}: tensor parallelism needs")
        key = (len(tp_degrees), pipelined, sequence_parallel)
        grid = self._chosen_tensor.get(key)
        if grid is not None and all(dim.size >= degree for policy, degree in zip(grid, tp_degrees, strict=False) for dim in policy.sharded_dims):
            return grid  # the choice made for another degree stays the best while every dim has at least one element a rank
        layers = self.profile.layer_names if pipelined else ()
        grid = choose_tensor_grid(flow, tp_degrees, self.constraints.placements, layers, sequence_parallel=sequence_parallel)
        reject_if_unsharded(grid, tp_degrees)
        self._chosen_tensor.setdefault(key, grid)
        return grid

    def _choose_stages(self, count: int, tp_degrees: tuple[int, ...], cp: int, sequence_parallel: bool) -> tuple[Stage, ...]:
        return balanced_stages(self.stage_boundaries(count, tp_degrees, cp, sequence_parallel), self.profile, count)

    def stage_boundaries(self, count: int, tp_degrees: tuple[int, ...], cp: int, sequence_parallel: bool) -> StageBoundaries:
        """The boundaries at which the model can be split into stages."""
        tensor = self.tensor_grid(tp_degrees, True, sequence_parallel) if math.prod(tp_degrees) > 1 else UNSHARDED
        if (id(tensor), cp) not in self._boundaries:
            flow = self._require_dataflow(f"mesh {Mesh(pp=count)}: a pipeline needs")
            self._boundaries[id(tensor), cp] = tensor, find_stage_boundaries(flow, self.profile, *tensor, cp=cp)
        return self._boundaries[id(tensor), cp][1]


def mesh_layouts(cluster: Cluster, constraints: Constraints, enumerate_meshes: MeshEnumerator) -> Iterator[tuple[Mesh, int]]:
    fixed = constraints.zero
    if constraints.mesh is not None:
        mesh = replace(constraints.mesh.canonical(), order=constraints.order or constraints.mesh.order)
        if mesh.shard > constraints.mesh.shard and fixed not in (None, 3):
            depth = f"mesh {constraints.mesh}: the depth of tensor parallelism gathers weights before use, which is zero=3"
            raise RequestError(f"{depth}: leave zero={fixed} out")
        stages = [3] if mesh.shard > constraints.mesh.shard else [1, 2, 3] if mesh.shard > 1 else [0]
        yield from ((mesh, zero) for zero in ([fixed] if fixed is not None else stages))
        return
    for world in world_sizes(len(cluster.devices), constraints):
        for mesh, zero in product(enumerate_meshes(world), (0, 1, 2, 3) if fixed is None else (fixed,)):
            if zero == 0 or (mesh.dp == 1 and fixed is not None):
                yield mesh, zero
            else:
                yield from ((replace(mesh, dp=mesh.dp // shard, shard=shard), zero) for shard in divisors(mesh.dp) if shard > 1)


def model_parallel_meshes(world: int, constraints: Constraints) -> list[Mesh]:
    """Meshes whose pipeline and tensor degrees divide the world size; data parallelism alone without the dataflow. A constraint on the schedule
    requires pp > 1; one on placements or sequence parallelism requires tp > 1."""
    if constraints.flow is None:
        return [Mesh(dp=world, order=constraints.order)]
    min_pp, min_tp = 1 + (constraints.schedule is not None), 1 + bool(constraints.placements or constraints.sequence)
    degrees = [(pp, tp) for pp in divisors(world) for tp in divisors(world // pp) if pp >= min_pp and tp >= min_tp]
    return [Mesh(pp=pp, dp=world // pp // tp, tp=(tp,), order=constraints.order) for pp, tp in degrees]


def world_sizes(devices: int, constraints: Constraints) -> list[int]:
    if constraints.world is not None:
        return [constraints.world]
    return sorted({devices, *(2**k for k in range(devices.bit_length()))})


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def micro_batch_counts(batch: int, mesh: Mesh, constraints: Constraints) -> list[int]:
    """Numbers of micro-batches to search: the constraint, or the divisors of a data rank's share; of those that are close together, the least."""
    if constraints.micro_batches is not None:
        return [constraints.micro_batches]
    if constraints.samples == "together" or constraints.batch_norm == "sync":
        return [1]
    counts: list[int] = []
    for divisor in divisors(max(batch // mesh.data_parallel_size, 1)):
        if not counts or divisor >= _LEAST_MICRO_BATCH_RATIO * counts[-1]:
            counts.append(divisor)
    return counts


def sample_coupling(profile: ModelProfile, constraints: Constraints) -> SampleCoupling:
    """What is known about the samples of a batch: from the dataflow, or else from the model's layers alone."""
    if constraints.flow is not None:
        return find_sample_coupling(constraints.flow)
    norms = tuple(SampleMeeting(name, "batch_norm", "batch_norm", channels) for name, channels in profile.batch_norms)
    return SampleCoupling(norms, "counted" if profile.counted_loss else "unknown")


def check_sample_split(mesh: Mesh, constraints: Constraints) -> None:
    """Raise if a mesh splits a batch that is to be kept whole."""
    if constraints.samples == "together" and mesh.data_parallel_size > 1:
        split = f"mesh {mesh} splits it over {mesh.data_parallel_size} data ranks"
        raise RequestError(f"samples=together keeps a batch whole, and {split}: use --mesh tp={mesh.size}, one device, or samples=apart")


def make_plan(
    profile: ModelProfile, cluster: Cluster, workload: Workload, constraints: Constraints, point: SearchPoint, partition: ModelPartition
) -> Plan:
    """The plan of a point at which all units have the same recompute mode."""
    mesh, world, recompute = point.mesh, point.mesh.size, point.recompute
    assert recompute != "mixed"
    if world > len(cluster.devices):
        raise RequestError(f"mesh {mesh} needs {world} devices, this cluster has {len(cluster.devices)}: use --nproc {len(cluster.devices)} or less")
    device, rank_devices, sharding = cluster.devices[0].kind, assign_rank_devices(cluster, world), partition.sharding
    offload, layer_modes = constraints.offload or "none", constraints.recompute_layers
    # No graph may span a unit whose backward is split in two, or in which the run patches the model's own calls.
    eager = sharding.context.attention_sites or rank_devices or schedule_traits(point.schedule).splits_backward
    plan = replace(
        sharding,
        model=profile.name,
        global_batch=workload.global_batch,
        mesh=mesh,
        micro_batches=point.micro_batches,
        stages=partition.stages,
        schedule=point.schedule,
        memory=choose_memory(profile, cluster, workload.precision, point.zero, recompute, layer_modes, offload),
        sync=_sync_policy(constraints, world),
        balance=equal_balance(workload.global_batch, mesh) if len(set(map(device_kind, rank_devices))) > 1 else BalancePolicy(),
        placements=constraints.placements,
        samples=sample_coupling(profile, constraints),
        batch_norm=constraints.batch_norm or "local",
        compile=constraints.compile or ("none" if eager else default_compile(device, world)),
        device=device,
        rank_devices=rank_devices,
        backend=constraints.backend or backend_for(device, rank_devices),
        threads=cluster.threads_per_rank(world),
    )
    check_tied_parameters(plan, profile.tied_parameters)
    return plan


def _sync_policy(constraints: Constraints, world: int) -> SyncPolicy:
    routes, nodes = routes_for_world(constraints.routes or (), constraints.nodes or (), world)
    fixed = {name: value for name in _SYNC_FIELDS if (value := getattr(constraints, name)) is not None}
    return SyncPolicy(**fixed, routes=routes, ranks_per_node=nodes)


def default_compile(device: str, world: int) -> CompileMode:
    """The compile mode where the user gives none. On GPUs compiling pays off within a minute: the whole model on one device, block by block on
    several so that gradient communication starts early."""
    return "none" if device == "cpu" else "model" if world == 1 else "blocks"
