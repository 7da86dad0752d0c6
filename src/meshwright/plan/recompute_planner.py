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
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.workload import Workload
from meshwright.cost.collective_cost import collective_seconds
from meshwright.cost.compute_cost import ComputeCost
from meshwright.cost.memory_cost import saved_activation_bytes
from meshwright.cost.step_cost import ActivationBudget, activation_budgets, estimate
from meshwright.plan.memory_planner import RECOMPUTE_MODES
from meshwright.schedule import MeshCoordinate
from meshwright.schedule.step_actions import layer_collectives

_BUDGET_REDUCTIONS = (0.0, 0.02, 0.05, 0.1, 0.2)  # of the room, where what was found does not fit after all
_SOLVER_TOLERANCE = 4e-6  # of the room: what a solver takes for equal may be a little more


@dataclass(frozen=True)
class UnitClass:
    """Blocks that are alike, and what each mode that they may have costs one of them."""

    count: int
    seconds: Mapping[RecomputeMode, float]
    saved_bytes: Mapping[RecomputeMode, float]  # bytes of one micro-batch
    rematerialized_bytes: Mapping[RecomputeMode, float]  # bytes that are brought back, one block at a time
    in_flight: tuple[int, ...]  # micro-batches under way, at each moment that may need most

    @property
    def modes(self) -> list[RecomputeMode]:
        return [mode for mode in RECOMPUTE_MODES if mode in self.seconds]


ModeCounts = Sequence[Mapping[RecomputeMode, int]]  # of each kind


