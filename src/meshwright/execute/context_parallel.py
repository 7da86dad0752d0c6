"""Context parallelism: each rank holds some positions of every sequence, and attention sees those of all ranks (see [Note: positions] in
core/context_policy.py).

The model's code is unchanged. While it runs, calls that generate positions return this rank's, and attention all-gathers keys and values; all
other ops work on any sequence length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.context_policy import LOSS_MODULE, POSITIONS_DIM, ContextPolicy, PositionGenerator
from meshwright.core.errors import RequestError, RunError
from meshwright.core.task import Batch, Loss
from meshwright.core.tensor_policy import ParameterShard, ShardedDim
from meshwright.execute.module_hooks import at_module_input
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.tensor_parallel import rewrite_sizes


class ContextParallelRuntime:
    """A model patched to process this rank's positions of every sequence."""

    def __init__(self, model: nn.Module, policy: ContextPolicy, comm: Comm, recompute_cache: RecomputeCache) -> None:
        self.policy, self.comm, self.recompute_cache = policy, comm, recompute_cache
        self.position_ranges = policy.position_ranges(comm.rank, comm.size)
        self.sequence_length, self.local_length = policy.sequence_length, policy.sequence_length // comm.size
        every = [p for r in range(comm.size) for first, count in policy.position_ranges(r, comm.size) for p in range(first, first + count)]
        self.rank_order = torch.tensor(every)  # positions, ordered by the rank that holds them
        self.position_order = self.rank_order.argsort()  # where each position is in `rank_order`
        self.position_generators: dict[tuple[str, str], list[PositionGenerator]] = {}
        for made in policy.position_generators:
            self.position_generators.setdefault((made.module, made.function), []).append(made)
        self.attention_modules = {a.module for a in policy.attention_sites}
        self._thread_state = threading.local()  # backward recomputes in autograd's own thread
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        rewrite_sizes(modules, self.policy.size_rewrites, {POSITIONS_DIM: ShardedDim(POSITIONS_DIM, self.sequence_length, ())}, self.comm)
        for held in self.policy.position_tables:
            self._shard_parameter(modules[held.parameter.rpartition(".")[0]], held)
        names = {m.module for m in self.policy.position_generators} | self.attention_modules | set(self.policy.mean_loss_modules) | {""}
        for name in names - {LOSS_MODULE}:
            self._track_module(modules[name], name)
        for entered in self.policy.position_splits:
            at_module_input(
                modules[entered.module], entered.position, partial(self._local_positions, dim=entered.dim, outer=entered.outer, inner=entered.inner)
            )

    # -- the batch and the loss --

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's positions of the fields that have positions. Other fields, and those that the loss slices itself, stay whole."""
        leaves, spec = pytree.tree_flatten(batch)
        for field in self.policy.fields:
            length = leaves[field.leaf].shape[field.dim]
            if length != self.sequence_length:
                raise RequestError(
                    f"field '{field.name}' of the batch has {length} positions, the plan is for {self.sequence_length}: plan for {length}"
                )
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
        frames: list[str] = self._thread_state.__dict__.setdefault("frames", [])
        frames.append(name)
        try:
            if len(frames) == 1:
                with _ContextParallelMode(self, frames):
                    yield
            else:
                yield
        finally:
            frames.pop()

    def _track_module(self, module: nn.Module, name: str) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._in_module(name):
                return inner(*args, **kwargs)

        module.forward = forward

    # -- sharding --

    def _local_positions(self, tensor: torch.Tensor, dim: int, outer: int = 1, inner: int = 1) -> torch.Tensor:
        """This rank's positions of a dim of size outer × positions × inner."""
        with torch._C.DisableTorchFunction():  # called from inside the model's code, whose sizes are being rewritten
            runs = tensor.unflatten(dim, (outer, self.sequence_length, inner))
            found = torch.cat([runs.narrow(dim + 1, first, count) for first, count in self.position_ranges], dim + 1)
            return found.flatten(dim, dim + 2)

    def _shard_parameter(self, module: nn.Module, parameter_shard: ParameterShard) -> None:
        """During the module's forward, replace a parameter or buffer by this rank's positions of it."""
        key, inner = parameter_shard.parameter.rpartition(".")[2], module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            whole = module._parameters.get(key)
            vars(module)[key] = self._local_positions(whole if whole is not None else module._buffers[key], parameter_shard.dim)  # type: ignore[arg-type]
            try:
                return inner(*args, **kwargs)
            finally:
                del vars(module)[key]

        module.forward = forward

    # -- position generators --

    def local_arange(self, position_generator: PositionGenerator, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The arange that this call should return; None if it is not the call that `position_generator` describes."""
        names = ("start", "end", "step") if len(args) > 1 or "end" in kwargs else ("end",)
        given = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
        start, end, step = (given.pop(k) for k in ("start", "end", "step"))
        runs = position_generator.outer * position_generator.inner
        if (start, step) != (position_generator.start, position_generator.step) or -(-(end - start) // step) not in (
            runs * self.sequence_length,
            runs * self.local_length,
        ):
            return None
        whole = torch.arange(start, start + runs * self.sequence_length * step, step, **given)
        return self._local_positions(whole, 0, position_generator.outer, position_generator.inner) if position_generator.is_sharded else whole

    def local_slice(
        self, position_generator: PositionGenerator, table: torch.Tensor, dim: int, start: int, stop: int
    ) -> tuple[torch.Tensor, slice] | None:
        """The tensor to slice instead, and the slice; None if this is not the slice that `position_generator` describes."""
        if (table.shape[dim], start) != (position_generator.source_length, position_generator.start) or stop - start not in (
            self.sequence_length,
            self.local_length,
        ):
            return None
        if not position_generator.is_sharded:
            return table, slice(start, start + self.sequence_length)
        return self._local_positions(table.narrow(dim, start, self.sequence_length), dim), slice(None)

    # -- attention --

    def attention(
        self, module: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of this rank's queries to the keys of all positions that they may attend to."""
        if attn_mask is not None:
            raise RunError(f"{module} gave attention a mask, which it did not when the plan was made: context parallelism has none")
        if query.shape[-2] != self.local_length or key.shape[-2] != self.local_length:
            raise RunError(f"{module} attends over {query.shape[-2]} positions of a rank, the plan has {self.local_length}: plan for this length")
        device = query.device.type
        if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
            query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
        keys, values = _GatherKeyValue.apply(key, value, self, f"context/{module}")
        how: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not is_causal:
            return F.scaled_dot_product_attention(query, keys, values, **how)
        parts, start = [], 0
        for first, count in self.position_ranges:
            seen = first + count
            mask = None if first == 0 else _causal_mask(count, seen, query.device)
            part, before = query.narrow(-2, start, count), (keys.narrow(-2, 0, seen), values.narrow(-2, 0, seen))
            parts.append(F.scaled_dot_product_attention(part, *before, attn_mask=mask, is_causal=first == 0, **how))
            start += count
        return torch.cat(parts, -2) if len(parts) > 1 else parts[0]

    def all_gather(self, local: torch.Tensor, name: str) -> torch.Tensor:
        """Rows of all positions, in sequence order, from every rank's own."""
        whole = local.new_empty((self.sequence_length, *local.shape[1:]))
        self.comm.sync.all_gather(whole, local, name).wait()
        return whole.index_select(0, self._index_on("position_order", local.device))

    def reduce_scatter(self, full: torch.Tensor, name: str) -> torch.Tensor:
        """Sum rows of all positions over ranks; return this rank's rows."""
        out = full.new_empty((self.local_length, *full.shape[1:]))
        self.comm.sync.reduce_scatter(out, full.index_select(0, self._index_on("rank_order", full.device)), name).wait()
        return out

    def _index_on(self, name: str, device: torch.device) -> torch.Tensor:
        """An index tensor on `device`, copied once: a copy in each layer would stall the GPU."""
        found: torch.Tensor = getattr(self, name)
        if found.device != device:
            found = found.to(device)
            setattr(self, name, found)
        return found

    # -- mean loss --

    def global_mean_loss(self, function: Callable[..., torch.Tensor], module: str, args: Any, kwargs: Any) -> torch.Tensor:
        """Cross entropy averages over counted targets, whose number differs between ranks. Divide this rank's sum by the global count and
        multiply by the number of ranks, so that the mean over ranks is the mean over targets."""
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("reduction", "mean") != "mean" or given["target"].is_floating_point():
            return function(*args, **kwargs)
        target, weight = given["target"], given.get("weight")
        counted = target != given.get("ignore_index", -100)
        number = counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0).sum()
        total = number.to(torch.float64)
        self.comm.sync.all_reduce(total, f"num_targets/{module}").wait()
        loss = function(**{**given, "reduction": "sum"})
        return loss * (self.comm.size / total).to(loss.dtype)


