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
    options = (plan.mesh, plan.backend, plan.micro_batches == 1, first_backward)
    compute = (_zero_0_1_memory, _zero_0_1_memory, _zero_2_memory, _zero_3_memory)[memory.zero]
    return profile.memo.get_or_compute("sync_memory", same, (*equal, *sizes, *options), lambda: compute(plan, profile, first_backward))


def _buffer_copies(plan: Plan) -> int:
    """Copies of a reduce-scattered buffer (see [Note: gloo buffers])."""
    return 2 if backend_traits(plan.backend).copies_input else 1


def _bucket_layers(profile: ModelProfile, buckets: Sequence[Bucket]) -> list[tuple[int, int]]:
    """The first and the last layer of each bucket's parameters."""
    layers = [index for index, _ in gradient_arrival_order(profile)]
    by_bucket = [[layers[slot.index] for slot in bucket.slots] for bucket in buckets]
    return [(min(indices), max(indices)) for indices in by_bucket]


def _is_single_gradient(bucket: Bucket) -> bool:
    return len(bucket.slots) == 1 and not bucket.padding


def _suffix_sums(by_layer: Sequence[float]) -> tuple[float, ...]:
    """For each layer, the sum over later layers; the first entry is the total."""
    return tuple(accumulate(reversed(by_layer), initial=0.0))[::-1]


def _zero_0_1_memory(plan: Plan, profile: ModelProfile, first_backward: bool) -> SyncMemory:
    """ZeRO-0 and 1: buckets are allocated from the start, except single gradients without padding; sent buffers are held until the end."""
    buckets, count = gradient_buckets(plan, profile), len(profile.layers)
    single_gradients, copies = [0.0] * count, [0.0] * count
    for bucket, (first_layer, _) in zip(buckets, _bucket_layers(profile, buckets), strict=True):
        if first_backward and _is_single_gradient(bucket):
            single_gradients[first_layer] += bucket.bytes
        if plan.memory.zero == 1:
            copies[first_layer] += (_buffer_copies(plan) - 1) * bucket.bytes
    new_gradients, copied = _suffix_sums(single_gradients), _suffix_sums(copies)
    if plan.mesh.pp > 1:  # buckets are sent after the pipeline has drained
        return SyncMemory(new_gradients, (0.0,) * count, (0.0,) * count, copied[0])
    return SyncMemory(new_gradients, copied[1:], copied[:-1], copied[0])


def _zero_2_memory(plan: Plan, profile: ModelProfile, first_backward: bool) -> SyncMemory:
    """ZeRO-2: a bucket exists from its first gradient until its reduction; one is in flight while the next is filled. In the first backward a
    rank's shard of it is kept from then on; later backwards accumulate into that."""
    buckets, copies, count = gradient_buckets(plan, profile), _buffer_copies(plan), len(profile.layers)
    during, after, shards = [0.0] * count, [0.0] * count, [0.0] * count
    in_flight, final_gradients, shard = 0.0, 0.0, 0.0  # of the previous bucket: bytes in flight, and a rank's shard
    for bucket, (first, last) in zip(buckets, _bucket_layers(profile, buckets), strict=True):
        filling = 0 if _is_single_gradient(bucket) else bucket.bytes  # a single-gradient bucket is its layer's workspace until it is sent
        for layer in range(first, last + 1):
            during[layer] += in_flight + filling
        after[first] = max(after[first], in_flight + copies * bucket.bytes)
        if first_backward and first:
            shards[first - 1] += shard  # allocated when this bucket has been sent
        elif first_backward:
            final_gradients += shard
        in_flight, shard = float(copies * bucket.bytes), bucket.bytes / plan.mesh.shard
    if not first_backward:
        return SyncMemory((), tuple(during), tuple(after), in_flight)
    return SyncMemory(_suffix_sums(shards), tuple(during), tuple(after), in_flight / copies, final_gradients + shard)


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
    root, blocks = units.pop("root", None), sorted(units.values(), key=lambda u: -u.first_layer)
    completion_order = sorted([*blocks, *([root] if root else [])], key=lambda u: -u.first_layer)
    prefetches = "gathers" in plan.sync.overlap and plan.mesh.pp == 1
    # A reduced shard is accumulated into an existing one if there are several micro-batches.
    copies = _buffer_copies(plan) + (1 / plan.mesh.shard if plan.micro_batches > 1 else 0.0)
    during, after = [], []
    for layer in range(len(profile.layers)):
        running = next((u for u in blocks if u.first_layer <= layer <= u.last_layer), None)
        prefetched = next((u for u in blocks if u is not running and u.last_layer < layer), None) if prefetches else None
        live = sum(u.parameter_bytes for u in (running, prefetched) if u)
        if prefetched and _prefetch_in_flight(plan, profile, running, layer, prefetched):
            live += prefetched.parameter_bytes
        if root and root.first_layer <= layer:
            live += root.parameter_bytes + (root.gradient_bytes if layer <= root.last_layer else 0.0)
        sent = next((u for u in reversed(completion_order) if u.first_layer > layer), None)
        in_flight = sent.gradient_bytes * copies if sent else 0.0
        during.append(live + in_flight + (running.gradient_bytes if running and not running.dominant_gradient else 0.0))
        complete = [u for u in completion_order if u.first_layer == layer]
        sends = sum(u.gradient_bytes * copies - (root.gradient_bytes if u is root else 0.0) for u in complete)
        after.append(live + in_flight + max(sends, running.gradient_bytes + running.dominant_gradient if running in complete and running else 0.0))
    return SyncMemory((), tuple(during), tuple(after), 0.0)


def _prefetch_in_flight(plan: Plan, profile: ModelProfile, current: _UnitMemory | None, layer_index: int, prefetched: _UnitMemory) -> bool:
    """Whether gloo's own copy of the prefetched unit is still allocated when the running unit ends (see [Note: gloo buffers])."""
    first, last = (current.first_layer, current.last_layer) if current else (layer_index, layer_index)
    flops = sum(layer.flops_backward for layer in profile.layers[first : last + 1])
    return backend_traits(plan.backend).copies_input and flops < _FLOPS_PER_GLOO_BYTE * prefetched.parameter_bytes


def _unit_memory(plan: Plan, profile: ModelProfile) -> dict[str, _UnitMemory]:
    unit_layers: dict[str, list[int]] = {}
    buffers = unit_buffers(plan, profile)
    for index, layer in enumerate(profile.layers):
        inside = [name for name in buffers if name == layer.name or (layer.name and name.startswith(f"{layer.name}."))]
        for name in inside or ["root"]:
            unit_layers.setdefault(name, []).append(index)
    units = {}
    for name, unit in buffers.items():
        if unit and name in unit_layers:
            parameters, gradients = sum(b.layout.bytes for b in unit), sum(b.bytes for b in unit if b.trainable)
            layers = [i for i in unit_layers[name] if name != "root" or profile.layers[i].tensors] or unit_layers[name]
            largest = max(slot.numel * b.itemsize for b in unit for slot in b.layout.slots)
            units[name] = _UnitMemory(min(layers), max(layers), parameters, gradients, largest if 2 * largest > gradients else 0.0)
    return units
