"""Where a replica's ranks run: what a server needs of them, and ranks that are forked on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from meshwright.core.errors import MeshwrightError, RunError
from meshwright.launch import ForkServer, WorkerPool

_PRELOAD = ("meshwright.serve.replica_process", "meshwright.serve.predict_replica")
_END_S = 3.0  # between asking ranks to end and killing them
T = TypeVar("T")


class ReplicaRanks(Protocol):
    """The ranks of one replica. They may be opened again after they have been closed."""

    @property
    def pids(self) -> list[int]:
        """Processes on this machine."""

    @property
    def host(self) -> str:
        """This machine's address, as the ranks can reach it; empty where they are on it, and need none."""

    async def open(self, world: int) -> None:
        """Start so many ranks. Raises what prevents it."""

    async def run(self, target: str, kwargs: Mapping[str, Any]) -> None:
        """Call `target` on every rank, with `rank`, `world`, `init_method` and these arguments; returns when all have, raises what made one fail."""

    async def close(self) -> None:
        """End the ranks."""

    async def release(self) -> None:
        """End what starts them too."""


class LocalRanks:
    """Ranks that are forked from a fork server of their own, which outlives them."""

    def __init__(self, threads: int, environ: Mapping[str, str], first_device: int = 0) -> None:
        self._threads, self._environ, self._first_device = threads, environ, first_device
        self._fork_server: ForkServer | None = None
        self._pool: WorkerPool | None = None
        self._changing = asyncio.Lock()  # two pools must not talk to one fork server
        self._idle = asyncio.Event()  # no call is under way
        self._idle.set()

    @property
    def pids(self) -> list[int]:
        return self._pool.pids if self._pool is not None else []

    @property
    def host(self) -> str:
        return ""

    async def open(self, world: int) -> None:
        async with self._changing:
            await in_thread(self._open, world)

    def _open(self, world: int) -> None:
        """With a new fork server, if the old one has ended."""
        if self._fork_server is not None:
            try:
                self._pool = WorkerPool(self._fork_server, world)
            except MeshwrightError:
                self._fork_server.close()
            else:
                return
        self._fork_server = ForkServer(self._threads, self._environ, _PRELOAD)
        self._pool = WorkerPool(self._fork_server, world)

    async def run(self, target: str, kwargs: Mapping[str, Any]) -> None:
        assert self._pool is not None
        self._idle.clear()
        devices = [self._first_device + rank for rank in range(len(self._pool.pids))]
        try:
            await in_thread(self._pool.call, target, {**kwargs, "devices": devices})
        except (OSError, ValueError) as error:
            raise RunError(f"the replica ended: {error}") from None
        finally:
            self._idle.set()

    async def close(self) -> None:
        """A call that is under way ends first: it reads what the fork server says of the ranks."""
        async with self._changing:
            if self._pool is None:
                return
            for number in (signal.SIGTERM, signal.SIGKILL):
                for pid in self._pool.pids if not self._idle.is_set() else ():
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), _END_S)
            await in_thread(self._pool.close)
            self._pool = None

    async def release(self) -> None:
        await self.close()
        async with self._changing:
            if self._fork_server is not None:
                await in_thread(self._fork_server.close)
                self._fork_server = None


def in_thread(function: Callable[..., T], *args: Any) -> Awaitable[T]:
    """The result of a function that blocks, from a thread of its own: those that asyncio shares are few, and a replica's call lasts as long as it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def give(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(give, result, failure)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=run, name="replica", daemon=True).start()
    return future
