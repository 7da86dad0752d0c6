"""What a compiler keeps of a layer for backward, where eager execution keeps whatever each operation asks for.

[Note: made again]
A compiler sees forward and backward of a layer at once, and need not keep what element-wise work makes: its kernels in backward can make that again
from what is there. What a product or attention of backward reads it keeps as it is, since that has to lie in memory for it anyhow. The rest it keeps
wherever that is smallest: a norm that widens its input keeps the narrow one. So of all ways to cut what backward needs off from what only forward can
make (products, random numbers, what comes from other layers) it takes the one of the fewest bytes, which a largest flow finds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ENDLESS = float("inf")


@dataclass
class _Value:
    """A storage that forward made, or that was there before."""

    bytes: int
    layer: str | None  # that made it; None: it was there
    again: bool = False  # whether backward can make it once more
    sources: tuple[int, ...] = ()  # of these, and of what is always there
    saver: str | None = None
    whole: bool = False  # read by a product of backward


class Fused:
    """The values of one traced step; addresses are their names while they live."""

    def __init__(self, constants: Iterable[int]) -> None:
        self._constants = frozenset(constants)  # parameters, buffers, the batch: always there
        self._values: list[_Value] = []
        self._at: dict[int, int] = {}

    def made(self, storages: Iterable[Any], sources: Iterable[Any], layer: str, again: bool) -> None:
        """An operation of forward; `again`: a compiler would do it once more in backward."""
        inputs = tuple(self._number(s) for s in {s._cdata: s for s in sources}.values() if s._cdata not in self._constants) if again else ()
        for storage in storages:
            if storage._cdata not in self._at and storage._cdata not in self._constants:
                self._at[storage._cdata] = len(self._values)
                self._values.append(_Value(storage.nbytes(), layer, again, inputs))

    def saved(self, storage: Any, layer: str) -> None:
        """Eager execution keeps it, for this layer."""
        self._values[self._number(storage)].saver = layer

    def handed_on(self, key: int, layer: str) -> None:
        if key in self._at:
            self._values[self._at[key]].saver = layer

    def read(self, storages: Iterable[Any]) -> None:
        """By a product of backward."""
        for storage in storages:
            if storage._cdata in self._at:
                self._values[self._at[storage._cdata]].whole = True

    def forget(self, key: int) -> None:
        self._at.pop(key, None)

    def remade(self) -> dict[str, int]:
        """By layer: of what eager execution keeps, the bytes that a compiler does not."""
        found: dict[str, list[int]] = {}
        for number, value in enumerate(self._values):
            if value.saver is not None and not value.whole:
                found.setdefault(value.saver, []).append(number)
        return {layer: max(sum(self._values[n].bytes for n in needed) - self._least(layer, needed), 0) for layer, needed in found.items()}

    def _number(self, storage: Any) -> int:
        if storage._cdata not in self._at:
            self._at[storage._cdata] = len(self._values)
            self._values.append(_Value(storage.nbytes(), None))
        return self._at[storage._cdata]

    def _least(self, layer: str, needed: list[int]) -> int:
        """The fewest bytes from which all that is needed can be made in this layer."""
        room: dict[int, dict[int, float]] = {}  # from each node of the flow's graph to others; a value is two, what enters and what leaves it
        todo, seen = deque(needed), set(needed)
        start, end = -1, -2

        def join(a: int, b: int, size: float) -> None:
            room.setdefault(a, {})[b] = size
            room.setdefault(b, {}).setdefault(a, 0.0)

        while todo:
            number = todo.popleft()
            value = self._values[number]
            join(2 * number, 2 * number + 1, 0.0 if value.whole else float(value.bytes))
            if value.whole:
                continue  # it is kept anyhow
            if not value.again or value.layer not in (layer, ""):
                join(start, 2 * number, _ENDLESS)
                continue
            for source in value.sources:
                join(2 * source + 1, 2 * number, _ENDLESS)
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        for number in needed:
            join(2 * number + 1, end, _ENDLESS)
        return int(_largest_flow(room, start, end))


def _largest_flow(room: dict[int, dict[int, float]], start: int, end: int) -> float:
    """By the shortest ways that are left; `room` is used up."""
    total = 0.0
    while (way := _shortest(room, start, end)) is not None:
        least = min(room[a][b] for a, b in way)
        for a, b in way:
            room[a][b] -= least
            room[b][a] += least
        total += least
    return total


def _shortest(room: dict[int, dict[int, float]], start: int, end: int) -> list[tuple[int, int]] | None:
    before: dict[int, int] = {start: start}
    todo = deque([start])
    while todo and end not in before:
        here = todo.popleft()
        for there, left in room.get(here, {}).items():
            if left > 0 and there not in before:
                before[there] = here
                todo.append(there)
    if end not in before:
        return None
    way, at = list[tuple[int, int]](), end
    while at != start:
        way.append((before[at], at))
        at = before[at]
    return way
