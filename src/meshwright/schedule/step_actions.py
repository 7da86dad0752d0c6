"""Expansion: from a plan with any axes and a profile to the ordered actions of its steady step, with every collective and every send."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.model import LayerProfile, ModelProfile, TensorSpec
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, Schedule
from meshwright.core.tensor_policy import CollectiveSite, TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW_PRECISION_DTYPES
from meshwright.schedule.buckets import Bucket, ParamReplication, assign_buckets, replication_of, shard_size, unit_buckets
from meshwright.schedule.compression_actions import bucket_collectives, replica_bytes
from meshwright.schedule.context_actions import add_context_collectives
from meshwright.schedule.expert_actions import expert_collectives
from meshwright.schedule.rank_profile import local_profile
from meshwright.schedule.sequence_actions import sequence_collectives
from meshwright.schedule.spatial_actions import spatial_collectives


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
    programs = tuple(build_program(plan, profile, MeshCoordinate(*at), clip=clip) for at in itertools.product(*map(range, degrees.values())))
    places = {}
    for rank in range(plan.world):
        at = 0
        for axis, ways in degrees.items():
            at = at * ways + plan.mesh.coordinate(rank, axis) % ways
        places[str(rank)] = at
    return Schedule(programs, places if len(programs) > 1 else {})


def build_program(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, *, clip: bool = False, micro_batches: int = 0) -> tuple[Action, ...]:
    """The actions of one coordinate's ranks in a step, with the plan's number of micro-batches or another."""
    build = _zero3_program if plan.memory.zero == 3 and plan.mesh.group_size("data") > 1 else _bucketed_program
    return (
        *build(plan, local_profile(plan, profile, coordinate.tp, coordinate.pp, coordinate.ep), coordinate, micro_batches or plan.micro_batches),
        *_grad_norm_actions(plan, clip),
    )


def gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    """The buckets that `execute` will make for this plan: parameters in reverse order of registration. `profile` is one rank's."""
    same, equal = plan.partition_key
    sizes = (plan.sync.first_bucket_bytes, plan.sync.bucket_bytes, plan.mesh.shard if plan.memory.zero else 1, plan.memory.zero > 0)
    return profile.memo.get_or_compute("buckets", same, (*equal, *sizes), lambda: _gradient_buckets(plan, profile))


def _gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    tensors = [t for _, t in gradient_arrival_order(profile)]
    kind = _replication_of(plan)
    kinds = [kind(t)._replace(in_grad_norm=t.in_grad_norm or not plan.memory.zero) for t in tensors]
    return assign_buckets(
        [t.numel for t in tensors],
        [t.itemsize for t in tensors],
        [(t.dtype, kind) for t, kind in zip(tensors, kinds, strict=True)],
        first_bytes=plan.sync.first_bucket_bytes,
        bytes_cap=plan.sync.bucket_bytes,
        shards=plan.mesh.shard if plan.memory.zero else 1,
    )


def gradient_arrival_order(profile: ModelProfile) -> list[tuple[int, TensorSpec]]:
    """Trainable parameters with their layer, last registered first: about the order in which gradients arrive. Parameters on other ranks are left
    out."""
    found = [(index, t) for index, layer in enumerate(profile.layers) for t in layer.tensors if t.trainable and t.numel]
    return sorted(found, key=lambda item: -item[1].registration_index)


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
    """The units of ZeRO-3, with the buffers that `execute` will make for them: the plan's units, MoE layers with sharded experts, and the rest of
    the model as `root`. `profile` is one rank's."""
    same, equal = plan.partition_key
    sizes = (plan.memory.units, plan.memory.precision, plan.mesh.shard)
    return profile.memo.get_or_compute("units", same, (*equal, *sizes), lambda: _unit_buffers(plan, profile))


def _unit_buffers(plan: Plan, profile: ModelProfile) -> dict[str, tuple[UnitBuffer, ...]]:
    mixtures = {m.module for m in plan.expert.moe_layers} if plan.mesh.ep > 1 else set()
    # A pipeline stage leaves the model's forward midway, so there every layer is a unit and the model itself is none.
    units = set(plan.memory.units) | ({layer.name for layer in profile.layers} if plan.mesh.pp > 1 else set())
    tensors: dict[str, list[TensorSpec]] = {"root": []}
    for layer in profile.layers:
        inside = _expert_units(plan, layer, mixtures)
        for unit in inside:
            tensors[unit.name] = list(unit.tensors)
        gone = {t.name for unit in inside for t in unit.tensors}
        mine = tensors.setdefault(layer.name, []) if layer.name in units else tensors["root"]
        mine += [t for t in layer.tensors if t.name not in gone]
    kinds = _replication_of(plan)
    return {name: _make_unit_buffers(plan, found, kinds) for name, found in tensors.items()}


