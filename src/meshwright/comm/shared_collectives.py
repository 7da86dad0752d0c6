"""Collectives of ranks that share memory: everyone adds up straight from the others' slots of a window. Blocking: a work queue runs them.

[Note: slots]
A tensor goes through in steps. In step k a rank writes a piece of every other rank's part into its slot k, and says that it is full; reads the
others' sums of step k-2; adds the pieces of its own part of step k-1 from all slots, puts the sum into its slot in turn, and says so. So nobody
waits for what was begun only now, and slots are small enough for what one rank writes to be in a cache when another reads it. Every part is
summed by one rank, so all end with the same bits.

In every step everybody tells everybody and hears everybody, even a rank that has nothing to give: who has heard step k from another one knows
that it has read all of step k-2, and of step k-1 all but sums. So four slots are enough and nobody has to say what it has read, in a call and
from one call to the next.

Memory is copied by address: of what a small call costs, tensors made for pieces were the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

from meshwright.comm.shared_memory_window import SLOT_FILLED, SLOT_REDUCED, SharedMemoryWindow

Combine = Callable[..., object]  # (a, b, out=…): torch.add and the like
PostReduce = Callable[[torch.Tensor], object]
AddressRange = tuple[int, int]  # an address and bytes from there on
_byte_count = itemgetter(1)
_ONE_SHOT_MAX_BYTES = 1 << 21  # bytes to add up from all others, up to which everyone adds up everything: one turn instead of two
# Bytes of a piece where one rank writes and others read: a sixteenth of all, so that they do it at the same time, but worth a signal, and in a cache.
_STREAM_CHUNK_BYTES = 1 << 18, 1 << 20


def all_reduce(window: SharedMemoryWindow, whole: torch.Tensor, reduce_fn: Combine, post_reduce: PostReduce, operation: str) -> None:
    """In place, of a flat tensor; `post_reduce` is done to what is summed."""
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
    """The sum of everybody's part of this rank into `out`, which may be `own`, this rank's own part; other parts are left as they are."""
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
    """Everyone's own part, which lies at `source`, to its place among all."""
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
    """The same in one step: a tenth of 1 MB among four was what Python did for pieces."""
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
    """In the order of ranks, so that all come to the same bits."""
    step = window.reserve_steps(1)
    window.memcpy(window.slot_address(window.rank, step), whole.data_ptr(), whole.nbytes)
    window.signal_peers(SLOT_FILLED)
    window.await_peers(SLOT_FILLED, operation)
    every = [window.view(rank, step, 0, whole.numel(), whole.dtype) for rank in range(window.size)]
    if window.rank < 2:  # what is ours is in a cache, and read before it is written over
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
    """Everybody's part of this rank is summed, and the sums come back to everyone."""
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
            place = window.view(me, first + step - 1, me * room, size // own.element_size(), own.dtype)  # first where others wait for it
            _reduce_into(window, first + step - 1, step - 1, own, place, reduce_fn)
            post_reduce(place)
            window.signal_peers(SLOT_REDUCED)
            window.memcpy(at, window.slot_address(me, first + step - 1) + me * room, size)


def _fill_slot(window: SharedMemoryWindow, slot: int, step: int, ranges: Sequence[AddressRange], chunk_bytes: int) -> None:
    """This rank's slot with a piece of every other rank's part."""
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
    """Nearly equal; the first ones are longer by one."""
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
    """What goes in one step; a part that is shorter than others has nothing left in the last."""
    start, size = address_range
    at = step * chunk_bytes
    return start + at, max(min(size - at, chunk_bytes), 0)


def _stream_chunk_bytes(window: SharedMemoryWindow, size: int) -> int:
    least, most = _STREAM_CHUNK_BYTES
    return min(max(size >> 16 << 12, least), most, window.chunk_bytes * window.size)


def _num_steps(ranges: Sequence[AddressRange], chunk_bytes: int) -> int:
    """At least one, so that ranks meet."""
    return max(-(-max(map(_byte_count, ranges)) // chunk_bytes), 1)
