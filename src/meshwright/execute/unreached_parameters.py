"""Parameters that no rank's backward reaches are left alone by the optimizer, as on one device, where they have no gradient.

[Note: parameters that no backward reaches]
A rank whose backward did not reach a parameter still takes part in the reduction, because another rank's may have: a branch that depends on the data.
It contributes negative zeros. They change no sum, and a sum is negative zero only if all its terms are. So the reduced gradient itself says whether
any rank has reached the parameter, on every rank alike and without another message, after several backwards too; where all parameters are reached,
nothing is looked at. A gradient that is exactly zero is +0.0, since sums begin with that.
ZeRO steps flat shards, in which parts cannot be skipped: these are put back after the step. What a whole shard has in common, Adam's step count, goes
on. Compressed gradients lose the sign, and a shard that is stepped in host memory is not put back: there a parameter that no backward reaches has a
gradient of zero, which weight decay and momentum move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from meshwright.execute.data_parallel import ShardedBuffer


def fill_unreached(gradient: Tensor) -> None:
    _as_real(gradient).fill_(-0.0)


def is_unreached(reduced: Tensor) -> bool:
    """Whether a reduced gradient, or a part of it, has negative zeros of all ranks."""
    values = _as_real(reduced)
    return bool((values.eq(0) & values.signbit()).all())


def note_unreached(buffer: ShardedBuffer, reduced: Tensor, has_earlier_gradient: bool) -> None:
    """After a backward's reduction into this rank's shard: update which slots have no gradient. One that an earlier backward has reached has one."""
    if buffer.missing_slots:
        parts = [(slot, _part_of(buffer, slot, buffer.slices.start, buffer.slices.size)) for slot in buffer.missing_slots]
        found = {slot for slot, part in parts if part.start < part.stop and is_unreached(reduced[part])}
        buffer.unreached_slots = buffer.unreached_slots & found if has_earlier_gradient else found
        buffer.missing_slots.clear()
    elif buffer.unreached_slots:
        buffer.unreached_slots.clear()


class UnreachedParts:
    """Puts back what an optimizer's step has changed in the parts of flat shards that have no gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: list[tuple[Tensor, Tensor]] = []

    def before_step(self, buffers: Iterable[ShardedBuffer]) -> None:
        """Remember those parts, and their optimizer state."""
        incomplete = [b for b in buffers if b.unreached_slots]
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]} if incomplete else set()
        for param, part in (found for b in incomplete for found in _unreached_parts(b) if id(found[0]) in stepped):
            states = (v for v in self._optimizer.state.get(param, {}).values() if torch.is_tensor(v) and v.shape == param.shape)
            self._kept += [(view, view.clone()) for view in (tensor.detach()[part] for tensor in (param, *states))]

    def after_step(self) -> None:
        for view, values in self._kept:
            view.copy_(values)
        self._kept.clear()


def _unreached_parts(buffer: ShardedBuffer) -> Iterator[tuple[nn.Parameter, slice]]:
    """The parts of the optimizer's shards on this rank that belong to slots without a gradient."""
    for shard in buffer.optimizer_shards:
        for slot in (i for i in shard.slots if i in buffer.unreached_slots and shard.param.grad is not None):
            part = _part_of(buffer, slot, buffer.slices.start + shard.start, shard.param.numel())
            if part.start < part.stop:
                yield shard.param, part


def _part_of(buffer: ShardedBuffer, index: int, start: int, size: int) -> slice:
    """The part of `size` elements from `start` on that a parameter fills; empty if it lies elsewhere."""
    slot = buffer.layout.slots[index]
    return slice(*(min(max(x - start, 0), size) for x in (slot.offset, slot.offset + slot.numel)))


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
