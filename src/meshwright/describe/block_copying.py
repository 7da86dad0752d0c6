"""Traces only the first two of a run of equal blocks; for the others, copies the second's trace entries with their own parameters, values and logical
dims.

A block is copied only if its inputs have the shapes and logical dims of its representative's, and if the logical dims of the representative's outputs
also occur outside it. Then tracing it would record exactly the copy: a block shares logical dims with the rest of the model only through its inputs,
and all others are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.core.dataflow import SizeRead
from meshwright.describe.dim_unification import LogicalDim, factors_of, unify
from meshwright.describe.layers import Layer, behavior_signature, find_layers
from meshwright.describe.trace_records import DataflowTrace, ModuleFrame, TensorDims, TracedOp, TracedTensor


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
    shapes: tuple[Any, ...]
    inputs: list[int]
    outputs: list[Any]  # per leaf: (value index, tensor), or any other value
    spec: Any
    start: _TracePosition
    end: _TracePosition
    reads: set[SizeRead]
    last_saved_op: int
    parameters: dict[str, int]  # its parameters and buffers, by name relative to the block
    local_dims: set[int] | None = None  # logical dims that occur only inside it; computed on demand


@contextmanager
def copy_repeated_blocks(model: nn.Module, writer: TraceWriter) -> Iterator[None]:
    """While active, blocks from the third of their kind on are copied."""
    kinds: dict[str, list[Layer]] = {}
    for layer in find_layers(model):
        if not layer.own_parameters_only and list(layer.module.children()):
            kinds.setdefault(behavior_signature(layer.module), []).append(layer)
    changed: list[tuple[nn.Module, Any]] = []
    named = {value.parameter: number for number, value in enumerate(writer.trace.values) if value.parameter}
    for blocks in kinds.values():
        if len(blocks) > 2 and _parameters_unshared(blocks, named):
            seen: list[_TracedBlock] = []
            for layer in blocks[1:]:
                changed.append((layer.module, vars(layer.module).get("forward")))
                layer.module.forward = _copying_forward(writer, layer, layer.module.forward, seen, _block_parameters(named, layer.name))
    try:
        yield
    finally:
        for module, own in reversed(changed):
            del module.forward
            if own is not None:
                module.forward = own


def _block_parameters(parameter_values: dict[str, int], block: str) -> dict[str, int]:
    return {name.removeprefix(f"{block}."): number for name, number in parameter_values.items() if name.startswith(f"{block}.")}


def _parameters_unshared(blocks: Sequence[Layer], parameter_values: dict[str, int]) -> bool:
    """Whether no block shares a parameter: a tied one is recorded under its first name only."""
    return all(f"{b.name}.{name}" in parameter_values for b in blocks for name, _ in (*b.module.named_parameters(), *b.module.named_buffers()))


def _copying_forward(
    writer: TraceWriter, layer: Layer, forward: Callable[..., Any], traced: list[_TracedBlock], parameters: dict[str, int]
) -> Callable[..., Any]:  # fmt: skip
    def call(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        shapes = _input_signature(given)
        numbers = [writer.value_index(t) for t in given if torch.is_tensor(t)]
        if traced and _can_copy(writer.trace, traced[0], layer.name, shapes, numbers, parameters):
            return _copy_block(writer, traced[0], layer.name, numbers, parameters)
        if traced:
            return forward(*args, **kwargs)
        return _trace_representative(writer, layer, lambda: forward(*args, **kwargs), traced, parameters, (shapes, numbers))

    return call


def _trace_representative(
    writer: TraceWriter,
    layer: Layer,
    run: Callable[[], Any],
    traced: list[_TracedBlock],
    parameters: dict[str, int],
    signature_and_inputs: tuple[tuple[Any, ...], list[int]],
) -> Any:
    """Run the representative, and record which trace entries are its own."""
    book, first = writer.trace, _TracePosition.of(writer.trace)
    before, book.reads = book.reads, set()
    try:
        output = run()
    finally:
        reads, book.reads = book.reads, before | book.reads
    found, spec = pytree.tree_flatten(output)
    outputs = [(writer.value_index(leaf), leaf) if torch.is_tensor(leaf) else leaf for leaf in found]
    traced.append(
        _TracedBlock(
            layer.name,
            signature_and_inputs[0],
            signature_and_inputs[1],
            outputs,
            spec,
            first,
            _TracePosition.of(book),
            reads,
            writer.frames[-1].last_saved_op,
            parameters,
        )
    )
    return output


def _input_signature(inputs: Sequence[Any]) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # these reads are not the model's own size reads
        return tuple((tuple(t.shape), t.dtype, t.requires_grad) if torch.is_tensor(t) else repr(t)[:80] for t in inputs)


def _factor_ids(dims: TensorDims) -> list[list[int]]:
    return [[id(s) for s in factors_of(dim)] for dim in dims]


def _can_copy(trace: DataflowTrace, block: _TracedBlock, name: str, shapes: tuple[Any, ...], inputs: list[int], parameters: dict[str, int]) -> bool:
    """Whether a copy would be identical to a trace."""
    if name == block.name or shapes != block.shapes or parameters.keys() != block.parameters.keys():
        return False
    if any(_factor_ids(trace.values[a].dims) != _factor_ids(trace.values[b].dims) for a, b in zip(block.inputs, inputs, strict=True)):
        return False
    if [block.inputs.index(n) for n in block.inputs] != [inputs.index(n) for n in inputs]:
        return False  # two of the representative's inputs are one tensor and this block's are not, or the reverse
    if block.local_dims is None:
        block.local_dims = _local_dims(trace, block, parameters)
    out = {s for leaf in block.outputs if isinstance(leaf, tuple) for s in _dims_in(trace, (leaf[0],))}
    return out <= _dims_in(trace, block.inputs)


def _local_dims(trace: DataflowTrace, block: _TracedBlock, parameters: dict[str, int]) -> set[int]:
    """Logical dims that occur only inside the representative. The set is final: values that lack a logical dim cannot be unified with it later."""
    theirs = {*block.parameters.values(), *parameters.values(), *range(block.start.values, block.end.values)}
    inside = (*range(block.start.values, block.end.values), *block.parameters.values())
    return _dims_in(trace, inside) - _dims_in(trace, (n for n in range(len(trace.values)) if n not in theirs))


def _dims_in(trace: DataflowTrace, values: Iterable[int]) -> set[int]:
    return {id(s) for number in values for dim in trace.values[number].dims for s in factors_of(dim)}


def _copy_block(writer: TraceWriter, block: _TracedBlock, name: str, inputs: list[int], parameters: dict[str, int]) -> Any:
    """Append the block's copied entries to the trace, and return its outputs."""
    copy = _BlockCopy(writer.trace, block, name, inputs, parameters)
    copy.write()
    for frame in writer.frames:
        frame.last_saved_op = copy.map_op(block.last_saved_op) if block.last_saved_op > block.start.ops else frame.last_saved_op
    writer.paused = True
    try:
        leaves_out = [_output_like(writer, copy.map_value(leaf[0]), leaf[1]) if isinstance(leaf, tuple) else leaf for leaf in block.outputs]
    finally:
        writer.paused = False
    return pytree.tree_unflatten(leaves_out, block.spec)


