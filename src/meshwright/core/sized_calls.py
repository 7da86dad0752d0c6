"""Calls in a model's code with explicit sizes, such as `view(B, S, 12, 64)` or `x[..., :64]`: reading the sizes, and replacing them.

The tracer records what `sized_call` finds and the runtime rewrites calls through it, so the two cannot disagree about a call's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_TENSOR_FACTORIES = ("zeros", "ones", "empty", "full", "randn", "rand", "new_zeros", "new_ones", "new_empty", "new_full")
SIZED_FUNCTIONS = frozenset((*_TENSOR_FACTORIES, "view", "reshape", "expand", "split", "split_with_sizes", "unflatten", "__getitem__", "narrow"))
_SIZE_KEYWORDS = ("size", "shape", "sizes", "split_size_or_sections", "split_size", "split_sizes")


@dataclass(frozen=True)
class SizedCall:
    """The sizes in one call: `sizes` as written (-1 where the code leaves one open); `dim` is their dim, for calls that work on one dim."""

    sizes: tuple[int, ...]
    dim: int
    with_sizes: Callable[[Sequence[int]], tuple[Any, Any]]  # other sizes → (args, kwargs) of the call with those
    dims: tuple[int, ...] = ()  # for slices, whose sizes are bounds: the dim of each bound


def sized_call(name: str, args: Any, kwargs: Any) -> SizedCall | None:
    """The sizes in a call of `name`; None if it has none, or they are not plain integers."""
    if name not in SIZED_FUNCTIONS:
        return None
    if name in ("__getitem__", "narrow"):
        return _sized_slice(args) if name == "__getitem__" else _sized_narrow(args, kwargs)
    first = 2 if name == "unflatten" else 0 if name in _TENSOR_FACTORIES and not name.startswith("new_") else 1
    dim = _call_dim(name, args, kwargs)
    key = next((k for k in _SIZE_KEYWORDS if k in kwargs), None)
    if key is not None:
        return _as_sized_call(kwargs[key], dim, lambda new: (args, {**kwargs, key: new}))
    if len(args) <= first:
        return None
    if isinstance(args[first], (tuple, list)) or name.startswith("split"):
        return _as_sized_call(args[first], dim, lambda new: ((*args[:first], new, *args[first + 1 :]), kwargs))
    if not all(_is_size(a) for a in args[first:]):
        return None
    return _as_sized_call(tuple(args[first:]), dim, lambda new: ((*args[:first], *new), kwargs))


def _sized_slice(args: Any) -> SizedCall | None:
    """The bounds of `x[:, 2:4]` or `x[..., :4]`, dim by dim; None for an index with integers, masks or new dims."""
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    slices = [i for i in items if isinstance(i, slice)]
    others = [i for i in items if not isinstance(i, slice)]
    bounds = [b for s in slices for b in (s.start, s.stop)]
    plain = all(i is ... for i in others) and len(others) < 2 and all(s.step is None for s in slices)
    if not plain or not any(map(_is_size, bounds)) or not all(b is None or _is_size(b) for b in bounds):
        return None
    before = next((position for position, i in enumerate(items) if i is ...), len(items))
    dims = tuple(i if i < before else i - len(slices) for i in range(len(slices)) for _ in range(2))

    def with_bounds(sizes: Sequence[int]) -> tuple[Any, Any]:
        values = [None if old is None else new for old, new in zip(bounds, sizes, strict=True)]
        new_slices: list[Any] = [slice(*values[i : i + 2]) for i in range(0, len(values), 2)]
        return (args[0], (*new_slices[:before], *others, *new_slices[before:])), {}

    return SizedCall(tuple(-1 if b is None else b for b in bounds), 0, with_bounds, dims)


def _sized_narrow(args: Any, kwargs: Any) -> SizedCall | None:
    """The start and length of `x.narrow(dim, start, length)`."""
    given = {**dict(zip(("input", "dim", "start", "length"), args, strict=False)), **kwargs}
    if not all(_is_size(given.get(k)) for k in ("dim", "start", "length")):
        return None
    dim, tensor = given["dim"], given.get("input", args[0] if args else None)
    return SizedCall((given["start"], given["length"]), dim, lambda new: ((tensor, dim, *new), {}), (dim, dim))


def _call_dim(name: str, args: Any, kwargs: Any) -> int:
    position = {"split": 2, "split_with_sizes": 2, "unflatten": 1}.get(name)
    dim = kwargs.get("dim", args[position] if position is not None and len(args) > position else 0)
    return dim if _is_size(dim) else 0


def _as_sized_call(sizes: Any, dim: int, with_sizes: Callable[[Any], tuple[Any, Any]]) -> SizedCall | None:
    if _is_size(sizes):  # a single number, as in `split(x, 768)`
        return SizedCall((sizes,), dim, lambda new: with_sizes(new[0]))
    if not isinstance(sizes, (tuple, list)) or not sizes or not all(map(_is_size, sizes)):
        return None
    return SizedCall(tuple(sizes), dim, lambda new: with_sizes(tuple(new)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
