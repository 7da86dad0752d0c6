"""One rank's lifetime in one run: apply a plan, step through global batches, validate, close."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.core.errors import RequestError, RunError
from meshwright.core.plan import Plan
from meshwright.core.task import Batch, Loss
from meshwright.execute.apply import Applied, apply, autocast, average_buffers

_Piece = tuple[int, int, Batch]  # a micro-batch: its first sample, their number, the samples


@dataclass(frozen=True)
class StepResult:
    """Tensors stay on the device: nothing here forces a synchronisation until somebody reads it."""

    loss: torch.Tensor  # mean over the global batch, the same on every rank
    grad_norm: torch.Tensor | None  # before clipping; None when nothing needed it
    skipped: bool = False  # fp16 only: the gradient overflowed and the step was not taken


class LossScale:
    """Dynamic scaling for fp16: halve on overflow, double after a run of good steps."""

    def __init__(self, start: float = 2.0**16, patience: int = 2000) -> None:
        self.value, self.patience, self._good = start, patience, 0

    def update(self, finite: bool) -> None:
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self._good % self.patience == 0:
            self.value *= 2


class Session:
    """Runs any plan that `apply` can apply. The batch given to `step` is this rank's share of the global batch."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int = 0, clip: float | None = None) -> None:
        self.model, self.optimizer, self.seed, self.clip = model, optimizer, seed, clip
        self.applied: Applied = apply(plan, model, optimizer)
        self.plan = plan = self.applied.plan
        if self.applied.buckets:
            self.applied.buckets.reduce_op = "sum"  # `step` weights the loss by samples, so a plain sum is exact
        self.steps_done = 0
        self._autocast = autocast(plan)
        self._scale = LossScale() if plan.memory.precision == "fp16" else None
        self._compiled: dict[Loss, Loss] = {}
        # The kernels read the scale in fp32, which is too coarse for fp64.
        self._fused = plan.memory.precision != "fp64" and plan.memory.offload == "none" and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._first, self._share = plan.share(plan.mesh.data_rank(self.applied.groups.rank))

    # -- training --

    def step(self, batch: Batch, loss_fn: Loss, total: int | None = None) -> StepResult:
        """One optimizer step on one global batch of `total` samples, of which `batch` holds this rank's."""
        total = total or self.plan.global_batch
        count = sample_count(batch)
        chunks = self.plan.micro_batches
        if count < chunks:
            raise RequestError(f"a batch of {count} samples cannot make {chunks} micro-batches: set micro_batches={max(count, 1)}")
        meter = _Meter(self.plan, self.applied)
        pieces = list(_cut(batch, count, chunks))
        if self.applied.pipeline is not None:
            self._through_stages(pieces, total, loss_fn, meter)
        else:
            for index, piece in enumerate(pieces):
                self._forward_backward(piece, total, loss_fn, meter, last=index == chunks - 1)
        return self._finish(meter, total)

    def _through_stages(self, pieces: list[_Piece], total: int, loss_fn: Loss, meter: _Meter) -> None:
        """All micro-batches through this rank's stages. Gradients add up; they are sent when the pipeline has drained."""
        pipeline, buckets = self.applied.pipeline, self.applied.buckets
        assert pipeline is not None
        if len({size for _, size, _ in pieces}) > 1:
            raise RequestError(f"a pipeline's micro-batches are of one size: {len(pieces)} do not divide this batch evenly; leave its rest out")
        with self.applied.accumulate():
            run_stage = lambda index: self._weighted_loss(pieces[index], total, self._loss(loss_fn), meter)  # noqa: E731
            pipeline.run([piece for _, _, piece in pieces], run_stage, loss_fn, self._autocast)
        meter.send(pipeline.counts_samples)
        self.applied.meet_shared()
        if buckets is not None:
            buckets.reduce_all()

    def _forward_backward(self, piece: _Piece, total: int, loss_fn: Loss, meter: _Meter, *, last: bool) -> None:
        loss = self._weighted_loss(piece, total, self._loss(loss_fn), meter)
        if last:
            meter.send()  # travels while backward runs
            loss.backward()
        else:
            with self.applied.accumulate():
                loss.backward()

    def _weighted_loss(self, piece: _Piece, total: int, loss_fn: Loss, meter: _Meter) -> torch.Tensor:
        """Forward of one micro-batch; its share of the global mean, scaled for fp16."""
        start, size, samples = piece
        self.applied.keys.set(self.seed, self.steps_done, self._first + start)
        with self._autocast():
            value = loss_fn(self.model, samples)
        loss = meter.add(value, size, total)
        return loss * self._scale.value if self._scale else loss

    def _finish(self, meter: _Meter, total: int) -> StepResult:
        if self.applied.buckets:
            self.applied.buckets.finish()
        loss, correction = meter.result(total)
        norm, skipped = self._condition(correction)
        if not skipped:
            self.optimizer.step()
        if self._fused:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.applied.clear_gradients()
        self.steps_done += 1
        return StepResult(loss, norm, skipped)

    def _condition(self, correction: torch.Tensor | None) -> tuple[torch.Tensor | None, bool]:
        """Unscale, weight by true counts and clip in one multiplication; say whether fp16 overflowed."""
        if self.clip is None and self._scale is None and correction is None:
            return None, False
        factor: torch.Tensor | float = (correction if correction is not None else 1.0) / (self._scale.value if self._scale else 1.0)
        norm: torch.Tensor | None = None
        if self.clip is not None or self._scale is not None:
            norm = self.applied.squared_norm().sqrt() * factor
            if self._scale is not None:
                finite = bool(torch.isfinite(norm))
                self._scale.update(finite)
                if not finite:
                    return norm, True
            if self.clip is not None:
                factor = factor * torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        if not (isinstance(factor, float) and factor == 1.0):
            self._scale_gradients(factor)
        return norm, False

    def _scale_gradients(self, factor: torch.Tensor | float) -> None:
        """A fused optimizer divides by `grad_scale` while it reads the gradient anyway: one pass over memory less."""
        if self._fused and torch.is_tensor(factor):
            self.optimizer.grad_scale = 1.0 / factor  # type: ignore[attr-defined]
        elif grads := self.applied.gradients():
            torch._foreach_mul_(grads, factor)

    def _loss(self, loss_fn: Loss) -> Loss:
        if self.applied.context is not None:
            return self.applied.context.around(loss_fn)
        if self.plan.compile != "model":
            return loss_fn
        if loss_fn not in self._compiled:
            self._compiled[loss_fn] = torch.compile(loss_fn)
        return self._compiled[loss_fn]

    # -- validation --

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch], loss_fn: Loss) -> float:
        """Mean loss over `batches`, reduced over ranks. Every rank brings the same number of batches."""
        average_buffers(self.applied)
        was_training = self.model.training
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for index, batch in enumerate(batches):
            size = sample_count(batch)
            self.applied.keys.set(self.seed, -1 - index, self._first)
            value = self._evaluate(batch, loss_fn)
            if value is not None:
                weighted = (value[0], value[1]) if isinstance(value, tuple) else (value * size, size)
                sums += torch.tensor([float(weighted[0]), float(weighted[1])], dtype=torch.float64)
        self.model.train(was_training)
        sums = sums.to(self.plan.device)
        self.applied.groups.batch.all_reduce(sums, "validation").wait()
        if sums[1] == 0:
            raise RequestError("no validation batches: the validation split is smaller than one global batch")
        return float(sums[0] / sums[1])

    def _evaluate(self, batch: Batch, loss_fn: Loss) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """The loss of one batch; None on a pipeline's ranks that do not hold the last stage."""

        def whole(_: int = 0) -> Any:
            with self._autocast():
                return (self.applied.context.around(loss_fn) if self.applied.context is not None else loss_fn)(self.model, batch)

        if self.applied.pipeline is None:
            return whole()  # type: ignore[no-any-return]
        return self.applied.pipeline.evaluate(batch, whole, loss_fn, self._autocast)  # type: ignore[no-any-return]


