"""Messages between a server, or the command line, and the first rank of a replica: JSON, one a line, over a Unix socket. Nothing is pickled."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

from meshwright.serve.requests import SamplingParams, TokenEvent, TokenLogprobs

_MAX_LINE_BYTES = 1 << 26


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
