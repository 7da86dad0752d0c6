"""Data parallelism with gradient buckets (ZeRO-0, 1 and 2): gradients are reduced in flat buckets while backward runs.

[Note: one engine for zero = 0, 1, 2]
A gradient is copied into its bucket as soon as autograd has it; a large one is a bucket by itself. A full bucket is reduced at once, in a fixed
order, overlapping with the rest of backward. The three stages differ only in what happens to the bucket:
  0  all-reduce; every rank keeps the full bucket and steps every parameter.
  1  reduce-scatter into the rank's slice of the bucket; the optimizer steps a flat shard; an all-gather restores the parameters.
  2  as 1, but the bucket is freed once it is reduced, so a rank holds gradients of its shard only.
An all-reduce is a reduce-scatter and an all-gather, so all three put the same bytes on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.core.comm import Comm
from meshwright.core.plan import Plan, SyncPolicy
from meshwright.execute.bucket_state import BucketState
from meshwright.execute.compression_runtime import make_compressor
from meshwright.execute.data_parallel import MEAN, LookAtGradients, Reduction, check_shardable, full_gradient
from meshwright.execute.memory_runtime import storage_bytes
from meshwright.execute.module_hooks import on_gradient_accumulated
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.shard_layout import make_shard_layout
from meshwright.execute.unreached_parameters import UnreachedParts
from meshwright.schedule.buckets import ParamReplication, assign_buckets


class BucketReducer:
    """The buckets' collectives: reduces gradients over data ranks, by ZeRO stage, and all-gathers stepped parameters."""

    def __init__(self, groups: ProcessGroups, policy: SyncPolicy, zero: int, frees_buckets: bool) -> None:
        self.groups, self.zero, self.frees_buckets = groups, zero, frees_buckets
        self.reduction: Callable[[], Reduction] = lambda: MEAN
        self.look: LookAtGradients | None = None
        self._compressor = make_compressor(policy)
        self._in_flight: deque[BucketState] = deque()  # buckets that are freed once reduced

    def launch(self, bucket: BucketState) -> None:
        grads = bucket.grads
        assert grads is not None
        if self.look is not None:
            self.look(bucket.params, bucket.grad_views, grads)
        op, factor = self.reduction()
        if factor is not None:
            grads.mul_(factor)
        if self.frees_buckets:
            self._in_flight.append(bucket)
        if self.zero:
            shard, sizes = bucket.slices.local_shard(grads), bucket.slices.uneven_sizes
            bucket.pending = self._compressor.reduce_scatter(self.groups.shard, shard, grads, f"grads/{bucket.name}", op, sizes)
        else:
            get_views = lambda: [bucket.grad_view(slot) for slot in range(len(bucket.params))]  # noqa: E731
            comm = self._replica_group(bucket)
            bucket.pending = self._compressor.all_reduce(comm, grads, f"grads/{bucket.name}", op, bucket.name, get_views)

    def wait(self, buckets: Sequence[BucketState]) -> None:
        """Wait until the gradients of these launched buckets are final."""
        if self.frees_buckets:
            self.drain(0)
            return
        for bucket in buckets if self.zero else ():
            self._reduce_over_replicas(bucket)
        for bucket in buckets:
            self._finish(bucket)

    def drain(self, max_in_flight: int) -> None:
        """Finish buckets in flight and free them, all but the last `max_in_flight`."""
        while len(self._in_flight) > max_in_flight:
            bucket = self._in_flight.popleft()
            self._reduce_over_replicas(bucket)
            self._finish(bucket)

    def _reduce_over_replicas(self, bucket: BucketState) -> None:
        assert bucket.pending is not None and bucket.grads is not None
        bucket.pending.wait()
        shard = bucket.slices.local_shard(bucket.grads)
        bucket.pending = self._compressor.all_reduce(self._replica_group(bucket), shard, f"replicas/{bucket.name}", self.reduction().op)

    def _finish(self, bucket: BucketState) -> None:
        assert bucket.pending is not None
        bucket.pending.wait()
        if self.zero:
            bucket.store_shard_gradient()
        elif bucket.missing_slots:
            bucket.drop_unreached_gradients()

    def _replica_group(self, bucket: BucketState) -> Comm:
        return self.groups.expert_replica if bucket.layout.replication.is_expert_parallel else self.groups.replica

    def average_expert_gradient(self, grad: Tensor) -> Tensor:
        """Divide an expert's gradient by the size of `ep` where ranks are averaged: it sums over the tokens of all ranks along `ep`."""
        return grad / self.groups.ep.size if self.reduction().op == "mean" else grad

    def residuals(self, bucket: BucketState, *, create: bool) -> Iterator[tuple[str, Tensor]]:
        """What compression keeps of one bucket."""
        views = (lambda: list(bucket.params)) if create else None
        return ((f"{bucket.name}/{name}", tensor) for name, tensor in self._compressor.residuals(bucket.name, views))

    def gather_parameters(self, buckets: Sequence[BucketState]) -> None:
        """After the optimizer's step: all-gather every rank's shard of the parameters (stages 1 and 2)."""
        works = []
        for bucket in buckets:
            assert bucket.flat_params is not None and bucket.shard is not None
            works.append(self.groups.shard.all_gather(bucket.flat_params, bucket.shard.data, f"params/{bucket.name}", bucket.slices.uneven_sizes))
        for work in works:
            work.wait()


