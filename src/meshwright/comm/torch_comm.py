"""`core.comm.Comm` over a torch.distributed process group: NCCL, Gloo, MPI, or any backend registered with torch.

Features that a backend lacks are emulated: dtypes in `wire_format.py`, gathers of unequal parts (padded over gloo) and scaled sums here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.autograd import profiler

from meshwright.comm.async_comm import AsyncComm, ChainedWork
from meshwright.comm.comm_ledger import Ledger
from meshwright.comm.wire_format import Finish, WireFormat, warn_fallback
from meshwright.comm.work_queue import COMPLETED
from meshwright.core.backends import SCALED_SUM, UNEVEN_GATHER, backend_traits
from meshwright.core.comm import PeerTensors, Work

# torch 2.13 renamed these two functions; 2.11 has only the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


class TorchComm(AsyncComm):
    """One process group. Calls are asynchronous: call `wait()` on the result; on CUDA it orders streams and does not block the host.

    A call and the wait for it appear under the call's name in a torch profiler's timeline; with NCCL the call is an NVTX range too.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger) -> None:
        self.group = group
        self.ledger = ledger
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self._traits = backend_traits(self.backend)
        self._in_kernels, self._scales = bool(self._traits.kernels), SCALED_SUM not in self._traits.fallbacks
        self._wire_format = WireFormat(self.backend, dist.get_rank())

    @property
    def sync(self) -> Self:
        """A comm whose calls block, for MPI only: gloo runs its calls in its own threads, NCCL on the device."""
        return super().sync if self._traits.sync_on_caller else self

    # -- reductions --

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", factor: float | None = None) -> Work:
        work, op, finish = self._wire_format.reduction_tensor(tensor, op)
        how = self._reduce_op(op, work, factor)
        return self._count_and_launch(
            name, "all_reduce", tensor, lambda: dist.all_reduce(work, how, group=self.group, async_op=self._async_op), finish
        )

    def reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", root: int = 0) -> Work:
        work, op, finish = self._wire_format.reduction_tensor(tensor, op)
        how = self._reduce_op(op, work)
        call = lambda: dist.reduce(work, group_dst=root, op=how, group=self.group, async_op=self._async_op)  # noqa: E731
        return self._count_and_launch(name, "reduce", tensor, call, finish if self.rank == root else None)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None
    ) -> Work:  # fmt: skip
        work, changed, _ = self._wire_format.reduction_tensor(tensor, op)
        how = self._reduce_op(changed, work)
        own = output if self._wire_format.accepts(output) and output.dtype == work.dtype else work.new_empty(_compute_shape(output, work))
        finish = None if own is output else lambda: _copy_result(output, own)
        if sizes is None:
            call = lambda: _reduce_scatter(own, work, op=how, group=self.group, async_op=self._async_op)  # noqa: E731
        else:
            call = lambda: dist.reduce_scatter(own, list(work.split(list(sizes))), op=how, group=self.group, async_op=self._async_op)  # noqa: E731
        return self._count_and_launch(name, "reduce_scatter", tensor, call, finish)

    # -- movements --

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str, sizes: Sequence[int] | None = None) -> Work:
        whole, finish = self._wire_format.receive_tensor(output)
        own = self._wire_format.send_tensor(tensor)
        if sizes is None:
            return self._count_and_launch(
                name, "all_gather", output, lambda: _all_gather(whole, own, group=self.group, async_op=self._async_op), finish
            )
        rows = [n * self._wire_format.rows_on_wire(output) for n in sizes]
        if len(set(rows)) > 1 and UNEVEN_GATHER in self._traits.fallbacks:
            return self._padded_all_gather(whole, own, rows, name, output, finish)
        call = lambda: dist.all_gather(list(whole.split(rows)), own, group=self.group, async_op=self._async_op)  # noqa: E731
        return self._count_and_launch(name, "all_gather", output, call, finish)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> Work:
        whole, finish = self._wire_format.receive_tensor(output)
        own = self._wire_format.send_tensor(tensor)
        arrive, leave = ([n * self._wire_format.rows_on_wire(t) for n in splits] for t, splits in ((output, recv_counts), (tensor, send_counts)))
        call = lambda: dist.all_to_all_single(whole, own, arrive, leave, group=self.group, async_op=self._async_op)  # noqa: E731
        return self._count_and_launch(name, "all_to_all", tensor, call, finish)

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Work:
        if self.rank == source:
            work, finish = self._wire_format.send_tensor(tensor), None
        else:
            work, finish = self._wire_format.receive_tensor(tensor)
        return self._count_and_launch(
            name, "broadcast", tensor, lambda: dist.broadcast(work, group=self.group, group_src=source, async_op=self._async_op), finish
        )

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, name: str, root: int = 0) -> Work:
        own = self._wire_format.send_tensor(tensor)
        whole, finish = self._wire_format.receive_tensor(output) if output is not None else (None, None)
        parts = list(whole.view(-1).split(own.numel())) if whole is not None and own.numel() else [own] * self.size
        shaped = [part.view(own.shape) for part in parts]
        call = lambda: dist.gather(own, shaped if self.rank == root else None, group=self.group, group_dst=root, async_op=self._async_op)  # noqa: E731
        self.ledger.add(name, "gather", self.size, tensor.numel() * tensor.element_size() * self.size)
        return self._launch(name, call, finish)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, name: str, root: int = 0) -> Work:
        own, finish = self._wire_format.receive_tensor(output)
        whole = self._wire_format.send_tensor(tensor) if tensor is not None else None
        parts = list(whole.view(-1).split(own.numel())) if whole is not None and own.numel() else [own] * self.size
        shaped = [part.view(own.shape) for part in parts]
        call = lambda: dist.scatter(own, shaped if self.rank == root else None, group=self.group, group_src=root, async_op=self._async_op)  # noqa: E731
        self.ledger.add(name, "scatter", self.size, output.numel() * output.element_size() * self.size)
        return self._launch(name, call, finish)

    def exchange(self, sends: PeerTensors, receives: PeerTensors, name: str) -> Work:
        """Send to and receive from single ranks, all concurrently; each send is counted."""
        for _, tensor in sends:
            self.ledger.add(name, "send", 2, tensor.numel() * tensor.element_size())
        landings = [(r, *self._wire_format.host_receive_tensor(t)) for r, t in receives]
        ways = [(dist.isend, r, self._wire_format.host_send_tensor(t)) for r, t in sends] + [(dist.irecv, r, t) for r, t, _ in landings]
        left = [finish for *_, finish in landings if finish is not None]
        call = lambda: _WorkList(dist.batch_isend_irecv([dist.P2POp(op, t, group=self.group, group_peer=r) for op, r, t in ways]))  # noqa: E731
        return self._launch(name, call, (lambda: [finish() for finish in left]) if left else None)

    def barrier(self) -> None:
        dist.barrier(self.group)

    def _padded_all_gather(
        self, whole: torch.Tensor, own: torch.Tensor, rows: list[int], name: str, output: torch.Tensor, finish: Finish | None
    ) -> Work:  # fmt: skip
        """Pad every part to the longest one for the gather, and trim it on arrival."""
        warn_fallback(self.backend, *UNEVEN_GATHER, dist.get_rank())
        most = max(rows)
        padded = own.new_zeros((most, *own.shape[1:]))
        padded[: own.shape[0]] = own
        arrived = own.new_empty((self.size * most, *own.shape[1:]))

        def unpad() -> None:
            for part, piece, count in zip(whole.split(rows), arrived.split(most), rows, strict=True):
                part.copy_(piece[:count])
            if finish is not None:
                finish()

        return self._count_and_launch(
            name, "all_gather", output, lambda: _all_gather(arrived, padded, group=self.group, async_op=self._async_op), unpad
        )

    def _count_and_launch(self, name: str, op: str, counted_tensor: torch.Tensor, call: Callable[[], Any], finish: Finish | None = None) -> Work:
        """Count a call and launch it under its name. Without a profiler the name costs two flag checks."""
        self.ledger.add(name, op, self.size, counted_tensor.numel() * counted_tensor.element_size())
        return self._launch(name, call, finish)

    def _launch(self, name: str, call: Callable[[], Any], finish: Finish | None = None) -> Work:
        if not self._in_kernels:
            work = _launch_profiled(name, call) if profiler._is_profiler_enabled else call()
        else:
            torch.cuda.nvtx.range_push(name)
            try:
                work = _launch_profiled(name, call) if profiler._is_profiler_enabled else call()
            finally:
                torch.cuda.nvtx.range_pop()
        work = COMPLETED if work is None else work  # a sync call returns None and is complete
        return work if finish is None else ChainedWork(work, finish)  # type: ignore[no-any-return]

    def _reduce_op(self, op: str, tensor: torch.Tensor, factor: float | None = None) -> Any:
        if factor is not None:
            if self._scales:
                return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
            warn_fallback(self.backend, *SCALED_SUM, dist.get_rank())
            tensor.mul_(factor)
        if op != "mean":
            return _REDUCE_OPS[op]
        if self._scales:
            return dist.ReduceOp.AVG
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"the mean of {tensor.dtype} is not a whole number: convert it, or take the sum")
        # Gloo's own mean divides after the sum; dividing first costs the same and never overflows where the mean would not.
        tensor.mul_(1.0 / self.size)
        return dist.ReduceOp.SUM


def _compute_shape(output: torch.Tensor, work: torch.Tensor) -> tuple[int, ...]:
    """The output's shape in the dtype of `work`, where complex numbers may be pairs of reals."""
    return (*output.shape, 2) if output.is_complex() and not work.is_complex() else tuple(output.shape)


def _copy_result(output: torch.Tensor, own: torch.Tensor) -> None:
    output.copy_(torch.view_as_complex(own) if output.is_complex() and not own.is_complex() else own)


class _WorkList:
    """Several works, waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _ProfiledWork(dist.Work):
    """A call made under a profiler; the wait for it is recorded under its name too. It is a `dist.Work` because FSDP2 waits for nothing else."""

    def __init__(self, work: Any, name: str) -> None:
        super().__init__()
        self._work, self._name = work, name

    def wait(self, *args: Any) -> bool:
        with profiler.record_function(f"{self._name} (wait)"):
            return bool(self._work.wait(*args))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _launch_profiled(name: str, call: Callable[[], Any]) -> Work:
    with profiler.record_function(name):
        work = call()
        return COMPLETED if work is None else _ProfiledWork(work, name)
