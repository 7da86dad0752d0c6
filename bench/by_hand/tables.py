"""Embedding tables at owners: indices travel to the rank that has the table, rows travel back; the perceptrons are replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from by_hand.ours import Job, Step
from cases import optimizer_of
from meshwright.core.mesh import Mesh
from meshwright.zoo.dlrm import DLRM, DLRMConfig
from meshwright.zoo.losses import click_loss
from rounds import Batch, Trial

_CONFIG = DLRMConfig(tables=8, rows=10_000, width=64, dense=64, bottom=(256, 128), top=(512, 256))
_SAMPLES = 2048


def tables(block: str, rank: int, world: int) -> Trial:
    job = Job(_dlrm, click_loss, _data(0, 0), _SAMPLES)
    plan = job.plan(Mesh(ep=world))
    owners = [table.ep_rank for table in plan.expert.tables]  # by hand the same rank has a table
    return Trial(list(job.engines(block, lambda: _owned(owners), plan, ("gradients",))), lambda number: _data(rank, number))


def _dlrm() -> DLRM:
    torch.manual_seed(0)
    return DLRM(_CONFIG)


def _data(rank: int, number: int) -> Batch:
    made = torch.Generator().manual_seed(1_000_003 * number + rank)
    dense, label = torch.randn(_SAMPLES, _CONFIG.dense, generator=made), torch.randint(0, 2, (_SAMPLES,), generator=made)
    return {"dense": dense, "label": label, "sparse": torch.randint(0, _CONFIG.rows, (_SAMPLES, _CONFIG.tables), generator=made)}


def _owned(owners: list[int]) -> Step:
    """As for experts, what is owned is no replica's, and its gradient is divided by the ranks."""
    model, world = _Owned(_dlrm(), owners), dist.get_world_size()
    held = {name: p for name, p in model.named_parameters() if name.startswith("tables.")}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(held))
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(replica)

    def step(batch: Batch) -> Tensor:
        loss = click_loss(replica, batch)
        loss.backward()
        torch._foreach_mul_([p.grad for p in held.values() if p.grad is not None], 1.0 / world)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class _Owned(nn.Module):
    def __init__(self, whole: DLRM, owners: list[int]) -> None:
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.by_owner = sorted(range(len(owners)), key=lambda table: owners[table])  # tables in the order in which indices travel
        self.places = [self.by_owner.index(table) for table in range(len(owners))]
        self.numbers = [owners.count(rank) for rank in range(self.world)]
        self.tables = nn.ModuleList(table for table, owner in zip(whole.tables, owners, strict=True) if owner == self.rank)
        self.bottom, self.top, self.interact = whole.bottom, whole.top, whole._pairwise_interaction

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *self._rows(sparse)], dim=1)
        top: Tensor = self.top(torch.cat((bottom, self.interact(vectors)), dim=1))
        return top.squeeze(1)

    def _rows(self, sparse: Tensor) -> list[Tensor]:
        asked = sparse.t()[self.by_owner].contiguous()
        mine = self.numbers[self.rank]
        there = asked.new_empty((self.world * mine, asked.shape[1]))
        dist.all_to_all_single(there, asked, [mine] * self.world, self.numbers)
        found = [table(part.contiguous()) for table, part in zip(self.tables, there.view(self.world, mine, -1).unbind(1), strict=True)]
        home = _Home.apply(torch.stack(found, 1).flatten(0, 1), self.numbers, mine)
        return [home[place] for place in self.places]


class _Home(torch.autograd.Function):
    """Every rank's rows, table by table, go back to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, numbers: list[int], mine: int) -> Tensor:
        ctx.numbers, ctx.mine = numbers, mine
        out = rows.new_empty((sum(numbers), *rows.shape[1:]))
        dist.all_to_all_single(out, rows, numbers, [mine] * len(numbers))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        out = grad.new_empty((len(ctx.numbers) * ctx.mine, *grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), [ctx.mine] * len(ctx.numbers), ctx.numbers)
        return out, None, None
