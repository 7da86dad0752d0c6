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
from meshwright.core.serialization import to_data
from meshwright.cost.route_selection import choose_routes
from meshwright.describe.collective_bench import fit_by_operation, measure_routes, merge_ranks, timing_curves
from meshwright.execute.process_groups import shared_memory_group
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.orchestrate.bench_comm import applicable_algorithms, comms_by_route

NODES = (2, 2)
WORLD = sum(NODES)
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)


def main(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    init_methods = iter(f"tcp://{address}:{port}" for port in range(29600, 29700))
    join_process_group(Rendezvous(rank, WORLD, next(init_methods), timeout_s=60))
    everyone = TorchComm(dist.group.WORLD, Ledger())  # type: ignore[arg-type]
    levels = SyncPolicy(routes=(Route("all_reduce", "gloo", 0, "two-level"),), ranks_per_node=NODES, timeout_s=60)
    shares = {
        "all": open_window(everyone, range(WORLD), 60.0) is not None,
        "near": shared_memory_group([list(range(WORLD))], "gloo", levels).has("two-level"),
    }
    rates, points = _measured()
    leave_process_group()
    chosen = choose_routes(rates, ["gloo"], ["all_reduce"], NODES)
    runs = [_train(rank, next(init_methods), sync) for sync in (SyncPolicy(), SyncPolicy(routes=chosen, ranks_per_node=NODES))]
    found = {"shares": shares, "points": points, "routes": [asdict(r) for r in chosen], "runs": runs}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def _measured() -> tuple[Rates, list[Any]]:
    """As `bench comm` does it."""
    ways = comms_by_route("gloo", applicable_algorithms(WORLD, NODES, None), NODES)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, measure_routes(ways, torch.device("cpu"), ["all_reduce"], SIZES, 0.1))
    points = merge_ranks("", every)
    return Rates(WORLD, 1, {}, (), 0.0, fit_by_operation(points), curves=timing_curves(points)), [asdict(p) for p in points]


def _train(rank: int, init_method: str, sync: SyncPolicy) -> dict[str, Any]:
    from tests.procs.jobs import train_curve

    plan = Plan("gpt-tiny", 8, Mesh(dp=WORLD), memory=MemoryPolicy(precision="fp64"), sync=sync)
    return train_curve(rank, WORLD, init_method, to_data(plan), {"zoo": "gpt-tiny"}, steps=3, clip=1.0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
