"""The list of a rank's state: every piece of every parameter, buffer and optimizer state that it holds, under any plan.

[Note: state as pieces]
A piece is a box of a whole tensor, with a view of the local memory that holds it. Fused cuts give a tensor several boxes, a flat ZeRO shard gives
a tensor up to 2·dims - 1, and both together more; a table that another rank has gives none. Whole state dicts, the digest, checkpoints and their
loading under another plan all read this list, and nothing else knows how a plan cuts tensors.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.box import Box, flat_range_boxes, missing_parts, whole_box
from meshwright.core.errors import RequestError, RunError
from meshwright.core.tensor_layout import TensorLayout
from meshwright.core.tied_parameters import stages_holding
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.exchange import gather_data
from meshwright.execute.shard_layout import slot_part

PARAMETER, BUFFER, OPTIMIZER, RESIDUAL = "parameter", "buffer", "optimizer", "residual"


@dataclass(frozen=True)
class StatePiece:
    """A box of one tensor of the state. `kind` is parameter, buffer, or optimizer/KEY; `name` is the parameter's or buffer's in the model."""

    kind: str
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    view: Tensor  # of local memory; writing to it changes the state

    @property
    def tensor(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        return f"{self.tensor}{self.box}"


def state_pieces(applied: AppliedPlan) -> list[StatePiece]:
    """Everything that this rank holds: parameters, persistent buffers, and the optimizer's tensors, in the model's order."""
    return [*parameter_pieces(applied), *buffer_pieces(applied), *stepped_pieces(applied, applied.optimizer_state, OPTIMIZER)]


def parameter_pieces(applied: AppliedPlan) -> Iterator[StatePiece]:
    parts: dict[int, list[tuple[int, Tensor]]] = {}
    for param, first, values in applied.gradient_sync.sharded_parameters() if applied.gradient_sync is not None else ():
        parts.setdefault(id(param), []).append((first, values))
    for name, param in applied.model.named_parameters():
        layout = layout_of(applied, name)
        if id(param) not in parts:
            yield from _pieces_of_local(PARAMETER, name, layout, param.detach())
        for first, values in parts.get(id(param), ()):
            yield from _pieces_of_range(PARAMETER, name, layout, first, values)


def buffer_pieces(applied: AppliedPlan) -> Iterator[StatePiece]:
    """Persistent buffers; in a pipeline those of this rank's stages, since only these are updated."""
    stages_of = stages_holding(applied.plan.stages)
    local = set(applied.pipeline.local_stages) if applied.pipeline is not None else set()
    persistent = set(applied.whole.buffers)
    for name, buffer in applied.model.named_buffers():
        stages = stages_of(name) if local else ()
        if name in persistent and (not stages or local.intersection(stages)):
            yield from _pieces_of_local(BUFFER, name, layout_of(applied, name), buffer.detach())


def stepped_pieces(applied: AppliedPlan, tensors_of: Callable[[nn.Parameter], Mapping[str, Any]], kind: str) -> Iterator[StatePiece]:
    """Pieces of what `tensors_of` gives for each parameter or shard that this rank's optimizer steps, as kind/KEY. Numbers are not tensors, and left
    out. A tensor without dims, such as a step count, belongs to each of a shard's parameters."""
    names = {id(p): name for name, p in applied.model.named_parameters()}
    if applied.gradient_sync is not None and applied.plan.memory.zero:
        yield from _sharded_pieces(applied, tensors_of, kind, names)
        return
    for param in applied.optimizer_parameters():
        name = names[id(param)]
        layout = layout_of(applied, name)
        for key, value in sorted(tensors_of(param).items()):
            if not torch.is_tensor(value):
                _check_number(applied, key, value)
            elif value.shape == param.shape:
                yield from _pieces_of_local(f"{kind}/{key}", name, layout, value.detach())
            elif layout.local_shape == layout.shape or not value.dim():
                yield from _pieces_of_local(f"{kind}/{key}", name, TensorLayout.uncut(tuple(value.shape)), value.detach())
            else:
                raise _other_shape(applied, key, name, value)


