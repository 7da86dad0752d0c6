"""Chooses how cp ranks shard the positions of a sequence, and what the run must change for that (see [Note: positions]). Pure reasoning over a
model's dataflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from meshwright.core.context_policy import LOSS_MODULE, POSITIONS_DIM, AttentionSite, ContextPolicy, PositionGenerator, PositionSplit, ShardedField
from meshwright.core.dataflow import Dataflow, Operation
from meshwright.core.errors import RequestError
from meshwright.core.tensor_policy import CollectiveSite, ParameterShard, TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW_PRECISION_DTYPES
from meshwright.plan.dataflow_graph import DataflowGraph
from meshwright.plan.loss_reduction import NLL_OPS, LossReductions
from meshwright.plan.tensor_planner import sharded_logical_dims

# Ops whose result does not depend on which positions it is for (constant or random): only its size matters.
_FILL_OPS = ("zeros", "ones", "empty", "full")
_OTHER_FREE_OPS = ("randn", "rand", "randint", "expand", "scalar_tensor", "empty_strided", "new_empty_strided")
_POSITION_FREE_OPS = frozenset((*_FILL_OPS, *(f"new_{op}" for op in _FILL_OPS), *(f"{op}_like" for op in _FILL_OPS), *_OTHER_FREE_OPS))
_POSITION_FUNCTIONS = {"slice": ("__getitem__", "narrow"), "arange": ("arange",)}  # operation → calls in a model's code that may generate positions


def choose_context(dataflow: Dataflow, cp_degree: int, tensor: TensorPolicy | None = None, precision: str = "fp32") -> ContextPolicy:
    """The policy for `cp_degree` ranks. Raises a RequestError that names the operation and the remedy if positions cannot be sharded."""
    builder = dataflow.memo.get_or_compute("context", (), cp_degree, lambda: _ContextPolicyBuilder(_ContextPropagation(dataflow, cp_degree)))
    return builder.build(tensor, precision)


def scale_sites_for_cp(dataflow: Dataflow, policy: TensorPolicy, cp_degree: int) -> TensorPolicy:
    """The tensor policy with its collectives scaled to 1/cp of the bytes where their value has positions."""
    value_dims = DataflowGraph.of(dataflow).value_dims
    logical_dim = sequence_dim(dataflow, cp_degree)
    calls = {call.module: call for call in reversed(dataflow.modules)}

    def scale_site(site: CollectiveSite, is_input: bool = False) -> CollectiveSite:
        call = calls[site.module]
        value = call.inputs[site.position] if is_input else call.outputs[0]
        return replace(site, bytes=site.bytes / cp_degree) if logical_dim in value_dims[value] else site

    return replace(
        policy,
        copy_sites=tuple(scale_site(site, is_input=True) for site in policy.copy_sites),
        reduce_sites=tuple(map(scale_site, policy.reduce_sites)),
        gather_sites=tuple(map(scale_site, policy.gather_sites)),
        embedding_sites=tuple(map(scale_site, policy.embedding_sites)),
        norm_sites=tuple(map(scale_site, policy.norm_sites)),
    )


def sequence_dim(dataflow: Dataflow, cp_degree: int) -> int:
    """The logical dim of the positions that `cp_degree` ranks shard: the one that attention runs over."""
    graph, error, advice = DataflowGraph.of(dataflow), f"cp={cp_degree}:", f"use --mesh dp={cp_degree}"
    sequences: dict[tuple[int, ...], str] = {}
    for index, op in enumerate(dataflow.operations):
        if op.name == "attention":
            query, key = (dataflow.values[v].logical_dims[-2] for v in op.inputs[:2])
            if query != key:
                raise RequestError(f"{error} {graph.describe_location(index)} attends from one sequence to another: {advice}")
            sequences.setdefault(query, graph.describe_location(index))
    if not sequences:
        raise RequestError(f"{error} this model does not attend through F.scaled_dot_product_attention: {advice}")
    if len(sequences) > 1:
        raise RequestError(f"{error} {' and '.join(list(sequences.values())[:2])} attend over different sequences: {advice}")
    (logical_dims,) = sequences
    if len(logical_dims) != 1:
        raise RequestError(f"{error} the model's code splits the dim of positions into several dims: {advice}")
    return logical_dims[0]


class _ContextPropagation:
    """Propagates sharded positions through a forward pass and its loss, in order, and records where they are generated, split and gathered. The
    result does not depend on tensor parallelism."""

    def __init__(self, dataflow: Dataflow, cp_degree: int) -> None:
        self.dataflow, self.cp_degree, self.graph = dataflow, cp_degree, DataflowGraph.of(dataflow)
        self.logical_dim = sequence_dim(dataflow, cp_degree)
        self.sequence_length = dataflow.sizes[self.logical_dim]
        if remainder := self.sequence_length % cp_degree:
            lengths = " or ".join(str(n) for n in (self.sequence_length - remainder, self.sequence_length - remainder + cp_degree) if n)
            raise RequestError(
                f"cp={cp_degree} does not divide the {self.sequence_length} positions of a sample: use a sequence (--seq) of {lengths}"
            )
        self.reductions = LossReductions(self.graph, self.logical_dim)
        self.whole_values = _find_whole_values(self.graph, self.logical_dim, self.reductions)
        self.sharded_values: set[int] = set()
        self.attention_ops: list[int] = []
        self.position_generators: dict[int, PositionGenerator] = {}
        self.split_edges: dict[int, set[int]] = {}  # unsharded value → operations that need it split
        self.target_count_modules: dict[str, None] = {}
        self.fields: list[ShardedField] = []
        self.split_parameters: list[ParameterShard] = []
        self._mark_sources()
        for index, op in enumerate(dataflow.operations):
            self._propagate_op(index, op)
        self.reductions.check_loss(cp_degree)

    # -- errors --

    def refusal(self, index: int, what: str, advice: str = "") -> RequestError:
        return RequestError(f"cp={self.cp_degree}: {self.graph.describe_location(index)} {what}: {advice or f'use --mesh dp={self.cp_degree}'}")

    def _blocking_error(self, index: int, op: Operation) -> RequestError:
        """The error for an operation that cannot work on a shard of the positions."""
        if op.name == "slice" or op.name.startswith(("split", "constant_pad")):
            advice = "put shifted labels into the batch" if self.graph.describe_location(index) == "the loss" else ""
            return self.refusal(index, f"slices or shifts positions ({op.name})", advice)
        attends = op.name in ("_softmax", "bmm", "mm", "multi_head_attention")
        return self.refusal(index, f"needs all positions at once ({op.name})", "attend through F.scaled_dot_product_attention" if attends else "")

    # -- propagation --

    def _has_positions(self, value: int) -> bool:
        return self.logical_dim in self.graph.value_dims[value]

    def _mark_sources(self) -> None:
        """Mark the batch tensors, parameters and buffers that have an entry for each position as sharded."""
        fields = {f.value: f for f in self.dataflow.batch_tensors}
        for index, value in enumerate(self.dataflow.values):
            if index in self.graph.producer or not self._has_positions(index) or index in self.whole_values:
                continue
            dim = next(d for d, logical_dims in enumerate(value.logical_dims) if self.logical_dim in logical_dims)
            if value.logical_dims[dim] != (self.logical_dim,):
                continue  # a longer table that the model's code slices
            if index in fields:
                self.fields.append(ShardedField(fields[index].leaf, fields[index].name, dim))
            elif value.parameter:
                self._check_reading_module(index, value.parameter)
                self.split_parameters.append(ParameterShard(value.parameter, dim))
            else:
                raise self.refusal(self.graph.consumers[index][0], "uses a constant with an entry for each position", "register it as a buffer")
            self.sharded_values.add(index)

    def _check_reading_module(self, value: int, name: str) -> None:
        calls = [call for call in self.dataflow.modules if call.module == name.rpartition(".")[0]]
        for index in self.graph.consumers.get(value, []):
            if not any(call.first_op <= index < call.end_op for call in calls):
                raise self.refusal(index, f"reads {name}, which has an entry for each position, outside its own module")

    def _propagate_op(self, index: int, op: Operation) -> None:
        values = self.dataflow.values
        sharded = [v for v in op.inputs if v in self.sharded_values]
        unsharded = [v for v in op.inputs if v not in self.sharded_values and self._has_positions(v)]
        outputs = [v for v in op.outputs if self._has_positions(v)]
        if any(sum(s == self.logical_dim for dim in values[v].logical_dims for s in dim) > 1 for v in op.outputs):
            raise self.refusal(index, f"compares positions with each other ({op.name})", "attend through F.scaled_dot_product_attention")
        if (sharded or outputs) and any(v in self.reductions.kinds for v in op.inputs):
            raise RequestError(f"cp={self.cp_degree}: {self.reductions.late_use_reason(op)}: use --mesh dp={self.cp_degree}")
        if op.name == "attention" and self.logical_dim in op.indivisible_dims:
            self._record_attention(index, op)
        elif _slices_positions(self.dataflow, op, self.logical_dim) or (outputs and not sharded and not unsharded):
            if sharded:
                raise self._blocking_error(index, op)
            self._record_generator(index, op)
        elif self.logical_dim in (*op.contracted_dims, *op.indivisible_dims):
            self._reduce_positions(index, op, sharded, unsharded, outputs)
        elif sharded and not outputs and op.name not in _POSITION_FREE_OPS:
            raise self.refusal(index, f"mixes positions with other dims so that they cannot be followed ({op.name})")
        elif outputs and not self.whole_values.issuperset(outputs):
            for value in unsharded:
                self.split_edges.setdefault(value, set()).add(index)
        else:
            self.reductions.propagate(op)
        self.sharded_values.update(v for v in outputs if v not in self.whole_values)

    def _record_attention(self, index: int, op: Operation) -> None:
        if len(op.inputs) > 3:
            raise self.refusal(index, "gives attention a mask", "leave it out (is_causal=True masks later positions), or use another mesh axis")
        if not self.sharded_values.issuperset(op.inputs):
            raise self.refusal(index, "attends to values that do not depend on positions")
        self.attention_ops.append(index)

    def _reduce_positions(self, index: int, op: Operation, sharded: list[int], unsharded: list[int], outputs: list[int]) -> None:
        """Handle an operation that needs all positions at once: allowed at the end of a loss, or on unsharded values."""
        if not sharded:
            if not self.whole_values.issuperset(outputs):
                raise self.refusal(index, f"generates positions by an operation that is not supported ({op.name})")
            return
        for value in unsharded:
            self.split_edges.setdefault(value, set()).add(index)
        if self.logical_dim in op.contracted_dims or not self.reductions.record_reduction(op):
            raise self._blocking_error(index, op)
        if op.name in NLL_OPS and op.int_args[:1] == (1,):
            if op.function not in ("cross_entropy", "nll_loss"):
                raise self.refusal(index, f"takes the mean over targets by a function that is not supported ({op.function})")
            self.target_count_modules[self.graph.enclosing_module(index)] = None

    def _record_generator(self, index: int, op: Operation) -> None:
        """Record a call that generates positions: the run makes it generate this rank's, or all of them where they stay unsharded."""
        if op.name in _POSITION_FREE_OPS:
            return
        values, is_slice = self.dataflow.values, op.name == "slice"
        dim = op.int_args[0] if is_slice and op.int_args else 0
        logical_dims = values[op.outputs[0]].logical_dims[dim] if op.int_args and op.name in _POSITION_FUNCTIONS else ()
        supported = op.function in _POSITION_FUNCTIONS.get(op.name, ()) and self.logical_dim in logical_dims
        if not supported or (is_slice and (op.int_args[2] != 1 or len(logical_dims) > 1)):
            if any(values[v].floating for v in op.inputs) and not is_slice:
                raise self._blocking_error(index, op)
            raise self.refusal(index, f"generates positions by an operation that is not supported ({op.function or op.name})")
        is_sharded, module = op.outputs[0] not in self.whole_values, self.graph.enclosing_module(index)
        if is_slice:
            generator = PositionGenerator(module, "slice", op.int_args[1], 1, values[op.inputs[0]].shape[dim], is_sharded=is_sharded)
        else:
            outer, inner = self.graph.outer_inner(logical_dims, logical_dims.index(self.logical_dim))
            generator = PositionGenerator(module, "arange", op.int_args[0], op.int_args[1], 0, outer, inner, is_sharded)
        self.position_generators[index] = generator


