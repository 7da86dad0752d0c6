"""Meetings as autograd sees them: what tensor-parallel ranks exchange in forward, and what that means for the gradient in backward."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.core.comm import Comm
from meshwright.execute.recompute_runtime import RecomputeCache


class CopyToTensorParallel(torch.autograd.Function):
    """Whole going in; the gradients of the ranks' parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str) -> torch.Tensor:
        ctx.comm, ctx.name = comm, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        ctx.comm.sync.all_reduce(grad, ctx.name).wait()
        return grad, None, None


class ReduceFromTensorParallel(torch.autograd.Function):
    """Partial sums going in; the sum comes out, and its gradient is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str, recompute_cache: RecomputeCache) -> torch.Tensor:
        def make() -> torch.Tensor:
            out = x.contiguous()
            if recompute_cache.is_active:
                out = out.data  # the product is kept: what is kept of it becomes the sum, and must not count as changed
            elif out is x:
                ctx.mark_dirty(x)
            comm.sync.all_reduce(out, name).wait()
            return out

        return recompute_cache.run_or_replay(make)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None, None, None


class AllReduceBothPasses(torch.autograd.Function):
    """Partial sums going in; the sum comes out, and ranks use it for parts of what follows: its gradients are partial too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str, recompute_cache: RecomputeCache) -> torch.Tensor:
        ctx.comm, ctx.name = comm, name
        return ReduceFromTensorParallel.forward(ctx, x, comm, name, recompute_cache)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return *CopyToTensorParallel.backward(ctx, grad), None


class GatherFromTensorParallel(torch.autograd.Function):
    """Pieces of the last dim going in; the whole comes out. Every rank has the same gradient of it and keeps its piece."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, sizes: list[int], name: str, recompute_cache: RecomputeCache) -> torch.Tensor:
        ctx.first, ctx.count = sum(sizes[: comm.rank]), sizes[comm.rank]
        return recompute_cache.run_or_replay(lambda: torch.cat(all_gather_uneven(x, comm, x.dim() - 1, sizes, name), -1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.narrow(-1, ctx.first, ctx.count).contiguous(), None, None, None, None


def all_gather_uneven(shard: torch.Tensor, comm: Comm, dim: int, sizes: list[int], name: str = "whole") -> list[torch.Tensor]:
    """All ranks' pieces. Backends gather equal sizes only, so shorter ones travel padded. Each travels as it lies in memory: to turn a
    large one round for a dim that is not its first costs more than the journey."""
    mine, short = shard.detach(), max(sizes) - shard.shape[dim]
    if short:
        shape = [short if d == dim else n for d, n in enumerate(mine.shape)]
        mine = torch.cat([mine, mine.new_zeros(shape)], dim)
    every = mine.new_empty((comm.size, *mine.shape))
    comm.sync.all_gather(every.view(-1), mine.contiguous().view(-1), name).wait()
    return [every[rank].narrow(dim, 0, n) for rank, n in enumerate(sizes)]
