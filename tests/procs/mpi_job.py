"""What `mpirun` starts in tests: every check over backend `mpi` in one start; each rank writes what it found as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import mpi
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.core.routes import Route
from meshwright.core.serial import to_data


def main(folder: str, full: bool) -> None:
    from tests.procs import collectives, contract

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mpi.register(timeout_s=60)
    dist.init_process_group("mpi")
    rank = dist.get_rank()
    found = {
        "backend": dist.get_backend(),
        "conform": collectives.tell(lambda: collectives.over_torch(full)),
        "calls": collectives.tell(contract.calls),
        "counts": collectives.tell(_large_counts),
        "engines": collectives.tell(lambda: contract.engines(folder)),
    }
    dist.destroy_process_group()
    found["routed"] = collectives.tell(lambda: _routed(rank, folder))
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))


PLANS = {
    "data parallel": Plan("gpt-tiny", 8, Mesh(dp=4)),
    "ZeRO-2 hybrid": Plan("gpt-tiny", 8, Mesh(dp=2, shard=2), memory=MemoryPolicy(2)),
    "ZeRO-3": Plan("gpt-tiny", 8, Mesh(shard=4), memory=MemoryPolicy(3, ("blocks.0", "blocks.1"))),
}
ROUTES = (
    Route("all_reduce", "mpi", 10_000),
    Route("all_gather", "mpi"),
    Route("reduce_scatter", "mpi"),
    Route("reduce_scatter", "mpi", 5_000, "shared"),
)


def _routed(rank: int, folder: str) -> dict[str, list[Any]]:
    """Every plan over gloo alone, and with some of its calls over MPI: losses, norms, state and ledger of both."""
    from tests.procs.jobs import train_curve

    def run(name: str, routes: tuple[Route, ...]) -> dict[str, Any]:
        plan = replace(PLANS[name], sync=SyncPolicy(bucket_bytes=50_000, first_bucket_bytes=5_000, routes=routes))
        meeting = f"file://{folder}/{name.replace(' ', '-')}-{len(routes)}"
        return train_curve(rank, 4, meeting, to_data(plan), {"zoo": "gpt-tiny"}, steps=3, clip=1.0)

    return {name: [run(name, ()), run(name, ROUTES)] for name in PLANS}


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
