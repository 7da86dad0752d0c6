"""Routes: which calls of a plan go over another backend than the one its ranks meet by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.errors import RequestError


@dataclass(frozen=True)
class Route:
    """Calls of `op` in which a rank sends at least `sent` bytes go over `backend`, up to where the operation's next route begins."""

    op: str
    backend: str
    sent: int = 0


def way(routes: Sequence[Route], op: str, sent: float, backend: str) -> str:
    """The backend of one call; `backend` unless a route says otherwise. It depends on what all ranks know, so they choose alike."""
    fitting = [r for r in routes if r.op == op and r.sent <= sent]
    return max(fitting, key=lambda r: r.sent).backend if fitting else backend


def check_routes(routes: Sequence[Route], backend: str) -> None:
    for route in routes:
        if {route.backend, backend} - {"gloo", "mpi"}:
            raise RequestError(
                f"plan: sync.routes join gloo and mpi, and {route.op} goes over {route.backend} in a plan for {backend}: leave them out"
            )
    if routes and backend != "gloo":
        raise RequestError(f"plan: sync.routes need ranks that meet by gloo, and the plan's backend is {backend}: set backend=gloo")
