"""From a plan with any axes and a profile to the ordered actions of its steady step, with every collective and every send."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.model import LayerProfile, ModelProfile, TensorSpec
from meshwright.core.plan import Plan
from meshwright.core.sample_coupling import batch_parts, counts_targets, watches_loss
from meshwright.core.schedule import Action, Op, Schedule
from meshwright.core.tensor_policy import CollectiveSite
from meshwright.core.workload import ITEM_BYTES, LOW_PRECISION_DTYPES
from meshwright.schedule.buckets import Bucket, ParamReplication, assign_buckets, replication_of, shard_size, unit_buckets
from meshwright.schedule.compression_actions import bucket_collectives, replica_bytes
from meshwright.schedule.context_actions import add_context_collectives
from meshwright.schedule.expert_actions import expert_collectives
from meshwright.schedule.norm_actions import synced_norm_collectives
from meshwright.schedule.rank_profile import local_profile
from meshwright.schedule.sequence_actions import sequence_collectives
from meshwright.schedule.spatial_actions import ModuleAction, spatial_collectives


@dataclass(frozen=True)
class MeshCoordinate:
    """A rank's coordinate along the axes on which programs differ."""

    pp: int = 0
    cp: int = 0
    ep: int = 0
    tp: int = 0
    shard: int = 0  # 0 unless ZeRO shards unevenly


def build_schedule(plan: Plan, profile: ModelProfile, *, clip: bool = False) -> Schedule:
    """The schedule of one step: one program for each pipeline, spatial, expert-parallel and tensor-parallel rank and each uneven shard; other
    ranks differ only in their data."""
    degrees = {"pp": plan.mesh.pp, "cp": plan.spatial.num_parts, "ep": plan.mesh.ep, "tp": plan.mesh.degree("tp")}
    degrees["shard"] = plan.mesh.shard if plan.balance.state_fractions else 1
    coordinates = list(itertools.product(*map(range, degrees.values())))
    programs = tuple(build_program(plan, profile, MeshCoordinate(*coordinate), clip=clip) for coordinate in coordinates)
    if len(programs) == 1:
        return Schedule(programs)
    index = {coordinate: i for i, coordinate in enumerate(coordinates)}
    of_rank = {r: index[tuple(plan.mesh.coordinate(r, axis) % degree for axis, degree in degrees.items())] for r in range(plan.world)}
    return Schedule(programs, {str(rank): program for rank, program in of_rank.items()})


def build_program(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, *, clip: bool = False, micro_batches: int = 0) -> tuple[Action, ...]:
    """The actions of one coordinate's ranks in a step, with the plan's number of micro-batches or another."""
    build = _zero3_program if plan.memory.zero == 3 and plan.mesh.group_size("data") > 1 else _bucketed_program
    local = local_profile(plan, profile, coordinate.tp, coordinate.pp, coordinate.ep)
    return *build(plan, local, coordinate, micro_batches or plan.micro_batches), *_grad_norm_actions(plan, clip)


def gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    """The buckets that `execute` will make for this plan: parameters in reverse order of registration. `profile` is one rank's."""
    same, equal = plan.partition_key
    sizes = (plan.sync.first_bucket_bytes, plan.sync.bucket_bytes, plan.mesh.shard if plan.memory.zero else 1, plan.memory.zero > 0)
    return profile.memo.get_or_compute("buckets", same, (*equal, *sizes), lambda: _gradient_buckets(plan, profile))


def _gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    tensors = [t for _, t in gradient_arrival_order(profile)]
    replication = replication_of(plan)
    return assign_buckets(
        [t.numel for t in tensors],
        [t.itemsize for t in tensors],
        [(t.dtype, replication(t.name, t.in_grad_norm or not plan.memory.zero)) for t in tensors],
        first_bytes=plan.sync.first_bucket_bytes,
        bytes_cap=plan.sync.bucket_bytes,
        shards=plan.mesh.shard if plan.memory.zero else 1,
    )


