"""Collectives through a shared-memory window: each rank reduces directly from the slots of the other ranks. All calls block; a work queue runs them.

[Note: slots]
A tensor is processed in steps. Each rank reduces one part of it, and in step k a rank does three things: it writes one chunk of every other rank's
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

from torch import Tensor

from meshwright.comm.shared_memory_window import SLOT_FILLED, SLOT_REDUCED, SharedMemoryWindow

Combine = Callable[..., object]  # called as (a, b, out=…), such as torch.add
PostReduce = Callable[[Tensor], object]
AddressRange = tuple[int, int]  # start address, number of bytes
_byte_count = itemgetter(1)
_ONE_SHOT_MAX_BYTES = 1 << 21  # bytes read from peers up to which each rank reduces the whole tensor: one phase, not two
# Smallest and largest chunk of an all-gather: 1/16 of all bytes, so that writing and reading overlap, but worth a signal and within a cache.
_STREAM_CHUNK_BYTES = 1 << 18, 1 << 20


def all_reduce(window: SharedMemoryWindow, tensor: Tensor, reduce_fn: Combine, post_reduce: PostReduce, operation: str) -> None:
    """All-reduce a flat tensor in place and apply `post_reduce` to the result."""
    if window.size == 1:
        post_reduce(tensor)
    elif tensor.nbytes * (window.size - 1) <= _ONE_SHOT_MAX_BYTES and tensor.nbytes <= window.chunk_bytes * window.size:
        _one_shot_all_reduce(window, tensor, reduce_fn, post_reduce, operation)
    else:
        parts = tensor.tensor_split(window.size)
        _two_shot_all_reduce(window, address_ranges(parts), parts[window.rank], reduce_fn, post_reduce, operation)


def reduce_scatter(window: SharedMemoryWindow, ranges: Sequence[AddressRange], part: Tensor, out: Tensor, reduce_fn: Combine, operation: str) -> None:
    """Reduce this rank's part over all ranks into `out`, which may be `part`, its local copy. The other parts are not changed."""
    chunk_bytes = window.chunk_bytes
    if window.size == 1:
        out.copy_(part)
        return
    steps = _num_steps(ranges, chunk_bytes)
    first = window.reserve_steps(steps)
    for step in range(steps + 1):
        if step < steps:
            _fill_slot(window, first + step, step, ranges, chunk_bytes)
        if step:
            window.await_peers(SLOT_FILLED, operation)
            _reduce_into(window, first + step - 1, step - 1, part, _chunk_of(out, step - 1, chunk_bytes), reduce_fn)


def all_gather(window: SharedMemoryWindow, ranges: Sequence[AddressRange], source: int, operation: str) -> None:
    """Copy every rank's part, which is at address `source` on that rank, to its range in `ranges` on all ranks."""
    chunk_bytes, (own_start, length) = _stream_chunk_bytes(window, sum(map(_byte_count, ranges))), ranges[window.rank]
    steps = _num_steps(ranges, chunk_bytes)
    if steps == 1:
        _one_step_all_gather(window, ranges, source, operation)
        return
    first = window.reserve_steps(steps)
    for step in range(steps + 1):
        if step < steps:
            start, size = _chunk_range((source, length), step, chunk_bytes)
            window.memcpy(window.slot_address(window.rank, first + step), start, size)
            window.signal_peers(SLOT_FILLED)
            if source != own_start:
                window.memcpy(own_start + step * chunk_bytes, start, size)
        if step:
            window.await_peers(SLOT_FILLED, operation)
            for peer in window.peers:
                start, size = _chunk_range(ranges[peer], step - 1, chunk_bytes)
                window.memcpy(start, window.slot_address(peer, first + step - 1), size)


def _one_step_all_gather(window: SharedMemoryWindow, ranges: Sequence[AddressRange], source: int, operation: str) -> None:
    """All-gather without chunks: the Python code for chunks took a tenth of the time of 1 MB among four ranks."""
    step, copy, slot, (own_start, length) = window.reserve_steps(1), window.memcpy, window.slot_address, ranges[window.rank]
    copy(slot(window.rank, step), source, length)
    window.signal_peers(SLOT_FILLED)
    if source != own_start:
        copy(own_start, source, length)
    window.await_peers(SLOT_FILLED, operation)
    for peer in window.peers:
        start, size = ranges[peer]
        copy(start, slot(peer, step), size)