def _causal_mask(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """The causal mask of the last `rows` of `columns` positions. On GPUs it selects kernels that need no mask tensor."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes seconds that only this needs

        return causal_lower_right(rows, columns)
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


class _GatherKeyValue(torch.autograd.Function):
    """Forward all-gathers keys and values of all positions; backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, runtime: ContextParallelRuntime, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.run, ctx.name = runtime, name
        ctx.shapes = [t.movedim(-2, 0).shape[1:] for t in (key, value)]
        keys, values = _unpack_kv(runtime.recompute_cache.run_or_replay(lambda: runtime.all_gather(_pack_kv(key, value), name)), ctx.shapes)
        return keys, values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *_unpack_kv(ctx.run.reduce_scatter(_pack_kv(*grads), ctx.name), ctx.shapes), None, None


def _pack_kv(*key_value: torch.Tensor) -> torch.Tensor:
    """Keys and values side by side, one row per position, so that one collective moves both."""
    return torch.cat([t.movedim(-2, 0).flatten(1) for t in key_value], 1)


def _unpack_kv(rows: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    parts = rows.split([s.numel() for s in shapes], 1)
    return [part.unflatten(1, shape).movedim(0, -2) for part, shape in zip(parts, shapes, strict=True)]


class _ContextParallelMode(TorchFunctionMode):
    """Intercepts the torch calls of the model's code and of the loss."""

    def __init__(self, runtime: ContextParallelRuntime, module_stack: list[str]) -> None:
        super().__init__()
        self.runtime, self.module_stack = runtime, module_stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run, frame = kwargs or {}, self.runtime, self.module_stack[-1]
        if func is F.scaled_dot_product_attention and frame in run.attention_modules:
            return run.attention(frame, *args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss) and frame in run.policy.mean_loss_modules:
            return run.global_mean_loss(func, frame.strip("()") or "model", args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "arange":
            for made in run.position_generators.get((frame, "arange"), ()):
                if (found := run.local_arange(made, args, kwargs)) is not None:
                    return found
        elif name in ("__getitem__", "narrow"):
            for made in run.position_generators.get((frame, "slice"), ()):
                args, kwargs = _rewrite_slice(run, made, name, args, kwargs)
        return func(*args, **kwargs)


def _rewrite_slice(runtime: ContextParallelRuntime, position_generator: PositionGenerator, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a slicing call, changed to this rank's positions if `position_generator` describes it."""
    table = args[0]
    if name == "narrow":
        dim, start, length = (args[1 + i] if len(args) > 1 + i else kwargs[k] for i, k in enumerate(("dim", "start", "length")))
        found = runtime.local_slice(position_generator, table, dim, start, start + length)
        return (
            (args, kwargs)
            if found is None
            else ((found[0], dim, found[1].start or 0, runtime.local_length if position_generator.is_sharded else runtime.sequence_length), {})
        )
    index = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
    if any(torch.is_tensor(i) or isinstance(i, (list, bool)) for i in index):
        return args, kwargs
    for place, dim in _slice_dims(index, table.dim()):
        start, stop, step = index[place].indices(table.shape[dim])
        found = runtime.local_slice(position_generator, table, dim, start, stop) if step == 1 else None
        if found is not None:
            table, index[place] = found
            break
    return (table, tuple(index)), kwargs


def _slice_dims(index: list[Any], rank: int) -> Iterator[tuple[int, int]]:
    """(place in `index`, dim of the tensor) of each slice."""
    dim, used = 0, sum(i is not None and i is not Ellipsis for i in index)
    for place, item in enumerate(index):
        if item is Ellipsis:
            dim += rank - used
        elif item is not None:
            if isinstance(item, slice):
                yield place, dim
            dim += 1
