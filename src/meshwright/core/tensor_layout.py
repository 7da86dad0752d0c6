"""Where the elements of a rank's local tensor lie in the whole one, after any number of cuts along dims."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.core.box import Box, Shape


class Segment(NamedTuple):
    """A run along one dim: `length` indices from `local` on in the local tensor, and from `whole` on in the whole one."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class TensorLayout:
    """A local tensor as a product of segments of the whole one's dims."""

    shape: Shape  # of the whole tensor
    segments: tuple[tuple[Segment, ...], ...]  # along each dim, in the order of the local tensor

    @classmethod
    def uncut(cls, shape: Shape) -> TensorLayout:
        return cls(shape, tuple((Segment(0, 0, n),) for n in shape))

    @property
    def local_shape(self) -> Shape:
        return tuple(sum(s.length for s in along) for along in self.segments)

    def cut(self, dim: int, size: int, first: int, count: int, outer: int = 1, inner: int = 1) -> TensorLayout:
        """The layout after a cut of the local tensor's `dim`, of `outer` x `size` x `inner` indices: of each `size`, `count` from `first` on stay."""
        kept, local = [], 0
        for block in range(outer):
            low = (block * size + first) * inner
            high = low + count * inner
            for segment in self.segments[dim]:
                begin, end = max(low, segment.local), min(high, segment.local + segment.length)
                if begin < end:
                    kept.append(Segment(local, segment.whole + begin - segment.local, end - begin))
                    local += end - begin
        return TensorLayout(self.shape, (*self.segments[:dim], tuple(kept), *self.segments[dim + 1 :]))

    def boxes(self, local: Box) -> Iterator[tuple[Box, Box]]:
        """The parts of a box of the local tensor that are boxes of the whole one: (in the local tensor, in the whole tensor)."""
        per_dim = []
        for along, start, size in zip(self.segments, local.start, local.size, strict=True):
            parts = [(max(start, s.local), min(start + size, s.local + s.length), s) for s in along]
            per_dim.append([(a, s.whole + a - s.local, b - a) for a, b, s in parts if a < b])
        for product in itertools.product(*per_dim):
            lengths = tuple(n for _, _, n in product)
            yield Box(tuple(a for a, _, _ in product), lengths), Box(tuple(w for _, w, _ in product), lengths)
