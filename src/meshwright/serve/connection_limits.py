"""Limits on connections that uvicorn leaves open: how many there may be, how long one may be silent before a request's headers are whole, how much it
may send before that, and how long it may not read its answer. A client that sends half a request and waits has a place for so long and no longer."""

from __future__ import annotations

import asyncio
import importlib
import resource
from dataclasses import dataclass
from typing import Any

_REFUSAL = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
MAX_HEADER_BYTES = 1 << 16
_CHECKS = 4  # in the shortest time of these


@dataclass(frozen=True)
class ConnectionLimits:
    """How long a request's headers may take to be whole, how long a connection may be idle, and how long an answer may not be read."""

    header_s: float = 15.0
    idle_s: float = 30.0
    unread_s: float = 30.0
    connections: int = 4096


def limited_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP (of httptools where that is installed, else of h11) with these limits."""
    interval_s = min(limits.header_s, limits.idle_s, limits.unread_s) / _CHECKS
    base: Any = importlib.import_module("uvicorn.protocols.http.auto").AutoHTTPProtocol

    class LimitedProtocol(base):  # type: ignore[misc]
        """A connection. `_unparsed` bytes have come of a request whose headers are not whole, the first of them at `_began`; nothing has come since
        `_heard`, when it was opened or an answer was finished."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._heard = self._began = self.loop.time()
            self._unparsed = 0
            self._is_paused = False
            self._unread, self._moved = 0, self._heard  # bytes that the client has still to read, and when they were last seen to be fewer
            self._timer: asyncio.TimerHandle | None = None
            if len(self.connections) > limits.connections:
                self._refuse(b"503 Service Unavailable")
                return
            self._timer = self.loop.call_later(interval_s, self._check_silence)

        def data_received(self, data: bytes) -> None:
            cycle, is_whole = self.cycle, self.cycle is None or not self.cycle.more_body
            super().data_received(data)
            if self.cycle is not cycle:
                self._unparsed = 0
            elif is_whole:
                self._began = self._began if self._unparsed else self.loop.time()
                self._unparsed += len(data)
                if self._unparsed > MAX_HEADER_BYTES:
                    self._refuse(b"431 Request Header Fields Too Large")

        def pause_writing(self) -> None:
            self._is_paused, self._moved = True, self.loop.time()
            super().pause_writing()

        def resume_writing(self) -> None:
            self._is_paused = False
            super().resume_writing()

        def on_response_complete(self) -> None:
            self._heard = self.loop.time()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _check_silence(self) -> None:
            now = self.loop.time()
            if self._is_unread_for(now) > limits.unread_s:
                self.transport.abort()  # what was written is not waited for
                return
            if not self._is_answering() and self._unparsed and now - self._began > limits.header_s:
                self._refuse(b"408 Request Timeout")
            elif not self._is_answering() and not self._unparsed and now - self._heard > limits.idle_s:
                self.transport.close()
            self._timer = self.loop.call_later(interval_s, self._check_silence)

        def _is_unread_for(self, now: float) -> float:
            """How long the client has read nothing of an answer that waits for it."""
            unread = self.transport.get_write_buffer_size()
            if unread < self._unread or not (self._is_paused or self.transport.is_closing()):
                self._moved = now
            self._unread = unread
            return now - self._moved if unread else 0.0

        def _refuse(self, status: bytes) -> None:
            if not self._is_answering():
                self.transport.write(_REFUSAL % status)
            self.transport.close()

    return LimitedProtocol


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process have as many connections as it was told, as far as the system's hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted + 256 if hard == resource.RLIM_INFINITY else min(wanted + 256, hard)
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
