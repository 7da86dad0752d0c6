"""Backward in two halves (zero bubble): what torch needs to find every parameter's part of it."""

from __future__ import annotations

from typing import Any

import torch


class _DependOnInputs(torch.autograd.Function):
    """A stage's outputs as they are, made to follow from its inputs. Where backward is cut in two, torch finds a parameter's part of it on
    the way from inputs to outputs, and would lose parameters of what no input leads to: a decoder's beginning beside the encoder's end.
    All outputs at once: torch's groups of parameters must not meet in two places."""

    @staticmethod
    def forward(ctx: Any, num_outputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.others = len(tensors) - num_outputs
        return tuple(t.clone() for t in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        return None, *grads, *(None,) * ctx.others


def depend_on_inputs(outputs: tuple[torch.Tensor, ...], received: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    learned, inputs = [t for t in outputs if t.requires_grad], [t for t in received if t.requires_grad]
    if not learned or not inputs:
        return outputs
    now = iter(_DependOnInputs.apply(len(learned), *learned, *inputs))
    return tuple(next(now) if t.requires_grad else t for t in outputs)
