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
    """What computation costs; `profile` is one rank's share of the model."""

    def seconds(self, profile: ModelProfile, action: Action) -> float: ...

    def flops(self, profile: ModelProfile, action: Action) -> float: ...


@dataclass(frozen=True)
class PricedRankClass:
    """Ranks on devices of one kind with equal shares: their cost model, and the number of samples in their micro-batches."""

    cost_model: ActionCostModel
    micro_batch: int
    ranks: Sequence[int]


def lower(plan: Plan, profile: ModelProfile, cost_model: ActionCostModel | Sequence[PricedRankClass], *, clip: bool = False) -> Schedule:
    """The plan's steady step, with one cost model for all ranks or one per rank class. `profile` may have any batch size; it is rescaled to the
    micro-batches."""
    rank_classes = [PricedRankClass(cost_model, plan.max_micro_batch_size, range(plan.world))] if not isinstance(cost_model, Sequence) else cost_model
    profiles = [profile.at_batch(rank_class.micro_batch) for rank_class in rank_classes]
    posts = _class_coordinates(plan, rank_classes)
    programs: dict[_ClassCoordinate, ActionList] = {}
    locals_ = {
        (rank_class, at): local_profile(plan, profiles[rank_class], at.tp, at.pp, at.ep) for rank_class, at in dict.fromkeys(posts)
    }  # kept: [Note: memo]
    for (rank_class, place), local in locals_.items():
        found = build_program(plan, profiles[rank_class], place, clip=clip)
        priced = [
            _with_cost(plan, local, action, rank_classes[rank_class].cost_model)
            for action in found
            if action.op in COMPUTE_OPS or action.num_ranks(plan.mesh) > 1
        ]
        programs[rank_class, place] = list(_in_pipeline_order(plan, profiles[rank_class], local, place, priced) if plan.mesh.pp > 1 else priced)
    if plan.spatial.grid:
        programs = _add_halo_receives(programs, [rank_class.micro_batch for rank_class in rank_classes])
    numbers: dict[tuple[Action, ...], int] = {}  # ranks with equal programs share one
    shared = {post: numbers.setdefault(tuple(_number_duplicates(actions)), len(numbers)) for post, actions in programs.items()}
    ranks = {str(rank): shared[post] for rank, post in enumerate(posts)} if len(numbers) > 1 else {}
    groups = _rank_groups(plan, profile, {action.axis for actions in numbers for action in actions})
    return Schedule(tuple(numbers), ranks, groups, plan.world, f"{plan.model}, {plan.mesh}")


def _class_coordinates(plan: Plan, rank_classes: Sequence[PricedRankClass]) -> list[_ClassCoordinate]:
    """Every rank's class index and mesh coordinate."""
    of = [0] * plan.world
    for number, rank_class in enumerate(rank_classes[1:], 1):
        for rank in rank_class.ranks:
            of[rank] = number
    places = _mesh_coordinates(plan)
    travel = plan.mesh.group_size("replica") > 1 or any(
        stage.tied_parameters for stage in plan.stages
    )  # collectives on ZeRO shards, which differ in size
    if plan.balance.state_fractions and travel:
        places = [replace(place, shard=plan.mesh.coordinate(rank, "shard")) for rank, place in enumerate(places)]
    return list(zip(of, places, strict=True))


def _mesh_coordinates(plan: Plan) -> list[MeshCoordinate]:
    """Every rank's coordinate. Tensor-parallel ranks with shards of equal size do the same, so all have the coordinate of the first."""
    mesh, ways = plan.mesh, plan.spatial.num_parts
    axes = tuple(dict.fromkeys("tp" if axis in TP_GRID_AXES else axis for axis in mesh.ordered_axes))
    degrees = {axis: range(mesh.degree(axis)) for axis in axes}
    alike: dict[str, int] = {}
    tensor = [alike.setdefault(str(plan.logical_dim_shards[at]), at) for at in degrees["tp"]]
    made = {at: MeshCoordinate(*at) for at in itertools.product(degrees["pp"], range(ways), degrees["ep"], set(tensor))}
    at_pp, at_cp, at_ep, at_tp = (axes.index(axis) for axis in ("pp", "cp", "ep", "tp"))
    return [made[at[at_pp], at[at_cp] % ways, at[at_ep], tensor[at[at_tp]]] for at in itertools.product(*degrees.values())]


