"""Pipeline stages for heterogeneous devices: where to cut a chain of layers when each stage has its own speed and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

Rows = Sequence[Sequence[float]]


def best_stage_cuts(seconds: Rows, layer_bytes: Rows, memory_limits: Sequence[float], cut_positions: Sequence[int]) -> list[int] | None:
    """The cut positions, in order, with which the slowest stage is as fast as possible and each stage fits; None where no cut fits. `seconds[s]`
    and `layer_bytes[s]` give the costs of each layer on stage s, `memory_limits[s]` its device's bytes. Dynamic programming over stages and
    positions."""
    ends = [*cut_positions, len(seconds[0])]
    time = [list(accumulate(row, initial=0.0)) for row in seconds]
    need = [list(accumulate(row, initial=0.0)) for row in layer_bytes]

    def stage_seconds(stage: int, start: int, end: int) -> float:
        fits = need[stage][end] - need[stage][start] <= memory_limits[stage] + 1e-12 * need[stage][-1]  # tolerance for rounding errors
        return time[stage][end] - time[stage][start] if fits else math.inf

    def extend_cut(stage: int, cut: int, end: int) -> tuple[float, tuple[int, ...]]:
        return max(best[cut][0], stage_seconds(stage, ends[cut], ends[end])), (*best[cut][1], ends[cut])

    best: list[tuple[float, tuple[int, ...]]] = [(stage_seconds(0, 0, end), ()) for end in ends]  # by end: (slowest stage's seconds, cuts)
    for stage in range(1, len(seconds)):
        options = [[extend_cut(stage, cut, end) for cut in range(stage - 1, end)] for end in range(len(ends))]
        best = [min(row, default=(math.inf, ())) for row in options]
    slowest, cuts = best[-1]
    return list(cuts) if math.isfinite(slowest) else None
