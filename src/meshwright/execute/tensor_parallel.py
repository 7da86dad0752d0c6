"""Tensor parallelism: shard a model's parameters along sharded logical dims, in place, and install the collectives that this needs.

The model's code is unchanged. A layer that contracts a sharded dim reduces its output over ranks; a module that takes a full activation into a
tensor-parallel region reduces that input's gradient in backward; literal sizes in the code are rewritten as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.sized_calls import SIZED_FUNCTIONS, sized_call
from meshwright.core.tensor_layout import TensorLayout
from meshwright.core.tensor_policy import CollectiveSite, ParameterShard, ShardedDim, SizeRewrite, TensorPolicy
from meshwright.describe.layers import layer_kind
from meshwright.execute.autograd_collectives import CopyToTensorParallel, GatherFromTensorParallel, ReduceFromTensorParallel
from meshwright.execute.compiled_collectives import CompiledSite
from meshwright.execute.deferred_weight_grad import clear_deferred, copy_to_region_overlapped, defer_weight_grad, deferrable_matmul
from meshwright.execute.module_hooks import Decorator, TensorFn, add_bias, at_module_input, eager_decorator, replace_parameter, run_forward_in
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.sequence_parallel import GatherFromSequence, ReduceScatterToSequence, SequenceShard, ShardedSequences
from meshwright.execute.sharded_norm import NormCollective, shard_norm


@dataclass(frozen=True)
class _ShardPlacement:
    """One sharding of one parameter: the logical dim, where it is in the tensor's dim, and the ranks that it is sharded over."""

    logical_dim: ShardedDim
    parameter_shard: ParameterShard
    comm: Comm

    def shard(self, full: Tensor) -> Tensor:
        """A copy of this rank's shard: along the first dim a view would keep the full tensor's memory alive."""
        first, count = self.logical_dim.shard_range(self.comm.rank, self.comm.size)
        dim, inner = self.parameter_shard.dim, self.parameter_shard.inner
        blocks = full.unflatten(dim, (self.parameter_shard.outer, self.logical_dim.size * inner))
        return blocks.narrow(dim + 1, first * inner, count * inner).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)

    def layout(self, whole: TensorLayout) -> TensorLayout:
        first, count = self.logical_dim.shard_range(self.comm.rank, self.comm.size)
        cut = self.parameter_shard
        return whole.cut(cut.dim, self.logical_dim.size, first, count, cut.outer, cut.inner)


def _shard_sizes(logical_dim: ShardedDim, comm: Comm) -> list[int]:
    return [logical_dim.shard_range(rank, comm.size)[1] for rank in range(comm.size)]


@dataclass
class TensorParallelShards:
    """The sharded parameters by name: along one dim, or along two on a grid of ranks."""

    placements: dict[str, list[_ShardPlacement]] = field(default_factory=dict)

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        for placement in self.placements.get(name, ()):
            full = placement.shard(full)
        return full

    def layout(self, name: str, layout: TensorLayout) -> TensorLayout:
        """Where the shard of a tensor with this layout lies in the whole one."""
        for placement in self.placements.get(name, ()):
            layout = placement.layout(layout)
        return layout


