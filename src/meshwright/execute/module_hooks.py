"""Changes to a module's forward from outside: hooks on one tensor of its inputs or outputs, and contexts around its code."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

TensorFn = Callable[[Tensor], Tensor]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def eager_decorator(compiled: bool) -> Decorator:
    """Return a decorator that keeps functions out of graphs, if blocks will be `compiled`."""
    return torch.compiler.disable if compiled else lambda function: function


def at_module_input(module: nn.Module, position: int, fn: TensorFn, eager: Decorator = lambda function: function) -> None:
    """Apply `fn` to the input at `position`, and replace all its occurrences among the inputs. It may be None: a mask that is left out."""
    module.register_forward_pre_hook(eager(lambda _, args, kwargs: map_input_at((args, kwargs), position, fn)), with_kwargs=True)


def at_module_output(module: nn.Module, position: int, fn: TensorFn, eager: Decorator) -> None:
    module.register_forward_hook(eager(lambda _m, _a, out: _map_leaf(out, tensor_leaves(out)[position], fn)))


def input_leaves(inputs: Any) -> list[Tensor | None]:
    """A module's inputs in the order of their positions (see `ModuleCall`)."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if leaf is None or torch.is_tensor(leaf)]


def tensor_leaves(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if torch.is_tensor(leaf)]


def map_input_at(inputs: Any, position: int, fn: TensorFn) -> Any:
    old = input_leaves(inputs)[position]
    return inputs if old is None else _map_leaf(inputs, old, fn)


def _map_leaf(tree: Any, old: Tensor, fn: TensorFn) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    new = fn(old)
    return pytree.tree_unflatten([new if leaf is old else leaf for leaf in leaves], spec)


def run_forward_in(module: nn.Module, context: Callable[[], AbstractContextManager[Any]], eager: Decorator = lambda function: function) -> None:
    """Enter a context around every call of `module.forward`."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    module.forward = eager(forward)


def replace_parameter(module: nn.Module, key: str, fn: TensorFn) -> None:
    """During the module's forward, replace a parameter or buffer by `fn` of it."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        param = module._parameters.get(key)
        vars(module)[key] = fn(param if param is not None else module._buffers[key])  # type: ignore[arg-type]
        try:
            return inner(*args, **kwargs)
        finally:
            del vars(module)[key]

    module.forward = forward


def add_bias(layer: nn.Module, out: Tensor) -> Tensor:
    """Add a layer's bias, if it has one, to the output of its matmul or convolution."""
    bias: Any = layer.bias
    if bias is None:
        return out
    return out + (bias.view(-1, *[1] * len(layer.kernel_size)) if isinstance(layer, nn.modules.conv._ConvNd) else bias).to(out.dtype)


def on_gradient_accumulated(param: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call a method whenever backward has added to a parameter's gradient. The hook refers to the method's object weakly: torch holds it where
    Python's garbage collector does not look, and a model that its own hooks refer to would never be freed."""
    reference = weakref.WeakMethod(method)

    def call(changed: Tensor) -> None:
        if (found := reference()) is not None:
            found(changed)

    param.register_post_accumulate_grad_hook(call)
