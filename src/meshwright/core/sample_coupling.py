"""Where the samples of a batch meet in a model or its loss: facts about the model, which a plan carries so that a run can be exact or say why not.

[Note: samples that meet]
A plan that splits the batch over data ranks or micro-batches computes what one device computes as long as samples are independent and the loss is
their mean. BatchNorm, contrastive losses and other statistics of the batch make samples meet. A mean over the targets that a mask leaves has a
divisor that depends on the data, so the mean of the ranks' means is another number; the run then sums and counts instead
(execute/counted_loss.py). A loss that is a sum is added up over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshwright.core.context_policy import LOSS_MODULE

if TYPE_CHECKING:
    from meshwright.core.plan import Plan

MeetingKind = Literal["batch_norm", "statistics", "products", "order", "updates"]
# "counted": the loss returns (sum, count); "masked mean": its divisor is a number of targets; "terms": a masked mean and other terms;
# "other": it computes on statistics of the batch, which are listed as meetings.
LossReduction = Literal["unknown", "mean", "counted", "masked mean", "sum", "terms", "other"]
BatchNormMode = Literal["local", "sync"]
SampleSplit = Literal["together", "apart"]


@dataclass(frozen=True)
class SampleMeeting:
    """An operation whose result for one sample depends on other samples of the batch, or on how often the model has run ("updates")."""

    module: str  # LOSS_MODULE in the code of the loss
    kind: MeetingKind
    operation: str
    num_channels: int = 0  # of a BatchNorm
    calls: int = 1  # in one forward pass

    @property
    def place(self) -> str:
        return "the loss" if self.module == LOSS_MODULE else self.module or "the model"


@dataclass(frozen=True)
class SampleCoupling:
    """What is known about the samples of a model: where they meet, and how the loss reduces them."""

    meetings: tuple[SampleMeeting, ...] = ()
    loss: LossReduction = "unknown"
    targets_per_sample: float = 1.0  # of a masked mean, where no target is masked
    loss_after: str | None = None  # the module that returns last before a masked mean is computed; None: there is none

    @property
    def batch_norms(self) -> tuple[SampleMeeting, ...]:
        return tuple(m for m in self.meetings if m.kind == "batch_norm")

    @property
    def compares_samples(self) -> bool:
        """Whether samples meet in products, as in contrastive losses."""
        return any(m.kind == "products" for m in self.meetings)


def batch_parts(plan: Plan) -> int:
    """Into how many parts a plan splits the global batch: over data ranks and micro-batches."""
    return plan.mesh.data_parallel_size * plan.micro_batches


def counts_targets(plan: Plan) -> bool:
    """Whether the run turns the loss, a masked mean, into a sum and a count."""
    return plan.samples.loss == "masked mean" and batch_parts(plan) > 1


def watches_loss(plan: Plan) -> bool:
    """Whether nothing is known about the loss, so that the run finds out whether it is a masked mean. Context parallelism counts targets itself."""
    return plan.samples.loss == "unknown" and plan.compile == "none" and plan.mesh.cp == 1


def inexact_reasons(plan: Plan) -> list[str]:
    """What differs from one device under this plan, one sentence each with what to set; empty where the plan is exact, as far as is known."""
    if batch_parts(plan) == 1:
        return []
    part = "micro-batch" if plan.micro_batches > 1 else "data rank"
    coupling, reasons = plan.samples, []
    if norms := coupling.batch_norms if plan.batch_norm == "local" else ():
        same, advice = ("as in DDP", "") if plan.micro_batches == 1 else ("as in gradient accumulation", " and micro_batches=1")
        reasons.append(f"BatchNorm ({_list_places(norms)}) normalises each {part}'s samples by themselves, {same}: set batchnorm=sync{advice}")
    words = {
        "products": "compares samples with each other, and each {part} has only its own",
        "statistics": "computes on statistics of the batch, and each {part} has its own",
        "order": "uses the order of the samples in the batch, and each {part} has its own",
    }
    for kind, text in words.items():
        if met := [m for m in coupling.meetings if m.kind == kind]:
            operations = ", ".join(dict.fromkeys(m.operation for m in met[:3]))
            reasons.append(f"{_list_places(met)} {text.format(part=part)} ({operations}): set samples=together to keep a batch whole")
    if plan.micro_batches > 1 and (updates := [m for m in coupling.meetings if m.kind == "updates"]):
        reasons.append(f"{_list_places(updates)} updates a buffer that it computes with, once for each micro-batch: set micro_batches=1")
    if coupling.loss == "terms":
        divides = f"each {part} divides by the number of its own"
        reasons.append(f"the loss adds other terms to a mean over targets, and where targets are masked {divides}: set samples=together")
    return reasons


def describe_inexactness(plan: Plan) -> str:
    """One line that says what differs from one device; empty where nothing does."""
    reasons = inexact_reasons(plan)
    return f"not equal to one device: {'; '.join(reasons)}" if reasons else ""


def explain_samples(plan: Plan) -> list[str]:
    """Sentences for the explanation of a plan: what differs from one device, or that it is not known."""
    if inexact := describe_inexactness(plan):
        return [f"{inexact[0].upper()}{inexact[1:]}."]
    if batch_parts(plan) > 1 and plan.samples.loss == "unknown":
        return ["Whether samples meet in the model or its loss is not known, because they were not traced: if they do, set samples=together."]
    return []


def _list_places(meetings: tuple[SampleMeeting, ...] | list[SampleMeeting]) -> str:
    places = list(dict.fromkeys(m.place for m in meetings))
    return places[0] + (f" and {len(places) - 1} other{'s' * (len(places) > 2)}" if len(places) > 1 else "")
