"""Collectives through a shared-memory window: each rank reduces directly from the slots of the other ranks. All calls block; a work queue runs them.

[Note: slots]
A tensor is processed in steps. Each rank owns one part of it, and in step k a rank does three things: it writes one chunk of every other rank's
part into its slot k and signals SLOT_FILLED; it copies the sums of step k-2 from the other ranks' slots; it reduces the chunks of its own part of
step k-1 from all slots, writes the sum into its slot and signals SLOT_REDUCED. So no rank waits for data that was written in the same step, and a
chunk is small enough to be still in the cache when another rank reads it. One rank reduces each part, so all ranks get the same bits.

In every step each rank signals every peer and waits for every peer, even if it has no data to send. SLOT_FILLED of step k implies that its sender
has read the chunks of step k-2, and SLOT_REDUCED of step k that it has read the sums of step k-1. So four slots are enough, within a call and from
one call to the next, and no rank needs to acknowledge what it has read.

Chunks are copied by address, because creating a tensor for each chunk was the largest cost of a small call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

from meshwright.comm.shared_memory_window import SLOT_FILLED, SLOT_REDUCED, SharedMemoryWindow

Combine = Callable[..., object]  # called as (a, b, out=…), such as torch.add
PostReduce = Callable[[torch.Tensor], object]
AddressRange = tuple[int, int]  # start address, number of bytes
_byte_count = itemgetter(1)
_ONE_SHOT_MAX_BYTES = 1 << 21  # bytes read from peers up to which each rank reduces the whole tensor: one phase, not two
# Smallest and largest chunk of an all-gather: 1/16 of all bytes, so that writing and reading overlap, but worth a signal and within a cache.
_STREAM_CHUNK_BYTES = 1 << 18, 1 << 20


def all_reduce(window: SharedMemoryWindow, whole: torch.Tensor, reduce_fn: Combine, post_reduce: PostReduce, operation: str) -> None:
    """All-reduce a flat tensor in place and apply `post_reduce` to the result."""
    if window.size == 1:
        post_reduce(whole)
    elif whole.nbytes * (window.size - 1) <= _ONE_SHOT_MAX_BYTES and whole.nbytes <= window.chunk_bytes * window.size:
        _one_shot_all_reduce(window, whole, reduce_fn, post_reduce, operation)
    else:
        sizes = split_sizes(whole.numel(), window.size)
        own = whole.narrow(0, sum(sizes[: window.rank]), sizes[window.rank])
        _two_shot_all_reduce(window, split_ranges(whole, sizes), own, own, reduce_fn, post_reduce, operation)


def reduce_scatter(
    window: SharedMemoryWindow, ranges: Sequence[AddressRange], own: torch.Tensor, out: torch.Tensor, reduce_fn: Combine, operation: str
) -> None:
    """Reduce this rank's part over all ranks into `out`, which may be `own`, the local copy of that part. The other parts are not changed."""
    room = window.chunk_bytes
    if window.size == 1:
        out.copy_(own)
        return
    steps = _num_steps(ranges, room)
    first = window.reserve_steps(steps)
    for step in range(steps + 1):
        if step < steps:
            _fill_slot(window, first + step, step, ranges, room)
        if step:
            window.await_peers(SLOT_FILLED, operation)
            _reduce_into(window, first + step - 1, step - 1, own, _chunk_of(out, step - 1, room), reduce_fn)


def all_gather(window: SharedMemoryWindow, ranges: Sequence[AddressRange], source: int, operation: str) -> None:
    """Copy every rank's part, which is at address `source` on that rank, to its range in `ranges` on all ranks."""
    room, (own, length) = _stream_chunk_bytes(window, sum(map(_byte_count, ranges))), ranges[window.rank]
    steps = _num_steps(ranges, room)
    if steps == 1:
        _one_step_all_gather(window, ranges, source, operation)
        return
    first = window.reserve_steps(steps)
    for step in range(steps + 1):
        if step < steps:
            start, size = _chunk_range((source, length), step, room)
            window.memcpy(window.slot_address(window.rank, first + step), start, size)
            window.signal_peers(SLOT_FILLED)
            if source != own:
                window.memcpy(own + step * room, start, size)
        if step:
            window.await_peers(SLOT_FILLED, operation)
            for peer in window.peers:
                start, size = _chunk_range(ranges[peer], step - 1, room)
                window.memcpy(start, window.slot_address(peer, first + step - 1), size)


def _one_step_all_gather(window: SharedMemoryWindow, ranges: Sequence[AddressRange], source: int, operation: str) -> None:
    """All-gather without chunks: the Python code for chunks took a tenth of the time of 1 MB among four ranks."""
    step, copy, slot, (own, length) = window.reserve_steps(1), window.memcpy, window.slot_address, ranges[window.rank]
    copy(slot(window.rank, step), source, length)
    window.signal_peers(SLOT_FILLED)
    if source != own:
        copy(own, source, length)
    window.await_peers(SLOT_FILLED, operation)
    for peer in window.peers:
        start, size = ranges[peer]
        copy(start, slot(peer, step), size)


