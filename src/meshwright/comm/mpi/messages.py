"""Sends and receives: MPI's own requests as `Work`. Those that nobody waits for are looked after (`post.py`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from meshwright.comm.mpi.post import Post

# Bytes up to which nobody has to look after a message: it is on its way already, or moves on whenever something else of MPI's does.
SMALL = 1 << 15


class Message(dist.Work):
    """One request. Only one thread may complete it: `_turn` says which."""

    done = False
    error: Exception | None = None
    _future: torch.futures.Future[list[torch.Tensor]] | None = None

    def __init__(self, post: Post, request: Any, tensor: torch.Tensor, held: torch.Tensor, source: int) -> None:
        """`held` is what MPI works on: the tensor, or what is copied to it when it has arrived."""
        super().__init__()
        self._post, self._request, self._tensor, self._source = post, request, tensor, source
        self._held = held
        self._turn = threading.Lock()

    def look(self) -> bool:
        """Move it on; True when it is over."""
        if not self.done and self._turn.acquire(blocking=False):
            try:
                self._move(self._request.Test)
            finally:
                self._turn.release()
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout.total_seconds() > 0:
            self._look_until(time.monotonic() + timeout.total_seconds())
        self._post.leave(self)
        if not self.done:
            with self._turn:
                self._post.helped = True
                self._move(self._request.Wait)
                self._post.helped = False
        if self.error is not None:
            raise self.error
        return True

    def _move(self, ask: Callable[[Any], Any]) -> None:
        """By whoever has the turn. What MPI complains of is said to who waits, whoever found it out."""
        if self.done:
            return
        status = MPI.Status() if self._source == MPI.ANY_SOURCE else None  # from anybody: who it was
        try:
            if ask(status):
                self._over(status)
        except MPI.Exception as error:
            self.error = error
            self.done = True
            if self._future is not None:
                self._future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong about it

    def _look_until(self, limit: float) -> None:
        while not self.look():
            if time.monotonic() > limit:
                raise TimeoutError("a message was not sent or received in time")

    def _over(self, status: Any) -> None:
        if status is not None:
            self._source = status.Get_source()
        if self._held is not self._tensor:
            self._tensor.copy_(self._held)
            self._held = self._tensor  # the memory may go
        self.done = True
        if self._future is not None and not self._future.done():
            self._future.set_result([self._tensor])

    def is_completed(self) -> bool:
        return self.look()

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> Any:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._turn:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.error is not None:
                    self._future.set_exception(self.error)  # type: ignore[arg-type]
                elif self.done:
                    self._future.set_result([self._tensor])
                else:
                    self._post.follow(self)  # who waits for a future does not move the message on
        return self._future
