"""Bounds: what any plan of a kind takes at least, in seconds and bytes, before it is made and priced.

[Note: bounds]
A step takes at least what the mean pipeline rank computes, and what its gradients need on the wires of its group; a rank holds at least the
mean of the parameters, gradients and states. The mean is never above the largest, and the largest decides an estimate. Equal layers are
priced once, at the same rates as an estimate does it, so the bounds are close: what they leave out is where ranks wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.combinations import stages_a_rank
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Compile, PipelineSchedule, Plan
from meshwright.core.recompute import Recompute
from meshwright.core.schedule import Action, wire_factor
from meshwright.core.tensor import TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW, OPTIMIZER_STATES, Workload
from meshwright.cost.collective import between, line_of
from meshwright.cost.compute import ComputeCost
from meshwright.cost.memory import FUSED_SAVED
from meshwright.cost.step import HEADROOM, in_flight
from meshwright.plan.memory import RECOMPUTES
from meshwright.schedule import local_profile

T = TypeVar("T")
Layers = tuple[tuple[str, ...], ...]  # of each pipeline rank, by name


@dataclass(frozen=True)
class Point:
    """A plan that is not made yet: what tells it from the others."""

    mesh: Mesh
    zero: int
    micro_batches: int
    recompute: Recompute
    sequence: bool = False
    schedule: PipelineSchedule = "1f1b"


@dataclass(frozen=True)
class _Sum:
    """What one micro-batch takes in all layers together, on a rank that has them all but for tensor parallelism."""

    forward: float
    backward: float
    again: dict[Recompute, float]
    kept: dict[Recompute, float]  # bytes saved for backward
    parameters: float  # bytes
    trained: float
    workspace: float = 0.0  # of the layer that needs most
    unit: float = 0.0  # bytes of the largest unit's parameters
    root: float = 0.0  # and of all that is in none


class Bounds:
    """Lower bounds for the points of one search."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, workload: Workload, calibration: Calibration, units: tuple[str, ...],
        backend: str, overlaps: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        self._profile, self._cluster, self._workload, self._calibration = profile, cluster, workload, calibration
        self._units = frozenset(units)
        self._sum = cache(self._summed)
        self._rows = cache(self._priced)
        self._least = cache(cluster.least_memory)
        self._alive: dict[int, _Same[Layers]] = {}
        self._folded = cache(self._fold)
        self._met = cache(self._meets)
        self._backend, self._overlaps = backend, overlaps

    def seconds(self, point: Point, tensor: TensorPolicy, compiled: Compile, travel: bool = True, stages: Layers = ()) -> float:
        """Computation of the slowest pipeline rank (of the mean one where `stages`, the layers of each, are not known), its bubble, the
        optimizer and, with `travel`, what takes the wires."""
        mesh, rates = point.mesh, self._calibration.layout(point.mesh.size)
        parts = self._at(point, tensor, compiled, stages)
        split = 1 if stages else mesh.pp
        each = max(part.forward + part.backward + part.again[point.recompute] for part in parts) / split
        bubble = (mesh.pp - 1) / (stages_a_rank(point.schedule) if mesh.pp > 1 else 1) / (3 if point.schedule == "zero_bubble" else 1)
        trained = sum(part.trained for part in parts) / mesh.pp
        whole = sum(part.parameters for part in parts) / mesh.pp
        price = ComputeCost(rates, self._workload.precision, compiled != "none", self._units)
        update = price.optimizer(min(part.trained for part in parts) / split / 4 / (mesh.shard if point.zero else 1), self._workload.optimizer, 4)
        computed = (point.micro_batches + bubble) * each + update
        if not travel:
            return computed
        mean = sum(part.forward + part.backward + part.again[point.recompute] for part in parts) / mesh.pp
        sent = self._gradients(point, trained, whole) + self._meetings(point, tensor)
        stolen = point.micro_batches * mean + update + (1.0 - self._overlap(rates)) * sent
        return max(computed, stolen + bubble * each, sent)

    def _overlap(self, rates: Rates) -> float:
        return rates.overlap if self._overlaps is None or "gradients" in self._overlaps else 0.0

    def _line(self, op: str, axis: str, point: Point, calls: float, size: float) -> float:
        """Seconds that the wires of a group are taken by so many calls with so many bytes in all."""
        mesh, rates = point.mesh, self._calibration.layout(point.mesh.size)
        ranks = mesh.group_size(axis)
        if ranks == 1:
            return 0.0
        action = Action("", op, axis=axis)  # type: ignore[arg-type]
        line = line_of(op, ranks, self._backend, rates, between(self._cluster, action, mesh))
        return calls * line.alpha_s + size * wire_factor(op, ranks) / line.bytes_per_s

    def _gradients(self, point: Point, trained: float, whole: float) -> float:
        """What the mean rank's gradients and, under ZeRO, its parameters take, by their bytes."""
        mesh, micro = point.mesh, point.micro_batches
        if point.zero == 0:
            return self._line("all_reduce", "replica", point, 1, trained)
        often = micro if point.zero > 1 else 1
        back = self._line("reduce_scatter", "shard", point, often, often * trained)
        back += self._line("all_reduce", "replica", point, often, often * trained / mesh.shard)
        if point.zero < 3:
            return back + self._line("all_gather", "shard", point, 1, trained)
        item = ITEM_BYTES[self._workload.precision] / 4 if self._workload.precision in LOW else 1.0
        return back + self._line("all_gather", "shard", point, 2 * micro, 2 * micro * whole * min(item, 1.0))

    def _meetings(self, point: Point, tensor: TensorPolicy) -> float:
        """What tensor-parallel ranks add up for each other; where they share positions, the two halves of it."""
        if point.mesh.degree("tp") == 1 or len(point.mesh.tp) > 1:
            return 0.0
        samples = self._workload.global_batch // point.mesh.data_width // point.micro_batches
        count, size, again = self._met(_Same(tensor), samples)
        often = point.micro_batches / point.mesh.pp
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

    def _in_unit(self, module: str) -> bool:
        """Inside of a unit: what happens at a unit's own door is not repeated with it."""
        while module := module.rpartition(".")[0]:
            if module in self._units:
                return True
        return False

    def bytes(self, point: Point, tensor: TensorPolicy, compiled: Compile, stages: Layers = ()) -> float:
        """What the mean pipeline rank holds: parameters, states, and of one micro-batch what is kept for backward. With `stages`, the
        largest rank, and all micro-batches that it has under way."""
        rates = self._calibration.layout(point.mesh.size)
        parts, base = self._at(point, tensor, compiled, stages), rates.base_bytes
        return min(rates.held, 1.0) * self._bytes(point, parts, base, bool(stages))

    def _bytes(self, point: Point, parts: Sequence[_Sum], base: int, stages: bool) -> float:
        if not stages:
            return base + self._held(point, parts[0], 1 / point.mesh.pp, 1) + (self._passing(point, parts[0]) if point.mesh.pp == 1 else 0.0)
        return base + max(self._held(point, part, 1.0, in_flight(point, rank)) + self._passing(point, part) for rank, part in enumerate(parts))

    def _passing(self, point: Point, part: _Sum) -> float:
        """What lives only while something is computed or travels: under ZeRO-3 two gathered units and two of gradients."""
        gathered = part.root + 4 * part.unit if point.zero == 3 and point.mesh.group_size("data") > 1 else 0.0
        return part.workspace + gathered

    def _held(self, point: Point, part: _Sum, share: float, under_way: int) -> float:
        mesh, states, shards = point.mesh, OPTIMIZER_STATES[self._workload.optimizer], point.mesh.shard
        whole, trained, kept = part.parameters * share, part.trained * share, part.kept[point.recompute] * share * under_way
        if mesh.group_size("data") == 1:  # gradients appear as activations go
            return whole + states * trained + max(trained, kept)
        return (
            kept
            + {
                0: whole + (1 + states) * trained,
                1: whole + trained + states * trained / shards,
                2: whole + (1 + states) * trained / shards,
                3: whole / shards + (1 + states) * trained / shards,
            }[point.zero]
        )

    def fits(self, point: Point, tensor: TensorPolicy, compiled: Compile, stages: Layers = ()) -> bool:
        return self.bytes(point, tensor, compiled, stages) <= HEADROOM * self._least(point.mesh.size)

    def _at(self, point: Point, tensor: TensorPolicy, compiled: Compile, stages: Layers = ()) -> list[_Sum]:
        share = self._workload.global_batch // point.mesh.data_width
        rates = self._calibration.layout(point.mesh.size)
        held = self._alive.setdefault(id(stages), _Same(stages))
        return self._sum(-(-share // point.micro_batches), point.mesh.tp, compiled, _Same(rates), _Same(tensor), held)

    def _priced(
        self, samples: int, ways: tuple[int, ...], compiled: Compile, rates: _Same[Rates], held: _Same[TensorPolicy]
    ) -> list[_Sum]:  # fmt: skip
        """Each kind of layer, once."""
        folded, _, _ = self._folded(ways, held)
        layers = local_profile(_plan(ways, held.value), folded.at(samples), 0).layers
        price = ComputeCost(rates.value, self._workload.precision, compiled != "none", self._units)
        memo: dict[tuple[int, str, bool], float] = {}
        found = []
        for layer in layers:
            unit = layer.name in self._units
            fused = compiled == "model" or (compiled == "blocks" and unit)
            saved = layer.activation_bytes - layer.fusible_bytes * (FUSED_SAVED if fused else 0.0)
            forward, cheap = (price.layer(layer, "forward", memo, cheap=cheap) for cheap in (False, True))
            again: dict[Recompute, float] = {"none": 0.0, "selective": cheap if unit else 0.0, "full": forward if unit else 0.0}
            less = (layer.output_bytes + layer.dear_bytes, layer.output_bytes)
            kept: dict[Recompute, float] = {"none": saved, "selective": less[0] if unit else saved, "full": less[1] if unit else saved}
            sizes = [(t.bytes, t.trainable) for t in layer.tensors]
            trained = float(sum(size for size, train in sizes if train))
            whole = float(sum(size for size, _ in sizes))
            work = layer.product_bytes if compiled == "model" else layer.transient_bytes
            extra = (work, whole, 0.0) if unit else (work, 0.0, whole)
            found.append(_Sum(forward, price.layer(layer, "backward", memo), again, kept, whole, trained, *extra))
        return found

    def _summed(
        self, samples: int, ways: tuple[int, ...], compiled: Compile, rates: _Same[Rates], held: _Same[TensorPolicy],
        stages: _Same[Layers],
    ) -> list[_Sum]:  # fmt: skip
        """What each of some sets of layers takes: all of them if there is none."""
        rows, (_, counts, kind_of) = self._rows(samples, ways, compiled, rates, held), self._folded(ways, held)
        if not stages.value:
            return [_total(rows, dict(enumerate(counts)))]
        return [_total(rows, Counter(kind_of[name] for name in names if name in kind_of)) for names in stages.value]

    def _fold(self, ways: tuple[int, ...], held: _Same[TensorPolicy]) -> tuple[ModelProfile, tuple[int, ...], dict[str, int]]:
        """The model with one layer of each kind, how many there are, and of which kind each layer is. Alike: as much work, as much of it cut."""
        profile, plan = self._profile, _plan(ways, held.value)
        kinds: dict[Hashable, list[int]] = {}
        for index, (whole, part) in enumerate(zip(profile.layers, local_profile(plan, profile, 0).layers, strict=True)):
            alike = (id(whole.kernels), part.parameters, whole.activation_bytes, whole.output_bytes, whole.name in self._units)
            kinds.setdefault(alike, []).append(index)
        first = [indices[0] for indices in kinds.values()]
        folded = replace(profile, layers=tuple(profile.layers[i] for i in first), slopes=tuple(profile.slopes[i] for i in first))
        kind_of = {profile.layers[index].name: number for number, indices in enumerate(kinds.values()) for index in indices}
        return folded, tuple(map(len, kinds.values())), kind_of


def _total(rows: Sequence[_Sum], counts: Mapping[int, int]) -> _Sum:
    def add(get: Callable[[_Sum], float]) -> float:
        return sum(count * get(rows[kind]) for kind, count in counts.items())

    again = {mode: add(lambda row, mode=mode: row.again[mode]) for mode in RECOMPUTES}  # type: ignore[misc]
    kept = {mode: add(lambda row, mode=mode: row.kept[mode]) for mode in RECOMPUTES}  # type: ignore[misc]
    figures = (add(lambda r: r.forward), add(lambda r: r.backward), again, kept, add(lambda r: r.parameters), add(lambda r: r.trained))
    here = [rows[kind] for kind in counts]
    return _Sum(*figures, max((r.workspace for r in here), default=0.0), max((r.unit for r in here), default=0.0), add(lambda r: r.root))


class _Same(Generic[T]):
    """A value as a key: the same object is the same key."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _plan(ways: tuple[int, ...], tensor: TensorPolicy) -> Plan:
    """As much of a plan as says what tensor parallelism leaves a rank."""
    return Plan("", 1, Mesh(tp=ways), tensor=tensor)
