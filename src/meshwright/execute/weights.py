"""Weights without the rest of the state: written by the first rank, tensor by tensor, as a folder that other software reads; and read from one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import FILE_NAME, TensorRecord
from meshwright.checkpoint.tensor_file import TensorSpec
from meshwright.checkpoint.weights_folder import write_weights
from meshwright.core.errors import RequestError
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.averaged_buffers import average_buffers
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.full_state import whole_tensors
from meshwright.execute.load_state import read_whole
from meshwright.execute.state_dtypes import DTYPES, NAMES, as_bytes, chunks_of
from meshwright.execute.state_pieces import StatePiece, buffer_pieces, make_catalog, parameter_pieces
from meshwright.execute.stored_tensors import Weights, open_weights
from meshwright.zoo.weight_layouts import WeightLayout, weight_layout


def whole_state_dict(applied: AppliedPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer under all of its names, whole, on the CPU; on other ranks than the first without values. One tensor
    at a time is whole. Collective."""
    average_buffers(applied)
    for _, name, tensor in whole_tensors(applied, [*parameter_pieces(applied), *buffer_pieces(applied)], everywhere=False):
        for alias in (name, *applied.whole.aliases.get(name, ())):
            yield alias, tensor


def load_whole_state_dict(applied: AppliedPlan, tensors: Mapping[str, Tensor]) -> None:
    """Fill every rank's pieces from whole tensors that the first rank has, by name; what other ranks give is not looked at. Collective."""
    world, device = applied.groups.world, applied.plan.device
    names = [*applied.whole.parameters, *applied.whole.buffers]
    error = broadcast_data(world, _mismatch(applied, names, tensors) if world.rank == 0 else "", device, "state/names")
    if error:
        raise RequestError(error)
    pieces: dict[str, list[StatePiece]] = {}
    for piece in itertools.chain(parameter_pieces(applied), buffer_pieces(applied)):
        pieces.setdefault(piece.name, []).append(piece)
    for name in names:
        dtype = broadcast_data(world, NAMES[tensors[name].dtype] if world.rank == 0 else "", device, "state/dtype")
        whole = tensors[name].detach().to(device) if world.rank == 0 else torch.empty(applied.whole.shapes[name], dtype=DTYPES[dtype], device=device)
        whole = whole.contiguous()
        world.broadcast(whole, "state").wait()
        with torch.no_grad():
            for piece in pieces.get(name, ()):
                piece.view.copy_(whole[piece.box.slices()])
    if applied.optimizer_offload is not None:
        applied.optimizer_offload.refresh_copies()


