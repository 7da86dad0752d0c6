"""Meetings as autograd sees them: what tensor-parallel ranks exchange in forward, and what that means for the gradient in backward."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.core.comm import Comm
from meshwright.execute.recompute import Recall


class Enter(torch.autograd.Function):
    """Whole going in; the gradients of the ranks' parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str) -> torch.Tensor:
        ctx.comm, ctx.name = comm, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        ctx.comm.at_once.all_reduce(grad, ctx.name).wait()
        return grad, None, None


class Sum(torch.autograd.Function):
    """Partial sums going in; the sum comes out, and its gradient is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str, recall: Recall) -> torch.Tensor:
        def make() -> torch.Tensor:
            out = x.contiguous()
            if recall.keeps:
                out = out.data  # the product is kept: what is kept of it becomes the sum, and must not count as changed
            elif out is x:
                ctx.mark_dirty(x)
            comm.at_once.all_reduce(out, name).wait()
            return out

        return recall.meet(make)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None, None, None


class Everywhere(torch.autograd.Function):
    """Partial sums going in; the sum comes out, and ranks use it for parts of what follows: its gradients are partial too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str, recall: Recall) -> torch.Tensor:
        ctx.comm, ctx.name = comm, name
        return Sum.forward(ctx, x, comm, name, recall)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return *Enter.backward(ctx, grad), None


class Gather(torch.autograd.Function):
    """Pieces of the last dim going in; the whole comes out. Every rank has the same gradient of it and keeps its piece."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, sizes: list[int], name: str, recall: Recall) -> torch.Tensor:
        ctx.first, ctx.count = sum(sizes[: comm.rank]), sizes[comm.rank]
        return recall.meet(lambda: torch.cat(gather_pieces(x, comm, x.dim() - 1, sizes, name), -1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.narrow(-1, ctx.first, ctx.count).contiguous(), None, None, None, None


def gather_pieces(piece: torch.Tensor, comm: Comm, dim: int, sizes: list[int], name: str = "whole") -> list[torch.Tensor]:
    """All ranks' pieces. Backends gather equal sizes only, so shorter ones travel padded. Each travels as it lies in memory: to turn a
    large one round for a dim that is not its first costs more than the journey."""
    mine, short = piece.detach(), max(sizes) - piece.shape[dim]
    if short:
        shape = [short if d == dim else n for d, n in enumerate(mine.shape)]
        mine = torch.cat([mine, mine.new_zeros(shape)], dim)
    every = mine.new_empty((comm.size, *mine.shape))
    comm.at_once.all_gather(every.view(-1), mine.contiguous().view(-1), name).wait()
    return [every[rank].narrow(dim, 0, n) for rank, n in enumerate(sizes)]
