"""Chooses which logical dims to shard over tensor-parallel ranks, and which collectives follow from that. Pure reasoning over a model's dataflow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.core.dataflow import Dataflow, ModuleCall, Operation
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.tensor_policy import CollectiveSite, ParameterShard, ShardedDim, SizeRewrite, TensorPolicy
from meshwright.plan.copy_sites import CollectiveSiteBuilder, ShardingBlockedError, find_copy_sites
from meshwright.plan.dataflow_graph import DataflowGraph, ParameterValue
from meshwright.plan.sequence_planner import add_sequence_parallel
from meshwright.plan.size_arguments import SLICE_OPS, size_arguments

Placements = Mapping[str, str]  # by module name
PLACEMENTS = ("auto", "column", "replicate")
_FORMER_PLACEMENTS = {"whole": "replicate"}  # as plans of format version 1 have them
NORM_OPS = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "mean")
# A layer that can be sharded only with a gather of its output is sharded if it holds at least the first share of the model, or the second share of
# the largest matrix sharded without one: the vocabulary of a deep model is a small part of it, and yet the largest part of its stage.
_MIN_GATHER_SHARE, _MIN_RELATIVE_SIZE = 0.02, 0.3


def choose_tensor_grid(
    dataflow: Dataflow, degrees: Sequence[int], placements: Placements | None = None, layers: Collection[str] = (), *, sequence_parallel: bool = False
) -> tuple[TensorPolicy, TensorPolicy]:
    """The policies of one or two tensor axes: the logical dims that cover most of the model, at most one for each parameter, and every collective
    that they cause. Where a pipeline will split the model between its `layers`, collectives stay inside them.

    [Note: 2D tensor parallelism]
    A product of two matrices contracts one logical dim and keeps two. With one tensor axis, one of a matrix's two dims is sharded. With two, the
    first axis shards the same dims and the second axis their partners: the features between layers, which all blocks have in common. Every
    activation is then sharded, layers alternate between row and column parallelism by themselves, and norms, which need all features, all-reduce
    their statistics. The two axes are independent: each completes its partial sums among its own ranks.
    """
    graph = DataflowGraph.of(dataflow, layers)
    placements = {name: _FORMER_PLACEMENTS.get(placement, placement) for name, placement in (placements or {}).items()}
    check_placements(dataflow, placements)
    first = _TensorAxis(degrees[0])
    policy = _choose_axis_policy(graph, first, placements)
    if len(degrees) == 1:
        if sequence_parallel and policy.sharded_dims:
            policy = add_sequence_parallel(graph, policy, frozenset(first.chosen_dims), degrees[0])
        return policy, TensorPolicy()
    if sequence_parallel:
        raise RequestError(f"sequence=true needs one tensor axis, and tp={degrees[0]}x{degrees[1]} has two: leave it out")
    first_axis_dims = {c.parameter: c.dim for s in policy.sharded_dims for c in s.parameter_shards}
    second = _TensorAxis(degrees[1], first.sharded_dim_names(graph), first_axis_dims, {m.module: m.logical_dim for m in policy.gather_sites})
    second_policy = _choose_axis_policy(graph, second, placements)
    first.other_axis_dims = second.sharded_dim_names(graph)
    return _build_policy(graph, first, placements), second_policy


@dataclass
class _TensorAxis:
    """One tensor axis: its degree, the logical dims chosen along it, those that cannot be sharded and why, and what the other axis shards."""

    degree: int
    other_axis_dims: Mapping[int, str] = field(default_factory=dict)  # logical dims that the other axis shards → names
    first_axis_dims: Mapping[str, int] | None = None  # on the second axis: parameters that the first axis shards → the dim
    gathered_layers: Mapping[str, str] = field(default_factory=dict)  # on the second axis: layers whose outputs the first gathers → the logical dim
    blocked_dims: dict[int, str] = field(default_factory=dict)
    chosen_dims: list[int] = field(default_factory=list)
    ungathered_layers: set[str] = field(default_factory=set)  # layers whose outputs cannot be gathered

    def sharded_dim_names(self, graph: DataflowGraph) -> dict[int, str]:
        return {s: _logical_dim_name(graph, s) for s in self.chosen_dims}


def _choose_axis_policy(graph: DataflowGraph, axis: _TensorAxis, placements: Placements) -> TensorPolicy:
    for _ in range(len(graph.dataflow.sizes) + len(graph.dataflow.modules) + 1):  # each round may block one more logical dim or layer
        axis.chosen_dims = _choose_logical_dims(graph, axis, placements)
        try:
            return _build_policy(graph, axis, placements)
        except ShardingBlockedError as error:
            if error.logical_dim < 0:
                axis.ungathered_layers.update(error.layers)
            else:
                axis.blocked_dims[error.logical_dim] = error.reason
    raise AssertionError("every round blocks a logical dim or a layer")


def check_placements(dataflow: Dataflow, placements: Placements) -> None:
    """Raise unless every name is a module of the model and every placement is known."""
    names = {call.module for call in dataflow.modules}
    for name, placement in placements.items():
        if name not in names:
            raise unknown_name_error("layer", name, names, "placements")
        if placement not in (*PLACEMENTS, *_FORMER_PLACEMENTS):
            raise unknown_name_error("placement", placement, PLACEMENTS, f"placements: {name}")


def _placement_override(placements: Placements, parameter: str) -> str | None:
    """The placement, other than auto, that the user asked for at a parameter's module, if any."""
    return next((placement for name, placement in placements.items() if placement != "auto" and parameter.startswith(f"{name}.")), None)


