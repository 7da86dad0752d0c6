"""Totals of the collectives inside layers over a whole model, by operation and axis: the communication of cp, ep and 2D tensor axes for the
bounds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
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
    none = (0, 0.0)
    keys = dict.fromkeys((op, axis) for op, axis, _ in one)
    return tuple(CollectiveTotal(*key, *((*one.get((*key, again), none), two.get((*key, again), none)[1] - one.get((*key, again), none)[1])
                             for again in (False, True))) for key in keys)  # fmt: skip


def _sum_collectives(sharding: Plan, profile: ModelProfile, units: Collection[str]) -> dict[tuple[str, str, bool], tuple[int, float]]:
    found: dict[tuple[str, str, bool], tuple[int, float]] = {}

    def add(action: Action, recomputed: bool) -> None:
        size = action.bytes if action.expected_bytes is None else action.expected_bytes
        if not action.group_size:
            calls, before = found.get((action.op, action.axis, recomputed), (0, 0.0))
            found[action.op, action.axis, recomputed] = calls + 1, before + size

    for layer, phases in layer_collectives(sharding, local_profile(sharding, profile, 0), MeshCoordinate()).items():
        for action in (*phases["forward"], *phases["backward"]):
            add(action, False)
        for action in phases["again"] if layer in units else ():
            add(action, True)
    return found


def expert_parameter_bytes(sharding: Plan, profile: ModelProfile) -> float:
    """Bytes of trainable expert and embedding-table parameters on the first ep rank."""
    owned = sharding.expert.parameters if sharding.mesh.ep > 1 else frozenset[str]()
    return float(sum(t.bytes for t in local_profile(sharding, profile, 0).tensors if t.name in owned and t.trainable)) if owned else 0.0
