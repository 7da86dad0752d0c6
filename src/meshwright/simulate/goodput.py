"""Goodput under device failures: the share of time that is progress, and the best checkpoint interval.

Failures are a Poisson process with rate λ. An interval of `work` seconds and its checkpoint of `save` seconds are repeated from the beginning after
a failure and a restart, which a failure can interrupt too. The expected time is exactly e^(λ restart) (e^(λ (work + save)) - 1) / λ (Daly 2006).
The ratio of work to it is largest for work = (1 + W(-e^(-λ save - 1))) / λ, with Lambert's W; Young's and Daly's formulas are expansions of it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.core.errors import RequestError


@dataclass(frozen=True)
class FailureModel:
    """Mean seconds between failures of the whole job, seconds to write a checkpoint, and seconds to restart after a failure."""

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
        """The exact share of time that is progress, with a checkpoint after every `interval_s` seconds of progress."""
        rate = 1 / self.mtbf_s
        exponent = rate * (interval_s + self.checkpoint_s + self.restart)
        if exponent > 700:
            return 0.0
        return rate * interval_s / (math.exp(rate * self.restart) * math.expm1(rate * (interval_s + self.checkpoint_s)))

    @property
    def best_interval(self) -> float:
        """The checkpoint interval with the largest goodput."""
        return self.mtbf_s * _one_plus_lambert_w(self.checkpoint_s / self.mtbf_s)

    @property
    def young_interval(self) -> float:
        return math.sqrt(2 * self.checkpoint_s * self.mtbf_s)

    @property
    def daly_interval(self) -> float:
        if self.checkpoint_s >= 2 * self.mtbf_s:
            return self.mtbf_s
        ratio = math.sqrt(self.checkpoint_s / (2 * self.mtbf_s))
        return self.young_interval * (1 + ratio / 3 + ratio * ratio / 9) - self.checkpoint_s


def _one_plus_lambert_w(checkpoint_ratio: float) -> float:
    """Solve x = 1 - e^(-x - save) for x = 1 + W(-e^(-save - 1)), where save is `checkpoint_ratio`. Newton's method from above always converges."""
    x = 1.0
    for _ in range(200):
        fall = math.exp(-x - checkpoint_ratio)
        step = (x - 1 + fall) / (1 - fall)
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x


class SampledGoodput(NamedTuple):
    """A goodput from simulated failures, with its standard error."""

    goodput: float
    error: float
    failures: int


def sample_goodput(failures: FailureModel, interval_s: float, seed: int, num_intervals: int = 20000) -> SampledGoodput:
    """Estimate the goodput from random failures over `num_intervals` checkpoint intervals."""
    draw = random.Random(f"{seed}/{interval_s!r}")
    times, count = [], 0
    for _ in range(num_intervals):
        lost = 0.0
        while (until := draw.expovariate(1 / failures.mtbf_s)) < interval_s + failures.checkpoint_s:
            count += 1
            lost += until
            while (until := draw.expovariate(1 / failures.mtbf_s)) < failures.restart:
                count += 1
                lost += until
            lost += failures.restart
            if count > 50 * num_intervals:  # hardly any progress: the estimate so far shows it
                break
        times.append(lost + interval_s + failures.checkpoint_s)
        if count > 50 * num_intervals:
            break
    mean = sum(times) / len(times)
    spread = math.sqrt(sum((t - mean) ** 2 for t in times) / max(len(times) - 1, 1) / len(times))
    return SampledGoodput(interval_s / mean, interval_s / mean * spread / mean, count)


def study_intervals(failures: FailureModel, seed: int, points: int = 41) -> dict[str, object]:
    """The best, Young's and Daly's interval with their exact goodput, sampled goodputs that confirm them, and the curve of goodput by interval."""
    best = failures.best_interval
    intervals = {"best": best, "young": failures.young_interval, "daly": failures.daly_interval}
    curve = [best * 10 ** (2.4 * i / (points - 1) - 1.2) for i in range(points)]
    samples = []
    for work in (best / 8, best / 3, best, 3 * best, 8 * best):
        num_intervals = int(min(max(3000 * failures.mtbf_s / (work + failures.checkpoint_s), 4000), 100_000))  # some thousand failures are expected
        samples.append({"interval_s": work, **sample_goodput(failures, work, seed, num_intervals)._asdict()})
    return {
        "failures_every_s": failures.mtbf_s,
        "checkpoint_s": failures.checkpoint_s,
        "restart_s": failures.restart,
        "intervals_s": intervals,
        "goodput": {name: failures.goodput(work) for name, work in intervals.items()},
        "drawn": samples,
        "curve": [[work, failures.goodput(work)] for work in curve],
        "seed": seed,
    }
