"""Breaks a simulated step's time down by activity, as a mean over ranks; the parts add up to the step time."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.span import Span
from meshwright.simulate.engine import Simulation

_PIPELINE_AXES = ("pp", "pp_back")


def breakdown(simulation: Simulation) -> dict[str, float]:
    """Seconds of forward, recompute, backward and optimizer; of exposed communication by axis, and of computation slowed down by overlapped calls
    (communication/slowing); of waiting for another pipeline stage, fill and drain included (bubble), and for other ranks of a group (waiting). A
    rank's idle time at the end of the step is a bubble if the rank is in a pipeline, otherwise waiting."""
    total: dict[str, float] = dict.fromkeys(("forward", "recompute", "backward", "optimizer", "bubble", "waiting"), 0.0)
    world = len(simulation.rank_partition.class_of)
    for number, size in enumerate(simulation.rank_partition.class_sizes):
        spans = simulation.spans[number]
        in_pipeline = any(span.axis in _PIPELINE_AXES for span in spans)
        parts = [part for span in spans for part in _span_parts(span)]
        parts.append(("bubble" if in_pipeline else "waiting", simulation.step_s - simulation.end_times[number]))
        for name, seconds in parts:
            total[name] = total.get(name, 0.0) + seconds * size / world
    return {name: seconds for name, seconds in total.items() if seconds or not name.startswith("communication")}


def _span_parts(span: Span) -> Iterator[tuple[str, float]]:
    if not span.group_size:
        yield ("recompute" if span.name.startswith("recompute/") else span.op), span.seconds - span.exposed_s
        yield "communication/slowing", span.exposed_s
        return
    axis = "pp" if span.axis in _PIPELINE_AXES or span.axis.startswith("pp: ") else span.axis
    yield f"communication/{axis}", span.exposed_s - span.waiting_s
    yield ("bubble" if span.axis in _PIPELINE_AXES else "waiting"), span.waiting_s


def closed_form_parts(parts: dict[str, float]) -> dict[str, float]:
    """The breakdown in the categories of the closed form, where the pipeline bubble and all waiting count as communication."""
    totals = dict.fromkeys(("forward", "backward", "optimizer", "communication"), 0.0)
    for name, seconds in parts.items():
        totals["forward" if name == "recompute" else name if name in totals else "communication"] += seconds
    return totals
