"""Exposed communication: how long a rank's main thread waits in Meshwright's collectives. Communication that overlaps computation does not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from meshwright.comm import ComposedComm, TorchComm


class Waits:
    """Once created, every call of a `Comm` and every wait for one adds to `seconds`; so do the waits of torch's pipeline schedules."""

    def __init__(self) -> None:
        self.seconds = 0.0
        inner, composed, wait_batch = TorchComm._launch, ComposedComm._submit, schedules._wait_batch_p2p
        TorchComm._launch = lambda comm, *call: _Timed(self.timed(lambda: inner(comm, *call)), self)  # type: ignore[method-assign]
        ComposedComm._submit = lambda comm, *call: _Timed(self.timed(lambda: composed(comm, *call)), self)  # type: ignore[method-assign]
        schedules._wait_batch_p2p = lambda works: self.timed(lambda: wait_batch(works))

    def timed(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - start


class _Timed(dist.Work):
    """A running call. It is a `Work`, because FSDP2 waits for nothing else."""

    def __init__(self, work: Any, waits: Waits) -> None:
        super().__init__()
        self._work, self._waits = work, waits

    def wait(self, *args: Any) -> bool:
        return bool(self._waits.timed(lambda: self._work.wait(*args)))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
