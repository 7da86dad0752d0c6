"""The Triton kernels in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CODE = """
import torch
from meshwright.serve.decode_batch import copy_tokens, gathered_attention
from meshwright.serve.paged_kernels import paged_attention, write_tokens
torch.manual_seed(0)
for rows, heads, kv_heads, width, value_width, size, window, softcap in (
    (3, 4, 2, 8, 8, 4, 0, 0.0), (2, 4, 4, 20, 12, 16, 0, 0.0), (4, 6, 2, 64, 64, 16, 30, 5.0)
):
    each = 12
    lengths = torch.randint(1, each * size, (rows,), dtype=torch.int32)
    lengths[0] = 1
    pages = torch.randperm(rows * each).view(rows, each).int()
    slots = rows * each * size
    inputs = torch.randn(rows, heads, width), torch.randn(slots, kv_heads, width), torch.randn(slots, kv_heads, value_width), pages, lengths
    found, expected = (attend(*inputs, size, width**-0.5, window, softcap) for attend in (paged_attention, gathered_attention))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    key, value = torch.randn(kv_heads, rows, width).transpose(0, 1), torch.randn(kv_heads, rows, value_width).transpose(0, 1)
    written = [[t.clone() for t in inputs[1:3]] for _ in range(2)]
    for write, pair in zip((write_tokens, copy_tokens), written, strict=True):
        write(key, value, *pair, torch.randperm(slots, generator=torch.Generator().manual_seed(1))[:rows])
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))
print("equal")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it comes with torch for GPUs")
def test_the_kernels_attend_as_torch_does() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False)
    assert done.stdout == "equal\n", done.stderr[-2000:]
