"""Where the wall-clock time of a run goes: seconds by phase, from the start of the process."""

from __future__ import annotations

import os
import time
from pathlib import Path


class PhaseClock:
    """Assigns all time since `start` to named phases: `mark(name)` ends the phase `name`."""

    def __init__(self, start: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.time() if start is None else start

    def mark(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(now - self._last, 0.0)
        self._last = now


def process_start() -> float:
    """When this process was started, in seconds of `time.time`; where the system does not tell, now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
