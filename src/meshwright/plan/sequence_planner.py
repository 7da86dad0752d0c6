"""Adds sequence parallelism to a tensor policy: tensor-parallel ranks shard positions between the tensor-parallel parts of a model (see [Note:
sequence]). Pure reasoning over dataflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright.core.dataflow import ModuleCall
from meshwright.core.errors import RequestError
from meshwright.core.tensor_policy import CollectiveSite, DropoutSite, ShardedDim, TensorPolicy
from meshwright.plan.copy_sites import CollectiveSiteBuilder
from meshwright.plan.dataflow_graph import DataflowGraph
from meshwright.plan.sequence_region import SequenceParallelError, SequenceRegion, logical_dim_of
from meshwright.plan.size_arguments import size_arguments


def add_sequence_parallel(graph: DataflowGraph, policy: TensorPolicy, sharded_dims: frozenset[int], tp_degree: int) -> TensorPolicy:
    """The same policy with sequence parallelism added. Raises a RequestError with the reason if the model does not allow it."""
    reason = "no cut part is followed by one that takes the same positions"
    for logical_dim in _candidate_dims(graph, policy, sharded_dims, tp_degree):
        try:
            region = SequenceRegion(graph, policy, logical_dim, sharded_dims)
            _SitePlacement(region).solve()
            policy = _SequencePolicyBuilder(region).build()
        except SequenceParallelError as error:
            reason = str(error)
    if not policy.is_sequence_parallel:
        raise RequestError(f"sequence=true: {reason}: leave it out")
    return policy


def sequence_sharded_values(graph: DataflowGraph, policy: TensorPolicy, sharded_dims: frozenset[int]) -> dict[int, tuple[str, int]]:
    """Values that are sequence-sharded wherever they are used: value → (name of the logical dim, tensor dim), with dim -1 if that dim holds other
    logical dims too."""
    found: dict[int, tuple[str, int]] = {}
    for logical_dim in {
        s for m in (*policy.reduce_sites, *policy.sequence_scatter_sites) if m.sequence_layout for s in [logical_dim_of(graph, policy, m)]
    }:
        region = SequenceRegion(graph, policy, logical_dim, sharded_dims)
        region.restore_from_policy()
        region.propagate()
        for value in region.sharded_values - region.gathered_outputs:
            along = region.position_layout(value)
            found[value] = (along.logical_dim, -1 if along.has_outer_dims or along.inner > 1 else along.dim)
    return found


def _candidate_dims(graph: DataflowGraph, policy: TensorPolicy, sharded_dims: frozenset[int], tp_degree: int) -> list[int]:
    """Logical dims of reduced outputs that are neither samples nor features (dims of the layer's own parameters); the most frequent first."""
    count: dict[int, int] = {}
    for site in policy.reduce_sites:
        for call in graph.calls_by_module[site.module]:
            read = {v for i in range(call.first_op, call.end_op) for v in graph.op(i).inputs if v in graph.parameter_of}
            features = {s for v in read for s in graph.value_dims[v]}
            for logical_dim in graph.value_dims[call.outputs[0]] - features - graph.dataflow.sample_dims - sharded_dims:
                if graph.dataflow.sizes[logical_dim] >= tp_degree:
                    count[logical_dim] = count.get(logical_dim, 0) + 1
    return sorted(count, key=lambda s: (-count[s], s))


class _SitePlacement:
    """Places scatters and gathers at the inputs and outputs of modules, until every operation of a region gets its inputs as it needs them."""

    def __init__(self, region: SequenceRegion) -> None:
        self.region, self.reader = region, region.graph

    def solve(self) -> None:
        for _ in range(len(self.reader.dataflow.values)):
            self.region.propagate()
            if not self._place_scatters() and not self._place_gathers():
                break
        self._check_calls()
        self._check_reads()

    def _place_scatters(self) -> bool:
        """Scatter whole values that are combined with sharded ones at the input of the smallest module that does so; their other uses in it then
        get shards too."""
        for value, ops in self.region.needs_scatter.items():
            call = next((c for c in self.reader.input_calls(value) if any(c.first_op <= i < c.end_op for i in ops)), None)
            if call is None:
                index = min(ops)
                raise SequenceParallelError(
                    f"{self.reader.describe_location(index)} combines positions with a value that every rank has whole ({self.reader.op(index).name})"
                )
            self.region.scatters[value, call.first_op] = call
        return bool(self.region.needs_scatter)

    def _place_gathers(self) -> bool:
        for value, ops in self.region.needs_gather.items():
            left = set(ops)
            for call in self.reader.input_calls(value):
                inside = {i for i in self.reader.consumers.get(value, []) if call.first_op <= i < call.end_op}
                if left & inside and inside <= ops:
                    self.region.gathers[value, call.first_op] = call
                    left -= inside
            if left or not ops:
                self._gather_at_output(value)
        return bool(self.region.needs_gather)

    def _gather_at_output(self, value: int) -> None:
        region = self.region
        for key in [k for k in region.gathers if k[0] == value]:
            del region.gathers[key]
        made = self.reader.producer.get(value)
        if value in region.sharded_values and _producing_call(self.reader, value) is not None:
            region.gathered_outputs.add(value)
        elif made is not None and made not in region.stop_ops:
            region.stop_ops.add(made)  # its inputs are then needed whole, and may be gathered instead
        else:
            index = min(region.needs_gather[value], default=0)
            raise SequenceParallelError(
                f"{self.reader.describe_location(index)} needs all positions of what no module gives out ({self.reader.op(index).name})"
            )

    def _check_calls(self) -> None:
        """Raise unless all calls of a module have the same scatters and gathers: what is done at its input is done in every call."""
        region = self.region
        entering = {(v, c.first_op) for v, c in region.sharded_entries()}
        known = {"entries": entering, "scatters": set(region.scatters), "gathers": set(region.gathers)}
        entries = [(v, c) for v, calls in region.entry_calls.items() for c in calls if (v, c.first_op) in entering]
        sites = {(c.module, c.inputs.index(v), "entries") for v, c in entries}
        sites |= {(c.module, c.inputs.index(v), "scatters") for (v, _), c in region.scatters.items()}
        sites |= {(c.module, c.inputs.index(v), "gathers") for (v, _), c in region.gathers.items()}
        several = "is called several times, with positions of all ranks and of one"
        for module, position, kind in sorted(sites):
            for call in self.reader.calls_by_module[module]:
                if (call.inputs[position], call.first_op) not in known[kind]:
                    raise SequenceParallelError(f"{module} {several}")
        for module in {c.module for c in region.reduced_outputs.values()} | set(region.dropout_modules):
            if any(c.outputs[0] not in region.sharded_values for c in self.reader.calls_by_module[module]):
                raise SequenceParallelError(f"{module} {several}")

    def _check_reads(self) -> None:
        """Raise where code reads the number of positions from a sharded value, which gives this rank's number, and uses it for a whole value."""
        flow, region = self.reader.dataflow, self.region
        for read in flow.size_reads:
            if region.logical_dim not in flow.values[read.value].logical_dims[read.dim] or not region.is_sharded_within(
                read.value, read.before_operation, read.before_operation
            ):
                continue
            frames = {c.module for c in flow.modules if c.first_op <= read.before_operation <= c.end_op}
            if not frames.isdisjoint(region.dropout_modules):
                continue  # dropout modules run on all positions
            for op in (o for o in flow.operations[read.before_operation :] if o.call_index >= 0 and flow.sized_calls[o.call_index].module in frames):
                made = flow.values[op.outputs[0]]
                counts = any(region.logical_dim in made.logical_dims[at] for _, _, at, _ in size_arguments(flow, op))
                if counts and op.outputs[0] not in region.sharded_values:
                    frame = flow.sized_calls[op.call_index].module or "the model"
                    raise SequenceParallelError(f"the code of {frame} takes the number of positions from one value and uses it for another")


class _SequencePolicyBuilder:
    """Builds the policy of a region whose scatters and gathers are placed."""

    def __init__(self, region: SequenceRegion) -> None:
        self.region, self.reader = region, region.graph
        self._meets = CollectiveSiteBuilder(self.reader, {})
        self._entries = {(c.module, c.inputs.index(v)): v for v, c in region.sharded_entries()}

    def build(self) -> TensorPolicy:
        region, old, flow = self.region, self.region.policy, self.reader.dataflow
        if len(self._entries) <= len(region.gathers) + len(region.gathered_outputs):
            raise SequenceParallelError("no cut part is followed by one that takes the same positions")
        whole = set(range(len(flow.values))) - {v for v in region.sharded_values if v not in region.gathered_outputs}
        sizes, unclear, uneven = self.reader.size_rewrites({region.logical_dim: region.dim_name}, whole)
        for rewrite in (*unclear, *uneven):
            raise SequenceParallelError(
                f"the code of {rewrite.module or 'the model'} uses the number of positions, {rewrite.original_size}, for other things too"
            )
        layout, outputs = region.position_layout, {c.module: v for v, c in region.reduced_outputs.items()}
        return replace(
            old,
            sharded_dims=(*old.sharded_dims, ShardedDim(region.dim_name, flow.sizes[region.logical_dim], ())),
            reduce_sites=tuple(replace(m, sequence_layout=layout(outputs[m.module])) if m.module in outputs else m for m in old.reduce_sites),
            copy_sites=tuple(dict.fromkeys(map(self._moved_entry, old.copy_sites))),
            sequence_scatter_sites=(*old.sequence_scatter_sites, *self._input_sites(region.scatters)),
            sequence_gather_sites=(*old.sequence_gather_sites, *self._input_sites(region.gathers), *self._output_sites()),
            dropout_sites=(*old.dropout_sites, *(DropoutSite(module, layout(value)) for module, value in region.dropout_modules.items())),
            partial_grad_parameters=tuple(dict.fromkeys((*old.partial_grad_parameters, *region.partial_parameters, *self._partial_biases()))),
            size_rewrites=(*old.size_rewrites, *sizes),
        )

    def _moved_entry(self, meet: CollectiveSite) -> CollectiveSite:
        place = self.region.moved_entries.get((meet.module, meet.position))
        if place is None or place not in self._entries:
            return meet
        return replace(meet, module=place[0], position=place[1], sequence_layout=self.region.position_layout(self._entries[place]))

    def _input_sites(self, calls: Mapping[tuple[int, int], ModuleCall]) -> Iterator[CollectiveSite]:
        for module, position, value in dict.fromkeys((c.module, c.inputs.index(v), v) for (v, _), c in calls.items()):
            yield self._along_positions(self._meets.build(module, value, position), value)

    def _output_sites(self) -> Iterator[CollectiveSite]:
        for value in sorted(self.region.gathered_outputs):
            call = _producing_call(self.reader, value)
            assert call is not None
            yield replace(self._along_positions(self._meets.build(call.module, value, call.outputs.index(value)), value), at_output=True)

    def _along_positions(self, meet: CollectiveSite, value: int) -> CollectiveSite:
        return replace(meet, sequence_layout=self.region.position_layout(value), needs_grad=self.reader.dataflow.values[value].needs_grad)

    def _partial_biases(self) -> Iterator[str]:
        """Biases of layers whose output is reduce-scattered: each rank adds them to its own positions only, so their gradients are partial."""
        sharded = self.region.sharded_dims
        for call in self.region.reduced_outputs.values():
            for index in range(call.first_op, call.end_op):
                op = self.reader.op(index)
                for value in op.inputs if sharded.intersection(op.contracted_dims) else ():
                    if value in self.reader.parameter_of and not sharded & self.reader.value_dims[value]:
                        yield self.reader.parameter_of[value]


def _producing_call(reader: DataflowGraph, value: int) -> ModuleCall | None:
    """The smallest module call that produces a value and returns it."""
    made = reader.producer.get(value, -1)
    return min((c for c in reader.producer_calls(value) if c.first_op <= made < c.end_op), key=lambda c: c.end_op - c.first_op, default=None)
