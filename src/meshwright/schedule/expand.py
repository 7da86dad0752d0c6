"""Expansion: the steady step of a data-parallel or ZeRO plan as ordered actions, with every collective it will make."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, Schedule
from meshwright.core.workload import ITEM_BYTES
from meshwright.schedule.buckets import Bucket, assign_buckets


def expand(plan: Plan, profile: ModelProfile) -> Schedule:
    """One program serves all ranks: in these plans every rank does the same on its own samples."""
    build = _sharded if plan.memory.zero == 3 and plan.world > 1 else _bucketed
    return Schedule((tuple(build(plan, profile)),))


def gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    """The buckets that `execute` will make for this plan: parameters in reverse order of registration."""
    tensors = list(reversed(profile.tensors))
    return assign_buckets(
        [t.numel for t in tensors],
        [t.itemsize for t in tensors],
        [t.itemsize for t in tensors],
        first_bytes=plan.sync.first_bucket_bytes,
        bytes_cap=plan.sync.bucket_bytes,
        shards=plan.mesh.shard if plan.memory.zero else 1,
    )


def unit_bytes(tensors: tuple[LayerProfile, ...] | list[LayerProfile], shards: int, itemsize: int | None = None) -> tuple[int, int]:
    """(bytes gathered for these layers as one ZeRO-3 unit, of which padding): FSDP2 cuts dimension 0 into equal rows."""
    padded = real = 0
    for layer in tensors:
        for t in layer.tensors:
            rows = t.shape[0] if t.shape else 1
            size = itemsize or t.itemsize
            padded += -(-rows // shards) * shards * (t.numel // max(rows, 1)) * size
            real += t.numel * size
    return padded, padded - real


def _compute(plan: Plan, profile: ModelProfile, op: str, layer: int, micro: int, waits: tuple[str, ...] = ()) -> Iterator[Action]:
    name = profile.layers[layer].name
    if op == "backward" and plan.memory.recompute == "full" and name in plan.memory.units:
        yield Action(f"recompute/{name}/{micro}", "forward", layer, waits=waits)
    yield Action(f"{op}/{name}/{micro}", "forward" if op == "forward" else "backward", layer, waits=waits)


def _loss(plan: Plan) -> Iterator[Action]:
    if plan.world > 1:
        yield Action("loss", "all_reduce", bytes=8 if plan.memory.precision == "fp64" else 4, axis="world")


def _bucketed(plan: Plan, profile: ModelProfile) -> Iterator[Action]:
    buckets = gradient_buckets(plan, profile) if plan.world > 1 else ()
    op, axis = ("reduce_scatter", "shard") if plan.memory.zero else ("all_reduce", "dp")
    ready = _completed_at(buckets, profile)
    launched: list[str] = []
    for micro in range(plan.micro_batches):
        last = micro == plan.micro_batches - 1
        for layer in range(len(profile.layers)):
            yield from _compute(plan, profile, "forward", layer, micro)
        if last:
            yield from _loss(plan)
        for layer in reversed(range(len(profile.layers))):
            yield from _compute(plan, profile, "backward", layer, micro)
            if last or plan.memory.zero == 2:
                for index in ready.get(layer, []):
                    bucket = buckets[index]
                    launched.append(f"grads/bucket{index}/{micro}")
                    yield Action(launched[-1], op, bytes=bucket.bytes, padding=bucket.padding, axis=axis)  # type: ignore[arg-type]
    if plan.memory.zero and plan.mesh.dp > 1:
        for index, bucket in enumerate(buckets):
            launched.append(f"replicas/bucket{index}")
            yield Action(launched[-1], "all_reduce", bytes=bucket.bytes // plan.mesh.shard, axis="dp", waits=tuple(launched[:-1]))
    yield Action("optimizer", "optimizer", waits=tuple(launched))
    if plan.memory.zero and plan.world > 1:
        for index, bucket in enumerate(buckets):
            yield Action(f"params/bucket{index}", "all_gather", bytes=bucket.bytes, padding=bucket.padding, axis="shard", waits=("optimizer",))


def _completed_at(buckets: tuple[Bucket, ...], profile: ModelProfile) -> dict[int, list[int]]:
    """Layer → buckets that are complete, and next in line, once its backward is done."""
    layer_of = [i for i, layer in enumerate(profile.layers) for _ in layer.tensors]
    layer_of.reverse()
    found: dict[int, list[int]] = {}
    latest = len(profile.layers)
    for index, bucket in enumerate(buckets):
        latest = min(latest, *(layer_of[s.index] for s in bucket.slots))  # buckets go in order, so a late one holds up the rest
        found.setdefault(latest, []).append(index)
    return found


def _sharded(plan: Plan, profile: ModelProfile) -> Iterator[Action]:
    units = set(plan.memory.units)
    shards, precision = plan.mesh.shard, plan.memory.precision
    item = ITEM_BYTES[precision] if precision in ("bf16", "fp16") else None
    root = [layer for layer in profile.layers if layer.name not in units]

    def gather(name: str, layers: list[LayerProfile], tag: str, waits: tuple[str, ...] = ()) -> Iterator[Action]:
        size, padding = unit_bytes(layers, shards, item)
        if size:
            yield Action(f"params/{name}/{tag}", "all_gather", bytes=size, padding=padding, axis="shard", waits=waits)

    def scatter(name: str, layers: list[LayerProfile], tag: str) -> Iterator[Action]:
        size, padding = unit_bytes(layers, shards, None)
        if size:
            yield Action(f"grads/{name}/{tag}", "reduce_scatter", bytes=size, padding=padding, axis="shard")
            if plan.mesh.dp > 1:
                yield Action(f"replicas/{name}/{tag}", "all_reduce", bytes=size // shards, axis="dp", waits=(f"grads/{name}/{tag}",))

    sent: list[str] = []
    for micro in range(plan.micro_batches):
        for phase, order in (("forward", range(len(profile.layers))), ("backward", reversed(range(len(profile.layers))))):
            tag = f"{phase}/{micro}"
            gathers = list(gather("root", root, tag))
            yield from gathers
            if phase == "backward" and micro == plan.micro_batches - 1:
                yield from _loss(plan)
            for index in order:
                layer = profile.layers[index]
                own = list(gather(layer.name, [layer], tag)) if layer.name in units else gathers
                yield from own if layer.name in units else ()
                yield from _compute(plan, profile, phase, index, micro, tuple(a.name for a in own))
                if phase == "backward" and layer.name in units:
                    actions = list(scatter(layer.name, [layer], tag))
                    sent += [a.name for a in actions]
                    yield from actions
            if phase == "backward":
                actions = list(scatter("root", root, tag))
                sent += [a.name for a in actions]
                yield from actions
    yield Action("optimizer", "optimizer", waits=tuple(sent))
