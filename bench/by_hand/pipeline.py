"""A pipeline: two stage modules for torch's own schedule, and the tied embedding's gradients summed over both ends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from by_hand.data import GPT, gpt_job
from by_hand.ours import Step
from cases import optimizer_of
from meshwright.core.mesh import Mesh
from meshwright.zoo import gpt
from rounds import Batch, Trial

MICRO = 4


def pipeline(block: str, rank: int, world: int) -> Trial:
    job = gpt_job(GPT)
    plan = job.plan(Mesh(pp=world), micro=MICRO)
    cut = int(plan.stages[1].entry.rpartition(".")[2])  # where Meshwright cuts: the comparison is of what is done there
    return Trial(list(job.engines(block, lambda: _staged(rank, cut), plan, ())), lambda number: GPT.data(0, number))


class _First(nn.Module):
    def __init__(self, model: gpt.GPT, blocks: int) -> None:
        super().__init__()
        self.embedding, self.blocks = model.embedding, model.blocks[:blocks]

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class _Last(nn.Module):
    def __init__(self, model: gpt.GPT, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[blocks:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def _staged(rank: int, cut: int) -> Step:
    model = GPT.model()
    part: nn.Module = _First(model, cut) if rank == 0 else _Last(model, cut)
    tied, optimizer = model.embedding.tokens.weight, optimizer_of(part)
    samples = GPT.batch // MICRO
    hidden = torch.empty(samples, GPT.seq, GPT.width, device="meta", requires_grad=True)
    tokens, logits = torch.empty(samples, GPT.seq, dtype=torch.int64, device="meta"), torch.empty(samples, GPT.seq, GPT.vocab, device="meta")
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
