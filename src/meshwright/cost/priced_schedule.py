"""A plan's schedule with the seconds of every rank: each by its own device kind, samples and share of the sharded state."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, Schedule
from meshwright.cost.action_cost import ActionCost
from meshwright.cost.collective_cost import padding_factor
from meshwright.cost.rank_classes import rates_labels
from meshwright.schedule.lower import PricedRankClass, lower


def priced_schedule(plan: Plan, profile: ModelProfile, optimizer: str, cluster: Cluster, calibration: Calibration, *, clip: bool = False) -> Schedule:
    """The plan's steady-state step on a cluster; collectives with uneven parts carry the padded bytes."""
    schedule = lower(plan, profile, priced_rank_classes(plan, optimizer, cluster, calibration), clip=clip)
    if not plan.balance.state_fractions:
        return schedule
    return replace(schedule, programs=tuple(tuple(_with_padding(action, plan) for action in program) for program in schedule.programs))


def priced_rank_classes(plan: Plan, optimizer: str, cluster: Cluster, calibration: Calibration) -> list[PricedRankClass]:
    """Ranks that are priced together. One class where nothing distinguishes the ranks, without looking at each: there may be a hundred thousand."""
    labels, mesh = rates_labels(plan, cluster.in_device_order(plan.device_order), calibration), plan.mesh

    def action_cost(label: str, shard: int = 0) -> ActionCost:
        return ActionCost(plan, optimizer, calibration.rates_for(plan.world, label), shard)

    if len(set(labels)) <= 1 and not plan.balance.shares and not plan.balance.state_fractions:
        return [PricedRankClass(action_cost(labels[0] if labels else ""), plan.max_micro_batch_size, range(plan.world))]
    classes: dict[tuple[str, int, float], list[int]] = {}
    for rank in range(plan.world):
        label = labels[rank % len(labels)] if labels else ""
        classes.setdefault((label, plan.micro_batch_size(rank), plan.state_fraction(mesh.coordinate(rank, "shard"))), []).append(rank)
    items = classes.items()
    return [PricedRankClass(action_cost(label, mesh.coordinate(ranks[0], "shard")), samples, ranks) for (label, samples, _), ranks in items]


def _with_padding(action: Action, plan: Plan) -> Action:
    padding = round(action.bytes * (padding_factor(action, plan) - 1.0))
    return replace(action, bytes=action.bytes + padding, padding=action.padding + padding) if padding else action
