"""Errors that a user can act on: one line that says what failed, where, and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshwrightError(Exception):
    """Base of every error Meshwright raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class RequestError(MeshwrightError):
    """The request is invalid, and the user can fix it. The command line prints it as one line and exits with 2."""

    exit_code = 2


class RunError(MeshwrightError):
    """A valid request failed while it ran."""


def unknown_name_error(kind: str, name: str, choices: Iterable[str], where: str = "") -> RequestError:
    """An error for a name that is not one of `choices`, with the nearest valid one."""
    names = sorted(choices)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"one of: {', '.join(names)}"
    return RequestError(f"unknown {kind} '{name}'{f' in {where}' if where else ''}; {hint}")


class StopRequest(KeyboardInterrupt):
    """SIGINT or SIGTERM asks this process to stop: in order, or `at_once` if it is the second signal."""

    def __init__(self, signal_name: str, at_once: bool) -> None:
        super().__init__(f"stopped by {signal_name}")
        self.at_once = at_once
