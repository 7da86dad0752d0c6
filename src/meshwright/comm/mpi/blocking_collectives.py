"""Collectives of one communicator as blocking mpi4py calls: prepare the tensors, call MPI, copy results back. The group's work queue runs them.

[Note: pairwise reduce-scatter]
Open MPI's own reduce-scatter of large tensors moves more memory than needed: a ZeRO-1 step of a GPT on two ranks takes 13% longer with it.
So from `PAIRWISE_MIN_BYTES` bytes per rank on, n ranks exchange parts in n-1 rounds: in each, a rank sends one peer that peer's part and adds the
part that it receives from another peer. A part is always summed in the same order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from meshwright.comm.mpi import buffers
from meshwright.comm.mpi.mpi_reductions import Reduction

Tensors = Sequence[Tensor]
PAIRWISE_MIN_BYTES = 1 << 17  # bytes per rank from which on [Note: pairwise reduce-scatter] applies
_PAIRWISE_TAG = 32767  # the largest tag that every MPI must support


class BlockingCollectives:
    """The blocking collectives of one communicator. Only the thread that holds the work queue's lock calls them, one at a time."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._group_rank, self._group_size = comm, comm.Get_rank(), comm.Get_size()

    # -- reductions --

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        work = reduction.prepare(tensor, keep=False)
        if work.is_cuda and reduction.is_torch_reducible:
            self._all_reduce_on_device(work.view(-1), reduction)
        else:
            reduction.for_each_chunk(work, lambda chunk: self._comm.Allreduce(MPI.IN_PLACE, reduction.buffer_spec(chunk), reduction.op))
        reduction.finish(tensor, work)

    def all_reduce_sparse(self, tensor: Tensor, divisor: int) -> None:
        """Sum of sparse COO tensors: every rank gathers the indices and values of all, and adds the values of equal indices."""
        own = tensor.coalesce()
        counts = self._comm.allgather(own._nnz())

        def gathered(part: Tensor) -> Tensor:
            parts = [part.new_empty((count, *part.shape[1:])) for count in counts]
            self.all_gather_list(parts, part)
            return torch.cat(parts)

        indices, values = gathered(own.indices().t()), gathered(own.values())
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
        tensor.copy_(total / divisor if divisor > 1 else total)

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        work = reduction.prepare(tensor)
        self._reduce(work, reduction, root)
        if self._group_rank == root:
            reduction.finish(tensor, work)

    def _reduce(self, work: Tensor, reduction: Reduction, root: int) -> None:
        def reduce(chunk: Tensor) -> None:
            spec = reduction.buffer_spec(chunk)
            self._comm.Reduce(*((MPI.IN_PLACE, spec) if self._group_rank == root else (spec, None)), reduction.op, root)

        reduction.for_each_chunk(work, reduce)

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: Reduction, sizes: list[int] | None = None) -> None:
        """`sizes` are the elements of each rank's part, if they differ."""
        sizes = sizes or [output.numel()] * self._group_size
        send = reduction.prepare(input)
        recv_start, send_start = output.data_ptr(), send.data_ptr()
        disjoint = recv_start >= send_start + send.nbytes or send_start >= recv_start + output.nbytes  # MPI forbids overlapping buffers
        in_place = reduction.compute_dtype == output.dtype and disjoint and buffers.is_mpi_ready(output)
        recv = output if in_place else torch.empty(output.shape, dtype=reduction.compute_dtype, device=send.device)
        if recv.is_cuda and reduction.is_torch_reducible:
            self._pairwise_reduce_scatter(recv, send, reduction, sizes)
        elif send.numel() * reduction.mpi_elements > buffers.max_count:
            self._reduce_scatter_by_reduce(recv, send, reduction, sizes)
        elif send.nbytes >= PAIRWISE_MIN_BYTES * self._group_size and recv.is_cpu:
            self._pairwise_reduce_scatter(recv, send, reduction, sizes)
        else:
            counts, recv_spec = [n * reduction.mpi_elements for n in sizes], reduction.buffer_spec(recv)
            if len(set(sizes)) == 1:
                self._comm.Reduce_scatter_block([buffers.raw_memory(send), counts[0], reduction.mpi_type], recv_spec, reduction.op)
            else:
                self._comm.Reduce_scatter(reduction.buffer_spec(send), recv_spec, counts, reduction.op)
        reduction.finish(output, recv)

    def _pairwise_reduce_scatter(self, total: Tensor, tensor: Tensor, reduction: Reduction, sizes: list[int]) -> None:
        """[Note: pairwise reduce-scatter]; `total` may be this rank's part of `tensor`."""
        parts, total = tensor.view(-1).split(sizes), total.view(-1)
        if parts[self._group_rank].data_ptr() != total.data_ptr():
            total.copy_(parts[self._group_rank])
        received = torch.empty_like(total)
        for step in range(1, self._group_size):
            target, source = (self._group_rank - step) % self._group_size, (self._group_rank + step) % self._group_size
            self._comm.Sendrecv(buffers.as_bytes(parts[target]), target, _PAIRWISE_TAG, buffers.as_bytes(received), source, _PAIRWISE_TAG)
            if total.is_cuda:
                reduction.reduce_fn(total, received, out=total)
                buffers.synchronized(total)
            else:
                reduction.op.Reduce_local(reduction.buffer_spec(received), reduction.buffer_spec(total))

    def _all_reduce_on_device(self, flat: Tensor, reduction: Reduction) -> None:
        """All-reduce where MPI moves the data and the device reduces it: a CUDA-aware MPI moves device memory fast but reduces it on the host."""
        parts = flat.tensor_split(self._group_size)
        sizes = [len(part) for part in parts]
        self._pairwise_reduce_scatter(parts[self._group_rank], flat, reduction, sizes)
        self._comm.Allgatherv(MPI.IN_PLACE, buffers.parts_per_rank(flat, sizes))

    def _reduce_scatter_by_reduce(self, recv: Tensor, send: Tensor, reduction: Reduction, sizes: list[int]) -> None:
        """Reduce-scatter of more elements than MPI can count: one chunked reduce per rank's part."""
        for root, part in enumerate(send.view(-1).split(sizes)):
            self._reduce(part, reduction, root)
            if root == self._group_rank:
                recv.view(-1).copy_(part)

    # -- data movement --

    def all_gather(self, output: Tensor, part: Tensor) -> None:
        """All-gather equal parts into one tensor."""
        recv = buffers.receive_buffer(output)
        send = buffers.send_buffer(part.cpu() if recv.is_cpu else part)
        size, recv_start, send_start = send.nbytes, recv.data_ptr(), send.data_ptr()
        in_place = send_start == recv_start + self._group_rank * size  # as in FSDP2, the part is already at its position in the output
        if not in_place and recv_start < send_start + size and send_start < recv_start + size * self._group_size:
            send = buffers.synchronized(send.clone())  # MPI forbids overlap, and MPICH checks
        unit = (MPI.BYTE,) if size * self._group_size <= buffers.max_count else (1, buffers.byte_datatype(size))
        self._comm.Allgather(MPI.IN_PLACE if in_place else (buffers.raw_memory(send), *unit), (buffers.raw_memory(recv), *unit))
        buffers.copy_back(output, recv)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        buffer = buffers.send_buffer(tensor) if self._group_rank == root else buffers.receive_buffer(tensor)
        self._comm.Bcast(buffers.as_bytes(buffer), root)
        if self._group_rank != root:
            buffers.copy_back(tensor, buffer)

    def all_to_all(self, output: Tensor, input: Tensor, receives: buffers.CountsAndDisplacements, sends: buffers.CountsAndDisplacements) -> None:
        """All-to-all with the given counts and displacements."""
        recv, send = buffers.receive_buffer(output), buffers.send_buffer(input)
        self._comm.Alltoallv([buffers.raw_memory(send), *sends], [buffers.raw_memory(recv), *receives])
        buffers.copy_back(output, recv)

    def all_to_all_lists(self, outputs: Tensors, inputs: Tensors) -> None:
        send = _concatenated(inputs)
        recv = torch.empty(sum(_numels(outputs)), dtype=send.dtype, device=send.device)
        self._comm.Alltoallv(buffers.parts_per_rank(send, _numels(inputs)), buffers.parts_per_rank(recv, _numels(outputs)))
        _copy_parts(recv, outputs)

    def all_gather_list(self, outputs: Tensors, tensor: Tensor) -> None:
        send, sizes = buffers.send_buffer(tensor), _numels(outputs)
        if tensor.numel() != sizes[self._group_rank]:
            raise buffers.shape_error("all_gather", tensor.shape, f"{sizes[self._group_rank]} elements, as its entry in the output list")
        recv = torch.empty(sum(sizes), dtype=send.dtype, device=send.device)
        self._comm.Allgatherv(buffers.as_bytes(send), buffers.parts_per_rank(recv, sizes))
        _copy_parts(recv, outputs)

    def gather(self, outputs: Tensors, tensor: Tensor, root: int) -> None:
        send = buffers.send_buffer(tensor)
        if self._group_rank != root:
            self._comm.Gatherv(buffers.as_bytes(send), None, root)
            return
        sizes = _numels(outputs)
        recv = torch.empty(sum(sizes), dtype=send.dtype, device=send.device)
        self._comm.Gatherv(buffers.as_bytes(send), buffers.parts_per_rank(recv, sizes), root)
        _copy_parts(recv, outputs)

    def scatter(self, tensor: Tensor, inputs: Tensors, root: int) -> None:
        recv = buffers.receive_buffer(tensor)
        send = _concatenated(inputs) if self._group_rank == root else None
        self._comm.Scatterv(buffers.parts_per_rank(send, _numels(inputs)) if send is not None else None, buffers.as_bytes(recv), root)
        buffers.copy_back(tensor, recv)


def _numels(tensors: Tensors) -> list[int]:
    return [t.numel() for t in tensors]


def _concatenated(tensors: Tensors) -> Tensor:
    return buffers.send_buffer(buffers.synchronized(torch.cat([t.reshape(-1) for t in tensors])))


def _copy_parts(recv: Tensor, outputs: Tensors) -> None:
    for part, output in zip(recv.split(_numels(outputs)), outputs, strict=True):
        output.copy_(part.view(output.shape))
