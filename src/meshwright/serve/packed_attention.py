"""Attention of packed tokens: the tokens of several sequences lie one after the other in one row, and each attends to its own sequence's pages.

[Note: packed tokens]
A forward pass sees (1, tokens): prompts, parts of prompts and single tokens of many sequences, without padding. Everything but attention treats
tokens independently, given their positions. Attention writes new keys and values into pages and reads each sequence's own.

[Note: single tokens]
A call of attention for each sequence costs as much as copying some hundred of its tokens. So on a CPU the sequences that are short and have one new
token each attend in one call: their keys and values are copied side by side, filled up to the longest with what a mask hides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from meshwright.serve.kv_memory import KVMemory
from meshwright.serve.steps import Chunk


@dataclass(frozen=True)
class AttentionOptions:
    """What layers do differently: the scale of scores (None: by the width), a window of tokens (0: all), a soft cap of scores (0: none)."""

    scale: float | None = None
    window: int = 0
    softcap: float = 0.0


DEFAULT_OPTIONS = AttentionOptions()
_FLASH_TYPES = (torch.bfloat16, torch.float16)
_FLASH_WIDTH = 256  # of a head at most
_SHORT_BYTES = 2**20  # of a sequence's keys and values in one layer; see [Note: single tokens]


def has_flash_attention(device: torch.device) -> bool:
    """Whether sequences of different lengths can attend in one call."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class _Segment:
    """One chunk's rows among the packed tokens, and where its sequence lies in memory: from `first` on, or at `slots`."""

    begin: int
    end: int
    start: int  # tokens before
    first: int  # slot of the sequence's first token, if its pages follow one another; else -1
    slots: Tensor | None

    @property
    def length(self) -> int:
        return self.start + self.end - self.begin


@dataclass(frozen=True)
class _Singles:
    """Sequences with one new token each that attend together: their rows among the packed tokens, their lengths (sequences, 1), where their tokens
    lie (sequences, longest): filled up with the place of the first."""

    rows: Tensor
    lengths: Tensor
    slots: Tensor

    def mask(self, window: int) -> Tensor:
        """Which tokens are seen: (sequences, 1, 1, longest)."""
        places = torch.arange(self.slots.shape[1], device=self.slots.device)
        seen = places < self.lengths
        if window:
            seen &= places >= self.lengths - window
        return seen[:, None, None]


