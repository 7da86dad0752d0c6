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
class Failures:
    """Seconds between two failures of the whole job, to write a checkpoint, and to begin again after a failure."""

    every: float
    save: float
    restart: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.every) and self.every > 0):
            raise RequestError(f"a time between failures of {self.every:g} s: give hours above 0, like --mtbf 50000")
        if not (math.isfinite(self.save) and self.save > 0):
            raise RequestError(f"a checkpoint of {self.save:g} s: give seconds above 0, like --checkpoint 30")
        if not (math.isfinite(self.restart) and self.restart >= 0):
            raise RequestError(f"a restart of {self.restart:g} s: give seconds from 0 on, like --restart 60")

    def goodput(self, work: float) -> float:
        """Progress over time, exactly, with a checkpoint after every `work` seconds of progress."""
        rate = 1 / self.every
        exponent = rate * (work + self.save + self.restart)
        if exponent > 700:
            return 0.0
        return rate * work / (math.exp(rate * self.restart) * math.expm1(rate * (work + self.save)))

    @property
    def best(self) -> float:
        """The stretch of work with the largest goodput."""
        return self.every * _one_and_lambert(self.save / self.every)

    @property
    def young(self) -> float:
        return math.sqrt(2 * self.save * self.every)

    @property
    def daly(self) -> float:
        if self.save >= 2 * self.every:
            return self.every
        part = math.sqrt(self.save / (2 * self.every))
        return self.young * (1 + part / 3 + part * part / 9) - self.save


def _one_and_lambert(save: float) -> float:
    """x with x = 1 - e^(-x - save), which is 1 + W(-e^(-save - 1)): by Newton's steps, from above, where they never miss."""
    x = 1.0
    for _ in range(200):
        fall = math.exp(-x - save)
        step = (x - 1 + fall) / (1 - fall)
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x


@dataclass(frozen=True)
class Drawn:
    """A goodput as it came out, and how far off it may be (one standard error)."""

    goodput: float
    error: float
    failures: int


def drawn(failures: Failures, work: float, seed: int, stretches: int = 20000) -> Drawn:
    """Live through many stretches of work, failure by failure."""
    draw = random.Random(f"{seed}/{work!r}")
    times, count = [], 0
    for _ in range(stretches):
        spent = 0.0
        while (until := draw.expovariate(1 / failures.every)) < work + failures.save:
            count += 1
            spent += until
            while (again := draw.expovariate(1 / failures.every)) < failures.restart:
                count += 1
                spent += again
            spent += failures.restart
            if count > 50 * stretches:  # hardly any progress: what is known by now says so
                break
        times.append(spent + work + failures.save)
        if count > 50 * stretches:
            break
    mean = sum(times) / len(times)
    spread = math.sqrt(sum((t - mean) ** 2 for t in times) / max(len(times) - 1, 1) / len(times))
    return Drawn(work / mean, work / mean * spread / mean, count)


def _enough(failures: Failures, work: float) -> int:
    """Stretches in which some thousand failures come, within reason."""
    return int(min(max(3000 * failures.every / (work + failures.save), 4000), 100_000))


def study(failures: Failures, seed: int, points: int = 41) -> dict[str, object]:
    """The intervals that formulas and arithmetic give, each with its exact goodput, a draw that confirms them, and the curve."""
    best = failures.best
    intervals = {"best": best, "young": failures.young, "daly": failures.daly}
    curve = [best * 10 ** (2.4 * i / (points - 1) - 1.2) for i in range(points)]
    shown = [best / 8, best / 3, best, 3 * best, 8 * best]
    draws = [drawn(failures, work, seed, _enough(failures, work)) for work in shown]
    return {
        "failures_every_s": failures.every,
        "checkpoint_s": failures.save,
        "restart_s": failures.restart,
        "intervals_s": intervals,
        "goodput": {name: failures.goodput(work) for name, work in intervals.items()},
        "drawn": [{"interval_s": w, "goodput": d.goodput, "error": d.error, "failures": d.failures} for w, d in zip(shown, draws, strict=True)],
        "curve": [[work, failures.goodput(work)] for work in curve],
        "seed": seed,
    }