class GradientBuckets:
    """The `DataParallel` implementation of ZeRO-0, 1 and 2: hooks on a model's parameters; `finish` makes the gradients final."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, plan: Plan, groups: ProcessGroups, replication: Mapping[int, ParamReplication]
    ) -> None:
        self.zero = zero = plan.memory.zero
        self.buckets = _make_buckets(_params_by_arrival(model, optimizer, zero), plan, groups, replication)
        # Ranks along `ep` have different expert buckets: waiting for one before all are launched can deadlock.
        frees_buckets = zero == 2 and not any(b.layout.replication.is_expert_parallel for b in self.buckets)
        self._reducer = BucketReducer(groups, plan.sync, zero, frees_buckets)
        self._overlaps = "gradients" in plan.sync.overlap
        self._sync_enabled = True
        self._backward_started = False
        self._slot_of_param: dict[int, tuple[BucketState, int]] = {}
        self._send_queues: tuple[deque[BucketState], ...] = ()  # unsent buckets: replicated ones, and experts'
        self._reset_queues()
        self._register_hooks()
        if zero:
            check_shardable(optimizer, zero)
            _shard_parameters(self.buckets, optimizer)
            optimizer.register_step_post_hook(lambda *_: self._after_step())
        self._unreached = UnreachedParts(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._before_step())

    # -- set-up --

    def _reset_queues(self) -> None:
        """Refill the queues, each of which is sent in order. Experts' buckets have their own, since other ranks have other experts and buckets."""
        self._send_queues = tuple(deque(b for b in self.buckets if b.layout.replication.is_expert_parallel is expert) for expert in (False, True))

    def _register_hooks(self) -> None:
        for bucket in self.buckets:
            for slot, param in enumerate(bucket.params):
                self._slot_of_param[id(param)] = (bucket, slot)
                on_gradient_accumulated(param, self._on_gradient_ready)
                if bucket.layout.replication.is_expert_parallel:
                    param.register_hook(self._reducer.average_expert_gradient)

    def set_reduction(self, reduction: Callable[[], Reduction]) -> None:
        self._reducer.reduction = reduction

    def watch_own_gradients(self, look: LookAtGradients) -> None:
        self._reducer.look = look

    # -- during backward --

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context in which backward accumulates gradients locally and sends nothing (stages 0 and 1; stage 2 has no buffer to accumulate in)."""
        before, self._sync_enabled = self._sync_enabled, self.zero == 2
        try:
            yield
        finally:
            self._sync_enabled = before

    def _on_gradient_ready(self, param: Tensor) -> None:
        bucket, slot = self._slot_of_param[id(param)]
        if not self._backward_started and self._sync_enabled:
            self._backward_started = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        bucket.take_gradient(slot)
        if self._sync_enabled:
            bucket.awaited_slots.discard(slot)
            if self._overlaps:
                self._launch_ready()

    def _launch_ready(self) -> None:
        for queue in self._send_queues:
            while queue and not queue[0].awaited_slots:
                self._reducer.launch(queue.popleft())
                self._reducer.drain(1)

    # -- after backward --

    def before_backward(self, loss: Tensor) -> None:
        """Do nothing: every rank has whole parameters."""

    def finish(self) -> None:
        """Reduce unsent buckets and wait. Runs by itself at the end of each backward; calling it again does nothing."""
        if not self._sync_enabled:
            return
        # Under ZeRO, gradients may have been accumulated under `accumulate` that no backward has sent since.
        if not self._backward_started and not (self.zero and any(p.grad is not None for b in self.buckets for p in b.params)):
            return
        for bucket in (b for queue in self._send_queues for b in queue):
            bucket.fill_missing_gradients()
            self._reducer.launch(bucket)
        self._reducer.wait(self.buckets)
        for bucket in self.buckets:
            bucket.await_all()
        self._backward_started = False
        self._reset_queues()

    def _before_step(self) -> None:
        self.finish()
        if self.zero:
            self._unreached.before_step(self.buckets)

    def _after_step(self) -> None:
        self._unreached.after_step()
        self._reducer.gather_parameters(self.buckets)

    def reduce_all(self) -> None:
        """Reduce all accumulated gradients, however they were accumulated. Under stage 2 every backward has sent its own."""
        if self.zero < 2:
            self._backward_started = True
            self.finish()

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.clear()

    # -- state --

    def tied_gradient(self, param: nn.Parameter) -> Tensor:
        return full_gradient(param)

    def sharded_parameters(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """None: every rank has whole parameters."""
        return iter(())

    def residuals(self, *, create: bool) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets if not self.zero else ():
            yield from self._reducer.residuals(bucket, create=create)

    def parameter_bytes(self, model: nn.Module) -> int:
        return storage_bytes(list(model.parameters()))

    def gradient_bytes(self) -> int:
        return sum(bucket.gradient_bytes() for bucket in self.buckets)


def _params_by_arrival(model: nn.Module, optimizer: Optimizer, zero: int) -> list[tuple[nn.Parameter, int]]:
    """Trainable parameters with their optimizer group, last registered first: about the order in which gradients arrive."""
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    params = [p for p in reversed(list(model.parameters())) if p.requires_grad and p.numel()]  # a table on another rank is empty here
    return [(p, group_of[id(p)] if zero else 0) for p in params if not zero or id(p) in group_of]


def _make_buckets(
    params_with_group: Sequence[tuple[nn.Parameter, int]], plan: Plan, groups: ProcessGroups, replication: Mapping[int, ParamReplication]
) -> list[BucketState]:
    """Assign parameters to buckets, which replication separates too: experts' gradients are reduced over other groups, and the gradient norm of
    shards (zero > 0) counts by bucket. Replicated parameters never share a bucket with tensor-parallel shards, which may differ in size: sums
    would have another order, and copies would drift apart."""
    zero, params, keys = plan.memory.zero, [p for p, _ in params_with_group], []
    for param, group in params_with_group:
        of = replication.get(id(param), ParamReplication())
        keys.append((group, str(param.dtype), of if zero else of._replace(in_grad_norm=True)))
    numels, itemsizes, shards = [p.numel() for p in params], [p.element_size() for p in params], groups.shard.size if zero else 1
    layouts = assign_buckets(numels, itemsizes, keys, first_bytes=plan.sync.first_bucket_bytes, bytes_cap=plan.sync.bucket_bytes, shards=shards)
    slices = [make_shard_layout(layout, groups.shard, plan.balance.state_fractions) for layout in layouts]
    slot_params = [tuple(params[s.index] for s in layout.slots) for layout in layouts]
    return [BucketState(layout, slot_params[i], f"bucket{i}", zero, slices[i]) for i, layout in enumerate(layouts)]


def _shard_parameters(buckets: Sequence[BucketState], optimizer: Optimizer) -> None:
    """Move parameters into flat buffers and give the optimizer this rank's shards instead."""
    shards: dict[int, list[nn.Parameter]] = {}
    for bucket in buckets:
        shards.setdefault(bucket.param_group, []).append(bucket.shard_parameters())
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = shards.get(index, [])
