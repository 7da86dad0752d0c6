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

from meshwright.core.mesh import GRID, GROUP_AXES, INSIDE
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import COMPUTES, Action, Groups, Schedule
from meshwright.core.ties import stages_holding
from meshwright.schedule.expand import Place, crossings, program
from meshwright.schedule.local import local_profile
from meshwright.schedule.orders import Turn, turns

Program = list[Action]
_Post = tuple[int, Place]  # the number of a rank's crew, and where it stands


class Price(Protocol):
    """What computation costs; `profile` is one rank's part of the model."""

    def seconds(self, profile: ModelProfile, action: Action) -> float: ...

    def flops(self, profile: ModelProfile, action: Action) -> float: ...


@dataclass(frozen=True)
class Crew:
    """Ranks on devices of one kind, with parts of one size: what computation costs them, and how many samples a micro-batch has."""

    price: Price
    micro_batch: int
    ranks: Sequence[int]


def lower(plan: Plan, profile: ModelProfile, price: Price | Sequence[Crew], *, clip: bool = False) -> Schedule:
    """The plan's steady step, at one price for all ranks or at each crew's own. `profile` may be at any batch: it is moved to the micro-batches."""
    crews = [Crew(price, plan.largest_micro_batch, range(plan.world))] if not isinstance(price, Sequence) else price
    profiles = [profile.at(crew.micro_batch) for crew in crews]
    posts = _posts(plan, crews)
    programs: dict[_Post, Program] = {}
    locals_ = {(crew, at): local_profile(plan, profiles[crew], at.tp, at.pp, at.ep) for crew, at in dict.fromkeys(posts)}  # kept: [Note: memo]
    for (crew, place), local in locals_.items():
        found = program(plan, profiles[crew], place, clip=clip)
        priced = [_priced(plan, local, action, crews[crew].price) for action in found if action.op in COMPUTES or action.ranks(plan.mesh) > 1]
        programs[crew, place] = list(_in_order(plan, profiles[crew], local, place, priced) if plan.mesh.pp > 1 else priced)
    if plan.spatial.grid:
        programs = _received(programs, [crew.micro_batch for crew in crews])
    numbers: dict[tuple[Action, ...], int] = {}  # ranks that turn out to do the same share a program
    shared = {post: numbers.setdefault(tuple(_unique(actions)), len(numbers)) for post, actions in programs.items()}
    ranks = {str(rank): shared[post] for rank, post in enumerate(posts)} if len(numbers) > 1 else {}
    groups = _groups(plan, profile, {action.axis for actions in numbers for action in actions})
    return Schedule(tuple(numbers), ranks, groups, plan.world, f"{plan.model}, {plan.mesh}")


def _posts(plan: Plan, crews: Sequence[Crew]) -> list[_Post]:
    """Every rank's crew and place."""
    of = [0] * plan.world
    for number, crew in enumerate(crews[1:], 1):
        for rank in crew.ranks:
            of[rank] = number
    places = _places(plan)
    travel = plan.mesh.group_size("replica") > 1 or any(stage.also for stage in plan.stages)  # slices of the state, which are of several sizes
    if plan.balance.states and travel:
        places = [replace(place, shard=plan.mesh.coordinate(rank, "shard")) for rank, place in enumerate(places)]
    return list(zip(of, places, strict=True))


def _places(plan: Plan) -> list[Place]:
    """Where each rank stands. Tensor-parallel ranks that hold pieces of one length do the same, and only the first of them is worked out."""
    mesh, ways = plan.mesh, plan.spatial.ways
    axes = tuple(dict.fromkeys("tp" if axis in GRID else axis for axis in mesh.layout))
    degrees = {axis: range(mesh.degree(axis)) for axis in axes}
    alike: dict[str, int] = {}
    tensor = [alike.setdefault(str(plan.pieces[at]), at) for at in degrees["tp"]]
    made = {at: Place(*at) for at in itertools.product(degrees["pp"], range(ways), degrees["ep"], set(tensor))}
    at_pp, at_cp, at_ep, at_tp = (axes.index(axis) for axis in ("pp", "cp", "ep", "tp"))
    return [made[at[at_pp], at[at_cp] % ways, at[at_ep], tensor[at[at_tp]]] for at in itertools.product(*degrees.values())]


