"""The region of a model between its tensor-parallel parts in which each rank has some positions of every value (see [Note: sequence])."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.core.errors import RequestError
from meshwright.core.strand import ModuleCall, Operation
from meshwright.core.tensor import Along, Dealt, Meet, TensorPolicy
from meshwright.plan.reader import Reader

_SEQUENCE_DIM_NAME = "sequence"
_MASKING_OPS = frozenset(("mul", "mul_", "div", "div_", "where", "_to_copy", "clone", "native_dropout"))  # a product with what is no input
_LIKE_OPS = frozenset(("empty_like", "zeros_like", "ones_like", "rand_like", "full_like", "new_empty", "new_zeros", "new_ones"))


class SequenceParallelError(Exception):
    """Why ranks cannot share positions."""


@dataclass
class SequenceRegion:
    """Follows one logical dim of positions from the sums that begin the region to the sharded parts that end it."""

    dataflow_index: Reader
    policy: TensorPolicy
    logical_dim: int
    sharded_dims: frozenset[int]
    scatters: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # (value, where the call begins): whole outside, sharded inside
    gathers: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # the other way round
    gathered_outputs: set[int] = field(default_factory=set)  # gathered where they are made
    stop_ops: set[int] = field(default_factory=set)  # operations that could go on with some positions, but what they make is needed whole

    def __post_init__(self) -> None:
        flow = self.dataflow_index.flow
        self.dim_name = next((s.name for s in self.policy.strands if not s.cuts and self._is_this_dim(s)), "")
        taken = sum(not s.cuts for s in self.policy.strands)
        self.dim_name = self.dim_name or (f"{_SEQUENCE_DIM_NAME}.{taken}" if taken else _SEQUENCE_DIM_NAME)
        sums = {m.module for m in self.policy.sums if m.along is None or m.along.strand == self.dim_name}
        self.reduced_outputs = {c.outputs[0]: c for c in flow.modules if c.module in sums and self.has_dim(c.outputs[0])}
        self.entry_calls: dict[int, list[ModuleCall]] = {}
        self.moved_entries: dict[tuple[str, int], tuple[str, int]] = {}  # where a value entered before → where it enters now
        positions = {(m.module, m.position) for m in self.policy.enters}
        for call in flow.modules:
            for at, value in enumerate(call.inputs):
                if (call.module, at) in positions and self.has_dim(value):
                    outer = self._outermost_call(call, value)
                    self.moved_entries[call.module, at] = (outer.module, outer.inputs.index(value))
                    self.entry_calls.setdefault(value, []).append(outer)

    def _outermost_call(self, call: ModuleCall, value: int) -> ModuleCall:
        """The largest module around a cut part that is given the same value for nothing else: code in it that asks for the value's sizes
        is told those of the whole."""
        users = self.dataflow_index.consumers.get(value, [])
        mine = [i for i in users if call.first <= i < call.last]
        around = [c for c in self.dataflow_index.doors(value) if c.first <= call.first and call.last <= c.last]
        return [c for c in (call, *around) if [i for i in users if c.first <= i < c.last] == mine][-1]

    def _is_this_dim(self, strand: Dealt) -> bool:
        """Is it this one, in a policy that has been settled?"""
        marked = [m for m in (*self.policy.sums, *self.policy.deals) if m.along is not None and m.along.strand == strand.name]
        return any(logical_dim_of(self.dataflow_index, self.policy, m) == self.logical_dim for m in marked)

    def has_dim(self, value: int) -> bool:
        return self.logical_dim in self.dataflow_index.carried[value]

    def restore_from_policy(self) -> None:
        """What an earlier reading has settled, from the policy itself."""
        for meet in (m for m in (*self.policy.deals, *self.policy.collects) if m.along is not None and m.along.strand == self.dim_name):
            for call in self.dataflow_index.calls_of[meet.module]:
                if meet.at_output:
                    self.gathered_outputs.add(call.outputs[meet.position])
                else:
                    (self.scatters if meet in self.policy.deals else self.gathers)[call.inputs[meet.position], call.first] = call

    def _is_sharded_at(self, value: int, index: int) -> bool:
        """Does a rank have some positions of the value where operation `index` uses it? The innermost door on the way decides."""
        return self.is_sharded_within(value, index, index + 1)

    def is_sharded_within(self, value: int, first: int, last: int) -> bool:
        doors = [(c, True) for (v, _), c in self.scatters.items() if v == value]
        doors += [(c, False) for (v, _), c in self.gathers.items() if v == value]
        doors += [(c, False) for c in self.entry_calls.get(value, [])]
        inside = [(c.last - c.first, shared) for c, shared in doors if c.first <= first and last <= c.last and (c.first, c.last) != (first, last)]
        if inside:
            return min(inside)[1]
        return value in self.sharded_values and value not in self.gathered_outputs

    def sharded_entries(self) -> list[tuple[int, ModuleCall]]:
        """Values that come sharded to a tensor-parallel part, which gathers them, and the calls of those parts."""
        every = ((v, c) for v, calls in self.entry_calls.items() for c in calls)
        return [(v, c) for v, c in every if self.is_sharded_within(v, c.first, c.last)]

    def propagate(self) -> None:
        """Through all operations, with the scatters and gathers that are placed so far."""
        flow = self.dataflow_index.flow
        self.sharded_values: set[int] = set(self.reduced_outputs)
        self.dropout_modules: dict[str, int] = {}  # modules that multiply by random numbers, and what they give
        self.partial_parameters: dict[str, None] = {}
        self.needs_gather: dict[int, set[int]] = {}  # sharded values, and operations that need them whole
        self.needs_scatter: dict[int, set[int]] = {}  # whole values, and operations that need their positions alone
        calls = {c.first: c for c in sorted(flow.modules, key=lambda c: c.first - c.last) if len(c.inputs) == len(c.outputs) == 1}
        skip = 0
        for index, op in enumerate(flow.operations):
            call = calls.get(index)
            if index >= skip and call is not None and self._is_sharded_at(call.inputs[0], index) and _is_dropout_like(self.dataflow_index, call):
                self.sharded_values.add(call.outputs[0])
                self.dropout_modules[call.module] = call.outputs[0]
                skip = call.last
            if index >= skip:
                self._propagate_op(index, op)
        for value in self.sharded_values.intersection(flow.outputs) - self.gathered_outputs:
            self.needs_gather.setdefault(value, set())

    def _propagate_op(self, index: int, op: Operation) -> None:
        mine = [v for v in op.inputs if self._is_sharded_at(v, index)]
        if not mine:
            return
        held = [self.dataflow_index.origin[v] for v in op.inputs if v in self.dataflow_index.origin]
        if index in self.stop_ops or not self._is_position_wise(op) or any(self.has_dim(v) for v in op.inputs if v in self.dataflow_index.origin):
            for value in mine:
                self.needs_gather.setdefault(value, set()).add(index)
            return
        if op.name in ("bernoulli_", "native_dropout"):
            raise SequenceParallelError(
                f"the code of {self.dataflow_index.place(index)} draws random numbers itself ({op.name}), not through a module such as nn.Dropout"
            )
        for value in op.inputs:
            if self.has_dim(value) and value not in mine:
                self.needs_scatter.setdefault(value, set()).add(index)
        self.sharded_values.update(v for v in op.outputs if self.has_dim(v))
        self.partial_parameters.update(dict.fromkeys(held))

    def _is_position_wise(self, op: Operation) -> bool:
        """Does an operation treat positions alike, outside of what is cut?"""
        touched = [*op.inputs, *op.outputs]
        if self.logical_dim in (*op.sums, *op.binds) or any(self.sharded_dims & self.dataflow_index.carried[v] for v in touched):
            return False
        return all(map(self.has_dim, op.outputs))

    def position_layout(self, value: int) -> Along:
        """Where positions lie in a value."""
        strands = self.dataflow_index.flow.values[value].strands
        dim = next(d for d, found in enumerate(strands) if self.logical_dim in found)
        at = strands[dim].index(self.logical_dim)
        sizes = self.dataflow_index.flow.sizes
        return Along(
            self.dim_name, dim, math.prod(sizes[s] for s in strands[dim][at + 1 :]), mixed=math.prod(sizes[s] for s in strands[dim][:at]) > 1
        )


def _is_dropout_like(reader: Reader, call: ModuleCall) -> bool:
    """Does a module multiply what it is given by random numbers of its own, and do nothing else? Then its output for ones is those."""
    flow, (given,), (made,) = reader.flow, call.inputs, call.outputs
    if given == made or flow.values[given].strands != flow.values[made].strands:
        return False
    on_the_way = {given}
    draws = False
    for op in flow.operations[call.first : call.last]:
        met = on_the_way.intersection(op.inputs)
        draws |= op.name in ("bernoulli_", "native_dropout", "arange") or op.name in _LIKE_OPS
        if not met or op.name in _LIKE_OPS:
            continue
        if len([v for v in op.inputs if v in on_the_way]) > 1 or op.name not in _MASKING_OPS or any(v in reader.origin for v in op.inputs):
            return False
        on_the_way.update(op.outputs)
    return draws and made in on_the_way


def logical_dim_of(reader: Reader, policy: TensorPolicy, meet: Meet) -> int:
    """The logical dim of the positions that a collective is along."""
    call = reader.calls_of[meet.module][0]
    assert meet.along is not None
    value = call.outputs[0] if meet in policy.sums else call.inputs[meet.position]
    names = {s.name: s.size for s in policy.strands}
    dim = reader.flow.values[value].strands[meet.along.dim]
    inner = 1
    for strand in reversed(dim):
        if inner == meet.along.inner and reader.flow.sizes[strand] == names[meet.along.strand]:
            return strand
        inner *= reader.flow.sizes[strand]
    raise RequestError(f"plan: tensor.sums says that positions lie in dim {meet.along.dim} of {meet.module}'s output, and they do not: plan again")
