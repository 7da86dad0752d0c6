"""Data sets by name, behind one small protocol: a length, and a batch for given indices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.task import Field
from meshwright.data import corpus, images, instructions
from meshwright.data.synthetic import SyntheticDataset

Split = Literal["train", "validation"]
_BUILTIN_NAMES = ("source", "digits", "mnist", "cifar10", "synthetic")


class Dataset(Protocol):
    """Samples by index. The same index gives the same sample on every rank."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """The samples at `indices` as one batch: one tensor per field, whose first dim is as long as `indices`."""


def is_instruction_file(name: str | None) -> bool:
    """Whether a data set's name is a JSON file of instructions and answers."""
    return name is not None and name.endswith(".json")


def load(
    name: str, fields: Mapping[str, Field], *, split: Split = "train", folder: Path | None = None, seed: int = 0,
    tokenizer: Path | None = None, hold_out: bool = True,
) -> Dataset:  # fmt: skip
    """The data set of this name, in the shapes of a task's fields. `folder` holds the files of mnist and cifar10; `seed` is for synthetic; for a
    JSON file of instructions, `tokenizer` is the folder of a tokenizer and `hold_out` reserves a part for validation."""
    if split not in ("train", "validation"):
        raise unknown_name_error("split", split, ("train", "validation"))
    if is_instruction_file(name):
        return instructions.load(Path(name), fields, split, tokenizer=tokenizer, hold_out=hold_out)
    if name == "source":
        return corpus.load(fields, split)
    if name == "synthetic":
        return SyntheticDataset(fields, split, seed)
    if name == "digits":
        return images.load_digits(fields, split)
    if name not in _BUILTIN_NAMES:
        raise unknown_name_error("data set", name, _BUILTIN_NAMES)
    if folder is None:
        raise RequestError(f"data set '{name}' is read from local files: give the folder that holds them")
    return images.load_mnist(fields, split, folder) if name == "mnist" else images.load_cifar10(fields, split, folder)
