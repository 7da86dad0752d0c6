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
    """A number of equal units, and what each allowed mode costs one unit."""

    count: int
    seconds: Mapping[RecomputeMode, float]
    saved_bytes: Mapping[RecomputeMode, float]  # saved for backward by one micro-batch
    rematerialized_bytes: Mapping[RecomputeMode, float]  # recomputed in backward, one unit at a time
    in_flight: tuple[int, ...]  # micro-batches in flight, at each moment that may be the peak

    @property
    def modes(self) -> list[RecomputeMode]:
        return [mode for mode in RECOMPUTE_MODES if mode in self.seconds]


def choose_mixed_recompute(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Plan | None:
    """The plan with the recomputation that makes it fit in the least time; None where it fits without, or where nothing makes it fit. Units whose
    mode the user set keep it. The program assumes one workspace for all layers and ignores gradients that are allocated while activations are
    freed, so its solution is verified by an estimate, and solved again with a smaller budget. If it finds nothing, one mode for all units is
    tried."""
    if plan.splits_backward:
        return None
    budgets = list(activation_budgets(plan, profile, workload, cluster, calibration))
    first_of_equals = {id(budget.local_profile): budget for budget in budgets}  # equal ranks have equal collectives
    comm_seconds = {key: _repeated_comm_seconds(plan, cluster, budget) for key, budget in first_of_equals.items()}

    def fits(candidate: Plan) -> bool:
        return estimate(candidate, profile, workload, cluster, calibration, with_time=False).fits

    for reduction in _BUDGET_REDUCTIONS:
        mixed = _plan_with_modes(plan, [replace(budget, bytes=int(budget.bytes * (1 - reduction))) for budget in budgets], comm_seconds)
        if mixed is None:
            break
        if fits(mixed):
            return mixed
    if fits(plan):
        return None
    uniform = (_recompute_all(plan, profile, mode) for mode in RECOMPUTE_MODES[1:])  # the faster mode first
    return next((candidate for candidate in uniform if candidate is not None and fits(candidate)), None)


def _recompute_all(plan: Plan, profile: ModelProfile, mode: RecomputeMode) -> Plan | None:
    """The plan with all units whose mode is open in this mode; None if no unit allows it."""
    modes: dict[str, RecomputeMode] = {x.name: mode for x in profile.layers if _is_mode_open(plan, x) and mode in _allowed_modes(plan, x)}
    return _with_memory(plan, recompute=mode) if modes and len(modes) == len(plan.memory.units) else _with_layer_modes(plan, modes)


def _with_layer_modes(plan: Plan, modes: Mapping[str, RecomputeMode]) -> Plan | None:
    return _with_memory(plan, layers={**plan.memory.layers, **modes}) if modes else None


def _with_memory(plan: Plan, **changes: Any) -> Plan | None:
    """The plan with a changed memory policy; None if it is not legal."""
    try:
        return replace(plan, memory=replace(plan.memory, **changes))
    except RequestError:
        return None


def _plan_with_modes(plan: Plan, budgets: Sequence[ActivationBudget], comm_seconds: Mapping[int, Mapping[str, float]]) -> Plan | None:
    modes: dict[str, RecomputeMode] = {}
    for budget in budgets:
        classes, unit_names = _unit_classes(plan, budget, comm_seconds[id(budget.local_profile)])
        counts = solve_modes(classes, *_remaining_budget(plan, budget))
        if counts is None:
            return None
        for name, mode in _assign_modes(unit_names, counts).items():
            modes[name] = max(mode, modes.get(name, "none"), key=RECOMPUTE_MODES.index)
    return _with_layer_modes(plan, modes)


def solve_modes(classes: Sequence[UnitClass], budgets: Sequence[float], rematerialized_bytes: float = 0.0) -> list[dict[RecomputeMode, int]] | None:
    """How many units of each class have which mode, for the least time; None if nothing fits. `budgets` are the bytes available at each moment,
    and `rematerialized_bytes` those that another layer recomputes in backward."""

    def bytes_without_recompute(moment: int) -> float:
        return rematerialized_bytes + sum(c.count * c.saved_bytes["none"] * c.in_flight[moment] for c in classes)

    if all(bytes_without_recompute(moment) <= budget for moment, budget in enumerate(budgets)):
        return [{"none": c.count} for c in classes]
    if min(budgets) <= 0 or not classes:
        return None
    return _IntegerProgram(classes, budgets, rematerialized_bytes).solve()


class _IntegerProgram:
    """The program for the solver: a column for the count of each class in each mode, one that says whether that count is positive, and one for the
    rematerialized bytes. Bytes are in units of the largest budget and seconds in units of the most expensive unit's, so that numbers are near 1."""

    def __init__(self, classes: Sequence[UnitClass], budgets: Sequence[float], rematerialized_bytes: float) -> None:
        import highspy  # imported here: the import takes 0.1 s, and few searches need it

        self._columns = 0
        self._solver: Any = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0)):
            self._solver.setOptionValue(option, value)
        self._integer = highspy.HighsVarType.kInteger
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._infinity = highspy.kHighsInf
        max_seconds = max((s for c in classes for s in c.seconds.values()), default=0.0) or 1.0
        max_bytes = max(budgets)
        rematerialized = self._add_column(0.0, self._infinity, integer=False, lower=rematerialized_bytes / max_bytes)
        self._count_columns: list[dict[RecomputeMode, int]] = []
        for c in classes:
            columns = {mode: self._add_column(c.seconds[mode] / max_seconds, c.count) for mode in c.modes}
            self._add_row(c.count, c.count, dict.fromkeys(columns.values(), 1.0))
            for mode in c.modes[1:]:
                is_used = self._add_column(0.0, 1)
                self._add_row(-self._infinity, 0.0, {columns[mode]: 1.0, is_used: -float(c.count)})
                self._add_row(0.0, self._infinity, {rematerialized: 1.0, is_used: -c.rematerialized_bytes[mode] / max_bytes})
            self._count_columns.append(columns)
        for moment, budget in enumerate(budgets):
            counts = [(c, *item) for c, columns in zip(classes, self._count_columns, strict=True) for item in columns.items()]
            saved = {column: c.in_flight[moment] * c.saved_bytes[mode] / max_bytes for c, mode, column in counts}
            self._add_row(-self._infinity, budget / max_bytes * (1 - _SOLVER_TOLERANCE), {**saved, rematerialized: 1.0})

    def solve(self) -> list[dict[RecomputeMode, int]] | None:
        self._solver.run()
        if self._solver.getModelStatus() != self._optimal:
            return None
        values = self._solver.getSolution().col_value
        return [{mode: round(values[column]) for mode, column in columns.items()} for columns in self._count_columns]

    def _add_column(self, cost: float, upper: float, integer: bool = True, lower: float = 0.0) -> int:
        self._solver.addVar(lower, float(upper))
        self._solver.changeColCost(self._columns, cost)
        if integer:
            self._solver.changeColIntegrality(self._columns, self._integer)
        self._columns += 1
        return self._columns - 1

    def _add_row(self, lower: float, upper: float, terms: Mapping[int, float]) -> None:
        self._solver.addRow(float(lower), float(upper), len(terms), list(terms), list(terms.values()))


