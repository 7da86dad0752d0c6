"""Writes a step as a Chrome/Perfetto trace: per rank one row of computation, and as many of communication as overlap requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.serialization import write_json
from meshwright.core.span import Span


def write_timeline(path: Path, spans_by_rank: Mapping[str, Sequence[Span]], metadata: Mapping[str, Any]) -> None:
    """Write the trace file. `spans_by_rank` maps a rank's display name to its spans; `metadata` is merged into the top-level object."""
    write_json(
        path,
        {
            "traceEvents": [event for number, (name, spans) in enumerate(spans_by_rank.items()) for event in _rank_events(number, name, spans)],
            **metadata,
        },
    )


def _rank_events(number: int, name: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
    events = [_metadata_event("process_name", number, 0, name), _metadata_event("thread_name", number, 0, "computation")]
    free: list[float] = []  # when each communication row becomes free
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        row = 0
        if span.group_size:
            at = next((i for i, end in enumerate(free) if end <= span.start_s), len(free))
            if at == len(free):
                free.append(0.0)
                events.append(_metadata_event("thread_name", number, at + 1, "communication" if at == 0 else f"communication {at + 1}"))
            free[at] = span.end_s
            row = at + 1
        events.append(
            {
                "name": span.name,
                "cat": span.op,
                "ph": "X",
                "ts": round(span.start_s * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "pid": number,
                "tid": row,
                "args": {
                    "op": span.op,
                    "group": span.axis,
                    "ranks": span.group_size,
                    "bytes": span.bytes,
                    "exposed_us": round(span.exposed_s * 1e6, 3),
                }
                if span.group_size
                else {},
            }
        )
    return events


def _metadata_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
