"""Step metering: collects losses, gradient norms and step times and hands them to a writer without synchronising the device.

[Note: reading a GPU's loss]
The GPU runs behind the host. Reading a loss blocks the host until the GPU has caught up, and the GPU then idles until the host launches more work.
So losses are copied to the host asynchronously on the stream, followed by an event, and read one interval later, when the copy has long finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.execute.finite_guard import Culprit
from meshwright.execute.session import StepResult


class HostTimestamp:
    """The host clock, for devices that run synchronously."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def seconds_since(self, earlier: HostTimestamp) -> float:
        return self.time - earlier.time


class CudaTimestamp:
    """A CUDA event on the current stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_since(self, earlier: CudaTimestamp) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000


@dataclass(frozen=True)
class StepRecord:
    """The measurements of one step."""

    step: int
    loss: float
    own_loss: float  # of this rank, before it was reduced
    grad_norm: float | None
    learning_rate: float
    seconds: float
    culprit: Culprit | None  # of this rank's own gradients
    is_timed: bool  # False for warm-up and profiled steps, whose time is not representative


@dataclass
class _Interval:
    steps: list[tuple[int, float]]  # step and learning rate
    losses: Tensor  # of all steps, then this rank's own of all steps
    grad_norms: Tensor | None
    culprits: list[Culprit | None]
    start: Any
    end: Any
    is_timed: bool


class StepLog:
    """Collects steps in intervals and passes finished records to `write`, in order. On a GPU one interval is always in flight."""

    def __init__(self, device: torch.device, interval_steps: int, write: Callable[[list[StepRecord]], None]) -> None:
        self._cuda = device.type == "cuda"
        self._interval_steps, self._write = interval_steps, write
        self._pending_steps: list[tuple[int, StepResult, float]] = []
        self._in_flight: _Interval | None = None
        self._interval_start: Any = self._timestamp()

    def _timestamp(self) -> Any:
        return CudaTimestamp() if self._cuda else HostTimestamp()

    def restart_clock(self) -> None:
        """Write all pending steps and start timing from here, so that work between steps is not counted."""
        self.drain()
        self._interval_start = self._timestamp()

    def add(self, step: int, result: StepResult, learning_rate: float) -> None:
        self._pending_steps.append((step, result, learning_rate))
        if len(self._pending_steps) >= self._interval_steps:
            self.close_interval()

    def close_interval(self, is_timed: bool = True) -> None:
        """End the current interval; starts the copy of its losses and writes the interval before it."""
        if not self._pending_steps:
            return
        results = [result for _, result, _ in self._pending_steps]
        losses = self._copy_to_host([r.loss.detach() for r in results] + [r.own_loss.detach() for r in results])
        norms = [r.grad_norm for r in results if r.grad_norm is not None]
        host_norms = self._copy_to_host(norms) if len(norms) == len(self._pending_steps) else None
        start, self._interval_start = self._interval_start, self._timestamp()
        steps = [(step, rate) for step, _, rate in self._pending_steps]
        self._pending_steps.clear()
        previous, self._in_flight = (
            self._in_flight,
            _Interval(steps, losses, host_norms, [r.culprit for r in results], start, self._interval_start, is_timed),
        )
        if previous is not None:
            self._write_interval(previous)
        if not self._cuda:
            self.drain()

    def _copy_to_host(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).to("cpu", non_blocking=self._cuda)

    def drain(self) -> None:
        """Write every pending step, waiting for the device."""
        self.close_interval()
        if self._in_flight is not None:
            last, self._in_flight = self._in_flight, None
            self._write_interval(last)

    def _write_interval(self, interval: _Interval) -> None:
        seconds = interval.end.seconds_since(interval.start) / len(interval.steps)
        losses, own_losses = interval.losses.view(2, -1).tolist()
        norms = interval.grad_norms.tolist() if interval.grad_norms is not None else [None] * len(losses)
        timed = interval.is_timed
        rows = zip(interval.steps, losses, own_losses, norms, interval.culprits, strict=True)
        self._write([StepRecord(step, loss, own, norm, rate, seconds, culprit, timed) for (step, rate), loss, own, norm, culprit in rows])
