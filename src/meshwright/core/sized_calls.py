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
    first = 0 if name in _TENSOR_FACTORIES and not name.startswith("new_") else 1
    if name == "unflatten":
        first = 2
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
    cuts = [i for i in items if isinstance(i, slice)]
    others = [i for i in items if not isinstance(i, slice)]
    bounds = [b for cut in cuts for b in (cut.start, cut.stop)]
    plain = all(i is ... for i in others) and len(others) < 2 and all(cut.step is None for cut in cuts)
    if not plain or not any(map(_is_size, bounds)) or not all(b is None or _is_size(b) for b in bounds):
        return None
    before = next((at for at, i in enumerate(items) if i is ...), len(items))
    dims = tuple(at if at < before else at - len(cuts) for at in range(len(cuts)) for _ in range(2))

    def put(new: Sequence[int]) -> tuple[Any, Any]:
        now = [None if was is None else n for was, n in zip(bounds, new, strict=True)]
        made: list[Any] = [slice(*now[at : at + 2]) for at in range(0, len(now), 2)]
        return (args[0], (*made[:before], *others, *made[before:])), {}

    return SizedCall(tuple(-1 if b is None else b for b in bounds), 0, put, dims)


def _sized_narrow(args: Any, kwargs: Any) -> SizedCall | None:
    """The start and length of `x.narrow(dim, start, length)`."""
    given = {**dict(zip(("input", "dim", "start", "length"), args, strict=False)), **kwargs}
    if not all(_is_size(given.get(k)) for k in ("dim", "start", "length")):
        return None
    dim, tensor = given["dim"], given.get("input", args[0] if args else None)
    return SizedCall((given["start"], given["length"]), dim, lambda new: ((tensor, dim, *new), {}), (dim, dim))


def _call_dim(name: str, args: Any, kwargs: Any) -> int:
    at = {"split": 2, "split_with_sizes": 2, "unflatten": 1}.get(name)
    found = kwargs.get("dim", args[at] if at is not None and len(args) > at else 0)
    return found if _is_size(found) else 0


def _as_sized_call(sizes: Any, dim: int, with_sizes: Callable[[Any], tuple[Any, Any]]) -> SizedCall | None:
    if _is_size(sizes):  # a single number, as in `split(x, 768)`
        return SizedCall((sizes,), dim, lambda new: with_sizes(new[0]))
    if not isinstance(sizes, (tuple, list)) or not sizes or not all(map(_is_size, sizes)):
        return None
    return SizedCall(tuple(sizes), dim, lambda new: with_sizes(tuple(new)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
