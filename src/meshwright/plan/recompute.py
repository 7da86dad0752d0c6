"""Which units keep everything, what is dear, or their input alone: an integer program for each pipeline rank, solved exactly (HiGHS).

[Note: recomputation as a program]
Blocks that are alike are counted, not told apart: how many of each kind have which mode. What recomputing adds to a micro-batch's time is to be
least; what a rank keeps of all micro-batches under way, with the one unit that is brought back at a time, must go into what memory the rest leaves.
Every rank has its own program: later ranks of a pipeline have fewer micro-batches under way, and recompute less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.recompute import Recompute
from meshwright.core.workload import Workload
from meshwright.cost.collective import collective_seconds
from meshwright.cost.compute import ComputeCost
from meshwright.cost.memory import kept_bytes
from meshwright.cost.step import Room, estimate, rooms
from meshwright.plan.memory import RECOMPUTES
from meshwright.schedule import Place
from meshwright.schedule.expand import meetings

_LESS = (0.0, 0.02, 0.05, 0.1, 0.2)  # of the room, where what was found does not fit after all
_SLACK = 4e-6  # of the room: what a solver takes for equal may be a little more


@dataclass(frozen=True)
class Kind:
    """Blocks that are alike, and what each mode that they may have costs one of them."""

    count: int
    seconds: Mapping[Recompute, float]
    kept: Mapping[Recompute, float]  # bytes of one micro-batch
    back: Mapping[Recompute, float]  # bytes that are brought back, one block at a time
    in_flight: tuple[int, ...]  # micro-batches under way, at each moment that may need most

    @property
    def modes(self) -> list[Recompute]:
        return [mode for mode in RECOMPUTES if mode in self.seconds]


Counts = Sequence[Mapping[Recompute, int]]  # of each kind


def mixed(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Plan | None:
    """The plan, which keeps everything that it may, with the recomputation that makes it fit at the least time; None where it fits as it is, and
    where nothing makes it fit. Units whose mode was asked for keep that. The program knows one workspace for all layers and no gradients that
    come while activations go, so what it finds is checked, and asked for again in a little less room; and where it finds nothing, all units together
    may make it fit all the same."""
    if plan.splits_backward:
        return None
    every = list(rooms(plan, profile, workload, cluster, calibration))
    met = {id(room.local): _met_again(plan, cluster, room) for room in {id(room.local): room for room in every}.values()}  # alike ranks meet alike
    for less in _LESS:
        found = _solved(plan, [replace(room, bytes=int(room.bytes * (1 - less))) for room in every], met)
        if found is None:
            break
        if estimate(found, profile, workload, cluster, calibration, timed=False).fits:
            return found
    if estimate(plan, profile, workload, cluster, calibration, timed=False).fits:
        return None
    alike = (other for mode in RECOMPUTES[1:] if (other := _all_again(plan, profile, mode)) is not None)  # the quicker one first
    return next((other for other in alike if estimate(other, profile, workload, cluster, calibration, timed=False).fits), None)


def _all_again(plan: Plan, profile: ModelProfile, mode: Recompute) -> Plan | None:
    """With every unit whose mode is open recomputed in this one, if any may be."""
    modes: dict[str, Recompute] = {x.name: mode for x in profile.layers if _open(plan, x) and mode in _allowed(plan, x)}
    memory = replace(plan.memory, layers={**plan.memory.layers, **modes})
    if len(modes) == len(plan.memory.units):
        memory = replace(plan.memory, recompute=mode)
    try:
        return replace(plan, memory=memory) if modes else None
    except RequestError:
        return None


def _solved(plan: Plan, rooms: Sequence[Room], met: Mapping[int, Mapping[str, float]]) -> Plan | None:
    modes: dict[str, Recompute] = {}
    for room in rooms:
        kinds, members = _kinds(plan, room, met[id(room.local)])
        counts = solve(kinds, *_left(plan, room))
        if counts is None:
            return None
        for name, mode in _dealt(members, counts).items():
            modes[name] = max(mode, modes.get(name, "none"), key=RECOMPUTES.index)
    if not modes:
        return None
    try:
        return replace(plan, memory=replace(plan.memory, layers={**plan.memory.layers, **modes}))
    except RequestError:
        return None


def solve(kinds: Sequence[Kind], rooms: Sequence[float], back: float = 0.0) -> list[dict[Recompute, int]] | None:
    """How many of each kind have which mode, so that time is least. `rooms` are the bytes that there are at each moment, and `back` those that
    some other layer brings back. None if nothing fits."""
    plain = [back + sum(kind.count * kind.kept["none"] * kind.in_flight[at] for kind in kinds) for at in range(len(rooms))]
    if all(need <= room for need, room in zip(plain, rooms, strict=True)):
        return [{"none": kind.count} for kind in kinds]
    if min(rooms) <= 0 or not kinds:
        return None
    return _Program(kinds, rooms, back).solved()


class _Program:
    """The program in the solver's words: a column for the count of each kind in each mode, one that says whether there is any, and one for what is
    brought back. Bytes are counted in rooms and seconds in the dearest block's, so that numbers are near 1."""

    def __init__(self, kinds: Sequence[Kind], rooms: Sequence[float], back: float) -> None:
        import highspy  # here: it takes a tenth of a second that few searches need

        self._columns = 0
        self._solver: Any = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0)):
            self._solver.setOptionValue(option, value)
        self._integer = highspy.HighsVarType.kInteger
        self._best = highspy.HighsModelStatus.kOptimal
        self._infinite = highspy.kHighsInf
        dearest = max((s for kind in kinds for s in kind.seconds.values()), default=0.0) or 1.0
        unit = max(rooms)
        passing = self._column(0.0, self._infinite, integer=False, least=back / unit)
        self._counts: list[dict[Recompute, int]] = []
        for kind in kinds:
            of = {mode: self._column(kind.seconds[mode] / dearest, kind.count) for mode in kind.modes}
            self._row(kind.count, kind.count, dict.fromkeys(of.values(), 1.0))
            for mode in kind.modes[1:]:
                some = self._column(0.0, 1)
                self._row(-self._infinite, 0.0, {of[mode]: 1.0, some: -float(kind.count)})
                self._row(0.0, self._infinite, {passing: 1.0, some: -kind.back[mode] / unit})
            self._counts.append(of)
        for at, room in enumerate(rooms):
            used = {column: k.in_flight[at] * k.kept[m] / unit for k, of in zip(kinds, self._counts, strict=True) for m, column in of.items()}
            self._row(-self._infinite, room / unit * (1 - _SLACK), {**used, passing: 1.0})

    def solved(self) -> list[dict[Recompute, int]] | None:
        self._solver.run()
        if self._solver.getModelStatus() != self._best:
            return None
        values = self._solver.getSolution().col_value
        return [{mode: round(values[column]) for mode, column in of.items()} for of in self._counts]

    def _column(self, cost: float, most: float, integer: bool = True, least: float = 0.0) -> int:
        self._solver.addVar(least, float(most))
        self._solver.changeColCost(self._columns, cost)
        if integer:
            self._solver.changeColIntegrality(self._columns, self._integer)
        self._columns += 1
        return self._columns - 1

    def _row(self, least: float, most: float, terms: Mapping[int, float]) -> None:
        self._solver.addRow(float(least), float(most), len(terms), list(terms), list(terms.values()))


