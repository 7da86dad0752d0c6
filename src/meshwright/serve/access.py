"""What stands before every request: who may send it, the size and encoding of its body, how long that may take to arrive, and one
line of the log for its end.

[Note: pages of others]
A server on loopback without a key trusts whoever can reach it. A web page from elsewhere, open in a browser on the same machine, can: so a request
whose `Origin` or `Host` is another site's is refused. The second is a name that its owner has pointed at 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

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
_LONGEST_NUMBER = 20  # digits of a length: more is too large anyway


@dataclass(frozen=True)
class AccessLimits:
    """What the bodies of requests may be. `max_bodies_bytes` is for all that this server holds at once."""

    max_body_bytes: int = 2**22
    max_bodies_bytes: int = 2**28
    body_timeout_s: float = 30.0


class Access:
    """An ASGI application around another one."""

    def __init__(
        self, app: App, metrics: ServiceMetrics, log: Callable[[dict[str, Any]], None], *, api_key: str = "", limits: AccessLimits
    ) -> None:  # fmt: skip
        self._app, self._metrics, self._log, self._limits = app, metrics, log, limits
        self._key_hash = hashlib.sha256(api_key.encode()).digest() if api_key else b""
        self._bodies_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts: dict[str, Any] = {"id": uuid.uuid4().hex, "status": 0}
        scope.setdefault("state", {})["facts"] = facts
        started, body = time.monotonic(), _Body(receive, self._limits, self._take)
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
                await self._app(scope, body.receive, send_noted)
        except asyncio.CancelledError:  # the time for answers under way is over
            if not facts["status"]:
                await _answer(send_noted, 503, "the server is shutting down")
        finally:
            self._bodies_bytes -= body.read
            self._metrics.under_way -= 1
            self._note(scope, facts, time.monotonic() - started)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) of a request that goes no further."""
        headers = dict(scope["headers"])
        if self._key_hash and scope["path"] not in OPEN_PATHS:
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(hashlib.sha256(given).digest(), self._key_hash):
                return 401, "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        if not self._key_hash and (stranger := _stranger(headers)):
            return 403, f"requests from pages of {stranger} are refused: use this server's own address, or start it with --api-key"
        if headers.get(b"content-encoding", b"identity") != b"identity":
            return 415, "compressed bodies are not accepted: send plain JSON"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:_LONGEST_NUMBER]) > self._limits.max_body_bytes:
            return 413, too_large(self._limits.max_body_bytes)
        return None

    def _take(self, count: int) -> None:
        """Note that so many bytes of a body have come."""
        self._bodies_bytes += count
        if self._bodies_bytes > self._limits.max_bodies_bytes:
            raise BodyError(429, "too many large requests are on their way: try again in a moment")

    def _note(self, scope: Scope, facts: dict[str, Any], seconds: float) -> None:
        path = scope["path"] if scope["path"] in _KNOWN_PATHS else "other"
        status = facts.pop("status") or 499  # the client went away before there was one
        self._metrics.requests[path, status] += 1
        self._metrics.seconds.observe(seconds)
        client = scope.get("client") or ("", 0)
        line = {"time": round(time.time(), 3), "client": client[0], "method": scope["method"], "path": scope["path"][:200], "status": status}
        with suppress(OSError, ValueError):  # a full disk, or a reader that has gone, is no reason to fail
            self._log({**line, "seconds": round(seconds, 4), **facts})


class _Body:
    """A request's body on its way: `receive` counts its bytes and the time that it takes."""

    def __init__(self, receive: Receive, limits: AccessLimits, take: Callable[[int], None]) -> None:
        self._receive, self._limits, self._take = receive, limits, take
        self._deadline = time.monotonic() + limits.body_timeout_s
        self._is_whole = False
        self.read = 0

    async def receive(self) -> Message:
        if self._is_whole:  # what comes now is that the client has gone
            return await self._receive()
        try:
            async with asyncio.timeout(max(self._deadline - time.monotonic(), 0.001)):
                message = await self._receive()
        except TimeoutError:
            raise BodyError(408, f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None
        count = len(message.get("body", b""))
        self.read += count
        self._take(count)
        if self.read > self._limits.max_body_bytes:
            await _discard_body(self._receive)
            raise BodyError(413, too_large(self._limits.max_body_bytes))
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message


def too_large(limit: int) -> str:
    return f"the body is larger than {limit:,} bytes: send less, or start the server with --set max_body_mb=N"


def _stranger(headers: Mapping[bytes, bytes]) -> str:
    """The site whose page sends a request, if it is not this server's; see [Note: pages of others]."""
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and origin.partition("://")[2] != host:
        return origin[:80]
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return "" if name in ("", "localhost") or name.endswith(".localhost") else name[:80]
    return ""


class BodyError(HTTPException):
    """A body that is not taken. What is left of it cannot be told from a next request, so the connection ends."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason, {"connection": "close"})


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
