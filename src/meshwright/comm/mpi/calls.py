"""The collectives of one communicator as blocking calls: tensors made fit for MPI, the call, and what is left to do then. A group's lane makes them.

After a message of 1 MB the caches hold nothing of Python's, and every function on the way costs a microsecond: small calls do not come here unless
they are put off or something has to be done to their tensors (`backend.py`), and of large ones nothing is made that is not needed.

[Note: pairs]
A sum that is scattered, or reduced to one rank of several on a node, is an exchange of parts: in each round a rank sends one other its part, takes in
its own from another, and adds it up. MPI's own ways move more through memory: of 1 MB, two ranks take half of their time by pairs, four on two cores
0.8. Every part is summed from its own rank's on, in the order in which `shared.py` does it: bits do not depend on which of the two it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from meshwright.comm import shared
from meshwright.comm.mpi import buffers, library
from meshwright.comm.mpi.near import ELSEWHERE, NEVER, Near
from meshwright.comm.mpi.reductions import Reduction
from meshwright.comm.window import Window

Tensors = Sequence[torch.Tensor]
# Bytes for each rank from which sums go by messages ([Note: pairs]); their tag, the largest that MPI promises.
PAIRWISE, ROUNDS_TAG = 1 << 17, 32767
_COPIED = 1 << 19  # bytes of a part up to which it is copied rather than made a tensor of
_at, _IN_PLACE, _BYTE = MPI.buffer.fromaddress, MPI.IN_PLACE, MPI.BYTE


class Calls:
    """Of large ones, those that are quicker through memory that the ranks share go that way (`near.py`)."""

    def __init__(self, comm: Any, members: tuple[int, ...]) -> None:
        self._comm, self._index, self._count = comm, comm.Get_rank(), comm.Get_size()
        # Bytes from which it is quicker by pairs. Between nodes MPI's own reduce adds up on every node first, and half as much goes over the wire.
        self.scatters_from = PAIRWISE * self._count
        self.reduces_from = self.scatters_from if self._count > 2 and library.neighbours() >= set(members) else NEVER
        self.compiled: Any = None  # what `quick.py` knows of the group
        self.near = Near(comm, members)

    # -- reductions --

    def all_reduce(self, tensor: torch.Tensor, way: Reduction) -> None:
        work = tensor if way.plain and tensor.is_cpu and tensor.is_contiguous() else way.prepared(tensor, keep=False)
        if (window := self._window("all_reduce", work, way)) is not None:
            shared.all_reduce(window, _flat(work), way.combine, shared.nothing, "all_reduce")
        elif work.is_cuda and way.combined:
            self._reduce_there(work.view(-1), way)
        else:
            way.pieces(work, lambda part: self._comm.Allreduce(_IN_PLACE, way.spec(part), way.op))
        self.near.done()
        way.finish(tensor, work)

    def reduce(self, tensor: torch.Tensor, way: Reduction, root: int) -> None:
        work = tensor if way.plain and tensor.is_cpu and tensor.is_contiguous() else way.prepared(tensor)
        if (window := self._window("reduce", work, way)) is not None:
            shared.reduce(window, _flat(work), way.combine, root, "reduce")
        else:
            self._reduce(work, way, root)
        self.near.done()
        if self._index == root:
            way.finish(tensor, work)

    def _reduce(self, work: torch.Tensor, way: Reduction, root: int) -> None:
        if work.is_cpu and self.reduces_from <= work.nbytes <= buffers.most:
            self._reduce_by_pairs(work.view(-1), way, root)
        elif self._index == root:
            way.pieces(work, lambda part: self._comm.Reduce(_IN_PLACE, way.spec(part), way.op, root))
        else:
            way.pieces(work, lambda part: self._comm.Reduce(way.spec(part), None, way.op, root))

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, way: Reduction, sizes: list[int] | None = None) -> None:
        """`sizes` are elements for each rank where they differ."""
        sizes = sizes or [output.numel()] * self._count
        work = whole if way.plain and whole.dtype == way.worked and buffers.ready(whole) else way.prepared(whole)
        start, begin = output.data_ptr(), work.data_ptr()
        apart = start >= begin + work.nbytes or begin >= start + output.nbytes  # MPI forbids that they overlap
        fits = way.worked == output.dtype and apart and buffers.ready(output)
        own = output if fits else torch.empty(output.shape, dtype=way.worked, device=work.device)
        window = self._window("reduce_scatter", work, way) if own.is_cpu else None
        if window is not None:
            mine = None if own.nbytes <= _COPIED else work.view(-1).narrow(0, sum(sizes[: self._index]), sizes[self._index])
            shared.scatter(window, shared.cut(work, sizes), mine, _flat(own), way.combine, "reduce_scatter")
        else:
            self._reduce_scatter(own, work, way, sizes)
        self.near.done()
        way.finish(output, own)

    def _reduce_scatter(self, own: torch.Tensor, work: torch.Tensor, way: Reduction, sizes: list[int]) -> None:
        if own.is_cuda and way.combined:
            self._scatter_by_pairs(own, work, way, sizes)
        elif work.numel() * way.width > buffers.most:
            self._scatter_by_reducing(own, work, way, sizes)
        elif work.nbytes >= self.scatters_from and own.is_cpu:
            self._scatter_by_pairs(own, work, way, sizes)
        elif len(set(sizes)) == 1:
            self._comm.Reduce_scatter_block([buffers.memory(work), sizes[0] * way.width, way.kind], way.spec(own), way.op)
        else:
            self._comm.Reduce_scatter(way.spec(work), way.spec(own), [n * way.width for n in sizes], way.op)

    def _scatter_by_pairs(self, own: torch.Tensor, work: torch.Tensor, way: Reduction, sizes: list[int]) -> None:
        """[Note: pairs]. Compiled where that is possible: in trials, too, it is to take as long as the calls that come after them."""
        if self.compiled is not None and own.is_cpu and work.nbytes <= buffers.most:
            unit = work.element_size()
            handles = MPI._handleof(way.kind), MPI._handleof(way.op)
            self.compiled.scatter(work.data_ptr(), own.data_ptr(), [n * unit for n in sizes], *handles, unit // way.width)
            return
        parts, own = work.view(-1).split(sizes), own.view(-1)
        if parts[self._index].data_ptr() != own.data_ptr():
            own.copy_(parts[self._index])
        arrived = torch.empty_like(own)
        for step in range(1, self._count):
            to, source = (self._index - step) % self._count, (self._index + step) % self._count
            self._comm.Sendrecv(buffers.as_bytes(parts[to]), to, ROUNDS_TAG, buffers.as_bytes(arrived), source, ROUNDS_TAG)
            if own.is_cuda:
                way.combine(own, arrived, out=own)
                buffers.made(own)
            else:
                way.op.Reduce_local(way.spec(arrived), way.spec(own))

    def _reduce_by_pairs(self, whole: torch.Tensor, way: Reduction, root: int) -> None:
        """Everyone sums a part, and one rank gathers them."""
        sizes = shared.lengths(whole.numel(), self._count)
        own = whole.split(sizes)[self._index]
        total = own if self._index == root else torch.empty_like(own)
        self._scatter_by_pairs(total, whole, way, sizes)
        if self._index == root:
            self._comm.Gatherv(_IN_PLACE, buffers.in_pieces(whole, sizes), root)
        else:
            self._comm.Gatherv(buffers.as_bytes(total), None, root)

    def _reduce_there(self, whole: torch.Tensor, way: Reduction) -> None:
        """Of device memory, which an MPI that takes it moves quickly but adds up on the host: moved by MPI, added up by the device."""
        sizes = shared.lengths(whole.numel(), self._count)
        self._scatter_by_pairs(whole.split(sizes)[self._index], whole, way, sizes)
        self._comm.Allgatherv(_IN_PLACE, buffers.in_pieces(whole, sizes))

    def _scatter_by_reducing(self, own: torch.Tensor, work: torch.Tensor, way: Reduction, sizes: list[int]) -> None:
        """More than MPI counts: every rank's part is reduced to it, a piece at a time."""
        start = 0
        for root, size in enumerate(sizes):
            part = work.view(-1)[start : start + size]
            self._reduce(part, way, root)
            if root == self._index:
                own.view(-1).copy_(part)
            start += size

    def _window(self, op: str, work: torch.Tensor, way: Reduction) -> Window | None:
        alike = self.near.alike(op, way) and (self._count == 2 or work.nbytes <= buffers.most)  # longer ones are added up in another order
        return self.near.window(op, work.nbytes if way.combined and work.is_cpu else ELSEWHERE, alike)

    # -- movements --

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """Of equal parts, into one tensor."""
        whole = output if output.is_cpu and output.is_contiguous() else buffers.incoming(output)
        own = part if part.is_cpu and part.is_contiguous() else buffers.outgoing(part.cpu() if whole.is_cpu else part)
        size, start, begin = own.nbytes, whole.data_ptr(), own.data_ptr()
        in_place = begin == start + self._index * size  # as FSDP2 gathers: the part lies where it belongs
        if not in_place and start < begin + size and begin < start + size * self._count:  # MPI forbids it, and MPICH looks
            own = buffers.made(own.clone())
        self.gather_at(start, own.data_ptr(), size, whole.is_cpu)
        if whole is not output:
            output.copy_(whole)

    def gather_at(self, start: int, begin: int, size: int, here: bool = True) -> None:
        """Of a part at `begin` with so many bytes, as everyone has one, to `start`; `here` is the host's memory."""
        total = size * self._count
        window = self.near.window("all_gather", total if here else ELSEWHERE, alike=True)
        if window is not None:
            shared.gather(window, [(start + rank * size, size) for rank in range(self._count)], begin, "all_gather")
        else:
            unit = (_BYTE,) if total <= buffers.most else (1, buffers.of_bytes(size))
            self._comm.Allgather(_IN_PLACE if begin == start + self._index * size else (_at(begin, size), *unit), (_at(start, total), *unit))
        self.near.done()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        held = tensor
        if not (tensor.is_cpu and tensor.is_contiguous()):
            held = buffers.outgoing(tensor) if self._index == root else buffers.incoming(tensor)
        self.broadcast_at(held.data_ptr(), held.nbytes, root, held.is_cpu)
        if held is not tensor and self._index != root:
            tensor.copy_(held)

    def broadcast_at(self, start: int, size: int, root: int, here: bool = True) -> None:
        window = self.near.window("broadcast", size if here else ELSEWHERE, alike=True)
        if window is not None:
            shared.broadcast(window, (start, size), root, "broadcast")
        else:
            self._comm.Bcast((_at(start, size), _BYTE) if size <= buffers.most else (_at(start, size), 1, buffers.of_bytes(size)), root)
        self.near.done()

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, receives: buffers.Pieces, sends: buffers.Pieces) -> None:
        """In pieces from each rank and to each."""
        whole = output if output.is_cpu and output.is_contiguous() else buffers.incoming(output)
        sent = input if input.is_cpu and input.is_contiguous() else buffers.outgoing(input)
        self._comm.Alltoallv([_at(sent.data_ptr(), sent.nbytes), *sends], [_at(whole.data_ptr(), whole.nbytes), *receives])
        if whole is not output:
            output.copy_(whole)

    def all_to_all_lists(self, outputs: Tensors, inputs: Tensors) -> None:
        sent = _joined(inputs)
        arrived = torch.empty(sum(t.numel() for t in outputs), dtype=sent.dtype, device=sent.device)
        self._comm.Alltoallv(*(buffers.in_pieces(b, [t.numel() for t in ts]) for b, ts in ((sent, inputs), (arrived, outputs))))
        _deal(arrived, outputs)

    def gather_all(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        own = buffers.outgoing(tensor)
        sizes = [t.numel() for t in outputs]
        if tensor.numel() != sizes[self._index]:
            raise buffers.unfit("all_gather", tensor.shape, f"what the list says, {sizes[self._index]}")
        arrived = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        self._comm.Allgatherv(buffers.as_bytes(own), buffers.in_pieces(arrived, sizes))
        _deal(arrived, outputs)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> None:
        own = buffers.outgoing(tensor)
        if self._index != root:
            self._comm.Gatherv(buffers.as_bytes(own), None, root)
            return
        sizes = [t.numel() for t in outputs]
        arrived = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        self._comm.Gatherv(buffers.as_bytes(own), buffers.in_pieces(arrived, sizes), root)
        _deal(arrived, outputs)

    def scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int) -> None:
        own = buffers.incoming(tensor)
        whole = _joined(inputs) if self._index == root else None
        sent = buffers.in_pieces(whole, [t.numel() for t in inputs]) if whole is not None else None
        self._comm.Scatterv(sent, buffers.as_bytes(own), root)
        buffers.settle(tensor, own)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous one. After a large message a view costs 15 µs, and most that come here are flat."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _joined(tensors: Tensors) -> torch.Tensor:
    return buffers.outgoing(buffers.made(torch.cat([t.reshape(-1) for t in tensors])))


def _deal(arrived: torch.Tensor, outputs: Tensors) -> None:
    for piece, output in zip(arrived.split([t.numel() for t in outputs]), outputs, strict=True):
        output.copy_(piece.view(output.shape))
