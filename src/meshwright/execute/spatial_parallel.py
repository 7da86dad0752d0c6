"""Spatial parallelism: shard samples into blocks at the model's input, exchange halos between neighbours where a window slides over blocks,
combine the statistics of norms, and gather blocks where the plan says so.

The model's code is unchanged. While a module runs whose windows need halos, its convolutions and poolings get their block with the halo around
it, and no padding of their own along sharded dims. See [Note: blocks and halos] in core/spatial_policy.py.

[Note: what each rank differentiates]
After a gather all n ranks of the group compute the same loss. `Session` weights each by 1/n and sums gradients over the group; a user's own loop
averages them. Either way a gradient after the gather counts once. Before the gather each rank has a partial gradient, and these must add up, so
the gather's backward multiplies by n, which cancels the weight or the average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.spatial_policy import Box, HaloPlan, SpatialGather, SpatialPolicy, WindowOp, box_shape, local_box, plan_halo, show_grid
from meshwright.execute.module_hooks import eager_decorator, run_forward_in
from meshwright.execute.sharded_norm import combine_moments, gather_moments, upcast

_Message = tuple[int, Box | None, Box | None]  # rank of the neighbour, box to send to it, box to receive from it
_CallKey = tuple[str, tuple[int, ...], tuple[int, ...]]  # function, kernel size, sizes of the block


def shard_spatial(model: nn.Module, policy: SpatialPolicy, comm: Comm, compiled: bool = False) -> None:
    """Make `model` work on this rank's blocks, in place. Collectives are kept out of compiled graphs."""
    eager = eager_decorator(compiled)
    modules = dict(model.named_modules())
    replacements: dict[str, dict[_CallKey, Callable[..., Any]]] = {}
    for op in policy.window_ops:
        calls = replacements.setdefault(op.module, {})
        calls[op.function, op.window.kernel, _local_sizes(op.sizes, policy, comm)] = _with_halo(op, policy.grid, comm)
    for norm in policy.norms:
        calls = replacements.setdefault(norm.module, {})
        statistics = _NormStatistics(norm.module, norm.sizes, policy.grid, comm)
        calls[norm.function, (), _local_sizes(norm.sizes, policy, comm)] = _NORM_REPLACEMENTS[norm.function](statistics)
    for name, calls in replacements.items():
        run_forward_in(modules[name], partial(_SpatialMode, calls), eager)
    for gather in {(g.module, g.position): g for g in policy.gathers}.values():
        modules[gather.module].register_forward_hook(eager(_gather_output_hook(gather, policy, comm)))
    model.register_forward_pre_hook(_shard_inputs(policy, comm), with_kwargs=True)


def _local_sizes(sizes: tuple[int, ...], policy: SpatialPolicy, comm: Comm) -> tuple[int, ...]:
    return box_shape(local_box(sizes, policy.grid, comm.rank))


def _shard_inputs(policy: SpatialPolicy, comm: Comm) -> Callable[..., Any]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if leaf is None or torch.is_tensor(leaf)]
        for spatial_input in policy.inputs:
            i, planned = tensors[spatial_input.position], spatial_input.sizes
            if tuple(leaves[i].shape[2:]) != planned:
                wanted, given = show_grid(planned), show_grid(tuple(leaves[i].shape[2:]))
                raise RequestError(f"this plan splits inputs of {wanted} positions, and this input has {given}: use {wanted}, or plan for {given}")
            leaves[i] = leaves[i][_box_index(local_box(planned, policy.grid, comm.rank))].contiguous()
        return pytree.tree_unflatten(leaves, spec)

    return before


def _box_index(box: Box) -> tuple[Any, ...]:
    """A box as an index into (sample, channel, positions …)."""
    return (slice(None), slice(None), *(slice(start, stop) for start, stop in box))


# -- windows --


class _SpatialMode(TorchFunctionMode):
    """While a module runs, replaces calls that slide over blocks or compute their statistics."""

    def __init__(self, replacements: Mapping[_CallKey, Callable[..., Any]]) -> None:
        super().__init__()
        self.replacements = replacements
        self.functions = {key[0] for key in replacements}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in self.functions:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            named = _named_arguments(name, args, kwargs)
            replacement = self.replacements.get((name, _kernel_size(named), tuple(named["input"].shape[2:])))
            if replacement is not None:
                return replacement(func, **named)
        return func(*args, **kwargs)


_ARGUMENT_NAMES = {
    "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "max_pool": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg_pool": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}


