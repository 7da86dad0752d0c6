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
    reader = DataflowGraph.of(dataflow)
    calls = list(_find_moe_layers(reader))
    mixtures = [_make_moe_layer(reader, call, size, ep_degree) for call, size in calls]
    tables = _find_tables(reader, {name for m in mixtures for name in m.parameters})
    if not mixtures and not tables:
        raise RequestError(f"ep={ep_degree}: this model has neither experts nor embedding tables {_why_no_tables(reader)}: use --mesh dp={ep_degree}")
    most = min((m.num_experts for m in mixtures), default=len(tables))
    if most < ep_degree:
        what = f"{most} experts in {mixtures[0].module}" if mixtures else f"{most} embedding tables" if most > 1 else "one embedding table"
        instead = f"use --mesh ep={most} or less" if most > 1 else f"use --mesh dp={ep_degree}"
        raise RequestError(f"ep={ep_degree}: this model has {what}, and an ep rank holds at least one: {instead}")
    last = max((c.end_op for _, calls in tables for c in calls), default=0)
    early = any(call.first_op < last for call, _ in calls)  # the dry run that collects the lookups would send its tokens too
    owned = _assign_tables(reader, tables, ep_degree) if len(tables) >= ep_degree and not early else ()
    return ExpertPolicy(tuple(mixtures), owned, *_lookup_container(reader, owned))


# -- MoE layers --


def _find_moe_layers(graph: DataflowGraph) -> Iterator[tuple[ModuleCall, int]]:
    """Yield calls of modules in which every parameter is indexed by the expert choices given to the call, with the number of experts. Modules are
    recorded when their calls end, so of two nested modules with the same parameters the inner one is found."""
    called = Counter(call.module for call in graph.dataflow.modules)
    taken: set[int] = set()
    for call in graph.dataflow.modules:
        if not call.module or called[call.module] > 1 or _input_roles(graph, call) is None:
            continue
        values = {w.value for w in graph.parameters if w.name.startswith(f"{call.module}.")}
        sizes = {graph.dataflow.values[v].shape[:1] for v in values}
        if len(sizes) == 1 and taken.isdisjoint(values) and _is_moe_layer(graph, call, values):
            taken |= values
            yield call, sizes.pop()[0]


def _is_moe_layer(graph: DataflowGraph, call: ModuleCall, weights: set[int]) -> bool:
    """Whether a call takes tokens [T, d] and integer expert choices [T, k], returns [T, d], and indexes all parameters by choice."""
    roles = _input_roles(graph, call)
    if roles is None or len(call.outputs) != 1:
        return False
    values = graph.dataflow.values
    if values[call.outputs[0]].shape != values[call.inputs[roles[0]]].shape:
        return False
    chosen = _values_derived_from(graph, call, call.inputs[roles[1]])

    def is_selected_by_choice(index: int) -> bool:
        op = graph.op(index)
        return call.first_op <= index < call.end_op and op.name in _SELECT_OPS and len(op.inputs) == 2 and op.inputs[1] in chosen

    return all(graph.consumers.get(w) and all(map(is_selected_by_choice, graph.consumers[w])) for w in weights)


def _input_roles(graph: DataflowGraph, call: ModuleCall) -> tuple[int, int, int | None] | None:
    """Which inputs are tokens, expert choices and routing weights; None where that is ambiguous."""
    given = [graph.dataflow.values[v] for v in call.inputs]
    choices = [i for i, v in enumerate(given) if not v.floating and len(v.shape) == 2]
    if len(choices) != 1 or not 2 <= len(given) <= 3:
        return None
    shape = given[choices[0]].shape
    floats = [i for i, v in enumerate(given) if v.floating and len(v.shape) == 2 and v.shape[0] == shape[0]]
    if len(floats) != len(given) - 1:
        return None
    if len(floats) == 1:
        return floats[0], choices[0], None
    weights = [i for i in floats if given[i].shape == shape]
    if len(weights) != 1:  # as many features as choices: by convention, tokens come first
        weights = floats[1:]
    return next(i for i in floats if i not in weights), choices[0], weights[0]


def _values_derived_from(graph: DataflowGraph, call: ModuleCall, value: int) -> set[int]:
    """A value, and all values computed from it alone inside a call."""
    found = {value}
    for op in graph.dataflow.operations[call.first_op : call.end_op]:
        if op.inputs and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


def _make_moe_layer(graph: DataflowGraph, call: ModuleCall, experts: int, ep_degree: int) -> MoELayer:
    roles = _input_roles(graph, call)
    assert roles is not None
    tokens, choices = (graph.dataflow.values[call.inputs[i]] for i in roles[:2])
    sharded = ShardedDim(call.module, experts, ())
    return MoELayer(
        call.module,
        tuple(w.name for w in graph.parameters if w.name.startswith(f"{call.module}.")),
        tuple(sharded.shard_range(owner, ep_degree)[1] for owner in range(ep_degree)),
        math.prod(choices.shape) / graph.dataflow.batch,
        tokens.shape[1],
        tokens.shape[1] * tokens.itemsize,
        *roles,
    )


