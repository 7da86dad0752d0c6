"""`bench comm`: measures the same collectives over every available backend; writes CSV, JSON and a figure, and fits α and β for the Calibration."""

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
from meshwright.core.calibration import AlphaBetaModel, Calibration, SizeCurve
from meshwright.core.cluster import Cluster
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError, RunError, unknown_name_error
from meshwright.core.plan import SyncPolicy
from meshwright.core.quantities import show_bytes
from meshwright.core.routes import ALGORITHMS, Route, has_two_levels, is_applicable
from meshwright.describe.collective_bench import BUFFERS_PER_RANK, CollectiveResult, RankTimings, measure_routes, merge_ranks
from meshwright.describe.collective_bench import OPERATIONS as OPERATIONS
from meshwright.describe.collective_bench import fit_by_operation as fit_by_operation
from meshwright.describe.collective_bench import timing_curves as timing_curves
from meshwright.execute.process_groups import composed_routes, shared_memory_group
from meshwright.launch import ForkServer, Rendezvous, WorkerPool, join_process_group, leave_process_group
from meshwright.launch.mpi_launcher import find_mpirun, mpirun_command, run_command
from meshwright.observe.bandwidth_figure import bandwidth_figure

ALL_ALGORITHMS = ("flat", *dict.fromkeys(name for names in ALGORITHMS.values() for name in names))


@dataclass(frozen=True)
class BenchRequest:
    """What `bench comm` measures: operations, message sizes, algorithms, ranks and the time budget."""

    ranks: int
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    budget_s: float
    device: str
    algorithms: tuple[str, ...] = ("flat",)
    ranks_per_node: tuple[int, ...] = ()  # ranks on each node, if there are several nodes or --nodes pretends so


def message_sizes(largest: int, smallest: int = 8) -> tuple[int, ...]:
    """Powers of eight from `smallest`, and `largest`."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 8
    return (*sizes, largest)


def check_request(request: BenchRequest, memory_bytes: int) -> None:
    """Raise RequestError for a request that cannot be measured, before anything is allocated."""
    for op in request.operations:
        if op not in OPERATIONS:
            raise unknown_name_error("operation", op, OPERATIONS)
    if request.ranks < 2:
        raise RequestError("bench comm measures messages between ranks, and --nproc is 1: use --nproc 2 or more")
    for name in request.algorithms:
        if name not in ALL_ALGORITHMS:
            raise unknown_name_error("algorithm", name, ALL_ALGORITHMS)
        if name == "two-level" and not has_two_levels(range(request.ranks), request.ranks_per_node):
            raise RequestError("two-level needs several nodes with equally many ranks: use --nodes 2 with --nproc 4 to pretend, or leave it out")
        if name == "shared" and not is_applicable(name, range(request.ranks), request.ranks_per_node):
            raise RequestError("shared needs all ranks on one node: use --nodes 1, or leave shared out")
    sharing = request.ranks if request.device == "cpu" else 1  # ranks that share the memory
    needed = int(max(request.sizes) * BUFFERS_PER_RANK) * sharing
    if needed > memory_bytes:
        raise RequestError(
            f"messages of {show_bytes(max(request.sizes))} on {request.ranks} ranks need {show_bytes(needed)}, "
            f"{show_bytes(memory_bytes)} are free: use --to {int(memory_bytes / BUFFERS_PER_RANK / sharing) // 10**6}MB or less"
        )


def available_backends(device: str, requested: Sequence[str] | None) -> list[str]:
    """The backends that can be measured on this machine; raises RequestError for a requested one that cannot."""
    present = [name for name, traits in BACKENDS.items() if _is_present(traits, device)]
    for name in requested or ():
        if name not in BACKENDS:
            raise unknown_name_error("backend", name, BACKENDS)
        if name not in present:
            raise RequestError(f"backend {name} is not present: {BACKENDS[name].install or 'it needs CUDA devices'}")
    return [name for name in requested or BACKENDS if name in present]


def _is_present(traits: BackendTraits, device: str) -> bool:
    return traits.is_installed and (not traits.launchers or find_mpirun() is not None) and ("cpu" in traits.devices or device in traits.devices)


def applicable_algorithms(ranks: int, ranks_per_node: Sequence[int], requested: Sequence[str] | None) -> tuple[str, ...]:
    """The requested algorithms, or all that apply to these ranks and nodes."""
    return tuple(requested or (a for a in ALL_ALGORITHMS if is_applicable(a, range(ranks), ranks_per_node)))


def count_ranks_per_node(ranks: int, num_nodes: int | None, cluster: Cluster) -> tuple[int, ...]:
    """The number of ranks on each node: as in the cluster, or `ranks` distributed evenly over `num_nodes` pretended nodes."""
    if num_nodes is None:
        return tuple(len(node.devices) for node in cluster.nodes)
    if not 1 <= num_nodes <= ranks:
        raise RequestError(f"--nodes {num_nodes}: {ranks} ranks need 1 to {ranks} nodes: change --nodes or --nproc")
    return tuple(ranks // num_nodes + (i < ranks % num_nodes) for i in range(num_nodes))


def measure_backends(
    request: BenchRequest, backends: Sequence[str], get_fork_server: Callable[[], ForkServer], log_progress: Callable[[str], None]
) -> list[CollectiveResult]:
    results: list[CollectiveResult] = []
    for backend in backends:
        log_progress(f"measuring {backend} on {request.ranks} ranks")
        by_mpirun = bool(backend_traits(backend).launchers)
        results += merge_ranks(backend, _measure_with_mpirun(request) if by_mpirun else _measure_with_workers(request, backend, get_fork_server()))
    return results


def _measure_with_workers(request: BenchRequest, backend: str, fork_server: ForkServer) -> list[list[RankTimings]]:
    with WorkerPool(fork_server, request.ranks) as workers:
        return workers.call("meshwright.orchestrate.bench_comm:measure_on_rank", {"request": asdict(request), "backend": backend}, timeout_s=1800)


def measure_on_rank(rank: int, world: int, init_method: str, request: dict[str, Any], backend: str) -> list[RankTimings]:
    """Measure on one rank. `init_method` is empty under MPI, whose ranks need no rendezvous."""
    bench, traits = BenchRequest(**request), backend_traits(backend)
    torch.set_num_threads(1)
    cuda = bench.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    join_process_group(Rendezvous(rank, world, init_method, backend, bench.device, rank))
    routes = comms_by_route(backend, bench.algorithms if traits.routable else ("flat",), bench.ranks_per_node)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda and "cuda" in traits.devices else torch.device("cpu")
    try:
        return measure_routes(routes, device, bench.operations, bench.sizes, bench.budget_s)
    finally:
        leave_process_group()


def comms_by_route(backend: str, algorithms: Sequence[str], ranks_per_node: Sequence[int], group: dist.ProcessGroup | None = None) -> dict[str, Comm]:
    """Route name → a Comm over all ranks that uses that algorithm; an operation that the algorithm lacks runs the backend's own. Collective."""
    flat, ranks = TorchComm(group or dist.group.WORLD, Ledger()), list(range(dist.get_world_size()))  # type: ignore[arg-type]
    routes = [Route(op, backend, 0, a) for op, op_algorithms in ALGORITHMS.items() for a in op_algorithms if a in algorithms]
    sync = SyncPolicy(routes=tuple(routes), ranks_per_node=tuple(ranks_per_node))
    memories = {backend: shared_memory_group([ranks], backend, sync)} if routes else {}
    routes = [r for r in routes if memories[backend].has(r.algorithm)]
    composed = composed_routes(memories, routes, Ledger())
    comms: dict[str, Comm] = {backend: flat} if "flat" in algorithms else {}
    for name in composed:
        ops = {r.op for r in routes if r.route_name == name}
        comms[name] = RoutedComm({backend: flat}, lambda op, _, name=name, ops=ops: name if op in ops else backend, composed)  # type: ignore[misc]
    return comms


