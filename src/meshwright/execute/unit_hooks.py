"""The hooks of ZeRO-3 (see [Note: a unit's life] in zero3_runtime.py): unshard units for forward and backward, reduce-scatter gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm, Work
from meshwright.execute.data_parallel import MEAN, LookAtGradients, Reduction
from meshwright.execute.flat_buffer import FlatBuffer
from meshwright.execute.module_hooks import on_gradient_accumulated
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.shard_layout import param_views
from meshwright.execute.sharded_unit import ShardedUnit


class ReduceScatterQueue:
    """Reduce-scatters of gradients in flight."""

    def __init__(self, groups: ProcessGroups, max_in_flight: int) -> None:
        """At most `max_in_flight` buffers overlap with later computation, because they hold memory."""
        self.groups = groups
        self.reduction: Callable[[], Reduction] = lambda: MEAN
        self.look: LookAtGradients | None = None
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[ShardedUnit, FlatBuffer, Tensor, Tensor, Work]] = deque()

    def launch(self, unit: ShardedUnit, flat: FlatBuffer) -> None:
        grads, reduced = flat.take_grads(), torch.empty_like(flat.local_shard)
        if self.look is not None:
            self.look(flat.params, param_views(grads, flat.layout, flat.params), grads)
        op, factor = self.reduction()
        if factor is not None:
            grads.mul_(factor)
        work = self.groups.shard.reduce_scatter(reduced, grads, f"grads/{unit.name}", op, flat.slices.uneven_sizes)
        self._in_flight.append((unit, flat, reduced, grads, work))
        self.drain(self._max_in_flight)

    def drain(self, max_in_flight: int = 0) -> None:
        """Finish all launched reduce-scatters but the last `max_in_flight`."""
        while len(self._in_flight) > max_in_flight:
            unit, flat, reduced, _, work = self._in_flight.popleft()
            work.wait()
            replicas = self.groups.expert_replica if unit.is_expert_parallel else self.groups.replica
            if replicas.size > 1:
                replicas.sync.all_reduce(reduced, f"replicas/{unit.name}", self.reduction().op).wait()
            if unit.is_expert_parallel and self.reduction().op == "mean":
                reduced.mul_(1.0 / self.groups.ep.size)  # an expert's gradient sums over the tokens of all ranks along `ep`
            flat.add_shard_gradient(reduced)


class UnitHooks:
    """Unshards and reshards units in forward and backward, from hooks on their modules and parameters."""

    def __init__(self, shard_group: Comm, scatters: ReduceScatterQueue, compute_dtype: torch.dtype | None) -> None:
        self._shard_group, self._scatters, self._compute_dtype = shard_group, scatters, compute_dtype
        self._units: list[ShardedUnit] = []
        self._slot_of_param: dict[int, tuple[ShardedUnit, FlatBuffer, int]] = {}
        self._backward_id = -1  # autograd's graph task id of the running backward

    def attach(self, unit: ShardedUnit, module: nn.Module) -> None:
        """Register a unit's hooks, which run outside of compiled graphs."""
        self._units.append(unit)
        for flat in (f for f in unit.flat_buffers if f.optimizer_shards):
            for slot, param in enumerate(flat.params):
                self._slot_of_param[id(param)] = (unit, flat, slot)
                on_gradient_accumulated(param, self._on_gradient_ready)
        pre_hook = torch.compiler.disable(lambda _, args, kwargs: self._pre_forward(unit, args, kwargs))
        module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True)
        module.register_forward_hook(torch.compiler.disable(lambda _m, _a, output: self._post_forward(unit, output)))

    # -- forward --

    def _pre_forward(self, unit: ShardedUnit, args: Any, kwargs: Any) -> Any:
        unit.unshard(self._shard_group)
        if unit.next_unit is not None and not _runs_backward():
            unit.next_unit.start_unshard(self._shard_group)
        if self._compute_dtype is not None:
            args, kwargs = pytree.tree_map(self._cast_input, (args, kwargs))
        if unit.has_frozen_params and torch.is_grad_enabled():
            args, kwargs = _call_after_backward(unit.reshard, args, kwargs)
        return args, kwargs

    def _cast_input(self, value: Any) -> Any:
        return value.to(self._compute_dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def _post_forward(self, unit: ShardedUnit, output: Any) -> None:
        if _runs_backward():  # recompute: the unit's own backward is next
            self.before_backward(unit)
            return
        for tensor in pytree.tree_leaves(output) if torch.is_grad_enabled() else ():
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.before_backward(unit))
        unit.reshard()

    # -- backward --

    def before_backward(self, unit: ShardedUnit) -> None:
        self._start_backward()
        if unit.last_backward_id == self._backward_id:
            return  # its backward is over; the hook is on a tensor that the unit passed through
        unit.in_backward = True
        unit.unshard(self._shard_group)
        prev = unit.prev_unit
        if prev is not None and not prev.in_backward and prev.last_backward_id != self._backward_id:
            prev.start_unshard(self._shard_group)

    def _start_backward(self) -> None:
        if self._backward_id != (backward_id := torch._C._current_graph_task_id()):
            self._backward_id = backward_id
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _on_gradient_ready(self, param: Tensor) -> None:
        unit, flat, slot = self._slot_of_param[id(param)]
        assert param.grad is not None
        self._start_backward()
        unit.in_backward = True
        flat.grad_view(slot).copy_(param.grad)
        param.grad = None
        flat.awaited_slots.discard(slot)
        if not flat.awaited_slots:
            self._scatters.launch(unit, flat)
            if not unit.has_frozen_params and all(f.is_sent for f in unit.flat_buffers):
                unit.end_backward(self._backward_id)

    def _end_backward(self) -> None:
        """Reduce-scatter units some of whose gradients have not arrived, and wait for all."""
        for unit in self._units:
            for flat in unit.flat_buffers if unit.in_backward else ():
                if flat.optimizer_shards and not flat.is_sent:
                    self._scatters.launch(unit, flat)
            unit.end_backward(self._backward_id)
        self._scatters.drain()

    def discard_prefetched(self) -> None:
        """Drop prefetched parameters after the optimizer's step."""
        for unit in self._units:
            unit.discard_prefetched(self._shard_group)


class _AfterBackward(torch.autograd.Function):
    """Identity whose backward calls `callback` when it has the gradients of all tensors."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.callback = callback
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.callback()
        return None, *grads


def _call_after_backward(callback: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """Call `callback` when backward has the gradients of all of a unit's inputs. Frozen parameters are not needed after that."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    indices = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if indices:
        for i, tensor in zip(indices, _AfterBackward.apply(callback, *(leaves[i] for i in indices)), strict=True):
            leaves[i] = tensor
    return pytree.tree_unflatten(leaves, spec)


def _runs_backward() -> bool:
    return bool(torch._C._current_graph_task_id() >= 0)
