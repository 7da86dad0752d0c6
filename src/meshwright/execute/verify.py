"""Verifies a plan before it is trusted: the same few samples on one device and under the plan, on copies of the model and its optimizer.

[Note: how a plan is verified]
Rank 0 runs the plain model; then all ranks apply the plan to copies and take one step. Rank 0 compares the loss, every parameter's gradient, the
gradient norm, and the optimizer's step. If they differ and the plan splits the batch, the step is repeated with the same samples on every data rank
and in every micro-batch: if it then agrees with one device, the plan computes the model rightly, and samples meet in the model or the loss
(BatchNorm, contrastive losses, masked means): the plan is inexact, not wrong. Compilation, compression of gradients and routes of collectives are
switched off, and so is dropout (with recomputation, if a model calls dropout as a function); everything else is as in training. A model whose
copies do not fit in memory is verified with fewer blocks (verify_truncation.py).

[Note: a rank that fails alone]
The step runs in process groups of its own. A rank that fails closes them, so that gloo's ranks that wait for it fail at once; then all ranks meet in
the world's group, which is intact, and agree on what has failed first.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.event import Fault
from meshwright.core.plan import Plan
from meshwright.core.task import Batch, Loss
from meshwright.core.verification import Comparison, Verification
from meshwright.execute.apply import AppliedPlan, autocast_factory
from meshwright.execute.birth import Birth, copy_with_values
from meshwright.execute.full_state import full_gradients, full_parameters
from meshwright.execute.process_groups import ProcessGroups, destroy_process_groups, make_process_groups
from meshwright.execute.session import Session, StepResult, sample_count
from meshwright.execute.verify_comparison import PlanResult, compare, compare_step, first_difference, measure_noise, tolerance_of
from meshwright.execute.verify_memory import TooLargeError, is_out_of_memory, place_reference
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
from meshwright.execute.verify_trial import Trial, make_trial, slice_batch
from meshwright.execute.verify_truncation import CannotTruncateError, Truncation, possible_truncations
from meshwright.launch.worker_process import describe_fault
from meshwright.observe.process_memory import trim_heap

_MAX_OVERFLOWS = 24  # steps that fp16 may skip until its loss scale is low enough
_MAX_RECORDING_RANKS = 16  # ranks whose module outputs are compared: they only help to name a module
_OutputNorms = list[tuple[str, SampleNorms, int]]  # module, norms, index of the first sample


def verify(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss_fn: Loss, *,
    seed: int = 0, birth: Birth | None = None, device: torch.device | None = None,
) -> Verification:  # fmt: skip
    """Compare a step under `plan` with a step on one device. Collective: every rank calls it before the plan is applied; only rank 0's `batch`
    is used. The model, the optimizer and the random state are left as they are. All ranks return the same; a model that raises an error under
    the plan has failed. A model without values has a `birth`, which gives them to copies on the `device`."""
    if plan.world == 1:
        return Verification("equal")
    start = time.perf_counter()
    with preserve_random_state():
        found = _Verifier(plan.for_rank(dist.get_rank()), model, optimizer, loss_fn, seed, birth, device).run(batch)
    _free_memory()
    return replace(found, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class _Failure:
    """Why a rank has no result. An error of the model is a verdict on the plan; others say why it cannot be verified."""

    fault: Fault
    verdict: Literal["failed", "not verified", "out of memory"]


class _Verifier:
    """One rank's part of verifying one plan."""

    def __init__(
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss, seed: int,
        birth: Birth | None, device: torch.device | None,
    ) -> None:  # fmt: skip
        self.plan, self.model, self.optimizer, self.loss_fn, self.seed = plan, model, optimizer, loss_fn, seed
        self.rank = dist.get_rank()
        self.device = device or next(iter([*model.parameters(), *model.buffers()])).device
        self.birth, self.unborn = birth, (model, optimizer)
        self.classes = {name: type(m).__name__ for name, m in model.named_modules()}
        self.truncation = Truncation()
        self.plain_device = self.device  # on which rank 0 runs the plain model

    def run(self, batch: Batch) -> Verification:
        """Verify with the whole model or, where its copies do not fit, with fewer blocks."""
        reasons: list[str] = []
        for truncation in possible_truncations(self.plan, self.unborn[0]):
            self.truncation = truncation
            try:
                self.model, self.optimizer = self.unborn
                self.plain_device = place_reference(self.plan, self.model, truncation, self.device, copies=1 if self.birth is None else 2)
                found = self._verify(batch)
            except TooLargeError as error:  # on every rank: they have agreed
                reasons.append(str(error))
                _free_memory()
                continue
            if found.verdict == "not verified":
                return replace(found, reason="; ".join([*reasons, found.reason]))
            return replace(found, stands_for=truncation.stands_for)
        return Verification("not verified", reasons[-1])

    def _verify(self, batch: Batch) -> Verification:
        trial, reference, reason = self._run_on_rank_zero(batch)
        messages: list[Any] = [None] * self.plan.world
        dist.all_gather_object(messages, (reason, trial))
        if (reason := next((r for r, _ in messages if r), None)) is not None:
            if isinstance(reason, TooLargeError):
                raise reason
            return Verification("not verified", reason)
        trial = messages[0][1]
        rows = self._compare(trial, reference)
        if isinstance(rows, Verification):
            return rows
        if _are_equal(rows):
            return Verification("equal", "", tuple(rows), trial.plan.global_batch)
        if trial.splits_batch:
            same_samples = self._compare(trial.repeat_samples(), None)
            if isinstance(same_samples, Verification):
                return same_samples
            if _are_equal(same_samples):
                return Verification("inexact", self._describe_meeting(rows), tuple(rows), trial.plan.global_batch)
            rows = same_samples
        difference = first_difference(rows, list(self.classes))
        assert difference is not None
        return Verification("wrong", f"under it {difference.describe()}", tuple(rows), trial.plan.global_batch)

    # -- on one device --

    def _run_on_rank_zero(self, batch: Batch) -> tuple[Trial | None, Reference | None, str | TooLargeError | None]:
        """(the trial and the reference, on rank 0; why this rank cannot verify)."""
        trial = reference = None
        try:
            if self.birth is not None:
                self.model, self.optimizer = copy_with_values(*self.unborn, self.birth, self.device, self.truncation.keeps)
            copy_model(self.model, self.optimizer, truncation=self.truncation)  # raises where a copy cannot be made, before any rank waits
            if self.rank == 0:
                trial = made = make_trial(self.truncation.apply_to(self.plan), batch)
                reference = refuse_random_model(lambda: self._run_plain(made))
                if not math.isfinite(reference.loss):
                    raise NotVerifiableError(f"the loss is {reference.loss} on one device")
                if reference.calls_dropout:  # which stays on in layers that backward recomputes
                    trial = replace(trial, plan=replace(trial.plan, memory=replace(trial.plan.memory, recompute="none", layers={})))
        except (NotVerifiableError, CannotTruncateError) as error:
            return None, None, str(error)
        except Exception as error:
            if is_out_of_memory(error):
                return None, None, TooLargeError(f"one device runs out of memory: {first_line(error)}")
            whole = "" if not self.truncation.left_out else f" with {len(self.truncation.left_out)} blocks left out"
            return None, None, f"on one device it fails{whole} with {type(error).__name__}: {first_line(error)}"
        return trial, reference, None

    def _run_plain(self, trial: Trial, rounding: float = 0.0) -> Reference:
        """The trial's samples through the plain model, whose parameters are changed by `rounding`, relative."""
        model, _ = copy_model(self.model, self.optimizer, self.plain_device, self.truncation)
        with torch.no_grad():
            for param in (p for p in model.parameters() if rounding and p.is_floating_point()):
                param.mul_(1.0 + rounding * torch.randn_like(param).clamp(-2, 2))
        batch = _move(trial.plain_batch, self.plain_device)
        autocast = autocast_factory(self.plan, self.plain_device.type)
        return run_reference(model, self.loss_fn, batch, sample_count(batch), autocast, self.seed)

    # -- under the plan --

    def _compare(self, trial: Trial, reference: Reference | None) -> list[Comparison] | Verification:
        """Step under the plan and compare with one device, whose part runs here if there is no `reference`. Rank 0 compares, and every rank returns
        what it found: the rows, or why there are none."""
        groups: ProcessGroups | None = make_process_groups(trial.plan.mesh, trial.plan.sync, trial.plan.rank_devices, shares_world=False)
        assert groups is not None
        dist.barrier()  # a rank that fails at once must not close its groups while others still connect to them
        found, outcome = self._try_plan(trial, groups)
        if isinstance(outcome, _Failure):  # see [Note: a rank that fails alone]
            destroy_process_groups(groups)
            groups = None
            _free_memory()
        outcomes: list[Any] = [None] * self.plan.world
        dist.all_gather_object(outcomes, outcome)
        if groups is not None:
            destroy_process_groups(groups)
        if failures := [o for o in outcomes if isinstance(o, _Failure)]:
            return self._describe_failure(failures)
        message: list[Any] = [None]
        if found is not None:
            outputs = [entry for of_rank in outcomes for entry in of_rank]
            message = [self._compare_on_rank_zero(trial, reference, replace(found, outputs=outputs))]
        dist.broadcast_object_list(message, src=0)
        return message[0]  # type: ignore[no-any-return]

    def _compare_on_rank_zero(self, trial: Trial, reference: Reference | None, found: PlanResult) -> list[Comparison] | Verification:
        try:
            reference = reference or self._run_plain(trial)
            tolerance = tolerance_of(self.plan)
            rows = compare(reference, found, tolerance, self.classes)
            if not all(row.is_equal for row in rows):  # see [Note: tolerances]
                noise = measure_noise(reference, self._run_plain(trial, tolerance.rounding))
                rows = compare(reference, found, replace(tolerance, noise=noise), self.classes)
            copied, optimizer = copy_model(self.model, self.optimizer, self.plain_device, self.truncation)
            return rows + compare_step(copied, optimizer, reference, found, self.classes)
        except Exception as error:  # the other ranks wait for this one
            return Verification("not verified", f"the comparison with one device fails with {type(error).__name__}: {first_line(error)}")

    def _try_plan(self, trial: Trial, groups: ProcessGroups) -> tuple[PlanResult | None, _OutputNorms | _Failure]:
        """One step under the trial's plan: (rank 0's results, what this rank tells the others)."""
        names: dict[int, str] = {}
        try:
            model, optimizer = copy_model(self.model, self.optimizer, truncation=self.truncation)
            names = {id(m): name for name, m in model.named_modules()}
            return self._run_plan(trial, groups, model, optimizer)
        except Exception as error:
            fault = describe_fault(error, self.rank)
            fault = replace(fault, message=f"{fault.kind}: {first_line(error)}{'' if fault.secondary else _describe_place(error, names)}")
            is_refusal = isinstance(error, (NotVerifiableError, CannotTruncateError))
            failure = _Failure(fault, "out of memory" if is_out_of_memory(error) else "not verified" if is_refusal else "failed")
            traceback.clear_frames(error.__traceback__)  # they hold the process groups, which are to be closed
        return None, failure

    def _describe_failure(self, failures: list[_Failure]) -> Verification:
        """The verdict on the plan by the failure that came first; the others may be ranks that waited for its rank."""
        first = min(failures, key=lambda f: (f.fault.secondary, f.fault.time))
        text = f"under it rank {first.fault.rank} fails with {first.fault.message}"
        if first.verdict == "out of memory":
            raise TooLargeError(text)
        return Verification(first.verdict, text if first.verdict == "failed" else first.fault.message)

    def _run_plan(
        self, trial: Trial, groups: ProcessGroups, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[PlanResult | None, _OutputNorms]:
        session = Session(trial.plan, model, optimizer, seed=self.seed, groups=groups)
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
        outputs = self._own_outputs(applied, recorder, 0 if trial.repeated else first)
        found = PlanResult(float(result.loss), gradients, float(norms[-1]), parameters, ())
        return found if self.rank == 0 else None, outputs

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

    def _own_outputs(self, applied: AppliedPlan, recorder: OutputRecorder | None, first: int) -> _OutputNorms:
        """The norms of module outputs that this rank has recorded. A pipeline rank computes the modules of its own stages only."""
        stages = [applied.plan.stages[i] for i in applied.plan.stages_of_rank(applied.groups.pp.rank)] if applied.pipeline is not None else []
        layers = [layer for stage in stages for layer in stage.layers]
        outputs = recorder.outputs if recorder is not None else {}
        return [(n, out, first) for n, out in outputs.items() if not layers or any(f"{n}.".startswith(f"{layer}.") for layer in layers)]

    def _describe_meeting(self, rows: list[Comparison]) -> str:
        """Where samples meet: the first module whose output depends on the other samples, or else the loss."""
        loss = next(row for row in rows if row.quantity == "loss")
        module = next((row for row in rows if row.quantity == "output" and not row.is_equal), None)
        where = f"in {module.name or 'the model'} ({module.module_class})" if module is not None else "in the loss"
        return f"samples meet {where}, and ranks or micro-batches see only their own: {loss.describe()}"


def _are_equal(rows: list[Comparison]) -> bool:
    """Outputs only help to name a module: a model may not use them."""
    return all(row.is_equal for row in rows if row.quantity != "output")


def _describe_place(error: BaseException, names: Mapping[int, str]) -> str:
    """The innermost module that an error passed through, by its name or, where it is a copy, its class; "" if there is none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]  # without the one that handles it: its locals refer to the error
    for module in (frame.f_locals.get("self") for frame in reversed(frames)):
        if isinstance(module, nn.Module):
            name, kind = names.get(id(module)), type(module).__name__
            return f" in {kind}" if name is None else f" in {name or 'the model'} ({kind})"
    return ""


def _move(batch: Batch, device: torch.device) -> Batch:
    return pytree.tree_map(lambda t: t.to(device) if torch.is_tensor(t) else t, batch)


def _free_memory() -> None:
    for _ in range(2):  # hooks and modules refer to each other, and an autograd graph that the first pass frees hides others from it
        gc.collect()
    trim_heap()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
