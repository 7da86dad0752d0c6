"""The tensor-parallel part of a plan: which logical dims of a model are sharded over ranks, and which collectives that requires."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property


def shard_range(size: int, rank: int, num_parts: int) -> tuple[int, int]:
    """(first, number) of one rank's part of `size` split over `num_parts` ranks; the remainder goes to the first ranks, one each."""
    least, remainder = divmod(size, num_parts)
    return rank * least + min(rank, remainder), least + (rank < remainder)


@dataclass(frozen=True)
class ParameterShard:
    """One parameter sharded along `dim`, of length `outer` × logical dim × `inner` (outer 3 for fused q, k and v; inner 64 for heads of 64)."""

    parameter: str
    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class ShardedDim:
    """A logical dim of length `size` that is sharded over ranks: heads, features, channels, vocabulary entries."""

    name: str
    size: int
    parameter_shards: tuple[ParameterShard, ...]

    def shard_range(self, rank: int, num_parts: int) -> tuple[int, int]:
        """(first, number) of one rank's shard."""
        return shard_range(self.size, rank, num_parts)

    def padded_bytes(self, size: float, num_parts: int) -> float:
        """Bytes of a gather of `size` bytes over this dim: backends move equal shards, so all are padded to the largest."""
        return size / self.size * self.shard_range(0, num_parts)[1] * num_parts


@dataclass(frozen=True)
class SizeRewrite:
    """A size in the model's own code that counts a sharded dim: `original_size` at `position` of a call with `num_sizes` sizes inside `module`."""

    module: str
    function: str
    num_sizes: int
    position: int
    original_size: int
    logical_dim: str
    dim: int = 0
    length: int = 0  # for a slice: length of the sliced dim


@dataclass(frozen=True)
class SequenceLayout:
    """Where the positions of a sequence lie in a tensor that is sharded by positions: their logical dim, the tensor dim, how many elements of
    that dim one position has, and whether it has outer logical dims (samples) too."""

    logical_dim: str
    dim: int
    inner: int = 1
    has_outer_dims: bool = False


@dataclass(frozen=True)
class DropoutSite:
    """A module that draws random numbers (dropout), and the layout of positions in its input."""

    module: str
    sequence_layout: SequenceLayout


@dataclass(frozen=True)
class CollectiveSite:
    """A collective in the model. `bytes` is the tensor's size for one sample (for any batch if it is `is_batch_independent`), so that the traffic
    is known before anything runs."""

    module: str
    bytes: float
    position: int = 0  # of the input, for gradients that are reduced where an unsharded activation enters a sharded region
    is_batch_independent: bool = False
    logical_dim: str = ""  # the dim that is gathered or looked up
    skipped_in_recompute: tuple[str, ...] = ()  # modules that save nothing for backward after it: their recompute stops before it
    linear_layers: tuple[str, ...] = ()  # linear layers that consume the input, for gradients that are reduced
    num_statistics: int = 1  # per normalized row: a layer norm's mean and variance are reduced in one call
    other_axis_dim: str = ""  # a logical dim of the tensor that the other axis of a grid shards: a rank has its shard of it
    sequence_layout: SequenceLayout | None = None  # with sequence parallelism: the layout of the positions that ranks gather or scatter
    at_output: bool = False  # of the module, for gathers
    needs_grad: bool = True  # whether it has a gradient in backward

    def bytes_for(self, samples: int) -> float:
        return self.bytes if self.is_batch_independent else self.bytes * samples


@dataclass(frozen=True)
class TensorPolicy:
    """Tensor parallelism of one model over the ranks of one axis. Empty: nothing is sharded.

    [Note: sequence]
    Between sharded regions every rank has the same activations, and does the same work on them: norms, dropout, residual sums. Where that work
    treats positions independently, each rank can hold only some positions. The all-reduce after a sharded region becomes a reduce-scatter by
    positions, and the next sharded region all-gathers the positions of its input; in backward the two are exchanged. Together they move as many
    bytes as the all-reduce. Unsharded parameters in between see only some positions, so their gradients are partial.
    """

    sharded_dims: tuple[ShardedDim, ...] = ()
    copy_sites: tuple[CollectiveSite, ...] = ()  # backward: the gradient of this input is a partial sum and is reduced
    reduce_sites: tuple[CollectiveSite, ...] = ()  # forward: the output is a partial sum and is reduced
    gather_sites: tuple[CollectiveSite, ...] = ()  # forward: the output's last feature dim is sharded and something needs all of it
    embedding_sites: tuple[CollectiveSite, ...] = ()  # forward: a rank looks up its own rows, and the results are reduced
    norm_sites: tuple[CollectiveSite, ...] = ()  # forward and backward: a norm is over a sharded dim, and its statistics are reduced
    sequence_scatter_sites: tuple[CollectiveSite, ...] = ()  # forward: a rank keeps its positions of an unsharded input
    sequence_gather_sites: tuple[CollectiveSite, ...] = ()  # forward: an input or output that is sharded by positions is gathered
    dropout_sites: tuple[DropoutSite, ...] = ()  # random numbers are drawn for all positions, so that they do not depend on the sharding
    partial_grad_parameters: tuple[str, ...] = ()  # unsharded parameters with partial gradients, which are reduced
    size_rewrites: tuple[SizeRewrite, ...] = ()
    unsharded_reasons: Mapping[str, str] = field(default_factory=dict)  # parameter → why it is not sharded

    def shard_lengths(self, rank: int, num_parts: int) -> Mapping[str, Mapping[int, int]]:
        """By parameter and dim: the length of the shard of one of `num_parts` ranks."""
        if (rank, num_parts) not in self._shard_lengths:
            lengths = self._shard_lengths[rank, num_parts] = {}
            for logical_dim in self.sharded_dims:
                _, count = logical_dim.shard_range(rank, num_parts)
                for shard in logical_dim.parameter_shards:
                    lengths.setdefault(shard.parameter, {})[shard.dim] = shard.outer * count * shard.inner
        return self._shard_lengths[rank, num_parts]

    @cached_property
    def _shard_lengths(self) -> dict[tuple[int, int], dict[str, dict[int, int]]]:
        """The cache of `shard_lengths`."""
        return {}

    @cached_property
    def reduce_sites_in(self) -> Mapping[str, tuple[CollectiveSite, ...]]:
        """By module: the reduce sites in it, or in a module inside it."""
        return _by_enclosing_module(self.reduce_sites)

    @cached_property
    def sequence_gathers_in(self) -> Mapping[str, tuple[CollectiveSite, ...]]:
        """By module: the copy sites in it, or in a module inside it, whose positions are gathered."""
        return _by_enclosing_module(site for site in self.copy_sites if site.sequence_layout)

    @cached_property
    def is_sequence_parallel(self) -> bool:
        """Whether activations between sharded regions are sharded by positions."""
        return any(site.sequence_layout for site in self.copy_sites)


def _by_enclosing_module(sites: Iterable[CollectiveSite]) -> Mapping[str, tuple[CollectiveSite, ...]]:
    by_module: dict[str, tuple[CollectiveSite, ...]] = {}
    for site in sites:
        module = site.module
        while module:
            by_module[module] = (*by_module.get(module, ()), site)
            module = module.rpartition(".")[0]
    return by_module
