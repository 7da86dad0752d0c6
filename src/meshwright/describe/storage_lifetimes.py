"""Tracks the lifetimes of a traced step's storages: how many bytes are live at each operation beyond what other layers have saved for backward.

Fake tensors are freed exactly when real ones would be, so a trace knows its live memory. A storage's address identifies it while it is alive and is
reused afterwards: `on_free` tells whoever stores addresses.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

AffineBytes = tuple[float, float]  # bytes at zero samples, and per sample


@dataclass
class _LiveStorage:
    bytes: int
    finalizer: Any  # the weak reference whose callback reports the free
    saved_by: str | None = None


class StorageLifetimes:
    """Live storages, and the layers that saved them."""

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self._on_free = on_free
        self._storages: dict[int, _LiveStorage] = {}
        self._live_bytes = self._saved_bytes = 0
        self._saved_by_layer: Counter[str] = Counter()

    def track(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = _LiveStorage(storage.nbytes(), weakref.ref(storage, lambda _: self._freed(key)))
            self._live_bytes += self._storages[key].bytes

    def mark_saved(self, storage: Any, layer: str) -> None:
        """Count the storage as saved for backward by `layer`; only the first saver counts it."""
        self.track(storage)
        live = self._storages[storage._cdata]
        if live.saved_by is None:
            live.saved_by = layer
            self._saved_bytes += live.bytes
            self._saved_by_layer[layer] += live.bytes

    def reassign_saver(self, address: int, layer: str) -> None:
        """Count the saved storage for another layer."""
        live = self._storages.get(address)
        if live is not None and live.saved_by is not None:
            self._saved_by_layer[live.saved_by] -= live.bytes
            self._saved_by_layer[layer] += live.bytes
            live.saved_by = layer

    def stop_counting(self, storage: Any) -> None:
        """Exclude the storage because it is counted elsewhere, as an accumulated gradient is with its parameter."""
        live = self._storages.get(storage._cdata)
        if live is not None and live.saved_by is None:
            self._live_bytes -= live.bytes
            live.bytes = 0

    def live_bytes_for(self, layer: str) -> int:
        """Live bytes that no other layer has saved."""
        return self._live_bytes - self._saved_bytes + self._saved_by_layer[layer]

    def _freed(self, address: int) -> None:
        live = self._storages.pop(address)
        self._live_bytes -= live.bytes
        if live.saved_by is not None:
            self._saved_bytes -= live.bytes
            self._saved_by_layer[live.saved_by] -= live.bytes
        self._on_free(address)


def upper_envelope(lines: Iterable[AffineBytes]) -> tuple[AffineBytes, ...]:
    """The lines over the number of samples that are the highest somewhere, from one sample on."""
    hull: list[AffineBytes] = []
    for base, slope in sorted(set(lines), key=lambda line: (line[1], line[0])):
        while hull and (hull[-1][1] == slope or not _still_highest(hull, (base, slope))):
            hull.pop()
        hull.append((base, slope))
    return tuple(hull)


def _still_highest(hull: list[AffineBytes], new: AffineBytes) -> bool:
    """Whether the last line is still the highest anywhere once a steeper one is added."""
    (base, slope), end = hull[-1], _crossing(hull[-1], new)
    begin = _crossing(hull[-2], hull[-1]) if len(hull) > 1 else 1.0
    return end > max(begin, 1.0) and base + slope * end > 0


def _crossing(shallow: AffineBytes, steep: AffineBytes) -> float:
    return (shallow[0] - steep[0]) / (steep[1] - shallow[1])
