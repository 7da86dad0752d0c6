"""Modules that are run over a data set, in tests: with outputs of many kinds, and such that cannot be written."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.task import Batch, Field


class _Linear(nn.Module):
    fields: ClassVar[dict[str, Field]] = {"x": Field((4,))}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)


class Named(_Linear):
    """Outputs with names; two of its tensors have no row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Parameter(torch.zeros(2, 5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.linear(x)
        return {"scores": out, "pair": (out.argmax(1), out.max(1).values > 0), "two": self.two, "sum": out.sum(), "version": 3}


class Meeting(nn.Module):
    """Its samples meet: alone, each gives zero."""

    fields: ClassVar[dict[str, Field]] = {"x": Field((3,))}

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Spoilt(_Linear):
    """A classifier that gives NaN for some samples."""

    fields: ClassVar[dict[str, Field]] = {"x": Field((4,)), "label": Field((), "int64", 3)}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).masked_fill(x[:, :1] > 0.5, torch.nan)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["label"])


class Scalar(_Linear):
    """One number for all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean()


class Failing(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no\nsecret inside")


class NoFields(nn.Module):
    """Says nothing about what it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return x
