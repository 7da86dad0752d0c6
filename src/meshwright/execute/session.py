"""One rank's lifetime in one run: apply a plan, step through global batches, validate, close."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.errors import RequestError, RunError
from meshwright.core.model import LOSS_LAYER
from meshwright.core.plan import Plan, compiles_layer
from meshwright.core.sample_coupling import counts_targets
from meshwright.core.task import Batch, Loss
from meshwright.execute.apply import AppliedPlan, apply, autocast_factory
from meshwright.execute.averaged_buffers import average_buffers
from meshwright.execute.batch_share import Share
from meshwright.execute.counted_loss import LossCounter, without_recorder
from meshwright.execute.data_parallel import MEAN, SUM, Reduction
from meshwright.execute.finite_guard import Culprit, FiniteGuard
from meshwright.execute.placeholders import Placeholders
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.reentrant_checkpoints import no_reentrant_checkpoints

_MicroBatch = tuple[int, int, Batch]  # first sample, number of samples, samples


@dataclass(frozen=True)
class StepResult:
    """A step's loss and gradient norm. Tensors stay on the device: nothing forces a synchronisation until they are read."""

    loss: Tensor  # mean over the global batch, the same on every rank
    grad_norm: Tensor | None  # before clipping; None when nothing needed it
    own_loss: Tensor  # this rank's part of the sum that `loss` comes from; 0 on pipeline ranks without the last stage
    skipped: bool = False  # the step was not taken: under fp16 the gradient overflowed, or the guard left it out
    culprit: Culprit | None = None  # of this rank's own gradients, where steps are guarded


