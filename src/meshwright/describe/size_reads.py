"""Records which sizes of a tensor a model's code reads: on a shard of the tensor it would read other numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

OnSizeRead = Callable[[torch.Tensor, Iterable[int]], None]


def record_size_reads(func: Any, args: Any, out: Any, on_read: OnSizeRead) -> Any:
    """The call's result, with every read of a size reported. Only floating-point tensors with three or more dims are of interest."""
    name = getattr(func, "__name__", "")
    full_shape = getattr(func, "__self__", None) is torch.Tensor.shape or (name == "size" and isinstance(out, tuple))
    if not full_shape and name not in ("size", "numel", "nelement"):
        return out
    with torch._C.DisableTorchFunction():
        tensor, rank = args[0], args[0].dim()
        if not tensor.is_floating_point() or rank < 3:
            return out
    if full_shape:
        return _RecordedShape(out, lambda dims: on_read(tensor, dims))
    on_read(tensor, [args[1] % rank] if name == "size" and len(args) > 1 and isinstance(args[1], int) else range(rank))
    return out


class _RecordedShape(tuple[int, ...]):
    """A tensor's shape that reports which of its entries are read."""

    on_read: Callable[[Iterable[int]], None]

    def __new__(cls, sizes: Iterable[int], on_read: Callable[[Iterable[int]], None]) -> _RecordedShape:
        shape = super().__new__(cls, sizes)
        shape.on_read = on_read
        return shape

    def __getitem__(self, index: Any) -> Any:
        dims = range(len(self))[index]
        self.on_read([dims] if isinstance(dims, int) else dims)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        self.on_read(range(len(self)))
        return super().__iter__()

    def __add__(self, other: Any) -> tuple[int, ...]:
        return (*self, *other)

    def __radd__(self, other: Any) -> tuple[int, ...]:
        return (*other, *self)

    def numel(self) -> int:
        return math.prod(self)
