"""A ledger of communication: which collectives a rank called, over how many ranks, how often and with how many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.schedule import wire_factor


@dataclass(frozen=True)
class LedgerEntry:
    """All calls of one name, op and group size since the ledger was last drained. `bytes` is the size of the whole tensor, summed over calls."""

    name: str
    op: str
    group: int
    calls: int
    bytes: int

    @property
    def bytes_sent(self) -> float:
        """Bytes that a rank sends for these calls with the bandwidth-optimal algorithm."""
        return self.bytes * wire_factor(self.op, self.group)


class Ledger:
    """Counts the calls of all groups of one rank."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str, int], tuple[int, int]] = {}
        self.on_call: Callable[[str, str], None] | None = None  # is told the name and the op of each call that begins

    def add(self, name: str, op: str, group: int, size: int) -> None:
        calls, total = self._totals.get((name, op, group), (0, 0))
        self._totals[name, op, group] = (calls + 1, total + size)
        if self.on_call is not None:
            self.on_call(name, op)

    def drain(self) -> tuple[LedgerEntry, ...]:
        """Return the entries counted so far, in order of first call, and empty the ledger."""
        entries = tuple(LedgerEntry(name, op, group, calls, size) for (name, op, group), (calls, size) in self._totals.items())
        self._totals.clear()
        return entries
