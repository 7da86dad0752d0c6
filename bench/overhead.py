"""What Meshwright costs over raw PyTorch, beside Accelerate and Lightning Fabric: the same model, batches and plan in one process group.

How it is measured: see `rounds.py`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from cases import PEERS, Case, missing_peers
from meshwright.core.errors import MeshwrightError
from rounds import HERE, machine, run, say, summarise

WORLD = 2


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each engine.")] = 25,
    batch: Annotated[int, typer.Option(min=1, help="Samples a rank.")] = Case.batch,
    seq: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = Case.seq,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the GPT.")] = Case.layers,
    output: Annotated[Path, typer.Option(help="JSON file for the results.")] = HERE / "results" / "overhead.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Time raw PyTorch, Accelerate, Lightning Fabric and Meshwright side by side on 2 ranks, one thread each.

    Examples:
      python bench/overhead.py
      python bench/overhead.py --batch 1 --seq 64 --output small.json
    """
    case = Case(batch=batch, seq=seq, layers=layers)
    for name in missing_peers():
        say(f"{name} is left out: {PEERS[name]} is not installed (pip install 'meshwright[bench]')")
    try:
        result = measured(case, rounds)
    except MeshwrightError as error:
        fail("overhead", error)
    write(result, output)
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(show(result))
    say(f"written to {output}")


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """One JSON object: a block for each kind of plan, every engine in it against the block's first."""
    blocks, difference = summarise(run("cases:trial", asdict(case), rounds, WORLD))
    tokens = case.batch * case.seq * WORLD
    for row in (row for block in blocks for row in block["engines"]):
        row["tokens_per_s"] = tokens / row["step_s"]
    return {
        "machine": machine(),
        "arguments": {"rounds": rounds, **asdict(case), "world": WORLD, "threads": 1, "backend": "gloo", "optimizer": "AdamW, fused"},
        "parameters": sum(p.numel() for p in case.model().parameters()),
        "blocks": blocks,
        "loss_difference": difference,
        "left_out": missing_peers(),
    }


def write(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


def fail(what: str, error: MeshwrightError) -> NoReturn:
    """Say what went wrong, with the failed rank's own story, and end."""
    fault = getattr(error, "fault", None)
    say(f"{fault.traceback if fault else ''}{what}: {error}")
    sys.exit(error.exit_code)


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
