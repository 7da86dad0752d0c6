"""Strands while they are being found: union-find nodes that can be tied together and split into factors (see [Note: strands])."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Strand:
    """An index of some length. `link` points to what it was tied to; `parts` are its factors, outermost first, once a view split it."""

    __slots__ = ("link", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.link: Strand | None = None
        self.parts: tuple[Strand, ...] = ()

    def root(self) -> Strand:
        node = self
        while node.link is not None:
            node = node.link
        return node

    def split(self, outer: int) -> None:
        self.parts = (Strand(outer), Strand(self.size // outer))


Dim = Sequence[Strand]


class UntiedError(Exception):
    """Two dims have no common factors: nothing can be said about what runs through them."""


def leaves(dim: Dim) -> list[Strand]:
    """The strands that a dim is a product of, as far as is known now."""
    found: list[Strand] = []
    for strand in dim:
        root = strand.root()
        found += leaves(root.parts) if root.parts else [root]
    return found


def fresh(size: int) -> list[Strand]:
    """A dim about which nothing is known; a dim of one element carries nothing."""
    return [Strand(size)] if size > 1 else []


def tie(one: Dim, other: Dim) -> None:
    """From now on the two dims are the same: their strands are matched up, split where their factors differ."""
    a, b = leaves(one), leaves(other)
    while a and b:
        x, y = a[0], b[0]
        if x is not y and x.size != y.size:
            big, small = (x, y) if x.size > y.size else (y, x)
            if big.size % small.size:
                raise UntiedError
            big.split(small.size)
        else:
            if x is not y:
                x.link = y
            a, b = a[1:], b[1:]
        a, b = leaves(a), leaves(b)
    if a or b:
        raise UntiedError


def regroup(dims: Sequence[Dim], sizes: Sequence[int]) -> list[list[Strand]]:
    """The same elements in the same order under other sizes: which strands each new dim is made of."""
    rest = [s for dim in dims for s in dim]
    found: list[list[Strand]] = []
    for size in sizes:
        taken: list[Strand] = []
        need = size
        while need > 1:
            rest = leaves(rest)
            if not rest:
                raise UntiedError
            head = rest[0]
            if need % head.size == 0:
                taken.append(head)
                need //= head.size
                rest = rest[1:]
            elif head.size % need == 0:
                head.split(need)
            else:
                raise UntiedError
        found.append(taken)
    if leaves(rest):
        raise UntiedError
    return found


def cut_evenly(dim: Dim, size: int, length: int) -> tuple[list[Strand], list[Strand]]:
    """A dim of `size` as (which of the equal pieces, place in a piece of `length`)."""
    if not length or size % length:
        raise UntiedError
    which, place = regroup([dim], (size // length, length))
    return which, place


def length(dim: Dim) -> int:
    return math.prod(s.size for s in leaves(dim))
