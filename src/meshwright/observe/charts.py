"""Draws charts as inline SVG and bars as HTML for the report: no library, no network, colours from the page's style sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.observe import formatting
from meshwright.observe.markup import Html, join, tag

WIDTH, HEIGHT = 560.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 14.0, 12.0, 38.0
MAX_POINTS = 500  # a curve 480 pixels wide shows no more detail, and a long run's report stays small

ChartPoint = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve by step. Values that are not finite leave a gap."""

    name: str
    points: Sequence[ChartPoint]
    colour: int = 1
    dots: bool = False


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line, such as a prediction, with its relative error as a band."""

    name: str
    value: float
    error: float = 0.0


@dataclass(frozen=True)
class Chart:
    """A line chart; `format_value` formats a value with its unit."""

    title: str
    series: Sequence[Series]
    format_value: Callable[[float], str]
    reference: ReferenceLine | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class _PlotArea:
    """The value ranges of a chart, and their mapping to SVG coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, step: float) -> float:
        return LEFT + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (min(max(value, self.y0), self.y1) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def line_chart(chart: Chart) -> Html:
    """A figure with title, legend, curves and, for values that could not be drawn, a note."""
    drawn = [s for s in chart.series if any(math.isfinite(v) for _, v in s.points)]
    title = tag("span", chart.title, class_="title")
    if not drawn:
        bad = any(s.points for s in chart.series)
        text = "No finite value was recorded." if bad else "Nothing was recorded."
        return tag("figure", tag("figcaption", title), tag("p", text, class_="empty"), class_="chart")
    frame, clipped = _make_plot_area(chart, drawn)
    thin = [Series(s.name, downsample(s.points), s.colour, s.dots) for s in drawn]
    legend = [_legend_entry(s.name, f"c{s.colour}{' dot' if s.dots else ''}") for s in thin if s.name != chart.title.lower()]
    legend += [_legend_entry(chart.reference.name, "dash")] if chart.reference else []
    layers = [
        _draw_grid(chart, frame),
        *(_draw_curve(s, frame) for s in thin),
        *([_draw_reference(chart.reference, frame)] if chart.reference else []),
    ]
    hover = tag("g", tag("line", class_="cross", y1=TOP, y2=HEIGHT - BOTTOM), class_="hover")
    label = f"{chart.title} by step"
    svg = tag(
        "svg", *layers, hover, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", role="img", aria_label=label, data_chart=_hover_data(chart, thin, frame)
    )
    return tag("figure", tag("figcaption", title, tag("span", *legend, class_="legend")), svg, _notes(chart, drawn, clipped), class_="chart")


def downsample(points: Sequence[ChartPoint], max_points: int = MAX_POINTS) -> list[ChartPoint]:
    """At most about `max_points` points, keeping the lowest and highest of each interval so that no spike is lost."""
    if len(points) <= max_points:
        return list(points)
    kept: list[ChartPoint] = []
    stretches = max(max_points // 2, 1)
    for i in range(stretches):
        part = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        good = [p for p in part if math.isfinite(p[1])]
        if not good:
            kept.append(part[0])
            continue
        ends = {min(good, key=lambda p: p[1]), max(good, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def ticks(low: float, high: float, count: int, integers_only: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    step = max(step, 1.0) if integers_only else step
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def stacked_bar(parts: Mapping[str, float], format_value: Callable[[float], str]) -> Html:
    """One bar split into its parts, with the numbers in a legend. Parts of zero appear in the legend only."""
    known = {name: max(formatting.finite_or_none(value) or 0.0, 0.0) for name, value in parts.items()}
    total = sum(known.values())
    if total <= 0:
        return tag("p", "Nothing is known about it.", class_="empty")
    pieces, keys = [], []
    for i, (name, value) in enumerate(known.items()):
        share = value / total
        text = f"{name}: {format_value(value)} ({formatting.format_percent(share)})"
        if value > 0:
            pieces.append(tag("span", class_=f"c{i % 6 + 1}", style=f"flex-grow:{share:.5f}", title=text))
        keys.append(
            tag("li", _legend_entry(name, f"c{i % 6 + 1} box"), tag("b", format_value(value)), tag("small", formatting.format_percent(share)))
        )
    return join([tag("div", *pieces, class_="stack", role="img", aria_label="parts of the whole"), tag("ul", *keys, class_="parts")])


def paired_bars(rows: Sequence[tuple[str, float | None, float | None]], format_value: Callable[[Any], str], tolerance: float) -> Html:
    """(label, predicted, measured) as two bars one above the other, with the relative difference."""
    top = max((v for _, *pair in rows for v in pair if v is not None), default=0.0) or 1.0
    return tag("div", *(_bar_pair(label, predicted, measured, format_value, top, tolerance) for label, predicted, measured in rows), class_="pairs")


def difference_chip(measured: float | None, predicted: float | None, tolerance: float) -> Html:
    """'+4.2 %' in a colour: within the stated error, within twice that, or beyond."""
    off = formatting.relative_error(measured, predicted)
    if off is None:
        return tag("span", formatting.DASH, class_="chip")
    grade = "good" if abs(off) <= tolerance else "fair" if abs(off) <= 2 * tolerance else "poor"
    return tag("span", formatting.format_signed_percent(off), class_=f"chip {grade}", title="measured against predicted")


def _bar_pair(label: str, predicted: float | None, measured: float | None, format_value: Callable[[Any], str], top: float, tolerance: float) -> Html:
    def bar(kind: str, value: float | None) -> Html:
        width = 0.0 if value is None else 100 * value / top
        filled = tag("i", class_=kind, style=f"width:{width:.2f}%")
        return tag("div", tag("span", kind, class_="what"), tag("span", filled, class_="track"), tag("b", format_value(value)), class_="bar")

    heading = tag("h4", label, difference_chip(measured, predicted, tolerance))
    return tag("div", heading, bar("predicted", predicted), bar("measured", measured), class_="pair")


def _make_plot_area(chart: Chart, visible_series: Sequence[Series]) -> tuple[_PlotArea, bool]:
    values = sorted(v for s in visible_series for _, v in s.points if math.isfinite(v))
    steps = [x for s in visible_series for x, _ in s.points]
    low, high = values[0], values[-1]
    usual = values[int(0.95 * (len(values) - 1))]
    # One warm-up step ten times as long as the rest would flatten the curve: clip it at the edge and add a note.
    clipped = len(values) >= 8 and usual > 0 and high > 3 * usual
    high = 1.3 * usual if clipped else high
    if chart.reference:
        low, high = min(low, chart.reference.value * (1 - chart.reference.error)), max(high, chart.reference.value * (1 + chart.reference.error))
    low = min(low, 0.0) if chart.from_zero else low
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    bottom = low if chart.from_zero and low == 0 else low - room
    x0, x1 = min(steps), max(steps)
    return _PlotArea(x0 - (0.5 if x0 == x1 else 0), x1 + (0.5 if x0 == x1 else 0), bottom, high + room), clipped


def _draw_grid(chart: Chart, area: _PlotArea) -> Html:
    parts = []
    for value in ticks(area.y0, area.y1, 5):
        y = area.y(value)
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(tag("text", "0" if value == 0 else chart.format_value(value), x=LEFT - 8, y=y, dy="0.35em", text_anchor="end"))
    for step in ticks(area.x0, area.x1, 6, integers_only=True):
        x = area.x(step)
        parts.append(tag("line", class_="tick", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4))
        parts.append(tag("text", f"{step:,.0f}", x=x, y=HEIGHT - BOTTOM + 22, text_anchor="middle"))
    parts.append(tag("text", "step", x=LEFT - 8, y=HEIGHT - BOTTOM + 22, text_anchor="end"))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM))
    return tag("g", *parts)


def _draw_reference(reference: ReferenceLine, area: _PlotArea) -> Html:
    y = area.y(reference.value)
    top, bottom = area.y(reference.value * (1 + reference.error)), area.y(reference.value * (1 - reference.error))
    band = tag("rect", class_="band", x=LEFT, y=top, width=WIDTH - LEFT - RIGHT, height=bottom - top)
    return tag("g", band, tag("line", class_="level", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))


def _draw_curve(series: Series, area: _PlotArea) -> Html:
    runs: list[list[str]] = [[]]
    for step, value in series.points:
        if math.isfinite(value):
            runs[-1].append(f"{area.x(step):.1f},{area.y(value):.1f}")
        else:
            runs.append([])
    parts = [tag("polyline", points=" ".join(run)) for run in runs if len(run) > 1]
    alone = {run[0] for run in runs if len(run) == 1}  # a line needs two points: a single one between gaps is drawn as a dot
    every = [p for run in runs for p in run]
    for point in every if series.dots else sorted(alone):
        x, _, y = point.partition(",")
        parts.append(tag("circle", cx=x, cy=y, r="4" if series.dots else "3"))
    return tag("g", *parts, class_=f"curve c{series.colour}")


def _hover_data(chart: Chart, series: Sequence[Series], area: _PlotArea) -> str:
    """The JSON that the page's script shows on hover: for each step, its coordinates and its values as text."""
    steps = sorted({x for s in series for x, _ in s.points})
    rows: list[dict[str, object]] = []
    for s in series:
        at = dict(s.points)
        values = [at.get(x) for x in steps]
        text = [None if v is None else chart.format_value(v) if math.isfinite(v) else str(v) for v in values]
        place = [round(area.y(v), 1) if v is not None and math.isfinite(v) else None for v in values]
        rows.append({"name": s.name, "colour": s.colour, "text": text, "y": place})
    if chart.reference:
        rows.append({"name": chart.reference.name, "colour": 0, "text": chart.format_value(chart.reference.value)})
    return json.dumps({"step": [int(x) for x in steps], "x": [round(area.x(x), 1) for x in steps], "rows": rows}, separators=(",", ":"))


def _notes(chart: Chart, visible_series: Sequence[Series], clipped: bool) -> Html:
    said = []
    if clipped:
        step, high = max((p for s in visible_series for p in s.points if math.isfinite(p[1])), key=lambda p: p[1])
        said.append(f"Off the scale: {chart.format_value(high)} at step {step:,.0f}.")
    bad = sum(not math.isfinite(v) for s in chart.series for _, v in s.points)
    said += [f"{bad} value{'s' * (bad > 1)} not finite (gap{'s' * (bad > 1)})."] if bad else []
    return tag("p", " ".join(said), class_="chart-note") if said else Html()


def _legend_entry(name: str, kind: str) -> Html:
    return tag("span", tag("i", class_=f"swatch {kind}"), name, class_="key")
