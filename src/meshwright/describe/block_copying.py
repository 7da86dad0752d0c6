"""Traces only the first two of a run of equal blocks; the others get copies of the second's trace entries, with their own parameters, values and
logical dims.

A block is copied only if its inputs have the shapes and logical dims of its representative's, and if the logical dims of the representative's outputs
also occur outside it. Then tracing it would record exactly the copy: a block shares logical dims with the rest of the model only through its inputs,
and all others are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.core.dataflow import ModuleCall, SizeRead
from meshwright.describe.dim_unification import LogicalDim, factors_of, unify
from meshwright.describe.layers import Layer, find_layers
from meshwright.describe.propagation_rules import TensorDims
from meshwright.describe.repeated_blocks import Forward, leaf_signature, repeated_blocks, replaced_forwards
from meshwright.describe.trace_records import DataflowTrace, ModuleFrame, TracedOp


class TraceWriter(Protocol):
    """The recorder that writes the trace."""

    trace: DataflowTrace
    frames: list[ModuleFrame]
    paused: bool

    def value_index(self, tensor: torch.Tensor) -> int: ...

    def bind_value(self, tensor: torch.Tensor, value: int) -> None: ...


@dataclass(frozen=True)
class _TracePosition:
    """Lengths of the trace's lists at one moment."""

    values: int
    ops: int
    modules: int
    calls: int

    @staticmethod
    def of(trace: DataflowTrace) -> _TracePosition:
        return _TracePosition(len(trace.values), len(trace.ops), len(trace.modules), len(trace.calls))


@dataclass
class _TracedBlock:
    """A traced representative: its inputs and outputs, and the range of its trace entries."""

    name: str
    signature: tuple[Any, ...]  # shapes, dtypes and requires_grad of its inputs
    inputs: list[int]
    outputs: list[Any]  # per leaf: (value index, tensor), or any other value
    spec: Any
    start: _TracePosition
    end: _TracePosition
    reads: set[SizeRead]
    last_saved_op: int
    parameters: dict[str, int]  # its parameters and buffers, by name relative to the block
    local_dims: set[int] | None = None  # logical dims that occur only inside it; computed on demand


def copy_repeated_blocks(model: nn.Module, writer: TraceWriter) -> AbstractContextManager[None]:
    """While active, blocks from the third of their kind on are copied."""
    values = {value.parameter: index for index, value in enumerate(writer.trace.values) if value.parameter}
    groups = [blocks for blocks in repeated_blocks(find_layers(model)) if _parameters_unshared(blocks, values)]
    return replaced_forwards(groups, partial(_copying_forward, writer, values))


def _parameters_unshared(blocks: Sequence[Layer], parameter_values: dict[str, int]) -> bool:
    """Whether no block shares a parameter: a tied one is recorded under its first name only."""
    return all(f"{b.name}.{name}" in parameter_values for b in blocks for name, _ in (*b.module.named_parameters(), *b.module.named_buffers()))


