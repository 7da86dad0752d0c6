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

from meshwright.comm.window import FULL, SUMMED, Window

Combine = Callable[..., object]  # (a, b, out=…): torch.add and the like
Then = Callable[[torch.Tensor], object]
Span = tuple[int, int]  # an address and bytes from there on
_SIZE = itemgetter(1)
_SHORT = 1 << 21  # bytes to add up from all others, up to which everyone adds up everything: one turn instead of two
# Bytes of a piece where one rank writes and others read: a sixteenth of all, so that they do it at the same time, but worth a signal, and in a cache.
_STREAM = 1 << 18, 1 << 20


def all_reduce(window: Window, whole: torch.Tensor, combine: Combine, then: Then, what: str) -> None:
    """In place, of a flat tensor; `then` is done to what is summed."""
    if window.size == 1:
        then(whole)
    elif whole.nbytes * (window.size - 1) <= _SHORT and whole.nbytes <= window.piece * window.size:
        _by_all(window, whole, combine, then, what)
    else:
        sizes = lengths(whole.numel(), window.size)
        own = whole.narrow(0, sum(sizes[: window.me]), sizes[window.me])
        _by_parts(window, cut(whole, sizes), own, own, combine, then, what)


def scatter(window: Window, spans: Sequence[Span], own: torch.Tensor, out: torch.Tensor, combine: Combine, what: str) -> None:
    """The sum of everybody's part of this rank into `out`, which may be `own`, this rank's own part; other parts are left as they are."""
    room = window.piece
    if window.size == 1:
        out.copy_(own)
        return
    steps = _steps(spans, room)
    first = window.begin(steps)
    for step in range(steps + 1):
        if step < steps:
            _fill(window, first + step, step, spans, room)
        if step:
            window.hear(FULL, what)
            _add_into(window, first + step - 1, step - 1, own, _narrowed(out, step - 1, room), combine)


def gather(window: Window, spans: Sequence[Span], source: int, what: str) -> None:
    """Everyone's own part, which lies at `source`, to its place among all."""
    room, (own, length) = _stream(window, sum(map(_SIZE, spans))), spans[window.me]
    steps = _steps(spans, room)
    if steps == 1:
        _gather_at_once(window, spans, source, what)
        return
    first = window.begin(steps)
    for step in range(steps + 1):
        if step < steps:
            start, size = _piece((source, length), step, room)
            window.copy(window.slot(window.me, first + step), start, size)
            window.tell(FULL)
            if source != own:
                window.copy(own + step * room, start, size)
        if step:
            window.hear(FULL, what)
            for peer in window.others:
                start, size = _piece(spans[peer], step - 1, room)
                window.copy(start, window.slot(peer, first + step - 1), size)


def _gather_at_once(window: Window, spans: Sequence[Span], source: int, what: str) -> None:
    """The same in one step: a tenth of 1 MB among four was what Python did for pieces."""
    step, copy, slot, (own, length) = window.begin(1), window.copy, window.slot, spans[window.me]
    copy(slot(window.me, step), source, length)
    window.tell(FULL)
    if source != own:
        copy(own, source, length)
    window.hear(FULL, what)
    for peer in window.others:
        start, size = spans[peer]
        copy(start, slot(peer, step), size)


def _by_all(window: Window, whole: torch.Tensor, combine: Combine, then: Then, what: str) -> None:
    """In the order of ranks, so that all come to the same bits."""
    step = window.begin(1)
    window.copy(window.slot(window.me, step), whole.data_ptr(), whole.nbytes)
    window.tell(FULL)
    window.hear(FULL, what)
    every = [window.view(rank, step, 0, whole.numel(), whole.dtype) for rank in range(window.size)]
    if window.me < 2:  # what is ours is in a cache, and read before it is written over
        every[window.me] = whole
    combine(every[0], every[1], out=whole)
    for other in every[2:]:
        combine(whole, other, out=whole)
    then(whole)


def _by_parts(
    window: Window, spans: Sequence[Span], own: torch.Tensor, out: torch.Tensor, combine: Combine, then: Then, what: str
) -> None:  # fmt: skip
    """Everybody's part of this rank is summed, and the sums come back to everyone."""
    me, room = window.me, window.piece
    steps = _steps(spans, room)
    first = window.begin(steps)
    for step in range(steps + 2):
        if step < steps:
            _fill(window, first + step, step, spans, room)
        if step > 1:
            window.hear(SUMMED, what)
            for peer in window.others:
                start, size = _piece(spans[peer], step - 2, room)
                window.copy(start, window.slot(peer, first + step - 2) + peer * room, size)
        if 0 < step <= steps:
            window.hear(FULL, what)
            at, size = _piece(spans[me], step - 1, room)
            place = window.view(me, first + step - 1, me * room, size // own.element_size(), own.dtype)  # first where others wait for it
            _add_into(window, first + step - 1, step - 1, own, place, combine)
            then(place)
            window.tell(SUMMED)
            window.copy(at, window.slot(me, first + step - 1) + me * room, size)


def _fill(window: Window, slot: int, step: int, spans: Sequence[Span], room: int) -> None:
    """This rank's slot with a piece of every other rank's part."""
    here = window.slot(window.me, slot)
    for peer in window.others:
        start, size = _piece(spans[peer], step, room)
        window.copy(here + peer * room, start, size)
    window.tell(FULL)


def _add_into(window: Window, slot: int, step: int, own: torch.Tensor, into: torch.Tensor, combine: Combine) -> None:
    total = _narrowed(own, step, window.piece)
    for peer in window.others:
        combine(total, window.view(peer, slot, window.me * window.piece, into.numel(), own.dtype), out=into)
        total = into


def _narrowed(flat: torch.Tensor, step: int, room: int) -> torch.Tensor:
    most = room // flat.element_size()
    if flat.numel() <= most and not step:
        return flat
    start = min(step * most, flat.numel())
    return flat.narrow(0, start, min(most, flat.numel() - start))


def spans_of(parts: Sequence[torch.Tensor]) -> list[Span]:
    return [(part.data_ptr(), part.nbytes) for part in parts]


def lengths(numel: int, ways: int) -> list[int]:
    """Nearly equal; the first ones are longer by one."""
    least, more = divmod(numel, ways)
    return [least + (i < more) for i in range(ways)]


def cut(whole: torch.Tensor, lengths: Sequence[int]) -> list[Span]:
    start, width = whole.data_ptr(), whole.element_size()
    spans = []
    for length in lengths:
        spans.append((start, length * width))
        start += length * width
    return spans


def _piece(span: Span, step: int, room: int) -> Span:
    """What goes in one step; a part that is shorter than others has nothing left in the last."""
    start, size = span
    at = step * room
    return start + at, max(min(size - at, room), 0)


def _stream(window: Window, size: int) -> int:
    least, most = _STREAM
    return min(max(size >> 16 << 12, least), most, window.piece * window.size)


def _steps(spans: Sequence[Span], room: int) -> int:
    """At least one, so that ranks meet."""
    return max(-(-max(map(_SIZE, spans)) // room), 1)
