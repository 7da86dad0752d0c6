"""A differentiable all-to-all: forward sends rows to other ranks, backward sends their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.core.comm import Comm
from meshwright.execute.recompute_runtime import RecomputeCache


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str, recv_counts: Sequence[int], send_counts: Sequence[int], cache: RecomputeCache) -> Tensor:
        ctx.comm, ctx.name, ctx.recv_counts, ctx.send_counts = comm, name, recv_counts, send_counts
        # Recomputation stops after the last tensor saved for backward. Every rank saves one here, or some would stop before this collective while
        # others wait in it.
        ctx.save_for_backward(x.new_empty(0))
        return all_to_all_no_grad(x, comm, name, recv_counts, send_counts, cache)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _run_all_to_all(grad, ctx.comm, ctx.name, ctx.send_counts, ctx.recv_counts), None, None, None, None, None


def all_to_all(x: Tensor, comm: Comm, name: str, recv_counts: Sequence[int], send_counts: Sequence[int], cache: RecomputeCache) -> Tensor:
    """Send `send_counts[r]` rows of `x` to rank r and receive `recv_counts[r]` rows from it. Collective, and so is its backward: every rank takes
    part in it, whether or not its own rows have a gradient."""
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()
    return _AllToAll.apply(x, comm, name, recv_counts, send_counts, cache)


def all_to_all_no_grad(x: Tensor, comm: Comm, name: str, recv_counts: Sequence[int], send_counts: Sequence[int], cache: RecomputeCache) -> Tensor:
    """`all_to_all` for indices and counts, which have no gradient."""
    return cache.run_or_replay(lambda: _run_all_to_all(x, comm, name, recv_counts, send_counts))


def _run_all_to_all(x: Tensor, comm: Comm, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> Tensor:
    out = x.new_empty((sum(recv_counts), *x.shape[1:]))
    comm.sync.all_to_all(out, x.contiguous(), name, recv_counts, send_counts).wait()
    return out
