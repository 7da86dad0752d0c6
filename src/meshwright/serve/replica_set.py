"""The replicas of one model: which one gets a request, what happens when one dies, and how a newer model takes the place of the present one.

[Note: retries]
A request that was accepted is answered, though its replica may die: it goes to another, or waits for the next, with the tokens that it has. Its
random numbers depend on its seed and the position alone, so the answer goes on as it would have.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshwright.core.errors import MeshwrightError, RequestError, RunError
from meshwright.core.plan import Plan
from meshwright.serve.async_replica import AsyncReplica, ReplicaDied
from meshwright.serve.model_source import ModelSource
from meshwright.serve.requests import SamplingParams, TokenEvent

Log = Callable[..., None]
_MAX_RETRIES = 3
_BACK_OFF_S = (0.0, 1.0, 5.0, 30.0)  # before a replica that died is started again; the last one from then on
_CALM_S = 60.0  # a replica that lived so long begins with the first again
_PREFIX_TOKENS, _MAX_PREFIXES = 64, 4096
_PREFIX_BONUS = 512  # tokens of load by which a replica that knows a prompt's beginning may be busier
_RETRY_AFTER_S = 2


class OverloadedError(MeshwrightError):
    """Too many requests wait: a client should come again after `retry_after_s`."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"too many requests are waiting: try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class NotReadyError(MeshwrightError):
    """No replica is ready."""


