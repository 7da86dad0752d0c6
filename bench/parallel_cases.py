"""The engines that `parallel.py` compares: tensor parallelism and a pipeline, written by hand in torch and by Meshwright, on one model and batch.

What is written by hand is what a careful person writes for this one model: column and row layers with their two reductions, two stage
modules for torch's pipelining, the tied embedding's gradients summed over both ends. Meshwright is given the module and finds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from cases import Batch, Case, Engine, _by_hand, _optimizer
from meshwright.core.mesh import Mesh
from meshwright.core.plan import OVERLAPS, Overlap, Plan, SyncPolicy
from meshwright.describe.flow import trace_module_flow
from meshwright.describe.trace import trace_module
from meshwright.execute.session import Session
from meshwright.plan import choose_cuts, cut_stages
from meshwright.zoo.gpt import GPT
from meshwright.zoo.losses import next_token

TENSOR, PIPELINE, DATA = "tensor parallel", "pipeline, 1f1b, 4 micro-batches", "data parallel, overlap"
MICRO = 4


@dataclass(frozen=True)
class Shared(Case):
    """Every rank of a tensor-parallel or pipeline group takes the same samples."""

    batch: int = 4
    layers: int = 4

    def tokens(self, block: str, world: int) -> int:
        return self.batch * self.seq * (world if block == DATA else 1)

    def data(self, rank: int, number: int) -> Batch:
        return super().data(0, number)


def engines(case: Shared, rank: int, world: int) -> Iterator[Engine]:
    """The second of a block is the first again: what a ratio means."""
    yield Engine("by hand", TENSOR, tensor_by_hand(case, rank, world))
    yield Engine("by hand, again", TENSOR, tensor_by_hand(case, rank, world))
    yield Engine("Meshwright", TENSOR, ours(case, Mesh(tp=(world,)), 1))
    yield Engine("by hand", PIPELINE, pipeline_by_hand(case, rank, world))
    yield Engine("by hand, again", PIPELINE, pipeline_by_hand(case, rank, world))
    yield Engine("Meshwright", PIPELINE, ours(case, Mesh(pp=world), MICRO))
    yield Engine("Meshwright", DATA, ours(case, Mesh(dp=world), 1))
    yield Engine("Meshwright, again", DATA, ours(case, Mesh(dp=world), 1))
    yield Engine("Meshwright, no overlap", DATA, ours(case, Mesh(dp=world), 1, overlap=()))


def ours(case: Shared, mesh: Mesh, micro: int, overlap: tuple[Overlap, ...] = OVERLAPS) -> Callable[[Batch], Tensor]:
    model = case.model()
    plan = Plan("gpt", case.batch * mesh.data_width, mesh, micro, sync=SyncPolicy(overlap=overlap))
    example = case.data(0, 0)
    if mesh.size > mesh.data_width:
        flow, profile = trace_module_flow(model, next_token, example), trace_module(model, next_token, example, name="gpt")
        # The embedding and the head are left whole by hand too.
        cuts = choose_cuts(flow, mesh.degree("tp"), {"embedding": "whole", "head": "whole"}) if mesh.degree("tp") > 1 else plan.tensor
        stages = cut_stages(flow, profile, mesh.pp, cuts) if mesh.pp > 1 else ()
        plan = Plan("gpt", case.batch, mesh, micro, stages, tensor=cuts)
    session = Session(plan, model, _optimizer(model))
    return lambda batch: session.step(batch, next_token).loss


# -- tensor parallelism by hand --


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _Column(nn.Module):
    def __init__(self, whole: nn.Linear, rank: int, world: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(world, 0)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(world, 0)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copy.apply(x), self.weight, self.bias)


class _Row(nn.Module):
    def __init__(self, whole: nn.Linear, rank: int, world: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return _Reduce.apply(F.linear(x, self.weight)) + self.bias  # type: ignore[no-any-return]


def tensor_by_hand(case: Shared, rank: int, world: int) -> Callable[[Batch], Tensor]:
    model = case.model()
    for block in model.blocks:
        block.attention.qkv = _Column(block.attention.qkv, rank, world)
        block.attention.output = _Row(block.attention.output, rank, world)
        block.mlp.up = _Column(block.mlp.up, rank, world)
        block.mlp.down = _Row(block.mlp.down, rank, world)
    return _by_hand(model, _optimizer(model))


# -- a pipeline by hand --


class _First(nn.Module):
    def __init__(self, model: GPT, blocks: int) -> None:
        super().__init__()
        self.embedding, self.blocks = model.embedding, model.blocks[:blocks]

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class _Last(nn.Module):
    def __init__(self, model: GPT, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[blocks:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def pipeline_by_hand(case: Shared, rank: int, world: int) -> Callable[[Batch], Tensor]:
    assert world == 2
    model = case.model()
    example = case.data(0, 0)
    made = trace_module_flow(model, next_token, example), trace_module(model, next_token, example, name="gpt")
    cut = int(cut_stages(*made, 2)[1].entry.rpartition(".")[2])  # where Meshwright cuts: the comparison is of what is done there
    part: nn.Module = _First(model, cut) if rank == 0 else _Last(model, cut)
    tied = model.embedding.tokens.weight
    optimizer = _optimizer(part)
    samples = case.batch // MICRO
    hidden = torch.empty(samples, case.seq, case.width, device="meta", requires_grad=True)
    tokens, logits = torch.empty(samples, case.seq, dtype=torch.int64, device="meta"), torch.empty(samples, case.seq, case.vocab, device="meta")
    shapes = (tokens, hidden) if rank == 0 else (hidden, logits)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), input_args=shapes[0], output_args=shapes[1])

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten()) / MICRO

    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_fn, scale_grads=False)

    def step(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        whole = batch["tokens"]
        if rank == 0:
            schedule.step(whole[:, :-1], return_outputs=False)
        else:
            schedule.step(target=whole[:, 1:], losses=losses, return_outputs=False)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        assert tied.grad is not None
        dist.all_reduce(tied.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
