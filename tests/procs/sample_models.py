"""Models and losses in which samples of a batch are not independent, or whose divisor depends on the data; and a job that trains them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshwright as mw

WORDS, WIDTH, LENGTH, BATCH = 32, 8, 6, 8


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Attending(Language):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            heads = block(x).view(*tokens.shape, 2, WIDTH // 2).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x)  # type: ignore[no-any-return]


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.dense, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.last(self.dense(self.norm(self.conv(image)).relu().mean((2, 3))))  # type: ignore[no-any-return]


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.left(left), dim=-1) @ F.normalize(self.right(right), dim=-1).t() * 5.0


def _logits_and_labels(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()


def cross_entropy(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(*_logits_and_labels(model, batch))


def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits, labels = _logits_and_labels(model, batch)
    return 0.5 * F.cross_entropy(logits, labels, weight=torch.linspace(0.5, 2.0, WORDS), label_smoothing=0.1)


def divided(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    losses = F.cross_entropy(*_logits_and_labels(model, batch), reduction="none")
    mask = (batch["labels"].flatten() >= 0).float()
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def summed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return 0.01 * F.cross_entropy(*_logits_and_labels(model, batch), reduction="sum")


def own_labels(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["tokens"], labels=batch["labels"], use_cache=False).loss  # type: ignore[no-any-return]


def regression(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["image"].double()), batch["left"].double())


def contrastive(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["left"], batch["right"])
    targets = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))  # type: ignore[no-any-return]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=WORDS, max_position_embeddings=LENGTH))  # type: ignore[no-any-return]


KINDS: dict[str, tuple[Any, Any]] = {
    "cross entropy": (Language, cross_entropy),
    "weighted": (Language, weighted),
    "attending": (Attending, cross_entropy),
    "divided": (Language, divided),
    "summed": (Language, summed),
    "gpt2": (gpt2, own_labels),
    "llama": (llama, own_labels),
    "batch norm": (lambda: Convolutional().double(), regression),
    "contrastive": (TwoTowers, contrastive),
}


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Four batches whose samples have from no to all labels masked; in the third, the whole first half of the batch is masked."""
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
        labels = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
        labels[torch.arange(LENGTH)[None] < torch.arange(BATCH)[:, None] - step] = -100
        if step == 2:
            labels[: BATCH // 2] = -100
        images, left, right = (torch.randn(BATCH, *shape, generator=generator) for shape in ((1, 5, 5), (WIDTH,), (WIDTH,)))
        yield {"tokens": tokens, "labels": labels, "image": images * (1 + step), "left": left, "right": right}


def trained_alone(kind: str) -> tuple[list[float], list[float]]:
    """The losses of a plain loop, and the model's buffers after it."""
    torch.manual_seed(0)
    build, loss_fn = KINDS[kind]
    model, losses = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches():
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, _buffers(model)


def validated_alone(kind: str) -> float:
    """Mean loss over the unmasked targets of all batches."""
    torch.manual_seed(0)
    build, loss_fn = KINDS[kind]
    model = build().eval()
    counts = [int((batch["labels"] >= 0).sum()) for batch in batches()]
    with torch.no_grad():
        return sum(float(loss_fn(model, batch)) * count for batch, count in zip(batches(), counts, strict=True)) / sum(counts)


def _buffers(model: nn.Module) -> list[float]:
    return [float(x) for buffer in model.buffers() for x in buffer.flatten()]


def train(
    rank: int, world: int, init_method: str, kind: str, mesh: str = "", validate: bool = False, shares: tuple[int, ...] = (), **constraints: Any
) -> dict[str, Any]:
    """Train under a mesh, or under the planner's choice; returns what rank `rank` saw and printed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        build, loss_fn = KINDS[kind]
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        fixed = {"mesh": mw.Mesh.parse(mesh)} if mesh else {}
        plan = mw.plan_for(model, next(batches()), loss_fn, world=world, **fixed, **constraints).best.plan
        if shares:
            from dataclasses import replace

            plan = replace(plan, balance=replace(plan.balance, shares=shares))
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            run = mw.prepare(model, optimizer, list(batches()), loss_fn=loss_fn, plan=plan)
        result = {"printed": printed.getvalue(), "mesh": str(plan.mesh), "why": run.why, "micro_batches": plan.micro_batches}
        if validate:
            return result | {"validation": run.validate(list(batches()), loss_fn)}
        losses = [float(run.step(batch, loss_fn)) for batch in run.loader]
        return result | {"losses": losses, "buffers": _buffers(model)}
    finally:
        dist.destroy_process_group()


def loop_over_sums(rank: int, world: int, init_method: str) -> dict[str, Any]:
    """A loop of one's own, and validation, of a loss that is a sum; and what another loss is told."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        build, loss_fn = KINDS["summed"]
        model: Any = build()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = mw.plan_for(model, next(batches()), loss_fn, world=world, mesh=mw.Mesh(dp=world)).best.plan
        run = mw.prepare(model, optimizer, list(batches()), loss_fn=loss_fn, plan=plan)
        validation = run.validate(list(batches()), loss_fn)
        model, optimizer, loader = run
        losses = []
        for batch in loader:
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(mw.gather(loss.detach()).sum()))
        try:
            run.step(batch, KINDS["cross entropy"][1])
        except mw.RequestError as error:
            return {"losses": losses, "validation": validation, "told": str(error)}
        return {}
    finally:
        dist.destroy_process_group()
