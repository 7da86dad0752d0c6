"""Where a model can be cut into pipeline stages, and the cut that balances them. Pure reasoning over dataflow and profile."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from meshwright.core.dataflow import Dataflow, ModuleCall
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.plan import BoundaryActivation, ModuleInput, Stage, TiedParameter
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.plan.context_planner import sequence_dim
from meshwright.plan.dataflow_graph import DataflowGraph
from meshwright.plan.sequence_planner import sequence_sharded_values
from meshwright.plan.tensor_planner import sharded_logical_dims

BestCutRow = list[tuple[float, tuple[int, ...]]]  # by end: (cost of the most expensive stage, cut positions) of the best cut before it


@dataclass(frozen=True)
class _Boundary:
    """A place between two layers where the model can be cut, given by the module call that comes after it."""

    call: ModuleCall
    activations: tuple[BoundaryActivation, ...]
    finished_modules: tuple[str, ...]  # modules that finish before it: a stage that begins here skips them


def cut_stages(
    dataflow: Dataflow, profile: ModelProfile, count: int, tensor: TensorPolicy | None = None, tensor_y: TensorPolicy | None = None, cp: int = 1
) -> tuple[Stage, ...]:  # fmt: skip
    """`count` stages whose slowest is as fast as possible, so a stage with more expensive layers may hold fewer. Values that tensor parallelism
    shards do not cross stage boundaries, except features that the second axis of 2D tensor parallelism shards. Under context parallelism each of
    `cp` ranks sends its own positions."""
    return balanced_stages(find_stage_boundaries(dataflow, profile, tensor, tensor_y, cp), profile, count)


@dataclass(frozen=True)
class StageBoundaries:
    """The places where a model can be cut into stages, for any number of stages."""

    dataflow: Dataflow
    layer_order: Sequence[str]  # layers in the order of their first use
    by_layer: Mapping[str, _Boundary]  # by the layer after the boundary
    parameter_reads: Sequence[tuple[int, str]]  # (operation, trainable parameter that it reads), in order
    best_cut_rows: list[BestCutRow] = field(default_factory=list, compare=False, repr=False)  # the best cuts into one stage, two, … computed so far

    @property
    def cut_positions(self) -> list[int]:
        return [i for i, name in enumerate(self.layer_order) if name in self.by_layer]


def find_stage_boundaries(
    dataflow: Dataflow, profile: ModelProfile, tensor: TensorPolicy | None = None, tensor_y: TensorPolicy | None = None, cp: int = 1
) -> StageBoundaries:
    order = [name for name, _ in _layers_in_order(dataflow, profile)]
    inner = frozenset(sharded_logical_dims(dataflow, tensor))
    shared = (
        sequence_sharded_values(DataflowGraph.of(dataflow, profile.layer_names), tensor, inner)
        if tensor is not None and tensor.is_sequence_parallel
        else {}
    )
    sharded = _BoundarySharding(inner, sharded_logical_dims(dataflow, tensor_y), shared, cp, sequence_dim(dataflow, cp) if cp > 1 else -1)
    values = [(at, dataflow.values[v]) for at, op in enumerate(dataflow.operations) for v in op.inputs]
    reads = [(at, value.parameter) for at, value in values if value.parameter and value.needs_grad]
    return StageBoundaries(dataflow, order, {b.call.module: b for b in _find_boundaries(dataflow, order, sharded)}, reads)


def balanced_stages(boundaries: StageBoundaries, profile: ModelProfile, count: int) -> tuple[Stage, ...]:
    order, places = boundaries.layer_order, boundaries.cut_positions
    if len(places) + 1 < count:
        raise RequestError(f"{count} stages: this model can be cut in {len(places)} places, so it has at most {len(places) + 1} stages")
    costs = {layer.name: layer.flops_forward + layer.flops_backward for layer in profile.layers}
    return build_stages(boundaries, _balanced_cuts([costs.get(name, 0.0) for name in order], places, count, boundaries.best_cut_rows))


def build_stages(boundaries: StageBoundaries, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between `cuts`, which are a subset of `boundaries.cut_positions`."""
    flow, order, found = boundaries.dataflow, boundaries.layer_order, boundaries.by_layer
    edges, count = [0, *cuts, len(order)], len(cuts) + 1
    starts = [0, *(found[order[c]].call.first_op for c in cuts), len(flow.operations)]
    stages = []
    for index in range(count):
        names = tuple(order[edges[index] : edges[index + 1]])
        boundary = found[order[edges[index]]] if index else None
        stages.append(
            Stage(
                layers=names,
                entry=boundary.call.module if boundary else "",
                boundary_activations=boundary.activations if boundary else (),
                skipped_modules=boundary.finished_modules if boundary else (),
                tied_parameters=_borrowed_parameters(boundaries, starts[index], starts[index + 1], names),
            )
        )
    return tuple(stages)


