"""Parameters that have a shape and no memory yet; see [Note: born sharded] in birth.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn, zeros


class Placeholders:
    """Replaces a model's meta tensors: parameters by views of one element, buffers, which are small, by memory of their own. An optimizer that was
    made for the model steps the new parameters."""

    def __init__(self, model: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._elements: dict[torch.dtype, Tensor] = {}
        self._device = device
        replace_meta_tensors(model, lambda _, tensor: self._like(tensor), optimizer)

    def _like(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.dtype not in self._elements:
            self._elements[tensor.dtype] = zeros(1, dtype=tensor.dtype, device=self._device)
        return self._elements[tensor.dtype].expand(tensor.shape) if tensor.dim() else self._elements[tensor.dtype].new_zeros(())

    def give_memory(self, model: nn.Module) -> None:
        """Allocate the parameters that are placeholders still."""
        pointers = {element.data_ptr() for element in self._elements.values()}
        for param in model.parameters():
            if param.data_ptr() in pointers:
                param.data = torch.empty(param.shape, dtype=param.dtype, device=self._device)


def is_placeholder(param: Tensor) -> bool:
    return param.untyped_storage().nbytes() < param.nbytes


def replace_meta_tensors(
    model: nn.Module, make: Callable[[str, Tensor], Tensor | None], optimizer: torch.optim.Optimizer | None = None
) -> None:  # fmt: skip
    """Replace parameters and buffers on meta by what `make` returns for their name, wherever they are registered, and in the optimizer's groups;
    None leaves one as it is. A tensor on meta cannot be given memory in place."""
    new: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in new:
                    made = make(f"{prefix}.{key}" if prefix else key, tensor)
                    if made is None:
                        continue
                    new[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                registry[key] = new[id(tensor)]  # type: ignore[assignment]
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [new.get(id(p), p) for p in group["params"]]
