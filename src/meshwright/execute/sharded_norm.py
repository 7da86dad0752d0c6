"""Norms over a sharded feature dim: each rank sums over its own shard, and a collective combines one or two numbers per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.core.comm import Comm
from meshwright.core.tensor_policy import ShardedDim
from meshwright.execute.autograd_collectives import AllReduceBothPasses
from meshwright.execute.recompute_runtime import RecomputeCache


class NormCollective(NamedTuple):
    """The group that statistics are summed over, the name of its collectives, and the cache that replays their results during recompute."""

    comm: Comm
    name: str
    recompute_cache: RecomputeCache


def shard_norm(
    module: nn.Module, sharded_dim: ShardedDim, collective: NormCollective, compiler_disabled: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Patch `module.forward` so that norms and means over its last dim, a shard of `sharded_dim`, are taken over the full dim."""
    pieces = [sharded_dim.shard_range(rank, collective.comm.size)[1] for rank in range(collective.comm.size)]
    mode, inner = _ShardedNormMode(pieces, collective), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    module.forward = compiler_disabled(forward)


class _ShardedNormMode(TorchFunctionMode):
    def __init__(self, shard_sizes: list[int], collective: NormCollective) -> None:
        super().__init__()
        self.full_size, self.local_size, self.collective = sum(shard_sizes), shard_sizes[collective.comm.rank], collective
        self.shares = [n / self.full_size for n in shard_sizes]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "layer_norm":
            return self._layer_norm(*args, **kwargs)
        if name == "rms_norm":
            return self._rms_norm(*args, **kwargs)
        if name == "mean" and self._is_over_sharded_dim(*args, **kwargs):
            return self._mean(args[0], keepdim=bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))).to(args[0].dtype)
        return func(*args, **kwargs)

    def _is_over_sharded_dim(self, x: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        return x.shape[-1] == self.local_size and [d % x.dim() for d in dims] == [x.dim() - 1]

    def _mean(self, x: torch.Tensor, keepdim: bool = True) -> torch.Tensor:
        """The mean over all ranks' shards, in fp32 at least."""
        total: torch.Tensor = AllReduceBothPasses.apply(_upcast(x).sum(-1, keepdim=keepdim), *self.collective)
        return total / self.full_size

    def _layer_norm(
        self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5, *_: Any
    ) -> torch.Tensor:
        return _scale_and_shift(x, _ShardedLayerNorm.apply(_upcast(x), eps, self.shares, self.collective), weight, bias)

    def _rms_norm(self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
        smallest = torch.finfo(x.dtype).eps if eps is None else eps
        return _scale_and_shift(x, _upcast(x) * torch.rsqrt(self._mean(_upcast(x).square()) + smallest), weight, None)


class _ShardedLayerNorm(torch.autograd.Function):
    """(x − mean) / deviation. Ranks all-gather the means and variances of their shards in one call and combine them. Sums of squares would need
    one call too, but lose precision to cancellation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, shares: list[float], collective: NormCollective) -> torch.Tensor:
        comm, name, recall = collective
        ctx.comm, ctx.name, ctx.share = comm, name, shares[comm.rank]
        own = x.mean(-1, keepdim=True)
        centred = x - own
        mine = torch.stack([own, centred.square().mean(-1, keepdim=True)])

        def make() -> torch.Tensor:
            every = mine.new_empty((comm.size, *mine.shape))
            comm.sync.all_gather(every.view(-1), mine.view(-1), name).wait()
            return every

        means, variances = recall.run_or_replay(make).unbind(1)
        weights = x.new_tensor(shares).view(-1, *[1] * x.dim())
        mean = (weights * means).sum(0)
        inverse = torch.rsqrt((weights * (variances + (means - mean).square())).sum(0) + eps)
        out = torch.addcmul((own - mean) * inverse, centred, inverse)
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        out, inverse = ctx.saved_tensors
        sums = torch.stack([grad.mean(-1, keepdim=True), (grad * out).mean(-1, keepdim=True)]).mul_(ctx.share)
        ctx.comm.sync.all_reduce(sums, ctx.name).wait()
        return (grad - sums[0]).addcmul_(out, sums[1], value=-1).mul_(inverse), None, None, None


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.element_size() < 4 else x


def _scale_and_shift(x: torch.Tensor, normalized: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply weight and bias; return the dtype that torch's own norms return: autocast on CUDA runs them in fp32."""
    if weight is not None and bias is not None and weight.dtype == bias.dtype == normalized.dtype:
        normalized = torch.addcmul(bias, normalized, weight)
    else:
        normalized = normalized if weight is None else normalized * weight
        normalized = normalized if bias is None else normalized + bias
    return normalized if x.is_cuda and torch.is_autocast_enabled("cuda") else normalized.to(x.dtype)