# -- choosing --


def _choose_logical_dims(graph: DataflowGraph, axis: _TensorAxis, placements: Placements) -> list[int]:
    numel: Counter[int] = Counter()  # by logical dim: elements of the parameters that have it
    for parameter in graph.parameters:
        numel.update(dict.fromkeys(graph.value_dims[parameter.value], parameter.numel))
    sharded: set[str] = set()
    chosen: list[int] = []
    for logical_dim in sorted({s for s in numel if numel[s]} - axis.blocked_dims.keys(), key=lambda s: (-numel[s], s)):
        names = [shard.parameter for shard in graph.parameter_shards(logical_dim)]
        reason = _blocking_reason(graph, logical_dim, axis, placements)
        if reason or len(names) != len(set(names)):
            axis.blocked_dims[logical_dim] = reason or "one parameter has it twice"
        elif sharded.isdisjoint(names):
            chosen.append(logical_dim)
            sharded.update(names)
    return chosen


def _blocking_reason(graph: DataflowGraph, logical_dim: int, axis: _TensorAxis, placements: Placements) -> str:
    """Why a logical dim cannot be sharded; empty when it can."""
    flow, size, shards = graph.dataflow, graph.dataflow.sizes[logical_dim], graph.parameter_shards(logical_dim)
    if size < axis.degree:
        return f"a dim of {size} cannot be split over {axis.degree} ranks"
    if logical_dim in axis.other_axis_dims or any((axis.first_axis_dims or {}).get(shard.parameter) == shard.dim for shard in shards):
        return "the other tensor axis shards it"
    for shard in shards:
        if placement := _placement_override(placements, shard.parameter):
            return f"placements ask for {placement} at {shard.parameter.rpartition('.')[0]}"
    for index, op in ((i, flow.operations[i]) for i in graph.constraining_ops.get(logical_dim, [])):
        if logical_dim in op.indivisible_dims and not (axis.first_axis_dims is not None and _is_norm(graph, op, logical_dim)):
            return f"{op.name} in {op.module or 'the loss'} needs all of it"
        if logical_dim in op.contracted_dims and graph.find_reduction_site(index, logical_dim) is None:
            return f"{op.name} in {op.module or 'the loss'} sums over it outside a layer"
        if op.name in SLICE_OPS and op.call_index < 0 and _slices_dim(graph, op, logical_dim):
            return f"the code of {op.module or 'the model'} slices it at a fixed index"
    for index in graph.grouped_convolutions.get(logical_dim, ()):
        call = graph.innermost_call.get(index)
        if call is None or call.kind != "conv":
            return f"the code of {flow.operations[index].module or 'the model'} convolves its channels in groups"
    if (creator := graph.created_by.get(logical_dim)) is not None:
        return f"{creator.name} in {creator.module or 'the model'} makes all of it"
    if any(logical_dim in graph.value_dims[v] for v in flow.outputs):
        return "the model returns it"
    if logical_dim in graph.input_dims:
        return "the input data has it"
    return ""


def _is_norm(graph: DataflowGraph, op: Operation, logical_dim: int) -> bool:
    """Whether an operation is a norm over this logical dim alone, inside a module: ranks that hold shards of it can then all-reduce its
    statistics."""
    normalized = graph.dataflow.values[op.inputs[0]].logical_dims[-1]
    return op.name in NORM_OPS and bool(op.module) and set(op.indivisible_dims) == {logical_dim} and normalized == (logical_dim,)


