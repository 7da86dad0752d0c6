"""The owners' part of a plan: which experts and which embedding tables each rank of the `ep` axis holds, and what travels to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """A module of experts, stacked along dim 0 of its parameters. Owner `i` holds `counts[i]` of them, in order.

    It is called with tokens, which experts each of them chose, and the weights of these choices (`None` where it is given none): the
    places of the three among the tensors that it is given. `pairs` is how many (token, expert) there are in one sample.
    """

    module: str
    parameters: tuple[str, ...]
    counts: tuple[int, ...]
    pairs: float
    width: int  # features of a token
    row_bytes: int  # of one token, and of one result
    tokens: int = 0
    choices: int = 1
    weights: int | None = 2

    @property
    def experts(self) -> int:
        return sum(self.counts)

    def first(self, owner: int) -> int:
        return sum(self.counts[:owner])


@dataclass(frozen=True)
class Table:
    """An embedding table, whole on one owner."""

    module: str
    parameter: str
    rows: int
    owner: int


@dataclass(frozen=True)
class Lookup:
    """One call of a table: how many indices a sample gives it, and the bytes of what comes back for them."""

    module: str
    indices: float
    result_bytes: float


@dataclass(frozen=True)
class OwnerPolicy:
    """Everything that is owned. Tables are looked up in one exchange, at the call of `container`, in the order of `lookups`."""

    mixtures: tuple[Mixture, ...] = ()
    tables: tuple[Table, ...] = ()
    container: str = ""
    lookups: tuple[Lookup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.mixtures or self.tables)

    def rows(self, owners: int) -> dict[str, tuple[int, ...]]:
        """For every owned parameter, how much of its dim 0 each of so many owners holds."""
        found = {name: m.counts for m in self.mixtures for name in m.parameters}
        return found | {t.parameter: tuple(t.rows if t.owner == owner else 0 for owner in range(owners)) for t in self.tables}

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset((*(name for m in self.mixtures for name in m.parameters), *(t.parameter for t in self.tables)))

    def lookups_of(self, owner: int) -> tuple[Lookup, ...]:
        """The lookups that one owner answers, in order."""
        mine = {t.module for t in self.tables if t.owner == owner}
        return tuple(lookup for lookup in self.lookups if lookup.module in mine)
