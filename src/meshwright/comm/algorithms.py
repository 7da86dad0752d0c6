"""Collectives as messages between the ranks of one group, over any `Comm`. Blocking: `composed.py` makes calls of them that can be waited for.

[Note: algorithms]
n ranks, N bytes; a round is as long as one message.
  flat       the backend's own.
  ring       a part goes round and every rank adds its own; then the sums go round. 2(n-1) rounds, 2N(n-1)/n bytes a rank, two neighbours.
  tree       recursive doubling: in round k ranks 2^k apart exchange everything. log2(n) rounds, N·log2(n) bytes: for small tensors.
  pairs      every rank sends every other one its part at once; then everyone its sum. 2 rounds, as few bytes as a ring, n-1 neighbours.
  whole      a reduce-scatter as the backend's own all-reduce, of which a rank keeps its part: twice the bytes, and yet quicker where a backend
             has put its care into all-reduce (Open MPI's reduce-scatter of 36 MB on two ranks takes twice as long as its all-reduce).
  two-level  parts are summed inside a node, ranks of the same place on other nodes sum theirs, and the sums go round the node: between
             nodes a rank sends 2N/k·(m-1)/m bytes for k ranks a node and m nodes. Inside a node by memory that is shared, if it is.
  shared     no messages: ranks of one node add up from memory that they share. See `shared.py`.
Large messages travel in segments, so that one is added up while the next is on its way. Every part is summed by one rank, or by all in an order
that gives the same bits (a + b = b + a), so all ranks end with the same values to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from meshwright.core.comm import Comm, Pending

Combine = Callable[..., object]  # (a, b, out=…): torch.add and the like
Room = Callable[[int], torch.Tensor]  # scratch memory for so many elements
_SEGMENT = 1 << 19  # bytes
_SHORT = 1 << 14  # bytes up to which rounds cost more than bytes
_MANY = 8  # nodes from which on each sends to its neighbours rather than to all


@dataclass
class Talk:
    """Some ranks of a group and what is on its way between them; `places` are theirs in the group. Every message has its own turn: between
    two ranks they arrive in the order in which they were sent."""

    comm: Comm
    name: str
    places: tuple[int, ...]
    me: int
    sent: list[Pending] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.places)

    def others(self) -> list[int]:
        """From the next one on, so that not all begin with the same."""
        return [(self.me + step) % self.size for step in range(1, self.size)]

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """In segments; `settle` before the tensor is changed."""
        self.sent += [self.comm.exchange([(self.places[peer], piece)], [], self.name) for piece in segments(tensor)]

    def receive(self, peer: int, tensor: torch.Tensor) -> list[tuple[torch.Tensor, Pending]]:
        return [(piece, self.comm.exchange([], [(self.places[peer], piece)], self.name)) for piece in segments(tensor)]

    def settle(self) -> None:
        for message in self.sent:
            message.wait()
        self.sent.clear()


def segments(flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of a flat tensor; of an empty one, none."""
    return list(flat.split(max(_SEGMENT // flat.element_size(), 1))) if flat.numel() else []


def cut(flat: torch.Tensor, ways: int) -> list[torch.Tensor]:
    """Views of nearly equal length; the first ones are longer by one."""
    least, more = divmod(flat.numel(), ways)
    return list(flat.split([least + (i < more) for i in range(ways)]))


# -- halves: everyone's parts to the sum of one's own, and everyone's own part to all --


def _scatter_ring(talk: Talk, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine, room: Room) -> None:
    n, me = talk.size, talk.me
    right, left = (me + 1) % n, (me - 1) % n
    talk.send(right, parts[(me - 1) % n])
    buffer = room(sum(p.numel() for p in parts) - parts[(me - 1) % n].numel())
    start = 0
    for step in range(n - 1):
        at = (me - step - 2) % n
        last, own = step == n - 2, segments(parts[at])
        arriving = talk.receive(left, buffer[start : start + parts[at].numel()])
        start += parts[at].numel()
        for piece, mine, into in zip(arriving, own, segments(out) if last else own, strict=True):
            piece[1].wait()
            combine(piece[0], mine, out=into if last else piece[0])
            if not last:
                talk.send(right, piece[0])
    talk.settle()


def _scatter_pairs(talk: Talk, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine, room: Room) -> None:
    mine = parts[talk.me]
    buffer = room(mine.numel() * (talk.size - 1))
    arriving = [talk.receive(peer, buffer[i * mine.numel() :][: mine.numel()]) for i, peer in enumerate(reversed(talk.others()))]
    for peer in talk.others():
        talk.send(peer, parts[peer])
    for pieces, own, into in zip(zip(*arriving, strict=True), segments(mine), segments(out), strict=True):
        for piece, message in pieces:
            message.wait()
            combine(own, piece, out=into)
            own = into
    talk.settle()


def _gather_ring(talk: Talk, parts: Sequence[torch.Tensor]) -> None:
    n, me = talk.size, talk.me
    right, left = (me + 1) % n, (me - 1) % n
    talk.send(right, parts[me])
    for step in range(n - 1):
        for piece, message in talk.receive(left, parts[(me - step - 1) % n]):
            message.wait()
            if step < n - 2:
                talk.send(right, piece)
    talk.settle()


def _gather_pairs(talk: Talk, parts: Sequence[torch.Tensor]) -> None:
    arriving = [message for peer in reversed(talk.others()) for _, message in talk.receive(peer, parts[peer])]
    for peer in talk.others():
        talk.send(peer, parts[talk.me])
    for message in arriving:
        message.wait()
    talk.settle()


def scatter(algorithm: str, talk: Talk, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine, room: Room) -> None:
    """The sum of everybody's part of this rank into `out`, which may be that part; other parts are left as they are."""
    if talk.size == 1:
        out.copy_(parts[0])
    elif algorithm == "ring":
        _scatter_ring(talk, parts, out, combine, room)
    else:
        _scatter_pairs(talk, parts, out, combine, room)


def gather(algorithm: str, talk: Talk, parts: Sequence[torch.Tensor]) -> None:
    """Everyone's own part, in place."""
    if talk.size > 1:
        (_gather_ring if algorithm == "ring" else _gather_pairs)(talk, parts)


# -- whole all-reduces, in place --


def by_halves(talk: Talk, whole: torch.Tensor, combine: Combine, room: Room, algorithm: str, then: Callable[[torch.Tensor], object]) -> None:
    """`then` is done to a part that is summed, by the rank that summed it."""
    parts = cut(whole, talk.size)
    scatter(algorithm, talk, parts, parts[talk.me], combine, room)
    then(parts[talk.me])
    gather(algorithm, talk, parts)


def by_tree(talk: Talk, whole: torch.Tensor, combine: Combine, room: Room) -> None:
    """Ranks beyond the largest power of two give theirs to another before, and get the result from it after."""
    full = 1 << (talk.size.bit_length() - 1)
    me, extra = talk.me, talk.me + full
    other = room(whole.numel())
    if me >= full:
        _swap(talk, me - full, [whole], [])
        _swap(talk, me - full, [], [whole])
        return
    if extra < talk.size:
        _swap(talk, extra, [], [other])
        combine(whole, other, out=whole)
    bit = 1
    while bit < full:
        _swap(talk, me ^ bit, [whole], [other])
        combine(whole, other, out=whole)
        bit <<= 1
    if extra < talk.size:
        _swap(talk, extra, [whole], [])


def _swap(talk: Talk, peer: int, sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
    place = talk.places[peer]
    if any(t.numel() for t in (*sends, *receives)):
        talk.comm.exchange([(place, t) for t in sends], [(place, t) for t in receives], talk.name).wait()


class Halves(Protocol):
    """How ranks of one node sum their parts and get the others'."""

    def scatter(self, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine) -> None: ...

    def gather(self, parts: Sequence[torch.Tensor]) -> None: ...


@dataclass(frozen=True)
class ByPairs:
    """By messages."""

    talk: Talk
    room: Room

    def scatter(self, parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Combine) -> None:
        scatter("pairs", self.talk, parts, out, combine, self.room)

    def gather(self, parts: Sequence[torch.Tensor]) -> None:
        gather("pairs", self.talk, parts)


def by_levels(
    talk: Talk,
    whole: torch.Tensor,
    combine: Combine,
    room: Room,
    nodes: Sequence[Sequence[int]],
    then: Callable[[torch.Tensor], object],
    near: Halves | None = None,
) -> None:
    """`nodes` holds the places of each node's ranks; `near` is how those of this one meet if not by messages."""
    here = next(node for node in nodes if talk.me in node)
    local = here.index(talk.me)
    inside = Talk(talk.comm, talk.name, tuple(here), local)
    if len({len(node) for node in nodes}) == 1:
        parts, halves = cut(whole, len(here)), near or ByPairs(inside, room)
        halves.scatter(parts, parts[local], combine)
        _across(Talk(talk.comm, talk.name, tuple(node[local] for node in nodes), nodes.index(here)), parts[local], combine, room, then)
        halves.gather(parts)
        return
    # Nodes of unequal size: their first ranks stand for them.
    if local:
        inside.send(0, whole)
        inside.settle()
        _swap(inside, 0, [], [whole])
        return
    buffer = room(whole.numel() * (len(here) - 1))
    arriving = [inside.receive(peer, buffer[i * whole.numel() :][: whole.numel()]) for i, peer in enumerate(inside.others())]
    for piece, into in ((p, w) for pieces in arriving for p, w in zip(pieces, segments(whole), strict=True)):
        piece[1].wait()
        combine(into, piece[0], out=into)
    _across(Talk(talk.comm, talk.name, tuple(node[0] for node in nodes), nodes.index(here)), whole, combine, room, then)
    for peer in inside.others():
        _swap(inside, peer, [whole], [])


def _across(talk: Talk, part: torch.Tensor, combine: Combine, room: Room, then: Callable[[torch.Tensor], object]) -> None:
    if part.nbytes <= _SHORT:
        by_tree(talk, part, combine, room)
        then(part)
    else:
        by_halves(talk, part, combine, room, "pairs" if talk.size < _MANY else "ring", then)