def choose_mixed_recompute(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Plan | None:
    """The plan, which keeps everything that it may, with the recomputation that makes it fit at the least time; None where it fits as it is, and
    where nothing makes it fit. Units whose mode was asked for keep that. The program knows one workspace for all layers and no gradients that
    come while activations go, so what it finds is checked, and asked for again in a little less room; and where it finds nothing, all units together
    may make it fit all the same."""
    if plan.splits_backward:
        return None
    every = list(activation_budgets(plan, profile, workload, cluster, calibration))
    met = {
        id(room.local_profile): _repeated_comm_seconds(plan, cluster, room) for room in {id(room.local_profile): room for room in every}.values()
    }  # alike ranks meet alike
    for less in _BUDGET_REDUCTIONS:
        found = _plan_with_modes(plan, [replace(room, bytes=int(room.bytes * (1 - less))) for room in every], met)
        if found is None:
            break
        if estimate(found, profile, workload, cluster, calibration, with_time=False).fits:
            return found
    if estimate(plan, profile, workload, cluster, calibration, with_time=False).fits:
        return None
    alike = (other for mode in RECOMPUTE_MODES[1:] if (other := _recompute_all(plan, profile, mode)) is not None)  # the quicker one first
    return next((other for other in alike if estimate(other, profile, workload, cluster, calibration, with_time=False).fits), None)


def _recompute_all(plan: Plan, profile: ModelProfile, mode: RecomputeMode) -> Plan | None:
    """With every unit whose mode is open recomputed in this one, if any may be."""
    modes: dict[str, RecomputeMode] = {x.name: mode for x in profile.layers if _is_mode_open(plan, x) and mode in _allowed_modes(plan, x)}
    memory = replace(plan.memory, layers={**plan.memory.layers, **modes})
    if len(modes) == len(plan.memory.units):
        memory = replace(plan.memory, recompute=mode)
    try:
        return replace(plan, memory=memory) if modes else None
    except RequestError:
        return None


def _plan_with_modes(plan: Plan, budgets: Sequence[ActivationBudget], repeated_comm_seconds: Mapping[int, Mapping[str, float]]) -> Plan | None:
    modes: dict[str, RecomputeMode] = {}
    for room in budgets:
        kinds, members = _unit_classes(plan, room, repeated_comm_seconds[id(room.local_profile)])
        counts = solve_modes(kinds, *_remaining_budget(plan, room))
        if counts is None:
            return None
        for name, mode in _assign_modes(members, counts).items():
            modes[name] = max(mode, modes.get(name, "none"), key=RECOMPUTE_MODES.index)
    if not modes:
        return None
    try:
        return replace(plan, memory=replace(plan.memory, layers={**plan.memory.layers, **modes}))
    except RequestError:
        return None


def solve_modes(
    unit_classes: Sequence[UnitClass], budgets: Sequence[float], rematerialized_bytes: float = 0.0
) -> list[dict[RecomputeMode, int]] | None:
    """How many of each kind have which mode, so that time is least. `budgets` are the bytes that there are at each moment, and
    `rematerialized_bytes` those that some other layer brings back. None if nothing fits."""
    plain = [
        rematerialized_bytes + sum(kind.count * kind.saved_bytes["none"] * kind.in_flight[at] for kind in unit_classes) for at in range(len(budgets))
    ]
    if all(need <= room for need, room in zip(plain, budgets, strict=True)):
        return [{"none": kind.count} for kind in unit_classes]
    if min(budgets) <= 0 or not unit_classes:
        return None
    return _IntegerProgram(unit_classes, budgets, rematerialized_bytes).solve()


class _IntegerProgram:
    """The program in the solver's words: a column for the count of each kind in each mode, one that says whether there is any, and one for what is
    brought back. Bytes are counted in rooms and seconds in the dearest block's, so that numbers are near 1."""

    def __init__(self, unit_classes: Sequence[UnitClass], budgets: Sequence[float], rematerialized_bytes: float) -> None:
        import highspy  # here: it takes a tenth of a second that few searches need

        self._columns = 0
        self._solver: Any = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0)):
            self._solver.setOptionValue(option, value)
        self._integer = highspy.HighsVarType.kInteger
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._infinity = highspy.kHighsInf
        dearest = max((s for kind in unit_classes for s in kind.seconds.values()), default=0.0) or 1.0
        unit = max(budgets)
        passing = self._add_column(0.0, self._infinity, integer=False, lower=rematerialized_bytes / unit)
        self._count_columns: list[dict[RecomputeMode, int]] = []
        for kind in unit_classes:
            of = {mode: self._add_column(kind.seconds[mode] / dearest, kind.count) for mode in kind.modes}
            self._add_row(kind.count, kind.count, dict.fromkeys(of.values(), 1.0))
            for mode in kind.modes[1:]:
                some = self._add_column(0.0, 1)
                self._add_row(-self._infinity, 0.0, {of[mode]: 1.0, some: -float(kind.count)})
                self._add_row(0.0, self._infinity, {passing: 1.0, some: -kind.rematerialized_bytes[mode] / unit})
            self._count_columns.append(of)
        for at, room in enumerate(budgets):
            used = {
                column: k.in_flight[at] * k.saved_bytes[m] / unit
                for k, of in zip(unit_classes, self._count_columns, strict=True)
                for m, column in of.items()
            }
            self._add_row(-self._infinity, room / unit * (1 - _SOLVER_TOLERANCE), {**used, passing: 1.0})

    def solve(self) -> list[dict[RecomputeMode, int]] | None:
        self._solver.run()
        if self._solver.getModelStatus() != self._optimal:
            return None
        values = self._solver.getSolution().col_value
        return [{mode: round(values[column]) for mode, column in of.items()} for of in self._count_columns]

    def _add_column(self, cost: float, upper: float, integer: bool = True, lower: float = 0.0) -> int:
        self._solver.addVar(lower, float(upper))
        self._solver.changeColCost(self._columns, cost)
        if integer:
            self._solver.changeColIntegrality(self._columns, self._integer)
        self._columns += 1
        return self._columns - 1

    def _add_row(self, lower: float, upper: float, terms: Mapping[int, float]) -> None:
        self._solver.addRow(float(lower), float(upper), len(terms), list(terms), list(terms.values()))


