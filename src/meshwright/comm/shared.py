"""Collectives of ranks that share memory: everyone adds up straight from the others' slots of a window. Blocking, as `algorithms.py` is.

[Note: slots]
A tensor goes through in steps. In step k a rank writes a piece of every other rank's part into its slot k, and says that it is full; adds the
pieces of its own part from all slots, puts the sum into its slot in turn, and says so; and reads the sums of the others. These three are done for
steps k, k-1 and k-2 one after the other, so that nobody waits for what was begun only now; slots are small enough for what one rank writes
to be in a cache when another reads it. Nothing is under way when a call ends. Every part is summed by one rank, so all end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshwright.comm.algorithms import Combine, cut
from meshwright.comm.window import FULL, READ, SLOTS, SUMMED, Window

Then = Callable[[torch.Tensor], object]
_SHORT = 1 << 21  # bytes to add up from all others, up to which everyone adds up everything: one turn instead of two


def all_reduce(window: Window, whole: torch.Tensor, combine: Combine, then: Then, what: str) -> None:
    """In place, of a flat tensor; `then` is done to what is summed."""
    if window.size == 1:
        then(whole)
    elif whole.nbytes * (window.size - 1) <= _SHORT and whole.nbytes <= window.piece * window.size:
        _by_all(window, whole, combine, then, what)
    else:
        parts = cut(whole, window.size)
        _by_parts(window, parts, parts[window.me], combine, then, what, back=True)


def scatter(window: Window, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine, what: str) -> None:
    """The sum of everybody's part of this rank into `out`, which may be that part; other parts are left as they are."""
    if window.size == 1:
        out.copy_(parts[0])
    else:
        _by_parts(window, parts, out, combine, _nothing, what, back=False)


@dataclass(frozen=True)
class Near:
    """The two halves above as the inner level of two (`algorithms.Halves`)."""

    window: Window
    what: str

    def scatter(self, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine) -> None:
        scatter(self.window, parts, out, combine, self.what)

    def gather(self, parts: Sequence[torch.Tensor]) -> None:
        gather(self.window, parts, self.what)


def gather(window: Window, parts: Sequence[torch.Tensor], what: str) -> None:
    """Everyone's own part, in place. A slot is one piece: nothing else has to have room in it."""
    room = window.piece * window.size
    pieces = _pieces(parts, room)
    first = window.begin(len(pieces))
    for step in range(len(pieces) + 1):
        if step < len(pieces):
            _fill(window, first + step, [(0, pieces[step][window.me])], room, what)
        if step:
            window.hear(FULL, what)
            for peer in window.others:
                piece = pieces[step - 1][peer]
                piece.copy_(_room(window, peer, first + step - 1, 0, piece, room))
            window.tell(READ)


def _by_all(window: Window, whole: torch.Tensor, combine: Combine, then: Then, what: str) -> None:
    """In the order of ranks, so that all come to the same bits."""
    step, room = window.begin(1), window.piece * window.size
    _fill(window, step, [(0, whole)], room, what)
    window.hear(FULL, what)
    every = [_room(window, r, step, 0, whole, room) for r in range(window.size)]
    combine(every[0], every[1], out=whole)
    for other in every[2:]:
        combine(whole, other, out=whole)
    window.tell(READ)
    then(whole)


def _by_parts(
    window: Window, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine, then: Then, what: str, back: bool
) -> None:  # fmt: skip
    """Everybody's part of this rank, summed, into `out`; with `back`, the others' sums into their parts."""
    me, room = window.me, window.piece
    pieces, sums = _pieces(parts, room), _pieces([out], room)
    first = window.begin(len(pieces))
    for step in range(len(pieces) + 1 + back):
        if step < len(pieces):
            _fill(window, first + step, [(peer, pieces[step][peer]) for peer in window.others], room, what)
        if 0 < step <= len(pieces):
            own = pieces[step - 1][me]
            into = sums[step - 1][0] if step <= len(sums) else own
            summed = _room(window, me, first + step - 1, me, own, room) if back else into  # first where the others wait for it
            _add(window, first + step - 1, own, summed, combine, what)
            then(summed)
            window.tell(SUMMED if back else READ)
            if back:
                into.copy_(summed)
        if back and step > 1:
            window.hear(SUMMED, what)
            for peer in window.others:
                piece = pieces[step - 2][peer]
                piece.copy_(_room(window, peer, first + step - 2, peer, piece, room))
            window.tell(READ)


def _fill(window: Window, step: int, pieces: Sequence[tuple[int, torch.Tensor]], room: int, what: str) -> None:
    """This rank's slot, once everybody has read what was in it."""
    if step >= SLOTS:
        window.hear(READ, what)
    for place, piece in pieces:
        _room(window, window.me, step, place, piece, room).copy_(piece)
    window.tell(FULL)


def _add(window: Window, step: int, own: torch.Tensor, into: torch.Tensor, combine: Combine, what: str) -> None:
    window.hear(FULL, what)
    for peer in window.others:
        combine(own, _room(window, peer, step, window.me, own, window.piece), out=into)
        own = into


def _room(window: Window, rank: int, step: int, place: int, piece: torch.Tensor, room: int) -> torch.Tensor:
    """Where such a piece lies in a rank's slot."""
    found = window.places(rank, step, room, piece.dtype)[place]
    return found if found.numel() == piece.numel() else found[: piece.numel()]


def _pieces(parts: Sequence[torch.Tensor], room: int) -> list[list[torch.Tensor]]:
    """Step by step, a piece of every part; parts that are shorter have empty ones at the end. At least one step, so that ranks meet."""
    cuts = [part.split(room // part.element_size()) for part in parts]
    steps = max(map(len, cuts))
    return [[cut[step] if step < len(cut) else part[:0] for part, cut in zip(parts, cuts, strict=True)] for step in range(steps)]


def _nothing(summed: torch.Tensor) -> None:
    """Sums are left as they are."""
