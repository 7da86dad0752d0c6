"""Where torch's options keep what every call asks of them: found out by changing it and looking, once in a process.

To ask by name costs a quarter of a microsecond, three times that when a message has emptied the caches, and twice that again where ranks share a
core; a reduction asks four times. Nothing is taken for granted about how torch lays them out: a field is asked by its name, unless there is one place
where every value that it was given was found.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_c10d: Any = torch._C._distributed_c10d
_KINDS = {
    "all_reduce": _c10d.AllreduceOptions,
    "reduce": _c10d.ReduceOptions,
    "reduce_scatter": _c10d.ReduceScatterOptions,
    "all_gather": _c10d.AllgatherOptions,
    "all_to_all": _c10d.AllToAllOptions,
    "broadcast": _c10d.BroadcastOptions,
}
_HEAD = object.__basicsize__  # bytes of an object, behind which pybind keeps the address of what it holds
_UNKNOWN = -1
_Values = Sequence[tuple[Any, bytes]]  # what is given, and how it would lie in memory
_YES_OR_NO: _Values = [(flag, bytes([flag])) for flag in (False, True, False, True)]
_RANKS: _Values = [(rank, rank.to_bytes(8, sys.byteorder)) for rank in (0, 1, 0x0102030405060708, 2)]
_OPS: _Values = [(op, bytes([hash(op)])) for op in (getattr(dist.ReduceOp, name) for name in ("SUM", "MIN", "PRODUCT", "MAX", "BAND"))]


class Fields(NamedTuple):
    """Of options of one kind, in bytes from where they begin; -1 where it is not known. As `Fields` in quick.c."""

    kind: Any = None
    later: int = _UNKNOWN
    reduction: int = _UNKNOWN
    root: int = _UNKNOWN


def fields_of(op: str) -> Fields:
    """What a group's call of that name is told. Messages have no options."""
    kind = _KINDS.get(op)
    return (
        Fields(kind, *(_place(kind, *field) for field in (("asyncOp", _YES_OR_NO), ("reduceOp", _OPS), ("rootRank", _RANKS)))) if kind else Fields()
    )


def _place(kind: Any, name: str, values: _Values) -> int:
    options = kind()
    if not hasattr(options, name):
        return _UNKNOWN
    found = None
    for value, image in values:
        setattr(options, name, value)
        held = _held(options)
        here = {at for at in range(len(held)) if held.startswith(image, at)}
        found = here if found is None else found & here
    return found.pop() if found is not None and len(found) == 1 else _UNKNOWN


def _held(options: Any) -> bytes:
    """What pybind holds for it, as far as it was allotted; nothing where that cannot be told."""
    try:
        size = ctypes.CDLL(None).malloc_usable_size
    except AttributeError:  # neither glibc nor musl
        return b""
    size.argtypes, size.restype = (ctypes.c_void_p,), ctypes.c_size_t
    address = ctypes.c_void_p.from_address(id(options) + _HEAD).value
    return ctypes.string_at(address, size(address)) if address else b""
