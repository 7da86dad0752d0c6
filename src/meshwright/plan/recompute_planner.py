"""Chooses the recompute mode of each unit (save everything, save expensive results, save the input alone) by an integer program for each pipeline
rank, solved exactly (HiGHS).

[Note: recomputation as an integer program]
The variables are counts: how many of the equal blocks have which mode. The objective is the time that recomputation adds to a micro-batch. The
constraint is memory: activations of all micro-batches in flight, plus the one unit that is rematerialized at a time, must fit beside the rest.
Every rank has its own program: later ranks of a pipeline have fewer micro-batches in flight, and recompute less.
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

_BUDGET_REDUCTIONS = (0.0, 0.02, 0.05, 0.1, 0.2)  # of the budget, tried in turn while the solution does not fit
_SOLVER_TOLERANCE = 4e-6  # of the budget: the solver's feasibility tolerance may exceed it a little


@dataclass(frozen=True)
class UnitClass:
    """A number of equal units, and what each allowed mode costs one of them."""

    count: int
    seconds: Mapping[RecomputeMode, float]
    saved_bytes: Mapping[RecomputeMode, float]  # saved for backward by one micro-batch
    rematerialized_bytes: Mapping[RecomputeMode, float]  # recomputed in backward, one unit at a time
    in_flight: tuple[int, ...]  # micro-batches in flight, at each moment that may be the peak

    @property
    def modes(self) -> list[RecomputeMode]:
        return [mode for mode in RECOMPUTE_MODES if mode in self.seconds]


ModeCounts = Sequence[Mapping[RecomputeMode, int]]  # one mapping for each unit class


def choose_mixed_recompute(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Plan | None:
    """The plan with the recomputation that makes it fit in the least time; None where it fits without, or where nothing makes it fit. Units whose
    mode the user set keep it. The program assumes one workspace for all layers and ignores gradients that are allocated while activations are
    freed, so its solution is verified by an estimate, and solved again with a smaller budget. If it finds nothing, one mode for all units is
    tried."""
    if plan.splits_backward:
        return None
    every = list(activation_budgets(plan, profile, workload, cluster, calibration))
    met = {
        id(room.local_profile): _repeated_comm_seconds(plan, cluster, room) for room in {id(room.local_profile): room for room in every}.values()
    }  # equal ranks have equal collectives
    for less in _BUDGET_REDUCTIONS:
        found = _plan_with_modes(plan, [replace(room, bytes=int(room.bytes * (1 - less))) for room in every], met)
        if found is None:
            break
        if estimate(found, profile, workload, cluster, calibration, with_time=False).fits:
            return found
    if estimate(plan, profile, workload, cluster, calibration, with_time=False).fits:
        return None
    alike = (other for mode in RECOMPUTE_MODES[1:] if (other := _recompute_all(plan, profile, mode)) is not None)  # the faster mode first
    return next((other for other in alike if estimate(other, profile, workload, cluster, calibration, with_time=False).fits), None)


def _recompute_all(plan: Plan, profile: ModelProfile, mode: RecomputeMode) -> Plan | None:
    """The plan with all units whose mode is open in this mode; None if no unit allows it."""
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
    """How many units of each class have which mode, for the least time; None if nothing fits. `budgets` are the bytes available at each moment,
    and `rematerialized_bytes` those that another layer recomputes in backward."""
    plain = [
        rematerialized_bytes + sum(kind.count * kind.saved_bytes["none"] * kind.in_flight[at] for kind in unit_classes) for at in range(len(budgets))
    ]
    if all(need <= room for need, room in zip(plain, budgets, strict=True)):
        return [{"none": kind.count} for kind in unit_classes]
    if min(budgets) <= 0 or not unit_classes:
        return None
    return _IntegerProgram(unit_classes, budgets, rematerialized_bytes).solve()


class _IntegerProgram:
    """The program for the solver: a column for the count of each class in each mode, one that says whether that count is positive, and one for the
    rematerialized bytes. Bytes are in units of the largest budget and seconds in units of the most expensive unit's, so that numbers are near 1."""

    def __init__(self, unit_classes: Sequence[UnitClass], budgets: Sequence[float], rematerialized_bytes: float) -> None:
        import highspy  # imported here: the import takes 0.1 s, and few searches need it

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
    """The classes of a rank's units whose mode is open, and the names of the units in each."""
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
    """The bytes that layers with a fixed mode leave of the budget at each moment, and the most bytes that one of them rematerializes."""
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
    """The modes that `execute` supports for a unit under this plan; Plan itself refuses what cannot run at all."""
    owned = any(table.module.startswith(f"{layer.name}.") for table in plan.expert.tables)
    split = plan.compile != "none" and plan.mesh.degree("tp") > 1
    if owned or plan.splits_backward:
        return ["none"]
    return ["none", "full"] if split or layer.has_inplace_ops or plan.spatial.grid else list(RECOMPUTE_MODES)


def _repeated_comm_seconds(plan: Plan, cluster: Cluster, budget: ActivationBudget) -> dict[str, float]:
    """By unit: seconds of its model-parallel collectives that recomputation repeats and computation does not overlap."""
    if plan.mesh.group_size("data") * plan.mesh.pp == plan.world and plan.mesh.cp == plan.mesh.ep == 1:
        return {}
    hidden = budget.rates.overlap if "gradients" in plan.sync.overlap else 0.0
    price = cache(lambda action: collective_seconds(action, plan, cluster, budget.rates))  # collectives of equal blocks differ only in their names
    every = layer_collectives(plan, budget.local_profile, MeshCoordinate(pp=budget.rank))
    return {unit: (1.0 - hidden) * sum(price(action.renamed("")) for action in met["again"]) for unit, met in every.items()}


def _assign_modes(unit_names: Sequence[Sequence[str]], counts: ModeCounts) -> dict[str, RecomputeMode]:
    """Assign modes to names: the first units of a class recompute most, since their activations would be saved longest."""
    found: dict[str, RecomputeMode] = {}
    for names, of in zip(unit_names, counts, strict=True):
        modes = [mode for mode in reversed(RECOMPUTE_MODES) for _ in range(of.get(mode, 0))]
        found |= {name: mode for name, mode in zip(names, modes, strict=True) if mode != "none"}
    return found
