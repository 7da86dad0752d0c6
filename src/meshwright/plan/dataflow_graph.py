"""Indexes a model's dataflow for the planners: which parameters and operations have a logical dim, what uses a value, where partial sums are
completed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.core.context_policy import LOSS_MODULE
from meshwright.core.dataflow import Dataflow, ModuleCall, Operation
from meshwright.core.tensor_policy import ParameterShard, SizeRewrite
from meshwright.plan.size_arguments import SLICE_OPS, size_arguments

# Linear operations may be applied to a partial sum before it is reduced, since they commute with addition.
_VIEW_OPS = ("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "clone", "_to_copy", "expand", "squeeze", "unsqueeze", "unbind", "split")
_LINEAR_OPS = frozenset((*_VIEW_OPS, "mul", "mul_", "div", "div_", "neg", "sum", "mean", "slice", "select", "index", "index_select"))
_ADD_OPS = frozenset(("add", "add_", "sub", "sub_", "index_add", "index_add_", "scatter_add", "scatter_add_"))
_ZERO_OPS = frozenset(("zeros", "zeros_like", "new_zeros"))
# Operations whose new dims may be of any length: the sizes in the model's code are rewritten, and all elements are alike.
_FILL_OPS = frozenset((*_ZERO_OPS, "empty", "empty_like", "new_empty", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "expand"))
_REPEAT_FUNCTIONS = ("repeat", "tile", "repeat_interleave")  # take how often, not a size


@dataclass(frozen=True)
class ParameterValue:
    """A trainable parameter and its value in the dataflow."""

    name: str
    value: int
    numel: int


class DataflowGraph:
    """A dataflow with lookup tables for planners. `layers` are the modules between which a pipeline may place
    stage boundaries, if any."""

    @classmethod
    def of(cls, dataflow: Dataflow, layers: Collection[str] = ()) -> DataflowGraph:
        """The shared instance for this dataflow."""
        return dataflow.memo.get_or_compute("reader", (), tuple(layers), lambda: cls(dataflow, layers))

    def __init__(self, dataflow: Dataflow, layers: Collection[str] = ()) -> None:
        self.dataflow = dataflow
        self._layers = frozenset(name for name in layers if not any(other.startswith(f"{name}.") for other in layers))
        self.parameters = [ParameterValue(v.parameter, i, math.prod(v.shape)) for i, v in enumerate(dataflow.values) if v.parameter and v.needs_grad]
        self.parameter_position = {parameter.value: i for i, parameter in enumerate(self.parameters)}
        self.value_dims = [frozenset(s for dim in v.logical_dims for s in dim) for v in dataflow.values]
        self.operation_dims = [frozenset().union(*(self.value_dims[v] for v in (*op.inputs, *op.outputs))) for op in dataflow.operations]
        self.consumers: dict[int, list[int]] = {}
        self.producer: dict[int, int] = {}
        for index, op in enumerate(dataflow.operations):
            for value in op.inputs:
                self.consumers.setdefault(value, []).append(index)
            for value in op.outputs:
                self.producer.setdefault(value, index)
        # Of calls with the same operations the inner one ended first: it comes last here.
        largest_first = sorted(enumerate(dataflow.modules), key=lambda item: (item[1].first_op - item[1].end_op, -item[0]))
        self.innermost_call = {op: call for _, call in largest_first for op in range(call.first_op, call.end_op)}
        self.calls_by_module: dict[str, list[ModuleCall]] = {}  # by module name
        self.enclosing_calls: list[list[ModuleCall]] = [[] for _ in dataflow.operations]  # by operation
        self._consumer_calls: dict[int, list[ModuleCall]] = {}  # by value: the calls that take it as an input
        self._producer_calls: dict[int, list[ModuleCall]] = {}  # by value: the calls that return it
        for call in dataflow.modules:
            self.calls_by_module.setdefault(call.module, []).append(call)
            for index in range(call.first_op, call.end_op):
                self.enclosing_calls[index].append(call)
            for calls, values in ((self._consumer_calls, call.inputs), (self._producer_calls, call.outputs)):
                for value in dict.fromkeys(values):
                    calls.setdefault(value, []).append(call)
        self.input_dims = frozenset().union(*(self.value_dims[v] for v in dataflow.inputs))
        self._parameter_shards = self._index_parameter_shards()
        self.constraining_ops: dict[int, list[int]] = {}  # logical dim → operations that contract it, need it whole or slice it
        for index, op in enumerate(dataflow.operations):
            sliced = self.value_dims[op.inputs[0]] if op.name in SLICE_OPS and op.call_index < 0 and op.inputs else ()
            for logical_dim in {*op.contracted_dims, *op.indivisible_dims, *sliced}:
                self.constraining_ops.setdefault(logical_dim, []).append(index)
        self.grouped_convolutions: dict[int, list[int]] = {}  # logical dim → convolutions whose groups are its indices, or in it
        for index, op in enumerate(dataflow.operations):
            if op.name == "convolution" and op.int_args[0] > 1:
                for logical_dim in self.value_dims[op.outputs[0]] & self.value_dims[op.inputs[1]]:
                    self.grouped_convolutions.setdefault(logical_dim, []).append(index)
        self.created_by: dict[int, Operation] = {}  # logical dim → an operation that makes all of it, whatever its inputs are
        for op in dataflow.operations:
            before = frozenset().union(*(self.value_dims[v] for v in op.inputs))
            fills = op.name in _FILL_OPS and op.function not in _REPEAT_FUNCTIONS
            for logical_dim in frozenset().union(*(self.value_dims[v] for v in op.outputs)) - before if not fills else ():
                self.created_by.setdefault(logical_dim, op)
        self.total_numel = sum(w.numel for w in self.parameters)
        self.parameter_of: dict[int, str] = {w.value: w.name for w in self.parameters}  # parameters and views of them → the parameter's name
        for op in dataflow.operations:
            if len(op.inputs) == 1 and op.inputs[0] in self.parameter_of:
                self.parameter_of.update(dict.fromkeys(op.outputs, self.parameter_of[op.inputs[0]]))

    def parameter_reads(self, name: str) -> set[int]:
        """The operations that read a parameter, or a view of it, and have a gradient."""
        return self._reads_by_parameter.get(name, set())

    @cached_property
    def _reads_by_parameter(self) -> dict[str, set[int]]:
        reads: dict[str, set[int]] = {}
        for value, name in self.parameter_of.items():
            for index in self.consumers.get(value, []):
                if any(self.dataflow.values[v].needs_grad and v not in self.parameter_of for v in self.op(index).outputs):
                    reads.setdefault(name, set()).add(index)
        return reads

    def op(self, index: int) -> Operation:
        return self.dataflow.operations[index]

    def input_calls(self, value: int) -> list[ModuleCall]:
        """Module calls that take a value as an input, smallest first; not those that return it too, since what is done at their input would reach
        its uses after them. Where `layers` may be on several pipeline stages, only calls inside one of them: a stage may run only the end of a
        larger module, on a value that it received inside the module."""
        calls = (m for m in self._consumer_calls.get(value, ()) if value not in m.outputs and (not self._layers or self._in_layer(m.module)))
        return sorted(calls, key=lambda m: m.end_op - m.first_op)

    def consumer_calls(self, value: int) -> Sequence[ModuleCall]:
        """All module calls that take a value as an input."""
        return self._consumer_calls.get(value, ())

    def producer_calls(self, value: int) -> Sequence[ModuleCall]:
        """The module calls that return a value."""
        return self._producer_calls.get(value, ())

    def _in_layer(self, module: str) -> bool:
        """Whether a module is one of the layers, or inside one."""
        while module and module not in self._layers:
            module = module.rpartition(".")[0]
        return module in self._layers

    def parameter_shards(self, logical_dim: int) -> list[ParameterShard]:
        """The parameters and buffers that have a logical dim."""
        return self._parameter_shards.get(logical_dim, [])

    def _index_parameter_shards(self) -> dict[int, list[ParameterShard]]:
        shards: dict[int, list[ParameterShard]] = {}
        for value in self.dataflow.values:
            for dim, logical_dims in enumerate(value.logical_dims if value.parameter else ()):
                for i, logical_dim in enumerate(logical_dims):
                    shard = ParameterShard(value.parameter, dim, *self.outer_inner(logical_dims, i))
                    shards.setdefault(logical_dim, []).append(shard)
        return shards

    def outer_inner(self, logical_dims: Sequence[int], i: int) -> tuple[int, int]:
        """The sizes of a tensor dim's logical dims before and after the i-th, multiplied."""
        sizes = [self.dataflow.sizes[s] for s in logical_dims]
        return math.prod(sizes[:i]), math.prod(sizes[i + 1 :])

    def find_reduction_site(self, index: int, logical_dim: int) -> tuple[ModuleCall, frozenset[int]] | None:
        """Where the partial sums of one matmul are reduced: (the module at whose output, the partial values before it), or None. Linear and conv
        layers add their bias after the reduction; any other module may apply to partial sums only what commutes with addition."""
        op, call = self.op(index), self.innermost_call.get(index)
        if call is None or sum(logical_dim in self.value_dims[v] for v in op.inputs) < 2:
            return None
        if call.kind in ("linear", "conv"):
            return call, frozenset()
        if any(self.dataflow.values[v].floating and logical_dim not in self.value_dims[v] for v in op.inputs):
            return None  # the product adds a bias, which every rank would add
        partial = set(op.outputs)
        for i, later in enumerate(self.dataflow.operations[index + 1 :], index + 1):
            inputs = partial.intersection(later.inputs)
            if inputs and i >= call.end_op:
                if not inputs.issubset(call.outputs):
                    return None
            elif inputs:
                if not self._commutes(later, partial):
                    return None
                partial.update(later.outputs)
        return (call, frozenset(partial)) if partial.intersection(call.outputs) else None

    def _commutes(self, op: Operation, partial: set[int]) -> bool:
        """Whether applying an operation to partial sums and then adding gives the same as adding first."""
        positions = [i for i, v in enumerate(op.inputs) if v in partial]
        if op.name in _LINEAR_OPS:
            return len(positions) == 1 and (positions == [0] or op.name in ("mul", "mul_"))  # a square, or a partial sum as divisor, does not commute
        if op.name not in _ADD_OPS or len(op.inputs) == 1:  # every rank would add a number that is no tensor
            return False
        others = [v for v in op.inputs if v not in partial and self.dataflow.values[v].floating]
        return all(v in self.producer and self.op(self.producer[v]).name in _ZERO_OPS for v in others)

    def enclosing_module(self, index: int, modules: Iterable[str] | None = None) -> str:
        """The innermost module (among `modules`, if given) whose code runs an operation; LOSS_MODULE outside of all."""
        if modules is None:
            call = self.innermost_call.get(index)
            return LOSS_MODULE if call is None else call.module
        around = [c for c in self.enclosing_calls[index] if c.module in modules]
        return min(around, key=lambda c: c.end_op - c.first_op).module if around else LOSS_MODULE

    def describe_location(self, index: int) -> str:
        """The enclosing module, worded for messages."""
        module = self.enclosing_module(index)
        return "the loss" if module == LOSS_MODULE else module or "the model"

    def size_rewrites(
        self, dim_names: Mapping[int, str], whole_values: Collection[int] = ()
    ) -> tuple[list[SizeRewrite], list[SizeRewrite], list[SizeRewrite]]:
        """Sizes in the model's code that count one of the logical dims in `dim_names`, except for `whole_values`; those of them that count
        something else too; and those that slice a logical dim at an index that does not divide."""
        rewrites: dict[SizeRewrite, None] = {}
        unchanged: set[tuple[str, str, int, int, int]] = set()
        uneven = []
        for op in (o for o in self.dataflow.operations if o.call_index >= 0):
            call, output = self.dataflow.sized_calls[op.call_index], self.dataflow.values[op.outputs[0]]
            for position, size, dim, length in size_arguments(self.dataflow, op):
                logical_dim = next((s for s in output.logical_dims[dim] if s in dim_names and op.outputs[0] not in whole_values), None)
                key = (call.module, call.function, len(call.sizes), position, size)
                if logical_dim is None:
                    unchanged.add(key)
                    continue
                rewrite = SizeRewrite(*key, dim_names[logical_dim], call.dim, length)
                uneven += [rewrite] if length and size % output.shape[dim] else []
                rewrites[rewrite] = None
        ambiguous = [r for r in rewrites if (r.module, r.function, r.num_sizes, r.position, r.original_size) in unchanged]
        return list(rewrites), ambiguous, uneven
