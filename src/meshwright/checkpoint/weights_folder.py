"""Folders of weights in the layout of Hugging Face: `model.safetensors`, or several files and an index that says which tensor is in which."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.tensor_file import TensorEntry, TensorFile, TensorSpec, write_tensor_file
from meshwright.core.errors import RequestError
from meshwright.core.serialization import read_json, write_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9


class WeightsFolder:
    """The tensors in a folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: TensorFile(folder / name) for name in self._file_names()}
        self._where = {key: (file, entry) for file in self._files.values() for key, entry in file.entries.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.__exit__()

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return {key: entry for key, (_, entry) in self._where.items()}

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def find(self, key: str) -> tuple[TensorFile, TensorEntry]:
        return self._where[key]

    def _file_names(self) -> list[str]:
        index = self.folder / _INDEX
        if not index.exists():
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
            if not names:
                raise RequestError(f"{self.folder}: there are no *.safetensors files in it")
            return [_SINGLE] if _SINGLE in names else names
        data = read_json(index)
        names = sorted(set(data["weight_map"].values())) if isinstance(data, dict) and isinstance(data.get("weight_map"), dict) else []
        wrong = [name for name in names if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name)]
        if wrong or not names:
            raise RequestError(f"{index}: it names no files of tensors beside it{f', but {wrong[0]!r}' if wrong else ''}")
        return names


def write_weights(
    folder: Path, specs: Sequence[TensorSpec], parts: Iterable[Iterable[Any]], *, extras: Callable[[Path], None] = lambda folder: None
) -> None:  # fmt: skip
    """Write a folder of weights, visible by one rename when it is whole; `extras` adds files. `parts` gives each tensor's bytes, in order."""
    partial = folder.with_name(f".saving-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    try:
        groups, source = _split(specs), iter(parts)
        names = [_SINGLE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        for name, group in zip(names, groups, strict=True):
            write_tensor_file(partial / name, group, (next(source) for _ in group), {"format": "pt"})
        if len(groups) > 1:
            weight_map = {spec.key: name for name, group in zip(names, groups, strict=True) for spec in group}
            write_json(partial / _INDEX, {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map})
        extras(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        aside = folder.with_name(f".removing-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    os.rename(partial, folder)


def _split(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups
