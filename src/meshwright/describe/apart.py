"""Ranks of one kind that turn out unlike: a throttled core, an older card under the same name. A probe tells them apart by their pace."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.calibration import Rates, quicker
from meshwright.describe.probe import slowest

_UNLIKE = 1.5  # a probe's figures of equal ranks differ by less than this factor, on a busy machine too
_FLOPS = 1e8  # of the product by which ranks are compared


def by_pace(every: list[Rates]) -> list[Rates]:
    """What the slowest of all ranks reached and, where ranks differ, what each group of like ones did, under a name of its own. A rank that has
    less of its core than the others (see [Note: crowded cores]) is a slower rank."""
    paces = [rates.compute_rate("matmul", "fp32", _FLOPS) / rates.crowding for rates in every]
    order = sorted(range(len(every)), key=lambda rank: -paces[rank])
    groups: list[list[int]] = []
    for rank in order:
        if groups and paces[groups[-1][0]] < _UNLIKE * paces[rank]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    found = [slowest(every)]
    free = min(rates.crowding for rates in every)
    for group in groups if len(groups) > 1 else ():
        part = slowest([every[rank] for rank in group])
        meetings = {"collectives": found[0].collectives, "curves": found[0].curves, "overlap": found[0].overlap}
        name = f"at {paces[group[-1]] / paces[order[0]]:.0%} of the fastest"
        own = replace(quicker(part, free / part.crowding), crowding=free, device=name, members=tuple(sorted(group)))
        found.append(replace(own, **meetings))  # type: ignore[arg-type]
    return found
