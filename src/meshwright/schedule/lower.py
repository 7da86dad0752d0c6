"""Lowering: from a plan and a profile to a self-contained schedule. Groups become lists of ranks, sends get their receives, a pipeline its order,
and computation its time; the result can be run, simulated or exported without the model and the plan.

[Note: what blocks a rank]
Collectives inside layers (tensor, context, spatial and expert parallelism) block what comes after them. Gradient reductions, parameter
all-gathers and reduce-scatters overlap with computation if the plan's `sync.overlap` says so, and block it otherwise.

[Note: memo]
Cost models identify kernels by `id`, so every rank's profile is kept until the last is priced: a freed kernel's id would be reused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from meshwright.core.mesh import GROUP_AXES, INTRA_LAYER_AXES, TP_GRID_AXES
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import COMPUTE_OPS, Action, GroupRanks, Schedule
from meshwright.core.tied_parameters import stages_holding
from meshwright.schedule.pipeline_actions import PipelineAction, pipeline_schedule
from meshwright.schedule.rank_profile import local_profile
from meshwright.schedule.step_actions import MeshCoordinate, build_program, pipeline_sends

ActionList = list[Action]
_ClassCoordinate = tuple[int, MeshCoordinate]  # the index of a rank's class, and its mesh coordinate


class ActionCostModel(Protocol):
    """What computation costs; `profile` is one rank's part of the model."""

    def seconds(self, profile: ModelProfile, action: Action) -> float: ...

    def flops(self, profile: ModelProfile, action: Action) -> float: ...


@dataclass(frozen=True)
class PricedRankClass:
    """Ranks on devices of one kind with equal shares: their cost model, and the number of samples in their micro-batches."""

    cost_model: ActionCostModel
    micro_batch: int
    ranks: Sequence[int]


def lower(plan: Plan, profile: ModelProfile, cost_model: ActionCostModel | Sequence[PricedRankClass], *, clip: bool = False) -> Schedule:
    """The plan's steady step, with one cost model for all ranks or one per rank class. `profile` may have any batch size."""
    classes = cost_model if isinstance(cost_model, Sequence) else [PricedRankClass(cost_model, plan.max_micro_batch_size, range(plan.world))]
    profiles = [profile.at_batch(rank_class.micro_batch) for rank_class in classes]
    class_coordinates = _class_coordinates(plan, classes)
    programs: dict[_ClassCoordinate, ActionList] = {}
    local_profiles = {(i, c): local_profile(plan, profiles[i], c.tp, c.pp, c.ep) for i, c in dict.fromkeys(class_coordinates)}  # [Note: memo]
    for (i, coordinate), local in local_profiles.items():
        actions = build_program(plan, profiles[i], coordinate, clip=clip)
        used = (a for a in actions if a.op in COMPUTE_OPS or a.num_ranks(plan.mesh) > 1)
        priced = [_with_cost(plan, local, action, classes[i].cost_model) for action in used]
        programs[i, coordinate] = list(_in_pipeline_order(plan, profiles[i], local, coordinate, priced) if plan.mesh.pp > 1 else priced)
    if plan.spatial.grid:
        programs = _add_halo_receives(programs, [rank_class.micro_batch for rank_class in classes])
    indices: dict[tuple[Action, ...], int] = {}  # ranks with equal programs share one
    program_of = {key: indices.setdefault(tuple(_number_duplicates(program)), len(indices)) for key, program in programs.items()}
    program_of_rank = {str(rank): program_of[key] for rank, key in enumerate(class_coordinates)} if len(indices) > 1 else {}
    groups = _rank_groups(plan, profile, {action.axis for program in indices for action in program})
    return Schedule(tuple(indices), program_of_rank, groups, plan.world, f"{plan.model}, {plan.mesh}")


def _class_coordinates(plan: Plan, rank_classes: Sequence[PricedRankClass]) -> list[_ClassCoordinate]:
    """Every rank's class index and mesh coordinate."""
    class_of = [0] * plan.world
    for index, rank_class in enumerate(rank_classes[1:], 1):
        for rank in rank_class.ranks:
            class_of[rank] = index
    coordinates = _mesh_coordinates(plan)
    reduces_shards = plan.mesh.group_size("replica") > 1 or any(stage.tied_parameters for stage in plan.stages)
    if plan.balance.state_fractions and reduces_shards:  # ZeRO's shards differ in size, and so do collectives on them
        coordinates = [replace(c, shard=plan.mesh.coordinate(rank, "shard")) for rank, c in enumerate(coordinates)]
    return list(zip(class_of, coordinates, strict=True))


