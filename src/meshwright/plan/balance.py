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
    """Equal shares, with one sample more for the first ranks where the batch does not divide. A pipeline's shares are equal; an uneven batch is
    refused."""
    width = mesh.data_parallel_size
    if mesh.pp > 1 or width == 1 or batch < width:
        return BalancePolicy()
    return BalancePolicy(tuple(batch // width + (rank < batch % width) for rank in range(width)))


def distribute_samples(
    samples: int, time_models: Sequence[TimeModel], min_samples: int = 1, max_samples: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Shares that finish soonest, with at most `max_samples[i]` samples on rank i; None where they do not fit. Each further sample goes to the
    rank that would finish it first, so no move of a sample can make the last rank finish sooner."""
    shares = [min_samples] * len(time_models)
    rooms = max_samples or [samples] * len(time_models)
    if min(rooms) < min_samples or sum(min(room, samples) for room in rooms) < samples or samples < min_samples * len(time_models):
        return None
    heap = [(pace(min_samples + 1), i) for i, pace in enumerate(time_models) if rooms[i] > min_samples]
    heapq.heapify(heap)
    for _ in range(samples - min_samples * len(time_models)):
        _, i = heap[0]
        shares[i] += 1
        if shares[i] < rooms[i]:
            heapq.heapreplace(heap, (time_models[i](shares[i] + 1), i))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def monotone_interpolation(points: Sequence[tuple[int, float]]) -> TimeModel:
    """Piecewise linear interpolation, extrapolated beyond the last point. Where fewer samples are measured slower than more, they get the time of
    the more."""
    sizes = [size for size, _ in points]
    ends = list(accumulate((seconds for _, seconds in reversed(points)), min))[::-1]
    slopes = [(b - a) / (n - m) for (m, n), (a, b) in zip(pairwise(sizes), pairwise(ends), strict=True)]

    def seconds(samples: int) -> float:
        at = min(max(bisect_left(sizes, samples) - 1, 0), len(slopes) - 1)
        return max(ends[at] + slopes[at] * (samples - sizes[at]), 0.0)

    return seconds


def capped_fractions(weights: Sequence[float], max_fractions: Sequence[float]) -> tuple[float, ...] | None:
    """Fractions of a whole in proportion to `weights`, none above its `max_fractions`: the excess goes to the others. None where the maxima sum to
    less than 1."""
    if sum(max_fractions) < 1.0:
        return None
    parts = [0.0] * len(weights)
    full: set[int] = set()
    while True:
        left = 1.0 - sum(max_fractions[i] for i in full)
        among = sum(w for i, w in enumerate(weights) if i not in full)
        parts = [max_fractions[i] if i in full else left * w / among if among else 0.0 for i, w in enumerate(weights)]
        over = {i for i, part in enumerate(parts) if i not in full and part > max_fractions[i]}
        if not over:
            break
        full |= over
    total = sum(parts)
    return tuple(part / total for part in parts) if abs(total - 1.0) < 1e-6 else None
