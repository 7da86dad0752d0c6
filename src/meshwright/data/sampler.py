"""Which samples make up which global batch: a pure function of seed and position, whatever the number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import RequestError


class GlobalSampler:
    """Global batches over `length` samples, a new permutation each epoch, the incomplete batch at an epoch's end dropped.

    All epochs concatenated form one endless stream; `position` is the offset in it, in samples, at which the next batch
    begins. It does not depend on the batch size, so a run may continue with another one without skipping or repeating samples.
    """

    def __init__(self, length: int, global_batch: int, seed: int, shuffle: bool = True) -> None:
        if length < 1:
            raise RequestError("the data set is empty")
        if global_batch < 1:
            raise RequestError(f"global batch {global_batch} must be at least 1")
        self.length = length
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._permutations: dict[int, Tensor] = {}

    def indices(self, step: int) -> Tensor:
        """The global batch of `step` in a run with this batch size from the start."""
        if self.global_batch > self.length:
            return self.indices_from(step * self.global_batch, self.global_batch)
        epoch, step_in_epoch = divmod(step, self.length // self.global_batch)
        return self.indices_from(epoch * self.length + step_in_epoch * self.global_batch, self.global_batch)

    def indices_from(self, position: int, count: int) -> Tensor:
        """The `count` samples of the batch due at `position`."""
        position = self._batch_start(position, count)
        parts = []
        while count > 0:  # more than one iteration only for a batch larger than the data set
            epoch, offset = divmod(position, self.length)
            size = min(count, self.length - offset)
            parts.append(self._permutation(epoch)[offset : offset + size] if self.shuffle else torch.arange(offset, offset + size))
            position, count = position + size, count - size
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def position_after(self, position: int, count: int) -> int:
        """The position after the batch of `count` samples due at `position`."""
        return self._batch_start(position, count) + count

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seed": self.seed, "length": self.length, "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position; the stream must be the same, the batch size may differ."""
        for key in ("length", "seed", "shuffle"):
            if state[key] != (now := getattr(self, key)):
                same = "use the same data set and seed, or --set allow_changes=true"
                raise RequestError(f"cannot resume the data: it was saved with {key}={state[key]}, now {key}={now}: {same}")
        self.position = int(state["position"])

    def _batch_start(self, position: int, count: int) -> int:
        """Skip to the next epoch where the rest of this one is too short for a batch; a batch larger than the data set spans epochs."""
        rest = self.length - position % self.length
        return position + rest if rest < count <= self.length else position

    def _permutation(self, epoch: int) -> Tensor:
        # The dictionary is replaced, never modified, so that a loader's thread and the main thread can both read it.
        permutation = self._permutations.get(epoch)
        if permutation is None:
            digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=7).digest()
            permutation = torch.randperm(self.length, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
            self._permutations = {**dict(list(self._permutations.items())[-1:]), epoch: permutation}
        return permutation
