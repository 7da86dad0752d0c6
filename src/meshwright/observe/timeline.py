"""Writes a step as a Chrome/Perfetto trace: per rank one row of computation, and as many of communication as overlap requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.serialization import write_json
from meshwright.core.span import Span


def write_timeline(path: Path, spans_by_rank: Mapping[str, Sequence[Span]], metadata: Mapping[str, Any]) -> None:
    """Write the trace file. `spans_by_rank` maps a rank's display name to its spans; `metadata` is merged into the top-level object."""
    events = [event for pid, (name, spans) in enumerate(spans_by_rank.items()) for event in _rank_events(pid, name, spans)]
    write_json(path, {"traceEvents": events, **metadata})


def _rank_events(pid: int, name: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The events of one rank, which is a process of the trace; its rows are threads, row 0 for computation."""
    events = [_metadata_event("process_name", pid, 0, name), _metadata_event("thread_name", pid, 0, "computation")]
    row_ends: list[float] = []  # when each communication row becomes free
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        row, arguments = 0, {}
        if span.group_size:
            i = next((i for i, end in enumerate(row_ends) if end <= span.start_s), len(row_ends))
            row = i + 1
            if i == len(row_ends):
                row_ends.append(0.0)
                events.append(_metadata_event("thread_name", pid, row, "communication" if row == 1 else f"communication {row}"))
            row_ends[i] = span.end_s
            arguments = {"op": span.op, "group": span.axis, "ranks": span.group_size, "bytes": span.bytes}
            arguments["exposed_us"] = round(span.exposed_s * 1e6, 3)
        start_us, duration_us = round(span.start_s * 1e6, 3), round(span.seconds * 1e6, 3)
        events.append({"name": span.name, "cat": span.op, "ph": "X", "ts": start_us, "dur": duration_us, "pid": pid, "tid": row, "args": arguments})
    return events


def _metadata_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
