"""Where a model is cut into layers: the blocks it repeats, and what stands around them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layer:
    """One layer. `owner` marks parameters that a container holds itself, outside all of its parts."""

    name: str
    module: nn.Module
    owner: bool = False


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers of `model` in registration order; every parameter belongs to exactly one."""
    found: list[Layer] = []
    _descend("", model, found)
    return found


def _descend(name: str, module: nn.Module, found: list[Layer]) -> None:
    children = list(module.named_children())
    if not children or (name and not _holds_blocks(module)):
        found.append(Layer(name, module))
        return
    if any(True for _ in module.parameters(recurse=False)):
        found.append(Layer(name, module, owner=True))
    repeats = isinstance(module, (nn.ModuleList, nn.Sequential)) and _repeats(module)
    for child_name, child in children:
        path = f"{name}.{child_name}" if name else child_name
        if repeats and list(child.children()):
            found.append(Layer(path, child))  # a repeated block stays whole
        else:
            _descend(path, child, found)


def _holds_blocks(module: nn.Module) -> bool:
    """A list or sequence of parts somewhere inside: something to cut at."""
    return any(isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1 for m in module.modules())


def _repeats(parts: nn.ModuleList | nn.Sequential) -> bool:
    signatures = [signature(part) for part in parts]
    return len(signatures) > 1 and len(set(signatures)) < len(signatures)


def signature(module: nn.Module) -> str:
    """Equal for modules of the same classes and parameter shapes."""
    shapes = ",".join(f"{n}{tuple(p.shape)}" for n, p in module.named_parameters())
    return f"{type(module).__name__}({shapes})"


def behaviour(module: nn.Module) -> str:
    """Equal for modules that do the same: the same parts with the same settings. A part's own number in the model is no setting."""
    parts = []
    for name, part in module.named_modules():
        settings = {
            key: getattr(value, "__qualname__", repr(value))
            for key, value in vars(part).items()
            if not key.startswith("_") and key != "training" and not key.endswith(_NUMBERING)
            and (isinstance(value, (int, float, str, bool, tuple)) or callable(value)) and not isinstance(value, nn.Module)
        }  # fmt: skip
        extra = "" if any(key.endswith(_NUMBERING) for key in vars(part)) else part.extra_repr()
        parts.append(f"{name}:{type(part).__qualname__}({extra}){sorted(settings.items())}")
    return signature(module) + ";".join(parts)


_NUMBERING = ("idx", "index", "site", "layer_id", "layer_number")


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has several; the first is the one that it is counted under."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return tuple(tuple(found) for found in names.values() if len(found) > 1)
