"""Spatial parallelism, deciding half: propagates blocks of positions through the dataflow, and decides for each layer whether it can work on a
block, which halo it needs from its neighbours, and where blocks must be gathered.

A pass goes through the operations once. If an operation cannot work on blocks, they are gathered at the output of the last module before it, and
another pass starts. After a gather every rank does the same work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.core.dataflow import Dataflow, ModuleCall, Operation
from meshwright.core.errors import RequestError
from meshwright.core.spatial_policy import (
    SpatialGather,
    SpatialInput,
    SpatialNorm,
    SpatialPolicy,
    WindowOp,
    box_shape,
    choose_grid,
    halo_obstacle,
    halo_widths,
    is_local,
    largest_block,
    local_box,
    show_grid,
)
from meshwright.plan.dataflow_graph import DataflowGraph

_RANDOM_OPS = frozenset(("native_dropout", "dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "uniform_", "normal_", "exponential_"))
_HALO_FUNCTIONS = {"conv": "conv{}d", "max": "max_pool{}d", "mean": "avg_pool{}d"}  # the calls to which the run can add a halo
_NORM_FUNCTIONS = ("batch_norm", "group_norm")
_MIN_SHARDED_SHARE = 0.1  # of all activations: with a smaller share in blocks, ranks would mostly repeat the same work
GridDims = tuple[int, ...]  # for each dim of a value, the grid dim that shards it, or -1


def choose_spatial(dataflow: Dataflow, cp_degree: int, grid: tuple[int, ...] = ()) -> SpatialPolicy:
    """How `cp_degree` ranks shard the positions of a model's samples. Raises a RequestError with the reason if they cannot."""
    dims = next((len(op.window.kernel) for op in dataflow.operations if op.window is not None and op.window.kind == "conv"), 0)
    if not dims:
        raise RequestError(f"cp={cp_degree}: this model has no convolution: use context parallelism of sequences, or --mesh dp={cp_degree}")
    grid = _check_grid(grid, cp_degree, dims) if grid else choose_grid(cp_degree, dims)
    graph, instead = DataflowGraph.of(dataflow), f"use --mesh dp={cp_degree}"
    roots = [call for call in dataflow.modules if not call.module]
    split_inputs = {p for p, v in enumerate(roots[0].inputs) if _is_splittable(dataflow, v, grid)} if roots else set()
    gathers: dict[tuple[str, int], str] = {}
    reason = "its input has too few positions, or none"
    while split_inputs:
        propagation = _SpatialPropagation(graph, grid, split_inputs, gathers)
        try:
            propagation.propagate()
        except _NeedsGatherError as error:
            reason = error.reason
            sites = _gather_sites(propagation, error.values, error.op_index)
            split_inputs -= {site for site in sites if isinstance(site, int)}
            gathers.update({site: reason for site in sites if not isinstance(site, int) and site not in gathers})
            continue
        share = propagation.result.share
        if share < _MIN_SHARDED_SHARE:
            raise RequestError(f"cp={cp_degree}: ranks would shard only {share:.0%} of this model's activations ({reason}): {instead}")
        return propagation.policy()
    raise RequestError(f"cp={cp_degree}: nothing in this model can be sharded over positions ({reason}): {instead}")


def _check_grid(grid: tuple[int, ...], cp_degree: int, dims: int) -> tuple[int, ...]:
    """The grid that the user asked for, over the last spatial dims."""
    if math.prod(grid) != cp_degree or len(grid) > dims:
        better = show_grid(choose_grid(cp_degree, dims)[-2:])
        raise RequestError(f"spatial={show_grid(grid)} is not a grid of cp={cp_degree} ranks over at most {dims} dims: use {better}")
    return (1,) * (dims - len(grid)) + grid


def _is_splittable(dataflow: Dataflow, value: int, grid: tuple[int, ...]) -> bool:
    tensor = dataflow.values[value]
    sizes = tensor.shape[2:]
    return tensor.floating and len(sizes) == len(grid) and all(size >= degree for size, degree in zip(sizes, grid, strict=True))


def _is_norm(op: Operation) -> bool:
    """Whether it is the operation that does the norm itself: torch's norm functions may also cast and count."""
    return op.function in _NORM_FUNCTIONS and op.function in op.name


class _NeedsGatherError(Exception):
    """An operation cannot work on blocks of these values."""

    def __init__(self, values: Iterable[int], op_index: int, reason: str) -> None:
        super().__init__(reason)
        self.values, self.op_index, self.reason = tuple(values), op_index, reason


