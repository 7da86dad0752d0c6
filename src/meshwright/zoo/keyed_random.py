"""Random numbers keyed by (seed, step, global sample, call site), so that they do not depend on how a batch is split over ranks.

Nothing here draws from torch's generators: bits are a hash of the key and the element's index inside its sample. Recomputing a
forward pass gives the same bits, and so does any other layout of the same global batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from meshwright.core.keyed_hash import GOLDEN_GAMMA, logical_shift_right, splitmix64, to_int64

_MASK_32 = 0xFFFFFFFF


class _KeyedModule(nn.Module):
    """Holds the key in a tensor, not in Python numbers: a compiled graph stays valid when the step changes."""

    key: Tensor

    def __init__(self, site: int) -> None:
        super().__init__()
        self.site = site
        # The fourth is a constant kept in the buffer: a compiler would fold a literal into the element indices, and overflow.
        self.register_buffer("key", torch.tensor([0, 0, 0, GOLDEN_GAMMA]), persistent=False)

    def set_key(self, seed: int, step: int, first_sample: int) -> None:
        """Set the run's seed, the step, and the global index of the first sample; called before each micro-batch."""
        # Filling one element with a number needs no copy from the host, so it does not synchronize a GPU.
        for slot, value in enumerate((seed, step, first_sample, GOLDEN_GAMMA)):
            self.key[slot] = to_int64(value)

    def _random_bits(self, like: Tensor) -> Tensor:
        """64 random bits for each element of `like`, whose first dim counts samples."""
        samples = self.key[2] + torch.arange(like.shape[0], device=like.device)
        elements = torch.arange(math.prod(like.shape[1:]), device=like.device)
        state = splitmix64(self.key[0] + to_int64((self.site + 1) * GOLDEN_GAMMA))
        state = splitmix64(state + self.key[1] * GOLDEN_GAMMA)
        state = splitmix64(state + samples * GOLDEN_GAMMA)
        return splitmix64(state.unsqueeze(1) + elements * self.key[3]).view(like.shape)


class KeyedDropout(_KeyedModule):
    """Dropout whose mask depends only on the key. `site` distinguishes the call sites of one model: give each its own."""

    def __init__(self, p: float, site: int) -> None:
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout p={p} must be at least 0 and less than 1")
        super().__init__(site)
        self.p = p
        if p == 0.0:
            del self.key  # a model without dropout has no key buffers

    def set_key(self, seed: int, step: int, first_sample: int) -> None:
        if self.p > 0.0:
            super().set_key(seed, step, first_sample)

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep = logical_shift_right(self._random_bits(x), 32) >= round(self.p * (_MASK_32 + 1))
        return torch.where(keep, x * (1.0 / (1.0 - self.p)), 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}"


class KeyedNormal(_KeyedModule):
    """Standard normal noise in the shape, dtype and device of its argument, by the Box–Muller transform."""

    def forward(self, like: Tensor) -> Tensor:
        bits = self._random_bits(like)
        # In float64 whatever `like` is, so that the last bit of a vectorised logarithm cannot affect a float32 result.
        radius = (logical_shift_right(bits, 32).double() + 0.5) / (_MASK_32 + 1)
        angle = (bits & _MASK_32).double() * (2.0 * math.pi / (_MASK_32 + 1))
        return (torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle)).to(like.dtype)

    def extra_repr(self) -> str:
        return f"site={self.site}"
