"""SIGINT, SIGTERM and SIGUSR1 stop a command in order: they raise StopRequest, so that every `finally` runs. A second signal cuts the order short."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from meshwright.core.errors import StopRequest

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Slurm warns with the last, if it is asked to: --signal=USR1@120


class StopSignals:
    """Installs the handlers, in the main thread only. `received` is the first signal, or None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background job ignores SIGINT on purpose
                    signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        at_once = self.received is not None
        self.received = self.received or signal.Signals(number)
        if at_once:
            ignore_stop_signals()  # what is left is short: kill the ranks, remove temporary folders
        raise StopRequest(signal.Signals(number).name, at_once)


def ignore_stop_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def end_on_sigterm() -> None:
    """Leave SIGTERM to the system, for a rank of an external launcher: a Python handler would not run while a collective blocks."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
