"""The expert-parallel part of a plan: which experts and which embedding tables each rank of the `ep` axis holds, and what is sent to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoELayer:
    """A module of experts, stacked along dim 0 of its parameters. Rank `i` of `ep` holds `experts_per_rank[i]` of them, in order.

    The `*_input` fields are the positions of tokens, chosen expert ids and routing weights among the module's input tensors (`None` where it
    has no routing weights). `token_expert_pairs` is the number of (token, expert) pairs in one sample.
    """

    module: str
    parameters: tuple[str, ...]
    experts_per_rank: tuple[int, ...]
    token_expert_pairs: float
    hidden_size: int  # features of a token
    row_bytes: int  # of one token's input, and of its output
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
    """An embedding table that one rank of `ep` holds."""

    module: str
    parameter: str
    rows: int
    ep_rank: int


@dataclass(frozen=True)
class TableLookup:
    """One lookup in a table: its indices per sample, and the bytes of their results."""

    module: str
    indices: float
    result_bytes: float


@dataclass(frozen=True)
class ExpertPolicy:
    """All expert-parallel modules. Tables are looked up in one all-to-all, at the call of `lookup_module`, in the order of `lookups`."""

    moe_layers: tuple[MoELayer, ...] = ()
    tables: tuple[EmbeddingTable, ...] = ()
    lookup_module: str = ""
    lookups: tuple[TableLookup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.moe_layers or self.tables)

    def rows_per_rank(self, ep_size: int) -> dict[str, tuple[int, ...]]:
        """For every expert-parallel parameter, how many rows of its dim 0 each of `ep_size` ranks holds."""
        experts = {name: m.experts_per_rank for m in self.moe_layers for name in m.parameters}
        return experts | {t.parameter: tuple(t.rows if t.ep_rank == rank else 0 for rank in range(ep_size)) for t in self.tables}

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset((*(name for m in self.moe_layers for name in m.parameters), *(t.parameter for t in self.tables)))

    def lookups_on(self, ep_rank: int) -> tuple[TableLookup, ...]:
        """The lookups that one rank of `ep` answers, in order."""
        modules = {t.module for t in self.tables if t.ep_rank == ep_rank}
        return tuple(lookup for lookup in self.lookups if lookup.module in modules)
