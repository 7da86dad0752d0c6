"""What worker processes do in tests of context parallelism: a model that counts positions in every way there is, in a session and in a loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.execute.full_state import full_state
from meshwright.execute.session import Session
from meshwright.launch import Rendezvous, join_process_group, leave_process_group

S, D, HEADS = 12, 8, 2


class EveryWay(nn.Module):
    """Positions from parameters of that length, from slices of longer tables and buffers, from ranges; and sizes spelt out in the code."""

    cosines: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.head = nn.Embedding(17, D), nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 17)
        self.held = nn.Parameter(torch.randn(1, S, D))
        self.even = nn.Parameter(torch.randn(2 * S, D))
        self.odd = nn.Parameter(torch.randn(S + 3, D))
        self.register_buffer("cosines", torch.randn(4 * S + 1, D // HEADS))

    def attend(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).view(x.shape[0], S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        rotation = self.cosines[None, 2 : 2 + length]
        y = F.scaled_dot_product_attention(q * rotation, k * rotation, v, **how)
        return self.out(y.transpose(1, 2).reshape(-1, length, D))  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.held + self.even[:length] + self.odd.narrow(0, 1, length) + torch.ones(length, 1)
        x = x * (1 + torch.arange(1, length + 1, device=x.device).to(x.dtype).unsqueeze(-1) / S)
        x = x + self.attend(x, is_causal=True)
        return self.head(x + self.attend(x, scale=0.3))  # type: ignore[no-any-return]


def counted_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels, weight = batch
    each = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
    return (each * weight).sum(), weight.sum()


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, labels, _ = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def _batch(step: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, 17, (4, S), generator=made), torch.randint(0, 17, (4, S), generator=made)
    labels[:, :2] = -100
    return tokens, labels, torch.rand(4, S, generator=made, dtype=torch.float64)


def every_way(rank: int, world: int, init_method: str, loop: bool) -> dict[str, Any]:
    """Three steps in a session by sum and count, or in a loop of one's own by means; the losses, a validation, the final state."""
    torch.set_num_threads(1)
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        torch.manual_seed(0)
        network = EveryWay().double()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        loss_fn = mean_loss if loop else counted_loss
        plan = Plan("alone", 4, memory=MemoryPolicy(precision="fp64"))
        if world > 1:
            plan = mw.plan_for(network, _batch(0), loss_fn, world=world, mesh=Mesh(cp=world)).best.plan
            plan = replace(plan, memory=MemoryPolicy(precision="fp64"))
        if loop:
            return _own_loop(network, optimizer, plan)
        session = Session(plan, network, optimizer, clip=1.0)
        losses = [float(session.step(_batch(step), loss_fn).loss) for step in range(3)]
        losses.append(session.validate([_batch(9), _batch(10)], loss_fn))
        return {"losses": losses, "state": {n: t.sum().item() for n, t in full_state(session.applied)}}
    finally:
        leave_process_group()


def _own_loop(network: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, Any]:
    applied = mw.parallelize(network, optimizer, plan)
    losses = []
    for step in range(3):
        tokens, labels, _ = applied.local(_batch(step))
        kept = labels != -100
        total = F.cross_entropy(network(tokens).flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
        count = kept.sum().double()
        applied.groups.data.all_reduce(count, "count").wait()
        loss = total / count
        (loss * applied.groups.data.size).backward()  # gradients are averaged over ranks
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach()
        applied.groups.data.all_reduce(shown, "shown").wait()
        losses.append(float(shown))
    return {"losses": losses, "state": {n: t.sum().item() for n, t in full_state(applied)}}
