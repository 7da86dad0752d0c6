"""Spatial parallelism: each rank has half of every volume's height; before a convolution neighbours swap the row at their border."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from by_hand.ours import Job, Step
from cases import by_hand, optimizer_of
from meshwright.core.mesh import Mesh
from meshwright.zoo.cosmoflow import CosmoFlow, CosmoFlowConfig
from meshwright.zoo.losses import regression_loss
from rounds import Batch, Trial

_CONFIG = CosmoFlowConfig(edge=32, filters=(16, 32, 64, 64, 64), dense=(64, 32))
_SAMPLES = 4
_HEIGHT = 3  # the dim that is cut


def spatial(block: str, rank: int, world: int) -> Trial:
    job = Job(_cosmoflow, regression_loss, _data(0), _SAMPLES)
    plan = job.plan(Mesh(cp=world))
    assert plan.spatial.grid == (1, world, 1) and [g.module for g in plan.spatial.gathers] == ["layers.4.conv"]  # as by hand
    return Trial(list(job.engines(block, lambda: _blocks(rank, world), plan, ("gradients",))), _data)


def _cosmoflow() -> CosmoFlow:
    torch.manual_seed(0)
    return CosmoFlow(_CONFIG)


def _data(number: int) -> Batch:
    made = torch.Generator().manual_seed(number)
    return {"volume": torch.randn(_SAMPLES, *_CONFIG.volume, generator=made), "target": torch.rand(_SAMPLES, _CONFIG.targets, generator=made)}


def _blocks(rank: int, world: int) -> Step:
    model = DistributedDataParallel(_Halves(_cosmoflow(), rank, world), gradient_as_bucket_view=True)
    return by_hand(model, optimizer_of(model), loss=regression_loss)


class _Halves(nn.Module):
    """All ranks have the same loss from the gathered volume on; DDP takes the mean of their gradients, so what flows back to a half counts
    twice."""

    def __init__(self, whole: CosmoFlow, rank: int, world: int) -> None:
        super().__init__()
        self.whole, self.rank, self.world = whole, rank, world

    def forward(self, volume: Tensor) -> Tensor:
        whole = self.whole
        x = volume.chunk(self.world, _HEIGHT)[self.rank].contiguous()
        *before, last = whole.layers
        for layer in before:
            x = F.max_pool3d(F.leaky_relu(self._convolve(layer.conv, x), 0.3), 2)
        x = _Gather.apply(self._convolve(last.conv, x), self.rank, self.world)
        x = F.max_pool3d(F.leaky_relu(x, 0.3), 2)
        x = F.leaky_relu(whole.dense1(x.flatten(1)), 0.3)
        x = F.leaky_relu(whole.dense2(x), 0.3)
        return 1.2 * torch.tanh(whole.output(x))

    def _convolve(self, conv: nn.Conv3d, x: Tensor) -> Tensor:
        return F.conv3d(_Halo.apply(x, self.rank), conv.weight, conv.bias, padding=(1, 0, 1))


class _Halo(torch.autograd.Function):
    """Between two ranks: the upper one lacks the row below its last, the lower one the row above its first; zeros at the outer border."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        height = x.shape[_HEIGHT]
        halo = _swap(x.narrow(_HEIGHT, height - 1 if rank == 0 else 0, 1), rank)
        border = torch.zeros_like(halo)
        return torch.cat([border, x, halo] if rank == 0 else [halo, x, border], _HEIGHT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        height = grad.shape[_HEIGHT] - 2
        given = _swap(grad.narrow(_HEIGHT, height + 1 if ctx.rank == 0 else 0, 1), ctx.rank)
        mine = grad.narrow(_HEIGHT, 1, height).contiguous()
        mine.narrow(_HEIGHT, height - 1 if ctx.rank == 0 else 0, 1).add_(given)
        return mine, None


def _swap(slab: Tensor, rank: int) -> Tensor:
    out = slab.contiguous()
    into = torch.empty_like(out)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]):
        work.wait()
    return into


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, world: int) -> Tensor:
        ctx.rank, ctx.world = rank, world
        every = x.new_empty((world * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(every, x.contiguous())
        return torch.cat(every.chunk(world), _HEIGHT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.chunk(ctx.world, _HEIGHT)[ctx.rank] * ctx.world, None, None
