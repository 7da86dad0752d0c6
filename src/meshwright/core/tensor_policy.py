"""The tensor-parallel part of a plan: which strands of a model are dealt out over ranks, and where the ranks must meet because of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property


def shard_range(size: int, rank: int, num_parts: int) -> tuple[int, int]:
    """(first, number) of what one of `num_parts` ranks holds of `size`; the first ranks take what does not divide."""
    each, more = divmod(size, num_parts)
    return rank * each + min(rank, more), each + (rank < more)


@dataclass(frozen=True)
class ParameterShard:
    """One parameter along one dim, which is `outer` × the strand × `inner` long (outer 3 for fused q, k and v; inner 64 for heads of 64)."""

    parameter: str
    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class ShardedDim:
    """A strand of `size` that ranks share: heads, features, channels, vocabulary entries."""

    name: str
    size: int
    parameter_shards: tuple[ParameterShard, ...]

    def shard_range(self, rank: int, num_parts: int) -> tuple[int, int]:
        """(first, number) of what one rank holds."""
        return shard_range(self.size, rank, num_parts)


@dataclass(frozen=True)
class SizeRewrite:
    """A size in the model's own code that counts a dealt strand: `original_size` at `position` of a call with `num_sizes` sizes inside `module`."""

    module: str
    function: str
    num_sizes: int
    position: int
    original_size: int
    logical_dim: str
    dim: int = 0
    length: int = 0  # for a slice: of the dim that is sliced


@dataclass(frozen=True)
class SequenceLayout:
    """Positions of a sequence in a tensor of which each rank has some: the strand, the dim that they lie in, how many elements of that dim
    one position has, and whether others (samples) lie in it too, outside of them."""

    logical_dim: str
    dim: int
    inner: int = 1
    has_outer_dims: bool = False


@dataclass(frozen=True)
class DropoutSite:
    """A module that multiplies by random numbers of its own, and where positions lie in what it is given."""

    module: str
    sequence_layout: SequenceLayout


@dataclass(frozen=True)
class CollectiveSite:
    """Where ranks meet. `bytes` is the tensor's size for one sample (for any number of them if it is `is_batch_independent`), so that what travels is
    known before anything runs."""

    module: str
    bytes: float
    position: int = 0  # of the input, for gradients that meet where a whole activation enters a cut part
    is_batch_independent: bool = False
    logical_dim: str = ""  # the one that is gathered or looked up
    skipped_in_recompute: tuple[str, ...] = ()  # modules in which nothing after it is kept for backward: recomputing those stops before it
    linear_layers: tuple[str, ...] = ()  # layers that multiply the input by their matrix, for gradients that meet
    num_statistics: int = 1  # of a row that is normed: a layer norm's mean and variance are told in one call
    other_axis_dim: str = ""  # a strand of the tensor that the other axis of a grid deals out: a rank has its piece of it
    sequence_layout: SequenceLayout | None = None  # where ranks share positions outside of cut parts: what they exchange is some positions of each
    at_output: bool = False  # of the module, for what is collected
    needs_grad: bool = True  # whether a gradient comes back

    def bytes_for(self, samples: int) -> float:
        return self.bytes if self.is_batch_independent else self.bytes * samples


@dataclass(frozen=True)
class TensorPolicy:
    """Tensor parallelism of one model over the ranks of one axis. Empty: nothing is cut.

    [Note: sequence]
    Between cut parts every rank has the same activations, and does the same work on them: norms, dropout, residual sums. Where that work
    treats positions alike, ranks can have some positions each instead. A sum over ranks then gives each rank its positions of the sum
    (a reduce-scatter), and a cut part gathers all positions on its way in; in backward the two change places. Together they carry what the
    all-reduce did. Whole parameters on the way see some positions only, so their gradients are partial.
    """

    sharded_dims: tuple[ShardedDim, ...] = ()
    copy_sites: tuple[CollectiveSite, ...] = ()  # backward: the gradients of this input are partial and are summed
    reduce_sites: tuple[CollectiveSite, ...] = ()  # forward: the output is a partial sum and is summed
    gather_sites: tuple[CollectiveSite, ...] = ()  # forward: the output's last feature dim is cut and something needs it whole
    embedding_sites: tuple[CollectiveSite, ...] = ()  # forward: a rank looks up its own rows, and the results are summed
    norm_sites: tuple[CollectiveSite, ...] = ()  # both: a norm runs over a dealt strand, and its statistics are summed
    sequence_scatter_sites: tuple[CollectiveSite, ...] = ()  # forward: of a whole input a rank keeps its positions
    sequence_gather_sites: tuple[CollectiveSite, ...] = ()  # forward: an input or output of which ranks have some positions each is needed whole
    dropout_sites: tuple[DropoutSite, ...] = ()  # random numbers that are drawn for all positions, so that they do not depend on the ranks
    partial_grad_parameters: tuple[str, ...] = ()  # parameters kept whole inside a cut part: their gradients are summed
    size_rewrites: tuple[SizeRewrite, ...] = ()
    unsharded_reasons: Mapping[str, str] = field(default_factory=dict)  # parameter → why it is not cut

    def shard_lengths(self, rank: int, num_parts: int) -> Mapping[str, Mapping[int, int]]:
        """By parameter and dim: how long one of so many ranks' piece is."""
        if (rank, num_parts) not in self._shard_lengths:
            found = self._shard_lengths[rank, num_parts] = {}
            for logical_dim in self.sharded_dims:
                _, count = logical_dim.shard_range(rank, num_parts)
                for cut in logical_dim.parameter_shards:
                    found.setdefault(cut.parameter, {})[cut.dim] = cut.outer * count * cut.inner
        return self._shard_lengths[rank, num_parts]

    @cached_property
    def _shard_lengths(self) -> dict[tuple[int, int], dict[str, dict[int, int]]]:
        """As they were asked for."""
        return {}

    @cached_property
    def reduce_sites_in(self) -> Mapping[str, tuple[CollectiveSite, ...]]:
        """By module: the sums in it, or in a module inside it."""
        return _by_enclosing_module(self.reduce_sites)

    @cached_property
    def sequence_gathers_in(self) -> Mapping[str, tuple[CollectiveSite, ...]]:
        """By module: the inputs in it, or in a module inside it, whose positions are gathered."""
        return _by_enclosing_module(site for site in self.copy_sites if site.sequence_layout)

    @cached_property
    def is_sequence_parallel(self) -> bool:
        """Do ranks share positions outside of cut parts?"""
        return any(site.sequence_layout for site in self.copy_sites)


def _by_enclosing_module(sites: Iterable[CollectiveSite]) -> Mapping[str, tuple[CollectiveSite, ...]]:
    found: dict[str, list[CollectiveSite]] = {}
    for site in sites:
        module = site.module
        while module:
            found.setdefault(module, []).append(site)
            module = module.rpartition(".")[0]
    return {module: tuple(inside) for module, inside in found.items()}
