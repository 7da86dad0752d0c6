"""Spatial parallelism, acting half: cut samples into blocks at the model's door, let neighbours exchange borders where a window slides
over them, share the statistics of norms, and put blocks together again where the plan says so.

The model's code stays as it is. While a module runs whose windows need borders, torch's own convolutions and poolings in it are given
their block with the borders around it, and no padding of their own along the dims that are cut. See [Note: blocks and halos].

[Note: what each rank differentiates]
After a gather every rank of the group computes the same loss. A session weights each by 1/ways and sums gradients over the group; a
user's own loop sums nothing and averages: either way a gradient behind the gather comes out once. Before it each rank has a part of the
gradient, and parts must add up, so the gather's backward multiplies by `ways` what the weight or the average divides by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.spatial import (
    Box,
    Door,
    Exchange,
    Norm,
    Reach,
    Regather,
    Slide,
    SpatialPolicy,
    block,
    lengths,
    reach,
    show_grid,
    volume,
    widest,
)

_Apart = Callable[[Callable[..., Any]], Callable[..., Any]]
_Key = tuple[str, tuple[int, ...], tuple[int, ...]]  # function, kernel, the block's sizes


def cut_positions(model: nn.Module, policy: SpatialPolicy, comm: Comm, compiled: bool = False) -> None:
    """Make `model` work on this rank's blocks, in place. Meetings are kept out of compiled graphs."""
    apart: _Apart = torch.compiler.disable if compiled else lambda function: function
    modules = dict(model.named_modules())
    tables: dict[str, dict[_Key, Callable[..., Any]]] = {}
    for slide in policy.slides:
        table = tables.setdefault(slide.module, {})
        table[slide.function, slide.window.kernel, _mine(slide.sizes, policy, comm)] = _sliding(slide, policy.grid, comm)
    for norm in policy.norms:
        table = tables.setdefault(norm.module, {})
        table[norm.function, (), _mine(norm.sizes, policy, comm)] = _NORMS[norm.function](_Shared(norm, policy, comm))
    for name, table in tables.items():
        modules[name].forward = apart(_with_mode(modules[name].forward, table))
    for gather in {(g.module, g.position): g for g in policy.gathers}.values():
        modules[gather.module].register_forward_hook(apart(_regather(gather, policy, comm)))
    model.register_forward_pre_hook(_doors(policy.doors, policy, comm), with_kwargs=True)


def _mine(sizes: tuple[int, ...], policy: SpatialPolicy, comm: Comm) -> tuple[int, ...]:
    return lengths(block(sizes, policy.grid, comm.rank))


def _doors(doors: tuple[Door, ...], policy: SpatialPolicy, comm: Comm) -> Callable[..., Any]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
        for door in doors:
            whole = leaves[places[door.position]]
            if tuple(whole.shape[2:]) != door.sizes:
                asked, given = show_grid(door.sizes), show_grid(tuple(whole.shape[2:]))
                raise RequestError(f"this plan cuts inputs of {asked} positions, and one of {given} came: give {asked}, or plan for {given}")
            leaves[places[door.position]] = whole[_at(block(door.sizes, policy.grid, comm.rank))].contiguous()
        return pytree.tree_unflatten(leaves, spec)

    return before


def _at(box: Box) -> tuple[Any, ...]:
    """An index into (sample, channel, positions …)."""
    return (slice(None), slice(None), *(slice(start, stop) for start, stop in box))


# -- windows --


class _Windows(TorchFunctionMode):
    """While a module runs, calls that slide over blocks or take statistics of them are made the way the plan says."""

    def __init__(self, table: Mapping[_Key, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table
        self.functions = {key[0] for key in table}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in self.functions:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            named = _named(name, args, kwargs)
            found = self.table.get((name, _kernel(named), tuple(named["input"].shape[2:])))
            if found is not None:
                return found(func, **named)
        return func(*args, **kwargs)


def _with_mode(inner: Callable[..., Any], table: Mapping[_Key, Callable[..., Any]]) -> Callable[..., Any]:
    mode = _Windows(table)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    return forward


_ARGUMENTS = {
    "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "max_pool": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg_pool": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}


def _named(function: str, args: Any, kwargs: Any) -> dict[str, Any]:
    names = _ARGUMENTS[function.rstrip("123d") if function[-1] == "d" else function]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _kernel(named: Mapping[str, Any]) -> tuple[int, ...]:
    if "kernel_size" in named:
        size, dims = named["kernel_size"], named["input"].dim() - 2
        return (size,) * dims if isinstance(size, int) else tuple(size) * (dims if len(size) == 1 else 1)
    return tuple(named["weight"].shape[2:]) if named.get("weight") is not None else ()


def _sliding(slide: Slide, grid: tuple[int, ...], comm: Comm) -> Callable[..., Any]:
    """The call on this rank's block with its borders. Along dims that are not cut the call pads for itself, as it would have."""
    mine = reach(slide, grid, comm.rank)
    fill = -math.inf if slide.window.kind == "max" else 0.0
    padding = tuple(0 if ways > 1 else n for ways, n in zip(grid, slide.window.padding, strict=True))

    def call(func: Any, input: torch.Tensor, **named: Any) -> Any:
        if slide.window.kind == "conv" and torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))  # as the convolution would; less travels so
        return func(_Halo.apply(input, mine, comm, f"halo/{slide.module or 'model'}", fill), **{**named, "padding": padding})

    return call


