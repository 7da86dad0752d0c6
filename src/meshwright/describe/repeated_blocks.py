"""Traces only the first two of a run of equal blocks; the others are skipped and cost what the second did.

The first may be special (its input needs no gradient), so the second represents the rest. A block is skipped only while its inputs have the shapes of
its representative's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


MarkerFactory = Callable[[torch.Tensor], Callable[[torch.Tensor], None]]


@contextmanager
def skip_repeated_blocks(layers: list[Layer], representative_of: dict[str, str], make_marker: MarkerFactory) -> Iterator[None]:
    """While active, blocks from the third of their kind on compute nothing; `representative_of` records which layer represents which.

    `make_marker` is called with each output of a representative; the function it returns is called with each substitute output. No tensor is kept
    alive.
    """
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        if not layer.own_parameters_only and list(layer.module.children()):
            kinds.setdefault(behavior_signature(layer.module), []).append(layer)
    changed: list[tuple[nn.Module, Any]] = []
    for blocks in kinds.values():
        if len(blocks) > 2:
            seen: list[_Representative] = []
            for layer in blocks[1:]:
                changed.append((layer.module, vars(layer.module).get("forward")))
                layer.module.forward = _skipping_forward(layer, layer.module.forward, seen, representative_of, make_marker)
    try:
        yield
    finally:
        for module, own in reversed(changed):
            del module.forward  # restores the class's own forward …
            if own is not None:
                module.forward = own  # … or the instance's previous one


def _skipping_forward(
    layer: Layer, forward: Callable[..., Any], representatives: list[_Representative], representative_of: dict[str, str], make_marker: MarkerFactory
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        # The representative itself always runs: a checkpointed block is run a second time, in backward.
        if representatives and representatives[0].name != layer.name and _leaf_signature(leaves) == representatives[0].inputs:
            representative_of[layer.name] = representatives[0].name
            return _make_outputs(representatives[0], leaves)
        output = forward(*args, **kwargs)
        if not representatives:
            found, spec = pytree.tree_flatten(output)
            representatives.append(
                _Representative(layer.name, _leaf_signature(leaves), [_describe_output(leaf, leaves, make_marker) for leaf in found], spec)
            )
        return output

    return call


def _leaf_signature(leaves: list[Any]) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) if torch.is_tensor(t) else repr(t)[:80] for t in leaves)


def _describe_output(leaf: Any, inputs: list[Any], make_marker: MarkerFactory) -> tuple[str, Any]:
    if not torch.is_tensor(leaf):
        return "value", leaf
    for position, given in enumerate(inputs):
        if given is leaf:
            return "input", position
    return "like", (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, make_marker(leaf))


def _make_outputs(representative: _Representative, leaves: list[Any]) -> Any:
    sources = [t for t in leaves if torch.is_tensor(t) and t.requires_grad]
    wanted = [known for kind, known in representative.outputs if kind == "like"]
    replayed = _SkipFunction.apply([known[:3] for known in wanted], *sources) if wanted else ()
    for (_, _, _, mark), now in zip(wanted, replayed, strict=True):
        mark(now)
    made = iter(replayed)
    outputs = [leaves[value] if kind == "input" else next(made) if kind == "like" else value for kind, value in representative.outputs]
    return pytree.tree_unflatten(outputs, representative.spec)


class _SkipFunction(torch.autograd.Function):
    """Returns tensors of the wanted shapes in forward, and gradients of the inputs' shapes in backward."""

    @staticmethod
    def forward(ctx: Any, output_specs: list[Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sources = [(tuple(s.shape), s.dtype) for s in inputs]
        made = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in output_specs)
        ctx.mark_non_differentiable(*(t for t, (_, _, needs) in zip(made, output_specs, strict=True) if not needs))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.sources)
