"""How the model of a built-in job comes into being: without values, which each rank then gives to its own pieces, or whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from meshwright.core.plan import Plan
from meshwright.core.task import Task
from meshwright.describe.deferred_init import DeferralError, defer_init
from meshwright.execute.birth import Birth, lacking_weights
from meshwright.orchestrate.config import RunConfig
from meshwright.zoo.weight_layouts import converts_weights

_MANY = 3_000_000_000  # values that take a minute to draw: a core draws some 50 million a second


def born_in_pieces(job: RunConfig, task: Task, plan: Plan) -> tuple[nn.Module | None, Birth | None, str]:
    """(the model without values, where they come from, ""), or (None, None, why it has to be built whole on every rank before it is cut)."""
    build = task.architecture if task.weights and task.architecture is not None else task.build
    try:
        deferred = defer_init(lambda: _in_precision(build(), plan), job.seed)
    except DeferralError as error:
        return None, None, str(error)
    if job.resume is not None:
        return deferred.model, Birth(deferred.values, is_restored=True), ""
    if not task.weights or job.init_from is not None:
        folder = Path(job.init_from) if job.init_from is not None else None
        return deferred.model, Birth(deferred.values, folder), ""
    folder = Path(task.weights)
    if converts_weights(deferred.model):
        return None, None, "transformers converts its weights while it reads them"
    if lacking := lacking_weights(deferred.model, folder):
        return None, None, f"its weights have no {lacking[0]} of this name and shape, which transformers may find under another"
    return deferred.model, Birth(deferred.values, folder), ""


def describe_birth(birth: Birth | None, reason: str, plan: Plan, shapes: Mapping[str, Sequence[int]]) -> str:
    """A line on what the model's birth costs, where that is much; "" elsewhere."""
    cuts = plan.memory.zero == 3 or any(plan.mesh.degree(axis) > 1 for axis in ("tp", "pp", "ep"))
    if birth is None:
        return f"every rank builds the whole model before it is cut: {reason}" if cuts else ""
    drawn = sum(math.prod(shape) for shape in shapes.values()) if birth.weights is None and not birth.is_restored else 0
    weights = "hf:FOLDER, --init-from FOLDER or --resume RUN read only a rank's own part"
    return f"every rank draws all {drawn / 1e9:.1f} billion initial values, which takes a minute or more: {weights}" if drawn > _MANY else ""


def build_whole(job: RunConfig, task: Task, plan: Plan) -> nn.Module:
    """On the host, so that ranks on other kinds of devices have the same values."""
    torch.manual_seed(job.seed)
    return _in_precision(task.build(), plan)


def _in_precision(model: nn.Module, plan: Plan) -> nn.Module:
    return model.double() if plan.memory.precision == "fp64" else model
