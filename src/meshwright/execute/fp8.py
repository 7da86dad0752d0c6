"""FP8: linear layers inside a model's units compute their three matmuls in fp8; the layers are patched in place.

[Note: one scale per tensor]
Each operand is divided by its current largest magnitude, so that it fills fp8's range: e4m3 for activations and weights, e5m2, which has more
range, for gradients. One scale serves a tensor in all of its matmuls; per-row scales would need every operand twice (its rows are the other
matmul's columns), and their kernels are slower. A weight is converted again in backward instead of saved: under ZeRO-3 a saved copy of every
unit's weights would undo the sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.cluster import FP8_MIN_CAPABILITY
from meshwright.execute.module_hooks import add_bias

FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
SIZE_MULTIPLE = 16  # the kernels need every size to be a multiple of this


@dataclass(frozen=True)
class Fp8Layers:
    """What `convert_to_fp8` did: the layers it changed, and why the other linear layers of the units stay in bf16."""

    converted: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def has_fp8(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() >= FP8_MIN_CAPABILITY


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x in fp8, the scale to multiply it by). The largest magnitude maps to the dtype's largest number, which bf16 can represent too."""
    low, high = torch.aminmax(x)  # one pass; a norm would be computed in float32 under autocast
    scale = torch.maximum(-low, high).float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x * scale.reciprocal()).to(dtype), scale


def _scaled_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """a (rows × inner) times b (columns × inner). The kernels need both contiguous, with the inner dim last."""
    a, b = a.contiguous(), b.contiguous()
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation)


class Fp8Matmul(torch.autograd.Function):
    """x @ weight.T in fp8, and both of its gradients. `x` is (rows, in), `weight` (out, in); the output has x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = to_fp8(x, FORWARD_DTYPE)
        weight8, weight_scale = to_fp8(weight, FORWARD_DTYPE)
        ctx.save_for_backward(x8, x_scale, weight)
        ctx.dtype = x.dtype
        return _scaled_matmul(x8, x_scale, weight8, weight_scale, x.dtype, fast_accumulation=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x8, x_scale, weight = ctx.saved_tensors
        grad8, grad_scale = to_fp8(grad, BACKWARD_DTYPE)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            weight8, weight_scale = to_fp8(weight, FORWARD_DTYPE)
            x_grad = _scaled_matmul(grad8, grad_scale, weight8.t(), weight_scale, ctx.dtype, fast_accumulation=False)
        if ctx.needs_input_grad[1]:
            weight_grad = _scaled_matmul(grad8.t(), grad_scale, x8.t(), x_scale, weight.dtype, fast_accumulation=False)
        return x_grad, weight_grad


def convert_to_fp8(model: nn.Module, units: Iterable[str], dtype: torch.dtype = torch.bfloat16) -> Fp8Layers:
    """Convert the linear layers inside `units`, in place; arithmetic around them is in `dtype`. Call it before the model is sharded: a layer
    reads its sizes when it is called, and has its matmul as `own_matmul` for code that reduces it over ranks."""
    converted, skipped = [], {}
    modules = dict(model.named_modules())
    for unit in units:
        for name, layer in modules[unit].named_modules(prefix=unit):
            transposed = type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")  # transformers' linear layer
            if type(layer) is not nn.Linear and not transposed:
                continue
            reason = "it is a unit by itself, which may be the head" if name == unit else _unsupported_reason(layer.weight)
            if reason:
                skipped[name] = reason
                continue
            converted.append(name)
            _convert_layer(layer, transposed, dtype)
    return Fp8Layers(tuple(converted), skipped)


def _unsupported_reason(weight: Any) -> str:
    wrong = [size for size in weight.shape if size % SIZE_MULTIPLE]
    return f"its matrix is {'×'.join(map(str, weight.shape))}, and {wrong[0]} is no multiple of {SIZE_MULTIPLE}" if wrong else ""


def _convert_layer(layer: nn.Module, transposed: bool, dtype: torch.dtype) -> None:
    """Patch a layer. If fp8 does not support a tensor-parallel shard's sizes or the number of rows, the matmul runs without fp8."""

    def own_matmul(x: Tensor) -> Tensor:
        weight: Any = layer.weight
        weight = weight.t() if transposed else weight
        rows = x.numel() // x.shape[-1]
        if rows % SIZE_MULTIPLE or _unsupported_reason(weight):
            return F.linear(x, weight)
        return Fp8Matmul.apply(x.to(dtype).reshape(rows, x.shape[-1]), weight).unflatten(0, x.shape[:-1])

    layer.own_matmul = own_matmul  # type: ignore[assignment]
    layer.forward = lambda x: add_bias(layer, own_matmul(x))
