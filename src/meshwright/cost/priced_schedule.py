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
    found = lower(plan, profile, priced_rank_classes(plan, optimizer, cluster, calibration), clip=clip)
    if not plan.balance.state_fractions:
        return found
    return replace(found, programs=tuple(tuple(_with_padding(action, plan) for action in program) for program in found.programs))


def priced_rank_classes(plan: Plan, optimizer: str, cluster: Cluster, calibration: Calibration) -> list[PricedRankClass]:
    """Ranks that are priced together. One class where nothing distinguishes the ranks, without looking at each: there may be a hundred thousand."""
    names, mesh, parts = rates_labels(plan, cluster.in_device_order(plan.device_order), calibration), plan.mesh, plan.balance
    if len(set(names)) <= 1 and not parts.shares and not parts.state_fractions:
        price = ActionCost(plan, optimizer, calibration.rates_for(plan.world, names[0] if names else ""))
        return [PricedRankClass(price, plan.max_micro_batch_size, range(plan.world))]
    found: dict[tuple[str, int, float], list[int]] = {}
    for rank in range(plan.world):
        name = names[rank % len(names)] if names else ""
        found.setdefault((name, plan.micro_batch_size(rank), plan.state_fraction(mesh.coordinate(rank, "shard"))), []).append(rank)
    return [
        PricedRankClass(ActionCost(plan, optimizer, calibration.rates_for(plan.world, name), mesh.coordinate(ranks[0], "shard")), samples, ranks)
        for (name, samples, _), ranks in found.items()
    ]


def _with_padding(action: Action, plan: Plan) -> Action:
    more = round(action.bytes * (padding_factor(action, plan) - 1.0))
    return replace(action, bytes=action.bytes + more, padding=action.padding + more) if more else action
