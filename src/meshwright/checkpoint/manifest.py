"""A checkpoint's manifest: what its files hold, of which run and step, and everything of the state that is no tensor. It is written last."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from meshwright.core.box import Box
from meshwright.core.errors import RequestError
from meshwright.core.serialization import from_data, read_json, to_data

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
_MAX_BYTES = 2**30


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor of the state, as the model or the optimizer has it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PieceRecord:
    """A part of a tensor that a file holds under `key`."""

    key: str
    tensor: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    bytes: int
    hash: str

    @property
    def box(self) -> Box:
        return Box(self.start, self.size)


@dataclass(frozen=True)
class FileRecord:
    name: str
    bytes: int
    header_hash: str
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """`state` is plain data: the step, the sampler's position, the schedule, the loss scale, settings that a resumed run must agree with."""

    step: int
    time: float
    model: str
    world: int
    versions: Mapping[str, str]
    plan: Any
    tensors: Mapping[str, TensorRecord]
    files: tuple[FileRecord, ...]
    state: Any = None
    rank_states: tuple[Any, ...] = ()  # of each rank: its random generators
    format: int = field(default=FORMAT_VERSION)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and flush the manifest of a folder that is not yet visible."""
    data = to_data(manifest)
    with (folder / FILE_NAME).open("x", encoding="utf-8") as file:
        file.write(json.dumps({"checksum": _checksum(data), **data}, allow_nan=False))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; RequestError says what is wrong with it."""
    path = folder / FILE_NAME
    if path.is_symlink():
        raise RequestError(f"{path}: it is a link, and not followed")
    data = read_json(path, _MAX_BYTES)
    if not isinstance(data, dict) or "checksum" not in data:
        raise RequestError(f"{path}: it is no checkpoint's manifest")
    version = data.get("format")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise RequestError(f"{path}: it has format version {version}, and this Meshwright reads up to {FORMAT_VERSION}: use a newer one")
    checksum = data.pop("checksum")
    if checksum != _checksum(data):
        raise RequestError(f"{path}: its checksum is wrong: it was changed after it was written")
    manifest = from_data(Manifest, data, str(path))
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: Path) -> None:
    """Names that lead elsewhere and boxes outside of their tensors are refused even where the checksum is right."""
    for index, file in enumerate(manifest.files):
        if file.name != file_name(index):
            raise RequestError(f"{path}: file {index} is called {file.name[:80]!r}, not {file_name(index)}")
        for piece in file.pieces:
            tensor = manifest.tensors.get(piece.tensor)
            fits = tensor is not None and len(piece.start) == len(piece.size) == len(tensor.shape)
            if not fits or any(not 0 <= a <= a + n <= whole for a, n, whole in zip(piece.start, piece.size, tensor.shape, strict=True)):  # type: ignore[union-attr]
                raise RequestError(f"{path}: the piece {piece.key[:80]!r} is no part of a tensor that it lists")


def _checksum(data: Any) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()))
