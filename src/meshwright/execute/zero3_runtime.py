"""Memory Manager, acting half: ZeRO-3. Parameters lie in flat buffers, one or a few a unit, of which a rank keeps its slice.

[Note: a unit's life]
Before a unit computes, its buffers are gathered and its parameters are views of them; afterwards the memory goes back. The same happens
around its backward, where gradients are copied into a flat buffer as they arrive. With the last of them the buffer is reduce-scattered,
and what arrives is the gradient of the rank's slice, which is what the optimizer steps. The next unit's buffers travel while this one
computes. Nothing is copied into what is sent or out of what arrives, and the optimizer sees a few flat tensors: what FSDP2's parameters,
which are cut one by one, cost. Between uses a parameter has its shape and no values: reading it gives NaN, and writing it is an error.

[Note: several buffers in a unit]
A buffer holds what is of one type, trained or not, and of one kind (`schedule.buckets.Kind`). A parameter that pipeline stages share has
one of its own, so that all of them cut it alike. Optimizer groups share a buffer: each gets its part of the slice, which may be empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.workload import LOW_PRECISION_DTYPES
from meshwright.execute.data_parallel import check_shardable, full_gradient
from meshwright.execute.flat_buffer import FlatBuffer, FlatBufferFactory
from meshwright.execute.memory_runtime import DTYPES, storage_bytes
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.sharded_unit import ShardedUnit, link_units, make_units
from meshwright.execute.unit_hooks import ReduceScatterQueue, UnitHooks
from meshwright.schedule.buckets import ParamReplication


class FullyShardedUnits:
    """Attached to a model by hooks, like `GradientBuckets`, and used like it."""

    zero = 3

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        groups: ProcessGroups,
        replication: Mapping[int, ParamReplication],
        tied_params: Collection[str],
    ) -> None:
        check_shardable(optimizer, self.zero)
        low = DTYPES[LOW_PRECISION_DTYPES[plan.memory.precision]] if plan.memory.precision in LOW_PRECISION_DTYPES else None
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        factory = FlatBufferFactory(groups.shard, plan.balance.state_fractions, low, group_of, replication)
        self.groups = groups
        self._scatters = ReduceScatterQueue(groups, max_in_flight=1 if "scatters" in plan.sync.overlap else 0)
        self._unit_of: dict[int, tuple[ShardedUnit, FlatBuffer]] = {}  # by a parameter's id
        hooks, units = UnitHooks(groups.shard, self._scatters, low), []
        for unit, module in make_units(model, plan, groups, factory, tied_params):
            units.append(unit)
            hooks.attach(unit, module)
            self._unit_of.update({id(p): (unit, flat) for flat in unit.flat_buffers for p in flat.params})
        if "gathers" in plan.sync.overlap and groups.pp.size == 1:
            link_units(units)
        self._flat_buffers = [flat for unit in units for flat in unit.flat_buffers]
        self.buckets = [flat for flat in self._flat_buffers if flat.optimizer_shards]
        self._give_shards_to(optimizer)
        model.register_state_dict_pre_hook(_forbid_state_dict)
        optimizer.register_step_pre_hook(lambda *_: self.finish())
        optimizer.register_step_post_hook(lambda *_: hooks.discard_prefetched())

    def _give_shards_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Of what is sharded the optimizer steps this rank's shards."""
        for index, group in enumerate(optimizer.param_groups):
            mine = [shard.param for flat in self.buckets for shard in flat.optimizer_shards if shard.param_group == index]
            group["params"] = mine + [p for p in group["params"] if id(p) not in self._unit_of]

    @property
    def reduce_op(self) -> str:
        return self._scatters.op

    @reduce_op.setter
    def reduce_op(self, op: str) -> None:
        self._scatters.op = op

    def finish(self) -> None:
        """Gradients are final when a backward ends; nothing is left to do."""

    def reduce_all(self) -> None:
        """Every backward has sent its own."""

    def accumulate(self) -> AbstractContextManager[None]:
        """There is no place to add whole gradients up in: every backward sends its own."""
        return nullcontext()

    def clear(self) -> None:
        for flat in self.buckets:
            for shard in flat.optimizer_shards:
                shard.param.grad = None

    # -- what it holds --

    def tied_gradient(self, param: nn.Parameter) -> torch.Tensor:
        """This rank's part of the gradient of a parameter that has a buffer of its own."""
        (shard,) = self._unit_of[id(param)][1].optimizer_shards
        return full_gradient(shard.param)

    def full_parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathered buffer by buffer."""
        found: dict[int, torch.Tensor] = {}
        for name, param in model.named_parameters():
            if id(param) not in self._unit_of:
                yield name, param.detach().cpu()
                continue
            if id(param) not in found:
                unit, flat = self._unit_of[id(param)]
                found |= flat.gather_full(self.groups.shard, unit.name)
            yield name, found.pop(id(param))

    def parameter_bytes(self, model: nn.Module) -> int:
        sharded = sum(flat.local_shard.nbytes for flat in self._flat_buffers)
        return sharded + storage_bytes([p for p in model.parameters() if id(p) not in self._unit_of])

    def gradient_bytes(self) -> int:
        grads = (shard.param.grad for flat in self.buckets for shard in flat.optimizer_shards)
        return sum(grad.nbytes for grad in grads if grad is not None)


def _forbid_state_dict(*_: Any) -> None:
    raise RequestError(
        "zero=3: between uses parameters have no values, and state_dict would hold none: "
        "on all ranks, dict(meshwright.execute.full_state.full_state(applied)) has them whole"
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters have shapes and no values."""
    return any(p.untyped_storage().nbytes() < p.nbytes for p in model.parameters())
