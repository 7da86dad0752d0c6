"""Draws charts as inline SVG and bars as HTML for the report: no library, no network, colours from the page's style sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.observe.formatting import DASH, finite_or_none, format_percent, format_signed_percent, relative_error
from meshwright.observe.markup import Html, join, tag
from meshwright.observe.step_columns import ChartPoint, downsample_columns

WIDTH, HEIGHT = 560.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 14.0, 12.0, 38.0
MAX_POINTS = 500  # a curve 480 pixels wide shows no more detail, and a long run's report stays small


@dataclass(frozen=True)
class Series:
    """One curve by step. Values that are not finite leave a gap."""

    name: str
    points: Sequence[ChartPoint]
    colour: int = 1
    dots: bool = False
    num_nonfinite: int | None = None  # where `points` are a selection: of all values


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
        fraction = (min(max(value, self.y0), self.y1) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - fraction * (HEIGHT - TOP - BOTTOM)


def line_chart(chart: Chart) -> Html:
    """A figure with title, legend, curves and, for values that could not be drawn, a note."""
    visible = [s for s in chart.series if any(math.isfinite(v) for _, v in s.points)]
    title = tag("span", chart.title, class_="title")
    if not visible:
        text = "No finite value was recorded." if any(s.points for s in chart.series) else "Nothing was recorded."
        return tag("figure", tag("figcaption", title), tag("p", text, class_="empty"), class_="chart")
    area, clipped = _make_plot_area(chart, visible)
    sampled = [replace(s, points=downsample(s.points)) for s in visible]
    legend = [_legend_entry(s.name, f"c{s.colour}{' dot' if s.dots else ''}") for s in sampled if s.name != chart.title.lower()]
    layers = [_draw_grid(chart, area), *(_draw_curve(s, area) for s in sampled)]
    if chart.reference:
        legend.append(_legend_entry(chart.reference.name, "dash"))
        layers.append(_draw_reference(chart.reference, area))
    layers.append(tag("g", tag("line", class_="cross", y1=TOP, y2=HEIGHT - BOTTOM), class_="hover"))
    box, label = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", f"{chart.title} by step"
    svg = tag("svg", *layers, viewBox=box, role="img", aria_label=label, data_chart=_hover_data(chart, sampled, area))
    return tag("figure", tag("figcaption", title, tag("span", *legend, class_="legend")), svg, _notes(chart, visible, clipped), class_="chart")


def downsample(points: Sequence[ChartPoint], max_points: int = MAX_POINTS) -> list[ChartPoint]:
    """At most `max_points` points, keeping the lowest and highest of each interval so that no spike is lost."""
    if len(points) <= max_points:
        return list(points)
    steps, values = np.array(points).T
    return downsample_columns(steps, values, max_points)


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
    values = {name: max(finite_or_none(value) or 0.0, 0.0) for name, value in parts.items()}
    total = sum(values.values())
    if total <= 0:
        return tag("p", "No values are known.", class_="empty")
    segments, legend = [], []
    for i, (name, value) in enumerate(values.items()):
        colour, shown, percent = f"c{i % 6 + 1}", format_value(value), format_percent(value / total)
        if value > 0:
            segments.append(tag("span", class_=colour, style=f"flex-grow:{value / total:.5f}", title=f"{name}: {shown} ({percent})"))
        legend.append(tag("li", _legend_entry(name, f"{colour} box"), tag("b", shown), tag("small", percent)))
    return join([tag("div", *segments, class_="stack", role="img", aria_label="parts of the total"), tag("ul", *legend, class_="parts")])


def paired_bars(rows: Sequence[tuple[str, float | None, float | None]], format_value: Callable[[Any], str], tolerance: float) -> Html:
    """(label, predicted, measured) as two bars one above the other, with the relative difference."""
    longest = max((v for _, *pair in rows for v in pair if v is not None), default=0.0) or 1.0

    def bar(kind: str, value: float | None) -> Html:
        filled = tag("i", class_=kind, style=f"width:{0.0 if value is None else 100 * value / longest:.2f}%")
        return tag("div", tag("span", kind, class_="what"), tag("span", filled, class_="track"), tag("b", format_value(value)), class_="bar")

    def pair(label: str, predicted: float | None, measured: float | None) -> Html:
        heading = tag("h4", label, difference_chip(measured, predicted, tolerance))
        return tag("div", heading, bar("predicted", predicted), bar("measured", measured), class_="pair")

    return tag("div", *(pair(*row) for row in rows), class_="pairs")


def difference_chip(measured: float | None, predicted: float | None, tolerance: float) -> Html:
    """'+4.2 %' in a colour: within the stated error, within twice that, or beyond."""
    error = relative_error(measured, predicted)
    if error is None:
        return tag("span", DASH, class_="chip")
    grade = "good" if abs(error) <= tolerance else "fair" if abs(error) <= 2 * tolerance else "poor"
    return tag("span", format_signed_percent(error), class_=f"chip {grade}", title="measured relative to predicted")


def _make_plot_area(chart: Chart, visible: Sequence[Series]) -> tuple[_PlotArea, bool]:
    values = sorted(v for s in visible for _, v in s.points if math.isfinite(v))
    steps = [x for s in visible for x, _ in s.points]
    low, high = values[0], values[-1]
    p95 = values[int(0.95 * (len(values) - 1))]
    # One warm-up step ten times as long as the rest would flatten the curve: clip it at the edge and add a note.
    clipped = len(values) >= 8 and p95 > 0 and high > 3 * p95
    high = 1.3 * p95 if clipped else high
    if line := chart.reference:
        low, high = min(low, line.value * (1 - line.error)), max(high, line.value * (1 + line.error))
    low = min(low, 0.0) if chart.from_zero else low
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    bottom = low if chart.from_zero and low == 0 else low - margin
    widen = 0.5 if min(steps) == max(steps) else 0
    return _PlotArea(min(steps) - widen, max(steps) + widen, bottom, high + margin), clipped


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
    # A line needs two points: a single one between gaps is drawn as a dot.
    for point in (p for run in runs if series.dots or len(run) == 1 for p in run):
        x, _, y = point.partition(",")
        parts.append(tag("circle", cx=x, cy=y, r="4" if series.dots else "3"))
    return tag("g", *parts, class_=f"curve c{series.colour}")


def _hover_data(chart: Chart, series: Sequence[Series], area: _PlotArea) -> str:
    """The JSON that the page's script shows on hover: for each step, its coordinates and its values as text."""
    steps = sorted({x for s in series for x, _ in s.points})
    rows: list[dict[str, object]] = []
    for s in series:
        by_step = dict(s.points)
        values = [by_step.get(x) for x in steps]
        text = [None if v is None else chart.format_value(v) if math.isfinite(v) else str(v) for v in values]
        y = [round(area.y(v), 1) if v is not None and math.isfinite(v) else None for v in values]
        rows.append({"name": s.name, "colour": s.colour, "text": text, "y": y})
    if chart.reference:
        rows.append({"name": chart.reference.name, "colour": 0, "text": chart.format_value(chart.reference.value)})
    return json.dumps({"step": [int(x) for x in steps], "x": [round(area.x(x), 1) for x in steps], "rows": rows}, separators=(",", ":"))


def _notes(chart: Chart, visible: Sequence[Series], clipped: bool) -> Html:
    notes = []
    if clipped:
        step, high = max((p for s in visible for p in s.points if math.isfinite(p[1])), key=lambda p: p[1])
        notes.append(f"Off the scale: {chart.format_value(high)} at step {step:,.0f}.")
    count = sum(sum(not math.isfinite(v) for _, v in s.points) if s.num_nonfinite is None else s.num_nonfinite for s in chart.series)
    notes += [f"{count} value{'s' * (count > 1)} not finite (gap{'s' * (count > 1)})."] if count else []
    return tag("p", " ".join(notes), class_="chart-note") if notes else Html()


def _legend_entry(name: str, kind: str) -> Html:
    return tag("span", tag("i", class_=f"swatch {kind}"), name, class_="key")
