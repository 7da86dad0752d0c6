"""What a call hands back: something to wait for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist


class PutOff:
    """A comm whose calls are put off, and its twin, made once, whose are not: `core.comm.Comm.at_once`. What both have they share."""

    _later = True
    _twin: Self | None = None

    @property
    def at_once(self) -> Self:
        if self._later and self._twin is None:
            self._twin = copy.copy(self)
            self._twin._later = False
        return self._twin or self


class Then(dist.Work):
    """A call after which something is left to do: done by the first wait."""

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