@dataclass(frozen=True)
class _BoundarySharding:
    """How values are sharded at a stage boundary: logical dims that may not cross it, those that may (with their names), and sequence-sharded
    values."""

    blocked_dims: frozenset[int]
    crossing_dims: Mapping[int, str]
    sequence_sharded: Mapping[int, tuple[str, int]]
    cp: int = 1
    sequence_dim: int = -1  # the logical dim that cp ranks shard

    def sharding_of(self, value: int, logical_dims: tuple[tuple[int, ...], ...]) -> tuple[str, int] | None:
        """(name of the logical dim along which a value is sharded or "", the tensor dim), or None if the value cannot cross."""
        if value in self.sequence_sharded:
            return self.sequence_sharded[value] if self.sequence_sharded[value][1] >= 0 else None
        carried = {s for dim in logical_dims for s in dim}
        places = [(self.crossing_dims[dim[0]], at) for at, dim in enumerate(logical_dims) if len(dim) == 1 and dim[0] in self.crossing_dims]
        if self.blocked_dims & carried or len(places) != sum(s in self.crossing_dims for s in carried):
            return None
        return places[0] if places else ("", 0)


def _layers_in_order(dataflow: Dataflow, profile: ModelProfile) -> list[tuple[str, int]]:
    """Layers in the order of their first use: when their module is called, or else when one of their parameters is read."""
    first: dict[str, int] = {}
    for call in dataflow.modules:
        first[call.module] = min(first.get(call.module, call.first_op), call.first_op)
    reads: dict[str, int] = {}
    for index, op in enumerate(dataflow.operations):
        for value in op.inputs:
            if dataflow.values[value].parameter:
                reads.setdefault(dataflow.values[value].parameter, index)
    end = len(dataflow.operations)
    placed = []
    for layer in profile.layers:
        at = first.get(layer.name, min((reads.get(t.name, end) for t in layer.tensors), default=end))
        placed.append((layer.name, end if layer.name == "(model)" else at))
    return sorted(placed, key=lambda item: item[1])


def _find_boundaries(dataflow: Dataflow, layers: Sequence[str], sharding: _BoundarySharding) -> list[_Boundary]:
    """Boundaries at which every crossing value can be sent: made by a module before and taken in as a module input after."""
    index: _BoundaryIndex = dataflow.memo.get_or_compute("boundaries", (), (), lambda: _BoundaryIndex(dataflow))
    found = []
    for name in layers[1:]:
        mine = index.calls_by_module.get(name, [])
        if len(mine) == 1 and mine[0].first_op > 0:
            activations = _boundary_activations(index, mine[0], sharding)
            if activations:
                found.append(_Boundary(mine[0], activations, tuple(dict.fromkeys(m.module for m in index.finished_modules(mine[0].first_op)))))
    return found


