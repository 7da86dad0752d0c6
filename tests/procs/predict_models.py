"""Modules that a server answers samples with, in tests: with and without fields, well-behaved and not."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.core.task import Batch, Field

DEADLY = 666.0  # ends the process of who computes it


class Named(nn.Module):
    """Takes a picture's features and a category in a call of its own kind, and gives outputs of many kinds."""

    fields: ClassVar[dict[str, Field]] = {"x": Field((4,)), "kind": Field((2,), "int64", 5), "flag": Field((), "bool"), "target": Field(())}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.table = nn.Embedding(5, 3)

    def forward(self, features: Tensor, extra: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        vectors = self.table(extra["kind"]).sum(1) * extra["flag"][:, None]
        out = self.linear(features) * scale + vectors
        return {"scores": out, "pair": (out.argmax(1), out.max(1).values > 0), "version": 3, "table": self.table.weight}

    def loss(self, batch: Batch) -> Tensor:
        out = self(batch["x"] * 2, {"kind": batch["kind"], "flag": batch["flag"]}, scale=0.5)
        return (out["scores"].sum(1) - batch["target"]).square().mean()


class Plain(nn.Module):
    """Says nothing about what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        out = self.linear(x)
        return out if gate is None else out * gate


class Meeting(nn.Module):
    """Its samples meet: each answer depends on the batch."""

    fields: ClassVar[dict[str, Field]] = {"x": Field((3,))}

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Deadly(nn.Module):
    """One number ends the process."""

    fields: ClassVar[dict[str, Field]] = {"x": Field((2,))}

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == DEADLY).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2


class Slow(nn.Module):
    """Takes its time, and cannot do with negative numbers."""

    fields: ClassVar[dict[str, Field]] = {"x": Field((2,))}

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative numbers\nsecret inside")
        torch.linalg.matrix_power(torch.eye(300) * 0.5, 60)
        return torch.where(x == 0.5, float("nan"), x * 3)
