"""`bench comm`: measures this machine's collectives over every backend, and stores the fitted costs in its calibration."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from meshwright.cli.common import JsonFlag, log_progress, make_config, print_json, require_torch, stdout
from meshwright.core.backends import backend_traits
from meshwright.core.quantities import parse_bytes, show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.describe.collective_bench import CollectiveResult

app = typer.Typer(help="Measure this machine; what is learned goes into its calibration.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine; what is learned goes into its calibration."""


@app.command("comm")
def comm(
    nproc: Annotated[int, typer.Option("--nproc", help="Number of ranks.")] = 2,
    backends: Annotated[str | None, typer.Option("--backend", help="Like gloo,mpi; every one that is present by default.")] = None,
    operations: Annotated[str | None, typer.Option("--ops", help="Like all_reduce,all_gather; all by default.")] = None,
    algorithms: Annotated[str | None, typer.Option("--algorithms", help="Like flat,shared,two-level; all that apply by default.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Pretend that the ranks lie on so many nodes.")] = None,
    to: Annotated[str, typer.Option("--to", help="Largest message, up to what memory allows.")] = "64MB",
    seconds: Annotated[float, typer.Option("--seconds", help="For one operation and size.")] = 0.1,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the CSV, JSON and figure.")] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Put what was fitted into this machine's calibration.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Measure every collective by size, backend and algorithm: bandwidth, median, p95, p99; checks results and fits latency and cost per byte.

    Examples:
      meshwright bench comm
      meshwright bench comm --nproc 4 --backend gloo,mpi --ops all_reduce --to 1GB
      meshwright bench comm --nproc 4 --nodes 2 --algorithms flat,two-level
    """
    require_torch()
    from meshwright.orchestrate import Orchestrator, bench_comm, calibrate

    with Orchestrator(make_config(nproc=nproc), os.environ, log_progress) as orchestrator:
        cluster = orchestrator.cluster
        device = cluster.devices[0].kind
        names = tuple(operations.split(",")) if operations else bench_comm.OPERATIONS
        lie = bench_comm.count_ranks_per_node(nproc, nodes, cluster)
        routes = bench_comm.applicable_algorithms(nproc, lie, algorithms.split(",") if algorithms else None)
        request = bench_comm.BenchRequest(nproc, names, bench_comm.message_sizes(parse_bytes(to)), seconds, device, routes, lie)
        free = _free_memory_bytes() if device == "cpu" else min(d.memory_bytes for d in cluster.devices)
        bench_comm.check_request(request, free)
        chosen = bench_comm.available_backends(device, backends.split(",") if backends else None)
        points = bench_comm.measure_backends(request, chosen, orchestrator.fork_server, log_progress)
        lines = bench_comm.fit_by_operation(points)
        files = bench_comm.write_results(out or Path("runs") / f"bench-comm-{datetime.now():%Y%m%d-%H%M%S}", points, lines, cluster)
        kept = None
        if keep:
            learned = bench_comm.with_measured_collectives(orchestrator.calibration(), nproc, lines, bench_comm.timing_curves(points))
            kept = calibrate.save_to_cache(replace(learned, records=()), cluster, os.environ)  # records compare runs with the old fits
    result: dict[str, Any] = {
        "points": [vars(p) for p in points],
        "lines": {name: {"alpha_s": line.alpha_s, "bytes_per_s": line.bytes_per_s} for name, line in lines.items()},
        "files": files,
        "calibration": str(kept) if kept else None,
        "correct": all(p.correct for p in points),
    }
    if as_json:
        print_json(result)
    else:
        _print_results(points, result)
    if not result["correct"]:
        raise typer.Exit(1)


def _free_memory_bytes() -> int:
    """Host memory that is available, in bytes."""
    from meshwright.describe.discover import available_memory

    return available_memory()


def _print_results(measurements: list[CollectiveResult], result: dict[str, Any]) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("way", "operation"):
        table.add_column(column)
    for column in ("size", "median", "p95", "p99", "algorithm", "bus", "calls", ""):
        table.add_column(column, justify="right")
    before = ("", "")
    for p in measurements:
        if (p.backend, p.op) != before and before != ("", ""):
            table.add_section()
        times = (show_seconds(t) for t in (p.median_s, p.p95_s, p.p99_s))
        rates = (show_rate(r, "B/s") for r in (p.algorithm_bandwidth, p.bus_bandwidth))
        shown = (p.backend, p.op) if (p.backend, p.op) != before else ("", "")
        table.add_row(*shown, show_bytes(p.bytes), *times, *rates, str(p.calls), "" if p.correct else "[red]wrong[/red]")
        before = (p.backend, p.op)
    stdout.print(table)
    for name, line in result["lines"].items():
        stdout.print(f"{name}: {show_seconds(line['alpha_s'])} a call, then {show_rate(line['bytes_per_s'], 'B/s')} of what a rank must send")
    for backend in dict.fromkeys(p.backend.partition(":")[0] for p in measurements):
        for lacks, instead in backend_traits(backend).fallbacks:
            stdout.print(f"{backend} has no {lacks}: composed, {instead}")
    stdout.print(f"written: {', '.join(result['files'].values())}", soft_wrap=True)
    if result["calibration"]:
        stdout.print(f"kept in {result['calibration']}", soft_wrap=True)
