"""`core.comm.Comm` over a torch.distributed process group: NCCL, Gloo, or any backend registered with torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.ledger import Ledger
from meshwright.core.comm import Pending

# torch 2.13 renamed the two; 2.11 knows only the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchComm:
    """One process group. Calls are asynchronous: `wait()` on the result, which on CUDA orders streams and does not block."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger) -> None:
        self.group = group
        self.ledger = ledger
        self._native_mean = dist.get_backend(group) == "nccl"

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Pending:
        self._record(name, "all_reduce", tensor)
        return dist.all_reduce(tensor, self._op(op, tensor), group=self.group, async_op=True)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum") -> Pending:
        self._record(name, "reduce_scatter", tensor)
        return _reduce_scatter(output, tensor, op=self._op(op, tensor), group=self.group, async_op=True)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Pending:
        self._record(name, "all_gather", output)
        return _all_gather(output, tensor, group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Pending:
        self._record(name, "broadcast", tensor)
        return dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)

    def barrier(self) -> None:
        dist.barrier(self.group)

    def _record(self, name: str, op: str, whole: torch.Tensor) -> None:
        self.ledger.add(name, op, self.size, whole.numel() * whole.element_size())

    def _op(self, op: str, tensor: torch.Tensor) -> Any:
        if op != "mean":
            return _OPS[op]
        if self._native_mean:
            return dist.ReduceOp.AVG
        # Gloo's own mean divides after the sum; dividing first costs the same and never overflows where the mean would not.
        tensor.mul_(1.0 / self.size)
        return dist.ReduceOp.SUM
