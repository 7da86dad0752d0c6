"""What a plan is expected to cost, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """Step time and memory of one plan on one cluster, and whether it fits."""

    step_s: float
    breakdown: Mapping[str, float]  # seconds: forward, backward, optimizer, communication (exposed), overhead
    memory_bytes: tuple[int, ...]  # peak by rank
    memory_kinds: Mapping[str, int]  # the largest rank's, by kind
    samples_per_s: float
    fits: bool
    reason: str  # why it fits or does not, with the number that decides
    error: float  # relative, one sigma
    tokens_per_s: float | None = None
    mfu: float | None = None
    traffic_bytes: float = 0.0  # what a rank sends in one step
    notes: tuple[str, ...] = ()
