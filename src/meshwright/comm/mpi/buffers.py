"""Tensors as MPI sees them: memory that can be handed over as it is, or a copy that can; and counts beyond what MPI's integers hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI

from meshwright.comm.mpi import library

most = 2**31 - 1  # elements or bytes in one count of MPI's; tests lower it
_at, _BYTE = MPI.buffer.fromaddress, MPI.BYTE
_UNIT = 2**24  # bytes in a piece of a type that holds more than `most`

Spec = Sequence[Any]
Pieces = tuple[tuple[list[int], list[int]], MPI.Datatype]  # counts, where each begins, and of what type


def ready(tensor: torch.Tensor) -> bool:
    """Whether MPI can work on it where it is."""
    return tensor.is_contiguous() and (tensor.is_cpu or (tensor.is_cuda and library.cuda_aware()))


def outgoing(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent: the tensor, or a copy that MPI can work on."""
    if ready(tensor):
        return tensor
    return made(tensor.contiguous()) if tensor.is_cpu or (tensor.is_cuda and library.cuda_aware()) else tensor.cpu().contiguous()


def made(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor once its device has done all that it was given to do: MPI, which knows nothing of streams, would read or write its memory before."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def incoming(tensor: torch.Tensor) -> torch.Tensor:
    """Where it arrives: the tensor, or memory that `settle` copies from."""
    if ready(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_cuda and not library.cuda_aware() else tensor.device)


def settle(tensor: torch.Tensor, arrived: torch.Tensor) -> None:
    if arrived is not tensor:
        tensor.copy_(arrived)


def memory(tensor: torch.Tensor) -> Any:
    """The tensor's bytes, without a copy and without its type: half and quarter precision have no name in MPI. The caller keeps the tensor."""
    return _at(tensor.data_ptr(), tensor.nbytes)


def as_bytes(tensor: torch.Tensor) -> Spec:
    """All of it, as one message."""
    size = tensor.nbytes
    where = _at(tensor.data_ptr(), size)
    return (where, _BYTE) if size <= most else (where, 1, of_bytes(size))


def in_pieces(tensor: torch.Tensor, elements: Sequence[int]) -> Spec:
    """One piece for each rank, one after the other, with so many elements each."""
    return [memory(tensor), *_pieces(tuple(elements), tensor.element_size(), most)]


@lru_cache(256)
def rows(shape: torch.Size, width: int, splits: tuple[int, ...], ranks: int, limit: int) -> Pieces:
    """So many rows for each rank; equally many where it is not said."""
    count = shape[0] if shape else 1
    if not splits and count % ranks:
        raise unfit("all_to_all", shape, f"a multiple of {ranks} rows")
    splits = splits or (count // ranks,) * ranks
    if sum(splits) != count:
        raise unfit("all_to_all", shape, f"the splits' {sum(splits)} rows")
    row = math.prod(shape[1:])
    return _pieces(tuple(n * row for n in splits), width, limit)


def unfit(operation: str, shape: torch.Size, wanted: str) -> ValueError:
    return ValueError(f"{operation}: a tensor of shape {list(shape)} does not hold {wanted}")


@lru_cache(256)
def _pieces(elements: tuple[int, ...], width: int, limit: int) -> Pieces:
    counts = [n * width for n in elements]
    unit, kind = 1, MPI.BYTE
    if sum(counts) > limit:
        unit = math.gcd(*counts)
        kind = of_bytes(unit)
        counts = [n // unit for n in counts]
        if sum(counts) > limit:
            raise ValueError(f"pieces of {list(elements)} elements are more than MPI can count: make their sizes multiples of a larger number")
    return (counts, list(accumulate(counts[:-1], initial=0))), kind


@cache
def of_bytes(size: int) -> MPI.Datatype:
    """A type that is `size` bytes long, however many these are."""
    if size <= most:
        made = MPI.BYTE.Create_contiguous(size)
    else:
        whole, rest = divmod(size, _UNIT)
        unit = MPI.BYTE.Create_contiguous(_UNIT)
        made = MPI.Datatype.Create_struct([whole, rest], [0, whole * _UNIT], [unit, MPI.BYTE])
    return made.Commit()


_streams: dict[torch.device, Any] = {}


def beside(tensor: torch.Tensor, run: Callable[[], object]) -> Callable[[], object]:
    """`run` for a CUDA tensor: on a stream of its own, after what the caller's stream has been given so far."""
    device = tensor.device
    event = torch.cuda.current_stream(device).record_event()

    def there() -> None:
        stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            event.synchronize()  # MPI knows nothing of streams
            run()
            stream.synchronize()

    return there
