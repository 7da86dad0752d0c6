"""Parameters that several layers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan


def check_ties(plan: Plan, ties: Iterable[Sequence[str]]) -> None:
    """In a pipeline ZeRO-3 gathers layer by layer, so layers of one rank cannot share a parameter. `ties` are the names of one parameter each."""
    if plan.mesh.pp == 1 or plan.memory.zero != 3:
        return
    ranks = {layer: plan.stage_rank(i) for i, stage in enumerate(plan.stages) for layer in stage.layers}
    for names in ties:
        owners = {max((n for n in ranks if name.startswith(f"{n}.")), key=len, default="") for name in names} - {""}
        for rank in range(plan.mesh.pp):
            here = sorted(n for n in owners if ranks[n] == rank)
            if len(here) > 1:
                raise RequestError(f"zero=3 with pp: {' and '.join(here)} share a parameter on one pipeline rank: use zero=1")
