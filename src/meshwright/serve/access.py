"""What stands before every request: the size and encoding of its body, how long it may take to arrive, the API key, and one log line for its end."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from meshwright.serve.openai_schema import error_body
from meshwright.serve.service_metrics import ServiceMetrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/health", "/ready"})  # without an API key: for load balancers, and the page asks for the key itself
_KNOWN_PATHS = frozenset(
    {
        *OPEN_PATHS, "/metrics", "/predict", "/openapi.json", "/docs", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings",
        "/v1/reload", "/v1/plan",
    }
)  # fmt: skip


_DISCARD_S, _DISCARD_BYTES = 2.0, 2**26


class Access:
    """An ASGI application around another one."""

    def __init__(
        self, app: App, metrics: ServiceMetrics, log: Callable[[dict[str, Any]], None], *, api_key: str = "", max_body_bytes: int = 2**22,
        body_timeout_s: float = 30.0,
    ) -> None:  # fmt: skip
        self._app, self._metrics, self._log = app, metrics, log
        self._api_key, self._max_body_bytes, self._body_timeout_s = api_key.encode(), max_body_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts: dict[str, Any] = {"id": uuid.uuid4().hex, "status": 0}
        scope.setdefault("state", {})["facts"] = facts
        started = time.monotonic()
        self._metrics.under_way += 1

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", facts["id"].encode())]
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await _discard_body(receive)
                await _answer(send_noted, *refusal)
            else:
                await self._app(scope, self._bounded(scope, receive), send_noted)
        except _BodyError as error:
            if not facts["status"]:
                await _discard_body(receive)
                await _answer(send_noted, error.status, str(error))
        finally:
            self._metrics.under_way -= 1
            self._note(scope, facts, time.monotonic() - started)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) of a request that goes no further."""
        headers = dict(scope["headers"])
        if self._api_key and scope["path"] not in OPEN_PATHS:
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self._api_key):
                return 401, "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        if headers.get(b"content-encoding", b"identity") != b"identity":
            return 415, "compressed bodies are not accepted: send plain JSON"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return 413, self._too_large()
        return None

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """`receive` that counts the body's bytes and the time that it takes."""
        read, deadline = 0, time.monotonic() + self._body_timeout_s
        is_whole = False

        async def receive_bounded() -> Message:
            nonlocal read, is_whole
            if is_whole:  # the body is here: what comes now is that the client has gone
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise _BodyError(408, f"the body did not arrive within {self._body_timeout_s:.0f} s") from None
            read += len(message.get("body", b""))
            if read > self._max_body_bytes:
                raise _BodyError(413, self._too_large())
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        return receive_bounded

    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes:,} bytes: send less, or start the server with --set max_body_mb=N"

    def _note(self, scope: Scope, facts: dict[str, Any], seconds: float) -> None:
        path = scope["path"] if scope["path"] in _KNOWN_PATHS else "other"
        status = facts.pop("status") or 499  # the client went away before there was one
        self._metrics.requests[path, status] += 1
        self._metrics.seconds.observe(seconds)
        client = scope.get("client") or ("", 0)
        line = {"time": round(time.time(), 3), "client": client[0], "method": scope["method"], "path": scope["path"][:200], "status": status}
        self._log({**line, "seconds": round(seconds, 4), **facts})


class _BodyError(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def _discard_body(receive: Receive) -> None:
    """Read what a client still sends, within bounds: one that is cut off while it sends would not see the answer."""
    deadline, left = time.monotonic() + _DISCARD_S, _DISCARD_BYTES
    with suppress(TimeoutError):
        while left > 0:
            message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
            left -= len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps(error_body(reason, code="invalid_api_key" if status == 401 else None)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