def _with_cost(plan: Plan, rank_profile: ModelProfile, action: Action, cost_model: ActionCostModel) -> Action:
    """The action with its time, or with whether it blocks the rank."""
    if action.op in COMPUTE_OPS:
        return replace(
            action,
            seconds=cost_model.seconds(rank_profile, action),
            flops=cost_model.flops(rank_profile, action),
            layer=-1 if plan.mesh.pp == 1 else action.layer,
        )
    kind = action.name.split("/")[0]
    if kind == "tied":
        return replace(action, axis=_tied_group_name(action), is_blocking=True)
    overlap = {"grads": "gradients", "replicas": "gradients", "params": "gathers"}.get(kind)
    if plan.memory.zero == 3 and kind == "grads":
        overlap = "scatters"
    blocks = action.axis in INTRA_LAYER_AXES and action.op != "send" if overlap is None else overlap not in plan.sync.overlap
    return replace(action, is_blocking=blocks)


def _tied_group_name(action: Action) -> str:
    return f"pp: {action.name.removeprefix('tied/')}"


def _rank_groups(plan: Plan, profile: ModelProfile, used_axes: set[str]) -> GroupRanks:
    mesh = plan.mesh
    found = {name: tuple(tuple(g) for g in mesh.groups(*axes)) for name, axes in GROUP_AXES.items() if name in used_axes}
    if mesh.pp > 1:
        stages = tuple(tuple(g) for g in mesh.groups("pp"))
        if "pp_back" in used_axes:
            found["pp_back"] = stages
        holders = stages_holding(plan.stages)
        for tensor in profile.tensors:
            at = sorted({plan.stage_rank(stage) for stage in holders(tensor.name)})
            if len(at) > 1 and f"pp: {tensor.name}" in used_axes:
                found[f"pp: {tensor.name}"] = tuple(tuple(g[place] for place in at) for g in stages)
    return found


def _number_duplicates(program: Sequence[Action]) -> Iterator[Action]:
    """Number repeated names, and drop dependencies on actions that were left out because their group has one rank."""
    seen: dict[str, int] = {}
    for action in program:
        waits = tuple(name for name in action.depends_on if name in seen)
        count = seen[action.name] = seen.get(action.name, -1) + 1
        yield replace(action, name=f"{action.name}/{count}" if count else action.name, depends_on=waits)


def _add_halo_receives(programs: dict[_ClassCoordinate, ActionList], samples: Sequence[int]) -> dict[_ClassCoordinate, ActionList]:
    """Add the receives of halos. What neighbours send after a computation arrives after the same computation here, and is waited for together
    with this rank's sends. Neighbours' micro-batches have equal numbers of samples, whatever their devices."""
    arrivals: dict[tuple[int, int], dict[str, ActionList]] = {}  # by samples and cp coordinate: no other coordinate matters with a spatial grid
    for here, actions in {(samples[rank_class], place.cp): actions for (rank_class, place), actions in programs.items()}.items():
        last = ""
        for action in actions:
            last = action.name if action.op in COMPUTE_OPS else last
            if action.op == "send" and action.axis == "cp":
                twin = replace(action, name=f"{action.name}/in", op="recv", peer=here[1], depends_on=())
                arrivals.setdefault((here[0], action.peer), {}).setdefault(last, []).append(twin)
    return {post: list(_with_halo_exchange(actions, arrivals.get((samples[post[0]], post[1].cp), {}))) for post, actions in programs.items()}


def _with_halo_exchange(program: ActionList, receives: dict[str, ActionList]) -> Iterator[Action]:
    """After each computation, this rank's halo sends and receives, then a wait for all of them."""
    held: list[Action] = []
    for action in [*program, Action("end", "wait")]:
        if action.op == "send" and action.axis == "cp":
            held.append(action)
            continue
        if held and (action.op in COMPUTE_OPS or action.op == "wait"):
            under_way = list(_number_duplicates(held))
            yield from under_way
            yield Action(f"wait/{under_way[0].name}", "wait", depends_on=tuple(a.name for a in under_way))
            held = []
        if action.name != "end":
            yield action
        if action.op in COMPUTE_OPS:
            held += receives.get(action.name, [])


# -- pipelines --


