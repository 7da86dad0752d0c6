"""How long a call takes, within a small budget.

[Note: crowded cores]
Where there are more ranks than cores, a short call is done within a slice of time that its rank has a core to itself, and a long one is not: by the
clock on the wall their rates would differ for no reason of their own. So work on a CPU is timed by the time that a rank had a core, with all ranks at
work, and how many ranks share a core is measured once, as the time on the wall over that time. Who prices a plan multiplies where all ranks
compute at once, and does not where some of them wait and leave their core to others, as in a pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_STABLE_RATIO = 1.02  # a median this near the lower quartile says that nothing disturbs
_MIN_CALLS = 5  # calls that agree
_MAX_CALLS = 200


class Stopwatch:
    """Seconds of a call, with the device waited for: the lower quartile, since what disturbs only adds. It is called until the calls agree or the
    budget is spent. A rank of one thread on a CPU is timed by the time that it had a core (see [Note: crowded cores])."""

    def __init__(self, device: torch.device, budget_s: float, threads: int = 0) -> None:
        self.device, self.budget_s = device, budget_s
        self.clock = time.thread_time if device.type == "cpu" and threads == 1 else time.perf_counter

    def __call__(self, work: Callable[[], object]) -> float:
        first = self.time_once(work)
        # A GPU runs behind: queue several calls and wait once, or the waiting would be measured.
        batch = 1 if self.device.type == "cpu" else max(2, min(100, int(0.002 / max(self.time_once(work), 1e-6))))
        least = 1 if self.device.type == "cpu" and first > self.budget_s else 3  # a long call is not disturbed by little things
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < least or not self._is_finished(times, time.perf_counter() - begun):
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
