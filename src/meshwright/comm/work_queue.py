"""A work queue: the operations of one communicator, run one at a time in the order of their calls.

MPI's collectives run on such a queue, and so do collectives through shared memory (`composed_collectives.py`).

[Note: sync and async calls]
All operations here are blocking functions. A sync call runs in the caller's thread, after everything that was queued before it. An async
call is queued and runs in the queue's own thread, without the GIL, while the caller computes; that is how gradient reduction overlaps with
backward. If `wait` is called before the thread has begun the operation, the waiting thread runs the rest of the queue itself, so that a small
message does not pay for a thread switch. Queues are independent of each other (MPI_THREAD_MULTIPLE), so ranks may use several groups in
different orders.

[Note: profiler events]
As torch's own backends do, a call begins an event `mpi:all_reduce` in the caller's thread, which is marked asynchronous and ends with the
operation. torch marks an event so if another thread ends it, so a thread of this module ends all of them. What the operation computes lies inside
a second event, `mpi.all_reduce`, in the thread that runs it.

Open MPI's blocking collectives are up to 2.5 times as fast as its non-blocking ones (`tuned` against `libnbc`), and MPI forbids mixing
the two on one communicator: so asynchrony comes from the thread, not from MPI.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

_CLOSE = object()
_WAKE = object()
Operation = Callable[[], object]
StreamWrapper = Callable[[Tensor, Operation], Operation]
ProfilerEvent = torch.futures.Future[None]  # the event ends when the future is set
_event_thread = ThreadPoolExecutor(1, "profiler events")


def begin_event(name: str, tensors: Sequence[Tensor]) -> ProfilerEvent | None:
    """Begin [Note: profiler events] if the profiler is on; the event has the shapes of `tensors`."""
    if not profiler._is_profiler_enabled:
        return None
    record = torch._C._autograd._record_function_with_args_enter(name, *tensors)
    event: ProfilerEvent = torch.futures.Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, event)
    return event


class TensorWork(dist.Work):
    """The part of torch's interface that is common to queued operations and messages: the outputs, or an error."""

    def __init__(self, outputs: Sequence[Tensor], event: ProfilerEvent | None) -> None:
        super().__init__()
        self.done, self._outputs, self._event = False, outputs, event
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()

    def finish(self) -> None:
        """The operation has ended, with a result or an error."""
        if self._event is not None:
            _event_thread.submit(self._event.set_result, None).result()
            self._event = None
        self.done = True

    def is_success(self) -> bool:
        return self.done and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Tensor]:
        return list(self._outputs)

    def synchronize(self) -> None:
        self.wait()


class QueuedWork(TensorWork):
    """One queued operation, with a future for callers such as DDP that ask for one."""

    def __init__(self, owner: WorkQueue, name: str, run: Operation, outputs: Sequence[Tensor], event: ProfilerEvent | None = None) -> None:
        super().__init__(outputs, event)
        self.name, self._queue = name, owner
        self._run: Operation | None = run

    def execute(self) -> None:
        """Run the operation. Called once, by the thread that holds the queue's lock."""
        assert self._run is not None
        try:
            self._run()
        except Exception as error:
            self._error = error
        self._run = None  # frees the tensors that it refers to
        self.finish()

    def complete_future(self) -> None:
        """Set the future's result or error. Never called with the queue's lock held: a callback of the future may call another collective."""
        with self._lock:
            if self._future is None or not self.done or self._future.done():
                return
            future = self._future
        if self._error is not None:
            future.set_exception(self._error)  # type: ignore[arg-type]  # torch's stub wants a type
        else:
            future.set_result(list(self._outputs))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done:
            self._queue.run_until(self, timeout.total_seconds() if timeout else 0.0)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
        self.complete_future()
        return self._future


class CompletedWork(dist.Work):
    """An operation that was complete when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def synchronize(self) -> None:
        """Does nothing: the operation is complete."""

    def result(self) -> list[Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


COMPLETED = CompletedWork()


class WorkQueue:
    """The operations of one communicator. Callers use `submit`; the rest is for `QueuedWork` and the watchdog.

    `on_stream` wraps an operation on a CUDA tensor so that it starts after the work already enqueued on the caller's stream.
    """

    def __init__(self, name: str, kind: str = "mpi", on_stream: StreamWrapper | None = None) -> None:
        self.name, self.kind, self._on_stream = name, kind, on_stream
        self.sequence_number = 0  # operations begun; equal on all ranks that are at the same point
        self.current = ""  # the operation under way
        self._running = threading.Lock()  # held while an operation runs
        self._pending: deque[QueuedWork] = deque()
        self._wake_ups: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool, run: Operation) -> QueuedWork | None:
        """Queue `run` and return its work; or, for a sync call, run it after everything queued before it and return None.

        The first of `inputs` determines the operation's device.
        """
        if inputs and inputs[0].is_cuda and self._on_stream is not None:
            run = self._on_stream(inputs[0], run)
        work = QueuedWork(self, name, run, outputs, begin_event(f"{self.kind}:{name}", inputs))
        self._pending.append(work)
        if not async_op:
            work.wait()
            return None
        if threading.current_thread() is self._thread:  # called from a future's callback: no other thread would run it
            self.run_until(work)
            return work
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"{self.kind} {self.name}", daemon=True)
            self._thread.start()
        self._wake_ups.put(_WAKE)
        return work

    def run_until(self, work: QueuedWork, timeout_s: float = 0.0) -> None:
        """Run queued operations in the calling thread until `work` is done. Raises TimeoutError after `timeout_s` seconds in total, if that is not 0,
        but does not interrupt an operation that this thread runs itself."""
        deadline = time.monotonic() + timeout_s
        while not work.done:
            remaining = deadline - time.monotonic() if timeout_s > 0 else -1
            if (timeout_s > 0 and remaining <= 0) or not self._running.acquire(timeout=remaining):
                current = f"; {self.current} is under way" if self.current else ""
                raise TimeoutError(f"{work.name} of {self.name} was not done within {timeout_s:g} s{current}")
            try:
                finished = None if work.done else self._run_next()
            finally:
                self._running.release()
            if finished is not None:
                finished.complete_future()

    def close(self) -> None:
        """Run all queued operations and stop the thread."""
        while self._pending:
            with contextlib.suppress(IndexError):  # the thread was faster
                self.run_until(self._pending[-1])
        if self._thread is not None:
            self._wake_ups.put(_CLOSE)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while self._wake_ups.get() is not _CLOSE:
            while self._pending:
                with self._running:
                    finished = self._run_next()
                if finished is not None:
                    finished.complete_future()

    def _run_next(self) -> QueuedWork | None:
        """Run the first queued operation, if there is one, and return it. Called with `_running` held."""
        if not self._pending:
            return None
        work = self._pending.popleft()
        self.sequence_number += 1
        self.current = work.name
        try:
            with profiler.record_function(f"{self.kind}.{work.name}") if profiler._is_profiler_enabled else contextlib.nullcontext():
                work.execute()
        finally:
            self.current = ""
        return work
