"""Runs a model without leaving traces in it: what its code stores while it runs on fake tensors (tables made on demand, caches, counters) must not be
found by the next step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

from torch import nn

_TORCH_REGISTRIES = ("_parameters", "_buffers", "_modules")  # and hooks of Meshwright's: whoever changes these puts them back


@contextmanager
def preserved_attributes(model: nn.Module) -> Iterator[None]:
    """While active, attributes of modules may be set, and lists, dicts and sets among them filled; afterwards they are as before. `lru_cache`s of
    the modules' code that were filled are emptied."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    contents = [(value, value.copy()) for _, attributes in before for key, value in attributes.items() if _is_own_container(key, value)]
    hooks = [(registry, set(registry)) for module in model.modules() for registry in (module._forward_hooks, module._forward_pre_hooks)]
    caches = [(cache, cache.cache_info().misses) for cache in _find_caches(model)]
    try:
        yield
    finally:
        for module, attributes in before:
            if vars(module).keys() != attributes.keys() or any(value is not attributes[key] for key, value in vars(module).items()):
                vars(module).clear()
                vars(module).update(attributes)
        for container, content in contents:
            _refill(container, content)
        for registry, known in hooks:
            _remove_hooks_of_the_model(registry, known)
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _is_own_container(key: str, value: Any) -> bool:
    return type(value) in (dict, list, set) and key not in _TORCH_REGISTRIES and "_hooks" not in key


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is Meshwright's, and not one of the model's code."""
    return (getattr(hook, "__module__", None) or "").startswith("meshwright.")


def _remove_hooks_of_the_model(registry: Any, known: set[int]) -> None:
    """Remove the hooks that the model's code registered when it first ran: the flag that says so is unset, and it would register them twice."""
    for key in [key for key, hook in registry.items() if key not in known and not is_own_hook(hook)]:
        del registry[key]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _find_caches(model: nn.Module) -> list[Any]:
    """The cached functions in the classes of a model's modules and in the files that define them."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if not base.__module__.startswith(("torch.", "builtins"))}
    namespaces: list[Any] = [vars(cls) for cls in classes]
    namespaces += [vars(sys.modules[name]) for name in {cls.__module__ for cls in classes} if name in sys.modules]
    values = [value for namespace in namespaces for value in list(namespace.values())]
    functions = [getattr(v, "__func__", v) for v in values if callable(v) or isinstance(v, classmethod)]  # a static method's function
    cells = [cell for function in functions if isinstance(function, FunctionType) for cell in function.__closure__ or ()]
    functions += [cell.cell_contents for cell in cells if cell != CellType()]  # what a decorator has wrapped
    return list({id(function): function for function in functions if isinstance(function, functools._lru_cache_wrapper)}.values())
