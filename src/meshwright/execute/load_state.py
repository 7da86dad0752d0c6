"""Loads a checkpoint into a model to which any plan was applied: each piece is filled from the stored pieces that overlap it, bit for bit."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint import checkpoint_folder
from meshwright.checkpoint.manifest import Manifest, PieceRecord, TensorRecord, read_manifest
from meshwright.checkpoint.tensor_file import TensorFile
from meshwright.core.box import Box
from meshwright.core.errors import RequestError
from meshwright.core.serialization import to_data
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.exchange import broadcast_data, gather_data
from meshwright.execute.state_dtypes import CHUNK_BYTES, DTYPES, as_bytes
from meshwright.execute.state_pieces import (
    BUFFER,
    OPTIMIZER,
    PARAMETER,
    buffer_pieces,
    parameter_pieces,
    residual_pieces,
    stepped_names,
    stepped_pieces,
)

_MAX_OPEN_FILES = 128
_SCALAR_STATES = {"step", "eta", "mu", "mu_product"}  # of torch's optimizers: one number a parameter, whatever its shape


class StoredTensors:
    """The tensors of a checkpoint, read box by box."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.tensors = folder, manifest.tensors
        self._pieces: dict[str, list[tuple[str, PieceRecord]]] = {}
        for file in manifest.files:
            for piece in file.pieces:
                self._pieces.setdefault(piece.tensor, []).append((file.name, piece))
        self._open: OrderedDict[str, TensorFile] = OrderedDict()
        self._stack = ExitStack()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__()

    def fill(self, tensor: str, box: Box, view: Tensor) -> None:
        """Write a box of a stored tensor into `view`, which has its size."""
        missing = [box]
        for file, piece in self._pieces.get(tensor, ()):
            if not any(part.intersect(piece.box) for part in missing):
                continue
            common = box.intersect(piece.box)
            assert common is not None
            self._copy(self._file(file), piece, common, view[common.inside(box).slices()])
            missing = [rest for part in missing for rest in part.subtract(common)]
        if missing:
            raise RequestError(f"{self.folder}: no file has {tensor}{missing[0]}: a part of the checkpoint is missing")

    def _copy(self, file: TensorFile, piece: PieceRecord, common: Box, view: Tensor) -> None:
        entry = file.entries.get(piece.key)
        if entry is None or entry.shape != piece.size:
            raise RequestError(f"{file.path}: it has no '{piece.key}' of shape {piece.size}")
        dtype = DTYPES[entry.dtype]
        for part in _parts(common.inside(piece.box), dtype.itemsize):
            target = view[part.inside(common.inside(piece.box)).slices()]
            is_direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
            values = target if is_direct else torch.empty(part.size, dtype=dtype)
            file.read_box(entry, part, as_bytes(values))
            if not is_direct:
                target.copy_(values)

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
            if len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].__exit__()
        self._open.move_to_end(name)
        return self._open[name]