def _replication_of(plan: Plan) -> Callable[[TensorSpec], ParamReplication]:
    kind = replication_of(plan)
    return lambda t: kind(t.name, t.in_grad_norm)


def _make_unit_buffers(plan: Plan, tensors: list[TensorSpec], replication_of: Callable[[TensorSpec], ParamReplication]) -> tuple[UnitBuffer, ...]:
    tensors = [t for t in tensors if t.numel]
    low = ITEM_BYTES[plan.memory.precision] if plan.memory.precision in LOW_PRECISION_DTYPES else None
    found = unit_buckets(
        [t.numel for t in tensors],
        [low if low and "float" in t.dtype else t.itemsize for t in tensors],
        [(t.dtype, t.trainable, t.name if len(t.pipeline_ranks) > 1 else "", replication_of(t)) for t in tensors],
        plan.mesh.shard,
    )
    first = [tensors[bucket.slots[0].index] for bucket in found]
    return tuple(UnitBuffer(bucket, t.trainable, t.itemsize) for bucket, t in zip(found, first, strict=True))


LayerCollectives = dict[str, dict[str, list[Action]]]
_NO_COLLECTIVES: dict[str, list[Action]] = {"forward": [], "again": [], "backward": []}


def _layer_actions(
    plan: Plan, profile: ModelProfile, collectives: LayerCollectives, phase: str, layer: int, micro_batch: int, waits: tuple[str, ...] = ()
) -> Iterator[Action]:
    """One layer's computation and collectives; each collective blocks what comes after it."""
    name = profile.layers[layer].name
    sites = collectives.get(name, _NO_COLLECTIVES)
    mode = plan.memory.recompute_mode(name) if phase == "backward" else "none"
    if mode != "none":
        yield Action(f"recompute/{name}/{micro_batch}", "forward", layer, depends_on=waits, skips_expensive=mode == "selective")
        for action in sites["again"] if mode == "full" else ():  # selective recompute saves collectives' results with the matmuls
            waits = (f"{action.name}/again/{micro_batch}",)
            yield action.renamed(waits[0])
    yield Action(f"{phase}/{name}/{micro_batch}", "forward" if phase == "forward" else "backward", layer, depends_on=waits)
    for action in sites[phase]:
        yield action.renamed(f"{action.name}/{phase}/{micro_batch}", (f"{phase}/{name}/{micro_batch}",))


def layer_collectives(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate) -> LayerCollectives:
    """The collectives inside layers, by layer and phase; `again` holds those that recomputing a layer repeats."""
    same, equal = plan.partition_key
    return profile.memo.get_or_compute(
        "layer collectives", same, (*equal, coordinate, bool(plan.balance.shares)), lambda: _build_layer_collectives(plan, profile, coordinate)
    )


