"""Data parallelism and ZeRO-3 where communication dominates: raw PyTorch and its peers over gloo, Meshwright over what it selects.

mpirun starts the ranks, so that gloo and MPI are both there. The ranks first measure what a call and a byte cost over each; Meshwright's
plans are routed by that, as `train --backend auto` does it. Raw PyTorch over MPI is shown too: how much of the gain is the backend's alone.
How steps are compared: see `rounds.py`. Goals: data parallelism at 1.2 times raw DDP over gloo, ZeRO-3 at 1.5 times the best other ZeRO-3.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from cases import (
    DATA_PARALLEL,
    PEERS,
    ZERO_3,
    Case,
    accelerate,
    fabric,
    meshwright,
    missing_peers,
    optimizer_of,
    pose_as_launched,
    raw_ddp,
    raw_fsdp2,
)
from exposed import Waits
from meshwright.comm import mpi
from meshwright.core.calibration import Rates
from meshwright.core.plan import SyncPolicy
from meshwright.cost.route_selection import choose_routes
from meshwright.describe.collective_bench import fit_by_operation, measure_routes, merge_ranks, timing_curves
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.launch.mpi_launcher import mpirun_command, run_command
from meshwright.orchestrate.bench_comm import applicable_algorithms, comms_by_route
from meshwright.zoo.losses import next_token_loss
from overhead import WORLD, show, write
from rounds import HERE, Batch, Engine, Trial, machine, ratios, say, summarise, timed

CASE = Case(batch=1, seq=64, tied=False)
GOALS = {DATA_PARALLEL: 1.2, ZERO_3: 1.5}
OURS = {DATA_PARALLEL: ("Meshwright", "Meshwright, ZeRO-1"), ZERO_3: ("Meshwright",)}  # both of the first are data parallelism
BACKENDS = ("gloo", "mpi")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZES = tuple(8**n for n in range(1, 9))  # to 16 MB
DEEPSPEED = {f"DeepSpeed ZeRO-{stage}": stage for stage in (1, 2, 3)}


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each engine.")] = 25,
    output: Annotated[Path, typer.Option(help="JSON file for the results.")] = HERE / "results" / "backends.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Measure on 2 ranks, one thread each; exit code 1 where a goal is missed.

    Example: python bench/backends.py
    """
    left_out = [*missing_peers(), *([] if _has_deepspeed() else ["DeepSpeed"])]
    for name in left_out:
        say(f"{name} is left out: {PEERS.get(name, 'deepspeed')} is not installed")
    ranks = _by_mpirun(rounds)
    blocks, difference = summarise([found["engines"] for found in ranks])
    tokens = CASE.batch * CASE.seq * WORLD
    for row in (row for block in blocks for row in block["engines"]):
        row["tokens_per_s"] = tokens / row["step_s"]
    goals = [_goal(block, name) for block in blocks for name in OURS[block["block"]]]
    result = {
        "machine": machine(),
        "arguments": {"rounds": rounds, **asdict(CASE), "world": WORLD, "threads": 1, "optimizer": "AdamW, fused"},
        "parameters": sum(p.numel() for p in CASE.model().parameters()),
        "lines": ranks[0]["lines"],
        "routes": ranks[0]["routes"],
        "blocks": blocks,
        "goals": goals,
        "loss_difference": difference,
        "left_out": left_out,
    }
    write(result, output)
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)
    say(f"written to {output}")
    sys.exit(0 if all(goal["met"] for goal in goals) else 1)


def _goal(block: dict[str, Any], name: str) -> dict[str, Any]:
    """Meshwright's speed against the best engine over gloo in ZeRO-3, against raw DDP over gloo in data parallelism; round by round."""
    rows = block["engines"]
    ours = next(row for row in rows if row["engine"] == name)
    others = [row for row in rows if not row["engine"].startswith("Meshwright") and not row["engine"].endswith("over MPI")]
    base = rows[0] if block["block"] == DATA_PARALLEL else min(others, key=lambda row: row["step_s"])
    speed = statistics.median(ratios(base["seconds"], ours["seconds"]))
    goal = GOALS[block["block"]]
    return {"block": block["block"], "engine": name, "against": base["engine"], "speed": speed, "goal": goal, "met": speed >= goal}


