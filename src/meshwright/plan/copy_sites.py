"""Finds the copy sites of tensor parallelism: module inputs where sharded operations read an unsharded value, so that its gradient is partial and
is all-reduced in backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from meshwright.core.dataflow import ModuleCall
from meshwright.core.tensor_policy import CollectiveSite
from meshwright.plan.dataflow_graph import DataflowGraph


class ShardingBlockedError(Exception):
    """A logical dim that cannot be sharded; or, -1, layers whose outputs cannot be gathered."""

    def __init__(self, logical_dim: int, reason: str, layers: Collection[str] = ()) -> None:
        self.logical_dim, self.reason, self.layers = logical_dim, reason, layers


@dataclass(frozen=True)
class CollectiveSiteBuilder:
    """Builds collective sites for values of the dataflow. The other axis of 2D tensor parallelism may shard a logical dim of the value."""

    graph: DataflowGraph
    dim_names: Mapping[int, str]
    gathered_layers: Mapping[str, str] = field(default_factory=dict)  # layers whose outputs the other axis gathers → the logical dim

    def build(self, module: str, value: int, position: int = 0) -> CollectiveSite:
        dataflow, dims = self.graph.dataflow, self.graph.value_dims[value]
        size = math.prod(dataflow.values[value].shape) * dataflow.values[value].itemsize
        batch_independent = dataflow.sample_dims.isdisjoint(dims)
        other_dim = next((self.dim_names[s] for s in dims if s in self.dim_names), "")
        return CollectiveSite(module, size if batch_independent else size / dataflow.batch, position, batch_independent, other_axis_dim=other_dim)

    def at_output(self, call: ModuleCall) -> CollectiveSite:
        """The site at a layer's output."""
        outer = [m for m in self.graph.enclosing_calls[call.first_op] if call.end_op <= m.end_op]
        skipped = tuple(m.module for m in outer if m.module and m.ops_before_last_save < call.end_op)
        site = self.build(call.module, call.outputs[0])
        return replace(site, skipped_in_recompute=skipped, other_axis_dim=self.gathered_layers.get(call.module, site.other_axis_dim))


def find_copy_sites(
    graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_dims: set[int], gathered_layers: set[str]
) -> tuple[list[CollectiveSite], list[str]]:
    """The copy sites, and the unsharded parameters whose gradients are partial."""
    statistics = _norm_statistics(graph, sharded_dims)
    partial_uses: dict[int, set[int]] = {}  # unsharded value → sharded operations that read it
    partial_parameters: dict[str, set[int]] = {}  # unsharded parameter → sharded operations that read it
    sums: dict[int, tuple[int, int]] = {}  # value that is a partial sum → the contracted logical dim, and the operation from which it is complete
    ops_by_input: dict[tuple[str, int], set[int]] = {}  # module and the position of its input → sharded operations that read it
    for index, op in enumerate(graph.dataflow.operations):
        for logical_dim in sharded_dims.intersection(op.contracted_dims):
            if (reduction := graph.find_reduction_site(index, logical_dim)) is not None:
                sums |= dict.fromkeys(reduction[1], (logical_dim, reduction[0].end_op))
        partial = {v for v in op.inputs if v in sums and index < sums[v][1]}
        is_sharded = sharded_dims & graph.operation_dims[index] or partial
        call = graph.innermost_call.get(index)
        is_gathered = call is not None and call.module in gathered_layers and bool(op.contracted_dims)
        adds_bias_later = bool(sharded_dims.intersection(op.contracted_dims))  # the layer adds its bias after the reduction
        for value in op.inputs if is_sharded or is_gathered else ():
            parameter = graph.parameter_of.get(value)
            is_unsharded = value not in partial and value not in statistics and not sharded_dims & graph.value_dims[value]
            if not is_unsharded or not graph.dataflow.values[value].needs_grad or (parameter and (is_gathered or adds_bias_later)):
                continue
            if parameter:
                partial_parameters.setdefault(parameter, set()).add(index)
            else:
                partial_uses.setdefault(value, set()).add(index)

    def blocked(ops: set[int], reason: str) -> ShardingBlockedError:
        dims = {s for i in ops for s in sharded_dims & graph.operation_dims[i]} or {sums[v][0] for i in ops for v in graph.op(i).inputs if v in sums}
        layers = {call.module for i in ops if (call := graph.innermost_call.get(i)) is not None} & gathered_layers
        return ShardingBlockedError(min(dims or sharded_dims) if dims or not layers else -1, reason, layers)

    for name, ops in partial_parameters.items():
        if graph.parameter_reads(name) - ops:
            raise blocked(ops, f"{name} is read by unsharded operations too")
    sites: list[CollectiveSite] = []
    for value, ops in sorted(_lift_grad_sums(graph, partial_uses).items()):
        for site in _place_sites(graph, site_builder, value, ops, blocked):
            sites.append(site)
            ops_by_input.setdefault((site.module, site.position), set()).update(ops)
    num_calls = Counter(call.module for call in graph.dataflow.modules)
    num_sites = Counter((site.module, site.position) for site in sites)
    for (module, position), ops in ops_by_input.items():
        if num_sites[module, position] != num_calls[module]:  # a site takes effect in every call of its module
            raise blocked(ops, f"{module or 'the model'} is called {num_calls[module]} times and not always with it")
    return sites, list(partial_parameters)


