"""Optimizer offload: the optimizer's state in host memory.

Each stepped parameter has a copy on the host, and the optimizer is given the copies. Before a step, gradients are copied to the host; after it,
new values are copied back before anything gathers or uses them. A device then holds parameters and gradients, and the host the states and the
copies. Nothing else changes: ZeRO's stage decides which shards a rank steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import RequestError


class OptimizerOffload:
    """Connects the parameters that a rank steps with an optimizer that works on host copies of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise RequestError("offload=optimizer moves the optimizer's state: apply the plan before the optimizer's first step")
        self._copies: dict[nn.Parameter, nn.Parameter] = {}  # on the host, by the device's parameters
        for group in optimizer.param_groups:
            for param in group["params"]:
                copy = torch.empty_like(param, device="cpu", pin_memory=param.is_cuda).copy_(param.detach())
                self._copies[param] = nn.Parameter(copy, param.requires_grad)
            group["params"] = [self._copies[param] for param in group["params"]]
        self.device_parameters = list(self._copies)
        optimizer.register_step_pre_hook(lambda _optimizer, args, kwargs: self._copy_gradients_to_host(has_closure(args, kwargs)))
        handle = optimizer.register_step_post_hook(lambda *_: self._copy_params_to_device())
        hooks = optimizer._optimizer_step_post_hooks
        assert isinstance(hooks, OrderedDict)
        hooks.move_to_end(handle.id, last=False)  # before the hooks that gather stepped parameters
        zero_copies = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            zero_copies(set_to_none)
            for param in self.device_parameters:
                if param.grad is not None:
                    param.grad = None if set_to_none else param.grad.zero_()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def host_copy(self, param: nn.Parameter) -> nn.Parameter:
        """The host copy of a stepped parameter, by which the optimizer knows it."""
        return self._copies[param]

    def _copy_gradients_to_host(self, has_closure: bool) -> None:
        if has_closure:
            raise RequestError("offload=optimizer copies gradients before a step, and a closure computes them in it: call step() without one")
        for param, copy in self._copies.items():
            if param.grad is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = torch.empty_like(copy, pin_memory=param.is_cuda)
            copy.grad.copy_(param.grad, non_blocking=True)
        self._synchronize()

    def _copy_params_to_device(self) -> None:
        """Copy new values back, and drop the device's gradients: they are on the host too."""
        for param, copy in self._copies.items():
            param.data.copy_(copy.data, non_blocking=True)
            param.grad = None
        self._synchronize()

    def refresh_copies(self) -> None:
        """Copy the device's values to the host, after somebody has changed them."""
        for param, copy in self._copies.items():
            copy.data.copy_(param.data)

    def _synchronize(self) -> None:
        if self.device_parameters and self.device_parameters[0].is_cuda:
            torch.cuda.current_stream(self.device_parameters[0].device).synchronize()


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an optimizer's step, by the arguments that its hooks see, was given a closure."""
    return kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
