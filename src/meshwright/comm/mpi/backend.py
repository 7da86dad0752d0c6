"""The process group: torch's collectives by MPI's. Methods are torch's; each hands one piece of work to the group's lane and returns a `Work`, or
nothing where the call is over.

torch calls some from Python, some from C++ (DDP's reducer, DTensor's functional collectives), and renamed some in 2.13: both names are here.

What most small calls have in common (waited for at once, contiguous tensors in the host's memory, a reduction that MPI has, nothing under way) does
not come here where there is a C compiler: see `quick.py`.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.mpi import library

library.load()  # before mpi4py is imported by anybody else: it must not initialise MPI in its own way
library.neighbours()  # while everyone is here

from mpi4py import MPI  # noqa: E402

from meshwright.comm.lane import DONE, Lane  # noqa: E402
from meshwright.comm.mpi import buffers  # noqa: E402
from meshwright.comm.mpi.calls import Calls, Tensors  # noqa: E402
from meshwright.comm.mpi.messages import SMALL, Message  # noqa: E402
from meshwright.comm.mpi.post import Post  # noqa: E402
from meshwright.comm.mpi.quick import Quick  # noqa: E402
from meshwright.comm.mpi.reductions import reduction  # noqa: E402
from meshwright.comm.mpi.watchdog import Watchdog  # noqa: E402

_c10d: Any = torch._C._distributed_c10d
_Base: Any = dist.ProcessGroup
_TAG = 1  # of making groups
_post = Post()
atexit.register(_post.close)  # before MPI ends: what is registered later runs first
_quick = Quick()
_post.stir = _quick.stir
_watchdog: Watchdog | None = None
_making = threading.Lock()


def make_group(ranks: Sequence[int]) -> MpiGroup:
    """A group of these ranks of the world, in this order; of everyone if there are none. Only members call it."""
    global _watchdog
    world = MPI.COMM_WORLD
    with _making:
        if _watchdog is None:
            _watchdog = Watchdog(world.Dup())
            atexit.register(_watchdog.close)
    members = tuple(ranks) or tuple(range(world.Get_size()))
    if not ranks:
        return MpiGroup(world.Dup(), members)
    group = world.Get_group().Incl(list(members))
    return MpiGroup(world.Create_group(group, _TAG), members)


class MpiGroup(_Base):  # type: ignore[misc]  # torch's stubs know only their own overloads
    """A communicator. Collectives are done in order by its lane; messages are requests of their own."""

    # Read in every call: Python finds what lies in a slot four times as quickly as in the dictionary of a class that is made in C++.
    __slots__ = ("__dict__", "_calls", "_comm", "_count", "_index", "_lane", "_quick")

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, comm: Any, members: tuple[int, ...]) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm, self._members = comm, members
        self._calls = Calls(comm, members)
        self._index, self._count = comm.Get_rank(), comm.Get_size()
        self._lane = Lane(f"the group of ranks {_ranges(members)}", beside=buffers.beside)
        self._label = self._note = ""
        self._quick = self._calls.compiled = _quick.state(comm, self._lane, _post, self._calls)
        assert _watchdog is not None
        _watchdog.watch(self._lane, members)

    # -- who we are --

    def getBackendName(self) -> str:
        return "mpi"

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:
        return self._label

    def setGroupName(self, name: str) -> None:
        self._label = name

    def getGroupDesc(self) -> str:
        return self._note

    def setGroupDesc(self, note: str) -> None:
        self._note = note

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> MpiGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """The lane counts by itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self._lane.number

    def shutdown(self) -> None:
        self._quick = None
        if self._comm != MPI.COMM_NULL:
            self._lane.close()
            self._calls.near.close()
            self._comm.Free()

    def abort(self) -> None:
        MPI.COMM_WORLD.Abort(1)

    def split_group(self, ranks: Sequence[int], *_: Any, **__: Any) -> MpiGroup:
        """A group of some of our ranks, made by its members alone."""
        return make_group([self._members[r] for r in ranks])

    # -- reductions --

    @_quick.before("all_reduce")
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.AllreduceOptions()
        (tensor,) = tensors
        way = reduction(opts.reduceOp, tensor.dtype, self._count)
        return self._lane.put("all_reduce", tensors, tensor, opts.asyncOp, self._calls.all_reduce, tensor, way)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.AllreduceCoalescedOptions()
        ways = [reduction(opts.reduceOp, t.dtype, self._count) for t in tensors]

        def run() -> None:
            for tensor, way in zip(tensors, ways, strict=True):
                self._calls.all_reduce(tensor, way)

        return self._lane.put("all_reduce", tensors, tensors[0], opts.asyncOp, run)

    @_quick.before("reduce")
    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceOptions()
        (tensor,) = tensors
        way = reduction(opts.reduceOp, tensor.dtype, self._count)
        return self._lane.put("reduce", tensors, tensor, opts.asyncOp, self._calls.reduce, tensor, way, opts.rootRank)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceScatterOptions()
        (output,), (inputs,) = output_tensors, input_tensors
        way = reduction(opts.reduceOp, output.dtype, self._count)
        sizes = [t.numel() for t in inputs]
        if output.numel() != sizes[self._index]:
            raise buffers.unfit("reduce_scatter", output.shape, f"what the list says, {sizes[self._index]}")
        run = lambda: self._calls.reduce_scatter(output, buffers.made(torch.cat([t.reshape(-1) for t in inputs])), way, sizes)  # noqa: E731
        return self._lane.put("reduce_scatter", output_tensors, output, opts.asyncOp, run)

    @_quick.before("reduce_scatter")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceScatterOptions()
        way, later, lane = reduction(opts.reduceOp, output.dtype, self._count), opts.asyncOp, self._lane
        self._check("reduce_scatter", input, output)
        return lane.put("reduce_scatter", (output,), output, later, self._calls.reduce_scatter, output, input, way)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ReduceScatterOptions()
        ways = [reduction(opts.reduceOp, t.dtype, self._count) for t in outputs]
        for output, whole in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter", whole, output)

        def run() -> None:
            for output, whole, way in zip(outputs, inputs, ways, strict=True):
                self._calls.reduce_scatter(output, whole, way)

        return self._lane.put("reduce_scatter", outputs, outputs[0], opts.asyncOp, run)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movements --

    @_quick.before("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.BroadcastOptions()
        (tensor,) = tensors
        later, root, lane = opts.asyncOp, opts.rootRank, self._lane
        if not later and tensor.is_cpu and tensor.is_contiguous() and lane.begin("broadcast"):
            try:
                self._calls.broadcast_at(tensor.data_ptr(), tensor.nbytes, root)
            finally:
                lane.current = ""
            return None
        return lane.put("broadcast", tensors, tensor, later, self._calls.broadcast, tensor, root)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> dist.Work | None:
        (outputs,), (tensor,) = output_tensors, input_tensors
        return self._lane.put("all_gather", outputs, tensor, opts is None or opts.asyncOp, self._calls.gather_all, outputs, tensor)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> dist.Work | None:
        """`output_lists[i]` is what the i-th input's copies of all ranks go to."""

        def run() -> None:
            for outputs, tensor in zip(output_lists, input_list, strict=True):
                self._calls.gather_all(outputs, tensor)

        every = [t for outputs in output_lists for t in outputs]
        return self._lane.put("all_gather", every, input_list[0], opts is None or opts.asyncOp, run)

    @_quick.before("all_gather")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work | None:
        total, size, later, lane = output.nbytes, input.nbytes, opts is None or opts.asyncOp, self._lane
        here = output.is_cpu and input.is_cpu and output.is_contiguous() and input.is_contiguous()
        if here and total == self._count * size and output.dtype == input.dtype and not later:
            start, begin = output.data_ptr(), input.data_ptr()
            apart = start >= begin + size or begin >= start + total
            if apart and lane.begin("all_gather"):
                try:
                    self._calls.gather_at(start, begin, size)
                finally:
                    lane.current = ""
                return None
        self._check("all_gather", output, input)
        return lane.put("all_gather", (output,), output, later, self._calls.all_gather, output, input)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work | None:
        for output, part in zip(outputs, inputs, strict=True):
            self._check("all_gather", output, part)

        def run() -> None:
            for output, part in zip(outputs, inputs, strict=True):
                self._calls.all_gather(output, part)

        return self._lane.put("all_gather", outputs, outputs[0], opts is None or opts.asyncOp, run)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.GatherOptions()
        (tensor,) = input_tensors
        outputs = output_tensors[0] if output_tensors else ()
        return self._lane.put("gather", outputs, tensor, opts.asyncOp, self._calls.gather, outputs, tensor, opts.rootRank)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.ScatterOptions()
        (tensor,) = output_tensors
        inputs = input_tensors[0] if input_tensors else ()
        return self._lane.put("scatter", output_tensors, tensor, opts.asyncOp, self._calls.scatter, tensor, inputs, opts.rootRank)

    @_quick.before("all_to_all")
    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> dist.Work | None:  # fmt: skip
        receives = buffers.rows(output.shape, output.itemsize, tuple(output_splits), self._count, buffers.most)
        sends = buffers.rows(input.shape, input.itemsize, tuple(input_splits), self._count, buffers.most)
        later = opts is None or opts.asyncOp
        return self._lane.put("all_to_all", (output,), output, later, self._calls.all_to_all, output, input, receives, sends)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> dist.Work | None:
        opts = opts or _c10d.AllToAllOptions()
        run = self._calls.all_to_all_lists
        return self._lane.put("all_to_all", output_tensors, output_tensors[0], opts.asyncOp, run, output_tensors, input_tensors)

    def barrier(self, opts: Any = None) -> dist.Work | None:
        return self._lane.put("barrier", (), None, opts is None or opts.asyncOp, self._comm.Barrier)

    # -- messages --

    @_quick.before("send")
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        (held,) = tensors
        if not (held.is_cpu and held.is_contiguous()):
            held = buffers.outgoing(buffers.made(held))
        request = self._comm.Isend(buffers.as_bytes(held), dst, tag)
        if held.nbytes <= SMALL and request.Test():  # MPI has taken it: most small ones are over before they are waited for
            return DONE
        return self._noted(request, held, held, self._index)

    @_quick.before("receive")
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        (tensor,) = (held,) = tensors
        if not (tensor.is_cpu and tensor.is_contiguous()):
            held = buffers.incoming(buffers.made(tensor))
        return self._noted(self._comm.Irecv(buffers.as_bytes(held), src, tag), tensor, held, src)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _noted(self, request: Any, tensor: torch.Tensor, held: torch.Tensor, source: int) -> dist.Work:
        message = Message(_post, request, tensor, held, source)
        if held.nbytes > SMALL:
            _post.follow(message)
        if self._lane.together is not None:
            self._lane.together.append(message)
        return message

    def _start_coalescing(self, device: torch.device) -> None:
        self._lane.together = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._lane.together = self._lane.together or [], None
        return self._lane.later("messages", (), None, lambda: [work.wait() for work in works])

    # -- how --

    def _check(self, operation: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.dtype != part.dtype:
            raise ValueError(f"{operation}: tensors of {whole.dtype} and {part.dtype}: make them alike")
        if whole.numel() != self._count * part.numel():
            raise buffers.unfit(operation, whole.shape, f"{self._count} times {part.numel()}")


def _ranges(members: tuple[int, ...]) -> str:
    """0–3 for a run of ranks; otherwise their numbers."""
    whole = members == tuple(range(members[0], members[0] + len(members))) and len(members) > 2
    return f"{members[0]}–{members[-1]}" if whole else ", ".join(map(str, members))
