"""Base class of comms with async calls, and a `Work` that runs a continuation when it is waited for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist


class AsyncComm:
    """A comm whose calls are async. `sync` is a shallow copy, made once, whose calls block (`core.comm.Comm.sync`); the two share their state."""

    _async_op = True
    _sync_twin: Self | None = None

    @property
    def sync(self) -> Self:
        if self._async_op and self._sync_twin is None:
            self._sync_twin = copy.copy(self)
            self._sync_twin._async_op = False
        return self._sync_twin or self


class ChainedWork(dist.Work):
    """A call with a continuation, which the first `wait` runs."""

    def __init__(self, work: Any, finish: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self, *args: Any) -> bool:
        done = bool(self._work.wait(*args))
        if self._finish is not None:
            self._finish()
            self._finish = None
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
