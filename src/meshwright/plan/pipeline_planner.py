"""Where a model can be split into pipeline stages, and the split that balances them. Pure reasoning over dataflow and profile."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise

from meshwright.core.dataflow import Dataflow, ModuleCall
from meshwright.core.errors import RequestError
from meshwright.core.model import LOSS_LAYER, LayerProfile, ModelProfile
from meshwright.core.plan import BoundaryActivation, ModuleInput, Stage, TiedParameter
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.plan.context_planner import sequence_dim
from meshwright.plan.dataflow_graph import DataflowGraph
from meshwright.plan.sequence_planner import sequence_sharded_values
from meshwright.plan.tensor_planner import sharded_logical_dims

BestCutRow = list[tuple[float, tuple[int, ...]]]  # by end: (cost of the most expensive stage, cut positions) of the best cut before it


@dataclass(frozen=True)
class _Boundary:
    """A boundary between two layers at which a stage can begin, given by the module call that comes after it."""

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
    """The boundaries at which a model can be split, for any number of stages."""

    dataflow: Dataflow
    layer_order: Sequence[str]  # layers in the order of their first use
    by_layer: Mapping[str, _Boundary]  # by the layer after the boundary
    parameter_reads: Sequence[tuple[int, str]]  # (operation, parameter that it reads), in order
    best_cut_rows: list[BestCutRow] = field(default_factory=list, compare=False, repr=False)  # the best cuts into one stage, two, … computed so far

    @property
    def cut_positions(self) -> list[int]:
        return [i for i, name in enumerate(self.layer_order) if name in self.by_layer]


def find_stage_boundaries(
    dataflow: Dataflow, profile: ModelProfile, tensor: TensorPolicy | None = None, tensor_y: TensorPolicy | None = None, cp: int = 1
) -> StageBoundaries:
    order, parameters = _layers_in_order(dataflow, profile), frozenset(t.name for t in profile.tensors)
    blocked = frozenset(sharded_logical_dims(dataflow, tensor))
    sequence: Mapping[int, tuple[str, int]] = {}
    if tensor is not None and tensor.is_sequence_parallel:
        sequence = sequence_sharded_values(DataflowGraph.of(dataflow, profile.layer_names), tensor, blocked)
    sharding = _BoundarySharding(blocked, sharded_logical_dims(dataflow, tensor_y), sequence, cp, sequence_dim(dataflow, cp) if cp > 1 else -1)
    inputs = [(i, dataflow.values[v]) for i, op in enumerate(dataflow.operations) for v in op.inputs]
    reads = [(i, value.parameter) for i, value in inputs if value.parameter in parameters]
    return StageBoundaries(dataflow, order, {b.call.module: b for b in _find_boundaries(dataflow, order, parameters, sharding)}, reads)


def balanced_stages(boundaries: StageBoundaries, profile: ModelProfile, count: int) -> tuple[Stage, ...]:
    order, positions = boundaries.layer_order, boundaries.cut_positions
    if count > len(positions) + 1:
        raise RequestError(f"this model cannot be split into {count} pipeline stages, only into {len(positions) + 1} at most: use a smaller pp")
    costs = {layer.name: layer.flops_forward + layer.flops_backward for layer in profile.layers}
    return build_stages(boundaries, _balanced_cuts([costs.get(name, 0.0) for name in order], positions, count, boundaries.best_cut_rows))


def build_stages(boundaries: StageBoundaries, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between `cuts`, which are a subset of `boundaries.cut_positions`."""
    order = boundaries.layer_order
    entries = [None, *(boundaries.by_layer[order[cut]] for cut in cuts)]
    layer_ranges = pairwise([0, *cuts, len(order)])
    op_ranges = pairwise([0, *(entry.call.first_op for entry in entries if entry), len(boundaries.dataflow.operations)])
    stages = []
    for entry, (first, last), (first_op, end_op) in zip(entries, layer_ranges, op_ranges, strict=True):
        layers = tuple(order[first:last])
        tied = _borrowed_parameters(boundaries, first_op, end_op, layers)
        received = (entry.call.module, entry.activations, entry.finished_modules) if entry else ("", (), ())
        stages.append(Stage(layers, *received, tied))
    return tuple(stages)


def reuses_parameters(dataflow: Dataflow, stages: Sequence[Stage]) -> bool:
    """Whether several operations of one stage use the same trainable parameter: those of a module that is called twice, or a value that is made from
    parameters alone, such as the queries that every block of a DETR decoder adds."""
    entries = tuple(stage.entry for stage in stages[1:])
    return dataflow.memo.get_or_compute("reuses parameters", (), entries, lambda: _reuses_parameters(dataflow, entries))