def gradient_arrival_order(profile: ModelProfile) -> list[tuple[int, TensorSpec]]:
    """This rank's trainable parameters with their layer, last registered first: about the order in which gradients arrive."""
    parameters = [(index, t) for index, layer in enumerate(profile.layers) for t in layer.tensors if t.trainable and t.numel]
    return sorted(parameters, key=lambda item: -item[1].registration_index)


@dataclass(frozen=True)
class UnitBuffer:
    """One flat buffer of a ZeRO-3 unit: gathered in the compute dtype, reduced and held in the storage dtype."""

    layout: Bucket
    trainable: bool
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.layout.numel * self.itemsize

    @property
    def padding(self) -> int:
        return self.layout.padding // self.layout.itemsize * self.itemsize


def unit_buffers(plan: Plan, profile: ModelProfile) -> dict[str, tuple[UnitBuffer, ...]]:
    """One rank's ZeRO-3 units and their buffers: the plan's units, MoE layers with sharded experts, and the rest of the model as `root`."""
    same, equal = plan.partition_key
    sizes = (plan.memory.units, plan.memory.precision, plan.mesh.shard)
    return profile.memo.get_or_compute("units", same, (*equal, *sizes), lambda: _unit_buffers(plan, profile))


def _unit_buffers(plan: Plan, profile: ModelProfile) -> dict[str, tuple[UnitBuffer, ...]]:
    moe_modules = _moe_modules(plan)
    # A pipeline stage leaves the model's forward midway, so there every layer is a unit and the model itself is none.
    units = set(plan.memory.units) | ({layer.name for layer in profile.layers} if plan.mesh.pp > 1 else set())
    tensors: dict[str, list[TensorSpec]] = {"root": []}
    for layer in profile.layers:
        expert_units = _expert_units(plan, layer, moe_modules)
        tensors |= {unit.name: list(unit.tensors) for unit in expert_units}
        in_experts = {t.name for unit in expert_units for t in unit.tensors}
        unit_tensors = tensors.setdefault(layer.name, []) if layer.name in units else tensors["root"]
        unit_tensors += [t for t in layer.tensors if t.name not in in_experts]
    replication = replication_of(plan)
    return {name: _make_unit_buffers(plan, unit_tensors, replication) for name, unit_tensors in tensors.items()}


def _make_unit_buffers(plan: Plan, tensors: list[TensorSpec], replication: Callable[[str, bool], ParamReplication]) -> tuple[UnitBuffer, ...]:
    tensors = [t for t in tensors if t.numel]
    low = ITEM_BYTES[plan.memory.precision] if plan.memory.precision in LOW_PRECISION_DTYPES else None
    buckets = unit_buckets(
        [t.numel for t in tensors],
        [low if low and "float" in t.dtype else t.itemsize for t in tensors],
        [(t.dtype, t.trainable, t.name if len(t.pipeline_ranks) > 1 else "", replication(t.name, t.in_grad_norm)) for t in tensors],
        plan.mesh.shard,
    )
    first_tensors = [tensors[bucket.slots[0].index] for bucket in buckets]
    return tuple(UnitBuffer(bucket, t.trainable, t.itemsize) for bucket, t in zip(buckets, first_tensors, strict=True))


LayerCollectives = dict[str, dict[str, list[Action]]]
_NO_COLLECTIVES: dict[str, list[Action]] = {"forward": [], "again": [], "backward": []}