def _mesh_coordinates(plan: Plan) -> list[MeshCoordinate]:
    """Every rank's coordinate. Tensor-parallel ranks with shards of equal size do the same, so all have the coordinate of the first."""
    mesh, grid_size = plan.mesh, plan.spatial.num_parts
    axes = tuple(dict.fromkeys("tp" if axis in TP_GRID_AXES else axis for axis in mesh.ordered_axes))
    ranges = {axis: range(mesh.degree(axis)) for axis in axes}
    first_with: dict[str, int] = {}
    tp_rank = [first_with.setdefault(str(plan.logical_dim_shards[tp]), tp) for tp in ranges["tp"]]
    shared = {c: MeshCoordinate(*c) for c in itertools.product(ranges["pp"], range(grid_size), ranges["ep"], set(tp_rank))}
    pp, cp, ep, tp = (axes.index(axis) for axis in ("pp", "cp", "ep", "tp"))
    return [shared[c[pp], c[cp] % grid_size, c[ep], tp_rank[c[tp]]] for c in itertools.product(*ranges.values())]


def _with_cost(plan: Plan, rank_profile: ModelProfile, action: Action, cost_model: ActionCostModel) -> Action:
    """The action with its time, or with whether it blocks the rank."""
    if action.op in COMPUTE_OPS:
        seconds, flops = cost_model.seconds(rank_profile, action), cost_model.flops(rank_profile, action)
        return replace(action, seconds=seconds, flops=flops, layer=-1 if plan.mesh.pp == 1 else action.layer)
    kind = action.name.split("/")[0]
    if kind == "tied":
        return replace(action, axis=f"pp: {action.name.removeprefix('tied/')}", is_blocking=True)
    overlap = {"grads": "gradients", "replicas": "gradients", "params": "gathers"}.get(kind)
    if plan.memory.zero == 3 and kind == "grads":
        overlap = "scatters"
    blocks = action.axis in INTRA_LAYER_AXES and action.op != "send" if overlap is None else overlap not in plan.sync.overlap
    return replace(action, is_blocking=blocks)


def _rank_groups(plan: Plan, profile: ModelProfile, used_axes: set[str]) -> GroupRanks:
    mesh = plan.mesh
    groups = {name: tuple(map(tuple, mesh.groups(*axes))) for name, axes in GROUP_AXES.items() if name in used_axes}
    if mesh.pp > 1:
        pipelines = tuple(map(tuple, mesh.groups("pp")))
        if "pp_back" in used_axes:
            groups["pp_back"] = pipelines
        holders = stages_holding(plan.stages)
        for name in (t.name for t in profile.tensors if f"pp: {t.name}" in used_axes):
            pp_ranks = sorted({plan.stage_rank(stage) for stage in holders(name)})
            groups[f"pp: {name}"] = tuple(tuple(pipeline[rank] for rank in pp_ranks) for pipeline in pipelines)
    return groups


def _number_duplicates(program: Sequence[Action]) -> Iterator[Action]:
    """Number repeated names, and drop dependencies on actions that were left out because their group has one rank."""
    seen: dict[str, int] = {}
    for action in program:
        depends_on = tuple(name for name in action.depends_on if name in seen)
        count = seen[action.name] = seen.get(action.name, -1) + 1
        yield replace(action, name=f"{action.name}/{count}" if count else action.name, depends_on=depends_on)


def _add_halo_receives(programs: dict[_ClassCoordinate, ActionList], samples: Sequence[int]) -> dict[_ClassCoordinate, ActionList]:
    """Add the receives of halos. What neighbours send after a computation arrives after the same computation here, and is waited for together
    with this rank's sends. Neighbours' micro-batches have equal numbers of samples, whatever their devices."""
    receives: dict[tuple[int, int], dict[str, ActionList]] = {}  # by samples and cp coordinate: no other coordinate matters with a spatial grid
    for (count, cp), program in {(samples[i], coordinate.cp): program for (i, coordinate), program in programs.items()}.items():
        computation = ""
        for action in program:
            computation = action.name if action.op in COMPUTE_OPS else computation
            if action.op == "send" and action.axis == "cp":
                receive = replace(action, name=f"{action.name}/in", op="recv", peer=cp, depends_on=())
                receives.setdefault((count, action.peer), {}).setdefault(computation, []).append(receive)
    return {(i, c): list(_with_halo_exchange(program, receives.get((samples[i], c.cp), {}))) for (i, c), program in programs.items()}


def _with_halo_exchange(program: ActionList, receives: dict[str, ActionList]) -> Iterator[Action]:
    """After each computation, this rank's halo sends and receives, then a wait for all of them."""
    pending: list[Action] = []
    for action in [*program, Action("end", "wait")]:
        if action.op == "send" and action.axis == "cp":
            pending.append(action)
            continue
        if pending and (action.op in COMPUTE_OPS or action.op == "wait"):
            messages = list(_number_duplicates(pending))
            yield from messages
            yield Action(f"wait/{messages[0].name}", "wait", depends_on=tuple(a.name for a in messages))
            pending = []
        if action.name != "end":
            yield action
        if action.op in COMPUTE_OPS:
            pending += receives.get(action.name, [])


