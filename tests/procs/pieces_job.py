"""What `mpirun` starts in tests: messages that go piece by piece, to a receiver who waits, from a sender who does something else meanwhile."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm import mpi

MESSAGES = 12
AWAY_S = 0.1
SIZE = 1 << 20  # numbers


def main(folder: str) -> None:
    torch.set_num_threads(1)
    mpi.register(timeout_s=60)
    dist.init_process_group("mpi")
    memory, took = torch.zeros(SIZE), []
    for _ in range(MESSAGES):
        dist.barrier()
        begun = time.perf_counter()
        if dist.get_rank() == 0:
            work = dist.isend(memory, 1)
            time.sleep(AWAY_S)
            work.wait()  # type: ignore[union-attr]  # rank 0 is in the group
        else:
            dist.recv(memory, 0)
        took.append(time.perf_counter() - begun)
    (Path(folder) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(took))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