def _print(result: dict[str, Any]) -> None:
    Console().print(show(result))
    for name, line in result["lines"].items():
        say(f"{name}: {line['alpha_s'] * 1e6:,.0f} µs a call, then {line['bytes_per_s'] / 1e9:.2f} GB/s")
    for route in result["routes"]:
        say(f"{route['op']} goes over {route['backend']} ({route['algorithm']}) from {route['sent']:,} bytes on")
    for goal in result["goals"]:
        met = "met" if goal["met"] else "missed"
        say(f"{goal['block']}, {goal['engine']}: {goal['speed']:.2f} times {goal['against']}, goal {goal['goal']}: {met}")


def _by_mpirun(rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        command, environ = mpirun_command(WORLD, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})
        code = run_command([*command, sys.executable, __file__, "--rank", folder, str(rounds)], environ, sys.stderr)
        if code:
            sys.exit(code)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(WORLD)]


# -- in a rank --


def measure(folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    join_process_group(Rendezvous(rank, WORLD, f"file://{folder}/rendezvous"))
    mpi.register()
    over_mpi = dist.new_group(backend="mpi")
    rates = _rates(over_mpi)
    lines, chosen = rates.collectives, choose_routes(rates, BACKENDS, OPERATIONS)
    waits = Waits()
    built = list(engines(CASE, rank, over_mpi, SyncPolicy(routes=chosen)))
    found = timed(Trial(built, lambda number: CASE.data(rank, number)), waits, rounds)
    said = {"engines": found, "lines": {name: asdict(line) for name, line in lines.items()}, "routes": [asdict(r) for r in chosen]}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
    leave_process_group()


def _rates(over_mpi: Any) -> Rates:
    """What calls cost over both backends by every algorithm, the same on every rank."""
    algorithms = applicable_algorithms(WORLD, (WORLD,), None)
    ways = comms_by_route("gloo", algorithms, (WORLD,)) | comms_by_route("mpi", algorithms, (WORLD,), over_mpi)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, measure_routes(ways, torch.device("cpu"), OPERATIONS, SIZES, 0.1))
    points = merge_ranks("", every)
    return Rates(WORLD, 1, {}, (), 0.0, fit_by_operation(points), curves=timing_curves(points))


def engines(case: Case, rank: int, over_mpi: Any, sync: SyncPolicy) -> Iterator[Engine]:
    """The second of a block is the first again: what a ratio means."""
    pose_as_launched(rank, WORLD)
    yield Engine("raw DDP", DATA_PARALLEL, raw_ddp(case))
    yield Engine("raw DDP, again", DATA_PARALLEL, raw_ddp(case))
    builders = {"Accelerate": accelerate, "Lightning Fabric": fabric}
    for name in [n for n in builders if n not in missing_peers()]:
        yield Engine(name, DATA_PARALLEL, builders[name](case, WORLD))
    stages = DEEPSPEED if _has_deepspeed() else {}
    for name, stage in ((n, s) for n, s in stages.items() if s < 3):
        yield Engine(name, DATA_PARALLEL, deepspeed(case, stage))
    yield Engine("raw DDP over MPI", DATA_PARALLEL, raw_ddp(case, group=over_mpi))
    yield Engine("Meshwright", DATA_PARALLEL, meshwright(case, WORLD, 0, sync), ours=True)
    yield Engine("Meshwright, ZeRO-1", DATA_PARALLEL, meshwright(case, WORLD, 1, sync), ours=True)
    yield Engine("raw FSDP2", ZERO_3, raw_fsdp2(case, WORLD))
    yield Engine("raw FSDP2, again", ZERO_3, raw_fsdp2(case, WORLD))
    for name, stage in ((n, s) for n, s in stages.items() if s == 3):
        yield Engine(name, ZERO_3, deepspeed(case, stage))
    yield Engine("raw FSDP2 over MPI", ZERO_3, raw_fsdp2(case, WORLD, over_mpi))
    yield Engine("Meshwright", ZERO_3, meshwright(case, WORLD, 3, sync), ours=True)


def deepspeed(case: Case, stage: int) -> Callable[[Batch], Tensor]:
    """Without its clipping, which is on by default and which nobody else does here."""
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    settings = {"train_micro_batch_size_per_gpu": case.batch, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    plain = case.model()
    engine, *_ = deepspeed.initialize(model=plain, optimizer=optimizer_of(plain), config=settings)

    def step(batch: Batch) -> Tensor:
        loss = next_token_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        typer.run(main)
