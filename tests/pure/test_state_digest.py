"""The digest of a state is the same however the state is cut, and whatever device hashes it."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.box import Box, whole_box
from meshwright.execute import state_digest
from meshwright.execute.state_digest import hash_piece
from meshwright.execute.state_pieces import StatePiece

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def piece(whole: torch.Tensor, box: Box) -> StatePiece:
    return StatePiece("parameter", "w", tuple(whole.shape), box, whole[box.slices()])


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_hashes_of_parts_add_up(dtype: torch.dtype) -> None:
    whole = drawn((300, 7, 40), dtype)
    parts = [Box((0, 0, 0), (100, 7, 40)), Box((100, 0, 0), (200, 3, 40)), Box((100, 3, 0), (200, 4, 11)), Box((100, 3, 11), (200, 4, 29))]
    total = sum(hash_piece(piece(whole, box)) for box in parts)
    assert torch.equal(total, hash_piece(piece(whole, whole_box(whole.shape))))
    changed = whole.clone()
    changed[150, 3, 10] = not changed[150, 3, 10]
    assert not torch.equal(total, hash_piece(piece(changed, whole_box(whole.shape))))
    assert not torch.equal(total, hash_piece(piece(whole.flip(0), whole_box(whole.shape)))), "the place counts"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (50_000,), (3, 5, 7)], ids=str)
def test_a_cpu_hashes_as_other_devices_do(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    whole = drawn(shape, dtype)
    ours = hash_piece(piece(whole, whole_box(shape)))
    monkeypatch.setattr(state_digest, "_sums_on_cpu", state_digest._sums)
    assert torch.equal(ours, hash_piece(piece(whole, whole_box(shape))))
