"""Columns of outputs on disk: each replica appends its samples' rows to files of its own, which are then joined into one file of tensors.

So the memory needed is that of a batch, however many samples there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.tensor_file import TensorSpec, write_tensor_file
from meshwright.core.errors import RunError
from meshwright.execute.state_dtypes import DTYPES, NAMES, as_bytes
from meshwright.serve.tensor_messages import Array

_CHUNK_BYTES = 1 << 24
Described = Mapping[str, tuple[str, Sequence[int], int]]  # dtype, shape of a row, and number of rows, by a column's name


class ColumnWriter:
    """The columns of one replica."""

    def __init__(self, folder: Path, replica: int) -> None:
        self._folder, self._replica = folder, replica
        self.described: dict[str, tuple[str, tuple[int, ...], int]] = {}

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Append a batch. Every batch has the same columns, and rows of the same shape."""
        for name, tensor in columns.items():
            tensor = tensor.detach().contiguous().cpu()
            dtype, shape, rows = self.described.get(name, (NAMES[tensor.dtype], tuple(tensor.shape[1:]), 0))
            if (dtype, shape) != (NAMES[tensor.dtype], tuple(tensor.shape[1:])):
                raise RunError(
                    f"the output {name} has the shape {tuple(tensor.shape[1:])} for some samples and {shape} for others: one file cannot hold it"
                )
            self.described[name] = dtype, shape, rows + tensor.shape[0]
            place = list(self.described).index(name)
            with _part(self._folder, self._replica, place).open("ab") as file:
                file.write(as_bytes(tensor))


def join_columns(folder: Path, parts: Sequence[Described], path: Path) -> None:
    """Write all replicas' columns as one file of tensors, the replicas' rows one after the other."""
    specs = [TensorSpec(name, dtype, (sum(part[name][2] for part in parts if name in part), *shape)) for name, (dtype, shape, _) in parts[0].items()]
    write_tensor_file(path, specs, (_bytes_of(folder, parts, name) for name in parts[0]), {"format": "pt"})


def check_alike(parts: Sequence[Described], only_first: Sequence[str] = ()) -> None:
    """All replicas must have got outputs of the same names and shapes, but for those that only the first makes."""
    kinds = [{name: (dtype, list(shape)) for name, (dtype, shape, _) in part.items() if name not in only_first} for part in parts]
    for kind in kinds[1:]:
        for name in kinds[0].keys() | kind.keys():
            if kinds[0].get(name) != kind.get(name):
                raise RunError(f"the output {name} differs in type or shape from sample to sample: one file cannot hold it")


def read_numbers(folder: Path, parts: Sequence[Described]) -> dict[str, Array]:
    """The columns of all replicas that have one number a sample."""
    found = {}
    for name, (dtype, shape, _) in parts[0].items():
        if not len(shape) and dtype != "BF16" and all(name in part for part in parts):
            kind: Any = torch.empty(0, dtype=DTYPES[dtype]).numpy().dtype
            files = (_part(folder, replica, list(part).index(name)) for replica, part in enumerate(parts))
            found[name] = np.concatenate([np.fromfile(file, kind) for file in files])
    return found


def _bytes_of(folder: Path, parts: Sequence[Described], name: str) -> Iterator[bytes]:
    for replica, part in enumerate(parts):
        if name in part:
            with _part(folder, replica, list(part).index(name)).open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk


def _part(folder: Path, replica: int, place: int) -> Path:
    return folder / f"{replica}-{place}"
