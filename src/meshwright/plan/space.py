"""The space of legal plans: every combination that `execute` can run on this cluster and that the user's wishes leave open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh, check_runnable
from meshwright.core.model import ModelProfile
from meshwright.core.plan import BalancePolicy, Compile, MemoryPolicy, PipelineSchedule, Plan, Stage, SyncPolicy, stages_a_rank
from meshwright.core.strand import Flow
from meshwright.core.tensor import TensorPolicy
from meshwright.core.workload import Workload
from meshwright.plan.partition import choose_units, one_stage
from meshwright.plan.pipeline import cut_stages
from meshwright.plan.tensor import check_placements, choose_cuts, refuse_if_nothing


@dataclass(frozen=True)
class Wishes:
    """What the user has fixed; None leaves it to the planner."""

    mesh: Mesh | None = None
    world: int | None = None
    zero: int | None = None
    recompute: str | None = None
    compile: Compile | None = None
    micro_batches: int | None = None
    backend: str | None = None
    bucket_bytes: int | None = None
    timeout_s: float | None = None
    schedule: PipelineSchedule | None = None
    placements: Mapping[str, str] = field(default_factory=dict)
    flow: Flow | None = None  # the model's dataflow; without it no tensor parallelism is considered


def candidates(profile: ModelProfile, cluster: Cluster, workload: Workload, wishes: Wishes) -> Iterator[Plan]:
    """Legal plans. If the wishes allow none, the last reason is raised: it says what to change."""
    _check(wishes, len(cluster.devices))
    reason: RequestError | None = None
    found = False
    cuts: dict[tuple[int, bool], TensorPolicy] = {}
    pieces: dict[tuple[int, int], tuple[Stage, ...]] = {}
    for mesh, zero in _layouts(cluster, wishes):
        try:
            check_runnable(mesh)
            tensor = _tensor(profile, mesh, wishes, cuts)
            schedule = wishes.schedule or "1f1b"
            stages = _stages(profile, mesh, schedule, wishes, tensor, pieces)
        except RequestError as error:
            reason = reason or error
            continue
        for micro in _micro_batches(workload.global_batch, mesh, wishes):
            for recompute in (wishes.recompute,) if wishes.recompute else ("none", "full"):
                try:
                    yield _make(profile, cluster, workload, wishes, mesh, zero, micro, recompute, tensor, stages, schedule)
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


def _tensor(profile: ModelProfile, mesh: Mesh, wishes: Wishes, made: dict[tuple[int, bool], TensorPolicy]) -> TensorPolicy:
    """The cuts for a mesh's tensor-parallel degree; reasoned out once for each degree, with a pipeline and without."""
    ways = mesh.degree("tp")
    if ways == 1:
        return TensorPolicy()
    if wishes.flow is None:
        raise RequestError(f"mesh {mesh}: tensor parallelism needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    key = (ways, mesh.pp > 1)
    if key not in made:
        made[key] = choose_cuts(wishes.flow, ways, wishes.placements, profile.layer_names if mesh.pp > 1 else ())
        refuse_if_nothing(made[key], ways)
    return made[key]


def _stages(
    profile: ModelProfile, mesh: Mesh, schedule: str, wishes: Wishes, tensor: TensorPolicy, made: dict[tuple[int, int], tuple[Stage, ...]]
) -> tuple[Stage, ...]:
    if mesh.pp == 1:
        return one_stage(profile)
    if wishes.flow is None:
        raise RequestError(f"mesh {mesh}: a pipeline needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    key = (mesh.pp * stages_a_rank(schedule), mesh.degree("tp"))
    if key not in made:
        made[key] = cut_stages(wishes.flow, profile, key[0], tensor)
    return made[key]


def _layouts(cluster: Cluster, wishes: Wishes) -> Iterator[tuple[Mesh, int]]:
    if wishes.mesh is not None:
        wanted = [wishes.zero] if wishes.zero is not None else [1, 2, 3] if wishes.mesh.shard > 1 else [0]
        yield from ((wishes.mesh, zero) for zero in wanted)
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
    profile: ModelProfile, cluster: Cluster, workload: Workload, wishes: Wishes, mesh: Mesh, zero: int, micro: int, recompute: str,
    tensor: TensorPolicy, stages: tuple[Stage, ...], schedule: PipelineSchedule,
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
        memory=MemoryPolicy(zero, choose_units(profile), recompute, workload.precision),  # type: ignore[arg-type]
        sync=SyncPolicy(
            **{k: v for k, v in (("bucket_bytes", wishes.bucket_bytes), ("timeout_s", wishes.timeout_s)) if v is not None}  # type: ignore[arg-type]
        ),
        balance=BalancePolicy(),
        placements=wishes.placements,
        tensor=tensor,
        compile=wishes.compile if wishes.compile is not None else _default_compile(device, world),
        device=device,
        backend=wishes.backend or ("nccl" if device == "cuda" else "gloo"),
        threads=max(cores // world, 1) if device == "cpu" else 0,
    )


def _default_compile(device: str, world: int) -> Compile:
    """On GPUs compiling pays within a minute; the whole model on one, block by block on several so that gradients leave early."""
    if device == "cpu":
        return "none"
    return "model" if world == 1 else "blocks"
