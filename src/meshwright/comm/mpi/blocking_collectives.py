"""Collectives of one communicator as blocking mpi4py calls: prepare the tensors, call MPI, copy results back. The group's work queue runs them.

[Note: pairwise reduce-scatter]
Open MPI's own reduce-scatter of large tensors moves more memory than needed: a ZeRO-1 step of a GPT on two ranks takes 13% longer with it.
So from `PAIRWISE_MIN_BYTES` bytes per rank on, n ranks exchange parts in n-1 rounds: in each, a rank sends one peer that peer's part and adds the
part that arrives from another peer. The order of summation does not depend on the size of the group's other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from meshwright.comm.mpi import buffers
from meshwright.comm.mpi.mpi_reductions import Reduction

Tensors = Sequence[torch.Tensor]
PAIRWISE_MIN_BYTES = 1 << 17  # bytes per rank from which on [Note: pairwise reduce-scatter] applies
_PAIRWISE_TAG = 32767  # the largest tag that every MPI must support


class BlockingCollectives:
    """The blocking collectives of one communicator. Only the thread that holds the work queue's lock calls them, one at a time."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._group_rank, self._group_size = comm, comm.Get_rank(), comm.Get_size()

    # -- reductions --

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        work = reduction.prepare(tensor, keep=False)
        if work.is_cuda and reduction.is_torch_reducible:
            self._all_reduce_on_device(work.view(-1), reduction)
        else:
            reduction.for_each_chunk(work, lambda part: self._comm.Allreduce(MPI.IN_PLACE, reduction.buffer_spec(part), reduction.op))
        reduction.finish(tensor, work)

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> None:
        work = reduction.prepare(tensor)
        self._reduce(work, reduction, root)
        if self._group_rank == root:
            reduction.finish(tensor, work)

    def _reduce(self, work: torch.Tensor, reduction: Reduction, root: int) -> None:
        if self._group_rank == root:
            reduction.for_each_chunk(work, lambda part: self._comm.Reduce(MPI.IN_PLACE, reduction.buffer_spec(part), reduction.op, root))
        else:
            reduction.for_each_chunk(work, lambda part: self._comm.Reduce(reduction.buffer_spec(part), None, reduction.op, root))

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, reduction: Reduction, sizes: list[int] | None = None) -> None:
        """`sizes` are the elements of each rank's part, if they differ."""
        sizes = sizes or [output.numel()] * self._group_size
        work = reduction.prepare(whole)
        start, begin = output.data_ptr(), work.data_ptr()
        disjoint = start >= begin + work.nbytes or begin >= start + output.nbytes  # MPI forbids overlapping buffers
        in_place = reduction.compute_dtype == output.dtype and disjoint and buffers.is_mpi_ready(output)
        own = output if in_place else torch.empty(output.shape, dtype=reduction.compute_dtype, device=work.device)
        if own.is_cuda and reduction.is_torch_reducible:
            self._pairwise_reduce_scatter(own, work, reduction, sizes)
        elif work.numel() * reduction.mpi_elements > buffers.max_count:
            self._reduce_scatter_by_reduce(own, work, reduction, sizes)
        elif work.nbytes >= PAIRWISE_MIN_BYTES * self._group_size and own.is_cpu:
            self._pairwise_reduce_scatter(own, work, reduction, sizes)
        elif len(set(sizes)) == 1:
            self._comm.Reduce_scatter_block(
                [buffers.raw_memory(work), sizes[0] * reduction.mpi_elements, reduction.mpi_type], reduction.buffer_spec(own), reduction.op
            )
        else:
            self._comm.Reduce_scatter(
                reduction.buffer_spec(work), reduction.buffer_spec(own), [n * reduction.mpi_elements for n in sizes], reduction.op
            )
        reduction.finish(output, own)

    def _pairwise_reduce_scatter(self, own: torch.Tensor, work: torch.Tensor, reduction: Reduction, sizes: list[int]) -> None:
        """[Note: pairwise reduce-scatter]; `own` may be this rank's part of `work`."""
        parts, own = work.view(-1).split(sizes), own.view(-1)
        if parts[self._group_rank].data_ptr() != own.data_ptr():
            own.copy_(parts[self._group_rank])
        arrived = torch.empty_like(own)
        for step in range(1, self._group_size):
            to, source = (self._group_rank - step) % self._group_size, (self._group_rank + step) % self._group_size
            self._comm.Sendrecv(buffers.as_bytes(parts[to]), to, _PAIRWISE_TAG, buffers.as_bytes(arrived), source, _PAIRWISE_TAG)
            if own.is_cuda:
                reduction.reduce_fn(own, arrived, out=own)
                buffers.synchronized(own)
            else:
                reduction.op.Reduce_local(reduction.buffer_spec(arrived), reduction.buffer_spec(own))

    def _all_reduce_on_device(self, whole: torch.Tensor, reduction: Reduction) -> None:
        """All-reduce where MPI moves the data and the device reduces it: a CUDA-aware MPI moves device memory fast but reduces it on the host."""
        sizes = [len(part) for part in whole.tensor_split(self._group_size)]
        self._pairwise_reduce_scatter(whole.split(sizes)[self._group_rank], whole, reduction, sizes)
        self._comm.Allgatherv(MPI.IN_PLACE, buffers.pieces_per_rank(whole, sizes))

    def _reduce_scatter_by_reduce(self, own: torch.Tensor, work: torch.Tensor, reduction: Reduction, sizes: list[int]) -> None:
        """Reduce-scatter of more elements than MPI can count: one chunked reduce per rank's part."""
        start = 0
        for root, size in enumerate(sizes):
            part = work.view(-1)[start : start + size]
            self._reduce(part, reduction, root)
            if root == self._group_rank:
                own.view(-1).copy_(part)
            start += size

    # -- data movement --

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """All-gather equal parts into one tensor."""
        whole = buffers.receive_buffer(output)
        own = buffers.send_buffer(part.cpu() if whole.is_cpu else part)
        size, start, begin = own.nbytes, whole.data_ptr(), own.data_ptr()
        in_place = begin == start + self._group_rank * size  # as in FSDP2, the part is already in its place in the output
        if not in_place and start < begin + size and begin < start + size * self._group_size:  # MPI forbids overlap, and MPICH checks
            own = buffers.synchronized(own.clone())
        unit = (MPI.BYTE,) if size * self._group_size <= buffers.max_count else (1, buffers.byte_datatype(size))
        self._comm.Allgather(MPI.IN_PLACE if in_place else (buffers.raw_memory(own), *unit), (buffers.raw_memory(whole), *unit))
        buffers.copy_back(output, whole)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        buffer = buffers.send_buffer(tensor) if self._group_rank == root else buffers.receive_buffer(tensor)
        self._comm.Bcast(buffers.as_bytes(buffer), root)
        if self._group_rank != root:
            buffers.copy_back(tensor, buffer)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, receives: buffers.CountsAndDisplacements, sends: buffers.CountsAndDisplacements
    ) -> None:
        """All-to-all with the given counts and displacements."""
        whole, sent = buffers.receive_buffer(output), buffers.send_buffer(input)
        self._comm.Alltoallv([buffers.raw_memory(sent), *sends], [buffers.raw_memory(whole), *receives])
        buffers.copy_back(output, whole)

    def all_to_all_lists(self, outputs: Tensors, inputs: Tensors) -> None:
        sent = _concatenated(inputs)
        arrived = torch.empty(sum(t.numel() for t in outputs), dtype=sent.dtype, device=sent.device)
        self._comm.Alltoallv(*(buffers.pieces_per_rank(b, [t.numel() for t in ts]) for b, ts in ((sent, inputs), (arrived, outputs))))
        _copy_pieces(arrived, outputs)

    def all_gather_list(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        own = buffers.send_buffer(tensor)
        sizes = [t.numel() for t in outputs]
        if tensor.numel() != sizes[self._group_rank]:
            raise buffers.shape_error("all_gather", tensor.shape, f"what the list says, {sizes[self._group_rank]}")
        arrived = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        self._comm.Allgatherv(buffers.as_bytes(own), buffers.pieces_per_rank(arrived, sizes))
        _copy_pieces(arrived, outputs)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> None:
        own = buffers.send_buffer(tensor)
        if self._group_rank != root:
            self._comm.Gatherv(buffers.as_bytes(own), None, root)
            return
        sizes = [t.numel() for t in outputs]
        arrived = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
        self._comm.Gatherv(buffers.as_bytes(own), buffers.pieces_per_rank(arrived, sizes), root)
        _copy_pieces(arrived, outputs)

    def scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int) -> None:
        own = buffers.receive_buffer(tensor)
        whole = _concatenated(inputs) if self._group_rank == root else None
        sent = buffers.pieces_per_rank(whole, [t.numel() for t in inputs]) if whole is not None else None
        self._comm.Scatterv(sent, buffers.as_bytes(own), root)
        buffers.copy_back(tensor, own)


def _concatenated(tensors: Tensors) -> torch.Tensor:
    return buffers.send_buffer(buffers.synchronized(torch.cat([t.reshape(-1) for t in tensors])))


def _copy_pieces(arrived: torch.Tensor, outputs: Tensors) -> None:
    for piece, output in zip(arrived.split([t.numel() for t in outputs]), outputs, strict=True):
        output.copy_(piece.view(output.shape))