class _Halo(torch.autograd.Function):
    """A block going in; the block with its neighbours' borders and the padding around it comes out, and borders' gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mine: Reach, comm: Comm, name: str, fill: float) -> torch.Tensor:
        ctx.mine, ctx.comm, ctx.name = mine, comm, name
        buffer = x.new_empty((*x.shape[:2], *mine.shape))
        for border in _around(mine):
            buffer[_at(border)] = fill
        buffer[_at(mine.own)] = x
        for exchanges in _by_dim(mine.exchanges):
            arrived = _swap(buffer, [(e, e.send, e.receive) for e in exchanges], comm, name)
            for exchange, slab in arrived:
                assert exchange.receive is not None
                buffer[_at(exchange.receive)] = slab
        return buffer[_at(mine.needed)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        mine, steps = ctx.mine, _by_dim(ctx.mine.exchanges)[::-1]
        if lengths(mine.needed) != mine.shape:
            buffer = grad.new_zeros((*grad.shape[:2], *mine.shape))
            buffer[_at(mine.needed)] = grad
        else:
            buffer = grad.clone(memory_format=torch.contiguous_format) if len(steps) > 1 else grad
        for exchanges in steps[:-1]:
            for exchange, slab in _swap(buffer, [(e, e.receive, e.send) for e in exchanges], ctx.comm, ctx.name):
                assert exchange.send is not None
                buffer[_at(exchange.send)] += slab
        last = _swap(buffer, [(e, e.receive, e.send) for e in steps[-1]], ctx.comm, ctx.name) if steps else []
        out = buffer[_at(mine.own)].clone(memory_format=torch.contiguous_format)
        for exchange, slab in last:  # what comes last lies in the rank's own block, whatever dims were exchanged before
            assert exchange.send is not None
            out[_at(_inside(exchange.send, mine.own))] += slab
        return out, None, None, None, None


def _by_dim(exchanges: tuple[Exchange, ...]) -> list[list[Exchange]]:
    """Those of one dim are under way together; one dim goes after the other, so that corners come along."""
    return [list(both) for _, both in groupby(exchanges, key=lambda e: e.dim)]


def _around(mine: Reach) -> Iterator[Box]:
    """The parts of a buffer before and behind the rank's own block, dim by dim: to fill all of it first costs a pass over memory."""
    whole = tuple((0, n) for n in mine.shape)
    for dim, (start, stop) in enumerate(mine.own):
        for run in ((0, start), (stop, mine.shape[dim])):
            if run[0] < run[1]:
                yield (*whole[:dim], run, *whole[dim + 1 :])


