"""State of one gradient bucket: the flat gradient, of which its parameters' gradients are views, and, under ZeRO, its flat parameters and the
shard of them that this rank's optimizer steps. Nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.core.comm import Work
from meshwright.execute.data_parallel import OptimizerShard
from meshwright.execute.shard_layout import ShardLayout, padding_of, param_views
from meshwright.execute.unreached_parameters import fill_unreached, is_unreached, note_unreached
from meshwright.schedule.buckets import Bucket


@dataclass
class BucketState:
    """A bucket's tensors. Created with its layout; ZeRO stages 1 and 2 then move the parameters into it."""

    layout: Bucket
    params: tuple[nn.Parameter, ...]
    name: str
    zero: int
    slices: ShardLayout  # of the flat buffers; unused under stage 0
    grads: Tensor | None = None  # the flat gradient; None while released (stage 2)
    flat_params: Tensor | None = None  # stages 1 and 2
    shard: nn.Parameter | None = None  # this rank's slice of `flat_params`, which the optimizer steps
    shard_padding: tuple[slice, ...] = ()  # parts of `shard` that belong to no parameter
    grad_views: list[Tensor] = field(default_factory=list)  # views of `grads`, one for each parameter
    awaited_slots: set[int] = field(default_factory=set)  # slots whose gradient has not arrived in this backward
    missing_slots: set[int] = field(default_factory=set)  # slots that this rank's last backward did not reach
    unreached_slots: set[int] = field(default_factory=set)  # under ZeRO, slots that no rank's backward has reached
    pending: Work | None = None
    accumulated: Tensor | None = None  # an earlier backward's reduced shard, when the user accumulates across backwards

    def __post_init__(self) -> None:
        self.await_all()
        if self.zero < 2 and not self.is_single_param:
            self.set_flat_grads(self._new_flat_buffer())

    @property
    def is_single_param(self) -> bool:
        """Whether the bucket is one parameter without padding: then autograd's gradient is the flat gradient."""
        return len(self.params) == 1 and self.layout.numel == self.params[0].numel()

    @property
    def param_group(self) -> int:
        """Index of the optimizer's param group."""
        return self.layout.key[0]  # type: ignore[index, no-any-return]

    @property
    def optimizer_shards(self) -> tuple[OptimizerShard, ...]:
        return (OptimizerShard(self.shard, 0, self.param_group, range(len(self.params))),) if self.shard is not None else ()

    def _new_flat_buffer(self) -> Tensor:
        return torch.zeros(self.layout.numel, dtype=self.params[0].dtype, device=self.params[0].device)

    def shard_parameters(self) -> nn.Parameter:
        """Move the parameters into a flat buffer; return this rank's shard of it."""
        flat = self._new_flat_buffer()
        for view, param in zip(param_views(flat, self.layout, self.params), self.params, strict=True):
            param.data = view.copy_(param.data)
        self.flat_params, self.shard = flat, nn.Parameter(self.slices.local_shard(flat))
        start, size = self.slices.start, self.slices.size
        gaps = (slice(max(gap.start - start, 0), min(gap.stop - start, size)) for gap in padding_of(self.layout))
        self.shard_padding = tuple(gap for gap in gaps if gap.start < gap.stop)
        return self.shard

    def await_all(self) -> None:
        """Before a backward: mark every gradient as awaited."""
        self.pending, self.awaited_slots = None, set(range(len(self.params)))

    def set_flat_grads(self, grads: Tensor) -> None:
        self.grads, self.grad_views = grads, param_views(grads, self.layout, self.params)

    def grad_view(self, slot: int) -> Tensor:
        self._save_accumulated()
        if self.grads is None:
            self.set_flat_grads(self._new_flat_buffer())
        return self.grad_views[slot]

    def _save_accumulated(self) -> None:
        """Save the shard's gradient, a slice of the flat gradient, before that is overwritten: it may hold an earlier backward's result."""
        if self.zero == 1 and self.accumulated is None and self.shard is not None and self.shard.grad is not None:
            self.accumulated = self.shard.grad.clone()

    def take_gradient(self, slot: int) -> None:
        """Make a parameter's new gradient a view of the flat gradient, or the flat gradient itself."""
        param = self.params[slot]
        assert param.grad is not None
        if self.is_single_param and param.grad.is_contiguous():
            self._save_accumulated()
            self.set_flat_grads(param.grad.view(-1))
        else:
            view = self.grad_view(slot)
            if param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
                param.grad = view

    def fill_missing_gradients(self) -> None:
        """Fill in gradients that this backward did not reach: with what was accumulated before, or with the zeros that say so; see
        [Note: parameters that no backward reaches]. A parameter that is frozen for now has none."""
        for slot in self.awaited_slots:
            param, view = self.params[slot], self.grad_view(slot)
            if param.grad is None:
                fill_unreached(view)
                self.missing_slots.add(slot)
                param.grad = view if param.requires_grad else None
                continue
            if param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
            param.grad = view

    def drop_unreached_gradients(self) -> None:
        """Leave parameters without a gradient that no rank's backward has reached, after the reduction of stage 0."""
        for slot in self.missing_slots:
            if is_unreached(self.grad_views[slot]):
                self.params[slot].grad = None
        self.missing_slots.clear()

    def store_shard_gradient(self) -> None:
        """Make a slice of the reduced flat gradient the shard's gradient. Stage 2 frees the rest of the memory."""
        assert self.grads is not None and self.shard is not None
        grad = self.slices.local_shard(self.grads)
        note_unreached(self, grad, self.accumulated is not None if self.zero == 1 else self.shard.grad is not None)
        for param in self.params:
            param.grad = None
        if self.zero == 2:
            self.shard.grad = grad.clone() if self.shard.grad is None else self.shard.grad.add_(grad)
            self.grads, self.grad_views, self.pending = None, [], None
        else:
            for gap in self.shard_padding:  # a step that clipping by a NaN has spoilt leaves NaN there, and backward writes only parameters' parts
                grad[gap].zero_()
            self.shard.grad = grad if self.accumulated is None else grad.add_(self.accumulated)
            self.accumulated = None

    def clear(self) -> None:
        """Drop gradients after a step."""
        self.accumulated = None
        if self.is_single_param:
            self.grads, self.grad_views = None, []
        for param in self.params if self.shard is None else (*self.params, self.shard):
            param.grad = None

    def gradient_bytes(self) -> int:
        shard_grad = self.shard.grad if self.zero == 2 and self.shard is not None else None
        return sum(grad.nbytes for grad in (self.grads, shard_grad) if grad is not None)
