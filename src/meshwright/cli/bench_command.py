"""`bench comm`: measures this machine's collectives over every backend, and stores the fitted costs in its calibration."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, print_line, require_torch, stdout
from meshwright.core.backends import backend_traits
from meshwright.core.quantities import parse_bytes, show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.describe.collective_bench import CollectiveResult

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine, and store the results in its calibration, from which plans are estimated.

    Example: meshwright bench comm
    """


@app.command("comm")
def comm(
    nproc: Annotated[int, typer.Option("--nproc", help="Number of ranks.")] = 2,
    backends: Annotated[str | None, typer.Option("--backend", help="Backends to measure, like gloo,mpi; all that are installed by default.")] = None,
    operations: Annotated[str | None, typer.Option("--ops", help="Collectives to measure, like all_reduce,all_gather; all by default.")] = None,
    algorithms: Annotated[str | None, typer.Option("--algorithms", help="Of flat,shared,two-level; all that apply by default.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Treat the ranks as if they were on this many nodes.")] = None,
    to: Annotated[str, typer.Option("--to", help="Largest message, like 64MB or 1GB; it must fit into memory.")] = "64MB",
    seconds: Annotated[float, typer.Option("--seconds", help="Time for each operation and message size.")] = 0.1,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the CSV, JSON and figure; runs/bench-comm-TIME by default.")] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Store the fitted costs in this machine's calibration.")] = True,
    as_json: options.Json = False,
) -> None:
    """Measure the collectives by size, backend and algorithm: bandwidth, median, p95, p99. Checks results; fits latency and cost per byte.

    Examples:
      meshwright bench comm
      meshwright bench comm --nproc 4 --backend gloo,mpi --ops all_reduce --to 1GB
      meshwright bench comm --nproc 4 --nodes 2 --algorithms flat,two-level
    """
    require_torch()
    from meshwright.describe.discover import available_memory
    from meshwright.orchestrate import Orchestrator, bench_comm, calibrate

    with Orchestrator(options.make_config(nproc=nproc), os.environ, log_progress) as orchestrator:
        cluster = orchestrator.cluster
        device = cluster.devices[0].kind
        names = tuple(operations.split(",")) if operations else bench_comm.OPERATIONS
        ranks_per_node = bench_comm.count_ranks_per_node(nproc, nodes, cluster)
        routes = bench_comm.applicable_algorithms(nproc, ranks_per_node, algorithms.split(",") if algorithms else None)
        request = bench_comm.BenchRequest(nproc, names, bench_comm.message_sizes(parse_bytes(to)), seconds, device, routes, ranks_per_node)
        bench_comm.check_request(request, available_memory() if device == "cpu" else min(d.memory_bytes for d in cluster.devices))
        available = bench_comm.available_backends(device, backends.split(",") if backends else None)
        points = bench_comm.measure_backends(request, available, orchestrator.fork_server, log_progress)
        lines = bench_comm.fit_by_operation(points)
        files = bench_comm.write_results(out or Path("runs") / f"bench-comm-{datetime.now():%Y%m%d-%H%M%S}", points, lines, cluster)
        stored = None
        if keep:
            fitted = bench_comm.with_measured_collectives(orchestrator.calibration(), nproc, lines, bench_comm.timing_curves(points))
            stored = calibrate.save_to_cache(replace(fitted, records=()), cluster, os.environ)  # records compare runs with the old fits
    result: dict[str, Any] = {
        "points": [vars(p) for p in points],
        "lines": {name: {"alpha_s": line.alpha_s, "bytes_per_s": line.bytes_per_s} for name, line in lines.items()},
        "files": files,
        "calibration": str(stored) if stored else None,
        "correct": all(p.correct for p in points),
    }
    if as_json:
        print_json(result)
    else:
        _print_results(points, result)
    if not result["correct"]:
        raise typer.Exit(1)


def _print_results(points: list[CollectiveResult], result: dict[str, Any]) -> None:
    table = make_table("route", "operation", ">size", ">median", ">p95", ">p99", ">algorithm B/s", ">bus B/s", ">calls", ">")
    for (route, op), group in groupby(points, key=lambda p: (p.backend, p.op)):
        table.add_section()
        for i, p in enumerate(group):
            times = (show_seconds(t) for t in (p.median_s, p.p95_s, p.p99_s))
            rates = (show_rate(r, "B/s") for r in (p.algorithm_bandwidth, p.bus_bandwidth))
            names = ("", "") if i else (route, op)
            table.add_row(*names, show_bytes(p.bytes), *times, *rates, str(p.calls), "" if p.correct else "[red]wrong[/red]")
    stdout.print(table)
    for name, line in result["lines"].items():
        stdout.print(f"{name}: {show_seconds(line['alpha_s'])} a call, and {show_rate(line['bytes_per_s'], 'B/s')} for the bytes that a rank sends")
    for backend in dict.fromkeys(p.backend.partition(":")[0] for p in points):
        for lacks, instead in backend_traits(backend).fallbacks:
            stdout.print(f"{backend} has no {lacks}: {instead}")
    print_line(f"written: {', '.join(result['files'].values())}")
    if result["calibration"]:
        print_line(f"stored in {result['calibration']}")
