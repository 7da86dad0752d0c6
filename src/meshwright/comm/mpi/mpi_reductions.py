"""Maps torch's reductions to MPI's. What MPI lacks is emulated: half precision is reduced in fp32, a mean is a sum and a division."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from meshwright.comm.mpi import buffers
from meshwright.comm.shared_collectives import Combine
from meshwright.comm.wire_format import warn_fallback

_MPI_TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.uint8: MPI.UINT8_T, torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
}  # fmt: skip
_REDUCE_OPS: Any = dist.ReduceOp.RedOpType
_MPI_OPS = {
    _REDUCE_OPS.SUM: MPI.SUM,
    _REDUCE_OPS.AVG: MPI.SUM,
    _REDUCE_OPS.PREMUL_SUM: MPI.SUM,
    _REDUCE_OPS.PRODUCT: MPI.PROD,
    _REDUCE_OPS.MIN: MPI.MIN,
    _REDUCE_OPS.MAX: MPI.MAX,
    _REDUCE_OPS.BAND: MPI.BAND,
    _REDUCE_OPS.BOR: MPI.BOR,
    _REDUCE_OPS.BXOR: MPI.BXOR,
}
# As bytes of 0 and 1, `any` of truth values is their maximum and `all` their minimum.
_BOOL_MPI_OPS = {_REDUCE_OPS.SUM: MPI.MAX, _REDUCE_OPS.MAX: MPI.MAX, _REDUCE_OPS.PRODUCT: MPI.MIN, _REDUCE_OPS.MIN: MPI.MIN}
# The same operations on two tensors of one device.
_REDUCE_FNS: dict[Any, Combine] = {
    _REDUCE_OPS.SUM: torch.add,
    _REDUCE_OPS.AVG: torch.add,
    _REDUCE_OPS.PREMUL_SUM: torch.add,
    _REDUCE_OPS.PRODUCT: torch.mul,
    _REDUCE_OPS.MIN: torch.minimum,
    _REDUCE_OPS.MAX: torch.maximum,
    _REDUCE_OPS.BAND: torch.bitwise_and,
    _REDUCE_OPS.BOR: torch.bitwise_or,
    _REDUCE_OPS.BXOR: torch.bitwise_xor,
}
_NOT_TORCH_REDUCIBLE = {torch.uint16, torch.uint32, torch.uint64}  # torch cannot add them
_COMPLEX_OPS = (_REDUCE_OPS.SUM, _REDUCE_OPS.AVG, _REDUCE_OPS.PREMUL_SUM)
_BITWISE_OPS = (_REDUCE_OPS.BAND, _REDUCE_OPS.BOR, _REDUCE_OPS.BXOR)


@dataclass(frozen=True)
class Reduction:
    """How to do one reduction of one dtype: `prepare` the tensor, reduce it with `op` over elements of `mpi_type`, `finish`."""

    op: Any
    mpi_type: Any
    mpi_elements: int  # elements of `mpi_type` per element of the tensor
    compute_dtype: torch.dtype  # the dtype that MPI reduces in
    factor: Any = None  # the input is multiplied by it
    divisor: int = 1  # the result is divided by it
    is_torch_reducible: bool = False  # torch can combine two tensors by `reduce_fn`
    reduce_fn: Combine = torch.add

    def prepare(self, tensor: torch.Tensor, keep: bool = True) -> torch.Tensor:
        """The tensor to pass to MPI. With `keep`, `tensor` itself is not modified."""
        ready = buffers.send_buffer(tensor)
        if ready.dtype != self.compute_dtype:
            ready = ready.to(self.compute_dtype)
        if self.factor is not None:
            factor = self.factor.to(ready.device) if isinstance(self.factor, torch.Tensor) else self.factor
            ready = ready.mul_(factor) if ready is not tensor or not keep else ready * factor
        return buffers.synchronized(ready)

    def finish(self, tensor: torch.Tensor, reduced: torch.Tensor) -> None:
        if self.divisor > 1:
            reduced.div_(self.divisor, rounding_mode=None if reduced.is_floating_point() or reduced.is_complex() else "trunc")
        buffers.copy_back(tensor, reduced)

    def buffer_spec(self, tensor: torch.Tensor) -> buffers.BufferSpec:
        return [buffers.raw_memory(tensor), tensor.numel() * self.mpi_elements, self.mpi_type]

    def for_each_chunk(self, tensor: torch.Tensor, fn: Callable[[torch.Tensor], object]) -> None:
        """Call `fn` on chunks of no more elements than MPI can count."""
        most = buffers.max_count // self.mpi_elements
        if tensor.numel() <= most:
            fn(tensor)
            return
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), most):
            fn(flat[start : start + most])


def find_reduction(op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    """The reduction for `op` and `dtype`; ValueError if `op` is not defined for the dtype."""
    ways = _reduction_cache(ranks)[hash(op)]
    if dtype in ways:
        return ways[dtype]
    kind = op.op if hasattr(op, "op") else op
    found = _build_reduction(kind, dtype, ranks)
    if found.compute_dtype not in _NOT_TORCH_REDUCIBLE:
        found = replace(found, is_torch_reducible=True, reduce_fn=_REDUCE_FNS[kind])
    if kind == _REDUCE_OPS.PREMUL_SUM:
        return replace(found, factor=op.__getstate__()[1])  # not cached: the factor differs from call to call
    ways[dtype] = found
    return found


@cache
def _reduction_cache(ranks: int) -> defaultdict[int, dict[torch.dtype, Reduction]]:
    """Reductions found so far for groups of `ranks` ranks, by the hash of torch's reduce op (the number of its kind) and by dtype."""
    return defaultdict(dict)


@cache
def _build_reduction(reduce_op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    if reduce_op not in _MPI_OPS:
        raise ValueError(f"backend mpi has no reduction {reduce_op}")
    divisor = ranks if reduce_op == _REDUCE_OPS.AVG else 1
    if dtype in _MPI_TYPES:
        if reduce_op in _BITWISE_OPS and dtype.is_floating_point:
            raise ValueError(f"{reduce_op} of {dtype}: bits are combined of whole numbers only")
        return Reduction(_MPI_OPS[reduce_op], _MPI_TYPES[dtype], 1, dtype, divisor=divisor)
    if dtype == torch.bool:
        if reduce_op not in _BOOL_MPI_OPS and reduce_op not in _BITWISE_OPS:
            raise ValueError(f"{reduce_op} of truth values has no meaning: convert them to numbers")
        return Reduction(_BOOL_MPI_OPS.get(reduce_op) or _MPI_OPS[reduce_op], MPI.UINT8_T, 1, dtype)
    if dtype.is_complex:
        if reduce_op not in _COMPLEX_OPS:
            raise ValueError(f"{reduce_op} of complex numbers has no meaning")
        return Reduction(_MPI_OPS[reduce_op], MPI.DOUBLE if dtype == torch.complex128 else MPI.FLOAT, 2, dtype, divisor=divisor)
    if reduce_op in _BITWISE_OPS:
        raise ValueError(f"{reduce_op} of {dtype}: bits are combined of whole numbers only")
    warn_fallback("mpi", f"reduction of {str(dtype).removeprefix('torch.')}", "done in float32", MPI.COMM_WORLD.rank)
    return Reduction(_MPI_OPS[reduce_op], MPI.FLOAT, 1, torch.float32, divisor=divisor)
