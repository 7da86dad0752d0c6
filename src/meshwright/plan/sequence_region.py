"""Sequence parallelism: the region of a model between its tensor-parallel parts in which each rank holds a shard of the positions of every value
(see [Note: sequence])."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshwright.core.dataflow import ModuleCall, Operation, SizeRead
from meshwright.core.errors import RequestError
from meshwright.core.tensor_policy import CollectiveSite, SequenceLayout, TensorPolicy
from meshwright.plan.dataflow_graph import DataflowGraph

_SEQUENCE_DIM_NAME = "sequence"
_MASKING_OPS = frozenset(("mul", "mul_", "div", "div_", "where", "_to_copy", "clone", "native_dropout"))  # multiply by a non-input
_LIKE_OPS = frozenset(("empty_like", "zeros_like", "ones_like", "rand_like", "full_like", "new_empty", "new_zeros", "new_ones"))


class SequenceParallelError(Exception):
    """The reason why ranks cannot shard positions."""


@dataclass
class SequenceRegion:
    """Propagates one logical dim of positions from the reduce sites that begin the region to the tensor-parallel parts that end it."""

    graph: DataflowGraph
    policy: TensorPolicy
    logical_dim: int
    sharded_dims: frozenset[int]
    scatters: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # (value, first_op of the call): replicated outside, sharded inside
    gathers: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # (value, first_op of the call): sharded outside, replicated inside
    gathered_outputs: set[int] = field(default_factory=set)  # values gathered at the output of the module that returns them
    stop_ops: set[int] = field(default_factory=set)  # operations that could run on sharded positions, but whose output is needed gathered

    def __post_init__(self) -> None:
        flow = self.graph.dataflow
        names = [s.name for s in self.policy.sharded_dims if not s.parameter_shards]  # of this region, if restored, and of other regions
        new_name = f"{_SEQUENCE_DIM_NAME}.{len(names)}" if names else _SEQUENCE_DIM_NAME
        self.dim_name = next(filter(self._is_this_dim, names), new_name)
        reduced = {m.module for m in self.policy.reduce_sites if m.sequence_layout is None or m.sequence_layout.logical_dim == self.dim_name}
        self.reduced_outputs = {c.outputs[0]: c for c in flow.modules if c.module in reduced and self.has_dim(c.outputs[0])}
        for value in [v for v, call in self.reduced_outputs.items() if self._parameters_have_dim(call)]:
            del self.reduced_outputs[value]
        self.entry_calls: dict[int, list[ModuleCall]] = {}
        self.moved_entries: dict[tuple[str, int], tuple[str, int]] = {}  # (module, input) of a copy site → of the outermost call around it
        copied_inputs = {(m.module, m.position) for m in self.policy.copy_sites}
        for call in flow.modules:
            for i, value in enumerate(call.inputs):
                if (call.module, i) in copied_inputs and self.has_dim(value):
                    outer = self._outermost_call(call, value)
                    self.moved_entries[call.module, i] = (outer.module, outer.inputs.index(value))
                    self.entry_calls.setdefault(value, []).append(outer)

    def _parameters_have_dim(self, call: ModuleCall) -> bool:
        """Whether positions are features of the layer itself, as where it mixes them: its bias has one element for each."""
        read = {v for i in range(call.first_op, call.end_op) for v in self.graph.op(i).inputs}
        return any(self.has_dim(v) for v in read if self.graph.dataflow.values[v].parameter)

    def _outermost_call(self, call: ModuleCall, value: int) -> ModuleCall:
        """The largest module around a tensor-parallel part that is given the same value and uses it for nothing else. Code in it that reads the
        value's sizes sees those of the gathered value."""
        users = self.graph.consumers.get(value, [])
        inside = [i for i in users if call.first_op <= i < call.end_op]
        around = [c for c in self.graph.input_calls(value) if c.first_op <= call.first_op and call.end_op <= c.end_op]
        return [c for c in (call, *around) if [i for i in users if c.first_op <= i < c.end_op] == inside][-1]

    def _is_this_dim(self, name: str) -> bool:
        """Whether a sharded dim of an already built policy is this region's logical dim."""
        sites = _sites_along(name, (*self.policy.reduce_sites, *self.policy.sequence_scatter_sites))
        return any(logical_dim_of(self.graph, self.policy, site) == self.logical_dim for site in sites)

    def has_dim(self, value: int) -> bool:
        return self.logical_dim in self.graph.value_dims[value]

    def restore_from_policy(self) -> None:
        """Set the scatters and gathers that are recorded in the policy."""
        for site in _sites_along(self.dim_name, (*self.policy.sequence_scatter_sites, *self.policy.sequence_gather_sites)):
            for call in self.graph.calls_by_module[site.module]:
                if site.at_output:
                    self.gathered_outputs.add(call.outputs[site.position])
                else:
                    (self.scatters if site in self.policy.sequence_scatter_sites else self.gathers)[call.inputs[site.position], call.first_op] = call

    def _is_sharded_at(self, value: int, index: int) -> bool:
        """Whether a rank holds a shard of the value's positions where operation `index` uses it: the innermost scatter or gather decides."""
        return self._is_sharded_in(value, lambda c: c.first_op <= index < c.end_op)

    def is_sharded_where_read(self, read: SizeRead) -> bool:
        """Whether the code that reads a size of a value has a shard of it."""
        return self._is_sharded_in(read.value, lambda c: is_read_in(read, c))

    def _is_sharded_in(self, value: int, is_around: Callable[[ModuleCall], bool]) -> bool:
        boundaries = [(c, True) for (v, _), c in self.scatters.items() if v == value]
        boundaries += [(c, False) for (v, _), c in self.gathers.items() if v == value]
        boundaries += [(c, False) for c in self.entry_calls.get(value, [])]
        around = [(c.end_op - c.first_op, sharded) for c, sharded in boundaries if is_around(c)]
        if around:
            return min(around)[1]
        call = self.producing_call(value) if value in self.gathered_outputs else None  # inside it the value is not gathered yet
        return value in self.sharded_values and (value not in self.gathered_outputs or (call is not None and is_around(call)))

    def producing_call(self, value: int) -> ModuleCall | None:
        """The smallest module call that produces a value and returns it."""
        op = self.graph.producer.get(value, -1)
        return min((c for c in self.graph.producer_calls(value) if c.first_op <= op < c.end_op), key=lambda c: c.end_op - c.first_op, default=None)

    def sharded_entries(self) -> list[tuple[int, ModuleCall]]:
        """Sharded values that a tensor-parallel part gathers at its input, and the calls of those parts."""
        return [(v, c) for v, calls in self.entry_calls.items() for c in calls if self._is_sharded_around(v, c)]

    def drop_needless_gathers(self) -> None:
        """Drop gathers of values that a later gather upstream has made replicated."""
        self.gathered_outputs &= self.sharded_values
        self.gathers = {key: call for key, call in self.gathers.items() if self._is_sharded_around(key[0], call)}

    def _is_sharded_around(self, value: int, call: ModuleCall) -> bool:
        """Whether a rank holds a shard of a value where a call takes it."""
        return self._is_sharded_in(value, lambda outer: _is_inside(call, outer))

    def propagate(self) -> None:
        """Propagate shards through all operations, with the scatters and gathers placed so far."""
        flow = self.graph.dataflow
        self.sharded_values: set[int] = set(self.reduced_outputs)
        self.dropout_modules: dict[str, int] = {}  # modules that multiply by random numbers → their output
        self.partial_parameters: dict[str, set[int]] = {}  # replicated parameter → operations that read it for this rank's positions
        self.needs_gather: dict[int, set[int]] = {}  # sharded value → operations that need it gathered
        self.needs_scatter: dict[int, set[int]] = {}  # replicated value → operations that need only this rank's positions
        calls = {c.first_op: c for c in sorted(flow.modules, key=lambda c: c.first_op - c.end_op) if len(c.inputs) == len(c.outputs) == 1}
        skip = 0
        for index, op in enumerate(flow.operations):
            call = calls.get(index)
            if index >= skip and call is not None and self._is_sharded_at(call.inputs[0], index) and _is_dropout_like(self.graph, call):
                self.sharded_values.add(call.outputs[0])
                self.dropout_modules[call.module] = call.outputs[0]
                skip = call.end_op
            if index >= skip:
                self._propagate_op(index, op)
        for value in self.sharded_values.intersection(flow.outputs) - self.gathered_outputs:
            self.needs_gather.setdefault(value, set())

    def _propagate_op(self, index: int, op: Operation) -> None:
        sharded = [v for v in op.inputs if self._is_sharded_at(v, index)]
        if not sharded:
            return
        parameters = [v for v in op.inputs if v in self.graph.parameter_of]
        if index in self.stop_ops or not self._is_position_wise(op) or any(map(self.has_dim, parameters)) or self._reads_for_all_positions(op):
            for value in sharded:
                self.needs_gather.setdefault(value, set()).add(index)
            return
        if op.name in ("bernoulli_", "native_dropout"):
            location = self.graph.describe_location(index)
            raise SequenceParallelError(f"the code of {location} draws random numbers itself ({op.name}), not through a module such as nn.Dropout")
        for value in op.inputs:
            if self.has_dim(value) and value not in sharded:
                self.needs_scatter.setdefault(value, set()).add(index)
        self.sharded_values.update(v for v in op.outputs if self.has_dim(v))
        for value in parameters:
            self.partial_parameters.setdefault(self.graph.parameter_of[value], set()).add(index)

    def _is_position_wise(self, op: Operation) -> bool:
        """Whether an operation treats all positions alike and touches no dim that tensor parallelism shards."""
        touched = [*op.inputs, *op.outputs]
        if self.logical_dim in (*op.contracted_dims, *op.indivisible_dims) or any(self.sharded_dims & self.graph.value_dims[v] for v in touched):
            return False
        return all(map(self.has_dim, op.outputs))

    def _reads_for_all_positions(self, op: Operation) -> bool:
        """Whether an operation reads a computed value that all positions share, such as a gate for each sample: each rank would have its positions'
        part of the value's gradient."""
        needs_grad = [v for v in op.inputs if self.graph.dataflow.values[v].needs_grad and v not in self.graph.parameter_of]
        return not all(map(self.has_dim, needs_grad))

    def position_layout(self, value: int) -> SequenceLayout:
        """Where the positions lie in a value."""
        flow = self.graph.dataflow
        dim, logical_dims = next((i, dims) for i, dims in enumerate(flow.values[value].logical_dims) if self.logical_dim in dims)
        at = logical_dims.index(self.logical_dim)
        outer, inner = (math.prod(flow.sizes[s] for s in dims) for dims in (logical_dims[:at], logical_dims[at + 1 :]))
        return SequenceLayout(self.dim_name, dim, inner, has_outer_dims=outer > 1)


