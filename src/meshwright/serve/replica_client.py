"""The other side of a replica: starts its processes, and gives it requests. One rank without need for a process of its own runs in this one."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import MeshwrightError, RunError
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data
from meshwright.launch import ForkServer, WorkerPool
from meshwright.serve.engine import Engine
from meshwright.serve.messages import LineSocket, decode_event, encode_params
from meshwright.serve.model_source import ModelSource
from meshwright.serve.replica import make_replica
from meshwright.serve.requests import SamplingParams, TokenEvent

_POLL_S = 0.2


class ReplicaClient(Protocol):
    """Requests to one replica. `facts` say what it is."""

    facts: dict[str, Any]

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of the engine."""

    def submit(self, tokens: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; returns its id."""

    def cancel(self, request: int) -> None: ...

    def events(self) -> Iterator[TokenEvent]:
        """Events as they come, until nothing is under way."""

    def close(self) -> None: ...


class LocalReplica:
    """A replica of one rank in this process."""

    def __init__(self, source: ModelSource, plan: Plan, end_tokens: Sequence[int], say: Callable[[str], None] = lambda _: None) -> None:
        replica = make_replica(source, plan, say=say)
        self.facts = replica.facts()
        self._engine: Engine = replica.make_engine(tuple(end_tokens))
        self._running: dict[int, Any] = {}

    def submit(self, tokens: Sequence[int], params: SamplingParams) -> int:
        sequence = self._engine.submit(tokens, params)
        self._running[sequence.id] = sequence
        return sequence.id

    def cancel(self, request: int) -> None:
        self._engine.cancel(self._running[request])

    def events(self) -> Iterator[TokenEvent]:
        return self._engine.drain()

    @property
    def stats(self) -> dict[str, Any]:
        return self._engine.facts()

    def close(self) -> None:
        self._running.clear()


class ReplicaProcesses:
    """A replica whose ranks are forked from a fork server and end with this object."""

    def __init__(self, fork_server: ForkServer, source: ModelSource, plan: Plan, end_tokens: Sequence[int]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-serve-"))  # private: nobody else can connect
        channel = self._folder / "channel"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(channel))
        self._listener.listen(1)
        self._failure: MeshwrightError | None = None
        self._pool = WorkerPool(fork_server, plan.world)
        kwargs = {"source": to_data(source), "plan": to_data(plan), "end_tokens": list(end_tokens), "channel": str(channel)}
        self._thread = threading.Thread(target=self._run, args=(kwargs,), name="replica", daemon=True)
        self._thread.start()
        self._lines: LineSocket | None = None
        self.facts: dict[str, Any] = {}
        self._stats: dict[str, Any] = {}
        self._pending: set[int] = set()
        self._next = 0

    def wait_until_ready(self) -> None:
        """Until the model is loaded. Raises what made a rank fail."""
        self._listener.settimeout(_POLL_S)
        while self._lines is None:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                self._check()
            else:
                self._lines = LineSocket(peer)
        while not self.facts:
            for message in self._receive():
                self.facts = message.get("ready", self.facts)

    def submit(self, tokens: Sequence[int], params: SamplingParams) -> int:
        self._next += 1
        self._send({"submit": self._next, "tokens": list(tokens), "params": encode_params(params)})
        self._pending.add(self._next)
        return self._next

    def cancel(self, request: int) -> None:
        self._pending.discard(request)
        self._send({"cancel": request})

    def events(self) -> Iterator[TokenEvent]:
        while self._pending:
            for message in self._receive():
                self._stats = message.get("stats", self._stats)
                if "refused" in message:
                    self._pending.discard(message["refused"])
                    yield TokenEvent(message["refused"], -1, "error", None, message["reason"])
                for data in message.get("events", ()):
                    event = decode_event(data)
                    if event.finish is not None:
                        self._pending.discard(event.request)
                    yield event

    @property
    def stats(self) -> dict[str, Any]:
        """As of now: the replica is asked."""
        self._next += 1
        self._send({"report": self._next})
        while self._stats.get("report") != self._next:
            for message in self._receive():
                self._stats = message.get("stats", self._stats)
        return self._stats

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._thread.join(_POLL_S)
        self._pool.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, kwargs: dict[str, Any]) -> None:
        try:
            self._pool.call("meshwright.serve.replica_process:serve_rank", kwargs)
        except MeshwrightError as error:
            self._failure = error
        except (OSError, ValueError) as error:  # the pool was closed
            self._failure = RunError(f"the replica ended: {error}")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._lines is not None
        try:
            self._lines.send(message)
        except OSError:
            self._fail()

    def _receive(self) -> list[dict[str, Any]]:
        assert self._lines is not None
        try:
            return self._lines.receive(_POLL_S)
        except (EOFError, OSError):
            self._fail()
        return []

    def _fail(self) -> None:
        self._thread.join(10 * _POLL_S)
        self._check()
        raise RunError("the replica has closed its connection")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