def _layer_actions(
    plan: Plan, profile: ModelProfile, collectives: LayerCollectives, phase: str, layer: int, micro_batch: int, waits: tuple[str, ...] = ()
) -> Iterator[Action]:
    """One layer's computation and collectives; each collective blocks what comes after it."""
    name = profile.layers[layer].name
    actions = collectives.get(name, _NO_COLLECTIVES)
    mode = plan.memory.recompute_mode(name) if phase == "backward" else "none"
    if mode != "none":
        yield Action(f"recompute/{name}/{micro_batch}", "forward", layer, depends_on=waits, skips_expensive=mode == "selective")
        for action in actions["again"] if mode == "full" else ():  # selective recompute saves collectives' results with the matmuls
            waits = (f"{action.name}/again/{micro_batch}",)
            yield action.renamed(waits[0])
    yield Action(f"{phase}/{name}/{micro_batch}", "forward" if phase == "forward" else "backward", layer, depends_on=waits)
    for action in actions[phase]:
        yield action.renamed(f"{action.name}/{phase}/{micro_batch}", (f"{phase}/{name}/{micro_batch}",))


def layer_collectives(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate) -> LayerCollectives:
    """The collectives inside layers, by layer and phase; `again` holds those that recomputing a layer repeats."""
    same, equal = plan.partition_key
    key = (*equal, coordinate, bool(plan.balance.shares), plan.mesh.group_size("data") if plan.batch_norm == "sync" else 1)
    return profile.memo.get_or_compute("layer collectives", same, key, lambda: _build_layer_collectives(plan, profile, coordinate))


def _build_layer_collectives(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate) -> LayerCollectives:
    collectives: LayerCollectives = {}
    layers = {name for stage in plan.stages for name in stage.layers} or {layer.name for layer in profile.layers}
    local_layers = {layer.name for layer in profile.layers}

    def add(module: str, phase: str, action: Action, again: bool) -> None:
        layer = _enclosing_layer(module, layers)
        if layer in local_layers:
            actions = collectives.setdefault(layer, {"forward": [], "again": [], "backward": []})
            actions[phase].append(action)
            if again:
                actions["again"].append(action)

    def add_all(actions: Iterable[ModuleAction]) -> None:
        for a in actions:
            add(a.module, a.phase, a.action, a.phase == "forward" and _enclosing_layer(a.module, layers) not in a.skipped_in_recompute)

    add_all(_tensor_collectives(plan, profile, coordinate.tp))
    add_context_collectives(plan, profile, coordinate.tp, add)
    for module, phase, action, again in expert_collectives(plan, profile.batch, coordinate.ep) if plan.mesh.ep > 1 else ():
        add(module, phase, action, again)
    add_all(spatial_collectives(plan.spatial, profile.batch, coordinate.cp))
    add_all(synced_norm_collectives(plan))
    return collectives


def _tensor_collectives(plan: Plan, profile: ModelProfile, tp_rank: int) -> Iterator[ModuleAction]:
    """The collectives of a tensor-parallel rank, over both axes of a grid."""
    shards = plan.logical_dim_shards[tp_rank]

    def local_bytes(site: CollectiveSite) -> float:
        """Bytes of a site's tensor on this rank: the other axis of a grid may shard it."""
        length, dim_length = shards[site.other_axis_dim] if site.other_axis_dim else (1, 1)
        return site.bytes_for(profile.batch) * (length / dim_length)

    def collective(name: str, op: Op, axis: str, size: float, padding: float = 0.0) -> Action:
        return Action(name, op, bytes=round(size), padding=round(padding), axis=axis)

    for axis, policy in plan.tensor_policies:
        degree, dims = plan.mesh.degree(axis), {dim.name: dim for dim in policy.sharded_dims}
        yield from sequence_collectives(policy, degree, axis, profile.batch)
        for kind, sites in (("tp_output", policy.reduce_sites), ("embedding", policy.embedding_sites)):
            for site in (s for s in sites if s.sequence_layout is None):
                action = collective(f"{kind}/{site.module}", "all_reduce", axis, local_bytes(site))
                yield ModuleAction(site.module, "forward", action, site.skipped_in_recompute)
        for site in (s for s in policy.gather_sites if s.sequence_layout is None):
            size = local_bytes(site)
            padded = dims[site.logical_dim].padded_bytes(size, degree)
            action = collective(f"gather/{site.module}", "all_gather", axis, padded, padded - size)
            yield ModuleAction(site.module, "forward", action, site.skipped_in_recompute)
        for site in (s for s in policy.copy_sites if s.sequence_layout is None):
            yield ModuleAction(site.module, "backward", collective(f"tp_input/{site.module}", "all_reduce", axis, local_bytes(site)))
        for site in policy.norm_sites:
            size, name = site.bytes_for(profile.batch) * site.num_statistics, f"norm/{site.module}"
            reduce = collective(name, "all_reduce", axis, size)
            gathers = site.num_statistics > 1
            yield ModuleAction(site.module, "forward", collective(name, "all_gather", axis, size * degree) if gathers else reduce)
            yield ModuleAction(site.module, "backward", reduce)
        sizes = {t.name: t.bytes for t in profile.tensors}
        for name in policy.partial_grad_parameters:
            yield ModuleAction(name, "backward", collective(f"tp_grad/{name}", "all_reduce", axis, sizes.get(name, 0)))


