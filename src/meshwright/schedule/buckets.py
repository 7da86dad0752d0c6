"""Which tensors travel together: in a gradient bucket, at start-up. The run and the prediction use the same functions and cannot disagree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.core.plan import Plan
from meshwright.core.shares import cut

ALIGN_BYTES = 16  # vectorised kernels want their operands so
ALONE = 4  # parameters of at least one in so many of a bucket's bytes stand alone
START_BYTES = 2**28  # start-up sends values in runs of about this size, so that it never doubles the model


class Kind(NamedTuple):
    """Of a parameter on one rank: how many ranks along `tp` and `ep` hold the same, does this rank count it in sums over a pipeline, and is
    it owned, so that ranks along `ep` hold other ones? A bucket never mixes kinds: their gradients meet, or their squares count, otherwise."""

    copies: int = 1
    counted: bool = True
    owned: bool = False


def replication_of(plan: Plan) -> Callable[[str, bool], Kind]:
    """The kind of a parameter, by its name and by whether this rank counts it in sums over a pipeline."""
    mesh = plan.mesh
    experts = plan.owners.parameters if mesh.ep > 1 else frozenset()
    everywhere = mesh.degree("tp") * mesh.ep  # ranks that hold a parameter which is neither sharded nor an expert's
    copies = dict.fromkeys(experts, mesh.degree("tp"))
    for axis, policy in plan.tensors:
        for name in {c.parameter for s in policy.strands for c in s.cuts}:
            copies[name] = copies.get(name, everywhere) // mesh.degree(axis)
    return lambda name, counted: Kind(copies.get(name, everywhere), counted, name in experts)


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

    The first bucket is small so that communication starts early. A parameter of a good part of a bucket's size has one of its own, since
    then its gradient is the bucket and need not be copied into one. Buckets are ordered by when they are complete.
    """
    open_slots: dict[Hashable, list[Slot]] = {}
    filled: dict[Hashable, int] = {}
    done: list[Bucket] = []

    def padded(numel: int, itemsize: int) -> int:
        unit = shards * max(ALIGN_BYTES // itemsize, 1) if shards > 1 else 1
        return -(-numel // unit) * unit

    def close(key: Hashable, itemsize: int) -> None:
        done.append(Bucket(key, tuple(open_slots.pop(key)), padded(filled.pop(key), itemsize), itemsize))

    for index, (numel, itemsize, key) in enumerate(zip(numels, itemsizes, keys, strict=True)):
        if numel * itemsize * ALONE >= bytes_cap:
            done.append(Bucket(key, (Slot(index, 0, numel),), padded(numel, itemsize), itemsize))
            continue
        align = max(ALIGN_BYTES // itemsize, 1)
        start = -(-filled.get(key, 0) // align) * align
        open_slots.setdefault(key, []).append(Slot(index, start, numel))
        filled[key] = start + numel
        if filled[key] * itemsize >= (bytes_cap if done else first_bytes):
            close(key, itemsize)
    for key, slots in list(open_slots.items()):
        close(key, itemsizes[slots[-1].index])
    return tuple(sorted(done, key=lambda b: b.slots[-1].index))


def unit_buckets(numels: Sequence[int], itemsizes: Sequence[int], keys: Sequence[Hashable], shards: int) -> tuple[Bucket, ...]:
    """The buffers of a ZeRO-3 unit: one for each key. `itemsizes` are those of what is gathered."""
    return assign_buckets(numels, itemsizes, keys, first_bytes=sys.maxsize, bytes_cap=sys.maxsize, shards=shards)


def shard_sizes(bucket: Bucket, shards: int, states: Sequence[float] = ()) -> tuple[int, ...]:
    """Elements of a bucket for each rank of the shard axis: as many, or in these parts of it."""
    return cut(bucket.numel, states, max(ALIGN_BYTES // bucket.itemsize, 1)) if states else (bucket.numel // shards,) * shards


def own_size(bucket: Bucket, shards: int, states: Sequence[float], shard: int) -> int:
    """Those of one rank: there may be thousands."""
    return shard_sizes(bucket, shards, states)[shard] if states else bucket.numel // shards


def start_runs(sizes: Sequence[int], keys: Sequence[Hashable], most: int = START_BYTES) -> Iterator[list[int]]:
    """Indices of tensors, given by their bytes, that start-up sends as one: of one key, closed by the one that reaches `most` bytes."""
    for key in dict.fromkeys(keys):
        run: list[int] = []
        held = 0
        for index in (i for i, k in enumerate(keys) if k == key and sizes[i]):
            run.append(index)
            held += sizes[index]
            if held >= most:
                yield run
                run, held = [], 0
        if run:
            yield run
