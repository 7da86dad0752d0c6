"""The worker process: receives a call, executes it, sends back its result or a Fault, and waits for the next."""

from __future__ import annotations

import importlib
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.event import Fault

# Errors that only report a lost peer: the cause is on another rank.
_SECONDARY_ERRORS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Application timeout caused", "Timed out waiting", "recvValue failed",
    "has ended while others waited", "wait timeout after", "connectFullMesh failed",
)  # fmt: skip
# Words of an error that says a limit was reached → what to change. The traceback would only show which allocation came last.
_LIMITS = {
    "can't allocate memory": "use a smaller --global-batch, --set micro_batches=2 or --set recompute=full, or raise the limit (ulimit -v)",
    "out of memory": "use a smaller --global-batch, --set micro_batches=2 or --set recompute=full",
    "Too many open files": "raise the limit (ulimit -n), or start fewer ranks with --nproc",
}


def send_message(peer: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    peer.sendall(struct.pack("!Q", len(data)) + data)


def receive_message(peer: socket.socket) -> Any:
    """The next value; EOFError when the peer has closed."""
    (size,) = struct.unpack("!Q", _receive_exactly(peer, 8))
    return pickle.loads(_receive_exactly(peer, size))


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = peer.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve_calls(peer: socket.socket) -> int:
    """Answer calls until the supervisor closes the socket. The exit code is 0 unless the last call failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    while True:
        try:
            target, kwargs = receive_message(peer)
        except EOFError:
            return 0
        rank = int(kwargs.get("rank", 0))
        try:
            module, _, name = target.partition(":")
            answer = ("done", getattr(importlib.import_module(module), name)(**kwargs))
        except Exception as error:
            answer = ("failed", describe_fault(error, rank))
        sys.stdout.flush()
        try:
            send_message(peer, answer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            send_message(peer, ("failed", describe_fault(error, rank)))


def describe_fault(error: BaseException, rank: int) -> Fault:
    text, kind = str(error), type(error).__name__
    if isinstance(error, MemoryError):
        text = f"out of memory {text}".strip()
    message = next((line for line in text.splitlines() if line.strip()), kind)
    for words, advice in _LIMITS.items():
        if words in text:
            return Fault(time.time(), rank, kind, f"{message}: {advice}")
    # A user's mistake needs no traceback; anything else does.
    trace = "" if isinstance(error, MeshwrightError) else "".join(traceback.format_exception(error))
    secondary = any(words in text for words in _SECONDARY_ERRORS) or getattr(error, "secondary", False)
    return Fault(time.time(), rank, kind, message, trace, secondary=secondary, rollback=getattr(error, "rollback", False))
