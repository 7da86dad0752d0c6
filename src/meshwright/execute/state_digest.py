"""A digest of a run's state that is the same for every parallel layout, computed from pieces in bounded memory.

Each element is hashed with its tensor and its place, and the hashes are added up: no rank needs more than its own pieces, in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.keyed_hash import GOLDEN_GAMMA, splitmix64, to_int64
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.averaged_buffers import average_buffers
from meshwright.execute.exchange import gather_data
from meshwright.execute.state_pieces import StatePiece, current_catalog, state_pieces

_CHUNK = {"cpu": 2**15, "cuda": 2**22}  # elements that are hashed at once: on a CPU as many as its cache holds
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_BITS_MULTIPLIER = to_int64(0xD6E8FEB86659FD93)


def state_digest(applied: AppliedPlan) -> str:
    """A hash of parameters, buffers and optimizer state. Collective."""
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
    key, on_cpu = int.from_bytes(digest.digest(), "big"), piece.view.device.type == "cpu"
    total, view = torch.zeros(2, dtype=torch.int64, device=piece.view.device), _as_reals(piece.view)
    shape, box = _element_numbers(piece)
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    for part, start in _chunks(view, list(box.start), _CHUNK.get(view.device.type, 2**20)):
        bits = part.contiguous().view(_INTEGERS[part.element_size()])
        total += _sums_on_cpu(bits, start, strides, key) if on_cpu else _sums(bits, start, strides, key)
    return total


def _sums(bits: Tensor, start: Sequence[int], strides: Sequence[int], key: int) -> Tensor:
    """The sums of the hashes of elements, by torch."""
    numbers = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first, size, stride in zip(start, bits.shape, strides, strict=True):
        numbers = numbers.unsqueeze(-1) + torch.arange(first, first + size, device=bits.device) * stride
    mixed = splitmix64((bits.to(torch.int64) * _BITS_MULTIPLIER).add_(numbers * GOLDEN_GAMMA).add_(to_int64(key)))
    return torch.stack([mixed.sum(), (mixed * (mixed >> 31)).sum()])


def _sums_on_cpu(bits: Tensor, start: Sequence[int], strides: Sequence[int], key: int) -> Tensor:
    """The same by numpy, which has unsigned integers and works in place: four times as fast as torch on a core."""
    with np.errstate(over="ignore"):
        steps = np.array(key, np.uint64)
        for first, size, stride in zip(start, bits.shape, strides, strict=True):
            steps = steps[..., None] + np.arange(first, first + size, dtype=np.uint64) * np.uint64(stride * GOLDEN_GAMMA % 2**64)
        mixed = bits.numpy().astype(np.int64).view(np.uint64)
        mixed *= np.uint64(_BITS_MULTIPLIER % 2**64)
        mixed += steps
        shifted = np.empty_like(mixed)
        for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            np.right_shift(mixed, np.uint64(shift), out=shifted)
            mixed ^= shifted
            if multiplier != 1:
                mixed *= np.uint64(multiplier)
        first_sum = mixed.sum()
        np.right_shift(mixed.view(np.int64), 31, out=shifted.view(np.int64))
        shifted *= mixed
        return torch.from_numpy(np.array([first_sum, shifted.sum()], np.uint64).view(np.int64))


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


def _chunks(view: Tensor, start: list[int], limit: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Parts of a view of at most `limit` elements, with the place of the first in the whole tensor."""
    if not view.numel():
        return
    if view.numel() <= limit:
        yield view, start
        return
    dim = next(i for i, size in enumerate(view.shape) if size > 1)
    rows = max(limit * view.shape[dim] // view.numel(), 1)
    for row in range(0, view.shape[dim], rows):
        part = view.narrow(dim, row, min(rows, view.shape[dim] - row))
        yield from _chunks(part, [first + (row if i == dim else 0) for i, first in enumerate(start)], limit)