def _reuses_parameters(dataflow: Dataflow, entries: Sequence[str]) -> bool:
    calls = DataflowGraph.of(dataflow).calls_by_module
    starts, used = sorted(calls[entry][0].first_op for entry in entries), set[tuple[int, int]]()
    made_of: dict[tuple[int, int], set[int]] = {}  # (stage, value that what the stage receives does not lead to) → parameters
    for index, op in enumerate(dataflow.operations):
        stage = bisect_right(starts, index)
        inputs = [v for v in dict.fromkeys(op.inputs) if dataflow.values[v].needs_grad]
        parameters = {v: {v} if dataflow.values[v].parameter else made_of.get((stage, v), set()) for v in inputs}
        if stage and inputs and all(parameters.values()):
            made = set().union(*parameters.values())
            made_of.update({(stage, v): made for v in op.outputs if dataflow.values[v].needs_grad})
            continue
        for parameter in (p for found in parameters.values() for p in found):
            if (stage, parameter) in used:
                return True
            used.add((stage, parameter))
    return False


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
        crossing = [(self.crossing_dims[dim[0]], i) for i, dim in enumerate(logical_dims) if len(dim) == 1 and dim[0] in self.crossing_dims]
        if self.blocked_dims & carried or len(crossing) != sum(s in self.crossing_dims for s in carried):
            return None
        return crossing[0] if crossing else ("", 0)


def _layers_in_order(dataflow: Dataflow, profile: ModelProfile) -> list[str]:
    """Layers in the order of their first use: when their module is called, or else when one of their parameters is read."""
    end = len(dataflow.operations)
    first_call = {call.module: call.first_op for call in sorted(dataflow.modules, key=lambda call: -call.first_op)}
    first_read = {dataflow.values[v].parameter: i for i in reversed(range(end)) for v in dataflow.operations[i].inputs}

    def first_use(layer: LayerProfile) -> int:
        read = min((first_read.get(t.name, end) for t in layer.tensors), default=end)
        return end if layer.name == LOSS_LAYER else first_call.get(layer.name, read)

    return [layer.name for layer in sorted(profile.layers, key=first_use)]


def _find_boundaries(
    dataflow: Dataflow, layers: Sequence[str], parameters: frozenset[str], sharding: _BoundarySharding
) -> list[_Boundary]:  # fmt: skip
    """Boundaries at which every crossing value can be sent: a module before returns it, and modules after take it as an input."""
    index: _BoundaryIndex = dataflow.memo.get_or_compute("boundaries", (), parameters, lambda: _BoundaryIndex(dataflow, parameters))
    calls = [index.graph.calls_by_module.get(name, []) for name in layers[1:]]
    once = [call for call, *others in filter(None, calls) if not others and 0 < call.first_op < call.end_op]
    # Several layers may begin with the same operation, one inside another: a stage between them would be empty.
    entries = sorted({call.first_op: call for call in reversed(once)}.values(), key=lambda call: call.first_op)
    sources = _find_sources(index, entries)
    boundaries = []
    for i, entry in enumerate(entries):
        if activations := _boundary_activations(index, entry, i, sources, sharding):
            finished = dict.fromkeys(m.module for m in index.finished_modules(entry.first_op))
            boundaries.append(_Boundary(entry, activations, tuple(finished)))
    return boundaries


@dataclass(frozen=True)
class _Source:
    """Where a value that crosses boundaries is read: a module's output, or its input; and the first boundary before which that happens."""

    module: str
    position: int
    at_module_input: bool
    boundary: int  # index into the boundaries, in the order in which they are passed


def _find_sources(index: _BoundaryIndex, entries: Sequence[ModuleCall]) -> dict[int, _Source]:
    """By value, its source: the largest module that has returned it at the first boundary that it crosses, or else that boundary's entry. It is the
    same at every boundary: a stage that receives a value sends what it received, and not what its own code made of placeholders."""
    sources: dict[int, _Source] = {}
    for boundary, entry in enumerate(entries):
        for value in (v for v in index.crossing_values(entry.first_op) if v not in sources):
            # A module without operations (nn.Identity, dropout with p=0) ends where it begins: it may be the entry, or inside it.
            before = [m for m in index.graph.producer_calls(value) if m.end_op <= entry.first_op and m.first_op < entry.first_op]
            before = [m for m in before if len(index.graph.calls_by_module[m.module]) == 1]
            if before:
                largest = max(before, key=lambda m: m.end_op - m.first_op)
                sources[value] = _Source(largest.module, largest.outputs.index(value), at_module_input=False, boundary=boundary)
            elif value in entry.inputs:
                sources[value] = _Source(entry.module, entry.inputs.index(value), at_module_input=True, boundary=boundary)
    return sources


