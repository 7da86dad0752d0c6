"""Totals of the collectives inside layers over a whole model, by operation and axis: the communication of cp, ep and 2D tensor axes for the
bounds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.schedule import MeshCoordinate, local_profile
from meshwright.schedule.step_actions import layer_collectives


@dataclass(frozen=True)
class CollectiveTotal:
    """All calls of one operation along one axis that a micro-batch makes in all layers, and those that full recomputation of units repeats: each
    as (number of calls, bytes with one sample, bytes that each further sample adds)."""

    op: str
    axis: str
    first_pass: tuple[int, float, float]
    recomputed: tuple[int, float, float]

    def calls(self, with_recompute: bool) -> int:
        return self.first_pass[0] + with_recompute * self.recomputed[0]

    def bytes(self, samples: int, with_recompute: bool) -> float:
        return sum(first + (samples - 1) * more for _, first, more in (self.first_pass, self.recomputed)[: 1 + with_recompute])


def collective_totals(sharding: Plan, profile: ModelProfile, units: Collection[str]) -> tuple[CollectiveTotal, ...]:
    """The totals by operation and axis, without sends between two ranks: they are few, and do not span the axis."""
    one, two = (_sum_collectives(sharding, profile.at_batch(samples), units) for samples in (1, 2))

    def total(op: str, axis: str, recomputed: bool) -> tuple[int, float, float]:
        (calls, first), (_, second) = (sums.get((op, axis, recomputed), (0, 0.0)) for sums in (one, two))
        return calls, first, second - first

    return tuple(CollectiveTotal(*key, total(*key, False), total(*key, True)) for key in dict.fromkeys((op, axis) for op, axis, _ in one))


def _sum_collectives(sharding: Plan, profile: ModelProfile, units: Collection[str]) -> dict[tuple[str, str, bool], tuple[int, float]]:
    """By (operation, axis, whether recomputed): calls and bytes."""
    sums: dict[tuple[str, str, bool], tuple[int, float]] = {}
    for layer, phases in layer_collectives(sharding, local_profile(sharding, profile, 0), MeshCoordinate()).items():
        for phase in ("forward", "backward", "again") if layer in units else ("forward", "backward"):
            for action in (a for a in phases[phase] if not a.group_size):
                key = (action.op, action.axis, phase == "again")
                calls, size = sums.get(key, (0, 0.0))
                sums[key] = calls + 1, size + (action.bytes if action.expected_bytes is None else action.expected_bytes)
    return sums


def expert_parameter_bytes(sharding: Plan, profile: ModelProfile) -> float:
    """Bytes of trainable expert and embedding-table parameters on the first ep rank."""
    names = sharding.expert.parameters if sharding.mesh.ep > 1 else frozenset[str]()
    return float(sum(t.bytes for t in local_profile(sharding, profile, 0).tensors if t.name in names and t.trainable)) if names else 0.0
