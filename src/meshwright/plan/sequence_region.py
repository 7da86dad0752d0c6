"""Sequence parallelism: the region of a model between its tensor-parallel parts in which each rank holds a shard of the positions of every value
(see [Note: sequence])."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.core.dataflow import ModuleCall, Operation
from meshwright.core.errors import RequestError
from meshwright.core.tensor_policy import CollectiveSite, SequenceLayout, ShardedDim, TensorPolicy
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
    scatters: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # (value, first_op of the call): whole outside the call, sharded inside
    gathers: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # (value, first_op of the call): sharded outside the call, whole inside
    gathered_outputs: set[int] = field(default_factory=set)  # values gathered at the output of the module that makes them
    stop_ops: set[int] = field(default_factory=set)  # operations that could work on a shard of the positions, but whose output is needed whole

    def __post_init__(self) -> None:
        flow = self.graph.dataflow
        self.dim_name = next((s.name for s in self.policy.sharded_dims if not s.parameter_shards and self._is_this_dim(s)), "")
        taken = sum(not s.parameter_shards for s in self.policy.sharded_dims)
        self.dim_name = self.dim_name or (f"{_SEQUENCE_DIM_NAME}.{taken}" if taken else _SEQUENCE_DIM_NAME)
        sums = {m.module for m in self.policy.reduce_sites if m.sequence_layout is None or m.sequence_layout.logical_dim == self.dim_name}
        self.reduced_outputs = {c.outputs[0]: c for c in flow.modules if c.module in sums and self.has_dim(c.outputs[0])}
        self.entry_calls: dict[int, list[ModuleCall]] = {}
        self.moved_entries: dict[tuple[str, int], tuple[str, int]] = {}  # (module, input) of a copy site → of the outermost call around it
        positions = {(m.module, m.position) for m in self.policy.copy_sites}
        for call in flow.modules:
            for at, value in enumerate(call.inputs):
                if (call.module, at) in positions and self.has_dim(value):
                    outer = self._outermost_call(call, value)
                    self.moved_entries[call.module, at] = (outer.module, outer.inputs.index(value))
                    self.entry_calls.setdefault(value, []).append(outer)

    def _outermost_call(self, call: ModuleCall, value: int) -> ModuleCall:
        """The largest module around a tensor-parallel part that is given the same value and uses it for nothing else. Code in it that reads the
        value's sizes sees those of the gathered value."""
        users = self.graph.consumers.get(value, [])
        mine = [i for i in users if call.first_op <= i < call.end_op]
        around = [c for c in self.graph.input_calls(value) if c.first_op <= call.first_op and call.end_op <= c.end_op]
        return [c for c in (call, *around) if [i for i in users if c.first_op <= i < c.end_op] == mine][-1]

    def _is_this_dim(self, strand: ShardedDim) -> bool:
        """Whether a sharded dim of an already built policy is this region's logical dim."""
        marked = [
            m
            for m in (*self.policy.reduce_sites, *self.policy.sequence_scatter_sites)
            if m.sequence_layout is not None and m.sequence_layout.logical_dim == strand.name
        ]
        return any(logical_dim_of(self.graph, self.policy, m) == self.logical_dim for m in marked)

    def has_dim(self, value: int) -> bool:
        return self.logical_dim in self.graph.value_dims[value]

    def restore_from_policy(self) -> None:
        """Set the scatters and gathers that are recorded in the policy."""
        for site in (
            m
            for m in (*self.policy.sequence_scatter_sites, *self.policy.sequence_gather_sites)
            if m.sequence_layout is not None and m.sequence_layout.logical_dim == self.dim_name
        ):
            for call in self.graph.calls_by_module[site.module]:
                if site.at_output:
                    self.gathered_outputs.add(call.outputs[site.position])
                else:
                    (self.scatters if site in self.policy.sequence_scatter_sites else self.gathers)[call.inputs[site.position], call.first_op] = call

    def _is_sharded_at(self, value: int, index: int) -> bool:
        """Whether a rank holds a shard of the value's positions where operation `index` uses it. The innermost enclosing scatter or gather
        decides."""
        return self.is_sharded_within(value, index, index + 1)

    def is_sharded_within(self, value: int, first: int, last: int) -> bool:
        boundaries = [(c, True) for (v, _), c in self.scatters.items() if v == value]
        boundaries += [(c, False) for (v, _), c in self.gathers.items() if v == value]
        boundaries += [(c, False) for c in self.entry_calls.get(value, [])]
        inside = [
            (c.end_op - c.first_op, shared)
            for c, shared in boundaries
            if c.first_op <= first and last <= c.end_op and (c.first_op, c.end_op) != (first, last)
        ]
        if inside:
            return min(inside)[1]
        return value in self.sharded_values and value not in self.gathered_outputs

    def sharded_entries(self) -> list[tuple[int, ModuleCall]]:
        """Sharded values that a tensor-parallel part gathers at its input, and the calls of those parts."""
        every = ((v, c) for v, calls in self.entry_calls.items() for c in calls)
        return [(v, c) for v, c in every if self.is_sharded_within(v, c.first_op, c.end_op)]

    def propagate(self) -> None:
        """Propagate shards through all operations, with the scatters and gathers placed so far."""
        flow = self.graph.dataflow
        self.sharded_values: set[int] = set(self.reduced_outputs)
        self.dropout_modules: dict[str, int] = {}  # modules that multiply by random numbers → their output
        self.partial_parameters: dict[str, None] = {}
        self.needs_gather: dict[int, set[int]] = {}  # sharded value → operations that need it whole
        self.needs_scatter: dict[int, set[int]] = {}  # whole value → operations that need only this rank's positions
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
        mine = [v for v in op.inputs if self._is_sharded_at(v, index)]
        if not mine:
            return
        held = [self.graph.parameter_of[v] for v in op.inputs if v in self.graph.parameter_of]
        if index in self.stop_ops or not self._is_position_wise(op) or any(self.has_dim(v) for v in op.inputs if v in self.graph.parameter_of):
            for value in mine:
                self.needs_gather.setdefault(value, set()).add(index)
            return
        if op.name in ("bernoulli_", "native_dropout"):
            raise SequenceParallelError(
                f"the code of {self.graph.describe_location(index)} draws random numbers itself ({op.name}), not through a module such as nn.Dropout"
            )
        for value in op.inputs:
            if self.has_dim(value) and value not in mine:
                self.needs_scatter.setdefault(value, set()).add(index)
        self.sharded_values.update(v for v in op.outputs if self.has_dim(v))
        self.partial_parameters.update(dict.fromkeys(held))

    def _is_position_wise(self, op: Operation) -> bool:
        """Whether an operation treats all positions alike and touches no dim that tensor parallelism shards."""
        touched = [*op.inputs, *op.outputs]
        if self.logical_dim in (*op.contracted_dims, *op.indivisible_dims) or any(self.sharded_dims & self.graph.value_dims[v] for v in touched):
            return False
        return all(map(self.has_dim, op.outputs))

    def position_layout(self, value: int) -> SequenceLayout:
        """Where the positions lie in a value."""
        logical_dims = self.graph.dataflow.values[value].logical_dims
        dim = next(d for d, found in enumerate(logical_dims) if self.logical_dim in found)
        at = logical_dims[dim].index(self.logical_dim)
        sizes = self.graph.dataflow.sizes
        return SequenceLayout(
            self.dim_name,
            dim,
            math.prod(sizes[s] for s in logical_dims[dim][at + 1 :]),
            has_outer_dims=math.prod(sizes[s] for s in logical_dims[dim][:at]) > 1,
        )


