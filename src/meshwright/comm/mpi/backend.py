"""The process group: torch's collectives by MPI's. Methods are torch's; each hands one piece of work to the group's lane and returns a `Work`.

torch calls some from Python, some from C++ (DDP's reducer, DTensor's functional collectives), and renamed some in 2.13: both names are here.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.mpi import library

library.load()  # before mpi4py is imported by anybody else: it must not initialise MPI in its own way

from mpi4py import MPI  # noqa: E402

from meshwright.comm.lane import Lane  # noqa: E402
from meshwright.comm.mpi import buffers  # noqa: E402
from meshwright.comm.mpi.messages import Message, Post  # noqa: E402
from meshwright.comm.mpi.reductions import Reduction, reduction  # noqa: E402
from meshwright.comm.mpi.watchdog import Watchdog  # noqa: E402

Tensors = Sequence[torch.Tensor]
_c10d: Any = torch._C._distributed_c10d
_Base: Any = dist.ProcessGroup
_TAG = 1  # of making groups
_PAIRWISE, _ROUNDS_TAG = 1 << 18, 32767  # bytes from which a reduce-scatter goes by messages; their tag, the largest that MPI promises
_post = Post()
atexit.register(_post.close)  # before MPI ends: what is registered later runs first
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

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, comm: Any, members: tuple[int, ...]) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm, self._members = comm, members
        self._index, self._count = comm.Get_rank(), comm.Get_size()
        self._lane = Lane(f"the group of ranks {_ranges(members)}")
        self._coalesced: list[Any] | None = None
        self._label = self._note = ""
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
        if self._comm != MPI.COMM_NULL:
            self._lane.close()
            self._comm.Free()

    def abort(self) -> None:
        MPI.COMM_WORLD.Abort(1)

    def split_group(self, ranks: Sequence[int], *_: Any, **__: Any) -> MpiGroup:
        """A group of some of our ranks, made by its members alone."""
        return make_group([self._members[r] for r in ranks])

    # -- reductions --

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.AllreduceOptions()
        (tensor,) = tensors
        way = reduction(opts.reduceOp, tensor.dtype, self._count)
        return self._put("all_reduce", lambda: self._all_reduce(tensor, way), tensors, tensor, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.AllreduceCoalescedOptions()
        ways = [reduction(opts.reduceOp, t.dtype, self._count) for t in tensors]

        def run() -> None:
            for tensor, way in zip(tensors, ways, strict=True):
                self._all_reduce(tensor, way)

        return self._put("all_reduce", run, tensors, tensors[0], opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.ReduceOptions()
        (tensor,) = tensors
        way, root = reduction(opts.reduceOp, tensor.dtype, self._count), opts.rootRank
        return self._put("reduce", lambda: self._reduce(tensor, way, root), tensors, tensor, opts)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> dist.Work:
        opts = opts or _c10d.ReduceScatterOptions()
        (output,), (inputs,) = output_tensors, input_tensors
        way = reduction(opts.reduceOp, output.dtype, self._count)
        sizes = [t.numel() for t in inputs]
        run = lambda: self._reduce_scatter(output, torch.cat([t.reshape(-1) for t in inputs]), way, sizes)  # noqa: E731
        return self._put("reduce_scatter", run, output_tensors, output, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.ReduceScatterOptions()
        way = reduction(opts.reduceOp, output.dtype, self._count)
        self._check("reduce_scatter", input, output)
        run = lambda: self._reduce_scatter(output, input, way, [output.numel()] * self._count)  # noqa: E731
        return self._put("reduce_scatter", run, [output], output, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.ReduceScatterOptions()
        ways = [reduction(opts.reduceOp, t.dtype, self._count) for t in outputs]
        for output, whole in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter", whole, output)

        def run() -> None:
            for output, whole, way in zip(outputs, inputs, ways, strict=True):
                self._reduce_scatter(output, whole, way, [output.numel()] * self._count)

        return self._put("reduce_scatter", run, outputs, outputs[0], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movements --

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.BroadcastOptions()
        (tensor,) = tensors
        return self._put("broadcast", lambda: self._broadcast(tensor, opts.rootRank), tensors, tensor, opts)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> dist.Work:
        (outputs,), (tensor,) = output_tensors, input_tensors
        return self._put("all_gather", lambda: self._gather_all(outputs, tensor), outputs, tensor, opts or _c10d.AllgatherOptions())

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> dist.Work:
        """`output_lists[i]` is what the i-th input's copies of all ranks go to."""

        def run() -> None:
            for outputs, tensor in zip(output_lists, input_list, strict=True):
                self._gather_all(outputs, tensor)

        every = [t for outputs in output_lists for t in outputs]
        return self._put("all_gather", run, every, input_list[0], opts or _c10d.AllgatherOptions())

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        self._check("all_gather", output, input)
        return self._put("all_gather", lambda: self._gather_single(output, input), [output], output, opts or _c10d.AllgatherOptions())

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        for output, part in zip(outputs, inputs, strict=True):
            self._check("all_gather", output, part)

        def run() -> None:
            for output, part in zip(outputs, inputs, strict=True):
                self._gather_single(output, part)

        return self._put("all_gather", run, outputs, outputs[0], opts or _c10d.AllgatherOptions())

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.GatherOptions()
        (tensor,) = input_tensors
        outputs = output_tensors[0] if output_tensors else ()
        return self._put("gather", lambda: self._gather(outputs, tensor, opts.rootRank), outputs, tensor, opts)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> dist.Work:
        opts = opts or _c10d.ScatterOptions()
        (tensor,) = output_tensors
        inputs = input_tensors[0] if input_tensors else ()
        return self._put("scatter", lambda: self._scatter(tensor, inputs, opts.rootRank), output_tensors, tensor, opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> dist.Work:  # fmt: skip
        receives, sends = self._splits(output, output_splits), self._splits(input, input_splits)

        def run() -> None:
            whole, sent = buffers.incoming(output), buffers.outgoing(input)
            self._comm.Alltoallv(buffers.in_pieces(sent, sends), buffers.in_pieces(whole, receives))
            buffers.settle(output, whole)

        return self._put("all_to_all", run, [output], output, opts or _c10d.AllToAllOptions())

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> dist.Work:
        def run() -> None:
            sent = _joined(input_tensors)
            arrived = torch.empty(sum(t.numel() for t in output_tensors), dtype=sent.dtype, device=sent.device)
            self._comm.Alltoallv(*(buffers.in_pieces(b, [t.numel() for t in ts]) for b, ts in ((sent, input_tensors), (arrived, output_tensors))))
            _deal(arrived, output_tensors)

        return self._put("all_to_all", run, output_tensors, output_tensors[0], opts or _c10d.AllToAllOptions())

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._lane.put("barrier", self._comm.Barrier, (), later=opts is None or opts.asyncOp)

    # -- messages --

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        held = buffers.outgoing(tensor)
        request = self._comm.Isend(buffers.as_bytes(held), dst, tag)
        return self._noted(Message(_post, request, tensor, held, source=self._index), held.nbytes)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        held = buffers.incoming(tensor)
        arrived = None if held is tensor else lambda: buffers.settle(tensor, held)
        return self._noted(Message(_post, self._comm.Irecv(buffers.as_bytes(held), src, tag), tensor, held, arrived, src), held.nbytes)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _noted(self, message: Message, size: int) -> dist.Work:
        _post.take(message, size)
        if self._coalesced is not None:
            self._coalesced.append(message)
        return message

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return self._lane.put("messages", lambda: [work.wait() for work in works], (), later=True)

    # -- how --

    def _put(self, name: str, run: Callable[[], object], outputs: Tensors, tensor: torch.Tensor, opts: Any) -> dist.Work:
        call = self._lane.put(name, buffers.beside(tensor, run) if tensor.is_cuda else run, outputs, opts.asyncOp, tensor.nbytes)
        if self._coalesced is not None:
            self._coalesced.append(call)
        return call

    def _all_reduce(self, tensor: torch.Tensor, way: Reduction) -> None:
        if way.fits(tensor):
            self._comm.Allreduce(MPI.IN_PLACE, way.spec(tensor), way.op)
            return
        work = way.prepared(tensor, keep=False)
        way.pieces(work, lambda part: self._comm.Allreduce(MPI.IN_PLACE, way.spec(part), way.op))
        way.finish(tensor, work)

    def _reduce(self, tensor: torch.Tensor, way: Reduction, root: int) -> None:
        if way.fits(tensor):
            self._comm.Reduce(*((MPI.IN_PLACE, way.spec(tensor)) if self._index == root else (way.spec(tensor), None)), way.op, root)
            return
        work = way.prepared(tensor)
        if self._index != root:
            way.pieces(work, lambda part: self._comm.Reduce(way.spec(part), None, way.op, root))
            return
        way.pieces(work, lambda part: self._comm.Reduce(MPI.IN_PLACE, way.spec(part), way.op, root))
        way.finish(tensor, work)

    def _reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, way: Reduction, sizes: list[int]) -> None:
        apart = buffers.ready(output) and not buffers.overlap(whole, output)
        if way.fits(whole) and apart and len(set(sizes)) == 1:
            self._comm.Reduce_scatter_block([buffers.memory(whole), sizes[0] * way.width, way.kind], way.spec(output), way.op)
            return
        work = way.prepared(whole)
        own = output if way.worked == output.dtype and apart else torch.empty(output.shape, dtype=way.worked, device=work.device)
        if whole.numel() * way.width > buffers.most:
            self._scatter_by_reducing(own, work, way, sizes)
        elif work.nbytes >= _PAIRWISE and own.is_cpu:
            self._scatter_by_pairs(own, work, way, sizes)
        elif len(set(sizes)) == 1:
            self._comm.Reduce_scatter_block([buffers.memory(work), sizes[0] * way.width, way.kind], way.spec(own), way.op)
        else:
            self._comm.Reduce_scatter(way.spec(work), way.spec(own), [n * way.width for n in sizes], way.op)
        way.finish(output, own)

    def _scatter_by_pairs(self, own: torch.Tensor, work: torch.Tensor, way: Reduction, sizes: list[int]) -> None:
        """In each round every rank sends one other its part, and takes in its own from another: MPI's own way moves more through memory."""
        parts = work.view(-1).split(sizes)
        if parts[self._index].data_ptr() != own.data_ptr():
            own.view(-1).copy_(parts[self._index])
        arrived = torch.empty_like(own)
        for step in range(1, self._count):
            to, source = (self._index + step) % self._count, (self._index - step) % self._count
            self._comm.Sendrecv(way.spec(parts[to]), to, _ROUNDS_TAG, way.spec(arrived), source, _ROUNDS_TAG)
            way.op.Reduce_local(way.spec(arrived), way.spec(own))

    def _scatter_by_reducing(self, own: torch.Tensor, work: torch.Tensor, way: Reduction, sizes: list[int]) -> None:
        """More than MPI counts: every rank's part is reduced to it, a piece at a time."""
        start = 0
        for root, size in enumerate(sizes):
            part = work.view(-1)[start : start + size]
            self._reduce(part, Reduction(way.op, way.kind, way.width, way.worked), root)
            if root == self._index:
                own.view(-1).copy_(part)
            start += size

    def _check(self, operation: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != self._count * part.numel():
            raise _unfit(operation, whole, f"{self._count} times {part.numel()}")

    def _gather_single(self, output: torch.Tensor, part: torch.Tensor) -> None:
        whole, own = buffers.incoming(output), buffers.outgoing(part)
        in_place = own.data_ptr() == whole.data_ptr() + self._index * own.nbytes  # as FSDP2 gathers: the part lies where it belongs
        if not in_place and buffers.overlap(whole, own):
            own = own.clone()
        unit = buffers.as_bytes(own)
        self._comm.Allgather(MPI.IN_PLACE if in_place else unit, [buffers.memory(whole), *unit[1:]])
        buffers.settle(output, whole)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        held = buffers.outgoing(tensor) if self._index == root else buffers.incoming(tensor)
        self._comm.Bcast(buffers.as_bytes(held), root)
        if self._index != root:
            buffers.settle(tensor, held)

    def _gather_all(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        own = buffers.outgoing(tensor)
        sizes = [t.numel() for t in outputs]
        if tensor.numel() != sizes[self._index]:
            raise _unfit("all_gather", tensor, f"what the list says, {sizes[self._index]}")
        arrived = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        self._comm.Allgatherv(buffers.as_bytes(own), buffers.in_pieces(arrived, sizes))
        _deal(arrived, outputs)

    def _gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> None:
        own = buffers.outgoing(tensor)
        if self._index != root:
            self._comm.Gatherv(buffers.as_bytes(own), None, root)
            return
        sizes = [t.numel() for t in outputs]
        arrived = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        self._comm.Gatherv(buffers.as_bytes(own), buffers.in_pieces(arrived, sizes), root)
        _deal(arrived, outputs)

    def _scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int) -> None:
        own = buffers.incoming(tensor)
        whole = _joined(inputs) if self._index == root else None
        sent = buffers.in_pieces(whole, [t.numel() for t in inputs]) if whole is not None else None
        self._comm.Scatterv(sent, buffers.as_bytes(own), root)
        buffers.settle(tensor, own)

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank from rows for each rank; no rows are equal rows."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % self._count:
                raise _unfit("all_to_all", tensor, f"a multiple of {self._count} rows")
            return [tensor.numel() // self._count] * self._count
        if sum(splits) != rows:
            raise _unfit("all_to_all", tensor, f"the splits' {sum(splits)} rows")
        return [n * (tensor.numel() // max(rows, 1)) for n in splits]


def _joined(tensors: Tensors) -> torch.Tensor:
    return buffers.outgoing(torch.cat([t.reshape(-1) for t in tensors]))


def _deal(arrived: torch.Tensor, outputs: Tensors) -> None:
    for piece, output in zip(arrived.split([t.numel() for t in outputs]), outputs, strict=True):
        output.copy_(piece.view(output.shape))


def _unfit(operation: str, tensor: torch.Tensor, wanted: str) -> ValueError:
    return ValueError(f"{operation}: a tensor of shape {list(tensor.shape)} does not hold {wanted}")


def _ranges(members: tuple[int, ...]) -> str:
    """0–3 for a run of ranks; otherwise their numbers."""
    whole = members == tuple(range(members[0], members[0] + len(members))) and len(members) > 2
    return f"{members[0]}–{members[-1]}" if whole else ", ".join(map(str, members))
