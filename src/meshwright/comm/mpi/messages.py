"""Sends and receives: MPI's own requests as `Work`. A thread looks after those that nobody waits for, so that they move on meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

# Bytes up to which nobody has to look after a message: it is on its way already, or moves on whenever something else of MPI's does.
SMALL = 1 << 15
_SHORTEST_S, _LONGEST_S = 50e-6, 2e-3  # between two looks at requests under way
_NAP_S, _NAPS = 2e-3, 25  # between two looks for new ones, and how many of them find nothing before the thread sleeps


class Message(dist.Work):
    """One request. Only one thread may complete it: `_turn` says which."""

    done = awaited = False
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
        self.awaited = True
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


class Post:
    """The thread that looks after messages that nobody waits for.

    Waking it up costs as much as a message of some MB does: it runs where its rank does, and takes Python's lock and its core just when these are
    needed to wait. So while there is traffic it is never woken and looks by itself, every `_NAP_S`; by then most have been waited for. It sleeps
    until it is called when there has been none for a while.
    """

    def __init__(self) -> None:
        self._new: deque[Message] = deque()
        self._call: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asleep = False
        self.helped = False  # somebody is inside MPI, which moves everybody's messages on

    def follow(self, message: Message) -> None:
        self._new.append(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpi messages", daemon=True)
            self._thread.start()
        elif self._asleep:
            self._asleep = False
            self._call.put("come")

    def close(self) -> None:
        if self._thread is not None:
            self._call.put("end")
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        under_way: list[Message] = []
        pause, naps = _SHORTEST_S, 0
        while self._call.empty() or self._call.get() != "end":
            if self._new:
                under_way += [self._new.popleft() for _ in range(len(self._new))]
                pause, naps = _SHORTEST_S, 0
            under_way = [m for m in under_way if not (m.done or m.awaited or (not self.helped and m.look()))]
            if under_way:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)
            elif naps < _NAPS:
                with contextlib.suppress(Empty):
                    self._call.put(self._call.get(timeout=_NAP_S))  # the loop reads it
                naps += 1
            else:
                self._sleep()

    def _sleep(self) -> None:
        self._asleep = True
        if self._new:  # came just before it could be seen that we sleep
            self._asleep = False
        else:
            self._call.put(self._call.get())  # the loop reads it