def _sharded_pieces(
    applied: AppliedPlan, tensors_of: Callable[[nn.Parameter], Mapping[str, Any]], kind: str, names: Mapping[int, str]
) -> Iterator[StatePiece]:  # fmt: skip
    assert applied.gradient_sync is not None
    for bucket in applied.gradient_sync.buckets:
        for shard in bucket.optimizer_shards:
            values = sorted(tensors_of(shard.param).items())
            for index in shard.slots:
                slot, name = bucket.layout.slots[index], names[id(bucket.params[index])]
                first, offset, count = slot_part(slot, bucket.slices.start + shard.start, shard.param.numel())
                if not count:
                    continue
                for key, value in values:
                    if not torch.is_tensor(value):
                        _check_number(applied, key, value)
                    elif not value.dim() and shard.param.dim():
                        yield from _pieces_of_local(f"{kind}/{key}", name, TensorLayout.uncut(()), value.detach())
                    elif value.shape == shard.param.shape:
                        part = value.detach()[offset : offset + count]
                        yield from _pieces_of_range(f"{kind}/{key}", name, layout_of(applied, name), first, part)
                    else:
                        raise _other_shape(applied, key, name, value)


def layout_of(applied: AppliedPlan, name: str) -> TensorLayout:
    """Where this rank's local tensor of a parameter or buffer lies in the whole one, apart from ZeRO's shards."""
    layout = TensorLayout.uncut(applied.whole.shapes[name])
    for shards in (applied.expert_parallel, applied.tensor_parallel):  # in the order in which they were cut
        layout = shards.layout(name, layout) if shards is not None else layout
    return layout


def _pieces_of_local(kind: str, name: str, layout: TensorLayout, local: Tensor) -> Iterator[StatePiece]:
    if layout.local_shape != tuple(local.shape):
        raise RunError(f"{name} has the shape {tuple(local.shape)} on this rank, and the plan says {layout.local_shape}")
    for inside, outside in layout.boxes(whole_box(layout.local_shape)) if local.numel() else ():
        yield StatePiece(kind, name, layout.shape, outside, local[inside.slices()])


def _pieces_of_range(kind: str, name: str, layout: TensorLayout, first: int, values: Tensor) -> Iterator[StatePiece]:
    """Pieces of consecutive elements of the flattened local tensor."""
    for offset, box in flat_range_boxes(layout.local_shape, first, values.numel()):
        local = values[offset : offset + box.numel].view(box.size)
        for inside, outside in layout.boxes(box):
            yield StatePiece(kind, name, layout.shape, outside, local[inside.inside(box).slices()])


def residual_pieces(applied: AppliedPlan, *, create: bool = False) -> Iterator[StatePiece]:
    """What gradient compression keeps between steps. It is each rank's own: another plan has no use for it."""
    rank = applied.groups.world.rank
    for name, tensor in applied.gradient_sync.residuals(create=create) if applied.gradient_sync is not None else ():
        yield from _pieces_of_local(RESIDUAL, f"{rank}:{name}", TensorLayout.uncut(tuple(tensor.shape)), tensor)


def stepped_names(applied: AppliedPlan) -> Iterator[tuple[nn.Parameter, list[str]]]:
    """Each parameter or shard that this rank's optimizer steps, with the names of the parameters that it has a part of."""
    names = {id(p): name for name, p in applied.model.named_parameters()}
    if applied.gradient_sync is None or not applied.plan.memory.zero:
        yield from ((param, [names[id(param)]]) for param in applied.optimizer_parameters())
        return
    for bucket in applied.gradient_sync.buckets:
        for shard in bucket.optimizer_shards:
            begin, size = bucket.slices.start + shard.start, shard.param.numel()
            held = [i for i in shard.slots if slot_part(bucket.layout.slots[i], begin, size)[2]]
            yield shard.param, [names[id(bucket.params[i])] for i in held]


def optimizer_numbers(applied: AppliedPlan) -> dict[str, Any]:
    """Numbers, not tensors, that the optimizer keeps for parameters of which this rank steps a part, as NAME/KEY."""
    return {
        f"{name}/{key}": value
        for param, names in stepped_names(applied)
        for key, value in applied.optimizer_state(param).items()
        for name in names
        if isinstance(value, (bool, int, float))
    }


def _check_number(applied: AppliedPlan, key: str, value: Any) -> None:
    if value is not None and not isinstance(value, (bool, int, float)):
        kind, optimizer = type(value).__name__, type(applied.optimizer).__name__
        raise RequestError(f"{optimizer} keeps a {kind} in its state '{key}', which cannot be saved: only tensors and numbers can")


