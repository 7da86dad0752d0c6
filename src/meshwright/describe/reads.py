"""Which of a tensor's sizes a model's code looks at: on a piece of the tensor it would be told another number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Note = Callable[[torch.Tensor, Iterable[int]], None]


def watch_sizes(func: Any, args: Any, out: Any, note: Note) -> Any:
    """What a call in the model's code gave, with every look at a size noted. Only data with positions is of interest."""
    name = getattr(func, "__name__", "")
    whole = getattr(func, "__self__", None) is torch.Tensor.shape or (name == "size" and isinstance(out, tuple))
    if not whole and name not in ("size", "numel", "nelement"):
        return out
    with torch._C.DisableTorchFunction():
        tensor, rank = args[0], args[0].dim()
        if not tensor.is_floating_point() or rank < 3:
            return out
    if whole:
        return _Sizes(out, lambda dims: note(tensor, dims))
    note(tensor, [args[1] % rank] if name == "size" and len(args) > 1 and isinstance(args[1], int) else range(rank))
    return out


class _Sizes(tuple[int, ...]):
    """A tensor's shape that tells which of its numbers are looked at."""

    note: Callable[[Iterable[int]], None]

    def __new__(cls, sizes: Iterable[int], note: Callable[[Iterable[int]], None]) -> _Sizes:
        made = super().__new__(cls, sizes)
        made.note = note
        return made

    def __getitem__(self, at: Any) -> Any:
        places = range(len(self))[at]
        self.note([places] if isinstance(places, int) else places)
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        self.note(range(len(self)))
        return super().__iter__()

    def __add__(self, other: Any) -> tuple[int, ...]:
        return (*self, *other)

    def __radd__(self, other: Any) -> tuple[int, ...]:
        return (*other, *self)

    def numel(self) -> int:
        return math.prod(self)
