"""A rank's shard of a flat buffer that ZeRO splits over the shard axis, evenly or by the plan's `balance.state_fractions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from meshwright.core.comm import Comm
from meshwright.schedule.buckets import Bucket, Slot, shard_sizes


@dataclass(frozen=True)
class ShardLayout:
    """Elements of each rank's shard, and which rank this is."""

    sizes: tuple[int, ...]
    rank: int

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def uneven_sizes(self) -> tuple[int, ...] | None:
        """Sizes for a collective; None if they are equal, which every backend does fastest."""
        return self.sizes if len(set(self.sizes)) > 1 else None

    def local_shard(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size]


def param_views(flat: Tensor, bucket: Bucket, params: Sequence[Tensor]) -> list[Tensor]:
    """Views of the parameters' slots in a flat buffer, in the parameters' shapes."""
    return [flat[slot.offset : slot.offset + slot.numel].view(param.shape) for slot, param in zip(bucket.slots, params, strict=True)]


def make_shard_layout(bucket: Bucket, shard: Comm, state_fractions: Sequence[float]) -> ShardLayout:
    return ShardLayout(shard_sizes(bucket, shard.size, state_fractions), shard.rank)


def slot_part(slot: Slot, start: int, size: int) -> tuple[int, int, int]:
    """Which of a parameter's elements lie in `size` elements of the flat buffer from `start` on: (the first of them, offset in the range, count)."""
    begin, end = max(slot.offset, start), min(slot.offset + slot.numel, start + size)
    return begin - slot.offset, begin - start, max(end - begin, 0)


def padding_of(bucket: Bucket) -> tuple[slice, ...]:
    """The gaps of a flat buffer between parameters and after them."""
    ends = [*(s.offset for s in bucket.slots[1:]), bucket.numel]
    return tuple(slice(s.offset + s.numel, end) for s, end in zip(bucket.slots, ends, strict=True) if s.offset + s.numel < end)
