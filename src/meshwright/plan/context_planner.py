"""Chooses how cp ranks shard the positions of a sequence, and what the run must change for that (see [Note: positions]). Pure reasoning over a
model's dataflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
_POSITION_FREE_OPS = frozenset(
    (
        "zeros",
        "ones",
        "empty",
        "full",
        "randn",
        "rand",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "expand",
        "scalar_tensor",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "empty_strided",
        "new_empty_strided",
        "randint",
    )
)
_POSITION_FUNCTIONS = {"slice": ("__getitem__", "narrow"), "arange": ("arange",)}  # operation → calls in a model's code that may generate positions


def choose_context(dataflow: Dataflow, cp_degree: int, tensor: TensorPolicy | None = None, precision: str = "fp32") -> ContextPolicy:
    """The policy for `cp_degree` ranks. Raises a RequestError with the place and the remedy if the model's positions cannot be sharded."""
    return dataflow.memo.get_or_compute(
        "context", (), cp_degree, lambda: _ContextPolicyBuilder(_ContextPropagation(dataflow, cp_degree).propagate())
    ).build(tensor, precision)


def scale_sites_for_cp(dataflow: Dataflow, policy: TensorPolicy, cp_degree: int) -> TensorPolicy:
    """The tensor policy with its collectives scaled to 1/cp of the bytes where their value has positions."""
    reader = DataflowGraph.of(dataflow)
    logical_dim = _find_sequence_dim(reader, cp_degree)
    calls = {call.module: call for call in reversed(dataflow.modules)}

    def scale_site(site: CollectiveSite, is_input: bool = False) -> CollectiveSite:
        call = calls[site.module]
        value = call.inputs[site.position] if is_input else call.outputs[0]
        return replace(site, bytes=site.bytes / cp_degree) if logical_dim in reader.value_dims[value] else site

    return replace(
        policy,
        copy_sites=tuple(scale_site(m, True) for m in policy.copy_sites),
        reduce_sites=tuple(map(scale_site, policy.reduce_sites)),
        gather_sites=tuple(map(scale_site, policy.gather_sites)),
        embedding_sites=tuple(map(scale_site, policy.embedding_sites)),
        norm_sites=tuple(map(scale_site, policy.norm_sites)),
    )


def sequence_dim(dataflow: Dataflow, cp_degree: int) -> int:
    """The logical dim of the positions that `cp_degree` ranks shard."""
    return _find_sequence_dim(DataflowGraph.of(dataflow), cp_degree)


def _find_sequence_dim(graph: DataflowGraph, cp_degree: int) -> int:
    """The logical dim of positions: the one that attention runs over."""
    found: dict[tuple[int, ...], str] = {}
    for index, op in enumerate(graph.dataflow.operations):
        if op.name == "attention":
            query, key = (graph.dataflow.values[v].logical_dims[-2] for v in op.inputs[:2])
            if query != key:
                raise RequestError(
                    f"cp={cp_degree}: {graph.describe_location(index)} attends from one sequence to another: use --mesh dp={cp_degree}"
                )
            found.setdefault(query, graph.describe_location(index))
    if not found:
        raise RequestError(f"cp={cp_degree}: this model does not attend through F.scaled_dot_product_attention: use --mesh dp={cp_degree}")
    if len(found) > 1:
        raise RequestError(f"cp={cp_degree}: {' and '.join(list(found.values())[:2])} attend over different sequences: use --mesh dp={cp_degree}")
    (logical_dims,) = found
    if len(logical_dims) != 1:
        raise RequestError(f"cp={cp_degree}: the model's code takes positions apart in pieces: use --mesh dp={cp_degree}")
    return logical_dims[0]