def _one_shot_all_reduce(window: SharedMemoryWindow, tensor: Tensor, reduce_fn: Combine, post_reduce: PostReduce, operation: str) -> None:
    """Every rank reduces the whole tensor, in rank order, so that all ranks get the same bits."""
    step = window.reserve_steps(1)
    window.memcpy(window.slot_address(window.rank, step), tensor.data_ptr(), tensor.nbytes)
    window.signal_peers(SLOT_FILLED)
    window.await_peers(SLOT_FILLED, operation)
    inputs = [window.view(rank, step, 0, tensor.numel(), tensor.dtype) for rank in range(window.size)]
    if window.rank < 2:  # the local tensor is in a cache; it is an operand of the first call, so it is read before `out` overwrites it
        inputs[window.rank] = tensor
    reduce_fn(inputs[0], inputs[1], out=tensor)
    for other in inputs[2:]:
        reduce_fn(tensor, other, out=tensor)
    post_reduce(tensor)


def _two_shot_all_reduce(
    window: SharedMemoryWindow, ranges: Sequence[AddressRange], part: Tensor, reduce_fn: Combine, post_reduce: PostReduce, operation: str
) -> None:
    """Each rank reduces its own part, then all ranks gather the reduced parts ([Note: slots])."""
    me, chunk_bytes = window.rank, window.chunk_bytes
    steps = _num_steps(ranges, chunk_bytes)
    first = window.reserve_steps(steps)
    for step in range(steps + 2):
        if step < steps:
            _fill_slot(window, first + step, step, ranges, chunk_bytes)
        if step > 1:
            window.await_peers(SLOT_REDUCED, operation)
            for peer in window.peers:
                start, size = _chunk_range(ranges[peer], step - 2, chunk_bytes)
                window.memcpy(start, window.slot_address(peer, first + step - 2) + peer * chunk_bytes, size)
        if 0 < step <= steps:
            window.await_peers(SLOT_FILLED, operation)
            start, size = _chunk_range(ranges[me], step - 1, chunk_bytes)
            in_slot = window.view(me, first + step - 1, me * chunk_bytes, size // part.element_size(), part.dtype)  # slot first: peers wait for it
            _reduce_into(window, first + step - 1, step - 1, part, in_slot, reduce_fn)
            post_reduce(in_slot)
            window.signal_peers(SLOT_REDUCED)
            window.memcpy(start, window.slot_address(me, first + step - 1) + me * chunk_bytes, size)


def _fill_slot(window: SharedMemoryWindow, slot: int, step: int, ranges: Sequence[AddressRange], chunk_bytes: int) -> None:
    """Write one chunk of every other rank's part into this rank's slot, and signal the peers."""
    slot_start = window.slot_address(window.rank, slot)
    for peer in window.peers:
        start, size = _chunk_range(ranges[peer], step, chunk_bytes)
        window.memcpy(slot_start + peer * chunk_bytes, start, size)
    window.signal_peers(SLOT_FILLED)


def _reduce_into(window: SharedMemoryWindow, slot: int, step: int, part: Tensor, into: Tensor, reduce_fn: Combine) -> None:
    total = _chunk_of(part, step, window.chunk_bytes)
    for peer in window.peers:
        reduce_fn(total, window.view(peer, slot, window.rank * window.chunk_bytes, into.numel(), part.dtype), out=into)
        total = into


def _chunk_of(flat: Tensor, step: int, chunk_bytes: int) -> Tensor:
    max_elements = chunk_bytes // flat.element_size()
    if flat.numel() <= max_elements and not step:
        return flat
    start = min(step * max_elements, flat.numel())
    return flat.narrow(0, start, min(max_elements, flat.numel() - start))


def address_ranges(parts: Sequence[Tensor]) -> list[AddressRange]:
    return [(part.data_ptr(), part.nbytes) for part in parts]


def _chunk_range(address_range: AddressRange, step: int, chunk_bytes: int) -> AddressRange:
    """The chunk of `address_range` for one step. It is empty in the last steps of a part that is shorter than others."""
    start, size = address_range
    offset = step * chunk_bytes
    return start + offset, max(min(size - offset, chunk_bytes), 0)


def _stream_chunk_bytes(window: SharedMemoryWindow, size: int) -> int:
    smallest, largest = _STREAM_CHUNK_BYTES
    return min(max(size >> 16 << 12, smallest), largest, window.chunk_bytes * window.size)


def _num_steps(ranges: Sequence[AddressRange], chunk_bytes: int) -> int:
    """Steps that the longest part needs; at least one, so that the ranks always synchronize."""
    return max(-(-max(map(_byte_count, ranges)) // chunk_bytes), 1)
