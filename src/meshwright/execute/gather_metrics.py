"""Values of a loop of the user's own, over all data ranks: of every sample of the global batch, and means over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.mesh import GROUP_AXES
from meshwright.execute.rank_loader import RankLoader

_MAX_DIMS = 8


def gather(value: Any, loader: RankLoader | None) -> Any:
    """Concatenate a tensor, or each tensor of a tree, along dim 0 over data ranks, in the order of the samples. A number or a tensor without dims
    becomes a tensor with one entry a data rank. While the loader is iterated, copies of samples are left out. No loader: there is one rank."""
    leaves, spec = pytree.tree_flatten(value)
    tensors = [_as_rows(leaf, loader) for leaf in leaves]
    if not tensors or loader is None or loader.groups is None or loader.groups.data.size == 1:
        return pytree.tree_unflatten(tensors, spec)
    shapes = _all_shapes(tensors, loader.groups.data)
    members = _members_in_order(loader)
    return pytree.tree_unflatten([_gather_rows(t, [s[i] for s in shapes], members, loader.groups.data) for i, t in enumerate(tensors)], spec)


def mean(value: Any, loader: RankLoader | None) -> Any:
    """The mean over the global batch that the loader yielded last, of values that are means over this rank's samples. Collective."""

    def reduce(leaf: Any) -> Tensor:
        tensor = _as_tensor(leaf, loader)
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        if loader is None or loader.groups is None or loader.groups.data.size == 1 or loader.share is None:
            return tensor
        tensor *= loader.share.weight / loader.plan.mesh.cp
        loader.groups.data.sync.all_reduce(tensor, "mean").wait()
        return tensor

    return pytree.tree_map(reduce, value)


def _members_in_order(loader: RankLoader) -> list[int]:
    """Positions in the data group of the ranks whose samples count, by data rank: ranks along cp have the same samples."""
    mesh = loader.plan.mesh
    ranks = next(group for group in mesh.groups(*GROUP_AXES["data"]) if loader.rank in group)
    position = {mesh.data_rank(rank): i for i, rank in enumerate(ranks) if mesh.coordinate(rank, "cp") == 0}
    in_order = sorted(position)
    if loader.is_open and loader.share is not None:
        in_order = [r for r in in_order if loader.split_for(r).is_first_copy]
    return [position[r] for r in in_order]


def _all_shapes(tensors: Sequence[Tensor], comm: Comm) -> list[list[tuple[int, ...]]]:
    """Every rank's shapes. They agree in all dims but the first, or all ranks raise the same error."""
    mine = torch.tensor([[t.dim(), *t.shape, *[0] * (_MAX_DIMS - t.dim())] for t in tensors], dtype=torch.int64, device=tensors[0].device)
    every = mine.new_empty((comm.size * len(tensors), _MAX_DIMS + 1))
    comm.sync.all_gather(every, mine, "gather/shapes").wait()
    shapes = [[tuple(row[1 : 1 + row[0]]) for row in rank] for rank in every.view(comm.size, len(tensors), -1).tolist()]
    for of_one in zip(*shapes, strict=True):
        if len({(len(shape), shape[1:]) for shape in of_one}) > 1:
            raise RequestError(f"mw.gather: ranks have tensors of the shapes {', '.join(map(str, of_one))}: pad all dims but the first to one size")
    return shapes


def _gather_rows(tensor: Tensor, shapes: Sequence[tuple[int, ...]], members: Sequence[int], comm: Comm) -> Tensor:
    sizes = [shape[0] for shape in shapes]
    rows = max(sizes)  # padded here, because a backend may lack gathers of unequal parts
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    every = tensor.new_empty((comm.size * rows, *tensor.shape[1:]))
    if every.numel():
        comm.sync.all_gather(every, padded, "gather").wait()
    return torch.cat([every[i * rows : i * rows + sizes[i]] for i in members])


def _as_rows(leaf: Any, loader: RankLoader | None) -> Tensor:
    tensor = _as_tensor(leaf, loader)
    if tensor.dim() > _MAX_DIMS:
        raise RequestError(f"mw.gather: a tensor has {tensor.dim()} dims, and at most {_MAX_DIMS} are gathered: reshape it")
    return tensor.reshape(1) if not tensor.dim() else tensor


def _as_tensor(leaf: Any, loader: RankLoader | None) -> Tensor:
    if not torch.is_tensor(leaf) and not isinstance(leaf, (bool, int, float)):
        raise RequestError(f"mw.gather and mw.mean take tensors, numbers, and lists, tuples and dicts of them, not {type(leaf).__name__}")
    return torch.as_tensor(leaf, device=loader.device if loader is not None else None).detach()
