"""The context-parallel part of a plan: how the positions of a sequence are shared by ranks, and where a model's code must be told which are whose.

[Note: positions]
Ranks along `cp` take the same samples and other positions of them. Everything that works position by position (embeddings, norms,
projections, losses) then needs nothing from the others; attention needs the keys and values of all positions, which are gathered.
In causal attention a later position does more work, so the sequence is cut in 2·cp chunks and a rank takes one from the front and one
from the back. The code of the model counts positions itself (`arange(S)`, `table[:S]`): such calls give this rank's positions instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.tensor_policy import ParameterShard, SizeRewrite

LOSS_MODULE = "(loss)"  # stands for a module where the code is the loss's own
POSITIONS_DIM = "positions"  # what rewritten sizes count


@dataclass(frozen=True)
class ShardedField:
    """A tensor of the batch, by its place among the batch's leaves, and the dim that counts positions."""

    leaf: int
    name: str
    dim: int


@dataclass(frozen=True)
class PositionGenerator:
    """A call in the code of `module` that makes positions: a range from `start`, or the slice from `start` of a dim that is `source_length` long.
    A range is `outer` × positions × `inner` long. What is not `is_sharded` is needed whole, however short the tensors are that its size is read
    off."""

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
    """Positions that are whole outside `module` and cut where it is given them, as the tensor at `position` of its inputs."""

    module: str
    position: int
    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class AttentionSite:
    """One attention over positions: whose code calls it, and the bytes a sample of all its keys and values."""

    module: str
    bytes: float
    logical_dim: str = ""  # what tensor parallelism deals out of them
    needs_grad: bool = True  # their gradients travel back


@dataclass(frozen=True)
class ContextPolicy:
    """Context parallelism of one model over `cp` ranks. Empty: sequences stay whole."""

    sequence_length: int = 0  # in one sample
    chunks: int = 0  # that these are cut in: one or two for each rank
    fields: tuple[ShardedField, ...] = ()
    attention_sites: tuple[AttentionSite, ...] = ()
    position_generators: tuple[PositionGenerator, ...] = ()
    position_splits: tuple[PositionSplit, ...] = ()
    position_tables: tuple[ParameterShard, ...] = ()  # parameters and buffers with an entry for each position
    mean_loss_modules: tuple[str, ...] = ()  # modules whose code takes the mean of a cross entropy over the targets that count
    size_rewrites: tuple[SizeRewrite, ...] = ()

    def position_ranges(self, rank: int, num_parts: int) -> tuple[tuple[int, int], ...]:
        """(first, number) of the runs of positions that one rank holds, in order."""
        size = self.sequence_length // self.chunks
        mine = (rank,) if self.chunks == num_parts else (rank, self.chunks - 1 - rank)
        return tuple((chunk * size, size) for chunk in mine)
