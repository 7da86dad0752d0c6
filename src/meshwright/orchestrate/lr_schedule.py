"""The learning rate by step: a linear warm-up from zero, then constant or a cosine that decays to zero at the end of the run."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, schedule: str) -> float:
    """The learning rate of `step`, counted from 0. It is above zero from the first step; the peak comes right after the warm-up."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule == "constant":
        return peak
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