def _in_pipeline_order(
    plan: Plan, profile: ModelProfile, rank_profile: ModelProfile, coordinate: MeshCoordinate, program: ActionList
) -> Iterator[Action]:
    """Reorder the program, which goes micro-batch by micro-batch, by the plan's pipeline schedule, with receives before each pipeline action."""
    mine = [s for s in range(len(plan.stages)) if plan.stage_rank(s) == coordinate.pp]
    pieces, rest = _split_by_pipeline_action(plan, rank_profile, mine, program)
    pieces = _split_backward(pieces) if plan.splits_backward else pieces
    for action in pipeline_schedule(plan.schedule, plan.mesh.pp, coordinate.pp, plan.micro_batches, len(mine)):
        arriving = list(_pipeline_receives(plan, profile, coordinate, mine[action.chunk], action))
        yield from arriving
        if arriving:
            yield Action(f"wait/{action.phase}/{action.chunk}/{action.micro_batch}", "wait", depends_on=tuple(a.name for a in arriving))
        yield from pieces.get(action, [])
    yield from rest


def _split_by_pipeline_action(
    plan: Plan, rank_profile: ModelProfile, local_stages: list[int], program: ActionList
) -> tuple[dict[PipelineAction, ActionList], ActionList]:
    """(actions by pipeline action, actions done once at the end of the step). Decided by the actions' names, which step_actions.py makes."""
    chunk_of = {name: chunk for chunk, stage in enumerate(local_stages) for name in plan.stages[stage].layers}
    pieces: dict[PipelineAction, ActionList] = {}
    rest: ActionList = []
    turn = PipelineAction("forward", 0, 0)
    for action in program:
        kind, *where = action.name.split("/")
        plain = replace(action, layer=-1)
        if action.layer >= 0:
            turn = PipelineAction("forward" if kind == "forward" else "backward", chunk_of[rank_profile.layers[action.layer].name], int(where[-1]))
        elif kind in ("activations", "gradients"):
            phase: str = "forward" if kind == "activations" else "backward"
            to = plan.stage_rank(int(where[0]) + (1 if phase == "forward" else -1))
            axis = "pp" if phase == "forward" else "pp_back"
            crossing = PipelineAction(phase, local_stages.index(int(where[0])), int(where[1]))  # type: ignore[arg-type]
            pieces.setdefault(crossing, []).append(replace(plain, axis=axis, peer=to))
            continue
        elif kind in ("params", "grads", "replicas") and where[0] in chunk_of:
            unit = PipelineAction(where[1], chunk_of[where[0]], int(where[2]))  # type: ignore[arg-type]
            pieces.setdefault(unit, []).append(plain)
            continue
        elif kind in ("loss", "tied", "optimizer", "norm") or (kind == "params" and len(where) == 1):
            rest.append(plain)
            continue
        pieces.setdefault(turn, []).append(plain)
    return pieces, rest


def _split_backward(actions_of: dict[PipelineAction, ActionList]) -> dict[PipelineAction, ActionList]:
    """Split backward into input gradients, for the stage before, and weight gradients: a matmul's two are equally expensive, so each takes half
    of the time. Gradients are reduced when the second half is done."""
    found: dict[PipelineAction, ActionList] = {}
    for turn, actions in actions_of.items():
        later = turn._replace(phase="weights")
        for action in actions:
            if action.op == "backward":
                half = replace(action, seconds=action.seconds / 2, flops=action.flops / 2)
                found.setdefault(turn, []).append(half)
                found.setdefault(later, []).append(replace(half, name=f"weights/{action.name.partition('/')[2]}", depends_on=()))
            else:
                moves = turn.phase == "backward" and action.name.startswith(("grads/", "replicas/"))
                found.setdefault(later if moves else turn, []).append(action)
    return found


def _pipeline_receives(
    plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, stage: int, pipeline_action: PipelineAction
) -> Iterator[Action]:
    """The receives of what the neighbouring stage sends for this pipeline action."""
    other = stage - 1 if pipeline_action.phase == "forward" else stage + 1
    if pipeline_action.phase == "weights" or not 0 <= other < len(plan.stages) or plan.stage_rank(other) == coordinate.pp:
        return
    source = replace(coordinate, pp=plan.stage_rank(other))
    kind = "activations" if pipeline_action.phase == "forward" else "gradients"
    for action in pipeline_sends(plan, profile, source, pipeline_action.phase, pipeline_action.micro_batch):
        if action.name.startswith(f"{kind}/{other}/"):
            axis = "pp" if pipeline_action.phase == "forward" else "pp_back"
            yield replace(action, name=f"{action.name}/in", op="recv", axis=axis, peer=source.pp)
