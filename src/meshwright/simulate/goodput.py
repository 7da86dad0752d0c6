"""How much of the time is progress when devices fail, and how often to write a checkpoint.

Failures come at random at a constant rate. A stretch of `work` seconds and a checkpoint of `save` seconds is done again from its beginning when one
comes, after a restart, which a failure can interrupt too. Its expected time is exactly e^(λ restart) (e^(λ (work + save)) - 1) / λ (Daly 2006). The
best stretch makes the ratio of work to that largest: (1 + W(-e^(-λ save - 1))) / λ, with Lambert's W; Young's and Daly's are its expansions.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from meshwright.core.errors import RequestError


@dataclass(frozen=True)
class FailureModel:
    """Seconds between two failures of the whole job, to write a checkpoint, and to begin again after a failure."""

    mtbf_s: float
    checkpoint_s: float
    restart: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mtbf_s) and self.mtbf_s > 0):
            raise RequestError(f"a time between failures of {self.mtbf_s:g} s: give hours above 0, like --mtbf 50000")
        if not (math.isfinite(self.checkpoint_s) and self.checkpoint_s > 0):
            raise RequestError(f"a checkpoint of {self.checkpoint_s:g} s: give seconds above 0, like --checkpoint 30")
        if not (math.isfinite(self.restart) and self.restart >= 0):
            raise RequestError(f"a restart of {self.restart:g} s: give seconds from 0 on, like --restart 60")

    def goodput(self, interval_s: float) -> float:
        """Progress over time, exactly, with a checkpoint after every `interval_s` seconds of progress."""
        rate = 1 / self.mtbf_s
        exponent = rate * (interval_s + self.checkpoint_s + self.restart)
        if exponent > 700:
            return 0.0
        return rate * interval_s / (math.exp(rate * self.restart) * math.expm1(rate * (interval_s + self.checkpoint_s)))

    @property
    def best_interval(self) -> float:
        """The stretch of work with the largest goodput."""
        return self.mtbf_s * _one_plus_lambert_w(self.checkpoint_s / self.mtbf_s)

    @property
    def young_interval(self) -> float:
        return math.sqrt(2 * self.checkpoint_s * self.mtbf_s)

    @property
    def daly_interval(self) -> float:
        if self.checkpoint_s >= 2 * self.mtbf_s:
            return self.mtbf_s
        part = math.sqrt(self.checkpoint_s / (2 * self.mtbf_s))
        return self.young_interval * (1 + part / 3 + part * part / 9) - self.checkpoint_s


def _one_plus_lambert_w(checkpoint_ratio: float) -> float:
    """x with x = 1 - e^(-x - save), which is 1 + W(-e^(-save - 1)): by Newton's steps, from above, where they never miss."""
    x = 1.0
    for _ in range(200):
        fall = math.exp(-x - checkpoint_ratio)
        step = (x - 1 + fall) / (1 - fall)
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x


@dataclass(frozen=True)
class SampledGoodput:
    """A goodput as it came out, and how far off it may be (one standard error)."""

    goodput: float
    error: float
    failures: int


def sample_goodput(failures: FailureModel, interval_s: float, seed: int, num_intervals: int = 20000) -> SampledGoodput:
    """Live through many stretches of work, failure by failure."""
    draw = random.Random(f"{seed}/{interval_s!r}")
    times, count = [], 0
    for _ in range(num_intervals):
        spent = 0.0
        while (until := draw.expovariate(1 / failures.mtbf_s)) < interval_s + failures.checkpoint_s:
            count += 1
            spent += until
            while (again := draw.expovariate(1 / failures.mtbf_s)) < failures.restart:
                count += 1
                spent += again
            spent += failures.restart
            if count > 50 * num_intervals:  # hardly any progress: what is known by now says so
                break
        times.append(spent + interval_s + failures.checkpoint_s)
        if count > 50 * num_intervals:
            break
    mean = sum(times) / len(times)
    spread = math.sqrt(sum((t - mean) ** 2 for t in times) / max(len(times) - 1, 1) / len(times))
    return SampledGoodput(interval_s / mean, interval_s / mean * spread / mean, count)


def _num_intervals(failures: FailureModel, interval_s: float) -> int:
    """Stretches in which some thousand failures come, within reason."""
    return int(min(max(3000 * failures.mtbf_s / (interval_s + failures.checkpoint_s), 4000), 100_000))


def study_intervals(failures: FailureModel, seed: int, points: int = 41) -> dict[str, object]:
    """The intervals that formulas and arithmetic give, each with its exact goodput, a draw that confirms them, and the curve."""
    best = failures.best_interval
    intervals = {"best": best, "young": failures.young_interval, "daly": failures.daly_interval}
    curve = [best * 10 ** (2.4 * i / (points - 1) - 1.2) for i in range(points)]
    shown = [best / 8, best / 3, best, 3 * best, 8 * best]
    draws = [sample_goodput(failures, work, seed, _num_intervals(failures, work)) for work in shown]
    return {
        "failures_every_s": failures.mtbf_s,
        "checkpoint_s": failures.checkpoint_s,
        "restart_s": failures.restart,
        "intervals_s": intervals,
        "goodput": {name: failures.goodput(work) for name, work in intervals.items()},
        "drawn": [{"interval_s": w, "goodput": d.goodput, "error": d.error, "failures": d.failures} for w, d in zip(shown, draws, strict=True)],
        "curve": [[work, failures.goodput(work)] for work in curve],
        "seed": seed,
    }
