"""The owners' part of a plan: which experts and which embedding tables each rank of the `ep` axis holds, and what travels to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoELayer:
    """A module of experts, stacked along dim 0 of its parameters. Owner `i` holds `counts[i]` of them, in order.

    It is called with tokens, which experts each of them chose, and the weights of these choices (`None` where it is given none): the
    places of the three among the tensors that it is given. `token_expert_pairs` is how many (token, expert) there are in one sample.
    """

    module: str
    parameters: tuple[str, ...]
    experts_per_rank: tuple[int, ...]
    token_expert_pairs: float
    hidden_size: int  # features of a token
    row_bytes: int  # of one token, and of one result
    tokens_input: int = 0
    expert_ids_input: int = 1
    routing_weights_input: int | None = 2

    @property
    def num_experts(self) -> int:
        return sum(self.experts_per_rank)

    def first_expert(self, ep_rank: int) -> int:
        return sum(self.experts_per_rank[:ep_rank])


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table, whole on one owner."""

    module: str
    parameter: str
    rows: int
    ep_rank: int


@dataclass(frozen=True)
class TableLookup:
    """One call of a table: how many indices a sample gives it, and the bytes of what comes back for them."""

    module: str
    indices: float
    result_bytes: float


@dataclass(frozen=True)
class ExpertPolicy:
    """Everything that is owned. Tables are looked up in one exchange, at the call of `lookup_module`, in the order of `lookups`."""

    moe_layers: tuple[MoELayer, ...] = ()
    tables: tuple[EmbeddingTable, ...] = ()
    lookup_module: str = ""
    lookups: tuple[TableLookup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.moe_layers or self.tables)

    def rows_per_rank(self, ep_size: int) -> dict[str, tuple[int, ...]]:
        """For every owned parameter, how much of its dim 0 each of so many owners holds."""
        found = {name: m.experts_per_rank for m in self.moe_layers for name in m.parameters}
        return found | {t.parameter: tuple(t.rows if t.ep_rank == owner else 0 for owner in range(ep_size)) for t in self.tables}

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset((*(name for m in self.moe_layers for name in m.parameters), *(t.parameter for t in self.tables)))

    def lookups_on(self, ep_rank: int) -> tuple[TableLookup, ...]:
        """The lookups that one owner answers, in order."""
        mine = {t.module for t in self.tables if t.ep_rank == ep_rank}
        return tuple(lookup for lookup in self.lookups if lookup.module in mine)
