"""Formats a run's numbers as text. An absent or non-finite value becomes a dash, because a report must not fail on a NaN."""

from __future__ import annotations

import math
import re
from typing import Any

from meshwright.core.quantities import show_bytes, show_count, show_seconds

DASH = "–"
MEASURED_RELATIVE = "Percentages are measured relative to predicted: + is more than predicted."


def finite_or_none(value: Any) -> float | None:
    """`value` as a float, or None when it is absent, not a number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def format_seconds(value: Any) -> str:
    number = finite_or_none(value)
    return DASH if number is None else "0 s" if number <= 0 else show_seconds(number)


def format_whole_seconds(value: float) -> str:
    """Format as whole seconds: decimals that change at every refresh only distract."""
    return format_seconds(round(value)) if value >= 1 else f"{max(value, 0):.0f} s"


def format_bytes(value: Any) -> str:
    number = finite_or_none(value)
    return DASH if number is None else re.sub(r"\.0+(?= )", "", show_bytes(number))  # 612 MB, not 612.0 MB


def format_number(value: Any) -> str:
    """Format a loss, learning rate or other number without unit; a NaN is shown as such, since here it is what the reader must see."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    number = finite_or_none(value)
    return DASH if number is None else f"{number:.4g}"


def format_rate(value: Any, unit: str) -> str:
    """format_rate(812.4, 'samples/s') → '812 samples/s'."""
    number = finite_or_none(value)
    if number is None:
        return DASH
    if number >= 999_999.5:
        return f"{show_count(number)} {unit}"
    return f"{number:,.0f} {unit}" if number >= 99.95 else f"{number:.3g} {unit}"


def format_percent(value: Any, digits: int = 0) -> str:
    """0.312 → '31 %'."""
    number = finite_or_none(value)
    return DASH if number is None else f"{100 * number:.{digits}f} %" if abs(number) < 1000 else f"{100 * number:.3g} %"


def relative_error(measured: Any, predicted: Any) -> float | None:
    """(measured - predicted) / predicted, or None when either is unknown."""
    real, expected = finite_or_none(measured), finite_or_none(predicted)
    return None if real is None or expected is None or expected <= 0 else (real - expected) / expected


def format_signed_percent(value: Any) -> str:
    """0.042 → '+4.2 %'; beyond ±10 % without decimals."""
    number = finite_or_none(value)
    if number is None:
        return DASH
    shown = f"{100 * number:+.{1 if abs(number) < 0.0995 else 0}f}" if abs(number) < 1000 else f"{100 * number:+.3g}"
    return f"{shown} %".replace("-", "−")
