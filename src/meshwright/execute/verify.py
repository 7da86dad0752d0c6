"""Verifies a plan before it is trusted: the same few samples on one device and under the plan, on copies of the model and its optimizer.

[Note: how a plan is verified]
Rank 0 runs the plain model; then all ranks apply the plan to copies and take one step. Rank 0 compares the loss, every parameter's gradient, the
gradient norm, and the optimizer's step. If they differ and the plan splits the batch, the step is repeated with the same samples on every data rank
and in every micro-batch: if it then agrees with one device, the plan computes the model rightly, and samples meet in the model or the loss
(BatchNorm, contrastive losses, masked means): the plan is inexact, not wrong. Compilation, compression of gradients and routes of collectives are
switched off, and so is dropout (with recomputation, if a model calls dropout as a function); everything else is as in training.
"""

from __future__ import annotations

import gc
import math
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.task import Batch, Loss
from meshwright.core.verification import Comparison, Verification
from meshwright.describe.discover import available_memory
from meshwright.execute.apply import AppliedPlan, autocast_factory
from meshwright.execute.full_state import full_gradients, full_parameters
from meshwright.execute.process_groups import destroy_process_groups
from meshwright.execute.session import Session, StepResult, sample_count
from meshwright.execute.verify_comparison import PlanResult, compare, compare_step, first_difference, measure_noise, tolerance_of
from meshwright.execute.verify_reference import (
    NoDropout,
    NotVerifiableError,
    OutputRecorder,
    Reference,
    SampleNorms,
    copy_model,
    first_line,
    preserve_random_state,
    refuse_random_model,
    run_reference,
)

_SAMPLES = 2  # in a micro-batch, if there are so many: a dim of size one may be broadcast where a larger one fails
_MAX_OVERFLOWS = 24  # steps that fp16 may skip until its loss scale is low enough
_MAX_RECORDING_RANKS = 16  # ranks whose module outputs are compared: they only help to name a module
_OutputNorms = list[tuple[str, SampleNorms, int]]  # module, norms, index of the first sample


