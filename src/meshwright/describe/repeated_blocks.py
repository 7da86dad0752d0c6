"""Traces only the first two of a run of equal blocks; the others are skipped and cost what the second did.

The first may be special (its input needs no gradient), so the second represents the rest. A block is skipped only while its inputs have the shapes of
its representative's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.describe.layers import Layer, behavior_signature


@dataclass
class _Representative:
    """The signatures of a representative's inputs and outputs."""

    name: str
    inputs: tuple[Any, ...]
    outputs: list[Any]  # per leaf: ("input", position), ("like", signature of a tensor) or ("value", anything)
    spec: Any


Forward = Callable[..., Any]
MarkerFactory = Callable[[torch.Tensor], Callable[[torch.Tensor], None]]


def repeated_blocks(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Groups of at least three blocks that compute the same."""
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        if not layer.own_parameters_only and list(layer.module.children()):
            groups.setdefault(behavior_signature(layer.module), []).append(layer)
    return [blocks for blocks in groups.values() if len(blocks) > 2]


@contextmanager
def replaced_forwards(groups: list[list[Layer]], make_forward: Callable[[Layer, Forward, list[Any]], Forward]) -> Iterator[None]:
    """While active, every block but the first of its group runs what `make_forward` returns for it, its forward and a list that its group shares."""
    replaced: list[tuple[nn.Module, Any]] = []
    for blocks in groups:
        representatives: list[Any] = []
        for layer in blocks[1:]:
            replaced.append((layer.module, vars(layer.module).get("forward")))
            layer.module.forward = make_forward(layer, layer.module.forward, representatives)
    try:
        yield
    finally:
        for module, previous in reversed(replaced):
            del module.forward  # restores the class's own forward …
            if previous is not None:
                module.forward = previous  # … or the instance's previous one


def skip_repeated_blocks(layers: list[Layer], representative_of: dict[str, str], make_marker: MarkerFactory) -> AbstractContextManager[None]:
    """While active, blocks from the third of their kind on compute nothing; `representative_of` records which layer represents which.

    `make_marker` is called with each output of a representative; the function it returns is called with each substitute output. No tensor is kept
    alive.
    """
    return replaced_forwards(repeated_blocks(layers), partial(_skipping_forward, representative_of, make_marker))


def _skipping_forward(
    representative_of: dict[str, str], make_marker: MarkerFactory, layer: Layer, forward: Forward, representatives: list[_Representative]
) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = pytree.tree_leaves((args, kwargs))
        # The representative itself always runs: a checkpointed block is run a second time, in backward.
        if representatives and representatives[0].name != layer.name and leaf_signature(inputs) == representatives[0].inputs:
            representative_of[layer.name] = representatives[0].name
            return _make_outputs(representatives[0], inputs)
        output = forward(*args, **kwargs)
        if not representatives:
            leaves, spec = pytree.tree_flatten(output)
            outputs = [_describe_output(leaf, inputs, make_marker) for leaf in leaves]
            representatives.append(_Representative(layer.name, leaf_signature(inputs), outputs, spec))
        return output

    return call


def leaf_signature(leaves: Iterable[Any]) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # these reads are not the model's own size reads
        return tuple((tuple(t.shape), t.dtype, t.requires_grad) if torch.is_tensor(t) else repr(t)[:80] for t in leaves)


def _describe_output(leaf: Any, inputs: list[Any], make_marker: MarkerFactory) -> tuple[str, Any]:
    if not torch.is_tensor(leaf):
        return "value", leaf
    for position, tensor in enumerate(inputs):
        if tensor is leaf:
            return "input", position
    return "like", (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, make_marker(leaf))


def _make_outputs(representative: _Representative, inputs: list[Any]) -> Any:
    sources = [t for t in inputs if torch.is_tensor(t) and t.requires_grad]
    specs = [spec for kind, spec in representative.outputs if kind == "like"]
    substitutes = _SkipFunction.apply([spec[:3] for spec in specs], *sources) if specs else ()
    for (_, _, _, mark), tensor in zip(specs, substitutes, strict=True):
        mark(tensor)
    tensors = iter(substitutes)
    outputs = [inputs[value] if kind == "input" else next(tensors) if kind == "like" else value for kind, value in representative.outputs]
    return pytree.tree_unflatten(outputs, representative.spec)


class _SkipFunction(torch.autograd.Function):
    """Returns tensors of the given shapes in forward, and gradients of the inputs' shapes in backward."""

    @staticmethod
    def forward(ctx: Any, output_specs: list[Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sources = [(tuple(s.shape), s.dtype) for s in inputs]
        outputs = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in output_specs)
        ctx.mark_non_differentiable(*(t for t, (_, _, needs_grad) in zip(outputs, output_specs, strict=True) if not needs_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.sources)
