"""Chooses which logical dims to shard over tensor-parallel ranks, and which collectives follow from that. Pure reasoning over a model's dataflow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.core.dataflow import Dataflow, ModuleCall, Operation
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.tensor_policy import CollectiveSite, ParameterShard, ShardedDim, SizeRewrite, TensorPolicy
from meshwright.plan.copy_sites import CollectiveSiteBuilder, ShardingBlockedError, find_copy_sites
from meshwright.plan.dataflow_graph import DataflowGraph, ParameterValue
from meshwright.plan.sequence_planner import add_sequence_parallel
from meshwright.plan.size_arguments import SLICE_OPS

PLACEMENTS = ("auto", "column", "replicate")
_FORMER_PLACEMENTS = {"whole": "replicate"}  # as plans of format version 1 have them
NORM_OPS = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "mean")
# A layer that can be sharded only with a gather of its output is sharded if it holds at least the first share of the model, or the second share of
# the largest matrix sharded without one: the vocabulary of a deep model is a small part of it, and yet the largest part of its stage.
_MIN_GATHER_SHARE, _MIN_RELATIVE_SIZE = 0.02, 0.3


def choose_tensor_grid(
    dataflow: Dataflow,
    tp_degrees: Sequence[int],
    placements: Mapping[str, str] | None = None,
    layers: Collection[str] = (),
    *,
    sequence_parallel: bool = False,
) -> tuple[TensorPolicy, TensorPolicy]:
    """The policies of one or two tensor axes: the logical dims that cover most of the model, at most one for each parameter, and every collective
    that they cause. Where a pipeline will cut the model between its `layers`, collectives stay inside them; `sequence_parallel` adds sequence
    parallelism.

    [Note: 2D tensor parallelism]
    A product of two matrices contracts one logical dim and keeps two. With one tensor axis, one of a matrix's two dims is sharded. With two, the
    first axis shards the same dims and the second axis their partners: the features between layers, which all blocks have in common. Every
    activation is then sharded, layers alternate between row and column parallelism by themselves, and norms, which need all features, all-reduce
    their statistics. The two axes are independent: each completes its partial sums among its own ranks.
    """
    reader = DataflowGraph.of(dataflow, layers)
    asked = {name: _FORMER_PLACEMENTS.get(placement, placement) for name, placement in (placements or {}).items()}
    check_placements(dataflow, asked)
    first = _TensorAxis(tp_degrees[0])
    policy = _choose_axis_policy(reader, first, asked)
    if len(tp_degrees) == 1:
        shared = (
            add_sequence_parallel(reader, policy, frozenset(first.chosen_dims), tp_degrees[0])
            if sequence_parallel and policy.sharded_dims
            else policy
        )
        return shared, TensorPolicy()
    if sequence_parallel:
        raise RequestError(f"sequence=true goes with one dimension of tensor parallelism, not with tp={tp_degrees[0]}x{tp_degrees[1]}: leave it out")
    taken = {c.parameter: c.dim for s in policy.sharded_dims for c in s.parameter_shards}
    second = _TensorAxis(tp_degrees[1], first.sharded_dim_names(reader), taken, {m.module: m.logical_dim for m in policy.gather_sites})
    across = _choose_axis_policy(reader, second, asked)
    first.other_axis_dims = second.sharded_dim_names(reader)
    return _build_policy(reader, first, asked), across


@dataclass
class _TensorAxis:
    """One tensor axis: its degree, the logical dims chosen along it, those that cannot be sharded and why, and what the other axis shards."""

    degree: int
    other_axis_dims: Mapping[int, str] = field(default_factory=dict)  # logical dims that the other axis shards → names
    first_axis_cuts: Mapping[str, int] | None = None  # on the second axis: parameters that the first axis shards → the dim
    gathered_layers: Mapping[str, str] = field(default_factory=dict)  # on the second axis: layers whose outputs the first gathers → the logical dim
    blocked_dims: dict[int, str] = field(default_factory=dict)
    chosen_dims: list[int] = field(default_factory=list)

    def sharded_dim_names(self, graph: DataflowGraph) -> dict[int, str]:
        return {s: _logical_dim_name(graph, s) for s in self.chosen_dims}


def _choose_axis_policy(graph: DataflowGraph, axis: _TensorAxis, placements: Mapping[str, str]) -> TensorPolicy:
    for _ in range(len(graph.dataflow.sizes) + 1):  # each round may block one more logical dim
        axis.chosen_dims = _choose_logical_dims(graph, axis, placements)
        try:
            return _build_policy(graph, axis, placements)
        except ShardingBlockedError as found:
            axis.blocked_dims[found.logical_dim] = found.reason
    raise AssertionError("every round blocks a logical dim")


def check_placements(dataflow: Dataflow, placements: Mapping[str, str]) -> None:
    """Raise unless every name is a module of the model and every placement is known."""
    names = {call.module for call in dataflow.modules}
    for name, placement in placements.items():
        if name not in names:
            raise unknown_name_error("layer", name, names, "placements")
        if placement not in (*PLACEMENTS, *_FORMER_PLACEMENTS):
            raise unknown_name_error("placement", placement, PLACEMENTS, f"placements: {name}")


def _placement_override(placements: Mapping[str, str], parameter: str) -> str | None:
    """The placement, other than auto, that the user asked for at a parameter's module, if any."""
    for name, placement in placements.items():
        if placement != "auto" and parameter.startswith(f"{name}."):
            return placement
    return None