def _named_arguments(function: str, args: Any, kwargs: Any) -> dict[str, Any]:
    names = _ARGUMENT_NAMES[function.rstrip("123d") if function[-1] == "d" else function]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _kernel_size(named: Mapping[str, Any]) -> tuple[int, ...]:
    if "kernel_size" in named:
        size, dims = named["kernel_size"], named["input"].dim() - 2
        return (size,) * dims if isinstance(size, int) else tuple(size) * (dims if len(size) == 1 else 1)
    return tuple(named["weight"].shape[2:]) if named.get("weight") is not None else ()


def _with_halo(window_op: WindowOp, grid: tuple[int, ...], comm: Comm) -> Callable[..., Any]:
    """Return a replacement that runs the call on this rank's block with its halo. Along unsharded dims the call still pads for itself."""
    halo_plan = plan_halo(window_op, grid, comm.rank)
    pad_value = -math.inf if window_op.window.kind == "max" else 0.0
    padding = tuple(0 if degree > 1 else n for degree, n in zip(grid, window_op.window.padding, strict=True))

    def call(func: Any, input: Tensor, **named: Any) -> Any:
        if window_op.window.kind == "conv" and torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))  # as the convolution would; the halo then has fewer bytes
        padded = _ExchangeHalos.apply(input, halo_plan, comm, f"halo/{window_op.module or 'model'}", pad_value)
        return func(padded, **{**named, "padding": padding})

    return call


class _ExchangeHalos(torch.autograd.Function):
    """Forward returns a block with its neighbours' halos and the padding around it; backward sends the halos' gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo_plan: HaloPlan, comm: Comm, name: str, pad_value: float) -> Tensor:
        ctx.halo_plan, ctx.comm, ctx.name = halo_plan, comm, name
        buffer = x.new_empty((*x.shape[:2], *halo_plan.shape))
        for border in _border_boxes(halo_plan):
            buffer[_box_index(border)] = pad_value
        buffer[_box_index(halo_plan.own_box)] = x
        for messages in _messages_by_dim(halo_plan):
            for box, slab in _exchange_slabs(buffer, messages, comm, name):
                buffer[_box_index(box)] = slab
        return buffer[_box_index(halo_plan.window_box)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        halo_plan = ctx.halo_plan
        steps = [[(peer, recv_box, send_box) for peer, send_box, recv_box in messages] for messages in _messages_by_dim(halo_plan)[::-1]]
        if box_shape(halo_plan.window_box) != halo_plan.shape:
            buffer = grad.new_zeros((*grad.shape[:2], *halo_plan.shape))
            buffer[_box_index(halo_plan.window_box)] = grad
        else:
            buffer = grad.clone(memory_format=torch.contiguous_format) if len(steps) > 1 else grad
        for messages in steps[:-1]:
            for box, slab in _exchange_slabs(buffer, messages, ctx.comm, ctx.name):
                buffer[_box_index(box)] += slab
        last = _exchange_slabs(buffer, steps[-1], ctx.comm, ctx.name) if steps else []
        out = buffer[_box_index(halo_plan.own_box)].clone(memory_format=torch.contiguous_format)
        for box, slab in last:  # slabs of the last exchange lie in the rank's own block, whatever dims were exchanged before
            out[_box_index(_relative_box(box, halo_plan.own_box))] += slab
        return out, None, None, None, None


def _messages_by_dim(halo_plan: HaloPlan) -> list[list[_Message]]:
    """The messages of each dim. Those of one dim are in flight together; dims follow one another, so that corners are included."""
    return [[(e.peer, e.send_box, e.recv_box) for e in group] for _, group in groupby(halo_plan.exchanges, key=lambda e: e.dim)]


def _border_boxes(halo_plan: HaloPlan) -> Iterator[Box]:
    """The parts of a buffer before and after the rank's own block, dim by dim: filling all of the buffer first would cost a pass over memory."""
    full = tuple((0, n) for n in halo_plan.shape)
    for dim, (start, stop) in enumerate(halo_plan.own_box):
        for span in ((0, start), (stop, halo_plan.shape[dim])):
            if span[0] < span[1]:
                yield (*full[:dim], span, *full[dim + 1 :])


def _relative_box(box: Box, origin: Box) -> Box:
    """A box of the buffer, relative to the start of `origin`."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


def _exchange_slabs(buffer: Tensor, messages: list[_Message], comm: Comm, name: str) -> list[tuple[Box, Tensor]]:
    """Send boxes of the buffer to neighbours and return the received (box, slab)s."""
    sends = [(peer, buffer[_box_index(box)].contiguous()) for peer, box, _ in messages if box is not None]
    receives = [(peer, box, buffer.new_empty((*buffer.shape[:2], *box_shape(box)))) for peer, _, box in messages if box is not None]
    comm.exchange(sends, [(peer, slab) for peer, _, slab in receives], name).wait()
    return [(box, slab) for _, box, slab in receives]


# -- norms --


class _NormStatistics:
    """Combines norm statistics over the blocks of all ranks, weighted by block size."""

    def __init__(self, module: str, sizes: tuple[int, ...], grid: tuple[int, ...], comm: Comm) -> None:
        self.comm, self.name, self.num_positions = comm, f"statistics/{module or 'model'}", math.prod(sizes)
        self.weights = [math.prod(box_shape(local_box(sizes, grid, rank))) / self.num_positions for rank in range(comm.size)]
        self.weight = self.weights[comm.rank]

    def moments(self, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(mean, variance) over `dims` on all ranks. Combining means of squares instead would lose precision to cancellation."""
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return combine_moments(gather_moments(torch.stack([mean, variance]), self.comm, self.name), self.weights)


