"""Key-value memory of one rank: for each attention layer, the keys and values of all tokens in all pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.core.errors import RunError


@dataclass(frozen=True)
class KVShape:
    """Heads and widths of one layer's keys and values on this rank."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


class KVMemory:
    """`layers` maps an attention layer's index to its tensors (tokens, heads, width). They are allocated when the shapes are known: a first forward
    pass without memory records them."""

    def __init__(self, page_tokens: int, device: torch.device) -> None:
        self.page_tokens, self.device = page_tokens, device
        self.num_pages = 0
        self.shapes: dict[int, KVShape] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_allocated(self) -> bool:
        return bool(self._layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers of this rank."""
        return sum(shape.token_bytes for shape in self.shapes.values())

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_tokens * self.token_bytes

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Note a layer's shapes; key and value are (heads, tokens, width)."""
        shape = KVShape(key.shape[0], key.shape[2], value.shape[2], key.dtype)
        if self.shapes.setdefault(layer, shape) != shape:
            raise RunError(f"attention layer {layer} has keys and values of several shapes")

    def allocate(self, num_pages: int) -> None:
        """Memory for all layers, with one page more, the last, which no sequence has. On a CPU it is taken when it is first written."""
        self.num_pages = num_pages
        tokens = (num_pages + 1) * self.page_tokens
        for layer, shape in self.shapes.items():
            make = lambda width, shape=shape: torch.empty((tokens, shape.heads, width), dtype=shape.dtype, device=self.device)  # noqa: E731
            self._layers[layer] = make(shape.key_width), make(shape.value_width)

    def free(self) -> None:
        self._layers.clear()
        self.num_pages = 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]

    def pages_in(self, num_bytes: float) -> int:
        """How many pages fit into a number of bytes."""
        return math.floor(num_bytes / max(self.page_tokens * self.token_bytes, 1))