# -- choosing --


def _choose_logical_dims(graph: DataflowGraph, axis: _TensorAxis, placements: Mapping[str, str]) -> list[int]:
    weight: dict[int, int] = {}
    for w in graph.parameters:
        for logical_dim in graph.value_dims[w.value]:
            weight[logical_dim] = weight.get(logical_dim, 0) + w.numel
    taken: set[str] = set()
    chosen: list[int] = []
    blocked = axis.blocked_dims
    for logical_dim in sorted(weight, key=lambda s: (-weight[s], s)):
        if logical_dim in blocked:
            continue
        reason = _blocking_reason(graph, logical_dim, axis, placements)
        if reason:
            blocked[logical_dim] = reason
            continue
        names = [cut.parameter for cut in graph.parameter_shards(logical_dim)]
        if len(names) != len(set(names)):
            blocked[logical_dim] = "runs through one parameter twice"
        elif taken.isdisjoint(names):
            chosen.append(logical_dim)
            taken.update(names)
    return chosen


def _blocking_reason(graph: DataflowGraph, logical_dim: int, axis: _TensorAxis, placements: Mapping[str, str]) -> str:
    """Why a logical dim cannot be sharded; empty when it can."""
    flow, size = graph.dataflow, graph.dataflow.sizes[logical_dim]
    if size < axis.degree:
        return f"{size} pieces do not go over {axis.degree} ranks"
    if logical_dim in axis.other_axis_dims or any(
        (axis.first_axis_cuts or {}).get(cut.parameter) == cut.dim for cut in graph.parameter_shards(logical_dim)
    ):
        return "the grid's other axis shards it"
    for cut in graph.parameter_shards(logical_dim):
        placement = _placement_override(placements, cut.parameter)
        if placement:
            return f"placements ask for {placement} at {cut.parameter.rpartition('.')[0]}"
    for index, op in ((i, flow.operations[i]) for i in graph.constraining_ops.get(logical_dim, [])):
        if logical_dim in op.indivisible_dims and not (axis.first_axis_cuts is not None and _is_norm(graph, op, logical_dim)):
            return f"{op.name} in {op.module or 'the loss'} needs all of it"
        if logical_dim in op.contracted_dims and graph.find_reduction_site(index, logical_dim) is None:
            return f"{op.name} in {op.module or 'the loss'} sums over it outside a layer"
        if op.name in SLICE_OPS and op.call_index < 0 and _slices_dim(graph, op, logical_dim):
            return f"the code of {op.module or 'the model'} slices it by number"
    if any(logical_dim in graph.value_dims[v] for v in flow.outputs):
        return "the model returns it"
    if logical_dim in graph.input_dims:
        return "the data carries it"
    return ""


def _is_norm(graph: DataflowGraph, op: Operation, logical_dim: int) -> bool:
    """Whether an operation is a norm over this logical dim alone, inside a module: ranks that hold shards of it can then all-reduce its
    statistics."""
    given = graph.dataflow.values[op.inputs[0]]
    return op.name in NORM_OPS and bool(op.module) and set(op.indivisible_dims) == {logical_dim} and given.logical_dims[-1] == (logical_dim,)


def _slices_dim(graph: DataflowGraph, op: Operation, logical_dim: int) -> bool:
    given, made = graph.dataflow.values[op.inputs[0]], graph.dataflow.values[op.outputs[0]]
    return any(a != b and logical_dim in s for a, b, s in zip(given.shape, made.shape, given.logical_dims, strict=True))


# -- consequences --