def _enclosing_layer(module: str, layers: set[str]) -> str:
    """The layer that a module belongs to: the longest layer name that it starts with; the model itself otherwise."""
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return module or "(model)"


def _loss_actions(plan: Plan, profile: ModelProfile) -> Iterator[Action]:
    if plan.mesh.group_size("batch") > 1:
        size = 8 if plan.memory.precision == "fp64" else 4
        may_count = watches_loss(plan) and batch_parts(plan) > 1 and not profile.counted_loss
        count = 2 if profile.counted_loss or counts_targets(plan) or may_count else 1
        yield Action("loss", "all_reduce", bytes=size * count, axis="batch", expected_bytes=size if may_count else None)


def _grad_norm_actions(plan: Plan, clip: bool) -> Iterator[Action]:
    """The all-reduces that clipping needs for the norm of a sharded gradient: one number over each axis that shards it."""
    for axis in ("tp", "ep", "pp", "shard") if clip else ():
        if plan.mesh.degree(axis) > 1:
            size = 8 if plan.memory.precision == "fp64" else 4
            yield Action("norm" if axis == "shard" else f"norm/{axis}", "all_reduce", bytes=size, axis=axis)


def pipeline_sends(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, phase: str, micro_batch: int) -> Iterator[Action]:
    """What this rank's stages send for one micro-batch: activations forward, gradients backward. Adjacent stages on one rank send nothing."""
    shards = plan.logical_dim_shards[coordinate.tp]
    for stage in plan.stages_of_rank(coordinate.pp) if plan.mesh.pp > 1 else ():
        target = stage + 1 if phase == "forward" else stage - 1
        if not 0 <= target < len(plan.stages) or plan.stage_rank(target) == coordinate.pp:
            continue
        name = f"activations/{stage}" if phase == "forward" else f"gradients/{stage}"
        for i, activation in enumerate(a for a in plan.stages[max(stage, target)].boundary_activations if a.needs_grad or phase == "forward"):
            length, dim_length = shards.get(activation.logical_dim, (1, 1))
            size = round(activation.bytes_for(profile.batch) * length / dim_length)
            yield Action(f"{name}/{micro_batch}/{i}", "send", bytes=size, axis="pp", group_size=2)


def _shard_numel(plan: Plan, bucket: Bucket, coordinate: MeshCoordinate) -> int:
    """Elements of this rank's shard of a bucket."""
    return shard_size(bucket, plan.mesh.shard, plan.balance.state_fractions, coordinate.shard)


