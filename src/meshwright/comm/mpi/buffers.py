"""MPI buffers of tensors: the tensor's own memory, or a copy that MPI can use; and datatypes for counts beyond MPI's 32-bit integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from meshwright.comm.mpi import mpi_library

max_count = 2**31 - 1  # the largest count that MPI takes, of elements or bytes; tests lower it
_memory_at, _BYTE = MPI.buffer.fromaddress, MPI.BYTE
_CHUNK_BYTES = 2**24  # block size of datatypes larger than `max_count`

BufferSpec = Sequence[Any]
CountsAndDisplacements = tuple[tuple[list[int], list[int]], MPI.Datatype]  # counts, displacements, and their datatype


def is_mpi_ready(tensor: Tensor) -> bool:
    """Whether MPI can use the tensor's own memory."""
    return tensor.is_contiguous() and (tensor.is_cpu or (tensor.is_cuda and mpi_library.is_cuda_aware()))


def send_buffer(tensor: Tensor) -> Tensor:
    """The tensor to send from: `tensor`, or a copy that MPI can use."""
    if is_mpi_ready(tensor):
        return tensor
    return synchronized(tensor.contiguous()) if tensor.is_cpu or (tensor.is_cuda and mpi_library.is_cuda_aware()) else tensor.cpu().contiguous()


def synchronized(tensor: Tensor) -> Tensor:
    """Return the tensor after its stream has finished: MPI ignores streams and would access the memory too early."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def receive_buffer(tensor: Tensor) -> Tensor:
    """The tensor to receive into: `tensor`, or a temporary that `copy_back` copies from."""
    if is_mpi_ready(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_cuda and not mpi_library.is_cuda_aware() else tensor.device)


def copy_back(tensor: Tensor, buffer: Tensor) -> None:
    if buffer is not tensor:
        tensor.copy_(buffer)


def raw_memory(tensor: Tensor) -> Any:
    """The tensor's memory as untyped bytes, not copied: MPI has no 16- and 8-bit floating-point types. The caller keeps the tensor alive."""
    return _memory_at(tensor.data_ptr(), tensor.nbytes)


def as_bytes(tensor: Tensor) -> BufferSpec:
    """The whole tensor as a buffer of bytes."""
    size = tensor.nbytes
    memory = _memory_at(tensor.data_ptr(), size)
    return (memory, _BYTE) if size <= max_count else (memory, 1, byte_datatype(size))


def parts_per_rank(tensor: Tensor, sizes: Sequence[int]) -> BufferSpec:
    """A buffer of one contiguous part per rank; `sizes` are the elements of the parts."""
    return [raw_memory(tensor), *_counts_and_displacements(tuple(sizes), tensor.element_size(), max_count)]


@lru_cache(256)
def rows_per_rank(shape: torch.Size, itemsize: int, splits: tuple[int, ...], ranks: int, limit: int) -> CountsAndDisplacements:
    """Counts and displacements for an all-to-all: `splits` are the rows per rank; if empty, rows are split equally."""
    rows = shape[0] if shape else 1
    if not splits and rows % ranks:
        raise shape_error("all_to_all", shape, f"a number of rows that is a multiple of {ranks}")
    splits = splits or (rows // ranks,) * ranks
    if sum(splits) != rows:
        raise shape_error("all_to_all", shape, f"{sum(splits)} rows, the sum of its splits")
    row = math.prod(shape[1:])
    return _counts_and_displacements(tuple(n * row for n in splits), itemsize, limit)


def shape_error(operation: str, shape: torch.Size, expected: str) -> ValueError:
    return ValueError(f"{operation}: the tensor has shape {list(shape)}, but must have {expected}")


@lru_cache(256)
def _counts_and_displacements(sizes: tuple[int, ...], itemsize: int, limit: int) -> CountsAndDisplacements:
    counts, datatype = [n * itemsize for n in sizes], MPI.BYTE
    if sum(counts) > limit:
        unit = math.gcd(*counts)
        datatype = byte_datatype(unit)
        counts = [n // unit for n in counts]
        if sum(counts) > limit:
            raise ValueError(
                f"parts of {list(sizes)} elements: MPI counts at most {limit} units, and the largest unit that divides all parts has {unit} bytes: "
                "use parts whose sizes have a larger common divisor, or a smaller tensor"
            )
    return (counts, list(accumulate(counts[:-1], initial=0))), datatype


@cache
def byte_datatype(size: int) -> MPI.Datatype:
    """A datatype of `size` bytes, which may be more than `max_count`."""
    if size <= max_count:
        return MPI.BYTE.Create_contiguous(size).Commit()
    chunks, rest = divmod(size, _CHUNK_BYTES)
    chunk = MPI.BYTE.Create_contiguous(_CHUNK_BYTES)
    return MPI.Datatype.Create_struct([chunks, rest], [0, chunks * _CHUNK_BYTES], [chunk, MPI.BYTE]).Commit()


_streams: dict[torch.device, Any] = {}


def on_side_stream(tensor: Tensor, run: Callable[[], object]) -> Callable[[], object]:
    """Wrap `run` for a CUDA tensor: it runs on a side stream, after the work already enqueued on the caller's stream."""
    device = tensor.device
    event = torch.cuda.current_stream(device).record_event()

    def run_on_stream() -> None:
        stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            event.synchronize()  # MPI ignores streams
            run()
            stream.synchronize()

    return run_on_stream
