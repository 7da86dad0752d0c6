"""Torch's reductions in MPI's terms. What MPI has no name for is composed: half precision is summed in fp32, a mean is a sum, then a division."""

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
from meshwright.comm.shared import Combine
from meshwright.comm.wire import say

_TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.uint8: MPI.UINT8_T, torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
}  # fmt: skip
_KINDS: Any = dist.ReduceOp.RedOpType
_OPS = {
    _KINDS.SUM: MPI.SUM, _KINDS.AVG: MPI.SUM, _KINDS.PREMUL_SUM: MPI.SUM, _KINDS.PRODUCT: MPI.PROD, _KINDS.MIN: MPI.MIN, _KINDS.MAX: MPI.MAX,
    _KINDS.BAND: MPI.BAND, _KINDS.BOR: MPI.BOR, _KINDS.BXOR: MPI.BXOR,
}  # fmt: skip
# Truth values are bytes of 0 and 1: any of them is their largest, all of them their smallest.
_TRUTH = {_KINDS.SUM: MPI.MAX, _KINDS.MAX: MPI.MAX, _KINDS.PRODUCT: MPI.MIN, _KINDS.MIN: MPI.MIN}
# The same between two tensors of a device.
_COMBINES: dict[Any, Combine] = {
    _KINDS.SUM: torch.add, _KINDS.AVG: torch.add, _KINDS.PREMUL_SUM: torch.add, _KINDS.PRODUCT: torch.mul, _KINDS.MIN: torch.minimum,
    _KINDS.MAX: torch.maximum, _KINDS.BAND: torch.bitwise_and, _KINDS.BOR: torch.bitwise_or, _KINDS.BXOR: torch.bitwise_xor,
}  # fmt: skip
_UNCOMBINED = {torch.uint16, torch.uint32, torch.uint64}  # torch cannot add them
_COMPLEX = (_KINDS.SUM, _KINDS.AVG, _KINDS.PREMUL_SUM)
_BITS = (_KINDS.BAND, _KINDS.BOR, _KINDS.BXOR)


@dataclass(frozen=True)
class Reduction:
    """How one reduction of one dtype is done: prepared, reduced by `op` over elements of `kind`, finished."""

    op: Any
    kind: Any
    width: int  # elements of `kind` for one of the tensor's
    worked: torch.dtype  # what it is reduced in
    factor: Any = None  # multiplied first
    ranks: int = 1  # divided by last
    plain: bool = False  # nothing is done before or after
    combined: bool = False  # torch can do it too, between two tensors
    combine: Combine = torch.add

    def prepared(self, tensor: torch.Tensor, keep: bool = True) -> torch.Tensor:
        """What goes in. With `keep` it is a copy whenever it differs from the tensor."""
        ready = buffers.outgoing(tensor)
        if ready.dtype != self.worked:
            ready = ready.to(self.worked)
        if self.factor is not None:
            factor = self.factor.to(ready.device) if isinstance(self.factor, torch.Tensor) else self.factor
            ready = ready.mul_(factor) if ready is not tensor or not keep else ready * factor
        return buffers.made(ready)

    def finish(self, tensor: torch.Tensor, reduced: torch.Tensor) -> None:
        if self.ranks > 1:
            reduced.div_(self.ranks, rounding_mode=None if reduced.is_floating_point() or reduced.is_complex() else "trunc")
        buffers.settle(tensor, reduced)

    def spec(self, tensor: torch.Tensor) -> buffers.Spec:
        return [buffers.memory(tensor), tensor.numel() * self.width, self.kind]

    def pieces(self, tensor: torch.Tensor, work: Callable[[torch.Tensor], object]) -> None:
        """`work` on as much at a time as MPI can count."""
        most = buffers.most // self.width
        if tensor.numel() <= most:
            work(tensor)
            return
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), most):
            work(flat[start : start + most])


def reduction(op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    """ValueError where the two have no meaning together."""
    ways = _known(ranks)[hash(op)]
    if dtype in ways:
        return ways[dtype]
    kind = op.op if hasattr(op, "op") else op
    found = _reduction(kind, dtype, ranks)
    if found.worked not in _UNCOMBINED:
        found = replace(found, combined=True, combine=_COMBINES[kind])
    if kind == _KINDS.PREMUL_SUM:
        return replace(found, factor=op.__getstate__()[1])  # the factor is a call's own
    ways[dtype] = replace(found, plain=found.worked == dtype and found.ranks == 1)
    return ways[dtype]


@cache
def _known(ranks: int) -> defaultdict[int, dict[torch.dtype, Reduction]]:
    """Those of a group of so many that were asked for, by the hash of torch's reduction, which is the number of its kind, and by dtype."""
    return defaultdict(dict)


@cache
def _reduction(kind: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    if kind not in _OPS:
        raise ValueError(f"backend mpi has no reduction {kind}")
    divisor = ranks if kind == _KINDS.AVG else 1
    if dtype in _TYPES:
        if kind in _BITS and dtype.is_floating_point:
            raise ValueError(f"{kind} of {dtype}: bits are combined of whole numbers only")
        return Reduction(_OPS[kind], _TYPES[dtype], 1, dtype, ranks=divisor)
    if dtype == torch.bool:
        if kind not in _TRUTH and kind not in _BITS:
            raise ValueError(f"{kind} of truth values has no meaning: convert them to numbers")
        return Reduction(_TRUTH.get(kind) or _OPS[kind], MPI.UINT8_T, 1, dtype)
    if dtype.is_complex:
        if kind not in _COMPLEX:
            raise ValueError(f"{kind} of complex numbers has no meaning")
        return Reduction(_OPS[kind], MPI.DOUBLE if dtype == torch.complex128 else MPI.FLOAT, 2, dtype, ranks=divisor)
    if kind in _BITS:
        raise ValueError(f"{kind} of {dtype}: bits are combined of whole numbers only")
    say("mpi", f"reduction of {str(dtype).removeprefix('torch.')}", "done in float32", MPI.COMM_WORLD.rank)
    return Reduction(_OPS[kind], MPI.FLOAT, 1, torch.float32, ranks=divisor)
