"""Expansion: the steady step of a plan, whatever its axes, as ordered actions, with every collective and every send that it will make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.model import LayerProfile, ModelProfile, TensorSpec
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, Schedule
from meshwright.core.tensor import Meet, TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW
from meshwright.schedule.buckets import Bucket, Kind, assign_buckets, own_size, replication_of, unit_buckets
from meshwright.schedule.compression import bucket_sends, replica_bytes
from meshwright.schedule.context import add_meetings
from meshwright.schedule.local import local_profile
from meshwright.schedule.owners import exchanges
from meshwright.schedule.sequence import sequence_meetings
from meshwright.schedule.spatial import spatial_meetings


@dataclass(frozen=True)
class Place:
    """Where a rank stands, along the axes on which ranks differ in what they do."""

    pp: int = 0
    cp: int = 0
    ep: int = 0
    tp: int = 0
    shard: int = 0  # where ZeRO cuts unevenly


def expand(plan: Plan, profile: ModelProfile, *, clip: bool = False) -> Schedule:
    """One program for each rank of a pipeline, of a grid of positions, of owners, of tensor parallelism and of uneven shards; others differ in
    their data."""
    degrees = {"pp": plan.mesh.pp, "cp": plan.spatial.ways, "ep": plan.mesh.ep, "tp": plan.mesh.degree("tp")}
    degrees["shard"] = plan.mesh.shard if plan.balance.states else 1
    programs = tuple(program(plan, profile, Place(*at), clip=clip) for at in itertools.product(*map(range, degrees.values())))
    places = {}
    for rank in range(plan.world):
        at = 0
        for axis, ways in degrees.items():
            at = at * ways + plan.mesh.coordinate(rank, axis) % ways
        places[str(rank)] = at
    return Schedule(programs, places if len(programs) > 1 else {})


def program(plan: Plan, profile: ModelProfile, at: Place, *, clip: bool = False, micro_batches: int = 0) -> tuple[Action, ...]:
    """What one kind of rank does in a step, or in one with another number of micro-batches than the plan's."""
    build = _sharded if plan.memory.zero == 3 and plan.mesh.group_size("data") > 1 else _bucketed
    return (*build(plan, local_profile(plan, profile, at.tp, at.pp, at.ep), at, micro_batches or plan.micro_batches), *_norm(plan, clip))


def gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    """The buckets that `execute` will make for this plan: parameters in reverse order of registration. `profile` is one rank's."""
    same, equal = plan.cut
    sizes = (plan.sync.first_bucket_bytes, plan.sync.bucket_bytes, plan.mesh.shard if plan.memory.zero else 1, plan.memory.zero > 0)
    return profile.memo.once("buckets", same, (*equal, *sizes), lambda: _gradient_buckets(plan, profile))


def _gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    tensors = [t for _, t in arrival(profile)]
    kind = _kinds(plan)
    kinds = [kind(t)._replace(counted=t.counted or not plan.memory.zero) for t in tensors]
    return assign_buckets(
        [t.numel for t in tensors],
        [t.itemsize for t in tensors],
        [(t.dtype, kind) for t, kind in zip(tensors, kinds, strict=True)],
        first_bytes=plan.sync.first_bucket_bytes,
        bytes_cap=plan.sync.bucket_bytes,
        shards=plan.mesh.shard if plan.memory.zero else 1,
    )


def arrival(profile: ModelProfile) -> list[tuple[int, TensorSpec]]:
    """Trainable parameters with their layer, last registered first: about the order in which gradients arrive. What others own is not here."""
    found = [(index, t) for index, layer in enumerate(profile.layers) for t in layer.tensors if t.trainable and t.numel]
    return sorted(found, key=lambda item: -item[1].order)


@dataclass(frozen=True)
class UnitBuffer:
    """One flat buffer of a ZeRO-3 unit: gathered in the type of the arithmetic, reduced and held in the type of storage."""

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
    """The units that ZeRO-3 gathers, with the buffers that `execute` will make for them: the plan's, mixtures whose experts have owners, and
    as `root` the rest of the model. `profile` is one rank's."""
    same, equal = plan.cut
    sizes = (plan.memory.units, plan.memory.precision, plan.mesh.shard)
    return profile.memo.once("units", same, (*equal, *sizes), lambda: _unit_buffers(plan, profile))


