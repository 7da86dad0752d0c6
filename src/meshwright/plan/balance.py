"""Load Balancer, deciding half: shares of samples and states for ranks on heterogeneous devices, by each rank's speed and memory."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy

TimeModel = Callable[[int], float]  # samples → seconds, never decreasing


def equal_balance(batch: int, mesh: Mesh) -> BalancePolicy:
    """Equal shares, with one sample more for the first ranks if the batch does not divide. A pipeline needs a batch that divides."""
    degree = mesh.data_parallel_size
    if mesh.pp > 1 or degree == 1 or batch < degree:
        return BalancePolicy()
    return BalancePolicy(tuple(batch // degree + (rank < batch % degree) for rank in range(degree)))


def distribute_samples(
    samples: int, time_models: Sequence[TimeModel], min_samples: int = 1, max_samples: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Shares that finish soonest, with at most `max_samples[i]` samples on rank i; None where they do not fit. Each further sample goes to the
    rank that would finish it first, so no move of a sample can make the last rank finish sooner."""
    shares = [min_samples] * len(time_models)
    limits = max_samples or [samples] * len(time_models)
    if min(limits) < min_samples or sum(min(limit, samples) for limit in limits) < samples or samples < sum(shares):
        return None
    heap = [(seconds(min_samples + 1), i) for i, seconds in enumerate(time_models) if limits[i] > min_samples]
    heapq.heapify(heap)
    for _ in range(samples - sum(shares)):
        _, i = heap[0]
        shares[i] += 1
        if shares[i] < limits[i]:
            heapq.heapreplace(heap, (time_models[i](shares[i] + 1), i))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def monotone_interpolation(points: Sequence[tuple[int, float]]) -> TimeModel:
    """Piecewise linear interpolation of (samples, seconds), extrapolated beyond the last point. A point slower than one with more samples gets
    the time of that one."""
    sizes = [size for size, _ in points]
    times = list(accumulate((seconds for _, seconds in reversed(points)), min))[::-1]
    slopes = [(b - a) / (n - m) for (m, n), (a, b) in zip(pairwise(sizes), pairwise(times), strict=True)]

    def seconds(samples: int) -> float:
        i = min(max(bisect_left(sizes, samples) - 1, 0), len(slopes) - 1)
        return max(times[i] + slopes[i] * (samples - sizes[i]), 0.0)

    return seconds


def capped_fractions(weights: Sequence[float], max_fractions: Sequence[float]) -> tuple[float, ...] | None:
    """Fractions of a whole in proportion to `weights`, none above its `max_fractions`: the excess goes to the others. None where the maxima sum to
    less than 1."""
    if sum(max_fractions) < 1.0:
        return None
    capped: set[int] = set()
    while True:
        remainder = 1.0 - sum(max_fractions[i] for i in capped)
        weight = sum(w for i, w in enumerate(weights) if i not in capped)
        fractions = [max_fractions[i] if i in capped else remainder * w / weight if weight else 0.0 for i, w in enumerate(weights)]
        excessive = {i for i, fraction in enumerate(fractions) if i not in capped and fraction > max_fractions[i]}
        if not excessive:
            break
        capped |= excessive
    total = sum(fractions)
    return tuple(fraction / total for fraction in fractions) if abs(total - 1.0) < 1e-6 else None
