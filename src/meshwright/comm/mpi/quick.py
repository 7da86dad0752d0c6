"""The quick way of a group's calls: what most have in common, compiled. Python's methods do the rest, and all of it where there is no compiler.

On a core that ranks share, a microsecond of Python is six of a call's time, and Python is most of what lies between torch and MPI. `quick.c` does
what the methods of `backend.py` do, and makes the same call of MPI's: ranks that have it and ranks that do not understand each other.

It is compiled when it is first needed (`compiled.py`). `CC` names another compiler than `cc`, and MESHWRIGHT_COMPILE=0 leaves it be.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.autograd import profiler

from meshwright.comm.lane import DONE, Lane
from meshwright.comm.mpi import buffers, library
from meshwright.comm.mpi.calls import ROUNDS_TAG, Calls
from meshwright.comm.mpi.compiled import compiled
from meshwright.comm.mpi.fields import fields_of
from meshwright.comm.mpi.messages import SMALL, Message
from meshwright.comm.mpi.post import AFTER_S, SOON_S, Post
from meshwright.comm.mpi.reductions import exact

# In the order of the table in quick.c.
_CALLS = ("Allreduce", "Reduce", "Reduce_scatter_block", "Allgather", "Alltoallv", "Bcast", "Isend", "Irecv", "Test", "Wait", "Iprobe",
          "Sendrecv", "Reduce_local", "Gatherv")  # fmt: skip
_SUMS = ("all_reduce", "reduce", "reduce_scatter")  # the first of its operations
_handle: Callable[[Any], int] = MPI._handleof
# As DLPack says them: a code, and bits.
_DTYPES = {
    torch.float32: (2, 32), torch.float64: (2, 64), torch.bool: (6, 8), torch.complex64: (5, 64), torch.complex128: (5, 128),
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64),
}  # fmt: skip
Method = Callable[..., Any]


class Quick:
    """The compiled module, or that there is none."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Collective: one rank of every node compiles it if it must."""
        node = library.node()
        pointers = MPI._sizeof(MPI.COMM_WORLD) == ctypes.sizeof(ctypes.c_void_p)
        path = node.bcast(compiled(environ, pointers) if node.Get_rank() == 0 else None)
        self.module = path and _bound(path)

    def before(self, name: str) -> Callable[[Method], Method]:
        """What the module can do of an operation is done by it, and the rest by the method."""
        return lambda method: self.module.Operation(name, method, *fields_of(name)) if self.module else method

    @property
    def stir(self) -> Any:
        """What moves messages on; None where it is not compiled."""
        return self.module.stir if self.module else None

    def state(self, comm: MPI.Comm, lane: Lane, post: Post, calls: Calls) -> Any:
        """What the module knows of a group. Collectives that may be quicker by shared memory are the methods' affair."""
        if not self.module:
            return None
        near = calls.near
        ways = []
        for kind, dtype, way in exact(comm.Get_size()):
            alike = sum(near.alike(op, way) << n for n, op in enumerate(_SUMS))
            ways.append((kind, _DTYPES[dtype], _handle(way.kind), _handle(way.op), way.kind.Get_size(), alike))

        def message(request: int, tensor: torch.Tensor, source: int, done: bool, code: int) -> Message:
            made = Message(post, MPI.Request.fromhandle(request), tensor, tensor, source)
            made.done, made.error = done, MPI.Exception(code) if code else None
            if not done and tensor.nbytes > SMALL:
                post.follow(made)
            return made

        limits = near.least, near.least_sum, calls.scatters_from, calls.reduces_from, buffers.most, SMALL
        watch = post, post.under_way, post.alarm.number, round(AFTER_S * 1e9), round(SOON_S * 1e9)
        return self.module.State(lane, near.settled, *watch, message, *limits, _handle(comm), comm.Get_rank(), comm.Get_size(), ways)


def _bound(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("quick", path)
    assert spec is not None and spec.loader is not None
    names = ctypes.CDLL(MPI.__file__)
    classes = vars(profiler), dist.Work, torch.Tensor, torch.nn.Parameter
    try:
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        addresses = tuple(ctypes.cast(getattr(names, f"MPI_{name}"), ctypes.c_void_p).value for name in _CALLS)
        dlpack = torch.Tensor.__dlpack_c_exchange_api__
        constants = _handle(MPI.BYTE), int(MPI.IN_PLACE), _handle(MPI.COMM_SELF), MPI.ANY_SOURCE, MPI.ANY_TAG, ROUNDS_TAG
        module.bind(addresses, *constants, dlpack, MPI.Exception, *classes, DONE)
    except (ImportError, AttributeError, ValueError):  # made for another machine; an MPI that hides its calls; a torch with another DLPack
        return None
    return module
