"""Backend `mpi` beside raw mpi4py and beside gloo: every collective, in one process tree, in turn. Prints one table, writes one JSON.

    python bench/mpi.py [--ranks 2,4] [--rounds 30] [--json]

A column "torch" is the raw call, then the same call of torch's on a group in Python whose methods do nothing: what torch's own dispatch to a
backend costs. About 10 to 20% over raw mpi4py from 1 MB up, and about torch's own overhead below, is what the backend is meant to reach.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed import distributed_c10d

from meshwright.comm.work_queue import COMPLETED
from meshwright.core.quantities import show_bytes
from meshwright.launch.mpi_launcher import mpirun_command, run_command
from rounds import machine

HERE = Path(__file__).parent
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
WARM_UP, IN_A_ROW = 4, 3  # calls that do not count, and calls that do
LARGE = 1 << 20  # bytes from which the ratio counts; below, the difference
COLUMNS = ("raw", "mpi", "gloo", "torch")


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, like 2,4.")] = "2,4",
    rounds: Annotated[int, typer.Option(help="Turns of each way at 1 MB; more below, fewer above.")] = 20,
    only: Annotated[str, typer.Option(help="Operations, like reduce,send. What is found is not kept.")] = "",
    sizes: Annotated[str, typer.Option(help="Bytes, like 8,65536. What is found is not kept.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure every collective over each; example: python bench/mpi.py --ranks 2 --only all_reduce --sizes 1024,1048576."""
    ops = only or ",".join(OPERATIONS)
    if unknown := set(ops.split(",")) - set(OPERATIONS):
        raise typer.BadParameter(f"no {', '.join(sorted(unknown))}: choose of {', '.join(OPERATIONS)}", param_hint="--only")
    if not all(number.isdecimal() and int(number) for number in f"{ranks},{sizes or 1}".split(",")):
        raise typer.BadParameter("whole numbers, like 2,4 and 8,65536", param_hint="--ranks, --sizes")
    worlds = [_world(int(n), rounds, ops, sizes or ",".join(map(str, SIZES))) for n in ranks.split(",")]
    result = {"machine": machine(), "worlds": worlds}
    if not only and not sizes:
        _keep(result, HERE / "results" / "mpi.json")
    if as_json:
        print(json.dumps(result))
    else:
        for world in worlds:
            Console().print(show(world))


def _keep(result: dict[str, Any], path: Path) -> None:
    """What was measured now, beside other numbers of ranks that were measured before; each says when."""
    now = {world["ranks"] for world in result["worlds"]}
    before = [world for world in json.loads(path.read_text())["worlds"] if world["ranks"] not in now] if path.exists() else []
    worlds = sorted([*before, *result["worlds"]], key=lambda world: world["ranks"])
    path.write_text(json.dumps({**result, "worlds": worlds}, indent=1) + "\n")


