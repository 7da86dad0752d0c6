"""Is the selected way of an all-reduce as quick as the best single one? Measured afresh: every way and the selected one, by turns in one run.

    python bench/selection.py [--ranks 2,4] [--rounds 240] [--nodes 2] [--json]

First every way of both backends is measured as `bench comm` does it and routes are made from the points. Then, size by size, all ways and the
routed group are timed by turns, in an order that changes from round to round, and each is put into a ratio with the others of its round; ways
that are far from the best are left out after a few rounds. The best single way is that of the second measurement, so a choice made from noise
shows. Goal: at most 1.05 at every size. Prints one table a world, writes one JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from meshwright.comm import RoutedComm, TorchComm, mpi
from meshwright.core.calibration import Rates
from meshwright.core.comm import Comm
from meshwright.core.quantities import show_bytes
from meshwright.core.routes import choose_route
from meshwright.core.schedule import wire_factor
from meshwright.cost.route_selection import choose_routes
from meshwright.describe.collective_bench import fit_by_operation, measure_routes, merge_ranks, timing_curves
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.launch.mpi_launcher import find_mpirun, mpirun_command, run_command
from meshwright.orchestrate.bench_comm import applicable_algorithms, comms_by_route, message_sizes
from rounds import machine, order, ratios, say

HERE = Path(__file__).parent
SIZES = message_sizes(1 << 26)
GOAL = 1.05
BUDGET_S = 0.2  # of one way and size, in the first measurement
LONGEST_S = 6.0  # one size, in the second
ALL, NEAR = 3, 1.5  # rounds of all ways; how near to the best of these a way must come to be measured on
IN_A_ROW = 4
SELECTED = "selected"


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, like 2,4.")] = "2,4",
    rounds: Annotated[int, typer.Option(help="Turns of each way; fewer for large tensors.")] = 240,
    nodes: Annotated[int, typer.Option(help="Nodes that four and more ranks pretend to lie on.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure; exit code 1 where the goal is missed."""
    worlds = [_world(int(n), rounds, nodes) for n in ranks.split(",")]
    result = {"machine": machine(), "goal": GOAL, "worlds": worlds}
    (HERE / "results" / "selection.json").write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        for world in worlds:
            Console(width=200).print(show(world))
    sys.exit(0 if all(row["met"] for world in worlds for row in world["rows"]) else 1)


def _world(ranks: int, rounds: int, nodes: int) -> dict[str, Any]:
    lie = [ranks // nodes + (i < ranks % nodes) for i in range(nodes)] if ranks >= 4 else [ranks]
    with tempfile.TemporaryDirectory() as folder:
        if find_mpirun() is None:
            sys.exit("bench/selection.py needs MPI beside gloo: pip install 'meshwright[mpi]'")
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        command, environ = mpirun_command(ranks, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path})
        code = run_command([*command, sys.executable, __file__, "--rank", folder, str(rounds), json.dumps(lie)], environ, sys.stderr)
        if code:
            sys.exit(code)
        every = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = [_row(cells) for cells in zip(*(found["sizes"] for found in every), strict=True)]
    return {"ranks": ranks, "nodes": lie, "routes": every[0]["routes"], "rows": rows}


