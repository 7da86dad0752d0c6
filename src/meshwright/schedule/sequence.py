"""Positions that tensor-parallel ranks share between cut parts, before the run: what travels where (see [Note: sequence])."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.schedule import Action
from meshwright.core.tensor import Meet, TensorPolicy
from meshwright.schedule.spatial import Spot


def sequence_meetings(policy: TensorPolicy, ways: int, axis: str, samples: int) -> Iterator[Spot]:
    """Backends move equal pieces, so positions that do not divide travel padded. What happens at a module's door is not repeated when that
    module itself is recomputed."""
    sizes = {strand.name: strand for strand in policy.strands}

    def moved(kind: str, op: str, meet: Meet) -> Action:
        assert meet.along is not None
        strand, size = sizes[meet.along.strand], meet.at(samples)
        padded = size / strand.size * strand.piece(0, ways)[1] * ways
        return Action(f"{kind}/{meet.module}", op, bytes=round(padded), padding=round(padded - size), axis=axis)  # type: ignore[arg-type]

    for meet in (m for m in policy.sums if m.along):
        yield Spot(meet.module, "forward", moved("sum", "reduce_scatter", meet), meet.final_in)
        yield Spot(meet.module, "backward", moved("sum", "all_gather", meet))
    for meet in (m for m in policy.enters if m.along):
        yield Spot(meet.module, "forward", moved("enter", "all_gather", meet), (meet.module,))
        yield Spot(meet.module, "backward", moved("enter", "reduce_scatter", meet))
    for meet in policy.collects:
        yield Spot(meet.module, "forward", moved("collect", "all_gather", meet), (meet.module,))
    for meet in (m for m in policy.deals if m.trained):
        yield Spot(meet.module, "backward", moved("deal", "all_gather", meet))
