"""A group of one rank, where every collective completes at once. A single-device run uses it, so such a run needs no special case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.core.comm import PeerTensors


class NullWork:
    """A collective that is already complete."""

    def wait(self) -> bool:
        return True


class NullComm:
    """`core.comm.Comm` for one rank."""

    rank = 0
    size = 1

    @property
    def sync(self) -> NullComm:
        return self

    def all_reduce(self, tensor: Tensor, name: str, op: str = "sum", factor: float | None = None) -> NullWork:
        if factor is not None:
            tensor.mul_(factor)
        return NullWork()

    def reduce(self, tensor: Tensor, name: str, op: str = "sum", root: int = 0) -> NullWork:
        return NullWork()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None) -> NullWork:
        return _copy_to_output(output, tensor)

    def all_gather(self, output: Tensor, tensor: Tensor, name: str, sizes: Sequence[int] | None = None) -> NullWork:
        return _copy_to_output(output, tensor)

    def all_to_all(self, output: Tensor, tensor: Tensor, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> NullWork:
        return _copy_to_output(output, tensor)

    def broadcast(self, tensor: Tensor, name: str, source: int = 0) -> NullWork:
        return NullWork()

    def gather(self, output: Tensor | None, tensor: Tensor, name: str, root: int = 0) -> NullWork:
        return NullWork() if output is None else _copy_to_output(output, tensor)

    def scatter(self, output: Tensor, tensor: Tensor | None, name: str, root: int = 0) -> NullWork:
        return NullWork() if tensor is None else _copy_to_output(output, tensor)

    def exchange(self, sends: PeerTensors, receives: PeerTensors, name: str) -> NullWork:
        for (_, sent), (_, received) in zip(sends, receives, strict=True):
            _copy_to_output(received, sent)
        return NullWork()

    def barrier(self) -> None:
        return None


def _copy_to_output(output: Tensor, tensor: Tensor) -> NullWork:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor.view(output.shape))
    return NullWork()