def _build_layer_collectives(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate) -> LayerCollectives:
    found: LayerCollectives = {}
    layers = {name for stage in plan.stages for name in stage.layers} or {layer.name for layer in profile.layers}
    here = {layer.name for layer in profile.layers}

    def add(module: str, phase: str, action: Action, again: bool = False) -> None:
        owner = _enclosing_layer(module, layers)
        if owner in here:
            mine = found.setdefault(owner, {"forward": [], "again": [], "backward": []})
            mine[phase].append(action)
            if again:
                mine["again"].append(action)

    pieces = plan.logical_dim_shards[coordinate.tp]

    def part(meet: CollectiveSite) -> float:
        """This rank's fraction of a tensor that the other axis of a grid shards."""
        return pieces[meet.other_axis_dim][0] / pieces[meet.other_axis_dim][1] if meet.other_axis_dim else 1.0

    for axis, policy in plan.tensor_policies:
        kinds = (
            ("tp_output", "all_reduce", policy.reduce_sites),
            ("embedding", "all_reduce", policy.embedding_sites),
            ("gather", "all_gather", policy.gather_sites),
        )
        for spot in sequence_collectives(policy, plan.mesh.degree(axis), axis, profile.batch):
            add(
                spot.module,
                spot.phase,
                spot.action,
                spot.phase == "forward" and _enclosing_layer(spot.module, layers) not in spot.skipped_in_recompute,
            )
        for kind, op, sites in kinds:
            for meet in (m for m in sites if m.sequence_layout is None):
                size = meet.bytes_for(profile.batch) * part(meet)
                whole = _padded_gather_bytes(policy, plan.mesh.degree(axis), meet, size) if kind == "gather" else size
                again = _enclosing_layer(meet.module, layers) not in meet.skipped_in_recompute
                add(meet.module, "forward", _collective_action(f"{kind}/{meet.module}", op, axis, whole, whole - size), again)
        for meet in (m for m in policy.copy_sites if m.sequence_layout is None):
            add(
                meet.module, "backward", _collective_action(f"tp_input/{meet.module}", "all_reduce", axis, meet.bytes_for(profile.batch) * part(meet))
            )
        for meet in policy.norm_sites:
            size, name = meet.bytes_for(profile.batch) * meet.num_statistics, f"norm/{meet.module}"
            told = (
                _collective_action(name, "all_gather", axis, size * plan.mesh.degree(axis))
                if meet.num_statistics > 1
                else _collective_action(name, "all_reduce", axis, size)
            )
            add(meet.module, "forward", told, again=True)
            add(meet.module, "backward", _collective_action(name, "all_reduce", axis, size))
        sizes = {t.name: t.bytes for t in profile.tensors}
        for name in policy.partial_grad_parameters:
            add(name, "backward", _collective_action(f"tp_grad/{name}", "all_reduce", axis, float(sizes.get(name, 0))))
    add_context_collectives(plan, profile, coordinate.tp, add)
    for module, phase, action, again in expert_collectives(plan, profile.batch, coordinate.ep) if plan.mesh.ep > 1 else ():
        add(module, phase, action, again)
    for spot in spatial_collectives(plan.spatial, profile.batch, coordinate.cp):
        add(spot.module, spot.phase, spot.action, spot.phase == "forward" and _enclosing_layer(spot.module, layers) not in spot.skipped_in_recompute)
    return found


def _collective_action(name: str, op: str, axis: str, size: float, padding: float = 0.0) -> Action:
    return Action(name, op, bytes=round(size), padding=round(padding), axis=axis)  # type: ignore[arg-type]


def _padded_gather_bytes(policy: TensorPolicy, num_parts: int, site: CollectiveSite, size: float) -> float:
    """Bytes of a gather with padding: it moves equal pieces."""
    logical_dim = next(s for s in policy.sharded_dims if s.name == site.logical_dim)
    return size / logical_dim.size * logical_dim.shard_range(0, num_parts)[1] * num_parts


def _enclosing_layer(module: str, layers: set[str]) -> str:
    """The layer that a module belongs to: the longest layer name that it starts with; the model itself otherwise."""
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return module or "(model)"


def _loss_actions(plan: Plan, profile: ModelProfile) -> Iterator[Action]:
    if plan.mesh.group_size("batch") > 1:
        size = 8 if plan.memory.precision == "fp64" else 4
        yield Action("loss", "all_reduce", bytes=size * (2 if profile.counted_loss else 1), axis="batch")


def _grad_norm_actions(plan: Plan, clip: bool) -> Iterator[Action]:
    """The all-reduces that clipping needs for the norm of a sharded gradient: one number over each axis that shards it."""
    size = 8 if plan.memory.precision == "fp64" else 4
    if clip and plan.mesh.degree("tp") > 1:
        yield Action("norm/tp", "all_reduce", bytes=size, axis="tp")
    if clip and plan.mesh.ep > 1:
        yield Action("norm/ep", "all_reduce", bytes=size, axis="ep")
    if clip and plan.mesh.pp > 1:
        yield Action("norm/pp", "all_reduce", bytes=size, axis="pp")
    if clip and plan.memory.zero and plan.mesh.shard > 1:
        yield Action("norm", "all_reduce", bytes=size, axis="shard")


