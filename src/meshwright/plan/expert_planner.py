"""Finds MoE layers and embedding tables in a model's dataflow, and assigns their experts and tables to the ranks of the `ep` axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from meshwright.core.dataflow import Dataflow, ModuleCall
from meshwright.core.errors import RequestError
from meshwright.core.expert_policy import EmbeddingTable, ExpertPolicy, MoELayer, TableLookup
from meshwright.core.tensor_policy import ShardedDim
from meshwright.plan.dataflow_graph import DataflowGraph

_SELECT_OPS = ("index", "index_select", "embedding")  # operations that select entries of dim 0


def choose_expert_parallel(dataflow: Dataflow, ep_degree: int) -> ExpertPolicy:
    """The policy: experts are distributed by number, tables by bytes. Raises a RequestError if there are fewer of them than ranks."""
    graph = DataflowGraph.of(dataflow)
    moe_calls = list(_find_moe_layers(graph))
    moe_layers = [_make_moe_layer(graph, call, num_experts, ep_degree) for call, num_experts in moe_calls]
    tables = _find_tables(graph, {name for m in moe_layers for name in m.parameters})
    if not moe_layers and not tables:
        raise RequestError(f"ep={ep_degree}: this model has neither experts nor embedding tables {_why_no_tables(graph)}: use --mesh dp={ep_degree}")
    limit = min((m.num_experts for m in moe_layers), default=len(tables))
    if limit < ep_degree:
        what = f"{limit} experts in {moe_layers[0].module}" if moe_layers else f"{limit} embedding tables" if limit > 1 else "one embedding table"
        instead = f"use --mesh ep={limit} or less" if limit > 1 else f"use --mesh dp={ep_degree}"
        raise RequestError(f"ep={ep_degree}: this model has {what}, and an ep rank holds at least one: {instead}")
    last_lookup = max((c.end_op for _, calls in tables for c in calls), default=0)
    moe_before_lookup = any(call.first_op < last_lookup for call, _ in moe_calls)  # the dry run that collects the lookups would send its tokens too
    sharded_tables = _assign_tables(graph, tables, ep_degree) if len(tables) >= ep_degree and not moe_before_lookup else ()
    return ExpertPolicy(tuple(moe_layers), sharded_tables, *_lookup_container(graph, sharded_tables))


# -- MoE layers --


def _find_moe_layers(graph: DataflowGraph) -> Iterator[tuple[ModuleCall, int]]:
    """Yield calls of modules in which every parameter is indexed by the expert choices given to the call, with the number of experts. Modules are
    recorded when their calls end, so of two nested modules with the same parameters the inner one is yielded."""
    num_calls = Counter(call.module for call in graph.dataflow.modules)
    expert_weights: set[int] = set()
    for call in graph.dataflow.modules:
        if not call.module or num_calls[call.module] > 1 or _input_roles(graph, call) is None:
            continue
        weights = {w.value for w in graph.parameters if w.name.startswith(f"{call.module}.")}
        sizes = {graph.dataflow.values[v].shape[:1] for v in weights}
        if len(sizes) == 1 and expert_weights.isdisjoint(weights) and _is_moe_layer(graph, call, weights):
            expert_weights |= weights
            yield call, sizes.pop()[0]


def _is_moe_layer(graph: DataflowGraph, call: ModuleCall, weights: set[int]) -> bool:
    """Whether a call takes tokens [T, d] and integer expert choices [T, k], returns [T, d], and indexes all parameters by choice."""
    roles, values = _input_roles(graph, call), graph.dataflow.values
    if roles is None or len(call.outputs) != 1 or values[call.outputs[0]].shape != values[call.inputs[roles[0]]].shape:
        return False
    chosen = {call.inputs[roles[1]]}  # the choices, and all that is computed from them alone
    for op in graph.dataflow.operations[call.first_op : call.end_op]:
        if op.inputs and chosen.issuperset(op.inputs):
            chosen.update(op.outputs)

    def is_selected_by_choice(index: int) -> bool:
        op = graph.op(index)
        return call.first_op <= index < call.end_op and op.name in _SELECT_OPS and len(op.inputs) == 2 and op.inputs[1] in chosen

    return all(graph.consumers.get(w) and all(map(is_selected_by_choice, graph.consumers[w])) for w in weights)


def _input_roles(graph: DataflowGraph, call: ModuleCall) -> tuple[int, int, int | None] | None:
    """Which inputs are tokens, expert choices and routing weights; None where that is ambiguous."""
    inputs = [graph.dataflow.values[v] for v in call.inputs]
    choices = [i for i, v in enumerate(inputs) if not v.floating and len(v.shape) == 2]
    if len(choices) != 1 or not 2 <= len(inputs) <= 3:
        return None
    shape = inputs[choices[0]].shape
    floats = [i for i, v in enumerate(inputs) if v.floating and len(v.shape) == 2 and v.shape[0] == shape[0]]
    if len(floats) != len(inputs) - 1:
        return None
    if len(floats) == 1:
        return floats[0], choices[0], None
    weights = [i for i in floats if inputs[i].shape == shape]
    if len(weights) != 1:  # as many features as choices: by convention, tokens come first
        weights = floats[1:]
    return next(i for i in floats if i not in weights), choices[0], weights[0]


def _make_moe_layer(graph: DataflowGraph, call: ModuleCall, experts: int, ep_degree: int) -> MoELayer:
    roles = _input_roles(graph, call)
    assert roles is not None
    tokens, choices = (graph.dataflow.values[call.inputs[i]] for i in roles[:2])
    sharded = ShardedDim(call.module, experts, ())
    return MoELayer(
        call.module,
        tuple(w.name for w in graph.parameters if w.name.startswith(f"{call.module}.")),
        tuple(sharded.shard_range(rank, ep_degree)[1] for rank in range(ep_degree)),
        math.prod(choices.shape) / graph.dataflow.batch,
        tokens.shape[1],
        tokens.shape[1] * tokens.itemsize,
        *roles,
    )


# -- embedding tables --


def _find_tables(graph: DataflowGraph, experts: set[str]) -> list[tuple[int, list[ModuleCall]]]:
    """Tables (the parameter's value and its calls) that only their own module reads, with indices that depend only on the samples; none unless
    they are larger than the rest of the model."""
    parameter_free = _parameter_free_values(graph)
    tables: dict[int, list[ModuleCall]] = {}
    for weight in graph.parameters:
        readers = [graph.innermost_call.get(i) for i in graph.consumers.get(weight.value, [])]
        calls = [c for c in readers if c is not None and c.kind in ("embedding", "bag") and weight.name.startswith(f"{c.module}.")]
        if calls and len(calls) == len(readers) and all(_is_table_lookup(graph, c, parameter_free) for c in calls):
            tables[weight.value] = calls
    itemsizes = {graph.dataflow.values[v].itemsize for v in tables}
    other_numel = sum(w.numel for w in graph.parameters if w.value not in tables and w.name not in experts)
    is_larger = sum(w.numel for w in graph.parameters if w.value in tables) > other_numel
    return list(tables.items()) if len(itemsizes) == 1 and is_larger else []


def _why_no_tables(graph: DataflowGraph) -> str:
    bag = next((c.module for c in graph.dataflow.modules if c.kind == "bag" and not _has_single_index_input(graph, c)), None)
    if bag is not None:
        return f"that can be sharded ({bag} takes offsets or weights: give it indices of shape [samples, n] alone)"
    return "that outweigh the rest of it"


def _parameter_free_values(graph: DataflowGraph) -> set[int]:
    """Values that depend on samples and on no parameter: they are available before any lookup."""
    flow, learned = graph.dataflow, {w.value for w in graph.parameters}
    from_samples = {
        v for v, dims in enumerate(graph.value_dims) if v not in graph.producer and flow.sample_dims & dims and not flow.values[v].parameter
    }
    for op in flow.operations:
        if learned.intersection(op.inputs):
            learned.update(op.outputs)
        elif from_samples.intersection(op.inputs):
            from_samples.update(op.outputs)
    return from_samples - learned


def _is_table_lookup(graph: DataflowGraph, call: ModuleCall, parameter_free: set[int]) -> bool:
    """Whether a call takes one tensor of indices, equally many for every sample; bags are rows of it, without offsets or weights."""
    divides = math.prod(graph.dataflow.values[call.inputs[0]].shape) % graph.dataflow.batch == 0
    return divides and _has_single_index_input(graph, call) and call.inputs[0] in parameter_free


def _has_single_index_input(graph: DataflowGraph, call: ModuleCall) -> bool:
    shape = graph.dataflow.values[call.inputs[0]].shape
    return len(call.inputs) == len(call.outputs) == 1 and (call.kind == "embedding" or len(shape) == 2)


def _assign_tables(graph: DataflowGraph, tables: list[tuple[int, list[ModuleCall]]], ep_degree: int) -> tuple[EmbeddingTable, ...]:
    """Assign the largest table first, each to the ep rank with the fewest bytes."""
    rank_bytes = [0] * ep_degree
    assigned = {}
    for index, calls in sorted(tables, key=lambda item: -math.prod(graph.dataflow.values[item[0]].shape)):
        value = graph.dataflow.values[index]
        rank = rank_bytes.index(min(rank_bytes))
        rank_bytes[rank] += math.prod(value.shape) * value.itemsize
        assigned[index] = EmbeddingTable(calls[0].module, value.parameter, value.shape[0], rank)
    return tuple(assigned[index] for index, _ in tables)


def _lookup_container(graph: DataflowGraph, tables: tuple[EmbeddingTable, ...]) -> tuple[str, tuple[TableLookup, ...]]:
    """The smallest module that is called once and contains all lookups, and the lookups in order."""
    if not tables:
        return "", ()
    names = {t.module for t in tables}
    modules, values, batch = graph.dataflow.modules, graph.dataflow.values, graph.dataflow.batch
    calls = sorted((c for c in modules if c.module in names), key=lambda c: c.first_op)
    num_calls = Counter(c.module for c in modules)
    around = [c for c in modules if c.first_op <= calls[0].first_op and calls[-1].end_op <= c.end_op and num_calls[c.module] == 1]
    containers = [c for c in around if c.module not in names]
    if not containers:
        raise RequestError("ep: no single module's forward contains all embedding lookups, so one all-to-all cannot serve them: use --mesh dp")
    ends = [(c.module, values[c.inputs[0]], values[c.outputs[0]]) for c in calls]
    lookups = (TableLookup(name, math.prod(i.shape) / batch, math.prod(o.shape) * o.itemsize / batch) for name, i, o in ends)
    return min(containers, key=lambda c: (c.end_op - c.first_op, -len(c.module))).module, tuple(lookups)
