"""A group of one: every collective is already done. It is what a single-device run uses, so such a run has no special case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from meshwright.core.comm import Messages


class Done:
    """A collective that has finished before it began."""

    def wait(self) -> bool:
        return True


class NullComm:
    """`core.comm.Comm` for one rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Done:
        return Done()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum") -> Done:
        return _copied(output, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Done:
        return _copied(output, tensor)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, receives: Sequence[int], sends: Sequence[int]) -> Done:
        return _copied(output, tensor)

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Done:
        return Done()

    def exchange(self, sends: Messages, receives: Messages, name: str) -> Done:
        return Done()

    def barrier(self) -> None:
        return None


def _copied(output: torch.Tensor, tensor: torch.Tensor) -> Done:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    return Done()
