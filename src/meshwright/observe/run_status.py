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
        return RunStatus("interrupted", "its processes are gone and left no word", None, status.started_at)
    return status


def root_cause(faults: Sequence[Fault]) -> Fault | None:
    """The earliest fault that is not merely a consequence of another rank's; if there is none, the first fault."""
    return next((f for f in faults if not f.secondary), faults[0] if faults else None)


def _replay_events(events: Sequence[Event], faults: Sequence[Fault]) -> RunStatus:
    status, last = RunStatus("waiting"), 0.0
    moments: list[Event | Fault] = sorted([*(e for e in events if e.kind != "fault"), *faults], key=lambda m: m.time)
    for moment in moments:
        if isinstance(moment, Fault):
            first = status.fault if status.state == "failed" and not (status.fault and status.fault.secondary and not moment.secondary) else moment
            assert first is not None
            status = RunStatus("failed", f"rank {first.rank}: {first.kind}: {first.message}".rstrip(": "), first, status.started_at)
        elif moment.kind == "start":
            again = status.state in ("done", "stopped") or moment.time - last > RESUME_GAP_S
            status = RunStatus("running", started_at=moment.time if again or not status.started_at else status.started_at)
        elif moment.kind == "stop" and status.state != "failed":
            status = RunStatus("stopped", str(moment.data.get("reason", "")), None, status.started_at)
        elif moment.kind == "end" and moment.rank == 0 and status.state == "running":
            status = RunStatus("done", "", None, status.started_at)
        last = moment.time
    return status


def _is_alive(events: Sequence[Event], last_write: float, now: float) -> bool:
    starts = {e.rank: e for e in events if e.kind == "start"}
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
        return True  # it exists, but belongs to another user
    return True
