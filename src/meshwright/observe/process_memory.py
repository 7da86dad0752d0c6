"""This process's memory as the kernel counts it: what is resident now, and the most that ever was. Needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path

_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Bytes of this process in RAM now; where the kernel does not say, the most there ever were."""
    value = _from_status("VmRSS")
    return _from_rusage() if value is None else value


def peak_resident_bytes() -> int:
    """The most bytes that were in RAM at once, since the start or the last `reset_peak_resident`."""
    peak, now = _from_status("VmHWM"), _from_status("VmRSS")
    # The kernel keeps the peak from per-core counters that it sums only now and then: it may lag by some hundred kilobytes.
    return _from_rusage() if peak is None else max(peak, now or 0)


def reset_peak_resident() -> bool:
    """Make the peak start again from what is resident now; False where the kernel refuses or has no such thing."""
    try:
        _PROC_CLEAR_REFS.write_text("5")  # 5: reset the peak only (proc(5)); smaller numbers would clear page bits too
    except OSError:
        return False
    return True


def _from_status(key: str) -> int | None:
    try:
        text = _PROC_STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _from_rusage() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, everyone else kilobytes
