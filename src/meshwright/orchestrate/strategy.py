"""A user's own strategy in the planner's hands: found by reference, applied to the best plan, priced like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction

from meshwright.core.errors import RequestError, unknown
from meshwright.core.model import ModelProfile
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.plan import Plan
from meshwright.core.strand import Flow
from meshwright.core.strategy import Strategy, as_strategy, differences
from meshwright.core.units import show_seconds
from meshwright.cost import estimate
from meshwright.plan import Ranking, Scored, choose_grid, choose_owners, cut_stages, refuse_if_nothing, share_positions
from meshwright.zoo.factory import import_reference


def load_strategy(reference: str) -> Strategy:
    """`path/to/file.py:name` or `package.module:name`, where the name is the decorator's or the function's."""
    place, colon, _ = reference.rpartition(":")
    if not colon or not place:
        raise RequestError(f"strategy={reference}: write it as FILE.py:NAME or package.module:NAME")
    module, wanted = import_reference(reference)
    named = {value.name: value for value in vars(module).values() if isinstance(value, Strategy)}
    found = named.get(wanted, getattr(module, wanted, None))
    if found is None:
        own = [n for n, v in vars(module).items() if isinstance(v, Strategy) or (isfunction(v) and v.__module__ == module.__name__)]
        raise unknown("strategy", wanted, [*named, *own], place) if own else RequestError(f"{reference}: {place} has no '{wanted}'")
    return as_strategy(found, reference)


def transform(ranking: Ranking, strategy: Strategy, flow: Callable[[Plan], Flow | None]) -> tuple[Ranking, str]:
    """The ranking led by what the strategy makes of its best plan, and a line that says what that changed and what it costs."""
    best, profile, cluster = ranking.best, ranking.profile, ranking.cluster
    plan = strategy.change(best.plan, profile, cluster)
    if needs_cuts(plan):
        plan = fill_cuts(plan, flow(plan), profile)
    found = estimate(plan, profile, ranking.workload, cluster, ranking.calibration)
    changed = ", ".join(differences(best.plan, plan))
    if not changed:
        return ranking, f"Strategy {strategy.name} left the best plan as it was."
    fits = "" if found.fits else f", and does not fit: {found.reason}"
    cost = f"{show_seconds(found.step_s)} a step instead of {show_seconds(best.estimate.step_s)}{fits}"
    line = f"Strategy {strategy.name} changed {changed}: {plan.summary()}, {cost}. What follows is about the plan it was given."
    return replace(ranking, scored=(Scored(plan, found), *ranking.scored)), line


def needs_cuts(plan: Plan) -> bool:
    """Does the mesh ask for pieces of the model that the plan does not name?"""
    uncut = plan.mesh.pp > 1 and not any(stage.entry for stage in plan.stages)
    uncut |= plan.mesh.ep > 1 and not plan.owners
    uncut |= plan.mesh.cp > 1 and not plan.context.attends and not plan.spatial.grid
    return uncut or (plan.mesh.degree("tp") > 1 and not plan.tensor.strands)


def fill_cuts(plan: Plan, flow: Flow | None, profile: ModelProfile) -> Plan:
    """A plan written by hand or by a strategy may leave its cuts, and who owns what, to us."""
    pp = plan.mesh.pp
    if flow is None:
        raise RequestError(f"mesh {plan.mesh} needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    if plan.mesh.degree("tp") > 1 and not plan.tensor.strands:
        grid = choose_grid(flow, plan.mesh.tp, plan.placements, profile.layer_names if pp > 1 else ())
        refuse_if_nothing(grid, plan.mesh.tp)
        plan = replace(plan, tensor=grid[0], across=grid[1])
    if plan.mesh.ep > 1 and not plan.owners:
        plan = replace(plan, owners=choose_owners(flow, plan.mesh.ep))
    if plan.mesh.cp > 1 and not plan.context.attends and not plan.spatial.grid:
        (tensor, across), context, spatial = share_positions(plan.mesh, flow, (plan.tensor, plan.across), plan.memory.precision)
        plan = replace(plan, tensor=tensor, across=across, context=context, spatial=spatial)
    if pp > 1 and not any(stage.entry for stage in plan.stages):
        count = pp * schedule_traits(plan.schedule).stages_per_rank
        plan = replace(plan, stages=cut_stages(flow, profile, count, plan.tensor, plan.across, plan.mesh.cp))
    return plan
