"""How long a traced step's tensors live: how many bytes are alive at each operation beyond what others have saved for backward.

Fake tensors are let go exactly when real ones would be, so a trace can be asked what it holds. A storage's address is its name while it lives,
and is used again afterwards: whoever remembers addresses is told of every death.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Line = tuple[float, float]  # bytes at no samples, and for each sample


@dataclass
class _Alive:
    bytes: int
    death: Any  # the weak reference whose callback says so
    saver: str | None = None


class Lifetimes:
    """What is alive, and who has saved it."""

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._forget = forget
        self._alive: dict[int, _Alive] = {}
        self._live = self._saved = 0
        self._by_layer: dict[str, int] = {}

    def born(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = _Alive(storage.nbytes(), weakref.ref(storage, lambda _: self._died(key)))
            self._live += self._alive[key].bytes

    def saved(self, storage: Any, layer: str) -> None:
        """A layer keeps it for backward; what keeps it first counts it."""
        self.born(storage)
        one = self._alive[storage._cdata]
        if one.saver is None:
            one.saver = layer
            self._saved += one.bytes
            self._by_layer[layer] = self._by_layer.get(layer, 0) + one.bytes

    def handed_on(self, key: int, layer: str) -> None:
        """What is saved counts for another layer from here on."""
        one = self._alive.get(key)
        if one is not None and one.saver is not None:
            self._by_layer[one.saver] -= one.bytes
            self._by_layer[layer] = self._by_layer.get(layer, 0) + one.bytes
            one.saver = layer

    def handed_over(self, storage: Any) -> None:
        """It is somebody else's from here on, as a finished gradient is its parameter's."""
        one = self._alive.get(storage._cdata)
        if one is not None and one.saver is None:
            self._live -= one.bytes
            one.bytes = 0

    def beside(self, layer: str) -> int:
        """Bytes alive that no other layer has saved."""
        return self._live - self._saved + self._by_layer.get(layer, 0)

    def _died(self, key: int) -> None:
        one = self._alive.pop(key)
        self._live -= one.bytes
        if one.saver is not None:
            self._saved -= one.bytes
            self._by_layer[one.saver] -= one.bytes
        self._forget(key)


def envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Of lines over the number of samples, those that are the highest somewhere, from one sample on."""
    found: list[Line] = []
    for base, slope in sorted(set(lines), key=lambda line: (line[1], line[0])):
        while found and (found[-1][1] == slope or not _needed(found, (base, slope))):
            found.pop()
        found.append((base, slope))
    return tuple(found)


def _needed(found: list[Line], new: Line) -> bool:
    """Whether the last of the lines is still the highest anywhere once a steeper one is there."""
    (base, slope), ends = found[-1], _crossing(found[-1], new)
    begins = _crossing(found[-2], found[-1]) if len(found) > 1 else 1.0
    return ends > max(begins, 1.0) and base + slope > 0


def _crossing(flat: Line, steep: Line) -> float:
    return (flat[0] - steep[0]) / (steep[1] - flat[1])
