"""Weights of linear layers in 8 bits, for inference: a scale for each output, activations as they are. Reading weights is what a next token takes.

[Note: quantized linear layers]
A layer is prepared before its model is cut, so that code that reduces its product over ranks calls the layer's own matmul. Weights are quantized when
they have their values, on each rank its own. The layer's `weight` is then an int8 or fp8 tensor, which code that looks at its dtype knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.serve_policy import Quantization
from meshwright.execute.module_hooks import add_bias

_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_PACKED_WIDTH = 32  # torch's int8 product on a CPU reads beyond the end of rows that are no multiple of its vectors, and crashes (torch 2.13)
_MOST_PACKED_ROWS = 12  # of activations, for which torch's int8 product on a CPU is quicker than converting the weight (1,536 × 576 on a Xeon)


def prepare_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The linear layers of a model that run torch's own code, with a matmul that takes quantized weights. Call it before the model is cut."""
    layers = tuple(layer for layer in model.modules() if _transposes(layer) is not None and "forward" not in vars(layer))
    for layer in layers:
        _prepare(layer, bool(_transposes(layer)))
    return layers


@torch.no_grad()
def quantize_layers(layers: tuple[nn.Module, ...], kind: Quantization) -> int:
    """Quantize the weights of prepared layers, one after the other; returns the bytes that they take now. A weight that an embedding shares stays
    there as it was."""
    total = 0
    for layer in layers:
        weight: Any = layer._parameters.pop("weight")
        quantized, scale = quantize(weight.t() if _transposes(layer) else weight, _DTYPES[kind])
        layer.register_buffer("weight", quantized)
        layer.register_buffer("weight_scale", scale)
        total += quantized.nbytes + scale.nbytes
        del weight
    return total


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weight in 8 bits, the scale of each of its rows)."""
    scale = weight.float().abs().amax(1).clamp_min(1e-12) / _LARGEST[dtype]
    scaled = weight.float() / scale.unsqueeze(1)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype).contiguous(), scale.to(weight.dtype)


def _transposes(layer: nn.Module) -> bool | None:
    """Whether a linear layer holds its weight transposed, as transformers' Conv1D does; None for other modules."""
    if type(layer) is nn.Linear:
        return False
    return True if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") else None


def _prepare(layer: nn.Module, transposed: bool) -> None:
    def own_matmul(x: Tensor) -> Tensor:
        weight: Any = layer.weight
        if weight.dtype not in _LARGEST:
            return F.linear(x, weight.t() if transposed else weight)
        return quantized_linear(x, weight, layer.weight_scale)  # type: ignore[arg-type]

    layer.own_matmul = own_matmul  # type: ignore[assignment]
    layer.forward = lambda x: add_bias(layer, own_matmul(x))


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x @ weight.T for a weight in 8 bits. A compiler on a GPU reads the weight as it is, and converts it in registers."""
    rows = x.numel() // x.shape[-1]
    if weight.dtype == torch.int8 and x.device.type == "cpu" and rows <= _MOST_PACKED_ROWS and x.shape[-1] % _PACKED_WIDTH == 0:
        packed = torch._weight_int8pack_mm(x.reshape(rows, -1).bfloat16(), weight, scale.bfloat16())
        return packed.to(x.dtype).unflatten(0, x.shape[:-1])
    return F.linear(x, weight.to(x.dtype)) * scale
