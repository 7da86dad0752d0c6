"""Splits a model into layers: its repeated blocks, and the modules around them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshwright.core.dataflow import LayerKind


@dataclass(frozen=True)
class Layer:
    """One layer. `own_parameters_only` marks parameters that a container holds directly, outside all of its children."""

    name: str
    module: nn.Module
    own_parameters_only: bool = False


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers of `model` in registration order; every parameter belongs to exactly one."""
    layers: list[Layer] = []
    _collect_layers("", model, layers)
    return layers


def _collect_layers(name: str, module: nn.Module, layers: list[Layer]) -> None:
    children = list(module.named_children())
    if not children or (name and _has_forward(module) and not _contains_blocks(module)):
        layers.append(Layer(name, module))
        return
    if any(True for _ in module.parameters(recurse=False)):
        layers.append(Layer(name, module, own_parameters_only=True))
    repeats = isinstance(module, (nn.ModuleList, nn.Sequential)) and _has_repeats(module)
    for child_name, child in children:
        path = f"{name}.{child_name}" if name else child_name
        if repeats and list(child.children()) and _has_forward(child):
            layers.append(Layer(path, child))  # a repeated block is one layer
        else:
            _collect_layers(path, child, layers)


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called: a ModuleList cannot, so nothing can be gathered or recomputed at its call."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _contains_blocks(module: nn.Module) -> bool:
    """Whether it contains a ModuleList or Sequential of several modules, to split at."""
    return any(isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1 for m in module.modules())


def _has_repeats(modules: nn.ModuleList | nn.Sequential) -> bool:
    present = [m for m in modules if m is not None]  # type: ignore[redundant-expr]  # a list may hold None in a module's place
    return len(set(map(module_signature, present))) < len(present)


def module_signature(module: nn.Module) -> str:
    """Equal for modules of the same classes and parameter shapes."""
    shapes = ",".join(f"{n}{tuple(p.shape)}" for n, p in module.named_parameters())
    return f"{type(module).__name__}({shapes})"


def behavior_signature(module: nn.Module) -> str:
    """Equal for modules that compute the same: the same submodules with the same settings, hooks and frozen parameters. A submodule's index in the
    model is not a setting."""
    signatures = []
    for name, submodule in module.named_modules():
        settings = {
            key: getattr(value, "__qualname__", repr(value))
            for key, value in vars(submodule).items()
            if not key.startswith("_") and key != "training" and not key.endswith(_INDEX_SUFFIXES)
            and (isinstance(value, (int, float, str, bool, tuple)) or callable(value)) and not isinstance(value, nn.Module)
        }  # fmt: skip
        extra = "" if any(key.endswith(_INDEX_SUFFIXES) for key in vars(submodule)) else submodule.extra_repr()
        hooks = [
            getattr(h, "__qualname__", type(h).__qualname__) for h in (*submodule._forward_pre_hooks.values(), *submodule._forward_hooks.values())
        ]
        signatures.append(f"{name}:{type(submodule).__qualname__}({extra}){sorted(settings.items())}{hooks}")
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return module_signature(module) + ";".join(signatures) + f";frozen {frozen}"


_INDEX_SUFFIXES = ("idx", "index", "site", "layer_id", "layer_number")


def layer_kind(module: nn.Module) -> LayerKind:
    """The layer's kind: linear and conv layers, whose partial results the runtime can reduce across ranks, bias included; and embedding tables
    that may be on other ranks. A subclass with its own forward is of no kind, since nobody knows what it does with its parameters. Only an
    embedding's forward may do more: the runtime replaces the lookup in it."""
    runs_torch_code = type(module).forward.__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    if (isinstance(module, nn.Linear) and runs_torch_code) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
        return "linear"
    if isinstance(module, nn.modules.conv._ConvNd) and runs_torch_code:
        return "conv"
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is not None or module.scale_grad_by_freq:
        return "other"
    if isinstance(module, nn.EmbeddingBag):
        return "bag" if runs_torch_code else "other"
    return "embedding"


def training_batch_norms(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """The BatchNorm layers that normalise by the batch, and their channels; frozen ones do not."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return tuple((name, m.num_features) for name, m in layers if m.training or m.running_mean is None)


def tied_parameter_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each tied parameter; the first is the one that it is counted under."""
    names_by_id: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(param), []).append(name)
    return tuple(tuple(names) for names in names_by_id.values() if len(names) > 1)
