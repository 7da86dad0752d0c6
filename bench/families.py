"""Every model that pip can install, under data parallelism, ZeRO-3, tensor and pipeline parallelism: equal to one device, refused, or a failure.

Each cell is four AdamW steps of one model on two ranks, beside the same steps in a plain loop (`family_cells.py`); models are built small by
`family_models.py`. Results are appended to a file after every model, so a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from family_cells import MESHES, families
from family_page import FAILURES, markdown, summary_table
from meshwright.launch import ForkServer, RankFailure, WorkerPool

HERE = Path(__file__).parent


def main(
    only: Annotated[str, typer.Option(help="Only models whose library/name contains this text (a regular expression).")] = "",
    cells: Annotated[str, typer.Option(help="Plans to try, by name, with commas.")] = ",".join(MESHES),
    draw: Annotated[int, typer.Option(min=0, help="Only this many models, drawn at random; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    part: Annotated[str, typer.Option(help="K/N: the K-th of N parts of the models, to run parts on several machines.")] = "1/1",
    again: Annotated[bool, typer.Option("--again", help="Run models again that the results have already.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Run models again of which a cell is neither equal nor refused.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a cell hangs.")] = 180.0,
    output: Annotated[Path, typer.Option(help="File with one JSON line for each model.")] = HERE / "results" / "families.jsonl",
    page: Annotated[Path | None, typer.Option(help="Also write all results as a Markdown page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results of this call as JSON on stdout instead of the table.")] = False,
) -> None:
    """Sweep over models and plans.

    Example: python bench/families.py --only transformers/gemma
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = sorted(key for key in families() if re.search(only, key))
    index, count = (int(number) for number in part.split("/"))
    names = (random.Random(seed).sample(names, min(draw, len(names))) if draw else names)[index - 1 :: count]
    known = read_results(output)
    todo = [n for n in names if again or n not in known or (failed and _has_failure(known[n]))]
    console = Console(stderr=True)
    runner = Runner(timeout)
    try:
        for name in track(todo, description="models", console=console):
            known[name] = runner.run(name, cells.split(","), known.get(name, {}).get("cells", {}) if not (again or failed) else {})
            with output.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
            console.print(f"{name}: {_one_line(known[name])}", highlight=False, soft_wrap=True)
    finally:
        runner.close()
    chosen = [known[n] for n in names if n in known]
    if page is not None:
        page.write_text(markdown(list(known.values())))
    if as_json:
        print(json.dumps(chosen))
    else:
        Console().print(summary_table(chosen))


class Runner:
    """Two ranks that run cell after cell; started anew after a failure."""

    def __init__(self, cell_timeout_s: float) -> None:
        self._cell_timeout_s = cell_timeout_s
        environ = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
        environ["MESHWRIGHT_CONSTRAINTS"] = json.dumps({"verify": False})  # a wrong plan is to be seen here, not refused
        self._server = ForkServer(1, environ, preload=("family_cells",))
        self._pool: WorkerPool | None = None

    def run(self, key: str, cells: list[str], known: dict[str, Any]) -> dict[str, Any]:
        """The result of one model: how it was built, and a result for each cell."""
        built = self._call("reference", key)
        result: dict[str, Any] = {"model": key, **built, "cells": dict(known)}
        for cell in cells if built.get("built") else ():
            if self._pool is None:
                self._call("reference", key)
            result["cells"][cell] = self._call("run_cell", key, cell=cell)
        return result

    def _call(self, function: str, key: str, **arguments: str) -> dict[str, Any]:
        """Rank 0's answer, or the failure."""
        self._pool = self._pool or WorkerPool(self._server, 2)
        try:
            answer: dict[str, Any] = self._pool.call(f"family_cells:{function}", {"key": key, **arguments}, timeout_s=self._cell_timeout_s)[0]
            return answer
        except RankFailure as failure:
            self._pool.close()
            self._pool = None
            text = str(failure)
            return {"built": False, "status": "hang" if "no answer" in text else "traceback", "why": text[-1500:]}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._server.close()


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each model."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["model"]: result for result in map(json.loads, lines)}


def _has_failure(result: dict[str, Any]) -> bool:
    return any(cell["status"] in FAILURES for cell in result["cells"].values())


def _one_line(result: dict[str, Any]) -> str:
    if not result["built"]:
        return f"not built ({result['why'][:200]})"
    return "  ".join(f"{name} {cell['status']}{_detail(cell)}" for name, cell in result["cells"].items())


def _detail(cell: dict[str, Any]) -> str:
    if cell["status"] == "wrong":
        return f" (by {cell['difference']:.1e})"
    return "" if cell["status"] == "equal" else f" ({cell['why'].strip().splitlines()[-1][:230]})"


if __name__ == "__main__":
    typer.run(main)
