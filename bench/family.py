"""What a model of the sweep is: how to build it with a batch, and the losses that the libraries' models share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQ, IMAGE, VOCAB, WIDTH, HEADS = 4, 16, 32, 96, 32, 4
MAX_PARAMETERS = 40_000_000
Loss = Callable[[nn.Module, Any], Tensor]
Built = tuple[nn.Module, Any, Loss]


@dataclass(frozen=True)
class Family:
    """One kind of model: `build` returns the model, a global batch of `BATCH` samples and a loss."""

    library: str
    name: str
    build: Callable[[], Built]

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers computes from its labels."""
    return model(**batch).loss


def output_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared distance of a model's first floating-point output from a wave: from zero, a norm at the end would make it constant."""
    return distance_from_wave(
        first_tensor(model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch))
    )


def distance_from_wave(output: Tensor) -> Tensor:
    wave = torch.arange(output[0].numel(), device=output.device).cos().view(output.shape[1:])
    return (output.to(torch.promote_types(output.dtype, torch.float32)) - wave).square().mean()


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(first_tensor(model(inputs)), labels)


def first_tensor(output: Any) -> Tensor:
    """The first floating-point tensor of an output that depends on parameters."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else vars(output).values()
    for value in values:
        if isinstance(value, (Tensor, tuple, list)) or hasattr(value, "values"):
            try:
                found = first_tensor(value)
            except ValueError:
                continue
            if found.is_floating_point() and (found.requires_grad or not torch.is_grad_enabled()):
                return found
    raise ValueError("no floating-point output")


def image_batch(size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, size, size, generator=generator), torch.randint(0, classes, (BATCH,), generator=generator)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
