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
    if rendezvous.world == 1:
        return
    if rendezvous.backend not in dist.Backend.backend_list:
        raise RequestError(f"backend '{rendezvous.backend}' is not known to this torch: use one of {', '.join(dist.Backend.backend_list)}")
    if rendezvous.init_method.startswith("file://") or "127.0.0.1" in rendezvous.init_method:
        # Ranks of one machine use loopback; Meshwright listens on no other interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    traits = backend_traits(rendezvous.backend)
    if traits.launchers:
        _join_launched(rendezvous)
        return
    device = torch.device("cuda", rendezvous.local_rank) if "cpu" not in traits.devices else None
    if device is not None:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            rendezvous.backend,
            init_method=rendezvous.init_method,
            rank=rendezvous.rank,
            world_size=rendezvous.world,
            timeout=timedelta(seconds=rendezvous.timeout_s),
            device_id=device,
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(f"rank {rendezvous.rank} could not join the other ranks at {rendezvous.init_method}: {str(error).splitlines()[0]}") from error


def _join_launched(place: Rendezvous) -> None:
    """Join an MPI process group: MPI numbers the ranks itself, so there is no rendezvous address."""
    if place.device == "cuda":
        torch.cuda.set_device(place.local_rank % max(torch.cuda.device_count(), 1))
    dist.init_process_group(place.backend)
    found = dist.get_rank(), dist.get_world_size()
    if found != (place.rank, place.world):
        leave_process_group()
        raise RequestError(
            f"the launcher says rank {place.rank} of {place.world}, MPI says rank {found[0]} of {found[1]}: "
            "start with mpirun (or meshwright train --launcher mpi), of the MPI that mpi4py uses"
        )


def leave_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((n for n in ("lo", "lo0") if n in names), "")