@dataclass
class _PropagationResult:
    """The result of one pass."""

    window_ops: list[WindowOp] = field(default_factory=list)  # one for each call that needs a halo
    norms: list[SpatialNorm] = field(default_factory=list)
    gathers: list[SpatialGather] = field(default_factory=list)
    decisions: dict[str, str] = field(default_factory=dict)  # module → how its sliding window or norm works on blocks
    block_modules: dict[str, None] = field(default_factory=dict)  # all modules that work on blocks
    replicated_calls: dict[tuple[str, str], set[tuple[int, ...]]] = field(default_factory=dict)  # (module, function) → sizes of its replicated inputs
    block_inputs: dict[int, list[int]] = field(default_factory=dict)  # operation → its inputs that are blocks
    block_elements: float = 0.0  # elements produced in blocks, and in all
    total_elements: float = 0.0

    @property
    def share(self) -> float:
        return self.block_elements / max(self.total_elements, 1.0)


class _SpatialPropagation:
    """One pass over the operations: model inputs are split into blocks, and gathered where earlier passes found it necessary."""

    def __init__(self, graph: DataflowGraph, grid: tuple[int, ...], split_inputs: set[int], required_gathers: Mapping[tuple[str, int], str]) -> None:
        self.graph, self.dataflow, self.grid, self.split_inputs, self.required_gathers = graph, graph.dataflow, grid, split_inputs, required_gathers
        self.model_calls = [call for call in self.dataflow.modules if not call.module]
        self.block_dims: dict[int, GridDims] = {}  # value that is a block → its grid dims
        self.result = _PropagationResult()

    def propagate(self) -> None:
        reads, ends = list(self.dataflow.size_reads), list(self.dataflow.modules)
        for index, op in enumerate(self.dataflow.operations):
            self._enter_model(index)
            while ends and ends[0].end_op <= index:
                self._exit_module(ends.pop(0))
            while reads and reads[0].before_operation <= index:
                read = reads.pop(0)
                if self.block_dims.get(read.value, (-1,) * (read.dim + 1))[read.dim] >= 0:
                    raise _NeedsGatherError([read.value], index, f"the code of {op.module or 'the model'} reads the size of a block")
            self._propagate_op(index, op)
        for call in ends:
            self._exit_module(call)
        self._check_calls_distinct()

    def _enter_model(self, index: int) -> None:
        for root in self.model_calls:
            if root.first_op == index:
                self.block_dims.update({root.inputs[p]: (-1, -1, *range(len(self.grid))) for p in self.split_inputs})

    def _exit_module(self, call: ModuleCall) -> None:
        """Gather the outputs of a module where required; those of the model must be gathered, since every rank computes the whole loss."""
        for position, value in enumerate(call.outputs):
            if value not in self.block_dims:
                continue
            if (call.module, position) in self.required_gathers:
                self._record_gather(call, position, value)
            elif not call.module:
                raise _NeedsGatherError([value], call.end_op, "the loss needs all positions")
        if not call.module:
            for position in self.split_inputs:
                self.block_dims.pop(call.inputs[position], None)

    def _record_gather(self, call: ModuleCall, position: int, value: int) -> None:
        grid_dims, tensor = self.block_dims.pop(value), self.dataflow.values[value]
        dims = tuple(map(grid_dims.index, range(len(self.grid))))
        sizes = tuple(tensor.shape[d] for d in dims)
        around = [m for m in self.dataflow.modules if m.first_op <= call.first_op and call.end_op <= m.end_op]
        final = tuple(m.module for m in around if m.module and m.ops_before_last_save < call.end_op)
        size = math.prod(tensor.shape) * tensor.itemsize / math.prod(sizes) / self.dataflow.batch
        self.result.gathers.append(SpatialGather(call.module, position, dims, sizes, size, final))

    # -- operations --

    def _propagate_op(self, index: int, op: Operation) -> None:
        elements = sum(math.prod(self.dataflow.values[v].shape) for v in op.outputs)
        self.result.total_elements += elements
        blocks = [v for v in op.inputs if v in self.block_dims]
        if not blocks:
            if op.window is not None or _is_norm(op):
                self.result.replicated_calls.setdefault((op.module, op.function), set()).add(self.dataflow.values[op.inputs[0]].shape[2:])
            return
        self.result.block_elements += elements
        self.result.block_inputs[index] = blocks
        self.result.block_modules[op.module or "(model)"] = None
        if op.name in _RANDOM_OPS:
            raise self._needs_gather(index, "draws random numbers, which depend on the layout")
        if op.window is not None:
            self._propagate_window(index, op)
        elif _is_norm(op):
            self._propagate_norm(index, op)
        else:
            self._propagate_pointwise(index, op)

    def _needs_gather(self, index: int, why: str) -> _NeedsGatherError:
        op = self.dataflow.operations[index]
        return _NeedsGatherError(self.result.block_inputs[index], index, f"{op.name} in {op.module or 'the model'} {why}")

    def _spatial_sizes(self, index: int, op: Operation) -> tuple[int, ...]:
        """The spatial sizes of an input of shape (sample, channel, positions …), sharded along the positions."""
        if self.block_dims.get(op.inputs[0], ()) != (-1, -1, *range(len(self.grid))) or any(v in self.block_dims for v in op.inputs[1:]):
            raise self._needs_gather(index, "takes positions in another order")
        return self.dataflow.values[op.inputs[0]].shape[2:]

    def _propagate_window(self, index: int, op: Operation) -> None:
        sizes, window = self._spatial_sizes(index, op), op.window
        assert window is not None
        source, out = self.dataflow.values[op.inputs[0]], op.outputs[0]
        if len(op.outputs) > 1 and self._is_used(op.outputs[1]):
            raise self._needs_gather(index, "returns indices into all positions")
        output_sizes = self.dataflow.values[out].shape[2:]
        window_op = WindowOp(op.module, op.function, window, sizes, output_sizes, source.shape[1] * source.itemsize, source.needs_grad)
        if window.kind == "grow":
            if any(size % degree for size, degree in zip(sizes, self.grid, strict=True)):
                raise self._needs_gather(index, f"upsamples {show_grid(sizes)} positions, which {show_grid(self.grid)} ranks cannot split evenly")
        elif obstacle := halo_obstacle(window_op, self.grid):
            raise self._needs_gather(index, f"cannot work on blocks: {obstacle}")
        elif not is_local(window_op, self.grid):
            if op.function != _HALO_FUNCTIONS[window.kind].format(len(window.kernel)):
                raise self._needs_gather(index, f"is called by {op.function}, which cannot be given a halo")
            self.result.window_ops.append(window_op)
        self.block_dims[out] = self.block_dims[op.inputs[0]]
        self._record_decision(op.module, sizes, window_op)

    def _is_used(self, value: int) -> bool:
        return bool(self.graph.consumers.get(value)) or any(value in call.outputs for call in self.dataflow.modules)

    def _propagate_norm(self, index: int, op: Operation) -> None:
        sizes, source = self._spatial_sizes(index, op), self.dataflow.values[op.inputs[0]]
        is_batch_norm = op.function == "batch_norm"
        # A group norm's operation also returns its statistics, one number for each sample and group.
        numbers = source.shape[1] if is_batch_norm else math.prod(self.dataflow.values[op.outputs[1]].shape) // self.dataflow.batch
        self.result.norms.append(SpatialNorm(op.module, op.function, sizes, numbers, max(source.itemsize, 4), is_batch_norm, source.needs_grad))
        self.block_dims[op.outputs[0]] = self.block_dims[op.inputs[0]]
        self._record_decision(op.module, sizes)

    def _record_decision(self, module: str, sizes: tuple[int, ...], window_op: WindowOp | None = None) -> None:
        halo = f", halo {show_grid(halo_widths(window_op, self.grid))}" if window_op in self.result.window_ops else ""
        self.result.decisions[module or "(model)"] = f"{show_grid(sizes)} positions in blocks of {show_grid(largest_block(sizes, self.grid))}{halo}"

    def _propagate_pointwise(self, index: int, op: Operation) -> None:
        """Handle an operation that treats all positions alike: the sharded dims come out unchanged, and no dim is needed whole."""
        values, sharded = self.dataflow.values, dict[tuple[int, ...], int]()  # logical dims of a sharded dim → its grid dim
        for value in self.result.block_inputs[index]:
            for logical_dims, grid_dim in zip(values[value].logical_dims, self.block_dims[value], strict=True):
                if grid_dim >= 0 and sharded.setdefault(logical_dims, grid_dim) != grid_dim:
                    raise self._needs_gather(index, "mixes one spatial dim with another")
        if {s for logical_dims in sharded for s in logical_dims}.intersection((*op.contracted_dims, *op.indivisible_dims)):
            raise self._needs_gather(index, "needs all positions")
        if op.call_index >= 0 and not self._splits_unsharded_dim(op, sharded):
            raise self._needs_gather(index, "is given sizes by the code")
        if any(value not in self.block_dims and not sharded.keys().isdisjoint(values[value].logical_dims) for value in op.inputs):
            raise self._needs_gather(index, "combines blocks with the same positions of a replicated value")
        for value in op.outputs:
            grid_dims = tuple(sharded.get(logical_dims, -1) for logical_dims in values[value].logical_dims)
            if sorted(d for d in grid_dims if d >= 0) != list(range(len(self.grid))):
                raise self._needs_gather(index, "reshapes positions")
            self.block_dims[value] = grid_dims

    def _splits_unsharded_dim(self, op: Operation, sharded_dims: Mapping[tuple[int, ...], int]) -> bool:
        """Whether the operation is a split by sizes along a dim that is not sharded."""
        call = self.dataflow.sized_calls[op.call_index]
        return call.function.startswith("split") and self.dataflow.values[op.inputs[0]].logical_dims[call.dim] not in sharded_dims

    def _check_calls_distinct(self) -> None:
        """The run identifies calls inside a module by function, kernel and block sizes; where these are ambiguous, the module's input is gathered."""
        calls: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], WindowOp | SpatialNorm] = {}
        ops: list[WindowOp | SpatialNorm] = [*self.result.window_ops, *self.result.norms]
        for op in ops:
            kernel = op.window.kernel if isinstance(op, WindowOp) else ()
            for rank in range(math.prod(self.grid)):
                local = box_shape(local_box(op.sizes, self.grid, rank))
                is_ambiguous = calls.setdefault((op.module, op.function, kernel, local), op) != op
                replicated = (m for (m, f), sizes in self.result.replicated_calls.items() if f == op.function and local in sizes)
                if is_ambiguous or any(m == op.module or not op.module or m.startswith(f"{op.module}.") for m in replicated):
                    index = next(i for i in self.result.block_inputs if self.dataflow.operations[i].module == op.module)
                    raise self._needs_gather(index, "is called on blocks and on other tensors of a block's size")

    def policy(self) -> SpatialPolicy:
        result, inputs = self.result, self.model_calls[0].inputs
        split_inputs = tuple(SpatialInput(p, self.dataflow.values[inputs[p]].shape[2:]) for p in sorted(self.split_inputs))
        reasons = (f"{self.required_gathers[g.module, g.position]}; gathered after {g.module or 'the model'}" for g in result.gathers)
        replicated = f"replicated: {next(reasons, '')}"
        parameter_modules = [w.name.rpartition(".")[0] for w in self.graph.parameters]
        layers = dict.fromkeys([*(op.module for op in self.dataflow.operations if op.window is not None), *parameter_modules])
        names = [name or "(model)" for name in layers]
        notes = {name: result.decisions.get(name, "on blocks" if name in result.block_modules else replicated) for name in names}
        window_ops, norms, gathers = tuple(result.window_ops), tuple(result.norms), tuple(result.gathers)
        return SpatialPolicy(self.grid, split_inputs, window_ops, norms, gathers, tuple(result.block_modules), notes)