class _ContextPropagation:
    """Propagates sharded positions through a forward pass and its loss, in order, and records where they are generated, split and gathered."""

    def __init__(self, dataflow: Dataflow, cp_degree: int) -> None:
        self.dataflow, self.cp_degree, self.graph = dataflow, cp_degree, DataflowGraph.of(dataflow)
        self.logical_dim = _find_sequence_dim(self.graph, cp_degree)
        self.sequence_length = dataflow.sizes[self.logical_dim]
        self._check_size()
        self.reductions = LossReductions(self.graph, self.logical_dim)
        self.whole_values = _find_whole_values(self.graph, self.logical_dim, self.reductions)
        self.sharded_values: set[int] = set()
        self.attention_ops: list[int] = []
        self.position_generators: dict[int, PositionGenerator] = {}
        self.split_edges: dict[int, set[int]] = {}  # whole value → operations that need it split
        self.target_count_modules: dict[str, None] = {}
        self.fields: list[ShardedField] = []
        self.split_parameters: list[ParameterShard] = []

    def propagate(self) -> _ContextPropagation:
        """Propagate through all operations. The result does not depend on tensor parallelism."""
        self._mark_sources()
        for index, op in enumerate(self.dataflow.operations):
            self._propagate_op(index, op)
        self.reductions.check_loss(self.cp_degree)
        return self

    # -- errors --

    def refusal(self, index: int, what: str, advice: str = "") -> RequestError:
        return RequestError(f"cp={self.cp_degree}: {self.graph.describe_location(index)} {what}: {advice or f'use --mesh dp={self.cp_degree}'}")

    def _check_size(self) -> None:
        if self.sequence_length % self.cp_degree:
            down, up = self.sequence_length // self.cp_degree * self.cp_degree, -(-self.sequence_length // self.cp_degree) * self.cp_degree
            fits = " or ".join(str(n) for n in (down, up) if n)
            raise RequestError(
                f"cp={self.cp_degree} does not divide the {self.sequence_length} positions of a sample: use a sequence (--seq) of {fits}"
            )

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
        for number, value in enumerate(self.dataflow.values):
            if number in self.graph.producer or not self._has_positions(number) or number in self.whole_values:
                continue
            dim = next(d for d, logical_dims in enumerate(value.logical_dims) if self.logical_dim in logical_dims)
            if value.logical_dims[dim] != (self.logical_dim,):
                continue  # a longer table, which the code slices
            if number in fields:
                self.fields.append(ShardedField(fields[number].leaf, fields[number].name, dim))
            elif value.parameter:
                self._check_reading_module(number, value.parameter)
                self.split_parameters.append(ParameterShard(value.parameter, dim))
            else:
                raise self.refusal(self.graph.consumers[number][0], "uses a constant with an entry for each position", "register it as a buffer")
            self.sharded_values.add(number)

    def _check_reading_module(self, value: int, name: str) -> None:
        owner = name.rpartition(".")[0]
        spans = [(m.first_op, m.end_op) for m in self.dataflow.modules if m.module == owner]
        for index in self.graph.consumers.get(value, []):
            if not any(first <= index < last for first, last in spans):
                raise self.refusal(index, f"reads {name}, which has an entry for each position, outside its own module")

    def _propagate_op(self, index: int, op: Operation) -> None:
        values = self.dataflow.values
        mine = [v for v in op.inputs if v in self.sharded_values]
        wholes = [v for v in op.inputs if v not in self.sharded_values and self._has_positions(v)]
        makes = [v for v in op.outputs if self._has_positions(v)]
        if any(sum(s == self.logical_dim for dim in values[v].logical_dims for s in dim) > 1 for v in op.outputs):
            raise self.refusal(index, f"compares positions with each other ({op.name})", "attend through F.scaled_dot_product_attention")
        if (mine or makes) and any(v in self.reductions.kinds for v in op.inputs):
            raise RequestError(f"cp={self.cp_degree}: {self.reductions.late_use_reason(op)}: use --mesh dp={self.cp_degree}")
        if op.name == "attention" and self.logical_dim in op.indivisible_dims:
            self._record_attention(index, op)
        elif _slices_positions(self.dataflow, op, self.logical_dim) or (makes and not mine and not wholes):
            if mine:
                raise self._blocking_error(index, op)
            self._record_generator(index, op)
        elif self.logical_dim in (*op.contracted_dims, *op.indivisible_dims):
            self._reduce_positions(index, op, mine, wholes, makes)
        elif mine and not makes and op.name not in _POSITION_FREE_OPS:
            raise self.refusal(index, f"loses sight of positions ({op.name})")
        elif makes and not self.whole_values.issuperset(makes):
            for value in wholes:
                self.split_edges.setdefault(value, set()).add(index)
        else:
            self.reductions.propagate(op)
        self.sharded_values.update(v for v in makes if v not in self.whole_values)

    def _record_attention(self, index: int, op: Operation) -> None:
        if len(op.inputs) > 3:
            raise self.refusal(index, "gives attention a mask", "leave it out (is_causal=True masks what is to come), or use another axis")
        if not self.sharded_values.issuperset(op.inputs):
            raise self.refusal(index, "attends to values that do not depend on positions")
        self.attention_ops.append(index)

    def _reduce_positions(self, index: int, op: Operation, sharded_inputs: list[int], whole_inputs: list[int], position_outputs: list[int]) -> None:
        """Handle an operation that needs all positions at once: allowed at the end of a loss, or on whole values."""
        if not sharded_inputs:
            if not self.whole_values.issuperset(position_outputs):
                raise self.refusal(index, f"makes positions in a way that is not known ({op.name})")
            return
        for value in whole_inputs:
            self.split_edges.setdefault(value, set()).add(index)
        if self.logical_dim in op.contracted_dims or not self.reductions.record_reduction(op):
            raise self._blocking_error(index, op)
        if op.name in NLL_OPS and op.int_args == (1,):
            if op.function not in ("cross_entropy", "nll_loss"):
                raise self.refusal(index, f"takes the mean over targets in a way that is not known ({op.function})")
            self.target_count_modules[self.graph.enclosing_module(index)] = None

    def _record_generator(self, index: int, op: Operation) -> None:
        """Record a call that generates positions: the run makes it generate this rank's, or all of them where they are needed whole."""
        if op.name in _POSITION_FREE_OPS:
            return
        out = self.dataflow.values[op.outputs[0]]
        dim = op.int_args[0] if op.name == "slice" and op.int_args else 0
        logical_dims = out.logical_dims[dim] if op.int_args and op.name in _POSITION_FUNCTIONS else ()
        at = logical_dims.index(self.logical_dim) if self.logical_dim in logical_dims else -1
        unknown = (
            op.function not in _POSITION_FUNCTIONS.get(op.name, ())
            or at < 0
            or (op.name == "slice" and (op.int_args[2] != 1 or len(logical_dims) > 1))
        )
        if unknown and any(self.dataflow.values[v].floating for v in op.inputs) and op.name != "slice":
            raise self._blocking_error(index, op)
        if unknown:
            raise self.refusal(index, f"makes positions in a way that is not known ({op.function or op.name})")
        cut, frame = op.outputs[0] not in self.whole_values, self.graph.enclosing_module(index)
        if op.name == "slice":
            self.position_generators[index] = PositionGenerator(
                frame, "slice", op.int_args[1], 1, self.dataflow.values[op.inputs[0]].shape[dim], is_sharded=cut
            )
        else:
            outer, inner = _dims_length(self.dataflow, logical_dims[:at]), _dims_length(self.dataflow, logical_dims[at + 1 :])
            self.position_generators[index] = PositionGenerator(frame, "arange", op.int_args[0], op.int_args[1], 0, outer, inner, cut)


