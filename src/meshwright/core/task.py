"""What to train: a model factory, its loss, and the fields of its samples. Torch appears only in annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from meshwright.core.memo import Memo

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = Any  # a tensor, or tuples, lists and dicts of tensors whose first dimension counts samples
Loss = Callable[["nn.Module", Batch], "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]


@dataclass(frozen=True)
class Field:
    """One named tensor of a sample. `high` bounds integers from above (a vocabulary, a number of classes)."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 0


@dataclass(frozen=True)
class Task:
    """A model with its loss, data and training defaults. `loss(model, batch)` returns a mean, or (sum, count)."""

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    fields: Mapping[str, Field]
    data: str = "synthetic"  # name of a built-in data set
    global_batch: int = 32
    learning_rate: float | None = None  # peak; None: by the width of the model
    tokens_per_sample: int | None = None
    weights: str = ""  # a folder of safetensors that `build` reads, after `architecture` has built the model
    architecture: Callable[[], nn.Module] | None = None
    note: str = ""

    @property
    def pretrained(self) -> bool:
        """Whether `build` returns trained weights."""
        return bool(self.weights)

    @cached_property
    def memo(self) -> Memo:
        """Results derived from this task: the model built for the profile is reused for the dataflow."""
        return Memo()


@runtime_checkable
class KeyedRandomModule(Protocol):
    """A module whose random numbers depend on the step and sample, not on the rank that computes them (see zoo/keyed_random.py)."""

    def set_key(self, seed: int, step: int, first_sample: int) -> None:
        """Set the run's seed, the step, and the global index of the first sample; called before each micro-batch."""
