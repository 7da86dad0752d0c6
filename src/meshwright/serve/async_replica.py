"""A replica as the server sees it: processes that are started, given requests, and watched; their events arrive in queues."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data
from meshwright.launch import ForkServer, WorkerPool
from meshwright.serve.messages import decode_event, encode_params
from meshwright.serve.model_source import ModelSource
from meshwright.serve.requests import SamplingParams, TokenEvent

ReplicaState = Literal["starting", "ready", "draining", "dead"]
_LINE_BYTES = 1 << 26
_PRELOAD = ("meshwright.serve.replica_process",)


class ReplicaDied(Exception):
    """The replica ended while it had the request."""


@dataclass
class Submitted:
    """One request at one replica: its events, and how many tokens it may still cost."""

    id: int
    cost: int
    events: asyncio.Queue[TokenEvent | ReplicaDied] = field(default_factory=asyncio.Queue)


class AsyncReplica:
    """One replica of a model. `start` returns when the model is loaded; `ended` is set when its processes have ended, however they did."""

    def __init__(self, name: str, source: ModelSource, plan: Plan, end_tokens: Sequence[int], environ: Mapping[str, str]) -> None:
        self.name, self.source, self.plan = name, source, plan
        self.state: ReplicaState = "starting"
        self.facts: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.failure = ""
        self.ended = asyncio.Event()
        self.last_answer = time.monotonic()
        self._end_tokens, self._environ = list(end_tokens), environ
        self._requests: dict[int, Submitted] = {}
        self._next = 0
        self._writer: asyncio.StreamWriter | None = None
        self._ready = asyncio.Event()
        self._fork_server: ForkServer | None = None
        self._pool: WorkerPool | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def load(self) -> int:
        """Tokens that its requests may still cost."""
        return sum(request.cost for request in self._requests.values())

    @property
    def pids(self) -> list[int]:
        return self._pool.pids if self._pool is not None else []

    async def start(self, fork_server: ForkServer | None = None) -> None:
        """Load the model. Raises what made a rank fail. A fork server of an earlier replica may be used again."""
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-serve-"))  # private: nobody else can connect
        channel = self._folder / "channel"
        listener = await asyncio.start_unix_server(self._connected, str(channel), limit=_LINE_BYTES)
        try:
            server = fork_server
            if server is None:
                server = await asyncio.to_thread(ForkServer, self.plan.threads or 1, self._environ, _PRELOAD)
            self._fork_server, self._pool = server, await asyncio.to_thread(WorkerPool, server, self.plan.world)
            kwargs = {"source": to_data(self.source), "plan": to_data(self.plan), "end_tokens": self._end_tokens, "channel": str(channel)}
            self._tasks.append(asyncio.create_task(self._run(kwargs)))
            waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self.ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        finally:
            listener.close()
        if not self._ready.is_set():
            raise MeshwrightError(self.failure or "the replica ended before it was ready")
        self.state = "ready"

    async def _run(self, kwargs: dict[str, Any]) -> None:
        assert self._pool is not None
        try:
            await asyncio.to_thread(self._pool.call, "meshwright.serve.replica_process:serve_rank", kwargs)
        except MeshwrightError as error:
            self.failure = str(error)
        except (OSError, ValueError) as error:
            self.failure = f"the replica ended: {error}"
        self.state = "dead"
        for request in self._requests.values():
            request.events.put_nowait(ReplicaDied(self.failure))
        self._requests.clear()
        self.ended.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        with suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            while line := await reader.readline():
                self._handle(json.loads(line))
        writer.close()

    def _handle(self, message: Mapping[str, Any]) -> None:
        self.last_answer = time.monotonic()
        if "ready" in message:
            self.facts = message["ready"]
            self._ready.set()
        elif "stats" in message:
            self.stats = message["stats"]
        elif "refused" in message:
            self._give(TokenEvent(message["refused"], -1, "error", None, message["reason"]))
        for data in message.get("events", ()):
            self._give(decode_event(data))

    def _give(self, event: TokenEvent) -> None:
        request = self._requests.get(event.request)
        if request is None:  # cancelled
            return
        request.cost = max(request.cost - 1, 1)
        request.events.put_nowait(event)
        if event.finish is not None:
            del self._requests[event.request]

    def submit(self, tokens: Sequence[int], params: SamplingParams, num_prompt: int) -> Submitted:
        """Queue a request whose first `num_prompt` tokens are the prompt."""
        self._next += 1
        request = Submitted(self._next, len(tokens) - num_prompt + params.max_tokens + len(tokens) // 8)
        self._requests[request.id] = request
        self._send({"submit": request.id, "tokens": list(tokens), "params": encode_params(params), "num_prompt": num_prompt})
        return request

    def cancel(self, request: Submitted) -> None:
        if self._requests.pop(request.id, None) is not None:
            self._send({"cancel": request.id})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        with suppress(ConnectionError, RuntimeError):  # it has died: its requests are told
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def stop(self, *, keep_fork_server: bool = False) -> ForkServer | None:
        """End the processes. Returns the fork server, if it is kept."""
        if self._writer is not None:
            self._writer.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), 2.0)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
        for task in self._tasks:
            task.cancel()
        kept, self._fork_server = (self._fork_server if keep_fork_server else None), (None if keep_fork_server else self._fork_server)
        if self._fork_server is not None:
            await asyncio.to_thread(self._fork_server.close)
        shutil.rmtree(self._folder, ignore_errors=True)
        return kept
