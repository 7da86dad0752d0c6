"""A run's state, independent of its parallel layout: whole tensors under the model's own names, and a digest that needs none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.keyed_hash import GOLDEN_GAMMA, splitmix64, to_int64
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.averaged_buffers import average_buffers
from meshwright.execute.exchange import gather_data
from meshwright.execute.state_pieces import OPTIMIZER, StatePiece, current_catalog, make_catalog, parameter_pieces, state_pieces, stepped_pieces

_CHUNK = 2**20  # elements that are hashed, or moved, at once


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


def state_digest(applied: AppliedPlan) -> str:
    """A hash of parameters, buffers and optimizer state: equal for any layout of the same values. Each element is hashed with its name and place, and
    the hashes are added up, so that every rank hashes its own pieces, in bounded memory. Collective."""
    average_buffers(applied)
    pieces = state_pieces(applied)
    owned = current_catalog(applied, pieces).owned(pieces)
    total = torch.zeros(2, dtype=torch.int64, device=applied.plan.device)
    for piece in owned:
        total += hash_piece(piece).to(total.device)
    applied.groups.world.sync.all_reduce(total, "state/digest").wait()
    return "".join(f"{value % 2**64:016x}" for value in total.tolist())


def replica_differences(applied: AppliedPlan) -> list[str]:
    """Pieces of which several ranks hold copies that are not the same. Collective."""
    hashes = {piece.id: hash_piece(piece).tolist() for piece in state_pieces(applied)}
    found: dict[str, set[tuple[int, ...]]] = {}
    for mine in gather_data(applied.groups.world, hashes, applied.plan.device, "state/replicas"):
        for key, value in mine.items():
            found.setdefault(key, set()).add(tuple(value))
    return [key for key, values in found.items() if len(values) > 1]


@torch.no_grad()
def hash_piece(piece: StatePiece) -> Tensor:
    """Two sums of 64 bits over a piece's elements, on its device."""
    digest = hashlib.blake2b(f"{piece.tensor}{piece.shape}{piece.view.dtype}".encode(), digest_size=8)
    key = to_int64(int.from_bytes(digest.digest(), "big"))
    total = torch.zeros(2, dtype=torch.int64, device=piece.view.device)
    for view, first in _chunks(_as_reals(piece.view), _element_numbers(piece)):
        total += _hash_elements(view, first, key)
    return total


def _hash_elements(values: Tensor, numbers: Tensor, key: int) -> Tensor:
    bits = values.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]).to(torch.int64)
    mixed = splitmix64((bits * _BITS_MULTIPLIER).add_(numbers * GOLDEN_GAMMA).add_(key))  # not in place: int64 bits are the tensor itself
    return torch.stack([mixed.sum(), (mixed * (mixed >> 31)).sum()])


_BITS_MULTIPLIER = to_int64(0xD6E8FEB86659FD93)


def _as_reals(view: Tensor) -> Tensor:
    """Complex numbers as pairs in a last dim; a tensor without dims as one of one element."""
    return torch.view_as_real(view).flatten(-2) if view.is_complex() and view.dim() else torch.view_as_real(view) if view.is_complex() else view


def _element_numbers(piece: StatePiece) -> tuple[tuple[int, ...], Box]:
    """The shape of the whole tensor and the piece's box in it, in the elements that are hashed."""
    if not piece.view.is_complex():
        return piece.shape, piece.box
    if not piece.shape:
        return (2,), Box((0,), (2,))
    start, size = piece.box.start, piece.box.size
    return (*piece.shape[:-1], 2 * piece.shape[-1]), Box((*start[:-1], 2 * start[-1]), (*size[:-1], 2 * size[-1]))


def _chunks(view: Tensor, place: tuple[tuple[int, ...], Box]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a view with the numbers that their elements have in the whole tensor, counted row by row."""
    shape, box = place
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    yield from _split(view, list(box.start), strides)


def _split(view: Tensor, start: list[int], strides: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    if not view.numel():
        return
    if view.numel() <= _CHUNK:
        numbers = torch.zeros((), dtype=torch.int64, device=view.device)
        for first, size, stride in zip(start, view.shape, strides, strict=True):
            numbers = numbers.unsqueeze(-1) + torch.arange(first, first + size, device=view.device) * stride
        yield view, numbers
        return
    dim = next(i for i, size in enumerate(view.shape) if size > 1)
    rows = max(_CHUNK * view.shape[dim] // view.numel(), 1)
    for row in range(0, view.shape[dim], rows):
        part = view.narrow(dim, row, min(rows, view.shape[dim] - row))
        yield from _split(part, [first + (row if i == dim else 0) for i, first in enumerate(start)], strides)