class _BoundaryIndex:
    """A dataflow indexed for the queries of every boundary, independent of how layers are split into stages."""

    def __init__(self, dataflow: Dataflow, parameters: Collection[str]) -> None:
        self.graph, self._depends_on_parameters = DataflowGraph.of(dataflow), _depends_on_parameters(dataflow, parameters)
        self._parameter_calls = _find_parameter_calls(dataflow, self._depends_on_parameters)
        self._producers: dict[int, list[int]] = {}  # by value: the operations that produce it
        for i, op in enumerate(dataflow.operations):
            for value in op.outputs:
                self._producers.setdefault(value, []).append(i)
        self._skipped_from = _skipped_from(dataflow, self._parameter_calls)
        uses = self.graph.consumers
        self._lifetimes = sorted((self._producers[v][0], uses[v][-1], v) for v in uses if v in self._producers)
        self.finished_modules, self.crossing_values = cache(self._find_finished_modules), cache(self._find_crossing_values)

    def _find_finished_modules(self, start: int) -> list[ModuleCall]:
        """The outermost modules with parameters whose last call ends before operation `start`."""
        finished: list[ModuleCall] = []
        for call, last_end in self._parameter_calls:
            if last_end <= start and (not finished or call.end_op > finished[-1].end_op):
                finished.append(call)
        return finished

    def _find_crossing_values(self, start: int) -> dict[int, list[int]]:
        """Values produced before operation `start` and used from there on, with the operations that use them."""
        crossing = {}
        for produced, last_use, value in self._lifetimes:
            if produced >= start:
                break
            if last_use >= start and (self._depends_on_parameters[value] or self._skipped_from[value] <= start):
                ops = self.graph.consumers[value]
                crossing[value] = ops[bisect_left(ops, start) :]
        return crossing


def _depends_on_parameters(dataflow: Dataflow, parameters: Collection[str]) -> list[bool]:
    """Whether each value depends on parameters, frozen ones too: a stage holds its own. Every stage computes the other values (masks, tables of
    positions) itself, from the batch and buffers."""
    depends = [v.parameter in parameters for v in dataflow.values]
    for op in dataflow.operations:
        if any(depends[v] for v in op.inputs):
            for value in op.outputs:
                depends[value] = True
    return depends


def _skipped_from(dataflow: Dataflow, parameter_calls: Sequence[tuple[ModuleCall, int]]) -> list[float]:
    """By value, the operation from which a stage that begins there skips a module in which the value, or something that it is computed from, is made:
    such a stage has only placeholders of it, also where no parameters are in it (a mask that a convolutional stem shortens)."""
    starts: list[float] = [math.inf] * len(dataflow.operations)
    for call, last_end in parameter_calls:
        for index in range(call.first_op, call.end_op):
            starts[index] = min(starts[index], last_end)
    found: list[float] = [math.inf] * len(dataflow.values)
    for op, start in zip(dataflow.operations, starts, strict=True):
        start = min((start, *(found[v] for v in op.inputs)))
        for value in op.outputs:
            found[value] = min(found[value], start)
    return found


def _boundary_activations(
    index: _BoundaryIndex, entry: ModuleCall, boundary: int, sources: Mapping[int, _Source], sharding: _BoundarySharding
) -> tuple[BoundaryActivation, ...]:
    """The activations that cross the boundary before `entry`; empty if one of them is not available as an input or output of a module."""
    graph, flow = index.graph, index.graph.dataflow
    activations = []
    for value, ops in sorted(index.crossing_values(entry.first_op).items()):
        after = [m for m in graph.consumer_calls(value) if m.first_op >= entry.first_op]
        outer = [m for m in after if not any(o is not m and o.first_op <= m.first_op and m.end_op <= o.end_op for o in after)]
        tensor = flow.values[value]
        sharded_dim = sharding.sharding_of(value, tensor.logical_dims)
        source = sources.get(value)
        if (
            sharded_dim is None
            or source is None
            or source.boundary > boundary
            or not all(any(m.first_op <= i < m.end_op for m in outer) for i in ops)
            or not all(_takes_in_every_call(graph, m, value, entry.first_op) for m in outer)
        ):
            return ()
        fixed = flow.sample_dims.isdisjoint(s for dim in tensor.logical_dims for s in dim)
        size = math.prod(tensor.shape) * tensor.itemsize / (1 if fixed else flow.batch)
        size /= sharding.cp if any(sharding.sequence_dim in dim for dim in tensor.logical_dims) else 1
        consumers = tuple(ModuleInput(m.module, m.inputs.index(value)) for m in outer)
        where = source.module, source.position, consumers, size, source.at_module_input
        activations.append(BoundaryActivation(*where, *sharded_dim, fixed, tensor.needs_grad))
    return tuple(activations)


