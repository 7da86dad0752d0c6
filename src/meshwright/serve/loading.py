"""A model on one rank, ready for inference: built without memory, cut by the plan, and filled with this rank's part of the weights alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.task import Task
from meshwright.describe.deferred_init import DeferralError, defer_init
from meshwright.execute.apply import AppliedPlan, apply
from meshwright.execute.birth import Birth
from meshwright.execute.load_state import load_tensors, read_whole
from meshwright.execute.placeholders import Placeholders
from meshwright.execute.quantized_weights import prepare_layers, quantize_layers
from meshwright.serve.model_source import ModelSource
from meshwright.zoo.weight_layouts import converts_weights

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode to which a plan was applied. `note` says what was not as usual: random weights, or a whole model on every rank."""

    model: nn.Module
    applied: AppliedPlan
    device: torch.device
    vocabulary: int
    note: str = ""
    prepared_layers: tuple[nn.Module, ...] = ()  # whose weights can be quantized

    def quantize(self) -> None:
        """Quantize the weights, if the plan says so."""
        if self.prepared_layers:
            quantize_layers(self.prepared_layers, self.applied.plan.serve.quantize)


def load_model(source: ModelSource, task: Task, plan: Plan, device: torch.device) -> LoadedModel:
    """Build and fill the model. Collective: every rank of the plan calls it."""
    dtype = PRECISIONS[plan.memory.precision]
    folder = Path(source.weights) if source.weights else None
    build = task.architecture if task.architecture is not None else task.build
    model, birth, note = _deferred(build, folder, dtype, source)
    if birth is None:
        torch.manual_seed(source.seed)
        model = task.build().to(dtype=dtype, device=device)
    assert model is not None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    placeholders = Placeholders(model, device) if birth is not None else None
    layers = prepare_layers(model) if plan.serve.quantize != "none" else ()
    applied = apply(plan, model.eval(), None, broadcasts=False, placeholders=placeholders)
    if birth is not None:
        birth.fill(applied)
    if birth is not None and birth.loaded is not None and birth.loaded.missing:
        names = birth.loaded.missing
        raise RequestError(
            f"{folder}: it has no {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: a part of the weights is missing"
        )
    if source.checkpoint:
        path = Path(source.checkpoint)
        manifest, wrong = read_whole(applied, path)
        if manifest is None:
            raise RequestError(wrong[0])
        load_tensors(applied, path, manifest, optimizer=False)
    return LoadedModel(model, applied, device, _vocabulary(model, task), note, layers)


def _deferred(
    build: Callable[[], nn.Module], folder: Path | None, dtype: torch.dtype, source: ModelSource
) -> tuple[nn.Module | None, Birth | None, str]:  # fmt: skip
    """The model without values and where they come from; no model and the reason, if it has to be built whole."""
    try:
        deferred = defer_init(lambda: build().to(dtype), source.seed)
    except DeferralError as error:
        return None, None, str(error)
    if source.checkpoint:
        return deferred.model, Birth(deferred.values, is_restored=True), ""
    if folder is None:
        return deferred.model, Birth(deferred.values), "its weights are random: no folder of weights was given"
    if converts_weights(deferred.model):
        return None, None, "transformers converts its weights while it reads them, so every rank reads all of them"
    return deferred.model, Birth(deferred.values, folder), ""


def _vocabulary(model: nn.Module, task: Task) -> int:
    for config in (getattr(model, "config", None),):
        for name in ("vocab_size", "vocab"):
            if isinstance(size := getattr(config, name, None), int):
                return size
    return next((field.high for field in task.fields.values() if field.dtype == "int64" and len(field.shape) == 1), 0)
