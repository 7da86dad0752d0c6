"""Metering: what each step took and gave, written to the run's folder without making the device wait.

[Note: reading a GPU's loss]
A GPU works behind the program that feeds it. Reading a loss waits until the GPU has caught up, and then the GPU waits for the program.
So losses are copied to the host in the GPU's own order, with an event behind them, and read one interval later, when they are long there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.execute.session import StepResult


class HostStamp:
    """Now, for devices that are waited for anyway."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def since(self, earlier: HostStamp) -> float:
        return self.time - earlier.time


class CudaStamp:
    """An event in the current stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def since(self, earlier: CudaStamp) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000


@dataclass(frozen=True)
class StepRecord:
    """One step, measured."""

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    seconds: float
    counted: bool  # False for steps that were profiled or interrupted: they say nothing about speed


@dataclass
class _Interval:
    steps: list[tuple[int, float]]
    losses: torch.Tensor
    norms: torch.Tensor | None
    begun: Any
    ended: Any
    counted: bool


class StepLog:
    """Collects steps and hands finished records to `write`, in order. On a GPU one interval is always left in flight."""

    def __init__(self, device: torch.device, every: int, write: Callable[[list[StepRecord]], None]) -> None:
        self._cuda = device.type == "cuda"
        self._every, self._write = every, write
        self._open: list[tuple[int, StepResult, float]] = []
        self._flying: _Interval | None = None
        self._begun: Any = self._stamp()

    def _stamp(self) -> Any:
        return CudaStamp() if self._cuda else HostStamp()

    def restart(self) -> None:
        """Forget the time since the last step: something else was done in between."""
        self.drain()
        self._begun = self._stamp()

    def add(self, step: int, result: StepResult, learning_rate: float) -> None:
        self._open.append((step, result, learning_rate))
        if len(self._open) >= self._every:
            self.close()

    def close(self, counted: bool = True) -> None:
        """End the current interval."""
        if not self._open:
            return
        losses = torch.stack([result.loss.detach() for _, result, _ in self._open])
        found = [result.grad_norm for _, result, _ in self._open if result.grad_norm is not None]
        norms = torch.stack(found) if len(found) == len(self._open) else None
        host = [None if t is None else t.to("cpu", non_blocking=self._cuda) for t in (losses, norms)]
        ended = self._stamp()
        assert host[0] is not None
        now = _Interval([(step, rate) for step, _, rate in self._open], host[0], host[1], self._begun, ended, counted)
        self._open.clear()
        self._begun = ended
        before, self._flying = self._flying, now
        if before is not None:
            self._finish(before)
        if not self._cuda:
            self.drain()

    def drain(self) -> None:
        """Everything that has begun is written."""
        self.close()
        if self._flying is not None:
            last, self._flying = self._flying, None
            self._finish(last)

    def _finish(self, interval: _Interval) -> None:
        each = interval.ended.since(interval.begun) / len(interval.steps)
        losses = interval.losses.tolist()
        norms = interval.norms.tolist() if interval.norms is not None else [None] * len(losses)
        self._write(
            [
                StepRecord(step, loss, norm, rate, each, interval.counted)
                for (step, rate), loss, norm in zip(interval.steps, losses, norms, strict=True)
            ]
        )
