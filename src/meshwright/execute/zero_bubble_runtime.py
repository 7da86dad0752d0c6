"""Split backward (zero bubble): makes every parameter of a stage visible to torch when it splits backward into input and weight gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _DependOnInputs(torch.autograd.Function):
    """Identity on a stage's outputs that makes them depend on its inputs. To split backward, torch searches parameters between inputs and
    outputs, and would miss those that no input leads to, such as a decoder's beginning beside the encoder's end. It takes all outputs at once,
    because torch's parameter groups must not intersect in two places."""

    @staticmethod
    def forward(ctx: Any, num_outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.num_inputs = len(tensors) - num_outputs
        return tuple(t.clone() for t in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return None, *grads, *(None,) * ctx.num_inputs


def depend_on_inputs(outputs: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with_grad, inputs = [t for t in outputs if t.requires_grad], [t for t in received if t.requires_grad]
    if not with_grad or not inputs:
        return outputs
    dependent = iter(_DependOnInputs.apply(len(with_grad), *with_grad, *inputs))
    return tuple(next(dependent) if t.requires_grad else t for t in outputs)
