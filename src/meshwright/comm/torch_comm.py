"""`core.comm.Comm` over a torch.distributed process group: NCCL, Gloo, or any backend registered with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from meshwright.comm.ledger import Ledger
from meshwright.core.comm import Messages, Pending

# torch 2.13 renamed the two; 2.11 knows only the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchComm:
    """One process group. Calls are asynchronous: `wait()` on the result, which on CUDA orders streams and does not block.

    A call shows under its name in a torch profiler's timeline, and so does the wait for it; with NCCL it is an NVTX range too.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger) -> None:
        self.group = group
        self.ledger = ledger
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._on_cuda = dist.get_backend(group) == "nccl"

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Pending:
        return self._start(name, "all_reduce", tensor, lambda: dist.all_reduce(tensor, self._op(op, tensor), group=self.group, async_op=True))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum") -> Pending:
        return self._start(
            name, "reduce_scatter", tensor, lambda: _reduce_scatter(output, tensor, op=self._op(op, tensor), group=self.group, async_op=True)
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Pending:
        return self._start(name, "all_gather", output, lambda: _all_gather(output, tensor, group=self.group, async_op=True))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, receives: Sequence[int], sends: Sequence[int]) -> Pending:
        return self._start(
            name,
            "all_to_all",
            tensor,
            lambda: dist.all_to_all_single(output, tensor, list(receives), list(sends), group=self.group, async_op=True),
        )

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Pending:
        return self._start(name, "broadcast", tensor, lambda: dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def exchange(self, sends: Messages, receives: Messages, name: str) -> Pending:
        """Messages with single ranks, all under way at once; each one sent is counted."""
        ways = [(dist.isend, *message) for message in sends] + [(dist.irecv, *message) for message in receives]
        for _, tensor in sends:
            self.ledger.add(name, "send", 2, tensor.numel() * tensor.element_size())
        return self._named(name, lambda: _All(dist.batch_isend_irecv([dist.P2POp(op, t, group=self.group, group_peer=r) for op, r, t in ways])))

    def barrier(self) -> None:
        dist.barrier(self.group)

    def _start(self, name: str, op: str, whole: torch.Tensor, call: Callable[[], Any]) -> Pending:
        """Count a call and make it under its name. Unless somebody is profiling, naming costs a look at two flags."""
        self.ledger.add(name, op, self.size, whole.numel() * whole.element_size())
        return self._named(name, call)

    def _named(self, name: str, call: Callable[[], Any]) -> Pending:
        if not self._on_cuda:
            return _profiled(name, call) if profiler._is_profiler_enabled else call()  # type: ignore[no-any-return]
        torch.cuda.nvtx.range_push(name)
        try:
            return _profiled(name, call) if profiler._is_profiler_enabled else call()  # type: ignore[no-any-return]
        finally:
            torch.cuda.nvtx.range_pop()

    def _op(self, op: str, tensor: torch.Tensor) -> Any:
        if op != "mean":
            return _OPS[op]
        if self._on_cuda:
            return dist.ReduceOp.AVG
        # Gloo's own mean divides after the sum; dividing first costs the same and never overflows where the mean would not.
        tensor.mul_(1.0 / self.size)
        return dist.ReduceOp.SUM


class _All:
    """Several calls under way, waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _Awaited(dist.Work):
    """A call that was made under a profiler: the wait for it shows under its name too. A `Work`, since FSDP2 waits for nothing else."""

    def __init__(self, work: Any, name: str) -> None:
        super().__init__()
        self._work, self._name = work, name

    def wait(self, *args: Any) -> bool:
        with profiler.record_function(f"{self._name} (wait)"):
            return bool(self._work.wait(*args))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _profiled(name: str, call: Callable[[], Any]) -> Pending:
    with profiler.record_function(name):
        return _Awaited(call(), name)