def _mismatch(applied: AppliedPlan, names: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    known = {*names, *(alias for aliases in applied.whole.aliases.values() for alias in aliases)}
    for name in names:
        if name not in tensors:
            return f"load_state_dict: there is no {name} in it"
        if tuple(tensors[name].shape) != applied.whole.shapes[name]:
            return f"load_state_dict: {name} has the shape {tuple(tensors[name].shape)} in it, and {applied.whole.shapes[name]} in the model"
    unknown = sorted(set(tensors) - known)
    return f"load_state_dict: the model has no {unknown[0]}" if unknown else ""


def export_weights(applied: AppliedPlan, folder: Path, source: Path | None = None) -> None:
    """Write the weights into `folder`, as `from_pretrained` reads them where the model is of the zoo's GPT or Llama or of transformers, and under the
    model's own names otherwise. Collective: the first rank writes, and when it has, all return, or raise what has failed."""
    layout, rank = weight_layout(applied.model, source), applied.groups.world.rank
    average_buffers(applied)
    pieces = [*parameter_pieces(applied), *buffer_pieces(applied)]
    specs = [_spec(layout, name, dtype, shape) for name, dtype, shape in _tensors(applied, pieces)]
    tensors = whole_tensors(applied, pieces, everywhere=False)
    error = ""
    if rank == 0:
        parts = ((as_bytes(part) for part in chunks_of(layout.to_folder(name, tensor))) for _, name, tensor in tensors)
        try:
            write_weights(folder, specs, parts, extras=layout.write_extras)
        except OSError as failure:
            error = f"{folder}: the weights could not be written: {(failure.strerror or str(failure)).lower()}"
    for _ in tensors:  # ranks send what they have, whether it can be written or not
        pass
    if error := broadcast_data(applied.groups.world, error, applied.plan.device, "state/export"):
        raise RequestError(error)


def _tensors(applied: AppliedPlan, pieces: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) in the order in which `whole_tensors` yields them."""
    order = {name: index for index, name in enumerate(applied.whole.shapes)}
    catalog = make_catalog(applied, pieces)
    for (_, name), entries in sorted(catalog.by_tensor().items(), key=lambda item: (order[item[0][1]], item[0][0])):
        yield name, NAMES[getattr(torch, entries[0].dtype)], entries[0].shape


def _spec(layout: WeightLayout, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(layout.rename(name), dtype, layout.shape_in_folder(name, shape))


@dataclass(frozen=True)
class LoadedWeights:
    """Names that a folder lacks, names in it that the model has not, and how many bytes this rank has read for how many elements that it holds."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int
    elements: int


def load_weights(applied: AppliedPlan, folder: Path) -> LoadedWeights:
    """Fill this rank's pieces from a folder of weights, of which only these are read, or from a checkpoint, whose checksums are compared before.
    Tensors of another shape are refused. Collective."""
    layout, elements = weight_layout(applied.model), 0
    if (folder / FILE_NAME).exists():
        _, wrong = read_whole(applied, folder)
        if wrong:
            raise RequestError(wrong[0])
    weights = open_weights(folder)
    try:
        keys = _keys(applied, layout, weights.tensors, folder)
        with torch.no_grad():
            for piece in itertools.chain(parameter_pieces(applied), buffer_pieces(applied)):
                if (key := keys[piece.name]) is not None:
                    _fill(weights, key, layout if key not in _names(applied, piece.name) else WeightLayout(), piece)
                    elements += piece.view.numel()
        tensors, bytes_read = weights.tensors, weights.bytes_read
    finally:
        weights.close()
    if applied.optimizer_offload is not None:
        applied.optimizer_offload.refresh_copies()
    used = {key for key in keys.values() if key is not None} | {alias for name in keys for alias in applied.whole.aliases.get(name, ())}
    missing, unexpected = sorted(name for name, key in keys.items() if key is None), sorted(set(tensors) - used)
    return LoadedWeights(tuple(missing), tuple(unexpected), bytes_read, elements)


def _fill(weights: Weights, key: str, layout: WeightLayout, piece: StatePiece) -> None:
    for inside, outside in layout.boxes_in_folder(piece.name, piece.shape, piece.box):
        view = piece.view[inside.inside(piece.box).slices()]
        weights.fill(key, outside, view.t() if layout.transposed(piece.name) else view)


def _keys(applied: AppliedPlan, layout: WeightLayout, tensors: Mapping[str, TensorRecord], folder: Path) -> dict[str, str | None]:
    """Under which name a folder has each parameter and buffer; None where it has not."""
    keys = {name: _key(applied, layout, name, tensors) for name in (*applied.whole.parameters, *applied.whole.buffers)}
    if tensors and not any(keys.values()):
        raise RequestError(f"{folder}: it is of another model: it has {next(iter(tensors))}, and the model has {next(iter(keys))}")
    for name, key in keys.items():
        whole = applied.whole.shapes[name]
        if key is None or tensors[key].shape == (whole if key in _names(applied, name) else layout.shape_in_folder(name, whole)):
            continue
        raise RequestError(f"{folder}: {key} has the shape {tensors[key].shape} in it, and {name} has {whole} in the model")
    return keys


def _key(applied: AppliedPlan, layout: WeightLayout, name: str, tensors: Any) -> str | None:
    """Under which name a folder has a tensor: the one that other software gives it, with a head or without, the model's own, or that of a tied
    parameter."""
    names = _names(applied, name)
    renamed = [layout.rename(name) for name in names]
    headless = [key.partition(".")[2] for key in renamed if key.startswith(layout.base)]
    return next((key for key in (*renamed, *headless, *names) if key in tensors), None)


def _names(applied: AppliedPlan, name: str) -> tuple[str, ...]:
    return name, *applied.whole.aliases.get(name, ())