def _kinds(plan: Plan, room: Room, met: Mapping[str, float]) -> tuple[list[Kind], list[list[str]]]:
    """The kinds among a rank's units whose mode is open, and the names of those that belong to each."""
    price = ComputeCost(room.rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
    memo: dict[tuple[int, str, bool], float] = {}
    found: dict[tuple[Any, ...], list[str]] = {}
    for layer, name in zip(room.local.layers, room.names, strict=True):
        if not _open(plan, layer):
            continue
        modes = _allowed(plan, layer)
        times = [price.layer(layer, "forward", memo, cheap=cheap) for cheap in (True, False)]
        seconds = {"none": 0.0, "selective": times[0], "full": times[1] + met.get(layer.name, 0.0)}
        rows = tuple((mode, seconds[mode], *kept_bytes(plan, layer, mode)) for mode in modes)
        found.setdefault((rows, tuple(counts.get(layer.name, 1) for counts in room.in_flight)), []).append(name)
    kinds = [
        Kind(len(names), {m: s for m, s, _, _ in rows}, {m: kept for m, _, kept, _ in rows}, {m: back for m, _, _, back in rows}, flight)
        for (rows, flight), names in found.items()
    ]
    return kinds, list(found.values())


def _left(plan: Plan, room: Room) -> tuple[list[float], float]:
    """What layers whose mode is not open leave of the room at each moment, and what one of them brings back."""
    fixed = [(layer.name, *kept_bytes(plan, layer, plan.memory.mode(layer.name))) for layer in room.local.layers if not _open(plan, layer)]
    left = [room.bytes - sum(counts.get(name, 1) * kept for name, kept, _ in fixed) for counts in room.in_flight]
    return left, max((back for _, _, back in fixed), default=0.0)


def _open(plan: Plan, layer: LayerProfile) -> bool:
    return layer.name in plan.memory.units and layer.name not in plan.memory.layers


def _allowed(plan: Plan, layer: LayerProfile) -> list[Recompute]:
    """What `execute` can do with a unit under this plan; a plan that it cannot run at all refuses itself."""
    owned = any(table.module.startswith(f"{layer.name}.") for table in plan.owners.tables)
    split = plan.compile != "none" and plan.mesh.degree("tp") > 1
    if owned or plan.splits_backward:
        return ["none"]
    return ["none", "full"] if split or layer.overwrites or plan.spatial.grid else list(RECOMPUTES)


def _met_again(plan: Plan, cluster: Cluster, room: Room) -> dict[str, float]:
    """By unit: what the meetings of other axes that a unit repeats take from computation."""
    if plan.mesh.group_size("data") * plan.mesh.pp == plan.world and plan.mesh.cp == plan.mesh.ep == 1:
        return {}
    hidden = room.rates.overlap if "gradients" in plan.sync.overlap else 0.0
    price = cache(lambda action: collective_seconds(action, plan, cluster, room.rates))  # calls of equal blocks differ in their names
    every = meetings(plan, room.local, Place(pp=room.rank))
    return {unit: (1.0 - hidden) * sum(price(action.named("")) for action in met["again"]) for unit, met in every.items()}


def _dealt(members: Sequence[Sequence[str]], counts: Counts) -> dict[str, Recompute]:
    """Those of a kind that come first recompute most: what they keep would be kept longest."""
    found: dict[str, Recompute] = {}
    for names, of in zip(members, counts, strict=True):
        modes = [mode for mode in reversed(RECOMPUTES) for _ in range(of.get(mode, 0))]
        found |= {name: mode for name, mode in zip(names, modes, strict=True) if mode != "none"}
    return found
