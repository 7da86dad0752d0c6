"""A comm over several backends and algorithms: each call takes the route that was measured fastest for its operation and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.comm.async_comm import AsyncComm
from meshwright.comm.composed_collectives import ComposedComm
from meshwright.core.comm import Comm, PeerTensors, Work

if TYPE_CHECKING:
    from torch import Tensor

_UNEVEN_BYTES = 1 << 22  # size by which calls are routed whose sizes may differ between ranks
RouteChooser = Callable[[str, int], str]  # (operation, bytes of the whole tensor) → backend, or backend:algorithm


class RoutedComm(AsyncComm):
    """`core.comm.Comm` that forwards every call to another comm. All ranks must choose the same route, so the choice depends only on operation and
    size. Where sizes may differ from rank to rank (all-to-all, messages), one large size (`_UNEVEN_BYTES`) stands for all."""

    def __init__(self, routes: Mapping[str, Comm], choose: RouteChooser, composed_routes: Mapping[str, ComposedComm] | None = None) -> None:
        self._comms: dict[str, Comm | ComposedComm] = {**routes, **(composed_routes or {})}
        self._choose = choose
        self.default_comm = next(iter(routes.values()))
        self.rank, self.size = self.default_comm.rank, self.default_comm.size
        self._resolved: dict[tuple[str, int, bool], Comm | ComposedComm] = {}  # by operation, bytes and async; shared with `sync`

    def all_reduce(self, tensor: Tensor, name: str, op: str = "sum", factor: float | None = None) -> Work:
        return self._comm_for("all_reduce", tensor.nbytes).all_reduce(tensor, name, op, factor)

    def reduce(self, tensor: Tensor, name: str, op: str = "sum", root: int = 0) -> Work:
        return self._comm_for("reduce", tensor.nbytes).reduce(tensor, name, op, root)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None) -> Work:
        return self._comm_for("reduce_scatter", tensor.nbytes).reduce_scatter(output, tensor, name, op, sizes)

    def all_gather(self, output: Tensor, tensor: Tensor, name: str, sizes: Sequence[int] | None = None) -> Work:
        return self._comm_for("all_gather", output.nbytes).all_gather(output, tensor, name, sizes)

    def all_to_all(self, output: Tensor, tensor: Tensor, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> Work:
        return self._comm_for("all_to_all", _UNEVEN_BYTES).all_to_all(output, tensor, name, recv_counts, send_counts)

    def broadcast(self, tensor: Tensor, name: str, source: int = 0) -> Work:
        return self._comm_for("broadcast", tensor.nbytes).broadcast(tensor, name, source)

    def gather(self, output: Tensor | None, tensor: Tensor, name: str, root: int = 0) -> Work:
        return self._comm_for("gather", tensor.nbytes * self.size).gather(output, tensor, name, root)

    def scatter(self, output: Tensor, tensor: Tensor | None, name: str, root: int = 0) -> Work:
        return self._comm_for("scatter", output.nbytes * self.size).scatter(output, tensor, name, root)

    def exchange(self, sends: PeerTensors, receives: PeerTensors, name: str) -> Work:
        return self._comm_for("send", _UNEVEN_BYTES).exchange(sends, receives, name)

    def barrier(self) -> None:
        self.default_comm.barrier()

    def _comm_for(self, op: str, size: int) -> Any:
        """The comm for a call. `ComposedComm` has only the operations that are routed to it."""
        key = op, size, self._async_op
        if key not in self._resolved:
            comm = self._comms[self._choose(op, size)]
            self._resolved[key] = comm if self._async_op else comm.sync
        return self._resolved[key]