def _measure_with_mpirun(request: BenchRequest) -> list[list[RankTimings]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "request.json").write_text(json.dumps(asdict(request)))
        command, environ = mpirun_command(request.ranks, {"OMP_NUM_THREADS": "1"})
        code = run_command([*command, sys.executable, "-m", "meshwright.orchestrate.bench_comm", folder], environ, sys.stderr)
        if code:
            raise RunError(f"mpirun exited with code {code}: its messages are above")
        ranks = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(request.ranks)]
    return [[RankTimings(t["op"], t["bytes"], tuple(t["seconds"]), t["correct"], t["way"]) for t in timings] for timings in ranks]


def _mpi_rank_main(folder: str) -> None:
    mpi.register()
    rank, world = (int(os.environ.get(a) or os.environ[b]) for a, b in (("OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")))
    timings = measure_on_rank(rank, world, "", json.loads((Path(folder) / "request.json").read_text()), "mpi")
    (Path(folder) / f"{rank}.json").write_text(json.dumps([asdict(t) for t in timings]))


def with_measured_collectives(
    calibration: Calibration, ranks: int, lines: Mapping[str, AlphaBetaModel], curves: Mapping[str, SizeCurve] | None = None
) -> Calibration:
    """The calibration with these measurements in place of the old ones at this number of ranks; other rank counts are unchanged."""
    nearest = calibration.rates_for(ranks)
    old = nearest if nearest.ranks == ranks else replace(nearest, collectives={}, curves={})
    other_curves = {name: curve for name, curve in old.curves.items() if name not in lines}
    new = replace(old, ranks=ranks, collectives={**old.collectives, **lines}, curves={**other_curves, **(curves or {})})
    layouts = sorted((*(r for r in calibration.layouts if r.ranks != ranks), new), key=lambda r: r.ranks)
    # No foreign load: a disturbed probe is measured again unasked, and these measurements must not be lost with it. Its error and basis stay.
    return replace(calibration, layouts=tuple(replace(r, foreign_load=0.0) for r in layouts))


def write_results(folder: Path, results: Sequence[CollectiveResult], lines: Mapping[str, AlphaBetaModel], cluster: Cluster) -> dict[str, str]:
    """Write comm.csv, comm.json and comm.svg; returns their paths by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "comm.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(CollectiveResult)])
        writer.writeheader()
        writer.writerows(asdict(p) for p in results)
    data = {"points": [asdict(p) for p in results], "lines": {k: asdict(v) for k, v in lines.items()}}
    (folder / "comm.json").write_text(json.dumps(data, indent=1) + "\n")
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for p in results:
        panels.setdefault(p.op, {}).setdefault(p.backend, []).append((float(p.bytes), p.bus_bandwidth))
    title = f"Bus bandwidth, {results[0].ranks} ranks on {cluster.nodes[0].name}"
    (folder / "comm.svg").write_text(bandwidth_figure(panels, title))
    return {kind: str(folder / f"comm.{kind}") for kind in ("csv", "json", "svg")}


if __name__ == "__main__":
    _mpi_rank_main(sys.argv[1])
