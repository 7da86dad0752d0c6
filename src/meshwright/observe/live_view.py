"""The live view of a run in a terminal, read only from its folder; on a pipe or in CI, one plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.core.event import Event
from meshwright.observe import formatting
from meshwright.observe.progress import ProgressSnapshot, ProgressTracker, sparkline
from meshwright.observe.run_folder import RunFolder
from meshwright.observe.wording import describe_devices, describe_event

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PLAIN_INTERVAL_S = 2.0
# A supervisor may restart a run that failed or vanished: the view waits this long before it ends.
RESTART_GRACE_S = 5.0
MAX_EVENTS_SHOWN = 4
STATE_COLOURS = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "interrupted": "red", "waiting": "bright_black"}
EVENT_COLOURS = {"fault": "red", "stop": "yellow", "end": "green", "validation": "magenta"}


def follow(folder: RunFolder, stop: Callable[[], bool], console: Console, interval: float = 0.25) -> None:
    """Show the run until `stop()` is true or the run is over."""
    show = _show_live if console.is_terminal and not console.is_dumb_terminal else _show_plain
    show(_poll_snapshots(folder, stop, interval), console)


def format_plain_line(snapshot: ProgressSnapshot) -> str:
    """'step 40/150  loss 2.31  812 samples/s  27%  left 12 s'."""
    parts = [f"step {snapshot.steps_done}{f'/{snapshot.steps}' if snapshot.steps else ''}"]
    if "loss" in snapshot.last_metrics:
        parts += [
            f"loss {formatting.format_number(snapshot.last_metrics['loss'])}",
            formatting.format_rate(snapshot.last_metrics.get("samples_per_s"), "samples/s"),
        ]
    parts += [f"{100 * snapshot.fraction_done:.0f}%"] if snapshot.fraction_done is not None else []
    parts += [f"left {_format_whole_seconds(snapshot.remaining_s)}"] if snapshot.remaining_s is not None else []
    if snapshot.status.is_over:
        parts += [f"{snapshot.status.state}: {snapshot.status.detail}" if snapshot.status.detail else snapshot.status.state]
    return "  ".join(parts)


def _poll_snapshots(folder: RunFolder, stop: Callable[[], bool], interval: float) -> Iterator[tuple[ProgressSnapshot, bool]]:
    """Yield snapshots until the run ends or `stop()` is true, each with whether it is the last."""
    progress = ProgressTracker(folder)
    while True:
        asked = stop()  # before reading: records written before the stop must still be shown
        progress.poll()
        now = progress.snapshot()
        if asked or _has_ended(now, folder):
            progress.poll()
            yield progress.snapshot(), True
            return
        yield now, False
        time.sleep(interval)


def _has_ended(snapshot: ProgressSnapshot, folder: RunFolder) -> bool:
    if snapshot.status.state == "done":
        return True
    if snapshot.status.state == "stopped" and any(e.kind == "end" and e.rank == 0 and e.time >= snapshot.status.started_at for e in snapshot.events):
        return True
    return snapshot.status.is_over and snapshot.taken_at - folder.last_write() > RESTART_GRACE_S


def _show_plain(snapshots: Iterator[tuple[ProgressSnapshot, bool]], console: Console) -> None:
    shown, printed_at = "", float("-inf")
    for now, last in snapshots:
        line = format_plain_line(now)
        due = time.monotonic() - printed_at >= PLAIN_INTERVAL_S and bool(now.last_metrics)
        if line != shown and (due or (last and (now.last_metrics or now.status.is_over))):
            # soft_wrap: a pipe has no width, and a log line broken in two cannot be searched.
            console.print(line, soft_wrap=True, highlight=False, markup=False)
            shown, printed_at = line, time.monotonic()


def _show_live(snapshots: Iterator[tuple[ProgressSnapshot, bool]], console: Console) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        for now, _ in snapshots:
            live.update(render_view(now, console.width), refresh=True)


def render_view(snapshot: ProgressSnapshot, width: int) -> RenderableType:
    """One frame of the live view, `width` columns wide."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

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
    from rich.text import Text

    plan = snapshot.plan.summary() if snapshot.plan else "no plan yet"
    devices = describe_devices(snapshot.cluster, snapshot.plan.world if snapshot.plan else None) if snapshot.cluster else ""
    return Text.assemble(plan, ("  ·  " + devices if devices else "", "bright_black"), overflow="ellipsis", no_wrap=True)


