"""Models of a script that have no memory before `prepare` gives each rank its own pieces: of `deferred_init`, of factories, or on the meta device."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.core.errors import RequestError
from meshwright.describe.deferred_init import InitialValues, defer_init, defer_reset
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.birth import Birth, lacking_weights
from meshwright.execute.weights import load_weights
from meshwright.orchestrate.resume import describe_names

_deferred: weakref.WeakKeyDictionary[nn.Module, InitialValues] = weakref.WeakKeyDictionary()  # by the model that has none


def deferred_init(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, without memory: on the meta device until `prepare` or `parallelize` gives each rank its own pieces. Their values
    are those that `build` would have drawn here from torch's generator, whose state stays as it is."""
    deferred = defer_init(build)
    _deferred[deferred.model] = deferred.values
    return deferred.model


def call_factories(objects: Sequence[Any]) -> list[Any]:
    """`prepare`'s objects, with a model in the place of a function without arguments, and an optimizer in that of a function of the model."""
    made = [deferred_init(thing) if _takes_nothing(thing) else thing for thing in objects]
    model = next((thing for thing in made if isinstance(thing, nn.Module)), None)
    return [thing(model) if _is_function(thing) and model is not None else thing for thing in made]


def _is_function(thing: Any) -> bool:
    return callable(thing) and not isinstance(thing, (nn.Module, torch.optim.Optimizer, LRScheduler, Iterable))


def _takes_nothing(thing: Any) -> bool:
    if not _is_function(thing):
        return False
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def birth_of(model: nn.Module, folder: Path | None) -> Birth | None:
    """How a model without values gets them, from a folder as far as it has them; None for a model that has values. RequestError names a tensor that
    nothing would give values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if not on_meta:
        return None
    if model in _deferred:
        return Birth(_deferred[model], folder)
    if len(on_meta) < len(tensors):
        raise RequestError(f"{on_meta[0]} is on the meta device, and other tensors are not: build the model with mw.deferred_init")
    values = defer_reset(model)
    loaded = {*on_meta} - {*lacking_weights(model, folder)} if folder is not None else set()
    if unknown := sorted({*values.undefined()} - loaded):
        reason = f"the model is on the meta device, and nothing gives {unknown[0]} its values: no reset_parameters() does"
        raise RequestError(f"{reason}: build it with mw.deferred_init(lambda: {type(model).__name__}(…)), or give weights=FOLDER that has them")
    return Birth(values, folder)


def fill_with_initial_values(applied: AppliedPlan, birth: Birth | None, folder: Path | None) -> None:
    """Give a model its initial values, and say which names of it and of a folder do not match. Collective."""
    if birth is not None:
        birth.share_random_state(applied)
        birth.fill(applied)
        birth.check_replicas(applied)
        loaded = birth.loaded
    else:
        loaded = load_weights(applied, folder) if folder is not None else None
    if loaded is not None and (loaded.missing or loaded.unexpected) and applied.groups.rank == 0:
        print(f"meshwright: {describe_names(str(folder), loaded.missing, loaded.unexpected)}", file=sys.stderr)
