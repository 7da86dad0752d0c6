"""Norms over a sharded feature dim: each rank sums over its own shard, and a collective combines one or two numbers per row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.comm import Comm
from meshwright.execute.autograd_collectives import AllReduceBothPasses
from meshwright.execute.module_hooks import Decorator, run_forward_in
from meshwright.execute.recompute_runtime import RecomputeCache


class NormCollective(NamedTuple):
    """The group that statistics are summed over, the name of its collectives, and the cache that replays their results during recompute."""

    comm: Comm
    name: str
    cache: RecomputeCache


def shard_norm(module: nn.Module, shard_sizes: list[int], collective: NormCollective, eager: Decorator) -> None:
    """Patch `module.forward` so that norms and means over its last dim, which is sharded, are taken over the full dim."""
    mode = _ShardedNormMode(shard_sizes, collective)
    run_forward_in(module, lambda: mode, eager)


class _ShardedNormMode(TorchFunctionMode):
    def __init__(self, shard_sizes: list[int], collective: NormCollective) -> None:
        super().__init__()
        self.full_size, self.local_size, self.collective = sum(shard_sizes), shard_sizes[collective.comm.rank], collective
        self.fractions = [n / self.full_size for n in shard_sizes]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "layer_norm":
            return self._layer_norm(*args, **kwargs)
        if name == "rms_norm":
            return self._rms_norm(*args, **kwargs)
        if name == "mean" and self._is_over_sharded_dim(*args, **kwargs):
            return self._mean(args[0], keepdim=bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))).to(args[0].dtype)
        return func(*args, **kwargs)

    def _is_over_sharded_dim(self, x: Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        return x.shape[-1] == self.local_size and [d % x.dim() for d in dims] == [x.dim() - 1]

    def _mean(self, x: Tensor, keepdim: bool = True) -> Tensor:
        """The mean over all ranks' shards, in fp32 at least."""
        total: Tensor = AllReduceBothPasses.apply(upcast(x).sum(-1, keepdim=keepdim), *self.collective)
        return total / self.full_size

    def _layer_norm(self, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any) -> Tensor:
        return _scale_and_shift(x, _ShardedLayerNorm.apply(upcast(x), eps, self.fractions, self.collective), weight, bias)

    def _rms_norm(self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        smallest = torch.finfo(x.dtype).eps if eps is None else eps
        return _scale_and_shift(x, upcast(x) * torch.rsqrt(self._mean(upcast(x).square()) + smallest), weight, None)


class _ShardedLayerNorm(torch.autograd.Function):
    """(x − mean) / deviation. Ranks all-gather the means and variances of their shards in one call and combine them. Sums of squares would need
    one call too, but lose precision to cancellation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, fractions: list[float], collective: NormCollective) -> Tensor:
        comm, name, cache = collective
        ctx.comm, ctx.name, ctx.fraction = comm, name, fractions[comm.rank]
        local_mean = x.mean(-1, keepdim=True)
        centred = x - local_mean
        local_moments = torch.stack([local_mean, centred.square().mean(-1, keepdim=True)])
        mean, variance = combine_moments(cache.run_or_replay(lambda: gather_moments(local_moments, comm, name)), fractions)
        inverse = torch.rsqrt(variance + eps)
        out = torch.addcmul((local_mean - mean) * inverse, centred, inverse)
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        out, inverse = ctx.saved_tensors
        sums = torch.stack([grad.mean(-1, keepdim=True), (grad * out).mean(-1, keepdim=True)]).mul_(ctx.fraction)
        ctx.comm.sync.all_reduce(sums, ctx.name).wait()
        return (grad - sums[0]).addcmul_(out, sums[1], value=-1).mul_(inverse), None, None, None


def gather_moments(local_moments: Tensor, comm: Comm, name: str) -> Tensor:
    """All ranks' moments, from this rank's mean and variance."""
    moments = local_moments.new_empty((comm.size, *local_moments.shape))
    comm.sync.all_gather(moments.view(-1), local_moments.view(-1), name).wait()
    return moments


def combine_moments(moments: Tensor, fractions: list[float]) -> tuple[Tensor, Tensor]:
    """(mean, variance) of all ranks' elements; `fractions` says which part of them each rank has."""
    means, variances = moments.unbind(1)
    weights = moments.new_tensor(fractions).view(-1, *[1] * (means.dim() - 1))
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0)


def upcast(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _scale_and_shift(x: Tensor, normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Apply weight and bias; return the dtype that torch's own norms return: autocast on CUDA runs them in fp32."""
    if weight is not None and bias is not None and weight.dtype == bias.dtype == normalized.dtype:
        normalized = torch.addcmul(bias, normalized, weight)
    else:
        normalized = normalized if weight is None else normalized * weight
        normalized = normalized if bias is None else normalized + bias
    return normalized if x.is_cuda and torch.is_autocast_enabled("cuda") else normalized.to(x.dtype)
