"""Rendezvous of ranks in a process group: by a file on one machine (no open port), by an address for adopted ranks. Timeouts are explicit."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.core.backends import backend_traits
from meshwright.core.errors import RequestError, RunError


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


def join_process_group(rendezvous: Rendezvous) -> None:
    """Create the default process group. A world of one has none."""
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
    try:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=timeout, device_id=device)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"rank {rank} could not join the other ranks at {init_method}: {str(error).splitlines()[0]}") from error


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
