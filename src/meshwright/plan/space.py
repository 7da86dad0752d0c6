"""The space of legal plans: every combination that `execute` can run on this cluster and that the user's wishes leave open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.core.cluster import Cluster
from meshwright.core.context import ContextPolicy
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh, check_runnable
from meshwright.core.model import ModelProfile
from meshwright.core.owners import OwnerPolicy
from meshwright.core.plan import BalancePolicy, Compile, Overlap, PipelineSchedule, Plan, Stage, SyncPolicy, stages_a_rank
from meshwright.core.recompute import Recompute
from meshwright.core.spatial import SpatialPolicy
from meshwright.core.strand import Flow
from meshwright.core.tensor import TensorPolicy
from meshwright.core.workload import Workload
from meshwright.plan.memory import RECOMPUTES, choose_memory
from meshwright.plan.owners import choose_owners
from meshwright.plan.partition import one_stage
from meshwright.plan.pipeline import cut_stages
from meshwright.plan.positions import Grid, share_positions
from meshwright.plan.tensor import check_placements, choose_grid, refuse_if_nothing


@dataclass(frozen=True)
class Wishes:
    """What the user has fixed; None leaves it to the planner."""

    mesh: Mesh | None = None
    world: int | None = None
    zero: int | None = None
    recompute: Recompute | None = None
    recompute_layers: Mapping[str, Recompute] = field(default_factory=dict)  # of single units, by name
    compile: Compile | None = None
    micro_batches: int | None = None
    backend: str | None = None
    bucket_bytes: int | None = None
    overlap: tuple[Overlap, ...] | None = None
    timeout_s: float | None = None
    schedule: PipelineSchedule | None = None
    placements: Mapping[str, str] = field(default_factory=dict)
    spatial: tuple[int, ...] = ()  # the grid of cp's ranks; empty: as square as it goes
    flow: Flow | None = None  # the model's dataflow; without it no tensor parallelism is considered


def candidates(profile: ModelProfile, cluster: Cluster, workload: Workload, wishes: Wishes) -> Iterator[Plan]:
    """Legal plans. If the wishes allow none, the last reason is raised: it says what to change."""
    _check(wishes, len(cluster.devices))
    reason: RequestError | None = None
    found = False
    cuts: dict[tuple[tuple[int, ...], bool], Grid] = {}
    pieces: dict[tuple[int, tuple[int, ...]], tuple[Stage, ...]] = {}
    for mesh, zero in _layouts(cluster, wishes):
        try:
            check_runnable(mesh)
            tensor = _tensor(profile, mesh, wishes, cuts)
            tensor, context, spatial = share_positions(mesh, wishes.flow, tensor, workload.precision, wishes.spatial)
            owners = _owners(mesh, wishes)
            schedule = wishes.schedule or "1f1b"
            stages = _stages(profile, mesh, schedule, wishes, tensor, pieces)
        except RequestError as error:
            reason = reason or error
            continue
        for micro in _micro_batches(workload.global_batch, mesh, wishes):
            for recompute in (wishes.recompute,) if wishes.recompute else RECOMPUTES:
                try:
                    yield _make(profile, cluster, workload, wishes, mesh, zero, micro, recompute, tensor, context, spatial, owners, stages, schedule)
                    found = True
                except RequestError as error:
                    reason = reason or error  # the first is about the simplest plan
    if not found:
        raise reason or RequestError("no plan is legal here: relax --mesh, --nproc or --set")


def _check(wishes: Wishes, devices: int) -> None:
    """What no mesh could make right is said at once, rather than as the reason why each of them was left out."""
    if wishes.mesh is not None:
        refuse_unused(wishes.mesh, wishes.schedule, wishes.placements)
    elif wishes.flow is None or (wishes.world or devices) == 1:
        refuse_unused(Mesh(), wishes.schedule, wishes.placements)
    if wishes.flow is not None:
        check_placements(wishes.flow, wishes.placements)


def refuse_unused(mesh: Mesh, schedule: str | None, placements: Mapping[str, str]) -> None:
    """Nothing that a user asks for is ignored."""
    if schedule is not None and mesh.pp == 1:
        raise RequestError(f"schedule={schedule} orders a pipeline's micro-batches, and mesh {mesh} has none: use --mesh pp=2, or leave it out")
    if placements and mesh.degree("tp") == 1:
        raise RequestError(f"placements say how tensor parallelism cuts layers, and mesh {mesh} has none: use --mesh tp=2, or leave them out")


def _tensor(profile: ModelProfile, mesh: Mesh, wishes: Wishes, made: dict[tuple[tuple[int, ...], bool], Grid]) -> Grid:
    """The cuts for a mesh's tensor-parallel degrees; reasoned out once for each, with a pipeline and without."""
    if mesh.degree("tp") == 1:
        return TensorPolicy(), TensorPolicy()
    if wishes.flow is None:
        raise RequestError(f"mesh {mesh}: tensor parallelism needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    key = (mesh.tp, mesh.pp > 1)
    if key not in made:
        made[key] = choose_grid(wishes.flow, mesh.tp, wishes.placements, profile.layer_names if mesh.pp > 1 else ())
        refuse_if_nothing(made[key], mesh.tp)
    return made[key]


def _owners(mesh: Mesh, wishes: Wishes) -> OwnerPolicy:
    """Only a mesh that is asked for has owners: the search proposes none yet."""
    if mesh.ep == 1:
        return OwnerPolicy()
    if wishes.flow is None:
        raise RequestError(f"mesh {mesh}: owners need the model's dataflow, and this model's loss is not known: pass loss_fn")
    return choose_owners(wishes.flow, mesh.ep)


def _stages(
    profile: ModelProfile, mesh: Mesh, schedule: str, wishes: Wishes, tensor: Grid, made: dict[tuple[int, tuple[int, ...]], tuple[Stage, ...]]
) -> tuple[Stage, ...]:
    if mesh.pp == 1:
        return one_stage(profile)
    if wishes.flow is None:
        raise RequestError(f"mesh {mesh}: a pipeline needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    key = (mesh.pp * stages_a_rank(schedule), mesh.tp)
    if key not in made:
        made[key] = cut_stages(wishes.flow, profile, key[0], *tensor)
    return made[key]


def _layouts(cluster: Cluster, wishes: Wishes) -> Iterator[tuple[Mesh, int]]:
    if wishes.mesh is not None:
        mesh = wishes.mesh.flattened()
        if mesh.shard > wishes.mesh.shard and wishes.zero not in (None, 3):
            depth = f"mesh {wishes.mesh}: the depth of tensor parallelism gathers weights before use, which is zero=3"
            raise RequestError(f"{depth}: leave zero={wishes.zero} out")
        every = [3] if mesh.shard > wishes.mesh.shard else [1, 2, 3] if mesh.shard > 1 else [0]
        yield from ((mesh, zero) for zero in ([wishes.zero] if wishes.zero is not None else every))
        return
    for world in _worlds(len(cluster.devices), wishes):
        for pp, ways in _model_parallel(world, wishes):
            tp, rest = (ways,), world // ways // pp
            for zero in (wishes.zero,) if wishes.zero is not None else (0, 1, 2, 3):
                if zero == 0:
                    yield Mesh(pp=pp, dp=rest, tp=tp), 0
                elif rest == 1:
                    if wishes.zero is not None:
                        yield Mesh(pp=pp, tp=tp), zero
                else:
                    yield from ((Mesh(pp=pp, dp=rest // shard, shard=shard, tp=tp), zero) for shard in _divisors(rest) if shard > 1)


def _model_parallel(world: int, wishes: Wishes) -> list[tuple[int, int]]:
    """Degrees of pipeline and tensor parallelism that divide the world; without the dataflow, none. Who asks for a schedule asks for a
    pipeline, and who places layers for tensor parallelism."""
    if wishes.flow is None:
        return [(1, 1)]
    every = [(pp, ways) for pp in _divisors(world) for ways in _divisors(world // pp)]
    return [(pp, ways) for pp, ways in every if (pp > 1 or wishes.schedule is None) and (ways > 1 or not wishes.placements)]


def _worlds(devices: int, wishes: Wishes) -> list[int]:
    if wishes.world is not None:
        return [wishes.world]
    return sorted({1, devices, *(2**k for k in range(1, devices.bit_length()) if 2**k <= devices)})


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _micro_batches(batch: int, mesh: Mesh, wishes: Wishes) -> list[int]:
    if wishes.micro_batches is not None:
        return [wishes.micro_batches]
    share = max(batch // mesh.data_width, 1)
    return [2**k for k in range(share.bit_length()) if share % 2**k == 0] or [1]


def _make(
    profile: ModelProfile, cluster: Cluster, workload: Workload, wishes: Wishes, mesh: Mesh, zero: int, micro: int, recompute: Recompute,
    tensor: Grid, context: ContextPolicy, spatial: SpatialPolicy, owners: OwnerPolicy, stages: tuple[Stage, ...], schedule: PipelineSchedule,
) -> Plan:  # fmt: skip
    device = cluster.devices[0].kind
    world = mesh.size
    if world > len(cluster.devices):
        raise RequestError(f"mesh {mesh} needs {world} devices, this cluster has {len(cluster.devices)}: use --nproc {len(cluster.devices)} or less")
    cores = cluster.nodes[0].cores
    return Plan(
        model=profile.name,
        global_batch=workload.global_batch,
        mesh=mesh,
        micro_batches=micro,
        stages=stages,
        schedule=schedule,
        memory=choose_memory(profile, cluster, workload.precision, zero, recompute, wishes.recompute_layers),
        sync=SyncPolicy(**{k: v for k in ("bucket_bytes", "overlap", "timeout_s") if (v := getattr(wishes, k)) is not None}),
        balance=BalancePolicy(),
        placements=wishes.placements,
        tensor=tensor[0],
        across=tensor[1],
        context=context,
        spatial=spatial,
        owners=owners,
        compile=wishes.compile if wishes.compile is not None else "none" if context.attends else _default_compile(device, world),
        device=device,
        backend=wishes.backend or ("nccl" if device == "cuda" else "gloo"),
        threads=max(cores // world, 1) if device == "cpu" else 0,
    )


def _default_compile(device: str, world: int) -> Compile:
    """On GPUs compiling pays within a minute; the whole model on one, block by block on several so that gradients leave early."""
    if device == "cpu":
        return "none"
    return "model" if world == 1 else "blocks"
