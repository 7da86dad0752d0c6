"""What a gradient bucket puts on the wire under a plan's compression: the same functions of its shapes as `execute/compression.py` goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.compression import factor_shape
from meshwright.core.plan import SyncPolicy
from meshwright.schedule.buckets import Bucket

_ROUNDED = 2  # bytes of a bf16 element


@dataclass(frozen=True)
class Sent:
    """One call for a bucket: `name` is added to the bucket's; one that `follows` leaves when what was sent before it has arrived."""

    name: str
    bytes: int
    padding: int = 0
    follows: bool = False


def bucket_sends(sync: SyncPolicy, bucket: Bucket, shapes: Sequence[Sequence[int]]) -> list[Sent]:
    """`shapes` are those of all parameters, as the bucket's slots number them."""
    if sync.compression == "bf16":
        return [Sent("", bucket.numel * _ROUNDED, bucket.padding // bucket.itemsize * _ROUNDED)]
    if sync.compression != "powersgd":
        return [Sent("", bucket.bytes, bucket.padding)]
    factors = {slot: factor_shape(shapes[slot.index], sync.compression_rank) for slot in bucket.slots}
    whole = sum(slot.numel for slot, shape in factors.items() if shape is None)
    kept = [shape for shape in factors.values() if shape is not None]
    lefts, rights = (sum(shape[side] * shape[2] for shape in kept) for side in (0, 1))
    every = (Sent("", whole * bucket.itemsize), Sent(".p", lefts * bucket.itemsize), Sent(".q", rights * bucket.itemsize, follows=True))
    return [sent for sent in every if sent.bytes]


def replica_bytes(sync: SyncPolicy, bucket: Bucket, own: int) -> int:
    """Of a rank's slice of a bucket, so many elements, which replicas of it reduce."""
    return own * (_ROUNDED if sync.compression == "bf16" else bucket.itemsize)
