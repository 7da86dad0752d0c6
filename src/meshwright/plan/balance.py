"""Load Balancer, deciding half: shares of a whole for ranks that are not alike, by what each can do and hold."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy

Line = tuple[float, float]  # seconds: a + b for each sample


def nearly_equal(batch: int, mesh: Mesh) -> BalancePolicy:
    """Equal shares, and one sample more for the first ranks where they do not divide. A pipeline's are equal or refused."""
    width = mesh.data_width
    if mesh.pp > 1 or width == 1 or batch < width:
        return BalancePolicy()
    return BalancePolicy(tuple(batch // width + (rank < batch % width) for rank in range(width)))


def deal(samples: int, lines: Sequence[Line], least: int = 1, most: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Shares that end soonest, where rank i takes `a + b·share` seconds and has room for `most[i]`: each further sample goes to the rank that
    would be done first with it. No exchange of a sample can then make the last one end sooner. None where there is no room."""
    shares = [least] * len(lines)
    rooms = most or [samples] * len(lines)
    if min(rooms) < least or sum(min(room, samples) for room in rooms) < samples or samples < least * len(lines):
        return None
    heap = [(a + b * (least + 1), i) for i, (a, b) in enumerate(lines) if rooms[i] > least]
    heapq.heapify(heap)
    for _ in range(samples - least * len(lines)):
        _, i = heap[0]
        shares[i] += 1
        a, b = lines[i]
        if shares[i] < rooms[i]:
            heapq.heapreplace(heap, (a + b * (shares[i] + 1), i))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def fill(weights: Sequence[float], most: Sequence[float]) -> tuple[float, ...] | None:
    """Parts of one whole as the weights are to each other, but none above what there is room for: what is too much goes to the others. None
    where all rooms together are too small."""
    if sum(most) < 1.0:
        return None
    parts = [0.0] * len(weights)
    full: set[int] = set()
    while True:
        left = 1.0 - sum(most[i] for i in full)
        among = sum(w for i, w in enumerate(weights) if i not in full)
        parts = [most[i] if i in full else left * w / among if among else 0.0 for i, w in enumerate(weights)]
        over = {i for i, part in enumerate(parts) if i not in full and part > most[i]}
        if not over:
            break
        full |= over
    total = sum(parts)
    return tuple(part / total for part in parts) if abs(total - 1.0) < 1e-6 else None