def _output_like(writer: TraceWriter, value: int, template: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        made = torch.empty_like(template).requires_grad_(template.requires_grad)
    writer.bind_value(made, value)
    return made


class _BlockCopy:
    """One block's trace entries, derived from its representative's."""

    def __init__(self, trace: DataflowTrace, block: _TracedBlock, name: str, inputs: list[int], parameters: dict[str, int]) -> None:
        self.trace, self.block, self.name = trace, block, name
        self.start = _TracePosition.of(trace)
        self._values = dict(zip(block.inputs, inputs, strict=True)) | {number: parameters[key] for key, number in block.parameters.items()}
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
        found = []
        for logical_dim in factors_of(logical_dims):
            if id(logical_dim) in self._local_dims:
                logical_dim = self._dim_map.setdefault(id(logical_dim), LogicalDim(logical_dim.size))
            found.append(logical_dim)
        return found

    def write(self) -> None:
        book, first, last = self.trace, self.block.start, self.block.end
        for number in self.block.parameters.values():
            for mine, theirs in zip(book.values[self._values[number]].dims, book.values[number].dims, strict=True):
                unify(mine, self._map_dims(theirs))
            book.values[self._values[number]].needs_grad |= book.values[number].needs_grad
        book.values += [self._copy_tensor(value) for value in book.values[first.values : last.values]]
        book.ops += [self._copy_op(op) for op in book.ops[first.ops : last.ops]]
        for call in book.modules[first.modules : last.modules]:
            copy = replace(call, module=self._map_module(call.module), first_op=self.map_op(call.first_op), end_op=self.map_op(call.end_op))
            kept = self.map_op(call.ops_before_last_save) if call.ops_before_last_save >= 0 else -1
            book.modules.append(
                replace(copy, inputs=self._map_values(call.inputs), outputs=self._map_values(call.outputs), ops_before_last_save=kept)
            )
        book.calls += [replace(call, module=self._map_module(call.module)) for call in book.calls[first.calls : last.calls]]
        book.reads |= {SizeRead(self.map_value(r.value), r.dim, self.map_op(r.before_operation)) for r in self.block.reads}

    def _copy_tensor(self, tensor: TracedTensor) -> TracedTensor:
        return replace(tensor, dims=[self._map_dims(dim) for dim in tensor.dims])

    def _copy_op(self, op: TracedOp) -> TracedOp:
        call, function, numbers = op.call_site
        return TracedOp(
            op.name,
            self._map_module(op.module),
            list(self._map_values(op.inputs)),
            list(self._map_values(op.outputs)),
            self._map_dims(op.contracted_dims),
            self._map_dims(op.unsharded_dims),
            (self._map_call(call) if call >= 0 else call, function, numbers),
            op.window,
        )
