"""Messages that carry arrays: one line of JSON, then the arrays' bytes, one after the other. Nothing is pickled. No torch.

The line has `arrays`, a list of [dtype, shape], and `bytes`, how many bytes follow it.
"""

from __future__ import annotations

import json
import math
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
MAX_LINE_BYTES, MAX_PAYLOAD_BYTES = 1 << 26, 1 << 32
_PART_BYTES = 1 << 20


def encode_message(header: Mapping[str, Any], arrays: Sequence[Array] = ()) -> list[bytes]:
    """The parts of a message, to be sent one after the other."""
    parts = [np.ascontiguousarray(array).tobytes() for array in arrays]
    described = [[array.dtype.name, list(array.shape)] for array in arrays]
    line = {**header, "arrays": described, "bytes": sum(map(len, parts))} if arrays else header
    return [json.dumps(line, separators=(",", ":")).encode() + b"\n", *parts]


def decode_arrays(header: Mapping[str, Any], payload: bytes | bytearray) -> list[Array]:
    """The arrays of a message, which share the payload's memory. ValueError if they do not fit it."""
    found, offset = [], 0
    for name, shape in header.get("arrays", ()):
        if name not in DTYPES:
            raise ValueError(f"no such type of numbers: {name!r}")
        dtype = np.dtype(name)
        count = math.prod(shape)
        found.append(np.frombuffer(payload, dtype, count, offset).reshape(shape))
        offset += count * dtype.itemsize
    if offset != len(payload):
        raise ValueError(f"{len(payload)} bytes came, and the arrays have {offset}")
    return found


def payload_size(header: Mapping[str, Any]) -> int:
    """How many bytes follow a line."""
    size = int(header.get("bytes", 0))
    if not 0 <= size <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return size


class TensorSocket:
    """A connected, blocking socket that carries such messages."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._buffer = peer, b""

    def wait(self, timeout_s: float) -> bool:
        """Whether something has come within so long."""
        return bool(self._buffer) or bool(select.select([self._peer], [], [], timeout_s)[0])

    def receive(self) -> tuple[dict[str, Any], list[Array]]:
        """The next message. EOFError when the other side has closed."""
        while b"\n" not in self._buffer:
            self._buffer += self._receive_some()
            if len(self._buffer) > MAX_LINE_BYTES + _PART_BYTES:
                raise EOFError
        line, _, rest = self._buffer.partition(b"\n")
        header = json.loads(line)
        payload = bytearray(payload_size(header))
        have = min(len(rest), len(payload))
        payload[:have] = rest[:have]
        self._buffer = rest[have:]
        while have < len(payload):
            count = self._peer.recv_into(memoryview(payload)[have:])
            if not count:
                raise EOFError
            have += count
        return header, decode_arrays(header, payload)

    def send(self, header: Mapping[str, Any], arrays: Sequence[Array] = ()) -> None:
        for part in encode_message(header, arrays):
            self._peer.sendall(part)

    def _receive_some(self) -> bytes:
        part = self._peer.recv(_PART_BYTES)
        if not part:
            raise EOFError
        return part
