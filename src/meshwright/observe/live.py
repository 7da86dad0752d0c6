"""The live view of a run in a terminal, fed only from its folder; on a pipe or in CI, one plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.core.event import Event
from meshwright.observe import figures
from meshwright.observe.folder import RunFolder
from meshwright.observe.progress import Progress, Snapshot, sparkline
from meshwright.observe.words import devices_in_words, event_in_words

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PLAIN_EVERY_S = 2.0
# A run that failed or vanished may be put back by its supervisor: this long it gets before the view gives up on it.
GRACE_S = 5.0
EVENTS_SHOWN = 4
STATE_COLOURS = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "interrupted": "red", "waiting": "bright_black"}
EVENT_COLOURS = {"fault": "red", "stop": "yellow", "end": "green", "validation": "magenta"}


def follow(folder: RunFolder, stop: Callable[[], bool], console: Console, interval: float = 0.25) -> None:
    """Show the run until `stop()` is true or the run is over, whichever is first."""
    show = _show_live if console.is_terminal and not console.is_dumb_terminal else _show_plain
    show(_looks(folder, stop, interval), console)


def plain_line(now: Snapshot) -> str:
    """'step 40/150  loss 2.31  812 samples/s  27%  left 12 s'."""
    parts = [f"step {now.done}{f'/{now.steps}' if now.steps else ''}"]
    if "loss" in now.last:
        parts += [f"loss {figures.quantity(now.last['loss'])}", figures.rate(now.last.get("samples_per_s"), "samples/s")]
    parts += [f"{100 * now.share:.0f}%"] if now.share is not None else []
    parts += [f"left {_clock(now.left_s)}"] if now.left_s is not None else []
    if now.status.over:
        parts += [f"{now.status.state}: {now.status.detail}" if now.status.detail else now.status.state]
    return "  ".join(parts)


def _looks(folder: RunFolder, stop: Callable[[], bool], interval: float) -> Iterator[tuple[Snapshot, bool]]:
    """Snapshots until the end, each with whether it is the last."""
    progress = Progress(folder)
    while True:
        asked = stop()  # before reading: what was written until the caller said stop must still be shown
        progress.poll()
        now = progress.snapshot()
        if asked or _ended(now, folder):
            progress.poll()
            yield progress.snapshot(), True
            return
        yield now, False
        time.sleep(interval)


def _ended(now: Snapshot, folder: RunFolder) -> bool:
    if now.status.state == "done":
        return True
    if now.status.state == "stopped" and any(e.kind == "end" and e.rank == 0 and e.time >= now.status.began for e in now.events):
        return True
    return now.status.over and now.now - folder.last_write() > GRACE_S


def _show_plain(looks: Iterator[tuple[Snapshot, bool]], console: Console) -> None:
    shown, printed_at = "", float("-inf")
    for now, last in looks:
        line = plain_line(now)
        due = time.monotonic() - printed_at >= PLAIN_EVERY_S and bool(now.last)
        if line != shown and (due or (last and (now.last or now.status.over))):
            # soft_wrap: a pipe has no width, and a log line broken in two cannot be searched.
            console.print(line, soft_wrap=True, highlight=False, markup=False)
            shown, printed_at = line, time.monotonic()


def _show_live(looks: Iterator[tuple[Snapshot, bool]], console: Console) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        for now, _ in looks:
            live.update(view(now, console.width), refresh=True)


def view(now: Snapshot, width: int) -> RenderableType:
    """One frame, `width` columns wide."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    colour = STATE_COLOURS[now.status.state]
    title = Text.assemble((now.model, "bold"), "  ", (now.status.state, f"bold {colour}"))
    parts: list[RenderableType] = [_header(now), Text(), _bar(now), Text(), _numbers(now, width)]
    if now.status.state in ("failed", "interrupted"):
        parts += [Text(), Text(now.status.detail, style="red")]
    if now.events:
        parts += [Text(), _events(now)]
    frame = Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, border_style=colour, padding=(0, 1))
    frame.subtitle, frame.subtitle_align = Text(now.name, style="bright_black"), "right"
    return frame


