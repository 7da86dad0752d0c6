"""Draws bandwidth by message size as one SVG file: a panel for each operation, a line for each backend, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.core.quantities import show_bytes, show_rate
from meshwright.observe.curves_figure import CurvePoint, Panel, curves_figure


def bandwidth_figure(operations: Mapping[str, Mapping[str, Sequence[CurvePoint]]], title: str) -> str:
    """The SVG text. `operations[operation][backend]` is (bytes, bytes per second), ascending. All panels share their axes for comparison."""

    def format_rate(rate: float) -> str:
        return show_rate(rate, "B/s")

    panels = [
        Panel(name.replace("_", "-"), "message size", curves, show_bytes, format_rate, log_x=True, log_y=True) for name, curves in operations.items()
    ]
    return curves_figure(panels, title, columns=3, shared_axes=True)
