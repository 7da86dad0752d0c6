"""Collectives of `core.comm.Comm` through the shared memory of a node (`shared_collectives.py`), instead of the backend's own collectives.

[Note: algorithms]
  flat       the backend's own collective.
  shared     all ranks of the group are on one node: they reduce directly from shared memory, with no messages.
  two-level  all-reduce over several nodes with equally many ranks: a reduce-scatter in each node's shared memory, the backend's own all-reduce
             between the ranks at the same position on every node, and an all-gather in each node's shared memory. With k ranks per node,
             a rank sends 1/k of the bytes between nodes that it sends in a flat ring.

The ledger counts a composed call as one operation, with the bytes of its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm import shared_collectives
from meshwright.comm.async_comm import AsyncComm, ChainedWork
from meshwright.comm.comm_ledger import Ledger
from meshwright.comm.shared_collectives import Combine, PostReduce, address_ranges
from meshwright.comm.shared_memory_window import SharedMemoryWindow
from meshwright.comm.wire_format import Finish, WireFormat, mean_error
from meshwright.comm.work_queue import COMPLETED, WorkQueue
from meshwright.core.comm import Comm, Work

_REDUCE_FNS: dict[str, Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
_SUMMABLE = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
             torch.complex64, torch.complex128}  # fmt: skip


@dataclass(eq=False)
class SharedMemoryGroup:
    """One group's shared memory and the work queue of its calls."""

    comm: Comm
    backend: str
    window: SharedMemoryWindow | None = None  # set if all ranks are on one node
    node_window: SharedMemoryWindow | None = None  # otherwise: for the group's ranks on this node
    across: Comm | None = None  # and for the ranks at this rank's position on every node

    def __post_init__(self) -> None:
        self.queue = WorkQueue(self.backend, kind="composed")

    def has(self, algorithm: str) -> bool:
        return self.window is not None if algorithm == "shared" else self.node_window is not None and self.across is not None


class ComposedComm(AsyncComm):
    """The collectives of one group with one algorithm."""

    def __init__(self, group: SharedMemoryGroup, algorithm: str, ledger: Ledger) -> None:
        self._group, self._algorithm, self.ledger = group, algorithm, ledger
        self.rank, self.size = group.comm.rank, group.comm.size
        self._wire_format = WireFormat(f"{group.backend} {algorithm}", self.rank, _SUMMABLE)

    def all_reduce(self, tensor: Tensor, name: str, op: str = "sum", factor: float | None = None) -> Work:
        if tensor.device.type != "cpu":
            host = tensor.cpu()
            return ChainedWork(self.all_reduce(host, name, op, factor), lambda: tensor.copy_(host))
        work, op, finish = self._wire_format.reduction_tensor(tensor, op)
        reduce_fn, scale = _reduce_fn_and_scale(work, op, factor, self.size)
        before, after = _pre_and_post_scale(work, scale)

        def run() -> None:
            before(work)
            if self._algorithm == "two-level":
                self._two_level_all_reduce(work.view(-1), reduce_fn, op, name)
                after(work)
            else:
                shared_collectives.all_reduce(self._window, work.view(-1), reduce_fn, after, name)

        return self._submit(name, "all_reduce", tensor, run, finish)

    def _two_level_all_reduce(self, tensor: Tensor, reduce_fn: Combine, op: str, name: str) -> None:
        window, across = self._group.node_window, self._group.across
        assert window is not None and across is not None, "two-level needs a window of the node"
        parts = tensor.tensor_split(window.size)
        part, ranges = parts[window.rank], address_ranges(parts)
        shared_collectives.reduce_scatter(window, ranges, part, part, reduce_fn, name)
        across.sync.all_reduce(part, name, "sum" if op == "mean" else op).wait()
        shared_collectives.all_gather(window, ranges, part.data_ptr(), name)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None) -> Work:
        if tensor.device.type != "cpu":
            host = torch.empty(output.shape, dtype=output.dtype)
            return ChainedWork(self.reduce_scatter(host, tensor.cpu(), name, op, sizes), lambda: output.copy_(host))
        work, op, _ = self._wire_format.reduction_tensor(tensor, op)
        result = output if output.is_contiguous() and output.dtype == work.dtype else work.new_empty(output.shape)
        reduce_fn, scale = _reduce_fn_and_scale(work, op, None, self.size)
        before, after = _pre_and_post_scale(work, scale)

        def run() -> None:
            before(work)
            parts = work.view(-1).split(_part_sizes(work, sizes, self.size))
            shared_collectives.reduce_scatter(self._window, address_ranges(parts), parts[self.rank], result.view(-1), reduce_fn, name)
            after(result)

        return self._submit(name, "reduce_scatter", tensor, run, None if result is output else lambda: output.copy_(result))

    def all_gather(self, output: Tensor, tensor: Tensor, name: str, sizes: Sequence[int] | None = None) -> Work:
        if tensor.device.type != "cpu":
            host = torch.empty(output.shape, dtype=output.dtype)
            return ChainedWork(self.all_gather(host, tensor.cpu(), name, sizes), lambda: output.copy_(host))
        result = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device=output.device)

        def run() -> None:
            parts = result.view(-1).split(_part_sizes(result, sizes, self.size))
            if parts[self.rank].data_ptr() != tensor.data_ptr():
                parts[self.rank].copy_(tensor.reshape(-1))
            shared_collectives.all_gather(self._window, address_ranges(parts), parts[self.rank].data_ptr(), name)

        return self._submit(name, "all_gather", output, run, None if result is output else lambda: output.copy_(result))

    @property
    def _window(self) -> SharedMemoryWindow:
        assert self._group.window is not None, "shared needs a window of all ranks"
        return self._group.window

    def _submit(self, name: str, op: str, counted: Tensor, run: Callable[[], None], finish: Finish | None) -> Work:
        self.ledger.add(name, op, self.size, counted.nbytes)

        def execute() -> None:
            with torch.no_grad():
                run()
                if finish is not None:
                    finish()

        return self._group.queue.submit(name, [counted], [counted], self._async_op, execute) or COMPLETED


def _reduce_fn_and_scale(work: Tensor, op: str, factor: float | None, num_ranks: int) -> tuple[Combine, float | None]:
    """The function that combines two tensors, and the factor for the result."""
    if op != "mean":
        return _REDUCE_FNS[op], factor
    if not (work.is_floating_point() or work.is_complex()):
        raise mean_error(work.dtype)
    return torch.add, (1.0 if factor is None else factor) / num_ranks


def _pre_and_post_scale(work: Tensor, scale: float | None) -> tuple[PostReduce, PostReduce]:
    """What to apply before and after the reduction. Scaling the reduced parts costs least. In fp16 the unscaled sum may overflow although the
    scaled one does not, so there every rank scales its input."""
    identity: PostReduce = lambda t: t  # noqa: E731
    scale_fn = identity if scale is None else lambda t: t.mul_(scale)
    return (scale_fn, identity) if work.dtype == torch.float16 else (identity, scale_fn)


def _part_sizes(tensor: Tensor, sizes: Sequence[int] | None, num_ranks: int) -> list[int]:
    """Elements of each rank's part; `sizes` are in rows."""
    if sizes is None:
        return [tensor.numel() // num_ranks] * num_ranks
    return [n * (tensor.numel() // max(sum(sizes), 1)) for n in sizes]
