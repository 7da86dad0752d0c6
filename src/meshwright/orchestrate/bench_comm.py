"""`bench comm`: every backend there is measures the same collectives; a table, a CSV and a figure; α and β go into the Calibration."""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import Ledger, RoutedComm, TorchComm, mpi
from meshwright.core.backends import BACKENDS, BackendTraits, backend_traits
from meshwright.core.calibration import Calibration, Line, Points
from meshwright.core.cluster import Cluster
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError, RunError, unknown
from meshwright.core.plan import SyncPolicy
from meshwright.core.routes import ALGORITHMS, Route, applies, has_levels
from meshwright.core.units import show_bytes
from meshwright.describe.collectives import HELD, OPERATIONS, Point, Timed, curves, fitted, measure_ways, over_ranks
from meshwright.execute.groups import composed_ways, shared_memory_group
from meshwright.launch import Nursery, Rendezvous, Workers, join, leave
from meshwright.launch.mpi import find, mpirun, run
from meshwright.observe.bandwidth import bandwidth_figure

__all__ = [
    "OPERATIONS",
    "Request",
    "algorithms_for",
    "check_request",
    "corrected",
    "curves",
    "every_way",
    "fitted",
    "measure",
    "on_as_many",
    "present",
    "sizes_to",
    "write_results",
]
EVERY = ("flat", *dict.fromkeys(name for names in ALGORITHMS.values() for name in names))


@dataclass(frozen=True)
class Request:
    """What to measure."""

    ranks: int
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    budget_s: float
    device: str
    algorithms: tuple[str, ...] = ("flat",)
    nodes: tuple[int, ...] = ()  # ranks on each node, where there are several or it is to be pretended


def sizes_to(largest: int, smallest: int = 8) -> tuple[int, ...]:
    """Powers of eight from `smallest`, and `largest`."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 8
    return (*sizes, largest)


def check_request(request: Request, memory_bytes: int) -> None:
    """Refuse what cannot be before anything is allocated."""
    for op in request.operations:
        if op not in OPERATIONS:
            raise unknown("operation", op, OPERATIONS)
    if request.ranks < 2:
        raise RequestError("one rank has nobody to talk to: use --nproc 2 or more")
    for name in request.algorithms:
        if name not in EVERY:
            raise unknown("algorithm", name, EVERY)
        if name == "two-level" and not has_levels(range(request.ranks), request.nodes):
            raise RequestError("two-level needs several nodes with equally many ranks: use --nodes 2 with --nproc 4 to pretend, or leave it out")
        if name == "shared" and not applies(name, range(request.ranks), request.nodes):
            raise RequestError("memory is shared on one node alone: use --nodes 1, or leave shared out")
    needed = int(max(request.sizes) * HELD) * (request.ranks if request.device == "cpu" else 1)
    if needed > memory_bytes:
        most = int(memory_bytes / HELD / (request.ranks if request.device == "cpu" else 1))
        raise RequestError(
            f"messages of {show_bytes(max(request.sizes))} on {request.ranks} ranks need {show_bytes(needed)}, "
            f"{show_bytes(memory_bytes)} are free: use --to {most // 10**6}MB or less"
        )


def present(device: str, asked: Sequence[str] | None) -> list[str]:
    """The backends that can be measured here; RequestError for one that was asked for and cannot."""
    there = {name: _is_present(traits, device) for name, traits in BACKENDS.items()}
    for name in asked or ():
        if name not in BACKENDS:
            raise unknown("backend", name, BACKENDS)
        if not there[name]:
            how = BACKENDS[name].install or "it needs CUDA devices"
            raise RequestError(f"backend {name} is not present: {how}")
    return [name for name in asked or BACKENDS if there[name]]


def _is_present(traits: BackendTraits, device: str) -> bool:
    return traits.is_installed and (not traits.launchers or find() is not None) and ("cpu" in traits.devices or device in traits.devices)


def algorithms_for(ranks: int, nodes: Sequence[int], asked: Sequence[str] | None) -> tuple[str, ...]:
    """All that apply, unless some are asked for."""
    return tuple(asked) if asked else tuple(a for a in EVERY if applies(a, range(ranks), nodes))


def on_as_many(ranks: int, nodes: int | None, cluster: Cluster) -> tuple[int, ...]:
    """How many of the ranks each node has: as the cluster says, or dealt out evenly over so many as are pretended."""
    if nodes is None:
        return tuple(len(node.devices) for node in cluster.nodes)
    if not 1 <= nodes <= ranks:
        raise RequestError(f"--nodes {nodes}: {ranks} ranks lie on 1 to {ranks} nodes: change one of them")
    return tuple(ranks // nodes + (i < ranks % nodes) for i in range(nodes))


def measure(request: Request, backends: Sequence[str], nursery: Callable[[], Nursery], say: Callable[[str], None]) -> list[Point]:
    found: list[Point] = []
    for backend in backends:
        say(f"measuring {backend} on {request.ranks} ranks")
        every = _by_mpirun(request) if backend_traits(backend).launchers else _by_workers(request, backend, nursery())
        found += over_ranks(backend, every)
    return found


def _by_workers(request: Request, backend: str, nursery: Nursery) -> list[list[Timed]]:
    with Workers(nursery, request.ranks) as workers:
        return workers.call("meshwright.orchestrate.bench_comm:rank", {"request": asdict(request), "backend": backend}, timeout_s=1800)


def rank(rank: int, world: int, meeting: str, request: dict[str, Any], backend: str) -> list[Timed]:
    """One rank of a measurement; MPI's ranks know where they are."""
    what = Request(**request)
    torch.set_num_threads(1)
    cuda = what.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    join(Rendezvous(rank, world, meeting, backend, what.device, rank))
    ways = every_way(backend, what.algorithms if backend_traits(backend).routable else ("flat",), what.nodes)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda and "cuda" in backend_traits(backend).devices else torch.device("cpu")
    try:
        return measure_ways(ways, device, what.operations, what.sizes, what.budget_s)
    finally:
        leave()


