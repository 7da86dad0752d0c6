"""The tensor-parallel part of a plan: which strands of a model are dealt out over ranks, and where the ranks must meet because of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property


def piece(size: int, rank: int, ways: int) -> tuple[int, int]:
    """(first, number) of what one of `ways` ranks holds of `size`; the first ranks take what does not divide."""
    each, more = divmod(size, ways)
    return rank * each + min(rank, more), each + (rank < more)


@dataclass(frozen=True)
class Cut:
    """One parameter along one dim, which is `outer` × the strand × `inner` long (outer 3 for fused q, k and v; inner 64 for heads of 64)."""

    parameter: str
    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Dealt:
    """A strand of `size` that ranks share: heads, features, channels, vocabulary entries."""

    name: str
    size: int
    cuts: tuple[Cut, ...]

    def piece(self, rank: int, ways: int) -> tuple[int, int]:
        """(first, number) of what one rank holds."""
        return piece(self.size, rank, ways)


@dataclass(frozen=True)
class Rewrite:
    """A size in the model's own code that counts a dealt strand: `number` at `position` of a call with `rank` sizes inside `module`."""

    module: str
    function: str
    rank: int
    position: int
    number: int
    strand: str
    dim: int = 0
    length: int = 0  # for a slice: of the dim that is sliced


@dataclass(frozen=True)
class Along:
    """Positions of a sequence in a tensor of which each rank has some: the strand, the dim that they lie in, how many elements of that dim
    one position has, and whether others (samples) lie in it too, outside of them."""

    strand: str
    dim: int
    inner: int = 1
    mixed: bool = False


@dataclass(frozen=True)
class Masked:
    """A module that multiplies by random numbers of its own, and where positions lie in what it is given."""

    module: str
    along: Along


@dataclass(frozen=True)
class Meet:
    """Where ranks meet. `bytes` is the tensor's size for one sample (for any number of them if it is `fixed`), so that what travels is
    known before anything runs."""

    module: str
    bytes: float
    position: int = 0  # of the input, for gradients that meet where a whole activation enters a cut part
    fixed: bool = False
    strand: str = ""  # the one that is gathered or looked up
    final_in: tuple[str, ...] = ()  # modules in which nothing after it is kept for backward: recomputing those stops before it
    feeds: tuple[str, ...] = ()  # layers that multiply the input by their matrix, for gradients that meet
    numbers: int = 1  # of a row that is normed: a layer norm's mean and variance are told in one call
    across: str = ""  # a strand of the tensor that the other axis of a grid deals out: a rank has its piece of it
    along: Along | None = None  # where ranks share positions outside of cut parts: what they exchange is some positions of each
    at_output: bool = False  # of the module, for what is collected
    trained: bool = True  # whether a gradient comes back

    def at(self, samples: int) -> float:
        return self.bytes if self.fixed else self.bytes * samples


@dataclass(frozen=True)
class TensorPolicy:
    """Tensor parallelism of one model over the ranks of one axis. Empty: nothing is cut.

    [Note: sequence]
    Between cut parts every rank has the same activations, and does the same work on them: norms, dropout, residual sums. Where that work
    treats positions alike, ranks can have some positions each instead. A sum over ranks then gives each rank its positions of the sum
    (a reduce-scatter), and a cut part gathers all positions on its way in; in backward the two change places. Together they carry what the
    all-reduce did. Whole parameters on the way see some positions only, so their gradients are partial.
    """

    strands: tuple[Dealt, ...] = ()
    enters: tuple[Meet, ...] = ()  # backward: the gradients of this input are partial and are summed
    sums: tuple[Meet, ...] = ()  # forward: the output is a partial sum and is summed
    gathers: tuple[Meet, ...] = ()  # forward: the output's last feature dim is cut and something needs it whole
    lookups: tuple[Meet, ...] = ()  # forward: a rank looks up its own rows, and the results are summed
    norms: tuple[Meet, ...] = ()  # both: a norm runs over a dealt strand, and its statistics are summed
    deals: tuple[Meet, ...] = ()  # forward: of a whole input a rank keeps its positions
    collects: tuple[Meet, ...] = ()  # forward: an input or output of which ranks have some positions each is needed whole
    masks: tuple[Masked, ...] = ()  # random numbers that are drawn for all positions, so that they do not depend on the ranks
    partial: tuple[str, ...] = ()  # parameters kept whole inside a cut part: their gradients are summed
    rewrites: tuple[Rewrite, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)  # parameter → why it is not cut

    def lengths(self, place: int, ways: int) -> Mapping[str, Mapping[int, int]]:
        """By parameter and dim: how long one of so many ranks' piece is."""
        if (place, ways) not in self._lengths:
            found = self._lengths[place, ways] = {}
            for strand in self.strands:
                _, count = strand.piece(place, ways)
                for cut in strand.cuts:
                    found.setdefault(cut.parameter, {})[cut.dim] = cut.outer * count * cut.inner
        return self._lengths[place, ways]

    @cached_property
    def _lengths(self) -> dict[tuple[int, int], dict[str, dict[int, int]]]:
        """As they were asked for."""
        return {}

    @cached_property
    def sums_in(self) -> Mapping[str, tuple[Meet, ...]]:
        """By module: the sums in it, or in a module inside it."""
        return _within(self.sums)

    @cached_property
    def gathered_in(self) -> Mapping[str, tuple[Meet, ...]]:
        """By module: the inputs in it, or in a module inside it, whose positions are gathered."""
        return _within(meet for meet in self.enters if meet.along)

    @cached_property
    def sequence(self) -> bool:
        """Do ranks share positions outside of cut parts?"""
        return any(meet.along for meet in self.enters)


def _within(meets: Iterable[Meet]) -> Mapping[str, tuple[Meet, ...]]:
    found: dict[str, list[Meet]] = {}
    for meet in meets:
        module = meet.module
        while module:
            found.setdefault(module, []).append(meet)
            module = module.rpartition(".")[0]
    return {module: tuple(inside) for module, inside in found.items()}
