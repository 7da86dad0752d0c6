"""This process's memory as the kernel counts it: current and peak resident bytes. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from pathlib import Path

_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Resident bytes of this process; the peak if the kernel does not report the current value."""
    value = _from_status("VmRSS")
    return _from_rusage() if value is None else value


def peak_resident_bytes() -> int:
    """Peak resident bytes since the start or the last `reset_peak_resident`."""
    peak, now = _from_status("VmHWM"), _from_status("VmRSS")
    # The kernel updates the peak from per-core counters that it sums only occasionally: it may lag by some hundred kilobytes.
    return _from_rusage() if peak is None else max(peak, now or 0)


def reset_peak_resident() -> bool:
    """Reset the peak to the current resident bytes; False if the kernel refuses or does not support it."""
    try:
        _PROC_CLEAR_REFS.write_text("5")  # 5: reset the peak only (proc(5)); smaller numbers would clear page bits too
    except OSError:
        return False
    return True


def available_memory() -> int:
    """Bytes that this host can give without swapping, as the kernel estimates them, and its control group allows."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return max(free, 0)


def trim_heap() -> None:
    """Give memory that is free within this process back to the kernel, where the C library can: glibc keeps what large tensors have left."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _from_status(key: str) -> int | None:
    try:
        text = _PROC_STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^{key}:\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _from_rusage() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, other systems kilobytes
