"""A cache of derived results that is keyed by object identity and values, shared by plans that differ only in other respects."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """Results by what they were computed from: identical objects (kept alive, so that their ids stay unique) and equal values."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[tuple[object, ...], Any]] = {}

    def get_or_compute(self, what: str, identities: tuple[object, ...], values: Hashable, make: Callable[[], T]) -> T:
        key = (what, *map(id, identities), values)
        if key not in self._results:
            self._results[key] = identities, make()
        return self._results[key][1]  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        """Pickle as empty: object ids are meaningless in another process."""
        return Memo, ()