def _takes_in_every_call(graph: DataflowGraph, consumer: ModuleCall, value: int, start: int) -> bool:
    """Whether each call of a module from operation `start` on has this value at the same position: a stage injects it into all of them."""
    position = consumer.inputs.index(value)
    later = (m for m in graph.calls_by_module[consumer.module] if m.first_op >= start)
    return all(m.inputs[position : position + 1] == (value,) for m in later)


def _find_parameter_calls(dataflow: Dataflow, depends_on_parameters: Sequence[bool]) -> list[tuple[ModuleCall, int]]:
    """Calls of modules that read parameters, outer calls first, each with the end of the last call of the same module."""
    reads = (any(depends_on_parameters[v] and dataflow.values[v].parameter for v in op.inputs) for op in dataflow.operations)
    read_counts = list(accumulate(reads, initial=0))  # how many of the first n operations read a parameter
    last_end: dict[str, int] = {}
    for call in dataflow.modules:
        last_end[call.module] = max(last_end.get(call.module, 0), call.end_op)
    calls = [(m, last_end[m.module]) for m in dataflow.modules if m.module and read_counts[m.end_op] > read_counts[m.first_op]]
    return sorted(calls, key=lambda item: (item[0].first_op, -item[0].end_op))  # nested calls come after the enclosing one


def _borrowed_parameters(boundaries: StageBoundaries, start: int, end: int, layers: tuple[str, ...]) -> tuple[TiedParameter, ...]:
    """Parameters that this stage's operations read although a layer of another stage holds them."""
    readers: dict[str, str] = {}  # parameter → the layer that reads it
    stage_layers = frozenset(layers) - {LOSS_LAYER}
    first, last = (bisect_left(boundaries.parameter_reads, (op, "")) for op in (start, end))
    for op, name in boundaries.parameter_reads[first:last]:
        if name not in readers and not _owns_parameter(stage_layers, name):
            inside = [m.module for m in boundaries.dataflow.modules if m.module in layers and m.first_op <= op < m.end_op]
            readers[name] = max(inside, key=len, default=layers[0])
    return tuple(TiedParameter(name, layer) for name, layer in sorted(readers.items()))


def _owns_parameter(layers: frozenset[str], parameter: str) -> bool:
    while parameter := parameter.rpartition(".")[0]:
        if parameter in layers:
            return True
    return False


def _balanced_cuts(costs: Sequence[float], cut_positions: Sequence[int], count: int, rows: list[BestCutRow]) -> list[int]:
    """Dynamic programming over cut positions: the cut into `count` stages whose most expensive stage is cheapest. `rows` caches the best cuts into
    fewer stages."""
    ends, sums = [*cut_positions, len(costs)], list(accumulate(costs, initial=0.0))
    if not rows:
        rows.append([(sums[end], ()) for end in ends])
    for stages in range(len(rows) + 1, count + 1):
        rows.append([_extend_best_cut(rows[-1], sums, ends, stages - 2, end) for end in range(len(ends))])
    return list(rows[count - 1][-1][1])


def _extend_best_cut(row: BestCutRow, sums: Sequence[float], ends: Sequence[int], first: int, end: int) -> tuple[float, tuple[int, ...]]:
    """The best cut with one more stage. As the cut moves right, the cost of the stages before it grows and that of the last stage shrinks, so the
    best cut is where the two cross."""
    if end <= first:
        return math.inf, ()

    def last_stage_cost(cut: int) -> float:
        return sums[ends[end]] - sums[ends[cut]]

    def max_cost(cut: int) -> float:
        return max(row[cut][0], last_stage_cost(cut))

    low = high = bisect_left(range(first, end), True, key=lambda cut: row[cut][0] >= last_stage_cost(cut)) + first
    best = min(max_cost(cut) for cut in (low - 1, low) if first <= cut < end)
    while low > first and max_cost(low - 1) <= best:
        low -= 1
    while high < end and max_cost(high) <= best:
        high += 1
    return min((best, (*row[cut][1], ends[cut])) for cut in range(low, high))