def _unit_classes(plan: Plan, budget: ActivationBudget, comm_seconds: Mapping[str, float]) -> tuple[list[UnitClass], list[list[str]]]:
    """The classes of a rank's units whose mode is open, and the names of the units in each."""
    price = ComputeCost(budget.rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
    memo: dict[tuple[int, str, bool], float] = {}
    names_by_class: dict[tuple[Any, ...], list[str]] = {}
    for layer, name in zip(budget.local_profile.layers, budget.layer_names, strict=True):
        if not _is_mode_open(plan, layer):
            continue
        cheap, forward = (price.layer_seconds(layer, "forward", memo, cheap_only=only) for only in (True, False))
        seconds = {"none": 0.0, "selective": cheap, "full": forward + comm_seconds.get(layer.name, 0.0)}
        rows = tuple((mode, seconds[mode], *saved_activation_bytes(plan, layer, mode)) for mode in _allowed_modes(plan, layer))
        names_by_class.setdefault((rows, tuple(counts.get(layer.name, 1) for counts in budget.in_flight)), []).append(name)
    classes = [
        UnitClass(len(names), {m: s for m, s, _, _ in rows}, {m: saved for m, _, saved, _ in rows}, {m: again for m, _, _, again in rows}, in_flight)
        for (rows, in_flight), names in names_by_class.items()
    ]
    return classes, list(names_by_class.values())


def _remaining_budget(plan: Plan, budget: ActivationBudget) -> tuple[list[float], float]:
    """The bytes that layers with a fixed mode leave of the budget at each moment, and the most bytes that one of them rematerializes."""
    fixed = [layer for layer in budget.local_profile.layers if not _is_mode_open(plan, layer)]
    sizes = [(layer.name, *saved_activation_bytes(plan, layer, plan.memory.recompute_mode(layer.name))) for layer in fixed]
    remaining = [budget.bytes - sum(counts.get(name, 1) * saved for name, saved, _ in sizes) for counts in budget.in_flight]
    return remaining, max((rematerialized for _, _, rematerialized in sizes), default=0.0)


def _is_mode_open(plan: Plan, layer: LayerProfile) -> bool:
    return layer.name in plan.memory.units and layer.name not in plan.memory.layers


def _allowed_modes(plan: Plan, layer: LayerProfile) -> list[RecomputeMode]:
    """The modes that `execute` supports for a unit under this plan; Plan itself refuses what cannot run at all."""
    has_sharded_tables = any(table.module.startswith(f"{layer.name}.") for table in plan.expert.tables)
    compiled_tp = plan.compile != "none" and plan.mesh.degree("tp") > 1
    if has_sharded_tables or plan.splits_backward:
        return ["none"]
    return ["none", "full"] if compiled_tp or layer.has_inplace_ops or plan.spatial.grid else list(RECOMPUTE_MODES)


def _repeated_comm_seconds(plan: Plan, cluster: Cluster, budget: ActivationBudget) -> dict[str, float]:
    """By unit: seconds of its model-parallel collectives that recomputation repeats and computation does not overlap."""
    if plan.mesh.group_size("data") * plan.mesh.pp == plan.world and plan.mesh.cp == plan.mesh.ep == 1:
        return {}
    overlapped = budget.rates.overlap if "gradients" in plan.sync.overlap else 0.0
    price = cache(lambda action: collective_seconds(action, plan, cluster, budget.rates))  # collectives of equal blocks differ only in their names
    collectives = layer_collectives(plan, budget.local_profile, MeshCoordinate(pp=budget.rank))
    return {unit: (1.0 - overlapped) * sum(price(action.renamed("")) for action in actions["again"]) for unit, actions in collectives.items()}


def _assign_modes(unit_names: Sequence[Sequence[str]], counts: Sequence[Mapping[RecomputeMode, int]]) -> dict[str, RecomputeMode]:
    """Assign modes to names: the first units of a class recompute most, since their activations would be saved longest."""
    modes_by_unit: dict[str, RecomputeMode] = {}
    for names, count in zip(unit_names, counts, strict=True):
        modes = [mode for mode in reversed(RECOMPUTE_MODES) for _ in range(count.get(mode, 0))]
        modes_by_unit |= {name: mode for name, mode in zip(names, modes, strict=True) if mode != "none"}
    return modes_by_unit