def _is_inside(call: ModuleCall, outer: ModuleCall) -> bool:
    first, end = call.first_op, call.end_op
    return outer.first_op <= first and end <= outer.end_op and (outer.first_op, outer.end_op) != (first, end)


def is_read_in(read: SizeRead, call: ModuleCall) -> bool:
    """Whether code that runs in a module call, or in a module inside it, reads a size."""
    return call.first_op <= read.before_operation <= call.end_op and f"{read.module}.".startswith(f"{call.module}." if call.module else "")


def _sites_along(dim_name: str, sites: Iterable[CollectiveSite]) -> list[CollectiveSite]:
    return [site for site in sites if site.sequence_layout is not None and site.sequence_layout.logical_dim == dim_name]


def _is_dropout_like(graph: DataflowGraph, call: ModuleCall) -> bool:
    """Whether a module multiplies its input by random numbers of its own and does nothing else. Its output for an input of ones is then those
    numbers."""
    flow, (source,), (out,) = graph.dataflow, call.inputs, call.outputs
    if source == out or flow.values[source].logical_dims != flow.values[out].logical_dims:
        return False
    derived, draws = {source}, False  # values computed from the input; whether random numbers are drawn
    for op in flow.operations[call.first_op : call.end_op]:
        draws |= op.name in ("bernoulli_", "native_dropout", "arange") or op.name in _LIKE_OPS
        if derived.isdisjoint(op.inputs) or op.name in _LIKE_OPS:
            continue
        if sum(v in derived for v in op.inputs) > 1 or op.name not in _MASKING_OPS or any(v in graph.parameter_of for v in op.inputs):
            return False
        derived.update(op.outputs)
    return draws and out in derived


def logical_dim_of(graph: DataflowGraph, policy: TensorPolicy, site: CollectiveSite) -> int:
    """The logical dim of positions along which a collective scatters or gathers."""
    call, layout, sizes = graph.calls_by_module[site.module][0], site.sequence_layout, graph.dataflow.sizes
    assert layout is not None
    value = call.outputs[0] if site in policy.reduce_sites else call.inputs[site.position]
    size = next(s.size for s in policy.sharded_dims if s.name == layout.logical_dim)
    inner = 1
    for logical_dim in reversed(graph.dataflow.values[value].logical_dims[layout.dim]):
        if inner == layout.inner and sizes[logical_dim] == size:
            return logical_dim
        inner *= sizes[logical_dim]
    raise RequestError(f"plan: the sequence_layout of {site.module} puts its positions in dim {layout.dim}, and they are not there: plan again")
