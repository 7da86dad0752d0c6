"""Constants fitted from measurement, with where and when. A plan is only as good as these."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

SizeCurve = tuple[tuple[float, float], ...]


def interpolate(points: SizeCurve, size: float) -> float:
    """The rate at `size`: log-linear between measured points, constant beyond them."""
    if not points:
        return 0.0
    at = bisect_left(points, (size, 0.0))
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    weight = (math.log(size) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return math.exp(math.log(y0) * (1 - weight) + math.log(y1) * weight)


def monotone_seconds(points: SizeCurve) -> SizeCurve:
    """Seconds by size, so that no call takes less than a smaller one: where the measured ones say so, both are disturbed, and their mean is taken."""
    pools: list[list[float]] = []
    for _, seconds in points:
        pools.append([seconds])
        while len(pools) > 1 and sum(pools[-2]) / len(pools[-2]) > sum(pools[-1]) / len(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    means = [sum(pool) / len(pool) for pool in pools for _ in pool]
    return tuple((size, mean) for (size, _), mean in zip(points, means, strict=True))


def monotone_rates(points: SizeCurve) -> SizeCurve:
    """Rates by the size of a call, so that none takes longer than a larger one: a point that says so was disturbed, or lies beyond a fit."""
    least, found = math.inf, []
    for size, rate in reversed(points):
        least = min(least, size / rate)
        found.append((size, size / least))
    return tuple(reversed(found))


@dataclass(frozen=True)
class AlphaBetaModel:
    """α–β: seconds to start, and bytes a second after that (over the bytes that a rank must send). `gap_s` is the part of α that calls under
    way at once cannot share, where that was measured; without it they share nothing."""

    alpha_s: float
    bytes_per_s: float
    gap_s: float | None = None

    def seconds(self, sent_bytes: float) -> float:
        return self.alpha_s + sent_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Rates:
    """What one rank reaches while all ranks of its layout work at once."""

    ranks: int
    threads: int
    compute: Mapping[str, SizeCurve]  # "matmul/fp32" → (flops a call, flop/s)
    memory: SizeCurve  # (bytes a call, bytes/s)
    op_overhead_s: float  # time an operation takes however small it is
    collectives: Mapping[str, AlphaBetaModel] = field(default_factory=dict)  # "gloo/all_reduce" → line; "gloo/all_reduce/2" → among two
    overlap: float = 0.0  # share of a collective that is hidden when there is enough to compute: 0 none, 1 all
    base_bytes: int = 0  # memory a rank holds before it has a model
    device: str = ""  # where ranks of several kinds worked together: the kind that this is about
    async_dispatch: bool = False  # calls are queued ahead of the device (GPUs): a call costs only where the work is shorter than it
    host: Mapping[str, float] = field(default_factory=dict)  # of a GPU: "link", bytes/s each way; "step", bytes/s of an optimizer in host memory
    curves: Mapping[str, SizeCurve] = field(default_factory=dict)  # "gloo:shared/all_reduce" → (bytes that a rank must send, seconds) as measured
    memory_correction: float = 1.0  # memory that runs held beside parameters, gradients and states, over what was predicted
    oversubscription: float = 1.0  # ranks at work for each core that they have: all others are of a rank that has its core to itself
    members: tuple[int, ...] = ()  # where ranks of one kind were found unlike: those that this is about
    fixed: Mapping[str, float] = field(default_factory=dict)  # seconds however small the work: "tensor" (of an optimizer's step), "handing" (on), …
    core_busy_curves: Mapping[str, SizeCurve] = field(
        default_factory=dict
    )  # like `curves`: how long a rank's call keeps a core, which its computation lacks

    def measured_seconds(self, name: str, sent_bytes: float) -> float | None:
        """Seconds of one call: between measured sizes along them, beyond them along the line. None where no size was measured by itself."""
        points = self.curves.get(name)
        if not points or name not in self.collectives:
            return None
        last, seconds = points[-1]
        return seconds + (sent_bytes - last) / self.collectives[name].bytes_per_s if sent_bytes > last else interpolate(points, sent_bytes)

    def core_busy_seconds(self, name: str, sent_bytes: float) -> float | None:
        """Seconds for which one call keeps a core; None where that was not measured."""
        points = self.core_busy_curves.get(name)
        if not points:
            return None
        last, seconds = points[-1]
        return seconds * sent_bytes / last if sent_bytes > last else interpolate(points, sent_bytes)

    @cached_property
    def without_oversubscription(self) -> Rates:
        """What a rank reaches while those who share its core leave it to it: a call takes less by as long as they have kept the core from it,
        where that was measured, else in proportion."""
        if self.oversubscription <= 1.0:
            return self
        times = self.oversubscription

        def seconds(name: str, sent: float, taken: float) -> float:
            kept = self.core_busy_seconds(name, sent)
            return taken / times if kept is None else taken - (times - 1.0) * min(kept, taken / times)

        def line(name: str, of: AlphaBetaModel) -> AlphaBetaModel:
            if name not in self.core_busy_curves:
                return AlphaBetaModel(of.alpha_s / times, of.bytes_per_s * times, None if of.gap_s is None else of.gap_s / times)
            ends = self.core_busy_curves[name][0][0], self.core_busy_curves[name][-1][0]
            few, many = (seconds(name, sent, of.seconds(sent)) for sent in ends)
            each = max(many - few, 1e-15) / max(ends[1] - ends[0], 1.0)
            return AlphaBetaModel(max(few - each * ends[0], 0.0), 1.0 / each)

        return replace(
            self,
            oversubscription=1.0,
            collectives={name: line(name, of) for name, of in self.collectives.items()},
            curves={name: tuple((sent, seconds(name, sent, taken)) for sent, taken in points) for name, points in self.curves.items()},
            fixed={key: value / times if key == "meeting" else value for key, value in self.fixed.items()},
        )

    def compute_rate(self, kind: str, precision: str, flops: float) -> float:
        """Flop/s of one call of this size; 0 when nothing like it was measured (then memory decides)."""
        if precision == "fp8" and (kind != "matmul" or "matmul/fp8" not in self.compute):
            precision = "bf16"  # what surrounds products in fp8, and the nearest to them
        alike = () if kind.startswith("special") else (f"matmul/{precision}", "matmul/fp32")
        if kind.endswith("-backward") and f"{kind}/{precision}" not in self.compute and alike:
            kind = kind.removesuffix("-backward")  # not measured apart
        for key in (f"{kind}/{precision}", *alike[:1], f"{kind}/fp32", *alike[1:]):
            if key in self.compute:
                return interpolate(self.compute[key], flops)
        return 0.0


def scale_rates(rates: Rates, factor: float) -> Rates:
    """Of a device that computes so many times as fast."""
    compute = {key: tuple((size, rate * factor) for size, rate in points) for key, points in rates.compute.items()}
    memory = tuple((size, rate * factor) for size, rate in rates.memory)
    fixed = {key: seconds / factor for key, seconds in rates.fixed.items()}
    return replace(rates, compute=compute, memory=memory, op_overhead_s=rates.op_overhead_s / factor, fixed=fixed)


@dataclass(frozen=True)
class CalibrationRecord:
    """One run: measured over predicted by the rates that are kept with it, uncorrected."""

    when: str
    model: str
    kind: str  # its make-up, which like models share
    precision: str
    strategy: str
    ranks: int
    step: float
    compute: float
    network: float | None  # None where communication was not told apart, or was next to none
    memory: float  # of what is held beside parameters, gradients and states


@dataclass(frozen=True)
class Calibration:
    """Measurements of one machine. `layouts` holds one entry for each way of cutting it into ranks that was tried."""

    machine: str
    device: str
    when: str
    layouts: tuple[Rates, ...]
    copies: Mapping[str, float] = field(default_factory=dict)  # "host_to_device" → bytes/s
    source: str = "probe"
    error: float = 0.15  # relative, one sigma, of step times predicted from it
    basis: str = ""  # where that comes from, in words
    records: tuple[CalibrationRecord, ...] = ()  # runs that were measured against it

    def rates_for(self, ranks: int, device: str = "") -> Rates:
        """The entry measured at `ranks`, or the nearest one, for a kind of device where there are several; several ranks are never priced
        by one alone, which has no collectives."""
        alike = [r for r in self.layouts if r.device == device] or self.layouts
        several = [r for r in alike if r.ranks > 1] if ranks > 1 else []
        return min(several or alike, key=lambda r: (abs(r.ranks - ranks), -r.ranks))
