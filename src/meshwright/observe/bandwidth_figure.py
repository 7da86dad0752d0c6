"""Draws bandwidth by message size as one SVG file: a panel for each operation, a line for each backend, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.core.quantities import show_bytes, show_rate
from meshwright.observe.markup import Html, join, tag

BandwidthPoint = tuple[float, float]
_WIDTH, _HEIGHT, _COLUMNS = 330.0, 220.0, 3
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 12.0, 26.0, 34.0
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626")
_STYLE = "text{font:11px sans-serif;fill:#374151}.t{font-weight:600;fill:#111827}line{stroke:#e5e7eb}polyline{fill:none;stroke-width:1.8}"


def bandwidth_figure(panels: Mapping[str, Mapping[str, Sequence[BandwidthPoint]]], title: str) -> str:
    """The SVG text. `panels[operation][backend]` is (bytes, bytes per second), ascending. All panels share their axes for comparison."""
    points = [p for lines in panels.values() for line in lines.values() for p in line]
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    x0, x1 = _log_range(p[0] for p in points)
    y0, y1 = _log_range(p[1] for p in points)
    rows = math.ceil(len(panels) / _COLUMNS)
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT + 40
    parts = [tag("style", Html(_STYLE)), tag("rect", width=width, height=height, fill="#fff"), _heading(title, names)]
    for i, (operation, lines) in enumerate(panels.items()):
        place = f"translate({i % _COLUMNS * _WIDTH:.0f},{40 + i // _COLUMNS * _HEIGHT:.0f})"
        parts.append(
            tag(
                "g",
                _draw_axes(operation, x0, x1, y0, y1),
                *(_draw_line(p, names.index(n), x0, x1, y0, y1) for n, p in lines.items()),
                transform=place,
            )
        )
    svg = tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=title)
    return f"{svg}\n"


def _log_range(values: object) -> tuple[float, float]:
    logs = [math.log10(v) for v in values]  # type: ignore[attr-defined]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return float(low), float(max(high, low + 1))


def _x(value: float, x0: float, x1: float) -> float:
    return _LEFT + (math.log10(value) - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, y0: float, y1: float) -> float:
    return _HEIGHT - _BOTTOM - (math.log10(value) - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)


def _heading(title: str, names: Sequence[str]) -> Html:
    keys = [tag("text", name, x=420 + 110 * i, y=24, style=f"fill:{_COLOURS[i % len(_COLOURS)]};font-weight:600") for i, name in enumerate(names)]
    return join([tag("text", title, x=12, y=24, class_="t"), *keys])


def _draw_axes(operation: str, x0: float, x1: float, y0: float, y1: float) -> Html:
    parts = [tag("text", operation.replace("_", "-"), x=_LEFT, y=16, class_="t")]
    for power in range(int(y0), int(y1) + 1):
        y = _y(10.0**power, y0, y1)
        parts += [tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y)]
        if power % 2 == 0 or y1 - y0 <= 4:
            parts += [tag("text", show_rate(10.0**power, "B/s"), x=_LEFT - 6, y=y + 4, text_anchor="end")]
    for power in range(int(x0), int(x1) + 1, 2):
        x = _x(10.0**power, x0, x1)
        parts += [tag("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM)]
        parts += [tag("text", show_bytes(10.0**power), x=x, y=_HEIGHT - _BOTTOM + 16, text_anchor="middle")]
    return join(parts)


def _draw_line(points: Sequence[BandwidthPoint], index: int, x0: float, x1: float, y0: float, y1: float) -> Html:
    path = " ".join(f"{_x(size, x0, x1):.1f},{_y(rate, y0, y1):.1f}" for size, rate in points)
    return tag("polyline", points=path, stroke=_COLOURS[index % len(_COLOURS)])
