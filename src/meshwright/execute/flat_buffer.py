"""One flat buffer of a ZeRO-3 unit: it holds the unit's parameters one after the other, and this rank keeps a shard of it.

Unsharded, parameters are views of the all-gathered buffer. Resharded, they have their shapes and no values, and the memory is freed: reading one
gives NaN, and writing it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.core.comm import Comm, Work
from meshwright.execute.data_parallel import OptimizerShard
from meshwright.execute.placeholders import is_placeholder
from meshwright.execute.shard_layout import ShardLayout, make_shard_layout, padding_of, param_views
from meshwright.execute.unreached_parameters import fill_unreached, note_unreached
from meshwright.schedule.buckets import Bucket, ParamReplication, unit_buckets

_NORM_PART = 1 << 16  # elements whose norm torch is asked for at once on CPUs


@dataclass
class FlatBuffer:
    """Parameters of one dtype, `ParamReplication` and `requires_grad`, and their gradients during backward."""

    layout: Bucket
    params: tuple[nn.Parameter, ...]
    slices: ShardLayout
    local_shard: Tensor  # in the storage dtype
    full_params: Tensor  # all ranks' shards, in the compute dtype; its storage is empty unless unsharded
    param_views: tuple[Tensor, ...]
    placeholders: tuple[Tensor, ...]  # the parameters' data while resharded
    padding: tuple[slice, ...]  # between parameters
    optimizer_shards: tuple[OptimizerShard, ...] = ()  # of `local_shard`, by optimizer param group; none for frozen parameters
    grads: Tensor | None = None  # the reduce-scatter's input
    awaited_slots: set[int] = field(default_factory=set)  # slots whose gradient has not arrived in this backward
    missing_slots: set[int] = field(default_factory=set)  # slots that this rank's last backward did not reach
    unreached_slots: set[int] = field(default_factory=set)  # slots that no rank's backward has reached
    is_sent: bool = False  # reduce-scattered in this backward
    pending_gather: Work | None = None

    def start_unshard(self, comm: Comm, unit: str) -> None:
        """Launch the all-gather, unless it is in flight."""
        if self.pending_gather is None:
            self.full_params.untyped_storage().resize_(self.full_params.nbytes)
            shard = self.local_shard.to(self.full_params.dtype)
            self.pending_gather = comm.all_gather(self.full_params, shard, f"params/{unit}", self.slices.uneven_sizes)

    def finish_unshard(self) -> None:
        assert self.pending_gather is not None
        self.pending_gather.wait()
        self.pending_gather = None
        for param, view in zip(self.params, self.param_views, strict=True):
            param.data = view

    def reshard(self) -> None:
        """Free the memory of the all-gathered buffer."""
        for param, placeholder in zip(self.params, self.placeholders, strict=True):
            param.data = placeholder
        self.full_params.untyped_storage().resize_(0)

    def grad_view(self, slot: int) -> Tensor:
        """The view of a parameter's gradient in the reduce-scatter's input."""
        if self.grads is None:
            self.grads = torch.empty(self.layout.numel, dtype=self.local_shard.dtype, device=self.local_shard.device)
            for gap in self.padding:
                self.grads[gap].zero_()
        offset, numel = self.layout.slots[slot].offset, self.layout.slots[slot].numel
        return self.grads[offset : offset + numel].view_as(self.params[slot])

    def take_grads(self) -> Tensor:
        """Pass the reduce-scatter's input to the caller. Gradients that backward did not reach are zeros that say so; see
        [Note: parameters that no backward reaches]."""
        for slot in self.awaited_slots:
            fill_unreached(self.grad_view(slot))
        self.missing_slots = set(self.awaited_slots)
        assert self.grads is not None
        grads, self.grads, self.is_sent = self.grads, None, True
        return grads

    def await_gradients(self) -> None:
        """Before a backward: mark every gradient as awaited."""
        self.is_sent, self.awaited_slots = False, set(range(len(self.params)))

    def add_shard_gradient(self, reduced: Tensor) -> None:
        """Add a reduce-scatter's output to the gradients of the optimizer's shards."""
        note_unreached(self, reduced, self.optimizer_shards[0].param.grad is not None)
        for shard in self.optimizer_shards:
            new = reduced[shard.start : shard.start + shard.param.numel()]
            shard.param.grad = new if shard.param.grad is None else shard.param.grad.add_(new)


@dataclass(frozen=True)
class FlatBufferFactory:
    """Moves parameters into flat buffers and shards them."""

    shard_group: Comm
    state_fractions: Sequence[float]  # of each rank of the group; empty if they are equal
    compute_dtype: torch.dtype | None  # of floating-point parameters once they are gathered; None: the storage dtype
    param_groups: Mapping[int, int]  # index of the optimizer's param group, by parameter id
    replication: Mapping[int, ParamReplication]  # by parameter id

    def make(self, params: Sequence[nn.Parameter], tied_names: Mapping[int, str]) -> tuple[FlatBuffer, ...]:
        """The buffers of one unit. A parameter with a tied name has a buffer of its own."""
        params = sorted(params, key=self._param_group)
        replication = [self.replication.get(id(p), ParamReplication()) for p in params]
        keys = [(str(p.dtype), p.requires_grad, tied_names.get(id(p), ""), r) for p, r in zip(params, replication, strict=True)]
        itemsizes = [self._gathered_dtype(p).itemsize for p in params]
        layouts = unit_buckets([p.numel() for p in params], itemsizes, keys, self.shard_group.size)
        return tuple(self._make_one(layout, tuple(params[s.index] for s in layout.slots)) for layout in layouts)

    def _make_one(self, layout: Bucket, params: tuple[nn.Parameter, ...]) -> FlatBuffer:
        first = params[0]
        slices = make_shard_layout(layout, self.shard_group, self.state_fractions)
        if any(map(is_placeholder, params)):
            shard = torch.zeros(slices.size, dtype=first.dtype, device=first.device)
        else:
            full = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
            for view, param in zip(param_views(full, layout, params), params, strict=True):
                view.copy_(param.data)
            shard = slices.local_shard(full).clone()
            del full
        gathered = torch.empty(layout.numel, dtype=self._gathered_dtype(first), device=first.device)
        nan = torch.full((), float("nan"), device=first.device).to(gathered.dtype)
        views, placeholders = tuple(param_views(gathered, layout, params)), tuple(nan.expand(p.shape) for p in params)
        flat = FlatBuffer(layout, params, slices, shard, gathered, views, placeholders, padding_of(layout))
        if first.requires_grad:
            flat.optimizer_shards = tuple(_split_by_param_group(flat, [self._param_group(p) for p in params]))
            flat.await_gradients()
        flat.reshard()
        return flat

    def _gathered_dtype(self, param: Tensor) -> torch.dtype:
        return self.compute_dtype if self.compute_dtype is not None and param.is_floating_point() else param.dtype

    def _param_group(self, param: nn.Parameter) -> int:
        return self.param_groups.get(id(param), -1)


def _split_by_param_group(flat: FlatBuffer, groups: Sequence[int]) -> Iterator[OptimizerShard]:
    """Split this rank's shard where the optimizer's param group changes. A group's part of it may be empty."""
    start, size = flat.slices.start, flat.slices.size
    firsts = [i for i, group in enumerate(groups) if not i or group != groups[i - 1]]
    for first, last in zip(firsts, [*firsts[1:], len(groups)], strict=True):
        begin = flat.layout.slots[first].offset if first else 0
        end = flat.layout.slots[last].offset if last < len(groups) else flat.layout.numel
        low, high = (min(max(x - start, 0), size) for x in (begin, end))
        yield OptimizerShard(nn.Parameter(flat.local_shard[low:high]), low, groups[first], range(first, last))


def norm_parts(grad: Tensor) -> tuple[Tensor, ...]:
    """A gradient, or the parts of a large one: on CPUs torch adds up the squares of all elements in a row, which loses a thousandth of the norm of
    ten million elements in fp32. A flat buffer has as many."""
    return grad.flatten().split(_NORM_PART) if grad.device.type == "cpu" and grad.numel() > _NORM_PART else (grad,)