def shard_model(model: nn.Module, optimizer: Optimizer, plan: Plan, groups: ProcessGroups, cache: RecomputeCache) -> TensorParallelShards:
    """Shard `model` in place; `optimizer` then steps the shards. Collective: every rank calls it with the same plan.

    Units that recompute selectively save their collectives' results in `cache`.
    """
    if optimizer.state:
        raise RequestError("tensor parallelism shards the optimizer's state: apply the plan before the optimizer's first step")
    shards = TensorParallelShards()
    for axis, policy in plan.tensor_policies:
        for logical_dim in policy.sharded_dims:
            for parameter_shard in logical_dim.parameter_shards:
                placement = _ShardPlacement(logical_dim, parameter_shard, groups.get(axis))
                shards.placements.setdefault(parameter_shard.parameter, []).append(placement)
    sync_rng_state(groups.tp, plan.device)
    shard_tensors(model, optimizer, shards.placements, shards.shard)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 and f"{name}.weight" in shards.placements:
            module.groups = module.groups * module.weight.shape[0] // (module.in_channels if module.transposed else module.out_channels)
    deferred, own_code = _deferred_layers(model, plan), {name for name, m in model.named_modules() if layer_kind(m) not in ("linear", "conv")}
    for axis, policy in plan.tensor_policies:
        _install_collectives(model, policy, groups.get(axis), deferred, own_code, cache, plan)
    reduced = {site.module for _, policy in plan.tensor_policies for site in policy.reduce_sites}
    for name in (name for name in deferred if name not in reduced):
        defer_weight_grad(model.get_submodule(name))
    return shards


def has_compiled_collectives(plan: Plan) -> bool:
    """Whether collectives are operators in compiled graphs. Those over positions, those of norms and those whose results selective recomputation
    keeps are not."""
    policies = [policy for _, policy in plan.tensor_policies]
    others = any(policy.is_sequence_parallel or policy.norm_sites or policy.sequence_scatter_sites for policy in policies)
    return plan.compile != "none" and not others and "selective" not in plan.memory.recompute_modes.values()


def _deferred_layers(model: nn.Module, plan: Plan) -> list[str]:
    """Layers whose weight gradients are computed while their input gradient is reduced. None in a pipeline, which orders the two itself, in
    compiled blocks, which keep both in one graph, or in fp8, which has matmuls of its own."""
    if "inputs" not in plan.sync.overlap or plan.mesh.pp > 1 or plan.compile != "none" or plan.memory.precision == "fp8":
        return []
    pairs = [(site.module, name) for _, policy in plan.tensor_policies for site in policy.copy_sites for name in site.linear_layers]
    if plan.memory.zero == 3:  # a weight is unsharded only while its unit runs, so the input must enter there too
        pairs = [(module, name) for module, name in pairs if _unit_of(module, plan) == _unit_of(name, plan)]
    return [name for name in dict.fromkeys(name for _, name in pairs) if model.get_submodule(name).weight.requires_grad]


def _unit_of(module: str, plan: Plan) -> str:
    return max((u for u in plan.memory.units if f"{module}.".startswith(f"{u}.")), key=len, default="")