def _is_dropout_like(reader: DataflowGraph, call: ModuleCall) -> bool:
    """Whether a module multiplies its input by random numbers of its own and does nothing else. Its output for an input of ones is then those
    numbers."""
    flow, (given,), (made,) = reader.dataflow, call.inputs, call.outputs
    if given == made or flow.values[given].logical_dims != flow.values[made].logical_dims:
        return False
    on_the_way = {given}
    draws = False
    for op in flow.operations[call.first_op : call.end_op]:
        met = on_the_way.intersection(op.inputs)
        draws |= op.name in ("bernoulli_", "native_dropout", "arange") or op.name in _LIKE_OPS
        if not met or op.name in _LIKE_OPS:
            continue
        if len([v for v in op.inputs if v in on_the_way]) > 1 or op.name not in _MASKING_OPS or any(v in reader.parameter_of for v in op.inputs):
            return False
        on_the_way.update(op.outputs)
    return draws and made in on_the_way


def logical_dim_of(reader: DataflowGraph, policy: TensorPolicy, meet: CollectiveSite) -> int:
    """The logical dim of positions along which a collective scatters or gathers."""
    call = reader.calls_by_module[meet.module][0]
    assert meet.sequence_layout is not None
    value = call.outputs[0] if meet in policy.reduce_sites else call.inputs[meet.position]
    names = {s.name: s.size for s in policy.sharded_dims}
    dim = reader.dataflow.values[value].logical_dims[meet.sequence_layout.dim]
    inner = 1
    for logical_dim in reversed(dim):
        if inner == meet.sequence_layout.inner and reader.dataflow.sizes[logical_dim] == names[meet.sequence_layout.logical_dim]:
            return logical_dim
        inner *= reader.dataflow.sizes[logical_dim]
    raise RequestError(
        f"plan: tensor.sums says that positions lie in dim {meet.sequence_layout.dim} of {meet.module}'s output, and they do not: plan again"
    )
