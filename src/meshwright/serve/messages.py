"""Messages between a server, or the command line, and the first rank of a replica: JSON, one a line, over a socket. Nothing is pickled.

[Note: channels]
A channel is the path of a Unix socket in a private folder where both sides are on one machine, or tcp://HOST:PORT/SECRET. Over TCP the rank sends the
secret first, in a line of its own: whoever else connects is not listened to.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import RunError
from meshwright.serve.requests import SamplingParams, TokenEvent, TokenLogprobs

_MAX_LINE_BYTES = 1 << 26


_TCP = "tcp://"
_CONNECT_S = 60.0


def tcp_channel(host: str, port: int, secret: str) -> str:
    return f"{_TCP}{host}:{port}/{secret}"


def connect_channel(channel: str) -> socket.socket:
    """A rank's side of a channel; see [Note: channels]."""
    if not channel.startswith(_TCP):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(channel)
        return peer
    address, _, secret = channel.removeprefix(_TCP).partition("/")
    host, _, port = address.rpartition(":")
    try:
        peer = socket.create_connection((host, int(port)), _CONNECT_S)
    except OSError as error:
        raise RunError(f"this rank cannot reach the server at {address}: {(error.strerror or str(error)).lower()}") from None
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(secret.encode() + b"\n")
    return peer


class LineSocket:
    """A connected socket that carries one JSON object a line."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._buffer = peer, b""

    def send(self, message: Mapping[str, Any]) -> None:
        self._peer.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """The messages that have come; waits for the first for at most so long (None: for ever). EOFError when the other side has closed."""
        if b"\n" not in self._buffer:
            if not select.select([self._peer], [], [], timeout_s)[0]:
                return []
            part = self._peer.recv(1 << 20)
            if not part:
                raise EOFError
            self._buffer += part
        while select.select([self._peer], [], [], 0)[0] and (part := self._peer.recv(1 << 20)):
            self._buffer += part
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > _MAX_LINE_BYTES:
            raise EOFError
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._peer.close()


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """Only what is not a default."""
    return {name: value for name, value in vars(params).items() if value != getattr(SamplingParams, name)}


def decode_params(data: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{**data, "stop_tokens": tuple(data.get("stop_tokens", ()))})


def encode_event(event: TokenEvent) -> list[Any]:
    top = event.logprobs and [event.logprobs.logprob, event.logprobs.top]
    return [event.request, event.token, event.finish, top, event.error, event.reused]


def decode_event(data: list[Any]) -> TokenEvent:
    request, token, finish, top, error, reused = data
    logprobs = TokenLogprobs(top[0], tuple((int(t), float(p)) for t, p in top[1])) if top else None
    return TokenEvent(request, token, finish, logprobs, error, reused)
