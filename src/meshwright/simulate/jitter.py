"""Random variation of computation times, reproducible by seed: a run and its simulation draw the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator


def jitter_factors(seed: int, rank: int, step_index: int, sigma: float) -> Iterator[float]:
    """Factors for the computations of one rank's step, in order: normal around 1, at least 0.1."""
    if not sigma:
        while True:
            yield 1.0
    draw = random.Random(f"{seed}/{rank}/{step_index}")
    while True:
        yield max(0.1, draw.gauss(1.0, sigma))