def _build_policy(graph: DataflowGraph, axis: _TensorAxis, placements: Mapping[str, str]) -> TensorPolicy:
    chosen, blocked, site = axis.chosen_dims, axis.blocked_dims, CollectiveSiteBuilder(graph, axis.other_axis_dims, axis.gathered_layers)
    sharded = {s: ShardedDim(_logical_dim_name(graph, s), graph.dataflow.sizes[s], tuple(graph.parameter_shards(s))) for s in chosen}
    cut = {c.parameter for d in sharded.values() for c in d.parameter_shards}
    alone, gathers, lookups = _gathered_layers(graph, site, cut, axis.degree, placements) if axis.first_axis_cuts is None else ([], [], [])
    cut |= {c.parameter for d in alone for c in d.parameter_shards}
    enters, partial = find_copy_sites(graph, site, set(chosen), {m.module for m in gathers})
    policy = TensorPolicy(
        sharded_dims=(*sharded.values(), *alone),
        copy_sites=tuple(enters),
        reduce_sites=tuple(_reduce_sites(graph, site, set(chosen))),
        gather_sites=tuple(gathers),
        embedding_sites=tuple(lookups),
        norm_sites=tuple(_norm_sites(graph, site, set(chosen))),
        partial_grad_parameters=tuple(partial),
        size_rewrites=tuple(_size_rewrites(graph, {s: d.name for s, d in sharded.items()})),
    )
    return replace(policy, unsharded_reasons=_unsharded_reasons(graph, cut, placements, blocked))


def _logical_dim_name(graph: DataflowGraph, logical_dim: int) -> str:
    first = graph.parameter_shards(logical_dim)[0]
    return f"{first.parameter}:{first.dim}"


def _reduce_sites(graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_dims: set[int]) -> Iterable[CollectiveSite]:
    found: dict[str, CollectiveSite] = {}
    for index, op in enumerate(graph.dataflow.operations):
        for logical_dim in sharded_dims.intersection(op.contracted_dims):
            done = graph.find_reduction_site(index, logical_dim)
            assert done is not None
            found.setdefault(done[0].module, site_builder.at_output(done[0]))
    yield from found.values()


def _norm_sites(graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_dims: set[int]) -> Iterable[CollectiveSite]:
    """Collectives of norm statistics: one number for each normalized row (two in a layer norm), in fp32 or wider."""
    for op in graph.dataflow.operations:
        for logical_dim in sharded_dims.intersection(op.indivisible_dims):
            found = site_builder.build(op.module, op.inputs[0])
            width = max(graph.dataflow.values[op.inputs[0]].itemsize, 4) / graph.dataflow.values[op.inputs[0]].itemsize
            size = found.bytes / graph.dataflow.sizes[logical_dim] * width
            yield replace(
                found,
                bytes=size,
                num_statistics=2 if op.name == "native_layer_norm" else 1,
                logical_dim=_logical_dim_name(graph, logical_dim),
                other_axis_dim="",
            )


def _gathered_layers(
    graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_parameters: set[str], tp_degree: int, placements: Mapping[str, str]
) -> tuple[list[ShardedDim], list[CollectiveSite], list[CollectiveSite]]:
    """Layers that no chosen logical dim covers but that are large, or asked for: sharded along their output features (embeddings along their
    rows), with a gather or reduction at their output."""
    logical_dims: dict[str, ShardedDim] = {}
    gathers: list[CollectiveSite] = []
    lookups: list[CollectiveSite] = []
    usual = max((w.numel for w in graph.parameters if w.name in sharded_parameters), default=graph.total_numel)
    for call in graph.dataflow.modules:
        if call.kind not in ("linear", "embedding"):
            continue
        weight, bias = _layer_parameters(graph, call)
        if weight is None or weight.name in sharded_parameters or not _is_worth_gather(graph, call, weight, placements, usual):
            continue
        dim = _feature_dim(graph, call, weight)
        size = graph.dataflow.values[weight.value].shape[dim]
        if size < tp_degree:
            continue
        extra = (ParameterShard(bias.name, 0),) if bias is not None else ()
        before = logical_dims.get(
            weight.name, ShardedDim(f"{weight.name}:{dim}", size, (ParameterShard(weight.name, dim),))
        )  # a tied matrix belongs to several layers
        logical_dims[weight.name] = replace(
            before, parameter_shards=(*before.parameter_shards, *(c for c in extra if c not in before.parameter_shards))
        )
        site = replace(site_builder.at_output(call), logical_dim=logical_dims[weight.name].name)
        (lookups if call.kind == "embedding" else gathers).append(site)
    return list(logical_dims.values()), gathers, lookups


def _is_worth_gather(graph: DataflowGraph, call: ModuleCall, weight: ParameterValue, placements: Mapping[str, str], largest_sharded: int) -> bool:
    placement = placements.get(call.module) or _placement_override(placements, weight.name)
    if placement in ("replicate", "column"):
        return placement == "column"
    return weight.numel >= min(_MIN_GATHER_SHARE * graph.total_numel, _MIN_RELATIVE_SIZE * largest_sharded)