# -- embedding tables --


def _find_tables(graph: DataflowGraph, experts: set[str]) -> list[tuple[int, list[ModuleCall]]]:
    """Tables (the parameter's value and its calls) that only their own module reads, with indices that depend only on the samples; none unless
    they are larger than the rest of the model."""
    known = _parameter_free_values(graph)
    found = []
    for weight in graph.parameters:
        readers = [graph.innermost_call.get(i) for i in graph.consumers.get(weight.value, [])]
        calls = [c for c in readers if c is not None and c.kind in ("embedding", "bag") and weight.name.startswith(f"{c.module}.")]
        if calls and len(calls) == len(readers) and all(_is_table_lookup(graph, c, known) for c in calls):
            found.append((weight.value, calls))
    tables = {v for v, _ in found}
    kinds = {graph.dataflow.values[v].itemsize for v in tables}
    rest = sum(w.numel for w in graph.parameters if w.value not in tables and w.name not in experts)
    return found if len(kinds) == 1 and sum(w.numel for w in graph.parameters if w.value in tables) > rest else []


def _why_no_tables(graph: DataflowGraph) -> str:
    bag = next((c.module for c in graph.dataflow.modules if c.kind == "bag" and not _has_single_index_input(graph, c)), None)
    if bag is not None:
        return f"that can be owned ({bag} takes offsets or weights: give it indices of shape [samples, n] alone)"
    return "that outweigh the rest of it"


def _parameter_free_values(graph: DataflowGraph) -> set[int]:
    """Values that depend on samples and on no parameter: they are available before any lookup."""
    values = graph.dataflow.values
    learned = {v for v, value in enumerate(values) if value.parameter and value.needs_grad}
    known = {
        v for v, value in enumerate(values) if v not in graph.producer and graph.dataflow.sample_dims & graph.value_dims[v] and not value.parameter
    }
    for op in graph.dataflow.operations:
        if learned.intersection(op.inputs):
            learned.update(op.outputs)
        elif known.intersection(op.inputs):
            known.update(op.outputs)
    return known - learned


def _is_table_lookup(graph: DataflowGraph, call: ModuleCall, known_values: set[int]) -> bool:
    """Whether a call takes one tensor of indices, equally many for every sample; bags are whole rows of it, without offsets or weights."""
    return (
        _has_single_index_input(graph, call)
        and call.inputs[0] in known_values
        and math.prod(graph.dataflow.values[call.inputs[0]].shape) % graph.dataflow.batch == 0
    )


def _has_single_index_input(graph: DataflowGraph, call: ModuleCall) -> bool:
    shape = graph.dataflow.values[call.inputs[0]].shape
    return len(call.inputs) == len(call.outputs) == 1 and (call.kind == "embedding" or len(shape) == 2)


def _assign_tables(graph: DataflowGraph, tables: list[tuple[int, list[ModuleCall]]], ep_degree: int) -> tuple[EmbeddingTable, ...]:
    """Assign the largest table first, each to the ep rank with the fewest bytes."""
    held = [0] * ep_degree
    made = {}
    for value, calls in sorted(tables, key=lambda item: -math.prod(graph.dataflow.values[item[0]].shape)):
        noted = graph.dataflow.values[value]
        owner = min(range(ep_degree), key=lambda i: held[i])
        held[owner] += math.prod(noted.shape) * noted.itemsize
        made[value] = EmbeddingTable(calls[0].module, noted.parameter, noted.shape[0], owner)
    return tuple(made[value] for value, _ in tables)


def _lookup_container(graph: DataflowGraph, tables: tuple[EmbeddingTable, ...]) -> tuple[str, tuple[TableLookup, ...]]:
    """The smallest module that is called once and contains all lookups, and the lookups in order."""
    if not tables:
        return "", ()
    names = {t.module for t in tables}
    calls = sorted((c for c in graph.dataflow.modules if c.module in names), key=lambda c: c.first_op)
    modules = [c.module for c in graph.dataflow.modules]
    around = [c for c in graph.dataflow.modules if c.first_op <= calls[0].first_op and calls[-1].end_op <= c.end_op and modules.count(c.module) == 1]
    around = [c for c in around if c.module not in names]
    if not around:
        raise RequestError("ep: the embedding tables are looked up outside any one module's forward, so their lookups cannot travel together: use dp")
    return min(around, key=lambda c: (c.end_op - c.first_op, -len(c.module))).module, tuple(_make_lookup(graph, c) for c in calls)


def _make_lookup(graph: DataflowGraph, call: ModuleCall) -> TableLookup:
    given, made = graph.dataflow.values[call.inputs[0]], graph.dataflow.values[call.outputs[0]]
    return TableLookup(call.module, math.prod(given.shape) / graph.dataflow.batch, math.prod(made.shape) * made.itemsize / graph.dataflow.batch)
