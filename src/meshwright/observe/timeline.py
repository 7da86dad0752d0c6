"""A step as a timeline that Chrome (chrome://tracing) and Perfetto open: for each rank computation, and communication in as many rows as it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.serial import write_json
from meshwright.core.span import Span


def write_timeline(path: Path, ranks: Mapping[str, Sequence[Span]], about: Mapping[str, Any]) -> None:
    """`ranks` maps what a row is called to its spans; `about` goes along as is."""
    write_json(path, {"traceEvents": [event for number, (name, spans) in enumerate(ranks.items()) for event in _rank(number, name, spans)], **about})


def _rank(number: int, name: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
    events = [_label("process_name", number, 0, name), _label("thread_name", number, 0, "computation")]
    free: list[float] = []  # when each row of communication is free again
    for span in sorted(spans, key=lambda s: (s.begun, s.ended)):
        row = 0
        if span.group:
            at = next((i for i, end in enumerate(free) if end <= span.begun), len(free))
            if at == len(free):
                free.append(0.0)
                events.append(_label("thread_name", number, at + 1, "communication" if at == 0 else f"communication {at + 1}"))
            free[at] = span.ended
            row = at + 1
        events.append(
            {
                "name": span.name,
                "cat": span.op,
                "ph": "X",
                "ts": round(span.begun * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "pid": number,
                "tid": row,
                "args": {"op": span.op, "group": span.axis, "ranks": span.group, "bytes": span.bytes, "exposed_us": round(span.held * 1e6, 3)}
                if span.group
                else {},
            }
        )
    return events


def _label(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
