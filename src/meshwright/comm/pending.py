"""What a call hands back: something to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


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
