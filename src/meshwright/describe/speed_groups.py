"""Groups ranks of one device kind that a probe found to differ in speed: a throttled core, an older card under the same name.

[Note: equal unless repeated]
Ranks that are measured at once compete for cores, and with foreign processes: the kernel may give one of them half of what another gets, and the
other half the next time. So a difference found there is only a suspicion. Ranks that differ are measured again in turns, several times: what limits a
rank by itself (a quota, a slower core) is there in every turn, and a foreign process is not. A rank is slower only if its best turn is, by more than
the error of a probe, than the typical turn of another.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from meshwright.core.calibration import Rates, scale_rates
from meshwright.describe.foreign_load import PROBE_ERROR
from meshwright.describe.probe import slowest_rates

_COMPARISON_FLOPS = 1e8  # size of the matmul by which ranks are compared


def suspect_unequal(rank_rates: Sequence[Rates]) -> bool:
    """Whether ranks differ so much, measured at once, that they must be measured in turns. A rank that gets less of its core than others (see
    [Note: oversubscribed cores]) counts as slower."""
    speeds = [_compute_rate(rates) / rates.oversubscription for rates in rank_rates]
    return max(speeds) > _speed_gap(PROBE_ERROR) * min(speeds)


def rates_by_speed_group(rank_rates: Sequence[Rates], turn_speeds: Sequence[Sequence[float]] = ()) -> list[Rates]:
    """The slowest rates of all ranks and, where ranks differ repeatably, those of each speed group under its own name. `turn_speeds`: by rank, its
    speed in each of its turns; empty where ranks were not suspected to differ (see [Note: equal unless repeated])."""
    overall = slowest_rates(list(rank_rates))
    best = [max(speeds) for speeds in turn_speeds]
    order = sorted(range(len(best)), key=lambda rank: -best[rank])
    groups: list[list[int]] = []
    for rank in order:
        if groups and statistics.median(turn_speeds[groups[-1][0]]) <= _speed_gap(PROBE_ERROR) * best[rank]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    by_group = [overall]
    fastest, least = order[0] if order else 0, min(rates.oversubscription for rates in rank_rates)
    for group in groups if len(groups) > 1 else ():
        slowest = slowest_rates([rank_rates[rank] for rank in group])
        relative_speed = best[group[-1]] / best[fastest]
        scaled = scale_rates(slowest, relative_speed * _compute_rate(rank_rates[fastest]) / _compute_rate(slowest))
        rates = replace(scaled, oversubscription=least, device=f"at {relative_speed:.0%} of the fastest", members=tuple(sorted(group)))
        by_group.append(replace(rates, collectives=overall.collectives, curves=overall.curves, overlap=overall.overlap))
    return by_group


def without_doubtful_groups(rates: Sequence[Rates], error: float) -> list[Rates]:
    """The rates without speed groups, unless the fastest and the slowest differ by more than this error."""
    speeds = [_compute_rate(r) for r in rates if r.members]
    doubtful = bool(speeds) and max(speeds) <= _speed_gap(error) * min(speeds)
    return [r for r in rates if not (doubtful and r.members)]


def _compute_rate(rates: Rates) -> float:
    return rates.compute_rate("matmul", "fp32", _COMPARISON_FLOPS)


def _speed_gap(error: float) -> float:
    """The ratio of two speeds that differ by two sigma."""
    return 1.0 + 2.0 * error