def _row(cells: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One size: a call lasts until the slowest rank is done; the selected way against the best single one, round by round."""
    every, near = ({w: [max(t) for t in zip(*(c[part][w] for c in cells), strict=True)] for w in cells[0][part]} for part in ("every", "near"))
    medians = {w: statistics.median(near.get(w) or every[w]) for w in every}
    best = min((w for w in near if w != SELECTED), key=lambda w: medians[w])
    ratio = statistics.median(ratios(near[SELECTED], near[best]))
    chosen = cells[0]["chosen"]
    return {
        "bytes": cells[0]["bytes"],
        "rounds": len(near[SELECTED]),
        "median_s": medians,
        "chosen": chosen,
        "best": best,
        "ratio": ratio,
        "same_again": statistics.median(ratios(near[SELECTED], near.get(chosen, near[SELECTED]))),  # the same calls twice: what a ratio means
        "met": ratio <= GOAL,
    }


def show(world: dict[str, Any]) -> Table:
    table = Table(title=f"{world['ranks']} ranks on {len(world['nodes'])} nodes, µs", title_justify="left", header_style="bold", box=None)
    names = list(world["rows"][0]["median_s"])
    table.add_column("size", justify="right")
    for column in (*names, "chosen", "best", "chosen / best", "chosen / itself", ""):
        table.add_column(column, justify="right")
    for row in world["rows"]:
        times = (f"{row['median_s'][w] * 1e6:,.0f}" for w in names)
        met = "met" if row["met"] else "[red]missed[/red]"
        table.add_row(show_bytes(row["bytes"]), *times, row["chosen"], row["best"], f"{row['ratio']:.3f}", f"{row['same_again']:.3f}", met)
    return table


# -- in a rank --


def measure(folder: str, rounds: int, nodes: list[int]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    mpi.register(300)
    join_process_group(Rendezvous(rank, world, f"file://{folder}/meeting"))
    over_mpi = dist.new_group(backend="mpi")
    names = applicable_algorithms(world, nodes, None)
    ways = comms_by_route("gloo", names, nodes) | comms_by_route("mpi", names, nodes, over_mpi)
    chosen = _routes(ways, world, nodes)
    own, other = (ways[b] for b in ("gloo", "mpi"))
    assert isinstance(own, TorchComm) and isinstance(other, TorchComm)
    # The composed ways that are selected are the very objects that are measured: a twin of them would share cores with their threads.
    composed = {n: c._comms[n] for n, c in ways.items() if isinstance(c, RoutedComm)}
    choose = lambda op, size: choose_route(chosen, op, size * wire_factor(op, world), "gloo")  # noqa: E731
    turns: dict[str, Comm] = {**ways, SELECTED: RoutedComm({"gloo": own, "mpi": other}, choose, composed)}
    found = []
    for size in SIZES:
        if rank == 0:
            say(f"{world} ranks: {show_bytes(size)}")
        every, near = _timed(turns, size, rounds)
        found.append({"bytes": size, "chosen": choose("all_reduce", size), "every": every, "near": near})
    said = {"sizes": found, "routes": [vars(r) for r in chosen]}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    leave_process_group()


def _routes(ways: dict[str, Comm], world: int, nodes: list[int]) -> Any:
    """From a measurement of all ways, the same on every rank."""
    every: list[Any] = [None] * world
    dist.all_gather_object(every, measure_routes(ways, torch.device("cpu"), ["all_reduce"], SIZES, BUDGET_S))
    points = merge_ranks("", every)
    return choose_routes(Rates(world, 1, {}, (), 0.0, fit_by_operation(points), curves=timing_curves(points)), ("gloo", "mpi"), ["all_reduce"], nodes)


def _timed(turns: dict[str, Comm], size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """A few rounds of all ways; then many of those that may be the best, and of the selected one. What a rank needed for a call in each round."""
    tensor = torch.zeros(max(size // 4, 1))
    every = _rounds(turns, tensor, list(turns), ALL)
    medians = torch.tensor([statistics.median(times) for times in every.values()], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)  # so that all ranks leave out the same
    near = {w: m for w, m in zip(turns, medians.tolist(), strict=True) if m <= NEAR * float(medians.min()) or w == SELECTED}
    period = len(near) * (1 + len(near) % 2)  # rounds after which every way has followed every other one as often
    count = min(rounds, int(LONGEST_S / sum(near.values()) / IN_A_ROW)) // period * period
    return every, _rounds(turns, tensor, list(near), max(count, period))


def _rounds(turns: dict[str, Comm], tensor: torch.Tensor, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Several calls in a row, of which the first, with cold caches, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for index in order(len(names), number):
            row = []
            for _ in range(IN_A_ROW):
                dist.barrier()
                start = time.perf_counter()
                turns[names[index]].all_reduce(tensor, "bench").wait()
                row.append(time.perf_counter() - start)
            seconds[names[index]].append(statistics.median(row[1:]))
    return seconds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        typer.run(main)
