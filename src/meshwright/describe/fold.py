"""Folding: of a run of equal blocks only the first two are traced; the others cost what the second did.

The first may be special (its input needs no gradient), so the second stands for the rest. A block is folded only while its
inputs have the same shapes as its representative's had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.describe.layers import Layer, behaviour


@dataclass
class _Seen:
    """What a representative took and gave, as shapes."""

    name: str
    inputs: tuple[Any, ...]
    outputs: list[Any]  # a leaf each: ("input", position), ("like", what is known of a tensor) or ("value", anything)
    spec: Any


Alike = Callable[[torch.Tensor], Callable[[torch.Tensor], None]]


@contextmanager
def folded(layers: list[Layer], stands_for: dict[str, str], alike: Alike) -> Iterator[None]:
    """While active, blocks from the third of their kind on do nothing; `stands_for` learns which layer speaks for which.

    `alike` is shown each output of a representative, and what it gives back each output that is made up after it: none is kept alive.
    """
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        if not layer.owner and list(layer.module.children()):
            kinds.setdefault(behaviour(layer.module), []).append(layer)
    changed: list[tuple[nn.Module, Any]] = []
    for blocks in kinds.values():
        if len(blocks) > 2:
            seen: list[_Seen] = []
            for layer in blocks[1:]:
                changed.append((layer.module, vars(layer.module).get("forward")))
                layer.module.forward = _stand_in(layer, layer.module.forward, seen, stands_for, alike)
    try:
        yield
    finally:
        for module, own in reversed(changed):
            del module.forward  # back to the class's own …
            if own is not None:
                module.forward = own  # … or to what somebody had put there


def _stand_in(layer: Layer, forward: Callable[..., Any], seen: list[_Seen], stands_for: dict[str, str], alike: Alike) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        # The representative itself always runs: a checkpointed block is run a second time, in backward.
        if seen and seen[0].name != layer.name and _shapes(leaves) == seen[0].inputs:
            stands_for[layer.name] = seen[0].name
            return _replay(seen[0], leaves)
        output = forward(*args, **kwargs)
        if not seen:
            found, spec = pytree.tree_flatten(output)
            seen.append(_Seen(layer.name, _shapes(leaves), [_describe(leaf, leaves, alike) for leaf in found], spec))
        return output

    return call


def _shapes(leaves: list[Any]) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) if torch.is_tensor(t) else repr(t)[:80] for t in leaves)


def _describe(leaf: Any, inputs: list[Any], alike: Alike) -> tuple[str, Any]:
    if not torch.is_tensor(leaf):
        return "value", leaf
    for position, given in enumerate(inputs):
        if given is leaf:
            return "input", position
    return "like", (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, alike(leaf))


def _replay(seen: _Seen, leaves: list[Any]) -> Any:
    sources = [t for t in leaves if torch.is_tensor(t) and t.requires_grad]
    wanted = [known for kind, known in seen.outputs if kind == "like"]
    replayed = _Skip.apply([known[:3] for known in wanted], *sources) if wanted else ()
    for (_, _, _, mark), now in zip(wanted, replayed, strict=True):
        mark(now)
    made = iter(replayed)
    outputs = [leaves[value] if kind == "input" else next(made) if kind == "like" else value for kind, value in seen.outputs]
    return pytree.tree_unflatten(outputs, seen.spec)


class _Skip(torch.autograd.Function):
    """Gives tensors of the wanted shapes, and gradients of the inputs' shapes."""

    @staticmethod
    def forward(ctx: Any, wanted: list[Any], *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sources = [(tuple(s.shape), s.dtype) for s in sources]
        made = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in wanted)
        ctx.mark_non_differentiable(*(t for t, (_, _, needs) in zip(made, wanted, strict=True) if not needs))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.sources)
