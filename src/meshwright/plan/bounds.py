"""Bounds: what any plan of a kind takes at least, in seconds and bytes, before it is made and priced.

[Note: bounds]
A step takes at least what the mean pipeline rank computes, and what its gradients need on the wires of its group; a rank holds at least the
mean of the parameters, gradients and states. The mean is never above the largest, and the largest decides an estimate. Once its stages are
known, a pipeline takes at least some rank's work, the way to it and the way back. Where units may recompute as each likes ("mixed"), at least
the time is added that the cheapest way to save so much memory would take. Equal layers are priced once, at the same rates as an estimate
does it, so the bounds are close: what they leave out is where ranks wait for each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.combinations import stages_a_rank
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Compile, PipelineSchedule, Plan, SyncPolicy
from meshwright.core.recompute import Recompute
from meshwright.core.schedule import Action, wire_factor
from meshwright.core.tensor import Meet, TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW, OPTIMIZER_STATES, Workload
from meshwright.cost.collective import between, line_of
from meshwright.cost.compute import ComputeCost
from meshwright.cost.memory import FUSED_SAVED
from meshwright.cost.pipeline import Order, Stage, held, least_seconds
from meshwright.cost.step import HEADROOM
from meshwright.plan.meetings import all_meetings, owned_bytes
from meshwright.plan.memory import RECOMPUTES
from meshwright.schedule import local_profile
from meshwright.schedule.buckets import ALONE

T = TypeVar("T")
Layers = tuple[tuple[str, ...], ...]  # of each stage of a pipeline, by name
Choice = Recompute | Literal["mixed"]  # mixed: each unit as an integer program has it (plan/recompute.py)
CHOICES: tuple[Choice, ...] = (*RECOMPUTES, "mixed")


@dataclass(frozen=True)
class Point:
    """A plan that is not made yet: what tells it from the others."""

    mesh: Mesh
    zero: int
    micro_batches: int
    recompute: Choice
    sequence: bool = False
    schedule: PipelineSchedule = "1f1b"

    @cached_property
    def order(self) -> Order:
        return Order(self.schedule, self.mesh.pp, self.micro_batches, stages_a_rank(self.schedule))


class _Saver(NamedTuple):
    """What recomputing one unit saves, and what it costs: its work, and calls and bytes that tensor-parallel ranks meet for again."""

    bytes: float
    seconds: float
    calls: int = 0
    met: float = 0.0


@dataclass(frozen=True)
class _Sum:
    """What one micro-batch takes in all layers together, on a rank that has them all but for tensor parallelism."""

    forward: float
    backward: float
    again: dict[Choice, float]
    kept: dict[Choice, float]  # bytes saved for backward
    parameters: float  # bytes
    trained: float
    unit: float = 0.0  # bytes of the largest unit's parameters
    root: float = 0.0  # and of all that is in none
    gathered: float = 0.0  # units that zero=3 gathers, each in a call
    scattered: float = 0.0  # those of them with gradients
    alone: float = 0.0  # gradients that fill a bucket
    sums: tuple[float, float] = (0.0, 0.0)  # calls and bytes of tensor-parallel ranks that end in it
    enters: tuple[float, float] = (0.0, 0.0)  # and that begin in it
    savers: tuple[tuple[tuple[_Saver, ...], float], ...] = ()  # the ways to recompute each kind of unit, and how many there are


class Bounds:
    """Lower bounds for the points of one search."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, workload: Workload, calibration: Calibration, units: tuple[str, ...],
        backend: str, overlaps: tuple[str, ...] | None = None, offload: bool = False, bucket_bytes: int = SyncPolicy.bucket_bytes,
    ) -> None:  # fmt: skip
        self._profile, self._cluster, self._workload, self._calibration = profile, cluster, workload, calibration
        self._units = frozenset(units)
        self._sum = cache(self._summed)
        self._rows = cache(self._priced)
        self._least = cache(cluster.least_memory)
        self._alive: dict[int, _Same[Layers]] = {}
        self._summed_ranks: dict[tuple[int, str, int, bool], list[_Sum]] = {}  # by the sums of stages, which `_sum` keeps alive
        self._folded = cache(self._fold)
        self._met = cache(self._meets)
        self._all_met = cache(lambda cut: all_meetings(cut.value, profile, self._units))
        self._given_out = cache(self._least_output)
        self._owned = cache(lambda cut: owned_bytes(cut.value, profile))
        self._backend, self._overlaps, self._offload, self._bucket_bytes = backend, overlaps, offload, bucket_bytes
        self._wire = cache(self._wire_of)
        self._held_at = cache(lambda order: [held(order, rank) for rank in range(order.ranks)])
        self._met_in = cache(self._meets_in)

    def seconds(self, point: Point, cut: Plan, compiled: Compile, travel: bool = True, stages: Layers = ()) -> float:
        """Computation of the slowest pipeline rank (of the mean one where `stages`, the layers of each stage, are not known), its way in and
        out, the optimizer and, with `travel`, what takes the wires."""
        mesh, rates, micro = point.mesh, self._calibration.layout(point.mesh.size), point.micro_batches
        parts = self._at(point, cut, compiled, stages)
        ranks = self._ranks(point, parts, stages)
        price = ComputeCost(rates, self._workload.precision, compiled != "none", self._units)
        stepped = min(part.trained for part in ranks) / 4 / (mesh.shard if point.zero else 1)
        update = price.optimizer(stepped, self._workload.optimizer, 4, self._offload)
        added, in_stages = self._added(point, parts, ranks, stages)
        each = max(rank.forward + rank.backward + rank.again[point.recompute] + more for rank, more in zip(ranks, added, strict=True))
        computed = micro * each + update
        way = 0.0
        stolen = 1.0 - self._overlap(rates)
        moved = [self._gradients(point, rank, cut) for rank in ranks] if travel else [0.0] * len(ranks)
        if stages:
            met = [self._met_turns(point, part) if travel else (0.0, 0.0) for part in parts]
            turns = [
                Stage(p.forward + on, p.backward + p.again[point.recompute] + least + back)
                for p, least, (on, back) in zip(parts, in_stages, met, strict=True)
            ]
            besides = [max(more - sum(in_stages[s] for s in point.order.stages(rank)), 0.0) for rank, more in enumerate(added)]
            after = [update if point.zero < 2 else 0.0] * len(ranks)  # what zero=2 and zero=3 move within a turn may be all that there is besides
            sums = after if point.zero < 2 else besides
            for rank, sent in enumerate(moved):
                sums[rank] += stolen * sent / (1 if point.zero < 2 else micro)
            least, way = least_seconds(point.order, turns, besides, after)
            computed = max(computed, least)
            way += 0.0 if is_plain(mesh) or not travel else self.meetings(point, cut)
        if not travel:
            return computed
        mean = sum(rank.forward + rank.backward + rank.again[point.recompute] + more for rank, more in zip(ranks, added, strict=True)) / len(ranks)
        sent, all_met = sum(moved) / len(ranks), self.meetings(point, cut)
        return max(computed, way, micro * mean + update + stolen * sent + all_met, sent + all_met)

    def _met_turns(self, point: Point, part: _Sum) -> tuple[float, float]:
        """Of a micro-batch in a stage, forward and backward: what lines of tensor-parallel ranks meet for. All that comes after waits for it."""
        if not is_plain(point.mesh):
            return 0.0, 0.0
        if not point.sequence:
            return self._line("all_reduce", "tp", point, *part.sums), self._line("all_reduce", "tp", point, *part.enters)
        scatter, gather = ([self._line(op, "tp", point, *met) for met in (part.sums, part.enters)] for op in ("reduce_scatter", "all_gather"))
        return scatter[0] + gather[1], gather[0] + scatter[1]

    def _ranks(self, point: Point, parts: Sequence[_Sum], stages: Layers) -> list[_Sum]:
        """By pipeline rank; the mean one where its stages are not known."""
        key = (id(parts), point.schedule, point.mesh.pp, bool(stages))
        if key not in self._summed_ranks:
            sums = [dict.fromkeys(point.order.stages(rank), 1.0) for rank in range(point.mesh.pp)] if stages else [{0: 1.0 / point.mesh.pp}]
            self._summed_ranks[key] = [_total(parts, counts) for counts in sums]
        return self._summed_ranks[key]

    def _added(self, point: Point, parts: Sequence[_Sum], ranks: Sequence[_Sum], stages: Layers) -> tuple[list[float], list[float]]:
        """What recomputation adds at least to a micro-batch where units differ in it, by rank and by stage: as much as saves what is too much,
        taken where a second of it saves most, which is where the most micro-batches are under way."""
        alone, none = [0.0] * len(ranks), [0.0] * len(parts)
        if point.recompute != "mixed" or (point.mesh.pp > 1 and not stages):
            return alone, none
        plain, limit = replace(point, recompute="none"), self.limit(point) - self._calibration.layout(point.mesh.size).base_bytes
        ways = {id(part): self._ways(point, part) for part in parts}
        for rank, whole in enumerate(ranks):
            mine = point.order.stages(rank) if stages else (0,)
            passing = self._passing(plain, whole)
            for counts in self._held_at(point.order)[rank] if stages else ((1,),):
                kept = sum(n * parts[stage].kept["none"] for n, stage in zip(counts, mine, strict=True))
                excess = self._held(plain, whole, kept) + passing - limit
                if excess <= 0:
                    continue
                every = {stage: [(n * rate, n * most) for rate, most in ways[id(parts[stage])]] for n, stage in zip(counts, mine, strict=True) if n}
                alone[rank] = max(alone[rank], _least_time(excess, [way for found in every.values() for way in found]))
                room = sum(most for found in every.values() for _, most in found)
                for stage, found in every.items():
                    here = sum(most for _, most in found)
                    none[stage] = max(none[stage], _least_time(excess - (room - here), found))
        return alone, none

    def _ways(self, point: Point, part: _Sum) -> list[tuple[float, float]]:
        """How recomputation saves what a micro-batch keeps: bytes a second, and bytes in all. What a unit's dearer mode saves more than its
        cheaper one comes after it, at what it costs more."""
        op, met = "all_gather" if point.sequence else "all_reduce", is_plain(point.mesh)
        found: list[tuple[float, float]] = []
        for modes, count in part.savers:
            done, spent = 0.0, 0.0
            costs = [(s.bytes, s.seconds + (self._line(op, "tp", point, s.calls, s.met) if met else 0.0)) for s in modes]
            while left := [(size - done, seconds - spent) for size, seconds in costs if size > done]:
                more, extra = max(left, key=lambda way: way[0] / way[1] if way[1] > 0 else math.inf)
                found.append((more / extra if extra > 0 else math.inf, count * more))
                done, spent = done + more, spent + max(extra, 0.0)
        return found

    def _overlap(self, rates: Rates) -> float:
        return rates.overlap if self._overlaps is None or "gradients" in self._overlaps else 0.0

    def _line(self, op: str, axis: str, point: Point, calls: float, size: float) -> float:
        """Seconds that the wires of a group are taken by so many calls with so many bytes in all."""
        alpha, each = self._wire(op, axis, point.mesh)
        return calls * alpha + size * each

    def _wire_of(self, op: str, axis: str, mesh: Mesh) -> tuple[float, float]:
        """Seconds of a call and of a byte."""
        ranks = mesh.group_size(axis)
        if ranks == 1:
            return 0.0, 0.0
        action = Action("", op, axis=axis)  # type: ignore[arg-type]
        line = line_of(op, ranks, self._backend, self._calibration.layout(mesh.size), between(self._cluster, action, mesh))
        return line.alpha_s, wire_factor(op, ranks) / line.bytes_per_s

    def crossings(self, point: Point, cut: Plan) -> float:
        """About what a stage in the middle of a pipeline takes to send on and back: as much as a unit gives out. No bound, but a guide."""
        mesh = point.mesh
        if mesh.pp == 1:
            return 0.0
        size = self._given_out(_Same(cut)) * (self._workload.global_batch // mesh.data_width)
        link = between(self._cluster, Action("", "send", axis="pp", group=2), mesh)
        line = line_of("send", 2, self._backend, self._calibration.layout(mesh.size), link)
        each = 2 * stages_a_rank(point.schedule)
        return each * (point.micro_batches * line.alpha_s + size / line.bytes_per_s)

    def _gradients(self, point: Point, rank: _Sum, cut: Plan) -> float:
        """What a rank's gradients and, under ZeRO, its parameters take, by their bytes and calls. What is owned meets among fewer."""
        mesh, micro, trained = point.mesh, point.micro_batches, rank.trained
        common = max(trained - self._owned(_Same(cut)) / mesh.pp, 0.0)
        calls = rank.scattered if point.zero == 3 else rank.alone if mesh.ep == 1 else 0.0
        if point.zero == 0:
            return self._line("all_reduce", "replica", point, calls, common)
        often = micro if point.zero > 1 else 1
        back = self._line("reduce_scatter", "shard", point, often * calls, often * trained)
        back += self._line("all_reduce", "replica", point, often * calls, often * common / mesh.shard)
        if point.zero < 3:
            return back + self._line("all_gather", "shard", point, calls, trained)
        item = ITEM_BYTES[self._workload.precision] / 4 if self._workload.precision in LOW else 1.0
        return back + self._line("all_gather", "shard", point, 2 * micro * rank.gathered, 2 * micro * rank.parameters * min(item, 1.0))

    def meetings(self, point: Point, cut: Plan) -> float:
        """What tensor-parallel ranks add up for each other; where they share positions, the two halves of it."""
        mesh, tensor = point.mesh, cut.tensor
        samples = self._workload.global_batch // mesh.data_width // point.micro_batches
        if mesh.cp > 1 or mesh.ep > 1 or len(mesh.tp) > 1:
            each, full = point.micro_batches / mesh.pp, point.recompute == "full"
            return sum(self._line(m.op, m.axis, point, each * m.calls(full), each * m.bytes(samples, full)) for m in self._all_met(_Same(cut)))
        if mesh.degree("tp") == 1:
            return 0.0
        count, size, again = self._met(_Same(tensor), samples)
        often = point.micro_batches / mesh.pp
        if not tensor.sequence:
            return self._line("all_reduce", "tp", point, often * count, often * (size + (again if point.recompute == "full" else 0.0)))
        there = self._line("reduce_scatter", "tp", point, often * count, often * size)
        return there + self._line("all_gather", "tp", point, often * count, often * (size + (again if point.recompute == "full" else 0.0)))

    def _meets(self, tensor: _Same[TensorPolicy], samples: int) -> tuple[int, float, float]:
        """How many, their bytes, and the bytes of those that a unit which is computed again repeats."""
        policy = tensor.value
        found = [meet.at(samples) for meet in (*policy.sums, *policy.enters) if bool(meet.along) == policy.sequence]
        forward = policy.enters if policy.sequence else tuple(m for m in policy.sums if not m.final_in)
        again = [m.at(samples) for m in forward if bool(m.along) == policy.sequence and self._in_unit(m.module)]
        return len(found), sum(found), sum(again)

    def _meets_in(self, cut: _Same[Plan]) -> dict[str, tuple[list[Meet], list[Meet]]]:
        """By layer: where its tensor-parallel ranks add up, and where they enter what is cut."""
        policy, layers = cut.value.tensor, set(self._profile.layer_names)
        found: dict[str, tuple[list[Meet], list[Meet]]] = {}
        for place, meets in enumerate((policy.sums, policy.enters)):
            for meet in (m for m in meets if bool(m.along) == policy.sequence):
                module = meet.module
                while module and module not in layers:
                    module = module.rpartition(".")[0]
                found.setdefault(module, ([], []))[place].append(meet)
        return found

    def _met_again(self, cut: _Same[Plan], layer: str, samples: int) -> tuple[int, float]:
        """Calls and bytes that a unit which is computed again repeats."""
        sums, enters = self._met_in(cut).get(layer, ((), ()))
        forward = enters if cut.value.tensor.sequence else [m for m in sums if not m.final_in]
        again = [m for m in forward if self._in_unit(m.module)]
        return len(again), float(sum(m.at(samples) for m in again))

    def _least_output(self, cut: _Same[Plan]) -> float:
        """Of the units, a sample's."""
        return min((x.output_bytes for x in local_profile(cut.value, self._profile.at(1), 0).layers if x.name in self._units), default=0.0)

    def _in_unit(self, module: str) -> bool:
        """Inside of a unit: what happens at a unit's own door is not repeated with it."""
        while module := module.rpartition(".")[0]:
            if module in self._units:
                return True
        return False

    def bytes(self, point: Point, cut: Plan, compiled: Compile, stages: Layers = ()) -> float:
        """What the mean pipeline rank holds: parameters, states, and of one micro-batch what is kept for backward. With `stages`, the
        largest rank, and all micro-batches that it has under way."""
        rates = self._calibration.layout(point.mesh.size)
        return min(rates.held, 1.0) * self._bytes(point, self._at(point, cut, compiled, stages), rates.base_bytes, stages)

    def _bytes(self, point: Point, parts: Sequence[_Sum], base: int, stages: Layers) -> float:
        ranks = self._ranks(point, parts, stages)
        if not stages:
            passing = self._passing(point, ranks[0]) if point.mesh.pp == 1 else 0.0
            return base + self._held(point, ranks[0], ranks[0].kept[point.recompute]) + passing
        return base + max(self._held(point, part, self._under_way(point, parts, at)) + self._passing(point, part) for at, part in enumerate(ranks))

    def _under_way(self, point: Point, parts: Sequence[_Sum], rank: int) -> float:
        """Bytes that all the micro-batches which a rank has under way keep."""
        kept = [parts[stage].kept[point.recompute] for stage in point.order.stages(rank)]
        return max(sum(n * size for n, size in zip(counts, kept, strict=True)) for counts in self._held_at(point.order)[rank])

    def _passing(self, point: Point, part: _Sum) -> float:
        """What lives only while something travels: under ZeRO-3 a unit's values and gradients at least."""
        return 2 * part.unit if point.zero == 3 and point.mesh.group_size("data") > 1 else 0.0

    def _held(self, point: Point, part: _Sum, kept: float) -> float:
        mesh, states, shards = point.mesh, 0 if self._offload else OPTIMIZER_STATES[self._workload.optimizer], point.mesh.shard
        whole, trained = part.parameters, part.trained
        if mesh.group_size("data") == 1:  # gradients appear as activations go
            return whole + states * trained + max(trained, kept)
        come = trained if point.micro_batches == 1 and point.zero < 2 else 0.0  # those that are a bucket each take the place of activations
        return (
            max(kept, come)
            - come
            + {
                0: whole + (1 + states) * trained,
                1: whole + trained + states * trained / shards,
                2: whole + (1 + states) * trained / shards,
                3: whole / shards + (1 + states) * trained / shards,
            }[point.zero]
        )

    def fits(self, point: Point, cut: Plan, compiled: Compile, stages: Layers = ()) -> bool:
        return self.bytes(point, cut, compiled, stages) <= self.limit(point)

    def limit(self, point: Point) -> float:
        """The bytes that a device has for it."""
        return HEADROOM * self._least(point.mesh.size)

    def _at(self, point: Point, cut: Plan, compiled: Compile, stages: Layers = ()) -> list[_Sum]:
        share = self._workload.global_batch // point.mesh.data_width
        rates = self._calibration.layout(point.mesh.size)
        held = self._alive.setdefault(id(stages), _Same(stages))
        return self._sum(-(-share // point.micro_batches), compiled, _Same(rates), _Same(cut), held)

    def _priced(
        self, samples: int, compiled: Compile, rates: _Same[Rates], held: _Same[Plan]
    ) -> list[_Sum]:  # fmt: skip
        """Each kind of layer, once."""
        folded, _, _ = self._folded(held)
        layers = local_profile(held.value, folded.at(samples), 0).layers
        price = ComputeCost(rates.value, self._workload.precision, compiled != "none", self._units)
        memo: dict[tuple[int, str, bool], float] = {}
        allowed = RECOMPUTES[2:] if compiled != "none" and held.value.mesh.degree("tp") > 1 else RECOMPUTES[1:]  # as a plan would refuse itself
        found = []
        for layer in layers:
            unit = layer.name in self._units
            fused = compiled == "model" or (compiled == "blocks" and unit)
            saved = layer.activation_bytes - layer.fusible_bytes * (FUSED_SAVED if fused else 0.0)
            forward, cheap = (price.layer(layer, "forward", memo, cheap=cheap) for cheap in (False, True))
            again: dict[Choice, float] = {"none": 0.0, "selective": cheap if unit else 0.0, "full": forward if unit else 0.0, "mixed": 0.0}
            less = (layer.output_bytes + layer.dear_bytes, layer.output_bytes)
            kept: dict[Choice, float] = {"none": saved, "selective": less[0] if unit else saved, "full": less[1] if unit else saved}
            kept["mixed"] = min(kept.values())
            sizes = [(t.bytes, t.trainable) for t in layer.tensors]
            trained = float(sum(size for size, train in sizes if train))
            whole = float(sum(size for size, _ in sizes))
            inside, outside = (whole, 0.0) if unit else (0.0, whole)
            met = self._met_again(held, layer.name, samples)
            modes = tuple(_Saver(saved - kept[m], again[m], *(met if m == "full" else ())) for m in allowed if unit and saved > kept[m])
            calls = float(unit and bool(layer.tensors)), float(unit and trained > 0)
            alone = float(sum(train and size * ALONE >= self._bucket_bytes for size, train in sizes))
            sums, enters = ((float(len(meets)), float(sum(m.at(samples) for m in meets))) for meets in self._met_in(held).get(layer.name, ((), ())))
            backward = price.layer(layer, "backward", memo)
            found.append(_Sum(forward, backward, again, kept, whole, trained, inside, outside, *calls, alone, sums, enters, ((modes, 1.0),)))
        return found

    def _summed(
        self, samples: int, compiled: Compile, rates: _Same[Rates], held: _Same[Plan],
        stages: _Same[Layers],
    ) -> list[_Sum]:  # fmt: skip
        """What each of some sets of layers takes: all of them if there is none."""
        rows, (_, counts, kind_of) = self._rows(samples, compiled, rates, held), self._folded(held)
        if not stages.value:
            return [_total(rows, dict(enumerate(counts)))]
        return [_total(rows, Counter(kind_of[name] for name in names if name in kind_of)) for names in stages.value]

    def _fold(self, held: _Same[Plan]) -> tuple[ModelProfile, tuple[int, ...], dict[str, int]]:
        """The model with one layer of each kind, how many there are, and of which kind each layer is. Alike: as much work, as much of it cut."""
        profile, plan = self._profile, held.value
        kinds: dict[Hashable, list[int]] = {}
        for index, (whole, part) in enumerate(zip(profile.layers, local_profile(plan, profile, 0).layers, strict=True)):
            met = tuple(tuple((m.bytes, m.fixed) for m in meets) for meets in self._met_in(held).get(whole.name, ()))
            alike = (id(whole.kernels), part.parameters, whole.activation_bytes, whole.output_bytes, whole.name in self._units, met)
            kinds.setdefault(alike, []).append(index)
        first = [indices[0] for indices in kinds.values()]
        folded = replace(profile, layers=tuple(profile.layers[i] for i in first), slopes=tuple(profile.slopes[i] for i in first))
        kind_of = {profile.layers[index].name: number for number, indices in enumerate(kinds.values()) for index in indices}
        return folded, tuple(map(len, kinds.values())), kind_of


def _least_time(excess: float, ways: Sequence[tuple[float, float]]) -> float:
    """Seconds that it takes to save so many bytes: (bytes a second, the most bytes), the quickest first."""
    spent = 0.0
    for rate, most in sorted(ways, reverse=True):
        if excess <= 0:
            break
        spent += min(excess, most) / rate
        excess -= most
    return spent


def _total(rows: Sequence[_Sum], counts: Mapping[int, float]) -> _Sum:
    def add(get: Callable[[_Sum], float]) -> float:
        return sum(count * get(rows[kind]) for kind, count in counts.items())

    again = {mode: add(lambda row, mode=mode: row.again[mode]) for mode in CHOICES}  # type: ignore[misc]
    kept = {mode: add(lambda row, mode=mode: row.kept[mode]) for mode in CHOICES}  # type: ignore[misc]
    figures = (add(lambda r: r.forward), add(lambda r: r.backward), again, kept, add(lambda r: r.parameters), add(lambda r: r.trained))
    unit = max((rows[kind].unit for kind in counts), default=0.0)
    savers: dict[tuple[_Saver, ...], float] = {}
    for kind, count in counts.items():
        for ways, number in rows[kind].savers:
            savers[ways] = savers.get(ways, 0.0) + count * number
    calls = (add(lambda r: r.gathered), add(lambda r: r.scattered), add(lambda r: r.alone))
    sums, enters = ((add(lambda r: r.sums[0]), add(lambda r: r.sums[1])), (add(lambda r: r.enters[0]), add(lambda r: r.enters[1])))
    return _Sum(*figures, unit, add(lambda r: r.root), *calls, sums, enters, tuple(savers.items()))


def is_plain(mesh: Mesh) -> bool:
    """Neither positions nor owners nor a grid."""
    return mesh.cp == mesh.ep == len(mesh.tp) == 1


class _Same(Generic[T]):
    """A value as a key: the same object is the same key."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value