def _inside(box: Box, block: Box) -> Box:
    """A box of the buffer, counted from where a block begins."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, block, strict=True))


def _swap(
    buffer: torch.Tensor, messages: list[tuple[Exchange, Box | None, Box | None]], comm: Comm, name: str
) -> list[tuple[Exchange, torch.Tensor]]:
    """Send boxes of the buffer to neighbours and take in theirs: (exchange, send, receive) each."""
    sends = [(e.peer, buffer[_at(out)].contiguous()) for e, out, _ in messages if out is not None]
    arriving = [(e, buffer.new_empty((*buffer.shape[:2], *lengths(into)))) for e, _, into in messages if into is not None]
    comm.exchange(sends, [(e.peer, slab) for e, slab in arriving], name).wait()
    return arriving


# -- norms --


class _Shared:
    """Statistics over the blocks of all ranks: how much each rank's count."""

    def __init__(self, norm: Norm, policy: SpatialPolicy, comm: Comm) -> None:
        self.comm, self.name = comm, f"statistics/{norm.module or 'model'}"
        self.positions = math.prod(norm.sizes)
        self.weights = [volume(block(norm.sizes, policy.grid, rank)) / self.positions for rank in range(comm.size)]
        self.share = self.weights[comm.rank]

    def moments(self, x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean, variance) over `dims` here and the same dims on all ranks. Means of squares would lose what squares of means hold."""
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        mine = torch.stack([mean, variance])
        every = mine.new_empty((self.comm.size, *mine.shape))
        self.comm.at_once.all_gather(every.view(-1), mine.view(-1), self.name).wait()
        weights = every.new_tensor(self.weights).view(-1, *[1] * mean.dim())
        whole = (weights * every[:, 0]).sum(0)
        return whole, (weights * (every[:, 1] + (every[:, 0] - whole).square())).sum(0)


class _Normalise(torch.autograd.Function):
    """(x − mean) / deviation over blocks; also gives mean and variance, which carry no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, ...], eps: float, shared: _Shared) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance = shared.moments(x, dims)
        inverse = torch.rsqrt(variance + eps)
        out = (x - mean) * inverse
        ctx.dims, ctx.shared = dims, shared
        ctx.save_for_backward(out, inverse)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        out, inverse = ctx.saved_tensors
        sums = torch.stack([grad.mean(ctx.dims, keepdim=True), (grad * out).mean(ctx.dims, keepdim=True)]) * ctx.shared.share
        ctx.shared.comm.at_once.all_reduce(sums, ctx.shared.name).wait()
        return (grad - sums[0] - out * sums[1]) * inverse, None, None, None


def _precise(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _batch_norm(shared: _Shared) -> Callable[..., Any]:
    def call(
        func: Any, input: torch.Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5, **rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        if not training:
            return func(input, running_mean, running_var, weight, bias, training, momentum, eps, **rest)  # type: ignore[no-any-return]
        out, mean, variance = _Normalise.apply(_precise(input), (0, *range(2, input.dim())), eps, shared)
        if running_mean is not None:
            count = input.shape[0] * shared.positions
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / max(count - 1, 1))).flatten().to(running_var.dtype), momentum)
        return _affine(out, weight, bias).to(input.dtype)

    return call


def _group_norm(shared: _Shared) -> Callable[..., Any]:
    def call(func: Any, input: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> torch.Tensor:
        grouped = _precise(input).unflatten(1, (num_groups, -1))
        out = _Normalise.apply(grouped, tuple(range(2, grouped.dim())), eps, shared)[0].flatten(1, 2)
        kind = out.dtype if torch.is_autocast_enabled(input.device.type) else input.dtype
        return _affine(out, weight, bias).to(kind)

    return call


_NORMS: dict[str, Callable[[_Shared], Callable[..., Any]]] = {"batch_norm": _batch_norm, "group_norm": _group_norm}


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    x = x * weight.to(x.dtype).view(shape) if weight is not None else x
    return x + bias.to(x.dtype).view(shape) if bias is not None else x


# -- whole again --


class _Regather(torch.autograd.Function):
    """Blocks going in; the whole comes out. See [Note: what each rank differentiates]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: Regather, policy: SpatialPolicy, comm: Comm) -> torch.Tensor:
        ctx.dims, ctx.ways = gather.dims, comm.size
        ctx.box = block(gather.sizes, policy.grid, comm.rank)
        front = x.movedim(gather.dims, tuple(range(len(gather.dims))))
        most = widest(gather.sizes, policy.grid)
        padded = front.new_zeros((*most, *front.shape[len(most) :]))
        padded[_run(lengths(ctx.box))] = front
        every = padded.new_empty((comm.size, *padded.shape))
        comm.at_once.all_gather(every.view(-1), padded.view(-1), gather.name).wait()
        whole = padded.new_empty((*gather.sizes, *front.shape[len(most) :]))
        for rank in range(comm.size):
            box = block(gather.sizes, policy.grid, rank)
            whole[tuple(slice(*run) for run in box)] = every[rank][_run(lengths(box))]
        return whole.movedim(tuple(range(len(gather.dims))), gather.dims).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        for dim, (start, stop) in zip(ctx.dims, ctx.box, strict=True):
            grad = grad.narrow(dim, start, stop - start)
        return grad * ctx.ways, None, None, None


def _run(counts: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in counts)


def _regather(gather: Regather, policy: SpatialPolicy, comm: Comm) -> Callable[..., Any]:
    def after(_: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
        at = places[gather.position]
        leaves[at] = _Regather.apply(leaves[at], gather, policy, comm)
        return pytree.tree_unflatten(leaves, spec)

    return after
