"""The communication protocol: collectives on tensors, in which each call has a name. Implementations are in `comm/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

PeerTensors: TypeAlias = "Sequence[tuple[int, torch.Tensor]]"  # (rank in the group, the tensor sent to it or received from it)


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object: ...


class Comm(Protocol):
    """One group of ranks. Every call works in place or writes to `output`, is asynchronous, and is recorded under its name with group and bytes.

    To block: `comm.sync.all_reduce(tensor, "name").wait()`. Any dtype, any strides; what a backend lacks is composed from other calls. `sizes` are
    the rows from or for each rank, where they differ. A call's bytes are those of the whole tensor: the larger of input and output.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def sync(self) -> Comm:
        """The same group, for calls that are waited for immediately: over MPI the calling thread makes them, small ones in a third of the time."""

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", factor: float | None = None) -> Work:
        """Reduce to all ranks. With `factor`, every rank's tensor is multiplied by it first."""

    def reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", root: int = 0) -> Work:
        """Reduce to the root. On other ranks the tensor is undefined afterwards."""

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None
    ) -> Work:  # fmt: skip
        """Reduce `tensor` and scatter the result into `output`. `tensor` may be overwritten."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str, sizes: Sequence[int] | None = None) -> Work: ...

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> Work:
        """Send `send_counts[r]` rows of `tensor` to rank r, receive `recv_counts[r]` rows of `output`; recorded with `tensor`'s bytes."""

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Work: ...

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, name: str, root: int = 0) -> Work:
        """Concatenate all ranks' tensors, of one shape, into the root's `output`; other ranks pass None."""

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, name: str, root: int = 0) -> Work:
        """Distribute the root's `tensor` in equal parts; other ranks pass None."""

    def exchange(self, sends: PeerTensors, receives: PeerTensors, name: str) -> Work: ...

    def barrier(self) -> None: ...
