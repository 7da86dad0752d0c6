"""The next tokens of several sequences as tensors of fixed shapes: what a step is made of when it runs again and again with new values."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.serve.kv_memory import KVMemory
from meshwright.serve.packed_attention import AttentionOptions

WriteTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
PagedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, float, int, float], Tensor]


@dataclass(frozen=True)
class PageKernels:
    """What a device does with pages: write the new tokens' keys and values, and attend to all of them."""

    write: WriteTokens
    attend: PagedAttention


@dataclass
class DecodeBatch:
    """One token of each of `rows` sequences; `pages` (rows, pages of a sequence) say where their keys and values lie. Tensors stay, values change."""

    memory: KVMemory
    tokens: Tensor  # (1, rows)
    positions: Tensor  # (1, rows)
    pages: Tensor  # int32
    kernels: PageKernels
    slots: Tensor | None = None  # where this step's keys and values go
    lengths: Tensor | None = None  # of the sequences with this step's tokens

    @property
    def logit_rows(self) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def locate(self) -> None:
        """Find the tokens' places in memory, once for all layers of a step."""
        size, positions = self.memory.page_tokens, self.positions[0]
        self.slots = self.pages.gather(1, (positions // size).unsqueeze(1)).squeeze(1).long() * size + positions % size
        self.lengths = (positions + 1).int()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of all tokens: query (heads, rows, width); returns (rows, heads, value width)."""
        assert self.slots is not None and self.lengths is not None
        keys, values = self.memory.layer(layer)
        self.kernels.write(key.transpose(0, 1), value.transpose(0, 1), keys, values, self.slots)
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        rows, size = query.transpose(0, 1), self.memory.page_tokens
        return self.kernels.attend(rows, keys, values, self.pages, self.lengths, size, scale, options.window, options.softcap)


def choose_kernels(device: torch.device) -> PageKernels:
    """Triton's kernels where there is a GPU and Triton, else operations of torch."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        paged_kernels = importlib.import_module("meshwright.serve.paged_kernels")
        return PageKernels(paged_kernels.write_tokens, paged_kernels.paged_attention)
    return PageKernels(copy_tokens, gathered_attention)


def copy_tokens(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """The same as `paged_kernels.write_tokens`."""
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)


def gathered_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, page_tokens: int, scale: float, window: int, softcap: float
) -> Tensor:
    """The same as `paged_kernels.paged_attention`: keys and values of all pages are collected first."""
    slots = (pages.long().unsqueeze(-1) * page_tokens + torch.arange(page_tokens, device=pages.device)).flatten(1)
    group = query.shape[1] // keys.shape[1]
    k, v = (t[slots].transpose(1, 2).repeat_interleave(group, 1) for t in (keys, values))
    scores = (query.unsqueeze(2) @ k.transpose(-1, -2)).squeeze(2).float() * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    places = torch.arange(slots.shape[1], device=pages.device)
    seen = places < lengths.unsqueeze(1)
    if window:
        seen &= places >= lengths.unsqueeze(1) - window
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1).to(v.dtype)
    v = v.masked_fill(~seen[:, None, :, None], 0.0)  # memory that nobody has written may hold NaN
    return (weights.unsqueeze(2) @ v).squeeze(2)
