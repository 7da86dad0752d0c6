"""Backend `mpi` beside raw mpi4py and beside gloo: every collective, in the same processes, in turn. Prints one table, writes one JSON.

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
    rounds: Annotated[int, typer.Option(help="Timed rounds of each variant at 1 MB; more for smaller messages, fewer for larger ones.")] = 20,
    only: Annotated[str, typer.Option(help="Only these operations, like reduce,send; results are not written to the JSON file.")] = "",
    sizes: Annotated[str, typer.Option(help="Only these message sizes in bytes, like 8,65536; results are not written to the JSON file.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure every collective with each backend. Example: python bench/mpi.py --ranks 2 --only all_reduce --sizes 1024,1048576."""
    ops = only or ",".join(OPERATIONS)
    if unknown := set(ops.split(",")) - set(OPERATIONS):
        raise typer.BadParameter(f"no {', '.join(sorted(unknown))}: choose from {', '.join(OPERATIONS)}", param_hint="--only")
    if not all(number.isdecimal() and int(number) for number in f"{ranks},{sizes or 1}".split(",")):
        raise typer.BadParameter("whole numbers, like 2,4 and 8,65536", param_hint="--ranks, --sizes")
    worlds = [_world(int(n), rounds, ops, sizes or ",".join(map(str, SIZES))) for n in ranks.split(",")]
    result = {"machine": machine(), "worlds": worlds}
    if not only and not sizes:
        _update_results(result, HERE / "results" / "mpi.json")
    if as_json:
        print(json.dumps(result))
    else:
        for world in worlds:
            Console().print(show(world))


def _update_results(result: dict[str, Any], path: Path) -> None:
    """Write the result, with earlier results for other numbers of ranks; each has its date."""
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
        ranks_rows = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {"ranks": ranks, "date": machine()["date"], "rows": [_row(cells) for cells in zip(*ranks_rows, strict=True)]}


def _row(cells: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One operation and size: a call lasts until the slowest rank is done."""
    seconds = {variant: [max(times) for times in zip(*(c["seconds"][variant] for c in cells), strict=True)] for variant in cells[0]["seconds"]}
    raw, ours = seconds["raw"], seconds["mpi"]
    ratio = statistics.median(a / b for a, b in zip(ours, raw, strict=True))
    extra = statistics.median(ours) - statistics.median(raw)
    size = cells[0]["bytes"]
    return {
        "op": cells[0]["op"],
        "bytes": size,
        "median_s": {variant: statistics.median(times) for variant, times in seconds.items()},
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
        times = (f"{row['median_s'][variant] * 1e6:,.0f}" if variant in row["median_s"] else "–" for variant in COLUMNS)
        table.add_row(row["op"], show_bytes(row["bytes"]), *times, f"{row['ratio']:.2f}", f"{row['extra_s'] * 1e6:,.0f}")
    return table


# -- in a rank --


def measure(folder: str, rounds: int, ops: str, sizes: str) -> None:
    from meshwright.comm import mpi

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    mpi.register(120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    groups = {"mpi": dist.new_group(backend="mpi")}
    with mock.patch.object(distributed_c10d, "ProcessGroupMPI", NoOpGroup):
        groups["torch"] = dist.new_group(backend="mpi")
    rows = []
    for op in ops.split(","):
        for size in map(int, sizes.split(",")) if op != "barrier" else (0,):
            variants = calls(op, size, rank, world, groups)
            count = 4 * rounds if size < LARGE else rounds if size < 1 << 24 else max(rounds // 4, 3) if size < 1 << 26 else 3
            rows.append({"op": op, "bytes": size, "seconds": _time(variants, count)})
            if rank == 0:
                print(f"{world} ranks: {op} {show_bytes(size)}", file=sys.stderr)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


class NoOpGroup(dist.ProcessGroup):
    """A process group whose calls complete at once and do nothing."""

    @classmethod
    def create(cls, ranks: list[int]) -> NoOpGroup:
        return cls(dist.get_rank(), len(ranks) or dist.get_world_size())  # type: ignore[call-arg]  # torch's stub lacks this constructor

    def getBackendName(self) -> str:
        return "mpi"

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """There is no sequence number."""

    def _ignore(self, *_: Any) -> None:
        """Names are ignored."""

    _set_group_name = _set_group_desc = setGroupName = setGroupDesc = _ignore  # type: ignore[assignment]

    def _complete(self, *_: Any, **__: Any) -> dist.Work:
        return COMPLETED

    allreduce = all_gather_single = _allgather_base = reduce_scatter_single = _reduce_scatter_base = all_to_all_single = alltoall_base = _complete
    broadcast = reduce = send = recv = barrier = _complete  # type: ignore[assignment]


def _time(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    from mpi4py import MPI

    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    names = list(variants)
    for variant in names:
        for _ in range(WARM_UP):
            variants[variant]()
    for number in range(rounds):
        for variant in names[number % len(names) :] + names[: number % len(names)]:
            for again in range(1 + IN_A_ROW):  # the first call after another variant's has cold caches and does not count
                MPI.COMM_WORLD.Barrier()
                start = time.perf_counter()
                variants[variant]()
                elapsed = time.perf_counter() - start
                if again:
                    seconds[variant].append(elapsed)
    return seconds


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", "barrier")


def calls(op: str, size: int, rank: int, world: int, groups: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The same operation in every variant. `size` is that of the full tensor.

    All but gloo use the same memory: its address makes a difference of a quarter at 1 MB.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    count = max(size // 4 // world, 1) * world
    arrays = tuple(np.full(n, 0, "f4") for n in (count, count // world, count))  # whose sums do not grow
    full, shard, received = arrays
    right, left = (rank + 1) % world, (rank - 1) % world
    raw: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, full),
        "all_gather": lambda: comm.Allgather(shard, full),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(full, shard),
        "all_to_all": lambda: comm.Alltoall(full, received),
        "broadcast": lambda: comm.Bcast(full),
        "reduce": lambda: comm.Reduce(MPI.IN_PLACE if rank == 0 else full, full if rank == 0 else None),
        "send": lambda: comm.Sendrecv(full, right, recvbuf=received, source=left),
        "barrier": comm.Barrier,
    }
    copies = tuple(a.copy() for a in arrays)
    tiny = tuple(np.full(n, 0, "f4") for n in (world, 1, world))
    dispatch = _torch_call(op, tiny, right, left, groups["torch"])
    others = {variant: _torch_call(op, arrays, right, left, group) for variant, group in groups.items() if variant != "torch"}
    return {"raw": raw[op], "gloo": _torch_call(op, copies, right, left, None), "torch": lambda: (raw[op](), dispatch()), **others}


def _torch_call(op: str, arrays: tuple[Any, ...], right: int, left: int, group: Any) -> Callable[[], object]:
    full, shard, received = (torch.from_numpy(a) for a in arrays)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, full, right, group), dist.P2POp(dist.irecv, received, left, group)]):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: gather(full, shard, group=group),
        "reduce_scatter": lambda: scatter(shard, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, full, group=group),
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