class _ContextPolicyBuilder:
    """Builds the policy from a finished propagation. Only the attention sites depend on tensor parallelism."""

    def __init__(self, follower: _ContextPropagation) -> None:
        self.follower, self.flow, self.reader = follower, follower.dataflow, follower.graph
        self.position_calls = tuple(dict.fromkeys(follower.position_generators.values()))

    def build(self, tensor: TensorPolicy | None, precision: str) -> ContextPolicy:
        return replace(self._base_policy, attention_sites=tuple(self._attention_sites(tensor, precision)))

    @cached_property
    def _base_policy(self) -> ContextPolicy:
        """The policy without its attention sites."""
        found, ways = self.follower, self.follower.cp_degree
        self._check_calls_distinct()
        self._check_losses_distinct()
        sizes, unclear, _ = self.reader.size_rewrites({found.logical_dim: POSITIONS_DIM}, found.whole_values)
        kept, unclear = ([r for r in some if not r.length] for some in (sizes, unclear))  # slices of positions are position generators
        return ContextPolicy(
            sequence_length=found.sequence_length,
            chunks=2 * ways if found.sequence_length % (2 * ways) == 0 else ways,
            fields=tuple(found.fields),
            position_generators=self.position_calls,
            position_splits=tuple(dict.fromkeys(self._split_inputs())),
            position_tables=tuple(found.split_parameters),
            mean_loss_modules=tuple(found.target_count_modules),
            size_rewrites=tuple(r for r in kept if r not in unclear),
        )

    def _split_inputs(self) -> Iterator[PositionSplit]:
        """Where whole values are split into positions: at the smallest module that takes the value in and uses only this rank's part."""
        for value, ops in self.follower.split_edges.items():
            calls = sorted((m for m in self.flow.modules if value in m.inputs), key=lambda m: m.end_op - m.first_op)
            users = self.reader.consumers[value]
            logical_dims = self.flow.values[value].logical_dims
            dim = next(d for d, found in enumerate(logical_dims) if self.follower.logical_dim in found)
            at = logical_dims[dim].index(self.follower.logical_dim)
            outer, inner = _dims_length(self.flow, logical_dims[dim][:at]), _dims_length(self.flow, logical_dims[dim][at + 1 :])
            for index in ops:
                call = next((m for m in calls if m.first_op <= index < m.end_op and all(i in ops for i in users if m.first_op <= i < m.end_op)), None)
                if call is None:
                    raise self.follower.refusal(index, f"needs the same positions whole and cut ({self.reader.op(index).name})")
                yield PositionSplit(call.module, call.inputs.index(value), dim, outer, inner)

    def _attention_sites(self, tensor: TensorPolicy | None, precision: str) -> Iterator[AttentionSite]:
        """Every attention call, with the bytes of a sample's keys and values, which ranks gather."""
        sharded = sharded_logical_dims(self.flow, tensor)
        for op in map(self.reader.op, self.follower.attention_ops):
            pair = [self.flow.values[v] for v in op.inputs[1:3]]
            item = ITEM_BYTES[LOW_PRECISION_DTYPES[precision]] if precision in LOW_PRECISION_DTYPES else max(v.itemsize for v in pair)
            size = sum(math.prod(v.shape) for v in pair) * item / self.flow.batch
            logical_dim = next((sharded[s] for s in sorted(self.reader.value_dims[op.inputs[1]]) if s in sharded), "")
            yield AttentionSite(op.module, size, logical_dim, any(v.needs_grad for v in pair))

    @cached_property
    def _patched_modules(self) -> set[str]:
        """Modules whose code is patched to see this rank's positions, plus the model and the loss for code outside of them."""
        return {m.module for m in self.position_calls} | {self.reader.op(i).module for i in self.follower.attention_ops} | {"", LOSS_MODULE}

    def _check_calls_distinct(self) -> None:
        """Raise if a call that generates positions looks like another call in the same code, at the whole or the sharded length."""
        calls, ways = self.position_calls, self.follower.cp_degree
        known = {(m.module, m.function, m.start, m.step, m.source_length) for m in calls}
        if len({replace(m, is_sharded=True) for m in calls}) < len(calls):
            raise RequestError(f"cp={ways}: {calls[0].module or 'the model'} needs the same positions whole and cut: use --mesh dp={ways}")
        for index, op in enumerate(self.flow.operations):
            if index in self.follower.position_generators or op.function not in _POSITION_FUNCTIONS.get(op.name, ()) or not op.int_args:
                continue
            frame = self.reader.enclosing_module(index, self._patched_modules)
            dim = op.int_args[0] if op.name == "slice" else 0
            of = self.flow.values[op.inputs[0]].shape[dim] if op.name == "slice" else 0
            start, step = op.int_args[1:] if op.name == "slice" else op.int_args
            length = self.flow.values[op.outputs[0]].shape[dim]
            if length in self._position_lengths(frame, op.name) and (frame, op.name, start, step, of) in known:
                raise self.follower.refusal(index, f"makes positions and other things of the length {length}", "use another sequence length (--seq)")

    def _position_lengths(self, frame: str, function: str) -> set[int]:
        mine = [m for m in self.position_calls if (m.module, m.function) == (frame, function)]
        return {
            m.outer * n * m.inner for m in mine for n in (self.follower.sequence_length, self.follower.sequence_length // self.follower.cp_degree)
        }

    def _check_losses_distinct(self) -> None:
        """Raise unless every cross entropy in code that averages over the targets of all ranks runs over positions."""
        for index, op in enumerate(self.flow.operations):
            over_others = op.name in NLL_OPS and self.follower.logical_dim not in op.indivisible_dims
            if over_others and self.reader.enclosing_module(index, self._patched_modules) in self.follower.target_count_modules:
                raise self.follower.refusal(index, "takes a cross entropy over positions and one over other things")


def _find_whole_values(reader: DataflowGraph, strand: int, reductions: LossReductions) -> set[int]:
    """Integer values (tokens, position numbers) of which some operation needs all positions: kept whole until a module splits them."""
    flow = reader.dataflow

    def is_index(value: int) -> bool:
        return not flow.values[value].floating

    free: set[int] = {v for v in range(len(flow.values)) if v not in reader.producer and is_index(v)}
    for op in flow.operations:
        if all(v in free for v in op.inputs):
            free.update(v for v in op.outputs if is_index(v))
    found: set[int] = set()
    for op in reversed(flow.operations):
        mine = [v for v in op.inputs if strand in reader.value_dims[v]]
        binding = (strand in (*op.contracted_dims, *op.indivisible_dims) and not reductions.reduction_of(op)) or _slices_positions(flow, op, strand)
        if mine and all(v in free for v in mine) and (binding or found.intersection(op.outputs)):
            found.update(mine)
    for op in reversed(flow.operations):  # the inputs of a whole value's producer are whole too
        if found.intersection(op.outputs):
            found.update(v for v in op.inputs if strand in reader.value_dims[v])
    return found


def _dims_length(flow: Dataflow, logical_dims: Iterable[int]) -> int:
    return math.prod(flow.sizes[s] for s in logical_dims)


def _slices_positions(dataflow: Dataflow, op: Operation, logical_dim: int) -> bool:
    """Whether an operation is a slice of a longer dim whose result is positions."""
    if op.name != "slice" or not op.int_args:
        return False
    before, after = dataflow.values[op.inputs[0]], dataflow.values[op.outputs[0]]
    dim = op.int_args[0]
    return before.shape[dim] != after.shape[dim] and logical_dim in after.logical_dims[dim]
