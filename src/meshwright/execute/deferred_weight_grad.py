"""Deferred weight gradients: the gradient of a layer's input is reduced over ranks while the gradient of its weight is computed.

[Note: deferred weight gradients]
Autograd computes both gradients of a matmul in one node, which leaves nothing to overlap with the reduction of the input gradient. Here the
weight goes through a node of its own. The matmul's backward returns the input gradient and stores the operands of the weight gradient in a
`DeferredWeightGrad`. Autograd runs ready nodes in the reverse order of their creation, so they are created in this order: wait, deferred weights,
launch, matmuls. Backward then runs the matmuls, launches the reduction, computes the weight gradients, and waits. In another order less would
overlap, and the results would be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.core.comm import Comm, Work
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.sequence_parallel import PendingReduceScatter, SequenceShard

_LAYER_ATTRIBUTE = "_ticket"  # a layer's DeferredWeightGrad, kept until its next call, so that recompute finds it


class DeferredWeightGrad:
    """A weight for one forward, and the operands of its gradient."""

    def __init__(self, weight: torch.Tensor, transposed: bool) -> None:
        self.operands: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.transposed = transposed  # the weight is (inputs, outputs), as in transformers' Conv1D
        self.weight: torch.Tensor = _ComputeWeightGrad.apply(weight, self)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """The product of an input and the weight, in the dtype that autocast would choose."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        out: torch.Tensor = _DeferringMatmul.apply(x, self.weight, self)
        return out


class _ComputeWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, deferred: DeferredWeightGrad) -> torch.Tensor:
        ctx.ticket, ctx.kind = deferred, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        total: torch.Tensor | None = None
        while ctx.ticket.operands:
            left, right = ctx.ticket.operands.pop()
            part = left.flatten(0, -2).t() @ right.flatten(0, -2)
            total = part if total is None else total + part
        assert total is not None
        return total.to(ctx.kind), None


class _DeferringMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, deferred: DeferredWeightGrad) -> torch.Tensor:
        ctx.ticket = deferred
        ctx.save_for_backward(x, weight)
        matrix = weight.to(x.dtype)
        return x @ (matrix if deferred.transposed else matrix.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        matrix = weight.to(x.dtype)
        ctx.ticket.operands.append((x, grad) if ctx.ticket.transposed else (grad, x))
        nothing = weight.new_zeros(()).expand_as(weight)  # `_ComputeWeightGrad` has the gradient; autograd only needs its shape
        return grad @ (matrix.t() if ctx.ticket.transposed else matrix), nothing, None


class _WaitInputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: list[Work]) -> torch.Tensor:
        ctx.sent = pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        while ctx.sent:
            ctx.sent.pop().wait()
        return grad, None


class _GatherInputWaitGrad(torch.autograd.Function):
    """`_WaitInputGrad` for sequence-sharded inputs: forward all-gathers positions, backward waits for the sum of this rank's positions."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, pending: list[PendingReduceScatter], sequence_shard: SequenceShard, recompute_cache: RecomputeCache
    ) -> torch.Tensor:
        ctx.sent = pending
        return recompute_cache.run_or_replay(lambda: sequence_shard.all_gather(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.sent.pop().wait(), None, None, None


class _LaunchInputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, launch: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.send = launch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        ctx.send(grad)
        return grad, None


def copy_to_region_overlapped(
    x: torch.Tensor, reduce_over: SequenceShard | tuple[Comm, str], layers: list[nn.Module], recompute_cache: RecomputeCache
) -> torch.Tensor:
    """Copy an activation into a tensor-parallel region; the reduction of its gradient overlaps with the weight gradients of `layers`.
    `reduce_over` is the group and a name if every rank has the full activation, or its sequence shard."""
    sent: list[Any] = []
    reduce_over = reduce_over.snapshot() if isinstance(reduce_over, SequenceShard) else reduce_over
    x = _GatherInputWaitGrad.apply(x, sent, reduce_over, recompute_cache) if isinstance(reduce_over, SequenceShard) else _WaitInputGrad.apply(x, sent)
    for layer in layers:
        vars(layer)[_LAYER_ATTRIBUTE] = DeferredWeightGrad(layer.weight, transposed=hasattr(layer, "nf"))  # type: ignore[arg-type]
    start = reduce_over.reduce_scatter if isinstance(reduce_over, SequenceShard) else lambda grad: reduce_over[0].all_reduce(grad, reduce_over[1])
    return _LaunchInputGrad.apply(x, lambda grad: sent.append(start(grad)))  # type: ignore[no-any-return]


def clear_deferred(layers: list[nn.Module]) -> None:
    """Remove the layers' deferred weight gradients, where no gradient is needed."""
    for layer in layers:
        vars(layer).pop(_LAYER_ATTRIBUTE, None)


def defer_weight_grad(layer: nn.Module) -> None:
    """Make a layer whose output is not reduced use its DeferredWeightGrad, if it has one, and add its bias itself."""
    inner = layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        deferred: DeferredWeightGrad | None = vars(layer).get(_LAYER_ATTRIBUTE)
        if deferred is None:
            return inner(x)  # type: ignore[no-any-return]
        out = deferred.matmul(x)
        bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
        return out if bias is None else out + bias.to(out.dtype)

    layer.forward = forward


def deferrable_matmul(layer: nn.Module, matmul: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer's matmul, through the DeferredWeightGrad that was made for this call, if there is one."""

    def product(x: torch.Tensor) -> torch.Tensor:
        deferred: DeferredWeightGrad | None = vars(layer).get(_LAYER_ATTRIBUTE)
        return matmul(x) if deferred is None else deferred.matmul(x)

    return product
