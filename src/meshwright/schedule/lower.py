"""Lowering: a plan's schedule made to stand by itself. Groups become lists of ranks, messages get their other end, a pipeline its order,
and computation its time; what comes out can be run, simulated or sent to somebody who has neither the model nor the plan.

[Note: what holds a rank up]
Meetings inside layers (tensor, context, spatial and expert parallelism) hold up what comes after them. Gradients, gathers of parameters
and scatters run beside computation if the plan's `sync.overlap` says so, and hold it up otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from meshwright.core.errors import RequestError
from meshwright.core.mesh import GROUP_AXES
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import COMPUTES, Action, Groups, Schedule
from meshwright.schedule.expand import Place, crossings, expand
from meshwright.schedule.local import local_profile
from meshwright.schedule.orders import ORDERS, Turn, turns

_INSIDE = ("tp", "tpx", "tpy", "cp", "ep")
Program = list[Action]


class Price(Protocol):
    """What computation costs; `profile` is one rank's part of the model."""

    def seconds(self, profile: ModelProfile, action: Action) -> float: ...

    def flops(self, profile: ModelProfile, action: Action) -> float: ...


def lower(plan: Plan, profile: ModelProfile, price: Price, *, clip: bool = False) -> Schedule:
    """The plan's steady step. `profile` may be at any batch: it is moved to the plan's micro-batch."""
    if plan.mesh.pp > 1 and plan.schedule not in ORDERS:
        raise RequestError(f"a plan with schedule={plan.schedule} cuts backward in two, which no proxy does yet: use {', '.join(ORDERS)}")
    profile = profile.at(plan.largest_micro_batch)
    found = expand(plan, profile, clip=clip)
    firsts: dict[int, int] = {}
    for rank in range(plan.world):
        firsts.setdefault(found.ranks.get(str(rank), 0), rank)
    programs: dict[int, Program] = {}
    for number, rank in firsts.items():
        place = _place(plan, rank)
        local = local_profile(plan, profile, place.tp, place.pp, place.ep)
        priced = [_priced(plan, local, action, price) for action in found.programs[number] if action.op in COMPUTES or action.ranks(plan.mesh) > 1]
        programs[number] = list(_in_order(plan, profile, local, place, priced) if plan.mesh.pp > 1 else priced)
    groups = _groups(plan, profile)
    if plan.spatial.grid:
        programs = _received(plan, firsts, programs)
    numbers: dict[tuple[Action, ...], int] = {}  # ranks that turn out to do the same share a program
    shared = {number: numbers.setdefault(tuple(_unique(program)), len(numbers)) for number, program in programs.items()}
    ranks = {str(rank): shared[found.ranks.get(str(rank), 0)] for rank in range(plan.world)} if len(numbers) > 1 else {}
    used = {action.axis for program in numbers for action in program}
    name = f"{plan.model}, {plan.mesh}"
    return Schedule(tuple(numbers), ranks, {axis: lists for axis, lists in groups.items() if axis in used}, plan.world, name)


def _place(plan: Plan, rank: int) -> Place:
    at = {axis: plan.mesh.coordinate(rank, axis) for axis in ("pp", "cp", "ep", "tp")}
    return Place(at["pp"], at["cp"] % plan.spatial.ways, at["ep"], at["tp"])


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
    blocks = action.axis in _INSIDE and action.op != "send" if overlap is None else overlap not in plan.sync.overlap
    return replace(action, blocks=blocks)


def _tied_axis(action: Action) -> str:
    return f"pp: {action.name.removeprefix('tied/')}"


def _groups(plan: Plan, profile: ModelProfile) -> Groups:
    mesh = plan.mesh
    found = {name: tuple(tuple(g) for g in mesh.groups(*axes)) for name, axes in GROUP_AXES.items() if mesh.group_size(name) > 1}
    if mesh.pp > 1:
        found["pp_back"] = found["pp"]
        for tensor in profile.tensors:
            at = {plan.stage_rank(stage) for stage in plan.holders(tensor.name)}
            if len(at) > 1:
                found[f"pp: {tensor.name}"] = tuple(tuple(r for r in g if mesh.coordinate(r, "pp") in at) for g in found["pp"])
    return found


def _unique(program: Sequence[Action]) -> Iterator[Action]:
    """Several messages of one name are told apart by a number; what is not done because nobody else takes part is not waited for either."""
    seen: dict[str, int] = {}
    for action in program:
        waits = tuple(name for name in action.waits if name in seen)
        count = seen[action.name] = seen.get(action.name, -1) + 1
        yield replace(action, name=f"{action.name}/{count}" if count else action.name, waits=waits)


def _received(plan: Plan, firsts: dict[int, int], programs: dict[int, Program]) -> dict[int, Program]:
    """Borders of blocks: what neighbours send after a computation arrives after the same computation here, and is waited for with what was sent."""
    number_of = {plan.mesh.coordinate(rank, "cp"): number for number, rank in firsts.items()}  # spatial grids go with no other axis that counts
    arrivals: dict[int, dict[str, Program]] = {number: {} for number in programs}
    for number, program in programs.items():
        here, last = plan.mesh.coordinate(firsts[number], "cp"), ""
        for action in program:
            last = action.name if action.op in COMPUTES else last
            if action.op == "send" and action.axis == "cp":
                twin = replace(action, name=f"{action.name}/in", op="recv", peer=here, waits=())
                arrivals[number_of[action.peer]].setdefault(last, []).append(twin)
    return {number: list(_exchanged(program, arrivals[number])) for number, program in programs.items()}


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


def _arriving(plan: Plan, profile: ModelProfile, place: Place, stage: int, turn: Turn) -> Iterator[Action]:
    """The other end of what the neighbour's stage sends for this turn."""
    other = stage - 1 if turn.phase == "forward" else stage + 1
    if not 0 <= other < len(plan.stages) or plan.stage_rank(other) == place.pp:
        return
    source = replace(place, pp=plan.stage_rank(other))
    kind = "activations" if turn.phase == "forward" else "gradients"
    for action in crossings(plan, profile, source, turn.phase, turn.micro):
        if action.name.startswith(f"{kind}/{other}/"):
            axis = "pp" if turn.phase == "forward" else "pp_back"
            yield replace(action, name=f"{action.name}/in", op="recv", axis=axis, peer=source.pp)
