"""A mixture and tables as somebody might write them, in plain torch and all in one precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

EXPERTS, WIDTH, ROWS = 5, 6, (40, 30, 20, 10)
_LENGTHS = (1, 3, 2)  # indices a sample gives to each lookup


class Experts(nn.Module):
    """Each token through the experts that it chose. Choices come first here, and the number of experts is in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.number = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)

    def forward(self, choices: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert self.up.shape[0] == self.number
        hidden = torch.einsum("tkfd,td->tkf", self.up[choices], tokens) + self.bias[choices]
        made = torch.einsum("tkdf,tkf->tkd", self.down[choices], hidden.tanh())
        return (made * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    """Two layers of experts; `skewed` sends all tokens to the first two experts."""

    def __init__(self, skewed: bool) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(2))
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.skew = 100.0 if skewed else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        for router, experts in zip(self.routers, self.experts, strict=True):
            preference = torch.arange(EXPERTS, device=x.device, dtype=x.dtype) < 2
            scores = (router(tokens) + self.skew * preference).softmax(-1)
            weights, choices = scores.topk(2)
            tokens = tokens + experts(choices, tokens, weights)
        return tokens.view_as(x)


class Tables(nn.Module):
    """Tables of unlike sizes, one of them looked up twice, and one of bags; an MLP comes before the last is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(n, WIDTH) for n in ROWS[:3])
        self.bag = nn.EmbeddingBag(ROWS[3], 2 * WIDTH, mode="mean")
        self.before, self.after = nn.Linear(4, WIDTH), nn.Linear(6 * WIDTH, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        one, some, pair = sparse.split(_LENGTHS, dim=1)
        first = self.words[0](one.flatten())
        dense = self.before(dense).tanh()
        again = self.words[0](pair).sum(1)
        parts = [first, dense, again, self.words[1](some).sum(1) * self.words[2](one).squeeze(1), self.bag(some)]
        return self.after(torch.cat(parts, 1)).squeeze(1)


def build(kind: str) -> tuple[nn.Module, Any]:
    if kind == "tables":
        return Tables(), lambda m, b: (m(b["dense"], b["sparse"]) - b["y"]).square().mean()
    return Mixture(kind == "skewed"), lambda m, b: (m(b["x"]) - b["y"]).square().mean()


def batch(kind: str, size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if kind == "tables":
        dense, y = (torch.randn(size, *shape, generator=generator, dtype=torch.float64) for shape in ((4,), ()))
        return {"dense": dense, "sparse": torch.randint(0, min(ROWS), (size, sum(_LENGTHS)), generator=generator), "y": y}
    x, y = (torch.randn(size, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x, "y": y}