def _layer_parameters(graph: DataflowGraph, call: ModuleCall) -> tuple[ParameterValue | None, ParameterValue | None]:
    """The matrix and the bias that a layer's own operations read; a tied matrix has the name of its first owner."""
    read = {v for op in range(call.first_op, call.end_op) for v in graph.op(op).inputs}
    mine = [graph.parameters[at] for at in sorted(graph.parameter_position[v] for v in read if v in graph.parameter_position)]
    matrix = next((w for w in mine if len(graph.dataflow.values[w.value].shape) == 2), None)
    bias = next((w for w in mine if len(graph.dataflow.values[w.value].shape) == 1), None)
    return matrix, bias


def _feature_dim(graph: DataflowGraph, call: ModuleCall, weight: ParameterValue) -> int:
    """The dim of a matrix that becomes the layer's output; for an embedding, the dim of its rows."""
    shape, out = graph.dataflow.values[weight.value].shape, graph.dataflow.values[call.outputs[0]].shape[-1]
    if call.kind == "embedding":
        return 0
    logical_dims = graph.dataflow.values[call.outputs[0]].logical_dims[-1]
    return next((d for d in (0, 1) if graph.dataflow.values[weight.value].logical_dims[d] == logical_dims and shape[d] == out), 0)


# -- sizes in the model's code --


def _size_rewrites(graph: DataflowGraph, dim_names: Mapping[int, str]) -> list[SizeRewrite]:
    found, unclear, uneven = graph.size_rewrites(dim_names)
    logical_dims = {name: logical_dim for logical_dim, name in dim_names.items()}
    for rewrite in uneven:
        where = f"the code of {rewrite.module or 'the model'} slices it by number ({rewrite.original_size} of {rewrite.length})"
        raise ShardingBlockedError(logical_dims[rewrite.logical_dim], where)
    for rewrite in unclear:
        raise ShardingBlockedError(
            logical_dims[rewrite.logical_dim], f"the code of {rewrite.module} uses the size {rewrite.original_size} for other things too"
        )
    return found


def _unsharded_reasons(
    graph: DataflowGraph, sharded_parameters: set[str], placements: Mapping[str, str], blocked_dims: Mapping[int, str]
) -> dict[str, str]:
    """For every unsharded parameter, the reason: a placement, an operation in its own module, or what blocks its logical dims elsewhere."""
    binds: dict[str, list[tuple[str, frozenset[int]]]] = {}
    for op in graph.dataflow.operations:
        if op.indivisible_dims:
            binds.setdefault(op.module, []).append((op.name, frozenset(op.indivisible_dims)))
    found = {}
    for w in graph.parameters:
        if w.name in sharded_parameters:
            continue
        module, carried = w.name.rpartition(".")[0], graph.value_dims[w.value]
        placement = _placement_override(placements, w.name)
        here = [f"{name} in {module} needs all of it" for name, logical_dims in binds.get(module, []) if logical_dims & carried]
        there = [blocked_dims[s] for s in sorted(carried) if s in blocked_dims]
        asked_for = [f"placements ask for {placement}"] if placement else []
        found[w.name] = [*asked_for, *here, *there, "its partner is cut along the other dim"][0]
    return found


def reject_if_unsharded(grid: tuple[TensorPolicy, TensorPolicy], tp_degrees: tuple[int, ...]) -> None:
    asked = "x".join(map(str, tp_degrees))
    for policy, line in zip(grid, ("", " along the second dimension"), strict=False):
        if not policy.sharded_dims and (len(tp_degrees) > 1 or not line):
            reason = next(iter(policy.unsharded_reasons.values()), "it has no parameters")
            other = f"dp={math.prod(tp_degrees)}" if not line else f"tp={math.prod(tp_degrees)}"
            raise RequestError(f"tp={asked}: nothing in this model can be cut{line} ({reason}): use --mesh {other}")


def sharded_logical_dims(dataflow: Dataflow, policy: TensorPolicy | None) -> dict[int, str]:
    """The logical dims that a policy shards across layers, with their names; without those that are gathered at the output of their layer."""
    if policy is None:
        return {}
    values = {v.parameter: v for v in dataflow.values if v.parameter}
    at_once = {m.logical_dim for m in (*policy.gather_sites, *policy.embedding_sites)}
    found = {}
    for sharded in policy.sharded_dims:
        if sharded.name not in at_once and sharded.parameter_shards:
            logical_dims = values[sharded.parameter_shards[0].parameter].logical_dims[sharded.parameter_shards[0].dim]
            outer = 1
            for logical_dim in logical_dims:
                if outer == sharded.parameter_shards[0].outer and dataflow.sizes[logical_dim] == sharded.size:
                    found[logical_dim] = sharded.name
                outer *= dataflow.sizes[logical_dim]
    return found
