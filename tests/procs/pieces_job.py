"""What `mpirun` starts in tests: messages that go piece by piece, from a sender who stays out of MPI until it hears that they have arrived."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm import mpi
from meshwright.comm.mpi.post import Followed

MESSAGES = 4
PATIENCE_S = 30.0  # as long as it takes: what is asked is whether a message arrives, not how soon
SIZE = 1 << 20  # numbers


def main(folder: str) -> None:
    torch.set_num_threads(1)
    mpi.register(timeout_s=60)
    dist.init_process_group("mpi")
    from meshwright.comm.mpi import backend

    memory, arrived, helped, quick = torch.zeros(SIZE), [], [], backend._post.stir

    def stir(under_way: set[Followed], nap: float) -> bool:
        helped.append(quick(under_way, nap))  # type: ignore[misc]  # the test does not start this job where nothing is compiled
        return helped[-1]

    backend._post.stir = stir
    for number in range(MESSAGES):
        dist.barrier()
        letter = Path(folder) / f"message-{number}"
        if dist.get_rank() == 0:
            work = dist.isend(memory, 1)
            until = time.monotonic() + PATIENCE_S
            while not letter.exists() and time.monotonic() < until:
                time.sleep(1e-3)
            arrived.append(letter.exists())
            work.wait()  # type: ignore[union-attr]  # rank 0 is in the group
        else:
            dist.recv(memory, 0)
            letter.touch()
    (Path(folder) / f"rank-{dist.get_rank()}.json").write_text(json.dumps([arrived, helped]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
