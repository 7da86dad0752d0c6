"""The bytes of the Python standard library's source code: a real text corpus that every installation has."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.core.errors import RequestError
from meshwright.core.task import Field

_MAX_BYTES = 32_000_000
_BYTE_VALUES = 256
_VALIDATION_FRACTION = 0.05
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class TokenWindows:
    """Windows of `length` bytes that overlap by one: each byte but the first is predicted exactly once."""

    def __init__(self, field: str, text: Tensor, length: int) -> None:
        self._field = field
        self._windows = text.unfold(0, length, length - 1)  # a view: no byte is copied

    def __len__(self) -> int:
        return self._windows.shape[0]

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {self._field: self._windows[indices].long()}


def load(fields: Mapping[str, Field], split: str) -> TokenWindows:
    """The corpus as windows for a language model; the last 5% is the validation part."""
    name, width = _token_field(fields)
    text = torch.frombuffer(_read_corpus(Path(sysconfig.get_paths()["stdlib"])), dtype=torch.uint8)
    border = int(text.numel() * (1.0 - _VALIDATION_FRACTION))
    part = text[:border] if split == "train" else text[border:]
    if part.numel() < width:
        raise RequestError(f"data set 'source': its {split} part has {part.numel()} bytes, less than one window of {width}: use a smaller --seq")
    return TokenWindows(name, part, width)


def _token_field(fields: Mapping[str, Field]) -> tuple[str, int]:
    if len(fields) == 1:
        name, field = next(iter(fields.items()))
        if field.dtype == "int64" and len(field.shape) == 1 and field.shape[0] >= 2:
            if 0 < field.high < _BYTE_VALUES:
                raise RequestError(f"data set 'source' has bytes as tokens and needs a vocabulary of {_BYTE_VALUES}; the model's has {field.high}")
            return name, field.shape[0]
    needs = ", ".join(fields) or "none"
    raise RequestError(f"data set 'source' feeds language models, which have one field, of tokens; this model's fields: {needs}")


def _source_files(root: Path) -> Iterator[Path]:
    """Source files in an order that does not depend on the file system."""
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(set(inner) - _SKIPPED_FOLDERS)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _read_corpus(root: Path) -> bytearray:
    text = bytearray()
    for path in _source_files(root):
        text += path.read_bytes()
        if len(text) >= _MAX_BYTES:
            break
    if not text:
        raise RequestError(f"data set 'source': there are no Python files in {root}: use another data set")
    return text[:_MAX_BYTES]
