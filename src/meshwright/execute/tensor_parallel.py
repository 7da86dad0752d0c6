"""Tensor parallelism: shard a model's parameters along sharded logical dims, in place, and install the collectives that this needs.

The model's code is unchanged. A layer that contracts a sharded dim reduces its output over ranks; a module that takes a full activation into a
tensor-parallel region reduces that input's gradient in backward; literal sizes in the code are rewritten as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.sized_calls import sized_call
from meshwright.core.tensor_policy import ParameterShard, ShardedDim, SizeRewrite, TensorPolicy
from meshwright.execute.autograd_collectives import CopyToTensorParallel, GatherFromTensorParallel, ReduceFromTensorParallel, all_gather_uneven
from meshwright.execute.deferred_weight_grad import clear_deferred, copy_to_region_overlapped, defer_weight_grad, deferrable_matmul
from meshwright.execute.module_hooks import TensorFn, at_module_input
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.sequence_parallel import GatherFromSequence, ReduceScatterToSequence, SequenceParallelRegion, SequenceShard
from meshwright.execute.sharded_norm import NormCollective, shard_norm

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class _ShardPlacement:
    """One sharding of one parameter: the logical dim, its place in the tensor's dim, and the ranks that share it."""

    sharded_dim: ShardedDim
    parameter_shard: ParameterShard
    comm: Comm

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's shard: along the first dim a view would keep the full tensor's memory alive."""
        first, count = self.sharded_dim.shard_range(self.comm.rank, self.comm.size)
        dim, inner = self.parameter_shard.dim, self.parameter_shard.inner
        runs = full.unflatten(dim, (self.parameter_shard.outer, self.sharded_dim.size * inner))
        return runs.narrow(dim + 1, first * inner, count * inner).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)

    def unshard(self, shard: torch.Tensor) -> torch.Tensor:
        comm, dim = self.comm, self.parameter_shard.dim
        pieces = all_gather_uneven(
            shard,
            comm,
            dim,
            [self.sharded_dim.shard_range(r, comm.size)[1] * self.parameter_shard.outer * self.parameter_shard.inner for r in range(comm.size)],
        )
        # Each rank's piece holds `outer` runs; the whole tensor has the runs of all ranks side by side.
        runs = [p.unflatten(dim, (self.parameter_shard.outer, -1)) for p in pieces]
        return torch.cat(runs, dim + 1).flatten(dim, dim + 1)


@dataclass
class TensorParallelShards:
    """The sharded parameters by name: along one dim, or along two on a grid of ranks."""

    placements: dict[str, list[_ShardPlacement]] = field(default_factory=dict)

    def shard(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a full tensor."""
        for layout in self.placements.get(name, ()):
            full = layout.shard(full)
        return full

    def unshard(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """The full tensor of a shard. Collective over the tensor-parallel ranks."""
        for layout in reversed(self.placements.get(name, [])):
            shard = layout.unshard(shard)
        return shard


def shard_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, groups: ProcessGroups, recompute_cache: RecomputeCache
) -> TensorParallelShards:
    """Shard `model` in place; `optimizer` then steps the shards. Collective: every rank calls it with the same plan.

    Units that recompute selectively save their collectives' results in `recompute_cache`.
    """
    if optimizer.state:
        raise RequestError("tensor parallelism cuts the optimizer's state: apply the plan before the optimizer's first step")
    found = TensorParallelShards()
    for axis, policy in plan.tensor_policies:
        for logical_dim in policy.sharded_dims:
            for cut in logical_dim.parameter_shards:
                found.placements.setdefault(cut.parameter, []).append(_ShardPlacement(logical_dim, cut, groups.get(axis)))
    sync_rng_state(groups.tp, plan.device)
    shard_tensors(model, optimizer, found.placements, found.shard)
    fed = _deferred_layers(model, plan)
    for axis, policy in plan.tensor_policies:
        _install_collectives(model, policy, groups.get(axis), fed, recompute_cache, plan.compile != "none")
    completed = {site.module for _, policy in plan.tensor_policies for site in policy.reduce_sites}
    for name in fed:
        if name not in completed:
            defer_weight_grad(model.get_submodule(name))
    return found


def _deferred_layers(model: nn.Module, plan: Plan) -> list[str]:
    """Layers whose weight gradients are computed while their input gradient is reduced. None in a pipeline, which orders the two itself, in
    compiled blocks, which keep both in one graph, or in fp8, whose matmuls are others."""
    if "inputs" not in plan.sync.overlap or plan.mesh.pp > 1 or plan.compile != "none" or plan.memory.precision == "fp8":
        return []
    pairs = [(site.module, name) for _, policy in plan.tensor_policies for site in policy.copy_sites for name in site.linear_layers]
    if plan.memory.zero == 3:  # a weight is unsharded only while its unit runs, so the input must enter there too
        pairs = [(boundary, name) for boundary, name in pairs if _unit_of(boundary, plan) == _unit_of(name, plan)]
    names = dict.fromkeys(name for _, name in pairs)
    return [name for name in names if model.get_submodule(name).weight.requires_grad]


