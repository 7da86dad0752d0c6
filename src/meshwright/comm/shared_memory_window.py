"""A shared-memory window: memory shared by the ranks of a group on one node, and the semaphores that synchronize access to it.

[Note: windows]
The memory is anonymous. Rank 0 creates it (memfd) and the others open it through /proc while all ranks wait. So the kernel frees it with the last
process that maps it, however that process ends, and it does not count against /dev/shm, which containers keep small. Signals are POSIX semaphores
in that memory, one for each ordered pair of ranks and kind: they are memory barriers as locks are, and a rank that waits long sleeps.

Each rank holds a file lock on one byte of the window. The kernel releases the lock when the process ends for any reason, which waiting ranks check.
These locks belong to the process: its forked children, such as data-loader workers, do not keep them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.wire_format import warn_fallback
from meshwright.core.comm import Comm
from meshwright.core.errors import RunError

SLOTS = 4  # per rank: one being filled, one being reduced, one being read, and one that peers may still be reading ([Note: slots])
SIGNAL_KINDS = SLOT_FILLED, SLOT_REDUCED = 0, 1  # signals: the sender's slot holds its chunks; it holds a sum
_MAX_CHUNK_BYTES, _MAX_WINDOW_BYTES = 1 << 21, 1 << 26  # bytes of one rank's chunk in a slot, and of all slots
_CACHE_LINE_BYTES = 64  # bytes from one semaphore to the next, so that no two share a cache line
_SPIN_S, _LIVENESS_CHECK_S = 300e-6, 0.25  # how long a rank polls before it sleeps; how often it then checks that the peer is alive
_MAX_CACHED_VIEWS = 4096
_PAGE_BYTES = 4096
_OPENED, _NOT_OPENED = b"\1", b"\0"  # whether a rank could open the window


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemoryWindow:
    """One rank's mapping of the window. Signals are counted: each one sent is received once."""

    def __init__(self, fd: int, world_ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self.size, self.rank, self._world_ranks, self._timeout_s = len(world_ranks), rank, tuple(world_ranks), timeout_s
        self.chunk_bytes = chunk_bytes_for(self.size)
        self._fd = fd
        self._mmap = mmap.mmap(fd, window_bytes(self.size))
        weakref.finalize(self, os.close, fd)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._libc: Any = _libc()
        self._buffer = ctypes.c_char.from_buffer(self._mmap)
        self._base_address = ctypes.addressof(self._buffer)
        self._bytes = torch.frombuffer(self._mmap, dtype=torch.uint8)
        first, length = _semaphore_bytes(self.size), self.chunk_bytes * self.size
        self._slots = [[first + (rank * SLOTS + slot) * length for slot in range(SLOTS)] for rank in range(self.size)]  # byte offset of each slot
        self.memcpy: Callable[[int, int, int], object] = self._libc.memcpy  # (destination, source, bytes); releases the GIL
        self.peers = [(rank + step) % self.size for step in range(1, self.size)]
        self._outgoing_semaphores = [[self._semaphore_address(kind, peer, rank) for peer in self.peers] for kind in SIGNAL_KINDS]
        self._incoming_semaphores = [[(peer, self._semaphore_address(kind, rank, peer)) for peer in self.peers] for kind in SIGNAL_KINDS]
        self._failure = ""
        self._steps = 0
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def reserve_steps(self, steps: int) -> int:
        """Reserve `steps` step numbers and return the first. All ranks count in the same way, from the first call on."""
        first = self._steps
        self._steps += steps
        return first

    def slot_address(self, rank: int, step: int) -> int:
        """The address of a rank's slot in a step."""
        return self._base_address + self._slots[rank][step % SLOTS]

    def view(self, rank: int, step: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A range of a rank's slot as a tensor. Tensors are cached: creating one costs more than reducing a small one."""
        start = self._slots[rank][step % SLOTS] + offset
        view = self._views.get((start, numel, dtype))
        if view is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            view = self._views[start, numel, dtype] = self._bytes[start : start + numel * dtype.itemsize].view(dtype)
        return view

    def init_semaphores(self) -> None:
        """Initialise all semaphores. Called by the rank that created the memory, before the other ranks use it."""
        for kind, receiver, sender in product(SIGNAL_KINDS, range(self.size), range(self.size)):
            if self._libc.sem_init(self._semaphore_address(kind, receiver, sender), 1, 0):
                raise OSError("this system has no semaphores between processes")

    def signal_peers(self, kind: int) -> None:
        """Signal every other rank."""
        post = self._libc.sem_post
        for semaphore in self._outgoing_semaphores[kind]:
            post(semaphore)

    def await_peers(self, kind: int, operation: str) -> None:
        """Wait for a signal from every other rank."""
        trywait = self._libc.sem_trywait
        for peer, semaphore in self._incoming_semaphores[kind]:
            if trywait(semaphore):
                self._await_peer(peer, semaphore, operation)

    def _await_peer(self, peer: int, semaphore: int, operation: str) -> None:
        """Poll for a moment, yielding the core, then sleep. Raises RunError if the peer has exited or the timeout has passed."""
        trywait, now = self._libc.sem_trywait, time.monotonic
        spin_end = now() + _SPIN_S
        while now() < spin_end:
            os.sched_yield()
            if not trywait(semaphore):
                return
        deadline = now() + self._timeout_s
        while not self._failure:
            has_exited = self._has_exited(peer)  # checked before the wait: a signal that it sent before it exited still counts
            wake = time.time() + _LIVENESS_CHECK_S
            if not self._libc.sem_timedwait(semaphore, ctypes.byref(_Timespec(int(wake), int(wake % 1 * 1e9)))):
                return
            if has_exited:
                self._failure = f"rank {self._world_ranks[peer]} has ended while others waited for it at {operation}"
            elif now() > deadline:
                self._failure = f"Timed out waiting {self._timeout_s:.0f} s for rank {self._world_ranks[peer]} at {operation}"
        raise RunError(self._failure)

    def _has_exited(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, peer)
        return True

    def _semaphore_address(self, kind: int, receiver: int, sender: int) -> int:
        return self._base_address + ((kind * self.size + receiver) * self.size + sender) * _CACHE_LINE_BYTES


@cache
def _libc() -> Any:
    """The C library, with argument types declared so that integers pass as addresses and sizes."""
    libc: Any = ctypes.CDLL(None)
    address, count = ctypes.c_void_p, ctypes.c_size_t
    libc.memcpy.argtypes, libc.memcpy.restype = (address, address, count), None
    libc.sem_init.argtypes = (address, ctypes.c_int, ctypes.c_uint)
    libc.sem_post.argtypes = libc.sem_trywait.argtypes = (address,)
    libc.sem_timedwait.argtypes = (address, address)
    return libc


def chunk_bytes_for(num_ranks: int) -> int:
    """Bytes of a chunk, in whole pages, such that all slots together stay within `_MAX_WINDOW_BYTES`."""
    return max(min(_MAX_CHUNK_BYTES, _MAX_WINDOW_BYTES // (SLOTS * num_ranks * num_ranks)) // _PAGE_BYTES, 1) * _PAGE_BYTES


def window_bytes(num_ranks: int) -> int:
    return _semaphore_bytes(num_ranks) + chunk_bytes_for(num_ranks) * SLOTS * num_ranks * num_ranks


def _semaphore_bytes(num_ranks: int) -> int:
    size = len(SIGNAL_KINDS) * num_ranks * num_ranks * _CACHE_LINE_BYTES
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def open_window(comm: Comm, world_ranks: Sequence[int], timeout_s: float) -> SharedMemoryWindow | None:
    """Open the window of a group whose global ranks are `world_ranks`. None, with a warning, if the ranks cannot share memory. Collective."""

    def gather(message: bytes) -> list[bytes]:
        gathered = torch.zeros(comm.size * len(message), dtype=torch.uint8)
        comm.all_gather(gathered, torch.frombuffer(bytearray(message), dtype=torch.uint8), "window").wait()
        return [bytes(part.tolist()) for part in gathered.split(len(message))]

    own_fd, reason = create_shared_memory(len(world_ranks)) if comm.rank == 0 else (-1, "")
    handshakes = gather(_handshake(own_fd, bool(reason)))
    pid, fd = (int.from_bytes(handshakes[0][start : start + 8], "little") for start in (32, 40))
    window: SharedMemoryWindow | None = None
    if len({handshake[:32] for handshake in handshakes}) > 1:
        reason = "they are on several nodes" if comm.rank == 0 else ""
    elif fd and not reason:
        window, reason = _map_window(own_fd, f"/proc/{pid}/fd/{fd}", world_ranks, comm.rank, timeout_s)
    if all(answer == _OPENED for answer in gather(_OPENED if window is not None else _NOT_OPENED)):
        return window
    if reason:
        ranks = ", ".join(map(str, world_ranks))
        warn_fallback("the node", f"memory that ranks {ranks} can share ({reason})", "their collectives use messages", 0)
    return None


def create_shared_memory(num_ranks: int) -> tuple[int, str]:
    """A file descriptor and "", or -1 and the reason. The memory is allocated here: if it were missing, the first write would kill the process."""
    if not sys.platform.startswith("linux"):
        return -1, "this needs Linux"
    fd = os.memfd_create("meshwright")
    try:
        os.posix_fallocate(fd, 0, window_bytes(num_ranks))
    except OSError as error:
        os.close(fd)
        return -1, f"{window_bytes(num_ranks):,} bytes: {error.strerror}"
    return fd, ""


def _map_window(fd: int, path: str, world_ranks: Sequence[int], rank: int, timeout_s: float) -> tuple[SharedMemoryWindow | None, str]:
    try:
        window = SharedMemoryWindow(fd if fd >= 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC), world_ranks, rank, timeout_s)
        if fd >= 0:
            window.init_semaphores()
    except (OSError, AttributeError) as error:
        return None, str(error)
    return window, ""


def _handshake(fd: int, failed: bool) -> bytes:
    """A hash of the rank's host and PID namespace, its pid, and its file descriptor if it created the memory. Ranks of one node have equal hashes."""
    reads: tuple[Callable[[], object], ...] = (Path("/proc/sys/kernel/random/boot_id").read_text, Path("/proc/self/ns/pid").readlink)
    facts = [socket.gethostname(), *map(_text_or_empty, reads), str(os.geteuid())]
    node_hash = hashlib.sha256("\0".join(facts).encode()).digest()
    return node_hash + os.getpid().to_bytes(8, "little") + (0 if failed or fd < 0 else fd).to_bytes(8, "little")


def _text_or_empty(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except OSError:
        return ""