def _slices_dim(graph: DataflowGraph, op: Operation, logical_dim: int) -> bool:
    source, out = graph.dataflow.values[op.inputs[0]], graph.dataflow.values[op.outputs[0]]
    return any(a != b and logical_dim in dims for a, b, dims in zip(source.shape, out.shape, source.logical_dims, strict=True))


# -- consequences --


def _build_policy(graph: DataflowGraph, axis: _TensorAxis, placements: Placements) -> TensorPolicy:
    chosen, sites = set(axis.chosen_dims), CollectiveSiteBuilder(graph, axis.other_axis_dims, axis.gathered_layers)
    names = axis.sharded_dim_names(graph)
    dims = [ShardedDim(name, graph.dataflow.sizes[s], tuple(graph.parameter_shards(s))) for s, name in names.items()]
    sharded = {c.parameter for d in dims for c in d.parameter_shards}
    gathered, gathers, lookups = _gathered_layers(graph, sites, sharded, axis, placements) if axis.first_axis_dims is None else ([], [], [])
    sharded |= {c.parameter for d in gathered for c in d.parameter_shards}
    copies, partial = find_copy_sites(graph, sites, chosen, {m.module for m in gathers})
    return TensorPolicy(
        sharded_dims=(*dims, *gathered),
        copy_sites=tuple(copies),
        reduce_sites=tuple(_reduce_sites(graph, sites, chosen)),
        gather_sites=tuple(gathers),
        embedding_sites=tuple(lookups),
        norm_sites=tuple(_norm_sites(graph, sites, chosen)),
        partial_grad_parameters=tuple(partial),
        size_rewrites=tuple(_size_rewrites(graph, names)),
        unsharded_reasons=_unsharded_reasons(graph, sharded, placements, axis.blocked_dims),
    )


def _logical_dim_name(graph: DataflowGraph, logical_dim: int) -> str:
    first = graph.parameter_shards(logical_dim)[0]
    return f"{first.parameter}:{first.dim}"


def _reduce_sites(graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_dims: set[int]) -> Iterable[CollectiveSite]:
    sites: dict[tuple[str, int], CollectiveSite] = {}  # by call: a layer may be called several times
    for index, op in enumerate(graph.dataflow.operations):
        for logical_dim in sharded_dims.intersection(op.contracted_dims):
            reduction = graph.find_reduction_site(index, logical_dim)
            assert reduction is not None
            call = reduction[0]
            sites.setdefault((call.module, call.first_op), site_builder.at_output(call))
    return sites.values()


def _norm_sites(graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_dims: set[int]) -> Iterable[CollectiveSite]:
    """Collectives of norm statistics: one number for each normalized row (two in a layer norm), in fp32 or wider."""
    for op in graph.dataflow.operations:
        for logical_dim in sharded_dims.intersection(op.indivisible_dims):
            site, itemsize = site_builder.build(op.module, op.inputs[0]), graph.dataflow.values[op.inputs[0]].itemsize
            size = site.bytes / graph.dataflow.sizes[logical_dim] * (max(itemsize, 4) / itemsize)
            count, name = 2 if op.name == "native_layer_norm" else 1, _logical_dim_name(graph, logical_dim)
            yield replace(site, bytes=size, num_statistics=count, logical_dim=name, other_axis_dim="")


