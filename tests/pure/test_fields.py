"""Where torch's options keep what is asked of them: right, or not known."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.mpi import fields
from meshwright.comm.mpi.fields import Fields, fields_of

OPTIONS: Any = torch._C._distributed_c10d
OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_lies_there_is_what_was_set(op: str) -> None:
    found = fields_of(op)
    if found.later < 0:
        pytest.skip("a C library that does not tell how much it allotted, or options that lie elsewhere")
    many = [found.kind() for _ in range(20)]
    for number, options in enumerate(many):
        options.asyncOp = number % 3 == 0
        if found.root >= 0:
            options.rootRank = 7 * number
        if found.reduction >= 0:
            options.reduceOp = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG)[number % 3]
    for number, options in enumerate(many):
        held = fields._held(options)
        assert held[found.later] == (number % 3 == 0)
        assert found.root < 0 or int.from_bytes(held[found.root : found.root + 8], sys.byteorder) == 7 * number
        assert found.reduction < 0 or held[found.reduction] == hash(options.reduceOp)


def test_messages_have_none() -> None:
    assert fields_of("send") == fields_of("receive") == Fields()


@pytest.mark.parametrize("held", [b"", b"\0\0", b"\1"], ids=["not told", "twice", "never right"])
def test_what_is_not_in_one_place_is_not_known(monkeypatch: pytest.MonkeyPatch, held: bytes) -> None:
    """A flag that would lie in two places, or in none."""
    monkeypatch.setattr(fields, "_held", lambda options: held.replace(b"\0", bytes([options.asyncOp])))
    assert fields_of("broadcast").later == -1


def test_memory_is_read_no_further_than_it_was_allotted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    assert fields_of("reduce")[1:] == (-1, -1, -1)
