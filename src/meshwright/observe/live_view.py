"""The live view of a run in a terminal, read only from its folder; on a pipe or in CI, one plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshwright.observe.formatting import format_number, format_rate, format_whole_seconds
from meshwright.observe.progress import ProgressSnapshot, ProgressTracker
from meshwright.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_INTERVAL_S = 2.0
# A supervisor may restart a run that failed or vanished: the view waits this long before it ends.
RESTART_GRACE_S = 5.0


def follow(folder: RunFolder, stop: Callable[[], bool], console: Console, interval: float = 0.25) -> None:
    """Show the run until `stop()` is true or the run is over."""
    show = _show_live if console.is_terminal and not console.is_dumb_terminal else _show_plain
    show(_poll_snapshots(folder, stop, interval), console)


def format_plain_line(snapshot: ProgressSnapshot) -> str:
    """'step 40/150  loss 2.31  812 samples/s  27%  left 12 s'."""
    parts, metrics = [f"step {snapshot.steps_done}{f'/{snapshot.steps}' if snapshot.steps else ''}"], snapshot.last_metrics
    if "loss" in metrics:
        parts += [f"loss {format_number(metrics['loss'])}", format_rate(metrics.get("samples_per_s"), "samples/s")]
    parts += [f"{100 * snapshot.fraction_done:.0f}%"] if snapshot.fraction_done is not None else []
    parts += [f"left {format_whole_seconds(snapshot.remaining_s)}"] if snapshot.remaining_s is not None else []
    if snapshot.status.is_over:
        parts += [f"{snapshot.status.state}: {snapshot.status.detail}" if snapshot.status.detail else snapshot.status.state]
    return "  ".join(parts)


def _poll_snapshots(folder: RunFolder, stop: Callable[[], bool], interval: float) -> Iterator[tuple[ProgressSnapshot, bool]]:
    """Yield snapshots until the run ends or `stop()` is true, each with whether it is the last."""
    progress = ProgressTracker(folder)
    while True:
        stopping = stop()  # before reading: records written before the stop must still be shown
        progress.poll()
        snapshot = progress.snapshot()
        if stopping or _has_ended(snapshot, folder):
            progress.poll()
            yield progress.snapshot(), True
            return
        yield snapshot, False
        time.sleep(interval)


def _has_ended(snapshot: ProgressSnapshot, folder: RunFolder) -> bool:
    status = snapshot.status
    if status.state == "done":
        return True
    if status.state == "stopped" and any(e.kind == "end" and e.rank == 0 and e.time >= status.started_at for e in snapshot.events):
        return True
    return status.is_over and snapshot.taken_at - folder.last_write() > RESTART_GRACE_S


def _show_plain(snapshots: Iterator[tuple[ProgressSnapshot, bool]], console: Console) -> None:
    printed, printed_at = "", float("-inf")
    for snapshot, is_last in snapshots:
        line = format_plain_line(snapshot)
        is_due = time.monotonic() - printed_at >= PLAIN_INTERVAL_S and bool(snapshot.last_metrics)
        if line != printed and (is_due or (is_last and (snapshot.last_metrics or snapshot.status.is_over))):
            # soft_wrap: a pipe has no width, and a log line broken in two cannot be searched.
            console.print(line, soft_wrap=True, highlight=False, markup=False)
            printed, printed_at = line, time.monotonic()


def _show_live(snapshots: Iterator[tuple[ProgressSnapshot, bool]], console: Console) -> None:
    from rich.live import Live

    from meshwright.observe.live_frame import render_view

    with Live(console=console, auto_refresh=False) as live:
        for snapshot, _ in snapshots:
            live.update(render_view(snapshot, console.width), refresh=True)
