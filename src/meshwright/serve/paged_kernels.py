# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Attention of one new token a sequence over pages of keys and values, as Triton kernels: pages are read where they lie.

[Note: splits]
A few sequences with a few heads would not keep a GPU busy, so the tokens of each are divided over several programs; a second kernel puts their parts
together by the sum of exponentials that each had.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # tokens that a program reads at once
_MIN_TILE = 16  # of a product on tensor cores
_PROGRAMS = 264  # to keep a GPU busy: two for each of 132 processors
_MOST_SPLITS = 32


def write_tokens(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Put key and value (rows, KV heads, width) into `keys` and `values` (slots, KV heads, width) at `slots` (rows)."""
    rows, heads, width = key.shape
    value_width = value.shape[2]
    _write[(rows, heads)](
        key, value, keys, values, slots, key.stride(0), key.stride(1), key.stride(2), value.stride(0), value.stride(1), value.stride(2),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        WIDTH=width, VALUE_WIDTH=value_width, TILE=triton.next_power_of_2(max(width, value_width)),
    )  # fmt: skip


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, page_tokens: int, scale: float, window: int, softcap: float
) -> Tensor:
    """query (rows, heads, width), keys and values (slots, KV heads, width), pages (rows, pages of a sequence), lengths (rows). Returns (rows, heads,
    value width)."""
    rows, heads, width = query.shape
    query = query if query.stride(2) == 1 else query.contiguous()
    kv_heads, value_width = keys.shape[1], values.shape[2]
    group = heads // kv_heads
    splits = max(min(_PROGRAMS // max(rows * kv_heads, 1), _MOST_SPLITS, triton.cdiv(pages.shape[1] * page_tokens, _BLOCK)), 1)
    out = torch.empty((rows, heads, value_width), dtype=query.dtype, device=query.device)
    parts = torch.empty((rows, heads, splits, value_width), dtype=torch.float32, device=query.device) if splits > 1 else out
    sums = torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device)
    _attend_split[(rows, kv_heads, splits)](
        query, keys, values, pages, lengths, parts, sums, scale, softcap, window,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), pages.stride(0),
        HEADS=heads, GROUP=group, SPLITS=splits, PAGE=page_tokens, WIDTH=width, VALUE_WIDTH=value_width,
        TILE=max(_MIN_TILE, triton.next_power_of_2(group)), WIDTH_TILE=max(_MIN_TILE, triton.next_power_of_2(width)),
        VALUE_TILE=max(_MIN_TILE, triton.next_power_of_2(value_width)), BLOCK=_BLOCK, SOFTCAP=softcap > 0.0, WINDOW=window > 0,
    )  # fmt: skip
    if splits == 1:
        return out
    _merge_splits[(rows, heads)](
        parts, sums, out, HEADS=heads, SPLITS=splits, SPLITS_TILE=triton.next_power_of_2(splits), VALUE_WIDTH=value_width,
        VALUE_TILE=triton.next_power_of_2(value_width),
    )  # fmt: skip
    return out


@triton.jit
def _write(
    key, value, keys, values, slots, key_row, key_head, key_dim, value_row, value_head, value_dim, keys_slot, keys_head, values_slot, values_head,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    dims = tl.arange(0, TILE)
    k = tl.load(key + row * key_row + head * key_head + dims * key_dim, mask=dims < WIDTH)
    tl.store(keys + slot * keys_slot + head * keys_head + dims, k, mask=dims < WIDTH)
    v = tl.load(value + row * value_row + head * value_head + dims * value_dim, mask=dims < VALUE_WIDTH)
    tl.store(values + slot * values_slot + head * values_head + dims, v, mask=dims < VALUE_WIDTH)


@triton.jit
def _attend_split(
    query, keys, values, pages, lengths, parts, sums, scale, softcap, window,
    query_row, query_head, key_slot, key_head, value_slot, value_head, page_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr, WIDTH_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    members, dims, value_dims = tl.arange(0, TILE), tl.arange(0, WIDTH_TILE), tl.arange(0, VALUE_TILE)
    heads = kv_head * GROUP + members
    is_member, is_dim, is_value_dim = members < GROUP, dims < WIDTH, value_dims < VALUE_WIDTH
    q = tl.load(query + row * query_row + heads[:, None] * query_head + dims[None, :], mask=is_member[:, None] & is_dim[None, :], other=0.0)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    found = tl.zeros([TILE, VALUE_TILE], tl.float32)
    for start in range(begin, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < end
        page = tl.load(pages + row * page_row + places // PAGE, mask=inside, other=0)
        slots = page.to(tl.int64) * PAGE + places % PAGE
        k = tl.load(keys + slots[:, None] * key_slot + kv_head * key_head + dims[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        kept = tl.exp(largest - now)
        weights = tl.exp(scores - now[:, None])
        v = tl.load(
            values + slots[:, None] * value_slot + kv_head * value_head + value_dims[None, :], mask=inside[:, None] & is_value_dim[None, :], other=0.0
        )
        found = found * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        largest = now
    is_empty = end <= begin
    total = tl.where(is_empty, 1.0, total)
    places_out = (row * HEADS + heads) * SPLITS + split
    part = (found / total[:, None]).to(parts.dtype.element_ty)
    tl.store(parts + places_out[:, None] * VALUE_WIDTH + value_dims[None, :], part, mask=is_member[:, None] & is_value_dim[None, :])
    tl.store(sums + places_out, tl.where(is_empty, float("-inf"), largest + tl.log(total)), mask=is_member)


@triton.jit
def _merge_splits(
    parts, sums, out, HEADS: tl.constexpr, SPLITS: tl.constexpr, SPLITS_TILE: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_TILE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0) * HEADS + tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS_TILE), tl.arange(0, VALUE_TILE)
    is_split, is_dim = splits < SPLITS, dims < VALUE_WIDTH
    exponents = tl.load(sums + place * SPLITS + splits, mask=is_split, other=float("-inf"))
    weights = tl.exp(exponents - tl.max(exponents, 0))
    part = tl.load(parts + (place * SPLITS + splits[:, None]) * VALUE_WIDTH + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0)
    merged = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + place * VALUE_WIDTH + dims, merged.to(out.dtype.element_ty), mask=is_dim)
