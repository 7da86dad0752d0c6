"""Dtypes by the names that the safetensors format gives them, and tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
CHUNK_BYTES = 2**26  # of host memory that a tensor which is not staged passes through


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which stay its own."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""  # numpy has no bfloat16
    return memoryview(values)


def chunks_of(tensor: Tensor) -> Iterator[Tensor]:
    """Contiguous copies of a tensor's parts in host memory, in the order of its elements, one after the other."""
    if tensor.nbytes <= CHUNK_BYTES or not tensor.dim():
        yield tensor.contiguous().cpu()
        return
    rows = max(CHUNK_BYTES * tensor.shape[0] // tensor.nbytes, 1)
    for first in range(0, tensor.shape[0], rows):
        part = tensor.narrow(0, first, min(rows, tensor.shape[0] - first))
        yield from chunks_of(part[0]) if rows == 1 and part.nbytes > CHUNK_BYTES else (part.contiguous().cpu(),)
