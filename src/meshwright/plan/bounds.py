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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter
from typing import TypeVar

from meshwright.core.calibration import Calibration, Line, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.plan import Compile, Plan, SyncPolicy
from meshwright.core.schedule import Action, wire_factor
from meshwright.core.tensor import TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW, OPTIMIZER_STATES, Workload
from meshwright.cost.collective import between, line_of
from meshwright.cost.compute import ComputeCost
from meshwright.cost.pipeline import Order, Stage, held, largest, least_seconds
from meshwright.cost.step import HEADROOM
from meshwright.plan.amounts import Amounts, Choice, Layers, Same, Sum
from meshwright.plan.meetings import all_meetings, owned_bytes
from meshwright.schedule import local_profile

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """A plan that is not made yet: what tells it from the others."""

    mesh: Mesh
    zero: int
    micro_batches: int
    recompute: Choice
    sequence: bool = False
    schedule: PipelineSchedule = "1f1b"
    stages_each: int = 0  # stages a rank; 0: as many as is usual

    @cached_property
    def order(self) -> Order:
        return Order(self.schedule, self.mesh.pp, self.micro_batches, self.stages_each or schedule_traits(self.schedule).stages_per_rank)


class Bounds:
    """Lower bounds for the points of one search."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, workload: Workload, calibration: Calibration, units: tuple[str, ...],
        backend: str, overlaps: tuple[str, ...] | None = None, offload: bool = False, bucket_bytes: int = SyncPolicy.bucket_bytes,
    ) -> None:  # fmt: skip
        self._profile, self._cluster, self._workload, self._rates = profile, cluster, workload, cache(calibration.layout)
        self._units = frozenset(units)
        self._amounts = Amounts.of(profile, workload.precision, units, bucket_bytes)
        self._least = cache(cluster.least_memory)
        self._met = cache(self._meets)
        self._all_met = cache(lambda cut: all_meetings(cut.value, profile, self._units))
        self._given_out = cache(self._least_output)
        self._owned = cache(lambda cut: owned_bytes(cut.value, profile))
        self._backend, self._overlaps, self._offload = backend, overlaps, offload
        self._wire, self._next = cache(self._wire_of), cache(self._next_of)
        self._moments, self._under_way = cache(self._kept_at), cache(self._most_kept)

    def seconds(self, point: Point, cut: Plan, compiled: Compile, travel: bool = True, stages: Layers = ()) -> float:
        """Computation of the slowest pipeline rank (of the mean one where `stages`, the layers of each stage, are not known), its way in and
        out, the optimizer and, with `travel`, what takes the wires. Without it ZeRO's stage is still open, which may leave little to update."""
        mesh, rates, micro = point.mesh, self._rates(point.mesh.size), point.micro_batches
        parts = self._at(point, cut, compiled, stages)
        ranks = self._ranks(point, parts, stages)
        price = ComputeCost(rates, self._workload.precision, compiled != "none", self._units)
        owners = mesh.dp * mesh.shard if not travel else mesh.shard if point.zero else 1
        stepped = min(part.trained for part in ranks) / 4 / owners
        update = price.optimizer(stepped, self._workload.optimizer, 4, self._offload)
        added, in_stages = self._added(point, parts, ranks, stages)
        each = max(rank.forward + rank.backward + rank.again[point.recompute] + more for rank, more in zip(ranks, added, strict=True))
        computed = micro * each + update
        way = 0.0
        stolen = 1.0 - self._overlap(rates)
        moved = _each(ranks, lambda rank: self._gradients(point, rank, cut)) if travel else [0.0] * len(ranks)
        if stages:
            met = _each(parts, lambda part: self._met_turns(point, part)) if travel else [(0.0, 0.0)] * len(parts)
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
        return max(computed, way, micro * mean + update + stolen * sent + all_met, sent)

    def _met_turns(self, point: Point, part: Sum) -> tuple[float, float]:
        """Of a micro-batch in a stage, forward and backward: what lines of tensor-parallel ranks meet for. All that comes after waits for it."""
        if not is_plain(point.mesh):
            return 0.0, 0.0
        if not point.sequence:
            return self._line("all_reduce", "tp", point, *part.sums), self._line("all_reduce", "tp", point, *part.enters)
        scatter, gather = ([self._line(op, "tp", point, *met) for met in (part.sums, part.enters)] for op in ("reduce_scatter", "all_gather"))
        return scatter[0] + gather[1], gather[0] + scatter[1]

    def _ranks(self, point: Point, parts: Sequence[Sum], stages: Layers) -> list[Sum]:
        """By pipeline rank; the mean one where its stages are not known."""
        mine = [point.order.stages(rank) for rank in range(point.mesh.pp)] if stages else ()
        return self._amounts.ranks(parts, point.schedule, mine, point.mesh.pp)

    def _added(self, point: Point, parts: Sequence[Sum], ranks: Sequence[Sum], stages: Layers) -> tuple[list[float], list[float]]:
        """What recomputation adds at least to a micro-batch where units differ in it, by rank and by stage: as much as saves what is too much,
        taken where a second of it saves most, which is where the most micro-batches are under way."""
        alone, none = [0.0] * len(ranks), [0.0] * len(parts)
        if point.recompute != "mixed" or (point.mesh.pp > 1 and not stages):
            return alone, none
        plain, limit = replace(point, recompute="none"), self.limit(point) - self._rates(point.mesh.size).base_bytes
        ways = _each(parts, lambda part: sorted(self._ways(point, part), reverse=True))
        for rank, (whole, moments) in enumerate(zip(ranks, self._moments(point.order, Same(parts), "none"), strict=True)):
            mine = point.order.stages(rank) if stages else (0,)
            for counts, kept in moments:
                excess = self._held(plain, whole, kept) - limit
                if excess <= 0:
                    continue
                every = {stage: [(n * rate, n * most) for rate, most in ways[stage]] for n, stage in zip(counts, mine, strict=True) if n}
                alone[rank] = max(alone[rank], _least_time(excess, sorted((way for found in every.values() for way in found), reverse=True)))
                room = sum(most for found in every.values() for _, most in found)
                for stage, found in every.items():
                    here = sum(most for _, most in found)
                    none[stage] = max(none[stage], _least_time(excess - (room - here), found))
        return alone, none

    def _ways(self, point: Point, part: Sum) -> list[tuple[float, float]]:
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
        if rates.busy:  # what a call takes from computation goes by its size
            return 1.0
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
        line = line_of(op, ranks, self._backend, self._rates(mesh.size), between(self._cluster, action, mesh))
        return line.alpha_s, wire_factor(op, ranks) / line.bytes_per_s

    def crossings(self, point: Point, cut: Plan) -> float:
        """About what a stage in the middle of a pipeline takes to send on and back: as much as a unit gives out. No bound, but a guide."""
        mesh = point.mesh
        if mesh.pp == 1:
            return 0.0
        size = self._given_out(Same(cut)) * (self._workload.global_batch // mesh.data_width)
        line = self._next(mesh)
        each = 2 * point.order.chunks
        return each * (point.micro_batches * line.alpha_s + size / line.bytes_per_s)

    def _next_of(self, mesh: Mesh) -> Line:
        """Between neighbours in a pipeline."""
        link = between(self._cluster, Action("", "send", axis="pp", group=2), mesh)
        return line_of("send", 2, self._backend, self._rates(mesh.size), link)

    def _gradients(self, point: Point, rank: Sum, cut: Plan) -> float:
        """What a rank's gradients and, under ZeRO, its parameters take, by their bytes and calls. What is owned meets among fewer."""
        mesh, micro, trained = point.mesh, point.micro_batches, rank.trained
        common = max(trained - self._owned(Same(cut)) / mesh.pp, 0.0)
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
            return sum(self._line(m.op, m.axis, point, each * m.calls(full), each * m.bytes(samples, full)) for m in self._all_met(Same(cut)))
        if mesh.degree("tp") == 1:
            return 0.0
        count, size, again = self._met(Same(tensor), samples)
        often = point.micro_batches / mesh.pp
        if not tensor.sequence:
            return self._line("all_reduce", "tp", point, often * count, often * (size + (again if point.recompute == "full" else 0.0)))
        there = self._line("reduce_scatter", "tp", point, often * count, often * size)
        return there + self._line("all_gather", "tp", point, often * count, often * (size + (again if point.recompute == "full" else 0.0)))

    def _meets(self, tensor: Same[TensorPolicy], samples: int) -> tuple[int, float, float]:
        """How many, their bytes, and the bytes of those that a unit which is computed again repeats."""
        policy = tensor.value
        found = [meet.at(samples) for meet in (*policy.sums, *policy.enters) if bool(meet.along) == policy.sequence]
        forward = policy.enters if policy.sequence else tuple(m for m in policy.sums if not m.final_in)
        again = [m.at(samples) for m in forward if bool(m.along) == policy.sequence and self._amounts.in_unit(m.module)]
        return len(found), sum(found), sum(again)

    def _least_output(self, cut: Same[Plan]) -> float:
        """Of the units, a sample's."""
        return min((x.output_bytes for x in local_profile(cut.value, self._profile.at(1), 0).layers if x.name in self._units), default=0.0)

    def bytes(self, point: Point, cut: Plan, compiled: Compile, stages: Layers = ()) -> float:
        """What the mean pipeline rank holds: parameters, states, and of one micro-batch what is kept for backward. With `stages`, the
        largest rank, and all micro-batches that it has under way."""
        rates = self._rates(point.mesh.size)
        return min(rates.held, 1.0) * self._bytes(point, self._at(point, cut, compiled, stages), rates.base_bytes, stages)

    def _bytes(self, point: Point, parts: Sequence[Sum], base: int, stages: Layers) -> float:
        ranks = self._ranks(point, parts, stages)
        if not stages:
            return base + self._held(point, ranks[0], ranks[0].kept[point.recompute])
        kept = self._under_way(point.order, Same(parts), point.recompute)
        return base + max(self._held(point, part, most) for part, most in zip(ranks, kept, strict=True))

    def _most_kept(self, order: Order, parts: Same[Sequence[Sum]], recompute: Choice) -> list[float]:
        """Bytes that all the micro-batches which a rank has under way keep at most, by rank."""
        return [max(kept for _, kept in moments) for moments in self._moments(order, parts, recompute)]

    def _kept_at(self, order: Order, parts: Same[Sequence[Sum]], recompute: Choice) -> list[list[tuple[tuple[int, ...], float]]]:
        """By rank, when it has most under way: how many micro-batches of each of its stages, and the bytes that they keep."""
        kept = [part.kept[recompute] for part in parts.value]
        found: list[list[tuple[tuple[int, ...], float]]] = []
        for rank in range(order.ranks):
            mine = order.stages(rank) if len(kept) > 1 else (0,)
            most = _telling(held(order, rank), [id(parts.value[stage]) for stage in mine])
            found.append([(counts, sum(n * kept[stage] for n, stage in zip(counts, mine, strict=True))) for counts in most])
        return found

    def _held(self, point: Point, part: Sum, kept: float) -> float:
        mesh, states, shards = point.mesh, 0 if self._offload else OPTIMIZER_STATES[self._workload.optimizer], point.mesh.shard
        whole, trained = part.parameters, part.trained
        if mesh.group_size("data") == 1:  # gradients appear as activations go
            return whole + states * trained + max(trained, kept)
        kept = max(kept, part.unit) if point.zero == 3 and mesh.pp == 1 else kept  # the largest unit's gradients, when little else is kept
        come = trained if point.micro_batches == 1 and point.zero < 2 else 0.0  # those that are a bucket each take the place of activations
        if point.zero == 2 and (point.micro_batches == 1 or mesh.pp > 1):
            come = trained / shards  # so do a rank's slices, in the first backward
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

    def _at(self, point: Point, cut: Plan, compiled: Compile, stages: Layers = ()) -> list[Sum]:
        share = self._workload.global_batch // point.mesh.data_width
        rates = self._rates(point.mesh.size)
        return self._amounts.sums(-(-share // point.micro_batches), compiled, rates, cut, stages)


def _each(rows: Sequence[Sum], find: Callable[[Sum], T]) -> list[T]:
    """What is found of each; once for those that are one object."""
    found: dict[int, T] = {}
    for row in rows:
        if id(row) not in found:
            found[id(row)] = find(row)
    return [found[id(row)] for row in rows]


def _telling(every: Sequence[tuple[int, ...]], kinds: Sequence[int]) -> list[tuple[int, ...]]:
    """Of counts of stages those with the most of each kind of stage together and, of these, of each stage."""
    if len(every) == 1:
        return [*every]
    known = sorted(set(kinds))
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for counts in every:
        together = tuple(sum(n for n, kind in zip(counts, kinds, strict=True) if kind == one) for one in known)
        alike.setdefault(together, []).append(counts)
    most = [alike[together] for together in largest(set(alike))]
    return [*{max(same, key=itemgetter(stage)): None for same in most for stage in range(len(kinds))}]


def _least_time(excess: float, ways: Sequence[tuple[float, float]]) -> float:
    """Seconds that it takes to save so many bytes: (bytes a second, the most bytes), the quickest first."""
    spent = 0.0
    for rate, most in ways:
        if excess <= 0:
            break
        spent += min(excess, most) / rate
        excess -= most
    return spent


def is_plain(mesh: Mesh) -> bool:
    """Neither positions nor owners nor a grid."""
    return mesh.cp == mesh.ep == len(mesh.tp) == 1