def _gather_sites(propagation: _SpatialPropagation, values: Iterable[int], op_index: int) -> set[tuple[str, int] | int]:
    """Where to gather these values before an operation: outputs of modules (module, output); where there is none, the position of a model input
    that must not be split."""
    sites: set[tuple[str, int] | int] = set()
    for value in values:
        site = _last_module_output(propagation, value, op_index)
        producer = max((i for i in range(op_index) if value in propagation.dataflow.operations[i].outputs), default=-1)
        if site is not None:
            sites.add(site)
        elif producer in propagation.result.block_inputs:
            sites |= _gather_sites(propagation, propagation.result.block_inputs[producer], producer)
        else:
            inputs = {p for call in propagation.model_calls for p in propagation.split_inputs if call.inputs[p] == value}
            sites |= inputs or propagation.split_inputs
    return sites


def _last_module_output(propagation: _SpatialPropagation, value: int, op_index: int) -> tuple[str, int] | None:
    """The last module call that returns the value, the outermost of those; only modules called once, so that other calls stay sharded."""
    modules, models = propagation.dataflow.modules, propagation.model_calls
    num_calls = Counter(call.module for call in modules)
    calls = [
        call
        for call in modules
        if value in call.outputs
        and call.end_op <= op_index
        and any(model.first_op <= call.first_op and call.end_op <= model.end_op for model in models)
        and num_calls[call.module] <= len(models)
        and (call.module, call.outputs.index(value)) not in propagation.required_gathers
    ]
    last = max(calls, key=lambda call: (call.end_op, call.end_op - call.first_op), default=None)
    return (last.module, last.outputs.index(value)) if last is not None else None