def _parts(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts of bounded size, along its first dim."""
    if not box.size or box.numel * itemsize <= CHUNK_BYTES:
        yield box
        return
    rows = max(CHUNK_BYTES * box.size[0] // (box.numel * itemsize), 1)
    for first in range(0, box.size[0], rows):
        yield Box((box.start[0] + first, *box.start[1:]), (min(rows, box.size[0] - first), *box.size[1:]))


def open_newest(applied: AppliedPlan, root: Path, step: int | None = None) -> tuple[Path, Manifest, list[str]]:
    """(folder, manifest, what is wrong with newer ones) of the newest whole checkpoint in `root`, or of the one of `step`. Every rank hashes a share
    of the files. Collective."""
    world, device = applied.groups.world, applied.plan.device
    steps = broadcast_data(world, checkpoint_folder.saved_steps(root) if world.rank == 0 else None, device, "state/steps")
    if step is not None:
        if step not in steps:
            raise RequestError(f"{root}: there is no checkpoint of step {step}; there are {', '.join(map(str, steps)) or 'none'}")
        steps = [step]
    problems: list[str] = []
    for candidate in reversed(steps):
        folder = checkpoint_folder.step_folder(root, candidate)
        try:
            manifest, wrong = read_manifest(folder), []
            wrong = list(checkpoint_folder.problems_of(folder, manifest, world.rank, world.size))
        except RequestError as error:
            wrong = [str(error)]
        everywhere = [line for lines in gather_data(world, wrong, device, "state/problems") for line in lines]
        if not everywhere:
            return folder, manifest, problems
        problems += list(dict.fromkeys(everywhere))
    raise RequestError(f"{root}: there is no whole checkpoint in it{f'; {problems[0]}' if problems else ''}")


def load_tensors(applied: AppliedPlan, folder: Path, manifest: Manifest, *, optimizer: bool = True) -> None:
    """Fill parameters, buffers and, unless told otherwise, the optimizer's state from a checkpoint of any plan."""
    check_same_model(applied, manifest, str(folder))
    if optimizer:
        make_optimizer_state(applied, manifest)
    is_same_plan = manifest.plan == to_data(applied.plan)
    with torch.no_grad(), StoredTensors(folder, manifest) as stored:
        states = stepped_pieces(applied, applied.optimizer_state, OPTIMIZER) if optimizer else ()
        residuals = residual_pieces(applied, create=True) if optimizer and is_same_plan else ()
        for piece in itertools.chain(parameter_pieces(applied), buffer_pieces(applied), states, residuals):
            if piece.tensor in manifest.tensors or piece.kind in (PARAMETER, BUFFER):
                stored.fill(piece.tensor, piece.box, piece.view)
    if applied.optimizer_offload is not None:
        applied.optimizer_offload.refresh_copies()


def check_same_model(applied: AppliedPlan, manifest: Manifest, where: str) -> None:
    """Refuse a checkpoint of another model: the line names the first parameter or buffer that differs."""
    kinds = (f"{PARAMETER}/", f"{BUFFER}/")
    stored = {key: record.shape for key, record in manifest.tensors.items() if key.startswith(kinds)}
    model = [*(f"{PARAMETER}/{name}" for name in applied.whole.parameters), *(f"{BUFFER}/{name}" for name in applied.whole.buffers)]
    for key in (*(k for k in model if k not in stored), *sorted(set(stored) - set(model))):
        kind, _, name = key.partition("/")
        has = "the checkpoint has" if key in stored else "the model has"
        raise RequestError(f"{where}: it is of another model: {has} the {kind} {name}, and {'the model' if key in stored else 'it'} has not")
    for key, shape in stored.items():
        kind, _, name = key.partition("/")
        if applied.whole.shapes[name] != shape:
            raise RequestError(f"{where}: it is of another model: {name} has the shape {shape} in it, and {applied.whole.shapes[name]} here")


def make_optimizer_state(applied: AppliedPlan, manifest: Manifest) -> None:
    """Give the optimizer empty state of the kinds that the checkpoint has, to be filled."""
    stored: dict[str, dict[str, TensorRecord]] = {}
    for key, record in manifest.tensors.items():
        kind, _, name = key.rpartition("/")
        if kind.startswith(f"{OPTIMIZER}/"):
            stored.setdefault(name, {})[kind.partition("/")[2]] = record
    groups = {id(p): group for group in applied.optimizer.param_groups for p in group["params"]}
    numbers = {key: value for rank in manifest.rank_states for key, value in rank.get("numbers", {}).items()}
    for param, names in stepped_names(applied):
        names = sorted(names, key=lambda name: not applied.whole.shapes[name])
        kinds = {key: (name, record) for name in reversed(names) for key, record in stored.get(name, {}).items()}
        if not kinds:
            continue
        stepped = param if applied.optimizer_offload is None else applied.optimizer_offload.host_copy(param)
        state = applied.optimizer.state[stepped] = {}
        for key, (name, record) in kinds.items():
            dtype, whole = DTYPES[record.dtype], applied.whole.shapes[name]
            if not record.shape and (whole or key in _SCALAR_STATES):
                on_device = groups[id(stepped)].get("fused") or groups[id(stepped)].get("capturable")
                state[key] = torch.zeros((), dtype=dtype, device=stepped.device if on_device else "cpu")
            else:
                state[key] = torch.zeros(stepped.shape if record.shape == whole else record.shape, dtype=dtype, device=stepped.device)
        state.update({key.rpartition("/")[2]: value for key, value in numbers.items() if key.rpartition("/")[0] == names[0]})
