"""The spatial part of a plan: the positions of every sample are sharded, each rank holds a block of them, and neighbours exchange halos.

[Note: blocks and halos]
The ranks of a cp group form a grid. A dim of N positions is split over the grid's extent along it into contiguous ranges, as evenly as
possible and by N alone: tensors of one size are split the same, whichever operation produced them. A sliding-window operation (convolution,
pooling) computes each rank's range of the output, which depends on a range of the input: the rank's own range, plus a halo sent by the
neighbour where the window overlaps its block, minus what the window does not reach, plus padding beyond the outer border. Halos are exchanged
one dim after another, so that the second exchange carries the corners of the first. Runtime and cost model read the same `HaloExchange`s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.dataflow import SlidingWindow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import grid_coordinates
from meshwright.core.tensor_policy import shard_range

HaloPhase = Literal["forward", "backward"]
Box = tuple[tuple[int, int], ...]  # (start, stop) of each spatial dim


def local_box(sizes: tuple[int, ...], grid: tuple[int, ...], rank: int) -> Box:
    """The block of positions that a rank holds."""
    ranges = itertools.starmap(shard_range, zip(sizes, grid_coordinates(rank, grid), grid, strict=True))
    return tuple((first, first + count) for first, count in ranges)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True)
class SpatialInput:
    """A model input whose samples are split into blocks: its position among the input tensors, and its spatial sizes."""

    position: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class WindowOp:
    """A sliding-window call over sharded positions that needs those of other ranks: its module and function, input and output sizes."""

    module: str
    function: str
    window: SlidingWindow
    sizes: tuple[int, ...]
    output_sizes: tuple[int, ...]  # spatial sizes of the output
    bytes: float  # of one position of one sample
    needs_grad: bool = True  # the input needs a gradient


@dataclass(frozen=True)
class SpatialNorm:
    """Statistics over sharded positions, reduced over ranks: `num_statistics` of each kind, per sample or (`is_batch_independent`) per batch."""

    module: str
    function: str
    sizes: tuple[int, ...]
    num_statistics: int
    itemsize: int
    is_batch_independent: bool
    needs_grad: bool = True


@dataclass(frozen=True)
class SpatialGather:
    """An all-gather of blocks: an output of a module, sharded along `dims`, becomes whole."""

    module: str
    position: int
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: float  # of one position of one sample
    skipped_in_recompute: tuple[str, ...] = ()  # modules that save nothing for backward after it: their recompute stops before it

    @property
    def name(self) -> str:
        return f"gather/{self.module or 'model'}"


@dataclass(frozen=True)
class SpatialPolicy:
    """Spatial parallelism of one model over a grid of ranks. Empty: nothing is sharded."""

    grid: tuple[int, ...] = ()
    inputs: tuple[SpatialInput, ...] = ()
    window_ops: tuple[WindowOp, ...] = ()
    norms: tuple[SpatialNorm, ...] = ()
    gathers: tuple[SpatialGather, ...] = ()
    sharded_modules: tuple[str, ...] = ()  # modules that compute on blocks
    layer_notes: Mapping[str, str] = field(default_factory=dict)  # layer → how it is sharded, or why it is not

    @property
    def num_parts(self) -> int:
        """Ranks that share a sample; all of them compute its loss."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class HaloExchange:
    """One message in each direction with a neighbour: boxes of the buffer (see `HaloPlan`); None for a direction without a message."""

    dim: int
    peer: int
    send_box: Box | None
    recv_box: Box | None


@dataclass(frozen=True)
class HaloPlan:
    """One rank's halo exchange before a sliding-window operation. Boxes are in coordinates of a buffer of its own block, halos and padding."""

    shape: tuple[int, ...]
    own_box: Box  # the rank's block in the buffer
    window_box: Box  # the part of the buffer that is the operation's input
    exchanges: tuple[HaloExchange, ...]


def input_range(window_op: WindowOp, dim: int, coordinate: int, num_parts: int) -> tuple[int, int]:
    """(start, stop) of the input positions that one rank's range of the output depends on; below 0 and beyond the size is padding."""
    w = window_op.window
    first, count = shard_range(window_op.output_sizes[dim], coordinate, num_parts)
    start = first * w.stride[dim] - w.padding[dim]
    return start, start + (count - 1) * w.stride[dim] + w.dilation[dim] * (w.kernel[dim] - 1) + 1


