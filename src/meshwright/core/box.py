"""Boxes: which part of a tensor somebody holds, as the start and size along each dim. Pure arithmetic: intersection, cover, flat ranges as boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """The elements from `start` on, `size` of them along each dim. The box of a tensor without dims has no numbers, and one element."""

    start: Shape
    size: Shape

    @property
    def stop(self) -> Shape:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The part that both have; None if there is none."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(min(a, b) - first for a, b, first in zip(self.stop, other.stop, start, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    def contains(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(a >= b for a, b in zip(self.stop, other.stop, strict=True))

    def inside(self, outer: Box) -> Box:
        """The same box, counted from the start of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def subtract(self, other: Box) -> list[Box]:
        """What is left of this box without `other`, as boxes that do not overlap: at most two for each dim."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest, start, size = [], list(self.start), list(self.size)
        for dim in range(len(start)):
            end = start[dim] + size[dim]
            for first, last in ((start[dim], common.start[dim]), (common.stop[dim], end)):
                if last > first:
                    rest.append(Box((*start[:dim], first, *start[dim + 1 :]), (*size[:dim], last - first, *size[dim + 1 :])))
            start[dim], size[dim] = common.start[dim], common.size[dim]
        return rest

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        return f"[{','.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def missing_parts(box: Box, present: Iterable[Box]) -> list[Box]:
    """The parts of `box` that none of the boxes `present` has."""
    missing = [box] if box.numel else []
    for other in present:
        missing = [part for piece in missing for part in piece.subtract(other)]
    return missing


def flat_range_boxes(shape: Sequence[int], first: int, count: int) -> list[tuple[int, Box]]:
    """`count` elements of a contiguous tensor from element `first` on, as boxes whose elements lie one after the other: at most 2·dims - 1. Each
    comes with its offset in the range."""
    if count <= 0:
        return []
    if not shape:
        return [(0, Box((), ()))]
    row = math.prod(shape[1:])
    begin, end = divmod(first, row)[0], -(-(first + count) // row)
    if end - begin == 1:
        return [(offset, _in_row(begin, box)) for offset, box in flat_range_boxes(shape[1:], first - begin * row, count)]
    found: list[tuple[int, Box]] = []
    head = begin * row + row - first if first > begin * row else 0
    if head:
        found += [(offset, _in_row(begin, box)) for offset, box in flat_range_boxes(shape[1:], row - head, head)]
    rows = (count - head) // row
    if rows:
        first_row = (first + head) // row
        found.append((head, Box((first_row, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))))
    tail = count - head - rows * row
    if tail:
        found += [(count - tail + offset, _in_row(end - 1, box)) for offset, box in flat_range_boxes(shape[1:], 0, tail)]
    return found


def _in_row(row: int, box: Box) -> Box:
    return Box((row, *box.start), (1, *box.size))


def contiguous_runs(shape: Sequence[int], box: Box) -> tuple[list[int], int]:
    """Where a box lies in a contiguous tensor: the first element of each run of elements that lie one after the other, and the length of a run."""
    inner = len(shape)
    run = 1
    while inner and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
        run *= shape[inner]
    if inner:
        inner -= 1
        run *= box.size[inner]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = [sum(a * s for a, s in zip(box.start, strides, strict=True))]
    for dim in range(inner):
        starts = [start + i * strides[dim] for start in starts for i in range(box.size[dim])]
    return starts, run
