"""Gradient compression: how buckets are reduced over data ranks. See [Note: compression] in core/compression_policy.py;
schedule/compression_actions.py predicts the same collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.comm import ChainedWork
from meshwright.core.comm import Comm, Work
from meshwright.core.compression_policy import low_rank_shape
from meshwright.core.plan import SyncPolicy

GetViews = Callable[[], Sequence[Tensor]]
SplitSizes = Sequence[int] | None  # elements of each rank, if they differ


class GradientCompressor:
    """Reduces gradients over ranks, in their own dtype; subclasses compress them. `bucket` is the key of state kept between steps; `get_views`
    returns the bucket's tensors, views of `grads`."""

    def all_reduce(self, comm: Comm, grads: Tensor, name: str, op: str, bucket: Hashable = "", get_views: GetViews = tuple) -> Work:
        return comm.all_reduce(grads, name, op)

    def reduce_scatter(self, comm: Comm, output: Tensor, grads: Tensor, name: str, op: str, sizes: SplitSizes = None) -> Work:
        return comm.reduce_scatter(output, grads, name, op, sizes)

    def residuals(self, bucket: Hashable, get_views: GetViews | None) -> Iterator[tuple[str, Tensor]]:
        """What is kept of a bucket between steps, by name; with `get_views`, it is made if there is none."""
        return iter(())


def make_compressor(policy: SyncPolicy) -> GradientCompressor:
    if policy.compression == "powersgd":
        return PowerSgd(policy.compression_rank)
    return CastCompression(torch.bfloat16) if policy.compression == "bf16" else GradientCompressor()


@dataclass(frozen=True)
class CastCompression(GradientCompressor):
    """Casts gradients to `dtype` and reduces them in it."""

    dtype: torch.dtype

    def all_reduce(self, comm: Comm, grads: Tensor, name: str, op: str, bucket: Hashable = "", get_views: GetViews = tuple) -> Work:
        if comm.size == 1:
            return comm.all_reduce(grads, name, op)
        wire = grads.to(self.dtype)
        return ChainedWork(comm.all_reduce(wire, name, op), lambda: grads.copy_(wire))

    def reduce_scatter(self, comm: Comm, output: Tensor, grads: Tensor, name: str, op: str, sizes: SplitSizes = None) -> Work:
        if comm.size == 1:
            return comm.reduce_scatter(output, grads, name, op, sizes)
        wire = torch.empty(output.shape, dtype=self.dtype, device=output.device)
        return ChainedWork(comm.reduce_scatter(wire, grads.to(self.dtype), name, op, sizes), lambda: output.copy_(wire))


@dataclass
class _PowerSgdMatrix:
    """A tensor that is reduced as two low-rank factors, and its state between steps."""

    tensor_index: int  # index among the bucket's tensors
    shape: tuple[int, int, int]  # rows, columns, rank
    q_factor: Tensor  # columns × rank: the last step's, which warm-starts this step's
    error_feedback: Tensor  # rows × columns: the compression error of all steps so far


@dataclass
class _PowerSgdState:
    """One bucket's state between steps."""

    matrices: list[_PowerSgdMatrix] = field(default_factory=list)
    uncompressed: list[int] = field(default_factory=list)  # indices of tensors that are reduced uncompressed


class PowerSgd(GradientCompressor):
    """PowerSGD (Vogels et al., 2019), with error feedback and a warm start, as in torch's DDP hook."""

    def __init__(self, compression_rank: int) -> None:
        self._compression_rank = compression_rank
        self.states: dict[Hashable, _PowerSgdState] = {}
        self._in_flight: list[_PowerSgdWork] = []

    def all_reduce(self, comm: Comm, grads: Tensor, name: str, op: str, bucket: Hashable = "", get_views: GetViews = tuple) -> Work:
        tensors = get_views()
        if bucket not in self.states:
            self.states[bucket] = self._init_state(tensors)
        work = _PowerSgdWork(comm, name, op, self.states[bucket], tensors, self._in_flight)
        self._in_flight.append(work)
        return work

    def reduce_scatter(self, comm: Comm, output: Tensor, grads: Tensor, name: str, op: str, sizes: SplitSizes = None) -> Work:
        raise AssertionError("plans with powersgd all-reduce gradients")

    def residuals(self, bucket: Hashable, get_views: GetViews | None) -> Iterator[tuple[str, Tensor]]:
        if bucket not in self.states and get_views is not None:
            self.states[bucket] = self._init_state(get_views())
        for matrix in self.states[bucket].matrices if bucket in self.states else ():
            yield f"{matrix.tensor_index}.q_factor", matrix.q_factor
            yield f"{matrix.tensor_index}.error_feedback", matrix.error_feedback

    def _init_state(self, tensors: Sequence[Tensor]) -> _PowerSgdState:
        """Draw the first q factors, the same on every rank."""
        state, generator = _PowerSgdState(), torch.Generator().manual_seed(len(self.states))
        for i, tensor in enumerate(tensors):
            shape = low_rank_shape(tensor.shape, self._compression_rank)
            if shape is None:
                state.uncompressed.append(i)
                continue
            rows, columns, rank = shape
            q_factor = torch.randn(columns, rank, generator=generator).to(tensor)
            state.matrices.append(_PowerSgdMatrix(i, shape, q_factor, tensor.new_zeros(rows, columns)))
        return state


