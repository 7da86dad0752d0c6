"""A window: memory that the ranks of a group share because they lie on one node, and the signals by which they take turns in it.

[Note: windows]
The memory has no name. The first rank makes it (memfd) and the others open it through /proc while everyone waits, so it is gone with the last
process that maps it, however that one ends; and it is not counted against /dev/shm, which containers keep small. Signals are POSIX semaphores in
that memory, one from each rank to each other one: they order memory between processors as locks do, and who waits long sleeps.

A rank that ends, in whichever way, loses the lock that it holds on a byte of the window; who waits for it sees that. Locks of this kind are a
process's own: what it forks, such as the workers of a data loader, does not keep them.
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
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.wire import say
from meshwright.core.comm import Comm
from meshwright.core.errors import RunError

SLOTS = 4  # of each rank: one is filled, one summed, one read, and one may still be read by others ([Note: slots])
KINDS = FULL, SUMMED = 0, 1  # signals: my slot holds my parts, my slot holds a sum
_PIECE, _MOST = 1 << 21, 1 << 26  # bytes of one rank's part of a slot, and of the whole window
_LINE = 64  # bytes between semaphores, so that no two share a line of the cache
_AWAKE_S, _SLICE_S = 300e-6, 0.25  # how long a rank looks before it sleeps; how long until it sees whether the other is still there
_VIEWS = 4096  # kept
_PIECE_UNIT = 4096
_THERE, _NOT = b"\1", b"\0"  # whether a rank could open it


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Window:
    """As one rank sees it. Signals are counted: each one sent is heard once."""

    def __init__(self, memory: int, members: Sequence[int], me: int, timeout_s: float) -> None:
        self.size, self.me, self._members, self._timeout_s = len(members), me, tuple(members), timeout_s
        self.piece = piece_bytes(self.size)
        self._memory = memory
        self._map = mmap.mmap(memory, window_bytes(self.size))
        weakref.finalize(self, os.close, memory)
        fcntl.lockf(memory, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, me)
        self._libc: Any = _libc()
        self._held = ctypes.c_char.from_buffer(self._map)
        self._start = ctypes.addressof(self._held)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        first, length = _signal_bytes(self.size), self.piece * self.size
        self._slots = [[first + (rank * SLOTS + slot) * length for slot in range(SLOTS)] for rank in range(self.size)]  # where each begins
        self.copy: Callable[[int, int, int], object] = self._libc.memcpy  # to an address from another, so many bytes; without Python's lock
        self.others = [(me + step) % self.size for step in range(1, self.size)]
        self._to = [[self._signal(kind, peer, me) for peer in self.others] for kind in KINDS]
        self._from = [[(peer, self._signal(kind, me, peer)) for peer in self.others] for kind in KINDS]
        self._broken = ""
        self._steps = 0
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def begin(self, steps: int) -> int:
        """The number of the first of so many steps; all ranks count alike, from the first call on."""
        first = self._steps
        self._steps += steps
        return first

    def slot(self, rank: int, step: int) -> int:
        """The address of a rank's slot in a step."""
        return self._start + self._slots[rank][step % SLOTS]

    def view(self, rank: int, step: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A place in a rank's slot as a tensor. Tensors are kept: making one costs more than a small one's sum."""
        at = self._slots[rank][step % SLOTS] + offset
        found = self._views.get((at, numel, dtype))
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            found = self._views[at, numel, dtype] = self._bytes[at : at + numel * dtype.itemsize].view(dtype)
        return found

    def prepare(self) -> None:
        """By the rank that made it, before others look."""
        for kind in KINDS:
            for to in range(self.size):
                for sender in range(self.size):
                    if self._libc.sem_init(self._signal(kind, to, sender), 1, 0):
                        raise OSError("it has no semaphores between processes")

    def tell(self, kind: int) -> None:
        """Every other rank."""
        post = self._libc.sem_post
        for signal in self._to[kind]:
            post(signal)

    def hear(self, kind: int, what: str) -> None:
        """Every other rank."""
        trywait = self._libc.sem_trywait
        for peer, signal in self._from[kind]:
            if trywait(signal):
                self._wait(peer, signal, what)

    def _wait(self, peer: int, signal: int, what: str) -> None:
        """A moment awake, in which whoever needs the core may have it; then asleep."""
        trywait, give, now = self._libc.sem_trywait, os.sched_yield, time.monotonic
        end_s = now() + _AWAKE_S
        while now() < end_s:
            give()
            if not trywait(signal):
                return
        until = time.monotonic() + self._timeout_s
        while not self._broken:
            gone = self._gone(peer)  # before we look: what it sent before it ended still counts
            end = time.time() + _SLICE_S
            if not self._libc.sem_timedwait(signal, ctypes.byref(_Time(int(end), int(end % 1 * 1e9)))):
                return
            if gone:
                self._broken = f"rank {self._members[peer]} has ended while others waited for it at {what}"
            elif time.monotonic() > until:
                self._broken = f"Timed out waiting {self._timeout_s:.0f} s for rank {self._members[peer]} at {what}"
        raise RunError(self._broken)

    def _gone(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._memory, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False
        fcntl.lockf(self._memory, fcntl.LOCK_UN, 1, peer)
        return True

    def _signal(self, kind: int, to: int, sender: int) -> int:
        return self._start + ((kind * self.size + to) * self.size + sender) * _LINE


@cache
def _libc() -> Any:
    """With the types of what is called, so that numbers are handed over as they are."""
    libc: Any = ctypes.CDLL(None)
    address, count = ctypes.c_void_p, ctypes.c_size_t
    libc.memcpy.argtypes, libc.memcpy.restype = (address, address, count), None
    libc.sem_init.argtypes = (address, ctypes.c_int, ctypes.c_uint)
    libc.sem_post.argtypes = libc.sem_trywait.argtypes = (address,)
    libc.sem_timedwait.argtypes = (address, address)
    return libc


def piece_bytes(ranks: int) -> int:
    """So that all slots together stay within bounds; whole pages."""
    return max(min(_PIECE, _MOST // (SLOTS * ranks * ranks)) // _PIECE_UNIT, 1) * _PIECE_UNIT


def window_bytes(ranks: int) -> int:
    return _signal_bytes(ranks) + piece_bytes(ranks) * SLOTS * ranks * ranks


def _signal_bytes(ranks: int) -> int:
    size = len(KINDS) * ranks * ranks * _LINE
    return -(-size // _PIECE_UNIT) * _PIECE_UNIT


def open_window(comm: Comm, members: Sequence[int], timeout_s: float) -> Window | None:
    """The window of a group, `members` being its ranks in the world; None where they cannot share memory, which one line says. Collective."""

    def gather(word: bytes) -> list[bytes]:
        every = torch.zeros(comm.size * len(word), dtype=torch.uint8)
        comm.all_gather(every, torch.frombuffer(bytearray(word), dtype=torch.uint8), "window").wait()
        return [bytes(one.tolist()) for one in every.split(len(word))]

    memory, why = -1, ""
    if comm.rank == 0:
        memory, why = make_memory(len(members))
    words = gather(_hello(memory, bool(why)))
    pid, fd = (int.from_bytes(words[0][at : at + 8], "little") for at in (32, 40))
    window: Window | None = None
    if len({word[:32] for word in words}) > 1:
        why = "they are on several nodes" if comm.rank == 0 else ""
    elif fd and not why:
        window, why = _opened(memory, f"/proc/{pid}/fd/{fd}", members, comm.rank, timeout_s)
    if all(word == _THERE for word in gather(_THERE if window is not None else _NOT)):
        return window
    if why:
        say("the node", f"memory that ranks {', '.join(map(str, members))} share ({why})", "their calls go by messages", 0)
    return None


def make_memory(ranks: int) -> tuple[int, str]:
    """Memory and no complaint, or the other way round. Allotted now: what is missing would end the process when it is first written."""
    if not sys.platform.startswith("linux"):
        return -1, "it takes Linux"
    memory = os.memfd_create("meshwright")
    try:
        os.posix_fallocate(memory, 0, window_bytes(ranks))
    except OSError as error:
        os.close(memory)
        return -1, f"{window_bytes(ranks):,} bytes: {error.strerror}"
    return memory, ""


def _opened(memory: int, path: str, members: Sequence[int], me: int, timeout_s: float) -> tuple[Window | None, str]:
    try:
        mine = memory if memory >= 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        window = Window(mine, members, me, timeout_s)
        if memory >= 0:
            window.prepare()
    except (OSError, AttributeError) as error:
        return None, str(error)
    return window, ""


def _hello(memory: int, failed: bool) -> bytes:
    """Where a rank is, hashed, and where it keeps the memory if it made it. Ranks of one node see the same processes."""
    facts = [socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid"), str(os.geteuid())]
    place = hashlib.sha256("\0".join(facts).encode()).digest()
    return place + os.getpid().to_bytes(8, "little") + (0 if failed or memory < 0 else memory).to_bytes(8, "little")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
