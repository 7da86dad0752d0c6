"""Hooks that apply a function to one tensor of a module's inputs or outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

TensorFn = Callable[[torch.Tensor], torch.Tensor]


def at_module_input(module: nn.Module, position: int, fn: TensorFn, compiler_disabled: Callable[..., Any] = lambda function: function) -> None:
    """Apply `fn` to the tensor at `position` among a module's inputs, and replace all its occurrences there. `compiler_disabled` keeps the hook
    out of compiled graphs."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensor_at((args, kwargs), position, fn)

    module.register_forward_pre_hook(compiler_disabled(before), with_kwargs=True)


def at_module_output(module: nn.Module, position: int, fn: TensorFn, compiler_disabled: Callable[..., Any]) -> None:
    module.register_forward_hook(compiler_disabled(lambda _m, _a, out: map_tensor_at(out, position, fn)))


def map_tensor_at(tree: Any, position: int, fn: TensorFn) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    given = [leaf for leaf in leaves if torch.is_tensor(leaf)][position]
    now = fn(given)
    return pytree.tree_unflatten([now if leaf is given else leaf for leaf in leaves], spec)
