"""Context parallelism: a rank has one chunk of positions from the front and one from the back; keys and values of all are gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from by_hand.data import GPT, gpt_job
from by_hand.ours import Step
from cases import optimizer_of
from meshwright.core.mesh import Mesh
from meshwright.zoo import gpt
from rounds import Batch, Trial


def context(block: str, rank: int, world: int) -> Trial:
    job = gpt_job(GPT)
    engines = job.engines(block, lambda: _positions(rank, world), job.plan(Mesh(cp=world)), ("gradients",))
    return Trial(list(engines), lambda number: GPT.data(0, number))


def _positions(rank: int, world: int) -> Step:
    chunk = GPT.seq // (2 * world)
    chunks = [[r, 2 * world - 1 - r] for r in range(world)]
    local = torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in chunks[rank]])
    model = GPT.model()
    model.embedding = _Embedding(model.embedding, local)
    for block in model.blocks:
        block.attention = _Attention(block.attention, chunk, chunks, rank)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(replica)

    def step(batch: Batch) -> Tensor:
        tokens = batch["tokens"]
        logits = replica(tokens[:, local])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, local + 1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class _Embedding(nn.Module):
    def __init__(self, embedding: gpt.TokenPositionEmbedding, local: Tensor) -> None:
        super().__init__()
        self.tokens, self.positions, self.local = embedding.tokens, embedding.positions, local

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions(self.local)
        return x


class _Attention(nn.Module):
    def __init__(self, attention: gpt.Attention, chunk: int, chunks: list[list[int]], rank: int) -> None:
        super().__init__()
        self.qkv, self.output, self.head_width = attention.qkv, attention.output, attention.head_width
        self.order = [c for r in chunks for c in r]  # chunks in the order in which ranks hold them
        self.indices = [self.order.index(c) for c in range(len(self.order))]
        self.parts = []
        for c in chunks[rank]:
            mask = None if c == 0 else torch.ones(chunk, (c + 1) * chunk, dtype=torch.bool).tril(c * chunk)
            self.parts.append(((c + 1) * chunk, mask))
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, 3, self.head_width)
        keys, values = _GatherKeyValues.apply(qkv[..., 1, :], qkv[..., 2, :], self.order, self.indices, self.chunk)
        outputs = []
        for query, (visible, mask) in zip(qkv[..., 0, :].transpose(1, 2).split(self.chunk, 2), self.parts, strict=True):
            outputs.append(
                F.scaled_dot_product_attention(query, keys[:, :, :visible], values[:, :, :visible], attn_mask=mask, is_causal=mask is None)
            )
        out: Tensor = self.output(torch.cat(outputs, 2).transpose(1, 2).reshape(batch, length, -1))
        return out


class _GatherKeyValues(torch.autograd.Function):
    """Keys and values (batch, local positions, heads, width) gathered to all positions (batch, heads, positions, width), in one call."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, order: list[int], indices: list[int], chunk: int) -> tuple[Tensor, Tensor]:
        ctx.order, ctx.chunk = order, chunk
        local = torch.stack([keys, values]).transpose(0, 2).contiguous()  # positions, batch, pair, heads, width
        gathered = local.new_empty((len(order) * chunk, *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local)
        chunks = gathered.split(chunk)
        full = torch.cat([chunks[p] for p in indices]).permute(2, 1, 3, 0, 4)
        return full[0], full[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        full = torch.stack(grads).permute(3, 1, 0, 2, 4)
        chunks = full.split(ctx.chunk)
        to_send = torch.cat([chunks[c] for c in ctx.order])
        local = to_send.new_empty((len(to_send) // dist.get_world_size(), *to_send.shape[1:]))
        dist.reduce_scatter_tensor(local, to_send)
        keys, values = local.transpose(0, 2)
        return keys, values, None, None, None
