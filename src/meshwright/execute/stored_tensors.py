"""Tensors in files, read box by box into memory of any device: those of a checkpoint, and the weights in a folder or a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import FILE_NAME, Manifest, PieceRecord, TensorRecord, read_manifest
from meshwright.checkpoint.tensor_file import TensorEntry, TensorFile
from meshwright.checkpoint.weights_folder import WeightsFolder
from meshwright.core.box import Box
from meshwright.core.errors import RequestError
from meshwright.execute.state_dtypes import CHUNK_BYTES, DTYPES, as_bytes
from meshwright.execute.state_pieces import BUFFER, PARAMETER

_MAX_OPEN_FILES = 128


class Weights(Protocol):
    """Whole tensors by name, of which boxes are read."""

    @property
    def tensors(self) -> Mapping[str, TensorRecord]: ...

    @property
    def bytes_read(self) -> int: ...

    def fill(self, tensor: str, box: Box, view: Tensor) -> None:
        """Write a box of a stored tensor into `view`, which has its size."""

    def close(self) -> None: ...


class StoredTensors:
    """The tensors of a checkpoint, as KIND/NAME."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.tensors = folder, manifest.tensors
        self._pieces: dict[str, list[tuple[str, PieceRecord]]] = {}
        for file in manifest.files:
            for piece in file.pieces:
                self._pieces.setdefault(piece.tensor, []).append((file.name, piece))
        self._open: OrderedDict[str, TensorFile] = OrderedDict()
        self._bytes_of_closed = 0

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._open.values():
            file.__exit__()

    @property
    def bytes_read(self) -> int:
        return self._bytes_of_closed + sum(file.bytes_read for file in self._open.values())

    def fill(self, tensor: str, box: Box, view: Tensor) -> None:
        missing = [box]
        for name, piece in self._pieces.get(tensor, ()):
            if not any(part.intersect(piece.box) for part in missing):
                continue
            common = box.intersect(piece.box)
            assert common is not None
            file = self._file(name)
            entry = file.entries.get(piece.key)
            if entry is None or entry.shape != piece.size:
                raise RequestError(f"{file.path}: it has no '{piece.key}' of shape {piece.size}")
            copy_box(file, entry, common.inside(piece.box), view[common.inside(box).slices()])
            missing = [rest for part in missing for rest in part.subtract(common)]
        if missing:
            raise RequestError(f"{self.folder}: no file has {tensor}{missing[0]}: a part of the checkpoint is missing")

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
            if len(self._open) > _MAX_OPEN_FILES:
                _, closed = self._open.popitem(last=False)
                self._bytes_of_closed += closed.bytes_read
                closed.__exit__()
        self._open.move_to_end(name)
        return self._open[name]


class CheckpointWeights(StoredTensors):
    """The parameters and buffers of a checkpoint under the model's own names."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self._keys = {key.partition("/")[2]: key for key in manifest.tensors if key.startswith((f"{PARAMETER}/", f"{BUFFER}/"))}
        self.tensors = {name: manifest.tensors[key] for name, key in self._keys.items()}

    def fill(self, tensor: str, box: Box, view: Tensor) -> None:
        super().fill(self._keys[tensor], box, view)


class FolderWeights:
    """The tensors in a folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = WeightsFolder(folder)
        self.tensors = {name: TensorRecord(entry.dtype, entry.shape) for name, entry in self._folder.tensors.items()}

    @property
    def bytes_read(self) -> int:
        return self._folder.bytes_read

    def fill(self, tensor: str, box: Box, view: Tensor) -> None:
        copy_box(*self._folder.find(tensor), box, view)

    def close(self) -> None:
        self._folder.close()


def open_weights(folder: Path) -> Weights:
    """The weights in a folder of safetensors files, or in a checkpoint."""
    return CheckpointWeights(folder, read_manifest(folder)) if (folder / FILE_NAME).exists() else FolderWeights(folder)


def copy_box(file: TensorFile, entry: TensorEntry, box: Box, view: Tensor) -> None:
    """Read a box of a tensor into `view`, in parts of bounded size where it cannot be read in place."""
    dtype = DTYPES[entry.dtype]
    for part in _parts(box, dtype.itemsize):
        target = view[part.inside(box).slices()]
        is_direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        values = target if is_direct else torch.empty(part.size, dtype=dtype, pin_memory=target.device.type == "cuda")
        file.read_box(entry, part, as_bytes(values))
        if not is_direct:
            target.copy_(values.to(target.device))  # in its own dtype, which the device then converts


def _parts(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts of bounded size, along its first dim."""
    if not box.size or box.numel * itemsize <= CHUNK_BYTES:
        yield box
        return
    rows = max(CHUNK_BYTES * box.size[0] // (box.numel * itemsize), 1)
    for first in range(0, box.size[0], rows):
        yield Box((box.start[0] + first, *box.start[1:]), (min(rows, box.size[0] - first), *box.size[1:]))
