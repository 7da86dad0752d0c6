"""What was worked out once, so that plans which differ in something else need not work it out again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """Results by what they were made of: objects that must be the very same, which are kept alive so that no other takes their identity,
    and values that must be equal."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[object, ...], Any]] = {}

    def once(self, what: str, same: tuple[object, ...], equal: Hashable, make: Callable[[], T]) -> T:
        key = (what, *map(id, same), equal)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = same, make()
        return found[1]  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        """Elsewhere nothing is known: identities do not travel."""
        return Memo, ()
