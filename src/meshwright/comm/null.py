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

    @property
    def at_once(self) -> NullComm:
        return self

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", factor: float | None = None) -> Done:
        if factor is not None:
            tensor.mul_(factor)
        return Done()

    def reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", root: int = 0) -> Done:
        return Done()

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None
    ) -> Done:  # fmt: skip
        return _copied(output, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str, sizes: Sequence[int] | None = None) -> Done:
        return _copied(output, tensor)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, receives: Sequence[int], sends: Sequence[int]) -> Done:
        return _copied(output, tensor)

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Done:
        return Done()

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, name: str, root: int = 0) -> Done:
        return Done() if output is None else _copied(output, tensor)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, name: str, root: int = 0) -> Done:
        return Done() if tensor is None else _copied(output, tensor)

    def exchange(self, sends: Messages, receives: Messages, name: str) -> Done:
        for (_, sent), (_, received) in zip(sends, receives, strict=True):
            _copied(received, sent)
        return Done()

    def barrier(self) -> None:
        return None


def _copied(output: torch.Tensor, tensor: torch.Tensor) -> Done:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor.view(output.shape))
    return Done()
