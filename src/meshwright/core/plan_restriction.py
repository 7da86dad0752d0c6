"""What a plan says about one module, and the plan of a model that has lost some: its policies are made of entries that name modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from meshwright.core.plan import Plan, Stage
from meshwright.core.serialization import dump_json, to_data

_NAMES = ("module", "parameter")  # the fields by which an entry says what it is about
_POLICIES = ("memory", "placements", "tensor", "tensor_y", "context", "spatial", "expert", "samples")


def is_inside(name: str, module: str) -> bool:
    """Whether `name` is that of the module, or of a module or parameter inside it."""
    return name == module or name.startswith(f"{module}.")


def without_modules(plan: Plan, removed: Collection[str]) -> Plan:
    """The plan for a model in which these modules have lost their parameters and submodules, and still are called. Stages keep their names."""
    inside = _membership(removed)
    changes: dict[str, Any] = {name: _prune(getattr(plan, name), inside) for name in _POLICIES}
    stages = tuple(replace(s, skipped_modules=tuple(m for m in s.skipped_modules if m in removed or not inside(m))) for s in plan.stages)
    return replace(plan, stages=stages, **changes)


def describe_treatment(plan: Plan, module: str) -> str:
    """All that the plan's policies say about a module, without its name: equal for modules that the plan treats alike."""
    entries = [text for name in _POLICIES for text in _mentions(getattr(plan, name), module, name)]
    return "\n".join([plan.memory.recompute_mode(module), *entries]).replace(f"{module}.", "*.").replace(f'"{module}"', '"*"')


def modules_at_boundaries(stages: Collection[Stage]) -> set[str]:
    """The modules that pipeline stages begin at, send the outputs of, or receive at."""
    names = {stage.entry for stage in stages}
    for activation in (a for stage in stages for a in stage.boundary_activations):
        names |= {activation.source, *(consumer.module for consumer in activation.consumers)}
    return names - {""}


def _membership(modules: Collection[str]) -> Callable[[str], bool]:
    """A function that says whether a name is that of one of the modules, or inside one."""

    def inside(name: str) -> bool:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return bool(name)

    return inside


def _is_about(entry: Any, inside: Callable[[str], bool]) -> bool:
    names = (entry,) if isinstance(entry, str) else [getattr(entry, field, None) for field in _NAMES] if is_dataclass(entry) else ()
    return any(isinstance(name, str) and inside(name) for name in names)


def _prune(value: Any, inside: Callable[[str], bool]) -> Any:
    """The value without the entries that are about these modules, however deep they lie."""
    if isinstance(value, tuple):
        return tuple(_prune(entry, inside) for entry in value if not _is_about(entry, inside))
    if isinstance(value, Mapping):
        return {key: entry for key, entry in value.items() if not inside(key)}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _prune(getattr(value, f.name), inside) for f in fields(value)})
    return value


def _mentions(value: Any, module: str, path: str) -> Iterator[str]:
    """The entries about a module, as text, each with where it lies."""
    inside = lambda name: is_inside(name, module)  # noqa: E731
    if isinstance(value, (tuple, Mapping)):
        for entry in value:
            if _is_about(entry, inside):
                yield f"{path} {dump_json(to_data(entry))}"
            elif is_dataclass(entry):
                yield from _mentions(entry, module, path)
    elif is_dataclass(value):
        named = f"{path} {name}" if isinstance(name := getattr(value, "name", None), str) else path
        for field in fields(value):
            yield from _mentions(getattr(value, field.name), module, f"{named}.{field.name}")
