"""Draws curves as one SVG file: panels in rows, linear or logarithmic axes, lines or dots, no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.observe.charts import ticks
from meshwright.observe.markup import Html, join, tag

CurvePoint = tuple[float, float]
_WIDTH, _HEIGHT = 460.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 16.0, 30.0, 44.0
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626")
_STYLE = "text{font:11px sans-serif;fill:#374151}.t{font-weight:600;fill:#111827}line{stroke:#e5e7eb}polyline{fill:none;stroke-width:1.8}"


@dataclass(frozen=True)
class Panel:
    """One plot: curves by name, ascending in x; those named in `dots` are drawn as points, in `dashed` as dashed lines."""

    title: str
    x_label: str
    curves: Mapping[str, Sequence[CurvePoint]]
    format_x: Callable[[float], str]
    format_y: Callable[[float], str]
    log_x: bool = False
    log_y: bool = False
    dots: frozenset[str] = frozenset()
    dashed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _PlotAxis:
    """The range of values on an axis (of their logarithms if `log`), and the SVG coordinates of its ends."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def position(self, value: float) -> float:
        scaled = math.log10(value) if self.log else value
        return self.start + (scaled - self.low) / (self.high - self.low) * (self.end - self.start)

    def tick_values(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high, 5)
        powers = [10.0**p for p in range(math.floor(self.low), math.ceil(self.high) + 1)]
        values = powers[:: len(powers) // 8 + 1] if len(powers) > 3 else sorted(p * m for p in powers for m in (1, 2, 5))
        return [v for v in values if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]


def curves_figure(panels: Sequence[Panel], title: str, columns: int | None = None, shared_axes: bool = False) -> str:
    """The SVG text: the panels in rows of `columns` (all in one row by default); a curve's name has the same colour in all panels."""
    columns = columns or len(panels)
    width, height = columns * _WIDTH, math.ceil(len(panels) / columns) * _HEIGHT + 36
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    parts = [tag("style", Html(_STYLE)), tag("rect", width=width, height=height, fill="#fff"), tag("text", title, x=12, y=22, class_="t")]
    for i, panel in enumerate(panels):
        points = [p for shown in (panels if shared_axes else [panel]) for curve in shown.curves.values() for p in curve]
        shift = f"translate({i % columns * _WIDTH:.0f},{36 + i // columns * _HEIGHT:.0f})"
        parts.append(tag("g", _draw_panel(panel, points, colours), transform=shift))
    svg = tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=title)
    return f"{svg}\n"


def _make_axis(values: Sequence[float], log: bool, start: float, end: float, from_zero: bool = False) -> _PlotAxis:
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
    low = min(low, 0.0) if from_zero and not log else low
    margin = 0.04 * (high - low) or 0.5
    return _PlotAxis(low if from_zero and not log else low - margin, high + margin, log, start, end)


def _draw_panel(panel: Panel, points: Sequence[CurvePoint], colours: Mapping[str, str]) -> Html:
    """The panel's axes, which cover `points`, and its curves. The legend is where few curves go: below those of logarithmic values, which rise."""
    x = _make_axis([p[0] for p in points], panel.log_x, _LEFT, _WIDTH - _RIGHT)
    y = _make_axis([p[1] for p in points], panel.log_y, _HEIGHT - _BOTTOM, _TOP, from_zero=True)
    parts = [tag("text", panel.title, x=_LEFT, y=16, class_="t")]
    for value in y.tick_values():
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y.position(value), y2=y.position(value)))
        parts.append(tag("text", panel.format_y(value) if value else "0", x=_LEFT - 6, y=y.position(value) + 4, text_anchor="end"))
    for value in x.tick_values():
        parts.append(tag("line", x1=x.position(value), x2=x.position(value), y1=_TOP, y2=_HEIGHT - _BOTTOM))
        parts.append(tag("text", panel.format_x(value), x=x.position(value), y=_HEIGHT - _BOTTOM + 16, text_anchor="middle"))
    parts.append(tag("text", panel.x_label, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 8, text_anchor="middle"))
    top = _HEIGHT - _BOTTOM - 14 * len(panel.curves) if panel.log_y else _TOP + 14
    for i, (name, curve) in enumerate(panel.curves.items()):
        colour = colours[name]
        parts.append(tag("text", name, x=_WIDTH - _RIGHT - 4, y=top + 14 * i, text_anchor="end", style=f"fill:{colour};font-weight:600"))
        parts.append(_draw_curve([(x.position(a), y.position(b)) for a, b in curve], colour, name in panel.dots, name in panel.dashed))
    return join(parts)


def _draw_curve(points: Sequence[CurvePoint], colour: str, dots: bool, dashed: bool) -> Html:
    if dots:
        return join([tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r="4", fill=colour) for a, b in points])
    style = "stroke-dasharray:5 4" if dashed else ""
    return tag("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in points), stroke=colour, style=style)
