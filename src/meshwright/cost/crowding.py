"""Ranks that share cores: what a pipeline takes when those of its ranks that wait leave their core to the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def crowded(end: float, busy: Sequence[float], crowding: float) -> float:
    """Seconds of a step of a pipeline. `end` and `busy` are at the pace at which `crowding` ranks share a core all the time: when the last rank
    would be done, and how long each works. In truth the step takes what it would take with a core for each, or what all work needs of the cores."""
    return max(end / crowding, statistics.fmean(busy)) if crowding > 1.0 else end
