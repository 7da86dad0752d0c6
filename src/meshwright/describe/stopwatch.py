"""Measures the seconds of a call within a small time budget.

[Note: oversubscribed cores]
With more ranks than cores, a short call ends within one time slice of its rank and a long one does not: by wall-clock time their rates would differ
for no reason of their own. So CPU work is timed by thread CPU time, with all ranks busy, and the number of ranks per core is measured once, as
wall-clock time over CPU time. The cost model multiplies by it where all ranks compute at once, and does not where some wait and leave their core to
others, as in a pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_STABLE_RATIO = 1.02  # a median this close to the lower quartile means no disturbance
_MIN_CALLS = 5  # calls that agree
_MAX_CALLS = 200


class Stopwatch:
    """Seconds of a call including device synchronisation: the lower quartile, since disturbances only add time. Calls repeat until they agree or
    the budget is spent. A single-threaded CPU rank is timed by its CPU time (see [Note: oversubscribed cores])."""

    def __init__(self, device: torch.device, budget_s: float, threads: int = 0) -> None:
        self.device, self.budget_s = device, budget_s
        self.clock = time.thread_time if device.type == "cpu" and threads == 1 else time.perf_counter

    def __call__(self, work: Callable[[], object]) -> float:
        first = self.time_once(work)
        # A GPU runs asynchronously: queue several calls and synchronise once, or the synchronisation would be measured.
        batch = 1 if self.device.type == "cpu" else max(2, min(100, int(0.002 / max(self.time_once(work), 1e-6))))
        min_calls = 1 if self.device.type == "cpu" and first > self.budget_s else 3  # small disturbances do not matter in a long call
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < min_calls or not self._is_finished(times, time.perf_counter() - start):
            times.append(self.time_once(lambda: [work() for _ in range(batch)]) / batch)
        return sorted(times)[len(times) // 4]

    def time_once(self, work: Callable[[], object]) -> float:
        start = self.clock()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock() - start

    def _is_finished(self, times: list[float], spent_s: float) -> bool:
        if spent_s >= self.budget_s or len(times) >= _MAX_CALLS:
            return True
        if len(times) < _MIN_CALLS or spent_s < self.budget_s / 8:
            return False
        ordered = sorted(times)
        return ordered[len(times) // 2] <= _STABLE_RATIO * ordered[len(times) // 4]