def _gathered_layers(
    graph: DataflowGraph, site_builder: CollectiveSiteBuilder, sharded_parameters: set[str], axis: _TensorAxis, placements: Placements
) -> tuple[list[ShardedDim], list[CollectiveSite], list[CollectiveSite]]:
    """Layers that no chosen logical dim covers but that are large, or asked for: sharded along their output features (embeddings along their
    rows), with a gather or reduction at their output."""
    dims: dict[str, ShardedDim] = {}  # by weight
    gathers: list[CollectiveSite] = []
    lookups: list[CollectiveSite] = []
    largest = max((w.numel for w in graph.parameters if w.name in sharded_parameters), default=graph.total_numel)
    flow = graph.dataflow
    for call in flow.modules:
        if call.kind not in ("linear", "embedding") or call.module in axis.ungathered_layers:
            continue
        weight, bias = _layer_parameters(graph, call)
        if weight is None or weight.name in sharded_parameters or not _is_worth_gather(graph, call, weight, placements, largest):
            continue
        if not all(_reads_as_layer(graph, i) for i in graph.consumers.get(weight.value, [])):
            continue  # other code reads it too, and would read a shard
        if call.kind == "linear" and any(graph.op(i).indivisible_dims for i in range(call.first_op, call.end_op)):
            continue  # a hook needs all features, before they are gathered
        dim = _feature_dim(graph, call, weight)
        size = flow.values[weight.value].shape[dim]
        if size < axis.degree:
            continue
        tied = dims.get(weight.name)  # the same matrix in another layer
        sharded = tied or ShardedDim(f"{weight.name}:{dim}", size, (ParameterShard(weight.name, dim),))
        has_bias = bias is not None and call.kind == "linear" and flow.values[bias.value].shape == (size,)
        biases = (ParameterShard(bias.name, 0),) if bias is not None and has_bias else ()
        dims[weight.name] = replace(sharded, parameter_shards=tuple(dict.fromkeys((*sharded.parameter_shards, *biases))))
        site = replace(site_builder.at_output(call), logical_dim=dims[weight.name].name)
        (lookups if call.kind == "embedding" else gathers).append(site)
    return list(dims.values()), gathers, lookups


def _reads_as_layer(graph: DataflowGraph, index: int) -> bool:
    """Whether an operation on a weight is a linear layer's product or an embedding's lookup; an embedding's own forward may read rows otherwise."""
    reader = graph.innermost_call.get(index)
    return reader is not None and (reader.kind == "linear" or (reader.kind == "embedding" and graph.op(index).name == "embedding"))


def _is_worth_gather(graph: DataflowGraph, call: ModuleCall, weight: ParameterValue, placements: Placements, largest_sharded: int) -> bool:
    placement = placements.get(call.module) or _placement_override(placements, weight.name)
    if placement in ("replicate", "column"):
        return placement == "column"
    return weight.numel >= min(_MIN_GATHER_SHARE * graph.total_numel, _MIN_RELATIVE_SIZE * largest_sharded)


def _layer_parameters(graph: DataflowGraph, call: ModuleCall) -> tuple[ParameterValue | None, ParameterValue | None]:
    """The trainable matrix and the bias, which may be frozen, that a layer's own operations read; a tied matrix has the name of its first owner."""
    read = {v for op in range(call.first_op, call.end_op) for v in graph.op(op).inputs}
    parameters = [graph.parameters[i] for i in sorted(graph.parameter_position[v] for v in read if v in graph.parameter_position)]
    matrix = next((w for w in parameters if len(graph.dataflow.values[w.value].shape) == 2), None)
    values = ((v, graph.dataflow.values[v]) for v in sorted(read))
    return matrix, next((ParameterValue(t.parameter, v, t.shape[0]) for v, t in values if t.parameter and len(t.shape) == 1), None)


def _feature_dim(graph: DataflowGraph, call: ModuleCall, weight: ParameterValue) -> int:
    """The dim of a matrix that becomes the layer's output; for an embedding, the dim of its rows."""
    shape, out = graph.dataflow.values[weight.value].shape, graph.dataflow.values[call.outputs[0]].shape[-1]
    if call.kind == "embedding":
        return 0
    logical_dims = graph.dataflow.values[call.outputs[0]].logical_dims[-1]
    return next((d for d in (0, 1) if graph.dataflow.values[weight.value].logical_dims[d] == logical_dims and shape[d] == out), 0)


# -- sizes in the model's code --


def _size_rewrites(graph: DataflowGraph, dim_names: Mapping[int, str]) -> list[SizeRewrite]:
    rewrites, unclear, uneven = graph.size_rewrites(dim_names)
    logical_dims = {name: logical_dim for logical_dim, name in dim_names.items()}
    for rewrite in uneven:
        reason = f"the code of {rewrite.module or 'the model'} slices it at a fixed index ({rewrite.original_size} of {rewrite.length})"
        raise ShardingBlockedError(logical_dims[rewrite.logical_dim], reason)
    for logical_dim, module in _sizes_computed_from(graph, dim_names):
        raise ShardingBlockedError(logical_dim, f"the code of {module or 'the model'} computes sizes from it")
    for logical_dim, module in _sizes_with_samples(graph, dim_names):
        raise ShardingBlockedError(logical_dim, f"the code of {module or 'the model'} multiplies its size by the number of samples")
    for rewrite in unclear:
        reason = f"the code of {rewrite.module} uses the size {rewrite.original_size} for other things too"
        raise ShardingBlockedError(logical_dims[rewrite.logical_dim], reason)
    return rewrites


