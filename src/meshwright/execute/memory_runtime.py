"""Random keys of micro-batches, and the bytes that a rank's tensors hold. ZeRO-3 is in `zero3_runtime.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.core.task import KeyedRandomModule

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class RandomKeys:
    """Sets the current micro-batch's key on modules whose randomness is keyed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, KeyedRandomModule)]
        self.current: tuple[int, int, int] = (0, 0, 0)

    def set(self, seed: int, step: int, first_sample: int) -> None:
        self.current = (seed, step, first_sample)
        for module in self._modules:
            module.set_key(*self.current)

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


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: views into one buffer count once."""
    seen = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
    return sum(seen.values())
