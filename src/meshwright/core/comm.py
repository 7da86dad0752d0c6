"""The communication protocol: collectives on tensors, each call named. Implementations are in `comm/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

PeerTensors: TypeAlias = "Sequence[tuple[int, torch.Tensor]]"  # (rank in the group, what is sent to it or arrives from it)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Comm(Protocol):
    """One group of ranks. Every call is in place or into `output`, returns at once, and is recorded under its name with its group and bytes.

    To block, wait: `comm.at_once.all_reduce(tensor, "name").wait()`. Any dtype, any strides; what a backend lacks is composed. `sizes` are rows
    from or for each rank, where they differ. A call's bytes are those of the whole tensor: the larger of what goes in and what comes out.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def sync(self) -> Comm:
        """The same group, for calls that are waited for at once: over MPI the caller then makes them itself, small ones in a third of the time."""
        ...

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", factor: float | None = None) -> Work:
        """With `factor`, every rank's tensor is multiplied by it first."""
        ...

    def reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", root: int = 0) -> Work:
        """Elsewhere than at the root the tensor's values are undefined afterwards."""
        ...

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None
    ) -> Work:  # fmt: skip
        """What is scattered may be overwritten on the way."""
        ...

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str, sizes: Sequence[int] | None = None) -> Work: ...

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> Work:
        """`sends[r]` rows of `tensor` go to rank r, and `receives[r]` rows of `output` come from it; counted by what is handed in."""
        ...

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Work: ...

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, name: str, root: int = 0) -> Work:
        """All tensors, of one shape, one after the other into the root's `output`; others give None."""
        ...

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, name: str, root: int = 0) -> Work:
        """Equal parts of the root's `tensor`; others give None."""
        ...

    def exchange(self, sends: PeerTensors, receives: PeerTensors, name: str) -> Work: ...

    def barrier(self) -> None: ...
