"""The space of legal plans: every combination that `execute` can run on this cluster and that the user's wishes leave open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import get_args

from meshwright.core.backends import backend_for
from meshwright.core.cluster import Cluster
from meshwright.core.compression import Compression
from meshwright.core.context import ContextPolicy
from meshwright.core.errors import RequestError
from meshwright.core.hybrid import kind_of, places
from meshwright.core.mesh import Mesh, check_runnable
from meshwright.core.model import ModelProfile
from meshwright.core.owners import OwnerPolicy
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.plan import BalancePolicy, Compile, Offload, Overlap, Plan, Stage, SyncPolicy
from meshwright.core.recompute import Recompute
from meshwright.core.routes import Route, for_world
from meshwright.core.spatial import SpatialPolicy
from meshwright.core.strand import Flow
from meshwright.core.tensor import TensorPolicy
from meshwright.core.ties import check_ties
from meshwright.core.workload import Workload
from meshwright.plan.balance import nearly_equal
from meshwright.plan.memory import RECOMPUTES, choose_memory
from meshwright.plan.orders import orders
from meshwright.plan.owners import choose_owners
from meshwright.plan.partition import one_stage
from meshwright.plan.pipeline import Doors, cut_at, find_doors
from meshwright.plan.positions import Grid, share_positions
from meshwright.plan.search_point import SearchPoint
from meshwright.plan.tensor import check_placements, choose_grid, refuse_if_nothing


@dataclass(frozen=True)
class Wishes:
    """What the user has fixed; None leaves it to the planner."""

    mesh: Mesh | None = None
    world: int | None = None
    zero: int | None = None
    recompute: Recompute | None = None
    recompute_layers: Mapping[str, Recompute] = field(default_factory=dict)  # of single units, by name
    offload: Offload | None = None
    compile: Compile | None = None
    micro_batches: int | None = None
    backend: str | None = None
    routes: tuple[Route, ...] | None = None  # other ways than that one's own
    nodes: tuple[int, ...] | None = None  # ranks on each node, where routes tell them apart
    compression: Compression | None = None
    allow: tuple[Compression, ...] = ()  # compressions that may be chosen where they are quicker
    compression_rank: int | None = None
    bucket_bytes: int | None = None
    overlap: tuple[Overlap, ...] | None = None
    timeout_s: float | None = None
    schedule: PipelineSchedule | None = None
    placements: Mapping[str, str] = field(default_factory=dict)
    sequence: bool | None = None  # whether tensor-parallel ranks share positions between cut parts
    spatial: tuple[int, ...] = ()  # the grid of cp's ranks; empty: as square as it goes
    order: tuple[str, ...] = ()  # which axes of the mesh are farthest apart; empty: as is best
    reorder: bool = False  # whether ranks may be on devices in another order than these are in: where they are still to be started
    flow: Flow | None = None  # the model's dataflow; without it no tensor parallelism is considered


# Constraints that a plan's SyncPolicy takes over by name; routes depend on the number of ranks too (see `_sync`).
_SYNC_FIELDS = {f.name for f in fields(SyncPolicy)} & {f.name for f in fields(Wishes)} - {"routes", "nodes"}


@dataclass(frozen=True)
class _Cuts:
    """How a mesh takes one model apart."""

    tensor: Grid
    context: ContextPolicy
    spatial: SpatialPolicy
    owners: OwnerPolicy
    stages: tuple[Stage, ...]


Shapes = Callable[[int], list[Mesh]]  # for so many devices: meshes whose dp is all that the other axes leave


def candidates(
    profile: ModelProfile, cluster: Cluster, workload: Workload, wishes: Wishes, cutter: Cutter | None = None, shapes: Shapes | None = None
) -> Iterator[Plan]:  # fmt: skip
    """Legal plans. If the wishes allow none, the last reason is raised: it says what to change."""
    check_wishes(wishes, len(cluster.devices))
    reason: RequestError | None = None
    found = False
    cutter = cutter or Cutter(profile, workload, wishes)
    every = layouts(cluster, wishes, shapes or (lambda world: model_parallel(world, wishes)))
    for mesh, zero in ((ordered, zero) for found, zero in every for ordered in _ordered(found, cluster, wishes)):
        for sequence in sequences(mesh, wishes):
            for schedule in schedules(mesh, wishes):
                try:
                    check_runnable(mesh)
                    cuts = cutter.cut(mesh, sequence, schedule)
                except RequestError as error:
                    reason = reason or error
                    continue
                for micro in micro_batches(workload.global_batch, mesh, wishes) if runs_by_itself(schedule, cuts.stages, wishes) else ():
                    for recompute in (wishes.recompute,) if wishes.recompute else RECOMPUTES:
                        try:
                            yield make(profile, cluster, workload, wishes, SearchPoint(mesh, zero, micro, recompute, sequence, schedule), cuts)
                            found = True
                        except RequestError as error:
                            reason = reason or error  # the first is about the simplest plan
    if not found:
        raise reason or RequestError("no plan is legal here: relax --mesh, --nproc or --set")


def _ordered(mesh: Mesh, cluster: Cluster, wishes: Wishes) -> Iterator[Mesh]:
    """In the usual order and in others; a mesh that is asked for is as it was asked for."""
    yield mesh
    if wishes.mesh is None:
        yield from orders(mesh, cluster)


def check_wishes(wishes: Wishes, devices: int) -> None:
    """What no mesh could make right is said at once, rather than as the reason why each of them was left out."""
    if wishes.mesh is not None:
        refuse_unused(wishes.mesh, wishes.schedule, wishes.placements, wishes.sequence)
    elif wishes.flow is None or (wishes.world or devices) == 1:
        refuse_unused(Mesh(), wishes.schedule, wishes.placements, wishes.sequence)
    if wishes.mesh is not None and Mesh(order=wishes.order).order and sum(wishes.mesh.degree(axis) > 1 for axis in wishes.order) < 2:
        raise RequestError(f"order={','.join(wishes.order)} is for axes that a mesh has, and {wishes.mesh} has fewer than two of them: leave it out")
    if wishes.flow is not None:
        check_placements(wishes.flow, wishes.placements)
    if wishes.compression_rank is not None and "powersgd" not in (wishes.compression, *wishes.allow):
        raise RequestError(f"compression_rank={wishes.compression_rank} is powersgd's: set compression=powersgd, or leave it out")


def refuse_unused(mesh: Mesh, schedule: str | None, placements: Mapping[str, str], sequence: bool | None = None) -> None:
    """Nothing that a user asks for is ignored."""
    if schedule is not None and mesh.pp == 1:
        raise RequestError(f"schedule={schedule} orders a pipeline's micro-batches, and mesh {mesh} has none: use --mesh pp=2, or leave it out")
    if placements and mesh.degree("tp") == 1:
        raise RequestError(f"placements say how tensor parallelism cuts layers, and mesh {mesh} has none: use --mesh tp=2, or leave them out")
    if sequence and mesh.degree("tp") == 1:
        raise RequestError(f"sequence=true is for tensor-parallel ranks, and mesh {mesh} has none: use --mesh tp=2, or leave it out")


def sequences(mesh: Mesh, wishes: Wishes) -> tuple[bool, ...]:
    """Whether to share positions between cut parts: as asked, or both ways where it may be of use."""
    if wishes.sequence is not None:
        return (wishes.sequence,)
    return (False, True) if len(mesh.tp) == 1 < mesh.degree("tp") and mesh.cp == mesh.ep == 1 else (False,)


def schedules(mesh: Mesh, wishes: Wishes) -> tuple[PipelineSchedule, ...]:
    """In which orders a pipeline may go: as asked, or all that are worth a search."""
    if wishes.schedule is not None or mesh.pp == 1:
        return (wishes.schedule or "1f1b",)
    return tuple(schedule for schedule in get_args(PipelineSchedule) if schedule_traits(schedule).searched)


def runs_by_itself(schedule: str, stages: tuple[Stage, ...], wishes: Wishes) -> bool:
    """Whether a schedule may be chosen unasked. torch splits backward where each stage hands on one learned value."""
    if not schedule_traits(schedule).splits_backward or wishes.schedule is not None:
        return True
    return all(len(s.receives) == 1 and s.receives[0].returns for s in stages[1:])


WHOLE: Grid = (TensorPolicy(), TensorPolicy())


class Cutter:
    """Takes a model apart for one mesh after another; what several of them share is reasoned out once."""

    def __init__(self, profile: ModelProfile, workload: Workload, wishes: Wishes) -> None:
        self.profile, self.workload, self.wishes = profile, workload, wishes
        self.tensor = cache(self._choose_tensor)
        self._stages = cache(self._choose_stages)
        self._parts = cache(self._choose_parts)
        self.owners = cache(lambda ep: choose_owners(self._flow(f"ep={ep}: owners need"), ep))
        self._chosen: dict[tuple[int, bool, bool], Grid] = {}
        self._doors: dict[tuple[int, int], tuple[Grid, Doors]] = {}
        self._whole = one_stage(profile)

    def cut(self, mesh: Mesh, sequence: bool, schedule: str = "1f1b", stages_each: int = 0) -> _Cuts:
        parts = self.parts(mesh, sequence)
        count = mesh.pp * (stages_each or schedule_traits(schedule).stages_per_rank)
        stages = self._stages(count, mesh.tp, mesh.cp, sequence) if mesh.pp > 1 else self._whole
        return _Cuts((parts.tensor, parts.across), parts.context, parts.spatial, parts.owners, stages)

    def parts(self, mesh: Mesh, sequence: bool) -> Plan:
        """As much of a plan as says what a rank has of every layer: tensor parallelism, shared positions, owners."""
        return self._parts(Mesh(cp=mesh.cp, ep=mesh.ep, tp=mesh.tp), mesh.pp > 1, sequence)

    def _choose_parts(self, mesh: Mesh, piped: bool, sequence: bool) -> Plan:
        grid = self.tensor(mesh.tp, piped, sequence) if mesh.degree("tp") > 1 else WHOLE
        (tensor, across), context, spatial = share_positions(mesh, self.wishes.flow, grid, self.workload.precision, self.wishes.spatial)
        owners = self.owners(mesh.ep) if mesh.ep > 1 else OwnerPolicy()
        return Plan("", mesh.ep, mesh, tensor=tensor, across=across, context=context, spatial=spatial, owners=owners)

    def _flow(self, who: str) -> Flow:
        if self.wishes.flow is None:
            raise RequestError(f"{who} the model's dataflow, and this model's loss is not known: pass loss_fn")
        return self.wishes.flow

    def _choose_tensor(self, ways: tuple[int, ...], piped: bool, sequence: bool) -> Grid:
        flow = self._flow(f"mesh {Mesh(tp=ways)}: tensor parallelism needs")
        known = self._chosen.get((len(ways), piped, sequence))
        if known is not None and all(strand.size >= n for policy, n in zip(known, ways, strict=False) for strand in policy.strands):
            return known  # what fewer ranks chose goes over these too, and nothing else was better
        found = choose_grid(flow, ways, self.wishes.placements, self.profile.layer_names if piped else (), sequence=sequence)
        refuse_if_nothing(found, ways)
        self._chosen.setdefault((len(ways), piped, sequence), found)
        return found

    def _choose_stages(self, count: int, ways: tuple[int, ...], cp: int, sequence: bool) -> tuple[Stage, ...]:
        return cut_at(self.doors(count, ways, cp, sequence), self.profile, count)

    def doors(self, count: int, ways: tuple[int, ...], cp: int, sequence: bool) -> Doors:
        """Where the model can be cut into stages."""
        tensor = self.tensor(ways, True, sequence) if math.prod(ways) > 1 else WHOLE
        if (id(tensor), cp) not in self._doors:
            flow = self._flow(f"mesh {Mesh(pp=count)}: a pipeline needs")
            self._doors[id(tensor), cp] = tensor, find_doors(flow, self.profile, *tensor, cp=cp)
        return self._doors[id(tensor), cp][1]


def layouts(cluster: Cluster, wishes: Wishes, shapes: Shapes) -> Iterator[tuple[Mesh, int]]:
    if wishes.mesh is not None:
        mesh = replace(wishes.mesh.flattened(), order=wishes.order or wishes.mesh.order)
        if mesh.shard > wishes.mesh.shard and wishes.zero not in (None, 3):
            depth = f"mesh {wishes.mesh}: the depth of tensor parallelism gathers weights before use, which is zero=3"
            raise RequestError(f"{depth}: leave zero={wishes.zero} out")
        every = [3] if mesh.shard > wishes.mesh.shard else [1, 2, 3] if mesh.shard > 1 else [0]
        yield from ((mesh, zero) for zero in ([wishes.zero] if wishes.zero is not None else every))
        return
    for world in worlds(len(cluster.devices), wishes):
        for mesh in shapes(world):
            for zero in (wishes.zero,) if wishes.zero is not None else (0, 1, 2, 3):
                if zero == 0:
                    yield mesh, 0
                elif mesh.dp == 1:
                    if wishes.zero is not None:
                        yield mesh, zero
                else:
                    yield from ((replace(mesh, dp=mesh.dp // shard, shard=shard), zero) for shard in divisors(mesh.dp) if shard > 1)


def model_parallel(world: int, wishes: Wishes) -> list[Mesh]:
    """Degrees of pipeline and tensor parallelism that divide the world; without the dataflow, none. Who asks for a schedule asks for a
    pipeline, and who places layers for tensor parallelism."""
    if wishes.flow is None:
        return [Mesh(dp=world, order=wishes.order)]
    every = [(pp, ways) for pp in divisors(world) for ways in divisors(world // pp)]
    tensor = bool(wishes.placements or wishes.sequence)
    wanted = [(pp, ways) for pp, ways in every if (pp > 1 or wishes.schedule is None) and (ways > 1 or not tensor)]
    return [Mesh(pp=pp, dp=world // pp // ways, tp=(ways,), order=wishes.order) for pp, ways in wanted]


def worlds(devices: int, wishes: Wishes) -> list[int]:
    if wishes.world is not None:
        return [wishes.world]
    return sorted({1, devices, *(2**k for k in range(1, devices.bit_length()) if 2**k <= devices)})


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def micro_batches(batch: int, mesh: Mesh, wishes: Wishes) -> list[int]:
    if wishes.micro_batches is not None:
        return [wishes.micro_batches]
    share = max(batch // mesh.data_width, 1)
    return [2**k for k in range(share.bit_length()) if share % 2**k == 0] or [1]


def make(profile: ModelProfile, cluster: Cluster, workload: Workload, wishes: Wishes, point: SearchPoint, cuts: _Cuts) -> Plan:
    """The plan of a point at which all units recompute alike."""
    mesh, world, recompute = point.mesh, point.mesh.size, point.recompute
    assert recompute != "mixed"
    if world > len(cluster.devices):
        raise RequestError(f"mesh {mesh} needs {world} devices, this cluster has {len(cluster.devices)}: use --nproc {len(cluster.devices)} or less")
    device, where = cluster.devices[0].kind, places(cluster, world)
    plan = Plan(
        model=profile.name,
        global_batch=workload.global_batch,
        mesh=mesh,
        micro_batches=point.micro_batches,
        stages=cuts.stages,
        schedule=point.schedule,
        memory=choose_memory(profile, cluster, workload.precision, point.zero, recompute, wishes.recompute_layers, wishes.offload or "none"),
        sync=_sync(wishes, world),
        balance=nearly_equal(workload.global_batch, mesh) if len(set(map(kind_of, where))) > 1 else BalancePolicy(),
        placements=wishes.placements,
        tensor=cuts.tensor[0],
        across=cuts.tensor[1],
        context=cuts.context,
        spatial=cuts.spatial,
        owners=cuts.owners,
        compile=_compile(wishes, device, world, cuts.context.attends or where or schedule_traits(point.schedule).splits_backward),
        device=device,
        places=where,
        backend=wishes.backend or backend_for(device, where),
        threads=cluster.threads(world),
    )
    check_ties(plan, profile.tied)
    return plan


def _sync(wishes: Wishes, world: int) -> SyncPolicy:
    routes, nodes = for_world(wishes.routes or (), wishes.nodes or (), world)
    told = {name: value for name in _SYNC_FIELDS if (value := getattr(wishes, name)) is not None}
    return SyncPolicy(**told, routes=routes, nodes=nodes)


def _compile(wishes: Wishes, device: str, world: int, eager: object) -> Compile:
    """`eager` where no graph may span a unit: its backward is cut in two, or it works on the model's own calls."""
    return wishes.compile if wishes.compile is not None else "none" if eager else default_compile(device, world)


def default_compile(device: str, world: int) -> Compile:
    """On GPUs compiling pays within a minute; the whole model on one, block by block on several so that gradients leave early."""
    if device == "cpu":
        return "none"
    return "model" if world == 1 else "blocks"