class _PowerSgdWork:
    """One bucket in flight: p factors and uncompressed tensors are reduced first, then q factors."""

    def __init__(self, comm: Comm, name: str, op: str, state: _PowerSgdState, tensors: Sequence[Tensor], in_flight: list[_PowerSgdWork]) -> None:
        self._comm, self._name, self._op, self._state, self._tensors, self._in_flight = comm, name, op, state, tensors, in_flight
        self._uncompressed = _flatten([tensors[i] for i in state.uncompressed])
        for m in state.matrices:
            m.error_feedback.add_(self._matrix_view(m))  # from here to `_reconstruct` it holds the matrix to compress
        self._p_factors = _flatten([m.error_feedback @ m.q_factor for m in state.matrices])
        self._q_factors: Tensor | None = None
        self._p_work = [comm.all_reduce(t, n, op) for t, n in ((self._uncompressed, name), (self._p_factors, f"{name}.p")) if t is not None]
        self._q_work: Work | None = None

    def wait(self) -> bool:
        for work in self._in_flight:  # in launch order, which is the same on every rank
            work.send_q_factors()
        self._in_flight.clear()
        if self._q_work is not None:
            self._q_work.wait()
            self._q_work = None
            self._reconstruct()
        return True

    def send_q_factors(self) -> None:
        """Wait for the p factors, orthogonalize them, and launch the all-reduce of the q factors."""
        for work in self._p_work:
            work.wait()
        if self._uncompressed is not None:
            tensors = [self._tensors[i] for i in self._state.uncompressed]
            for tensor, reduced in zip(tensors, _unflatten(self._uncompressed, [t.shape for t in tensors]), strict=True):
                tensor.copy_(reduced)
        if self._p_factors is not None:
            p_factors = _unflatten(self._p_factors, [(m.shape[0], m.shape[2]) for m in self._state.matrices])
            for p in p_factors:
                p.copy_(torch.linalg.qr(p).Q)
            self._q_factors = _flatten([m.error_feedback.t() @ p for m, p in zip(self._state.matrices, p_factors, strict=True)])
            assert self._q_factors is not None
            self._q_work = self._comm.all_reduce(self._q_factors, f"{self._name}.q", self._op)

    def _reconstruct(self) -> None:
        """Write the product of both factors as the gradient; the error feedback keeps this rank's difference from the mean."""
        assert self._p_factors is not None and self._q_factors is not None
        p_factors = _unflatten(self._p_factors, [(m.shape[0], m.shape[2]) for m in self._state.matrices])
        q_factors = _unflatten(self._q_factors, [(m.shape[1], m.shape[2]) for m in self._state.matrices])
        mean_factor = 1.0 if self._op == "mean" else 1.0 / self._comm.size
        for m, p, q in zip(self._state.matrices, p_factors, q_factors, strict=True):
            m.q_factor.copy_(q)
            gradient = p @ q.t()
            m.error_feedback.sub_(gradient, alpha=mean_factor)
            self._matrix_view(m).copy_(gradient)

    def _matrix_view(self, matrix: _PowerSgdMatrix) -> Tensor:
        return self._tensors[matrix.tensor_index].view(*matrix.shape[:2])


def _flatten(tensors: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else None


def _unflatten(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [t.view(shape) for t, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)]