def plan_halo(window_op: WindowOp, grid: tuple[int, ...], rank: int) -> HaloPlan:
    """One rank's halo exchange. A dim that is not sharded keeps the operation's own padding, so the block spans it whole."""
    coordinates = grid_coordinates(rank, grid)
    own = local_box(window_op.sizes, grid, rank)
    needed = [input_range(window_op, dim, coordinates[dim], degree) if degree > 1 else own[dim] for dim, degree in enumerate(grid)]
    spans = [(min(n[0], o[0]), max(n[1], o[1])) for n, o in zip(needed, own, strict=True)]
    unpadded = [(max(start, 0), min(stop, size)) for (start, stop), size in zip(spans, window_op.sizes, strict=True)]

    def in_buffer(box: Sequence[tuple[int, int]]) -> Box:
        return tuple((start - span[0], stop - span[0]) for (start, stop), span in zip(box, spans, strict=True))

    def slab(dim: int, positions: tuple[int, int]) -> Box | None:
        return in_buffer([*unpadded[:dim], positions, *own[dim + 1 :]]) if positions[0] < positions[1] else None

    exchanges = []
    for dim, step in itertools.product(range(len(grid)), (-1, 1)):
        neighbour = coordinates[dim] + step
        if not 0 <= neighbour < grid[dim]:
            continue
        start, stop = own[dim]
        needs_from, needs_to = input_range(window_op, dim, neighbour, grid[dim])
        if step < 0:
            send, receive = slab(dim, (start, min(needs_to, stop))), slab(dim, (unpadded[dim][0], start))
        else:
            send, receive = slab(dim, (max(needs_from, start), stop)), slab(dim, (stop, unpadded[dim][1]))
        if send or receive:
            exchanges.append(HaloExchange(dim, rank + step * math.prod(grid[dim + 1 :]), send, receive))
    return HaloPlan(box_shape(tuple(spans)), in_buffer(own), in_buffer(needed), tuple(exchanges))


def halo_obstacle(window_op: WindowOp, grid: tuple[int, ...]) -> str:
    """Why this operation cannot run on blocks; empty if it can."""
    for dim, (degree, size) in enumerate(zip(grid, window_op.sizes, strict=True)):
        if (smaller := min(size, window_op.output_sizes[dim])) < degree:
            return f"a dim of {smaller} cannot be split over {degree} ranks"
        for i in range(degree) if degree > 1 else ():
            start, stop = input_range(window_op, dim, i, degree)
            before, after = shard_range(size, max(i - 1, 0), degree), shard_range(size, min(i + 1, degree - 1), degree)
            if max(start, 0) < before[0] or min(stop, size) > sum(after):
                return f"its window reaches past the neighbour, who has {min(before[1], after[1])} of {size} positions"
    return ""


def is_local(window_op: WindowOp, grid: tuple[int, ...]) -> bool:
    """Whether every rank needs only positions it holds, from its first on (a convolution may leave the last ones unused): no exchange."""
    max_unused = window_op.window.stride if window_op.window.kind == "conv" else (1,) * len(grid)
    for dim, degree in enumerate(grid):
        for i in range(degree) if degree > 1 else ():
            first, count = shard_range(window_op.sizes[dim], i, degree)
            start, stop = input_range(window_op, dim, i, degree)
            if window_op.window.padding[dim] or start != first or not 0 <= first + count - stop < max_unused[dim]:
                return False
    return True


def halo_widths(window_op: WindowOp, grid: tuple[int, ...]) -> tuple[int, ...]:
    """For each dim, the widest halo that any rank receives from one side."""
    exchanges = [e for rank in range(math.prod(grid)) for e in plan_halo(window_op, grid, rank).exchanges]
    return tuple(max((box_shape(e.recv_box)[dim] for e in exchanges if e.dim == dim and e.recv_box), default=0) for dim in range(len(grid)))


def halo_messages(window_op: WindowOp, grid: tuple[int, ...], rank: int) -> Iterator[tuple[HaloPhase, int, float]]:
    """(phase, destination, bytes per sample) of every message that a rank sends: halos in forward, gradients of received halos in backward."""
    for exchange in plan_halo(window_op, grid, rank).exchanges:
        if exchange.send_box is not None:
            yield "forward", exchange.peer, volume(exchange.send_box) * window_op.bytes
        if exchange.recv_box is not None and window_op.needs_grad:
            yield "backward", exchange.peer, volume(exchange.recv_box) * window_op.bytes


def largest_block(sizes: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
    """The largest block of any rank: an all-gather pads the others to it."""
    return box_shape(local_box(sizes, grid, 0))


def choose_grid(num_parts: int, dims: int) -> tuple[int, ...]:
    """The most nearly square grid over the last of `dims` spatial dims: 4 is 2×2, 2 is 2×1, 8 is 2×2×2 in a volume and 4×2 in an image."""
    squarest = min(_factorizations(num_parts, dims), key=lambda f: (max(f), sum(f)))
    degrees = [n for n in squarest if n > 1]
    grid = [*degrees, *[1] * (min(2, dims) - len(degrees))]
    return (1,) * (dims - len(grid)) + tuple(grid)


def _factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """The products of `num_factors` factors, largest first, that make a number."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    for factors in itertools.product(divisors, repeat=num_factors):
        if math.prod(factors) == number and sorted(factors, reverse=True) == list(factors):
            yield factors


def parse_grid(text: str) -> tuple[int, ...]:
    """'4x1' → (4, 1)."""
    try:
        grid = tuple(int(part) for part in text.split("x"))
    except ValueError:
        grid = ()
    if not grid or min(grid) < 1:
        raise RequestError(f"spatial={text}: write ranks for each dim, like 2x2 or 4x1")
    return grid


def show_grid(grid: tuple[int, ...]) -> str:
    return "x".join(map(str, grid))
