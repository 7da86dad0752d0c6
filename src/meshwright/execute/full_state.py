"""A run's state, independent of its parallel layout: unsharded tensors under the model's own names, and their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.comm import Comm
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.data_parallel import ShardedBuffer
from meshwright.execute.process_groups import process_group
from meshwright.execute.shard_layout import ShardLayout


def full_state(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, then every tensor of optimizer state, unsharded, on the CPU, in the model's order. Collective."""
    yield from full_parameters(applied)
    yield from _from_holders(applied, _stepped_tensors(applied, applied.optimizer_state))


def full_parameters(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, unsharded, on the CPU, in the model's order. Collective."""
    yield from _from_holders(applied, ((name, _unshard(name, value, applied)) for name, value in _parameter_values(applied)))


def full_gradients(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of every parameter that the optimizer steps, unsharded, on the CPU; zeros where a rank has none. Collective; to be called
    when gradients are final, such as in a hook before the optimizer's step."""
    gradients = _stepped_tensors(applied, lambda param: {"grad": param.grad if param.grad is not None else torch.zeros_like(param)})
    for name, gradient in _from_holders(applied, gradients):
        yield name.removesuffix("/grad"), gradient


def _from_holders(applied: AppliedPlan, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of this rank's pipeline stages and experts, and those of the other ranks. A name is a parameter's, or begins with it and '/'."""
    if applied.pipeline is None and applied.expert_parallel is None:
        yield from tensors
        return
    local: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        local.setdefault(name.partition("/")[0], []).append((name, tensor))
    names = list(applied.pipeline.stages_of_param) if applied.pipeline is not None else [n for n, _ in applied.model.named_parameters()]
    for name in names:
        comm, holder = _group_and_holder(applied, name)
        entries: list[Any] = [local.get(name, []) if holder in (None, comm.rank) else None]
        if holder is not None:
            dist.broadcast_object_list(entries, group=process_group(comm), group_src=holder)
        yield from entries[0]


def _group_and_holder(applied: AppliedPlan, name: str) -> tuple[Comm, int | None]:
    """(group, the one pipeline or expert-parallel rank in it that holds a parameter, or None if all of its ranks do)."""
    if applied.pipeline is not None:
        return applied.groups.pp, applied.plan.stage_rank(applied.pipeline.stages_of_param[name][0])
    return applied.groups.ep, applied.expert_parallel.holder_rank(name) if applied.expert_parallel is not None else None


def _stepped_tensors(applied: AppliedPlan, tensors_of: Callable[[nn.Parameter], Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield what `tensors_of` gives for the parameters or shards that this rank's optimizer steps, unsharded within its stages, as NAME/KEY."""
    names = {id(p): name for name, p in applied.model.named_parameters()}
    if applied.gradient_sync is not None and applied.plan.memory.zero:
        for name, value in _gather_shards(applied, applied.gradient_sync.buckets, names, tensors_of):
            yield name, _unshard(name.rpartition("/")[0], value, applied)
        return
    for param in applied.optimizer_parameters():
        for key, value in sorted(tensors_of(param).items()):
            yield f"{names[id(param)]}/{key}", _unshard(names[id(param)], _as_tensor(value).detach().cpu(), applied)


def _parameter_values(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    if applied.gradient_sync is not None:
        return applied.gradient_sync.full_parameters(applied.model)
    return ((name, param.detach().cpu()) for name, param in applied.model.named_parameters())


def _unshard(name: str, shard: Tensor, applied: AppliedPlan) -> Tensor:
    """Gather the full tensor of a tensor- or expert-parallel shard. A tensor without dims (a step count) is the same on every rank."""
    for shards in (applied.tensor_parallel, applied.expert_parallel) if shard.dim() else ():
        shard = shards.unshard(name, shard.to(applied.plan.device)) if shards is not None else shard
    return shard.cpu()


def _gather_shards(
    applied: AppliedPlan, buckets: Sequence[ShardedBuffer], names: dict[int, str], tensors_of: Callable[[nn.Parameter], Mapping[str, Any]]
) -> Iterator[tuple[str, Tensor]]:
    """Gather what `tensors_of` gives for ZeRO's flat shards and split it by parameter. All ranks have the same keys."""
    full_states: dict[str, Tensor] = {}
    for bucket in buckets:
        states = [(shard, tensors_of(shard.param)) for shard in bucket.optimizer_shards]
        for key in sorted({key for _, state in states for key in state}):
            values = [(shard, _as_tensor(state[key]).detach()) for shard, state in states if key in state]
            flat = _gather_flat(bucket.slices, [(shard.start, value) for shard, value in values if value.dim()], applied.groups.shard)
            for shard, value in values:
                for i in shard.slots:
                    slot, param = bucket.layout.slots[i], bucket.params[i]
                    full = flat[slot.offset : slot.offset + slot.numel].view(param.shape) if value.dim() else value
                    full_states[f"{names[id(param)]}/{key}"] = full.cpu()
    order = {name: i for i, name in enumerate(names.values())}
    yield from sorted(full_states.items(), key=lambda item: (order[item[0].rpartition("/")[0]], item[0]))


def _gather_flat(layout: ShardLayout, segments: list[tuple[int, Tensor]], comm: Comm) -> Tensor:
    """All-gather a flat buffer from every rank's shard; `segments` are (offset in this rank's shard, values). Empty if there are none."""
    if not segments:
        return torch.empty(0)
    shard = segments[0][1].new_zeros(layout.size)
    for start, values in segments:
        shard[start : start + values.numel()] = values
    flat = shard.new_empty(sum(layout.sizes))
    comm.all_gather(flat, shard, "state", layout.uneven_sizes).wait()
    return flat


def _as_tensor(value: Any) -> Tensor:
    return value if torch.is_tensor(value) else torch.tensor(float(value))


def state_digest(applied: AppliedPlan) -> str:
    """A hash of the final parameters and optimizer state: equal for any layout of the same values. Collective."""
    digest = hashlib.sha256()
    for name, tensor in full_state(applied):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        # Through bytes, not numpy, because numpy has no bfloat16.
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()[:32]
