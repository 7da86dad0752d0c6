"""Ways in which a worker can behave, for the tests of the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm import Ledger, TorchComm
from meshwright.core.errors import RequestError
from meshwright.describe.collective_probe import measure_in_turns
from meshwright.launch import Rendezvous, join_process_group, leave_process_group


def whoami(rank: int, world: int, init_method: str) -> tuple[int, int]:
    return rank, os.getpid()


def fail_on(rank: int, world: int, init_method: str, who: int) -> None:
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=100))
    if rank == who:
        time.sleep(0.2)
        raise ValueError("planted")
    dist.all_reduce(torch.ones(1))


def die_on(rank: int, world: int, init_method: str, who: int) -> None:
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=100))
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def stop_on(rank: int, world: int, init_method: str, who: int, how: str) -> None:
    """One rank does not come to a collective that the others wait in."""
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=5))
    dist.all_reduce(torch.ones(1))
    if rank == who:
        os.kill(os.getpid(), signal.SIGSTOP) if how == "SIGSTOP" else time.sleep(600)
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int, world: int, init_method: str, who: int) -> None:
    if rank == who:
        time.sleep(600)


def ignore_everything(rank: int, world: int, init_method: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(600)


def speeds_in_turns(rank: int, world: int, init_method: str, who: int, control_group: str) -> list[float]:
    """Rank `who` measures inside a control group, which its caller has limited."""
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=120))
    group = Path(control_group)
    if rank == who:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    speeds = measure_in_turns(TorchComm(dist.group.WORLD, Ledger()))  # type: ignore[arg-type]
    if rank == who:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    leave_process_group()
    return speeds


def refuse(rank: int, world: int, init_method: str) -> None:
    raise RequestError("change this to that")
