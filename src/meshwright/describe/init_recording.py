"""The record of a constructor: its operations on tensors without values, in program order, and which of them a tensor's values need.

Tensors are told apart by storage. `TensorRef` says which part of which storage a tensor is; views, `.data`, `detach` and tied parameters therefore
need no operations of their own. `Recording.needed_for` gives the operations that a storage's values follow from: what is overwritten later is not
among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import RequestError

START, END = -1, 1 << 62  # times before and after every operation


class DeferralError(RequestError):
    """A constructor that cannot be recorded; the model has to be built whole."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor as a part of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False

    @cached_property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for n in self.size:
            count *= n
        return count

    @cached_property
    def dense(self) -> bool:
        """Whether each element has its own place, without gaps."""
        expected = 1
        for stride, size in sorted((s, n) for s, n in zip(self.stride, self.size, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class ShapeRef:
    """An argument of which an operation takes the shape and dtype only, as `zeros_like` does."""

    like: TensorRef


@dataclass(frozen=True)
class GeneratorRef:
    """A generator that the constructor passed; 0 is the default one."""

    key: int


@dataclass(eq=False)
class Operation:
    """One call. Its tensors are references; tensors in `args` that are none are constants. `writes` says of each storage whether the operation
    replaces all of it, `outputs` which results are new tensors. `draws` is the generator's key, `restart` the state that the constructor gave it
    before: a state, or the operation after which it was saved. `closed`: how much it draws depends on no values."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: dict[int, bool]
    outputs: tuple[tuple[int, TensorRef], ...]
    default_dtype: torch.dtype
    draws: int | None = None
    restart: Tensor | int | None = None

    @property
    def closed(self) -> bool:
        return not self.reads

    @property
    def storages(self) -> set[int]:
        return {*self.reads, *self.writes}


@dataclass
class Recording:
    """The operations of a constructor; `sizes` in bytes of all storages. `first_state` is that of the default generator before it."""

    first_state: Tensor
    operations: list[Operation] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)  # the operations that draw random numbers
    sizes: dict[int, int] = field(default_factory=dict)
    end_restart: Tensor | int | None = None  # the default generator's state at the end, where the constructor set it
    _writers: dict[int, list[int]] = field(default_factory=dict)

    def append(self, operation: Operation) -> int:
        index = len(self.operations)
        self.operations.append(operation)
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(index)
        if operation.draws is not None:
            self.draws.append(index)
        return index

    def needed_for(self, targets: Iterable[tuple[int, int]]) -> list[int]:
        """The operations, in order, that give each storage its values as of a time."""
        included: set[int] = set()
        todo = list(targets)
        while todo:
            storage, time = todo.pop()
            writers = self._writers.get(storage, [])
            at = bisect_left(writers, time) - 1
            if at < 0 or writers[at] in included:  # no writer: the values are undefined, as after `torch.empty`
                continue
            index = writers[at]
            included.add(index)
            todo += self.inputs_of(index)
        return sorted(included)

    def inputs_of(self, index: int) -> list[tuple[int, int]]:
        """The storages that an operation reads, and those of which it leaves a part as it was."""
        operation = self.operations[index]
        return [(s, index) for s in operation.reads] + [(s, index) for s, whole in operation.writes.items() if not whole]

    def is_written(self, storage: int) -> bool:
        """Whether a storage ever gets values."""
        return storage in self._writers

    def covers(self, ref: TensorRef) -> bool:
        """Whether the tensor is all of its storage."""
        return ref.offset == 0 and ref.nbytes == self.sizes[ref.storage] and ref.dense and not ref.conj and not ref.neg
