"""Large collectives of ranks that share a node: through memory of their own instead of MPI's, from the sizes on where that was measured quicker.

The memory is opened at a group's first large call, in which everybody is. What decides is what all ranks know: the operation, its bytes, the
group. So gathers to one rank and all-to-alls, whose sizes a rank may know in part only, always go by MPI.
"""

from __future__ import annotations

from typing import Any

from meshwright.comm.mpi import library
from meshwright.comm.window import Window, window_among

_NEVER = 1 << 62
_SLACK_S = 60.0  # by which the watchdog, which knows who is missing, comes before the window's own clock
# Bytes of the whole tensor, for each rank of the group: with every one more there is somebody to wait for.
FROM = {"all_reduce": 1 << 18, "reduce_scatter": 1 << 18, "reduce": 1 << 18, "broadcast": 1 << 19, "all_gather": 1 << 19}
# Two ranks gather quicker when each reads the other's memory itself, as MPI has them do; of more, each one's memory would be read several times.
# What one rank gives to several is theirs to copy either way.
_SIZES = {"all_gather": range(3, 1 << 20), "broadcast": range(2, 3)}


class Near:
    """The window of one group, once it was needed; asked by whoever holds the group's lane."""

    def __init__(self, comm: Any, members: tuple[int, ...]) -> None:
        self._comm, self._members = comm, members
        self._window: Window | None = None
        self._tried = False
        ranks = len(members)
        self._from = {op: size * ranks if ranks in _SIZES.get(op, range(2, 1 << 20)) else _NEVER for op, size in FROM.items()}
        self.least = min(self._from.values())  # bytes below which there is nothing to ask

    def window(self, op: str, size: int) -> Window | None:
        """None where a call of so many bytes goes by MPI. Collective when it is the first that does not."""
        if size < self._from[op]:
            return None
        if not self._tried:
            self._tried = True
            self._window, _ = window_among(self._comm.allgather, self._comm.Get_rank(), self._members, library.timeout_s + _SLACK_S)
        return self._window

    def close(self) -> None:
        self._window, self._tried, self.least = None, True, _NEVER
