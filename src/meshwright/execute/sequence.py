"""Positions that tensor-parallel ranks share outside of cut parts, as autograd sees them (see [Note: sequence])."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.core.comm import Comm, Pending
from meshwright.core.tensor import Along, TensorPolicy, piece
from meshwright.execute.doors import Change, at_door, at_output
from meshwright.execute.meet import gather_pieces
from meshwright.execute.recompute import Recall


class Positions:
    """How many positions the sequence has that runs now; all regions of one strand share it. A batch may be shorter than the planner's."""

    def __init__(self, comm: Comm, length: int) -> None:
        self.comm, self.length = comm, length

    @property
    def counts(self) -> list[int]:
        return [piece(self.length, rank, self.comm.size)[1] for rank in range(self.comm.size)]


class Share:
    """Positions along one dim of one kind of tensor: from all of them to this rank's, and back."""

    def __init__(self, positions: Positions, along: Along, name: str) -> None:
        self.positions, self.comm, self.along, self.name = positions, positions.comm, along, name

    def note(self, whole: torch.Tensor) -> None:
        """A whole tensor tells how long its sequence is."""
        if not self.along.mixed:
            self.positions.length = whole.shape[self.along.dim] // self.along.inner

    def now(self) -> Share:
        """The same for the sequence that runs now, whatever runs before backward comes."""
        return Share(Positions(self.comm, self.positions.length), self.along, self.name)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's positions of a whole tensor."""
        first, count = piece(self.positions.length, self.comm.rank, self.comm.size)
        return self._joined(self._apart(whole, self.positions.length).narrow(self.along.dim + 1, first, count)).contiguous()

    def whole_shape(self, held: torch.Tensor) -> list[int]:
        mine = self.positions.counts[self.comm.rank]
        return [n // mine * self.positions.length if d == self.along.dim else n for d, n in enumerate(held.shape)]

    def gathered(self, held: torch.Tensor) -> torch.Tensor:
        """All positions, of which every rank has given its own."""
        counts, dim = self.positions.counts, self.along.dim + 1
        pieces = gather_pieces(self._apart(held, counts[self.comm.rank]), self.comm, dim, counts, self.name)
        return self._joined(torch.cat(pieces, dim))

    def scatter(self, partial: torch.Tensor, comm: Comm | None = None) -> Scattered:
        """Partial sums of all positions are under way to become the sums of this rank's; over another `comm` of the group if there is one."""
        counts = self.positions.counts
        most, front = max(counts), self._apart(partial, self.positions.length).movedim(self.along.dim + 1, 0)
        if min(counts) < most:  # backends scatter equal pieces only
            padded = front.new_zeros((len(counts) * most, *front.shape[1:]))
            for rank, run in enumerate(front.split(counts)):
                padded[rank * most : rank * most + len(run)] = run
            front = padded
        out = front.new_empty((most, *front.shape[1:]))
        sent = front.contiguous()
        sent = sent.clone() if sent.data_ptr() == partial.data_ptr() else sent  # others may use it still
        return Scattered(self, out, sent, (comm or self.comm).reduce_scatter(out, sent, self.name))

    def _apart(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return x.unflatten(self.along.dim, (-1, length, self.along.inner))

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(self.along.dim, self.along.dim + 2)

    def received(self, out: torch.Tensor) -> torch.Tensor:
        count = self.positions.counts[self.comm.rank]
        return self._joined(out.narrow(0, 0, count).movedim(0, self.along.dim + 1)).contiguous()


class Scattered:
    """A reduce-scatter under way; it keeps what is sent alive."""

    def __init__(self, share: Share, out: torch.Tensor, sent: torch.Tensor, pending: Pending) -> None:
        self._share, self._out, self._sent, self._pending = share, out, sent, pending

    def wait(self) -> torch.Tensor:
        self._pending.wait()
        return self._share.received(self._out)


class SumMine(torch.autograd.Function):
    """Partial sums of all positions going in; the sums of this rank's come out. Each rank has the gradient of its own; all are needed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: Share, recall: Recall) -> torch.Tensor:
        share.note(x)
        ctx.share = share.now()
        return recall.meet(lambda: share.scatter(x, share.comm.at_once).wait())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.gathered(grad), None, None


class EnterAll(torch.autograd.Function):
    """This rank's positions going in, all of them coming out, for a cut part; the gradients of its pieces are summed for their owners."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: Share, recall: Recall) -> torch.Tensor:
        ctx.share = share.now()
        return recall.meet(lambda: share.gathered(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.scatter(grad, ctx.share.comm.at_once).wait(), None, None


class Deal(torch.autograd.Function):
    """All positions going in, this rank's coming out; their gradients come back from all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: Share) -> torch.Tensor:
        share.note(x)
        ctx.share = share.now()
        return share.mine(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.gathered(grad), None


class Collect(EnterAll):
    """The same for what every rank does alike: of the gradient, it keeps its own."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.mine(grad), None, None


class Region:
    """All that one axis of ranks shares the positions of."""

    def __init__(self, policy: TensorPolicy, comm: Comm) -> None:
        self._strands = {s.name: Positions(comm, s.size) for s in policy.strands if not s.cuts}

    def share(self, along: Along, name: str) -> Share:
        return Share(self._strands[along.strand], along, name)

    def arrange(self, modules: dict[str, nn.Module], policy: TensorPolicy, apart: Callable[..., Any], recall: Recall) -> None:
        """Values that are dealt out and collected at modules' doors, and random numbers that must not depend on ranks."""
        for meet in policy.deals:
            assert meet.along is not None
            at_door(modules[meet.module], meet.position, _dealing(self.share(meet.along, f"deal/{meet.module}")), apart)
        for meet in policy.collects:
            assert meet.along is not None
            place = at_output if meet.at_output else at_door
            place(modules[meet.module], meet.position, _collecting(self.share(meet.along, f"collect/{meet.module}"), recall), apart)
        for mask in policy.masks:
            _mask_all(modules[mask.module], self.share(mask.along, mask.module), apart)


def _dealing(share: Share) -> Change:
    return lambda x: Deal.apply(x, share)  # type: ignore[no-any-return]


def _collecting(share: Share, recall: Recall) -> Change:
    return lambda x: Collect.apply(x, share, recall)  # type: ignore[no-any-return]


def _mask_all(module: nn.Module, share: Share, apart: Callable[..., Any]) -> None:
    """A module that multiplies by random numbers draws them for all positions, as one device would, and uses this rank's."""
    inner = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return inner(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            mask = share.mine(inner(torch.ones(share.whole_shape(x), dtype=x.dtype, device=x.device)))
        return x * mask

    module.forward = apart(forward)
