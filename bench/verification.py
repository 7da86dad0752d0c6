"""What verification costs: its seconds beside a step and beside ten minutes of training, for built-in models on two ranks of this machine."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright.core.quantities import show_seconds
from meshwright.orchestrate import Orchestrator, RunConfig
from meshwright.orchestrate.verified_run import verify_plan

HERE = Path(__file__).parent
CASES = (
    ("gpt-tiny", "dp=2", 0), ("gpt-tiny", "tp=2", 0), ("gpt-tiny", "pp=2", 0), ("gpt-tiny", "shard=2", 3), ("llama-tiny", "tp=2", 0),
    ("vae", "dp=2", 0), ("cnn", "dp=2", 0), ("dlrm-tiny", "ep=2", 0), ("gpt-mini", "dp=2", 0), ("gpt-mini", "tp=2", 0),
)  # fmt: skip
TEN_MINUTES, GOAL = 600.0, 0.02


def main(
    only: Annotated[str, typer.Option(help="Only models whose name holds this text.")] = "",
    output: Annotated[Path, typer.Option(help="JSON file for the results.")] = HERE / "results" / "verification.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Verify plans as `train` does before step 1, on ranks of their own, and once more when the verdict is known.

    Example: python bench/verification.py --only gpt-tiny
    """
    rows = [measured(*case) for case in CASES if only in case[0]]
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"cases": rows}, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps({"cases": rows}))
    else:
        Console().print(show(rows))


def measured(model: str, mesh: str, zero: int) -> dict[str, Any]:
    """One plan: the seconds of verification, with its ranks and data, and again from the cache; the step's are the planner's estimate."""
    config = RunConfig(model=model, mesh=mesh, zero=zero or None)
    with Orchestrator(config, os.environ, lambda _: None) as orchestrator:
        prepared = orchestrator.prepare(runs=True)
        verify_plan(orchestrator, prepared, prepared.plan, again=True)  # starts the fork server, which training needs anyway
        marks, found = [time.perf_counter()], []
        for again in (True, False, False):  # the last one has a fingerprint of files that were read before
            found.append(verify_plan(orchestrator, prepared, prepared.plan, again=again))
            marks.append(time.perf_counter())
    first, seconds = found[0], [end - start for start, end in pairwise(marks)]
    return {
        "model": model, "plan": prepared.plan.strategy, "verdict": first.verdict, "samples": first.samples, "step_s": prepared.estimate.step_s,
        "verify_s": first.seconds, "with_ranks_s": seconds[0], "known_s": seconds[-1], "of_ten_minutes": seconds[0] / TEN_MINUTES,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "plan", "verdict", "step", "verification", "with ranks and data", "of ten minutes", "known already")
    for row in rows:
        share = f"{row['of_ten_minutes']:.2%}{'' if row['of_ten_minutes'] <= GOAL else ' (goal: 2%)'}"
        times = [show_seconds(row[key]) for key in ("step_s", "verify_s", "with_ranks_s")]
        table.add_row(row["model"], row["plan"], row["verdict"], *times, share, show_seconds(row["known_s"]))
    return table


if __name__ == "__main__":
    typer.run(main)