def _one_shot_all_reduce(window: SharedMemoryWindow, whole: torch.Tensor, reduce_fn: Combine, post_reduce: PostReduce, operation: str) -> None:
    """Every rank reduces the whole tensor, in rank order, so that all ranks get the same bits."""
    step = window.reserve_steps(1)
    window.memcpy(window.slot_address(window.rank, step), whole.data_ptr(), whole.nbytes)
    window.signal_peers(SLOT_FILLED)
    window.await_peers(SLOT_FILLED, operation)
    every = [window.view(rank, step, 0, whole.numel(), whole.dtype) for rank in range(window.size)]
    if window.rank < 2:  # the local tensor is in a cache; it is an operand of the first call, so it is read before `out` overwrites it
        every[window.rank] = whole
    reduce_fn(every[0], every[1], out=whole)
    for other in every[2:]:
        reduce_fn(whole, other, out=whole)
    post_reduce(whole)


def _two_shot_all_reduce(
    window: SharedMemoryWindow,
    ranges: Sequence[AddressRange],
    own: torch.Tensor,
    out: torch.Tensor,
    reduce_fn: Combine,
    post_reduce: PostReduce,
    operation: str,
) -> None:
    """Each rank reduces its own part, then all ranks gather the reduced parts ([Note: slots])."""
    me, room = window.rank, window.chunk_bytes
    steps = _num_steps(ranges, room)
    first = window.reserve_steps(steps)
    for step in range(steps + 2):
        if step < steps:
            _fill_slot(window, first + step, step, ranges, room)
        if step > 1:
            window.await_peers(SLOT_REDUCED, operation)
            for peer in window.peers:
                start, size = _chunk_range(ranges[peer], step - 2, room)
                window.memcpy(start, window.slot_address(peer, first + step - 2) + peer * room, size)
        if 0 < step <= steps:
            window.await_peers(SLOT_FILLED, operation)
            at, size = _chunk_range(ranges[me], step - 1, room)
            place = window.view(me, first + step - 1, me * room, size // own.element_size(), own.dtype)  # slot first: peers wait for it
            _reduce_into(window, first + step - 1, step - 1, own, place, reduce_fn)
            post_reduce(place)
            window.signal_peers(SLOT_REDUCED)
            window.memcpy(at, window.slot_address(me, first + step - 1) + me * room, size)


def _fill_slot(window: SharedMemoryWindow, slot: int, step: int, ranges: Sequence[AddressRange], chunk_bytes: int) -> None:
    """Write one chunk of every other rank's part into this rank's slot, and signal the peers."""
    here = window.slot_address(window.rank, slot)
    for peer in window.peers:
        start, size = _chunk_range(ranges[peer], step, chunk_bytes)
        window.memcpy(here + peer * chunk_bytes, start, size)
    window.signal_peers(SLOT_FILLED)


def _reduce_into(window: SharedMemoryWindow, slot: int, step: int, own: torch.Tensor, into: torch.Tensor, reduce_fn: Combine) -> None:
    total = _chunk_of(own, step, window.chunk_bytes)
    for peer in window.peers:
        reduce_fn(total, window.view(peer, slot, window.rank * window.chunk_bytes, into.numel(), own.dtype), out=into)
        total = into


def _chunk_of(flat: torch.Tensor, step: int, chunk_bytes: int) -> torch.Tensor:
    most = chunk_bytes // flat.element_size()
    if flat.numel() <= most and not step:
        return flat
    start = min(step * most, flat.numel())
    return flat.narrow(0, start, min(most, flat.numel() - start))


def address_ranges(parts: Sequence[torch.Tensor]) -> list[AddressRange]:
    return [(part.data_ptr(), part.nbytes) for part in parts]


def split_sizes(numel: int, parts: int) -> list[int]:
    """Nearly equal sizes; the first ones may be larger by one."""
    least, more = divmod(numel, parts)
    return [least + (i < more) for i in range(parts)]


def split_ranges(whole: torch.Tensor, sizes: Sequence[int]) -> list[AddressRange]:
    start, width = whole.data_ptr(), whole.element_size()
    spans = []
    for length in sizes:
        spans.append((start, length * width))
        start += length * width
    return spans


def _chunk_range(address_range: AddressRange, step: int, chunk_bytes: int) -> AddressRange:
    """The chunk of `address_range` for one step. It is empty in the last steps of a part that is shorter than others."""
    start, size = address_range
    at = step * chunk_bytes
    return start + at, max(min(size - at, chunk_bytes), 0)


def _stream_chunk_bytes(window: SharedMemoryWindow, size: int) -> int:
    least, most = _STREAM_CHUNK_BYTES
    return min(max(size >> 16 << 12, least), most, window.chunk_bytes * window.size)


def _num_steps(ranges: Sequence[AddressRange], chunk_bytes: int) -> int:
    """Steps that the longest part needs; at least one, so that the ranks always synchronize."""
    return max(-(-max(map(_byte_count, ranges)) // chunk_bytes), 1)
