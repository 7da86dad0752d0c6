"""BatchNorm over the samples of all data ranks: forward, backward and running statistics are those of one device with the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.execute.module_hooks import eager_decorator, run_forward_in
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.sharded_norm import upcast
from meshwright.execute.spatial_parallel import affine_by_channel

_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def sync_batch_norms(model: nn.Module, plan: Plan, comm: Comm, cache: RecomputeCache) -> None:
    """Patch every module that runs `F.batch_norm`: those that the plan names, and BatchNorm layers."""
    modules = dict(model.named_modules())
    layers = {name for name, module in modules.items() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    names = {m.module for m in plan.samples.batch_norms} | layers
    if outside := names - modules.keys():
        raise RequestError(f"batchnorm=sync: BatchNorm runs outside of the model, in {min(outside)}: move it into the model, or set batchnorm=local")
    for name in sorted(names):
        mode = _SyncedBatchNormMode(comm, f"statistics/{name or 'model'}", cache)
        run_forward_in(modules[name], lambda mode=mode: mode, eager_decorator(plan.compile != "none"))  # type: ignore[misc]


class _SyncedBatchNormMode(TorchFunctionMode):
    """Replaces `F.batch_norm` in training."""

    def __init__(self, comm: Comm, name: str, cache: RecomputeCache) -> None:
        super().__init__()
        self._collective = comm, name, cache

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.batch_norm:
            return func(*args, **kwargs)
        given = {"training": False, "momentum": 0.1, "eps": 1e-5, **dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        return _batch_norm(given, *self._collective) if given["training"] else func(*args, **kwargs)


def _batch_norm(given: dict[str, Any], comm: Comm, name: str, cache: RecomputeCache) -> Tensor:
    x, running_mean = given["input"], given.get("running_mean")
    out, mean, variance, count = _Normalize.apply(upcast(x), given["eps"], comm, name, cache)
    if running_mean is not None:
        unbiased = variance * (count / (count - 1).clamp(min=1))
        running_mean.lerp_(mean.to(running_mean.dtype), given["momentum"])
        given["running_var"].lerp_(unbiased.to(running_mean.dtype), given["momentum"])
    return affine_by_channel(out, given.get("weight"), given.get("bias")).to(x.dtype)


class _Normalize(torch.autograd.Function):
    """(x − mean) / deviation over all ranks' samples; also returns mean, variance and count, which have no gradient. Ranks gather their means and
    variances: sums of squares would lose precision to cancellation. Counts are gathered too, since shares may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, comm: Comm, name: str, cache: RecomputeCache) -> tuple[Tensor, ...]:
        dims = (0, *range(2, x.dim()))
        local_variance, local_mean = torch.var_mean(x, dims, correction=0)
        local = torch.cat([local_mean, local_variance, local_mean.new_tensor([x.numel() / x.shape[1]])])

        def gather() -> Tensor:
            moments = local.new_empty((comm.size, local.numel()))
            comm.all_gather(moments.view(-1), local, name).wait()
            return moments

        moments = cache.run_or_replay(gather)
        means, variances, counts = moments.split([x.shape[1], x.shape[1], 1], 1)
        count = counts.sum()
        fractions = counts / count
        mean = (fractions * means).sum(0)
        variance = (fractions * (variances + (means - mean).square())).sum(0)
        shape = (1, -1, *[1] * (x.dim() - 2))
        inverse = torch.rsqrt(variance + eps).view(shape)
        out = (x - mean.view(shape)) * inverse
        ctx.dims, ctx.comm, ctx.name = dims, comm, name
        ctx.save_for_backward(out, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # type: ignore[override]
        out, inverse, count = ctx.saved_tensors
        sums = torch.stack([grad.sum(ctx.dims), (grad * out).sum(ctx.dims)])
        ctx.comm.all_reduce(sums, ctx.name).wait()
        mean_grad, mean_product = (sums / count).view(2, *inverse.shape)
        return (grad - mean_grad - out * mean_product) * inverse, None, None, None, None
