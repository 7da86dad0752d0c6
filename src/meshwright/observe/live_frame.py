"""One frame of the live view of a run, drawn with rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.core.event import Event
from meshwright.observe import formatting
from meshwright.observe.formatting import format_bytes, format_number, format_percent, format_rate, format_seconds, format_whole_seconds
from meshwright.observe.progress import ProgressSnapshot, sparkline
from meshwright.observe.wording import describe_devices, describe_event

MAX_EVENTS_SHOWN = 4
STATE_COLOURS = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "interrupted": "red", "waiting": "bright_black"}
EVENT_COLOURS = {"fault": "red", "stop": "yellow", "restart": "yellow", "end": "green", "validation": "magenta"}


def render_view(snapshot: ProgressSnapshot, width: int) -> RenderableType:
    """One frame of the live view, `width` columns wide."""
    colour = STATE_COLOURS[snapshot.status.state]
    title = Text.assemble((snapshot.model, "bold"), "  ", (snapshot.status.state, f"bold {colour}"))
    parts: list[RenderableType] = [_header(snapshot), Text(), _progress_bar(snapshot), Text(), _metrics_table(snapshot, width)]
    if snapshot.status.state in ("failed", "interrupted"):
        parts += [Text(), Text(snapshot.status.detail, style="red")]
    if snapshot.events:
        parts += [Text(), _events_table(snapshot)]
    frame = Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, border_style=colour, padding=(0, 1))
    frame.subtitle, frame.subtitle_align = Text(snapshot.name, style="bright_black"), "right"
    return frame


def _header(snapshot: ProgressSnapshot) -> Text:
    plan = snapshot.plan.summary() if snapshot.plan else "no plan yet"
    devices = describe_devices(snapshot.cluster, snapshot.plan.world if snapshot.plan else None) if snapshot.cluster else ""
    return Text.assemble(plan, ("  ·  " + devices if devices else "", "bright_black"), overflow="ellipsis", no_wrap=True)


def _progress_bar(snapshot: ProgressSnapshot) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=1)
    for _ in range(3):
        table.add_column(no_wrap=True)
    total = snapshot.steps or 1
    colour = STATE_COLOURS[snapshot.status.state]
    done = min(snapshot.steps_done, total)
    bar = ProgressBar(total, done, pulse=snapshot.steps is None, complete_style=colour, finished_style=colour)
    remaining = "" if snapshot.remaining_s is None else f"{format_whole_seconds(snapshot.remaining_s)} left"
    table.add_row(bar, f"step {snapshot.steps_done}/{snapshot.steps or '?'}", format_percent(snapshot.fraction_done), remaining)
    return table


def _metrics_table(snapshot: ProgressSnapshot, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("loss", _loss_text(snapshot, max(min(width - 60, 48), 8)))
    metrics, estimate = snapshot.last_metrics, snapshot.estimate
    speed = [format_rate(metrics.get("samples_per_s"), "samples/s")]
    speed += [format_rate(metrics["tokens_per_s"], "tokens/s")] if formatting.finite_or_none(metrics.get("tokens_per_s")) else []
    speed += [f"MFU {format_percent(metrics['mfu'], 1)}"] if formatting.finite_or_none(metrics.get("mfu")) else []
    table.add_row("speed", " · ".join(speed))
    table.add_row("step time", _measured_vs_predicted(format_seconds, snapshot.step_s, estimate.step_s if estimate else None))
    peak = next(iter(estimate.memory_bytes), None) if estimate else None  # of rank 0, whose memory is in the metrics
    table.add_row("memory", _measured_vs_predicted(format_bytes, metrics.get("memory_bytes"), peak, gauge=True))
    table.add_row("elapsed", format_whole_seconds(snapshot.elapsed_s))
    return table


def _loss_text(snapshot: ProgressSnapshot, width: int) -> Text:
    text = Text(format_number(snapshot.last_metrics.get("loss")), style="bold")
    text.append("  " + sparkline(snapshot.losses, width), style="not bold cyan")
    if snapshot.validation is not None:
        text.append(f"  validation {format_number(snapshot.validation)}", style="not bold magenta")
    return text


def _measured_vs_predicted(format_value: Callable[[Any], str], measured: Any, predicted: float | None, gauge: bool = False) -> Text:
    """'118 ms  predicted 121 ms (−2.5 %)'; `gauge` adds a bar with the fraction of the predicted peak."""
    text = Text(format_value(measured))
    if predicted is None:
        return text
    error = formatting.relative_error(measured, predicted)
    if gauge:
        cells = 0 if error is None else max(min(round(12 * (1 + error)), 12), 0)
        text = Text.assemble(("█" * cells, "cyan"), ("░" * (12 - cells), "bright_black"), "  ", text)
    text.append(f"  predicted {'peak ' if gauge else ''}{format_value(predicted)}", style="bright_black")
    if error is not None:
        percent = format_percent(1 + error) if gauge else formatting.format_signed_percent(error)
        text.append(f" ({percent})", style="green" if (error if gauge else abs(error)) <= 0.1 else "yellow")
    return text


def _events_table(snapshot: ProgressSnapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    for style in ("bright_black", "bright_black", "", ""):
        table.add_column(style=style, no_wrap=True, overflow="ellipsis")
    for group in _group_events(snapshot.events)[-MAX_EVENTS_SHOWN:]:
        first = group[0]
        when = time.strftime("%H:%M:%S", time.localtime(first.time))
        who = f"{len(group)} ranks" if len(group) > 1 else f"rank {first.rank}"
        table.add_row(when, who, Text(first.kind, style=EVENT_COLOURS.get(first.kind, "")), Text(describe_event(first)))
    return table


def _group_events(events: Sequence[Event]) -> list[list[Event]]:
    """Consecutive events that are the same on different ranks, grouped: they are shown as one line."""
    recent = events[-64 * MAX_EVENTS_SHOWN :]
    groups: list[list[Event]] = []
    for _, same in groupby(recent, key=lambda e: (e.kind, e.step, e.data.get("message"))):
        ranks: set[int] = set()
        for event in same:
            if not ranks or event.rank in ranks:
                groups.append([])
                ranks = set()
            groups[-1].append(event)
            ranks.add(event.rank)
    return groups