class _BoundaryIndex:
    """A dataflow indexed for the queries of every boundary, independent of how layers are cut into stages."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow, self.depends_on_parameters = dataflow, _depends_on_parameters(dataflow)
        self.parameter_calls = _find_parameter_calls(dataflow, _parameter_read_counts(dataflow, self.depends_on_parameters))
        self.calls_by_module: dict[str, list[ModuleCall]] = {}
        self.consumer_calls: dict[int, list[ModuleCall]] = {}  # by value: the calls that take it as an input
        self.producer_calls: dict[int, list[ModuleCall]] = {}  # by value: the calls that return it
        for call in dataflow.modules:
            self.calls_by_module.setdefault(call.module, []).append(call)
            for calls, values in ((self.consumer_calls, call.inputs), (self.producer_calls, call.outputs)):
                for value in dict.fromkeys(values):
                    calls.setdefault(value, []).append(call)
        self.producers: dict[int, list[int]] = {}  # by value: the operations that produce it
        self.consumers: dict[int, list[int]] = {}
        for at, op in enumerate(dataflow.operations):
            for value in op.outputs:
                self.producers.setdefault(value, []).append(at)
            for value in op.inputs:
                self.consumers.setdefault(value, []).append(at)
        self._lifetimes = sorted((self.producers[v][0], uses[-1], v) for v, uses in self.consumers.items() if v in self.producers)
        self.finished_modules, self.crossing_values = (
            cache(lambda start: _finished_modules(self.parameter_calls, start)),
            cache(self._find_crossing_values),
        )

    def _find_crossing_values(self, start: int) -> dict[int, list[int]]:
        """Values produced before operation `start` and used from there on, with the operations that use them."""
        found, done = {}, self.finished_modules(start)
        for made, last, value in self._lifetimes:
            if made >= start:
                break
            if last >= start and (
                self.depends_on_parameters[value] or any(m.first_op <= at < m.end_op for m in done for at in self.producers[value])
            ):
                found[value] = self.consumers[value][bisect_left(self.consumers[value], start) :]
        return found


def _depends_on_parameters(dataflow: Dataflow) -> list[bool]:
    """Whether each value depends on trainable parameters. Every stage computes the other values (masks, position tables) itself."""
    found = [bool(v.parameter) and v.needs_grad for v in dataflow.values]
    for op in dataflow.operations:
        if any(found[v] for v in op.inputs):
            for value in op.outputs:
                found[value] = True
    return found


def _boundary_activations(index: _BoundaryIndex, entry: ModuleCall, sharding: _BoundarySharding) -> tuple[BoundaryActivation, ...]:
    """The activations that cross the boundary before `entry`; empty if one of them is not available as an input or output of a module."""
    flow = index.dataflow
    used = index.crossing_values(entry.first_op)
    activations = []
    for value, ops in sorted(used.items()):
        after = [m for m in index.consumer_calls.get(value, ()) if m.first_op >= entry.first_op]
        outer = [m for m in after if not any(o is not m and o.first_op <= m.first_op and m.end_op <= o.end_op for o in after)]
        noted = flow.values[value]
        cut = sharding.sharding_of(value, noted.logical_dims)
        if cut is None or not all(any(m.first_op <= i < m.end_op for m in outer) for i in ops):
            return ()
        fixed = flow.sample_dims.isdisjoint(s for dim in noted.logical_dims for s in dim)
        size = math.prod(noted.shape) * noted.itemsize / (1 if fixed else flow.batch)
        size /= sharding.cp if any(sharding.sequence_dim in dim for dim in noted.logical_dims) else 1
        sinks = tuple(ModuleInput(m.module, m.inputs.index(value)) for m in outer)
        before = (
            m for m in index.producer_calls.get(value, ()) if m.end_op <= entry.first_op and m is not entry
        )  # an `entry` without operations (dropout with p=0) also ends at its own first_op
        sources = [m for m in before if len(index.calls_by_module[m.module]) == 1]
        if sources:
            source = max(sources, key=lambda m: m.end_op - m.first_op)
            activations.append(BoundaryActivation(source.module, source.outputs.index(value), sinks, size, False, *cut, fixed, noted.needs_grad))
        elif value in entry.inputs:
            activations.append(BoundaryActivation(entry.module, entry.inputs.index(value), sinks, size, True, *cut, fixed, noted.needs_grad))
        else:
            return ()
    return tuple(activations)


ParameterCalls = list[tuple[ModuleCall, int]]


def _find_parameter_calls(dataflow: Dataflow, read_counts: Sequence[int]) -> ParameterCalls:
    """Calls of modules that read trainable parameters, outer calls first, each with the end of the last call of the same module."""
    last: dict[str, int] = {}
    for call in dataflow.modules:
        last[call.module] = max(last.get(call.module, 0), call.end_op)
    found = [(m, last[m.module]) for m in dataflow.modules if m.module and read_counts[m.end_op] > read_counts[m.first_op]]
    return sorted(found, key=lambda item: (item[0].first_op, -item[0].end_op))  # nested calls come after the enclosing one


def _finished_modules(parameter_calls: ParameterCalls, start: int) -> list[ModuleCall]:
    """The outermost modules with parameters whose last call ends before operation `start`."""
    found: list[ModuleCall] = []
    for call, last in parameter_calls:
        if last <= start and (not found or call.end_op > found[-1].end_op):
            found.append(call)
    return found


def _parameter_read_counts(dataflow: Dataflow, depends_on_parameters: Sequence[bool]) -> list[int]:
    """For every n, how many of the first n operations read a trainable parameter."""
    sums = [0]
    for op in dataflow.operations:
        sums.append(sums[-1] + any(depends_on_parameters[v] and bool(dataflow.values[v].parameter) for v in op.inputs))
    return sums


def _borrowed_parameters(boundaries: StageBoundaries, start: int, end: int, layers: tuple[str, ...]) -> tuple[TiedParameter, ...]:
    """Parameters that this stage's operations read although a layer of another stage holds them."""
    found: dict[str, str] = {}
    here = frozenset(layers) - {"(model)"}
    first, last = (bisect_left(boundaries.parameter_reads, (at, "")) for at in (start, end))
    for index, name in boundaries.parameter_reads[first:last]:
        if name not in found and not _owns_parameter(here, name):
            inside = [m.module for m in boundaries.dataflow.modules if m.module in layers and m.first_op <= index < m.end_op]
            found[name] = max(inside, key=len, default=layers[0])
    return tuple(TiedParameter(name, layer) for name, layer in sorted(found.items()))


