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
from torch import Tensor, nn

from meshwright.core.comm import Comm, Work
from meshwright.execute.module_hooks import TensorFn, add_bias
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.sequence_parallel import PendingReduceScatter, SequenceShard

_ATTRIBUTE = "_deferred_weight_grad"  # a layer's DeferredWeightGrad, kept until its next call, so that recompute finds it


class DeferredWeightGrad:
    """A weight for one forward, and the operands of its gradient."""

    def __init__(self, weight: Tensor, transposed: bool) -> None:
        self.operands: list[tuple[Tensor, Tensor]] = []
        self.transposed = transposed  # the weight is (inputs, outputs), as in transformers' Conv1D
        self.weight: Tensor = _ComputeWeightGrad.apply(weight, self)

    def matmul(self, x: Tensor) -> Tensor:
        """The product of an input and the weight, in the dtype that autocast would choose."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _DeferringMatmul.apply(x, self.weight, self)


class _ComputeWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, deferred: DeferredWeightGrad) -> Tensor:
        ctx.deferred, ctx.dtype = deferred, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        total: Tensor | None = None
        while ctx.deferred.operands:
            left, right = ctx.deferred.operands.pop()
            grad = left.flatten(0, -2).t() @ right.flatten(0, -2)
            total = grad if total is None else total + grad
        assert total is not None
        return total.to(ctx.dtype), None


class _DeferringMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredWeightGrad) -> Tensor:
        ctx.deferred = deferred
        ctx.save_for_backward(x, weight)
        matrix = weight.to(x.dtype)
        return x @ (matrix if deferred.transposed else matrix.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        matrix = weight.to(x.dtype)
        ctx.deferred.operands.append((x, grad) if ctx.deferred.transposed else (grad, x))
        placeholder = weight.new_zeros(()).expand_as(weight)  # `_ComputeWeightGrad` has the gradient; autograd only needs its shape
        return grad @ (matrix.t() if ctx.deferred.transposed else matrix), placeholder, None


class _WaitInputGrad(torch.autograd.Function):
    """Forward copies an input, or all-gathers its positions if it is sequence-sharded; backward waits for the reduction of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: list[Work | PendingReduceScatter], shard: SequenceShard | None, cache: RecomputeCache) -> Tensor:
        ctx.pending, ctx.is_sharded = pending, shard is not None
        return x.view_as(x) if shard is None else cache.run_or_replay(lambda: shard.all_gather(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        reduced = ctx.pending.pop().wait()  # an all-reduce is in place
        return reduced if ctx.is_sharded else grad, None, None, None


class _LaunchInputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[[Tensor], None]) -> Tensor:
        ctx.launch = launch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        ctx.launch(grad)
        return grad, None


def copy_to_region_overlapped(
    x: Tensor, comm: Comm, name: str, shard: SequenceShard | None, layers: list[nn.Module], cache: RecomputeCache
) -> Tensor:  # fmt: skip
    """Copy an activation, or gather it if it is sequence-sharded, into a tensor-parallel region; the reduction of its gradient overlaps with the
    weight gradients of `layers`."""
    pending: list[Work | PendingReduceScatter] = []
    shard = shard.snapshot() if shard is not None else None
    x = _WaitInputGrad.apply(x, pending, shard, cache)
    for layer in layers:
        vars(layer)[_ATTRIBUTE] = DeferredWeightGrad(layer.weight, transposed=hasattr(layer, "nf"))  # type: ignore[arg-type]
    launch = lambda grad: pending.append(comm.all_reduce(grad, name) if shard is None else shard.reduce_scatter(grad))  # noqa: E731
    return _LaunchInputGrad.apply(x, launch)


def clear_deferred(layers: list[nn.Module]) -> None:
    """Remove the layers' deferred weight gradients, where no gradient is needed."""
    for layer in layers:
        vars(layer).pop(_ATTRIBUTE, None)


def defer_weight_grad(layer: nn.Module) -> None:
    """Make a layer whose output is not reduced use its DeferredWeightGrad, if it has one, and add its bias itself."""
    inner = layer.forward
    layer.forward = lambda x: add_bias(layer, vars(layer)[_ATTRIBUTE].matmul(x)) if _ATTRIBUTE in vars(layer) else inner(x)


def deferrable_matmul(layer: nn.Module, matmul: TensorFn) -> TensorFn:
    """A layer's matmul, through the DeferredWeightGrad that was made for this call, if there is one."""
    return lambda x: vars(layer)[_ATTRIBUTE].matmul(x) if _ATTRIBUTE in vars(layer) else matmul(x)
