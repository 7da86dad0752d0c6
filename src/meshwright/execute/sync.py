"""Synchronization Manager, acting half: gradients meet in flat buckets while backward goes on (data parallel, ZeRO-1, ZeRO-2).

[Note: one engine for zero = 0, 1, 2]
A gradient is copied into its bucket as soon as autograd has it; a large one is a bucket by itself. A full bucket is reduced at once, in
a fixed order, beside the rest of backward. The three stages differ only in what happens to the bucket:
  0  all-reduce; every rank keeps the whole bucket and steps every parameter.
  1  reduce-scatter into the rank's own slice of the bucket; the optimizer steps a flat slice; all-gather brings the parameters back.
  2  as 1, but the bucket is released once it is reduced, so a rank holds gradients for its own slice alone.
An all-reduce is a reduce-scatter and an all-gather, so all three put the same bytes on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.core.comm import Comm, Pending
from meshwright.core.errors import RequestError
from meshwright.core.plan import SyncPolicy
from meshwright.execute.compression import travel_of
from meshwright.execute.groups import Groups
from meshwright.execute.memory import storage_bytes
from meshwright.execute.slices import Slices, slices_of
from meshwright.schedule.buckets import Bucket, Kind, assign_buckets

# Optimizers whose update of one element depends on that element alone; only these may work on a slice cut across tensors.
ELEMENTWISE = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}


@dataclass(frozen=True)
class Piece:
    """What the optimizer steps of a rank's slice of a flat buffer."""

    param: nn.Parameter
    start: int  # in the slice
    group: int  # of the optimizer
    slots: range  # the parameters that it is a part of


def check_sliceable(optimizer: torch.optim.Optimizer, zero: int) -> None:
    if optimizer.state:
        raise RequestError(f"zero={zero} cuts the optimizer's state: apply the plan before the optimizer's first step")
    if type(optimizer).__name__ not in ELEMENTWISE:
        raise RequestError(f"zero={zero} steps slices cut across tensors, and {type(optimizer).__name__} is not known to be element-wise: use zero=0")


@dataclass
class _Live:
    """One bucket at work."""

    layout: Bucket
    params: tuple[nn.Parameter, ...]
    name: str
    slices: Slices  # of the flat buffers; under stage 0 nobody asks
    grads: torch.Tensor | None = None  # the flat buffer; None while released (stage 2)
    values: torch.Tensor | None = None  # flat parameters (stages 1 and 2)
    shard: nn.Parameter | None = None  # this rank's slice of `values`: what the optimizer steps
    views: list[torch.Tensor] = field(default_factory=list)  # of `grads`, one for each parameter
    waiting: set[int] = field(default_factory=set)  # slots whose gradient has not arrived in this backward
    pending: Pending | None = None
    carried: torch.Tensor | None = None  # an earlier backward's reduced slice, when the user accumulates across backwards

    @property
    def alone(self) -> bool:
        """One parameter without padding: its gradient, as autograd makes it, is the bucket."""
        return len(self.params) == 1 and self.layout.numel == self.params[0].numel()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (Piece(self.shard, 0, _group_of(self), range(len(self.params))),) if self.shard is not None else ()


