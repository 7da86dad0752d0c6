"""What stands in for modules that other pipeline stages compute: outputs of the right shapes, their hooks, and parameters to ask for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.describe.preserved_attributes import is_own_hook


@dataclass(frozen=True)
class PlaceholderTree:
    """The structure of a module's inputs or outputs; tensors are made of zeros when it is asked for."""

    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, tree: Any, device: str) -> PlaceholderTree:
        leaves, spec = pytree.tree_flatten(tree)
        makers = (partial(torch.zeros, tuple(t.shape), dtype=t.dtype, device=device) if torch.is_tensor(t) else t for t in leaves)
        return cls(tuple(makers), spec)

    def make(self) -> Any:
        return pytree.tree_unflatten([leaf() if isinstance(leaf, partial) else leaf for leaf in self.leaves], self.spec)


@dataclass(frozen=True)
class SkippedCall:
    """A call of a module that an earlier stage has computed."""

    module: str
    args: PlaceholderTree
    kwargs: PlaceholderTree
    output: PlaceholderTree


class SkippedCallRecorder:
    """Records a call of a module and the calls inside it, in the order in which they return."""

    def __init__(self, name: str, module: nn.Module, device: str) -> None:
        self.calls: tuple[SkippedCall, ...] = ()  # of the last call of the module
        self._name, self._device, self._inside = name, device, list[SkippedCall]()
        modules = [(f"{name}.{inner}" if inner else name, m) for inner, m in module.named_modules()]
        self.handles = [m.register_forward_hook(partial(self._record, path), with_kwargs=True) for path, m in modules]

    def _record(self, path: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inside.append(SkippedCall(path, *(PlaceholderTree.of(tree, self._device) for tree in (args, kwargs, output))))
        if path == self._name:
            self.calls, self._inside = tuple(self._inside), []


def skip_calls(calls: Sequence[SkippedCall], modules: Mapping[str, nn.Module]) -> Any:
    """The placeholder output of the last of these calls, which encloses the others. Forward hooks of the model's own run, with placeholders: a model
    may collect with them what its layers return."""
    output = None
    for call in calls:
        hooks = _hooks_of_the_model(modules[call.module])
        if hooks or call is calls[-1]:
            output = call.output.make()
        for hook, with_kwargs in hooks:
            keywords = (call.kwargs.make(),) if with_kwargs else ()
            changed = hook(modules[call.module], call.args.make(), *keywords, output)
            output = output if changed is None else changed
    return output


def _hooks_of_the_model(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The forward hooks that are not Meshwright's, and whether each takes keyword arguments. Some are registered when a model first runs."""
    return [(hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items() if not is_own_hook(hook)]


def lend_parameters(module: nn.Module, placeholders: Sequence[Tensor], running: Callable[[], bool]) -> None:
    """Let a module without parameters of its own yield placeholders while a stage runs: a model may ask one for its device or dtype."""

    def parameters(recurse: bool = True) -> Iterator[Tensor]:
        return iter(placeholders if running() else ())

    vars(module)["parameters"] = parameters
