"""Logical dims during tracing: union-find nodes that can be unified and split into factors (see [Note: logical dims])."""

from __future__ import annotations

import math
from collections.abc import Sequence


class LogicalDim:
    """An index of some length. `parent` points to the one it was unified with; `factors` are its factors, outermost first, once a view split it."""

    __slots__ = ("factors", "parent", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: LogicalDim | None = None
        self.factors: tuple[LogicalDim, ...] = ()

    def root(self) -> LogicalDim:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def split(self, outer: int) -> None:
        self.factors = (LogicalDim(outer), LogicalDim(self.size // outer))


Dim = Sequence[LogicalDim]


class DimMismatchError(Exception):
    """Two dims have no common factors, so their logical dims cannot be matched."""


def factors_of(dim: Dim) -> list[LogicalDim]:
    """The logical dims that a dim is a product of, as far as known."""
    factors: list[LogicalDim] = []
    for logical_dim in dim:
        root = logical_dim.root()
        factors += factors_of(root.factors) if root.factors else [root]
    return factors


def new_dim(size: int) -> list[LogicalDim]:
    """A dim without known relations; a dim of size one has no logical dim."""
    return [LogicalDim(size)] if size > 1 else []


def unify(first: Dim, second: Dim) -> None:
    """Make the two dims equal: their logical dims are matched in order, and split where their factors differ."""
    a, b = factors_of(first), factors_of(second)
    while a and b:
        x, y = a[0], b[0]
        if x is not y and x.size != y.size:
            big, small = (x, y) if x.size > y.size else (y, x)
            if big.size % small.size:
                raise DimMismatchError
            big.split(small.size)
        else:
            if x is not y:
                x.parent = y
            a, b = a[1:], b[1:]
        a, b = factors_of(a), factors_of(b)
    if a or b:
        raise DimMismatchError


def reshape_dims(dims: Sequence[Dim], sizes: Sequence[int]) -> list[list[LogicalDim]]:
    """The logical dims of each new dim when the same elements, in the same order, get other sizes."""
    remaining = [s for dim in dims for s in dim]
    new_dims: list[list[LogicalDim]] = []
    for size in sizes:
        new_dims.append([])
        while size > 1:
            remaining = factors_of(remaining)
            if not remaining:
                raise DimMismatchError
            first = remaining[0]
            if size % first.size == 0:
                new_dims[-1].append(first)
                size //= first.size
                remaining = remaining[1:]
            elif first.size % size == 0:
                first.split(size)
            else:
                raise DimMismatchError
    if factors_of(remaining):
        raise DimMismatchError
    return new_dims


def split_evenly(dim: Dim, size: int, piece_size: int) -> tuple[list[LogicalDim], list[LogicalDim]]:
    """A dim of `size` as (index of the piece, position in a piece of `piece_size`)."""
    if not piece_size or size % piece_size:
        raise DimMismatchError
    piece, position = reshape_dims([dim], (size // piece_size, piece_size))
    return piece, position


def dim_size(dim: Dim) -> int:
    return math.prod(s.size for s in factors_of(dim))
