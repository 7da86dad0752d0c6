"""MPI as torch.distributed's backend `mpi`, on torch's stock wheels: `register()`, then `init_process_group("mpi")` under mpirun.

torch knows the name, but its wheels are built without MPI: `register` supplies the class that torch looks up. DDP, FSDP2, DTensor,
pipelining and DCP then run over it unchanged. MPI is not loaded before a group is made.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

_Store: Any = Store


class _ProcessGroupFactory:
    """What torch calls for backend `mpi`: every member of a group calls `create` with the group's ranks; an empty list means all ranks."""

    @staticmethod
    def create(ranks: list[int]) -> dist.ProcessGroup:
        from meshwright.comm.mpi.mpi_group import make_group

        return make_group(ranks)


class _NoStore(_Store):  # type: ignore[misc]  # torch's stubs want their own signatures
    """What torch gives the default group `mpi` for a store, with a reason instead of torch's internal assertion."""

    _kept: ClassVar[list[_NoStore]] = []  # torch keeps the C++ part only

    def __init__(self) -> None:
        super().__init__()
        self._kept.append(self)

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "the default group is mpi, which has no store: make gloo the default, init_process_group('gloo'), and make the group of MPI with "
            "new_group(backend='mpi')"
        )

    set = get = add = wait = check = compare_set = delete_key = _refuse


def register(timeout_s: float = 600.0) -> None:
    """Make `mpi` a backend of this process. A rank that keeps the others waiting for `timeout_s` is named, and the job is ended.

    A torch that was built with MPI keeps its own backend.
    """
    from meshwright.comm.mpi import mpi_library

    mpi_library.timeout_s = timeout_s
    module: Any = distributed_c10d
    if not dist.is_mpi_available():
        module.ProcessGroupMPI = _ProcessGroupFactory
        module._MPI_AVAILABLE = True
        module.Store = _NoStore  # torch makes one for no other backend