class _ContextPolicyBuilder:
    """Builds the policy from a finished propagation. Only the attention sites depend on tensor parallelism."""

    def __init__(self, propagation: _ContextPropagation) -> None:
        self.propagation, self.dataflow, self.graph = propagation, propagation.dataflow, propagation.graph
        self.position_calls = tuple(dict.fromkeys(propagation.position_generators.values()))

    def build(self, tensor: TensorPolicy | None, precision: str) -> ContextPolicy:
        return replace(self._base_policy, attention_sites=tuple(self._attention_sites(tensor, precision)))

    @cached_property
    def _base_policy(self) -> ContextPolicy:
        """The policy without its attention sites."""
        propagation, degree, length = self.propagation, self.propagation.cp_degree, self.propagation.sequence_length
        self._check_calls_distinct()
        self._check_losses_distinct()
        rewrites, ambiguous, _ = self.graph.size_rewrites({propagation.logical_dim: POSITIONS_DIM}, propagation.whole_values)
        return ContextPolicy(
            sequence_length=length,
            chunks=2 * degree if length % (2 * degree) == 0 else degree,
            fields=tuple(propagation.fields),
            position_generators=self.position_calls,
            position_splits=tuple(dict.fromkeys(self._split_inputs())),
            position_tables=tuple(propagation.split_parameters),
            mean_loss_modules=tuple(propagation.target_count_modules),
            size_rewrites=tuple(r for r in rewrites if not r.length and r not in ambiguous),  # slices of positions are position generators
        )

    def _split_inputs(self) -> Iterator[PositionSplit]:
        """Where unsharded values are split by position: at the smallest module that takes the value as input and uses only this rank's shard."""
        for value, ops in self.propagation.split_edges.items():
            calls = sorted((m for m in self.dataflow.modules if value in m.inputs), key=lambda m: m.end_op - m.first_op)
            consumers, sequence = self.graph.consumers[value], self.propagation.logical_dim
            dim, dims = next((i, dims) for i, dims in enumerate(self.dataflow.values[value].logical_dims) if sequence in dims)
            outer_inner = self.graph.outer_inner(dims, dims.index(sequence))
            for index in ops:
                around = (m for m in calls if m.first_op <= index < m.end_op)
                call = next((m for m in around if all(i in ops for i in consumers if m.first_op <= i < m.end_op)), None)
                if call is None:
                    raise self.propagation.refusal(index, f"needs the same positions sharded and unsharded ({self.graph.op(index).name})")
                yield PositionSplit(call.module, call.inputs.index(value), dim, *outer_inner)

    def _attention_sites(self, tensor: TensorPolicy | None, precision: str) -> Iterator[AttentionSite]:
        """Every attention call, with the bytes of a sample's keys and values, which ranks gather."""
        sharded = sharded_logical_dims(self.dataflow, tensor)
        for op in map(self.graph.op, self.propagation.attention_ops):
            key_value = [self.dataflow.values[v] for v in op.inputs[1:3]]
            itemsize = ITEM_BYTES[LOW_PRECISION_DTYPES[precision]] if precision in LOW_PRECISION_DTYPES else max(v.itemsize for v in key_value)
            size = sum(math.prod(v.shape) for v in key_value) * itemsize / self.dataflow.batch
            logical_dim = next((sharded[s] for s in sorted(self.graph.value_dims[op.inputs[1]]) if s in sharded), "")
            yield AttentionSite(op.module, size, logical_dim, any(v.needs_grad for v in key_value))

    @cached_property
    def _patched_modules(self) -> set[str]:
        """Modules whose code is patched to see this rank's positions, plus the model and the loss for code outside of them."""
        return {m.module for m in self.position_calls} | {self.graph.op(i).module for i in self.propagation.attention_ops} | {"", LOSS_MODULE}

    def _check_calls_distinct(self) -> None:
        """Raise if a call that generates positions looks like another call in the same code, at the full or the sharded length."""
        calls, degree = self.position_calls, self.propagation.cp_degree
        known = {(m.module, m.function, m.start, m.step, m.source_length) for m in calls}
        if len({replace(m, is_sharded=True) for m in calls}) < len(calls):
            module = calls[0].module or "the model"
            raise RequestError(f"cp={degree}: {module} needs the same positions sharded and unsharded: use --mesh dp={degree}")
        for index, op in enumerate(self.dataflow.operations):
            if index in self.propagation.position_generators or op.function not in _POSITION_FUNCTIONS.get(op.name, ()) or not op.int_args:
                continue
            module = self.graph.enclosing_module(index, self._patched_modules)
            dim = op.int_args[0] if op.name == "slice" else 0
            source_length = self.dataflow.values[op.inputs[0]].shape[dim] if op.name == "slice" else 0
            start, step = op.int_args[1:] if op.name == "slice" else op.int_args
            length, sequence = self.dataflow.values[op.outputs[0]].shape[dim], self.propagation.sequence_length
            sizes = [m.outer * m.inner for m in calls if (m.module, m.function) == (module, op.name)]
            if (
                length in {n * size for n in (sequence, sequence // degree) for size in sizes}
                and (module, op.name, start, step, source_length) in known
            ):
                what = f"generates positions and other ranges of the same length {length}"
                raise self.propagation.refusal(index, what, "use another sequence length (--seq)")

    def _check_losses_distinct(self) -> None:
        """Raise unless every cross entropy in code that averages over the targets of all ranks runs over positions."""
        for index, op in enumerate(self.dataflow.operations):
            not_over_positions = op.name in NLL_OPS and self.propagation.logical_dim not in op.indivisible_dims
            if not_over_positions and self.graph.enclosing_module(index, self._patched_modules) in self.propagation.target_count_modules:
                raise self.propagation.refusal(index, "takes one cross entropy over positions and another over other dims")


def _find_whole_values(graph: DataflowGraph, logical_dim: int, reductions: LossReductions) -> set[int]:
    """Integer values (tokens, position numbers) of which some operation needs all positions: unsharded until a module splits them."""
    dataflow = graph.dataflow
    integers: set[int] = {v for v, value in enumerate(dataflow.values) if v not in graph.producer and not value.floating}
    for op in dataflow.operations:
        if integers.issuperset(op.inputs):  # computed from integers alone
            integers.update(v for v in op.outputs if not dataflow.values[v].floating)
    whole: set[int] = set()
    for op in reversed(dataflow.operations):
        inputs = [v for v in op.inputs if logical_dim in graph.value_dims[v]]
        needs_all = logical_dim in (*op.contracted_dims, *op.indivisible_dims) and not reductions.reduction_of(op)
        needs_all = needs_all or _slices_positions(dataflow, op, logical_dim)
        if inputs and integers.issuperset(inputs) and (needs_all or whole.intersection(op.outputs)):
            whole.update(inputs)
    for op in reversed(dataflow.operations):  # the inputs of an unsharded value's producer are unsharded too
        if whole.intersection(op.outputs):
            whole.update(v for v in op.inputs if logical_dim in graph.value_dims[v])
    return whole


def _slices_positions(dataflow: Dataflow, op: Operation, logical_dim: int) -> bool:
    """Whether an operation is a slice of a longer dim whose result is positions."""
    if op.name != "slice" or not op.int_args:
        return False
    before, after = dataflow.values[op.inputs[0]], dataflow.values[op.outputs[0]]
    dim = op.int_args[0]
    return before.shape[dim] != after.shape[dim] and logical_dim in after.logical_dims[dim]
