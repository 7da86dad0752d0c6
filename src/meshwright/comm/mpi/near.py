"""Large collectives of ranks that share a node: through memory of their own instead of MPI's, where that is quicker.

The memory is opened at a group's first large call, in which everybody is. What decides is what all ranks know: the operation, its bytes, the
group. So gathers to one rank and all-to-alls, whose sizes a rank may know in part only, always go by MPI.

[Note: trials]
Which way is quicker depends on the machine: of 16 MB, two ranks' sum through shared memory takes 0.9 of MPI's time on one and 1.6 on another. So the
first calls of an operation and size go the two ways, a few in a row and in turn, and the rest goes the quicker one. Ranks meet before a call that is
tried, since who came early would have waited, or given before the others came to take; and it takes as long as the rank that it takes longest. (From
when the last rank begins is not enough: where ranks share a core, others have done their part by then.) But no clock may decide which bits come out:
what is moved, sums of two and sums that are scattered are the same either way; other sums of more depend on the order, and go by their size.
What one group has settled holds for others of the same ranks, from their first large call on, in which they compare what they know: one rank may have
come further in another group than the next one has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.comm.mpi import library
from meshwright.comm.mpi.reductions import Reduction
from meshwright.comm.window import Window, window_among
from meshwright.core.comm import TRIES

NEVER = 1 << 62
ELSEWHERE = -1  # bytes of what the window cannot hold: of a device, or that torch cannot add up
_SLACK_S = 60.0  # by which the watchdog, which knows who is missing, comes before the window's own clock
# Bytes of the whole tensor, for each rank of the group, from which it may be quicker: with every one more there is somebody to wait for.
FROM = 1 << 18
# The same of sums that go by their size. Of 1 MB, four ranks on two cores take 0.7 to 1.1 of MPI's time on a Neoverse N1 and 1.1 to 1.4 on a Xeon; of
# 2 MB the Xeon takes 0.95 to 1.2, of 4 MB 0.5 to 1.05.
SUMS_FROM = 1 << 19
# Calls of a trial: so many one way in a row, `TRIES` in all. The first ones touch memory that nobody has touched yet, so the second half counts; and
# the first of a row finds nothing of its own in the caches.
_ROW = 4
_WORTH = 0.9  # of MPI's time: the window's varies more, and what is settled holds as long as the group does
_METHOD_S = 10e-6  # that a trial does not see: MPI's calls are compiled (`quick.py`), and the way to the window is Python's


_Key = tuple[str, int]  # an operation and the power of two that its bytes lie below
_settled: dict[tuple[int, ...], dict[_Key, bool]] = {}  # by ranks: what groups of them have come to, true for the window


@dataclass
class _Trial:
    """Of one operation and size: calls by the window and by MPI, in turn."""

    key: _Key
    calls: list[float] = field(default_factory=list)  # how long each took this rank
    begun: float = 0.0


class Near:
    """The window of one group, once it was needed; asked by whoever holds the group's lane."""

    def __init__(self, comm: Any, members: tuple[int, ...]) -> None:
        self._comm, self._members = comm, members
        self._window: Window | None = None
        self._tried = False
        self._trials: dict[_Key, _Trial] = {}
        self._under_way: _Trial | None = None
        self.settled: dict[_Key, Window | None] = {}  # what trials came to
        self.least = FROM * len(members) if len(members) > 1 else NEVER  # bytes below which there is nothing to ask
        self.least_sum = SUMS_FROM * len(members) if len(members) > 1 else NEVER  # nor for what is not alike

    def alike(self, op: str, way: Reduction) -> bool:
        """Whether both ways give the same bits: a + b is b + a, and what is scattered is added up in one order ([Note: pairs])."""
        return (len(self._members) == 2 or op == "reduce_scatter") and way.combine is torch.add

    def window(self, op: str, size: int, alike: bool) -> Window | None:
        """None where a call of so many bytes goes by MPI, which is so for `ELSEWHERE`. Collective when it is the first that does not, or one that is
        tried. `alike` says that both ways give the same bits. `done` is to be called when the call is over."""
        self._under_way = None  # a call that failed
        if size < (self.least if alike else self.least_sum):
            return None
        key = op, size.bit_length()
        if alike and key in self.settled:
            return self.settled[key]
        if not self._tried:
            self._open()
        if self._window is None or not alike:
            return self._window
        if key in self.settled:
            return self.settled[key]
        trial = self._under_way = self._trials.setdefault(key, _Trial(key))
        self._comm.Barrier()
        trial.begun = time.monotonic()
        return self._window if _by_window(len(trial.calls)) else None

    def _open(self) -> None:
        self._tried = True
        self._window, _ = window_among(self._comm.allgather, self._comm.Get_rank(), self._members, library.timeout_s + _SLACK_S)
        if self._window is not None:
            known = dict(_settled.get(self._members, {}))
            every = self._comm.allgather(known)
            self.settled.update({key: self._window if yes else None for key, yes in known.items() if all(other.get(key) is yes for other in every)})

    def done(self) -> None:
        """The call that `window` was asked about is over. Collective when it is the last of a trial."""
        trial = self._under_way
        if trial is None:
            return
        self._under_way = None
        trial.calls.append(time.monotonic() - trial.begun)
        if len(trial.calls) == TRIES:
            took = [max(every) for every in zip(*self._comm.allgather(trial.calls), strict=True)]
            by_window, by_mpi = ([took[n] for n in range(TRIES // 2, TRIES) if n % _ROW and _by_window(n) is way] for way in (True, False))
            quicker = _undisturbed(by_window) + _METHOD_S <= _WORTH * _undisturbed(by_mpi)
            self.settled[trial.key] = self._window if quicker else None
            _settled.setdefault(self._members, {})[trial.key] = quicker

    def close(self) -> None:
        self._window, self._tried, self.least, self.least_sum = None, True, NEVER, NEVER
        self.settled.clear()


def _undisturbed(times: list[float]) -> float:
    """What else goes on only makes a call longer: a quarter of the calls were quicker."""
    return sorted(times)[len(times) // 4]


def _by_window(number: int) -> bool:
    """Which way a trial's call goes."""
    return number // _ROW % 2 == 0