def _copying_forward(writer: TraceWriter, parameter_values: dict[str, int], layer: Layer, forward: Forward, traced: list[_TracedBlock]) -> Forward:
    prefix = f"{layer.name}."
    parameters = {name.removeprefix(prefix): index for name, index in parameter_values.items() if name.startswith(prefix)}

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        signature = leaf_signature(leaves)
        inputs = [writer.value_index(t) for t in leaves if torch.is_tensor(t)]
        if traced and _can_copy(writer.trace, traced[0], layer.name, signature, inputs, parameters):
            return _copy_block(writer, traced[0], layer.name, inputs, parameters)
        if traced:
            return forward(*args, **kwargs)
        # The representative: run it, and record which trace entries are its own.
        trace, start = writer.trace, _TracePosition.of(writer.trace)
        earlier_reads, trace.reads = trace.reads, set()
        try:
            output = forward(*args, **kwargs)
        finally:
            reads, trace.reads = trace.reads, earlier_reads | trace.reads
        leaves, spec = pytree.tree_flatten(output)
        outputs = [(writer.value_index(leaf), leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        end, last_saved_op = _TracePosition.of(trace), writer.frames[-1].last_saved_op
        traced.append(_TracedBlock(layer.name, signature, inputs, outputs, spec, start, end, reads, last_saved_op, parameters))
        return output

    return call


def _factor_ids(dims: TensorDims) -> list[list[int]]:
    return [[id(s) for s in factors_of(dim)] for dim in dims]


def _can_copy(
    trace: DataflowTrace, block: _TracedBlock, name: str, signature: tuple[Any, ...], inputs: list[int], parameters: dict[str, int]
) -> bool:
    """Whether a copy would be identical to a trace."""
    if name == block.name or signature != block.signature or parameters.keys() != block.parameters.keys():
        return False
    if any(_factor_ids(trace.values[a].dims) != _factor_ids(trace.values[b].dims) for a, b in zip(block.inputs, inputs, strict=True)):
        return False
    if [block.inputs.index(n) for n in block.inputs] != [inputs.index(n) for n in inputs]:
        return False  # two of the representative's inputs are one tensor and this block's are not, or the reverse
    if block.local_dims is None:
        block.local_dims = _local_dims(trace, block, parameters)
    return _dims_in(trace, (leaf[0] for leaf in block.outputs if isinstance(leaf, tuple))) <= _dims_in(trace, block.inputs)


def _local_dims(trace: DataflowTrace, block: _TracedBlock, parameters: dict[str, int]) -> set[int]:
    """Logical dims that occur only inside the representative. The set is final: values that lack a logical dim cannot be unified with it later."""
    inside = {*range(block.start.values, block.end.values), *block.parameters.values()}
    outside = set(range(len(trace.values))) - inside - set(parameters.values())
    return _dims_in(trace, inside) - _dims_in(trace, outside)


def _dims_in(trace: DataflowTrace, values: Iterable[int]) -> set[int]:
    return {id(s) for index in values for dim in trace.values[index].dims for s in factors_of(dim)}


def _copy_block(writer: TraceWriter, block: _TracedBlock, name: str, inputs: list[int], parameters: dict[str, int]) -> Any:
    """Append the block's copied entries to the trace, and return its outputs."""
    copy = _BlockCopy(writer.trace, block, name, inputs, parameters)
    copy.write()
    for frame in writer.frames:
        frame.last_saved_op = copy.map_op(block.last_saved_op) if block.last_saved_op > block.start.ops else frame.last_saved_op
    writer.paused = True
    try:
        outputs = [_output_like(writer, copy.map_value(leaf[0]), leaf[1]) if isinstance(leaf, tuple) else leaf for leaf in block.outputs]
    finally:
        writer.paused = False
    return pytree.tree_unflatten(outputs, block.spec)


def _output_like(writer: TraceWriter, value: int, template: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        output = torch.empty_like(template).requires_grad_(template.requires_grad)
    writer.bind_value(output, value)
    return output


class _BlockCopy:
    """One block's trace entries, derived from its representative's."""

    def __init__(self, trace: DataflowTrace, block: _TracedBlock, name: str, inputs: list[int], parameters: dict[str, int]) -> None:
        self.trace, self.block, self.name = trace, block, name
        self.start = _TracePosition.of(trace)
        self._values = dict(zip(block.inputs, inputs, strict=True)) | {index: parameters[name] for name, index in block.parameters.items()}
        self._local_dims = block.local_dims or set()
        self._dim_map: dict[int, LogicalDim] = {}

    def map_value(self, index: int) -> int:
        if self.block.start.values <= index < self.block.end.values:
            return index - self.block.start.values + self.start.values
        return self._values.get(index, index)

    def _map_values(self, indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self.map_value, indices))

    def map_op(self, index: int) -> int:
        return index - self.block.start.ops + self.start.ops

    def _map_call(self, index: int) -> int:
        return index - self.block.start.calls + self.start.calls if index >= self.block.start.calls else index

    def _map_module(self, module: str) -> str:
        inside = module == self.block.name or module.startswith(f"{self.block.name}.")
        return self.name + module[len(self.block.name) :] if inside else module

    def _map_dims(self, logical_dims: Sequence[LogicalDim]) -> list[LogicalDim]:
        """The logical dims for this block: new ones in place of the representative's local ones."""
        factors = factors_of(logical_dims)
        return [self._dim_map.setdefault(id(s), LogicalDim(s.size)) if id(s) in self._local_dims else s for s in factors]

    def write(self) -> None:
        trace, start, end = self.trace, self.block.start, self.block.end
        for index in self.block.parameters.values():
            parameter, represented = trace.values[self._values[index]], trace.values[index]
            for dim, represented_dim in zip(parameter.dims, represented.dims, strict=True):
                unify(dim, self._map_dims(represented_dim))
            parameter.needs_grad |= represented.needs_grad
        trace.values += [replace(value, dims=[self._map_dims(dim) for dim in value.dims]) for value in trace.values[start.values : end.values]]
        trace.ops += [self._copy_op(op) for op in trace.ops[start.ops : end.ops]]
        trace.modules += [self._copy_module_call(call) for call in trace.modules[start.modules : end.modules]]
        trace.calls += [replace(call, module=self._map_module(call.module)) for call in trace.calls[start.calls : end.calls]]
        trace.reads |= {
            SizeRead(self.map_value(r.value), r.dim, self.map_op(r.before_operation), self._map_module(r.module)) for r in self.block.reads
        }

    def _copy_module_call(self, call: ModuleCall) -> ModuleCall:
        saves = self.map_op(call.ops_before_last_save) if call.ops_before_last_save >= 0 else -1
        copy = replace(call, module=self._map_module(call.module), inputs=self._map_values(call.inputs), outputs=self._map_values(call.outputs))
        return replace(copy, first_op=self.map_op(call.first_op), end_op=self.map_op(call.end_op), ops_before_last_save=saves)

    def _copy_op(self, op: TracedOp) -> TracedOp:
        values = list(self._map_values(op.inputs)), list(self._map_values(op.outputs))
        dims = self._map_dims(op.contracted_dims), self._map_dims(op.unsharded_dims)
        call, function, constants = op.call_site
        return TracedOp(op.name, self._map_module(op.module), *values, *dims, (self._map_call(call), function, constants), op.window, op.factor)
