"""Tensors as MPI sees them: memory that can be handed over as it is, or a copy that can; and counts beyond what MPI's integers hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI

from meshwright.comm.mpi import mpi_library

max_count = 2**31 - 1  # elements or bytes in one count of MPI's; tests lower it
_memory_at, _BYTE = MPI.buffer.fromaddress, MPI.BYTE
_CHUNK_BYTES = 2**24  # bytes in a piece of a type that holds more than `max_count`

BufferSpec = Sequence[Any]
CountsAndDisplacements = tuple[tuple[list[int], list[int]], MPI.Datatype]  # counts, where each begins, and of what type


def is_mpi_ready(tensor: torch.Tensor) -> bool:
    """Whether MPI can work on it where it is."""
    return tensor.is_contiguous() and (tensor.is_cpu or (tensor.is_cuda and mpi_library.is_cuda_aware()))


def send_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent: the tensor, or a copy that MPI can work on."""
    if is_mpi_ready(tensor):
        return tensor
    return synchronized(tensor.contiguous()) if tensor.is_cpu or (tensor.is_cuda and mpi_library.is_cuda_aware()) else tensor.cpu().contiguous()


def synchronized(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor once its device has done all that it was given to do: MPI, which knows nothing of streams, would read or write its memory before."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def receive_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Where it arrives: the tensor, or memory that `copy_back` copies from."""
    if is_mpi_ready(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_cuda and not mpi_library.is_cuda_aware() else tensor.device)


def copy_back(tensor: torch.Tensor, arrived: torch.Tensor) -> None:
    if arrived is not tensor:
        tensor.copy_(arrived)


def raw_memory(tensor: torch.Tensor) -> Any:
    """The tensor's bytes, without a copy and without its type: half and quarter precision have no name in MPI. The caller keeps the tensor."""
    return _memory_at(tensor.data_ptr(), tensor.nbytes)


def as_bytes(tensor: torch.Tensor) -> BufferSpec:
    """All of it, as one message."""
    size = tensor.nbytes
    where = _memory_at(tensor.data_ptr(), size)
    return (where, _BYTE) if size <= max_count else (where, 1, byte_datatype(size))


def pieces_per_rank(tensor: torch.Tensor, elements: Sequence[int]) -> BufferSpec:
    """One piece for each rank, one after the other, with so many elements each."""
    return [raw_memory(tensor), *_counts_and_displacements(tuple(elements), tensor.element_size(), max_count)]


@lru_cache(256)
def rows_per_rank(shape: torch.Size, itemsize: int, splits: tuple[int, ...], ranks: int, limit: int) -> CountsAndDisplacements:
    """So many rows for each rank; equally many where it is not said."""
    count = shape[0] if shape else 1
    if not splits and count % ranks:
        raise shape_error("all_to_all", shape, f"a multiple of {ranks} rows")
    splits = splits or (count // ranks,) * ranks
    if sum(splits) != count:
        raise shape_error("all_to_all", shape, f"the splits' {sum(splits)} rows")
    row = math.prod(shape[1:])
    return _counts_and_displacements(tuple(n * row for n in splits), itemsize, limit)


def shape_error(operation: str, shape: torch.Size, wanted: str) -> ValueError:
    return ValueError(f"{operation}: a tensor of shape {list(shape)} does not hold {wanted}")


@lru_cache(256)
def _counts_and_displacements(elements: tuple[int, ...], itemsize: int, limit: int) -> CountsAndDisplacements:
    counts = [n * itemsize for n in elements]
    unit, kind = 1, MPI.BYTE
    if sum(counts) > limit:
        unit = math.gcd(*counts)
        kind = byte_datatype(unit)
        counts = [n // unit for n in counts]
        if sum(counts) > limit:
            raise ValueError(f"pieces of {list(elements)} elements are more than MPI can count: make their sizes multiples of a larger number")
    return (counts, list(accumulate(counts[:-1], initial=0))), kind


@cache
def byte_datatype(size: int) -> MPI.Datatype:
    """A type that is `size` bytes long, however many these are."""
    if size <= max_count:
        made = MPI.BYTE.Create_contiguous(size)
    else:
        whole, rest = divmod(size, _CHUNK_BYTES)
        unit = MPI.BYTE.Create_contiguous(_CHUNK_BYTES)
        made = MPI.Datatype.Create_struct([whole, rest], [0, whole * _CHUNK_BYTES], [unit, MPI.BYTE])
    return made.Commit()


_streams: dict[torch.device, Any] = {}


def on_side_stream(tensor: torch.Tensor, run: Callable[[], object]) -> Callable[[], object]:
    """`run` for a CUDA tensor: on a stream of its own, after what the caller's stream has been given so far."""
    device = tensor.device
    event = torch.cuda.current_stream(device).record_event()

    def run_there() -> None:
        stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            event.synchronize()  # MPI knows nothing of streams
            run()
            stream.synchronize()

    return run_there
