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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.wire import say
from meshwright.core.comm import Comm
from meshwright.core.errors import RunError

SLOTS = 4  # of each rank: one is filled, one summed, one read, and one is free for the next
KINDS = FULL, SUMMED, READ = 0, 1, 2  # signals: my slot holds my parts, my slot holds a sum, I have read your slot
_PIECE, _MOST = 1 << 21, 1 << 26  # bytes of one rank's part of a slot, and of the whole window
_LINE = 64  # bytes between semaphores, so that no two share a line of the cache
_SPINS, _SLICE_S = 60, 0.25  # looks before a rank sleeps; how long until it sees whether the other is still there
_PIECE_UNIT = 4096
_HELLO = 48  # bytes in which a rank says where it is


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
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._held = ctypes.c_char.from_buffer(self._map)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)[_signal_bytes(self.size) :]
        self._slots = [list(of_rank.split(self.piece * self.size)) for of_rank in whole.split(self.piece * self.size * SLOTS)]
        self.others = [(me + step) % self.size for step in range(1, self.size)]
        self._to = [[self._signal(kind, peer, me) for peer in self.others] for kind in KINDS]
        self._from = [[(peer, self._signal(kind, me, peer)) for peer in self.others] for kind in KINDS]
        self._broken = ""
        self._steps = 0
        self._views: dict[tuple[int, torch.dtype], list[list[list[torch.Tensor]]]] = {}

    def begin(self, steps: int) -> int:
        """The number of the first of so many steps; all ranks count alike, from the first call on."""
        first = self._steps
        self._steps += steps
        return first

    def places(self, rank: int, step: int, room: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The slot of a rank in a step, cut into places of `room` bytes."""
        if (room, dtype) not in self._views:
            numel = room // dtype.itemsize
            self._views[room, dtype] = [[list(slot.view(dtype).split(numel)) for slot in of_rank] for of_rank in self._slots]
        return self._views[room, dtype][rank][step % SLOTS]

    def prepare(self) -> None:
        """By the rank that made it, before others look."""
        for kind in KINDS:
            for to in range(self.size):
                for sender in range(self.size):
                    if self._libc.sem_init(self._signal(kind, to, sender), 1, 0):
                        raise OSError(ctypes.get_errno(), "sem_init")

    def tell(self, kind: int) -> None:
        """Every other rank."""
        for signal in self._to[kind]:
            self._libc.sem_post(signal)

    def hear(self, kind: int, what: str) -> None:
        """Every other rank."""
        for peer, signal in self._from[kind]:
            self._wait(peer, signal, what)

    def _wait(self, peer: int, signal: Any, what: str) -> None:
        """A moment awake, in which whoever needs the core may have it; then asleep."""
        trywait = self._libc.sem_trywait
        for _ in range(_SPINS):
            if not trywait(signal):
                return
            os.sched_yield()
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

    def _signal(self, kind: int, to: int, sender: int) -> Any:
        return ctypes.c_void_p(ctypes.addressof(self._held) + ((kind * self.size + to) * self.size + sender) * _LINE)


def piece_bytes(ranks: int) -> int:
    """So that all slots together stay within bounds; whole pages."""
    return max(min(_PIECE, _MOST // (SLOTS * ranks * ranks)) // _PIECE_UNIT, 1) * _PIECE_UNIT


def window_bytes(ranks: int) -> int:
    return _signal_bytes(ranks) + piece_bytes(ranks) * SLOTS * ranks * ranks


def _signal_bytes(ranks: int) -> int:
    size = len(KINDS) * ranks * ranks * _LINE
    return -(-size // _PIECE_UNIT) * _PIECE_UNIT


def open_window(comm: Comm, members: Sequence[int], timeout_s: float) -> Window | None:
    """The window of a group, `members` being its ranks in the world; None where they cannot share memory, which is said. Collective."""
    memory, mine = -1, ""
    if comm.rank == 0:
        memory, mine = make_memory(comm.size)
    hello = _hello(memory, bool(mine))
    every = torch.zeros(comm.size * _HELLO, dtype=torch.uint8)
    comm.all_gather(every, torch.frombuffer(bytearray(hello), dtype=torch.uint8), "window").wait()
    words = [bytes(word.tolist()) for word in every.split(_HELLO)]
    pid, fd = (int.from_bytes(words[0][at : at + 8], "little") for at in (32, 40))
    window: Window | None = None
    if len({word[:32] for word in words}) > 1:
        mine = "they are on several nodes" if comm.rank == 0 else ""
    elif fd and not mine:
        window, mine = _opened(memory, f"/proc/{pid}/fd/{fd}", members, comm.rank, timeout_s)
    failed = torch.tensor([float(window is None)])
    comm.all_reduce(failed, "window", "max").wait()
    if failed.item():
        if mine:
            say("the node", f"memory that ranks {', '.join(map(str, members))} share ({mine})", "their calls go by messages", 0)
        return None
    return window


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
