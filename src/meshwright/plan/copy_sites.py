"""Finds the copy sites of tensor parallelism: module inputs where an unsharded value enters a sharded part, so that its gradient is partial and is
all-reduced in backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.core.dataflow import ModuleCall
from meshwright.core.tensor_policy import CollectiveSite
from meshwright.plan.dataflow_graph import DataflowGraph


class ShardingBlockedError(Exception):
    def __init__(self, logical_dim: int, reason: str) -> None:
        self.logical_dim, self.reason = logical_dim, reason


@dataclass(frozen=True)
class CollectiveSiteBuilder:
    """Builds collective sites for values of the dataflow. The other axis of 2D tensor parallelism may shard a logical dim of the value."""

    graph: DataflowGraph
    dim_names: Mapping[int, str]
    gathered_layers: Mapping[str, str] = field(default_factory=dict)  # layers whose outputs the other axis gathers → the logical dim

    def build(self, module: str, value: int, position: int = 0) -> CollectiveSite:
        noted, carried = self.graph.dataflow.values[value], self.graph.value_dims[value]
        size = math.prod(noted.shape) * noted.itemsize
        fixed = self.graph.dataflow.sample_dims.isdisjoint(carried)
        across = next((self.dim_names[s] for s in carried if s in self.dim_names), "")
        return CollectiveSite(module, size if fixed else size / self.graph.dataflow.batch, position, fixed, other_axis_dim=across)

    def at_output(self, call: ModuleCall) -> CollectiveSite:
        """The site at a layer's output."""
        outer = [m for m in self.graph.enclosing_calls[call.first_op] if call.end_op <= m.end_op]
        final = tuple(m.module for m in outer if m.module and m.ops_before_last_save < call.end_op)
        found = self.build(call.module, call.outputs[0])
        return replace(found, skipped_in_recompute=final, other_axis_dim=self.gathered_layers.get(call.module, found.other_axis_dim))


def find_copy_sites(
    graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_dims: set[int], gathered_layers: set[str]
) -> tuple[list[CollectiveSite], list[str]]:
    """The copy sites, and the unsharded parameters whose gradients are partial."""
    met = _norm_statistics(graph, sharded_dims)
    edges: dict[int, set[int]] = {}
    partial: dict[str, None] = {}
    sums: dict[int, int] = {}  # value that is a partial sum → the contracted logical dim
    for index, op in enumerate(graph.dataflow.operations):
        for logical_dim in sharded_dims.intersection(op.contracted_dims):
            sums |= dict.fromkeys((graph.find_reduction_site(index, logical_dim) or (None, frozenset()))[1], logical_dim)
        active = sharded_dims & graph.operation_dims[index] or (sums and sums.keys() & set(op.inputs))
        call = graph.innermost_call.get(index)
        opened = call is not None and call.module in gathered_layers and bool(op.contracted_dims)
        if not active and not opened:
            continue
        for value in op.inputs:
            parameter = graph.parameter_of.get(value)
            if (
                not graph.dataflow.values[value].needs_grad
                or value in sums
                or value in met
                or sharded_dims & graph.value_dims[value]
                or (opened and parameter)
            ):
                continue
            if parameter and sharded_dims.intersection(op.contracted_dims):
                continue  # a bias, which the layer adds after the reduction
            if parameter:
                partial[parameter] = None
            else:
                edges.setdefault(value, set()).add(index)
    lifted = _lift_grad_sums(graph, edges)
    return [m for value, ops in sorted(lifted.items()) for m in _place_sites(graph, site_builder, value, ops, sharded_dims, sums)], list(partial)


