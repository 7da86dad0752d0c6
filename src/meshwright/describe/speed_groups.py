"""Ranks of one kind that turn out unlike: a throttled core, an older card under the same name. A probe tells them apart by their pace."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.calibration import Rates, scale_rates
from meshwright.describe.probe import slowest_rates

_SPEED_GAP = 1.5  # a probe's figures of equal ranks differ by less than this factor, on a busy machine too
_COMPARISON_FLOPS = 1e8  # of the product by which ranks are compared


def rates_by_speed_group(rank_rates: list[Rates]) -> list[Rates]:
    """What the slowest of all ranks reached and, where ranks differ, what each group of like ones did, under a name of its own. A rank that has
    less of its core than the others (see [Note: crowded cores]) is a slower rank."""
    paces = [rates.compute_rate("matmul", "fp32", _COMPARISON_FLOPS) / rates.oversubscription for rates in rank_rates]
    order = sorted(range(len(rank_rates)), key=lambda rank: -paces[rank])
    groups: list[list[int]] = []
    for rank in order:
        if groups and paces[groups[-1][0]] < _SPEED_GAP * paces[rank]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    found = [slowest_rates(rank_rates)]
    free = min(rates.oversubscription for rates in rank_rates)
    for group in groups if len(groups) > 1 else ():
        part = slowest_rates([rank_rates[rank] for rank in group])
        sites = {"collectives": found[0].collectives, "curves": found[0].curves, "overlap": found[0].overlap}
        name = f"at {paces[group[-1]] / paces[order[0]]:.0%} of the fastest"
        own = replace(scale_rates(part, free / part.oversubscription), oversubscription=free, device=name, members=tuple(sorted(group)))
        found.append(replace(own, **sites))  # type: ignore[arg-type]
    return found
