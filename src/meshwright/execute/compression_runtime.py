"""Gradient compression: how buckets are reduced over data ranks. See [Note: compression] in core/compression_policy.py;
schedule/compression_actions.py predicts the same collectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from meshwright.comm import ChainedWork
from meshwright.core.comm import Comm, Work
from meshwright.core.compression_policy import low_rank_shape
from meshwright.core.plan import SyncPolicy

GetViews = Callable[[], Sequence[torch.Tensor]]
SplitSizes = Sequence[int] | None  # elements of each rank, if they differ


class GradientCompressor(Protocol):
    """Reduces gradients over ranks. `bucket` is the key of state kept between steps; `get_views` returns the bucket's tensors, views of `grads`."""

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", get_views: GetViews = tuple
    ) -> Work: ...  # fmt: skip

    def reduce_scatter(self, comm: Comm, output: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: SplitSizes = None) -> Work: ...


def make_compressor(policy: SyncPolicy) -> GradientCompressor:
    if policy.compression == "powersgd":
        return PowerSgd(policy.compression_rank)
    return CastCompression(torch.bfloat16) if policy.compression == "bf16" else NoCompression()


class NoCompression:
    """Reduces gradients in their own dtype."""

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", get_views: GetViews = tuple
    ) -> Work:  # fmt: skip
        return comm.all_reduce(grads, name, op)

    def reduce_scatter(self, comm: Comm, output: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: SplitSizes = None) -> Work:
        return comm.reduce_scatter(output, grads, name, op, sizes)


@dataclass(frozen=True)
class CastCompression:
    """Casts gradients to `dtype` and reduces them in it."""

    dtype: torch.dtype

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", get_views: GetViews = tuple
    ) -> Work:  # fmt: skip
        if comm.size == 1:
            return comm.all_reduce(grads, name, op)
        wire = grads.to(self.dtype)
        return ChainedWork(comm.all_reduce(wire, name, op), lambda: grads.copy_(wire))

    def reduce_scatter(self, comm: Comm, output: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: SplitSizes = None) -> Work:
        if comm.size == 1:
            return comm.reduce_scatter(output, grads, name, op, sizes)
        wire = torch.empty(output.shape, dtype=self.dtype, device=output.device)
        return ChainedWork(comm.reduce_scatter(wire, grads.to(self.dtype), name, op, sizes), lambda: output.copy_(wire))


@dataclass
class _PowerSgdMatrix:
    """A tensor that is reduced as two low-rank factors, and its state between steps."""

    tensor_index: int  # index among the bucket's tensors
    shape: tuple[int, int, int]  # rows, columns, rank
    q_factor: torch.Tensor  # columns × rank: the last step's, which warm-starts this step's
    error_feedback: torch.Tensor  # rows × columns: the compression error of all steps so far


@dataclass
class _PowerSgdState:
    """One bucket's state between steps."""

    matrices: list[_PowerSgdMatrix] = field(default_factory=list)
    uncompressed: list[int] = field(default_factory=list)  # indices of tensors that are reduced uncompressed


class PowerSgd:
    """PowerSGD (Vogels et al., 2019), with error feedback and a warm start, as in torch's DDP hook."""

    def __init__(self, compression_rank: int) -> None:
        self._compression_rank = compression_rank
        self.states: dict[Hashable, _PowerSgdState] = {}
        self._in_flight: list[_PowerSgdWork] = []

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", get_views: GetViews = tuple
    ) -> Work:  # fmt: skip
        tensors = get_views()
        if bucket not in self.states:
            self.states[bucket] = self._init_state(tensors)
        call = _PowerSgdWork(comm, name, op, self.states[bucket], tensors, self._in_flight)
        self._in_flight.append(call)
        return call

    def reduce_scatter(self, comm: Comm, output: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: SplitSizes = None) -> Work:
        raise AssertionError("plans with powersgd have whole gradients on every rank")

    def _init_state(self, tensors: Sequence[torch.Tensor]) -> _PowerSgdState:
        """Draw the first q factors, the same on every rank."""
        found = _PowerSgdState()
        made = torch.Generator().manual_seed(len(self.states))
        for at, part in enumerate(tensors):
            shape = low_rank_shape(part.shape, self._compression_rank)
            if shape is None:
                found.uncompressed.append(at)
                continue
            rows, columns, kept = shape
            right = torch.randn(columns, kept, generator=made).to(part)
            found.matrices.append(_PowerSgdMatrix(at, shape, right, part.new_zeros(rows, columns)))
        return found


