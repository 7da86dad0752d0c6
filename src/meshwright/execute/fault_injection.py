"""Makes the faults of `--inject` happen on the rank that they name, in a training loop that calls this at the begin and the end of each step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import RunError
from meshwright.core.injected_fault import InjectedFault


class InjectedFaultError(RunError):
    """The exception of `--inject raise:…`."""


class FaultInjection:
    """The faults of one rank in one start of the run (`generation`: 0, and one more after each restart)."""

    def __init__(self, faults: Sequence[InjectedFault], rank: int, generation: int, say: Callable[[InjectedFault, int], None]) -> None:
        """`say` is told of a fault and its step just before it happens."""
        self._faults = [f for f in faults if f.rank == rank and f.fires_in(generation)]
        self._said: set[InjectedFault] = set()
        self._slept_s = 0.0  # in the last step
        self._say = say

    @contextmanager
    def around_step(self, step: int, model: nn.Module, own_seconds: float | None) -> Iterator[None]:
        """Around step `step` of a training loop. `own_seconds` is what this rank's own part of the last step took, with what was added here."""
        hooks = []
        for fault in self._faults:
            if fault.kind == "slow":
                self._slow_down(fault, step, own_seconds)
            elif fault.step == step:
                self._announce(fault, step)
                if fault.kind == "nan":
                    hooks += _poison_gradient(model)
                else:
                    _ACTIONS[fault.kind](fault)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _slow_down(self, fault: InjectedFault, step: int, own_seconds: float | None) -> None:
        if step >= fault.step and own_seconds is not None:
            self._announce(fault, step)
            self._slept_s = (fault.factor - 1.0) * max(own_seconds - self._slept_s, 0.0)
            time.sleep(self._slept_s)

    def _announce(self, fault: InjectedFault, step: int) -> None:
        if fault not in self._said:
            self._said.add(fault)
            self._say(fault, step)


def _raise(fault: InjectedFault) -> None:
    raise InjectedFaultError(f"injected by --inject {fault}")


def _hang(_: InjectedFault) -> None:
    while True:
        pass


_ACTIONS: dict[str, Callable[[InjectedFault], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "exit": lambda fault: os._exit(fault.code),
    "raise": _raise,
}


def _poison_gradient(model: nn.Module) -> list[Any]:
    """Have the first gradient that arrives in the next backward begin with NaN. Hooks on parameters run before anything reads the gradient."""
    left = [True]

    def poison(grad: Tensor) -> Tensor | None:
        if not left or not grad.numel():
            return None
        left.clear()
        grad = grad.clone(memory_format=torch.contiguous_format)
        grad.view(-1)[0] = float("nan")
        return grad

    return [p.register_hook(poison) for p in model.parameters() if p.requires_grad]
