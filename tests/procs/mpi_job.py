"""What `mpirun` starts in tests: every check over backend `mpi` in one start; each rank writes what it found as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm import mpi


def main(folder: str, full: bool) -> None:
    from tests.procs import collectives, contract

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mpi.register(timeout_s=60)
    dist.init_process_group("mpi")
    found = {
        "backend": dist.get_backend(),
        "conform": collectives.tell(lambda: collectives.over_torch(full)),
        "calls": collectives.tell(contract.calls),
        "counts": collectives.tell(_large_counts),
        "engines": collectives.tell(lambda: contract.engines(folder)),
    }
    (Path(folder) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _large_counts() -> list[str]:
    """As if MPI counted to 100: what lies beyond is cut into pieces or described by larger types."""
    from meshwright.comm.mpi import buffers
    from tests.procs import collectives

    kept, buffers.most = buffers.most, 100
    buffers._UNIT = 64
    buffers.of_bytes.cache_clear()
    try:
        _, wrong = collectives.conform(lambda groups: _comm(groups), (torch.complex64,), ("plain",))
    finally:
        buffers.most = kept
    return wrong


def _comm(groups: list[list[int]]):  # type: ignore[no-untyped-def]
    from meshwright.comm import Ledger, TorchComm

    return TorchComm(dist.new_subgroups_by_enumeration(groups)[0], Ledger())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main(sys.argv[1], sys.argv[2:] == ["full"])