class _PowerSgdWork:
    """One bucket in flight: p factors and uncompressed tensors are reduced first, then q factors."""

    def __init__(
        self, comm: Comm, name: str, op: str, state: _PowerSgdState, tensors: Sequence[torch.Tensor], in_flight: list[_PowerSgdWork]
    ) -> None:
        self._comm, self._name, self._op, self._state, self._tensors, self._in_flight = comm, name, op, state, tensors, in_flight
        self._uncompressed = torch.cat([tensors[i].reshape(-1) for i in state.uncompressed]) if state.uncompressed else None
        for m in state.matrices:
            m.error_feedback.add_(self._matrix_view(m))  # from here to `_reconstruct` it holds the matrix to compress
        self._p_factors = _flatten([m.error_feedback @ m.q_factor for m in state.matrices])
        self._q_factors: torch.Tensor | None = None
        self._p_work = [comm.all_reduce(t, n, op) for t, n in ((self._uncompressed, name), (self._p_factors, f"{name}.p")) if t is not None]
        self._q_work: Work | None = None

    def wait(self) -> bool:
        for call in self._in_flight:  # in launch order, which is the same on every rank
            call.send_q_factors()
        self._in_flight.clear()
        if self._q_work is not None:
            self._q_work.wait()
            self._q_work = None
            self._reconstruct()
        return True

    def send_q_factors(self) -> None:
        """Wait for the p factors, orthogonalize them, and launch the all-reduce of the q factors."""
        for pending in self._p_work:
            pending.wait()
        if self._uncompressed is not None:
            sizes = [self._tensors[i].numel() for i in self._state.uncompressed]
            for i, piece in zip(self._state.uncompressed, self._uncompressed.split(sizes), strict=True):
                self._tensors[i].copy_(piece.view_as(self._tensors[i]))
        if self._p_factors is not None:
            lefts = _unflatten(self._p_factors, [(m.shape[0], m.shape[2]) for m in self._state.matrices])
            for left in lefts:
                left.copy_(torch.linalg.qr(left).Q)
            self._q_factors = _flatten([m.error_feedback.t() @ left for m, left in zip(self._state.matrices, lefts, strict=True)])
            assert self._q_factors is not None
            self._q_work = self._comm.all_reduce(self._q_factors, f"{self._name}.q", self._op)

    def _reconstruct(self) -> None:
        """Write the product of both factors as the gradient; the error feedback keeps this rank's difference from the mean."""
        assert self._p_factors is not None and self._q_factors is not None
        lefts = _unflatten(self._p_factors, [(m.shape[0], m.shape[2]) for m in self._state.matrices])
        rights = _unflatten(self._q_factors, [(m.shape[1], m.shape[2]) for m in self._state.matrices])
        share = 1.0 if self._op == "mean" else 1.0 / self._comm.size
        for m, left, right in zip(self._state.matrices, lefts, rights, strict=True):
            m.q_factor.copy_(right)
            found = left @ right.t()
            m.error_feedback.sub_(found, alpha=share)
            self._matrix_view(m).copy_(found)

    def _matrix_view(self, matrix: _PowerSgdMatrix) -> torch.Tensor:
        return self._tensors[matrix.tensor_index].view(*matrix.shape[:2])


def _flatten(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat([m.reshape(-1) for m in matrices]) if matrices else None


def _unflatten(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [piece.view(shape) for piece, shape in zip(flat.split([a * b for a, b in shapes]), shapes, strict=True)]
