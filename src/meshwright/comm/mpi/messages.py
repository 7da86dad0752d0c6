"""Sends and receives: MPI's own requests as `Work`. A thread looks after those that nobody waits for, so that they move on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

_SMALL = 1 << 15  # bytes up to which a thread's waking up costs more than the message
_SHORTEST_S, _LONGEST_S = 50e-6, 2e-3  # between two looks at requests under way


class Message(dist.Work):
    """One request. Only one thread may complete it: `_turn` says which."""

    def __init__(self, post: Post, request: Any, tensor: torch.Tensor, held: object, arrived: Callable[[], None] | None) -> None:
        super().__init__()
        self._post = post
        self.done, self.awaited = False, False
        self._request, self._tensor = request, tensor
        self._held: object = held  # the memory MPI works on
        self._arrived = arrived
        self._turn = threading.Lock()
        self._source = -1
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def look(self) -> bool:
        """Move it on; True when it is over."""
        if not self.done and self._turn.acquire(blocking=False):
            try:
                status = MPI.Status()
                if not self.done and self._request.Test(status):
                    self._over(status)
            finally:
                self._turn.release()
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.awaited = True
        limit = time.monotonic() + timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else 0.0
        while limit and not self.look():
            if time.monotonic() > limit:
                raise TimeoutError("a message was not sent or received in time")
        if not self.done:
            with self._turn:
                status = MPI.Status()
                if not self.done:
                    self._request.Wait(status)
                    self._over(status)
        return True

    def _over(self, status: Any) -> None:
        self._source = status.Get_source()
        if self._arrived is not None:
            self._arrived()
        self._held = self._arrived = None
        self.done = True
        if self._future is not None and not self._future.done():
            self._future.set_result([self._tensor])

    def is_completed(self) -> bool:
        return self.look()

    def is_success(self) -> bool:
        return self.done

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
                if self.done:
                    self._future.set_result([self._tensor])
                else:
                    self._post.follow(self)  # who waits for a future does not move the message on
        return self._future


class Post:
    """The thread that looks after messages under way; it sleeps when there are none, and longer the longer nothing happens."""

    def __init__(self) -> None:
        self._new: SimpleQueue[Message | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, message: Message, size: int) -> Message:
        """A small message is on its way already, or moves on whenever something else of MPI's does: no thread has to wake up for it."""
        if size > _SMALL and not message.look():
            self.follow(message)
        return message

    def follow(self, message: Message) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpi messages", daemon=True)
            self._thread.start()
        self._new.put(message)

    def close(self) -> None:
        if self._thread is not None:
            self._new.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        under_way: list[Message] = []
        pause = _SHORTEST_S
        while True:
            while not under_way or not self._new.empty():
                message = self._new.get()
                if message is None:
                    return
                under_way.append(message)
                pause = _SHORTEST_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
            under_way = [m for m in under_way if not (m.done or (not m.awaited and m.look()))]
