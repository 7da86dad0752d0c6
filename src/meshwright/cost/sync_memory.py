"""Bytes of the buffers for gradient reduction and parameter all-gather during backward, layer by layer, as `execute` allocates them.

[Note: gloo buffers]
Gloo reduce-scatters a copy of its input and frees it with the call: such a buffer exists twice until the call is waited for. Its all-gather also uses
a buffer of its own, freed when all data has arrived: for a prefetched unit that is before the running unit ends, unless the running unit has so
little to compute that the all-gather takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshwright.core.backends import backend_traits
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.schedule.buckets import Bucket
from meshwright.schedule.step_actions import gradient_arrival_order, gradient_buckets, unit_buffers

_FLOPS_PER_GLOO_BYTE = 30  # operations that a CPU performs while gloo moves a byte, about


@dataclass(frozen=True)
class SyncMemory:
    """Bytes by layer: while it runs, and when it has ended and complete buckets are sent."""

    new_gradients: tuple[float, ...] = ()  # allocated by later layers in this backward
    during_layer: tuple[float, ...] = ()
    after_layer: tuple[float, ...] = ()
    end: float = 0.0  # at the end of backward
    final_gradients: float = 0.0  # gradients allocated only at the end of backward

    @property
    def allocated_gradients(self) -> float:
        """Bytes of the final gradients that this backward allocates."""
        return (self.new_gradients[0] if self.new_gradients else 0.0) + self.final_gradients


def sync_memory(plan: Plan, profile: ModelProfile, first_backward: bool = False) -> SyncMemory:
    """Sync buffers of the rank whose `profile` is given; in the `first_backward` of a step gradients are not allocated yet."""
    if plan.mesh.group_size("data") == 1:
        return SyncMemory()
    same, equal = plan.partition_key
    memory, sync = plan.memory, plan.sync
    sizes = (memory.zero, memory.units, memory.precision, sync.first_bucket_bytes, sync.bucket_bytes, tuple(sorted(sync.overlap)))
    more = (plan.mesh, plan.backend, plan.micro_batches == 1, first_backward)
    make = {0: _zero_0_1_memory, 1: _zero_0_1_memory, 2: _zero_2_memory, 3: _zero_3_memory}[plan.memory.zero]
    return profile.memo.get_or_compute("travel", same, (*equal, *sizes, *more), lambda: make(plan, profile, first_backward))


def _buffer_copies(plan: Plan) -> int:
    """Copies of a reduce-scattered buffer (see [Note: gloo buffers])."""
    return 2 if backend_traits(plan.backend).copies_input else 1


def _bucket_layers(profile: ModelProfile, buckets: Sequence[Bucket]) -> list[tuple[int, int]]:
    """The first and the last layer of each bucket's parameters."""
    layers = [index for index, _ in gradient_arrival_order(profile)]
    found = [[layers[slot.index] for slot in bucket.slots] for bucket in buckets]
    return [(min(each), max(each)) for each in found]


def _is_single_gradient(bucket: Bucket) -> bool:
    return len(bucket.slots) == 1 and not bucket.padding


def _suffix_sums(by_layer: Sequence[float]) -> tuple[float, ...]:
    """For each layer, the sum over later layers; the first entry is the total."""
    return tuple(accumulate(reversed(by_layer), initial=0.0))[::-1]


def _zero_0_1_memory(plan: Plan, profile: ModelProfile, first_backward: bool) -> SyncMemory:
    """ZeRO-0 and 1: buckets are allocated from the start, except single gradients without padding; sent buffers are held until the end."""
    buckets, count = gradient_buckets(plan, profile), len(profile.layers)
    alone, sent = [0.0] * count, [0.0] * count
    for bucket, (at, _) in zip(buckets, _bucket_layers(profile, buckets), strict=True):
        if first_backward and _is_single_gradient(bucket):
            alone[at] += bucket.bytes
        if plan.memory.zero == 1:
            sent[at] += (_buffer_copies(plan) - 1) * bucket.bytes
    fresh, copied = _suffix_sums(alone), _suffix_sums(sent)
    if plan.mesh.pp > 1:  # buckets are sent after the pipeline has drained
        return SyncMemory(fresh, (0.0,) * count, (0.0,) * count, copied[0])
    return SyncMemory(fresh, copied[1:], copied[:-1], copied[0])


