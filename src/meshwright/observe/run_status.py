"""Infers a run's status from its events, faults and result: waiting, running, done, stopped, failed, or interrupted (its processes vanished)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.event import Event, Fault

RunState = Literal["waiting", "running", "done", "stopped", "failed", "interrupted"]

# A run on another machine, where its processes cannot be checked, counts as dead after this long without a write.
SILENCE_TIMEOUT_S = 600.0
# A start this long after the last event is a resumed run, not a restarted rank.
RESUME_GAP_S = 60.0


@dataclass(frozen=True)
class RunStatus:
    """The state of a run. `started_at` is when the current attempt started (a resumed run starts a new one); 0 before any start."""

    state: RunState
    detail: str = ""
    fault: Fault | None = None
    started_at: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.state not in ("waiting", "running")


def infer_status(events: Sequence[Event], faults: Sequence[Fault], has_result: bool, last_write: float, now: float) -> RunStatus:
    """The run's status. `has_result`: this attempt has a result. `last_write`: when the folder last changed. Both lists are in order of time."""
    status = _replay_events(events, faults)
    if has_result and status.state in ("running", "failed"):
        return RunStatus("done", "", None, status.started_at)  # the run survived the fault: the result came after it
    if status.state == "running" and not _is_alive(events, last_write, now):
        return RunStatus("interrupted", "its processes ended without reporting a result or a fault", None, status.started_at)
    return status


def root_cause(faults: Sequence[Fault]) -> Fault | None:
    """The earliest fault that is not merely a consequence of another rank's; if there is none, the first fault."""
    return next((f for f in faults if not f.secondary), faults[0] if faults else None)


def _replay_events(events: Sequence[Event], faults: Sequence[Fault]) -> RunStatus:
    status, last_time = RunStatus("waiting"), 0.0
    records: list[Event | Fault] = sorted([*(e for e in events if e.kind != "fault"), *faults], key=lambda r: r.time)
    for record in records:
        if isinstance(record, Fault):
            cause = record if status.fault is None or (status.fault.secondary and not record.secondary) else status.fault
            who = f"rank {cause.rank}: " if cause.rank >= 0 else ""
            status = RunStatus("failed", f"{who}{cause.kind}: {cause.message}".rstrip(": "), cause, status.started_at)
        elif record.kind == "start":
            is_resumed = record.generation == 0 and (status.state in ("done", "stopped") or record.time - last_time > RESUME_GAP_S)
            status = RunStatus("running", started_at=record.time if is_resumed or not status.started_at else status.started_at)
        elif record.kind == "restart":
            status = RunStatus("running", started_at=status.started_at)
        elif record.kind == "stop" and status.state != "failed":
            status = RunStatus("stopped", str(record.data.get("reason", "")), None, status.started_at)
        elif record.kind == "end" and record.rank == 0 and status.state == "running":
            status = RunStatus("done", "", None, status.started_at)
        last_time = record.time
    return status


def _is_alive(events: Sequence[Event], last_write: float, now: float) -> bool:
    starts = {(e.kind, e.rank): e for e in events if e.kind in ("start", "restart")}  # a restart names the supervisor's process
    here = socket.gethostname()
    pids = [e.data.get("pid") for e in starts.values() if e.data.get("host") == here]
    if len(pids) < len(starts) or not all(isinstance(p, int) and p > 0 for p in pids):
        return now - last_write < SILENCE_TIMEOUT_S
    return any(_process_exists(int(p)) for p in pids if p is not None)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it exists, but belongs to another user
    return True
