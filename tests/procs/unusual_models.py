"""Models as somebody might write them, whose layers are not what their classes suggest; and a job that trains them under a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import meshwright as mw

WORDS, WIDTH, LENGTH, SAMPLES = 96, 16, 6, 32


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 4.0


class OffsetPositions(nn.Embedding):
    """Looks up places that it computes itself."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return super().forward(places + 2)


class ClippedLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.clamp(-1, 1), self.weight.tanh(), self.bias)


class PaddedConv(nn.Conv1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (1, 1)))


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Language(nn.Module):
    """A language model; `kind` says what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        embeddings = {"scaled embedding": ScaledEmbedding(WORDS, WIDTH), "renormalized embedding": nn.Embedding(WORDS, WIDTH, max_norm=0.5)}
        self.words = embeddings.get(kind) or nn.Embedding(WORDS, WIDTH)
        self.places = OffsetPositions(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(ClippedLinear if kind == "linear with its own forward" else nn.Linear) for _ in range(2))
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]) for _ in range(2)) if kind == "uncalled lists" else None
        self.single = nn.ModuleList([Block()]) if kind == "uncalled lists" else None
        self.conv = PaddedConv(WIDTH, WIDTH, 3) if kind == "conv with its own forward" else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind in ("scaled embedding", "renormalized embedding"):
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(tokens)
        for _ in range(3 if self.kind == "reused blocks" else 1):
            for block in self.blocks:
                x = block(x)
        for block, linear in self.pairs or ():  # type: ignore[misc]
            x = linear(block(x))
        for block in self.single or ():
            x = block(x)
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)  # type: ignore[no-any-return]


KINDS = (
    "scaled embedding", "renormalized embedding", "linear with its own forward", "conv with its own forward", "reused blocks", "uncalled lists",
)  # fmt: skip


def language_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].roll(1, 1).flatten())


def loader() -> DataLoader[Any]:
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    noise = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    return DataLoader([{"tokens": t, "noise": n} for t, n in zip(tokens, noise, strict=True)], batch_size=8)


def trained_alone(kind: str) -> list[float]:
    """The losses of a plain loop."""
    torch.manual_seed(0)
    model, losses = Language(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader():
        loss = language_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank: int, world: int, init_method: str, kind: str, mesh: str, **constraints: Any) -> list[float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        model, batches = Language(kind), loader()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = mw.plan_for(model, next(iter(batches)), language_loss, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
        run = mw.prepare(model, optimizer, batches, loss_fn=language_loss, plan=plan)
        return [float(run.step(batch, language_loss)) for batch in run.loader]
    finally:
        dist.destroy_process_group()


class Adversaries(nn.Module):
    """A generator and a discriminator, as small as they come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4))
        self.judge = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def judge_loss(self, judge: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        real, made = judge(batch["tokens"][:, :4] / WORDS), judge(self.maker(batch["noise"]).detach())
        return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))

    def maker_loss(self, maker: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        made = self.judge(maker(batch["noise"]))
        return F.binary_cross_entropy_with_logits(made, torch.ones_like(made))


def adversaries_alone() -> list[tuple[float, float]]:
    both, losses = Adversaries(), []
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (both.judge, both.maker)]
    for batch in loader():
        values = []
        for loss_fn, model, optimizer in zip((both.judge_loss, both.maker_loss), (both.judge, both.maker), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        losses.append((values[0], values[1]))
    return losses


def adversaries(rank: int, world: int, init_method: str, zero: int) -> list[tuple[float, float]]:
    """Two models that are prepared one by one; the generator's loss runs through the discriminator."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        both, batches = Adversaries(), loader()
        runs = []
        for model, loss_fn in ((both.judge, both.judge_loss), (both.maker, both.maker_loss)):
            mesh = mw.Mesh(shard=world) if zero else mw.Mesh(dp=world)
            plan = mw.plan_for(model, next(iter(batches)), loss_fn, world=world, mesh=mesh, zero=zero).best.plan
            runs.append(mw.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), batches, loss_fn=loss_fn, plan=plan))
        judge, maker = runs
        return [(float(judge.step(b, both.judge_loss)), float(maker.step(b, both.maker_loss))) for b in judge.loader]
    finally:
        dist.destroy_process_group()
