"""A model's dataflow with the questions that planners ask of it: who carries a strand, who uses a value, where partial sums are completed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.context_policy import LOSS_MODULE
from meshwright.core.dataflow import Dataflow, ModuleCall, Operation
from meshwright.core.tensor_policy import ParameterShard, SizeRewrite
from meshwright.plan.size_arguments import SLICE_OPS, size_arguments

# What may happen to a partial sum before it is completed: a sum of results is the result of the sum.
_VIEW_OPS = ("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "clone", "_to_copy", "expand", "squeeze", "unsqueeze", "unbind", "split")
_LINEAR_OPS = frozenset((*_VIEW_OPS, "mul", "mul_", "div", "div_", "neg", "sum", "mean", "slice", "select", "index", "index_select"))
_ADD_OPS = frozenset(("add", "add_", "sub", "sub_", "index_add", "index_add_", "scatter_add", "scatter_add_"))
_ZERO_OPS = frozenset(("zeros", "zeros_like", "new_zeros"))


@dataclass(frozen=True)
class ParameterValue:
    """A parameter and the strands of its dims."""

    name: str
    value: int
    numel: int


class DataflowIndex:
    """A flow with the questions that choosing asks of it."""

    @classmethod
    def of(cls, dataflow: Dataflow, layers: Collection[str] = ()) -> DataflowIndex:
        """The one for this flow, which many ask."""
        return dataflow.memo.get_or_compute("reader", (), tuple(layers), lambda: cls(dataflow, layers))

    def __init__(self, dataflow: Dataflow, layers: Collection[str] = ()) -> None:
        self.dataflow = dataflow
        self._layers = frozenset(name for name in layers if not any(other.startswith(f"{name}.") for other in layers))
        self.parameters = [ParameterValue(v.parameter, i, math.prod(v.shape)) for i, v in enumerate(dataflow.values) if v.parameter and v.needs_grad]
        self.parameter_position = {weight.value: at for at, weight in enumerate(self.parameters)}
        self.value_dims = [frozenset(s for dim in v.logical_dims for s in dim) for v in dataflow.values]
        self.operation_dims = [
            frozenset().union(*(self.value_dims[v] for v in (*op.inputs, *op.outputs))) for op in dataflow.operations
        ]  # strands, by operation
        self.consumers: dict[int, list[int]] = {}
        self.producer: dict[int, int] = {}
        for index, op in enumerate(dataflow.operations):
            for value in op.inputs:
                self.consumers.setdefault(value, []).append(index)
            for value in op.outputs:
                self.producer.setdefault(value, index)
        self.innermost_call = {
            op: call for call in sorted(dataflow.modules, key=lambda m: m.first_op - m.end_op) for op in range(call.first_op, call.end_op)
        }
        self.calls_by_module: dict[str, list[ModuleCall]] = {}  # by the module's name
        self.enclosing_calls: list[list[ModuleCall]] = [[] for _ in dataflow.operations]  # by operation
        self._consumer_calls: dict[int, list[ModuleCall]] = {}  # by value: the calls that are given it
        self._producer_calls: dict[int, list[ModuleCall]] = {}  # and those that give it
        for call in dataflow.modules:
            self.calls_by_module.setdefault(call.module, []).append(call)
            for index in range(call.first_op, call.end_op):
                self.enclosing_calls[index].append(call)
            for calls, values in ((self._consumer_calls, call.inputs), (self._producer_calls, call.outputs)):
                for value in dict.fromkeys(values):
                    calls.setdefault(value, []).append(call)
        self.input_dims = frozenset().union(*(self.value_dims[v] for v in dataflow.inputs))
        self._parameter_shards = self._index_parameter_shards()
        self.constraining_ops: dict[int, list[int]] = {}  # strand → operations that sum over it, need it whole or slice it
        for index, op in enumerate(dataflow.operations):
            sliced = self.value_dims[op.inputs[0]] if op.name in SLICE_OPS and op.call_index < 0 and op.inputs else ()
            for logical_dim in {*op.contracted_dims, *op.indivisible_dims, *sliced}:
                self.constraining_ops.setdefault(logical_dim, []).append(index)
        self.total_numel = sum(w.numel for w in self.parameters)
        self.parameter_of: dict[int, str] = {w.value: w.name for w in self.parameters}  # values that are a parameter, or a view of one
        for op in dataflow.operations:
            if len(op.inputs) == 1 and op.inputs[0] in self.parameter_of:
                self.parameter_of.update(dict.fromkeys(op.outputs, self.parameter_of[op.inputs[0]]))

    def op(self, index: int) -> Operation:
        return self.dataflow.operations[index]

    def input_calls(self, value: int) -> list[ModuleCall]:
        """The modules that are given a value, smallest first. Where `layers` may lie on several pipeline stages, those inside one of
        them: of a larger module a stage may run the end alone, on a value that it has received behind the module's door."""
        kept = (m for m in self._consumer_calls.get(value, ()) if not self._layers or self._in_layer(m.module))
        return sorted(kept, key=lambda m: m.end_op - m.first_op)

    def consumer_calls(self, value: int) -> Sequence[ModuleCall]:
        """All the modules that are given a value."""
        return self._consumer_calls.get(value, ())

    def producer_calls(self, value: int) -> Sequence[ModuleCall]:
        """The modules that give a value out."""
        return self._producer_calls.get(value, ())

    def _in_layer(self, module: str) -> bool:
        """Whether it is one of the layers, or inside one."""
        while module and module not in self._layers:
            module = module.rpartition(".")[0]
        return module in self._layers

    def parameter_shards(self, logical_dim: int) -> list[ParameterShard]:
        """The parameters and buffers that carry a strand."""
        return self._parameter_shards.get(logical_dim, [])

    def _index_parameter_shards(self) -> dict[int, list[ParameterShard]]:
        found: dict[int, list[ParameterShard]] = {}
        for value in self.dataflow.values:
            if value.parameter:
                for dim, logical_dims in enumerate(value.logical_dims):
                    for at, logical_dim in enumerate(logical_dims):
                        cut = ParameterShard(value.parameter, dim, self._dims_length(logical_dims[:at]), self._dims_length(logical_dims[at + 1 :]))
                        found.setdefault(logical_dim, []).append(cut)
        return found

    def _dims_length(self, logical_dims: Iterable[int]) -> int:
        return math.prod(self.dataflow.sizes[s] for s in logical_dims)

    def find_reduction_site(self, index: int, logical_dim: int) -> tuple[ModuleCall, frozenset[int]] | None:
        """Where the partial sums of one product are completed: the module at whose output, and the values on the way that are partial.
        Layers add their bias afterwards; any other module may only do to partial sums what commutes with adding them up."""
        op, call = self.op(index), self.innermost_call.get(index)
        if call is None or sum(logical_dim in self.value_dims[v] for v in op.inputs) < 2:
            return None
        if call.kind in ("linear", "conv"):
            return call, frozenset()
        partial = set(op.outputs)
        for later in range(index + 1, len(self.dataflow.operations)):
            then = self.op(later)
            met = partial.intersection(then.inputs)
            if not met or later >= call.end_op:
                if met and not met.issubset(call.outputs):
                    return None
                continue
            if not self._commutes(then, partial):
                return None
            partial.update(then.outputs)
        return (call, frozenset(partial)) if partial.intersection(call.outputs) else None

    def _commutes(self, op: Operation, partial: set[int]) -> bool:
        """Whether doing it to partial sums and adding up gives the same as adding up first."""
        places = [i for i, v in enumerate(op.inputs) if v in partial]
        if op.name in _LINEAR_OPS:
            return len(places) == 1 and (places == [0] or op.name in ("mul", "mul_"))  # a square or a divisor does not
        started = [v for v in op.inputs if v not in partial and self.dataflow.values[v].floating]
        return op.name in _ADD_OPS and all(v in self.producer and self.op(self.producer[v]).name in _ZERO_OPS for v in started)

    def enclosing_module(self, index: int, modules: Iterable[str] | None = None) -> str:
        """The module (of some, if given) in whose code an operation is; what is in none is the loss's own."""
        if modules is None:
            call = self.innermost_call.get(index)
            return LOSS_MODULE if call is None else call.module
        around = [c for c in self.enclosing_calls[index] if c.module in modules]
        return min(around, key=lambda c: c.end_op - c.first_op).module if around else LOSS_MODULE

    def describe_location(self, index: int) -> str:
        """The same in words."""
        found = self.enclosing_module(index)
        return "the loss" if found == LOSS_MODULE else found or "the model"

    def size_rewrites(
        self, dim_names: Mapping[int, str], whole_values: Collection[int] = ()
    ) -> tuple[list[SizeRewrite], list[SizeRewrite], list[SizeRewrite]]:
        """Numbers in the model's code that count one of some strands, and not for values that stay whole; those of them that count other
        things too; and those that cut a strand at a place where it does not divide."""
        found: dict[SizeRewrite, None] = {}
        spared: set[tuple[str, str, int, int, int]] = set()
        uneven = []
        for op in (o for o in self.dataflow.operations if o.call_index >= 0):
            call, made = self.dataflow.sized_calls[op.call_index], self.dataflow.values[op.outputs[0]]
            for position, number, at, length in size_arguments(self.dataflow, op):
                logical_dim = next((s for s in made.logical_dims[at] if s in dim_names and op.outputs[0] not in whole_values), None)
                key = (call.module, call.function, len(call.sizes), position, number)
                if logical_dim is None:
                    spared.add(key)
                    continue
                rewrite = SizeRewrite(*key, dim_names[logical_dim], call.dim, length)
                uneven += [rewrite] if length and number % made.shape[at] else []
                found[rewrite] = None
        unclear = [r for r in found if (r.module, r.function, r.num_sizes, r.position, r.original_size) in spared]
        return list(found), unclear, uneven
