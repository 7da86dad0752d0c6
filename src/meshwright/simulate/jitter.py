"""Computation that varies as it does in practice, the same for a seed: a run and a simulation of it draw the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator


def jitter_factors(seed: int, rank: int, step_index: int, sigma: float) -> Iterator[float]:
    """What to multiply each computation of one rank's step by: normal around 1, never below a tenth."""
    if not sigma:
        while True:
            yield 1.0
    draw = random.Random(f"{seed}/{rank}/{step_index}")
    while True:
        yield max(0.1, draw.gauss(1.0, sigma))
