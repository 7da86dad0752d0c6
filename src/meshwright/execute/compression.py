"""How gradient buckets travel between data ranks. See [Note: compression] in core/compression.py; schedule/compression.py counts the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from meshwright.comm import Then
from meshwright.core.comm import Comm, Pending
from meshwright.core.compression import factor_shape
from meshwright.core.plan import SyncPolicy

Parts = Callable[[], Sequence[torch.Tensor]]
Sizes = Sequence[int] | None  # elements for each rank, where they differ


class Travel(Protocol):
    """How gradients go. `bucket` names what is kept from step to step; `parts` gives its tensors, which are views of `grads`."""

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", parts: Parts = tuple
    ) -> Pending: ...  # fmt: skip

    def reduce_scatter(self, comm: Comm, own: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: Sizes = None) -> Pending: ...


def travel_of(policy: SyncPolicy) -> Travel:
    if policy.compression == "powersgd":
        return PowerSgd(policy.compression_rank)
    return Rounded(torch.bfloat16) if policy.compression == "bf16" else Plain()


class Plain:
    """As they are."""

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", parts: Parts = tuple
    ) -> Pending:  # fmt: skip
        return comm.all_reduce(grads, name, op)

    def reduce_scatter(self, comm: Comm, own: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: Sizes = None) -> Pending:
        return comm.reduce_scatter(own, grads, name, op, sizes)


@dataclass(frozen=True)
class Rounded:
    """Rounded for the wire and reduced so."""

    kind: torch.dtype

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", parts: Parts = tuple
    ) -> Pending:  # fmt: skip
        if comm.size == 1:
            return comm.all_reduce(grads, name, op)
        wire = grads.to(self.kind)
        return Then(comm.all_reduce(wire, name, op), lambda: grads.copy_(wire))

    def reduce_scatter(self, comm: Comm, own: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: Sizes = None) -> Pending:
        if comm.size == 1:
            return comm.reduce_scatter(own, grads, name, op, sizes)
        wire = torch.empty(own.shape, dtype=self.kind, device=own.device)
        return Then(comm.reduce_scatter(wire, grads.to(self.kind), name, op, sizes), lambda: own.copy_(wire))


@dataclass
class _Matrix:
    """One tensor that travels as two factors, and what is kept of it."""

    at: int  # among the bucket's tensors
    shape: tuple[int, int, int]  # rows, columns, rank
    right: torch.Tensor  # columns × rank: the last step's, which is where this step's begins
    left_out: torch.Tensor  # rows × columns: by all steps so far


@dataclass
class _Kept:
    """Of one bucket, from step to step."""

    matrices: list[_Matrix] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # tensors that go as they are


class PowerSgd:
    """Vogels et al., 2019, with error feedback and a warm start, as torch's DDP hook does it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.kept: dict[Hashable, _Kept] = {}
        self._under_way: list[_LowRank] = []

    def all_reduce(
        self, comm: Comm, grads: torch.Tensor, name: str, op: str, bucket: Hashable = "", parts: Parts = tuple
    ) -> Pending:  # fmt: skip
        tensors = parts()
        if bucket not in self.kept:
            self.kept[bucket] = self._begun(tensors)
        call = _LowRank(comm, name, op, self.kept[bucket], tensors, self._under_way)
        self._under_way.append(call)
        return call

    def reduce_scatter(self, comm: Comm, own: torch.Tensor, grads: torch.Tensor, name: str, op: str, sizes: Sizes = None) -> Pending:
        raise AssertionError("plans with powersgd have whole gradients on every rank")

    def _begun(self, parts: Sequence[torch.Tensor]) -> _Kept:
        """The first right factors are drawn, the same on every rank."""
        found = _Kept()
        made = torch.Generator().manual_seed(len(self.kept))
        for at, part in enumerate(parts):
            shape = factor_shape(part.shape, self._rank)
            if shape is None:
                found.whole.append(at)
                continue
            rows, columns, kept = shape
            right = torch.randn(columns, kept, generator=made).to(part)
            found.matrices.append(_Matrix(at, shape, right, part.new_zeros(rows, columns)))
        return found


class _LowRank:
    """One bucket on its way: left factors and what goes whole leave at once; when they are there, right factors follow."""

    def __init__(self, comm: Comm, name: str, op: str, kept: _Kept, parts: Sequence[torch.Tensor], under_way: list[_LowRank]) -> None:
        self._comm, self._name, self._op, self._kept, self._parts, self._under_way = comm, name, op, kept, parts, under_way
        self._whole = torch.cat([parts[i].reshape(-1) for i in kept.whole]) if kept.whole else None
        for m in kept.matrices:
            m.left_out.add_(self._matrix(m))  # from here on it holds what is to be sent
        self._lefts = _joined([m.left_out @ m.right for m in kept.matrices])
        self._rights: torch.Tensor | None = None
        self._first = [comm.all_reduce(t, n, op) for t, n in ((self._whole, name), (self._lefts, f"{name}.p")) if t is not None]
        self._second: Pending | None = None

    def wait(self) -> bool:
        for call in self._under_way:  # everyone waits for them in the order in which they left
            call.follow()
        self._under_way.clear()
        if self._second is not None:
            self._second.wait()
            self._second = None
            self._rebuild()
        return True

    def follow(self) -> None:
        """Left factors are there: make them orthogonal, and send the right ones."""
        for pending in self._first:
            pending.wait()
        if self._whole is not None:
            sizes = [self._parts[i].numel() for i in self._kept.whole]
            for i, piece in zip(self._kept.whole, self._whole.split(sizes), strict=True):
                self._parts[i].copy_(piece.view_as(self._parts[i]))
        if self._lefts is not None:
            lefts = _apart(self._lefts, [(m.shape[0], m.shape[2]) for m in self._kept.matrices])
            for left in lefts:
                left.copy_(torch.linalg.qr(left).Q)
            self._rights = _joined([m.left_out.t() @ left for m, left in zip(self._kept.matrices, lefts, strict=True)])
            assert self._rights is not None
            self._second = self._comm.all_reduce(self._rights, f"{self._name}.q", self._op)

    def _rebuild(self) -> None:
        """The product of both factors is the gradient; a rank keeps what its own differs from the mean by."""
        assert self._lefts is not None and self._rights is not None
        lefts = _apart(self._lefts, [(m.shape[0], m.shape[2]) for m in self._kept.matrices])
        rights = _apart(self._rights, [(m.shape[1], m.shape[2]) for m in self._kept.matrices])
        share = 1.0 if self._op == "mean" else 1.0 / self._comm.size
        for m, left, right in zip(self._kept.matrices, lefts, rights, strict=True):
            m.right.copy_(right)
            found = left @ right.t()
            m.left_out.sub_(found, alpha=share)
            self._matrix(m).copy_(found)

    def _matrix(self, matrix: _Matrix) -> torch.Tensor:
        return self._parts[matrix.at].view(*matrix.shape[:2])


def _joined(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat([m.reshape(-1) for m in matrices]) if matrices else None


def _apart(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [piece.view(shape) for piece, shape in zip(flat.split([a * b for a, b in shapes]), shapes, strict=True)]
