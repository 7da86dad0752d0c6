"""Context parallelism: each rank holds some positions of every sequence, and attention sees those of all ranks (see [Note: positions] in
core/context_policy.py).

The model's code is unchanged. While it runs, calls that generate positions return this rank's, and attention all-gathers keys and values; all
other ops work on any sequence length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.context_policy import LOSS_MODULE, POSITIONS_DIM, ContextPolicy, PositionGenerator
from meshwright.core.errors import RequestError, RunError
from meshwright.core.task import Batch, Loss
from meshwright.core.tensor_policy import ShardedDim
from meshwright.execute.counted_loss import count_targets
from meshwright.execute.module_hooks import at_module_input, replace_parameter, run_forward_in
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.tensor_parallel import rewrite_sizes


class ContextParallelRuntime:
    """A model patched to process this rank's positions of every sequence."""

    def __init__(self, model: nn.Module, policy: ContextPolicy, comm: Comm, cache: RecomputeCache) -> None:
        self.policy, self.comm, self.cache = policy, comm, cache
        self.position_ranges = policy.position_ranges(comm.rank, comm.size)
        self.sequence_length, self.local_length = policy.sequence_length, policy.sequence_length // comm.size
        positions = [p for r in range(comm.size) for first, count in policy.position_ranges(r, comm.size) for p in range(first, first + count)]
        self.rank_order = torch.tensor(positions)  # positions, ordered by the rank that holds them
        self.position_order = self.rank_order.argsort()  # where each position is in `rank_order`
        self.position_generators: dict[tuple[str, str], list[PositionGenerator]] = {}
        for generator in policy.position_generators:
            self.position_generators.setdefault((generator.module, generator.function), []).append(generator)
        self.attention_modules = {a.module for a in policy.attention_sites}
        self._thread_state = threading.local()  # backward recomputes in autograd's own thread
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        rewrite_sizes(modules, self.policy.size_rewrites, {POSITIONS_DIM: ShardedDim(POSITIONS_DIM, self.sequence_length, ())}, self.comm)
        for table in self.policy.position_tables:
            module, _, key = table.parameter.rpartition(".")
            replace_parameter(modules[module], key, partial(self._local_positions, dim=table.dim))
        names = {m.module for m in self.policy.position_generators} | self.attention_modules | set(self.policy.mean_loss_modules) | {""}
        for name in names - {LOSS_MODULE}:
            run_forward_in(modules[name], partial(self._in_module, name))
        for split in self.policy.position_splits:
            fn = partial(self._local_positions, dim=split.dim, outer=split.outer, inner=split.inner)
            at_module_input(modules[split.module], split.position, fn)

    # -- the batch and the loss --

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's positions of the fields that have positions. Other fields, and those that the loss slices itself, stay complete."""
        leaves, spec = pytree.tree_flatten(batch)
        for field in self.policy.fields:
            length = leaves[field.leaf].shape[field.dim]
            if length != self.sequence_length:
                raise RequestError(f"batch field '{field.name}' has {length} positions, the plan is for {self.sequence_length}: plan for {length}")
            leaves[field.leaf] = self._local_positions(leaves[field.leaf], field.dim)
        return pytree.tree_unflatten(leaves, spec)

    def wrap_loss(self, loss_fn: Loss) -> Loss:
        """Return a loss that takes a full batch and computes the loss of this rank's positions."""

        def loss(model: nn.Module, batch: Batch) -> Any:
            with self._in_module(LOSS_MODULE):
                return loss_fn(model, self.shard_batch(batch))

        return loss

    @property
    def loss_slices_positions(self) -> bool:
        """Whether the loss generates positions itself, by slicing fields of the batch."""
        return any(m.module == LOSS_MODULE for m in self.policy.position_generators)

    # -- module stack: whose code is running --

    @contextmanager
    def _in_module(self, name: str) -> Iterator[None]:
        modules: list[str] = self._thread_state.__dict__.setdefault("modules", [])
        modules.append(name)
        try:
            with _ContextParallelMode(self, modules) if len(modules) == 1 else nullcontext():
                yield
        finally:
            modules.pop()

    # -- sharding --

    def _local_positions(self, tensor: Tensor, dim: int, outer: int = 1, inner: int = 1) -> Tensor:
        """This rank's positions of a dim of size outer × positions × inner."""
        with torch._C.DisableTorchFunction():  # called from inside the model's code, whose sizes are being rewritten
            full = tensor.unflatten(dim, (outer, self.sequence_length, inner))
            return torch.cat([full.narrow(dim + 1, first, count) for first, count in self.position_ranges], dim + 1).flatten(dim, dim + 2)

    # -- position generators --

    def local_arange(self, generator: PositionGenerator, args: Any, kwargs: Any) -> Tensor | None:
        """The arange that this call should return; None if it is not the call that `generator` describes."""
        names = ("start", "end", "step") if len(args) > 1 or "end" in kwargs else ("end",)
        given = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
        start, end, step = (given.pop(k) for k in ("start", "end", "step"))
        repeats, count = generator.outer * generator.inner, -(-(end - start) // step)
        if (start, step) != (generator.start, generator.step) or count not in (repeats * self.sequence_length, repeats * self.local_length):
            return None
        full = torch.arange(start, start + repeats * self.sequence_length * step, step, **given)
        return self._local_positions(full, 0, generator.outer, generator.inner) if generator.is_sharded else full

    def local_slice(self, generator: PositionGenerator, table: Tensor, dim: int, start: int, count: int) -> tuple[Tensor, int, int] | None:
        """(tensor to slice instead, start, count); None if this is not the slice that `generator` describes."""
        if (table.shape[dim], start) != (generator.source_length, generator.start) or count not in (self.sequence_length, self.local_length):
            return None
        if not generator.is_sharded:
            return table, start, self.sequence_length
        return self._local_positions(table.narrow(dim, start, self.sequence_length), dim), 0, self.local_length

    # -- attention --

    def attention(
        self, module: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's queries to the keys of all positions that they may attend to."""
        if attn_mask is not None:
            raise RunError(f"{module} passed a mask to attention, which it did not when the plan was made: context parallelism supports none")
        if query.shape[-2] != self.local_length or key.shape[-2] != self.local_length:
            raise RunError(f"{module} attends over {query.shape[-2]} positions per rank, the plan is for {self.local_length}: plan for this length")
        device = query.device.type
        if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
            query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
        keys, values = _GatherKeyValue.apply(key, value, self, f"context/{module}")
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not is_causal:
            return F.scaled_dot_product_attention(query, keys, values, **options)
        outputs = []
        for (first, count), local_query in zip(self.position_ranges, query.split([n for _, n in self.position_ranges], -2), strict=True):
            end = first + count
            mask = None if first == 0 else _causal_mask(count, end, query.device)
            past = keys.narrow(-2, 0, end), values.narrow(-2, 0, end)
            outputs.append(F.scaled_dot_product_attention(local_query, *past, attn_mask=mask, is_causal=first == 0, **options))
        return torch.cat(outputs, -2) if len(outputs) > 1 else outputs[0]

    def all_gather(self, local: Tensor, name: str) -> Tensor:
        """Gather the rows of all positions, in sequence order."""
        full = local.new_empty((self.sequence_length, *local.shape[1:]))
        self.comm.sync.all_gather(full, local, name).wait()
        return full.index_select(0, self._index_on("position_order", local.device))

    def reduce_scatter(self, full: Tensor, name: str) -> Tensor:
        """Sum rows of all positions over ranks; return this rank's rows."""
        out = full.new_empty((self.local_length, *full.shape[1:]))
        self.comm.sync.reduce_scatter(out, full.index_select(0, self._index_on("rank_order", full.device)), name).wait()
        return out

    def _index_on(self, name: str, device: torch.device) -> Tensor:
        """An index tensor on `device`, copied once: a copy in each layer would stall the GPU."""
        if getattr(self, name).device != device:
            setattr(self, name, getattr(self, name).to(device))
        return getattr(self, name)

    # -- mean loss --

    def global_mean_loss(self, function: Callable[..., Tensor], module: str, args: Any, kwargs: Any) -> Tensor:
        """Cross entropy averages over counted targets, whose number differs between ranks. Divide this rank's sum by the global count and
        multiply by the number of ranks, so that the mean over ranks is the mean over targets."""
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("reduction", "mean") != "mean" or given["target"].is_floating_point():
            return function(*args, **kwargs)
        total = count_targets(given["target"], given.get("ignore_index", -100), given.get("weight")).to(torch.float64)
        self.comm.sync.all_reduce(total, f"num_targets/{module}").wait()
        loss = function(**{**given, "reduction": "sum"})
        return loss * (self.comm.size / total).to(loss.dtype)


def _causal_mask(rows: int, columns: int, device: torch.device) -> Tensor:
    """The causal mask of the last `rows` of `columns` positions. On GPUs it selects kernels that need no mask tensor."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes seconds that only this needs

        return causal_lower_right(rows, columns)
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


class _GatherKeyValue(torch.autograd.Function):
    """Forward all-gathers keys and values of all positions; backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, runtime: ContextParallelRuntime, name: str) -> tuple[Tensor, ...]:
        ctx.runtime, ctx.name = runtime, name
        ctx.shapes = [t.movedim(-2, 0).shape[1:] for t in (key, value)]
        return tuple(_unpack_kv(runtime.cache.run_or_replay(lambda: runtime.all_gather(_pack_kv(key, value), name)), ctx.shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_unpack_kv(ctx.runtime.reduce_scatter(_pack_kv(*grads), ctx.name), ctx.shapes), None, None


def _pack_kv(*key_value: Tensor) -> Tensor:
    """Keys and values side by side, one row per position, so that one collective moves both."""
    return torch.cat([t.movedim(-2, 0).flatten(1) for t in key_value], 1)


def _unpack_kv(rows: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    tensors = rows.split([s.numel() for s in shapes], 1)
    return [t.unflatten(1, shape).movedim(0, -2) for t, shape in zip(tensors, shapes, strict=True)]


class _ContextParallelMode(TorchFunctionMode):
    """Intercepts the torch calls of the model's code and of the loss."""

    def __init__(self, runtime: ContextParallelRuntime, module_stack: list[str]) -> None:
        super().__init__()
        self.runtime, self.module_stack = runtime, module_stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, runtime, module = kwargs or {}, self.runtime, self.module_stack[-1]
        if func is F.scaled_dot_product_attention and module in runtime.attention_modules:
            return runtime.attention(module, *args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss) and module in runtime.policy.mean_loss_modules:
            return runtime.global_mean_loss(func, module.strip("()") or "model", args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "arange":
            for generator in runtime.position_generators.get((module, "arange"), ()):
                if (positions := runtime.local_arange(generator, args, kwargs)) is not None:
                    return positions
        elif name in ("__getitem__", "narrow"):
            for generator in runtime.position_generators.get((module, "slice"), ()):
                args, kwargs = _rewrite_slice(runtime, generator, name, args, kwargs)
        return func(*args, **kwargs)


def _rewrite_slice(runtime: ContextParallelRuntime, generator: PositionGenerator, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a slicing call, changed to this rank's positions if `generator` describes it."""
    table = args[0]
    if name == "narrow":
        dim, start, count = (args[1 + i] if len(args) > 1 + i else kwargs[k] for i, k in enumerate(("dim", "start", "length")))
        local = runtime.local_slice(generator, table, dim, start, count)
        return (args, kwargs) if local is None else ((local[0], dim, *local[1:]), {})
    index = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
    if any(torch.is_tensor(i) or isinstance(i, (list, bool)) for i in index):
        return args, kwargs
    for i, dim in _slice_dims(index, table.dim()):
        start, stop, step = index[i].indices(table.shape[dim])
        local = runtime.local_slice(generator, table, dim, start, stop - start) if step == 1 else None
        if local is not None:
            table, start, count = local
            index[i] = slice(start, start + count)
            break
    return (table, tuple(index)), kwargs


def _slice_dims(index: list[Any], num_dims: int) -> Iterator[tuple[int, int]]:
    """(position in `index`, dim of the tensor) of each slice."""
    dim, used = 0, sum(i is not None and i is not Ellipsis for i in index)
    for i, item in enumerate(index):
        if item is Ellipsis:
            dim += num_dims - used
        elif item is not None:
            if isinstance(item, slice):
                yield i, dim
            dim += 1