def _unit_classes(plan: Plan, budget: ActivationBudget, repeated_comm_seconds: Mapping[str, float]) -> tuple[list[UnitClass], list[list[str]]]:
    """The kinds among a rank's units whose mode is open, and the names of those that belong to each."""
    price = ComputeCost(budget.rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
    memo: dict[tuple[int, str, bool], float] = {}
    found: dict[tuple[Any, ...], list[str]] = {}
    for layer, name in zip(budget.local_profile.layers, budget.layer_names, strict=True):
        if not _is_mode_open(plan, layer):
            continue
        modes = _allowed_modes(plan, layer)
        times = [price.layer_seconds(layer, "forward", memo, cheap_only=cheap) for cheap in (True, False)]
        seconds = {"none": 0.0, "selective": times[0], "full": times[1] + repeated_comm_seconds.get(layer.name, 0.0)}
        rows = tuple((mode, seconds[mode], *saved_activation_bytes(plan, layer, mode)) for mode in modes)
        found.setdefault((rows, tuple(counts.get(layer.name, 1) for counts in budget.in_flight)), []).append(name)
    kinds = [
        UnitClass(len(names), {m: s for m, s, _, _ in rows}, {m: kept for m, _, kept, _ in rows}, {m: back for m, _, _, back in rows}, flight)
        for (rows, flight), names in found.items()
    ]
    return kinds, list(found.values())


def _remaining_budget(plan: Plan, budget: ActivationBudget) -> tuple[list[float], float]:
    """What layers whose mode is not open leave of the room at each moment, and what one of them brings back."""
    fixed = [
        (layer.name, *saved_activation_bytes(plan, layer, plan.memory.recompute_mode(layer.name)))
        for layer in budget.local_profile.layers
        if not _is_mode_open(plan, layer)
    ]
    left = [budget.bytes - sum(counts.get(name, 1) * kept for name, kept, _ in fixed) for counts in budget.in_flight]
    return left, max((back for _, _, back in fixed), default=0.0)


def _is_mode_open(plan: Plan, layer: LayerProfile) -> bool:
    return layer.name in plan.memory.units and layer.name not in plan.memory.layers


def _allowed_modes(plan: Plan, layer: LayerProfile) -> list[RecomputeMode]:
    """What `execute` can do with a unit under this plan; a plan that it cannot run at all refuses itself."""
    owned = any(table.module.startswith(f"{layer.name}.") for table in plan.expert.tables)
    split = plan.compile != "none" and plan.mesh.degree("tp") > 1
    if owned or plan.splits_backward:
        return ["none"]
    return ["none", "full"] if split or layer.has_inplace_ops or plan.spatial.grid else list(RECOMPUTE_MODES)


def _repeated_comm_seconds(plan: Plan, cluster: Cluster, budget: ActivationBudget) -> dict[str, float]:
    """By unit: what the meetings of other axes that a unit repeats take from computation."""
    if plan.mesh.group_size("data") * plan.mesh.pp == plan.world and plan.mesh.cp == plan.mesh.ep == 1:
        return {}
    hidden = budget.rates.overlap if "gradients" in plan.sync.overlap else 0.0
    price = cache(lambda action: collective_seconds(action, plan, cluster, budget.rates))  # calls of equal blocks differ in their names
    every = layer_collectives(plan, budget.local_profile, MeshCoordinate(pp=budget.rank))
    return {unit: (1.0 - hidden) * sum(price(action.renamed("")) for action in met["again"]) for unit, met in every.items()}


def _assign_modes(unit_names: Sequence[Sequence[str]], counts: ModeCounts) -> dict[str, RecomputeMode]:
    """Those of a kind that come first recompute most: what they keep would be kept longest."""
    found: dict[str, RecomputeMode] = {}
    for names, of in zip(unit_names, counts, strict=True):
        modes = [mode for mode in reversed(RECOMPUTE_MODES) for _ in range(of.get(mode, 0))]
        found |= {name: mode for name, mode in zip(names, modes, strict=True) if mode != "none"}
    return found
