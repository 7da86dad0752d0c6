"""`core.comm.Comm` over a torch.distributed process group: NCCL, Gloo, MPI, or any backend registered with torch.

Features that a backend lacks are emulated: dtypes in `wire_format.py`, gathers of unequal parts (padded over gloo) and scaled sums here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from meshwright.comm.async_comm import AsyncComm, ChainedWork
from meshwright.comm.comm_ledger import Ledger
from meshwright.comm.wire_format import Finish, WireFormat, mean_error, warn_fallback
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

    def all_reduce(self, tensor: Tensor, name: str, op: str = "sum", factor: float | None = None) -> Work:
        work, op, finish = self._wire_format.reduction_tensor(tensor, op)
        return self._collective(name, "all_reduce", tensor.nbytes, finish, dist.all_reduce, work, self._reduce_op(op, work, factor))

    def reduce(self, tensor: Tensor, name: str, op: str = "sum", root: int = 0) -> Work:
        work, op, finish = self._wire_format.reduction_tensor(tensor, op)
        finish = finish if self.rank == root else None
        return self._collective(name, "reduce", tensor.nbytes, finish, dist.reduce, work, group_dst=root, op=self._reduce_op(op, work))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None) -> Work:
        work, op, _ = self._wire_format.reduction_tensor(tensor, op)
        as_pairs = output.is_complex() and not work.is_complex()  # the backend reduces complex numbers as pairs of reals
        shape = (*output.shape, 2) if as_pairs else output.shape
        recv = output if self._wire_format.accepts(output) and output.dtype == work.dtype else work.new_empty(shape)
        finish = None if recv is output else lambda: output.copy_(torch.view_as_complex(recv) if as_pairs else recv)
        fn, send = (_reduce_scatter, work) if sizes is None else (dist.reduce_scatter, list(work.split(list(sizes))))
        return self._collective(name, "reduce_scatter", tensor.nbytes, finish, fn, recv, send, op=self._reduce_op(op, work))

    # -- data movement --

    def all_gather(self, output: Tensor, tensor: Tensor, name: str, sizes: Sequence[int] | None = None) -> Work:
        recv, finish = self._wire_format.receive_tensor(output)
        send = self._wire_format.send_tensor(tensor)
        if sizes is None:
            return self._collective(name, "all_gather", output.nbytes, finish, _all_gather, recv, send)
        rows = [n * self._wire_format.rows_on_wire(output) for n in sizes]
        if len(set(rows)) > 1 and UNEVEN_GATHER in self._traits.fallbacks:
            return self._padded_all_gather(recv, send, rows, name, finish)
        return self._collective(name, "all_gather", output.nbytes, finish, dist.all_gather, list(recv.split(rows)), send)

    def all_to_all(self, output: Tensor, tensor: Tensor, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> Work:
        recv, finish = self._wire_format.receive_tensor(output)
        send = self._wire_format.send_tensor(tensor)
        splits = ([n * self._wire_format.rows_on_wire(t) for n in counts] for t, counts in ((output, recv_counts), (tensor, send_counts)))
        return self._collective(name, "all_to_all", tensor.nbytes, finish, dist.all_to_all_single, recv, send, *splits)

    def broadcast(self, tensor: Tensor, name: str, source: int = 0) -> Work:
        wire = self._wire_format
        work, finish = (wire.send_tensor(tensor), None) if self.rank == source else wire.receive_tensor(tensor)
        return self._collective(name, "broadcast", tensor.nbytes, finish, dist.broadcast, work, group_src=source)

    def gather(self, output: Tensor | None, tensor: Tensor, name: str, root: int = 0) -> Work:
        send = self._wire_format.send_tensor(tensor)
        recv, finish = self._wire_format.receive_tensor(output) if output is not None else (None, None)
        parts = self._split_by_rank(recv, send) if self.rank == root else None
        return self._collective(name, "gather", tensor.nbytes * self.size, finish, dist.gather, send, parts, group_dst=root)

    def scatter(self, output: Tensor, tensor: Tensor | None, name: str, root: int = 0) -> Work:
        recv, finish = self._wire_format.receive_tensor(output)
        send = self._wire_format.send_tensor(tensor) if tensor is not None else None
        parts = self._split_by_rank(send, recv) if self.rank == root else None
        return self._collective(name, "scatter", output.nbytes * self.size, finish, dist.scatter, recv, parts, group_src=root)

    def exchange(self, sends: PeerTensors, receives: PeerTensors, name: str) -> Work:
        """Send to and receive from single ranks, all concurrently; each send is counted."""
        for _, tensor in sends:
            self.ledger.add(name, "send", 2, tensor.nbytes)
        receiving = [(r, *self._wire_format.host_receive_tensor(t)) for r, t in receives]
        ops = [(dist.isend, r, self._wire_format.host_send_tensor(t)) for r, t in sends] + [(dist.irecv, r, t) for r, t, _ in receiving]
        finishes = [finish for *_, finish in receiving if finish is not None]
        call = lambda: _WorkList(dist.batch_isend_irecv([dist.P2POp(op, t, group=self.group, group_peer=r) for op, r, t in ops]))  # noqa: E731
        return self._launch(name, call, (lambda: [finish() for finish in finishes]) if finishes else None)

    def barrier(self) -> None:
        dist.barrier(self.group)

    def _padded_all_gather(self, recv: Tensor, send: Tensor, rows: list[int], name: str, finish: Finish | None) -> Work:
        """Pad every part to the longest one for the gather, and trim it on arrival."""
        warn_fallback(self.backend, *UNEVEN_GATHER, dist.get_rank())
        max_rows = max(rows)
        padded = send.new_zeros((max_rows, *send.shape[1:]))
        padded[: send.shape[0]] = send
        gathered = send.new_empty((self.size * max_rows, *send.shape[1:]))

        def unpad() -> None:
            for part, padded_part, count in zip(recv.split(rows), gathered.split(max_rows), rows, strict=True):
                part.copy_(padded_part[:count])
            if finish is not None:
                finish()

        return self._collective(name, "all_gather", recv.nbytes, unpad, _all_gather, gathered, padded)

    def _split_by_rank(self, tensor: Tensor | None, like: Tensor) -> list[Tensor]:
        """One part of `tensor` for each rank, in the shape of `like`."""
        parts = tensor.view(-1).split(like.numel()) if tensor is not None and like.numel() else [like] * self.size
        return [part.view(like.shape) for part in parts]

    def _collective(self, name: str, op: str, size: int, finish: Finish | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Work:
        """Count a call of `size` bytes and launch it under its name. Without a profiler the name costs two flag checks."""
        self.ledger.add(name, op, self.size, size)
        return self._launch(name, partial(fn, *args, group=self.group, async_op=self._async_op, **kwargs), finish)

    def _launch(self, name: str, call: Callable[[], Any], finish: Finish | None = None) -> Work:
        if self._in_kernels:
            torch.cuda.nvtx.range_push(name)
        try:
            work = _launch_profiled(name, call) if profiler._is_profiler_enabled else call()
        finally:
            if self._in_kernels:
                torch.cuda.nvtx.range_pop()
        work = COMPLETED if work is None else work  # a sync call returns None and is complete
        return work if finish is None else ChainedWork(work, finish)  # type: ignore[no-any-return]

    def _reduce_op(self, op: str, tensor: Tensor, factor: float | None = None) -> Any:
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
            raise mean_error(tensor.dtype)
        # Gloo's own mean divides after the sum; dividing first costs the same and never overflows where the mean would not.
        tensor.mul_(1.0 / self.size)
        return dist.ReduceOp.SUM


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