class _Meter:
    """The global mean loss of one step, from pieces: weights them, reduces them over ranks beside backward."""

    def __init__(self, plan: Plan, applied: Applied) -> None:
        self._plan, self._applied = plan, applied
        self._sums: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._counted = False
        self._wait: Callable[[], Any] = lambda: None
        self._vector: torch.Tensor | None = None

    def add(self, value: torch.Tensor | tuple[torch.Tensor, torch.Tensor], size: int, total: int) -> torch.Tensor:
        """Take one micro-batch's loss; give back what to differentiate: its share of the global mean, by samples.
        Ranks that share positions all have the same loss, so each counts a part of it."""
        parts = total * self._plan.spatial.ways
        if isinstance(value, tuple):
            loss, count = value[0] / parts, torch.as_tensor(value[1], device=value[0].device)
            self._counts.append(count.detach())
        else:
            loss = value * (size / (total * self._plan.mesh.cp))  # ranks along cp have equal parts of the same samples
        if loss.dim():
            raise RequestError(f"loss_fn returned a tensor of shape {tuple(loss.shape)}: return a scalar mean, or (sum, count)")
        self._sums.append(loss.detach())
        return loss

    def send(self, counted: bool | None = None) -> None:
        """Sum over all ranks that the batch passes through; a pipeline's ranks without the last stage have nothing to add to it."""
        kind = torch.float64 if self._plan.memory.precision == "fp64" else torch.float32
        self._counted = bool(self._counts) if counted is None else counted
        empty = torch.zeros((), dtype=kind, device=self._plan.device)
        parts = [torch.stack(self._sums).sum().to(kind) if self._sums else empty]
        if self._counted:
            parts.append(torch.stack([c.to(kind) for c in self._counts]).sum() / self._plan.spatial.ways if self._counts else empty)
        self._vector = torch.stack(parts)
        self._wait = self._applied.groups.batch.all_reduce(self._vector, "loss").wait

    def result(self, total: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(global mean loss, factor that turns sample-weighted gradients into count-weighted ones, or None)."""
        if self._vector is None:
            raise RunError("no micro-batch was run")
        self._wait()
        if not self._counted:
            return self._vector[0], None
        correction = total / self._vector[1]
        return self._vector[0] * correction, correction


def _cut(batch: Batch, count: int, chunks: int) -> Iterable[_Piece]:
    """The micro-batches of a batch."""
    start = 0
    for index in range(chunks):
        size = count // chunks + (index < count % chunks)
        piece = batch if chunks == 1 else pytree.tree_map(lambda t, a=start, n=size: t[a : a + n] if torch.is_tensor(t) else t, batch)
        yield start, size, piece
        start += size


def sample_count(batch: Batch) -> int:
    """The first dimension of the first tensor in a batch."""
    for leaf in pytree.tree_leaves(batch):
        if torch.is_tensor(leaf) and leaf.dim():
            return int(leaf.shape[0])
    raise RequestError("the batch holds no tensor with a first dimension to count samples by")
