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
    over a pipeline, and whether it is expert parallel, so that each rank along `ep` has its own. A bucket never mixes these: their gradients are
    reduced over different groups, or their squares count differently."""

    copies: int = 1
    in_grad_norm: bool = True
    is_expert_parallel: bool = False


def replication_of(plan: Plan) -> Callable[[str, bool], ParamReplication]:
    """Return a function from a parameter's name, and whether this rank counts it in sums over a pipeline, to its replication."""
    mesh = plan.mesh
    experts = plan.expert.parameters if mesh.ep > 1 else frozenset()
    replicated = mesh.degree("tp") * mesh.ep  # ranks that hold a parameter which is neither sharded nor an expert's
    copies = dict.fromkeys(experts, mesh.degree("tp"))
    for axis, policy in plan.tensor_policies:
        for name in {shard.parameter for dim in policy.sharded_dims for shard in dim.parameter_shards}:
            copies[name] = copies.get(name, replicated) // mesh.degree(axis)
    return lambda name, counted: ParamReplication(copies.get(name, replicated), counted, name in experts)


@dataclass(frozen=True)
class Slot:
    """A parameter's position in its bucket, in elements."""

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
    buckets: list[Bucket] = []

    def close(key: Hashable, slots: list[Slot]) -> None:
        itemsize, last = itemsizes[slots[-1].index], slots[-1]
        unit = shards * max(ALIGN_BYTES // itemsize, 1) if shards > 1 else 1
        buckets.append(Bucket(key, tuple(slots), -(-(last.offset + last.numel) // unit) * unit, itemsize))

    for index, (numel, itemsize, key) in enumerate(zip(numels, itemsizes, keys, strict=True)):
        if numel * itemsize * OWN_BUCKET_DIVISOR >= bytes_cap:
            close(key, [Slot(index, 0, numel)])
            continue
        slots, align = open_slots.setdefault(key, []), max(ALIGN_BYTES // itemsize, 1)
        start = -(-(slots[-1].offset + slots[-1].numel) // align) * align if slots else 0
        slots.append(Slot(index, start, numel))
        if (start + numel) * itemsize >= (bytes_cap if buckets else first_bytes):
            close(key, open_slots.pop(key))
    for key, slots in open_slots.items():
        close(key, slots)
    return tuple(sorted(buckets, key=lambda b: b.slots[-1].index))


def unit_buckets(numels: Sequence[int], itemsizes: Sequence[int], keys: Sequence[Hashable], shards: int) -> tuple[Bucket, ...]:
    """The buffers of a ZeRO-3 unit, one for each key. `itemsizes` are those of the gathered dtype."""
    return assign_buckets(numels, itemsizes, keys, first_bytes=sys.maxsize, bytes_cap=sys.maxsize, shards=shards)


def shard_sizes(bucket: Bucket, shards: int, state_fractions: Sequence[float] = ()) -> tuple[int, ...]:
    """Elements of a bucket for each rank of the shard axis: equal, or in proportion to `state_fractions`."""
    if not state_fractions:
        return (bucket.numel // shards,) * shards
    return split_proportionally(bucket.numel, state_fractions, max(ALIGN_BYTES // bucket.itemsize, 1))


def shard_size(bucket: Bucket, shards: int, state_fractions: Sequence[float], shard: int) -> int:
    """Elements of one rank's shard; equal shards need no list of all ranks, of which there may be thousands."""
    return shard_sizes(bucket, shards, state_fractions)[shard] if state_fractions else bucket.numel // shards


def init_broadcast_groups(sizes: Sequence[int], keys: Sequence[Hashable], max_bytes: int = INIT_BROADCAST_BYTES) -> Iterator[list[int]]:
    """Groups of indices of tensors that start-up broadcasts in one call. A group has one key, and ends with the tensor that brings it to
    `max_bytes`; `sizes` are bytes."""
    for key in dict.fromkeys(keys):
        group: list[int] = []
        group_bytes = 0
        for index in (i for i, k in enumerate(keys) if k == key and sizes[i]):
            group.append(index)
            group_bytes += sizes[index]
            if group_bytes >= max_bytes:
                yield group
                group, group_bytes = [], 0
        if group:
            yield group