def verify(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss_fn: Loss, *, seed: int = 0) -> Verification:
    """Compare a step under `plan` with a step on one device. Collective: every rank calls it before the plan is applied; only rank 0's `batch`
    is used. The model, the optimizer and the random state are left as they are; errors of the model under the plan are raised."""
    if plan.world == 1:
        return Verification("equal")
    start = time.perf_counter()
    with preserve_random_state():
        found = _Verifier(plan.for_rank(dist.get_rank()), model, optimizer, loss_fn, seed).run(batch)
    _free_memory()
    return replace(found, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class _Trial:
    """A plan for a few samples, and the samples. If they are `repeated`, every micro-batch has the same, and one device runs only those."""

    plan: Plan
    batch: Batch
    repeated: bool = False

    @property
    def splits_batch(self) -> bool:
        return self.plan.mesh.data_parallel_size * self.plan.micro_batches > 1

    @property
    def plain_batch(self) -> Batch:
        """What one device runs."""
        count = self.plan.global_batch // (self.plan.mesh.data_parallel_size * self.plan.micro_batches)
        return slice_batch(self.batch, 0, count) if self.repeated else self.batch

    def repeat_samples(self) -> _Trial:
        """The trial with equal shares, in which every micro-batch has the same samples."""
        parts = self.plan.mesh.data_parallel_size * self.plan.micro_batches
        count = min(_SAMPLES, self.plan.global_batch)
        plan = replace(self.plan, global_batch=parts * count, balance=replace(self.plan.balance, shares=()))
        first = slice_batch(self.batch, 0, count)
        batch = pytree.tree_map(lambda t: torch.cat([t] * parts) if torch.is_tensor(t) and t.dim() else t, first)
        return _Trial(plan, batch, repeated=True)


def make_trial(plan: Plan, batch: Batch) -> _Trial:
    """The plan for as few samples of the batch as it can split, with shares in the same proportion."""
    parts, micro_batches, available = plan.mesh.data_parallel_size, plan.micro_batches, sample_count(batch)
    shares = plan.balance.shares
    if shares:
        divisor = math.gcd(*shares)
        factor = next((f for f in range(1, divisor) if _can_split([s // divisor * f for s in shares], plan)), divisor)
        shares = tuple(s // divisor * factor for s in shares)
        count = sum(shares)
    else:
        count = max(n for n in (parts * micro_batches, parts * micro_batches * _SAMPLES) if n <= available or n == parts * micro_batches)
    if count > available:
        raise NotVerifiableError(f"a batch of {available} samples cannot be split over {parts} data ranks with {micro_batches} micro-batches each")
    sync = replace(plan.sync, routes=(), compression="none")
    small = replace(plan, global_batch=count, balance=replace(plan.balance, shares=shares), compile="none", sync=sync)
    samples = pytree.tree_map(lambda t: t.detach().cpu() if torch.is_tensor(t) else t, slice_batch(batch, 0, count))
    return _Trial(small, samples)


def _can_split(shares: list[int], plan: Plan) -> bool:
    return min(shares) >= plan.micro_batches and not (plan.mesh.pp > 1 and any(share % plan.micro_batches for share in shares))


def slice_batch(batch: Batch, first: int, count: int) -> Batch:
    return pytree.tree_map(lambda t: t[first : first + count] if torch.is_tensor(t) and t.dim() else t, batch)


class _Verifier:
    """One rank's part of verifying one plan."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss, seed: int) -> None:
        self.plan, self.model, self.optimizer, self.loss_fn, self.seed = plan, model, optimizer, loss_fn, seed
        self.rank = dist.get_rank()
        self.device = next(iter([*model.parameters(), *model.buffers()])).device
        self.plain_device = self.device  # on which rank 0 runs the plain model
        self.classes = {name: type(m).__name__ for name, m in model.named_modules()}

    def run(self, batch: Batch) -> Verification:
        trial, reference, reason = self._run_on_rank_zero(batch)
        messages: list[Any] = [None] * self.plan.world
        dist.all_gather_object(messages, (reason, trial))
        if (reason := next((r for r, _ in messages if r), None)) is not None:
            return Verification("not verified", reason)
        trial = messages[0][1]
        rows = self._compare(trial, reference)
        if all(row.is_equal for row in rows if row.quantity != "output"):
            return Verification("equal", "", tuple(rows), trial.plan.global_batch)
        if trial.splits_batch:
            repeated = trial.repeat_samples()
            plain = self._run_plain(repeated) if self.rank == 0 else None
            same_samples = self._compare(repeated, plain)
            if all(row.is_equal for row in same_samples if row.quantity != "output"):
                return Verification("inexact", self._describe_meeting(rows), tuple(rows), trial.plan.global_batch)
            rows = same_samples
        difference = first_difference(rows, list(self.classes))
        assert difference is not None
        return Verification("wrong", f"under it {difference.describe()}", tuple(rows), trial.plan.global_batch)

    # -- on one device --

    def _run_on_rank_zero(self, batch: Batch) -> tuple[_Trial | None, Reference | None, str | None]:
        """(the trial and the reference, on rank 0; why this rank cannot verify)."""
        trial = reference = None
        try:
            self._check_memory()
            copy_model(self.model, self.optimizer)  # raises where a copy cannot be made, before any rank waits for another
            if self.rank == 0:
                trial = made = make_trial(self.plan, batch)
                reference = refuse_random_model(lambda: self._run_plain(made))
                if not math.isfinite(reference.loss):
                    raise NotVerifiableError(f"the loss is {reference.loss} on one device")
                if reference.calls_dropout:  # which stays on in layers that backward recomputes
                    trial = replace(trial, plan=replace(trial.plan, memory=replace(trial.plan.memory, recompute="none", layers={})))
        except NotVerifiableError as error:
            return None, None, str(error)
        except Exception as error:
            return None, None, f"on one device it fails with {type(error).__name__}: {first_line(error)}"
        return trial, reference, None

    def _run_plain(self, trial: _Trial, rounding: float = 0.0) -> Reference:
        """The trial's samples through the plain model, whose parameters are changed by `rounding`, relative."""
        model, _ = copy_model(self.model, self.optimizer, self.plain_device)
        with torch.no_grad():
            for param in (p for p in model.parameters() if rounding and p.is_floating_point()):
                param.mul_(1.0 + rounding * torch.randn_like(param).clamp(-2, 2))
        batch = _move(trial.plain_batch, self.plain_device)
        autocast = autocast_factory(self.plan, self.plain_device.type)
        return run_reference(model, self.loss_fn, batch, sample_count(batch), autocast, self.seed)

    def _check_memory(self) -> None:
        """Raise unless the copies fit beside what is there: a whole copy, and gradients and two optimizer states as the plan shards them. Where
        they do not fit unsharded, one device's part runs on the host."""
        mesh, tensors = self.plan.mesh, [*self.model.parameters(), *self.model.buffers()]
        copied, states = sum(t.nbytes for t in tensors), 3 * sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        needed = copied + states // (mesh.shard * mesh.degree("tp") * mesh.pp)
        on_host = available_memory() // min(self.plan.world, os.cpu_count() or 1)
        free = _free_bytes(self.device) if self.device.type == "cuda" else on_host
        if needed > free:
            raise NotVerifiableError(f"a copy of the model and its optimizer needs {show_bytes(needed)}, and {show_bytes(free)} are free")
        if self.device.type == "cuda" and self.rank == 0 and copied + states > free:
            if copied + states > on_host:
                raise NotVerifiableError(f"one device's step needs {show_bytes(copied + states)}, and {show_bytes(free)} are free")
            self.plain_device = torch.device("cpu")

    # -- under the plan --

    def _compare(self, trial: _Trial, reference: Reference | None) -> list[Comparison]:
        """Step under the plan and compare with one device. Rank 0 compares, and every rank returns what it found."""
        try:
            found = self._run_plan(trial)
        except Exception as error:
            error.add_note(f"meshwright: while {self.plan.strategy} was verified before training, with {trial.plan.global_batch} samples")
            raise
        message: list[Any] = [None]
        if found is not None and reference is not None:
            tolerance = tolerance_of(self.plan)
            rows = compare(reference, found, tolerance, self.classes)
            if not all(row.is_equal for row in rows):  # see [Note: tolerances]
                noise = measure_noise(reference, self._run_plain(trial, tolerance.rounding))
                rows = compare(reference, found, replace(tolerance, noise=noise), self.classes)
            copied, optimizer = copy_model(self.model, self.optimizer, self.plain_device)
            rows += compare_step(copied, optimizer, reference, found, self.classes)
            message = [rows]
        dist.broadcast_object_list(message, src=0)
        return message[0]  # type: ignore[no-any-return]

    def _run_plan(self, trial: _Trial) -> PlanResult | None:
        """One step under the trial's plan; rank 0 returns its results."""
        model, optimizer = copy_model(self.model, self.optimizer)
        session = Session(trial.plan, model, optimizer, seed=self.seed)
        applied = session.applied
        if trial.repeated:
            applied.random_keys.freeze(self.seed)
        first, count = trial.plan.sample_range(trial.plan.mesh.data_rank(self.rank))
        recorder = OutputRecorder(model, -(-count // trial.plan.micro_batches)) if self.rank < _MAX_RECORDING_RANKS else None
        gradients: dict[str, Tensor] = {}
        norms: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: self._capture_gradients(applied, gradients, norms))
        result = self._step(session, slice_batch(trial.batch, first, count))
        parameters = {name: tensor for name, tensor in full_parameters(applied) if self.rank == 0}
        outputs = self._gather_outputs(applied, recorder, 0 if trial.repeated else first)
        loss = float(result.loss)
        destroy_process_groups(applied.groups, [comm for _, comm in applied.pipeline.tied_groups] if applied.pipeline is not None else ())
        return PlanResult(loss, gradients, float(norms[-1]), parameters, outputs) if self.rank == 0 else None

    def _step(self, session: Session, share: Batch) -> StepResult:
        with NoDropout():
            for _ in range(_MAX_OVERFLOWS):
                result = session.step(_move(share, self.device), self.loss_fn)
                if not result.skipped:
                    break
        return result

    def _capture_gradients(self, applied: AppliedPlan, gradients: dict[str, Tensor], norms: list[Tensor]) -> None:
        """Keep the full gradients, on rank 0, and their norm as clipping would compute it. A fused optimizer has yet to scale them."""
        scale = getattr(applied.optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        norms.append(applied.squared_norm().sqrt() * factor)
        for name, gradient in full_gradients(applied):
            if self.rank == 0:
                gradients[name] = gradient * factor if factor != 1.0 else gradient.clone()

    def _gather_outputs(self, applied: AppliedPlan, recorder: OutputRecorder | None, first: int) -> _OutputNorms:
        """The norms of module outputs on the ranks that record them. A pipeline rank computes the modules of its own stages only."""
        stages = [applied.plan.stages[i] for i in applied.plan.stages_of_rank(applied.groups.pp.rank)] if applied.pipeline is not None else []
        layers = [layer for stage in stages for layer in stage.layers]
        outputs = recorder.outputs if recorder is not None else {}
        own = [(n, out, first) for n, out in outputs.items() if not layers or any(f"{n}.".startswith(f"{layer}.") for layer in layers)]
        gathered: list[Any] = [None] * self.plan.world
        dist.all_gather_object(gathered, own)
        return [entry for entries in gathered for entry in entries]

    def _describe_meeting(self, rows: list[Comparison]) -> str:
        """Where samples meet: the first module whose output depends on the other samples, or else the loss."""
        loss = next(row for row in rows if row.quantity == "loss")
        module = next((row for row in rows if row.quantity == "output" and not row.is_equal), None)
        where = f"in {module.name or 'the model'} ({module.module_class})" if module is not None else "in the loss"
        return f"samples meet {where}, and ranks or micro-batches see only their own: {loss.describe()}"


def _move(batch: Batch, device: torch.device) -> Batch:
    return pytree.tree_map(lambda t: t.to(device) if torch.is_tensor(t) else t, batch)


def _free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process can allocate."""
    return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _free_memory() -> None:
    gc.collect()  # hooks and modules refer to each other
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
