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
from torch import Tensor

from meshwright.comm.mpi import buffers
from meshwright.comm.shared_collectives import Combine
from meshwright.comm.wire_format import warn_fallback

_MPI_TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.uint8: MPI.UINT8_T, torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
}  # fmt: skip
_REDUCE_OPS: Any = dist.ReduceOp.RedOpType
# torch's reduce op → MPI's, and the same operation on two tensors of one device
_MPI_OPS: dict[Any, tuple[Any, Combine]] = {
    _REDUCE_OPS.SUM: (MPI.SUM, torch.add),
    _REDUCE_OPS.AVG: (MPI.SUM, torch.add),
    _REDUCE_OPS.PREMUL_SUM: (MPI.SUM, torch.add),
    _REDUCE_OPS.PRODUCT: (MPI.PROD, torch.mul),
    _REDUCE_OPS.MIN: (MPI.MIN, torch.minimum),
    _REDUCE_OPS.MAX: (MPI.MAX, torch.maximum),
    _REDUCE_OPS.BAND: (MPI.BAND, torch.bitwise_and),
    _REDUCE_OPS.BOR: (MPI.BOR, torch.bitwise_or),
    _REDUCE_OPS.BXOR: (MPI.BXOR, torch.bitwise_xor),
}
# As bytes of 0 and 1, `any` of truth values is their maximum and `all` their minimum.
_BOOL_MPI_OPS = {_REDUCE_OPS.SUM: MPI.MAX, _REDUCE_OPS.MAX: MPI.MAX, _REDUCE_OPS.PRODUCT: MPI.MIN, _REDUCE_OPS.MIN: MPI.MIN}
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

    def prepare(self, tensor: Tensor, keep: bool = True) -> Tensor:
        """The tensor to pass to MPI. With `keep`, `tensor` itself is not modified."""
        ready = buffers.send_buffer(tensor)
        if ready.dtype != self.compute_dtype:
            ready = ready.to(self.compute_dtype)
        if self.factor is not None:
            factor = self.factor.to(ready.device) if isinstance(self.factor, Tensor) else self.factor
            ready = ready.mul_(factor) if ready is not tensor or not keep else ready * factor
        return buffers.synchronized(ready)

    def finish(self, tensor: Tensor, reduced: Tensor) -> None:
        if self.divisor > 1:
            reduced.div_(self.divisor, rounding_mode=None if reduced.is_floating_point() or reduced.is_complex() else "trunc")
        buffers.copy_back(tensor, reduced)

    def buffer_spec(self, tensor: Tensor) -> buffers.BufferSpec:
        return [buffers.raw_memory(tensor), tensor.numel() * self.mpi_elements, self.mpi_type]

    def for_each_chunk(self, tensor: Tensor, fn: Callable[[Tensor], object]) -> None:
        """Call `fn` on chunks of no more elements than MPI can count."""
        max_elements = buffers.max_count // self.mpi_elements
        for chunk in tensor.view(-1).split(max_elements) if tensor.numel() > max_elements else (tensor,):
            fn(chunk)


def find_reduction(op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    """The reduction for `op` and `dtype`; ValueError if `op` is not defined for the dtype."""
    cached = _reduction_cache(ranks)[hash(op)]
    if dtype in cached:
        return cached[dtype]
    reduce_op = op.op if hasattr(op, "op") else op
    reduction = _build_reduction(reduce_op, dtype, ranks)
    if reduction.compute_dtype not in _NOT_TORCH_REDUCIBLE:
        reduction = replace(reduction, is_torch_reducible=True, reduce_fn=_MPI_OPS[reduce_op][1])
    if reduce_op == _REDUCE_OPS.PREMUL_SUM:
        return replace(reduction, factor=op.__getstate__()[1])  # not cached: the factor differs from call to call
    cached[dtype] = reduction
    return reduction


@cache
def _reduction_cache(ranks: int) -> defaultdict[int, dict[torch.dtype, Reduction]]:
    """Reductions found so far for groups of `ranks` ranks, by the hash of torch's reduce op (the number of its kind) and by dtype."""
    return defaultdict(dict)


@cache
def _build_reduction(reduce_op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    if reduce_op not in _MPI_OPS:
        raise ValueError(f"backend mpi has no reduction {reduce_op}: use SUM, AVG, PRODUCT, MIN or MAX")
    mpi_op, divisor = _MPI_OPS[reduce_op][0], ranks if reduce_op == _REDUCE_OPS.AVG else 1
    if reduce_op in _BITWISE_OPS and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{reduce_op} is not defined for {dtype}: use an integer dtype")
    if dtype in _MPI_TYPES:
        return Reduction(mpi_op, _MPI_TYPES[dtype], 1, dtype, divisor=divisor)
    if dtype == torch.bool:
        if reduce_op not in _BOOL_MPI_OPS and reduce_op not in _BITWISE_OPS:
            raise ValueError(f"{reduce_op} is not defined for {dtype}: convert the tensor to a numeric dtype")
        return Reduction(_BOOL_MPI_OPS.get(reduce_op) or mpi_op, MPI.UINT8_T, 1, dtype)
    if dtype.is_complex:
        if reduce_op not in _COMPLEX_OPS:
            raise ValueError(f"{reduce_op} is not defined for {dtype}: use SUM or AVG")
        return Reduction(mpi_op, MPI.DOUBLE if dtype == torch.complex128 else MPI.FLOAT, 2, dtype, divisor=divisor)
    warn_fallback("mpi", f"reduction of {str(dtype).removeprefix('torch.')}", "done in float32", MPI.COMM_WORLD.rank)
    return Reduction(mpi_op, MPI.FLOAT, 1, torch.float32, divisor=divisor)