def _norm_statistics(graph: DataflowGraph, sharded_dims: set[int]) -> set[int]:
    """Values that depend on sharded features only through a norm's statistics: their gradients are reduced together with the statistics."""
    found: dict[int, int] = {}  # value → the logical dim
    flow = graph.dataflow
    for index, op in enumerate(flow.operations):
        if not found and sharded_dims.isdisjoint(op.indivisible_dims):
            continue
        made = [v for v in op.outputs if not sharded_dims & graph.value_dims[v]]
        sources = [v for v in op.inputs if flow.values[v].needs_grad and v not in graph.parameter_of]
        bound = next(iter(sharded_dims.intersection(op.indivisible_dims)), None)
        logical_dims = [found[v] for v in sources if v in found]
        if bound is not None or (logical_dims and len(logical_dims) == len(sources)):
            found.update(dict.fromkeys(made, logical_dims[0] if bound is None else bound))
        elif logical_dims and not sharded_dims & graph.operation_dims[index]:
            raise ShardingBlockedError(logical_dims[0], f"{op.name} in {op.module or 'the loss'} uses a statistic of it")
    return set(found)


def _lift_grad_sums(graph: DataflowGraph, partial_uses: dict[int, set[int]]) -> dict[int, set[int]]:
    """Move gradient reductions upstream: a gradient may be summed before an operation instead of after it (backward is linear), if all uses of its
    result are partial. This skips views inside a layer, up to the layer's input."""
    found: dict[int, set[int]] = {}
    work = dict(partial_uses)
    while work:
        value, ops = work.popitem()
        maker = graph.producer.get(value)
        users = {i for i in graph.consumers.get(value, []) if graph.dataflow.values[value].needs_grad}
        if maker is not None and users <= ops and _is_liftable(graph, maker, ops):
            source = next(v for v in graph.op(maker).inputs if graph.dataflow.values[v].needs_grad)
            into = work if source in work or source not in found else found
            into[source] = {maker} | into.get(source, set())
        else:
            found[value] = ops | found.get(value, set())
    return found


def _is_liftable(graph: DataflowGraph, producer: int, ops: set[int]) -> bool:
    """Whether an operation has no parameters and one input that needs gradients, inside the layer that uses its result."""
    wanted = [v for v in graph.op(producer).inputs if graph.dataflow.values[v].needs_grad]
    if len(wanted) != 1 or wanted[0] in graph.parameter_of:
        return False
    return all(graph.innermost_call.get(producer) is graph.innermost_call.get(i) for i in ops)


def _place_sites(
    graph: DataflowGraph, site_builder: CollectiveSiteBuilder, value: int, ops: set[int], sharded_dims: set[int], partial_sums: Mapping[int, int]
) -> list[CollectiveSite]:
    """One site at the smallest module that takes the value in and contains exactly its partial uses; else one at each layer."""
    calls = graph.input_calls(value)
    users = set(graph.consumers.get(value, []))
    for call in calls:
        inside = {i for i in users if call.first_op <= i < call.end_op}
        if ops <= inside and inside <= ops:
            return [_input_site(graph, site_builder, value, call)]
    found: dict[tuple[int, int], ModuleCall] = {}
    for index in ops:
        layer = next((m for m in calls if m.first_op <= index < m.end_op and {i for i in users if m.first_op <= i < m.end_op} <= ops), None)
        if layer is None:
            op = graph.op(index)
            logical_dims = sharded_dims & graph.operation_dims[index] or {partial_sums[v] for v in op.inputs if v in partial_sums}
            raise ShardingBlockedError(min(logical_dims), f"a whole activation enters it inside {op.module or 'the loss'} ({op.name})")
        found[layer.first_op, layer.end_op] = layer
    outer = [m for m in found.values() if not any(o is not m and o.first_op <= m.first_op and m.end_op <= o.end_op for o in found.values())]
    return [_input_site(graph, site_builder, value, m) for m in outer]  # outermost only: nested sites would sum the gradient twice


def _input_site(graph: DataflowGraph, site_builder: CollectiveSiteBuilder, value: int, call: ModuleCall) -> CollectiveSite:
    return replace(site_builder.build(call.module, value, call.inputs.index(value)), linear_layers=_linear_consumers(graph, value, call))


def _linear_consumers(graph: DataflowGraph, value: int, call: ModuleCall) -> tuple[str, ...]:
    """Linear layers inside a module that multiply the given module input by their matrix."""
    inside = (m for m in graph.consumer_calls(value) if m.kind == "linear" and call.first_op <= m.first_op and m.end_op <= call.end_op)
    return tuple(m.module for m in inside if m.inputs[0] == value)