def _unit_of(module: str, plan: Plan) -> str:
    return max((u for u in plan.memory.units if f"{module}.".startswith(f"{u}.")), key=len, default="")


def _install_collectives(
    model: nn.Module, policy: TensorPolicy, comm: Comm, deferred_layers: Sequence[str], recompute_cache: RecomputeCache, compiled: bool
) -> None:
    """Install the collectives of one axis. If blocks will be `compiled`, collectives are kept out of the graphs: a compiler would make a graph
    for every layer's own name."""
    apart: _Decorator = torch.compiler.disable if compiled else lambda function: function
    modules = dict(model.named_modules())
    region = SequenceParallelRegion(policy, comm)
    region.install(modules, policy, apart, recompute_cache)
    for site in policy.copy_sites:
        name, layers = f"tp_input/{site.module}", [modules[name] for name in deferred_layers if name in site.linear_layers]
        share = region.sequence_shard(site.sequence_layout, name) if site.sequence_layout else None
        at_module_input(modules[site.module], site.position, _copy_to_region(comm, name, layers, share, recompute_cache), apart)
    for site in policy.reduce_sites:
        name = f"tp_output/{site.module}"
        _reduce_output(
            modules[site.module],
            _reduce_from_region(comm, name, region.sequence_shard(site.sequence_layout, name) if site.sequence_layout else None, recompute_cache),
            apart,
        )
    logical_dims = {s.name: s for s in policy.sharded_dims}
    for site in policy.embedding_sites:
        _shard_embedding(modules[site.module], logical_dims[site.logical_dim], comm, f"embedding/{site.module}", apart, recompute_cache)
    for site in policy.gather_sites:
        _gather_output(modules[site.module], logical_dims[site.logical_dim], comm, f"gather/{site.module}", apart, recompute_cache)
    for name in policy.partial_grad_parameters:
        _sum_parameter_gradient(modules[name.rpartition(".")[0]], name.rpartition(".")[2], comm, f"tp_grad/{name}")
    rewrite_sizes(modules, policy.size_rewrites, logical_dims, comm)
    for name, logical_dim in {site.module: site.logical_dim for site in policy.norm_sites}.items():
        shard_norm(modules[name], logical_dims[logical_dim], NormCollective(comm, f"norm/{name}", recompute_cache), apart)


def sync_rng_state(comm: Comm, device_type: str) -> None:
    """Broadcast the first rank's RNG state within the group: dropout on replicated tensors must be the same on all ranks."""
    device = torch.device(device_type)
    state = torch.get_rng_state().to(device)
    comm.broadcast(state, "init/rng").wait()
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        comm.broadcast(state, "init/rng").wait()
        torch.cuda.set_rng_state(state.cpu(), device)


# -- parameters --


