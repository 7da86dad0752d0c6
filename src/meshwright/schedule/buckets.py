"""Which parameters share a gradient bucket. One function, used by the run and by the prediction, so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGN_BYTES = 16  # vectorised kernels want their operands so


class Kind(NamedTuple):
    """Of a parameter on one rank: is it a piece of a tensor-parallel whole, does this rank count it in sums over a pipeline, and is it
    owned, so that ranks along `ep` hold other ones? A bucket never mixes kinds: their gradients meet, or their squares are summed, elsewhere."""

    cut: bool = False
    counted: bool = True
    owned: bool = False


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket, in elements."""

    index: int  # into the sequence given to assign_buckets
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together. `numel` includes alignment and the padding that makes it divide over the shards."""

    key: Hashable
    slots: tuple[Slot, ...]
    numel: int
    itemsize: int

    @property
    def kind(self) -> Kind:
        """Keys end with the kind where there are kinds."""
        last = self.key[-1] if isinstance(self.key, tuple) and self.key else None
        return last if isinstance(last, Kind) else Kind()

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def padding(self) -> int:
        """Bytes that carry nothing."""
        return self.bytes - sum(s.numel for s in self.slots) * self.itemsize


def assign_buckets(
    numels: Sequence[int], itemsizes: Sequence[int], keys: Sequence[Hashable], *, first_bytes: int, bytes_cap: int, shards: int
) -> tuple[Bucket, ...]:
    """Group parameters, given in the order their gradients arrive, into buckets of one key each.

    The first bucket is small so that communication starts early. Buckets are ordered by when they are complete.
    """
    open_slots: dict[Hashable, list[Slot]] = {}
    filled: dict[Hashable, int] = {}
    done: list[Bucket] = []

    def close(key: Hashable, itemsize: int) -> None:
        unit = shards * max(ALIGN_BYTES // itemsize, 1) if shards > 1 else 1
        numel = -(-filled.pop(key) // unit) * unit
        done.append(Bucket(key, tuple(open_slots.pop(key)), numel, itemsize))

    for index, (numel, itemsize, key) in enumerate(zip(numels, itemsizes, keys, strict=True)):
        align = max(ALIGN_BYTES // itemsize, 1)
        start = -(-filled.get(key, 0) // align) * align
        open_slots.setdefault(key, []).append(Slot(index, start, numel))
        filled[key] = start + numel
        if filled[key] * itemsize >= (bytes_cap if done else first_bytes):
            close(key, itemsize)
    for key, slots in list(open_slots.items()):
        close(key, itemsizes[slots[-1].index])
    return tuple(sorted(done, key=lambda b: b.slots[-1].index))