def _world(ranks: int, rounds: int, ops: str, sizes: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command, environ = mpirun_command(ranks, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        code = run_command([*command, sys.executable, __file__, "--rank", folder, str(rounds), ops, sizes], environ, sys.stderr)
        if code:
            sys.exit(code)
        every = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {"ranks": ranks, "date": machine()["date"], "rows": [_row(cells) for cells in zip(*every, strict=True)]}


def _row(cells: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One operation and size: a call lasts until the slowest rank is done."""
    ways = {way: [max(times) for times in zip(*(c["seconds"][way] for c in cells), strict=True)] for way in cells[0]["seconds"]}
    raw, ours = ways["raw"], ways["mpi"]
    ratio = statistics.median(a / b for a, b in zip(ours, raw, strict=True))
    extra = statistics.median(ours) - statistics.median(raw)
    size = cells[0]["bytes"]
    return {
        "op": cells[0]["op"],
        "bytes": size,
        "median_s": {way: statistics.median(times) for way, times in ways.items()},
        "ratio": ratio,
        "extra_s": extra,
        "calls": len(raw),
    }


def show(world: dict[str, Any]) -> Table:
    table = Table(title=f"{world['ranks']} ranks", title_justify="left", header_style="bold", box=None)
    table.add_column("operation")
    for column in ("size", "raw mpi4py µs", "backend mpi µs", "gloo µs", "raw, torch alone µs", "ratio to raw", "extra µs"):
        table.add_column(column, justify="right")
    for row in world["rows"]:
        times = (f"{row['median_s'][way] * 1e6:,.0f}" if way in row["median_s"] else "–" for way in COLUMNS)
        table.add_row(row["op"], show_bytes(row["bytes"]), *times, f"{row['ratio']:.2f}", f"{row['extra_s'] * 1e6:,.0f}")
    return table


# -- in a rank --


def measure(folder: str, rounds: int, ops: str, sizes: str) -> None:
    from meshwright.comm import mpi

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    mpi.register(120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    groups = {"mpi": dist.new_group(backend="mpi")}
    with mock.patch.object(distributed_c10d, "ProcessGroupMPI", Nothing):
        groups["torch"] = dist.new_group(backend="mpi")
    found = []
    for op in ops.split(","):
        for size in map(int, sizes.split(",")) if op != "barrier" else (0,):
            ways = calls(op, size, rank, world, groups)
            count = 4 * rounds if size < LARGE else rounds if size < 1 << 24 else max(rounds // 4, 3) if size < 1 << 26 else 3
            found.append({"op": op, "bytes": size, "seconds": _time(ways, count)})
            if rank == 0:
                print(f"{world} ranks: {op} {show_bytes(size)}", file=sys.stderr)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Nothing(dist.ProcessGroup):
    """A group whose calls are over before they begin."""

    @classmethod
    def create(cls, ranks: list[int]) -> Nothing:
        return cls(dist.get_rank(), len(ranks) or dist.get_world_size())  # type: ignore[call-arg]  # torch's stub knows one way of making it

    def getBackendName(self) -> str:
        return "mpi"

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """There is none."""

    def _ignore(self, *_: Any) -> None:
        """It needs no name."""

    _set_group_name = _set_group_desc = setGroupName = setGroupDesc = _ignore  # type: ignore[assignment]

    def _over(self, *_: Any, **__: Any) -> dist.Work:
        return COMPLETED

    allreduce = all_gather_single = _allgather_base = reduce_scatter_single = _reduce_scatter_base = all_to_all_single = alltoall_base = _over
    broadcast = reduce = send = recv = barrier = _over  # type: ignore[assignment]


def _time(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    from mpi4py import MPI

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for way in names:
        for _ in range(WARM_UP):
            ways[way]()
    for number in range(rounds):
        for way in names[number % len(names) :] + names[: number % len(names)]:
            for again in range(1 + IN_A_ROW):  # the first after another way's calls finds nothing of its own in the caches
                MPI.COMM_WORLD.Barrier()
                begun = time.perf_counter()
                ways[way]()
                took = time.perf_counter() - begun
                if again:
                    seconds[way].append(took)
    return seconds


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", "barrier")


def calls(op: str, size: int, rank: int, world: int, groups: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The same operation in every way. `size` is that of the whole tensor.

    All but gloo work on the same memory, since where it lies makes a difference of a quarter at 1 MB.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    whole = max(size // 4 // world, 1) * world
    arrays = tuple(np.full(n, 0, "f4") for n in (whole, whole // world, whole))  # whose sums do not grow
    full, part, other = arrays
    right, left = (rank + 1) % world, (rank - 1) % world
    raw: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, full),
        "all_gather": lambda: comm.Allgather(part, full),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(full, part),
        "all_to_all": lambda: comm.Alltoall(full, other),
        "broadcast": lambda: comm.Bcast(full),
        "reduce": lambda: comm.Reduce(MPI.IN_PLACE if rank == 0 else full, full if rank == 0 else None),
        "send": lambda: comm.Sendrecv(full, right, recvbuf=other, source=left),
        "barrier": comm.Barrier,
    }
    copies = tuple(a.copy() for a in arrays)
    few = tuple(np.full(n, 0, "f4") for n in (world, 1, world))
    dispatch = _torch_call(op, few, right, left, groups["torch"])
    same = {way: _torch_call(op, arrays, right, left, group) for way, group in groups.items() if way != "torch"}
    return {"raw": raw[op], "gloo": _torch_call(op, copies, right, left, None), "torch": lambda: (raw[op](), dispatch()), **same}


def _torch_call(op: str, arrays: tuple[Any, ...], right: int, left: int, group: Any) -> Callable[[], object]:
    full, part, other = (torch.from_numpy(a) for a in arrays)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, full, right, group), dist.P2POp(dist.irecv, other, left, group)]):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: gather(full, part, group=group),
        "reduce_scatter": lambda: scatter(part, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
        "broadcast": lambda: dist.broadcast(full, 0, group=group),
        "reduce": lambda: dist.reduce(full, 0, group=group),
        "send": exchange,
        "barrier": lambda: dist.barrier(group),
    }[op]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        typer.run(main)