class GradientBuckets:
    """Attached to a model's parameters by hooks; `finish` makes the gradients final. Works under `backward()` of any loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        policy: SyncPolicy,
        zero: int,
        kinds: Mapping[int, Kind] | None = None,
        states: Sequence[float] = (),
    ) -> None:
        self.groups, self.policy, self.zero = groups, policy, zero
        self._states = states
        self.travel = travel_of(policy)
        self._kinds = kinds or {}
        self.reduce = "mean"  # a user's own loop averages over ranks; Session weights the loss itself and sums
        self._enabled = True
        self._begun = False
        self._lanes: tuple[deque[_Live], ...] = ()  # buckets that were not sent yet: those that all replicas hold, and those that are owned
        self._home: dict[int, tuple[_Live, int]] = {}
        self._sent: deque[_Live] = deque()  # under way (stage 2)
        self.buckets = self._build(_ordered(model, optimizer, zero))
        # Owners have other buckets than their replicas: whoever waits for one before all are sent may wait for somebody who waits for him.
        self._releases = zero == 2 and not any(b.layout.kind.owned for b in self.buckets)
        self._line_up()
        if zero:
            self._shard(optimizer)
            optimizer.register_step_post_hook(lambda *_: self.gather_parameters())
        optimizer.register_step_pre_hook(lambda *_: self.finish())

    # -- set-up --

    def _build(self, found: Sequence[tuple[nn.Parameter, int]]) -> list[_Live]:
        params = [p for p, _ in found]
        layouts = assign_buckets(
            [p.numel() for p in params],
            [p.element_size() for p in params],
            [(group, str(p.dtype), self._kind(p)) for p, group in found],
            first_bytes=self.policy.first_bucket_bytes,
            bytes_cap=self.policy.bucket_bytes,
            shards=self.groups.shard.size if self.zero else 1,
        )
        slices = [slices_of(b, self.groups.shard, self._states) for b in layouts]
        live = [_Live(b, tuple(params[s.index] for s in b.slots), f"bucket{i}", slices[i]) for i, b in enumerate(layouts)]
        for bucket in live:
            for at, param in enumerate(bucket.params):
                self._home[id(param)] = (bucket, at)
                param.register_post_accumulate_grad_hook(self._arrived)
                if bucket.layout.kind.owned:
                    param.register_hook(self._owners_mean)
            bucket.waiting = set(range(len(bucket.params)))
            if self.zero < 2 and not bucket.alone:
                self._hold(bucket, _flat(bucket))
        return live

    def _kind(self, param: nn.Parameter) -> Kind:
        """Squares are summed kind by kind over slices alone; what is owned meets elsewhere at every stage. What tensor-parallel ranks hold
        alike never shares a bucket with pieces, which may differ in size: sums would be made in another order, and copies drift apart."""
        kind = self._kinds.get(id(param), Kind())
        return kind if self.zero else kind._replace(counted=True)

    def _line_up(self) -> None:
        """In each lane buckets go in order. What is owned has its own, since other ranks own something else and have other buckets for it."""
        self._lanes = tuple(deque(b for b in self.buckets if b.layout.kind.owned is owned) for owned in (False, True))

    def _shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Move parameters into flat buffers and give the optimizer this rank's slices instead."""
        check_sliceable(optimizer, self.zero)
        shards: dict[int, list[nn.Parameter]] = {}
        for bucket in self.buckets:
            flat = _flat(bucket)
            for slot, param in zip(bucket.layout.slots, bucket.params, strict=True):
                view = flat[slot.offset : slot.offset + slot.numel].view_as(param)
                view.copy_(param.data)
                param.data = view
            bucket.values = flat
            bucket.shard = nn.Parameter(bucket.slices.own(flat))
            shards.setdefault(_group_of(bucket), []).append(bucket.shard)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = shards.get(index, [])

    # -- during backward --

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, backward adds gradients up locally and sends nothing (stages 0 and 1; stage 2 holds no place to add up in)."""
        before, self._enabled = self._enabled, self.zero == 2
        try:
            yield
        finally:
            self._enabled = before

    def _arrived(self, param: torch.Tensor) -> None:
        bucket, at = self._home[id(param)]
        if not self._begun and self._enabled:
            self._begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        assert param.grad is not None
        if bucket.alone and param.grad.is_contiguous():
            self._set_aside(bucket)
            self._hold(bucket, param.grad.view(-1))
        else:
            view = self._view(bucket, at)
            if param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
                param.grad = view
        if self._enabled:
            bucket.waiting.discard(at)
            if "gradients" in self.policy.overlap:
                self._launch_complete()

    def _owners_mean(self, grad: torch.Tensor) -> torch.Tensor:
        """An owner has the sum over what all ranks along `ep` sent it; where ranks are averaged, that is so many times too much."""
        return grad / self.groups.ep.size if self.reduce == "mean" else grad

    def _view(self, bucket: _Live, at: int) -> torch.Tensor:
        self._set_aside(bucket)
        if bucket.grads is None:
            self._hold(bucket, _flat(bucket))
        return bucket.views[at]

    def _hold(self, bucket: _Live, grads: torch.Tensor) -> None:
        bucket.grads = grads
        slots = zip(bucket.layout.slots, bucket.params, strict=True)
        bucket.views = [grads[slot.offset : slot.offset + slot.numel].view_as(param) for slot, param in slots]

    def _set_aside(self, bucket: _Live) -> None:
        """Before a bucket is written again: the slice may hold an earlier backward's result."""
        if self.zero == 1 and bucket.carried is None and bucket.shard is not None and bucket.shard.grad is not None:
            bucket.carried = bucket.shard.grad.clone()

    def _launch_complete(self) -> None:
        for lane in self._lanes:
            while lane and not lane[0].waiting:
                self._launch(lane.popleft())
                if self._releases:
                    self._settle_sent(1)

    def _launch(self, bucket: _Live) -> None:
        grads = bucket.grads
        assert grads is not None
        if self._releases:
            self._sent.append(bucket)
        if self.zero:
            own, sizes = bucket.slices.own(grads), bucket.slices.uneven
            bucket.pending = self.travel.reduce_scatter(self.groups.shard, own, grads, f"grads/{bucket.name}", self.reduce, sizes)
        else:
            parts = lambda: [self._view(bucket, at) for at in range(len(bucket.params))]  # noqa: E731
            bucket.pending = self.travel.all_reduce(self._replicas(bucket), grads, f"grads/{bucket.name}", self.reduce, bucket.name, parts)

    def _replicas(self, bucket: _Live) -> Comm:
        return self.groups.owned if bucket.layout.kind.owned else self.groups.replica

    # -- after backward --

    def finish(self) -> None:
        """Reduce what is still open and wait. Runs by itself at the end of each backward; calling it again does nothing."""
        if not self._enabled or (not self._begun and not self._unsent()):
            return
        for bucket in (b for lane in self._lanes for b in lane):
            self._fill_missing(bucket)
            self._launch(bucket)
        if self._releases:
            self._settle_sent(0)
        elif self.zero:
            self._settle_shards()
        else:
            self._settle_whole()
        for bucket in self.buckets:
            bucket.pending = None
            bucket.waiting = set(range(len(bucket.params)))
        self._begun = False
        self._line_up()

    def send_all(self) -> None:
        """Reduce everything that was added up, whichever way it got there: a pipeline's backward may go round autograd's hooks."""
        self._begun = True
        self.finish()

    def _unsent(self) -> bool:
        """Gradients were added up under `accumulate` and no backward has sent them since."""
        return any(p.grad is not None for b in self.buckets for p in b.params) if self.zero else False

    def _fill_missing(self, bucket: _Live) -> None:
        """A parameter that this backward did not reach keeps what was accumulated before, or counts as zero."""
        for at in bucket.waiting:
            param, view = bucket.params[at], self._view(bucket, at)
            if param.grad is None:
                view.zero_()
            elif param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
            param.grad = view

    def _settle_whole(self) -> None:
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()

    def _settle_shards(self) -> None:
        for bucket in self.buckets:
            self._over_replicas(bucket)
        for bucket in self.buckets:
            self._take_in(bucket)

    def _settle_sent(self, still: int) -> None:
        """Take in what was sent and give its memory back, but for the last few (stage 2)."""
        while len(self._sent) > still:
            bucket = self._sent.popleft()
            self._over_replicas(bucket)
            self._take_in(bucket)

    def _over_replicas(self, bucket: _Live) -> None:
        assert bucket.pending is not None and bucket.grads is not None
        bucket.pending.wait()
        mine = bucket.slices.own(bucket.grads)
        bucket.pending = self.travel.all_reduce(self._replicas(bucket), mine, f"replicas/{bucket.name}", self.reduce)

    def _take_in(self, bucket: _Live) -> None:
        assert bucket.pending is not None and bucket.grads is not None and bucket.shard is not None
        bucket.pending.wait()
        mine = bucket.slices.own(bucket.grads)
        for param in bucket.params:
            param.grad = None
        if self.zero == 2:
            bucket.shard.grad = mine.clone() if bucket.shard.grad is None else bucket.shard.grad.add_(mine)
            bucket.grads, bucket.views, bucket.pending = None, [], None
        else:
            bucket.shard.grad = mine if bucket.carried is None else mine.add_(bucket.carried)
            bucket.carried = None

    def gather_parameters(self) -> None:
        """After the optimizer's step: bring every rank's slice of the parameters to every rank (stages 1 and 2)."""
        works = []
        for bucket in self.buckets:
            assert bucket.values is not None and bucket.shard is not None
            works.append(self.groups.shard.all_gather(bucket.values, bucket.shard.data, f"params/{bucket.name}", bucket.slices.uneven))
        for work in works:
            work.wait()

    # -- what it holds --

    def clear(self) -> None:
        """Drop gradients after a step."""
        for bucket in self.buckets:
            bucket.carried = None
            if bucket.alone:
                bucket.grads, bucket.views = None, []
            for param in bucket.params if bucket.shard is None else (*bucket.params, bucket.shard):
                param.grad = None

    def parameter_bytes(self, model: nn.Module) -> int:
        return storage_bytes(list(model.parameters()))

    def gradient_bytes(self) -> int:
        held = [b.grads for b in self.buckets if b.grads is not None]
        held += [b.shard.grad for b in self.buckets if self.zero == 2 and b.shard is not None and b.shard.grad is not None]
        return sum(t.numel() * t.element_size() for t in held)


def _ordered(model: nn.Module, optimizer: torch.optim.Optimizer, zero: int) -> list[tuple[nn.Parameter, int]]:
    """Trainable parameters with their optimizer group, last registered first: about the order in which gradients arrive."""
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found = [(p, group_of.get(id(p), -1)) for p in model.parameters() if p.requires_grad and p.numel()]  # a table of another owner is empty here
    if zero == 0:
        return [(p, 0) for p, _ in reversed(found)]
    return [(p, group) for p, group in reversed(found) if group >= 0]


def _flat(bucket: _Live) -> torch.Tensor:
    first = bucket.params[0]
    return torch.zeros(bucket.layout.numel, dtype=first.dtype, device=first.device)


def _group_of(bucket: _Live) -> int:
    key: Any = bucket.layout.key
    return int(key[0])