def shard_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Container[str], shard_fn: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Replace every parameter and buffer among `names` by this rank's shard of it, wherever it is registered."""
    known = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in list(held.items()):
                if tensor is None or known.get(id(tensor), "") not in names:
                    continue
                if id(tensor) not in made:
                    piece = shard_fn(known[id(tensor)], tensor.detach())
                    made[id(tensor)] = nn.Parameter(piece, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else piece
                held[key] = made[id(tensor)]  # type: ignore[assignment]
    for group in optimizer.param_groups:
        group["params"] = [made.get(id(p), p) for p in group["params"]]


# -- collectives --


def _copy_to_region(
    comm: Comm, name: str, deferred_layers: list[nn.Module], sequence_shard: SequenceShard | None, recompute_cache: RecomputeCache
) -> TensorFn:
    """The function applied to an activation that enters a tensor-parallel region; `deferred_layers` are the layers in it that multiply it."""

    def enter(x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            clear_deferred(deferred_layers)
            return x if sequence_shard is None else sequence_shard.all_gather(x)
        if deferred_layers:
            return copy_to_region_overlapped(x, (comm, name) if sequence_shard is None else sequence_shard, deferred_layers, recompute_cache)
        return CopyToTensorParallel.apply(x, comm, name) if sequence_shard is None else GatherFromSequence.apply(x, sequence_shard, recompute_cache)  # type: ignore[no-any-return]

    return enter


def _reduce_from_region(comm: Comm, name: str, sequence_shard: SequenceShard | None, recompute_cache: RecomputeCache) -> TensorFn:
    """The function that completes partial sums: an all-reduce, or a reduce-scatter over positions."""
    if sequence_shard is None:
        return lambda x: ReduceFromTensorParallel.apply(x, comm, name, recompute_cache)  # type: ignore[no-any-return]
    return lambda x: ReduceScatterToSequence.apply(x, sequence_shard, recompute_cache)  # type: ignore[no-any-return]


def _reduce_output(layer: nn.Module, reduce_fn: TensorFn, compiler_disabled: _Decorator) -> None:
    """Make a layer that contracts a sharded dim reduce its matmul over ranks and add its bias once, afterwards."""
    product = _matmul_of(layer)
    if product is None:
        layer.register_forward_hook(compiler_disabled(lambda _m, _a, out: reduce_fn(out)))
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = reduce_fn(product(x))
        bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
        if bias is None:
            return out
        if isinstance(layer, nn.modules.conv._ConvNd):
            bias = bias.view(-1, *[1] * len(layer.kernel_size))
        return out + bias.to(out.dtype)

    layer.forward = compiler_disabled(forward)


def _matmul_of(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The layer without its bias; None for a module that only passes partial sums on. A layer with another matmul (fp8) has it as `product`."""
    if "product" in vars(layer):
        return layer.product  # type: ignore[return-value]
    if isinstance(layer, nn.Linear):
        return deferrable_matmul(layer, lambda x: F.linear(x, layer.weight))
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        plain = layer.forward

        def transposed(x: torch.Tensor) -> torch.Tensor:
            kept, layer._parameters["bias"] = layer._parameters["bias"], None
            try:
                return plain(x)
            finally:
                layer._parameters["bias"] = kept

        return transposed
    if isinstance(layer, nn.modules.conv._ConvNd):
        return lambda x: layer._conv_forward(x, layer.weight, None)  # type: ignore[operator,no-any-return]
    if hasattr(layer, "nf"):  # transformers' Conv1D: a linear layer with a transposed weight
        return deferrable_matmul(layer, lambda x: x @ layer.weight)  # type: ignore[operator]
    return None


def _shard_embedding(
    layer: nn.Module, sharded_dim: ShardedDim, comm: Comm, name: str, compiler_disabled: _Decorator, recompute_cache: RecomputeCache
) -> None:
    """Shard an embedding by rows: each rank looks up the rows it holds and adds zeros for the others."""
    first, count = sharded_dim.shard_range(comm.rank, comm.size)
    padding = getattr(layer, "padding_idx", None)
    padding = padding - first if padding is not None and first <= padding < first + count else None

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        mine = (tokens >= first) & (tokens < first + count)
        rows = F.embedding(torch.where(mine, tokens - first, 0), layer.weight, padding)  # type: ignore[arg-type]
        return ReduceFromTensorParallel.apply(rows * mine.unsqueeze(-1).to(rows.dtype), comm, name, recompute_cache)  # type: ignore[no-any-return]

    layer.forward = compiler_disabled(forward)


def _gather_output(
    layer: nn.Module, sharded_dim: ShardedDim, comm: Comm, name: str, compiler_disabled: _Decorator, recompute_cache: RecomputeCache
) -> None:
    sizes = [sharded_dim.shard_range(r, comm.size)[1] for r in range(comm.size)]
    layer.register_forward_hook(compiler_disabled(lambda _m, _a, out: GatherFromTensorParallel.apply(out, comm, sizes, name, recompute_cache)))


def _sum_parameter_gradient(module: nn.Module, key: str, comm: Comm, name: str) -> None:
    """Sum the gradient of a replicated parameter inside a tensor-parallel region over ranks, through what the module sees of it in forward."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        vars(module)[key] = CopyToTensorParallel.apply(module._parameters[key], comm, name)
        try:
            return inner(*args, **kwargs)
        finally:
            del vars(module)[key]

    module.forward = forward


# -- sizes in the model's code --


class _SizeRewriteMode(TorchFunctionMode):
    """While a module runs, replaces sizes of sharded dims in its calls by this rank's. A slice is rewritten only on tensors whose dim has this
    rank's length: code that reads sizes from a tensor's shape has the right ones already. In submodules the same numbers may mean something else,
    so only the innermost mode of `mode_stack` rewrites."""

    def __init__(self, rewrites: Mapping[tuple[str, int, int, int, int], int], mode_stack: list[_SizeRewriteMode | None]) -> None:
        super().__init__()
        self.rewrites, self.mode_stack = rewrites, mode_stack
        self.functions = {key[0] for key in rewrites}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        call = sized_call(name, args, kwargs) if name in self.functions and self.mode_stack[-1] is self else None
        if call is not None:
            lengths = [args[0].shape[d] for d in call.dims] or [0] * len(call.sizes)
            now = [self.rewrites.get((name, len(call.sizes), i, n, lengths[i]), n) for i, n in enumerate(call.sizes)]
            args, kwargs = call.with_sizes(now)
        return func(*args, **kwargs)


def rewrite_sizes(modules: Mapping[str, nn.Module], rewrites: Sequence[SizeRewrite], sharded_dims: Mapping[str, ShardedDim], comm: Comm) -> None:
    """Patch modules so that, while they run, sizes of sharded dims in their code are this rank's."""
    tables: dict[str, dict[tuple[str, int, int, int, int], int]] = {}
    for r in rewrites:
        size, mine = sharded_dims[r.logical_dim].size, sharded_dims[r.logical_dim].shard_range(comm.rank, comm.size)[1]
        tables.setdefault(r.module, {})[r.function, r.num_sizes, r.position, r.original_size, r.length // size * mine] = (
            r.original_size // size * mine
        )
    running: list[_SizeRewriteMode | None] = []
    for name, table in tables.items():
        _run_in_mode(modules[name], _SizeRewriteMode(table, running), running)
    for module in {id(inner): inner for name in tables for inner in _custom_submodules(modules[name])}.values():
        if all(module is not modules[name] for name in tables):
            _run_in_mode(module, None, running)


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
