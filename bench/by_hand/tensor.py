"""Tensor parallelism on a line of ranks: column and row layers with their two reductions; alone, under DDP, and under FSDP2, which is the
depth of a grid in three dimensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from by_hand.data import GPT, SMALL, gpt_job, units_of
from by_hand.ours import Step
from cases import Case, by_hand, optimizer_of
from meshwright.core.mesh import Mesh
from meshwright.zoo import gpt
from rounds import Trial

_REPLICATED = {"embedding": "replicate", "head": "replicate"}  # as by hand


def line(block: str, rank: int, world: int) -> Trial:
    job = gpt_job(GPT)

    def cut() -> Step:
        model = _cut(GPT, None)
        return by_hand(model, optimizer_of(model))

    engines = job.engines(block, cut, job.plan(Mesh(tp=(world,)), placements=_REPLICATED), ("inputs",))
    return Trial(list(engines), lambda number: GPT.data(0, number))


def hybrid(block: str, rank: int, world: int) -> Trial:
    job, mesh = gpt_job(SMALL), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def replicate() -> Step:
        model = DistributedDataParallel(_cut(SMALL, mesh.get_group("tp")), process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
        return by_hand(model, optimizer_of(model))

    engines = job.engines(block, replicate, job.plan(Mesh(dp=2, tp=(2,)), placements=_REPLICATED), ("gradients", "inputs"))
    return Trial(list(engines), lambda number: SMALL.data(rank // 2, number))


def depth(block: str, rank: int, world: int) -> Trial:
    job, mesh = gpt_job(SMALL), init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))

    def shard() -> Step:
        model = _cut(SMALL, mesh.get_group("tp"))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["shard"], reshard_after_forward=True)
        return by_hand(model, optimizer_of(model))

    plan = job.plan(Mesh(tp=(2, 1, 2)).canonical(), units=units_of(SMALL), placements=_REPLICATED)
    engines = job.engines(block, shard, plan, ("inputs", "gathers", "scatters"))
    return Trial(list(engines), lambda number: SMALL.data(rank // 2, number))


def _cut(case: Case, group: Any) -> gpt.GPT:
    model = case.model()
    for block in model.blocks:
        block.attention.qkv = Column(block.attention.qkv, group)
        block.attention.output = Row(block.attention.output, group)
        block.mlp.up = Column(block.mlp.up, group)
        block.mlp.down = Row(block.mlp.down, group)
    return model


class Copy(torch.autograd.Function):
    """Identity in forward; in backward the ranks' gradients are all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """All-reduces partial sums in forward; identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def shard_of(whole: Tensor, dim: int, group: Any) -> Tensor:
    return whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


class Column(nn.Module):
    def __init__(self, whole: nn.Linear, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(shard_of(whole.weight, 0, group).clone())
        self.bias = nn.Parameter(shard_of(whole.bias, 0, group).clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copy.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, whole: nn.Linear, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(shard_of(whole.weight, 1, group).clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(F.linear(x, self.weight), self.group) + self.bias  # type: ignore[no-any-return]
