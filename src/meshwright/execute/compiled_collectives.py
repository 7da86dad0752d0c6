"""Collectives of tensor parallelism as operators that a compiler sees: a compiled block, or a whole model, has no graph break at them.

[Note: sites as tensors]
Each collective in a model has a name of its own, which the ledger counts. A name, or a number, would be a constant of the compiled graph, and every
block would be compiled anew for its own. So the operator is given the number of its site in a tensor, and reads it when it runs: blocks with the same
code share one graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshwright.core.comm import Comm
from meshwright.execute.autograd_collectives import all_gather_uneven

_sites: WeakValueDictionary[int, CompiledSite] = WeakValueDictionary()
_numbers = itertools.count()


class CompiledSite:
    """One collective in the model: its group, its name and, for gathers, the sizes of all ranks' shards. `number` tells it from others in a graph;
    whoever uses it holds the site too."""

    def __init__(self, comm: Comm, name: str, sizes: Sequence[int] = ()) -> None:
        self.comm, self.name, self.sizes = comm, name, list(sizes)
        key = next(_numbers)
        self.number = torch.tensor(key)
        _sites[key] = self

    def copy_to_region(self, x: Tensor) -> Tensor:
        """The identity; backward all-reduces the ranks' partial gradients."""
        return _CopyToRegion.apply(x, self.number)  # type: ignore[no-any-return]

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """All-reduces partial sums; backward is the identity."""
        return _ReduceFromRegion.apply(x, self.number)  # type: ignore[no-any-return]

    def gather_from_region(self, x: Tensor) -> Tensor:
        """All-gathers shards of the last dim; backward keeps this rank's shard of the gradient."""
        first = sum(self.sizes[: self.comm.rank])
        return _GatherFromRegion.apply(x, self.number, sum(self.sizes), first, self.sizes[self.comm.rank])  # type: ignore[no-any-return]


@torch.library.custom_op("meshwright::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, site: Tensor) -> Tensor:
    found = _sites[int(site)]
    out = x.clone(memory_format=torch.contiguous_format)
    found.comm.sync.all_reduce(out, found.name).wait()
    return out


@_all_reduce.register_fake
def _(x: Tensor, site: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("meshwright::all_gather_last", mutates_args=())
def _all_gather_last(x: Tensor, site: Tensor, total: int) -> Tensor:
    found = _sites[int(site)]
    return torch.cat(all_gather_uneven(x, found.comm, x.dim() - 1, found.sizes, found.name), -1)


@_all_gather_last.register_fake
def _(x: Tensor, site: Tensor, total: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], total))


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, site: Tensor) -> Tensor:
        ctx.save_for_backward(site)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (site,) = ctx.saved_tensors
        return torch.ops.meshwright.all_reduce(grad, site), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, site: Tensor) -> Tensor:
        return torch.ops.meshwright.all_reduce(x, site)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, site: Tensor, total: int, first: int, count: int) -> Tensor:
        ctx.first, ctx.count = first, count
        return torch.ops.meshwright.all_gather_last(x, site, total)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.narrow(-1, ctx.first, ctx.count).contiguous(), None, None, None, None
