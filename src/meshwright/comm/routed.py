"""One group over several backends and by several algorithms: each call goes the way that was measured quickest for its operation and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.comm.composed import Composed
from meshwright.comm.pending import PutOff
from meshwright.core.comm import Comm, Messages, Pending

if TYPE_CHECKING:
    import torch

Choose = Callable[[str, int], str]  # (operation, bytes of the whole tensor) → backend, or backend:algorithm


class RoutedComm(PutOff):
    """`core.comm.Comm` that hands every call on. All ranks must choose alike, so a choice may depend on operation and size only: where sizes
    differ from rank to rank (all-to-all, unequal parts, messages) the choice is that of the largest size."""

    def __init__(self, ways: Mapping[str, Comm], choose: Choose, composed: Mapping[str, Composed] | None = None) -> None:
        self._ways, self._choose = dict(ways), choose
        self._composed = dict(composed or {})
        self.first = next(iter(self._ways.values()))
        self.rank, self.size = self.first.rank, self.first.size
        self._known: dict[tuple[str, int, bool], Comm | Composed] = {}  # shared with the twin, whose calls are not put off

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", factor: float | None = None) -> Pending:
        return self._by("all_reduce", tensor.nbytes).all_reduce(tensor, name, op, factor)

    def reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", root: int = 0) -> Pending:
        return self._by("reduce", tensor.nbytes).reduce(tensor, name, op, root)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None
    ) -> Pending:  # fmt: skip
        return self._by("reduce_scatter", tensor.nbytes).reduce_scatter(output, tensor, name, op, sizes)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str, sizes: Sequence[int] | None = None) -> Pending:
        return self._by("all_gather", output.nbytes).all_gather(output, tensor, name, sizes)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, receives: Sequence[int], sends: Sequence[int]) -> Pending:
        return self._by("all_to_all", _UNEVEN).all_to_all(output, tensor, name, receives, sends)

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Pending:
        return self._by("broadcast", tensor.nbytes).broadcast(tensor, name, source)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        return self._by("gather", tensor.nbytes * self.size).gather(output, tensor, name, root)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, name: str, root: int = 0) -> Pending:
        return self._by("scatter", output.nbytes * self.size).scatter(output, tensor, name, root)

    def exchange(self, sends: Messages, receives: Messages, name: str) -> Pending:
        return self._by("send", _UNEVEN).exchange(sends, receives, name)

    def barrier(self) -> None:
        self.first.barrier()

    def _by(self, op: str, size: int) -> Any:
        """What takes the call: all operations are `Comm`'s, and `Composed` has those that are routed to it."""
        return self._known.get((op, size, self._later)) or self._take(op, size)

    def _take(self, op: str, size: int) -> Any:
        way = self._choose(op, size)
        comm = self._composed[way] if way in self._composed else self._ways[way]
        self._known[op, size, self._later] = taken = comm if self._later else comm.at_once
        return taken


_UNEVEN = 1 << 22  # bytes that stand for sizes which the ranks do not share
