"""Bytes of a gradient bucket's collectives under a plan's compression, by the functions that `execute/compression_runtime.py` uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.compression_policy import low_rank_shape
from meshwright.core.plan import SyncPolicy
from meshwright.schedule.buckets import Bucket

_BF16_BYTES = 2  # bytes of a bf16 element


@dataclass(frozen=True)
class BucketCollective:
    """One collective of a bucket: `suffix` is appended to the bucket's name; with `after_previous` it starts when the one before it is done."""

    suffix: str
    bytes: int
    padding: int = 0
    after_previous: bool = False


def bucket_collectives(sync: SyncPolicy, bucket: Bucket, shapes: Sequence[Sequence[int]]) -> list[BucketCollective]:
    """The collectives of one bucket. `shapes` are those of all parameters, indexed as in the bucket's slots."""
    if sync.compression == "bf16":
        return [BucketCollective("", bucket.numel * _BF16_BYTES, bucket.padding // bucket.itemsize * _BF16_BYTES)]
    if sync.compression != "powersgd":
        return [BucketCollective("", bucket.bytes, bucket.padding)]
    shapes_by_slot = {slot: low_rank_shape(shapes[slot.index], sync.compression_rank) for slot in bucket.slots}
    uncompressed = sum(slot.numel for slot, shape in shapes_by_slot.items() if shape is None)
    p_numel, q_numel = (sum(shape[side] * shape[2] for shape in shapes_by_slot.values() if shape is not None) for side in (0, 1))
    calls = (
        BucketCollective("", uncompressed * bucket.itemsize),
        BucketCollective(".p", p_numel * bucket.itemsize),
        BucketCollective(".q", q_numel * bucket.itemsize, after_previous=True),
    )
    return [call for call in calls if call.bytes]


def replica_bytes(sync: SyncPolicy, bucket: Bucket, shard_numel: int) -> int:
    """Bytes of a rank's shard of a bucket, of `shard_numel` elements, which its replicas all-reduce."""
    return shard_numel * (_BF16_BYTES if sync.compression == "bf16" else bucket.itemsize)