class ReplicaSet:
    """`count` replicas of a model under one plan."""

    def __init__(
        self, source: ModelSource, plan: Plan, end_tokens: Sequence[int], environ: Mapping[str, str], *, count: int = 1, max_waiting: int = 256,
        log: Log = lambda kind, **facts: None,
    ) -> None:  # fmt: skip
        self.source, self.plan, self.count, self.max_waiting = source, plan, count, max_waiting
        self.replicas: list[AsyncReplica] = []
        self.restarts = 0
        self.accepted = 0  # requests under way
        self._end_tokens, self._environ, self._log = end_tokens, environ, log
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._known: OrderedDict[tuple[int, ...], AsyncReplica] = OrderedDict()  # beginnings of prompts, by who has computed them
        self._closing = False
        self._generation = 0

    @property
    def ready(self) -> list[AsyncReplica]:
        return [replica for replica in self.replicas if replica.state == "ready"]

    @property
    def facts(self) -> dict[str, Any]:
        return next((replica.facts for replica in self.replicas if replica.facts), {})

    async def start(self) -> None:
        """Start all replicas; raises if the first one cannot."""
        self.replicas = await self._start_all(self.source)
        self._watch(self.replicas)

    async def _start_all(self, source: ModelSource) -> list[AsyncReplica]:
        self._generation += 1
        made = [AsyncReplica(f"{self._generation}-{i}", source, self.plan, self._end_tokens, self._environ) for i in range(self.count)]
        results = await asyncio.gather(*(replica.start() for replica in made), return_exceptions=True)
        if failed := [result for result in results if isinstance(result, BaseException)]:
            await asyncio.gather(*(replica.stop() for replica in made))
            raise failed[0]
        return made

    def _watch(self, replicas: Sequence[AsyncReplica]) -> None:
        self._watchers += [asyncio.create_task(self._keep_alive(replica)) for replica in replicas]

    async def _keep_alive(self, replica: AsyncReplica) -> None:
        """Start a replica again when it dies, later each time that it dies at once."""
        attempt = 0
        while True:
            started = time.monotonic()
            await replica.ended.wait()
            if self._closing or replica not in self.replicas:
                return
            self._log("replica", replica=replica.name, state="dead", reason=replica.failure)
            fork_server = await replica.stop(keep_fork_server="fork server" not in replica.failure)
            attempt = 0 if time.monotonic() - started > _CALM_S else attempt + 1
            again = AsyncReplica(replica.name, replica.source, replica.plan, self._end_tokens, self._environ)
            self.replicas[self.replicas.index(replica)] = replica = again
            await asyncio.sleep(_BACK_OFF_S[min(max(attempt - 1, 0), len(_BACK_OFF_S) - 1)])
            with suppress(MeshwrightError):
                await again.start(fork_server)
                self.restarts += 1
                self._log("replica", replica=again.name, state="ready")
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- requests --

    def check_room(self, requests: int = 1) -> None:
        """Refuse what would have to wait too long."""
        if not self.ready and not any(replica.state in ("starting", "dead") for replica in self.replicas):
            raise NotReadyError("no replica is ready")
        if self.accepted + requests > self.max_waiting + sum(replica.facts.get("sequences", 0) for replica in self.ready):
            raise OverloadedError(_RETRY_AFTER_S)

    async def generate(self, tokens: Sequence[int], params: SamplingParams) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of one answer; ends with the event that has a reason. RequestError if it can never run."""
        assert params.seed is not None
        self.accepted += 1
        given = list(tokens)
        try:
            for attempt in range(_MAX_RETRIES + 1):
                replica = await self._choose(given)
                request = replica.submit(given, params, len(tokens))
                try:
                    while True:
                        event = await request.events.get()
                        if isinstance(event, ReplicaDied):
                            break
                        if event.error:
                            raise RequestError(event.error)
                        if event.token >= 0:
                            given.append(event.token)
                        yield event
                        if event.finish is not None:
                            return
                finally:
                    replica.cancel(request)
                self._log("retry", attempt=attempt + 1, tokens=len(given), reason=replica.failure)
                await self._notify()
            raise RunError(f"the request ended {_MAX_RETRIES + 1} replicas: {replica.failure}")
        finally:
            self.accepted -= 1

    async def _choose(self, tokens: Sequence[int]) -> AsyncReplica:
        """The replica with the least to do, or one that has computed the beginning of this prompt and is not much busier."""
        async with self._changed:
            while not self.ready:
                if self._closing:
                    raise NotReadyError("the server is shutting down")
                await self._changed.wait()
        prefix = tuple(tokens[:_PREFIX_TOKENS])
        known = self._known.get(prefix) if len(prefix) == _PREFIX_TOKENS else None
        chosen = min(self.ready, key=lambda replica: replica.load - _PREFIX_BONUS * (replica is known))
        if len(prefix) == _PREFIX_TOKENS:
            self._known[prefix] = chosen
            self._known.move_to_end(prefix)
            if len(self._known) > _MAX_PREFIXES:
                self._known.popitem(last=False)
        return chosen

    # -- changes --

    async def reload(self, source: ModelSource) -> None:
        """Put a newer model in place: its replicas are started beside the present ones, tried, and take over; the old ones end when they have
        answered. If anything fails, the present ones stay."""
        fresh = await self._start_all(source)
        try:
            for replica in fresh:
                await _try_out(replica)
        except BaseException:
            await asyncio.gather(*(replica.stop() for replica in fresh))
            raise
        old, self.replicas, self.source = self.replicas, fresh, source
        self._known.clear()
        self._watch(fresh)
        await self._notify()
        for replica in old:
            if replica.state == "ready":
                replica.state = "draining"
        self._watchers.append(asyncio.create_task(self._retire(old)))

    async def _retire(self, replicas: Sequence[AsyncReplica]) -> None:
        while any(replica.load and replica.state != "dead" for replica in replicas):
            await asyncio.sleep(0.05)
        await asyncio.gather(*(replica.stop() for replica in replicas))

    async def close(self, grace_s: float = 30.0) -> None:
        """Answer what is under way, for at most so long, and end all processes."""
        self._closing = True
        deadline = time.monotonic() + grace_s
        while self.accepted and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await self._notify()
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*(replica.stop() for replica in self.replicas), return_exceptions=True)


async def _try_out(replica: AsyncReplica) -> None:
    """One short answer, as a health check. The numbers must be finite, which greedy tokens of a broken model need not show: so must their
    log-probabilities."""
    request = replica.submit([1, 2, 3], SamplingParams(max_tokens=4, seed=0, ignore_end=True, logprobs=0), 3)
    while True:
        event = await asyncio.wait_for(request.events.get(), 120.0)
        if isinstance(event, ReplicaDied) or event.error:
            raise RunError(f"the new model does not answer: {replica.failure or getattr(event, 'error', '')}")
        if event.logprobs is not None and event.logprobs.logprob != event.logprobs.logprob:
            raise RunError("the new model's log-probabilities are NaN")
        if event.finish is not None:
            return