def _tied_gradient_actions(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate) -> Iterator[Action]:
    """The all-reduces for parameters that stages on several ranks use."""
    for tensor in (t for t in profile.tensors if len(t.pipeline_ranks) > 1 and t.trainable):
        size = tensor.bytes
        if plan.memory.zero == 3 and plan.mesh.shard > 1:
            (buffer,) = _make_unit_buffers(plan, [tensor], replication_of(plan))
            size = _shard_numel(plan, buffer.layout, coordinate) * tensor.itemsize
        yield Action(f"tied/{tensor.name}", "all_reduce", bytes=size, axis="pp", group_size=len(tensor.pipeline_ranks))


def _bucketed_program(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, micro_batches: int) -> Iterator[Action]:
    buckets = gradient_buckets(plan, profile) if plan.mesh.group_size("data") > 1 else ()
    op: Op = "reduce_scatter" if plan.memory.zero else "all_reduce"
    replica_axes = ["expert_replica" if b.replication.is_expert_parallel else "replica" for b in buckets]
    ready = _buckets_ready_after(buckets, profile)
    collectives = layer_collectives(plan, profile, coordinate)
    shapes = [t.shape for _, t in gradient_arrival_order(profile)]
    launched: list[str] = []
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        followers: list[Action] = []
        for layer in range(len(profile.layers)):
            yield from _layer_actions(plan, profile, collectives, "forward", layer, micro)
        yield from pipeline_sends(plan, profile, coordinate, "forward", micro)
        if last:
            yield from _loss_actions(plan, profile)
        for layer in reversed(range(len(profile.layers))):
            yield from _layer_actions(plan, profile, collectives, "backward", layer, micro)
            for index in ready.get(layer, []) if last or plan.memory.zero == 2 else ():
                axis = "shard" if plan.memory.zero else replica_axes[index]
                for call in bucket_collectives(plan.sync, buckets[index], shapes):
                    before = (launched[-1],) if call.after_previous else ()
                    launched.append(f"grads/bucket{index}{call.suffix}/{micro}")
                    action = Action(launched[-1], op, bytes=call.bytes, padding=call.padding, axis=axis, depends_on=before)
                    if call.after_previous:
                        followers.append(action)
                    else:
                        yield action
        yield from followers
        yield from pipeline_sends(plan, profile, coordinate, "backward", micro)
        if last:
            yield from _tied_gradient_actions(plan, profile, coordinate)
        if plan.memory.zero and plan.mesh.group_size("replica") > 1 and (last or plan.memory.zero == 2):
            for index, bucket in enumerate(buckets):
                name = f"replicas/bucket{index}/{micro}"
                size = replica_bytes(plan.sync, bucket, _shard_numel(plan, bucket, coordinate))
                yield Action(name, "all_reduce", bytes=size, axis=replica_axes[index], depends_on=(f"grads/bucket{index}/{micro}",))
                launched.append(name)
    yield Action("optimizer", "optimizer", depends_on=tuple(launched))
    if plan.memory.zero and plan.mesh.group_size("data") > 1:
        for index, bucket in enumerate(buckets):
            yield Action(f"params/bucket{index}", "all_gather", bytes=bucket.bytes, padding=bucket.padding, axis="shard", depends_on=("optimizer",))


def _buckets_ready_after(buckets: tuple[Bucket, ...], profile: ModelProfile) -> dict[int, list[int]]:
    """Layer → buckets that are complete, and next in order, once its backward is done."""
    layer_of = [layer for layer, _ in gradient_arrival_order(profile)]
    ready: dict[int, list[int]] = {}
    latest = dict.fromkeys((False, True), len(profile.layers))
    for index, bucket in enumerate(buckets):
        lane = bucket.replication.is_expert_parallel  # buckets of a lane are reduced in order, so a late one delays the rest
        latest[lane] = min(latest[lane], *(layer_of[s.index] for s in bucket.slots))
        ready.setdefault(latest[lane], []).append(index)
    return ready