def _unit_buffers(plan: Plan, profile: ModelProfile) -> dict[str, tuple[UnitBuffer, ...]]:
    mixtures = {m.module for m in plan.owners.mixtures} if plan.mesh.ep > 1 else set()
    # A pipeline's stage leaves the model's forward half way, so there every layer is a unit and the model itself is none.
    units = set(plan.memory.units) | ({layer.name for layer in profile.layers} if plan.mesh.pp > 1 else set())
    tensors: dict[str, list[TensorSpec]] = {"root": []}
    for layer in profile.layers:
        inside = _owned_units(plan, layer, mixtures)
        for unit in inside:
            tensors[unit.name] = list(unit.tensors)
        gone = {t.name for unit in inside for t in unit.tensors}
        mine = tensors.setdefault(layer.name, []) if layer.name in units else tensors["root"]
        mine += [t for t in layer.tensors if t.name not in gone]
    kinds = _kinds(plan)
    return {name: _buffers(plan, found, kinds) for name, found in tensors.items()}


def _kinds(plan: Plan) -> Callable[[TensorSpec], Kind]:
    kind = replication_of(plan)
    return lambda t: kind(t.name, t.counted)


def _buffers(plan: Plan, tensors: list[TensorSpec], kind: Callable[[TensorSpec], Kind]) -> tuple[UnitBuffer, ...]:
    tensors = [t for t in tensors if t.numel]
    low = ITEM_BYTES[plan.memory.precision] if plan.memory.precision in LOW else None
    found = unit_buckets(
        [t.numel for t in tensors],
        [low if low and "float" in t.dtype else t.itemsize for t in tensors],
        [(t.dtype, t.trainable, t.name if len(t.stage_ranks) > 1 else "", kind(t)) for t in tensors],
        plan.mesh.shard,
    )
    first = [tensors[bucket.slots[0].index] for bucket in found]
    return tuple(UnitBuffer(bucket, t.trainable, t.itemsize) for bucket, t in zip(found, first, strict=True))


Meetings = dict[str, dict[str, list[Action]]]
_NONE: dict[str, list[Action]] = {"forward": [], "again": [], "backward": []}


def _compute(plan: Plan, profile: ModelProfile, every: Meetings, op: str, layer: int, micro: int, waits: tuple[str, ...] = ()) -> Iterator[Action]:
    """One layer, and where its ranks meet: each meeting holds up what comes after it."""
    name = profile.layers[layer].name
    meets = every.get(name, _NONE)
    mode = plan.memory.mode(name) if op == "backward" else "none"
    if mode != "none":
        yield Action(f"recompute/{name}/{micro}", "forward", layer, waits=waits, cheap=mode == "selective")
        for action in meets["again"] if mode == "full" else ():  # what ranks made of a product is kept with it
            waits = (f"{action.name}/again/{micro}",)
            yield action.named(waits[0])
    yield Action(f"{op}/{name}/{micro}", "forward" if op == "forward" else "backward", layer, waits=waits)
    for action in meets[op]:
        yield action.named(f"{action.name}/{op}/{micro}", (f"{op}/{name}/{micro}",))


def meetings(plan: Plan, profile: ModelProfile, place: Place) -> Meetings:
    """Where tensor- and context-parallel ranks meet, by layer and phase; `again` is what recomputing a layer repeats."""
    same, equal = plan.cut
    return profile.memo.once("meetings", same, (*equal, place, bool(plan.balance.shares)), lambda: _meetings(plan, profile, place))


