"""Is the selected route of an all-reduce as fast as the best single route? Measured afresh: every route and the selected one, in turn, in one run.

    python bench/selection.py [--ranks 2,4] [--rounds 240] [--nodes 2] [--json]

First every route over both backends is measured as `bench comm` does it and routes are made from the points. Then, size by size, all routes and the
routed group are timed in turn, in an order that changes from round to round, and each is put into a ratio with the others of its round; routes
that are far from the best are left out after a few rounds. The best single route is that of the second measurement, so a choice made from noise
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
BUDGET_S = 0.2  # for one route and size, in the first measurement
LONGEST_S = 6.0  # for one size, in the second
ALL, NEAR = 3, 1.5  # rounds of all routes; how near to the best of these a route must be to be measured further
IN_A_ROW = 4
SELECTED = "selected"


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, like 2,4.")] = "2,4",
    rounds: Annotated[int, typer.Option(help="Timed rounds of each route; fewer for large tensors.")] = 240,
    nodes: Annotated[int, typer.Option(help="Number of nodes that four and more ranks are treated as.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure all routes; exit code 1 where the goal is missed. Example: python bench/selection.py --ranks 2"""
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
    ranks_per_node = [ranks // nodes + (i < ranks % nodes) for i in range(nodes)] if ranks >= 4 else [ranks]
    with tempfile.TemporaryDirectory() as folder:
        if find_mpirun() is None:
            sys.exit("bench/selection.py needs MPI beside gloo: pip install 'meshwright[mpi]'")
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        command, environ = mpirun_command(ranks, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path})
        code = run_command([*command, sys.executable, __file__, "--rank", folder, str(rounds), json.dumps(ranks_per_node)], environ, sys.stderr)
        if code:
            sys.exit(code)
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = [_row(cells) for cells in zip(*(answer["sizes"] for answer in answers), strict=True)]
    return {"ranks": ranks, "nodes": ranks_per_node, "routes": answers[0]["routes"], "rows": rows}


def _row(cells: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One size: a call lasts until the slowest rank is done; the selected route against the best single one, round by round."""
    first, times = ({w: [max(t) for t in zip(*(c[phase][w] for c in cells), strict=True)] for w in cells[0][phase]} for phase in ("every", "near"))
    medians = {w: statistics.median(times.get(w) or first[w]) for w in first}
    best = min((w for w in times if w != SELECTED), key=lambda w: medians[w])
    ratio = statistics.median(ratios(times[SELECTED], times[best]))
    chosen = cells[0]["chosen"]
    return {
        "bytes": cells[0]["bytes"],
        "rounds": len(times[SELECTED]),
        "median_s": medians,
        "chosen": chosen,
        "best": best,
        "ratio": ratio,
        "same_again": statistics.median(ratios(times[SELECTED], times.get(chosen, times[SELECTED]))),  # the same calls twice: what a ratio means
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
    join_process_group(Rendezvous(rank, world, f"file://{folder}/rendezvous"))
    mpi_group = dist.new_group(backend="mpi")
    names = applicable_algorithms(world, nodes, None)
    comms = comms_by_route("gloo", names, nodes) | comms_by_route("mpi", names, nodes, mpi_group)
    routes = _routes(comms, world, nodes)
    gloo_comm, mpi_comm = (comms[b] for b in ("gloo", "mpi"))
    assert isinstance(gloo_comm, TorchComm) and isinstance(mpi_comm, TorchComm)
    # The composed routes that are selected are the very objects that are measured: copies of them would compete with their threads for cores.
    composed = {n: c._comms[n] for n, c in comms.items() if isinstance(c, RoutedComm)}
    choose = lambda op, size: choose_route(routes, op, size * wire_factor(op, world), "gloo")  # noqa: E731
    candidates: dict[str, Comm] = {**comms, SELECTED: RoutedComm({"gloo": gloo_comm, "mpi": mpi_comm}, choose, composed)}
    sizes = []
    for size in SIZES:
        if rank == 0:
            say(f"{world} ranks: {show_bytes(size)}")
        first_times, times = _timed(candidates, size, rounds)
        sizes.append({"bytes": size, "chosen": choose("all_reduce", size), "every": first_times, "near": times})
    answer = {"sizes": sizes, "routes": [vars(r) for r in routes]}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    leave_process_group()


def _routes(comms: dict[str, Comm], world: int, nodes: list[int]) -> Any:
    """Routes chosen from a measurement of all of them, the same on every rank."""
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, measure_routes(comms, torch.device("cpu"), ["all_reduce"], SIZES, BUDGET_S))
    points = merge_ranks("", answers)
    return choose_routes(Rates(world, 1, {}, (), 0.0, fit_by_operation(points), curves=timing_curves(points)), ("gloo", "mpi"), ["all_reduce"], nodes)


def _timed(candidates: dict[str, Comm], size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """A few rounds of all routes; then many of those that may be the best, and of the selected one: this rank's seconds for a call in each round."""
    tensor = torch.zeros(max(size // 4, 1))
    first_times = _rounds(candidates, tensor, list(candidates), ALL)
    medians = torch.tensor([statistics.median(times) for times in first_times.values()], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)  # so that all ranks leave out the same routes
    near = {w: m for w, m in zip(candidates, medians.tolist(), strict=True) if m <= NEAR * float(medians.min()) or w == SELECTED}
    period = len(near) * (1 + len(near) % 2)  # rounds after which every route has followed every other one equally often
    count = min(rounds, int(LONGEST_S / sum(near.values()) / IN_A_ROW)) // period * period
    return first_times, _rounds(candidates, tensor, list(near), max(count, period))


def _rounds(candidates: dict[str, Comm], tensor: torch.Tensor, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Several calls in a row, of which the first, with cold caches, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for index in order(len(names), number):
            row = []
            for _ in range(IN_A_ROW):
                dist.barrier()
                start = time.perf_counter()
                candidates[names[index]].all_reduce(tensor, "bench").wait()
                row.append(time.perf_counter() - start)
            seconds[names[index]].append(statistics.median(row[1:]))
    return seconds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        typer.run(main)
