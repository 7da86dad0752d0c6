"""Load Balancer, deciding half: ranks on unlike devices take as many samples as lets them all finish at one moment."""

from __future__ import annotations

import heapq
from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import BalancePolicy, Plan
from meshwright.cost.compute import ComputeCost


def nearly_equal(batch: int, mesh: Mesh) -> BalancePolicy:
    """Equal shares, and one sample more for the first ranks where they do not divide. A pipeline's are equal or refused."""
    width = mesh.data_width
    if mesh.pp > 1 or width == 1 or batch < width:
        return BalancePolicy()
    return BalancePolicy(tuple(batch // width + (rank < batch % width) for rank in range(width)))


def balanced(plan: Plan, profile: ModelProfile, calibration: Calibration) -> Plan:
    """The plan with shares by speed, as measured for each kind of device; one whose shares are equal on purpose stays as it is."""
    if not plan.balance.shares:
        return plan
    kinds = [plan.seen_by(rank).device for rank in _first_ranks(plan)]
    lines = {kind: _line(plan, profile, calibration, kind) for kind in set(kinds)}
    shares = deal(plan.global_batch, [lines[kind] for kind in kinds], plan.micro_batches)
    return replace(plan, balance=BalancePolicy(shares))


def deal(samples: int, lines: list[tuple[float, float]], least: int = 1) -> tuple[int, ...]:
    """Shares that end soonest, where rank i takes `a + b·share` seconds: each further sample goes to the rank that would be done first
    with it. No exchange of a sample can then make the last one end sooner."""
    shares = [least] * len(lines)
    heap = [(a + b * (least + 1), i) for i, (a, b) in enumerate(lines)]
    heapq.heapify(heap)
    for _ in range(samples - least * len(lines)):
        _, i = heap[0]
        shares[i] += 1
        a, b = lines[i]
        heapq.heapreplace(heap, (a + b * (shares[i] + 1), i))
    return tuple(shares)


def _first_ranks(plan: Plan) -> list[int]:
    """Of each data rank the first rank: the others of its group are of the same kind."""
    found: dict[int, int] = {}
    for rank in range(plan.world):
        found.setdefault(plan.mesh.data_rank(rank), rank)
    return [found[width] for width in sorted(found)]


def _line(plan: Plan, profile: ModelProfile, calibration: Calibration, kind: str) -> tuple[float, float]:
    """Seconds of forward and backward as a line over a rank's samples, from one sample and from an equal share."""
    price = ComputeCost(calibration.layout(plan.world, kind), plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))

    def seconds(samples: int) -> float:
        memo: dict[tuple[int, str, bool], float] = {}
        layers = profile.at(samples).layers
        return plan.micro_batches * sum(price.layer(layer, phase, memo) for layer in layers for phase in ("forward", "backward"))

    most = max(plan.global_batch // plan.mesh.data_width // plan.micro_batches, 2)
    one, many = seconds(1), seconds(most)
    each = max((many - one) / (most - 1), 0.0)
    return max(one - each, 0.0), each / plan.micro_batches