def _priced(plan: Plan, local: ModelProfile, action: Action, price: Price) -> Action:
    """With its time, or with how it holds the rank up."""
    if action.op in COMPUTES:
        return replace(
            action, seconds=price.seconds(local, action), flops=price.flops(local, action), layer=-1 if plan.mesh.pp == 1 else action.layer
        )
    kind = action.name.split("/")[0]
    if kind == "tied":
        return replace(action, axis=_tied_axis(action), blocks=True)
    overlap = {"grads": "gradients", "replicas": "gradients", "params": "gathers"}.get(kind)
    if plan.memory.zero == 3 and kind == "grads":
        overlap = "scatters"
    blocks = action.axis in INSIDE and action.op != "send" if overlap is None else overlap not in plan.sync.overlap
    return replace(action, blocks=blocks)


def _tied_axis(action: Action) -> str:
    return f"pp: {action.name.removeprefix('tied/')}"


def _groups(plan: Plan, profile: ModelProfile, used: set[str]) -> Groups:
    mesh = plan.mesh
    found = {name: tuple(tuple(g) for g in mesh.groups(*axes)) for name, axes in GROUP_AXES.items() if name in used}
    if mesh.pp > 1:
        stages = tuple(tuple(g) for g in mesh.groups("pp"))
        if "pp_back" in used:
            found["pp_back"] = stages
        holders = stages_holding(plan.stages)
        for tensor in profile.tensors:
            at = sorted({plan.stage_rank(stage) for stage in holders(tensor.name)})
            if len(at) > 1 and f"pp: {tensor.name}" in used:
                found[f"pp: {tensor.name}"] = tuple(tuple(g[place] for place in at) for g in stages)
    return found


def _unique(program: Sequence[Action]) -> Iterator[Action]:
    """Several messages of one name are told apart by a number; what is not done because nobody else takes part is not waited for either."""
    seen: dict[str, int] = {}
    for action in program:
        waits = tuple(name for name in action.waits if name in seen)
        count = seen[action.name] = seen.get(action.name, -1) + 1
        yield replace(action, name=f"{action.name}/{count}" if count else action.name, waits=waits)


def _received(programs: dict[_Post, Program], samples: Sequence[int]) -> dict[_Post, Program]:
    """Borders of blocks: what neighbours send after a computation arrives after the same computation here, and is waited for with what was sent.
    Neighbours have micro-batches of as many samples, whatever they compute on."""
    arrivals: dict[tuple[int, int], dict[str, Program]] = {}  # by samples and place in the grid; these go with no other axis that counts
    for here, actions in {(samples[crew], place.cp): actions for (crew, place), actions in programs.items()}.items():
        last = ""
        for action in actions:
            last = action.name if action.op in COMPUTES else last
            if action.op == "send" and action.axis == "cp":
                twin = replace(action, name=f"{action.name}/in", op="recv", peer=here[1], waits=())
                arrivals.setdefault((here[0], action.peer), {}).setdefault(last, []).append(twin)
    return {post: list(_exchanged(actions, arrivals.get((samples[post[0]], post[1].cp), {}))) for post, actions in programs.items()}


def _exchanged(program: Program, arrivals: dict[str, Program]) -> Iterator[Action]:
    """Own messages and those that arrive after each computation, then a wait for all of them."""
    held: list[Action] = []
    for action in [*program, Action("end", "wait")]:
        if action.op == "send" and action.axis == "cp":
            held.append(action)
            continue
        if held and (action.op in COMPUTES or action.op == "wait"):
            under_way = list(_unique(held))
            yield from under_way
            yield Action(f"wait/{under_way[0].name}", "wait", waits=tuple(a.name for a in under_way))
            held = []
        if action.name != "end":
            yield action
        if action.op in COMPUTES:
            held += arrivals.get(action.name, [])


# -- pipelines --