class LossScaler:
    """Dynamic scaling for fp16: halve on overflow, double after a run of good steps."""

    def __init__(self, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value, self.growth_interval, self.good_steps = init_scale, growth_interval, 0

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps % self.growth_interval == 0:
            self.value *= 2


class Session:
    """Runs any plan that `apply` can apply. The batch given to `step` is this rank's share of the global batch."""

    def __init__(
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, *,
        seed: int = 0, clip: float | None = None, groups: ProcessGroups | None = None, planned_loss: Loss | None = None,
        broadcasts: bool = True, placeholders: Placeholders | None = None,
    ) -> None:  # fmt: skip
        """`groups` are process groups of the plan's mesh; None: they are made. `planned_loss` is what the plan was made for; None: any loss.
        `broadcasts` and `placeholders` are for `apply`."""
        self.model, self.optimizer, self.seed, self.clip = model, optimizer, seed, clip
        self.applied: AppliedPlan = apply(plan, model, optimizer, groups, broadcasts=broadcasts, placeholders=placeholders)
        self.plan = plan = self.applied.plan
        if self.applied.gradient_sync:
            # `step` weights the loss by samples, so a plain sum is exact.
            self.applied.gradient_sync.set_reduction(lambda: SUM if self.is_running else self.own_loop_reduction())
        self.own_loop_reduction: Callable[[], Reduction] = lambda: MEAN  # for a backward of the user's own
        self.is_running = False  # within `step` or `validate`
        self.steps_done = 0
        self.autocast = autocast_factory(plan)
        self.loss_scaler = LossScaler() if plan.memory.precision == "fp16" else None
        self._loss_counter = LossCounter(plan, planned_loss)
        self._compiled: dict[Loss, Loss] = {}
        # The kernels read the scale in fp32, which is too coarse for fp64.
        self._fused = plan.memory.precision != "fp64" and plan.memory.offload == "none" and getattr(optimizer, "_step_supports_amp_scaling", False)
        self.guard: FiniteGuard | None = None
        self._first_sample = plan.sample_range(plan.mesh.data_rank(self.applied.groups.rank))[0]

    @property
    def has_low_precision(self) -> bool:
        return self.autocast is not nullcontext

    def guard_steps(self, *, needs_norm: bool) -> None:
        """From now on leave out each step whose loss is not finite, or whose gradient is not, where its norm is known. `needs_norm`: it always is.
        Under fp16 the loss scaler judges the gradient."""
        on_device = self._fused and self.plan.device == "cuda" and self.plan.sync.compression == "none"
        self.guard = FiniteGuard(self.applied, needs_norm=needs_norm, on_device=on_device)

    # -- training --

    def step(self, batch: Batch, loss_fn: Loss, total: int | None = None, share: Share | None = None) -> StepResult:
        """One optimizer step on one global batch of `total` samples, of which `batch` holds this rank's; a `share` says more about them."""
        total = total or self.plan.global_batch
        count, num_micro_batches = sample_count(batch), min(self.plan.micro_batches, share.min_samples if share else self.plan.micro_batches)
        if count < num_micro_batches:
            raise RequestError(f"a batch of {count} samples does not split into {num_micro_batches} micro-batches: set micro_batches={max(count, 1)}")
        self._loss_counter.check(loss_fn)
        loss_fn = self._loss_counter.for_training(loss_fn)
        loss_reducer = _LossReducer(self.plan, self.applied, share.copies if share else 1)
        first_sample = share.first_sample if share else self._first_sample
        micro_batches = list(_split_micro_batches(batch, count, num_micro_batches, first_sample))
        with self._running():
            if self.guard is not None:
                self.guard.begin_step()
            self.applied.discard_gradients()
            if self.applied.pipeline is not None:
                self._run_pipeline(micro_batches, total, loss_fn, loss_reducer)
            else:
                for index, micro_batch in enumerate(micro_batches):
                    self._forward_backward(micro_batch, total, loss_fn, loss_reducer, is_last=index == num_micro_batches - 1)
            return self._finish_step(loss_reducer, total)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.is_running = True
        try:
            with no_reentrant_checkpoints(self.plan):
                yield
        finally:
            self.is_running = False

    def _run_pipeline(self, micro_batches: list[_MicroBatch], global_batch: int, loss_fn: Loss, loss_reducer: _LossReducer) -> None:
        """Run all micro-batches through this rank's stages. Gradients accumulate, and are reduced when the pipeline has drained."""
        pipeline = self.applied.pipeline
        assert pipeline is not None
        if len({size for _, size, _ in micro_batches}) > 1:
            reason = f"this batch does not split into {len(micro_batches)} equal ones"
            raise RequestError(f"a pipeline's micro-batches have one size, and {reason}: leave samples out (drop_last)")
        with self.applied.accumulate():
            run_stage = lambda index: self._weighted_loss(micro_batches[index], global_batch, self._prepare_loss_fn(loss_fn), loss_reducer)  # noqa: E731
            pipeline.run([samples for _, _, samples in micro_batches], run_stage, loss_fn, self.autocast)
        loss_reducer.start_all_reduce(pipeline.loss_has_count)
        self.applied.all_reduce_tied_gradients(self.guard.look_at_tied if self.guard is not None else None)
        if self.applied.gradient_sync is not None:
            self.applied.gradient_sync.reduce_all()

    def _forward_backward(self, micro_batch: _MicroBatch, global_batch: int, loss_fn: Loss, loss_reducer: _LossReducer, *, is_last: bool) -> None:
        loss = self._weighted_loss(micro_batch, global_batch, self._prepare_loss_fn(loss_fn), loss_reducer)
        if is_last:
            loss_reducer.start_all_reduce()  # overlaps with backward
        if self.applied.gradient_sync is not None:
            self.applied.gradient_sync.before_backward(loss)
        with nullcontext() if is_last else self.applied.accumulate():
            loss.backward()

    def _weighted_loss(self, micro_batch: _MicroBatch, global_batch: int, loss_fn: Loss, loss_reducer: _LossReducer) -> Tensor:
        """Run one micro-batch forward; return its share of the global mean loss, scaled for fp16."""
        start, size, samples = micro_batch
        self.applied.random_keys.set(self.seed, self.steps_done, start)
        with self.autocast():
            value = loss_fn(self.model, samples)
        loss = loss_reducer.add(value, size, global_batch)
        return loss * self.loss_scaler.value if self.loss_scaler else loss

    def _finish_step(self, loss_reducer: _LossReducer, global_batch: int) -> StepResult:
        if self.applied.gradient_sync:
            self.applied.gradient_sync.finish()
        loss, own_loss, correction = loss_reducer.result(global_batch)
        norm, factor, skipped = self._measure_gradient(correction)
        if self.guard is not None and self.guard.leaves_out(loss, norm if self.loss_scaler is None else None):
            skipped = True
        if not skipped:
            self._scale_gradients(factor if self.clip is None or norm is None else factor * torch.clamp(self.clip / (norm + 1e-6), max=1.0))
            self.optimizer.step()
        if self._fused:
            self.optimizer.grad_scale = self.optimizer.found_inf = None  # type: ignore[attr-defined]
        self.applied.clear_gradients()
        self.steps_done += 1
        return StepResult(loss, norm, own_loss, skipped, self.guard.culprit() if self.guard is not None else None)

    def _measure_gradient(self, correction: Tensor | None) -> tuple[Tensor | None, Tensor | float, bool]:
        """(the norm where something needs it, the factor of the gradient for the loss scale and true counts, whether fp16 overflowed)."""
        factor: Tensor | float = (correction if correction is not None else 1.0) / (self.loss_scaler.value if self.loss_scaler else 1.0)
        if self.clip is None and self.loss_scaler is None and not (self.guard is not None and self.guard.needs_norm):
            return None, factor, False
        norm = self.applied.squared_norm().sqrt() * factor
        if self.loss_scaler is None:
            return norm, factor, False
        finite = bool(torch.isfinite(norm))
        self.loss_scaler.update(finite)
        return norm, factor, not finite

    def _scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply gradients by `factor`. A fused optimizer divides by `grad_scale` while it reads them, which saves a pass over memory."""
        if isinstance(factor, float) and factor == 1.0:
            return
        if self._fused and torch.is_tensor(factor):
            self.optimizer.grad_scale = 1.0 / factor  # type: ignore[attr-defined]
        elif grads := self.applied.local_gradients():
            torch._foreach_mul_(grads, factor)

    def _prepare_loss_fn(self, loss_fn: Loss) -> Loss:
        if self.applied.context is not None:
            return self.applied.context.wrap_loss(loss_fn)
        if not compiles_layer(self.plan, LOSS_LAYER):
            return loss_fn
        if loss_fn not in self._compiled:
            self._compiled[loss_fn] = self._compile_loss(loss_fn)
        return self._compiled[loss_fn]

    def _compile_loss(self, loss_fn: Loss) -> Loss:
        must_count = counts_targets(self.plan)
        if self.plan.compile == "model":
            compiled = torch.compile(loss_fn)
        elif must_count and self.plan.samples.loss_after != "":
            return loss_fn  # it is computed in the model's own forward, which is not compiled
        else:
            compiled = partial(_run_around_model, torch.compile(loss_fn), torch.compiler.disable(without_recorder(self.model.forward)))

        def run(model: nn.Module, batch: Batch) -> Any:
            value = compiled(model, batch)
            if isinstance(value, tuple):
                return value
            self._compiled[loss_fn] = loss_fn
            print("meshwright: the compiled loss cannot be counted over its parts, so it runs without compile", file=sys.stderr)
            return loss_fn(model, batch)

        return run if must_count else compiled

    # -- validation --

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch], loss_fn: Loss, share: Callable[[], Share | None] = lambda: None) -> float:
        """Mean loss over `batches`, reduced over ranks. Every rank brings the same number of batches; `share` describes the current one."""
        average_buffers(self.applied)
        self._loss_counter.check(loss_fn)
        loss_fn = self._loss_counter.for_validation(loss_fn)
        was_training = self.model.training
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for index, batch in enumerate(batches):
            size, mine = sample_count(batch), share()
            self.applied.random_keys.set(self.seed, -1 - index, mine.first_sample if mine else self._first_sample)
            with self._running():
                value = self._evaluate(batch, loss_fn)
            if value is not None or self.applied.pipeline is None:
                # A sum over samples is added up over the ranks of a batch, a mean counts by their samples.
                weight = (mine.global_batch if mine else self.plan.global_batch) if self.plan.samples.loss == "sum" else size
                loss_sum, count = checked_loss(value) if isinstance(value, tuple) else (checked_loss(value) * weight, size)
                sums += torch.tensor([float(loss_sum), float(count)], dtype=torch.float64) / (mine.copies if mine else 1)
        self.model.train(was_training)
        sums = sums.to(self.plan.device)
        self.applied.groups.batch.all_reduce(sums, "validation").wait()
        if sums[1] == 0:
            raise RequestError("no validation batches: the validation split is smaller than one global batch")
        return float(sums[0] / sums[1])

    def _evaluate(self, batch: Batch, loss_fn: Loss) -> Tensor | tuple[Tensor, Tensor] | None:
        """The loss of one batch; None on a pipeline's ranks that do not hold the last stage."""

        def evaluate(_: int = 0) -> Any:
            with self.autocast():
                return (self.applied.context.wrap_loss(loss_fn) if self.applied.context is not None else loss_fn)(self.model, batch)

        return evaluate() if self.applied.pipeline is None else self.applied.pipeline.evaluate(batch, evaluate, loss_fn, self.autocast)


def _run_around_model(compiled: Loss, eager_forward: Callable[..., Any], model: nn.Module, batch: Batch) -> Any:
    """Run a compiled loss whose graphs leave out the model's own forward, in which compiled units run. The model is patched during the call only:
    a copy of it, such as an average of its weights, must call its own forward."""
    patched = vars(model).get("forward")
    model.forward = eager_forward  # type: ignore[method-assign]
    try:
        return compiled(model, batch)
    finally:
        if patched is None:
            del model.forward
        else:
            model.forward = patched


class _LossReducer:
    """Weights the losses of one step's micro-batches and reduces their sum over ranks, overlapping with backward."""

    def __init__(self, plan: Plan, applied: AppliedPlan, copies: int) -> None:
        """`copies` is how many data ranks hold the samples of this one."""
        self._plan, self._applied, self._copies = plan, applied, copies
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._has_counts = False
        self._wait: Callable[[], Any] = lambda: None
        self._reduced: Tensor | None = None
        self._own_sum: Tensor | None = None  # of this rank, before the reduction

    def add(self, value: Tensor | tuple[Tensor, Tensor], size: int, global_batch: int) -> Tensor:
        """Take one micro-batch's loss; return what to differentiate: its share of the global mean, by samples. Spatial-parallel ranks all have
        the same loss, so each counts a part of it."""
        value = checked_loss(value)
        if isinstance(value, tuple):
            loss = value[0] / (self._expected_count(global_batch) * self._plan.spatial.num_parts * self._copies)
            count = torch.as_tensor(value[1], device=value[0].device).detach()
            self._counts.append(count / self._copies if self._copies > 1 else count)
        else:  # ranks along cp have equal parts of the same samples
            fraction = 1.0 if self._plan.samples.loss == "sum" else size / global_batch
            loss = value * (fraction / (self._plan.mesh.cp * self._copies))
        self._sums.append(loss.detach())
        return loss

    def start_all_reduce(self, has_counts: bool | None = None) -> None:
        """Start the sum over all ranks that the batch passes through; pipeline ranks without the last stage add zero."""
        dtype = torch.float64 if self._plan.memory.precision == "fp64" else torch.float32
        self._has_counts = bool(self._counts) if has_counts is None else has_counts
        zero = torch.zeros((), dtype=dtype, device=self._plan.device)
        sums = [torch.stack(self._sums).sum().to(dtype) if self._sums else zero]
        if self._has_counts:
            sums.append(torch.stack([c.to(dtype) for c in self._counts]).sum() / self._plan.spatial.num_parts if self._counts else zero)
        self._own_sum = sums[0]
        self._reduced = torch.stack(sums)
        self._wait = self._applied.groups.batch.all_reduce(self._reduced, "loss").wait

    def result(self, global_batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """(global mean loss, this rank's part of the sum, factor that turns sample-weighted gradients into count-weighted ones, or None)."""
        if self._reduced is None or self._own_sum is None:
            raise RunError("no micro-batch was run")
        self._wait()
        if not self._has_counts:
            return self._reduced[0], self._own_sum, None
        correction = self._expected_count(global_batch) / self._reduced[1]
        loss = self._reduced[0] * correction
        is_one = correction.device.type == "cpu" and float(correction) == 1.0  # no target is masked: gradients are right as they are
        return loss, self._own_sum, None if is_one else correction

    def _expected_count(self, global_batch: int) -> float:
        """The count of a global batch in which no target is masked, as far as it is known; losses are divided by it until the true count is."""
        return global_batch * (self._plan.samples.targets_per_sample if counts_targets(self._plan) else 1.0)


def checked_loss(value: Any) -> Any:
    """What a loss function returned: a scalar, or (sum, count)."""
    loss = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    if not torch.is_tensor(loss):
        names = (
            f" with {', '.join(map(str, value))}" if isinstance(value, Mapping) else f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
        )
        raise RequestError(f"loss_fn returned a {type(value).__name__}{names}: return one tensor, the scalar mean, or (sum, count)")
    if loss.dim():
        raise RequestError(f"loss_fn returned a tensor of shape {tuple(loss.shape)}: return a scalar mean, or (sum, count)")
    return value


def _split_micro_batches(batch: Batch, count: int, num_micro_batches: int, first_sample: int) -> Iterable[_MicroBatch]:
    start = 0
    for index in range(num_micro_batches):
        size = count // num_micro_batches + (index < count % num_micro_batches)
        samples = batch if num_micro_batches == 1 else pytree.tree_map(lambda t, a=start, n=size: t[a : a + n] if torch.is_tensor(t) else t, batch)
        yield first_sample + start, size, samples
        start += size


def sample_count(batch: Batch) -> int:
    """The first dimension of the first tensor in a batch."""
    count = find_sample_count(batch)
    if count is None:
        raise RequestError("the batch has no tensor whose first dimension could be the number of samples: put one into it")
    return count


def find_sample_count(batch: Batch) -> int | None:
    return next((int(leaf.shape[0]) for leaf in pytree.tree_leaves(batch) if torch.is_tensor(leaf) and leaf.dim()), None)