def _header(now: Snapshot) -> Text:
    from rich.text import Text

    plan = now.plan.summary() if now.plan else "no plan yet"
    devices = devices_in_words(now.cluster, now.plan.world if now.plan else None) if now.cluster else ""
    return Text.assemble(plan, ("  ·  " + devices if devices else "", "bright_black"), overflow="ellipsis", no_wrap=True)


def _bar(now: Snapshot) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=1)
    for _ in range(3):
        table.add_column(no_wrap=True)
    total = now.steps or 1
    colour = STATE_COLOURS[now.status.state]
    bar = ProgressBar(total=total, completed=min(now.done, total), pulse=now.steps is None, complete_style=colour, finished_style=colour)
    left = "" if now.left_s is None else f"{_clock(now.left_s)} left"
    table.add_row(bar, f"step {now.done}/{now.steps or '?'}", figures.percent(now.share), left)
    return table


def _numbers(now: Snapshot, width: int) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("loss", _loss(now, max(min(width - 60, 48), 8)))
    speed = [figures.rate(now.last.get("samples_per_s"), "samples/s")]
    speed += [figures.rate(now.last["tokens_per_s"], "tokens/s")] if figures.finite(now.last.get("tokens_per_s")) else []
    speed += [f"MFU {figures.percent(now.last['mfu'], 1)}"] if figures.finite(now.last.get("mfu")) else []
    table.add_row("speed", " · ".join(speed))
    table.add_row("step time", _against(figures.seconds, now.step_s, now.estimate.step_s if now.estimate else None))
    peak = next(iter(now.estimate.memory_bytes), None) if now.estimate else None  # rank 0's, whose memory the metrics tell
    table.add_row("memory", _against(figures.size, now.last.get("memory_bytes"), peak, gauge=True))
    table.add_row("time spent", _clock(now.spent_s))
    return table


def _loss(now: Snapshot, width: int) -> Text:
    from rich.text import Text

    text = Text(figures.quantity(now.last.get("loss")), style="bold")
    text.append("  " + sparkline(now.losses, width), style="not bold cyan")
    if now.validation is not None:
        text.append(f"  validation {figures.quantity(now.validation)}", style="not bold magenta")
    return text


def _against(show: Callable[[Any], str], measured: Any, predicted: float | None, gauge: bool = False) -> Text:
    """'118 ms  predicted 121 ms (−2.5 %)'; a gauge shows how much of the predicted peak is reached."""
    from rich.text import Text

    text = Text(show(measured))
    if predicted is None:
        return text
    off = figures.relative(measured, predicted)
    if gauge:
        cells = 0 if off is None else max(min(round(12 * (1 + off)), 12), 0)
        text = Text.assemble(("█" * cells, "cyan"), ("░" * (12 - cells), "bright_black"), "  ", text)
    text.append(f"  predicted {'peak ' if gauge else ''}{show(predicted)}", style="bright_black")
    if off is not None:
        part = f" ({figures.percent(1 + off)})" if gauge else f" ({figures.signed_percent(off)})"
        text.append(part, style="green" if (off if gauge else abs(off)) <= 0.1 else "yellow")
    return text


def _events(now: Snapshot) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for style in ("bright_black", "bright_black", "", ""):
        table.add_column(style=style, no_wrap=True, overflow="ellipsis")
    for group in _grouped(now.events)[-EVENTS_SHOWN:]:
        first = group[0]
        when = time.strftime("%H:%M:%S", time.localtime(first.time))
        who = f"{len(group)} ranks" if len(group) > 1 else f"rank {first.rank}"
        table.add_row(when, who, Text(first.kind, style=EVENT_COLOURS.get(first.kind, "")), Text(event_in_words(first)))
    return table


def _grouped(events: Sequence[Event]) -> list[list[Event]]:
    """Neighbours that are the same thing on several ranks, together: what each rank says once should take one line."""
    groups: list[list[Event]] = []
    for event in events[-64 * EVENTS_SHOWN :]:
        last = groups[-1] if groups else []
        alike = bool(last) and (last[0].kind, last[0].step, last[0].data.get("message")) == (event.kind, event.step, event.data.get("message"))
        if alike and all(event.rank != other.rank for other in last):
            last.append(event)
        else:
            groups.append([event])
    return groups


def _clock(value: float) -> str:
    """Whole seconds: digits that change at every look only distract."""
    return figures.seconds(round(value)) if value >= 1 else f"{max(value, 0):.0f} s"