def every_way(backend: str, algorithms: Sequence[str], nodes: Sequence[int], group: dist.ProcessGroup | None = None) -> dict[str, Comm]:
    """The world over one backend, by each of these algorithms; an operation that an algorithm lacks is the backend's own. Collective."""
    own, ranks = TorchComm(group or dist.group.WORLD, Ledger()), list(range(dist.get_world_size()))  # type: ignore[arg-type]
    asked = [Route(op, backend, 0, a) for op, having in ALGORITHMS.items() for a in having if a in algorithms]
    sync = SyncPolicy(routes=tuple(asked), nodes=tuple(nodes))
    memories = {backend: shared_memory_group([ranks], backend, sync)} if asked else {}
    asked = [r for r in asked if memories[backend].has(r.algorithm)]
    composed = composed_ways(memories, asked, Ledger())
    found: dict[str, Comm] = {backend: own} if "flat" in algorithms else {}
    for name in composed:
        having = {r.op for r in asked if r.way == name}
        found[name] = RoutedComm({backend: own}, lambda op, _, name=name, having=having: name if op in having else backend, composed)  # type: ignore[misc]
    return found


def _by_mpirun(request: Request) -> list[list[Timed]]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "request.json").write_text(json.dumps(asdict(request)))
        command, environ = mpirun(request.ranks, {"OMP_NUM_THREADS": "1"})
        code = run([*command, sys.executable, "-m", "meshwright.orchestrate.bench_comm", folder], environ, sys.stderr)
        if code:
            raise RunError(f"mpirun ended with code {code}: what it said is above")
        read = [json.loads((home / f"{r}.json").read_text()) for r in range(request.ranks)]
    return [[Timed(t["op"], t["bytes"], tuple(t["seconds"]), t["correct"], t["way"]) for t in one] for one in read]


def _mpi_rank(folder: str) -> None:
    mpi.register()
    number, world = (int(os.environ.get(a) or os.environ[b]) for a, b in (("OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")))
    found = rank(number, world, "", json.loads((Path(folder) / "request.json").read_text()), "mpi")
    (Path(folder) / f"{number}.json").write_text(json.dumps([asdict(t) for t in found]))


def corrected(calibration: Calibration, ranks: int, lines: Mapping[str, Line], points: Mapping[str, Points] | None = None) -> Calibration:
    """With what was measured at this number of ranks in place of what was there; other numbers of ranks are left as they are."""
    nearest = calibration.layout(ranks)
    known = nearest if nearest.ranks == ranks else replace(nearest, collectives={}, curves={})
    left = {name: curve for name, curve in known.curves.items() if name not in lines}
    mine = replace(known, ranks=ranks, collectives={**known.collectives, **lines}, curves={**left, **(points or {})})
    return replace(calibration, layouts=tuple(sorted((*(r for r in calibration.layouts if r.ranks != ranks), mine), key=lambda r: r.ranks)))


def write_results(folder: Path, points: Sequence[Point], lines: Mapping[str, Line], cluster: Cluster) -> dict[str, str]:
    """comm.csv, comm.json and comm.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "comm.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Point)])
        writer.writeheader()
        writer.writerows(asdict(p) for p in points)
    data = {"points": [asdict(p) for p in points], "lines": {k: asdict(v) for k, v in lines.items()}}
    (folder / "comm.json").write_text(json.dumps(data, indent=1) + "\n")
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for p in points:
        panels.setdefault(p.op, {}).setdefault(p.backend, []).append((float(p.bytes), p.bus_bandwidth))
    title = f"Bus bandwidth, {points[0].ranks} ranks on {cluster.nodes[0].name}"
    (folder / "comm.svg").write_text(bandwidth_figure(panels, title))
    return {kind: str(folder / f"comm.{kind}") for kind in ("csv", "json", "svg")}


if __name__ == "__main__":
    _mpi_rank(sys.argv[1])
