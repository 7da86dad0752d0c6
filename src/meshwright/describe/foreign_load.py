"""Foreign load: the share of the cores that other processes used while something was measured, and what it means for a probe's error."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PROBE_ERROR = 0.25  # relative; step times predicted from a quick probe were off by 4 to 23% (docs/measured/planner.md)
DISTURBING_LOAD = 0.1  # share of the cores; less disturbs a probe by less than its own error
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_SAMPLE_S = 0.3


@dataclass(frozen=True)
class CpuUse:
    """A reading of the kernel's counters, in CPU seconds; two of them give the use in between."""

    at_s: float  # wall-clock time
    busy_s: float  # of all processes on the usable cores, and what a hypervisor took from them
    own_s: float  # of this process and its descendants
    cores: int
    waited_s: float | None = None  # time in which some process waited for a core (pressure stall information); None where it is not counted


def read_cpu_use(root: Path = Path("/"), pid: int | None = None, usable: Collection[int] | None = None) -> CpuUse | None:
    """The counters now; None where there is no /proc/stat. `usable`: the cores that count, by default those that this process may use."""
    if usable is None:
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    try:
        busy = dict(_busy_seconds((root / "proc/stat").read_text()))
    except OSError:
        return None
    counted = [busy[core] for core in usable if core in busy]
    if not counted:
        return None
    return CpuUse(time.monotonic(), sum(counted), _tree_seconds(root / "proc", pid or os.getpid()), len(counted), _waited_seconds(root))


def foreign_share(before: CpuUse | None, after: CpuUse | None, own_threads: int) -> float:
    """The share of the cores that other processes used between two readings, from 0 to 1; 0 where there are none. Where this process tree had fewer
    busy threads than cores, processes that waited for a core waited for others."""
    if before is None or after is None or after.at_s <= before.at_s:
        return 0.0
    elapsed_s = after.at_s - before.at_s
    used_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    shares = [used_s / (elapsed_s * after.cores)]
    if own_threads < after.cores and before.waited_s is not None and after.waited_s is not None:
        shares.append((after.waited_s - before.waited_s) / elapsed_s)
    return min(max(0.0, *shares), 1.0)


def foreign_share_now() -> float:
    """The share of the cores that other processes use at this moment; takes a fraction of a second."""
    before = read_cpu_use()
    time.sleep(_SAMPLE_S)
    return foreign_share(before, read_cpu_use(), own_threads=1)


def crowded_share(oversubscription: float, threads: int, cores: int) -> float:
    """The share of their cores that the ranks did not get: what the measured oversubscription exceeds threads per core by. It shows foreign load
    where the counters do not, as in some containers."""
    return max(1.0 - max(threads / cores, 1.0) / oversubscription, 0.0)


def probe_error(load: float) -> float:
    """The relative error, one sigma, of step times predicted from a probe with this foreign load: a step that gets the whole machine, or less of it
    than the probe did, is off by about that share."""
    return math.hypot(PROBE_ERROR, load) if load >= DISTURBING_LOAD else PROBE_ERROR


def describe_load(load: float) -> str:
    return f"other processes used {load:.0%} of the cores"


def _busy_seconds(stat: str) -> Iterator[tuple[int, float]]:
    """By core, from /proc/stat. Interrupts are left out: most are the ranks' own messages."""
    for core, counters in re.findall(r"^cpu(\d+) (.*)$", stat, re.MULTILINE):
        user, nice, system, _idle, _iowait, _irq, _softirq, steal = [*map(int, counters.split()), *[0] * 8][:8]
        yield int(core), (user + nice + system + steal) / _TICKS_PER_S


def _tree_seconds(proc: Path, pid: int) -> float:
    """CPU seconds of a process and its descendants, those that have ended included."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # the name before ")" may contain anything
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    tree, size = {pid}, 0
    while len(tree) > size:
        size = len(tree)
        tree |= {child for child, parent in parents.items() if parent in tree}
    return sum(seconds.get(member, 0.0) for member in tree)


def _waited_seconds(root: Path) -> float | None:
    try:
        found = re.search(r"^some .*total=(\d+)", (root / "proc/pressure/cpu").read_text(), re.MULTILINE)
    except OSError:  # a kernel without it, or one that was started with psi=0
        return None
    return int(found[1]) * 1e-6 if found else None
