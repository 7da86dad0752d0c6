"""What was worked out once, so that plans which differ in something else need not work it out again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """Results by what they were made of: objects that must be the very same, which are kept alive so that no other takes their identity,
    and values that must be equal."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[tuple[object, ...], Any]] = {}

    def get_or_compute(self, what: str, identities: tuple[object, ...], values: Hashable, make: Callable[[], T]) -> T:
        key = (what, *map(id, identities), values)
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = identities, make()
        return found[1]  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        """Elsewhere nothing is known: identities do not travel."""
        return Memo, ()
