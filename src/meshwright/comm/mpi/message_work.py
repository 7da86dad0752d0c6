"""Point-to-point messages: an MPI request as a torch `Work`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from meshwright.comm.work_queue import TensorWork

_POLL_S = 50e-6


class MessageWork(TensorWork):
    """One send or receive. MPI progresses it during any MPI call of this rank; `wait` completes it. `_lock` lets one thread at a time query MPI."""

    def __init__(self, request: Any, tensor: Tensor, buffer: Tensor, source: int, label: str) -> None:
        """`buffer` is the tensor that MPI reads or writes: `tensor` itself, or one that is copied to `tensor` on arrival. Errors name `label`."""
        super().__init__([tensor])
        self._request, self._tensor, self._buffer, self._source, self._label = request, tensor, buffer, source, label

    def is_completed(self) -> bool:
        if self._lock.acquire(blocking=False):
            try:
                self._complete(self._request.Test)
            finally:
                self._lock.release()
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        deadline = time.monotonic() + seconds
        while seconds > 0 and not self.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._label} did not complete within {seconds:g} s")
            time.sleep(_POLL_S)
        with self._lock:
            self._complete(self._request.Wait)
        if self._error is not None:
            raise self._error
        return True

    def _complete(self, test_or_wait: Callable[[Any], Any]) -> None:
        """Called with the lock held. `wait` raises MPI errors, whichever thread they occurred in."""
        if self.done:
            return
        status = MPI.Status() if self._source == MPI.ANY_SOURCE else None
        try:
            if not test_or_wait(status):
                return
            if status is not None:
                self._source = status.Get_source()
            if self._buffer is not self._tensor:
                self._tensor.copy_(self._buffer)
                self._buffer = self._tensor  # frees the buffer
        except MPI.Exception as error:
            self._error = error
        self.done = True

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that a separate thread completes: waiting for a future does not call MPI."""
        if self._future is None:
            self._future = torch.futures.Future()
            threading.Thread(target=self._complete_future, args=(self._future,), name="mpi message", daemon=True).start()
        return self._future

    def _complete_future(self, future: torch.futures.Future[list[Tensor]]) -> None:
        try:
            while not self.is_completed():
                time.sleep(_POLL_S)
            self.wait()
            future.set_result([self._tensor])
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's stub wants a type