def _in_order(plan: Plan, profile: ModelProfile, local: ModelProfile, place: Place, program: Program) -> Iterator[Action]:
    """The program, which goes micro-batch by micro-batch, in the order of the plan's schedule, with what arrives before each turn."""
    mine = [s for s in range(len(plan.stages)) if plan.stage_rank(s) == place.pp]
    pieces, rest = _pieces(plan, local, mine, program)
    pieces = _in_two(pieces) if plan.splits_backward else pieces
    for turn in turns(plan.schedule, plan.mesh.pp, place.pp, plan.micro_batches, len(mine)):
        arriving = list(_arriving(plan, profile, place, mine[turn.chunk], turn))
        yield from arriving
        if arriving:
            yield Action(f"wait/{turn.phase}/{turn.chunk}/{turn.micro}", "wait", waits=tuple(a.name for a in arriving))
        yield from pieces.get(turn, [])
    yield from rest


def _pieces(plan: Plan, local: ModelProfile, mine: list[int], program: Program) -> tuple[dict[Turn, Program], Program]:
    """Which actions belong to which turn; what is done once, at the end of the step, is the rest. Names tell (see `run_name`)."""
    chunk_of = {name: chunk for chunk, stage in enumerate(mine) for name in plan.stages[stage].layers}
    pieces: dict[Turn, Program] = {}
    rest: Program = []
    turn = Turn("forward", 0, 0)
    for action in program:
        kind, *where = action.name.split("/")
        plain = replace(action, layer=-1)
        if action.layer >= 0:
            turn = Turn("forward" if kind == "forward" else "backward", chunk_of[local.layers[action.layer].name], int(where[-1]))
        elif kind in ("activations", "gradients"):
            phase: str = "forward" if kind == "activations" else "backward"
            to = plan.stage_rank(int(where[0]) + (1 if phase == "forward" else -1))
            axis = "pp" if phase == "forward" else "pp_back"
            crossing = Turn(phase, mine.index(int(where[0])), int(where[1]))  # type: ignore[arg-type]
            pieces.setdefault(crossing, []).append(replace(plain, axis=axis, peer=to))
            continue
        elif kind in ("params", "grads", "replicas") and where[0] in chunk_of:
            unit = Turn(where[1], chunk_of[where[0]], int(where[2]))  # type: ignore[arg-type]
            pieces.setdefault(unit, []).append(plain)
            continue
        elif kind in ("loss", "tied", "optimizer", "norm") or (kind == "params" and len(where) == 1):
            rest.append(plain)
            continue
        pieces.setdefault(turn, []).append(plain)
    return pieces, rest


def _in_two(pieces: dict[Turn, Program]) -> dict[Turn, Program]:
    """Backward cut into what goes back to the stage before and the gradients of weights: a product's two are as large as each other, so half of
    the time is each one's. Gradients leave when the second is done."""
    found: dict[Turn, Program] = {}
    for turn, actions in pieces.items():
        later = turn._replace(phase="weights")
        for action in actions:
            if action.op == "backward":
                half = replace(action, seconds=action.seconds / 2, flops=action.flops / 2)
                found.setdefault(turn, []).append(half)
                found.setdefault(later, []).append(replace(half, name=f"weights/{action.name.partition('/')[2]}", waits=()))
            else:
                moves = turn.phase == "backward" and action.name.startswith(("grads/", "replicas/"))
                found.setdefault(later if moves else turn, []).append(action)
    return found


def _arriving(plan: Plan, profile: ModelProfile, place: Place, stage: int, turn: Turn) -> Iterator[Action]:
    """The other end of what the neighbour's stage sends for this turn."""
    other = stage - 1 if turn.phase == "forward" else stage + 1
    if turn.phase == "weights" or not 0 <= other < len(plan.stages) or plan.stage_rank(other) == place.pp:
        return
    source = replace(place, pp=plan.stage_rank(other))
    kind = "activations" if turn.phase == "forward" else "gradients"
    for action in crossings(plan, profile, source, turn.phase, turn.micro):
        if action.name.startswith(f"{kind}/{other}/"):
            axis = "pp" if turn.phase == "forward" else "pp_back"
            yield replace(action, name=f"{action.name}/in", op="recv", axis=axis, peer=source.pp)
