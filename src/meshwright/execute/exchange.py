"""Plain data between ranks, as JSON in byte tensors: no pickle crosses a wire."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from meshwright.core.comm import Comm


def gather_data(comm: Comm, value: Any, device: str, name: str) -> list[Any]:
    """Every rank's value, on every rank. Collective."""
    if comm.size == 1:
        return [value]
    text = _to_bytes(value, device)
    sizes = torch.zeros(comm.size, dtype=torch.int64, device=device)
    comm.sync.all_gather(sizes, torch.tensor([len(text)], device=device), name).wait()
    longest = int(sizes.max())
    padded, gathered = text.new_zeros(longest), text.new_empty(longest * comm.size)
    padded[: len(text)] = text
    comm.sync.all_gather(gathered, padded, name).wait()
    rows = gathered.view(comm.size, longest).cpu()
    return [_from_bytes(row[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]


def broadcast_data(comm: Comm, value: Any, device: str, name: str) -> Any:
    """The first rank's value, on every rank. Collective."""
    if comm.size == 1:
        return value
    text = _to_bytes(value if comm.rank == 0 else None, device)
    size = torch.tensor([len(text)], device=device)
    comm.sync.broadcast(size, name).wait()
    if comm.rank != 0:
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
    comm.sync.broadcast(text, name).wait()
    return _from_bytes(text.cpu())


def _to_bytes(value: Any, device: str) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _from_bytes(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))
