"""Calls in a model's code that spell sizes out, such as `view(B, S, 12, 64)`: which sizes they hold, and the same call with others.

The trace notes what `sized_call` finds, and the run rewrites through it, so the two cannot disagree about what a call says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_FACTORIES = ("zeros", "ones", "empty", "full", "randn", "rand", "new_zeros", "new_ones", "new_empty", "new_full")
SIZED = frozenset((*_FACTORIES, "view", "reshape", "expand", "split", "split_with_sizes", "unflatten"))
_KEYWORDS = ("size", "shape", "sizes", "split_size_or_sections", "split_size", "split_sizes")


@dataclass(frozen=True)
class SizedCall:
    """`sizes` as the code gives them (-1 where it leaves one open); `dim` is where they apply, for calls that work on one dim."""

    sizes: tuple[int, ...]
    dim: int
    put: Callable[[Sequence[int]], tuple[Any, Any]]  # other sizes → the arguments of the call that has them


def sized_call(name: str, args: Any, kwargs: Any) -> SizedCall | None:
    """The sizes in a call of `name`; None if it takes none, or takes them from somewhere else than the code."""
    if name not in SIZED:
        return None
    first = 0 if name in _FACTORIES and not name.startswith("new_") else 1
    if name == "unflatten":
        first = 2
    dim = _dim(name, args, kwargs)
    key = next((k for k in _KEYWORDS if k in kwargs), None)
    if key is not None:
        return _found(kwargs[key], dim, lambda new: (args, {**kwargs, key: new}))
    if len(args) <= first:
        return None
    if isinstance(args[first], (tuple, list)) or name.startswith("split"):
        return _found(args[first], dim, lambda new: ((*args[:first], new, *args[first + 1 :]), kwargs))
    if not all(_is_size(a) for a in args[first:]):
        return None
    return _found(tuple(args[first:]), dim, lambda new: ((*args[:first], *new), kwargs))


def _dim(name: str, args: Any, kwargs: Any) -> int:
    at = {"split": 2, "split_with_sizes": 2, "unflatten": 1}.get(name)
    found = kwargs.get("dim", args[at] if at is not None and len(args) > at else 0)
    return found if _is_size(found) else 0


def _found(given: Any, dim: int, put: Callable[[Any], tuple[Any, Any]]) -> SizedCall | None:
    if _is_size(given):  # one number, as `split(x, 768)` has it
        return SizedCall((given,), dim, lambda new: put(new[0]))
    if not isinstance(given, (tuple, list)) or not given or not all(map(_is_size, given)):
        return None
    return SizedCall(tuple(given), dim, lambda new: put(tuple(new)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