def _norm_statistics(graph: DataflowGraph, sharded_dims: set[int]) -> set[int]:
    """Values that depend on sharded features only through a norm's statistics: their gradients are reduced together with the statistics."""
    statistics: dict[int, int] = {}  # value → the logical dim
    for index, op in enumerate(graph.dataflow.operations):
        reduced = next(iter(sharded_dims.intersection(op.indivisible_dims)), None)
        if not statistics and reduced is None:
            continue
        outputs = [v for v in op.outputs if not sharded_dims & graph.value_dims[v]]
        inputs = [v for v in op.inputs if graph.dataflow.values[v].needs_grad and v not in graph.parameter_of]
        input_dims = [statistics[v] for v in inputs if v in statistics]
        if reduced is not None or (input_dims and len(input_dims) == len(inputs)):
            statistics.update(dict.fromkeys(outputs, input_dims[0] if reduced is None else reduced))
        elif input_dims and not sharded_dims & graph.operation_dims[index]:
            raise ShardingBlockedError(input_dims[0], f"{op.name} in {op.module or 'the loss'} uses a statistic of it")
    return set(statistics)


def _lift_grad_sums(graph: DataflowGraph, partial_uses: dict[int, set[int]]) -> dict[int, set[int]]:
    """Move gradient reductions upstream: a gradient may be summed before an operation instead of after it (backward is linear), if all uses of its
    result are partial. This skips views inside a layer, up to the layer's input."""
    lifted: dict[int, set[int]] = {}
    pending = dict(partial_uses)
    while pending:
        value, ops = pending.popitem()
        producer = graph.producer.get(value)
        consumers = {i for i in graph.consumers.get(value, []) if graph.dataflow.values[value].needs_grad}
        if producer is not None and consumers <= ops and _is_liftable(graph, producer, ops):
            source = next(v for v in graph.op(producer).inputs if graph.dataflow.values[v].needs_grad)
            uses = pending if source in pending or source not in lifted else lifted
            uses[source] = {producer} | uses.get(source, set())
        else:
            lifted[value] = ops | lifted.get(value, set())
    return lifted


def _is_liftable(graph: DataflowGraph, producer: int, ops: set[int]) -> bool:
    """Whether an operation has no parameters and one input that needs gradients, inside the layer that uses its result."""
    inputs, call = [v for v in graph.op(producer).inputs if graph.dataflow.values[v].needs_grad], graph.innermost_call.get(producer)
    return len(inputs) == 1 and inputs[0] not in graph.parameter_of and all(graph.innermost_call.get(i) is call for i in ops)


def _place_sites(
    graph: DataflowGraph, site_builder: CollectiveSiteBuilder, value: int, ops: set[int], blocked: Callable[[set[int], str], ShardingBlockedError]
) -> list[CollectiveSite]:
    """One site at the smallest module that takes the value as input and contains exactly its partial uses; else one at each module that contains as
    many of them as possible and no other use."""
    inside = [(call, {i for i in graph.consumers.get(value, []) if call.first_op <= i < call.end_op}) for call in graph.input_calls(value)]
    for call, consumers in inside:
        if consumers == ops:
            return [_input_site(graph, site_builder, value, call)]
    layers: dict[tuple[int, int], ModuleCall] = {}
    for index in ops:
        around = [(call, consumers) for call, consumers in inside if call.first_op <= index < call.end_op and consumers <= ops]
        if not around:
            op = graph.op(index)
            raise blocked({index}, f"{op.name} in {op.module or 'the loss'} combines it with an unsharded activation")
        layer, _ = max(around, key=lambda item: len(item[1]))
        layers[layer.first_op, layer.end_op] = layer
    outer = [m for m in layers.values() if not any(o is not m and o.first_op <= m.first_op and m.end_op <= o.end_op for o in layers.values())]
    return [_input_site(graph, site_builder, value, m) for m in outer]  # outermost only: nested sites would sum the gradient twice


def _input_site(graph: DataflowGraph, site_builder: CollectiveSiteBuilder, value: int, call: ModuleCall) -> CollectiveSite:
    """The site at a module's input, with the linear layers inside the module that multiply that input by their weight."""
    inside = (m for m in graph.consumer_calls(value) if m.kind == "linear" and call.first_op <= m.first_op and m.end_op <= call.end_op)
    site = site_builder.build(call.module, value, call.inputs.index(value))
    return replace(site, linear_layers=tuple(m.module for m in inside if m.inputs[0] == value))
