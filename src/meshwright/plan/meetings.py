"""What ranks exchange inside of a step because they share its layers, added up over the model: what bounds know of cp, ep and grids."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
from meshwright.schedule import Place, local_profile
from meshwright.schedule.expand import meetings


@dataclass(frozen=True)
class Met:
    """All calls of one operation along one axis that one micro-batch makes in all layers, and of these the ones that full recomputation of
    units repeats: how many, the bytes of one sample, and what each further sample adds."""

    op: str
    axis: str
    once: tuple[int, float, float]
    again: tuple[int, float, float]

    def calls(self, again: bool) -> int:
        return self.once[0] + again * self.again[0]

    def bytes(self, samples: int, again: bool) -> float:
        return sum(first + (samples - 1) * more for _, first, more in (self.once, self.again)[: 1 + again])


def all_meetings(cut: Plan, profile: ModelProfile, units: Collection[str]) -> tuple[Met, ...]:
    """Messages between two ranks are left out: they are few, and not among all of an axis."""
    one, two = (_sums(cut, profile.at(samples), units) for samples in (1, 2))
    none = (0, 0.0)
    keys = dict.fromkeys((op, axis) for op, axis, _ in one)
    return tuple(Met(*key, *((*one.get((*key, again), none), two.get((*key, again), none)[1] - one.get((*key, again), none)[1])
                             for again in (False, True))) for key in keys)  # fmt: skip


def _sums(cut: Plan, profile: ModelProfile, units: Collection[str]) -> dict[tuple[str, str, bool], tuple[int, float]]:
    found: dict[tuple[str, str, bool], tuple[int, float]] = {}

    def add(action: Action, again: bool) -> None:
        size = action.bytes if action.likely is None else action.likely
        if not action.group:
            calls, before = found.get((action.op, action.axis, again), (0, 0.0))
            found[action.op, action.axis, again] = calls + 1, before + size

    for layer, phases in meetings(cut, local_profile(cut, profile, 0), Place()).items():
        for action in (*phases["forward"], *phases["backward"]):
            add(action, False)
        for action in phases["again"] if layer in units else ():
            add(action, True)
    return found


def owned_bytes(cut: Plan, profile: ModelProfile) -> float:
    """What the first owner has of experts and tables, trained."""
    owned = cut.owners.parameters if cut.mesh.ep > 1 else frozenset[str]()
    return float(sum(t.bytes for t in local_profile(cut, profile, 0).tensors if t.name in owned and t.trainable)) if owned else 0.0