# -- pipelines --


def _in_pipeline_order(
    plan: Plan, profile: ModelProfile, rank_profile: ModelProfile, coordinate: MeshCoordinate, program: ActionList
) -> Iterator[Action]:
    """Reorder the program, which goes micro-batch by micro-batch, by the plan's pipeline schedule, with receives before each pipeline action."""
    stages = [s for s in range(len(plan.stages)) if plan.stage_rank(s) == coordinate.pp]
    actions_of, final = _split_by_pipeline_action(plan, rank_profile, stages, program)
    actions_of = _split_backward(actions_of) if plan.splits_backward else actions_of
    for action in pipeline_schedule(plan.schedule, plan.mesh.pp, coordinate.pp, plan.micro_batches, len(stages)):
        receives = list(_pipeline_receives(plan, profile, coordinate, stages[action.chunk], action))
        yield from receives
        if receives:
            yield Action(f"wait/{action.phase}/{action.chunk}/{action.micro_batch}", "wait", depends_on=tuple(a.name for a in receives))
        yield from actions_of.get(action, [])
    yield from final


def _split_by_pipeline_action(
    plan: Plan, rank_profile: ModelProfile, local_stages: list[int], program: ActionList
) -> tuple[dict[PipelineAction, ActionList], ActionList]:
    """(actions by pipeline action, actions done once at the end of the step). Decided by the actions' names, which step_actions.py makes."""
    chunk_of = {name: chunk for chunk, stage in enumerate(local_stages) for name in plan.stages[stage].layers}
    actions_of: dict[PipelineAction, ActionList] = {}
    final: ActionList = []
    current = PipelineAction("forward", 0, 0)
    for action in program:
        kind, *where = action.name.split("/")
        target = current
        if action.layer >= 0:
            chunk = chunk_of[rank_profile.layers[action.layer].name]
            target = current = PipelineAction("forward" if kind == "forward" else "backward", chunk, int(where[-1]))
        elif kind in ("activations", "gradients"):
            stage, chunk, micro = int(where[0]), local_stages.index(int(where[0])), int(where[1])
            if kind == "activations":
                target = PipelineAction("forward", chunk, micro)
                action = replace(action, axis="pp", peer=plan.stage_rank(stage + 1))
            else:
                target = PipelineAction("backward", chunk, micro)
                action = replace(action, axis="pp_back", peer=plan.stage_rank(stage - 1))
        elif kind in ("params", "grads", "replicas") and where[0] in chunk_of:
            target = PipelineAction(where[1], chunk_of[where[0]], int(where[2]))  # type: ignore[arg-type]
        elif kind in ("loss", "tied", "optimizer", "norm") or (kind == "params" and len(where) == 1):
            final.append(replace(action, layer=-1))
            continue
        actions_of.setdefault(target, []).append(replace(action, layer=-1))
    return actions_of, final


def _split_backward(actions_of: dict[PipelineAction, ActionList]) -> dict[PipelineAction, ActionList]:
    """Split backward into input gradients, for the stage before, and weight gradients: a matmul's two are equally expensive, so each takes half
    of the time. Gradients are reduced when the second half is done."""
    split: dict[PipelineAction, ActionList] = {}
    for pipeline_action, actions in actions_of.items():
        weights = pipeline_action._replace(phase="weights")
        for action in actions:
            if action.op == "backward":
                half = replace(action, seconds=action.seconds / 2, flops=action.flops / 2)
                split.setdefault(pipeline_action, []).append(half)
                split.setdefault(weights, []).append(replace(half, name=f"weights/{action.name.partition('/')[2]}", depends_on=()))
            else:
                reduces = pipeline_action.phase == "backward" and action.name.startswith(("grads/", "replicas/"))
                split.setdefault(weights if reduces else pipeline_action, []).append(action)
    return split


def _pipeline_receives(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, stage: int, action: PipelineAction) -> Iterator[Action]:
    """The receives of what the neighbouring stage sends for this pipeline action."""
    source, kind, axis = (stage - 1, "activations", "pp") if action.phase == "forward" else (stage + 1, "gradients", "pp_back")
    if action.phase == "weights" or not 0 <= source < len(plan.stages) or plan.stage_rank(source) == coordinate.pp:
        return
    peer = plan.stage_rank(source)
    for send in pipeline_sends(plan, profile, replace(coordinate, pp=peer), action.phase, action.micro_batch):
        if send.name.startswith(f"{kind}/{source}/"):
            yield replace(send, name=f"{send.name}/in", op="recv", axis=axis, peer=peer)
