"""Constants fitted from measurement, with the machine and the date. Predictions are only as good as these."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

SizeCurve = tuple[tuple[float, float], ...]


def interpolate(points: SizeCurve, size: float) -> float:
    """The rate at `size`: log-linear between measured points, constant beyond them."""
    if not points:
        return 0.0
    index = bisect_left(points, (size, 0.0))
    if index in (0, len(points)):
        return points[0 if index == 0 else -1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    weight = (math.log(size) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return math.exp(math.log(y0) * (1 - weight) + math.log(y1) * weight)


def monotone_seconds(points: SizeCurve) -> SizeCurve:
    """Seconds by size, made non-decreasing: where a call measured faster than a smaller one, both are noisy and get their mean."""
    pools: list[list[float]] = []
    for _, seconds in points:
        pools.append([seconds])
        while len(pools) > 1 and sum(pools[-2]) / len(pools[-2]) > sum(pools[-1]) / len(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    means = [sum(pool) / len(pool) for pool in pools for _ in pool]
    return tuple((size, mean) for (size, _), mean in zip(points, means, strict=True))


def monotone_rates(points: SizeCurve) -> SizeCurve:
    """Rates by call size, raised so that no call takes longer than a larger one: a point that does is noisy, or lies beyond a fit."""
    seconds = list(accumulate((size / rate for size, rate in reversed(points)), min))[::-1]
    return tuple((size, size / least) for (size, _), least in zip(points, seconds, strict=True))


@dataclass(frozen=True)
class AlphaBetaModel:
    """The α–β model of a call: latency, and bytes per second (of the bytes that a rank must send). `gap_s` is the part of α that concurrent
    calls cannot overlap, where that was measured; None: they overlap none of it."""

    alpha_s: float
    bytes_per_s: float
    gap_s: float | None = None

    def seconds(self, sent_bytes: float) -> float:
        return self.alpha_s + sent_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Rates:
    """The rates of one rank while all ranks of its layout work at the same time."""

    ranks: int
    threads: int
    compute: Mapping[str, SizeCurve]  # "matmul/fp32" → (FLOPs per call, FLOP/s)
    memory: SizeCurve  # (bytes per call, bytes/s)
    op_overhead_s: float  # fixed time of an operation, whatever its size
    collectives: Mapping[str, AlphaBetaModel] = field(default_factory=dict)  # "gloo/all_reduce" → α–β; "gloo/all_reduce/2": between two ranks
    overlap: float = 0.0  # fraction of a collective that sufficient computation hides: 0 none, 1 all
    base_bytes: int = 0  # memory of a rank before it has a model
    device: str = ""  # the kind of device, where devices of several kinds were measured together
    async_dispatch: bool = False  # kernels are queued ahead of the device (GPUs): a call's overhead counts only where its kernel is shorter
    host: Mapping[str, float] = field(default_factory=dict)  # of a GPU: "link", bytes/s each direction; "step", bytes/s of a host-memory optimizer
    curves: Mapping[str, SizeCurve] = field(default_factory=dict)  # "gloo:shared/all_reduce" → (bytes that a rank must send, seconds) as measured
    memory_correction: float = 1.0  # measured over predicted memory, excluding parameters, gradients and optimizer states
    oversubscription: float = 1.0  # ranks per core; rates of computation are those of a rank with a core to itself
    members: tuple[int, ...] = ()  # the ranks of this entry, where ranks of one kind of device differ in speed
    fixed: Mapping[str, float] = field(default_factory=dict)  # fixed seconds of: "tensor" (in an optimizer step), "p2p" (a message between stages), …
    # Like `curves`: seconds for which a call occupies the core that the rank computes on.
    core_busy_curves: Mapping[str, SizeCurve] = field(default_factory=dict)
    foreign_load: float = 0.0  # share of the cores that other processes used meanwhile

    def measured_seconds(self, name: str, sent_bytes: float) -> float | None:
        """Seconds of one call: interpolated between measured sizes, beyond them by the α–β bandwidth. None where no sizes were measured."""
        points = self.curves.get(name)
        if not points or name not in self.collectives:
            return None
        last, seconds = points[-1]
        return seconds + (sent_bytes - last) / self.collectives[name].bytes_per_s if sent_bytes > last else interpolate(points, sent_bytes)

    def core_busy_seconds(self, name: str, sent_bytes: float) -> float | None:
        """Seconds for which one call occupies a core; None where that was not measured."""
        points = self.core_busy_curves.get(name)
        if not points:
            return None
        last, seconds = points[-1]
        return seconds * sent_bytes / last if sent_bytes > last else interpolate(points, sent_bytes)

    @cached_property
    def without_oversubscription(self) -> Rates:
        """The rates of a rank while the other ranks on its core are idle: a call is shorter by the time for which they occupied the core, where
        that was measured, else in proportion."""
        if self.oversubscription <= 1.0:
            return self
        ranks_per_core = self.oversubscription

        def alone_seconds(name: str, sent: float, seconds: float) -> float:
            busy = self.core_busy_seconds(name, sent)
            alone = seconds / ranks_per_core
            return alone if busy is None else seconds - (ranks_per_core - 1.0) * min(busy, alone)

        def alone_model(name: str, model: AlphaBetaModel) -> AlphaBetaModel:
            if name not in self.core_busy_curves:
                gap = None if model.gap_s is None else model.gap_s / ranks_per_core
                return AlphaBetaModel(model.alpha_s / ranks_per_core, model.bytes_per_s * ranks_per_core, gap)
            least, largest = self.core_busy_curves[name][0][0], self.core_busy_curves[name][-1][0]
            fastest, slowest = (alone_seconds(name, sent, model.seconds(sent)) for sent in (least, largest))
            s_per_byte = max(slowest - fastest, 1e-15) / max(largest - least, 1.0)
            return AlphaBetaModel(max(fastest - s_per_byte * least, 0.0), 1.0 / s_per_byte)

        curves = {name: tuple((sent, alone_seconds(name, sent, seconds)) for sent, seconds in points) for name, points in self.curves.items()}
        collectives = {name: alone_model(name, model) for name, model in self.collectives.items()}
        fixed = {key: seconds / ranks_per_core if key == "tp_sync" else seconds for key, seconds in self.fixed.items()}
        return replace(self, oversubscription=1.0, collectives=collectives, curves=curves, fixed=fixed)

    def compute_rate(self, kind: str, precision: str, flops: float) -> float:
        """FLOP/s of one call of this size; 0 when nothing like it was measured (then memory bandwidth decides)."""
        if precision == "fp8" and (kind != "matmul" or "matmul/fp8" not in self.compute):
            precision = "bf16"  # the precision of everything around fp8 matmuls, and the nearest to fp8
        similar = () if kind.startswith("special") else (f"matmul/{precision}", "matmul/fp32")
        if kind.endswith("-backward") and f"{kind}/{precision}" not in self.compute and similar:
            kind = kind.removesuffix("-backward")  # not measured separately
        keys = (f"{kind}/{precision}", *similar[:1], f"{kind}/fp32", *similar[1:])
        return next((interpolate(self.compute[key], flops) for key in keys if key in self.compute), 0.0)


def scale_rates(rates: Rates, factor: float) -> Rates:
    """The rates of a device that computes `factor` times as fast."""
    compute = {key: tuple((size, rate * factor) for size, rate in points) for key, points in rates.compute.items()}
    memory = tuple((size, rate * factor) for size, rate in rates.memory)
    fixed = {key: seconds / factor for key, seconds in rates.fixed.items()}
    return replace(rates, compute=compute, memory=memory, op_overhead_s=rates.op_overhead_s / factor, fixed=fixed)


@dataclass(frozen=True)
class CalibrationRecord:
    """One run: measured over predicted values, predicted by the calibration's uncorrected rates."""

    when: str
    model: str
    kind: str  # its layer kinds, the key that similar models share
    precision: str
    strategy: str
    ranks: int
    step: float
    compute: float
    network: float | None  # None where communication was not measured separately, or was negligible
    memory: float  # excluding parameters, gradients and optimizer states


@dataclass(frozen=True)
class Calibration:
    """Measurements of one machine. `layouts` has one entry for each measured division of it into ranks."""

    machine: str
    device: str
    when: str
    layouts: tuple[Rates, ...]
    copies: Mapping[str, float] = field(default_factory=dict)  # "host_to_device" → bytes/s
    source: str = "probe"
    error: float = 0.15  # relative, one sigma, of step times predicted from it
    basis: str = ""  # what `error` is based on, in words
    records: tuple[CalibrationRecord, ...] = ()  # runs that were measured against it

    @property
    def foreign_load(self) -> float:
        """The largest share of the cores that other processes used during a measurement."""
        return max((rates.foreign_load for rates in self.layouts), default=0.0)

    def rates_for(self, ranks: int, device: str = "") -> Rates:
        """The entry measured at `ranks`, or the nearest one, for the kind of device where there are several; several ranks never get the entry
        of a single rank, which has no collectives."""
        same_device = [r for r in self.layouts if r.device == device] or self.layouts
        several_ranks = [r for r in same_device if r.ranks > 1] if ranks > 1 else []
        return min(several_ranks or same_device, key=lambda r: (abs(r.ranks - ranks), -r.ranks))