def _sizes_computed_from(graph: DataflowGraph, dim_names: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """(sharded logical dim, module) where a module's code reads the size of a tensor dim of which it is a factor, and splits that dim by a view:
    what the code computes from a rank's size, such as the width of a head, would be another number."""
    flow = graph.dataflow
    reads: set[tuple[int, str]] = set()
    for read in flow.size_reads:
        factors = flow.values[read.value].logical_dims[read.dim]
        reads |= {(logical_dim, read.module) for logical_dim in factors if len(factors) > 1 and logical_dim in dim_names}
    for op in (o for o in flow.operations if o.call_index >= 0 and o.inputs):
        split = {dims[0] for dims in flow.values[op.outputs[0]].logical_dims if len(dims) == 1}
        whole = {s for dims in flow.values[op.inputs[0]].logical_dims if len(dims) > 1 for s in dims}
        yield from sorted((s, op.module) for s in split & whole if (s, op.module) in reads)


def _sizes_with_samples(graph: DataflowGraph, dim_names: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """(sharded logical dim, module) where a size in a module's code counts both samples and the dim, as in `view(batch * heads, …)`. Batches differ
    from the traced one, so the number is not known, nor whether the code computed it from the size of a rank."""
    flow = graph.dataflow
    for op in (o for o in flow.operations if o.call_index >= 0):
        for _, _, dim, _ in size_arguments(flow, op):
            counted = flow.values[op.outputs[0]].logical_dims[dim]
            if not flow.sample_dims.isdisjoint(counted):
                yield from ((s, op.module) for s in counted if s in dim_names)


def _unsharded_reasons(graph: DataflowGraph, sharded: set[str], placements: Placements, blocked_dims: Mapping[int, str]) -> dict[str, str]:
    """For every unsharded parameter, the reason: a placement, an operation in its own module, or what blocks its logical dims elsewhere."""
    indivisible: dict[str, list[tuple[str, frozenset[int]]]] = {}  # module → its operations and the logical dims that each needs whole
    for op in graph.dataflow.operations:
        if op.indivisible_dims:
            indivisible.setdefault(op.module, []).append((op.name, frozenset(op.indivisible_dims)))
    reasons = {}
    for parameter in (p for p in graph.parameters if p.name not in sharded):
        module, dims = parameter.name.rpartition(".")[0], graph.value_dims[parameter.value]
        placement = _placement_override(placements, parameter.name)
        in_module = [f"{name} in {module} needs all of it" for name, logical_dims in indivisible.get(module, []) if logical_dims & dims]
        elsewhere = [blocked_dims[s] for s in sorted(dims) if s in blocked_dims]
        requested = [f"placements ask for {placement}"] if placement else []
        reasons[parameter.name] = [*requested, *in_module, *elsewhere, "a parameter that shares its dim is sharded along another dim"][0]
    return reasons


def reject_if_unsharded(grid: tuple[TensorPolicy, TensorPolicy], tp_degrees: tuple[int, ...]) -> None:
    size = math.prod(tp_degrees)
    for policy, axis, instead in zip(grid, ("", " along the second tensor axis"), (f"dp={size}", f"tp={size}"), strict=True):
        if not policy.sharded_dims and (len(tp_degrees) > 1 or not axis):
            reason = next(iter(policy.unsharded_reasons.values()), "it has no parameters")
            raise RequestError(f"tp={'x'.join(map(str, tp_degrees))}: nothing in this model can be sharded{axis} ({reason}): use --mesh {instead}")


def sharded_logical_dims(dataflow: Dataflow, policy: TensorPolicy | None) -> dict[int, str]:
    """The logical dims that a policy shards across layers, with their names; without those that are gathered at the output of their layer."""
    if policy is None:
        return {}
    values = {v.parameter: v for v in dataflow.values if v.parameter}
    gathered = {m.logical_dim for m in (*policy.gather_sites, *policy.embedding_sites)}
    names = {}
    for sharded in (s for s in policy.sharded_dims if s.name not in gathered and s.parameter_shards):
        shard, outer = sharded.parameter_shards[0], 1
        for logical_dim in values[shard.parameter].logical_dims[shard.dim]:
            if outer == shard.outer and dataflow.sizes[logical_dim] == sharded.size:
                names[logical_dim] = sharded.name
            outer *= dataflow.sizes[logical_dim]
    return names