def _other_shape(applied: AppliedPlan, key: str, name: str, value: Tensor) -> RequestError:
    shape = f"{type(applied.optimizer).__name__} keeps '{key}' of shape {tuple(value.shape)} for {name}, of which ranks hold parts"
    return RequestError(f"{shape}: it cannot be saved; use --mesh dp=N and zero=0, or an optimizer whose state has the parameter's shape")


@dataclass(frozen=True)
class CatalogEntry:
    """A part of a tensor that the rank `owner` writes. It is the piece with the id `source`, or a part of it."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    owner: int
    source: str


class StateCatalog:
    """Which rank writes what: every element of the state that some rank holds once, by the rank with the least to write among those that hold it."""

    def __init__(self, entries: Sequence[CatalogEntry], rank: int, ranks_on_host: int) -> None:
        self.entries, self.rank, self.ranks_on_host = entries, rank, ranks_on_host

    def owned(self, pieces: Iterable[StatePiece]) -> list[StatePiece]:
        """This rank's part of the entries, with views of its own memory."""
        held = {piece.id: piece for piece in pieces}
        return [_part_of(held[entry.source], entry.box) for entry in self.entries if entry.owner == self.rank]

    def by_tensor(self) -> dict[tuple[str, str], list[CatalogEntry]]:
        found: dict[tuple[str, str], list[CatalogEntry]] = {}
        for entry in self.entries:
            found.setdefault((entry.kind, entry.name), []).append(entry)
        return found


def _part_of(piece: StatePiece, box: Box) -> StatePiece:
    return piece if box == piece.box else StatePiece(piece.kind, piece.name, piece.shape, box, piece.view[box.inside(piece.box).slices()])


def make_catalog(applied: AppliedPlan, pieces: Sequence[StatePiece]) -> StateCatalog:
    """Exchange lists of pieces between all ranks. Collective."""
    mine = [[p.kind, p.name, p.shape, str(p.view.dtype).removeprefix("torch."), p.box.start, p.box.size, p.view.element_size()] for p in pieces]
    gathered = gather_data(applied.groups.world, [socket.gethostname(), mine], applied.plan.device, "state/catalog")
    tensors: dict[tuple[str, str], dict[Box, tuple[list[Any], list[int]]]] = {}
    for rank, (_, rows) in enumerate(gathered):
        for row in rows:
            box = Box(tuple(row[4]), tuple(row[5]))
            tensors.setdefault((row[0], row[1]), {}).setdefault(box, (row, []))[1].append(rank)
    load, entries = [0] * len(gathered), []
    for (kind, name), holders in tensors.items():
        for whole, box in _disjoint(holders):
            (_, _, shape, dtype, _, _, itemsize), ranks = holders[whole]
            owner = min(ranks, key=lambda rank: (load[rank], rank))
            load[owner] += box.numel * itemsize
            entries.append(CatalogEntry(kind, name, tuple(shape), dtype, box, owner, f"{kind}/{name}{whole}"))
    hosts = [host for host, _ in gathered]
    return StateCatalog(entries, applied.groups.world.rank, hosts.count(socket.gethostname()))


def _disjoint(boxes: Mapping[Box, tuple[list[Any], list[int]]]) -> Iterator[tuple[Box, Box]]:
    """(box, what of it no earlier one has). Boxes overlap where pipeline stages share a parameter that each of them shards in its own way."""
    if not boxes or sum(box.numel for box in boxes) <= math.prod(next(iter(boxes.values()))[0][2]):
        yield from ((box, box) for box in boxes)
        return
    earlier: list[Box] = []
    for box in boxes:
        yield from ((box, part) for part in missing_parts(box, earlier))
        earlier.append(box)


def current_catalog(applied: AppliedPlan, pieces: Sequence[StatePiece]) -> StateCatalog:
    """The catalog of these pieces, made anew where some rank's list has changed. Collective."""
    ids = tuple(p.id for p in pieces)
    known = applied.catalog
    changed = torch.tensor([int(known is None or known[0] != ids)], device=applied.plan.device)
    applied.groups.world.sync.all_reduce(changed, "state/changed", "max").wait()
    if int(changed) or known is None:
        known = applied.catalog = (ids, make_catalog(applied, pieces))
    return known[1]