def _install_collectives(
    model: nn.Module, policy: TensorPolicy, comm: Comm, deferred_layers: Sequence[str], own_code: Container[str], cache: RecomputeCache,
    plan: Plan,
) -> None:  # fmt: skip
    """Install the collectives of one axis. `own_code` names modules that are not torch's linear and conv layers and run their own code. Where blocks
    are compiled, collectives are operators in their graphs or, if they are `eager`, break them."""
    modules = dict(model.named_modules())
    eager, traced = eager_decorator(plan.compile != "none"), has_compiled_collectives(plan)
    sequences = ShardedSequences(policy, comm)
    sequences.install(modules, policy, eager, cache)
    for site in _one_per_input(policy.copy_sites):
        name, layers = f"tp_input/{site.module}", [modules[name] for name in deferred_layers if name in site.linear_layers]
        if traced:
            at_module_input(modules[site.module], site.position, CompiledSite(comm, name).copy_to_region)
            continue
        shard = sequences.shard(site.sequence_layout, name) if site.sequence_layout else None
        at_module_input(modules[site.module], site.position, _copy_to_region(comm, name, layers, shard, cache), eager)
    for site in _one_per_input(policy.reduce_sites):
        name = f"tp_output/{site.module}"
        shard = sequences.shard(site.sequence_layout, name) if site.sequence_layout else None
        matmul = _matmul_of(modules[site.module], site.module in own_code)
        if traced:
            _reduce_output(modules[site.module], matmul, CompiledSite(comm, name).reduce_from_region, lambda function: function)
            continue
        _reduce_output(modules[site.module], matmul, _reduce_from_region(comm, name, shard, cache), eager)
    logical_dims = {s.name: s for s in policy.sharded_dims}
    for site in _one_per_input(policy.embedding_sites):
        name = f"embedding/{site.module}"
        reduce = CompiledSite(comm, name).reduce_from_region if traced else _reduce_from_region(comm, name, None, cache)
        _shard_embedding(modules[site.module], logical_dims[site.logical_dim], comm, reduce, eager, traced)
    for site in _one_per_input(policy.gather_sites):
        sizes = _shard_sizes(logical_dims[site.logical_dim], comm)
        if traced:
            compiled = CompiledSite(comm, f"gather/{site.module}", sizes)
            modules[site.module].register_forward_hook(lambda _m, _a, out, compiled=compiled: compiled.gather_from_region(out))  # type: ignore[misc]
            continue
        args = (comm, sizes, f"gather/{site.module}", cache)
        modules[site.module].register_forward_hook(eager(lambda _m, _a, out, args=args: GatherFromTensorParallel.apply(out, *args)))
    for name in policy.partial_grad_parameters:  # replicated parameters inside a tensor-parallel region: their gradients are partial sums
        module, _, key = name.rpartition(".")
        copy = CompiledSite(comm, f"tp_grad/{name}").copy_to_region if traced else _copy_to_region(comm, f"tp_grad/{name}", [], None, cache)
        for holder, held_as in _registrations(modules[module], key, modules.values()):
            replace_parameter(holder, held_as, copy)
    rewrite_sizes(modules, policy.size_rewrites, logical_dims, comm)
    for name, logical_dim in {site.module: site.logical_dim for site in policy.norm_sites}.items():
        shard_norm(modules[name], _shard_sizes(logical_dims[logical_dim], comm), NormCollective(comm, f"norm/{name}", cache), eager)


