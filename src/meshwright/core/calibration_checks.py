"""Checks the numbers of a calibration that was read from a file: a rate that no machine can have would make every prediction wrong in silence."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.core.calibration import Calibration, Rates, SizeCurve
from meshwright.core.errors import RequestError


def check_calibration(calibration: Calibration, where: str) -> None:
    """Raise RequestError unless rates, sizes and ratios are positive and times are not negative. Finite they are: JSON is read so."""
    if not calibration.layouts:
        raise RequestError(f"{where}: it has no layouts, so nothing was measured")
    for i, rates in enumerate(calibration.layouts):
        _check_rates(rates, f"{where}: layouts[{i}]")
    _check_positive(calibration.copies, f"{where}: copies")
    _check_not_negative({"error": calibration.error}, where)
    for i, record in enumerate(calibration.records):
        ratios = {"step": record.step, "compute": record.compute, "network": record.network, "memory": record.memory}
        _check_positive({key: value for key, value in ratios.items() if value is not None}, f"{where}: records[{i}]")


def _check_rates(rates: Rates, where: str) -> None:
    _check_positive({"ranks": rates.ranks, "memory_correction": rates.memory_correction, "oversubscription": rates.oversubscription}, where)
    _check_not_negative({"threads": rates.threads, "op_overhead_s": rates.op_overhead_s, "base_bytes": rates.base_bytes}, where)
    if not 0.0 <= rates.overlap <= 1.0:
        raise RequestError(f"{where}: overlap is {rates.overlap:g}, and is a fraction from 0 to 1")
    for name, points in {**rates.compute, "memory": rates.memory}.items():
        _check_curve(points, f"{where}: {name}")
    for name, model in rates.collectives.items():
        _check_positive({"bytes_per_s": model.bytes_per_s}, f"{where}: {name}")
        _check_not_negative({"alpha_s": model.alpha_s, "gap_s": model.gap_s or 0.0}, f"{where}: {name}")
    for name, points in rates.curves.items():
        _check_curve(points, f"{where}: curves.{name}")
    for name, points in rates.core_busy_curves.items():
        _check_not_negative({f"seconds at {size:g}": seconds for size, seconds in points}, f"{where}: core_busy_curves.{name}")
    _check_positive(rates.host, f"{where}: host")


def _check_curve(points: SizeCurve, where: str) -> None:
    _check_positive({f"size {size:g}": size for size, _ in points}, where)
    _check_positive({f"value at {size:g}": value for size, value in points}, where)
    if list(points) != sorted(points):
        raise RequestError(f"{where}: its sizes are not in ascending order")


def _check_positive(values: Mapping[str, float], where: str) -> None:
    for name, value in values.items():
        if not value > 0:
            raise RequestError(f"{where}: {name} is {value:g}, and must be positive")


def _check_not_negative(values: Mapping[str, float], where: str) -> None:
    for name, value in values.items():
        if value < 0:
            raise RequestError(f"{where}: {name} is {value:g}, and must not be negative")