def _meetings(plan: Plan, profile: ModelProfile, place: Place) -> Meetings:
    found: Meetings = {}
    layers = {name for stage in plan.stages for name in stage.layers} or {layer.name for layer in profile.layers}
    here = {layer.name for layer in profile.layers}

    def add(module: str, phase: str, action: Action, again: bool = False) -> None:
        owner = _owner(module, layers)
        if owner in here:
            mine = found.setdefault(owner, {"forward": [], "again": [], "backward": []})
            mine[phase].append(action)
            if again:
                mine["again"].append(action)

    pieces = plan.pieces[place.tp]

    def part(meet: Meet) -> float:
        """What this rank has of a tensor that the other axis of a grid deals out."""
        return pieces[meet.across][0] / pieces[meet.across][1] if meet.across else 1.0

    for axis, policy in plan.tensors:
        kinds = (("sum", "all_reduce", policy.sums), ("lookup", "all_reduce", policy.lookups), ("gather", "all_gather", policy.gathers))
        for spot in sequence_meetings(policy, plan.mesh.degree(axis), axis, profile.batch):
            add(spot.module, spot.phase, spot.action, spot.phase == "forward" and _owner(spot.module, layers) not in spot.final_in)
        for kind, op, meets in kinds:
            for meet in (m for m in meets if m.along is None):
                size = meet.at(profile.batch) * part(meet)
                whole = _gathered(policy, plan.mesh.degree(axis), meet, size) if kind == "gather" else size
                again = _owner(meet.module, layers) not in meet.final_in
                add(meet.module, "forward", _meeting(f"{kind}/{meet.module}", op, axis, whole, whole - size), again)
        for meet in (m for m in policy.enters if m.along is None):
            add(meet.module, "backward", _meeting(f"enter/{meet.module}", "all_reduce", axis, meet.at(profile.batch) * part(meet)))
        for meet in policy.norms:
            size, name = meet.at(profile.batch) * meet.numbers, f"norm/{meet.module}"
            told = _meeting(name, "all_gather", axis, size * plan.mesh.degree(axis)) if meet.numbers > 1 else _meeting(name, "all_reduce", axis, size)
            add(meet.module, "forward", told, again=True)
            add(meet.module, "backward", _meeting(name, "all_reduce", axis, size))
        sizes = {t.name: t.bytes for t in profile.tensors}
        for name in policy.partial:
            add(name, "backward", _meeting(f"enter/{name}", "all_reduce", axis, float(sizes.get(name, 0))))
    add_meetings(plan, profile, place.tp, add)
    for module, phase, action, again in exchanges(plan, profile.batch, place.ep) if plan.mesh.ep > 1 else ():
        add(module, phase, action, again)
    for spot in spatial_meetings(plan.spatial, profile.batch, place.cp):
        add(spot.module, spot.phase, spot.action, spot.phase == "forward" and _owner(spot.module, layers) not in spot.final_in)
    return found


def _meeting(name: str, op: str, axis: str, size: float, padding: float = 0.0) -> Action:
    return Action(name, op, bytes=round(size), padding=round(padding), axis=axis)  # type: ignore[arg-type]


def _gathered(policy: TensorPolicy, ways: int, meet: Meet, size: float) -> float:
    """A gather moves equal pieces: what does not divide travels padded."""
    strand = next(s for s in policy.strands if s.name == meet.strand)
    return size / strand.size * strand.piece(0, ways)[1] * ways


def _owner(module: str, layers: set[str]) -> str:
    """The layer that a module belongs to: the longest name that it starts with; the model itself otherwise."""
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return module or "(model)"


def _loss(plan: Plan, profile: ModelProfile) -> Iterator[Action]:
    if plan.mesh.group_size("batch") > 1:
        size = 8 if plan.memory.precision == "fp64" else 4
        yield Action("loss", "all_reduce", bytes=size * (2 if profile.counted_loss else 1), axis="batch")


def _norm(plan: Plan, clip: bool) -> Iterator[Action]:
    """Clipping needs the norm of a gradient that is spread out: one number to sum over each axis that spreads it."""
    size = 8 if plan.memory.precision == "fp64" else 4
    if clip and plan.mesh.degree("tp") > 1:
        yield Action("norm/tp", "all_reduce", bytes=size, axis="tp")
    if clip and plan.mesh.ep > 1:
        yield Action("norm/ep", "all_reduce", bytes=size, axis="ep")
    if clip and plan.mesh.pp > 1:
        yield Action("norm/pp", "all_reduce", bytes=size, axis="pp")
    if clip and plan.memory.zero and plan.mesh.shard > 1:
        yield Action("norm", "all_reduce", bytes=size, axis="shard")