class _SpatialNormalize(torch.autograd.Function):
    """(x − mean) / deviation over all blocks; also returns mean and variance, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], eps: float, statistics: _NormStatistics) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = statistics.moments(x, dims)
        inverse = torch.rsqrt(variance + eps)
        out = (x - mean) * inverse
        ctx.dims, ctx.statistics = dims, statistics
        ctx.save_for_backward(out, inverse)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # type: ignore[override]
        out, inverse = ctx.saved_tensors
        sums = torch.stack([grad.mean(ctx.dims, keepdim=True), (grad * out).mean(ctx.dims, keepdim=True)]) * ctx.statistics.weight
        ctx.statistics.comm.sync.all_reduce(sums, ctx.statistics.name).wait()
        return (grad - sums[0] - out * sums[1]) * inverse, None, None, None


def _batch_norm(statistics: _NormStatistics) -> Callable[..., Any]:
    def call(
        func: Any, input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5, **rest: Any,
    ) -> Tensor:  # fmt: skip
        if not training:
            return func(input, running_mean, running_var, weight, bias, training, momentum, eps, **rest)
        out, mean, variance = _SpatialNormalize.apply(upcast(input), (0, *range(2, input.dim())), eps, statistics)
        if running_mean is not None:
            count = input.shape[0] * statistics.num_positions
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / max(count - 1, 1))).flatten().to(running_var.dtype), momentum)
        return affine_by_channel(out, weight, bias).to(input.dtype)

    return call


def _group_norm(statistics: _NormStatistics) -> Callable[..., Any]:
    def call(func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        grouped = upcast(input).unflatten(1, (num_groups, -1))
        out = _SpatialNormalize.apply(grouped, tuple(range(2, grouped.dim())), eps, statistics)[0].flatten(1, 2)
        return affine_by_channel(out, weight, bias).to(out.dtype if torch.is_autocast_enabled(input.device.type) else input.dtype)

    return call


_NORM_REPLACEMENTS: dict[str, Callable[[_NormStatistics], Callable[..., Any]]] = {"batch_norm": _batch_norm, "group_norm": _group_norm}


def affine_by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    x = x * weight.to(x.dtype).view(shape) if weight is not None else x
    return x + bias.to(x.dtype).view(shape) if bias is not None else x


# -- gathers --


class _GatherBlocks(torch.autograd.Function):
    """All-gathers blocks into the full tensor. See [Note: what each rank differentiates]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: SpatialGather, policy: SpatialPolicy, comm: Comm) -> Tensor:
        ctx.dims, ctx.num_ranks = gather.dims, comm.size
        boxes = [local_box(gather.sizes, policy.grid, rank) for rank in range(comm.size)]
        ctx.box = boxes[comm.rank]
        leading_dims = tuple(range(len(gather.dims)))
        block = x.movedim(gather.dims, leading_dims)
        padded = block.new_zeros((*box_shape(boxes[0]), *block.shape[len(gather.dims) :]))  # the first rank's block is the largest
        padded[tuple(slice(n) for n in box_shape(ctx.box))] = block
        blocks = padded.new_empty((comm.size, *padded.shape))
        comm.sync.all_gather(blocks.view(-1), padded.view(-1), gather.name).wait()
        full = padded.new_empty((*gather.sizes, *block.shape[len(gather.dims) :]))
        for rank, box in enumerate(boxes):
            full[tuple(slice(*span) for span in box)] = blocks[rank][tuple(slice(n) for n in box_shape(box))]
        return full.movedim(leading_dims, gather.dims).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        for dim, (start, stop) in zip(ctx.dims, ctx.box, strict=True):
            grad = grad.narrow(dim, start, stop - start)
        return grad * ctx.num_ranks, None, None, None


def _gather_output_hook(gather: SpatialGather, policy: SpatialPolicy, comm: Comm) -> Callable[..., Any]:
    def after(_: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        i = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)][gather.position]
        leaves[i] = _GatherBlocks.apply(leaves[i], gather, policy, comm)
        return pytree.tree_unflatten(leaves, spec)

    return after