def _zero3_program(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, micro_batches: int) -> Iterator[Action]:
    moe_modules = _moe_modules(plan)
    expert_units = {layer.name: [unit.name for unit in _expert_units(plan, layer, moe_modules)] for layer in profile.layers}
    units = unit_buffers(plan, profile)

    def buffer_name(name: str, tag: str, index: int) -> str:
        return f"{name}/{tag}/{index}" if index else f"{name}/{tag}"  # most units have one buffer

    def gather(name: str, tag: str) -> Iterator[Action]:
        for i, layout in enumerate(buffer.layout for buffer in units[name]):
            yield Action(f"params/{buffer_name(name, tag, i)}", "all_gather", bytes=layout.bytes, padding=layout.padding, axis="shard")

    def scatter(name: str, tag: str) -> Iterator[Action]:
        axis = "expert_replica" if name in moe_modules else "replica"
        for i, buffer in enumerate(b for b in units[name] if b.trainable):
            reduced = f"grads/{buffer_name(name, tag, i)}"
            yield Action(reduced, "reduce_scatter", bytes=buffer.bytes, padding=buffer.padding, axis="shard")
            if plan.mesh.group_size(axis) > 1:
                size = _shard_numel(plan, buffer.layout, coordinate) * buffer.itemsize
                yield Action(f"replicas/{buffer_name(name, tag, i)}", "all_reduce", bytes=size, axis=axis, depends_on=(reduced,))

    collectives = layer_collectives(plan, profile, coordinate)
    launched: list[str] = []
    for micro in range(micro_batches):
        for phase, order in (("forward", range(len(profile.layers))), ("backward", range(len(profile.layers) - 1, -1, -1))):
            tag = f"{phase}/{micro}"
            root_gathers = list(gather("root", tag))
            yield from root_gathers
            if phase == "backward" and micro == micro_batches - 1:
                yield from _loss_actions(plan, profile)
            gathers = {i: list(gather(name, tag)) for i in order if (name := profile.layers[i].name) in units and name not in moe_modules}
            gathering = [index for index, actions in gathers.items() if actions]
            next_unit = dict(itertools.pairwise(gathering))
            yield from gathers[gathering[0]] if gathering else ()
            for index in order:
                layer = profile.layers[index].name
                if index in next_unit:  # the next unit is prefetched while this one computes
                    yield from gathers[next_unit[index]]
                expert_gathers = [a for unit in expert_units[layer] for a in gather(unit, tag)]
                yield from expert_gathers
                waits = tuple(a.name for a in (*gathers.get(index, root_gathers), *expert_gathers))
                yield from _layer_actions(plan, profile, collectives, phase, index, micro, waits)
                if phase == "backward":
                    names = dict.fromkeys([*expert_units[layer], *([layer] if layer in units else [])])
                    scatters = [a for name in names for a in scatter(name, tag)]
                    launched += [a.name for a in scatters]
                    yield from scatters
            if phase == "backward":
                scatters = list(scatter("root", tag))
                launched += [a.name for a in scatters]
                yield from scatters
            yield from pipeline_sends(plan, profile, coordinate, phase, micro)
    yield from _tied_gradient_actions(plan, profile, coordinate)
    yield Action("optimizer", "optimizer", depends_on=tuple(launched))


def _moe_modules(plan: Plan) -> set[str]:
    """Modules whose experts are sharded over `ep`; each is a unit of ZeRO-3."""
    return {m.module for m in plan.expert.moe_layers} if plan.mesh.ep > 1 else set()


def _expert_units(plan: Plan, layer: LayerProfile, moe_modules: set[str]) -> list[LayerProfile]:
    """The MoE layers in a layer, each with its expert-parallel parameters."""
    names = sorted(name for name in moe_modules if name == layer.name or name.startswith(f"{layer.name}.") or layer.name == "(model)")
    experts = {name: tuple(t for t in layer.tensors if t.name in plan.expert.parameters and t.name.startswith(f"{name}.")) for name in names}
    return [replace(layer, name=name, tensors=tensors) for name, tensors in experts.items() if tensors]
