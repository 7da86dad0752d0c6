"""Tensor parallelism on a grid of 2 × 2 ranks: heads, hidden features and vocabulary over one axis, the features between layers over the
other; layer norms exchange their statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from by_hand.data import GPT, gpt_job
from by_hand.ours import Step
from by_hand.tensor import Copy, Reduce, shard_of
from cases import by_hand, optimizer_of
from meshwright.core.mesh import Mesh
from meshwright.zoo import gpt
from rounds import Trial


def grid(block: str, rank: int, world: int) -> Trial:
    job, mesh = gpt_job(GPT), init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))

    def sharded() -> Step:
        model = _shard_model(mesh.get_group("x"), mesh.get_group("y"))
        return by_hand(model, optimizer_of(model))

    return Trial(list(job.engines(block, sharded, job.plan(Mesh(tp=(2, 2))), ("inputs",))), lambda number: GPT.data(0, number))


def _shard_model(x: Any, y: Any) -> gpt.GPT:
    """Inside a block activations are sharded over `x`, between blocks over `y`."""
    model = GPT.model()
    for block in model.blocks:
        block.attention.qkv = _Product(block.attention.qkv, x, y)
        block.attention.output = _Product(block.attention.output, y, x)
        block.mlp.up = _Product(block.mlp.up, x, y)
        block.mlp.down = _Product(block.mlp.down, y, x)
        block.attention_norm = _Norm(block.attention_norm, y)
        block.mlp_norm = _Norm(block.mlp_norm, y)
    model.norm = _Norm(model.norm, y)
    model.embedding.tokens = _Table(model.embedding.tokens, x, y)
    model.embedding.positions = _Table(model.embedding.positions, x, y)
    model.head = _Head(model.embedding.tokens, x, y)
    return model


class _Product(nn.Module):
    """Outputs are sharded over one axis and inputs over the other: partial sums are reduced over the latter, input gradients over the former."""

    def __init__(self, linear: nn.Linear, outputs: Any, inputs: Any) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.weight = nn.Parameter(shard_of(shard_of(linear.weight, 0, outputs), 1, inputs).clone())
        self.bias = nn.Parameter(shard_of(linear.bias, 0, outputs).clone())

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(F.linear(Copy.apply(x, self.outputs), self.weight), self.inputs) + self.bias  # type: ignore[no-any-return]


class _Table(nn.Module):
    """Rows over one axis, features over the other; rows that a rank does not hold count as zeros."""

    def __init__(self, table: nn.Embedding, rows: Any, features: Any) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(shard_of(shard_of(table.weight, 0, rows), 1, features).clone())
        self.first = dist.get_rank(rows) * self.weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        is_local = (tokens >= self.first) & (tokens < self.first + self.weight.shape[0])
        vectors = F.embedding(torch.where(is_local, tokens - self.first, 0), self.weight)
        return Reduce.apply(vectors * is_local.unsqueeze(-1).to(vectors.dtype), self.rows)  # type: ignore[no-any-return]


class _Head(nn.Module):
    """The tied table as a matrix; logits are gathered over the vocabulary."""

    def __init__(self, table: _Table, vocabulary: Any, features: Any) -> None:
        super().__init__()
        self.weight, self.vocabulary, self.features = table.weight, vocabulary, features

    def forward(self, x: Tensor) -> Tensor:
        logits = Reduce.apply(F.linear(Copy.apply(x, self.vocabulary), self.weight), self.features)
        return _Gather.apply(logits, self.vocabulary)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        world = dist.get_world_size(group)
        gathered = x.new_empty((world * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x, group=group)
        return torch.cat(gathered.chunk(world), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return shard_of(grad, -1, ctx.group).contiguous(), None


class _Norm(nn.Module):
    def __init__(self, whole: nn.LayerNorm, group: Any) -> None:
        super().__init__()
        self.group, self.eps = group, whole.eps
        self.weight, self.bias = (nn.Parameter(shard_of(p, 0, group).clone()) for p in (whole.weight, whole.bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, _Normalise.apply(x, self.eps, self.group), self.weight)


class _Normalise(torch.autograd.Function):
    """(x − mean) / deviation over the last dim of all ranks' pieces, which are equal; their means and variances are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: Any) -> Tensor:
        ctx.group, ctx.world = group, dist.get_world_size(group)
        own = x.mean(-1, keepdim=True)
        centred = x - own
        mine = torch.stack([own, centred.square().mean(-1, keepdim=True)])
        every = mine.new_empty((ctx.world * 2, *own.shape))
        dist.all_gather_into_tensor(every, mine, group=group)
        means, variances = every.view(ctx.world, 2, *own.shape).unbind(1)
        mean = means.mean(0)
        inverse = (variances + (means - mean).square_()).mean(0).add_(eps).rsqrt_()
        out = torch.addcmul((own - mean).mul_(inverse), centred, inverse)
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        out, inverse = ctx.saved_tensors
        sums = torch.stack([grad.mean(-1, keepdim=True), (grad * out).mean(-1, keepdim=True)]).div_(ctx.world)
        dist.all_reduce(sums, group=ctx.group)
        return (grad - sums[0]).addcmul_(out, sums[1], value=-1).mul_(inverse), None, None
