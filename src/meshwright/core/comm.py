"""The communication protocol: collectives on tensors, each call named. Implementations are in `comm/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Messages: TypeAlias = "Sequence[tuple[int, torch.Tensor]]"  # (rank in the group, what is sent to it or arrives from it)


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Comm(Protocol):
    """One group of ranks. Every call is in place or into `output`, returns at once, and is recorded under its name."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Pending: ...

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum") -> Pending: ...

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Pending: ...

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, receives: Sequence[int], sends: Sequence[int]) -> Pending:
        """`sends[r]` rows of `tensor` go to rank r, and `receives[r]` rows of `output` come from it; counted by what is handed in."""
        ...

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Pending: ...

    def exchange(self, sends: Messages, receives: Messages, name: str) -> Pending: ...

    def barrier(self) -> None: ...
