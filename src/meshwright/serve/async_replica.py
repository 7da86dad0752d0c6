"""A replica as the server sees it: ranks that are started, given work over a socket, and watched. Its kinds differ in what the work is."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data
from meshwright.serve.messages import tcp_channel
from meshwright.serve.model_source import ModelSource
from meshwright.serve.replica_ranks import ReplicaRanks
from meshwright.serve.tensor_messages import MAX_LINE_BYTES, Array, encode_message, payload_size

ReplicaState = Literal["starting", "ready", "draining", "dead"]
_SECRET_S = 10.0  # for who connects over TCP to say the secret
_END_S = 2.0  # for ranks whose socket is closed to end by themselves


class ReplicaDied(Exception):
    """The replica ended while it had the work."""


@dataclass(frozen=True)
class ReplicaJob:
    """What the ranks of a replica run: `target` gets the source, the plan and the options as plain data."""

    target: str
    source: ModelSource
    plan: Plan
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_source(self, source: ModelSource) -> ReplicaJob:
        return replace(self, source=source)

    def arguments(self, channel: str) -> dict[str, Any]:
        return {"source": to_data(self.source), "plan": to_data(self.plan), "channel": channel, **self.options}


class AsyncReplica(ABC):
    """One replica of a model. `start` returns when the model is loaded; `ended` is set when its ranks have ended, however they did."""

    def __init__(self, name: str, job: ReplicaJob, ranks: ReplicaRanks) -> None:
        self.name, self.job, self.ranks = name, job, ranks
        self.state: ReplicaState = "starting"
        self.facts: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.failure = ""
        self.last_heard = time.monotonic()  # or since when it has had something to do
        self._error: MeshwrightError | None = None
        self.ended = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._folder: Path | None = None

    @property
    @abstractmethod
    def load(self) -> int:
        """How much it has to do; 0: nothing."""

    @abstractmethod
    async def try_out(self) -> None:
        """A little work, as a health check; raises if the answer shows that the model is broken."""

    @abstractmethod
    def _receive(self, message: Mapping[str, Any], payload: bytes) -> None:
        """A message that is not about the replica itself."""

    @abstractmethod
    def _give_up(self) -> None:
        """Tell those who wait for it that the replica has died."""

    async def start(self) -> None:
        """Load the model. Raises what made a rank fail."""
        try:
            await self._start()
        except BaseException:
            self.state = "dead"
            self.ended.set()
            raise

    async def _start(self) -> None:
        listener, channel = await self._listen()
        try:
            await self.ranks.open(self.job.plan.world)
            self._task = asyncio.create_task(self._run(channel))
            waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self.ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        finally:
            listener.close()
        if not self._ready.is_set():
            raise self._error or MeshwrightError("the replica ended before it was ready")
        self.state = "ready"

    async def _listen(self) -> tuple[asyncio.Server, str]:
        """A listener for the first rank, and its channel; see [Note: channels] in messages."""
        if not self.ranks.host:
            self._folder = Path(tempfile.mkdtemp(prefix="meshwright-serve-"))  # private: nobody else can connect
            path = str(self._folder / "channel")
            return await asyncio.start_unix_server(self._connected, path, limit=MAX_LINE_BYTES), path
        secret = secrets.token_hex(32)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            expected, given = f"{secret}\n".encode(), b""
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                given = await asyncio.wait_for(reader.readexactly(len(expected)), _SECRET_S)
            if self._writer is None and hmac.compare_digest(given, expected):
                await self._connected(reader, writer)
            writer.close()

        server = await asyncio.start_server(connected, self.ranks.host, 0, limit=MAX_LINE_BYTES)
        return server, tcp_channel(self.ranks.host, server.sockets[0].getsockname()[1], secret)

    async def _run(self, channel: str) -> None:
        try:
            await self.ranks.run(self.job.target, self.job.arguments(channel))
        except MeshwrightError as error:
            self.failure, self._error = str(error), error
        except Exception as error:  # whatever it is, who waits for the replica must hear of its end
            self.failure = f"{type(error).__name__}: {error}"
            self._error = MeshwrightError(f"the replica ended: {self.failure}")
        self.state = "dead"
        self._give_up()
        self.ended.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        with suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            while line := await reader.readline():
                self.last_heard = time.monotonic()
                message = json.loads(line)
                payload = await reader.readexactly(payload_size(message))
                self.stats = message.get("stats", self.stats)
                if "ready" in message:
                    self.facts = message["ready"]
                    self._ready.set()
                else:
                    self._receive(message, payload)
        writer.close()

    def _send(self, message: Mapping[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Before it is noted as work."""
        assert self._writer is not None
        if not self.load:
            self.last_heard = time.monotonic()
        with suppress(ConnectionError, RuntimeError):  # it has died: those who wait are told
            for part in encode_message(message, arrays):
                self._writer.write(part)

    async def stop(self) -> None:
        """End the ranks; what starts them stays."""
        if self._writer is not None:
            self._writer.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), _END_S)
        await self.ranks.close()
        if self._task is not None:
            self._task.cancel()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
