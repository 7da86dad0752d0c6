"""Collectives of tensor parallelism as autograd functions: what ranks exchange in forward, and the gradient's collective in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.core.comm import Comm
from meshwright.execute.recompute_runtime import RecomputeCache


class CopyToTensorParallel(torch.autograd.Function):
    """Forward is the identity; backward all-reduces the ranks' partial gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        ctx.comm.sync.all_reduce(grad, ctx.name).wait()
        return grad, None, None


class ReduceFromTensorParallel(torch.autograd.Function):
    """Forward all-reduces partial sums; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str, cache: RecomputeCache) -> Tensor:
        def all_reduce() -> Tensor:
            out = x.contiguous()
            if cache.is_active:
                out = out.data  # selective recompute has saved this tensor: it becomes the sum, and must not count as modified
            elif out is x:
                ctx.mark_dirty(x)
            comm.sync.all_reduce(out, name).wait()
            return out

        return cache.run_or_replay(all_reduce)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None, None, None


class AllReduceBothPasses(torch.autograd.Function):
    """Forward all-reduces partial sums; backward all-reduces the gradient too, because each rank uses the sum for a part of what follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str, cache: RecomputeCache) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return ReduceFromTensorParallel.forward(ctx, x, comm, name, cache)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return *CopyToTensorParallel.backward(ctx, grad), None


class GatherFromTensorParallel(torch.autograd.Function):
    """Forward all-gathers shards of the last dim; backward keeps this rank's shard of the gradient, which is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, sizes: list[int], name: str, cache: RecomputeCache) -> Tensor:
        ctx.first, ctx.count = sum(sizes[: comm.rank]), sizes[comm.rank]
        return cache.run_or_replay(lambda: torch.cat(all_gather_uneven(x, comm, x.dim() - 1, sizes, name), -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.narrow(-1, ctx.first, ctx.count).contiguous(), None, None, None, None


def all_gather_uneven(shard: Tensor, comm: Comm, dim: int, sizes: list[int], name: str = "whole") -> list[Tensor]:
    """All ranks' shards. Backends gather equal sizes only, so shorter ones are padded. Each is sent in its own memory layout: transposing a large
    one for a dim that is not its first costs more than the transfer."""
    shard, padding = shard.detach(), max(sizes) - shard.shape[dim]
    if padding:
        shard = torch.cat([shard, shard.new_zeros([padding if d == dim else n for d, n in enumerate(shard.shape)])], dim)
    shards = shard.new_empty((comm.size, *shard.shape))
    comm.sync.all_gather(shards.view(-1), shard.contiguous().view(-1), name).wait()
    return [shards[rank].narrow(dim, 0, n) for rank, n in enumerate(sizes)]
