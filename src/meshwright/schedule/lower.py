"""Lowering: a plan's schedule made to stand by itself. Groups become lists of ranks, messages get their other end, a pipeline its order,
and computation its time; what comes out can be run, simulated or sent to somebody who has neither the model nor the plan.

[Note: what holds a rank up]
Meetings inside layers (tensor, context, spatial and expert parallelism) hold up what comes after them. Gradients, gathers of parameters
and scatters run beside computation if the plan's `sync.overlap` says so, and hold it up otherwise.

[Note: memo]
Prices know kernels by identity, so every rank's profile is kept until the last is priced: a freed one's identity would be given to the next.
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
_ClassCoordinate = tuple[int, MeshCoordinate]  # the number of a rank's crew, and where it stands


class ActionCostModel(Protocol):
    """What computation costs; `profile` is one rank's part of the model."""

    def seconds(self, profile: ModelProfile, action: Action) -> float: ...

    def flops(self, profile: ModelProfile, action: Action) -> float: ...


@dataclass(frozen=True)
class PricedRankClass:
    """Ranks on devices of one kind, with parts of one size: what computation costs them, and how many samples a micro-batch has."""

    cost_model: ActionCostModel
    micro_batch: int
    ranks: Sequence[int]


def lower(plan: Plan, profile: ModelProfile, cost_model: ActionCostModel | Sequence[PricedRankClass], *, clip: bool = False) -> Schedule:
    """The plan's steady step, at one price for all ranks or at each crew's own. `profile` may be at any batch: it is moved to the micro-batches."""
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
    numbers: dict[tuple[Action, ...], int] = {}  # ranks that turn out to do the same share a program
    shared = {post: numbers.setdefault(tuple(_number_duplicates(actions)), len(numbers)) for post, actions in programs.items()}
    ranks = {str(rank): shared[post] for rank, post in enumerate(posts)} if len(numbers) > 1 else {}
    groups = _rank_groups(plan, profile, {action.axis for actions in numbers for action in actions})
    return Schedule(tuple(numbers), ranks, groups, plan.world, f"{plan.model}, {plan.mesh}")


def _class_coordinates(plan: Plan, rank_classes: Sequence[PricedRankClass]) -> list[_ClassCoordinate]:
    """Every rank's crew and place."""
    of = [0] * plan.world
    for number, rank_class in enumerate(rank_classes[1:], 1):
        for rank in rank_class.ranks:
            of[rank] = number
    places = _mesh_coordinates(plan)
    travel = plan.mesh.group_size("replica") > 1 or any(
        stage.tied_parameters for stage in plan.stages
    )  # slices of the state, which are of several sizes
    if plan.balance.state_fractions and travel:
        places = [replace(place, shard=plan.mesh.coordinate(rank, "shard")) for rank, place in enumerate(places)]
    return list(zip(of, places, strict=True))


def _mesh_coordinates(plan: Plan) -> list[MeshCoordinate]:
    """Where each rank stands. Tensor-parallel ranks that hold pieces of one length do the same, and only the first of them is worked out."""
    mesh, ways = plan.mesh, plan.spatial.num_parts
    axes = tuple(dict.fromkeys("tp" if axis in TP_GRID_AXES else axis for axis in mesh.ordered_axes))
    degrees = {axis: range(mesh.degree(axis)) for axis in axes}
    alike: dict[str, int] = {}
    tensor = [alike.setdefault(str(plan.logical_dim_shards[at]), at) for at in degrees["tp"]]
    made = {at: MeshCoordinate(*at) for at in itertools.product(degrees["pp"], range(ways), degrees["ep"], set(tensor))}
    at_pp, at_cp, at_ep, at_tp = (axes.index(axis) for axis in ("pp", "cp", "ep", "tp"))
    return [made[at[at_pp], at[at_cp] % ways, at[at_ep], tensor[at[at_tp]]] for at in itertools.product(*degrees.values())]


def _with_cost(plan: Plan, rank_profile: ModelProfile, action: Action, cost_model: ActionCostModel) -> Action:
    """With its time, or with how it holds the rank up."""
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
    """Several messages of one name are told apart by a number; what is not done because nobody else takes part is not waited for either."""
    seen: dict[str, int] = {}
    for action in program:
        waits = tuple(name for name in action.depends_on if name in seen)
        count = seen[action.name] = seen.get(action.name, -1) + 1
        yield replace(action, name=f"{action.name}/{count}" if count else action.name, depends_on=waits)


def _add_halo_receives(programs: dict[_ClassCoordinate, ActionList], samples: Sequence[int]) -> dict[_ClassCoordinate, ActionList]:
    """Borders of blocks: what neighbours send after a computation arrives after the same computation here, and is waited for with what was sent.
    Neighbours have micro-batches of as many samples, whatever they compute on."""
    arrivals: dict[tuple[int, int], dict[str, ActionList]] = {}  # by samples and place in the grid; these go with no other axis that counts
    for here, actions in {(samples[rank_class], place.cp): actions for (rank_class, place), actions in programs.items()}.items():
        last = ""
        for action in actions:
            last = action.name if action.op in COMPUTE_OPS else last
            if action.op == "send" and action.axis == "cp":
                twin = replace(action, name=f"{action.name}/in", op="recv", peer=here[1], depends_on=())
                arrivals.setdefault((here[0], action.peer), {}).setdefault(last, []).append(twin)
    return {post: list(_with_halo_exchange(actions, arrivals.get((samples[post[0]], post[1].cp), {}))) for post, actions in programs.items()}


def _with_halo_exchange(program: ActionList, receives: dict[str, ActionList]) -> Iterator[Action]:
    """Own messages and those that arrive after each computation, then a wait for all of them."""
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
    """The program, which goes micro-batch by micro-batch, in the order of the plan's schedule, with what arrives before each turn."""
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
    """Which actions belong to which turn; what is done once, at the end of the step, is the rest. Names tell (see `run_name`)."""
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
    """Backward cut into what goes back to the stage before and the gradients of weights: a product's two are as large as each other, so half of
    the time is each one's. Gradients leave when the second is done."""
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
    """The other end of what the neighbour's stage sends for this turn."""
    other = stage - 1 if pipeline_action.phase == "forward" else stage + 1
    if pipeline_action.phase == "weights" or not 0 <= other < len(plan.stages) or plan.stage_rank(other) == coordinate.pp:
        return
    source = replace(coordinate, pp=plan.stage_rank(other))
    kind = "activations" if pipeline_action.phase == "forward" else "gradients"
    for action in pipeline_sends(plan, profile, source, pipeline_action.phase, pipeline_action.micro_batch):
        if action.name.startswith(f"{kind}/{other}/"):
            axis = "pp" if pipeline_action.phase == "forward" else "pp_back"
            yield replace(action, name=f"{action.name}/in", op="recv", axis=axis, peer=source.pp)