def _progress_bar(snapshot: ProgressSnapshot) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=1)
    for _ in range(3):
        table.add_column(no_wrap=True)
    total = snapshot.steps or 1
    colour = STATE_COLOURS[snapshot.status.state]
    bar = ProgressBar(
        total=total, completed=min(snapshot.steps_done, total), pulse=snapshot.steps is None, complete_style=colour, finished_style=colour
    )
    left = "" if snapshot.remaining_s is None else f"{_format_whole_seconds(snapshot.remaining_s)} left"
    table.add_row(bar, f"step {snapshot.steps_done}/{snapshot.steps or '?'}", formatting.format_percent(snapshot.fraction_done), left)
    return table


def _metrics_table(snapshot: ProgressSnapshot, width: int) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("loss", _loss_text(snapshot, max(min(width - 60, 48), 8)))
    speed = [formatting.format_rate(snapshot.last_metrics.get("samples_per_s"), "samples/s")]
    speed += (
        [formatting.format_rate(snapshot.last_metrics["tokens_per_s"], "tokens/s")]
        if formatting.finite_or_none(snapshot.last_metrics.get("tokens_per_s"))
        else []
    )
    speed += (
        [f"MFU {formatting.format_percent(snapshot.last_metrics['mfu'], 1)}"] if formatting.finite_or_none(snapshot.last_metrics.get("mfu")) else []
    )
    table.add_row("speed", " · ".join(speed))
    table.add_row(
        "step time", _measured_vs_predicted(formatting.format_seconds, snapshot.step_s, snapshot.estimate.step_s if snapshot.estimate else None)
    )
    peak = next(iter(snapshot.estimate.memory_bytes), None) if snapshot.estimate else None  # of rank 0, whose memory is in the metrics
    table.add_row("memory", _measured_vs_predicted(formatting.format_bytes, snapshot.last_metrics.get("memory_bytes"), peak, gauge=True))
    table.add_row("time spent", _format_whole_seconds(snapshot.elapsed_s))
    return table


def _loss_text(snapshot: ProgressSnapshot, width: int) -> Text:
    from rich.text import Text

    text = Text(formatting.format_number(snapshot.last_metrics.get("loss")), style="bold")
    text.append("  " + sparkline(snapshot.losses, width), style="not bold cyan")
    if snapshot.validation is not None:
        text.append(f"  validation {formatting.format_number(snapshot.validation)}", style="not bold magenta")
    return text


def _measured_vs_predicted(format_value: Callable[[Any], str], measured: Any, predicted: float | None, gauge: bool = False) -> Text:
    """'118 ms  predicted 121 ms (−2.5 %)'; `gauge` adds a bar with the fraction of the predicted peak."""
    from rich.text import Text

    text = Text(format_value(measured))
    if predicted is None:
        return text
    off = formatting.relative_error(measured, predicted)
    if gauge:
        cells = 0 if off is None else max(min(round(12 * (1 + off)), 12), 0)
        text = Text.assemble(("█" * cells, "cyan"), ("░" * (12 - cells), "bright_black"), "  ", text)
    text.append(f"  predicted {'peak ' if gauge else ''}{format_value(predicted)}", style="bright_black")
    if off is not None:
        part = f" ({formatting.format_percent(1 + off)})" if gauge else f" ({formatting.format_signed_percent(off)})"
        text.append(part, style="green" if (off if gauge else abs(off)) <= 0.1 else "yellow")
    return text


def _events_table(snapshot: ProgressSnapshot) -> Table:
    from rich.table import Table
    from rich.text import Text

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
    groups: list[list[Event]] = []
    for event in events[-64 * MAX_EVENTS_SHOWN :]:
        last = groups[-1] if groups else []
        alike = bool(last) and (last[0].kind, last[0].step, last[0].data.get("message")) == (event.kind, event.step, event.data.get("message"))
        if alike and all(event.rank != other.rank for other in last):
            last.append(event)
        else:
            groups.append([event])
    return groups


def _format_whole_seconds(value: float) -> str:
    """Format as whole seconds: decimals that change at every refresh only distract."""
    return formatting.format_seconds(round(value)) if value >= 1 else f"{max(value, 0):.0f} s"
