"""The context-parallel part of a plan: how the positions of a sequence are sharded over ranks, and which calls in the model's code that changes.

[Note: positions]
Ranks along `cp` take the same samples and different positions of them. Everything that works position by position (embeddings, norms,
projections, losses) needs no communication; attention needs the keys and values of all positions, which are all-gathered.
In causal attention a later position does more work, so the sequence is split into 2·cp chunks and a rank takes one from the front and one
from the back. The model's code counts positions itself (`arange(S)`, `table[:S]`): such calls are rewritten to return this rank's positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.tensor_policy import ParameterShard, SizeRewrite

LOSS_MODULE = "(loss)"  # the module name for calls in the loss function's own code
POSITIONS_DIM = "positions"  # the logical dim of rewritten sizes


@dataclass(frozen=True)
class ShardedField:
    """A tensor of the batch, by its index among the batch's leaves, and its dim of positions."""

    leaf: int
    name: str
    dim: int


@dataclass(frozen=True)
class PositionGenerator:
    """A call in the code of `module` that produces positions: a range from `start`, or the slice from `start` of a dim of length `source_length`.
    A range is `outer` × positions × `inner` long. Without `is_sharded` the result must cover all positions, although the code reads its size
    off a sharded tensor."""

    module: str
    function: str  # arange or slice
    start: int = 0
    step: int = 1
    source_length: int = 0
    outer: int = 1
    inner: int = 1
    is_sharded: bool = True


@dataclass(frozen=True)
class PositionSplit:
    """The input tensor at `position` of `module`, which holds all positions outside the module and is split on entry."""

    module: str
    position: int
    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class AttentionSite:
    """One attention over positions: the module whose code calls it, and the bytes per sample of all its keys and values."""

    module: str
    bytes: float
    logical_dim: str = ""  # their logical dim that tensor parallelism shards
    needs_grad: bool = True  # their gradients are communicated in backward


@dataclass(frozen=True)
class ContextPolicy:
    """Context parallelism of one model over `cp` ranks. Empty: sequences are not sharded."""

    sequence_length: int = 0  # positions in one sample
    chunks: int = 0  # that a sequence is split into: one or two per rank
    fields: tuple[ShardedField, ...] = ()
    attention_sites: tuple[AttentionSite, ...] = ()
    position_generators: tuple[PositionGenerator, ...] = ()
    position_splits: tuple[PositionSplit, ...] = ()
    position_tables: tuple[ParameterShard, ...] = ()  # parameters and buffers with an entry for each position
    mean_loss_modules: tuple[str, ...] = ()  # modules whose code computes a mean cross entropy over the targets that are not ignored
    size_rewrites: tuple[SizeRewrite, ...] = ()

    def position_ranges(self, rank: int, num_parts: int) -> tuple[tuple[int, int], ...]:
        """(first, number) of the contiguous ranges of positions that one rank holds, in order."""
        size = self.sequence_length // self.chunks
        chunks = (rank,) if self.chunks == num_parts else (rank, self.chunks - 1 - rank)
        return tuple((chunk * size, size) for chunk in chunks)
