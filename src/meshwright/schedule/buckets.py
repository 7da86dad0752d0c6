"""Which tensors share a collective: in a gradient bucket, and at start-up. The run and the prediction use the same functions and cannot disagree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.core.plan import Plan
from meshwright.core.shares import split_proportionally

ALIGN_BYTES = 16  # alignment that vectorised kernels need
OWN_BUCKET_DIVISOR = 4  # a parameter of at least 1/4 of a bucket's bytes has a bucket of its own
INIT_BROADCAST_BYTES = 2**28  # start-up broadcasts values in groups of about this size, so that it never doubles the model


class ParamReplication(NamedTuple):
    """How a parameter is replicated, as one rank sees it: how many ranks along `tp` and `ep` hold the same, whether this rank counts it in sums
    over a pipeline, and whether it is expert parallel, so that ranks along `ep` hold others. A bucket never mixes these: their gradients are
    reduced over other groups, or their squares count differently."""

    copies: int = 1
    in_grad_norm: bool = True
    is_expert_parallel: bool = False


def replication_of(plan: Plan) -> Callable[[str, bool], ParamReplication]:
    """Return a function from a parameter's name, and whether this rank counts it in sums over a pipeline, to its replication."""
    mesh = plan.mesh
    experts = plan.expert.parameters if mesh.ep > 1 else frozenset()
    everywhere = mesh.degree("tp") * mesh.ep  # ranks that hold a parameter which is neither sharded nor an expert's
    copies = dict.fromkeys(experts, mesh.degree("tp"))
    for axis, policy in plan.tensor_policies:
        for name in {c.parameter for s in policy.sharded_dims for c in s.parameter_shards}:
            copies[name] = copies.get(name, everywhere) // mesh.degree(axis)
    return lambda name, counted: ParamReplication(copies.get(name, everywhere), counted, name in experts)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket, in elements."""

    index: int  # into the sequence given to assign_buckets
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that share a collective. `numel` includes alignment and the padding that makes it divisible by the number of shards."""

    key: Hashable
    slots: tuple[Slot, ...]
    numel: int
    itemsize: int

    @property
    def replication(self) -> ParamReplication:
        """The last item of the key, if that is a ParamReplication."""
        last = self.key[-1] if isinstance(self.key, tuple) and self.key else None
        return last if isinstance(last, ParamReplication) else ParamReplication()

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def padding(self) -> int:
        """Bytes of alignment and padding."""
        return self.bytes - sum(s.numel for s in self.slots) * self.itemsize


def assign_buckets(
    numels: Sequence[int], itemsizes: Sequence[int], keys: Sequence[Hashable], *, first_bytes: int, bytes_cap: int, shards: int
) -> tuple[Bucket, ...]:
    """Group parameters, given in the order their gradients arrive, into buckets of one key each.

    The first bucket is small so that communication starts early. A parameter with a large part of a bucket's bytes has a bucket of its own: its
    gradient is then the bucket and need not be copied into one. Buckets are ordered by when they are complete.
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
        if numel * itemsize * OWN_BUCKET_DIVISOR >= bytes_cap:
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
    """The buffers of a ZeRO-3 unit, one for each key. `itemsizes` are those of the gathered dtype."""
    return assign_buckets(numels, itemsizes, keys, first_bytes=sys.maxsize, bytes_cap=sys.maxsize, shards=shards)


def shard_sizes(bucket: Bucket, shards: int, state_fractions: Sequence[float] = ()) -> tuple[int, ...]:
    """Elements of a bucket for each rank of the shard axis: equal, or in proportion to `state_fractions`."""
    return (
        split_proportionally(bucket.numel, state_fractions, max(ALIGN_BYTES // bucket.itemsize, 1))
        if state_fractions
        else (bucket.numel // shards,) * shards
    )


def shard_size(bucket: Bucket, shards: int, state_fractions: Sequence[float], shard: int) -> int:
    """Elements of one rank's shard; equal shards need no list of all ranks, of which there may be thousands."""
    return shard_sizes(bucket, shards, state_fractions)[shard] if state_fractions else bucket.numel // shards


def init_broadcast_groups(sizes: Sequence[int], keys: Sequence[Hashable], max_bytes: int = INIT_BROADCAST_BYTES) -> Iterator[list[int]]:
    """Groups of indices of tensors that start-up broadcasts in one call. A group has one key, and ends with the tensor that brings it to
    `max_bytes`; `sizes` are bytes."""
    for key in dict.fromkeys(keys):
        run: list[int] = []
        held = 0
        for index in (i for i, k in enumerate(keys) if k == key and sizes[i]):
            run.append(index)
            held += sizes[index]
            if held >= max_bytes:
                yield run
                run, held = [], 0
        if run:
            yield run