def crossings(plan: Plan, profile: ModelProfile, place: Place, phase: str, micro: int) -> Iterator[Action]:
    """What this rank's stages send for one micro-batch: activations on, gradients back. Neighbours on one rank send nothing."""
    pieces = plan.pieces[place.tp]
    for index in range(len(plan.stages)) if plan.mesh.pp > 1 else ():
        other = index + 1 if phase == "forward" else index - 1
        if plan.stage_rank(index) != place.pp or not 0 <= other < len(plan.stages) or plan.stage_rank(other) == place.pp:
            continue
        name = f"activations/{index}" if phase == "forward" else f"gradients/{index}"
        for at, carry in enumerate(c for c in plan.stages[max(index, other)].receives if c.returns or phase == "forward"):
            held, whole = pieces.get(carry.strand, (1, 1))
            yield Action(f"{name}/{micro}/{at}", "send", bytes=round(carry.at(profile.batch) * held / whole), axis="pp", group=2)


def _own(plan: Plan, bucket: Bucket, place: Place) -> int:
    """Elements of a bucket that are this rank's."""
    return own_size(bucket, plan.mesh.shard, plan.balance.states, place.shard)


def _tied(plan: Plan, profile: ModelProfile, place: Place) -> Iterator[Action]:
    """Parameters that stages of several ranks use."""
    for tensor in profile.tensors:
        ranks = tensor.stage_ranks
        if len(ranks) > 1 and tensor.trainable:
            cut = plan.memory.zero == 3 and plan.mesh.shard > 1
            size = _own(plan, _buffers(plan, [tensor], _kinds(plan))[0].layout, place) * tensor.itemsize if cut else tensor.bytes
            yield Action(f"tied/{tensor.name}", "all_reduce", bytes=size, axis="pp", group=len(ranks))


def _bucketed(plan: Plan, profile: ModelProfile, place: Place, micro_batches: int) -> Iterator[Action]:
    buckets = gradient_buckets(plan, profile) if plan.mesh.group_size("data") > 1 else ()
    op = "reduce_scatter" if plan.memory.zero else "all_reduce"
    replicas = ["owned" if b.kind.owned else "replica" for b in buckets]
    ready = _completed_at(buckets, profile)
    meets = meetings(plan, profile, place)
    shapes = [t.shape for _, t in arrival(profile)]
    launched: list[str] = []
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        followers: list[Action] = []
        for layer in range(len(profile.layers)):
            yield from _compute(plan, profile, meets, "forward", layer, micro)
        yield from crossings(plan, profile, place, "forward", micro)
        if last:
            yield from _loss(plan, profile)
        for layer in reversed(range(len(profile.layers))):
            yield from _compute(plan, profile, meets, "backward", layer, micro)
            if last or plan.memory.zero == 2:
                for index in ready.get(layer, []):
                    bucket = buckets[index]
                    axis = "shard" if plan.memory.zero else replicas[index]
                    for sent in bucket_sends(plan.sync, bucket, shapes):
                        before = (launched[-1],) if sent.follows else ()
                        launched.append(f"grads/bucket{index}{sent.name}/{micro}")
                        action = Action(launched[-1], op, bytes=sent.bytes, padding=sent.padding, axis=axis, waits=before)  # type: ignore[arg-type]
                        if sent.follows:
                            followers.append(action)
                        else:
                            yield action
        yield from followers
        yield from crossings(plan, profile, place, "backward", micro)
        if last:
            yield from _tied(plan, profile, place)
        if plan.memory.zero and plan.mesh.group_size("replica") > 1 and (last or plan.memory.zero == 2):
            for index, bucket in enumerate(buckets):
                name = f"replicas/bucket{index}/{micro}"
                size = replica_bytes(plan.sync, bucket, _own(plan, bucket, place))
                yield Action(name, "all_reduce", bytes=size, axis=replicas[index], waits=(f"grads/bucket{index}/{micro}",))
                launched.append(name)
    yield Action("optimizer", "optimizer", waits=tuple(launched))
    if plan.memory.zero and plan.mesh.group_size("data") > 1:
        for index, bucket in enumerate(buckets):
            yield Action(f"params/bucket{index}", "all_gather", bytes=bucket.bytes, padding=bucket.padding, axis="shard", waits=("optimizer",))


