"""Errors that a user can act on: one line that says what failed, where, and what to change."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class MeshwrightError(Exception):
    """Base of every error Meshwright raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class RequestError(MeshwrightError):
    """The request is invalid, and the user can fix it. The command line prints it as one line and exits with 2."""

    exit_code = 2


class RunError(MeshwrightError):
    """A valid request failed while it ran."""


class NonFiniteLossError(RunError):
    """The loss or the gradient became NaN or infinite. `secondary`: this rank's own part of it was finite, so that the cause is on another rank.
    `rollback`: the run is to go on from its last good state."""

    def __init__(self, message: str, *, secondary: bool = False, rollback: bool = False) -> None:
        super().__init__(message)
        self.secondary, self.rollback = secondary, rollback


_MAX_LISTED = 40


def unknown_name_error(kind: str, name: str, choices: Iterable[str], where: str = "") -> RequestError:
    """An error for a name that is not one of `choices`, with the nearest valid one; where none is near, with all of them."""
    names = sorted(choices)
    name = name if len(name) <= 80 else f"{name[:80]}…"
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6 if len(name) > 3 else 0.5)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    hint = f"did you mean '{near[0]}'?" if near else f"one of: {', '.join(names[:_MAX_LISTED])}{more}"
    return RequestError(f"unknown {kind} '{name}'{f' in {where}' if where else ''}; {hint}")


class StopRequest(KeyboardInterrupt):
    """SIGINT or SIGTERM asks this process to stop: in order, or `at_once` if it is the second signal."""

    def __init__(self, signal_name: str, at_once: bool) -> None:
        super().__init__(f"stopped by {signal_name}")
        self.at_once = at_once


class RunStopped(MeshwrightError):
    """The ranks were told to stop, and have saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal = signal.Signals(signal_number)
