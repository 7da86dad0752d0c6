"""The replicas of one model: how they start, what happens when one dies, and how a newer model takes the place of the present one.

[Note: reload]
The replicas of a newer model are started beside the present ones and answer a trial before they take over; if any of them fails, the present ones
stay. The former model is kept in mind: if a replica of the newer one dies later and cannot be started again, the set goes back to the former.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from meshwright.core.errors import MeshwrightError
from meshwright.serve.async_replica import AsyncReplica, ReplicaJob
from meshwright.serve.model_source import ModelSource
from meshwright.serve.replica_ranks import ReplicaRanks

Log = Callable[..., None]
R = TypeVar("R", bound=AsyncReplica)
MAX_RETRIES = 3  # of a request whose replica died
_BACK_OFF_S = (0.0, 1.0, 5.0, 30.0)  # before a replica that died is started again; the last one from then on
_CALM_S = 60.0  # a replica that lived so long begins with the first again
_RETRY_AFTER_S = 2


class OverloadedError(MeshwrightError):
    """Too many requests wait: a client should come again after `retry_after_s`."""

    def __init__(self, retry_after_s: int = _RETRY_AFTER_S) -> None:
        super().__init__(f"too many requests are waiting: try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class NotReadyError(MeshwrightError):
    """No replica is ready."""


class DeadlineError(MeshwrightError):
    """An answer took longer than it may."""


class BusyError(MeshwrightError):
    """The same is being done already."""


class ReplicaSet(Generic[R]):
    """`count` replicas of one job, made by `make_replica(name, job, ranks)` on ranks from
    `make_ranks(number)`."""

    def __init__(
        self, make_replica: Callable[[str, ReplicaJob, ReplicaRanks], R], job: ReplicaJob, make_ranks: Callable[[int], ReplicaRanks], *,
        count: int = 1, hang_timeout_s: float = 300.0, log: Log = lambda kind, **facts: None,
    ) -> None:  # fmt: skip
        self.job, self.count, self.log, self._hang_timeout_s = job, count, log, hang_timeout_s
        self.replicas: list[R] = []
        self.restarts = 0
        self.accepted = 0  # requests under way
        self._make_replica, self._make_ranks = make_replica, make_ranks
        self._former: ReplicaJob | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._closing = False
        self._generation = 0
        self._reloading = asyncio.Lock()

    @property
    def ready(self) -> list[R]:
        return [replica for replica in self.replicas if replica.state == "ready"]

    @property
    def facts(self) -> dict[str, Any]:
        return next((replica.facts for replica in self.replicas if replica.facts), {})

    def check_ready(self) -> None:
        """Refuse what no replica will answer soon. One that died is soon there again."""
        if self._closing:
            raise NotReadyError("the server is shutting down")
        if not any(replica.facts for replica in self.replicas):
            raise NotReadyError("the model is being loaded: try again in a moment")

    async def wait_until_ready(self) -> list[R]:
        """The replicas that are ready, as soon as there is one."""
        async with self._changed:
            while not self.ready:
                if self._closing:
                    raise NotReadyError("the server is shutting down")
                await self._changed.wait()
        return self.ready

    async def notify(self) -> None:
        """Wake those who wait for a replica."""
        async with self._changed:
            self._changed.notify_all()

    # -- life --

    async def start(self) -> None:
        """Start all replicas; raises if one of them cannot."""
        self.replicas = await self._start_all(self.job)
        for replica in self.replicas:
            self._watch(self._keep_alive(replica))
        self._watch(self._end_hung())
        await self.notify()

    async def _end_hung(self) -> None:
        """Replicas that have work and say nothing for long are killed; they are then started again like others that died."""
        while True:
            await asyncio.sleep(min(self._hang_timeout_s / 4, 5.0))
            for replica in self.ready:
                silent_s = time.monotonic() - replica.last_heard
                if replica.load and silent_s > self._hang_timeout_s:
                    self.log("replica", replica=replica.name, state="hung", reason=f"it has not answered for {silent_s:.0f} s")
                    await replica.ranks.close()

    async def _start_all(self, job: ReplicaJob) -> list[R]:
        self._generation += 1
        made = [self._make_replica(f"{self._generation}-{i}", job, self._make_ranks(i)) for i in range(self.count)]
        try:
            results = await asyncio.gather(*(replica.start() for replica in made), return_exceptions=True)
            if failed := [result for result in results if isinstance(result, BaseException)]:
                raise failed[0]
        except BaseException:
            await _end(made)
            raise
        return made

    def _watch(self, work: Any) -> None:
        def end(task: asyncio.Task[None]) -> None:
            self._watchers.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.log("defect", error=f"{type(error).__name__}: {error}")

        task: asyncio.Task[None] = asyncio.create_task(work)
        self._watchers.add(task)
        task.add_done_callback(end)

    async def _keep_alive(self, replica: R) -> None:
        """Start a replica again when it dies, later each time that it dies at once."""
        attempt = 0
        while True:
            started = time.monotonic()
            await replica.ended.wait()
            if self._closing or replica not in self.replicas:
                return
            self.log("replica", replica=replica.name, state="dead", reason=replica.failure)
            await replica.stop()
            attempt = 0 if time.monotonic() - started > _CALM_S else attempt + 1
            again = self._make_replica(replica.name, self.job, replica.ranks)
            self.replicas[self.replicas.index(replica)] = replica = again
            await self.notify()
            await asyncio.sleep(_BACK_OFF_S[min(max(attempt - 1, 0), len(_BACK_OFF_S) - 1)])
            await self._start_again(again)
            await self.notify()

    async def _start_again(self, replica: R) -> None:
        try:
            await replica.start()
        except Exception as error:  # it is tried again, later, whatever it was
            replica.failure = replica.failure or str(error)
            if self._former is not None and replica.job is self.job:
                self.job, self._former = self._former, None
                self.log("roll-back", reason=replica.failure, checkpoint=self.job.source.checkpoint, weights=self.job.source.weights)
        else:
            self.restarts += 1
            self.log("replica", replica=replica.name, state="ready")

    # -- changes --

    async def reload(self, source: ModelSource) -> None:
        """Put a newer model in place; see [Note: reload]. If it fails, the present one stays, and the reason is raised."""
        if self._reloading.locked():
            raise BusyError("newer weights are being loaded already: wait for them")
        async with self._reloading:
            job = self.job.with_source(source)
            fresh = await self._start_all(job)
            try:
                for replica in fresh:
                    await replica.try_out()
            except BaseException:
                await _end(fresh)
                raise
            old, self.replicas, self._former, self.job = self.replicas, fresh, self.job, job
            for replica in fresh:
                self._watch(self._keep_alive(replica))
            for replica in old:
                if replica.state == "ready":
                    replica.state = "draining"
            await self.notify()
            self._watch(self._retire(old))

    async def _retire(self, replicas: Sequence[R]) -> None:
        """End replicas when they have answered what they have."""
        while any(replica.load and replica.state != "dead" for replica in replicas):
            await asyncio.sleep(0.05)
        await _end(replicas)

    async def close(self, grace_s: float = 30.0) -> None:
        """Answer what is under way, for at most so long, and end all processes."""
        self._closing = True
        deadline = time.monotonic() + grace_s
        while self.accepted and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await self.notify()
        for task in list(self._watchers):
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await _end(self.replicas)


async def _end(replicas: Sequence[AsyncReplica]) -> None:
    async def end(replica: AsyncReplica) -> None:
        await replica.stop()
        await replica.ranks.release()

    await asyncio.gather(*(end(replica) for replica in replicas), return_exceptions=True)