def _completed_at(buckets: tuple[Bucket, ...], profile: ModelProfile) -> dict[int, list[int]]:
    """Layer → buckets that are complete, and next in line, once its backward is done."""
    layer_of = [layer for layer, _ in arrival(profile)]
    found: dict[int, list[int]] = {}
    latest = dict.fromkeys((False, True), len(profile.layers))
    for index, bucket in enumerate(buckets):
        lane = bucket.kind.owned  # buckets go in order, so a late one holds up the rest; what is owned has an order of its own
        latest[lane] = min(latest[lane], *(layer_of[s.index] for s in bucket.slots))
        found.setdefault(latest[lane], []).append(index)
    return found


def _sharded(plan: Plan, profile: ModelProfile, place: Place, micro_batches: int) -> Iterator[Action]:
    mixtures = {m.module for m in plan.owners.mixtures} if plan.mesh.ep > 1 else set()
    inside = {layer.name: _owned_units(plan, layer, mixtures) for layer in profile.layers}  # layers of experts are units of their own
    units = unit_buffers(plan, profile)

    def gather(name: str, tag: str) -> Iterator[Action]:
        for at, buffer in enumerate(units[name]):
            layout = buffer.layout
            yield Action(f"params/{name}/{tag}{_nth(at)}", "all_gather", bytes=layout.bytes, padding=layout.padding, axis="shard")

    def scatter(name: str, tag: str) -> Iterator[Action]:
        axis = "owned" if name in mixtures else "replica"
        for at, buffer in enumerate(b for b in units[name] if b.trainable):
            sent = f"grads/{name}/{tag}{_nth(at)}"
            yield Action(sent, "reduce_scatter", bytes=buffer.bytes, padding=buffer.padding, axis="shard")
            if plan.mesh.group_size(axis) > 1:
                size = _own(plan, buffer.layout, place) * buffer.itemsize
                yield Action(f"replicas/{name}/{tag}{_nth(at)}", "all_reduce", bytes=size, axis=axis, waits=(sent,))

    meets = meetings(plan, profile, place)
    sent: list[str] = []
    for micro in range(micro_batches):
        for phase, order in (("forward", range(len(profile.layers))), ("backward", range(len(profile.layers) - 1, -1, -1))):
            tag = f"{phase}/{micro}"
            gathers = list(gather("root", tag))
            yield from gathers
            if phase == "backward" and micro == micro_batches - 1:
                yield from _loss(plan, profile)
            own = {i: list(gather(name, tag)) for i in order if (name := profile.layers[i].name) in units and name not in mixtures}
            ahead = [index for index, actions in own.items() if actions]
            after = dict(itertools.pairwise(ahead))
            yield from own[ahead[0]] if ahead else ()
            for index in order:
                layer = profile.layers[index]
                if index in after:  # the next unit is fetched while this one computes
                    yield from own[after[index]]
                fetched = [a for unit in inside[layer.name] for a in gather(unit.name, tag)]
                yield from fetched
                yield from _compute(plan, profile, meets, phase, index, micro, tuple(a.name for a in (*own.get(index, gathers), *fetched)))
                if phase == "backward" and (layer.name in units or inside[layer.name]):
                    mine = [layer.name] if layer.name in units else []
                    actions = [a for name in dict.fromkeys([*(u.name for u in inside[layer.name]), *mine]) for a in scatter(name, tag)]
                    sent += [a.name for a in actions]
                    yield from actions
            if phase == "backward":
                actions = list(scatter("root", tag))
                sent += [a.name for a in actions]
                yield from actions
            yield from crossings(plan, profile, place, phase, micro)
    yield from _tied(plan, profile, place)
    yield Action("optimizer", "optimizer", waits=tuple(sent))


def _nth(at: int) -> str:
    """A unit has one buffer as a rule."""
    return f"/{at}" if at else ""


def _owned_units(plan: Plan, layer: LayerProfile, mixtures: set[str]) -> list[LayerProfile]:
    """The mixtures in a layer, each with the parameters that it holds at its owners."""
    names = sorted(name for name in mixtures if name == layer.name or name.startswith(f"{layer.name}.") or layer.name == "(model)")
    held = {name: tuple(t for t in layer.tensors if t.name in plan.owners.parameters and t.name.startswith(f"{name}.")) for name in names}
    return [replace(layer, name=name, tensors=tensors) for name, tensors in held.items() if tensors]
