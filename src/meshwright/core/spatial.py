"""The spatial part of a plan: ranks share every sample's positions, each takes a block of them, and neighbours exchange borders.

[Note: blocks and halos]
The ranks of a cp group stand on a grid. A dim of N positions is dealt out over the grid's extent along it in runs, as evenly as it
goes, and by N alone: tensors of one size are cut alike, whoever made them. Whatever slides (a convolution, a pooling) gives a rank its
run of the output, and for that the rank needs a range of the input: its own run, more of it where the window hangs over (a halo, which
neighbours send), less where it does not reach, padding beyond the outer border. Borders are exchanged dim after dim, so that the
second exchange carries the corners of the first. Run and prediction read the same `Exchange`s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.errors import RequestError
from meshwright.core.strand import Window
from meshwright.core.tensor import piece

Phase = Literal["forward", "backward"]
Box = tuple[tuple[int, int], ...]  # (start, stop) of each spatial dim


def place_of(rank: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Where a rank stands; the last dim holds neighbouring ranks."""
    found = []
    for ways in reversed(grid):
        rank, at = divmod(rank, ways)
        found.append(at)
    return tuple(reversed(found))


def block(sizes: tuple[int, ...], grid: tuple[int, ...], rank: int) -> Box:
    """The positions that a rank holds."""
    runs = [piece(n, at, ways) for n, at, ways in zip(sizes, place_of(rank, grid), grid, strict=True)]
    return tuple((first, first + count) for first, count in runs)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True)
class Door:
    """Where whole samples are cut into blocks: a tensor among those that the model is given, with its spatial sizes."""

    position: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Slide:
    """A window that slides over cut positions and needs others than a rank's own: which call in which module, and from what to what."""

    module: str
    function: str
    window: Window
    sizes: tuple[int, ...]
    made: tuple[int, ...]  # spatial sizes of the result
    bytes: float  # of one position of one sample
    backward: bool = True  # a gradient goes back to the input


@dataclass(frozen=True)
class Norm:
    """Statistics over cut positions, which ranks must have in common: `numbers` of each kind, a sample or (`fixed`) at all."""

    module: str
    function: str
    sizes: tuple[int, ...]
    numbers: int
    itemsize: int
    fixed: bool
    backward: bool = True


@dataclass(frozen=True)
class Regather:
    """Where blocks become whole again: an output of a module whose dims `dims` are cut."""

    module: str
    position: int
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: float  # of one position of one sample
    final_in: tuple[str, ...] = ()  # modules in which nothing after it is kept for backward: recomputing those stops before it

    @property
    def name(self) -> str:
        return f"gather/{self.module or 'model'}"


@dataclass(frozen=True)
class SpatialPolicy:
    """Spatial parallelism of one model over a grid of ranks. Empty: nothing is cut."""

    grid: tuple[int, ...] = ()
    doors: tuple[Door, ...] = ()
    slides: tuple[Slide, ...] = ()
    norms: tuple[Norm, ...] = ()
    gathers: tuple[Regather, ...] = ()
    cut: tuple[str, ...] = ()  # modules that work on blocks
    fates: Mapping[str, str] = field(default_factory=dict)  # layer → how it is cut, or why it is not

    @property
    def ways(self) -> int:
        """Ranks that share a sample; all of them compute its loss."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class Exchange:
    """One message each way with a neighbour: boxes of the buffer (see `Reach`), None where nothing goes that way."""

    dim: int
    peer: int
    send: Box | None
    receive: Box | None


@dataclass(frozen=True)
class Reach:
    """What one rank does before a window slides. Its buffer spans its own block, the halos and the padding, in the buffer's own numbering."""

    shape: tuple[int, ...]
    own: Box  # where the rank's block lies in the buffer
    needed: Box  # what the window is given of it
    exchanges: tuple[Exchange, ...]


def needed_run(slide: Slide, dim: int, at: int, ways: int) -> tuple[int, int]:
    """(start, stop) of the input positions behind one rank's run of the output; below 0 and beyond the size is padding."""
    w = slide.window
    first, count = piece(slide.made[dim], at, ways)
    start = first * w.stride[dim] - w.padding[dim]
    return start, start + (count - 1) * w.stride[dim] + w.dilation[dim] * (w.kernel[dim] - 1) + 1


