"""Attention over pages: short sequences with one new token attend together, and get what each would get alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.serve import packed_attention
from meshwright.serve.kv_memory import KVMemory
from meshwright.serve.packed_attention import AttentionOptions, PackedBatch
from meshwright.serve.steps import Chunk

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 8, 4


def draw(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


def filled_memory() -> KVMemory:
    memory = KVMemory(PAGE, torch.device("cpu"))
    PackedBatch([Chunk(0, 0, (1,))], memory).attend(0, draw(HEADS, 1, WIDTH), draw(KV_HEADS, 1, WIDTH), draw(KV_HEADS, 1, WIDTH))
    memory.allocate(32)
    for part in memory.layer(0):
        part.copy_(draw(*part.shape))
        part[-PAGE:] = float("nan")  # nobody has written there
    return memory


@pytest.mark.parametrize("options", [AttentionOptions(), AttentionOptions(window=3), AttentionOptions(scale=0.3, softcap=2.0)], ids=str)
def test_short_sequences_attend_together_as_each_alone(options: AttentionOptions) -> None:
    chunks = [
        Chunk(0, 5, (7,), (0, 1)),
        Chunk(1, 2, (8, 9, 10), (9, 4)),  # a part of a prompt, its pages apart
        Chunk(2, 0, (3,), (11,)),
        Chunk(3, 9, (4,), (20, 5, 13)),
        Chunk(4, 13, (5,), (24, 25, 26, 27)),  # too long to be copied
    ]
    count = sum(len(chunk.tokens) for chunk in chunks)
    query, key, value = draw(HEADS, count, WIDTH), draw(KV_HEADS, count, WIDTH), draw(KV_HEADS, count, WIDTH)
    memory, token_bytes = filled_memory(), 2 * KV_HEADS * WIDTH * 8
    with patch.object(packed_attention, "_SHORT_BYTES", 12 * token_bytes):
        batch = PackedBatch(chunks, memory)
        together = batch.attend(0, query, key, value, options)
    with patch.object(packed_attention, "_SHORT_BYTES", 0):
        each = PackedBatch(chunks, memory)
        alone = each.attend(0, query, key, value, options)
    assert batch._singles is not None and len(batch._singles.rows) == 3 and each._singles is None
    assert together.isfinite().all() and torch.allclose(together, alone, rtol=1e-12, atol=1e-12)
