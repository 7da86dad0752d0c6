"""Weights of other software as a folder of safetensors, which `--init-from` and `prepare(weights=…)` read: from torch's distributed checkpoints (DCP)
and from files of `torch.save`. Neither executes what it reads, unless the source is trusted."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.tensor_file import TensorSpec
from meshwright.checkpoint.weights_folder import write_weights
from meshwright.core.errors import RequestError
from meshwright.execute.state_dtypes import NAMES, as_bytes, chunks_of

_METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_HINT = "--trust reads it as Python's pickle does, which runs what is in it"
# What torch writes into the metadata of a checkpoint: shapes and places, of these classes only.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "collections": ("OrderedDict", "defaultdict"),
}  # fmt: skip


@dataclass(frozen=True)
class _Chunk:
    """Where a part of a tensor lies: at `start` in the tensor, in `file` from `offset` on."""

    file: Path
    offset: int
    length: int
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class _Stored:
    """A tensor that has not been read yet; `chunks` cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


def import_weights(source: Path, folder: Path, *, key: str | None = None, trust: bool = False) -> list[str]:
    """Write the weights of `source`, a DCP folder or a file of `torch.save`, into a new folder of safetensors; returns their names. `key` says under
    which key of the state they are (`model`, or a path such as `app.model`); without one they are looked for."""
    if source.is_dir():
        if not (source / _METADATA).is_file():
            raise RequestError(f"{source}: it has no {_METADATA}, so it is no distributed checkpoint of torch: give a folder that has one, or a file")
        stored, paths = _read_metadata(source, trust)
        names = _chosen(paths, key, source)
        specs = {name: (stored[flat].dtype, stored[flat].shape) for name, flat in names.items()}
        tensors = (_assemble(stored[flat], flat, trust) for flat in names.values())
    else:
        state = _load(source.read_bytes() if source.stat().st_size < (1 << 20) else source, str(source), trust)
        flat_state = dict(_flatten(state, ()))
        names = _chosen({".".join(path): path for path in flat_state}, key, source)
        by_flat = {".".join(path): tensor for path, tensor in flat_state.items()}
        specs = {name: (by_flat[flat].dtype, tuple(by_flat[flat].shape)) for name, flat in names.items()}
        tensors = (by_flat[flat].detach().contiguous() for flat in names.values())
    unknown = next((name for name, (dtype, _) in specs.items() if dtype not in NAMES), None)
    if unknown is not None:
        raise RequestError(f"{source}: {unknown} is of {specs[unknown][0]}, which safetensors cannot hold")
    write_weights(
        folder, [TensorSpec(name, NAMES[dtype], shape) for name, (dtype, shape) in specs.items()],
        ((as_bytes(part) for part in chunks_of(tensor)) for tensor in tensors),
    )  # fmt: skip
    return list(names)


def _chosen(paths: Mapping[str, tuple[str, ...]], key: str | None, source: Path) -> dict[str, str]:
    """Names of the weights, without the keys that lead to them, and their flat names."""
    wanted = tuple(key.split(".")) if key else next((p for p in (("model",), ("app", "model"), ("state_dict",)) if _below(paths, p)), ())
    found = _below(paths, wanted)
    if not found:
        tops = sorted({path[0] for path in paths.values()})
        raise RequestError(f"{source}: there are no tensors below {'.'.join(wanted) or 'it'}: give --key with one of {', '.join(tops[:8]) or 'none'}")
    return found


def _below(paths: Mapping[str, tuple[str, ...]], prefix: tuple[str, ...]) -> dict[str, str]:
    """Flat names below a path of keys, by what is left of their own paths."""
    return {".".join(path[len(prefix) :]): flat for flat, path in paths.items() if path[: len(prefix)] == prefix and len(path) > len(prefix)}


# -- files of torch.save --


