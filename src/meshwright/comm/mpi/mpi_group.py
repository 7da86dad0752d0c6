"""torch's process group over MPI. The methods are torch's; each submits one operation to the group's work queue and returns a `Work`, or None for a
sync call, which is complete.

torch calls some methods from Python and some from C++ (DDP's reducer, DTensor's functional collectives), and renamed some in 2.13: both
names are here.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.mpi import mpi_library

mpi_library.load()  # before any other import of mpi4py, which would initialise MPI itself

from mpi4py import MPI  # noqa: E402

from meshwright.comm.mpi import buffers  # noqa: E402
from meshwright.comm.mpi.blocking_collectives import BlockingCollectives, Tensors  # noqa: E402
from meshwright.comm.mpi.message_work import Inbox, MessageWork, ReceiveWork  # noqa: E402
from meshwright.comm.mpi.mpi_reductions import find_reduction  # noqa: E402
from meshwright.comm.mpi.watchdog import Watchdog  # noqa: E402
from meshwright.comm.work_queue import WorkQueue, begin_event  # noqa: E402

_c10d: Any = torch._C._distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup
_CREATE_GROUP_TAG = 1
_inbox = Inbox()
_watchdog: Watchdog | None = None
_watchdog_lock = threading.Lock()


def make_group(ranks: Sequence[int]) -> MpiGroup:
    """Create a group of these global ranks, in this order, or of all ranks if `ranks` is empty. Only members call it."""
    global _watchdog
    world = MPI.COMM_WORLD
    with _watchdog_lock:
        if _watchdog is None:
            _watchdog = Watchdog(world.Dup(), _inbox)
            atexit.register(_watchdog.close)
    members = tuple(ranks) or tuple(range(world.Get_size()))
    if not ranks:
        return MpiGroup(world.Dup(), members)
    group = world.Get_group().Incl(list(members))
    return MpiGroup(world.Create_group(group, _CREATE_GROUP_TAG), members)


class MpiGroup(_ProcessGroup):  # type: ignore[misc]  # torch's stubs know only their own overloads
    """One communicator. Its work queue runs collectives in order; sends and receives are separate MPI requests."""

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, comm: Any, world_ranks: tuple[int, ...]) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm, self._world_ranks = comm, world_ranks
        self._collectives = BlockingCollectives(comm)
        self._group_rank, self._group_size = comm.Get_rank(), comm.Get_size()
        self._queue = WorkQueue(f"the group of ranks {_format_ranks(world_ranks)}", on_stream=buffers.on_side_stream)
        self._coalesced: list[dist.Work] | None = None  # works since _start_coalescing
        self._group_name = self._group_desc = ""
        assert _watchdog is not None
        _watchdog.watch(self._queue, world_ranks)

    # -- identity --

    def getBackendName(self) -> str:
        return "mpi"

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> MpiGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the work queue counts its operations."""

    def _get_sequence_number_for_group(self) -> int:
        return self._queue.sequence_number

    def shutdown(self) -> None:
        if self._comm != MPI.COMM_NULL:
            self._queue.close()
            _inbox.discard(self._comm)
            self._comm.Free()

    def abort(self) -> None:
        MPI.COMM_WORLD.Abort(1)

    def split_group(self, ranks: Sequence[int], *_: Any, **__: Any) -> MpiGroup:
        """Create a group of some of this group's ranks. Only its members call it."""
        return make_group([self._world_ranks[r] for r in ranks])

    # -- reductions --

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.AllreduceOptions()
        (tensor,) = tensors
        reduction = find_reduction(opts.reduceOp, tensor.dtype, self._group_size)
        if tensor.is_sparse:
            if reduction.op != MPI.SUM or reduction.factor is not None:
                raise ValueError("all_reduce of a sparse tensor: backend mpi has SUM and AVG only")
            return self._submit("all_reduce", tensors, tensors, opts.asyncOp, self._collectives.all_reduce_sparse, tensor, reduction.divisor)
        return self._submit("all_reduce", tensors, tensors, opts.asyncOp, self._collectives.all_reduce, tensor, reduction)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.AllreduceCoalescedOptions()
        reductions = [find_reduction(opts.reduceOp, t.dtype, self._group_size) for t in tensors]
        return self._submit("all_reduce", tensors, tensors, opts.asyncOp, _for_each, self._collectives.all_reduce, tensors, reductions)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceOptions()
        (tensor,) = tensors
        reduction = find_reduction(opts.reduceOp, tensor.dtype, self._group_size)
        return self._submit("reduce", tensors, tensors, opts.asyncOp, self._collectives.reduce, tensor, reduction, opts.rootRank)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceScatterOptions()
        (output,), (inputs,) = output_tensors, input_tensors
        reduction = find_reduction(opts.reduceOp, output.dtype, self._group_size)
        sizes = [t.numel() for t in inputs]
        if output.numel() != sizes[self._group_rank]:
            raise buffers.shape_error("reduce_scatter", output.shape, f"{sizes[self._group_rank]} elements, as its entry in the input list")

        def run() -> None:
            self._collectives.reduce_scatter(output, buffers.synchronized(torch.cat([t.reshape(-1) for t in inputs])), reduction, sizes)

        return self._submit("reduce_scatter", output_tensors, inputs, opts.asyncOp, run)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceScatterOptions()
        reduction = find_reduction(opts.reduceOp, output.dtype, self._group_size)
        self._check_shapes("reduce_scatter", input, output)
        return self._submit("reduce_scatter", (output,), (input,), opts.asyncOp, self._collectives.reduce_scatter, output, input, reduction)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceScatterOptions()
        reductions = [find_reduction(opts.reduceOp, t.dtype, self._group_size) for t in outputs]
        for output, whole in zip(outputs, inputs, strict=True):
            self._check_shapes("reduce_scatter", whole, output)
        reduce_scatter = self._collectives.reduce_scatter
        return self._submit("reduce_scatter", outputs, inputs, opts.asyncOp, _for_each, reduce_scatter, outputs, inputs, reductions)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- data movement --

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.BroadcastOptions()
        (tensor,) = tensors
        return self._submit("broadcast", tensors, tensors, opts.asyncOp, self._collectives.broadcast, tensor, opts.rootRank)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> dist.Work | None:
        (outputs,), (tensor,) = output_tensors, input_tensors
        return self._submit("all_gather", outputs, input_tensors, opts is None or opts.asyncOp, self._collectives.all_gather_list, outputs, tensor)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> dist.Work | None:
        """All-gather several tensors: `output_lists[rank][i]` receives the i-th input of a rank."""
        if len(output_lists) != self._group_size or any(len(outputs) != len(input_list) for outputs in output_lists):
            raise ValueError(f"all_gather_coalesced: the output must be {self._group_size} lists, one per rank, of {len(input_list)} tensors each")
        async_op, outputs = opts is None or opts.asyncOp, [t for outputs in output_lists for t in outputs]
        each_input = list(zip(*output_lists, strict=True))
        all_gather = self._collectives.all_gather_list
        return self._submit("all_gather", outputs, input_list, async_op, _for_each, all_gather, each_input, input_list)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work | None:
        self._check_shapes("all_gather", output, input)
        return self._submit("all_gather", (output,), (input,), opts is None or opts.asyncOp, self._collectives.all_gather, output, input)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work | None:
        for output, part in zip(outputs, inputs, strict=True):
            self._check_shapes("all_gather", output, part)
        async_op = opts is None or opts.asyncOp
        return self._submit("all_gather", outputs, inputs, async_op, _for_each, self._collectives.all_gather, outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.GatherOptions()
        (tensor,) = input_tensors
        outputs = output_tensors[0] if output_tensors else ()
        return self._submit("gather", outputs, input_tensors, opts.asyncOp, self._collectives.gather, outputs, tensor, opts.rootRank)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ScatterOptions()
        (tensor,) = output_tensors
        inputs = input_tensors[0] if input_tensors else ()
        return self._submit("scatter", output_tensors, output_tensors, opts.asyncOp, self._collectives.scatter, tensor, inputs, opts.rootRank)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> dist.Work | None:  # fmt: skip
        receives = buffers.rows_per_rank(output.shape, output.itemsize, tuple(output_splits), self._group_size, buffers.max_count)
        sends = buffers.rows_per_rank(input.shape, input.itemsize, tuple(input_splits), self._group_size, buffers.max_count)
        async_op = opts is None or opts.asyncOp
        return self._submit("all_to_all", (output,), (input,), async_op, self._collectives.all_to_all, output, input, receives, sends)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.AllToAllOptions()
        run = self._collectives.all_to_all_lists
        return self._submit("all_to_all", output_tensors, input_tensors, opts.asyncOp, run, output_tensors, input_tensors)

    def barrier(self, opts: Any = None) -> dist.Work | None:
        return self._submit("barrier", (), (), opts is None or opts.asyncOp, self._comm.Barrier)

    # -- messages --

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        event = begin_event("mpi:send", tensors)
        buffer = buffers.send_buffer(buffers.synchronized(tensor))
        request, label = self._comm.Isend(buffers.as_bytes(buffer), dst, tag), f"the send to rank {self._world_ranks[dst]} with tag {tag}"
        return self._coalesce(MessageWork(_inbox, request, buffer, label, event))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        return self._receive("mpi:recv", tensors, src, f"rank {self._world_ranks[src]}", tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._receive("mpi:recvAnySource", tensors, MPI.ANY_SOURCE, "any rank", tag)

    def _receive(self, event_name: str, tensors: Tensors, source: int, sender: str, tag: int) -> dist.Work:
        (tensor,) = tensors
        event, label = begin_event(event_name, tensors), f"the receive from {sender} with tag {tag}"
        work = ReceiveWork(_inbox, self._comm, buffers.synchronized(tensor), source, tag, label, event)
        _inbox.add(work)
        return self._coalesce(work)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        works, self._coalesced = self._coalesced or [], None
        return self._submit("coalesced", (), (), True, lambda: [work.wait() for work in works])

    # -- submission and checks --

    def _submit(self, name: str, outputs: Tensors, inputs: Tensors, async_op: bool, fn: Callable[..., object], *args: Any) -> dist.Work | None:
        if any(t.layout != torch.strided for t in inputs) and fn != self._collectives.all_reduce_sparse:
            raise ValueError(f"{name} of a sparse tensor: backend mpi has only all_reduce, of the COO layout; use to_dense()")
        work = self._queue.submit(name, outputs, inputs, async_op, partial(self._call, name, inputs, fn, *args))
        return self._coalesce(work) if work is not None else None

    def _call(self, name: str, inputs: Tensors, fn: Callable[..., object], *args: Any) -> None:
        try:
            fn(*args)
        except MPI.Exception as error:
            sizes = ", ".join(str(t.numel() * t.element_size()) for t in inputs) or "no"
            raise RuntimeError(
                f"{name} number {self._queue.sequence_number} of {self._queue.name} failed on rank {self._world_ranks[self._group_rank]}: {error} "
                f"(this rank gave {sizes} bytes; ranks must make the same calls with the same sizes)"
            ) from error

    def _coalesce(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_shapes(self, operation: str, whole: Tensor, part: Tensor) -> None:
        if whole.dtype != part.dtype:
            raise ValueError(f"{operation}: the tensors have dtypes {whole.dtype} and {part.dtype}: convert one of them")
        if whole.numel() != self._group_size * part.numel():
            raise buffers.shape_error(operation, whole.shape, f"{self._group_size} × {part.numel()} elements")


def _for_each(fn: Callable[..., object], *lists: Sequence[Any]) -> None:
    for args in zip(*lists, strict=True):
        fn(*args)


def _format_ranks(ranks: tuple[int, ...]) -> str:
    """'0–3' for three or more consecutive ranks; otherwise a list of numbers."""
    consecutive = len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}–{ranks[-1]}" if consecutive else ", ".join(map(str, ranks))
