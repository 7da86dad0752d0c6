"""A run's state in a form that does not depend on how it was spread: whole tensors under the model's own names, and their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.core.comm import Comm
from meshwright.execute.apply import Applied
from meshwright.execute.groups import process_group
from meshwright.execute.sync import GradientBuckets


def whole_state(applied: Applied) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, then every tensor of optimizer state, whole, on the CPU, in the model's order. Collective."""
    mine = _stage_state(applied)
    if applied.pipeline is None and applied.owners is None:
        yield from mine
        return
    held = dict(mine)
    names = [name for name, _, _ in applied.pipeline.every] if applied.pipeline is not None else [n for n, _ in applied.model.named_parameters()]
    for keys in (lambda name: [name], lambda name: sorted(k for k in held if k.startswith(f"{name}/"))):
        for name in names:
            comm, holder = _holder(applied, name)
            found: list[Any] = [[(k, held[k]) for k in keys(name)] if holder in (None, comm.rank) else None]
            if holder is not None:
                dist.broadcast_object_list(found, group=process_group(comm), group_src=holder)
            yield from found[0]


def _holder(applied: Applied, name: str) -> tuple[Comm, int | None]:
    """The one rank of a pipeline, or of the owners, that holds a parameter; None where this rank has it anyway."""
    if applied.pipeline is not None:
        return applied.groups.pp, applied.plan.stage_rank(applied.pipeline.owners[name][0])
    return applied.groups.ep, applied.owners.owner(name) if applied.owners is not None else None


def _stage_state(applied: Applied) -> Iterator[tuple[str, torch.Tensor]]:
    """The state of what this rank's pipeline stages hold: all of it where there is no pipeline."""
    names = {id(p): name for name, p in applied.model.named_parameters()}
    for name, param in applied.model.named_parameters():
        yield name, _uncut(name, _whole(param, applied), applied)
    if applied.buckets is not None and applied.plan.memory.zero:
        for name, value in _sliced_states(applied, applied.buckets, names):
            yield name, _uncut(name.rpartition("/")[0], value, applied)
        return
    for param in applied.stepped():
        for key, value in sorted(applied.optimizer.state.get(param, {}).items()):
            yield f"{names[id(param)]}/{key}", _uncut(names[id(param)], _whole(_tensor(value), applied), applied)


def _uncut(name: str, piece: torch.Tensor, applied: Applied) -> torch.Tensor:
    """The whole of a tensor-parallel or an owner's piece; what has no dims (a step count) is the same everywhere."""
    if (applied.tensor is None and applied.owners is None) or not piece.dim():
        return piece
    piece = piece.to(applied.plan.device)
    piece = applied.tensor.whole(name, piece) if applied.tensor is not None else piece
    return (applied.owners.whole(name, piece) if applied.owners is not None else piece).cpu()


def _sliced_states(applied: Applied, buckets: GradientBuckets, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """ZeRO-1 and 2 keep one flat state a bucket: gather it, and cut it into the parameters it belongs to."""
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets.buckets:
        assert bucket.shard is not None and bucket.values is not None
        for key, value in sorted(applied.optimizer.state.get(bucket.shard, {}).items()):
            whole = _tensor(value)
            if whole.dim():
                flat = torch.empty_like(bucket.values, dtype=whole.dtype)
                applied.groups.shard.all_gather(flat, whole, f"state/{bucket.name}").wait()
            for slot, param in zip(bucket.layout.slots, bucket.params, strict=True):
                piece = flat[slot.offset : slot.offset + slot.numel].view_as(param) if whole.dim() else whole
                found[f"{names[id(param)]}/{key}"] = piece.detach().cpu()
    order = {name: i for i, name in enumerate(names.values())}
    yield from sorted(found.items(), key=lambda item: (order[item[0].rpartition("/")[0]], item[0]))


def _tensor(value: Any) -> torch.Tensor:
    return value if torch.is_tensor(value) else torch.tensor(float(value))


def _whole(tensor: torch.Tensor | nn.Parameter, applied: Applied) -> torch.Tensor:
    """Gather a ZeRO-3 tensor: FSDP2 gives each rank equal rows of dimension 0, the last ones fewer or none."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    comm = applied.groups.shard
    shape, local = tensor.shape, tensor.to_local().detach()
    rows = -(-shape[0] // comm.size)
    mine = local.new_zeros((rows, *shape[1:]))
    mine[: local.shape[0]] = local
    every = local.new_empty((rows * comm.size, *shape[1:]))
    comm.all_gather(every, mine, "state").wait()
    return every[: shape[0]].cpu()


def state_digest(applied: Applied) -> str:
    """A hash of the final parameters and optimizer state: equal for any layout of the same values. Collective."""
    digest = hashlib.sha256()
    for name, tensor in whole_state(applied):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        # Through bytes, not numpy, because numpy has no bfloat16.
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()[:32]
