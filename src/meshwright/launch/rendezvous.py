"""Rendezvous of ranks in a process group: by a file on one machine (no open port), by an address for adopted ranks. Timeouts are explicit."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from meshwright.core.backends import backend_traits
from meshwright.core.errors import RequestError, RunError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CONNECT_TIMEOUT_S = 600.0  # ranks of one job may start minutes apart on a busy machine


@dataclass(frozen=True)
class Rendezvous:
    """How to reach the other ranks. `init_method` is 'file://PATH' or 'tcp://HOST:PORT'."""

    rank: int
    world: int
    init_method: str
    backend: str = "gloo"
    device: str = "cpu"
    local_rank: int = 0
    timeout_s: float = 120.0


def connect_store(rendezvous: Rendezvous) -> Store | None:
    """The key-value store of the ranks, which rank 0 holds; None for a world of one and over MPI, which need none. Blocks until all are connected."""
    if rendezvous.world == 1 or backend_traits(rendezvous.backend).launchers:
        return None
    timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
    try:
        store, _, _ = next(torch_rendezvous(rendezvous.init_method, rendezvous.rank, rendezvous.world, timeout=timeout))  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise _join_error(rendezvous, error) from error
    return store  # type: ignore[no-any-return]


def join_process_group(rendezvous: Rendezvous, store: Store | None = None) -> None:
    """Create the default process group, over a store that is connected already or by the address. A world of one has none."""
    rank, world, init_method, backend = rendezvous.rank, rendezvous.world, rendezvous.init_method, rendezvous.backend
    if world == 1:
        return
    if backend not in dist.Backend.backend_list:
        raise RequestError(f"backend '{backend}' is not known to this torch: use one of {', '.join(dist.Backend.backend_list)}")
    if init_method.startswith("file://") or "127.0.0.1" in init_method:
        # Ranks of one machine use loopback; Meshwright listens on no other interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    traits = backend_traits(backend)
    if traits.launchers:
        _join_mpi(rendezvous)
        return
    device = torch.device("cuda", rendezvous.local_rank) if "cpu" not in traits.devices else None
    if device is not None:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=rendezvous.timeout_s)
    address = {"init_method": init_method} if store is None else {"store": store}
    try:
        dist.init_process_group(backend, **address, rank=rank, world_size=world, timeout=timeout, device_id=device)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise _join_error(rendezvous, error) from error


def _join_error(rendezvous: Rendezvous, error: Exception) -> RunError:
    return RunError(f"rank {rendezvous.rank} could not join the other ranks at {rendezvous.init_method}: {str(error).splitlines()[0]}")


def _join_mpi(rendezvous: Rendezvous) -> None:
    """Join an MPI process group: MPI numbers the ranks itself, so there is no rendezvous address."""
    if rendezvous.device == "cuda":
        torch.cuda.set_device(rendezvous.local_rank % max(torch.cuda.device_count(), 1))
    dist.init_process_group(rendezvous.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if (rank, world) != (rendezvous.rank, rendezvous.world):
        leave_process_group()
        raise RequestError(
            f"the launcher says rank {rendezvous.rank} of {rendezvous.world}, MPI says rank {rank} of {world}: "
            "start with mpirun (or meshwright train --launcher mpi), of the MPI that mpi4py uses"
        )


def leave_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((n for n in ("lo", "lo0") if n in names), "")
