"""Groups ranks of one device kind that a probe found to differ in speed: a throttled core, an older card under the same name."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.calibration import Rates, scale_rates
from meshwright.describe.probe import slowest_rates

_SPEED_GAP = 1.5  # figures of equal ranks differ by less than this factor, on a busy machine too
_COMPARISON_FLOPS = 1e8  # size of the matmul by which ranks are compared


def rates_by_speed_group(rank_rates: list[Rates]) -> list[Rates]:
    """The slowest rates of all ranks and, where ranks differ, those of each speed group under its own name. A rank that gets less of its core than
    others (see [Note: oversubscribed cores]) counts as slower."""
    speeds = [rates.compute_rate("matmul", "fp32", _COMPARISON_FLOPS) / rates.oversubscription for rates in rank_rates]
    order = sorted(range(len(rank_rates)), key=lambda rank: -speeds[rank])
    groups: list[list[int]] = []
    for rank in order:
        if groups and speeds[groups[-1][0]] < _SPEED_GAP * speeds[rank]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    overall = slowest_rates(rank_rates)
    by_group = [overall]
    least = min(rates.oversubscription for rates in rank_rates)
    for group in groups if len(groups) > 1 else ():
        slowest = slowest_rates([rank_rates[rank] for rank in group])
        name = f"at {speeds[group[-1]] / speeds[order[0]]:.0%} of the fastest"
        rates = replace(scale_rates(slowest, least / slowest.oversubscription), oversubscription=least, device=name, members=tuple(sorted(group)))
        by_group.append(replace(rates, collectives=overall.collectives, curves=overall.curves, overlap=overall.overlap))
    return by_group
