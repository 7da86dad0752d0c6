"""A lane: the operations of one communicator, done one after the other in the order they were asked for. MPI's calls go by lanes, and so do
those that are composed of messages (`composed.py`).

[Note: who does the work]
MPI's blocking collectives are up to 2.5 times as quick as its non-blocking ones (Open MPI's `tuned` against `libnbc`), and the two must not be
mixed on one communicator. So every collective here is a blocking one, and what is asynchronous is who calls it. A call that is waited for at
once is made by the caller itself. A call that is not is made by the lane's thread, without Python's lock, while the caller computes; and if
`wait` comes before the thread has got to it, the waiter makes it. Small messages thus never pay for handing over to a thread, and large ones
overlap. Lanes are independent (MPI_THREAD_MULTIPLE), so ranks may use several groups in different orders.

Waking a thread costs more than a small message does, so for those it is given a moment: by then most have been waited for.

What Python does between torch and MPI is most of a small call, and after a message that fills the caches, or where ranks take turns on a core, it
takes several times as long. So a call that is made at once has no object of its own, as torch's other backends have none either, and takes no lock:
who finds nothing waiting and nothing `current` is the first. The lane's own threads say what they do before they take it from those that wait, so
whoever looks sees it in one place or the other; and they wait for what another thread does at once. That is enough for one thread of the caller's.
That no two threads are the first is due to Python's lock: nothing is called between looking and saying.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

LARGE = 1 << 15  # bytes from which a call is worth a thread's waking up at once
_MOMENT_S = 200e-6
_FOREVER = -1.0
_announcing = threading.Lock()
Beside = Callable[[torch.Tensor, Callable[[], object]], Callable[[], object]]


class Call(dist.Work):
    """One operation: a `Work`, with a future for those who ask for one (DDP does)."""

    def __init__(self, lane: Lane, name: str, run: Callable[[], object], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.name, self.done = name, False
        self._lane, self._outputs = lane, outputs
        self._run: Callable[[], object] | None = run
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._announced = False

    def perform(self) -> None:
        """Called once, by whoever holds the lane."""
        assert self._run is not None
        try:
            self._lane.make(self.name, self._run)
        except Exception as error:
            self._error = error
        self._run = None  # what it holds on to may go
        self.done = True

    def announce(self) -> None:
        """Complete the future, if there is one. Not while the lane is held: what hangs on the future may use it."""
        if self._future is None or not self.done:
            return
        with _announcing:
            if self._announced:
                return
            self._announced = True
        if self._error is not None:
            self._future.set_exception(self._error)  # type: ignore[arg-type]  # torch's stub is wrong about it
        else:
            self._future.set_result(list(self._outputs))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done:
            self._lane.finish(self, timeout.total_seconds() if timeout else 0.0)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._future is None:
            self._future = torch.futures.Future()
            if not self.done:
                self._lane.ring(hurry=True)  # who waits for a future does not help
        self.announce()
        return self._future


class Done(dist.Work):
    """What is over when it is returned, such as a small message that MPI has taken. There is nothing that it has to remember."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def synchronize(self) -> None:
        """It is over."""

    def result(self) -> list[torch.Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


DONE = Done()


class Lane:
    """Use `put`, or `begin` where every microsecond counts; the rest is for calls and for the watchdog."""

    # What is compiled (mpi/quick.c) reads some of them where they lie.
    __slots__ = ("__weakref__", "_bell", "_beside", "_rung", "_thread", "_turn", "_waiting", "current", "kind", "name", "number", "together")

    def __init__(self, name: str, kind: str = "mpi", beside: Beside | None = None) -> None:
        """`beside` turns what is done with a device's tensor into what a lane may do: it begins when the device has come so far."""
        self.name, self.kind, self._beside = name, kind, beside
        self.together: list[dist.Work] | None = None  # what was put but not made since somebody began to collect it
        self.number = 0  # of operations begun: the same on every rank that keeps up
        self.current = ""  # what is being done
        self._turn = threading.Lock()  # of those that make what was put off
        self._waiting: deque[Call] = deque()
        self._bell: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._rung = False
        self._thread: threading.Thread | None = None

    def begin(self, name: str) -> bool:
        """Whether nobody is before the caller, and nobody looks. Who then makes the call itself sets `current` to "" when it is over."""
        if self._waiting or self.current or profiler._is_profiler_enabled:  # in this order: see above
            return False
        self.number += 1
        self.current = name
        return True

    def put(
        self, name: str, outputs: Sequence[torch.Tensor], tensor: torch.Tensor | None, later: bool, run: Callable[..., object], *args: Any
    ) -> dist.Work | None:  # fmt: skip
        """Do it later; or now, after what was asked for before, and return nothing. `tensor` tells how large it is, and where."""
        if later:
            return self.later(name, outputs, tensor, partial(run, *args))
        if (tensor is None or not tensor.is_cuda) and self.begin(name):
            try:
                run(*args)
            finally:
                self.current = ""
        else:
            self._put_off(name, outputs, tensor, partial(run, *args)).wait()
        return None

    def later(self, name: str, outputs: Sequence[torch.Tensor], tensor: torch.Tensor | None, run: Callable[[], object]) -> Call:
        """At the latest when it is waited for."""
        call = self._put_off(name, outputs, tensor, run)
        if self.together is not None:
            self.together.append(call)
        self.ring(hurry=tensor is not None and tensor.nbytes >= LARGE)
        return call

    def _put_off(self, name: str, outputs: Sequence[torch.Tensor], tensor: torch.Tensor | None, run: Callable[[], object]) -> Call:
        if tensor is not None and tensor.is_cuda and self._beside is not None:
            run = self._beside(tensor, run)
        call = Call(self, name, run, outputs)
        self._waiting.append(call)
        return call

    def finish(self, wanted: Call, timeout_s: float = 0.0) -> None:
        """Return when `wanted` is done, doing what is left before it."""
        until = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        while not wanted.done:
            left_s = until - time.monotonic() if until else _FOREVER
            if (until and left_s <= 0) or not self._turn.acquire(timeout=left_s):
                raise TimeoutError(f"{wanted.name} was not done within {timeout_s:.1f} s")
            try:
                ran = None if wanted.done else self._next(until)
            finally:
                self._turn.release()
            if ran is not None:
                ran.announce()

    def close(self) -> None:
        """Finish what is left, and end the thread."""
        while self._waiting:
            self.finish(self._waiting[-1])
        if self._thread is not None:
            self._bell.put("end")
            self._thread.join()
            self._thread = None

    def ring(self, hurry: bool) -> None:
        """Have the thread look at what is waiting: now, or in a moment."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"{self.kind} {self.name}", daemon=True)
            self._thread.start()
        if hurry or not self._rung:
            self._rung = True
            self._bell.put("now" if hurry else "soon")

    def _serve(self) -> None:
        while (word := self._bell.get()) != "end":
            if word == "soon":
                with contextlib.suppress(queue.Empty):
                    word = self._bell.get(timeout=_MOMENT_S)
                    if word == "end":
                        return
            self._rung = False
            while self._waiting:
                with self._turn:
                    ran = self._next()
                if ran is not None:
                    ran.announce()

    def _next(self, until: float = 0.0) -> Call | None:
        """By whoever has the turn. None when there is nothing left, or when it is too late."""
        while self.current:  # another thread makes a call at once
            if until and time.monotonic() > until:
                return None
            time.sleep(_MOMENT_S)
        if not self._waiting:
            return None
        call = self._waiting[0]
        self.current = call.name
        try:
            self._waiting.popleft()
            call.perform()
        finally:
            self.current = ""
        return call

    def make(self, name: str, run: Callable[[], object]) -> None:
        """By whoever has the turn."""
        self.number += 1
        with profiler.record_function(f"{self.kind}:{name}") if profiler._is_profiler_enabled else contextlib.nullcontext():
            run()
