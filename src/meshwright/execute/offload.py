"""Optimizer offload: the optimizer's state in host memory.

Each stepped parameter has a copy on the host, and the optimizer is given the copies. Before a step, gradients are copied to the host; after it,
new values are copied back before anything gathers or uses them. A device then holds parameters and gradients, and the host the states and the
copies. Nothing else changes: ZeRO's stage decides which shards a rank steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.core.errors import RequestError


class OptimizerOffload:
    """Connects the parameters that a rank steps with an optimizer that works on host copies of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise RequestError("offload=optimizer moves the optimizer's state: apply the plan before the optimizer's first step")
        self.device_parameters: list[nn.Parameter] = []
        self._copies: dict[int, nn.Parameter] = {}
        for group in optimizer.param_groups:
            self.device_parameters += group["params"]
            group["params"] = [self._make_host_copy(param) for param in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: self._copy_gradients_to_host())
        back = optimizer.register_step_post_hook(lambda *_: self._copy_params_to_device())
        hooks = optimizer._optimizer_step_post_hooks
        assert isinstance(hooks, OrderedDict)
        hooks.move_to_end(back.id, last=False)  # before the hooks that gather stepped parameters

    def host_copy(self, param: nn.Parameter) -> nn.Parameter:
        """The host copy of a stepped parameter, by which the optimizer knows it."""
        return self._copies[id(param)]

    def _make_host_copy(self, param: nn.Parameter) -> nn.Parameter:
        there = torch.empty_like(param, device="cpu", pin_memory=param.is_cuda).copy_(param.detach())
        self._copies[id(param)] = nn.Parameter(there, param.requires_grad)
        return self._copies[id(param)]

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return ((param, self._copies[id(param)]) for param in self.device_parameters)

    def _copy_gradients_to_host(self) -> None:
        for param, copy in self._pairs():
            if param.grad is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = torch.empty_like(copy, pin_memory=param.is_cuda)
            copy.grad.copy_(param.grad, non_blocking=True)
        _synchronize(self.device_parameters)

    def _copy_params_to_device(self) -> None:
        """Copy new values back and drop the device's gradients: an optimizer's zero_grad would clear only the copies'."""
        for param, copy in self._pairs():
            param.data.copy_(copy.data, non_blocking=True)
            param.grad = None
        _synchronize(self.device_parameters)


def _synchronize(params: list[nn.Parameter]) -> None:
    if params and params[0].is_cuda:
        torch.cuda.current_stream(params[0].device).synchronize()
