"""An all-to-all that gradients go back through: rows travel to their owners and results home, in backward the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.core.comm import Comm
from meshwright.execute.recompute import Recall


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str, receives: Sequence[int], sends: Sequence[int], recall: Recall) -> torch.Tensor:
        ctx.comm, ctx.name, ctx.receives, ctx.sends = comm, name, receives, sends
        # Recomputing stops after the last tensor that was kept. One is kept here on every rank alike, or some would stop before
        # the exchange that others wait in.
        ctx.save_for_backward(x.new_empty(0))
        return recall.meet(lambda: _sent(x, comm, name, receives, sends))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _sent(grad, ctx.comm, ctx.name, ctx.sends, ctx.receives), None, None, None, None, None


def exchange(x: torch.Tensor, comm: Comm, name: str, receives: Sequence[int], sends: Sequence[int], recall: Recall) -> torch.Tensor:
    """`sends[r]` rows of `x` go to rank r; what comes back holds `receives[r]` rows from it. Collective, and so is its backward: every
    rank takes part in that, whether its own rows have a gradient or not."""
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()
    return _Exchange.apply(x, comm, name, receives, sends, recall)  # type: ignore[no-any-return]


def exchange_numbers(x: torch.Tensor, comm: Comm, name: str, receives: Sequence[int], sends: Sequence[int], recall: Recall) -> torch.Tensor:
    """The same for indices and counts, which have no gradient."""
    return recall.meet(lambda: _sent(x, comm, name, receives, sends))


def _sent(x: torch.Tensor, comm: Comm, name: str, receives: Sequence[int], sends: Sequence[int]) -> torch.Tensor:
    out = x.new_empty((sum(receives), *x.shape[1:]))
    comm.at_once.all_to_all(out, x.contiguous(), name, receives, sends).wait()
    return out
