"""The tensor-parallel part of a plan: which strands of a model are dealt out over ranks, and where the ranks must meet because of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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

    def at(self, samples: int) -> float:
        return self.bytes if self.fixed else self.bytes * samples


@dataclass(frozen=True)
class TensorPolicy:
    """Tensor parallelism of one model over the ranks of one axis. Empty: nothing is cut."""

    strands: tuple[Dealt, ...] = ()
    enters: tuple[Meet, ...] = ()  # backward: the gradients of this input are partial and are summed
    sums: tuple[Meet, ...] = ()  # forward: the output is a partial sum and is summed
    gathers: tuple[Meet, ...] = ()  # forward: the output's last feature dim is cut and something needs it whole
    lookups: tuple[Meet, ...] = ()  # forward: a rank looks up its own rows, and the results are summed
    norms: tuple[Meet, ...] = ()  # both: a norm runs over a dealt strand, and its statistics are summed
    partial: tuple[str, ...] = ()  # parameters kept whole inside a cut part: their gradients are summed
    rewrites: tuple[Rewrite, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)  # parameter → why it is not cut