def _owns_parameter(layers: frozenset[str], parameter: str) -> bool:
    while parameter := parameter.rpartition(".")[0]:
        if parameter in layers:
            return True
    return False


def _balanced_cuts(costs: Sequence[float], cut_positions: Sequence[int], count: int, best_cut_rows: list[BestCutRow]) -> list[int]:
    """Dynamic programming over cut positions: the cut into `count` stages whose most expensive stage is cheapest. `best_cut_rows` caches the
    results for fewer stages."""
    ends = [*cut_positions, len(costs)]
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    if not best_cut_rows:
        best_cut_rows.append([(sums[end], ()) for end in ends])
    for pieces in range(len(best_cut_rows) + 1, count + 1):
        best_cut_rows.append([_extend_best_cut(best_cut_rows[-1], sums, ends, pieces - 2, end) for end in range(len(ends))])
    return list(best_cut_rows[count - 1][-1][1])


def _extend_best_cut(
    best_cut_row: BestCutRow, prefix_costs: Sequence[float], ends: Sequence[int], first: int, end: int
) -> tuple[float, tuple[int, ...]]:  # fmt: skip
    """The best cut with one more stage. As the cut moves right, the cost of the stages before it grows and that of the last stage shrinks, so the
    best cut is where the two cross."""
    if end <= first:
        return math.inf, ()
    last = prefix_costs[ends[end]]
    site = bisect_left(range(first, end), True, key=lambda cut: best_cut_row[cut][0] >= last - prefix_costs[ends[cut]]) + first
    near = [max(best_cut_row[cut][0], last - prefix_costs[ends[cut]]) for cut in (site - 1, site) if first <= cut < end]
    best = min(near)
    low, high = site, site
    while low > first and max(best_cut_row[low - 1][0], last - prefix_costs[ends[low - 1]]) <= best:
        low -= 1
    while high < end and max(best_cut_row[high][0], last - prefix_costs[ends[high]]) <= best:
        high += 1
    return min((best, (*best_cut_row[cut][1], ends[cut])) for cut in range(low, high))
