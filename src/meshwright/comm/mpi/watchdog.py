"""Detects hung collectives. A blocking MPI call cannot be cancelled, so the watchdog prints one line with the missing ranks and ends the job."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from meshwright.comm.mpi import mpi_library
from meshwright.comm.mpi.message_work import Inbox
from meshwright.comm.work_queue import WorkQueue

_POLL_S = 0.05
_GRACE_S = 3.0  # ranks that wait for the same peer time out within this of each other
_WAITING_TAG = 1


@dataclass
class _WatchedQueue:
    queue: weakref.ref[WorkQueue]
    ranks: tuple[int, ...]  # global ranks
    name: str
    sequence_number: int = -1  # last operation seen, and since when: the queue itself keeps no times
    unchanged_since: float = 0.0


class Watchdog:
    """The process's watchdog thread, with its own communicator. It polls the work queues of all groups, and matches received messages."""

    def __init__(self, control: Any, inbox: Inbox) -> None:
        self._control, self._inbox = control, inbox
        self._watched: list[_WatchedQueue] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch_loop, name="mpi watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Called before MPI is finalised."""
        self._stopped.set()
        self._thread.join()

    def watch(self, queue: WorkQueue, ranks: tuple[int, ...]) -> None:
        with self._lock:
            self._watched.append(_WatchedQueue(weakref.ref(queue), ranks, queue.name))

    def _watch_loop(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self._control.iprobe()  # lets MPI progress messages that no call waits for
            self._inbox.match()
            with self._lock:
                self._watched = [w for w in self._watched if w.queue() is not None]
                watched = list(self._watched)
            for entry in watched:
                queue, now = entry.queue(), time.monotonic()
                if queue is None:
                    continue
                number, operation = queue.sequence_number, queue.current
                if number != entry.sequence_number or not operation:
                    entry.sequence_number, entry.unchanged_since = number, now
                elif now - entry.unchanged_since > mpi_library.timeout_s:
                    self._abort_job(entry, operation, number)

    def _abort_job(self, watched: _WatchedQueue, operation: str, sequence_number: int) -> None:
        """Tell the other ranks of the group that this rank waits; ranks that do not send the same message are missing. Print them, then exit."""
        me = self._control.Get_rank()
        message = (watched.name, sequence_number)
        peers = [r for r in watched.ranks if r != me]
        requests = [self._control.isend(message, dest=r, tag=_WAITING_TAG) for r in peers]
        waiting = {me}
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            arrived = [r for r in peers if self._control.iprobe(source=r, tag=_WAITING_TAG)]
            waiting |= {r for r in arrived if self._control.recv(source=r, tag=_WAITING_TAG) == message}
            time.sleep(0.01)
        missing = [r for r in watched.ranks if r not in waiting]
        if me == min(waiting):
            line = _missing_line(missing, len(waiting), f"{operation} number {sequence_number} of {watched.name}")
            print(f"meshwright: {line}", file=sys.stderr, flush=True)
        del requests
        time.sleep(0.5)  # lets the line reach the terminal before mpirun kills all ranks
        os._exit(1)


def _missing_line(missing: list[int], waiting: int, operation: str) -> str:
    seconds = f"{mpi_library.timeout_s:.0f} s"
    if not missing:
        return f"all ranks reached {operation}, and it did not finish within {seconds}: the network does not move data"
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{ranks} did not arrive at {operation} within {seconds}; {waiting} ranks waited"