def _registrations(module: nn.Module, key: str, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """All places where a module's tensor is registered: layers that share a parameter, which has the name of the first."""
    tensor = module._parameters.get(key, module._buffers.get(key))
    return [(m, k) for m in modules for registry in (m._parameters, m._buffers) for k, t in registry.items() if t is not None and t is tensor]


def _one_per_input(sites: Iterable[CollectiveSite]) -> Iterable[CollectiveSite]:
    """The sites without those of a module's further calls: what is installed at a module happens in each of its calls."""
    return {(site.module, site.position): site for site in sites}.values()


def sync_rng_state(comm: Comm, device_type: str) -> None:
    """Broadcast the first rank's RNG state within the group: dropout on replicated tensors must be the same on all ranks."""
    accessors: list[Any] = [(torch.get_rng_state, torch.set_rng_state)]
    if device_type == "cuda":
        accessors.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    for get_state, set_state in accessors:
        state = get_state().to(device_type)
        comm.broadcast(state, "init/rng").wait()
        set_state(state.cpu())


# -- parameters --


def shard_tensors(model: nn.Module, optimizer: Optimizer, names: Container[str], shard_fn: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every parameter and buffer among `names` by this rank's shard of it, wherever it is registered."""
    name_of = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    shards: dict[int, Tensor] = {}
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            for key, tensor in list(registered.items()):
                if tensor is None or name_of.get(id(tensor), "") not in names:
                    continue
                if id(tensor) not in shards:
                    shard = shard_fn(name_of[id(tensor)], tensor.detach())
                    shards[id(tensor)] = nn.Parameter(shard, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shard
                registered[key] = shards[id(tensor)]  # type: ignore[assignment]
    for group in optimizer.param_groups:
        group["params"] = [shards.get(id(p), p) for p in group["params"]]


# -- collectives --


def _copy_to_region(comm: Comm, name: str, deferred_layers: list[nn.Module], shard: SequenceShard | None, cache: RecomputeCache) -> TensorFn:
    """The function applied to an activation that enters a tensor-parallel region; `deferred_layers` are the layers in it that multiply it."""

    def enter(x: Tensor) -> Tensor:
        if not x.requires_grad:
            clear_deferred(deferred_layers)
            return x if shard is None else shard.all_gather(x)
        if deferred_layers:
            return copy_to_region_overlapped(x, comm, name, shard, deferred_layers, cache)
        return CopyToTensorParallel.apply(x, comm, name) if shard is None else GatherFromSequence.apply(x, shard, cache)

    return enter


def _reduce_from_region(comm: Comm, name: str, shard: SequenceShard | None, cache: RecomputeCache) -> TensorFn:
    """The function that completes partial sums: an all-reduce, or a reduce-scatter over positions."""
    if shard is None:
        return lambda x: ReduceFromTensorParallel.apply(x, comm, name, cache)
    return lambda x: ReduceScatterToSequence.apply(x, shard, cache)


def _reduce_output(layer: nn.Module, matmul: TensorFn | None, reduce_fn: TensorFn, eager: Decorator) -> None:
    """Make a layer that contracts a sharded dim reduce its `matmul` over ranks and add its bias once, afterwards. Without one, reduce its output."""
    if matmul is None:
        layer.register_forward_hook(eager(lambda _m, _a, out: reduce_fn(out)))
    else:
        layer.forward = eager(lambda x: add_bias(layer, reduce_fn(matmul(x))))


def _matmul_of(layer: nn.Module, runs_own_code: bool) -> TensorFn | None:
    """The layer without its bias; None for a module that runs its own code, and returns a partial sum. Layers in fp8 or with quantized weights have
    an `own_matmul`."""
    if "own_matmul" in vars(layer):
        return layer.own_matmul  # type: ignore[return-value]
    if runs_own_code:
        return None
    if isinstance(layer, nn.Linear):
        return deferrable_matmul(layer, lambda x: F.linear(x, layer.weight))
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return _without_bias(layer)
    if isinstance(layer, nn.modules.conv._ConvNd):
        return lambda x: layer._conv_forward(x, layer.weight, None)  # type: ignore[operator]
    if hasattr(layer, "nf"):  # transformers' Conv1D: a linear layer with a transposed weight
        return deferrable_matmul(layer, lambda x: x @ layer.weight)  # type: ignore[operator]
    return None


def _without_bias(layer: nn.Module) -> TensorFn:
    inner = layer.forward

    def forward(x: Tensor) -> Tensor:
        own = vars(layer)  # what comes before the parameter: `replace_parameter` puts a bias with a partial gradient there
        replaced = {"bias": own["bias"]} if "bias" in own else {}
        own["bias"] = None
        try:
            return inner(x)
        finally:
            del own["bias"]
            own.update(replaced)

    return forward


def _shard_embedding(layer: nn.Module, logical_dim: ShardedDim, comm: Comm, reduce: TensorFn, eager: Decorator, traced: bool) -> None:
    """Shard an embedding by rows: each rank looks up the rows it holds and adds zeros for the others. A subclass runs its own forward, in which
    lookups of its weight are replaced."""
    first, count = logical_dim.shard_range(comm.rank, comm.size)
    padding = getattr(layer, "padding_idx", None)
    padding = padding - first if padding is not None and first <= padding < first + count else None

    def look_up(tokens: Tensor) -> Tensor:
        is_local = (tokens >= first) & (tokens < first + count)
        rows = F.embedding(torch.where(is_local, tokens - first, 0), layer.weight, padding)  # type: ignore[arg-type]
        return reduce(rows * is_local.unsqueeze(-1).to(rows.dtype))

    if type(layer).forward is nn.Embedding.forward and "forward" not in vars(layer):
        layer.forward = look_up if traced else eager(look_up)
    else:
        run_forward_in(layer, lambda: _LookupMode(layer, look_up), eager)


class _LookupMode(TorchFunctionMode):
    """Replaces the lookups of an embedding's weight."""

    def __init__(self, layer: nn.Module, look_up: TensorFn) -> None:
        super().__init__()
        self.layer, self.look_up = layer, look_up

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = {**dict(zip(("input", "weight"), args, strict=False)), **kwargs} if func is F.embedding else {}
        if named and named["weight"] is self.layer.weight:
            return self.look_up(named["input"])
        return func(*args, **kwargs)


# -- sizes in the model's code --


# The functions that a mode sees, by name: a compiler follows a look-up of the function, and no question for its name.
_FUNCTION_NAMES: dict[Any, str] = {
    found: name for name in SIZED_FUNCTIONS for holder in (torch, torch.functional, Tensor) if (found := getattr(holder, name, None)) is not None
}
_SizeKey = tuple[str, int, int, int, int]  # function, its number of sizes, which of them, its value, length of the sliced dim (0: no slice)


class _SizeRewriteMode(TorchFunctionMode):
    """While a module runs, replaces sizes of sharded dims in its calls by this rank's. A slice is rewritten only on tensors whose dim has this
    rank's length: code that reads sizes from a tensor's shape has the right ones already. In submodules the same numbers may mean something else,
    so only the innermost mode of `mode_stack` rewrites."""

    def __init__(self, rewrites: Mapping[_SizeKey, int], mode_stack: list[_SizeRewriteMode | None]) -> None:
        super().__init__()
        self.rewrites, self.mode_stack = rewrites, mode_stack
        self.functions = {key[0] for key in rewrites}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = _FUNCTION_NAMES.get(func, ""), kwargs or {}
        call = sized_call(name, args, kwargs) if name in self.functions and self.mode_stack[-1] is self else None
        if call is not None and not _counts_all_elements(name, args, call.sizes):
            lengths = [args[0].shape[d] for d in call.dims] or [0] * len(call.sizes)
            args, kwargs = call.with_sizes([self.rewrites.get((name, len(call.sizes), i, n, lengths[i]), n) for i, n in enumerate(call.sizes)])
        return func(*args, **kwargs)


def _counts_all_elements(name: str, args: Any, sizes: Sequence[int]) -> bool:
    """Whether a view's sizes are already those of its tensor: one of them may by chance be the size that others count a sharded dim by."""
    return name in ("view", "reshape") and torch.is_tensor(args[0]) and -1 not in sizes and math.prod(sizes) == args[0].numel()


def rewrite_sizes(modules: Mapping[str, nn.Module], rewrites: Sequence[SizeRewrite], sharded_dims: Mapping[str, ShardedDim], comm: Comm) -> None:
    """Patch modules so that, while they run, sizes of sharded dims in their code are this rank's."""
    tables: dict[str, dict[_SizeKey, int]] = {}
    for r in rewrites:
        size, local_size = sharded_dims[r.logical_dim].size, sharded_dims[r.logical_dim].shard_range(comm.rank, comm.size)[1]
        key = (r.function, r.num_sizes, r.position, r.original_size, r.length // size * local_size)
        tables.setdefault(r.module, {})[key] = r.original_size // size * local_size
    mode_stack: list[_SizeRewriteMode | None] = []
    for name, table in tables.items():
        _run_in_mode(modules[name], _SizeRewriteMode(table, mode_stack), mode_stack)
    for module in {id(inner): inner for name in tables for inner in _custom_submodules(modules[name])}.values():
        if all(module is not modules[name] for name in tables):
            _run_in_mode(module, None, mode_stack)


def _custom_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Submodules except torch's own layers, whose code has no literal sizes."""
    for inner in module.modules():
        if inner is not module and (next(inner.children(), None) is not None or not type(inner).__module__.startswith("torch.nn.")):
            yield inner


def _run_in_mode(module: nn.Module, mode: _SizeRewriteMode | None, mode_stack: list[_SizeRewriteMode | None]) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mode_stack.append(mode)
        try:
            with mode if mode is not None else nullcontext():
                return inner(*args, **kwargs)
        finally:
            mode_stack.pop()

    module.forward = forward