class PackedBatch:
    """The chunks of one step as tensors. `attend` is called by each layer."""

    def __init__(self, chunks: Sequence[Chunk], memory: KVMemory) -> None:
        self.memory, device = memory, memory.device
        self.tokens = torch.tensor([[t for chunk in chunks for t in chunk.tokens]], device=device)
        self.positions = torch.tensor([[p for chunk in chunks for p in range(chunk.start, chunk.end)]], device=device)
        ends: list[int] = []
        row = 0
        self._segments: list[_Segment] = []
        slots: list[Tensor] = []
        for chunk in chunks:
            segment = self._segment(chunk, row)
            self._segments.append(segment)
            slots.append(self._new_slots(segment))
            row = segment.end
            ends += range(row - chunk.num_logits, row)
        self.logit_rows = torch.tensor(ends, dtype=torch.int64, device=device)
        self._slots = torch.cat(slots) if len(slots) > 1 else slots[0]
        self._masks: dict[tuple[int, int, int], Tensor] = {}
        self._singles = self._find_singles()
        self._starts: Tensor | None = None  # rows at which sequences begin, if all of them do so in this step and flash attention is there
        if has_flash_attention(device) and all(chunk.start == 0 for chunk in chunks):
            self._starts = torch.tensor([0, *(segment.end for segment in self._segments)], dtype=torch.int32, device=device)

    def _find_singles(self) -> _Singles | None:
        """Takes the short sequences with one new token out of the segments, if there are several. See [Note: single tokens]."""
        memory = self.memory
        if not memory.is_allocated or memory.device.type != "cpu":
            return None
        longest = _SHORT_BYTES // max(memory.token_bytes // max(len(memory.shapes), 1), 1)
        chosen = [s for s in self._segments if s.end - s.begin == 1 and s.length <= longest]
        if len(chosen) < 2:
            return None
        taken = {s.begin for s in chosen}
        self._segments = [s for s in self._segments if s.begin not in taken]
        own = [s.slots if s.slots is not None else torch.arange(s.first, s.first + s.length) for s in chosen]
        length = max(s.length for s in chosen)
        slots = torch.stack([torch.cat([o, o[:1].expand(length - len(o))]) for o in own])
        return _Singles(torch.tensor([s.begin for s in chosen]), torch.tensor([[s.length] for s in chosen]), slots)

    def _segment(self, chunk: Chunk, row: int) -> _Segment:
        size, pages = self.memory.page_tokens, chunk.pages
        end = row + len(chunk.tokens)
        if not self.memory.is_allocated:
            return _Segment(row, end, 0, 0, None)
        if pages[-1] - pages[0] == len(pages) - 1 and all(b - a == 1 for a, b in itertools.pairwise(pages)):
            return _Segment(row, end, chunk.start, pages[0] * size, None)
        first = torch.tensor(pages, device=self.memory.device).unsqueeze(1) * size
        slots = (first + torch.arange(size, device=self.memory.device)).flatten()[: chunk.end]
        return _Segment(row, end, chunk.start, -1, slots)

    def _new_slots(self, segment: _Segment) -> Tensor:
        if segment.slots is not None:
            return segment.slots[segment.start :]
        return torch.arange(segment.first + segment.start, segment.first + segment.length, device=self.memory.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = DEFAULT_OPTIONS) -> Tensor:
        """Attention of all tokens: query (heads, tokens, width), key and value with as many heads or a divisor of them. Returns (tokens, heads, value
        width)."""
        memory = self.memory
        if not memory.is_allocated:  # the pass that finds out the shapes: tokens attend to the pass itself
            memory.record(layer, key, value)
            rows = [(slice(s.begin, s.end), s) for s in self._segments]
            return torch.cat([self._attend(query[:, r], key[:, r], value[:, r], s, options) for r, s in rows])
        keys, values = memory.layer(layer)
        keys.index_copy_(0, self._slots, key.transpose(0, 1))
        values.index_copy_(0, self._slots, value.transpose(0, 1))
        if self._starts is not None and query.dtype in _FLASH_TYPES and not options.softcap and query.shape[2] == value.shape[2] <= _FLASH_WIDTH:
            return self._attend_at_once(query, key, value, self._starts, options)
        out = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
        if self._singles is not None:
            out[self._singles.rows] = self._attend_together(query, keys, values, self._singles, options)
        for segment in self._segments:
            first = max(segment.length - options.window, 0) if options.window and segment.end - segment.begin == 1 else 0
            sequence_keys, sequence_values = (_read(cached, segment, first) for cached in (keys, values))
            own = slice(segment.begin, segment.end)
            out[own] = self._attend(query[:, own], sequence_keys, sequence_values, segment, options)
        return out

    def _attend_together(self, query: Tensor, keys: Tensor, values: Tensor, singles: _Singles, options: AttentionOptions) -> Tensor:
        """Sequences with one new token each, in one call: (sequences, heads, value width)."""
        count, longest = singles.slots.shape
        heads, kv_heads, width = query.shape[0], keys.shape[1], query.shape[2]
        rows = query[:, singles.rows].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, width)
        places = singles.slots.flatten()
        k, v = (t.index_select(0, places).view(count, longest, kv_heads, -1).transpose(1, 2) for t in (keys, values))
        key = (0, longest, options.window)
        if key not in self._masks:
            self._masks[key] = singles.mask(options.window)
        return _scores_to_values(rows, k, v, self._masks[key], False, options).reshape(count, heads, -1)

    def _attend_at_once(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, options: AttentionOptions) -> Tensor:
        """All sequences in one call, which begin in this step."""
        longest = max(segment.length for segment in self._segments)
        key, value = (t.repeat_interleave(query.shape[0] // t.shape[0], 0) for t in (key, value))
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        window = (options.window - 1 if options.window else -1, 0)
        return varlen_attn(query, key, value, starts, starts, longest, longest, scale=options.scale, window_size=window)  # type: ignore

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segment: _Segment, options: AttentionOptions) -> Tensor:
        """One sequence's attention: query (heads, new tokens, width); returns (new tokens, heads, value width)."""
        heads, count, width = query.shape
        kv_heads, length, _ = key.shape
        grouped = query.reshape(kv_heads, heads // kv_heads, count, width)
        if count == 1:  # the heads that share keys are a batch of queries
            out = _scores_to_values(grouped.transpose(1, 2), key.unsqueeze(1), value.unsqueeze(1), None, False, options)
            return out.reshape(1, heads, -1)
        is_windowed = bool(options.window) and length > options.window
        mask = self._mask(count, length, options.window if is_windowed else 0) if segment.start or is_windowed else None
        shape = (kv_heads, heads // kv_heads, length)
        keys, values = (t.unsqueeze(1).expand(*shape, t.shape[-1]) for t in (key, value))
        out = _scores_to_values(grouped, keys, values, mask, mask is None, options)
        return out.reshape(heads, count, -1).transpose(0, 1)

    def _mask(self, count: int, length: int, window: int) -> Tensor:
        key = (count, length, window)
        if key not in self._masks:
            self._masks[key] = _causal_mask(count, length, window, self.memory.device)
        return self._masks[key]


def _read(cached: Tensor, segment: _Segment, first: int) -> Tensor:
    """A sequence's keys or values (heads, tokens, width), from its token `first` on; a view where its pages follow one another."""
    if segment.slots is None:
        return cached[segment.first + first : segment.first + segment.length].transpose(0, 1)
    return cached.index_select(0, segment.slots[first:]).transpose(0, 1)


def _causal_mask(count: int, length: int, window: int, device: torch.device) -> Tensor:
    """Which of `length` tokens the last `count` of them see."""
    rows = torch.arange(length - count, length, device=device).unsqueeze(1)
    columns = torch.arange(length, device=device).unsqueeze(0)
    seen = columns <= rows
    return seen & (columns > rows - window) if window else seen


def _scores_to_values(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, options: AttentionOptions) -> Tensor:
    if not options.softcap:
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=options.scale)
    scale = options.scale if options.scale is not None else query.shape[-1] ** -0.5
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / options.softcap)) * options.softcap
    if causal:
        mask = _causal_mask(query.shape[-2], key.shape[-2], 0, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.float().softmax(-1).to(value.dtype) @ value
