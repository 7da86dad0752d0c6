"""Every kind of parallelism as Meshwright applies it to a module, beside the same written by hand in torch (`by_hand/`), and the effect of overlap.

How it is measured: see `rounds.py`; each block has a process group of its own. Exposed communication is the time of a step in which a
rank's main thread waits in collectives (`exposed.py`); a pipeline's includes its bubble.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from by_hand import BLOCKS
from meshwright.core.errors import MeshwrightError, unknown_name_error
from overhead import fail, write
from rounds import HERE, machine, run, say, summarise


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Blocks to measure, of {', '.join(BLOCKS)}; all if not given.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each engine.")] = 15,
    output: Annotated[Path, typer.Option(help="JSON file for the results; blocks in it that are not measured now stay.")] = HERE
    / "results"
    / "parallel.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Time each kind of parallelism by hand and through Meshwright on 2 or 4 ranks, one thread each, with overlap on and off.

    Examples:
      python bench/parallel.py
      python bench/parallel.py --only tensor --only context --rounds 9
    """
    try:
        for name in only or ():
            if name not in BLOCKS:
                raise unknown_name_error("block", name, tuple(BLOCKS))
        found = _kept(output) if only else {}
        for name in only or BLOCKS:
            found[name] = _measured(name, rounds)
            result = {"threads": 1, "backend": "gloo", "optimizer": "AdamW, fused", "blocks": [found[n] for n in BLOCKS if n in found]}
            write(result, output)
    except MeshwrightError as error:
        fail("parallel", error)
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(_show([found[name] for name in only or BLOCKS]))
    say(f"written to {output}")


def _kept(output: Path) -> dict[str, Any]:
    if not output.exists():
        return {}
    return {block["name"]: block for block in json.loads(output.read_text())["blocks"] if block.get("name") in BLOCKS}


def _measured(name: str, rounds: int) -> dict[str, Any]:
    block = BLOCKS[name]
    say(f"{block.title}: {block.about}, {block.world} ranks")
    [found], difference = summarise(run("by_hand:trial", {"name": name}, rounds, block.world))
    return {"name": name, "about": block.about, "world": block.world, "rounds": rounds, "machine": machine(), "loss_difference": difference, **found}


def _show(blocks: list[dict[str, Any]]) -> Table:
    table = Table(title="Step time beside hand-written torch", title_justify="left", header_style="bold", box=None)
    table.add_column("engine", no_wrap=True)
    for column in ("ms a step", "ratio", "CPU time", "exposed ms"):
        table.add_column(column, justify="right")
    for block in blocks:
        table.add_section()
        table.add_row(f"[bold]{block['block']}[/bold]", "", f"[dim]±{block['noise']:.3f}[/dim]", "", "")
        for row in block["engines"]:
            exposed = "–" if row["exposed_s"] is None else f"{row['exposed_s'] * 1e3:,.1f}"
            table.add_row(f"  {row['engine']}", f"{row['step_s'] * 1e3:,.1f}", f"{row['ratio']:.3f}", f"{row['cpu_ratio']:.3f}", exposed)
    worst = max(block["loss_difference"] for block in blocks)
    table.caption = f"Medians; ratios to the first engine, and their noise. Losses of a block's engines agree to {worst:.0e}."
    table.caption_justify = "left"
    return table


if __name__ == "__main__":
    typer.run(main)
