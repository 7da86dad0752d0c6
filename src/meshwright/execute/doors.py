"""Tensors changed at a module's door: among what it is given, or among what it gives out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Change = Callable[[torch.Tensor], torch.Tensor]


def at_door(module: nn.Module, position: int, change: Change, apart: Callable[..., Any] = lambda function: function) -> None:
    """Among the tensors that a module is given, the one at `position` is changed, wherever else it is given too. `apart` keeps the
    hook out of compiled graphs."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return changed((args, kwargs), position, change)

    module.register_forward_pre_hook(apart(before), with_kwargs=True)


def at_output(module: nn.Module, position: int, change: Change, apart: Callable[..., Any]) -> None:
    module.register_forward_hook(apart(lambda _m, _a, out: changed(out, position, change)))


def changed(tree: Any, position: int, change: Change) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    given = [leaf for leaf in leaves if torch.is_tensor(leaf)][position]
    now = change(given)
    return pytree.tree_unflatten([now if leaf is given else leaf for leaf in leaves], spec)
