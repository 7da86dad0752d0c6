"""Messages that nobody waits for: a thread looks after them, so that they move on meanwhile.

Waking a thread that has nothing to do costs as much as a message of some MB does: it runs where its rank does, and takes Python's lock and its core
just when these are needed. So nobody wakes it to tell it when to look. Linux keeps the time in a timer that a thread can wait for (timerfd), and
setting it again before it goes off wakes nobody: while messages are waited for soon after they are begun, the thread sleeps.

Whether a message needs it depends on the MPI and on what lies between the ranks. Where one process may read another's memory the receiver copies a
message by itself. Elsewhere the sender hands over piece by piece, and only when it is inside MPI: a receiver that waits would wait for as long as the
sender computes. So the thread stirs (`quick.c`): it has MPI move what it can, and sees by its own time whether that was something. As long as it is,
it comes sooner and naps less.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

_MONOTONIC, _CLOSE_ON_EXEC = 1, 0o2000000
_AT_ONCE = 1e-9  # 0 would turn a timer off
_COUNT_BYTES = 8  # what a timer that has gone off is read as
AFTER_S = 2e-3  # until the first message is looked after: by then most have been waited for
SOON_S = 2e-4  # the same, and the longest between two looks, while looking helps
_SHORTEST_S, _LONGEST_S = 50e-6, 2e-3  # between two looks


class Followed(Protocol):
    """What there is to know of a message."""

    @property
    def done(self) -> bool: ...

    def look(self) -> bool:
        """Move it on; True when it is over."""


class Alarm:
    """For one thread that waits and any that set it. What is set while nobody waits is not lost."""

    __slots__ = ("__weakref__", "_at", "_said", "number")

    def __init__(self) -> None:
        self.number = -1 if _libc() is None else int(_libc().timerfd_create(_MONOTONIC, _CLOSE_ON_EXEC))  # of the timer, -1 without one
        if self.number >= 0:
            weakref.finalize(self, os.close, self.number)
        self._at: float | None = None
        self._said = threading.Condition()

    def set(self, seconds: float) -> None:
        """So far from now, whatever was set before."""
        if self.number >= 0:
            _libc().timerfd_settime(self.number, 0, _once(seconds), None)
            return
        with self._said:
            self._at = time.monotonic() + seconds
            self._said.notify()

    def wait(self) -> None:
        if self.number >= 0:
            os.read(self.number, _COUNT_BYTES)
            return
        with self._said:
            while self._at is None or (left_s := self._at - time.monotonic()) > 0:
                self._said.wait(None if self._at is None else left_s)
            self._at = None


class Post:
    """The thread that looks after messages that nobody waits for. It is not woken for those that are waited for before it would look."""

    # What is compiled (quick.c) does what `follow` and `leave` do.
    __slots__ = ("_ending", "_thread", "alarm", "helped", "helps", "stir", "under_way")

    def __init__(self) -> None:
        self.under_way: set[Followed] = set()  # and nobody waits for them
        self.helped = False  # somebody is inside MPI, which moves everybody's messages on
        self.helps = False  # looking has moved something on lately
        self.stir: Callable[[set[Followed], float], bool] | None = None  # after a nap; True if something came of it
        self.alarm = Alarm()
        self._thread: threading.Thread | None = None
        self._ending = False

    def follow(self, message: Followed) -> None:
        self.under_way.add(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpi messages", daemon=True)
            self._thread.start()
        if len(self.under_way) == 1:
            self.alarm.set(SOON_S if self.helps else AFTER_S)

    def leave(self, message: Followed) -> None:
        """Somebody waits for it."""
        self.under_way.discard(message)

    def close(self) -> None:
        if self._thread is not None:
            self._ending = True
            self.alarm.set(0)
            self._thread.join()
            self._thread, self._ending = None, False

    def _serve(self) -> None:
        while not self._ending:
            self.alarm.wait()
            self._look()

    def _look(self) -> None:
        """Until all of them are over or somebody waits for them."""
        nap, known, helps = _SHORTEST_S, frozenset[Followed](), False
        while self.under_way and not self._ending:
            now = frozenset(self.under_way)
            for message in now:
                if message.done or (not self.helped and message.look()):
                    self.under_way.discard(message)
            stirred = self._stir(nap)
            helps = helps or stirred
            nap = _SHORTEST_S if stirred or now - known else min(2 * nap, SOON_S if helps or self.helps else _LONGEST_S)
            known = now
        self.helps = helps

    def _stir(self, nap: float) -> bool:
        if self.stir is not None and not self.helped:
            return self.stir(self.under_way, nap)
        time.sleep(nap)
        return False


@cache
def _libc() -> Any:
    """None where it has no such timers."""
    libc: Any = ctypes.CDLL(None)
    try:
        libc.timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    except AttributeError:
        return None
    return libc


@cache
def _once(seconds: float) -> Any:
    """As libc describes it: seconds and nanoseconds of how often, which is never, and of when."""
    whole, part = divmod(max(seconds, _AT_ONCE), 1.0)
    return (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9 + 0.5))