def pipeline_sends(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, phase: str, micro_batch: int) -> Iterator[Action]:
    """What this rank's stages send for one micro-batch: activations forward, gradients backward. Adjacent stages on one rank send nothing."""
    pieces = plan.logical_dim_shards[coordinate.tp]
    for index in range(len(plan.stages)) if plan.mesh.pp > 1 else ():
        other = index + 1 if phase == "forward" else index - 1
        if plan.stage_rank(index) != coordinate.pp or not 0 <= other < len(plan.stages) or plan.stage_rank(other) == coordinate.pp:
            continue
        name = f"activations/{index}" if phase == "forward" else f"gradients/{index}"
        for at, activation in enumerate(c for c in plan.stages[max(index, other)].boundary_activations if c.needs_grad or phase == "forward"):
            held, whole = pieces.get(activation.logical_dim, (1, 1))
            yield Action(
                f"{name}/{micro_batch}/{at}", "send", bytes=round(activation.bytes_for(profile.batch) * held / whole), axis="pp", group_size=2
            )


def _shard_numel(plan: Plan, bucket: Bucket, coordinate: MeshCoordinate) -> int:
    """Elements of this rank's shard of a bucket."""
    return shard_size(bucket, plan.mesh.shard, plan.balance.state_fractions, coordinate.shard)


def _tied_gradient_actions(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate) -> Iterator[Action]:
    """The all-reduces for parameters that stages on several ranks use."""
    for tensor in profile.tensors:
        ranks = tensor.pipeline_ranks
        if len(ranks) > 1 and tensor.trainable:
            cut = plan.memory.zero == 3 and plan.mesh.shard > 1
            size = (
                _shard_numel(plan, _make_unit_buffers(plan, [tensor], _replication_of(plan))[0].layout, coordinate) * tensor.itemsize
                if cut
                else tensor.bytes
            )
            yield Action(f"tied/{tensor.name}", "all_reduce", bytes=size, axis="pp", group_size=len(ranks))


def _bucketed_program(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, micro_batches: int) -> Iterator[Action]:
    buckets = gradient_buckets(plan, profile) if plan.mesh.group_size("data") > 1 else ()
    op = "reduce_scatter" if plan.memory.zero else "all_reduce"
    replicas = ["expert_replica" if b.replication.is_expert_parallel else "replica" for b in buckets]
    ready = _buckets_ready_after(buckets, profile)
    sites = layer_collectives(plan, profile, coordinate)
    shapes = [t.shape for _, t in gradient_arrival_order(profile)]
    launched: list[str] = []
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        followers: list[Action] = []
        for layer in range(len(profile.layers)):
            yield from _layer_actions(plan, profile, sites, "forward", layer, micro)
        yield from pipeline_sends(plan, profile, coordinate, "forward", micro)
        if last:
            yield from _loss_actions(plan, profile)
        for layer in reversed(range(len(profile.layers))):
            yield from _layer_actions(plan, profile, sites, "backward", layer, micro)
            if last or plan.memory.zero == 2:
                for index in ready.get(layer, []):
                    bucket = buckets[index]
                    axis = "shard" if plan.memory.zero else replicas[index]
                    for sent in bucket_collectives(plan.sync, bucket, shapes):
                        before = (launched[-1],) if sent.after_previous else ()
                        launched.append(f"grads/bucket{index}{sent.suffix}/{micro}")
                        action = Action(launched[-1], op, bytes=sent.bytes, padding=sent.padding, axis=axis, depends_on=before)  # type: ignore[arg-type]
                        if sent.after_previous:
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
                yield Action(name, "all_reduce", bytes=size, axis=replicas[index], depends_on=(f"grads/bucket{index}/{micro}",))
                launched.append(name)
    yield Action("optimizer", "optimizer", depends_on=tuple(launched))
    if plan.memory.zero and plan.mesh.group_size("data") > 1:
        for index, bucket in enumerate(buckets):
            yield Action(f"params/bucket{index}", "all_gather", bytes=bucket.bytes, padding=bucket.padding, axis="shard", depends_on=("optimizer",))


