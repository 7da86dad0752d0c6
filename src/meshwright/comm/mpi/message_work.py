"""Point-to-point messages: an MPI request as a torch `Work`.

[Note: matched receives]
Open MPI 5.0 writes a message of more than 4 KB in whole, beyond the end of a receive buffer that is shorter, and then reports the error. So no
receive is posted before its message is there: MPI_Improbe takes a message off MPI's queue and tells its size, and only then is it received, into the
tensor or, if that is too short, into a temporary buffer. Messages go to receives in the order of the calls, as MPI does it. The sender of a large
message waits until it is matched. So a rank that waits for any message matches all, and the watchdog's thread does it for a rank that waits
elsewhere, such as in a collective.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from meshwright.comm.mpi import buffers
from meshwright.comm.work_queue import ProfilerEvent, TensorWork

_POLL_S = 50e-6
_SPINS = 200  # polls without sleep, about half a millisecond


class MessageWork(TensorWork):
    """One send, or a receive (`ReceiveWork`). MPI progresses it during any MPI call of this rank. `_lock` lets one thread at a time query MPI."""

    def __init__(self, inbox: Inbox, request: Any, buffer: Tensor, label: str, event: ProfilerEvent | None) -> None:
        """MPI reads or writes `buffer`. Errors name `label`."""
        super().__init__([buffer], event)
        self._inbox, self._request, self._buffer, self.label = inbox, request, buffer, label

    def is_completed(self) -> bool:
        self._inbox.match()
        if self._request is not None and self._lock.acquire(blocking=False):
            try:
                self._complete(blocking=False)
            finally:
                self._lock.release()
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        begun, polls = time.monotonic(), 0
        while not self.is_completed():
            if seconds > 0 and time.monotonic() > begun + seconds:
                raise TimeoutError(f"{self.label} did not complete within {seconds:g} s")
            if seconds <= 0 and self._request is not None and self._inbox.is_empty():
                with self._lock:
                    self._complete(blocking=True)
            else:
                os.sched_yield() if polls < _SPINS else time.sleep(_POLL_S)
                polls += 1
        if self._error is not None:
            raise self._error
        return True

    def _complete(self, *, blocking: bool) -> None:
        """Called with the lock held. `wait` raises errors, whichever thread they occurred in."""
        if self.done:
            return
        try:
            if self._request.Wait() if blocking else self._request.Test():
                self._on_arrival()
            else:
                return
        except MPI.Exception as error:
            self._error = RuntimeError(f"{self.label} failed: {error}")
        self.finish()

    def _on_arrival(self) -> None:
        """MPI is done with the buffer."""

    def source_rank(self) -> int:
        raise NotImplementedError("only a receive has a source")

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
            future.set_result(self.result())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's stub wants a type


class ReceiveWork(MessageWork):
    """One receive of `tensor` from rank `source` of the group, or from any. It has no request before its message is matched."""

    def __init__(self, inbox: Inbox, comm: Any, tensor: Tensor, source: int, tag: int, label: str, event: ProfilerEvent | None) -> None:
        super().__init__(inbox, None, buffers.receive_buffer(tensor), label, event)
        self._outputs = [tensor]
        self.comm, self.source, self.tag = comm, source, tag

    def accepts(self, comm: Any, source: int, tag: int) -> bool:
        return comm is self.comm and tag == self.tag and self.source in (source, MPI.ANY_SOURCE)

    def start(self, message: Any, source: int, size: int) -> None:
        """Receive `message`, which has `size` bytes."""
        self.source, room = source, self._buffer.nbytes
        if size > room:
            self._error = RuntimeError(
                f"{self.label}: the message of {size} bytes from rank {source} of the group does not fit into the tensor of {room} bytes "
                "(MPI_ERR_TRUNCATE): send and receive tensors of one size"
            )
            self._buffer = torch.empty(size, dtype=torch.uint8)
        self._request = message.Irecv(buffers.as_bytes(self._buffer))

    def _on_arrival(self) -> None:
        if self._error is None:
            buffers.copy_back(self._outputs[0], self._buffer)
        self._buffer = self._outputs[0]  # frees the temporary

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


class Inbox:
    """The receives of this process that have no message yet, in the order of their calls: [Note: matched receives]."""

    def __init__(self) -> None:
        self._waiting: list[ReceiveWork] = []
        self._lock = threading.Lock()

    def is_empty(self) -> bool:
        return not self._waiting

    def add(self, receive: ReceiveWork) -> None:
        with self._lock:
            self._waiting.append(receive)
        self.match()

    def match(self) -> None:
        """Start the receives whose messages are there."""
        if not self._waiting or not self._lock.acquire(blocking=False):
            return
        try:
            status = MPI.Status()
            for receive in tuple(self._waiting):
                message = receive.comm.Improbe(receive.source, receive.tag, status)
                if message is not None:
                    source = status.Get_source()
                    first = next(r for r in self._waiting if r.accepts(receive.comm, source, receive.tag))
                    self._waiting.remove(first)
                    first.start(message, source, status.Get_elements(MPI.BYTE))
        finally:
            self._lock.release()

    def discard(self, comm: Any) -> None:
        """Forget the receives of a communicator that is about to be freed."""
        with self._lock:
            self._waiting = [r for r in self._waiting if r.comm is not comm]
