"""ZeRO-3 (fully sharded data parallelism). A unit's parameters live in one or a few flat buffers, of which each rank keeps its shard.

[Note: a unit's life]
Before a unit's forward its buffers are all-gathered and its parameters become views of them; afterwards the memory is freed. The same happens
around its backward, where gradients are copied into a flat buffer as they arrive. The last gradient launches a reduce-scatter of that buffer,
whose output is the gradient of the rank's shard, which the optimizer steps. The next unit's all-gather overlaps with this unit's computation.
Unlike FSDP2, which shards parameters one by one, this copies nothing into or out of the collectives' buffers, and the optimizer sees a few flat
tensors. While resharded, a parameter has its shape and no values: reading it gives NaN, and writing it is an error.

[Note: several buffers in a unit]
The parameters of a buffer have one dtype, one `requires_grad` and one `schedule.buckets.ParamReplication`. A parameter that pipeline stages share
has a buffer of its own, so that all of them shard it the same way. Optimizer param groups share a buffer: each steps its part of the shard, which
may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from meshwright.core.plan import Plan
from meshwright.execute.data_parallel import LookAtGradients, Reduction, check_shardable, full_gradient
from meshwright.execute.flat_buffer import FlatBuffer, FlatBufferFactory
from meshwright.execute.memory_runtime import low_precision_dtype, storage_bytes
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.shard_layout import slot_part
from meshwright.execute.sharded_unit import ROOT, ShardedUnit, link_units, make_units
from meshwright.execute.unit_hooks import ReduceScatterQueue, UnitHooks
from meshwright.execute.unreached_parameters import UnreachedParts
from meshwright.schedule.buckets import ParamReplication


class FullyShardedUnits:
    """The `DataParallel` implementation of ZeRO-3: hooks on a model's units, and an optimizer that steps this rank's shards."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, groups: ProcessGroups,
        replication: Mapping[int, ParamReplication], tied_params: Collection[str],
    ) -> None:  # fmt: skip
        check_shardable(optimizer, zero=3)
        compute_dtype = low_precision_dtype(plan)
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        factory = FlatBufferFactory(groups.shard, plan.balance.state_fractions, compute_dtype, group_of, replication)
        self.groups = groups
        self._scatters = ReduceScatterQueue(groups, max_in_flight=1 if "scatters" in plan.sync.overlap else 0)
        self._unit_of: dict[int, tuple[ShardedUnit, FlatBuffer]] = {}  # by a parameter's id
        self._hooks, units = UnitHooks(groups.shard, self._scatters, compute_dtype), []
        for unit, module in make_units(model, plan, groups, factory, tied_params):
            units.append(unit)
            self._hooks.attach(unit, module)
            self._unit_of.update({id(p): (unit, flat) for flat in unit.flat_buffers for p in flat.params})
        if "gathers" in plan.sync.overlap and groups.pp.size == 1:
            link_units(units)
        self._root = next((unit for unit in units if unit.name == ROOT), None)
        self._flat_buffers = [flat for unit in units for flat in unit.flat_buffers]
        self.buckets = [flat for flat in self._flat_buffers if flat.optimizer_shards]
        for index, group in enumerate(optimizer.param_groups):
            shards = [shard.param for flat in self.buckets for shard in flat.optimizer_shards if shard.param_group == index]
            group["params"] = shards + [p for p in group["params"] if id(p) not in self._unit_of]
        unreached = UnreachedParts(optimizer)
        optimizer.register_step_pre_hook(lambda *_: unreached.before_step(self.buckets))
        optimizer.register_step_post_hook(lambda *_: unreached.after_step())
        optimizer.register_step_post_hook(lambda *_: self._hooks.discard_prefetched())

    def set_reduction(self, reduction: Callable[[], Reduction]) -> None:
        self._scatters.reduction = reduction

    def watch_own_gradients(self, look: LookAtGradients) -> None:
        self._scatters.look = look

    def before_backward(self, loss: Tensor) -> None:
        if self._root is not None and loss.requires_grad:
            root = self._root
            loss.register_hook(lambda _: self._hooks.before_backward(root))

    def finish(self) -> None:
        """Do nothing: gradients are final when a backward ends."""

    def reduce_all(self) -> None:
        """Do nothing: every backward has reduce-scattered its own gradients."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Change nothing: without a buffer to accumulate full gradients in, every backward reduce-scatters its own."""
        return nullcontext()

    def clear(self) -> None:
        for flat in self.buckets:
            for shard in flat.optimizer_shards:
                shard.param.grad = None

    # -- state --

    def tied_gradient(self, param: nn.Parameter) -> Tensor:
        """This rank's shard of the gradient of a parameter that has a buffer of its own."""
        (shard,) = self._unit_of[id(param)][1].optimizer_shards
        return full_gradient(shard.param)

    def sharded_parameters(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        for flat in self._flat_buffers:
            for param, slot in zip(flat.params, flat.layout.slots, strict=True):
                first, offset, count = slot_part(slot, flat.slices.start, flat.slices.size)
                yield param, first, flat.local_shard[offset : offset + count]

    def residuals(self, *, create: bool) -> Iterator[tuple[str, Tensor]]:
        """None: reduce-scattered gradients are not compressed with error feedback."""
        return iter(())

    def parameter_bytes(self, model: nn.Module) -> int:
        sharded = sum(flat.local_shard.nbytes for flat in self._flat_buffers)
        return sharded + storage_bytes([p for p in model.parameters() if id(p) not in self._unit_of])

    def gradient_bytes(self) -> int:
        grads = (shard.param.grad for flat in self.buckets for shard in flat.optimizer_shards)
        return sum(grad.nbytes for grad in grads if grad is not None)


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter has a shape but no values."""
    return any(p.untyped_storage().nbytes() < p.nbytes for p in model.parameters())