def _buckets_ready_after(buckets: tuple[Bucket, ...], profile: ModelProfile) -> dict[int, list[int]]:
    """Layer → buckets that are complete, and next in order, once its backward is done."""
    layer_of = [layer for layer, _ in gradient_arrival_order(profile)]
    found: dict[int, list[int]] = {}
    latest = dict.fromkeys((False, True), len(profile.layers))
    for index, bucket in enumerate(buckets):
        lane = bucket.replication.is_expert_parallel  # buckets are sent in order, so a late one delays the rest; experts' have an order of their own
        latest[lane] = min(latest[lane], *(layer_of[s.index] for s in bucket.slots))
        found.setdefault(latest[lane], []).append(index)
    return found


def _zero3_program(plan: Plan, profile: ModelProfile, coordinate: MeshCoordinate, micro_batches: int) -> Iterator[Action]:
    mixtures = {m.module for m in plan.expert.moe_layers} if plan.mesh.ep > 1 else set()
    inside = {layer.name: _expert_units(plan, layer, mixtures) for layer in profile.layers}  # MoE layers are units of their own
    units = unit_buffers(plan, profile)

    def gather(name: str, tag: str) -> Iterator[Action]:
        for at, buffer in enumerate(units[name]):
            layout = buffer.layout
            yield Action(f"params/{name}/{tag}{_index_suffix(at)}", "all_gather", bytes=layout.bytes, padding=layout.padding, axis="shard")

    def scatter(name: str, tag: str) -> Iterator[Action]:
        axis = "expert_replica" if name in mixtures else "replica"
        for at, buffer in enumerate(b for b in units[name] if b.trainable):
            sent = f"grads/{name}/{tag}{_index_suffix(at)}"
            yield Action(sent, "reduce_scatter", bytes=buffer.bytes, padding=buffer.padding, axis="shard")
            if plan.mesh.group_size(axis) > 1:
                size = _shard_numel(plan, buffer.layout, coordinate) * buffer.itemsize
                yield Action(f"replicas/{name}/{tag}{_index_suffix(at)}", "all_reduce", bytes=size, axis=axis, depends_on=(sent,))

    sites = layer_collectives(plan, profile, coordinate)
    sent: list[str] = []
    for micro in range(micro_batches):
        for phase, order in (("forward", range(len(profile.layers))), ("backward", range(len(profile.layers) - 1, -1, -1))):
            tag = f"{phase}/{micro}"
            gathers = list(gather("root", tag))
            yield from gathers
            if phase == "backward" and micro == micro_batches - 1:
                yield from _loss_actions(plan, profile)
            own = {i: list(gather(name, tag)) for i in order if (name := profile.layers[i].name) in units and name not in mixtures}
            ahead = [index for index, actions in own.items() if actions]
            after = dict(itertools.pairwise(ahead))
            yield from own[ahead[0]] if ahead else ()
            for index in order:
                layer = profile.layers[index]
                if index in after:  # the next unit is prefetched while this one computes
                    yield from own[after[index]]
                fetched = [a for unit in inside[layer.name] for a in gather(unit.name, tag)]
                yield from fetched
                yield from _layer_actions(plan, profile, sites, phase, index, micro, tuple(a.name for a in (*own.get(index, gathers), *fetched)))
                if phase == "backward" and (layer.name in units or inside[layer.name]):
                    mine = [layer.name] if layer.name in units else []
                    actions = [a for name in dict.fromkeys([*(u.name for u in inside[layer.name]), *mine]) for a in scatter(name, tag)]
                    sent += [a.name for a in actions]
                    yield from actions
            if phase == "backward":
                actions = list(scatter("root", tag))
                sent += [a.name for a in actions]
                yield from actions
            yield from pipeline_sends(plan, profile, coordinate, phase, micro)
    yield from _tied_gradient_actions(plan, profile, coordinate)
    yield Action("optimizer", "optimizer", depends_on=tuple(sent))


def _index_suffix(index: int) -> str:
    """A suffix for all buffers but a unit's first, which is usually the only one."""
    return f"/{index}" if index else ""


def _expert_units(plan: Plan, layer: LayerProfile, moe_modules: set[str]) -> list[LayerProfile]:
    """The MoE layers in a layer, each with its expert-parallel parameters."""
    names = sorted(name for name in moe_modules if name == layer.name or name.startswith(f"{layer.name}.") or layer.name == "(model)")
    held = {name: tuple(t for t in layer.tensors if t.name in plan.expert.parameters and t.name.startswith(f"{name}.")) for name in names}
    return [replace(layer, name=name, tensors=tensors) for name, tensors in held.items() if tensors]
