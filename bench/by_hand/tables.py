"""Table-wise sharded embedding tables: indices are sent to the rank that holds the table, rows are sent back; the perceptrons are replicated."""

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
    owners = [table.ep_rank for table in plan.expert.tables]  # by hand, tables are on the same ranks
    return Trial(list(job.engines(block, lambda: _sharded_tables(owners), plan, ("gradients",))), lambda number: _data(rank, number))


def _dlrm() -> DLRM:
    torch.manual_seed(0)
    return DLRM(_CONFIG)


def _data(rank: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(1_000_003 * number + rank)
    dense, label = torch.randn(_SAMPLES, _CONFIG.dense, generator=generator), torch.randint(0, 2, (_SAMPLES,), generator=generator)
    return {"dense": dense, "label": label, "sparse": torch.randint(0, _CONFIG.rows, (_SAMPLES, _CONFIG.tables), generator=generator)}


def _sharded_tables(owners: list[int]) -> Step:
    """As for experts: DDP ignores the sharded tables, and their gradients are divided by the number of ranks."""
    model, world = _ShardedTables(_dlrm(), owners), dist.get_world_size()
    local = {name: p for name, p in model.named_parameters() if name.startswith("tables.")}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(local))
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(replica)

    def step(batch: Batch) -> Tensor:
        loss = click_loss(replica, batch)
        loss.backward()
        torch._foreach_mul_([p.grad for p in local.values() if p.grad is not None], 1.0 / world)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class _ShardedTables(nn.Module):
    def __init__(self, dlrm: DLRM, owners: list[int]) -> None:
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.by_owner = sorted(range(len(owners)), key=lambda table: owners[table])  # tables in the order in which indices are sent
        self.indices = [self.by_owner.index(table) for table in range(len(owners))]
        self.numbers = [owners.count(rank) for rank in range(self.world)]
        self.tables = nn.ModuleList(table for table, owner in zip(dlrm.tables, owners, strict=True) if owner == self.rank)
        self.bottom, self.top, self.interact = dlrm.bottom, dlrm.top, dlrm._pairwise_interaction

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *self._rows(sparse)], dim=1)
        top: Tensor = self.top(torch.cat((bottom, self.interact(vectors)), dim=1))
        return top.squeeze(1)

    def _rows(self, sparse: Tensor) -> list[Tensor]:
        to_send = sparse.t()[self.by_owner].contiguous()
        num_local = self.numbers[self.rank]
        received = to_send.new_empty((self.world * num_local, to_send.shape[1]))
        dist.all_to_all_single(received, to_send, [num_local] * self.world, self.numbers)
        rows = [table(ids.contiguous()) for table, ids in zip(self.tables, received.view(self.world, num_local, -1).unbind(1), strict=True)]
        returned = _ReturnRows.apply(torch.stack(rows, 1).flatten(0, 1), self.numbers, num_local)
        return [returned[i] for i in self.indices]


class _ReturnRows(torch.autograd.Function):
    """Sends each rank's rows back to it, table by table."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, numbers: list[int], num_local: int) -> Tensor:
        ctx.numbers, ctx.num_local = numbers, num_local
        out = rows.new_empty((sum(numbers), *rows.shape[1:]))
        dist.all_to_all_single(out, rows, numbers, [num_local] * len(numbers))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        out = grad.new_empty((len(ctx.numbers) * ctx.num_local, *grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), [ctx.num_local] * len(ctx.numbers), ctx.numbers)
        return out, None, None