def reach(slide: Slide, grid: tuple[int, ...], rank: int) -> Reach:
    """A dim that is not cut keeps the operation's own padding, so there the block is the whole."""
    places = place_of(rank, grid)
    own = block(slide.sizes, grid, rank)
    need = [needed_run(slide, d, places[d], ways) if ways > 1 else own[d] for d, ways in enumerate(grid)]
    spans = [(min(n[0], o[0]), max(n[1], o[1])) for n, o in zip(need, own, strict=True)]
    filled = [(max(s, 0), min(e, n)) for (s, e), n in zip(spans, slide.sizes, strict=True)]

    def in_buffer(box: list[tuple[int, int]]) -> Box:
        return tuple((start - span[0], stop - span[0]) for (start, stop), span in zip(box, spans, strict=True))

    def slab(dim: int, run: tuple[int, int]) -> Box | None:
        if run[0] >= run[1]:
            return None
        return in_buffer([*filled[:dim], run, *own[dim + 1 :]])

    found = []
    for dim, ways in enumerate(grid):
        stride = math.prod(grid[dim + 1 :])
        for step in (-1, 1):
            other = places[dim] + step
            if not 0 <= other < ways:
                continue
            theirs = needed_run(slide, dim, other, ways)
            if step < 0:
                send, receive = (own[dim][0], min(theirs[1], own[dim][1])), (filled[dim][0], own[dim][0])
            else:
                send, receive = (max(theirs[0], own[dim][0]), own[dim][1]), (own[dim][1], filled[dim][1])
            if slab(dim, send) or slab(dim, receive):
                found.append(Exchange(dim, rank + step * stride, slab(dim, send), slab(dim, receive)))
    return Reach(lengths(tuple(spans)), in_buffer(list(own)), in_buffer(need), tuple(found))


def obstacle(slide: Slide, grid: tuple[int, ...]) -> str:
    """Why this window cannot slide over blocks; empty if it can."""
    for dim, ways in enumerate(grid):
        if min(slide.sizes[dim], slide.made[dim]) < ways:
            return f"a dim of {min(slide.sizes[dim], slide.made[dim])} cannot be dealt out over {ways} ranks"
        for at in range(ways):
            start, stop = needed_run(slide, dim, at, ways)
            before, after = piece(slide.sizes[dim], max(at - 1, 0), ways), piece(slide.sizes[dim], min(at + 1, ways - 1), ways)
            if ways > 1 and (max(start, 0) < before[0] or min(stop, slide.sizes[dim]) > sum(after)):
                return f"its window reaches past the neighbour, who has {min(before[1], after[1])} of {slide.sizes[dim]} positions"
    return ""


def is_local(slide: Slide, grid: tuple[int, ...]) -> bool:
    """Every rank needs what it holds, from its first position on, and a convolution may leave a rest over: nothing is to be done."""
    rest = slide.window.stride if slide.window.kind == "conv" else (1,) * len(grid)
    for dim, ways in enumerate(grid):
        for at in range(ways) if ways > 1 else ():
            first, count = piece(slide.sizes[dim], at, ways)
            start, stop = needed_run(slide, dim, at, ways)
            if slide.window.padding[dim] or start != first or not 0 <= first + count - stop < rest[dim]:
                return False
    return True


def halo_widths(slide: Slide, grid: tuple[int, ...]) -> tuple[int, ...]:
    """For each dim, the most that a rank is sent from one side."""
    every = [(e.dim, e.receive) for rank in range(math.prod(grid)) for e in reach(slide, grid, rank).exchanges]
    return tuple(max((lengths(box)[dim] for d, box in every if d == dim and box is not None), default=0) for dim in range(len(grid)))


def sent(slide: Slide, grid: tuple[int, ...], rank: int) -> Iterator[tuple[Phase, int, float]]:
    """(phase, to whom, bytes a sample) of every message that a rank sends: borders forward, and the gradients of those it was sent backward."""
    for exchange in reach(slide, grid, rank).exchanges:
        if exchange.send is not None:
            yield "forward", exchange.peer, volume(exchange.send) * slide.bytes
        if exchange.receive is not None and slide.backward:
            yield "backward", exchange.peer, volume(exchange.receive) * slide.bytes


def widest(sizes: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
    """The largest block of any rank: what a gather pads the others to."""
    return lengths(block(sizes, grid, 0))


def choose_grid(ways: int, dims: int) -> tuple[int, ...]:
    """As square as it goes over the last of `dims` spatial dims: 4 is 2×2, 2 is 2×1, 8 is 2×2×2 in a volume and 4×2 in an image."""
    best = min(_factorings(ways, dims), key=lambda f: (max(f), sum(f)))
    used = [n for n in best if n > 1]
    grid = [*used, *[1] * (min(2, dims) - len(used))]
    return (1,) * (dims - len(grid)) + tuple(grid)


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many, largest first."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorings(number // first, parts - 1) if first >= rest[0])


def parse_grid(text: str) -> tuple[int, ...]:
    """'4x1' → (4, 1)."""
    try:
        grid = tuple(int(part) for part in text.split("x"))
    except ValueError:
        grid = ()
    if not grid or min(grid) < 1:
        raise RequestError(f"spatial={text}: write ranks for each dim, like 2x2 or 4x1")
    return grid


def show_grid(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))
