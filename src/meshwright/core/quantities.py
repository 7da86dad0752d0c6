"""Formatting and parsing of quantities: bytes, seconds, counts and rates."""

from __future__ import annotations

import re

from meshwright.core.errors import RequestError

_MAX_DIGITS = 40
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def _scaled(value: float, unit: str, prefixes: tuple[str, ...]) -> str:
    size = float(value)
    for prefix in prefixes:
        if abs(size) < 999.5 or prefix == prefixes[-1]:
            digits = 0 if prefix == "" and size == int(size) else 1 if abs(size) >= 9.995 else 2
            number = f"{size:.{digits}f}" if abs(size) < 1e6 else f"{size:.3g}"  # beyond the last prefix
            return f"{number} {prefix}{unit}".rstrip()
        size /= 1000
    raise AssertionError("unreachable")


def show_bytes(value: float) -> str:
    """31200000000 → '31.2 GB' (decimal, as memory and links are sold)."""
    return _scaled(value, "B", _PREFIXES)


def show_count(value: float) -> str:
    """124439808 → '124.4 M'."""
    return _scaled(value, "", (*_PREFIXES[:3], "B", "T"))


def show_rate(value: float, unit: str) -> str:
    """show_rate(3.6e10, 'FLOP/s') → '36.0 GFLOP/s'."""
    return _scaled(value, unit, _PREFIXES)


def show_seconds(value: float) -> str:
    """0.0123 → '12.3 ms'; 75 → '1 min 15 s'."""
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60)} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= 0.9995 * scale:  # three digits would round it up to this unit
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.2g} µs"


def _parse_number(text: str, unit: str, what: str) -> tuple[float, re.Match[str]]:
    """A number and what follows it, which must match the pattern `unit`; `what` describes a valid value for the error line."""
    match = re.fullmatch(rf"\s*(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)\s*{unit}\s*", text)
    if match is None:
        raise RequestError(f"'{text}' is not {what}")
    if len(match["number"]) > _MAX_DIGITS:
        raise RequestError(f"'{text[:_MAX_DIGITS]}…' has too many digits")
    return float(match["number"]), match


def parse_bytes(text: str) -> int:
    """'24GB' → 24000000000, '16GiB' → 17179869184, '1024' → 1024."""
    number, match = _parse_number(text, "(?P<prefix>[kKMGTP]?)(?P<binary>i?)B?", "a size; write it like 24GB or 512MiB")
    return int(number * _prefix_factor(match))


def parse_rate(text: str) -> float:
    """Bytes per second: '300 GB/s' → 3e11, '200 Gb/s' and '200 Gbit/s' → 2.5e10."""
    unit, what = "(?P<prefix>[kKMGTP]?)(?P<binary>i?)(?P<unit>B|b|bit)/s", "a bandwidth; write it like 300 GB/s (bytes) or 200 Gb/s (bits)"
    number, match = _parse_number(text, unit, what)
    return number * _prefix_factor(match) / (1 if match["unit"] == "B" else 8)


def _prefix_factor(match: re.Match[str]) -> int:
    return int((1024 if match["binary"] else 1000) ** " KMGTP".index(match["prefix"].upper() or " "))


def parse_flops(text: str) -> float:
    """Operations per second: '312 TFLOP/s' → 3.12e14."""
    number, match = _parse_number(text, "(?P<prefix>[MGTPE])FLOP/?[sS]", "a compute rate; write it like 312 TFLOP/s")
    return number * 1000.0 ** _PREFIXES.index(match["prefix"])


def parse_seconds(text: str) -> float:
    """'2 us' and '2 µs' → 2e-6, '1.5 ms' → 1.5e-3, '3 s' → 3.0."""
    number, match = _parse_number(text, "(?P<unit>s|ms|us|µs|μs|ns)", "a time; write it like 2 us or 1.5 ms")
    return number * {"s": 1.0, "ms": 1e-3, "ns": 1e-9}.get(match["unit"], 1e-6)
