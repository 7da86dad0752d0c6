"""What Meshwright costs over raw PyTorch, beside Accelerate and Lightning Fabric: the same model, batches and plan in one process group.

Each round every engine takes one step, in an order that rotates. A ratio is taken within a round, against the
raw engine's step of that round, so that a machine that slows down or is shared slows both sides; the median over rounds is shown.
A second copy of each raw engine is timed too: how far its ratio is from 1 is the noise. The processor time of both ranks is put into a
ratio as well: other work on the machine disturbs it less than the clock. All engines must reach the same losses.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
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

from cases import PEERS, Case, missing_peers
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
      python bench/overhead.py --batch 1 --seq 64 --output small.json
    """
    case = Case(batch=batch, seq=seq, layers=layers)
    for name in missing_peers():
        _say(f"{name} is left out: {PEERS[name]} is not installed (pip install 'meshwright[bench]')")
    compare(case, rounds, "cases", output, as_json=as_json)


def compare(case: Case, rounds: int, engines: str, output: Path, *, as_json: bool) -> None:
    """Run the engines that a module makes, write what they took to `output` and show it."""
    try:
        result = summarise(case, rounds, run(case, rounds, engines))
    except MeshwrightError as error:
        fault = getattr(error, "fault", None)
        _say(f"{fault.traceback if fault else ''}{output.stem}: {error}")
        sys.exit(error.exit_code)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(show(result))
    _say(f"written to {output}")


def run(case: Case, rounds: int, engines: str) -> list[list[dict[str, Any]]]:
    """What each rank measured, engine by engine; `engines` is the module that makes them."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    nursery = Nursery(1, {**os.environ, "PYTHONPATH": path})
    try:
        with Workers(nursery, WORLD) as workers:
            return workers.call("overhead:measure", {"case": asdict(case), "rounds": rounds, "engines": engines})
    finally:
        nursery.close()


# -- in a worker --


def measure(rank: int, world: int, meeting: str, case: dict[str, Any], rounds: int, engines: str) -> list[dict[str, Any]]:
    """Seconds and losses of every engine on this rank, one entry a round; the warm-up has losses only."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    join(Rendezvous(rank, world, meeting))
    maker = importlib.import_module(engines)
    what = getattr(maker, "Shared", Case)(**case)
    built = list(maker.engines(what, rank, world))
    found: list[dict[str, Any]] = [{"engine": e.name, "block": e.block, "seconds": [], "cpu_seconds": [], "losses": []} for e in built]
    gc.collect()
    gc.freeze()  # else a collection walks through all that the peers imported, in whichever engine's step it happens
    started = time.perf_counter()
    for number in range(WARM_UP + rounds):
        batch = what.data(rank, number)
        for index in _order(len(built), number):
            dist.barrier()
            begun, worked = time.perf_counter(), time.process_time()
            loss = float(built[index].step(batch))
            seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - worked
            found[index]["losses"].append(loss)
            if number >= WARM_UP:
                found[index]["seconds"].append(seconds)
                found[index]["cpu_seconds"].append(cpu_seconds)
        if rank == 0:
            done, whole = number + 1, WARM_UP + rounds
            left = (time.perf_counter() - started) / done * (whole - done)
            _say(f"round {done} of {whole}, {WARM_UP} of them to warm up; {left / 60:.1f} min left", over=done < whole)
    leave()
    return found


def _order(count: int, number: int) -> list[int]:
    """Rotates from round to round so that, over `count` rounds, each engine takes each place once and follows each other one once.

    Without the latter a raw engine that always comes after a sharded one, which leaves the allocator in another state, looks 3% slower.
    """
    zigzag = [-(i // 2) if i % 2 == 0 else (i + 1) // 2 for i in range(count)]  # 0, 1, -1, 2, -2, …: all steps between neighbours differ
    order = [(place + number) % count for place in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order  # an odd count is balanced only together with its mirror image


def _say(text: str, over: bool = False) -> None:
    """Progress on stderr; in a terminal the next line is written over this one."""
    terminal = sys.stderr.isatty()
    print(("\r\033[K" if terminal else "") + text, file=sys.stderr, end="" if over and terminal else "\n", flush=True)


# -- what it means --


def summarise(case: Case, rounds: int, ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One JSON object: a block for each kind of plan, every engine in it against the block's first."""
    difference = check_losses(ranks)
    blocks: dict[str, list[dict[str, Any]]] = {}
    for per_rank in zip(*ranks, strict=True):
        rows = blocks.setdefault(per_rank[0]["block"], [])
        rows.append(_row(case, per_rank, raw=rows[0] if rows else None))
    return {
        "machine": _machine(),
        "arguments": {"rounds": rounds, **asdict(case), "world": WORLD, "threads": 1, "backend": "gloo", "optimizer": "AdamW, fused"},
        "parameters": sum(p.numel() for p in case.model().parameters()),
        "blocks": [{"block": name, "noise": _noise(rows[1]), "engines": rows} for name, rows in blocks.items()],
        "loss_difference": difference,
        "left_out": missing_peers(),
    }


def _row(case: Case, per_rank: tuple[dict[str, Any], ...], raw: dict[str, Any] | None) -> dict[str, Any]:
    """One engine: a step lasts until the slower rank is done; processor time is both ranks' together."""
    seconds = [max(both) for both in zip(*(found["seconds"] for found in per_rank), strict=True)]
    cpu = [sum(both) for both in zip(*(found["cpu_seconds"] for found in per_rank), strict=True)]
    low, ratio, high = statistics.quantiles(_ratios(seconds, raw["seconds"] if raw else seconds), n=4)
    return {
        "engine": per_rank[0]["engine"],
        "step_s": statistics.median(seconds),
        "tokens_per_s": case.tokens(per_rank[0]["block"], WORLD) / statistics.median(seconds),
        "ratio": ratio,
        "ratio_iqr": [low, high],
        "cpu_ratio": statistics.median(_ratios(cpu, raw["cpu_seconds"] if raw else cpu)),
        "seconds": seconds,
        "cpu_seconds": cpu,
    }


def _noise(again: dict[str, Any]) -> float:
    """From the raw engine's second copy: how far its ratio is from 1, or the standard error of such a median if that is larger."""
    low, high = again["ratio_iqr"]
    sigma = (high - low) / 1.349  # of a normal distribution with these quartiles
    return max(abs(again["ratio"] - 1), 1.253 * sigma / math.sqrt(len(again["seconds"])))


def _ratios(ours: list[float], raw: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(ours, raw, strict=True)]


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
    for column in ("ms a step", "tokens/s", "ratio to raw", "interquartile", "CPU time"):
        table.add_column(column, justify="right")
    for block in result["blocks"]:
        table.add_section()
        table.add_row(f"[bold]{block['block']}[/bold]", "", "", f"[dim]noise ±{block['noise']:.3f}[/dim]", "", "")
        for row in block["engines"]:
            low, high = row["ratio_iqr"]
            times = f"{row['step_s'] * 1e3:,.1f}", f"{row['tokens_per_s']:,.0f}"
            table.add_row(f"  {row['engine']}", *times, f"{row['ratio']:.3f}", f"{low:.3f} – {high:.3f}", f"{row['cpu_ratio']:.3f}")
    table.caption = f"Median of {made['rounds']} rounds. Losses of all engines agree to {result['loss_difference']:.0e}."
    table.caption_justify = "left"
    return table


if __name__ == "__main__":
    typer.run(main)