def _load(source: Path | bytes, name: str, trust: bool) -> Any:
    """What `torch.save` has written, through torch's unpickler that makes tensors and plain values only, unless the source is trusted."""
    given: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        return torch.load(given, map_location="cpu", weights_only=not trust, mmap=isinstance(source, Path) or None)
    except Exception as error:  # torch.load raises errors of a dozen types for files that are broken
        if trust:
            raise RequestError(f"{name}: torch.load cannot read it: {_first_line(error)}") from error
        raise RequestError(f"{name}: it is not a file of tensors and plain values, or it is broken ({_first_line(error)}); {_HINT}") from error


def _flatten(state: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _flatten(value, (*path, *str(key).split(".")))


# -- torch's distributed checkpoints --


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only what torch writes into a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype) or value is torch.Size or (module == "torch" and name in ("device", "memory_format")):
            return value
        raise RequestError(f"it names {module}.{name}, which no distributed checkpoint needs; {_HINT}")


def _read_metadata(folder: Path, trust: bool) -> tuple[dict[str, _Stored], dict[str, tuple[str, ...]]]:
    """The tensors of a checkpoint by their flat names, and the path of keys that each name stands for."""
    file = folder / _METADATA
    if file.stat().st_size > _MAX_METADATA_BYTES:
        raise RequestError(f"{file}: it has more than {_MAX_METADATA_BYTES >> 20} MiB")
    try:
        with file.open("rb") as stream:
            metadata = (pickle.Unpickler if trust else _MetadataUnpickler)(stream).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        stored = {name: _describe(folder, name, entry, places) for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        keys = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        paths = {name: tuple(part for key in keys.get(name, (name,)) for part in str(key).split(".")) for name in stored}
    except RequestError as error:
        raise RequestError(f"{file}: {error}") from None
    except Exception as error:  # a pickle that is broken raises anything
        raise RequestError(f"{file}: it is broken: {_first_line(error)}") from error
    return stored, paths


def _describe(folder: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> _Stored:
    shape, chunks = tuple(map(int, entry.size)), []
    for chunk in entry.chunks:
        start, size = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        if any(s < 0 or n < 0 or s + n > whole for s, n, whole in zip(start, size, shape, strict=True)):
            raise RequestError(f"{name} has a part at {start} of {size}, which is outside of its shape {shape}")
        info = places[name, start]
        if Path(info.relative_path).name != info.relative_path:
            raise RequestError(f"{name} is in {info.relative_path}, which is no file of the folder")
        file = folder / info.relative_path
        if file.is_symlink() or not file.is_file():
            raise RequestError(f"{info.relative_path}, which holds {name}, is not in the folder")
        if info.offset < 0 or info.length < 0 or info.offset + info.length > file.stat().st_size:
            raise RequestError(f"{info.relative_path} ends before {name} does")
        chunks.append(_Chunk(file, info.offset, info.length, start, size))
    numel = torch.Size(shape).numel()
    if sum(torch.Size(c.size).numel() for c in chunks) != numel or numel * entry.properties.dtype.itemsize > sum(c.length for c in chunks):
        raise RequestError(f"the parts of {name} are not the whole of it, {shape}")
    return _Stored(shape, entry.properties.dtype, tuple(chunks))


def _assemble(stored: _Stored, name: str, trust: bool) -> Tensor:
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        with chunk.file.open("rb") as stream:
            stream.seek(chunk.offset)
            part = _load(stream.read(chunk.length), f"{chunk.file}: {name}", trust)
        if not isinstance(part, Tensor) or tuple(part.shape) != chunk.size or part.dtype != stored.dtype:
            raise RequestError(f"{chunk.file}: it has another tensor in the place of {name}")
        whole[tuple(slice(s, s + n) for s, n in zip(chunk.start, chunk.size, strict=True))] = part
    return whole


def _first_line(error: Exception) -> str:
    with suppress(StopIteration):
        return next(line for line in str(error).splitlines() if line.strip())
    return type(error).__name__
