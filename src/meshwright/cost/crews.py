"""A plan's schedule with the time that each rank takes: by the kind of its own device, its own samples and its own part of the state."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, Schedule
from meshwright.cost.actions import ActionCost
from meshwright.cost.classes import kinds
from meshwright.cost.collective import stretch
from meshwright.schedule.lower import Crew, lower


def priced_schedule(plan: Plan, profile: ModelProfile, optimizer: str, cluster: Cluster, calibration: Calibration, *, clip: bool = False) -> Schedule:
    """The plan's steady step on a cluster; calls with uneven parts have the bytes that they take on the way."""
    found = lower(plan, profile, crews(plan, optimizer, cluster, calibration), clip=clip)
    if not plan.balance.states:
        return found
    return replace(found, programs=tuple(tuple(_stretched(action, plan) for action in program) for program in found.programs))


def crews(plan: Plan, optimizer: str, cluster: Cluster, calibration: Calibration) -> list[Crew]:
    """Ranks that are priced together. All of them where nothing tells them apart, which is not asked of each: there may be a hundred thousand."""
    names, mesh, parts = kinds(plan, cluster.seated(plan.seats), calibration), plan.mesh, plan.balance
    if len(set(names)) <= 1 and not parts.shares and not parts.states:
        price = ActionCost(plan, optimizer, calibration.layout(plan.world, names[0] if names else ""))
        return [Crew(price, plan.largest_micro_batch, range(plan.world))]
    found: dict[tuple[str, int, float], list[int]] = {}
    for rank in range(plan.world):
        name = names[rank % len(names)] if names else ""
        found.setdefault((name, plan.micro_batch(rank), plan.state_part(mesh.coordinate(rank, "shard"))), []).append(rank)
    return [
        Crew(ActionCost(plan, optimizer, calibration.layout(plan.world, name), mesh.coordinate(ranks[0], "shard")), samples, ranks)
        for (name, samples, _), ranks in found.items()
    ]


def _stretched(action: Action, plan: Plan) -> Action:
    more = round(action.bytes * (stretch(action, plan) - 1.0))
    return replace(action, bytes=action.bytes + more, padding=action.padding + more) if more else action
