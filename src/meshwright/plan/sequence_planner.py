"""Adds sequence parallelism to a tensor policy: tensor-parallel ranks shard positions between the tensor-parallel parts of a model (see [Note:
sequence]). Pure reasoning over dataflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright.core.dataflow import ModuleCall, Operation
from meshwright.core.errors import RequestError
from meshwright.core.tensor_policy import CollectiveSite, DropoutSite, ShardedDim, TensorPolicy
from meshwright.plan.copy_sites import CollectiveSiteBuilder
from meshwright.plan.dataflow_graph import DataflowGraph
from meshwright.plan.sequence_region import SequenceParallelError, SequenceRegion, is_read_in, logical_dim_of
from meshwright.plan.size_arguments import VIEW_OPS, size_arguments

_NO_REGION = "no tensor-parallel layer is followed by another one that takes the same positions"


def add_sequence_parallel(graph: DataflowGraph, policy: TensorPolicy, sharded_dims: frozenset[int], tp_degree: int) -> TensorPolicy:
    """The same policy with sequence parallelism added. Raises a RequestError with the reason if the model does not allow it."""
    reason = _NO_REGION
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
    sharded: dict[int, tuple[str, int]] = {}
    sites = (site for site in (*policy.reduce_sites, *policy.sequence_scatter_sites) if site.sequence_layout)
    for logical_dim in {logical_dim_of(graph, policy, site) for site in sites}:
        region = SequenceRegion(graph, policy, logical_dim, sharded_dims)
        region.restore_from_policy()
        region.propagate()
        for value in region.sharded_values - region.gathered_outputs:
            layout = region.position_layout(value)
            sharded[value] = (layout.logical_dim, -1 if layout.has_outer_dims or layout.inner > 1 else layout.dim)
    return sharded


def _candidate_dims(graph: DataflowGraph, policy: TensorPolicy, sharded_dims: frozenset[int], tp_degree: int) -> list[int]:
    """Logical dims of reduced outputs that are neither samples nor features (dims of the layer's own parameters); the most frequent first."""
    counts: Counter[int] = Counter()
    for site in policy.reduce_sites:
        for call in graph.calls_by_module[site.module]:
            inputs = {v for i in range(call.first_op, call.end_op) for v in graph.op(i).inputs}
            read = {v for v in inputs if v in graph.parameter_of or graph.dataflow.values[v].parameter}  # frozen ones too
            features = {s for v in read for s in graph.value_dims[v]}
            positions = graph.value_dims[call.outputs[0]] - features - graph.dataflow.sample_dims - sharded_dims
            counts.update(s for s in positions if graph.dataflow.sizes[s] >= tp_degree)
    return sorted(counts, key=lambda s: (-counts[s], s))


class _SitePlacement:
    """Places scatters and gathers at the inputs and outputs of modules, until every operation of a region gets its inputs as it needs them."""

    def __init__(self, region: SequenceRegion) -> None:
        self.region, self.graph = region, region.graph

    def solve(self) -> None:
        for _ in range(len(self.graph.dataflow.values)):
            self.region.propagate()
            if not self._place_scatters() and not self._place_gathers():
                break
        self.region.drop_needless_gathers()
        self._check_calls()
        self._check_reads()

    def _place_scatters(self) -> bool:
        """Scatter replicated values that are combined with sharded ones at the input of the smallest module that does so; their other uses in it then
        get shards too."""
        for value, ops in self.region.needs_scatter.items():
            call = next((c for c in self.graph.input_calls(value) if any(c.first_op <= i < c.end_op for i in ops)), None)
            if call is None:
                index = min(ops)
                location, op = self.graph.describe_location(index), self.graph.op(index).name
                raise SequenceParallelError(f"{location} combines sharded positions with a replicated value ({op})")
            self.region.scatters[value, call.first_op] = call
        return bool(self.region.needs_scatter)

    def _place_gathers(self) -> bool:
        for value, ops in self.region.needs_gather.items():
            remaining = set(ops)
            for call in self.graph.input_calls(value):
                inside = {i for i in self.graph.consumers.get(value, []) if call.first_op <= i < call.end_op}
                if remaining & inside and inside <= ops:
                    self.region.gathers[value, call.first_op] = call
                    remaining -= inside
            if remaining or not ops:
                self._gather_at_output(value)
        return bool(self.region.needs_gather)

    def _gather_at_output(self, value: int) -> None:
        region, producer = self.region, self.graph.producer.get(value)
        for key in [k for k in region.gathers if k[0] == value]:
            del region.gathers[key]
        call = region.producing_call(value)
        if value in region.sharded_values and call is not None and call.end_op <= min(region.needs_gather[value], default=call.end_op):
            region.gathered_outputs.add(value)
        elif producer is not None and producer not in region.stop_ops:
            region.gathered_outputs.discard(value)
            region.stop_ops.add(producer)  # its inputs are then gathered instead
        else:
            index = min(region.needs_gather[value], default=0)
            location, op = self.graph.describe_location(index), self.graph.op(index).name
            raise SequenceParallelError(f"{location} needs all positions of a value that no module returns ({op})")

    def _check_calls(self) -> None:
        """Raise unless all calls of a module have the same scatters and gathers: what is done at its input is done in every call."""
        region = self.region
        entering = {(v, c.first_op) for v, c in region.sharded_entries()}
        entries = [((v, c.first_op), c) for v, calls in region.entry_calls.items() for c in calls if (v, c.first_op) in entering]
        calls_by_kind = {"entries": entries, "scatters": region.scatters.items(), "gathers": region.gathers.items()}
        keys = {kind: {key for key, _ in calls} for kind, calls in calls_by_kind.items()}
        sites = {(c.module, c.inputs.index(v), kind) for kind, calls in calls_by_kind.items() for (v, _), c in calls}
        several = "is called several times, with sharded and with replicated positions"
        for module, position, kind in sorted(sites):
            if any((c.inputs[position], c.first_op) not in keys[kind] for c in self.graph.calls_by_module[module]):
                raise SequenceParallelError(f"{module} {several}")
        for module in {c.module for c in region.reduced_outputs.values()} | set(region.dropout_modules):
            if any(c.outputs[0] not in region.sharded_values for c in self.graph.calls_by_module[module]):
                raise SequenceParallelError(f"{module} {several}")
        for name, ops in region.partial_parameters.items():
            if any(not self._has_partial_gradient(name, index) for index in self.graph.parameter_reads(name) - ops):
                raise SequenceParallelError(f"{name} is used several times, with sharded and with replicated positions")

    def _has_partial_gradient(self, name: str, index: int) -> bool:
        """Whether a parameter's gradient from this operation is a partial sum: inside a tensor-parallel region, or before a reduce-scatter."""
        if name in self.region.policy.partial_grad_parameters:
            return True
        return any(c.first_op <= index < c.end_op for c in self.region.reduced_outputs.values())

    def _check_reads(self) -> None:
        """Raise where code reads the number of positions from a sharded value, which gives this rank's number, and uses it for a replicated value."""
        flow, region = self.graph.dataflow, self.region
        for read in flow.size_reads:
            op_index = read.before_operation
            counts_positions = region.logical_dim in flow.values[read.value].logical_dims[read.dim]
            if not counts_positions or not region.is_sharded_where_read(read):
                continue
            modules = {c.module for c in flow.modules if is_read_in(read, c)}
            if not modules.isdisjoint(region.dropout_modules):
                continue  # dropout modules run on all positions
            for op in (o for o in flow.operations[op_index:] if o.call_index >= 0 and flow.sized_calls[o.call_index].module in modules):
                if self._regroups_positions(op, flow.values[read.value].logical_dims[read.dim]):
                    raise SequenceParallelError(f"the code of {read.module or 'the model'} computes sizes from the number of positions")
                dims = flow.values[op.outputs[0]].logical_dims
                if op.outputs[0] not in region.sharded_values and any(region.logical_dim in dims[at] for _, _, at, _ in size_arguments(flow, op)):
                    module = flow.sized_calls[op.call_index].module or "the model"
                    raise SequenceParallelError(f"the code of {module} takes the number of positions from one value and uses it for another")

    def _regroups_positions(self, op: Operation, read_dims: tuple[int, ...]) -> bool:
        """Whether a view splits the dim that was read, also into parts of one: sizes that code computes for it differ for a rank's positions."""
        flow, region = self.graph.dataflow, self.region
        source, out = (flow.values[v] for v in (op.inputs[0], op.outputs[0])) if op.inputs else (None, None)
        if source is None or out is None or not region.has_dim(op.inputs[0]) or not region.has_dim(op.outputs[0]):
            return False
        at = next(i for i, dims in enumerate(out.logical_dims) if region.logical_dim in dims)
        beside = (*out.shape[max(at - 1, 0) : at], *out.shape[at + 1 : at + 2])
        return op.name in VIEW_OPS and (not set(read_dims) <= set(out.logical_dims[at]) or (len(source.shape) != len(out.shape) and 1 in beside))


class _SequencePolicyBuilder:
    """Builds the policy of a region whose scatters and gathers are placed."""

    def __init__(self, region: SequenceRegion) -> None:
        self.region, self.graph = region, region.graph
        self._site_builder = CollectiveSiteBuilder(self.graph, {})
        self._entries = {(c.module, c.inputs.index(v)): v for v, c in region.sharded_entries()}

    def build(self) -> TensorPolicy:
        region, old, flow = self.region, self.region.policy, self.graph.dataflow
        if len(self._entries) <= len(region.gathers) + len(region.gathered_outputs):
            raise SequenceParallelError(_NO_REGION)
        replicated = set(range(len(flow.values))) - region.sharded_values  # where it is computed, an output that is gathered is sharded
        sizes, unclear, uneven = self.graph.size_rewrites({region.logical_dim: region.dim_name}, replicated)
        for rewrite in (*unclear, *uneven):
            module = rewrite.module or "the model"
            raise SequenceParallelError(f"the code of {module} uses the number of positions, {rewrite.original_size}, for other things too")
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

    def _moved_entry(self, site: CollectiveSite) -> CollectiveSite:
        entry = self.region.moved_entries.get((site.module, site.position))
        if entry is None or entry not in self._entries:
            return site
        return replace(site, module=entry[0], position=entry[1], sequence_layout=self.region.position_layout(self._entries[entry]))

    def _input_sites(self, calls: Mapping[tuple[int, int], ModuleCall]) -> Iterator[CollectiveSite]:
        for module, position, value in dict.fromkeys((c.module, c.inputs.index(v), v) for (v, _), c in calls.items()):
            yield self._along_positions(self._site_builder.build(module, value, position), value)

    def _output_sites(self) -> Iterator[CollectiveSite]:
        for value in sorted(self.region.gathered_outputs):
            call = self.region.producing_call(value)
            assert call is not None
            yield replace(self._along_positions(self._site_builder.build(call.module, value, call.outputs.index(value)), value), at_output=True)

    def _along_positions(self, site: CollectiveSite, value: int) -> CollectiveSite:
        return replace(site, sequence_layout=self.region.position_layout(value), needs_grad=self.graph.dataflow.values[value].needs_grad)

    def _partial_biases(self) -> Iterator[str]:
        """Biases of layers whose output is reduce-scattered: each rank adds them to its own positions only, so their gradients are partial. A layer
        adds its bias in the product, or in an operation of its own if its input is not contiguous."""
        sharded = self.region.sharded_dims
        for call in self.region.reduced_outputs.values():
            for index in range(call.first_op, call.end_op):
                for value in self.graph.op(index).inputs:
                    if value in self.graph.parameter_of and not sharded & self.graph.value_dims[value]:
                        yield self.graph.parameter_of[value]