def _zero_2_memory(plan: Plan, profile: ModelProfile, first_backward: bool) -> SyncMemory:
    """ZeRO-2: a bucket exists from its first gradient until its reduction; one is in flight while the next is filled. In the first backward a
    rank's shard of it is kept from then on; later backwards accumulate into that."""
    buckets, times, count = gradient_buckets(plan, profile), _buffer_copies(plan), len(profile.layers)
    working, leaving, kept = [0.0] * count, [0.0] * count, [0.0] * count
    before, late, own = 0.0, 0.0, 0.0
    for bucket, (start, last) in zip(buckets, _bucket_layers(profile, buckets), strict=True):
        filled = 0 if _is_single_gradient(bucket) else bucket.bytes  # a single-gradient bucket is its layer's workspace until it is sent
        for at in range(start, last + 1):
            working[at] += before + filled
        leaving[start] = max(leaving[start], before + times * bucket.bytes)
        if first_backward and start:
            kept[start - 1] += own  # the previous bucket's shard: allocated when this bucket has been sent
        elif first_backward:
            late += own
        before, own = float(times * bucket.bytes), bucket.bytes / plan.mesh.shard
    if not first_backward:
        return SyncMemory((), tuple(working), tuple(leaving), before)
    return SyncMemory(_suffix_sums(kept), tuple(working), tuple(leaving), before / times, late + own)


@dataclass(frozen=True)
class _UnitMemory:
    first_layer: int  # index of a layer
    last_layer: int
    parameter_bytes: float
    gradient_bytes: float
    dominant_gradient: float  # bytes of a gradient that is over half of the unit's: it is computed first, and the buffer is allocated with it


def _zero_3_memory(plan: Plan, profile: ModelProfile, first_backward: bool) -> SyncMemory:
    """ZeRO-3: the unsharded parameters of the root, the running unit and the prefetched one; their gradients, of which one is in flight while the
    next is filled."""
    units = _unit_memory(plan, profile)
    root, others = units.pop("root", None), sorted(units.values(), key=lambda u: -u.first_layer)
    every = sorted([*others, *([root] if root else [])], key=lambda u: -u.first_layer)  # in the order of completion
    times, ahead = _buffer_copies(plan), "gathers" in plan.sync.overlap and plan.mesh.pp == 1
    again = plan.micro_batches > 1  # reduced shards are accumulated into existing ones
    working, leaving = [], []
    for at in range(len(profile.layers)):
        mine = next((u for u in others if u.first_layer <= at <= u.last_layer), None)
        following = next((u for u in others if u is not mine and u.last_layer < at), None) if ahead else None
        here = sum(u.parameter_bytes for u in (mine, following) if u)
        if following and _prefetch_in_flight(plan, profile, mine, at, following):
            here += following.parameter_bytes
        if root and root.first_layer <= at:
            here += root.parameter_bytes + (root.gradient_bytes if at <= root.last_layer else 0.0)
        sent = next((u for u in reversed(every) if u.first_layer > at), None)
        gone = _reduce_scatter_bytes(sent, times, again, plan.mesh.shard)
        working.append(here + gone + (mine.gradient_bytes if mine and not mine.dominant_gradient else 0.0))
        complete = [u for u in every if u.first_layer == at]
        sends = sum(_reduce_scatter_bytes(u, times, again, plan.mesh.shard) - (root.gradient_bytes if u is root else 0.0) for u in complete)
        leaving.append(here + gone + max(sends, mine.gradient_bytes + mine.dominant_gradient if mine in complete and mine else 0.0))
    return SyncMemory((), tuple(working), tuple(leaving), 0.0)


def _prefetch_in_flight(plan: Plan, profile: ModelProfile, current: _UnitMemory | None, layer_index: int, prefetched: _UnitMemory) -> bool:
    """Whether gloo's own copy of the prefetched unit is still allocated when the running unit ends (see [Note: gloo buffers])."""
    layers = profile.layers[current.first_layer : current.last_layer + 1] if current else profile.layers[layer_index : layer_index + 1]
    return (
        backend_traits(plan.backend).copies_input
        and sum(layer.flops_backward for layer in layers) < _FLOPS_PER_GLOO_BYTE * prefetched.parameter_bytes
    )


def _reduce_scatter_bytes(unit: _UnitMemory | None, copies: int, accumulates: bool, shards: int) -> float:
    return unit.gradient_bytes * (copies + (1 / shards if accumulates else 0.0)) if unit else 0.0


def _unit_memory(plan: Plan, profile: ModelProfile) -> dict[str, _UnitMemory]:
    places: dict[str, list[int]] = {}
    buffers = unit_buffers(plan, profile)
    for at, layer in enumerate(profile.layers):
        inside = [name for name in buffers if name == layer.name or (layer.name and name.startswith(f"{layer.name}."))]
        for name in inside or ["root"]:
            places.setdefault(name, []).append(at)
    found = {}
    for name, buffers_of in buffers.items():
        if buffers_of and name in places:
            values, grads = sum(b.layout.bytes for b in buffers_of), sum(b.bytes for b in buffers_of if b.trainable)
            held = [at for at in places[name] if name != "root" or profile.layers[at].tensors] or places[name]
            largest = max(slot.numel * b.itemsize for b in buffers_of for slot in b.layout.slots)
            found[name] = _UnitMemory(min(held), max(held), values, grads, largest if 2 * largest > grads else 0.0)
    return found
