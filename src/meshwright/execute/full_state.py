"""A run's state, independent of its parallel layout: whole tensors under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.execute.apply import AppliedPlan
from meshwright.execute.state_pieces import OPTIMIZER, StatePiece, make_catalog, parameter_pieces, stepped_pieces


def full_state(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter as NAME, then every tensor of optimizer state as NAME/KEY, whole, on the CPU of every rank. Collective."""
    yield from full_parameters(applied)
    for piece_kind, name, tensor in whole_tensors(applied, list(stepped_pieces(applied, applied.optimizer_state, OPTIMIZER))):
        yield f"{name}/{piece_kind.partition('/')[2]}", tensor


def full_parameters(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, whole, on the CPU of every rank, in the model's order. Collective."""
    return ((name, tensor) for _, name, tensor in whole_tensors(applied, list(parameter_pieces(applied))))


def full_gradients(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of every parameter that the optimizer steps, whole, on the CPU; zeros where a rank has none. Collective; to be called
    when gradients are final, such as in a hook before the optimizer's step."""
    gradients = stepped_pieces(applied, lambda param: {"grad": param.grad if param.grad is not None else torch.zeros_like(param)}, "gradient")
    return ((name, tensor) for _, name, tensor in whole_tensors(applied, list(gradients)))


def whole_tensors(applied: AppliedPlan, pieces: Sequence[StatePiece], *, everywhere: bool = True) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) of everything that some rank has a piece of, one after the other in the model's order, whole and on the CPU: on
    every rank, or on the first alone while the others yield tensors without values. Collective."""
    catalog, world = make_catalog(applied, pieces), applied.groups.world
    mine = {(piece.tensor, piece.box): piece for piece in catalog.owned(pieces)}
    order = {name: index for index, name in enumerate(applied.whole.shapes)}
    for (kind, name), entries in sorted(catalog.by_tensor().items(), key=lambda item: (order[item[0][1]], item[0][0])):
        dtype = getattr(torch, entries[0].dtype)
        whole = torch.empty(entries[0].shape, dtype=dtype, device="cpu" if everywhere or world.rank == 0 else "meta")
        for entry in entries:
            values: Tensor | None = None
            if entry.owner == world.rank:
                values = mine[f"{entry.kind}/{entry.name}", entry.box].view.contiguous()
            elif everywhere or world.rank == 0:
                values = torch.empty(entry.box.size, dtype=dtype, device=applied.plan.device)
            if everywhere and world.size > 1:
                assert values is not None
                values = values.to(applied.plan.device)
                world.broadcast(values, "state", entry.owner).wait()
            elif entry.owner != 0 and values is not None:
                values = values.to(applied.plan.device)
                peers = [(entry.owner if world.rank == 0 else 0, values)]
                world.exchange([] if world.rank == 0 else peers, peers if world.rank == 0 else [], "state").wait()
            if values is not None and whole.device.type != "meta":
                whole[entry.box.slices()] = values.cpu()
        yield kind, name, whole
