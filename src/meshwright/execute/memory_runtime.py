"""Random keys of micro-batches, dtypes, and the bytes that a rank's tensors hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.core.plan import Plan
from meshwright.core.task import KeyedRandomModule
from meshwright.core.workload import LOW_PRECISION_DTYPES

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def low_precision_dtype(plan: Plan) -> torch.dtype | None:
    """The dtype that forward computes in, if it is not that of the parameters."""
    name = LOW_PRECISION_DTYPES.get(plan.memory.precision)
    return DTYPES[name] if name is not None else None


class RandomKeys:
    """Sets the current micro-batch's key on modules whose randomness is keyed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, KeyedRandomModule)]
        self.current: tuple[int, int, int] = (0, 0, 0)

    @property
    def has_modules(self) -> bool:
        return bool(self._modules)

    def set(self, seed: int, step: int, first_sample: int) -> None:
        self.current = (seed, step, first_sample)
        for module in self._modules:
            module.set_key(*self.current)

    def freeze(self, seed: int) -> None:
        """Give every micro-batch the key of the first one: batches of equal samples then draw equal numbers."""
        self.set(seed, 0, 0)
        self._modules = []

    @contextmanager
    def using(self, key: tuple[int, int, int]) -> Iterator[None]:
        """Context in which the key of another micro-batch is set."""
        before = self.current
        if before != key:
            self.set(*key)
        try:
            yield
        finally:
            if before != key:
                self.set(*before)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: views into one buffer count once."""
    storages = {(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors)}
    return sum(nbytes for _, nbytes in storages)
