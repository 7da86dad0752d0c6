"""What Meshwright costs over raw PyTorch, beside Accelerate and Lightning Fabric: the same model, batches and plan in one process group.

Each round every engine takes one step, in an order that changes from round to round. A ratio is taken within a round, against the
raw engine's step of that round, so that a machine that slows down or is shared slows both sides; the median over rounds is shown.
A second copy of each raw engine is timed too: how far its ratio is from 1 is the noise. All engines must reach the same losses.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from cases import PEERS, Case, engines, missing_peers
from meshwright.core.errors import MeshwrightError, RunError
from meshwright.launch import Nursery, Rendezvous, Workers, join, leave

HERE = Path(__file__).parent
WORLD = 2
WARM_UP = 4  # rounds: first steps allocate, DDP rebuilds its buckets after the first
LOSS_TOLERANCE = 1e-4


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each engine.")] = 25,
    batch: Annotated[int, typer.Option(min=1, help="Samples a rank.")] = Case.batch,
    seq: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = Case.seq,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the GPT.")] = Case.layers,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = HERE / "results" / "overhead.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print that JSON on stdout instead of the table.")] = False,
) -> None:
    """Time raw PyTorch, Accelerate, Lightning Fabric and Meshwright side by side on 2 ranks, one thread each.

    Examples:
      python bench/overhead.py
      python bench/overhead.py --batch 1 --seq 64 --rounds 100 --output bench/results/overhead-small.json
    """
    case = Case(batch=batch, seq=seq, layers=layers)
    for name in missing_peers():
        _say(f"{name} is left out: {PEERS[name]} is not installed (pip install 'meshwright[bench]')")
    try:
        result = summarise(case, rounds, _run(case, rounds))
    except MeshwrightError as error:
        fault = getattr(error, "fault", None)
        _say(f"{fault.traceback if fault else ''}overhead: {error}")
        sys.exit(error.exit_code)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(show(result))
    _say(f"written to {output}")


def _run(case: Case, rounds: int) -> list[list[dict[str, Any]]]:
    """What each rank measured, engine by engine."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    nursery = Nursery(1, {**os.environ, "PYTHONPATH": path})
    try:
        with Workers(nursery, WORLD) as workers:
            return workers.call("overhead:measure", {"case": asdict(case), "rounds": rounds})
    finally:
        nursery.close()


# -- in a worker --


def measure(rank: int, world: int, meeting: str, case: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Seconds and losses of every engine on this rank, one entry a round; the warm-up has losses only."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    join(Rendezvous(rank, world, meeting))
    what = Case(**case)
    built = list(engines(what, rank, world))
    found: list[dict[str, Any]] = [{"engine": e.name, "block": e.block, "seconds": [], "losses": []} for e in built]
    gc.collect()
    gc.freeze()  # else a collection walks through all that the peers imported, in whichever engine's step it happens
    for number in range(WARM_UP + rounds):
        batch = what.data(rank, number)
        for index in _order(len(built), number):
            dist.barrier()
            begun = time.perf_counter()
            loss = float(built[index].step(batch))
            seconds = time.perf_counter() - begun
            found[index]["losses"].append(loss)
            if number >= WARM_UP:
                found[index]["seconds"].append(seconds)
        if rank == 0:
            _say(f"round {number + 1 - WARM_UP} of {rounds}" if number >= WARM_UP else "warming up", over=number + 1 < WARM_UP + rounds)
    leave()
    return found


def _order(count: int, number: int) -> list[int]:
    """Rotated by one each round and turned around every other one, so that nobody always follows the same neighbour."""
    rotated = [(number + i) % count for i in range(count)]
    return rotated[::-1] if number % 2 else rotated


def _say(text: str, over: bool = False) -> None:
    """Progress on stderr; in a terminal a line may be written over."""
    terminal = sys.stderr.isatty()
    if terminal or not over:
        print(("\r\033[K" if terminal else "") + text, file=sys.stderr, end="" if over else "\n", flush=True)


# -- what it means --


def summarise(case: Case, rounds: int, ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One JSON object: a block for each kind of plan, every engine in it against the block's first."""
    difference = check_losses(ranks)
    blocks: dict[str, list[dict[str, Any]]] = {}
    raw: list[float] = []
    for per_rank in zip(*ranks, strict=True):
        slowest = [max(seconds) for seconds in zip(*(found["seconds"] for found in per_rank), strict=True)]
        rows = blocks.setdefault(per_rank[0]["block"], [])
        raw = raw if rows else slowest
        ratios = [a / b for a, b in zip(slowest, raw, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(slowest)
        tokens = case.batch * case.seq * WORLD / median
        named = {"engine": per_rank[0]["engine"], "step_s": median, "tokens_per_s": tokens}
        rows.append({**named, "ratio": middle, "ratio_iqr": [low, high], "seconds": slowest})
    return {
        "machine": _machine(),
        "arguments": {"rounds": rounds, **asdict(case), "world": WORLD, "threads": 1, "backend": "gloo", "optimizer": "AdamW, fused"},
        "parameters": sum(p.numel() for p in case.model().parameters()),
        "blocks": [{"block": name, "noise": abs(rows[1]["ratio"] - 1), "engines": rows} for name, rows in blocks.items()],
        "loss_difference": difference,
        "left_out": missing_peers(),
    }


def check_losses(ranks: list[list[dict[str, Any]]]) -> float:
    """The largest relative difference between two engines' mean losses in one round; RunError when they did not train the same."""
    curves = {}
    for per_rank in zip(*ranks, strict=True):
        name = f"{per_rank[0]['engine']} ({per_rank[0]['block']})"
        curves[name] = [statistics.fmean(losses) for losses in zip(*(found["losses"] for found in per_rank), strict=True)]
    first, expected = next(iter(curves.items()))
    worst = 0.0
    for name, curve in curves.items():
        for number, (loss, wanted) in enumerate(zip(curve, expected, strict=True)):
            off = abs(loss - wanted) / abs(wanted)
            if not off <= LOSS_TOLERANCE:
                raise RunError(f"{name} has loss {loss:.6f} at step {number}, {first} has {wanted:.6f}: the engines do not train the same")
            worst = max(worst, off)
    return worst


def _machine() -> dict[str, Any]:
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def show(result: dict[str, Any]) -> Table:
    made = result["arguments"]
    title = f"{made['layers']}-layer GPT, {result['parameters'] / 1e6:.1f} M parameters, {made['batch']} × {made['seq']} tokens a rank, {WORLD} ranks"
    table = Table(title=title, title_justify="left", header_style="bold", box=None)
    table.add_column("engine")
    for column in ("ms a step", "tokens/s", "ratio to raw", "interquartile"):
        table.add_column(column, justify="right")
    for block in result["blocks"]:
        table.add_section()
        table.add_row(f"[bold]{block['block']}[/bold]", "", "", f"[dim]noise ±{block['noise']:.3f}[/dim]", "")
        for row in block["engines"]:
            low, high = row["ratio_iqr"]
            times = f"{row['step_s'] * 1e3:,.1f}", f"{row['tokens_per_s']:,.0f}"
            table.add_row(f"  {row['engine']}", *times, f"{row['ratio']:.3f}", f"{low:.3f} – {high:.3f}")
    table.caption = f"Median of {made['rounds']} rounds. Losses of all engines agree to {result['loss_difference']:.0e}."
    table.caption_justify = "left"
    return table


if __name__ == "__main__":
    typer.run(main)
