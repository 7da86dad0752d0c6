"""Loads a user's own strategy by reference, applies it to the planner's best plan and estimates the result; fills in missing partitioning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction

from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.model import ModelProfile
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.plan import Plan
from meshwright.core.plan_strategy import Strategy, as_strategy, differences
from meshwright.core.quantities import show_seconds
from meshwright.cost import estimate
from meshwright.plan import Ranking, ScoredPlan, choose_cp_policies, choose_expert_parallel, choose_tensor_grid, cut_stages, reject_if_unsharded
from meshwright.zoo.factory import import_reference


def load_strategy(reference: str) -> Strategy:
    """The strategy at `path/to/file.py:name` or `package.module:name`; the name is the decorator's or the function's."""
    source = reference.rpartition(":")[0]
    if not source:
        raise RequestError(f"strategy={reference}: write it as FILE.py:NAME or package.module:NAME")
    module, name = import_reference(reference)
    strategies = {value.name: value for value in vars(module).values() if isinstance(value, Strategy)}
    strategy = strategies.get(name, getattr(module, name, None))
    if strategy is None:
        names = [n for n, v in vars(module).items() if isinstance(v, Strategy) or (isfunction(v) and v.__module__ == module.__name__)]
        raise unknown_name_error("strategy", name, [*strategies, *names], source) if names else RequestError(f"{reference}: {source} has no '{name}'")
    return as_strategy(strategy, reference)


def apply_strategy(ranking: Ranking, strategy: Strategy, trace_dataflow: Callable[[Plan], Dataflow | None]) -> tuple[Ranking, str]:
    """The ranking with the strategy's version of the best plan put first, and a line that says what changed and what it costs."""
    best, profile, cluster = ranking.best, ranking.profile, ranking.cluster
    plan = strategy.apply(best.plan, profile, cluster)
    if needs_partitioning(plan):
        plan = fill_partitioning(plan, trace_dataflow(plan), profile)
    predicted = estimate(plan, profile, ranking.workload, cluster, ranking.calibration)
    changed = ", ".join(differences(best.plan, plan))
    if not changed:
        return ranking, f"Strategy {strategy.name} did not change the best plan."
    fits = "" if predicted.fits else f", and does not fit: {predicted.reason}"
    cost = f"{show_seconds(predicted.step_s)} per step instead of {show_seconds(best.estimate.step_s)}{fits}"
    line = f"Strategy {strategy.name} changed {changed}: {plan.summary()}, {cost}. The reasons below are for the plan before this change."
    return replace(ranking, scored=(ScoredPlan(plan, predicted), *ranking.scored)), line


def needs_partitioning(plan: Plan) -> bool:
    """Whether the mesh has a pp, ep, cp or tp axis for which the plan names no partitioning."""
    lacks_stages = plan.mesh.pp > 1 and not any(stage.entry for stage in plan.stages)
    lacks_experts = plan.mesh.ep > 1 and not plan.expert
    lacks_cp = plan.mesh.cp > 1 and not plan.context.attention_sites and not plan.spatial.grid
    return lacks_stages or lacks_experts or lacks_cp or (plan.mesh.degree("tp") > 1 and not plan.tensor.sharded_dims)


def fill_partitioning(plan: Plan, dataflow: Dataflow | None, profile: ModelProfile) -> Plan:
    """The plan with the partitioning that its mesh needs and it leaves out: tp shards, expert placement, cp policies and pipeline stages."""
    pp = plan.mesh.pp
    if dataflow is None:
        raise RequestError(f"mesh {plan.mesh} needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    if plan.mesh.degree("tp") > 1 and not plan.tensor.sharded_dims:
        grid = choose_tensor_grid(dataflow, plan.mesh.tp, plan.placements, profile.layer_names if pp > 1 else ())
        reject_if_unsharded(grid, plan.mesh.tp)
        plan = replace(plan, tensor=grid[0], tensor_y=grid[1])
    if plan.mesh.ep > 1 and not plan.expert:
        plan = replace(plan, expert=choose_expert_parallel(dataflow, plan.mesh.ep))
    if plan.mesh.cp > 1 and not plan.context.attention_sites and not plan.spatial.grid:
        (tensor, tensor_y), context, spatial = choose_cp_policies(plan.mesh, dataflow, (plan.tensor, plan.tensor_y), plan.memory.precision)
        plan = replace(plan, tensor=tensor, tensor_y=tensor_y, context=context, spatial=spatial)
    if pp > 1 and not any(stage.entry for stage in plan.stages):
        count = pp * schedule_traits(plan.schedule).stages_per_rank
        plan = replace(plan, stages=cut_stages(dataflow, profile, count, plan.tensor, plan.tensor_y, plan.mesh.cp))
    return plan
