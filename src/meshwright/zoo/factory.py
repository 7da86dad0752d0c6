"""A user's own model by reference, `package.module:factory` or `path/to/file.py:factory`, as a task."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.errors import RequestError
from meshwright.core.task import Batch, Field, Task


def load(reference: str) -> Task:
    """Import the factory and call it; it returns a Task, or a module with `loss(batch)` and `fields`."""
    return _load(reference, needs_loss=True)


def _load(reference: str, *, needs_loss: bool) -> Task:
    module, attribute = import_reference(reference)
    factory = getattr(module, attribute, None)
    if factory is None:
        raise RequestError(f"{reference}: {reference.rpartition(':')[0]} has no '{attribute}'")
    if not callable(factory):
        raise RequestError(f"{reference}: '{attribute}' is a {type(factory).__name__}, not a function that returns a Task or a module")
    result = _call_factory(factory, reference)
    if isinstance(result, Task):
        return result
    if isinstance(result, nn.Module):
        return _task_from_module(result, factory, reference, needs_loss)
    raise RequestError(f"{reference}: returned {type(result).__name__}; it must return a meshwright Task, or a module with loss(batch) and fields")


def load_module(reference: str) -> Task:
    """The same for inference: a module may do without loss and fields. Its fields that `forward` names are then what it is called with."""
    return _load(reference, needs_loss=False)


def module_loss(model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
    """The module's own loss method. It should call `self(...)`, not `self.forward(...)`, so that hooks run."""
    return model.loss(batch)  # type: ignore[operator]


def import_reference(reference: str) -> tuple[ModuleType, str]:
    """Import the module of `package.module:name` or `path/to/file.py:name`; returns it and the name."""
    source, _, attribute = reference.rpartition(":")
    try:
        if source.endswith(".py"):
            return _import_file(Path(source)), attribute
        _add_to_sys_path(Path.cwd())  # the console script's path starts at its own folder; a user's package is usually in the current one
        return importlib.import_module(source), attribute
    except RequestError:
        raise
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise RequestError(f"{reference}: cannot import {source}: {type(error).__name__}: {one_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RequestError(f"{path}: no such file")
    _add_to_sys_path(path.resolve().parent)
    # A unique name: a file called random.py must not shadow the standard library's module.
    spec = importlib.util.spec_from_file_location(f"meshwright_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module there
    spec.loader.exec_module(module)
    return module


def _add_to_sys_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _call_factory(factory: Callable[[], Any], reference: str) -> Any:
    """The factory's result, without memory for weights where possible: a module is first built on the meta device."""
    try:
        with torch.device("meta"):
            result = factory()
        if isinstance(result, nn.Module):
            return result
    except Exception:  # some constructors read values, which meta tensors lack; the plain call below decides
        pass
    try:
        return factory()
    except Exception as error:
        raise RequestError(f"{reference}: the factory raised {type(error).__name__}: {one_line(error)}") from error


def _task_from_module(module: nn.Module, factory: Callable[[], nn.Module], reference: str, needs_loss: bool) -> Task:
    kind, has_loss = type(module).__name__, callable(getattr(module, "loss", None))
    if needs_loss and not has_loss:
        raise RequestError(f"{reference}: {kind} has no loss(batch) method: add one, or return a meshwright Task")
    fields = getattr(module, "fields", None)
    if not isinstance(fields, Mapping) or not fields or not all(isinstance(f, Field) for f in fields.values()):
        if needs_loss:
            raise RequestError(f"{reference}: {kind} has no fields, a mapping of names to meshwright Field: add it, or return a meshwright Task")
        fields = {}
    return Task(name=reference, build=factory, loss=module_loss if has_loss else call_with_fields, fields=dict(fields))


def call_with_fields(model: nn.Module, batch: Batch) -> Tensor:
    """Stands for the loss of a module that has none: a sum of its outputs for the fields that its forward names."""
    names = inspect.signature(model.forward).parameters
    out = model(**{name: tensor for name, tensor in batch.items() if name in names})
    return torch.stack([leaf.float().mean() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]).sum()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
