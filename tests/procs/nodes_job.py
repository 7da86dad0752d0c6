"""One rank of `test_nodes.py`: measures every way between two nodes, selects, and trains by what was selected. Writes what it found as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import Ledger, TorchComm, open_window
from meshwright.core.calibration import Rates
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.core.routes import Route
from meshwright.core.serial import to_data
from meshwright.cost.selection import routes
from meshwright.describe.collectives import curves, fitted, measure_ways, over_ranks
from meshwright.execute.groups import shared_memory_group
from meshwright.launch import Rendezvous, join, leave
from meshwright.orchestrate.bench_comm import algorithms_for, every_way

NODES = (2, 2)
WORLD = sum(NODES)
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)


def main(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    meetings = iter(f"tcp://{address}:{port}" for port in range(29600, 29700))
    join(Rendezvous(rank, WORLD, next(meetings), timeout_s=60))
    everyone = TorchComm(dist.group.WORLD, Ledger())  # type: ignore[arg-type]
    levels = SyncPolicy(routes=(Route("all_reduce", "gloo", 0, "two-level"),), nodes=NODES, timeout_s=60)
    shares = {
        "all": open_window(everyone, range(WORLD), 60.0) is not None,
        "near": shared_memory_group([list(range(WORLD))], "gloo", levels).has("two-level"),
    }
    rates, points = _measured()
    leave()
    chosen = routes(rates, ["gloo"], ["all_reduce"], NODES)
    runs = [_train(rank, next(meetings), sync) for sync in (SyncPolicy(), SyncPolicy(routes=chosen, nodes=NODES))]
    found = {"shares": shares, "points": points, "routes": [asdict(r) for r in chosen], "runs": runs}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def _measured() -> tuple[Rates, list[Any]]:
    """As `bench comm` does it."""
    ways = every_way("gloo", algorithms_for(WORLD, NODES, None), NODES)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, measure_ways(ways, torch.device("cpu"), ["all_reduce"], SIZES, 0.1))
    points = over_ranks("", every)
    return Rates(WORLD, 1, {}, (), 0.0, fitted(points), curves=curves(points)), [asdict(p) for p in points]


def _train(rank: int, meeting: str, sync: SyncPolicy) -> dict[str, Any]:
    from tests.procs.jobs import train_curve

    plan = Plan("gpt-tiny", 8, Mesh(dp=WORLD), memory=MemoryPolicy(precision="fp64"), sync=sync)
    return train_curve(rank, WORLD, meeting, to_data(plan), {"zoo": "gpt-tiny"}, steps=3, clip=1.0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
