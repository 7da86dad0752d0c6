"""Copies of a model and its optimizer for verification: whole, or with only some of each run of equal blocks, where memory is too small.

[Note: blocks that stand for others]
Two blocks are equal if they compute the same (the same submodules, settings and shapes), lie in the same pipeline stage, and the plan treats them
alike. Of each kind the first ones stay. The others keep their places and names, lose their parameters and submodules, and pass their inputs on: which
input becomes which output is seen in the call of a block that stayed. So the model's own forward and the plan's module names stay as they are. One
device runs the same truncated model, so that both sides compute the same function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.plan import Plan
from meshwright.core.plan_restriction import describe_treatment, is_inside, modules_at_boundaries, without_modules
from meshwright.describe.layers import Layer, behavior_signature, find_layers, tied_parameter_names

_KEPT = (2, 1)  # blocks of a kind that stay, tried in this order: two of them also show what passes between neighbours


class CannotTruncateError(Exception):
    """Why a model does not run with fewer blocks."""


@dataclass(frozen=True)
class Truncation:
    """Which blocks stand for which: by the name of a block that stays, the equal ones that are left out. Empty: the model is whole."""

    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def left_out(self) -> frozenset[str]:
        return frozenset(name for names in self.stands_for.values() for name in names)

    def keeps(self, name: str) -> bool:
        """Whether the parameter or buffer of this name stays."""
        return not any(is_inside(name, block) for block in self.left_out)

    def apply_to(self, plan: Plan) -> Plan:
        return without_modules(plan, self.left_out) if self.left_out else plan


def possible_truncations(plan: Plan, model: nn.Module) -> Iterator[Truncation]:
    """The whole model, then with fewer and fewer blocks. The same on every rank."""
    yield Truncation()
    kinds, previous = _equal_blocks(plan, model), Truncation()
    for count in _KEPT:
        stands_for = {}
        for blocks, needed in kinds:
            kept = [*needed, *(b for b in blocks if b not in needed)][: max(count, len(needed))]
            if len(kept) < len(blocks):
                stands_for[blocks[0]] = tuple(b for b in blocks if b not in kept)
        truncation = Truncation(stands_for)
        if truncation.left_out != previous.left_out:
            yield truncation
        previous = truncation


def _equal_blocks(plan: Plan, model: nn.Module) -> list[tuple[list[str], list[str]]]:
    """(blocks that are equal, those of them that must stay) of each kind, in the model's order: the first stays, and where stages meet or parameters
    are shared."""
    stages = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    fixed = {*modules_at_boundaries(plan.stages), *(table.module for table in plan.expert.tables)}
    fixed |= {name for names in tied_parameter_names(model) for name in names}
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for layer in find_layers(model):
        if not layer.own_parameters_only and list(layer.module.children()):
            key = (_compute_key(layer), stages.get(layer.name), describe_treatment(plan, layer.name))
            kinds.setdefault(key, []).append(layer.name)
    must_stay = lambda block: any(is_inside(name, block) for name in fixed)  # noqa: E731
    return [(blocks, [blocks[0], *filter(must_stay, blocks[1:])]) for blocks in kinds.values() if len(blocks) > 1]


def _compute_key(layer: Layer) -> tuple[Any, ...]:
    return behavior_signature(layer.module), tuple((p.dtype, p.requires_grad) for p in layer.module.parameters())


# -- copies --


def copy_truncated(model: nn.Module, optimizer: torch.optim.Optimizer, truncation: Truncation) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A deep copy of both without the parameters, buffers and optimizer states of blocks that are left out."""
    parameters = [p for name, p in model.named_parameters() if not truncation.keeps(name)]
    buffers = [b for name, b in model.named_buffers() if not truncation.keeps(name)]
    states = [value for p in parameters for value in optimizer.state.get(p, {}).values() if torch.is_tensor(value)]
    stand_ins = {id(p): nn.Parameter(torch.empty(0), p.requires_grad) for p in parameters}
    memo: dict[int, Any] = {**stand_ins, **{id(t): torch.empty(0) for t in (*buffers, *states)}}
    copied, stepper = copy.deepcopy((model, optimizer), memo)
    left_out = {id(p) for p in stand_ins.values()}
    for group in stepper.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in left_out]
    for parameter in stand_ins.values():
        stepper.state.pop(parameter, None)
    for kept, names in truncation.stands_for.items():
        _pass_through(copied, kept, names)
    return copied, stepper


def _pass_through(model: nn.Module, kept: str, left_out: Iterable[str]) -> None:
    """Let blocks return their inputs, in the structure in which the block that stands for them returns its outputs."""
    seen: list[Callable[..., Any]] = []

    def look(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[:] = [_rearrange(kept, pytree.tree_leaves((args, kwargs)), output)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not seen:
            raise CannotTruncateError(f"{kept} is not called before the blocks that it would stand for")
        return seen[0](pytree.tree_leaves((args, kwargs)))

    model.get_submodule(kept).register_forward_hook(look, with_kwargs=True)
    for name in left_out:
        block = model.get_submodule(name)
        for registered in (block._parameters, block._buffers, block._modules):
            registered.clear()  # type: ignore[attr-defined]
        block.forward = forward


def _rearrange(block: str, inputs: list[Any], output: Any) -> Callable[[list[Any]], Any]:
    """A function from a call's inputs to its outputs, each of which is the first input of that shape; autocast may have changed its dtype."""
    leaves, spec = pytree.tree_flatten(output)
    positions = [_position(block, inputs, leaf) if torch.is_tensor(leaf) else None for leaf in leaves]
    values = [None if torch.is_tensor(leaf) else leaf for leaf in leaves]
    return lambda given: pytree.tree_unflatten(
        [value if at is None else given[at] for at, value in zip(positions, values, strict=True)], spec
    )  # fmt: skip


def _position(block: str, inputs: list[Any], output: Tensor) -> int:
    for position, tensor in enumerate(inputs):
        if torch.is_tensor(tensor) and tensor.shape == output.shape and tensor.is_floating_point() == output.is_floating_point():
            return position
    raise CannotTruncateError(f"{block} returns a tensor of shape {tuple(output.shape)}, and none of its inputs is like it")
